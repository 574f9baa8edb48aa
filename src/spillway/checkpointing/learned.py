"""What the first calls of a checkpointed function taught.

NOTE [ Learning ]

The first call of each kind (types of tensors, numbers among the arguments, whether the module trains) is observed,
without a dispatch mode:

* Of each saved tensor a fingerprint is taken. The first replay is run to its end, and compared with the fingerprints.
* The version counters of inputs, buffers and other tensors that the function can reach are compared before and after,
  so that in-place writes are known. Later calls copy what is written before they begin.
* Saved tensors that share memory with an output are known by their numbers. Later calls watch their versions, as
  autograd would.

Later calls rely on it. One call in 64 is compared again, by fingerprints that the device compares on its own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence, Set
from typing import TYPE_CHECKING, Any

from spillway.checkpointing.preserved import Order
from spillway.checkpointing.program import Decisions, Program, Selection
from spillway.errors import UnsupportedError
from spillway.operators import Planned

if TYPE_CHECKING:
    from spillway.checkpointing.collector import Collector, Meta

_EVERY = 64
"""Calls of which one is compared."""
_MOST_OBSERVED = 8
"""Calls that are observed in full before one of them was replayed."""
_MOST_PROGRAMS, _MOST_DECISIONS, _MOST_FAILURES = 8, 32, 3
_numbers = itertools.count()


class Learned:
    """What is known of one kind of call of a function. See NOTE [ Learning ]."""

    __slots__ = (
        *("_calls", "_decisions", "_failures", "_offset", "_order", "_programs", "_recomputed", "draws", "escaping"),
        *("has_other_kernels", "is_validated", "learned_from", "state", "takes_gradients", "unread", "varies"),
        *("written", "written_inputs"),
    )

    def __init__(self) -> None:
        self._calls = 0
        self._offset = next(_numbers)
        self._programs: dict[Hashable, Program] = {}
        """Programs of calls with tensors of such shapes."""
        self._order: tuple[Program, Planned, Order] | None = None
        """The latest."""
        self._failures: dict[Hashable, int] = {}
        self._recomputed: tuple[Sequence[Meta], Set[int], int] | None = None
        """Of the latest replay: what forward saved, which of it was wanted, and bytes."""
        self._decisions: dict[tuple[Hashable, Hashable], Decisions] = {}
        """By shapes, and by what is to be preserved."""
        self.is_validated = False
        """Whether a replay was compared in full, and was right."""
        self.learned_from = 0
        """How many calls were compared in full, or recorded."""
        self.draws = False
        """Whether the function was seen to draw random numbers of torch's."""
        self.escaping: frozenset[int] = frozenset()
        """Numbers of saved tensors that share memory with an output or with state: somebody else may write them."""
        self.has_other_kernels = False
        """Whether it gives other bits where nothing needs a gradient: see NOTE [ Kernels without grad ]."""
        self.takes_gradients = False
        """Whether the function takes a gradient of what it computes: then it is called plainly."""
        self.varies = False
        """Whether calls saved other tensors each time, so that such calls have no program."""
        self.unread: frozenset[str] = frozenset()
        """Names of attributes in which a reentrant function leaves a history, and which it does not read."""
        self.written_inputs: frozenset[int] = frozenset()
        """Places of inputs that the function writes in place."""
        self.written: frozenset[str] = frozenset()
        """Names of other tensors that it writes in place."""

        self.state: tuple[str, ...] = ()
        """Names of the Python state that the function changes."""

    @classmethod
    def believed(cls) -> Learned:
        """For a call within a replay, which the replay's own checks cover."""
        learned = cls()
        learned.is_validated = True
        learned._offset = 1
        return learned

    def check_capture(self, *, draws: bool) -> None:
        """A call is about to be captured into a graph, which can neither compare nor set a random generator.

        Args:
            draws: whether a replay is to draw what forward drew.

        Raises:
            UnsupportedError: where that would be needed.
        """
        if not self.is_validated or (draws and self.draws):
            raise UnsupportedError(
                "got a checkpointed function in a graph that is being captured, expected one of which a call was "
                "recomputed before, and that draws no random numbers; run a step like it in the same session first, "
                "without capturing; with dropout, use save='random' and preserve_rng_state=False"
            )

    def decisions(self, shapes: Hashable, selection: Selection) -> tuple[Decisions | None, bool]:
        """What is preserved of a call with tensors of such shapes, if that is known; and whether to record its program.

        Raises:
            RecomputeError: if a policy says that an output must be saved, and that output is written in place.
        """
        program = self._programs.get(shapes)
        if program is None:
            return None, len(self._programs) < _MOST_PROGRAMS
        if program.opaque is not None:
            return None, False
        known = self._decisions.get((shapes, selection.key))
        if known is None:
            chosen = program.chosen.get(selection.key)
            if chosen is None and selection.choices.asks and selection.choices.planned is None:
                # Each operator has to be asked about while it runs.
                return None, True
            if len(self._decisions) >= _MOST_DECISIONS:
                self._decisions.clear()
            known = self._decisions[shapes, selection.key] = Decisions.of(program, selection.choices, chosen)
        return known, False

    def order(self, shapes: Hashable, planned: Planned) -> Order | None:
        """What is done with each tensor that such a call saves, where nothing is recomputed, if that is known."""
        program = self._programs.get(shapes)
        if program is None or program.opaque is not None:
            return None
        if self._order is None or self._order[:2] != (program, planned):
            self._order = program, planned, Order(program, planned)
        return self._order[2]

    def record(self, shapes: Hashable, selection: Selection, program: Program) -> None:
        """A program was recorded."""
        before = self._programs.get(shapes)
        if before is not None:
            program.chosen = {**before.chosen, **program.chosen}
        self._programs[shapes] = program

    def differed(self, program: Program, *, is_final: bool) -> None:
        """A call did something else than the program says.

        Args:
            program: of the call.
            is_final: whether no such program may be used again. Otherwise the next call is recorded, a few times.
        """
        for shapes, known in list(self._programs.items()):
            if known is program:
                failures = self._failures[shapes] = self._failures.get(shapes, 0) + 1
                self._decisions = {key: each for key, each in self._decisions.items() if key[0] != shapes}
                if is_final or failures >= _MOST_FAILURES:
                    self._programs[shapes] = Program(opaque="calls differ from each other")
                    self.varies = not is_final
                else:
                    del self._programs[shapes]

    def recomputed_bytes(self, metas: Sequence[Meta], collector: Collector) -> int:
        """Bytes that a replay has made. They are counted anew if other tensors were saved, or are wanted."""
        numbers = collector.numbers()
        if self._recomputed is None or self._recomputed[0] != metas or self._recomputed[1] != numbers:
            self._recomputed = metas, numbers, collector.made_bytes()
        return self._recomputed[2]

    def begins(self) -> bool:
        """A call begins; gives whether it is observed in full."""
        self._calls += 1
        return not self.is_validated and self._calls <= _MOST_OBSERVED

    def is_sampled(self) -> bool:
        """Whether this call is one of those that are compared now and then."""
        return (self._calls + self._offset) % _EVERY == 0


class Proofs:
    """What is known of one function, over all its calls."""

    def __init__(self) -> None:
        self.learned: dict[Hashable, Any] = {}
        """What calls of each kind taught."""
        self.ranks_agreed = False
        """Whether the ranks that share its inputs were seen to have the same ones."""


class ProofStore:
    """The proofs of a session, by function: ``session.of(ProofStore)``."""

    def __init__(self) -> None:
        self._proofs: dict[Hashable, Proofs] = {}
        self._lock = threading.Lock()

    def of(self, function: Hashable) -> Proofs:
        """The proofs of the function that this key identifies."""
        with self._lock:
            found = self._proofs.get(function)
            if found is None:
                # Modules that are gone are never asked for again.
                self._proofs = {known: each for known, each in self._proofs.items() if not _is_gone(known)}
                found = self._proofs[function] = Proofs()
            return found

    def __len__(self) -> int:
        return len(self._proofs)


def _is_gone(function: Hashable) -> bool:
    """Whether the key of a function names a module that is gone."""
    if isinstance(function, tuple):
        return any(map(_is_gone, function))
    return isinstance(function, weakref.ref) and function() is None
