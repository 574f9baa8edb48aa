"""Blocks for tests: real ones, recorded on the CPU, and random ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway.checkpointing.call import CheckpointedCall
from spillway.checkpointing.learned import LearnedFunctions
from spillway.checkpointing.program import Decisions
from spillway.checkpointing.schema import facts_of
from spillway.checkpointing.selectors import full_name
from spillway.planner.profile import BlockCall, BlockProfile, OperatorProfile, Outside, Profile, ReplayRule, Value
from spillway.profiler.probe import Probe, ProfilerListener
from spillway.recomputing import Recompute, call_checkpointed
from spillway.saved_tensors.handles import in_replay
from spillway.types import Decision

KEEP, HOST, DISK, AGAIN = Decision.KEEP, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK, Decision.RECOMPUTE


class MLP(nn.Module):
    """Pre-norm, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Attention by hand, with views and a residual, and an MLP after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.mlp(x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, 8)))


class Dropout(nn.Module):
    """Of what dropout gives, only the mask is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(self.up(x).sigmoid()).tanh(), 0.5)


class InPlace(nn.Module):
    """An activation, a product and a residual that write in place; the last activation saves the output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu_(self.up(x))
        z = self.down(y).mul_(2)
        z += x
        return z.relu_()


class Normed(nn.Module):
    """Normalised by its mean square, to which something is added in place: nobody needs it where the root is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x)).sigmoid()


class Twice(nn.Module):
    """What is normalised is saved by the first operator after it and by the last: a re-run goes on to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return self.up(normed).sigmoid().exp() * normed


class Routed(nn.Module):
    """Each row goes by its two largest scores: topk is settled."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(8, 4), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, where = self.router(x).softmax(-1).topk(2, -1)
        picked = x.gather(-1, where) * best
        return x * picked.sum(-1, keepdim=True) + self.down(nn.functional.silu(self.up(x)))


class Constant(nn.Module):
    """Makes a mask and a scale out of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        mask = torch.ones(length, length).tril() * 0.5
        y = self.up(x)
        return (mask @ y).exp().mul(y).chunk(2, -1)[0].repeat(1, 1, 2)


class Late(nn.Module):
    """What a product gives is saved last of all, by the last operator."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return y.sigmoid().exp() * y


MODULES: dict[str, Callable[[], nn.Module]] = {
    each.__name__: each for each in (MLP, Attention, Dropout, InPlace, Normed, Twice, Routed, Constant, Late)
}


def output_of(
    module: nn.Module, how: Recompute, session: spillway.Session, made_by: Callable[..., CheckpointedCall] | None = None
) -> torch.Tensor:
    """What a checkpointed call of a module gives."""
    output: torch.Tensor = call_checkpointed(how, module, (inputs(),), {}, session, made_by)
    return output


def profiled(module: nn.Module, session: spillway.Session) -> BlockProfile:
    """What a probe says of one call of a module."""
    probe = Probe(torch.device("cpu"))
    listener = ProfilerListener(probe, lambda *_: None, lambda *_: None)
    output_of(module, Recompute(), session, listener.call).float().square().sum().backward()
    probe.read(())
    assert probe.operators is not None
    return BlockProfile("block", probe.operators, probe.values, 1.0, 2.0, 4096, 1.0, 512)


def inputs() -> torch.Tensor:
    """What any of the modules is called with: no leaf."""
    torch.manual_seed(3)
    return torch.randn(2, 4, 8, requires_grad=True) * 1


@dataclass(frozen=True)
class Replayed:
    """What the engine does in a replay of a call that was replayed before."""

    ran: tuple[str, ...]
    """Operators that run again, views among them."""
    given: frozenset[int]
    """Values that the replay is handed."""
    again: frozenset[int]
    """Saved values that are computed again."""
    reach: int
    """How many operators had run when autograd saved the last tensor that the replay is to come to."""

    @classmethod
    def of(cls, module: nn.Module, how: Recompute, session: spillway.Session) -> Replayed:
        """Call it a few times."""
        seen = []
        for _ in range(3):
            output = output_of(module, how, session).float().square().sum()
            with _Seeing() as seeing:
                output.backward()
            seen.append(tuple(seeing.names))
        known = session.of(LearnedFunctions).of(weakref.ref(module)).calls
        ((program,),) = (each._programs.values() for each in known.values())
        decisions = Decisions.of(program, how.choices, None)
        # The first replay with these decisions is compared to its end, and one of 64 later ones is, too.
        ran = min(seen[1:], key=len)
        dropped = [number for number, each in enumerate(decisions.saved) if each is False]
        until = decisions.until if decisions.handed else max(dropped, default=-1)
        return cls(
            ran,
            frozenset(decisions.handed),
            frozenset(_dropped(decisions)),
            program.saved[until].place if until >= 0 else 0,
        )


def _dropped(decisions: Decisions) -> list[int]:
    saved = zip(decisions.program.saved, decisions.saved, strict=True)
    return [each.value for each, how in saved if how is False and each.value in decisions.program.makers]


class _Seeing(TorchDispatchMode):
    """Sees the operators that a replay runs: those that it leaves out do not get here."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_replay() and not facts_of(func).ignored:
            self.names.append(full_name(func))
        return func(*args, **(kwargs or {}))


def unsaved(block: BlockProfile) -> list[int]:
    """What no plan preserves where a block is replayed: operators' outputs, of which autograd does not save all."""
    read = {number for each in block.operators for number in (*each.reads, *each.writes)}
    return [
        number
        for each in block.operators
        if any(block.values[made].saved_at is None and made in read for made in each.makes)
        for number in each.makes
    ]


def told_apart(block: BlockProfile) -> BlockProfile:
    """The block with seconds and bytes that are powers of two: sums of them say whose they are."""
    operators = tuple(replace(each, seconds=2.0**place) for place, each in enumerate(block.operators))
    values = tuple(replace(value, nbytes=1 << number) for number, value in enumerate(block.values))
    return replace(
        block, operators=operators, values=values, forward_seconds=2.0 ** len(operators) - 1, recompute_factor=1.0
    )


def decoded(total: float) -> frozenset[int]:
    """Which powers of two a sum is of."""
    number = int(total)
    assert number == total
    return frozenset(place for place in range(number.bit_length()) if number >> place & 1)


@st.composite
def random_blocks(
    draw: st.DrawFn, *, most: int = 9, kinds: Sequence[ReplayRule] = tuple(ReplayRule), outputs: int = 2
) -> BlockProfile:
    """Any small block. Bytes are multiples of what counts as small, and a few operators write in place."""
    count = draw(st.integers(1, most))
    values = [Value(8192, None, is_input=True, saved_at=0, dies_at=count + 1), Value(8192, None, dies_at=count + 1)]
    operators: list[OperatorProfile] = []
    for place in range(count):
        again = draw(st.sampled_from(kinds))
        reads = tuple(draw(st.lists(st.integers(0, len(values) - 1), min_size=1, max_size=3, unique=True)))
        ours = [number for number in reads if values[number].maker is not None]
        writes = ()
        makes = ()
        if again in (ReplayRule.FREE, ReplayRule.ALWAYS) and ours and draw(st.integers(0, 5)) == 0:
            writes = (ours[0],)
        elif again is not ReplayRule.VIEW:
            makes = tuple(range(len(values), len(values) + draw(st.integers(1, outputs))))
        for _ in makes:
            dies_at = draw(st.integers(place + 1, count + 1))
            saved_at = draw(st.none() | st.integers(place + 1, max(min(dies_at, count), place + 1)))
            values.append(Value(8192 * draw(st.integers(1, 6)), place, saved_at=saved_at, dies_at=dies_at))
        seconds = draw(st.integers(0, 8)) / 1024
        workspace = 512 * draw(st.integers(0, 3))
        operators.append(OperatorProfile(f"op{place}", seconds, reads, makes, writes, again, workspace))
    total = sum(each.seconds for each in operators)
    return BlockProfile("block", tuple(operators), tuple(values), total, 2 * total, 1 << 20, 1.0, 4096)


def profile_of(block: BlockProfile, calls: int) -> Profile:
    """A step of so many calls of it."""
    return Profile(
        model="Model",
        device="cuda:0",
        kinds=(block,),
        calls=tuple(BlockCall(f"layers.{number}", 0) for number in range(calls)),
        static_bytes=1 << 20,
        before=Outside(1e-3, 0, 0),
        middle=Outside(1e-3, 4096, 0),
        after=Outside(1e-3, 0, 0),
        min_bytes=0,
    )
