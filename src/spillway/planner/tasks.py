"""A step as a program: tasks of the compute stream in order, and the storages that are offloaded beside them.

NOTE [ Owners of bytes ]

The ``change_bytes`` of a task are what it leaves allocated: gradients of parameters, kept activations, and storages
that are about to be offloaded. The simulation counts offloaded storages from there on. It frees one when the window
releases it, counts it again when its copy back is queued, and frees it when it is dropped. A storage that stays is
freed by the ``change_bytes`` of a later task.

NOTE [ Program order ]

The CPU allocates and frees memory, and runs far ahead of the GPU. So windows are counted in the order of tasks, not in
time. A storage is freed where a later one needs its room in the window: compute stalls there for its copy. A copy back
is queued where an earlier storage was taken, and starts when compute has got there.

A task takes the CPU its ``host_seconds``. Where the loop never waits for the GPU, a step begins with the lead that the
CPU has from the steps before: see NOTE [ The host ] in ``timeline.py``.

NOTE [ Turns ]

Most steps are one forward and one backward of one model. A rank of a pipeline takes turns with chunks of its stages: a
forward of one, a backward of another. All chunks of a block share its decisions. So a problem has each block once, part
(stage) after part, and the turns say how a program is put together. Each chunk has its own storages. Gradients of
parameters are there after a part's first backward.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from spillway.types import Decision

_CASTS = "casts of the forward"
"""A task in which they are let go of."""


class Phase(enum.Enum):
    """What a task is a part of."""

    FORWARD = "forward"
    RERUN = "rerun"
    BACKWARD = "backward"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Sent:
    """A storage that begins to leave."""

    key: int
    """Names it in its program."""
    nbytes: int
    on_disk: bool = False
    """Whether it goes to the disk, and not to host memory."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work of the compute lane. See the notes at the top of this file."""

    name: str
    phase: Phase
    seconds: float
    peak_bytes: int = 0
    """Most bytes that are allocated while it runs, beyond those when it begins."""
    change_bytes: int = 0
    """Bytes that are allocated when it has ended, beyond those when it began. Before its ``drops``."""
    sends: tuple[Sent, ...] = ()
    """What begins to leave when it has ended, in order."""
    takes: tuple[int, ...] = ()
    """Keys of what must be on the device before it begins, in the order in which it is asked for. A key may be taken
    again later on."""
    drops: tuple[int, ...] = ()
    """Keys that nobody wants any more when it has ended."""
    gradient_bytes: int = 0
    """Of ``change_bytes``, gradients of parameters."""
    recomputed_bytes: int = 0
    """Of ``change_bytes``, what was computed again; below 0 where that is let go of."""
    host_seconds: float = 0.0
    """What the host needs to queue it."""

    def shifted(self, prefix: str, by: int) -> Task:
        """The same task of another block: names begin with ``prefix``, keys are counted from ``by`` on."""
        return replace(
            self,
            name=f"{prefix}{self.name}",
            sends=tuple(replace(sent, key=sent.key + by) for sent in self.sends),
            takes=tuple(key + by for key in self.takes),
            drops=tuple(key + by for key in self.drops),
        )

    def later(self) -> Task:
        """The same task where the gradients that it makes are there already, and are added to."""
        if not self.gradient_bytes:
            return self
        return replace(self, change_bytes=self.change_bytes - self.gradient_bytes, gradient_bytes=0)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a block, and what it comes to. Keys count the block's values from 0."""

    decisions: tuple[Decision, ...]
    """For each value of the block."""
    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    """Re-runs, and the backward itself."""
    output_bytes: int = 0
    """Of what it keeps, an output of the block that is counted once more for whoever takes it."""
    input_bytes: int = 0
    """Of what it keeps, its inputs."""
    let_go_bytes: int = 0
    """Of what it keeps, what is there to the end of the model's forward, and no longer."""

    def placed(self, prefix: str, by: int, twice: int) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Its tasks as those of a block, forward and backward: see :meth:`Task.shifted`.

        The block before has counted ``twice`` bytes, too, from its forward's end to its backward's.
        """
        forward, backward = (tuple(task.shifted(prefix, by) for task in each) for each in (self.forward, self.backward))
        if not twice:
            return forward, backward
        less = replace(forward[-1], change_bytes=forward[-1].change_bytes - twice)
        more = replace(backward[-1], change_bytes=backward[-1].change_bytes + twice)
        return (*forward[:-1], less), (*backward[:-1], more)

    @property
    def kept_bytes(self) -> int:
        """What the device holds for it from the end of its forward to its backward, when all that leaves has left."""
        return sum(task.change_bytes for task in self.forward) - self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        """What leaves."""
        return sum(sent.nbytes for task in self.forward for sent in task.sends)

    @property
    def rerun_seconds(self) -> float:
        """What is computed again."""
        return sum(task.seconds for task in self.backward if task.phase is Phase.RERUN)


def counted_twice(output_bytes: int, input_bytes: int) -> int:
    """Of what a block keeps of its output and the next one of its inputs, what is the same.

    Where the next one keeps more than that one input, it is not known which is which, and nothing is said to be.
    """
    return output_bytes if output_bytes == input_bytes else 0


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidths in bytes a second, ``out`` to CPU memory and ``back`` from it, and how much may be in flight."""

    out: float
    back: float
    disk_write: float
    disk_read: float
    window: int
    """Bytes that may be LEAVING at once."""
    ahead: int | None = None
    """Bytes that may be fetched ahead; ``None``: as many."""
    host: float = 1.0
    """How many times as long as it says of tasks the host takes."""


class Turn(NamedTuple):
    """A forward or a backward of a chunk through a part. See NOTE [ Turns ]."""

    part: int = 0
    chunk: int = 0
    is_backward: bool = False


ONE_PASS = (Turn(), Turn(is_backward=True))


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks that are called one after the other, those of a model or of a stage, and what is around them."""

    blocks: int
    before: tuple[Task, ...] = ()
    """At the begin of a forward."""
    middle: tuple[Task, ...] = ()
    """At the begin of a backward: head, loss and their backward."""
    after: tuple[Task, ...] = ()
    """At its end: the backward of what comes before the blocks, and the optimizer."""
    late: tuple[Task, ...] = ()
    """Of ``middle``, what comes after blocks have let go of what they hold for as long as the forward takes."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A step whose blocks can be treated in several ways.

    It is made of turns. That of a forward: ``before``, and the forwards of the part's blocks. Of a backward:
    ``middle``, what blocks let go of when the forward is over, ``late``, the backwards of the blocks from the last to
    the first, ``after``.
    """

    static_bytes: int
    """Allocated when the step begins: parameters, optimizer state."""
    parts: tuple[Part, ...]
    names: tuple[str, ...]
    """Of the blocks, part by part."""
    options: tuple[tuple[Option, ...], ...]
    """For each block. Blocks of one signature share one tuple, the very same object."""
    rates: Rates
    budget: int
    """Bytes that may be allocated on the device at most."""
    host_budget: int | None = None
    disk_budget: int | None = None
    late: float = 1.0
    """How many times as long the CPU may take now and then: see NOTE [ A slower CPU ] in ``solve.py``."""
    lead: float = 0.0
    """Seconds by which the host may be ahead of the device when the step begins."""
    turns: tuple[Turn, ...] = ONE_PASS
    placed: dict[tuple[int, int, int, int], tuple[tuple[Task, ...], tuple[Task, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Tasks of options as those of a block, by its number, the option's, and the arguments of :meth:`Option.placed`.
    They are the same for all rates and budgets."""

    def program(self, chosen: Sequence[int]) -> Program:
        """The step with an option for each block, by its number. Tasks are made once for each block and option."""
        options = [each[number] for each, number in zip(self.options, chosen, strict=True)]
        # Each block's keys are its own, and each chunk's.
        first = list(accumulate((len(option.decisions) for option in options), initial=0))
        tasks: list[Task] = []
        gone: set[int] = set()
        """Parts of which a backward has been."""
        for turn in self.turns:
            part, blocks = self.parts[turn.part], self.blocks_of(turn.part)
            placed: list[tuple[tuple[Task, ...], tuple[Task, ...]]] = []
            before = let_go = 0
            for block in blocks:
                option = options[block]
                by, twice = first[block] + turn.chunk * first[-1], counted_twice(before, option.input_bytes)
                key = (block, chosen[block], by, twice)
                if key not in self.placed:
                    self.placed[key] = option.placed(f"{self.names[block]} ", by, twice)
                placed.append(self.placed[key])
                before = option.output_bytes
                let_go += option.let_go_bytes
            if not turn.is_backward:
                tasks += part.before
                tasks += (task for there, _ in placed for task in there)
                continue
            casts = (Task(_CASTS, Phase.FORWARD, 0.0, change_bytes=-let_go),) if let_go else ()
            blocks_back = (task for _, again in reversed(placed) for task in again)
            back = (*part.middle, *casts, *part.late, *blocks_back, *part.after)
            tasks += (task.later() for task in back) if turn.part in gone else back
            gone.add(turn.part)
        return Program(self.static_bytes, tuple(tasks), self.lead)

    def blocks_of(self, part: int) -> range:
        """Numbers of a part's blocks."""
        first = sum(each.blocks for each in self.parts[:part])
        return range(first, first + self.parts[part].blocks)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole step."""

    static_bytes: int
    tasks: tuple[Task, ...]
    lead: float = 0.0
    """Seconds by which the host may be ahead of the device when it begins."""
