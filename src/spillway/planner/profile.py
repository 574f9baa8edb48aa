"""The profile of a step: the operators of each kind of block, and times and bytes around the blocks.

NOTE [ Counted bytes ]

A block's input is the output of the block before it, and counts there: the block itself decides only how long it is
held. The *level* is the memory in use without offloaded storages, and without activations that blocks hold from their
forward to their backward. It is measured while blocks hold only their inputs, which are offloaded.

Forwards may leave more behind than their values: FSDP2 holds the buffer of its latest all-gather from the first block
to the end of the model's forward. Plans count such bytes from before the first block on.

Calls of one kind differ in backward. The last block of a decoder makes the gradient of the encoder's output, and the
others add to it. An output that several calls are given, as T5's position bias, is held up to the backward of the first
of them. So each call has its own rise of the level, beyond the mean of its kind.

NOTE [ The end of an operator ]

When an operator's backward has made its gradients, autograd sums those that were broadcast: of a bias, say. Only then
does it release what a forward kept. A reloaded or recomputed tensor is released before. Torch's sums of many rows take
a large buffer on a GPU, which comes on top of a kept tensor, and where a released one was. So a part of a backward has
two peaks, with and without the tensors of its operator.

NOTE [ One size tells a larger one ]

One profile does not tell constants: all but parameters' bytes are taken to grow with the inputs. That is too much for
constants, and too little for what grows with the square, as attention does that saves its matrix.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from spillway.errors import printable
from spillway.planner.files import Count, FileRecord, Record, Seconds
from spillway.units import format_bytes, format_html, format_seconds

SCHEMA = 16


class ReplayRule(enum.Enum):
    """Whether a replay must run an operator."""

    FREE = "free"
    """It runs only if its outputs are needed and not preserved."""
    VIEW = "view"
    """It always runs, and computes nothing."""
    ALWAYS = "always"
    """It always runs: it writes in place, its output is a constant or not a plain new tensor, or shapes or Python code
    depend on it."""


@dataclass(frozen=True, slots=True)
class Value(Record):
    """A storage that the operators of a block read or make."""

    nbytes: Count
    maker: Count | None
    """The operator that makes it; ``None``: it comes from outside."""
    is_input: bool = False
    """Whether it is an input that only the block holds."""
    saved_at: Count | None = None
    """Number of operators that had run when autograd saved it first; ``None``: it is not saved."""
    dies_at: Count = 0
    """Number of operators that had run when the block's own code released it; one more than there are: it outlives."""
    saved_last_at: Count | None = None
    """Number of operators that had run when autograd saved it last: backward needs it there first. ``None``: as
    ``saved_at``."""
    is_constant: bool = False
    """Whether autograd saved it last without a history. Then a replay does not end there, but where autograd saves for
    the next operator: see NOTE [ The end of a replay ] in ``collector.py``."""
    is_cast: bool = False
    """Whether it is a leaf's cast, made in the call: see NOTE [ Casts ] in ``block_tasks.py``."""

    @property
    def is_recomputable(self) -> bool:
        """Whether an operator of the block makes it, and autograd saves it."""
        return self.saved_at is not None and self.maker is not None

    @property
    def asked_at(self) -> int | None:
        """Number of operators that had run at the place where backward needs it first."""
        return self.saved_at if self.saved_last_at is None else self.saved_last_at


@dataclass(frozen=True, slots=True)
class OperatorProfile(Record):
    """An operator of a block."""

    name: str
    seconds: Seconds
    reads: tuple[Count, ...]
    """Numbers of values."""
    makes: tuple[Count, ...]
    writes: tuple[Count, ...] = ()
    replay: ReplayRule = ReplayRule.FREE
    workspace_bytes: Count = 0
    """Allocated while it runs, beyond its outputs."""
    module: str = ""
    """The innermost module whose forward runs it, by its name in the block; empty for the block itself."""
    line: str = ""
    """The line of the model's code that calls it: ``model.py:12``."""

    @property
    def is_view(self) -> bool:
        return self.replay is ReplayRule.VIEW

    @property
    def always_runs(self) -> bool:
        return self.replay is ReplayRule.ALWAYS

    @property
    def draws(self) -> int | None:
        """Profiles do not know random operators."""
        return 0


@dataclass(frozen=True, slots=True)
class BackwardPart(Record):
    """A part of a block's backward, between two uses of saved storages."""

    place: Count
    """It begins with the backward of the operator before this place. Storages saved later are not needed any more."""
    peak_bytes: Count
    """Most bytes in it, beyond those before the backward, and beyond saved storages that are still needed."""
    begin_bytes: Count
    """Bytes at its begin, counted alike: gradients on their way through the block."""
    held_peak_bytes: Count = 0
    """As ``peak_bytes``, if its saved storages are there to its end: see NOTE [ The end of an operator ]."""


@dataclass(frozen=True, slots=True)
class SavedParameter(Record):
    """A parameter that autograd saves in a block."""

    place: Count
    """Number of operators that had run when autograd saved it."""
    nbytes: Count


@dataclass(frozen=True, slots=True)
class HostTimes(Record):
    """CPU time to queue a block's work, in seconds."""

    plain: Seconds
    """Its forward, not checkpointed."""
    checkpointed: Seconds
    """Its forward, checkpointed."""
    replay: Seconds
    """A replay that leaves out no operator."""
    backward: Seconds
    """Its backward, without a replay."""


@dataclass(frozen=True, slots=True)
class BlockProfile(Record):
    """A kind of block. Times are those of one call."""

    kind: str
    operators: tuple[OperatorProfile, ...]
    values: tuple[Value, ...]
    forward_seconds: Seconds
    backward_seconds: Seconds
    """Without recomputation."""
    backward_peak_bytes: Count
    """Most bytes in its backward, beyond those at its begin, when all saved storages are there."""
    recompute_factor: Seconds
    """Seconds of recomputation for each second that the operators took in forward."""
    backward_change_bytes: int
    """Rise of the level in its backward: gradients of its parameters, mostly."""
    backward_parts: tuple[BackwardPart, ...] = ()
    """In their order. Without them, ``backward_peak_bytes`` are assumed for the whole backward."""
    saves_at: tuple[Count, ...] = ()
    """Numbers of operators after which autograd saves for another operator than before, which offloads the storages
    saved for earlier ones. Without them, storages are offloaded at once."""
    host: HostTimes | None = None
    """``None``: compute never waits for the CPU."""
    gap: Outside | None = None
    """Work between the block before and one of this kind, in forward, such as a pooling. The mean of all calls."""
    cached_bytes: Count = 0
    """Bytes of its casts that live from its forward to the end of the model's forward in any plan: see NOTE [ Casts ]
    in ``block_tasks.py``."""
    parameters: tuple[SavedParameter, ...] = ()
    """Parameters that autograd saves, in the order in which backward needs them, if some of them are streamed."""

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves."""
        return sum(value.nbytes for value in self.values if value.saved_at is not None)

    def nbytes(self, numbers: Iterable[int]) -> int:
        """Bytes of some of its values, by their numbers."""
        return sum(self.values[number].nbytes for number in numbers)


@dataclass(frozen=True, slots=True)
class Outside(Record):
    """A part of a step outside of blocks."""

    seconds: Seconds
    peak_bytes: Count
    """Most bytes in it, beyond the level at its begin."""
    change_bytes: int
    """Rise of the level."""
    host_seconds: Seconds = 0.0
    """CPU time to queue it."""


@dataclass(frozen=True, slots=True)
class OptimizerProfile(Record):
    """An optimizer that can step any fraction of its elements on the CPU, measured with all of them there."""

    state_bytes: Count
    """State of all elements on the GPU, with fp32 master weights."""
    gradient_bytes: Count
    """Gradients of all elements, which stay on the GPU until a step there."""
    step_bytes: Count
    """Allocated by a step of all elements on the GPU, beyond that."""
    host_seconds: Seconds
    """Time of the step on the CPU."""
    stall_seconds: Seconds
    """The part of it that stalled the GPU."""


@dataclass(frozen=True, slots=True)
class BlockCall(Record):
    """One call of a block in a step."""

    name: str
    """Name of the module."""
    kind: Count
    """Its place in :attr:`Profile.kinds`."""
    backward_extra_bytes: int = 0
    """Rise of the level in its backward, beyond that of its kind. See NOTE [ Counted bytes ]."""
    streamed: tuple[Count, ...] = ()
    """Bytes of each of its parameters that are streamed: in CPU memory, and on the GPU only while the block runs. No
    other number of a profile has them. See NOTE [ Copies of weights ] in ``tasks.py``."""
    read_seconds: Seconds = 0.0
    """Time to read those that are in files."""


@dataclass(frozen=True, slots=True)
class Static(Record):
    """Memory in use when a step begins, by purpose. The shares add up to :attr:`Profile.static_bytes`."""

    weights: Count
    """Parameters of the model."""
    gradients: Count
    """Gradients of these parameters, if the step begins with some."""
    optimizer: Count
    """State of the optimizer that the profile was given. The state of another one is in ``other``."""
    other: Count
    """The rest: buffers, the state of an unknown optimizer, all other memory of the process."""

    @property
    def total(self) -> int:
        """The sum of all shares."""
        return self.weights + self.gradients + self.optimizer + self.other


@dataclass(frozen=True, slots=True)
class Profile(FileRecord):
    """A measured step."""

    model: str
    """Class of the model."""
    device: str
    kinds: tuple[BlockProfile, ...]
    calls: tuple[BlockCall, ...]
    """In the order of the forward."""
    static_bytes: Count
    """In use when the step begins."""
    before: Outside
    """From the start of the forward to the first block, with all that the forwards of blocks leave behind beyond their
    values."""
    middle: Outside
    """From the end of the last block's forward to the start of its backward: head and loss, without casts of blocks,
    and only up to the place where these are freed."""
    after: Outside
    """From the end of the first block's backward to the start of the next step: the optimizer."""
    min_bytes: Count
    """Smaller storages are not offloaded."""
    optimizer: OptimizerProfile | None = None
    """If the plan is to choose the fraction that is stepped on the CPU."""
    static: Static | None = None
    """The shares of ``static_bytes``; ``None``: they are not known."""
    held_bytes: Count = 0
    """The part of ``middle`` that is held while other passes run between forward and backward."""
    late: Outside | None = None
    """Bytes of head and loss after casts of blocks were freed; their time is in ``middle``. ``None``: there are none,
    or no casts are freed."""
    schema: int = SCHEMA

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saves in all blocks."""
        return sum(self.kinds[call.kind].saved_bytes for call in self.calls)

    @property
    def gradient_bytes(self) -> int:
        """Rise of the level in all blocks' backwards: gradients of their parameters, mostly."""
        return sum(max(self.kinds[call.kind].backward_change_bytes, 0) for call in self.calls)

    def __str__(self) -> str:
        kinds = f"{len(self.kinds)} kind{'s' if len(self.kinds) > 1 else ''}"
        return (
            f"{printable(f'{self.model} on {self.device}')}: {len(self.calls)} blocks of {kinds} save "
            f"{format_bytes(self.saved_bytes)}, beside {format_bytes(self.static_bytes)} that are always in use"
        )

    def _repr_html_(self) -> str:
        return format_html("\n".join(lines_of(self)))

    def _faults(self) -> Iterator[tuple[str, str]]:
        if self.static is not None and self.static.total != self.static_bytes:
            yield "static", f"{self.static.total} bytes, but static_bytes are {self.static_bytes}"
        for where, number, count in self._numbers():
            if number is not None and number >= count:
                yield where, f"{number}, but there are only {count}"
        for kind, block in enumerate(self.kinds):
            made = {(number, place) for place, each in enumerate(block.operators) for number in each.makes}
            makers = {(number, value.maker) for number, value in enumerate(block.values) if value.maker is not None}
            for number, _ in sorted(made ^ makers):
                yield f"kinds.{kind}.values.{number}.maker", "it is not the operator that makes it"
            for number, value in enumerate(block.values):
                if value.saved_last_at is not None and (value.saved_at is None or value.saved_last_at < value.saved_at):
                    yield f"kinds.{kind}.values.{number}.saved_last_at", "it is before saved_at"

    def _numbers(self) -> Iterator[tuple[str, int | None, int]]:
        """Numbers that stand for operators, values or kinds: where, the number, and how many there are."""
        for place, call in enumerate(self.calls):
            yield f"calls.{place}.kind", call.kind, len(self.kinds)
        for kind, block in enumerate(self.kinds):
            count = len(block.operators)
            for place, each in enumerate(block.operators):
                for number in (*each.reads, *each.makes, *each.writes):
                    yield f"kinds.{kind}.operators.{place}", number, len(block.values)
            for number, value in enumerate(block.values):
                where = f"kinds.{kind}.values.{number}"
                yield f"{where}.maker", value.maker, count
                yield f"{where}.saved_at", value.saved_at, count + 1
                yield f"{where}.saved_last_at", value.saved_last_at, count + 1


def lines_of(profile: Profile) -> Iterator[str]:
    """A profile in lines: its kinds of blocks, and the rest of the step."""
    yield str(profile)
    for number, kind in enumerate(profile.kinds):
        yield (
            f"{sum(call.kind == number for call in profile.calls)} like {kind.kind}: {len(kind.operators)} operators "
            f"save {format_bytes(kind.saved_bytes)}; forward {format_seconds(kind.forward_seconds)}, backward "
            f"{format_seconds(kind.backward_seconds)}"
        )
    for name, part in (("before", profile.before), ("between", profile.middle), ("after", profile.after)):
        yield f"{name} the blocks: {format_seconds(part.seconds)}, at most {format_bytes(part.peak_bytes)} more"
    yield f"always there: {format_bytes(profile.static_bytes)}"


_FIXED = frozenset({"host", "host_seconds", "backward_change_bytes", "cached_bytes", "parameters", "read_seconds"})
"""Fields of blocks that do not grow with the inputs."""


def enlarged(profile: Profile, factor: float) -> Profile:
    """The profile of inputs that are larger by a factor, at least 1. See NOTE [ One size tells a larger one ].

    CPU times, and what comes after the blocks (an optimizer, mostly), stay as they are.
    """
    parts = {name: part for name in ("before", "middle", "late") if (part := getattr(profile, name)) is not None}
    grown = {name: _grown(part, factor) for name, part in parts.items()}
    more = sum(grown[name].change_bytes - parts[name].change_bytes for name in parts)
    return replace(
        profile,
        **grown,
        kinds=tuple(_grown(kind, factor) for kind in profile.kinds),
        calls=tuple(_grown(call, factor) for call in profile.calls),
        # The tensors that they hold are freed there.
        after=replace(profile.after, change_bytes=profile.after.change_bytes - more),
        held_bytes=round(profile.held_bytes * factor),
    )


def _grown(record: Any, factor: float) -> Any:
    """A record whose bytes and seconds are so many times as large, but for those that do not grow with the inputs."""
    if not is_dataclass(record) or (isinstance(record, Value) and record.is_cast):
        return record
    changed: dict[str, Any] = {}
    for name in {field.name for field in fields(record)} - _FIXED:
        value = getattr(record, name)
        if isinstance(value, tuple):
            changed[name] = tuple(_grown(each, factor) for each in value)
        elif name.endswith("bytes"):
            changed[name] = round(value * factor)
        elif name.endswith("seconds"):
            changed[name] = value * factor
        else:
            changed[name] = _grown(value, factor)
    return replace(record, **changed)  # type: ignore[type-var]


def risen(profile: Profile, nbytes: int, *, has_gradients: bool = False) -> Profile:
    """The profile of steps that begin with so many bytes more.

    If the profiled step was an optimizer's first, its state is not made again. With ``has_gradients``, gradients of
    blocks are among the bytes: backward adds to them, and does not make them.
    """
    static = profile.static
    freed = profile.gradient_bytes + (0 if static is None else static.gradients)
    made = min(max(profile.after.change_bytes + freed, 0), nbytes)
    return replace(
        profile,
        static_bytes=profile.static_bytes + nbytes,
        static=None if static is None else replace(static, other=static.other + nbytes),
        after=replace(profile.after, peak_bytes=max(profile.after.peak_bytes - made, 0)),
        kinds=tuple(
            replace(kind, backward_change_bytes=min(kind.backward_change_bytes, 0)) if has_gradients else kind
            for kind in profile.kinds
        ),
    )
