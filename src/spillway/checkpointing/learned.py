"""Knowledge about a checkpointed function from its first calls.

NOTE [ Learning ]

Calls of one kind share types of tensors, numbers among the arguments, and whether the module trains. The first call of
a kind is observed, without a dispatch mode:

* A fingerprint is taken of each saved tensor. The first replay is compared with the fingerprints. It runs to the
  end of the function, unless there are several ranks.
* The versions of all tensors that the function can reach are compared before and after forward. Later calls copy the
  tensors that the function writes, before they begin.
* Saved tensors that share memory with an output are noted by number. Later calls check their versions, as autograd
  does.

Later calls rely on it. One call in 64 is compared again, and the GPU compares the fingerprints on its own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spillway.checkpointing.preserved import SavingOrder
from spillway.checkpointing.program import Decisions, Program
from spillway.checkpointing.selectors import Choices, Planned
from spillway.errors import UnsupportedError

if TYPE_CHECKING:
    from spillway.checkpointing.collector import Collector, Meta

_EVERY = 64
"""One call of so many is compared."""
_MOST_OBSERVED = 8
"""Calls that are observed in full, if none of them is replayed."""
_MOST_PROGRAMS, _MOST_DECISIONS, _MOST_FAILURES = 8, 32, 3
_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class LearnedCalls:
    """Knowledge about one kind of call. See NOTE [ Learning ]."""

    is_validated: bool = False
    """Whether a replay was compared in full, and was right."""
    learned_from: int = 0
    """Number of calls that were compared in full, or recorded."""
    draws: bool = False
    """Whether the function was seen to draw random numbers of torch."""
    puts_back: bool = False
    """Whether it was seen to set back a generator of Python or NumPy: its replays must not end before."""
    escaping: frozenset[int] = frozenset()
    """Numbers of saved tensors that share memory with an output or with state: other code may write them."""
    why_kept: str | None = None
    """Why the function is called plainly: it takes a gradient of what it computes, or runs after its call."""
    varies: bool = False
    """Whether calls saved other tensors each time, so that such calls have no program."""
    written_inputs: frozenset[int] = frozenset()
    """Places of inputs that the function writes in place."""
    written: frozenset[str] = frozenset()
    """Names of other tensors that it writes in place."""
    state: tuple[str, ...] = ()
    """Names of the Python state that the function changes."""
    metas: Sequence[Meta] = ()
    """Metadata of the tensors that the latest call saved. Later calls share the objects."""
    _calls: int = 0
    _offset: int = field(default_factory=lambda: next(_numbers))
    _programs: dict[Hashable, Program] = field(default_factory=dict)
    _decisions: dict[tuple[Hashable, Hashable], Decisions] = field(default_factory=dict)
    """Decisions, by shapes and by what is preserved."""
    _failures: dict[Hashable, int] = field(default_factory=dict)
    """Number of calls that differed from their program, by shapes."""
    _order: tuple[Program, Planned, SavingOrder] | None = None
    _recomputed: tuple[Sequence[Meta], Set[int], int] | None = None
    """The latest replay: saved tensors, numbers of the wanted ones, and bytes."""

    @classmethod
    def trusted(cls) -> LearnedCalls:
        """For a call within a replay, whose checks cover it."""
        return cls(is_validated=True, _offset=1)

    def check_capture(self, *, draws: bool) -> None:
        """Raise an error for a call in a captured graph, where nothing is compared, if its replay cannot be trusted.

        ``draws``: its replay must draw the random numbers of forward, and a captured graph sets no generator.
        """
        if not self.is_validated or (draws and self.draws):
            raise UnsupportedError(
                "A checkpointed function cannot be captured into a graph before one of its calls was recomputed and "
                "compared, nor if it draws random numbers. Run a step like it in the same session first, without "
                "capturing. With dropout, use save='random' and preserve_rng_state=False."
            )

    def decisions(self, shapes: Hashable, choices: Choices) -> tuple[Decisions | None, bool]:
        """Decisions about a call with tensors of these shapes, if they are known, and whether to record its program."""
        program = self._programs.get(shapes)
        if program is None:
            return None, len(self._programs) < _MOST_PROGRAMS
        if program.opaque is not None:
            return None, False
        known = self._decisions.get((shapes, choices.key))
        if known is None:
            chosen = program.chosen.get(choices.key)
            if chosen is None and choices.asks and choices.planned is None:
                # The policy must see each operator while it runs.
                return None, True
            if len(self._decisions) >= _MOST_DECISIONS:
                self._decisions.clear()
            known = self._decisions[shapes, choices.key] = Decisions.of(program, choices, chosen)
        return known, False

    def order(self, shapes: Hashable, planned: Planned) -> SavingOrder | None:
        """The order of saving of such a call, if it is known. Nothing of it is recomputed."""
        program = self._programs.get(shapes)
        if program is None or program.opaque is not None:
            return None
        if self._order is None or self._order[:2] != (program, planned):
            self._order = program, planned, SavingOrder(program, planned)
        return self._order[2]

    def record(self, shapes: Hashable, program: Program) -> None:
        before = self._programs.get(shapes)
        if before is not None:
            program.chosen = {**before.chosen, **program.chosen}
        self._programs[shapes] = program

    def differed(self, program: Program, *, is_final: bool) -> None:
        """Take note of a call that did not follow its program. The next one is recorded, a few times.

        If ``is_final``, such calls have no program from now on.
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
        """Bytes that a replay has made. They are counted again if other tensors were saved, or are wanted."""
        numbers = collector.numbers()
        if self._recomputed is None or self._recomputed[0] != metas or self._recomputed[1] != numbers:
            self._recomputed = metas, numbers, collector.made_bytes()
        return self._recomputed[2]

    def begins(self) -> bool:
        """Count a call. Returns whether it is observed in full."""
        self._calls += 1
        return not self.is_validated and self._calls <= _MOST_OBSERVED

    def is_sampled(self) -> bool:
        """Whether this call is one of the compared samples."""
        return (self._calls + self._offset) % _EVERY == 0


@dataclass(slots=True, eq=False)
class LearnedFunction:
    """Knowledge about one function."""

    calls: dict[Hashable, LearnedCalls] = field(default_factory=dict)
    ranks_agreed: bool = False
    """Whether the ranks that share its inputs were seen to have the same ones."""


class LearnedFunctions:
    """Knowledge about the functions of a session: ``session.of(LearnedFunctions)``."""

    def __init__(self) -> None:
        self._known: dict[Hashable, LearnedFunction] = {}
        self._lock = threading.Lock()

    def of(self, function: Hashable) -> LearnedFunction:
        with self._lock:
            found = self._known.get(function)
            if found is None:
                # Functions of modules that are gone are never called again.
                self._known = {known: each for known, each in self._known.items() if not _is_gone(known)}
                found = self._known[function] = LearnedFunction()
            return found


def _is_gone(function: Hashable) -> bool:
    """Whether the identity of a function names a module that is gone."""
    if isinstance(function, tuple):
        return any(map(_is_gone, function))
    return isinstance(function, weakref.ref) and function() is None
