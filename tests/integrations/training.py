"""A small model, and a few steps of it: plainly, or in one of Spillway's ways, which must give the same bits."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway import Recompute
from support import assert_nothing_left

WIDTH, TOKENS, ROWS, LENGTH = 32, 61, 2, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Detaching(Block):
    """Uses a weight by an alias that does not show whose it is."""

    def forward(self, x: Tensor) -> Tensor:
        frozen = functional.linear(x, self.up.weight.detach())
        return super().forward(x) + self.down(functional.gelu(frozen))


class Model(nn.Module):
    def __init__(self, block: type[Block] = Block, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.call: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


@dataclass
class Way:
    """How steps are run.

    Args:
        offloads: options of an ``offload`` context around each forward; ``None``: none.
        attached: policy of what is attached to the model; ``None``: nothing is.
        regions: how each block is called; ``None``: plainly.
    """

    offloads: dict[str, Any] | None = None
    attached: Any = None
    regions: Recompute | None = None

    def context(self, session: spillway.Session) -> AbstractContextManager[Any]:
        if self.offloads is None:
            return contextlib.nullcontext()
        return spillway.offload(session=session, min_bytes=0, **self.offloads)


PLAIN = Way()

# By name, since selectors cannot be pickled.
WAYS: dict[str, Way] = {
    "plain": PLAIN,
    "offload": Way(offloads={}),
    "attach, offload": Way(attached=spillway.policies.Ratio(1)),
    "attach, regions": Way(attached=Recompute(offload=["inputs", "matmul"])),
    "attach, saved_by": Way(attached=Recompute(offload=["inputs", spillway.saved_by("norm")])),
    "recompute": Way(offloads={}, regions=Recompute(offload=["inputs"], save="matmul")),
    "recompute, reentrant": Way(offloads={}, regions=Recompute(offload=["inputs"], use_reentrant=True)),
}


class Collectives(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Outcome:
    """What steps gave.

    Args:
        tensors: losses, gradients and weights.
        moved: bytes that left, in each step.
        collectives: of the last step.
    """

    tensors: list[Tensor] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)


def train(
    build: Callable[[], tuple[nn.Module, Model]], way: Way, session: spillway.Session, *, same: bool, micro: int = 1
) -> Outcome:
    """Two steps: the first knows no order, the second has learned it.

    Args:
        build: gives the module to call, and the model in it.
        way: how.
        session: whose lanes and tiers move what leaves.
        same: whether all ranks have the same tokens.
        micro: forwards and backwards in a step; all but the last are within ``no_sync``.
    """
    torch.manual_seed(0)
    module, model = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    outcome = Outcome()
    attached = None
    if way.attached is not None:
        blocks = (lambda name, each: isinstance(each, Block)) if isinstance(way.attached, Recompute) else None
        attached = spillway.attach(module, policy=way.attached, blocks=blocks, min_bytes=0, session=session)
    if way.regions is not None:
        how = way.regions
        model.call = lambda block, x: spillway.recomputing.call_checkpointed(how, block, (x,), {}, session)
    torch.manual_seed(1 if same else 1 + dist.get_rank())
    for number in range(2):
        last = number == 1
        with Collectives() if last else contextlib.nullcontext() as collectives:
            for part in range(micro):
                tokens = torch.randint(TOKENS, (ROWS, LENGTH))
                quiet = module.no_sync() if part < micro - 1 else contextlib.nullcontext()  # type: ignore[operator]
                with quiet:
                    with way.context(session) as context:
                        loss = functional.cross_entropy(module(tokens).flatten(0, 1).float(), tokens.flatten())
                    loss.backward()
        if collectives is not None:
            outcome.collectives = collectives.counts
        if way is not PLAIN:
            stats = attached.stats() if attached is not None else context.stats()
            outcome.moved.append(stats.offloaded_bytes)
        outcome.tensors.append(loss.detach())
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        outcome.tensors += [local(gradient).clone() for gradient in gradients]
        optimizer.step()
        optimizer.zero_grad()
    outcome.tensors += [local(parameter).detach().clone() for parameter in module.parameters()]
    if attached is not None:
        attached.remove()
    return outcome


def local(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def compare(
    build: Any, way: Way, *, same: bool = False, micro: int = 1, alone: Any = None, talks_again: bool = False
) -> None:
    """A way must give what plain steps give, move activations and no parameter, and leave nothing behind.

    Args:
        build: gives the module to call, and the model in it.
        way: which.
        same: whether all ranks have the same tokens.
        micro: forwards and backwards in a step.
        alone: gives a module that saves the same activations, where nothing else moves. ``None``: not compared.
        talks_again: whether a re-run may have collectives, as those between layers that are split.
    """
    plain = train(build, PLAIN, spillway.Session.default(), same=same, micro=micro)
    # Window 0: all that can leave has left before the forward ends.
    with spillway.Session(window=0) as session:
        ours = train(build, way, session, same=same, micro=micro)
        gc.collect()
        assert_nothing_left(session)
    assert len(ours.tensors) == len(plain.tensors)
    assert all(map(torch.equal, ours.tensors, plain.tensors)), "other bits than plain PyTorch's"
    assert talks_again or ours.collectives == plain.collectives, "other collectives than plain PyTorch's"
    assert all(ours.moved), "nothing moved: this proves nothing"
    if alone is not None:
        with spillway.Session(window=0) as session:
            assert ours.moved == train(alone, way, session, same=same).moved, "more moved than activations"
