"""What a step was measured to do: the operators of each kind of block, and times and bytes around them.

NOTE [ Counted bytes ]

A block's input is the output of what came before it, and counts there: the block itself decides only how long it is
held. *Level* is what is allocated without what the lanes carry, and without what blocks hold from their forward to
their backward; how that moves is measured while blocks hold nothing but their inputs, which are away.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from spillway.errors import printable
from spillway.planner.files import Count, FileRecord, Record, Seconds
from spillway.units import format_bytes

SCHEMA = 8


class Again(enum.Enum):
    """What a re-run has to do with an operator."""

    FREE = "free"
    """It may be handed what it gave, and need not run if nobody wants that."""
    VIEW = "view"
    """It computes nothing, and runs."""
    ALWAYS = "always"
    """It runs: it writes in place, makes what is not a plain new tensor, or a constant, or shapes or Python code depend
    on it."""


@dataclass(frozen=True, slots=True)
class Value(Record):
    """A storage that the operators of a block read or make."""

    nbytes: Count
    maker: Count | None
    """The operator that makes it; ``None``: it comes from outside."""
    is_input: bool = False
    """Whether it is an input of the block that nothing else holds."""
    saved_at: Count | None = None
    """How many operators had run when autograd saved it first; ``None``: it does not."""
    dies_at: Count = 0
    """How many operators had run when the block's own code held it no more. One more than there are: it outlives."""
    saved_last_at: Count | None = None
    """How many operators had run when autograd saved it last: there backward asks for it first. ``None``: ``saved_at``.
    """
    is_cast: bool = False
    """Whether it is a leaf's cast, made in the call: see NOTE [ Casts ] in ``block_tasks.py``."""

    @property
    def is_recomputable(self) -> bool:
        """Whether an operator of the block makes it, and autograd saves it."""
        return self.saved_at is not None and self.maker is not None

    @property
    def asked_at(self) -> int | None:
        """How many operators had run where backward asks for it first."""
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
    again: Again = Again.FREE
    workspace_bytes: Count = 0
    """Allocated while it runs, beyond what it makes."""


@dataclass(frozen=True, slots=True)
class BackwardPart(Record):
    """A part of a block's backward: from where it is given what the block saved to where it is given more."""

    place: Count
    """It goes back through the operators from this many on. What autograd first saved later is not needed any more."""
    peak_bytes: Count
    """Most that is allocated in it, beyond what was before the backward, and beyond what is saved and still needed."""
    begin_bytes: Count
    """Of these, what is there when it begins: gradients on their way through the block."""
    late_bytes: Count = 0
    """Most while an operator's own code does not hold any more what it was given, beyond that. What was kept comes on
    top, since autograd holds it longer: until gradients were summed up where a parameter was broadcast."""


@dataclass(frozen=True, slots=True)
class HostTimes(Record):
    """What the host needs to queue a block's work, in seconds."""

    plain: Seconds
    """Its forward, where it is left alone."""
    region: Seconds
    """Its forward, checkpointed."""
    rerun: Seconds
    """Its replay, if nothing is left out."""
    backward: Seconds
    """Its backward, without that."""


@dataclass(frozen=True, slots=True)
class BlockProfile(Record):
    """A kind of block. Times are those of one call."""

    kind: str
    operators: tuple[OperatorProfile, ...]
    values: tuple[Value, ...]
    forward_seconds: Seconds
    backward_seconds: Seconds
    """Without re-runs."""
    backward_peak_bytes: Count
    """Most that is allocated in its backward beyond what was at its begin, when all that it saved is there."""
    rerun_factor: Seconds
    """What a re-run takes, for each second that its operators took in forward."""
    backward_change_bytes: int
    """By how much the level has risen when its backward has ended: gradients of its parameters, mostly."""
    backward_parts: tuple[BackwardPart, ...] = ()
    """In their order. Without them, ``backward_peak_bytes`` are taken to be needed all the time."""
    saves_at: tuple[Count, ...] = ()
    """After how many operators autograd saves something for another one than before: then what it saved for the earlier
    ones leaves. Without them, it leaves at once."""
    host: HostTimes | None = None
    """``None``: the host is not waited for."""
    gap: Outside | None = None
    """What comes between the block before and one of this kind, in forward: a pooling, say. A mean of all calls."""
    cached_bytes: Count = 0
    """Of its casts, what is there from its forward to the end of the model's, whatever is decided: see NOTE [ Casts ]
    in ``block_tasks.py``."""

    @property
    def saved_bytes(self) -> int:
        """What autograd saves of it."""
        return sum(value.nbytes for value in self.values if value.saved_at is not None)

    def nbytes(self, numbers: Iterable[int]) -> int:
        """Bytes of some of its values, by their numbers."""
        return sum(self.values[number].nbytes for number in numbers)


@dataclass(frozen=True, slots=True)
class Outside(Record):
    """A part of a step that is no block's."""

    seconds: Seconds
    peak_bytes: Count
    """Most that is allocated in it, beyond the level at its begin."""
    change_bytes: int
    """By how much the level has risen at its end."""
    host_seconds: Seconds = 0.0
    """What the host needs to queue it."""


@dataclass(frozen=True, slots=True)
class OptimizerProfile(Record):
    """An optimizer that can step any fraction of its elements on the host: all of them, where this was measured."""

    state_bytes: Count
    """Of all elements, were they stepped on the device: masters, too."""
    gradient_bytes: Count
    """Of all elements: on the device they stay until the step."""
    step_bytes: Count
    """Allocated while all are stepped on the device, beyond that."""
    host_seconds: Seconds
    """What the host's step takes."""
    stall_seconds: Seconds
    """Of these, what the device waited for."""


@dataclass(frozen=True, slots=True)
class BlockCall(Record):
    """One call of a block in a step."""

    name: str
    """The module's."""
    kind: Count
    """Its place in :attr:`Profile.kinds`."""


@dataclass(frozen=True, slots=True)
class Static(Record):
    """What is allocated when a step begins, by what it is. The shares add up to :attr:`Profile.static_bytes`."""

    weights: Count
    """Parameters of the model."""
    gradients: Count
    """Of these parameters, where they are there when the step begins."""
    optimizer: Count
    """State of an optimizer that was known when the profile was made. Of any other, it is in ``other``."""
    other: Count
    """The rest: buffers, an optimizer's state that nobody told of, what else the process has there."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.other


@dataclass(frozen=True, slots=True)
class Profile(FileRecord):
    """What one step was measured to do."""

    model: str
    """Class of the model."""
    device: str
    kinds: tuple[BlockProfile, ...]
    calls: tuple[BlockCall, ...]
    """In the order of the forward."""
    static_bytes: Count
    """Allocated when the step begins."""
    before: Outside
    """From the begin of the forward to the first block."""
    middle: Outside
    """From the end of the last block's forward to the begin of its backward: head and loss. Without what blocks' casts
    are let go of in it, and where these are, only to there."""
    after: Outside
    """From the end of the first block's backward to the begin of the next step: the optimizer."""
    min_bytes: Count
    """What is smaller does not leave."""
    optimizer: OptimizerProfile | None = None
    """If the plan is to say how much of it is on the host."""
    static: Static | None = None
    """What ``static_bytes`` are made of; ``None``: that is not known."""
    held_bytes: Count = 0
    """Of ``middle``, where other passes came between forward and backward: what was held meanwhile."""
    late: Outside | None = None
    """What comes of head and loss after blocks' casts were let go of, without its time, which is in ``middle``.
    ``None``: nothing, or they are not."""
    lead_seconds: Seconds = 0.0
    """By how much the host may be ahead of the device when the step begins: 0 where the loop waits for the device in
    between."""
    schema: int = SCHEMA

    @property
    def saved_bytes(self) -> int:
        """What autograd saves of all blocks."""
        return sum(self.kinds[call.kind].saved_bytes for call in self.calls)

    @property
    def gradient_bytes(self) -> int:
        """By how much the level rises in blocks' backwards: gradients of their parameters, mostly."""
        return sum(max(self.kinds[call.kind].backward_change_bytes, 0) for call in self.calls)

    def __str__(self) -> str:
        kinds = f"{len(self.kinds)} kind{'s' if len(self.kinds) > 1 else ''}"
        return (
            f"{printable(f'{self.model} on {self.device}')}: {len(self.calls)} blocks of {kinds} save "
            f"{format_bytes(self.saved_bytes)}, beside {format_bytes(self.static_bytes)} that are always there"
        )

    def _check(self) -> None:
        if self.static is not None and self.static.total != self.static_bytes:
            raise self._is_none("static", f"{self.static.total} bytes, where static_bytes are {self.static_bytes}")
        for place, kind in enumerate(self.kinds):
            self._check_numbers(kind, f"kinds.{place}")
        for place, call in enumerate(self.calls):
            self._check_below(call.kind, len(self.kinds), f"calls.{place}.kind", "kinds")

    def _check_numbers(self, block: BlockProfile, where: str) -> None:
        count = len(block.operators)
        for place, each in enumerate(block.operators):
            for name in ("reads", "makes", "writes"):
                for number in getattr(each, name):
                    self._check_below(number, len(block.values), f"{where}.operators.{place}.{name}", "values")
            for number in each.makes:
                if block.values[number].maker != place:
                    raise self._is_none(
                        f"{where}.values.{number}.maker", f"not {place}, which makes it by its own word"
                    )
        for number, value in enumerate(block.values):
            maker, first, last = (f"{where}.values.{number}.{name}" for name in ("maker", "saved_at", "saved_last_at"))
            if value.maker is not None:
                self._check_below(value.maker, count, maker, "operators")
                if number not in block.operators[value.maker].makes:
                    raise self._is_none(maker, f"{value.maker}, which does not make it by its own word")
            if value.saved_at is not None:
                self._check_below(value.saved_at, count + 1, first, "operators")
            if value.saved_last_at is not None:
                self._check_below(value.saved_last_at, count + 1, last, "operators")
                if value.saved_at is None or value.saved_last_at < value.saved_at:
                    raise self._is_none(last, f"{value.saved_last_at}, before it was saved first")

    def _check_below(self, number: int, count: int, place: str, what: str) -> None:
        if number >= count:
            raise self._is_none(place, f"{number}, where there are {count} {what}")
