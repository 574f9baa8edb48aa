"""Offloading hidden states: the toy that tutorials show, why it is wrong, and two forms that are right.

    python examples/tutorial/offload_simple.py

A stack of blocks is run forward and backward. Autograd saves the input of each block, its *hidden state*, for the
block's backward, so all of them stay on the GPU until then. The toy is meant to move them to the CPU, and does not. It
doubles gradients, too. ``docs/tutorial.md`` explains it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import spillway

BLOCKS, WIDTH, ROWS = 8, 256, 2048
HIDDEN_BYTES = ROWS * WIDTH * 4
MIB = 1 << 20


class ToyOffload(torch.autograd.Function):
    """WRONG, twice. Found in the wild in many shapes; do not use it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # Wrong: this copies, and frees nothing. The next operator gets x itself, and saves it on the GPU.
        ctx.on_host = x.detach().to("cpu", copy=True)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # Wrong: the forward returns x, so the backward has to return grad. This is twice as much.
        return grad + grad


Call = Callable[[nn.Module, Tensor, spillway.Session], Tensor]
"""Calls a block with its hidden state, one way or another."""


def plain(block: nn.Module, hidden: Tensor, session: spillway.Session) -> Tensor:
    """Everything stays."""
    out: Tensor = block(hidden)
    return out


def toy(block: nn.Module, hidden: Tensor, session: spillway.Session) -> Tensor:
    """Wrong: see ToyOffload."""
    out: Tensor = block(ToyOffload.apply(hidden))
    return out


def marked(block: nn.Module, hidden: Tensor, session: spillway.Session) -> Tensor:
    """Right: each later save of this tensor's storage is offloaded."""
    out: Tensor = block(spillway.offload_tensor(hidden, session=session))
    return out


def recomputed(block: nn.Module, hidden: Tensor, session: spillway.Session) -> Tensor:
    """Right, and saves more: the block's input is offloaded, and the block is recomputed."""
    out: Tensor = spillway.recompute(block, hidden, offload=["inputs"], session=session)
    return out


WAYS: dict[str, Call] = {"plain": plain, "toy": toy, "offload_tensor": marked, "recompute": recomputed}


@dataclass(frozen=True)
class Outcome:
    """The result of one forward and backward."""

    alive: int
    """Bytes of hidden states on the GPU after forward."""
    kept: int
    """Bytes of saved tensors that stay there."""
    away: int
    """Bytes of offloaded tensors after forward."""
    grads: list[Tensor]
    """Gradients of all parameters."""


def step(call: Call, device: torch.device) -> Outcome:
    """One forward and one backward, always with the same weights and numbers."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
    ).to(device)
    hidden = torch.randn(ROWS, WIDTH, device=device)
    states = []
    # At most one hidden state is copied at a time. With the default in-flight limit (64 MiB on a CPU, 512 MiB on an
    # accelerator) the copies of all eight would be in flight when backward needs them, so none would be freed.
    with spillway.Session(window=HIDDEN_BYTES) as session:
        # Keeps all but the marked tensors, and counts.
        context = spillway.offload(policy=spillway.policies.Keep(), session=session)
        with context:
            for block in blocks:
                hidden = call(block, hidden, session)
                states.append(weakref.ref(hidden.untyped_storage()))
            loss = hidden.mean()
        del hidden
        session.synchronize()
        alive = sum(storage.nbytes() for state in states if (storage := state()) is not None)
        kept, away = context.stats().kept_bytes, sum(session.used_bytes)
        loss.backward()
    return Outcome(
        alive, kept, away, [parameter.grad for parameter in blocks.parameters() if parameter.grad is not None]
    )


def main() -> None:
    """Show what the toy does to a gradient, and run all ways side by side."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")

    x = torch.ones(3, requires_grad=True)
    x.sum().backward()
    right, x.grad = x.grad, None
    ToyOffload.apply(x).sum().backward()
    print(f"gradient of a sum: {right}, through the toy: {x.grad}")

    print(f"{BLOCKS} blocks on {device}, each given a hidden state of {HIDDEN_BYTES // MIB} MiB; after forward:")
    print(f"{'way':16}{'hidden, on the device':>23}{'saved, kept there':>20}{'away':>10}   gradients")
    outcomes = {name: step(call, device) for name, call in WAYS.items()}
    expected = outcomes["plain"].grads
    for name, outcome in outcomes.items():
        if all(map(torch.equal, outcome.grads, expected)):
            verdict = "equal to plain, bit for bit"
        else:
            factor = (outcome.grads[0].norm() / expected[0].norm()).item()
            verdict = f"WRONG: the first block's are {factor:.0f} times too large"
        alive, kept, away = (nbytes // MIB for nbytes in (outcome.alive, outcome.kept, outcome.away))
        print(f"{name:16}{alive:19} MiB{kept:16} MiB{away:6} MiB   {verdict}")


if __name__ == "__main__":
    main()
