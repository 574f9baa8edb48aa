"""Collectives inside of recomputed blocks: ranks repeat the same ones, whatever each of them records or compares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from integrations.ranks import World
from integrations.training import Collectives
from spillway.checkpointing import learned
from spillway.errors import RecomputeError

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]

WIDTH, STEPS = 8, 9


class Copied(torch.autograd.Function):
    """The same input on all ranks: their gradients are summed."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad


class Summed(torch.autograd.Function):
    """The sum of all ranks' tensors, whose schema does not say that it writes them."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class FunctionalSummed(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        from torch.distributed import _functional_collectives as collectives

        return collectives.wait_tensor(collectives.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Block(nn.Module):
    """Two tensor parallel halves. The last collective comes after all saved tensors."""

    def __init__(self, summed: Any) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.summed = summed
        for weight in (self.up.weight, self.down.weight, self.out.weight):
            weight.data.add_(0.01 * dist.get_rank())

    def forward(self, x: Tensor, _: int = 0) -> Tensor:
        hidden = functional.gelu(self.up(Copied.apply(self.norm(x))))
        hidden = self.summed.apply(self.down(hidden))
        return x + self.summed.apply(self.out(Copied.apply(functional.gelu(hidden))))


class Placed(nn.Module):
    """A DTensor's operators change its placement by collectives of their own."""

    def __init__(self, _: Any) -> None:
        super().__init__()
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.up = nn.Parameter(DTensor.from_local(torch.randn(WIDTH, WIDTH), self.mesh, [Shard(1)]))
        self.down = nn.Parameter(DTensor.from_local(torch.randn(WIDTH, WIDTH), self.mesh, [Shard(0)]))

    def forward(self, x: Tensor, _: int = 0) -> Tensor:
        from torch.distributed.tensor import DTensor, Replicate

        placed = DTensor.from_local(x, self.mesh, [Replicate()])
        # The product is a sum that is still to be made: the tanh makes it.
        hidden = torch.tanh(functional.gelu(placed @ self.up) @ self.down).to_local().clone()
        # In backward, a sum comes before the tanh is needed.
        return x + Copied.apply(hidden).sin()


KINDS = {"in place": (Block, Summed), "functional": (Block, FunctionalSummed), "placed": (Placed, None)}
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "save": {"save": "matmul"},
    "offload": {"offload": ["inputs", spillway.saved_by("matmul"), "pointwise"]},
    "drop": {"drop_output": True},
}


def trained(kind: str, how: dict[str, Any] | None, *, apart: str = "") -> list[Tensor]:
    """Losses and gradients. The first rank departs from the others as ``apart`` says."""
    torch.manual_seed(0)
    make, summed = KINDS[kind]
    blocks = nn.ModuleList(make(summed) for _ in range(3))
    is_apart = dist.get_rank() == 0 and how is not None
    if is_apart and apart == "calls":
        spillway.recompute(nn.GELU(), torch.randn(2, requires_grad=True)).sum().backward()
    torch.manual_seed(1)
    found, held = [], []
    for step in range(STEPS):
        x = torch.randn(4, WIDTH, requires_grad=True)
        hidden = x
        with nullcontext() if how is None else spillway.offload(min_bytes=0, policy=spillway.policies.Keep()):
            for block in blocks:
                number = step // 2 if is_apart and apart == "numbers" else 0
                call = block if how is None else partial(spillway.recompute, block, **how)
                hidden = call(hidden, number)
                if is_apart and apart == "outputs":
                    held.append(hidden)
        # The sum saves no output.
        loss = (hidden.square() if step % 2 else hidden).sum()
        del hidden
        blocks.zero_grad()
        loss.backward()
        held.clear()
        grads = [each.grad for each in (x, *blocks.parameters())]
        found += [loss.detach(), *(getattr(each, "_local_tensor", each).clone() for each in grads)]
    return found


def case(kind: str, how: dict[str, Any], apart: str) -> None:
    with mock.patch.object(learned, "_EVERY", 4):
        plain, ours = trained(kind, None), trained(kind, how, apart=apart)
    assert all(map(torch.equal, ours, plain))


@pytest.mark.parametrize("apart", ["calls", "numbers", "outputs"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_repeat_the_same_collectives(world: World, kind: str, how: str, apart: str) -> None:
    world.run(case, kind, HOWS[how], apart)


def saved_after_a_sum(x: Tensor) -> Tensor:
    return Summed.apply(2 * x).exp()  # type: ignore[no-any-return]


def saved_without_content(x: Tensor) -> Tensor:
    """Its kernel writes the noise that it saves: a replay goes on after it."""
    return Summed.apply(functional.rrelu(2 * x, training=True))  # type: ignore[no-any-return]


def held_case(extra_of: Callable[[Tensor], Tensor]) -> None:
    """One rank holds an output that the others drop, and with it the last saved tensor."""

    def found(how: Any) -> list[Tensor]:
        torch.manual_seed(0)
        inner = nn.Linear(WIDTH, WIDTH)

        def function(x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = Summed.apply(inner(Copied.apply(x))).tanh()
            return hidden, extra_of(x)

        grads: list[Tensor] = []
        for _ in range(3):
            x = torch.randn(4, WIDTH, requires_grad=True)
            hidden, extra = how(function, x)
            held = extra if dist.get_rank() == 0 else None
            del extra
            grads += torch.autograd.grad(hidden.square().mean(), [x, *inner.parameters()])
            del held
        return grads

    assert all(map(torch.equal, found(spillway.recompute), found(lambda function, x: function(x))))


@pytest.mark.parametrize("extra_of", [saved_after_a_sum, saved_without_content])
def test_ranks_that_hold_other_outputs_repeat_the_same_collectives(
    world: World, extra_of: Callable[[Tensor], Tensor]
) -> None:
    world.run(held_case, extra_of)


def products_case() -> None:
    """The last operator saves a tensor that nothing before it reads: a recording that ended there would not know it."""
    torch.manual_seed(0)
    first, last, scale = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), torch.rand(WIDTH)

    def function(x: Tensor) -> Tensor:
        return last(first(x).sin()) * scale

    counts = []
    for save in ((), "matmul"):
        for _ in range(4):
            loss = spillway.recompute(function, torch.randn(4, WIDTH, requires_grad=True), save=save).sum()
            with Counted() as counted:
                loss.backward()
        counts.append(counted.products)
    assert counts[0] == counts[1] + 2


class Counted(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


def test_ranks_without_collectives_leave_operators_out(world: World) -> None:
    world.run(products_case)


NAMED = {"save": ["matmul", "_c10d_functional::*"]}


def named_case() -> None:
    counts = []
    plain = trained("functional", None)
    for how in ({"save": "matmul"}, NAMED):
        with Collectives() as mode:
            ours = trained("functional", how)
        assert all(map(torch.equal, ours, plain))
        counts.append(mode.counts["_c10d_functional.all_reduce.default"])
    # Three blocks with two sums each. One of them is before the last saved tensor, in a partial replay too.
    assert counts == [3 * 3 * STEPS, 3 * 2 * STEPS + 3]


def in_place_case() -> None:
    """Its output is kept as it is after the sum. A replay that summed it once more would change what backward reads."""
    how = {"save": ["matmul", "c10d::*"]}
    plain, ours = trained("in place", None), trained("in place", how)
    assert all(map(torch.equal, ours, plain))


def test_an_in_place_collective_is_known_to_write(world: World) -> None:
    world.run(in_place_case)


def test_collectives_that_are_named_are_left_out(world: World) -> None:
    world.run(named_case)


def twice_case() -> None:
    """Its first backward takes what was kept. In the second, all ranks repeat the collectives."""
    found = []
    for how in (None, NAMED):
        torch.manual_seed(0)
        block = Block(FunctionalSummed)
        call = block if how is None else partial(spillway.recompute, block, **how)
        for _ in range(4):
            loss = call(torch.randn(4, WIDTH, requires_grad=True)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        found.append([each.grad for each in block.parameters()])
    assert all(map(torch.equal, *found))


def test_a_second_backward_repeats_collectives_that_were_named(world: World) -> None:
    world.run(twice_case)


def departing_case() -> None:
    """A rank that must repeat collectives alone says so. The others would wait for it."""
    torch.manual_seed(0)
    block = Block(FunctionalSummed)
    departs = False

    def function(x: Tensor) -> Tensor:
        return block(x.sin() if departs else x.cos())

    call = partial(spillway.recompute, function, **NAMED)
    for _ in range(3):
        call(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    departs = dist.get_rank() == 0
    loss = call(torch.randn(4, WIDTH, requires_grad=True)).sum()
    if departs:
        whole = pytest.raises(RecomputeError, match=r"whole on this rank.* collectives.* Do not name collectives")
        with whole, Collectives() as mode:
            loss.backward()
        for _ in range(2 - mode.counts["c10d.allreduce_.default"]):
            # The other rank waits for it, in Copied.backward.
            dist.all_reduce(torch.zeros(4, WIDTH))
    else:
        loss.backward()


def test_a_rank_that_cannot_leave_out_named_collectives_raises_an_error(world: World) -> None:
    world.run(departing_case)
