"""A step as a program: tasks of the compute stream in order, and the storages that are offloaded beside them.

NOTE [ Owners of bytes ]

The ``change_bytes`` of a task are the allocations that outlive it: gradients of parameters, kept activations, and
storages that are about to be offloaded. The simulation counts offloaded storages from there on. It frees one when the
in-flight limit requires it, counts it again when its reload is queued, and frees it when it is dropped. A storage that
stays is freed by the ``change_bytes`` of a later task.

NOTE [ Program order ]

The CPU allocates and frees memory, and runs far ahead of the GPU. So in-flight bytes are counted in the order of tasks,
not in time. A storage is freed where a later one would exceed the in-flight limit: compute stalls there for its copy. A
reload is queued where an earlier storage was taken, and starts when compute has reached that place.

A task takes the CPU its ``host_seconds``: see NOTE [ The host ] in ``timeline.py``.

NOTE [ Copies of weights ]

The streamed parameters of a block are on the device from the begin of its forward to its end. When it begins, the next
block's are fetched. A replay needs them once more, and backward holds them from there to its end: the same rule, in the
order of replays. Several such tasks in a row share one copy (:class:`Weights`).

A block that is not recomputed has them saved by autograd. So they are storages that are offloaded from the start, and
are reloaded for its backward, parameter by parameter, with all other storages and within the in-flight limit. Backward
also takes saved parameters that are not streamed: no task sends these, so they are there.

Weights in files are read by the CPU before they cross the link, mostly in a longer time. Both overlap, piece by piece.
So their copies take the longer of the two times: at the link's bandwidth, and as long as reads took in a measured step.

NOTE [ Turns ]

Most steps are one forward and one backward of one model. A rank of a pipeline takes turns with chunks of its stages: a
forward of one, a backward of another. All chunks of a block share its decisions. So a problem has each block once, part
(stage) after part, and the turns define the program. Each chunk has its own storages. The gradients of parameters exist
after a part's first backward.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from spillway.types import Decision


def in_words(task: str) -> str:
    """The name of a block's task, such as ``"layers.3 backward"``, in words. Other names are words already.

    Example:
        >>> in_words("layers.3 backward"), in_words("head and loss")
        ('the backward of layers.3', 'head and loss')
    """
    block, _, part = task.rpartition(" ")
    return f"the {part} of {block}" if part in ("forward", "backward", "recomputation") else task


BEFORE, MIDDLE, AFTER = "before the blocks", "head and loss", "after the blocks"
"""Names of the tasks outside of blocks."""
GAP = "before it"
"""The task between two blocks, which the name of the second one precedes."""
_CASTS = "casts of the forward"


class TaskBytes(NamedTuple):
    """The measured bytes on the GPU in a task of a step."""

    name: str
    """As ``"layers.3 backward"``. The code between two blocks belongs to the forward of the second one."""
    peak_bytes: int
    end_bytes: int
    """When it has ended."""


def measured_groups(names: Iterable[str]) -> list[tuple[str, list[int]]]:
    """Consecutive tasks that a measured step does not tell apart: the name of each group, and places of its tasks.

    A block's backward up to the end of its replay belongs to the recomputation.

    Example:
        >>> measured_groups(["a before it", "a forward", "head and loss", "a backward", "a recomputation"])
        [('a forward', [0, 1]), ('head and loss', [2]), ('a recomputation', [3, 4])]
    """
    groups: list[tuple[str, list[int]]] = []
    for place, task in enumerate(names):
        block, _, part = task.rpartition(" ")
        name = MIDDLE if task == _CASTS else f"{task.removesuffix(GAP)}forward" if task.endswith(f" {GAP}") else task
        places = [place]
        last = groups[-1][0] if groups else ""
        if last == name or (part == "recomputation" and last == f"{block} backward"):
            places = [*groups.pop()[1], place]
        groups.append((name, places))
    return groups


class Phase(enum.Enum):
    """The part of a step to which a task belongs."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Sent:
    """A storage that is offloaded."""

    key: int
    """Names it in its program."""
    nbytes: int
    on_disk: bool = False
    """Whether it is offloaded to the disk, and not to CPU memory."""
    is_weight: bool = False
    """Whether it is a streamed parameter, which needs no copy out. See NOTE [ Copies of weights ]."""
    read_seconds: float = 0.0
    """Time to read it from its file, if it is a parameter in one."""


class Streamed(NamedTuple):
    """The streamed parameters of a block."""

    sizes: tuple[int, ...] = ()
    """Bytes of each."""
    read_seconds: float = 0.0
    """Time to read those in files."""


class Weights(NamedTuple):
    """The streamed parameters of a block, on the device. See NOTE [ Copies of weights ]."""

    block: int
    nbytes: int
    is_replay: bool = False
    """Whether they are there for a replay and the backward after it, or for a forward."""
    read_seconds: float = 0.0
    """Time to read those in files."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work of the compute stream. See the notes at the top of this file."""

    name: str
    phase: Phase
    seconds: float
    peak_bytes: int = 0
    """Most bytes that are allocated while it runs, beyond those when it begins."""
    change_bytes: int = 0
    """Bytes that are allocated when it has ended, beyond those when it began. Before its ``drops``."""
    sends: tuple[Sent, ...] = ()
    """Storages whose offload begins when it has ended, in order."""
    takes: tuple[int, ...] = ()
    """Keys of storages that must be on the GPU before it begins, in the order in which it needs them. A key may be
    taken again later on."""
    drops: tuple[int, ...] = ()
    """Keys of storages that are not needed any more when it has ended."""
    gradient_bytes: int = 0
    """The gradients of parameters among ``change_bytes``."""
    recomputed_bytes: int = 0
    """The recomputed storages among ``change_bytes``; below 0 if they are freed."""
    host_seconds: float = 0.0
    """CPU time to queue it."""
    weights: Weights | None = None
    """Streamed parameters that must be on the GPU from its begin to its end."""

    def shifted(self, prefix: str, by: int) -> Task:
        """The same task of another block: names begin with ``prefix``, and keys are ``by`` higher."""
        return replace(
            self,
            name=f"{prefix}{self.name}",
            sends=tuple(replace(sent, key=sent.key + by) for sent in self.sends),
            takes=tuple(key + by for key in self.takes),
            drops=tuple(key + by for key in self.drops),
        )

    def later(self) -> Task:
        """The same task if its gradients exist already, and are added to."""
        if not self.gradient_bytes:
            return self
        return replace(self, change_bytes=self.change_bytes - self.gradient_bytes, gradient_bytes=0)


@dataclass(frozen=True, slots=True)
class Option:
    """Decisions for a block, and the tasks that follow from them. Keys number the block's values from 0."""

    decisions: tuple[Decision, ...]
    """One for each value of the block."""
    forward: tuple[Task, ...]
    backward: tuple[Task, ...]
    """Recomputation and backward."""
    output_bytes: int = 0
    """Kept bytes of the block's output, which count once more for its user."""
    input_bytes: int = 0
    """Kept bytes of its inputs."""
    let_go_bytes: int = 0
    """Kept bytes that are freed at the end of the model's forward."""
    parameters: tuple[int, ...] = ()
    """Bytes of parameters that autograd saved, which backward takes. Their keys follow those of the values."""

    def placed(
        self, prefix: str, by: int, twice: int, extra: int, block: int, streamed: Streamed
    ) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
        """Its tasks as those of a block, forward and backward: see :meth:`Task.shifted`.

        The block before has counted ``twice`` bytes, too, from its forward's end to its backward's. The level rises by
        ``extra`` bytes more at the end of its backward. The block of this number has ``streamed`` parameters.
        """
        forward, backward = ([task.shifted(prefix, by) for task in each] for each in (self.forward, self.backward))
        if streamed.sizes:
            self._stream(forward, backward, block, by + len(self.decisions), streamed)
        if twice:
            forward[-1] = replace(forward[-1], change_bytes=forward[-1].change_bytes - twice)
        if twice or extra:
            last = backward[-1]
            peak = max(last.peak_bytes, last.change_bytes)
            backward[-1] = replace(last, peak_bytes=peak, change_bytes=last.change_bytes + twice + extra)
        return tuple(forward), tuple(backward)

    def _stream(self, forward: list[Task], backward: list[Task], block: int, key: int, streamed: Streamed) -> None:
        """Give the tasks the copies of parameters. See NOTE [ Copies of weights ]."""
        nbytes, seconds = sum(streamed.sizes), streamed.read_seconds
        for place, task in enumerate(forward):
            if task.phase is Phase.FORWARD:
                forward[place] = replace(task, weights=Weights(block, nbytes, False, seconds))
        again = next((place for place, task in enumerate(backward) if task.phase is Phase.RECOMPUTE), None)
        if again is not None:
            weights = Weights(block, nbytes, True, seconds)
            backward[again:] = [replace(task, weights=weights) for task in backward[again:]]
            return
        sends, left = forward[-1].sends, Counter(streamed.sizes)
        for number, each in enumerate(self.parameters, key):
            if left[each]:
                # Parameters of one size are alike.
                left[each] -= 1
                sends = (*sends, Sent(number, each, is_weight=True, read_seconds=seconds * each / nbytes))
        forward[-1] = replace(forward[-1], sends=sends)

    @property
    def kept_bytes(self) -> int:
        """Bytes on the GPU from the end of its forward to its backward, once its offloads are done."""
        return sum(task.change_bytes for task in self.forward) - self.sent_bytes

    @property
    def sent_bytes(self) -> int:
        return sum(sent.nbytes for task in self.forward for sent in task.sends)

    @property
    def recompute_seconds(self) -> float:
        return sum(task.seconds for task in self.backward if task.phase is Phase.RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Rates:
    """Bandwidths in bytes a second, ``out`` to CPU memory and ``back`` from it, and the in-flight limit in bytes."""

    out: float
    back: float
    disk_write: float
    disk_read: float
    window: int
    """For offloading, and for prefetching."""
    host: float = 1.0
    """CPU time, relative to the ``host_seconds`` of tasks."""


class Turn(NamedTuple):
    """A forward or a backward of a chunk through a part. See NOTE [ Turns ]."""

    part: int = 0
    chunk: int = 0
    is_backward: bool = False


ONE_PASS = (Turn(), Turn(is_backward=True))


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks that are called one after the other, in a model or a stage, and the tasks around them."""

    blocks: int
    before: tuple[Task, ...] = ()
    """At the start of a forward."""
    middle: tuple[Task, ...] = ()
    """At the start of a backward: head, loss and their backward."""
    after: tuple[Task, ...] = ()
    """At its end: the backward of embeddings, and the optimizer."""
    late: tuple[Task, ...] = ()
    """After ``middle``, when blocks have freed the casts that they hold for the forward."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A step with several options for each block.

    It consists of turns. A forward is ``before``, and the forwards of the part's blocks. A backward is ``middle``, the
    release of the forward's casts, ``late``, the backwards of the blocks from the last to the first, and ``after``.
    """

    static_bytes: int
    """In use when the step begins: parameters, optimizer state."""
    parts: tuple[Part, ...]
    names: tuple[str, ...]
    """Names of the blocks, part by part."""
    options: tuple[tuple[Option, ...], ...]
    """For each block. Blocks of one kind share one tuple, the very same object."""
    rates: Rates
    budget: int
    """Most bytes that may be allocated on the GPU."""
    extra_bytes: tuple[int, ...]
    """For each block, the rise of the level in its backward, beyond that of its options."""
    streamed: tuple[Streamed, ...]
    """Streamed parameters of each block."""
    spare: int | None = None
    """Bytes of the user's budget beyond this one, which stay free; ``None``: all may be used."""
    host_budget: int | None = None
    disk_budget: int | None = None
    late: float = 1.0
    """CPU time of a slower CPU, relative to the measured one: see NOTE [ A slower CPU ] in ``solve.py``."""
    turns: tuple[Turn, ...] = ONE_PASS
    placed: dict[tuple[int, int, int, int], tuple[tuple[Task, ...], tuple[Task, ...]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Tasks by the block's number, the option's, and the arguments of :meth:`Option.placed`. They do not depend on
    rates and budgets."""

    def program(self, chosen: Sequence[int]) -> Program:
        """The step with an option for each block, by its number. Tasks are made once for each block and option."""
        options = [each[number] for each, number in zip(self.options, chosen, strict=True)]
        # The keys of each block and each chunk are different.
        first = list(accumulate((len(each.decisions) + len(each.parameters) for each in options), initial=0))
        tasks: list[Task] = []
        had_backward: set[int] = set()
        for turn in self.turns:
            part, blocks = self.parts[turn.part], self.blocks_of(turn.part)
            placed: list[tuple[tuple[Task, ...], tuple[Task, ...]]] = []
            before = let_go = 0
            for block in blocks:
                option = options[block]
                by = first[block] + turn.chunk * first[-1]
                # Bytes that the block before keeps as its output. Those of several inputs cannot be told apart.
                twice = before if before == option.input_bytes else 0
                key = (block, chosen[block], by, twice)
                if key not in self.placed:
                    prefix, extra = f"{self.names[block]} ", self.extra_bytes[block]
                    self.placed[key] = option.placed(prefix, by, twice, extra, block, self.streamed[block])
                placed.append(self.placed[key])
                before = option.output_bytes
                let_go += option.let_go_bytes
            if not turn.is_backward:
                tasks += part.before
                tasks += (task for there, _ in placed for task in there)
                continue
            casts = (Task(_CASTS, Phase.FORWARD, 0.0, change_bytes=-let_go),) if let_go else ()
            blocks_back = (task for _, back in reversed(placed) for task in back)
            backward = (*part.middle, *casts, *part.late, *blocks_back, *part.after)
            tasks += (task.later() for task in backward) if turn.part in had_backward else backward
            had_backward.add(turn.part)
        return Program(self.static_bytes, tuple(tasks))

    def blocks_of(self, part: int) -> range:
        """Numbers of a part's blocks."""
        first = sum(each.blocks for each in self.parts[:part])
        return range(first, first + self.parts[part].blocks)


@dataclass(frozen=True, slots=True)
class Program:
    """A whole step."""

    static_bytes: int
    tasks: tuple[Task, ...]
