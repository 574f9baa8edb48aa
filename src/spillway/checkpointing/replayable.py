"""A call that can be replayed: it holds all that the function read in forward, until backward is through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks

from spillway.capture.handles import KeptHandle, unpack
from spillway.capture.hooks import Pass
from spillway.checkpointing.ambient import Ambience, drawing, generators_of, states_of
from spillway.checkpointing.checks import Verdicts, has_content_of, prints_of
from spillway.checkpointing.function import ReplayedFunction
from spillway.checkpointing.learned import Learned
from spillway.checkpointing.partition import PartHandle, Partition
from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.reached import ReachedTensors, RefusedTensor, Refusing, copy_of, overlap
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided
from spillway.records import Decision

_KEEP = Decision.KEEP
HasRun = Callable[[Iterable[torch.Tensor]], None]
Within = Callable[[HasRun], AbstractContextManager[None]]
"""Makes the context that goes around the function's code in a replay. What it is given is called when that has run, and
before reached tensors get their content of now back, with those that the code may have written."""


class ReplayableCall:
    """One call of a function with what a replay needs: arguments, Python state, settings and random generators.

    Args:
        function: the function with its arguments and its Python state; called with the tensors among the arguments.
        state: the Python state before the call.
        learned: what earlier calls of this kind taught.
        passage: the forward scope that the call belongs to: counts bytes, and offloads inputs if asked to.
        inputs: what is done with the tensors among the arguments; ``None``: what the hooks around the call do.
        verdicts: takes comparisons whose outcome the device has yet to tell.
        label: names the function in messages.
        draws: whether the replay draws the random numbers of forward.
        compares: whether the values of each call are compared, and not only of samples.
        is_captured: whether the call is captured into a graph, where nothing is compared.
        partition: how tensors among the arguments are split over ranks; ``None``: not at all.
        unused: selectors that choose nothing, for a note.
    """

    def __init__(
        self,
        function: ReplayedFunction,
        state: PythonState,
        learned: Learned,
        passage: Pass,
        inputs: Decision | None,
        verdicts: Verdicts,
        *,
        label: str,
        draws: bool,
        compares: bool = False,
        is_captured: bool = False,
        partition: Partition | None = None,
        unused: Sequence[object] = (),
    ) -> None:
        self._function = function
        self._state = state
        self._learned = learned
        self._passage = passage
        self._inputs = inputs
        self._verdicts = verdicts
        self._label = label
        self._draws = draws
        self._partition = partition
        self._unused = unused
        self._is_captured = is_captured
        self._is_observed = learned.begins() and not is_captured
        """Whether it is observed in full: see NOTE [ Learning ]."""
        self._compares = not is_captured and (compares or self._is_observed or learned.is_sampled())
        self._ambience = Ambience.now()
        self._restore: Callable[[], None] = _nothing
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        """In an observed call: random generators with their states when forward began."""
        self._devices: set[torch.device] = set()
        self._tensors: list[tuple[Any, Callable[[Any], torch.Tensor], bool, bool]] = []
        """Of each tensor among the arguments: its handle, how to unpack it, whether it requires grad, and whether the
        function writes it in place."""
        self._gathered: list[torch.Tensor] = []
        """With a partition, in a replay: these tensors."""
        self._copies: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        """In an observed call: copies of these tensors and their versions, until forward has ended."""
        self._odd: torch.Tensor | None = None
        """A tensor of a subclass among what the function reads, if there is one: its own code runs, without modes."""
        self._output_prints: list[torch.Tensor | None] = []
        """Fingerprints of what forward gave, where values are compared."""
        self._reached: ReachedTensors
        """What the function can reach besides its arguments."""

    # Forward.

    def _may_begin(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the call can be replayed. Earlier comparisons are looked at."""
        if not self._is_captured:
            self._verdicts.send()
            self._verdicts.read()
        written = self._learned.written_inputs
        if not (written and overlap(tensors, written)):
            return True
        # Copies would be apart from each other.
        self._passage.ledger.note(
            f"{self._label} writes an argument that shares memory with another one. What autograd saves in it is kept, "
            f"not recomputed."
        )
        return False

    def _forward_begins(self, tensors: Sequence[torch.Tensor]) -> None:
        """Hold what a replay needs, before the function runs."""
        observed = self._is_observed
        self._devices = {tensor.device for tensor in tensors}
        if self._draws:
            generators = generators_of(self._devices)
            self._restore = states_of(generators)
            if observed:
                self._states = [(each, each.get_state()) for each in generators]
        named = self._state.reachable()
        read = [*tensors, *(each for _, each in named)]
        if not PLAIN.issuperset(map(type, read)):
            self._odd = next(each for each in read if type(each) not in PLAIN)
        with below_modes(self._odd):
            self._save_inputs(tensors)
            self._reached = ReachedTensors(
                named, self._learned, self._odd, is_observed=observed, is_compared=self._compares
            )
            self._passage.flush()
        if observed:
            self._versions = [-1 if tensor.is_inference() else tensor._version for tensor in tensors]

    def _forward_ended(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Settle what forward wrote, after the function has run or raised."""
        if self._compares:
            self._output_prints = prints_of(output)
        self._reached.forward_ended()
        if self._is_observed:
            self._learn(output, tensors)
        if self._learned.state:
            self._note_state()
        self._passage.flush()

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the arguments saved, and copied in an observed call."""
        around = _top_saved_tensors_default_hooks(True)
        passage, is_light = self._passage, False
        pack: Callable[[torch.Tensor], Any] = KeptHandle
        back: Callable[[Any], torch.Tensor] = unpack
        if self._inputs is not None and self._inputs is not _KEEP:
            pack = passage.pack_to_leave
        elif self._inputs is None and around is not None:
            pack, back = around
            if getattr(pack, "__self__", None) is passage and passage.keeps_the_rest:
                # What needs no gradient is mostly alive anyway: to count it is not worth the time.
                pack, is_light = passage.keep, True
        written = self._learned.written_inputs
        self._copies = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            if place in written:
                # What is saved is what it was before.
                copy = copy_of(tensor)
                self._tensors.append((KeptHandle(copy), unpack, tensor.requires_grad, True))
                continue
            if self._partition is not None and self._partition.splits(tensor):
                part = PartHandle(tensor, self._partition, pack, back, passage.nothing(tensor.device))
                self._tensors.append((part, unpack, tensor.requires_grad, False))
            else:
                handle = KeptHandle(tensor) if is_light and not tensor.requires_grad else pack(tensor)
                self._tensors.append((handle, back, tensor.requires_grad, False))
            if self._is_observed:
                self._copies[place] = copy_of(tensor)

    def _learn(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        """An observed call has ended: see NOTE [ Learning ]."""
        learned = self._learned
        learned.draws |= any(not torch.equal(a.get_state(), b) for a, b in self._states)
        learned.state = tuple(dict.fromkeys((*learned.state, *self._state.changed())))
        for place, tensor in enumerate(tensors):
            copy, version = self._copies[place], self._versions[place]
            if copy is None or version == -1:
                continue
            if tensor._version != version or not has_content_of(tensor, copy):
                learned.written_inputs |= {place}
                self._tensors[place] = (KeptHandle(copy), unpack, tensor.requires_grad, True)
        self._copies.clear()

    def _note_state(self) -> None:
        names = self._learned.state
        self._passage.ledger.note(
            f"{self._label}: its forward changes Python state ({', '.join(names[:4])}"
            f"{' and more' if len(names) > 4 else ''}). Each recomputation starts from the state before the forward, "
            f"and puts the later state back."
        )

    # Backward.

    def _replay_begins(self) -> None:
        self._passage.was_recomputed = True
        self._passage.ledger.note_unused(self._unused)

    def _inputs_back(self) -> list[torch.Tensor]:
        """The tensors among the arguments.

        Ranks gather theirs once in a replay, since one of them may run the function more often than another.
        """
        if self._partition is None:
            return [back(handle) for handle, back, *_ in self._tensors]
        if not self._gathered:
            self._gathered = [back(handle) for handle, back, *_ in self._tensors]
        return self._gathered

    def _replay_ended(self) -> None:
        self._gathered = []

    @contextmanager
    def _as_of_forward(
        self, tensors: Sequence[torch.Tensor], changed: Sequence[tuple[torch.Tensor, int]]
    ) -> Iterator[Within]:
        """A context with the settings and random generators of forward, for a replay.

        Args:
            tensors: the function's tensors.
            changed: what was written since forward, and must not be read.

        Raises:
            RecomputeError: if the function has read it.
        """
        asked: list[RefusedTensor] = []
        may_go = self._state.replaceable() if changed else set()
        refused = {id(each): RefusedTensor.of(each, v, asked) for each, v in changed if _may_be_refused(each, may_go)}
        others = [pair for pair in changed if id(pair[0]) not in refused]
        refusing = Refusing(others) if others else None
        with drawing:
            restore = states_of(generators_of(self._devices)) if self._draws else _nothing
            try:
                self._restore()
                with (
                    self._ambience.in_force(),
                    torch.enable_grad(),
                    nullcontext() if refusing is None else refusing,
                ):
                    yield partial(self._as_before, tensors, refused)
            finally:
                restore()
        if refusing is not None:
            refusing.check()
        for each in asked:
            each.refuse()

    @contextmanager
    def _as_before(
        self, tensors: Sequence[torch.Tensor], refused: dict[int, RefusedTensor], has_run: HasRun
    ) -> Iterator[None]:
        """A context around the function's code, in which reached tensors have the content from before forward."""
        state, reached = self._state, self._reached
        sole = state.sole_buffers() if reached.may_be_written else set()
        with reached.as_before(sole, tensors) as others, state.swapped(others), state.replaced(refused):
            try:
                yield
            finally:
                # What was saved of them is compared before they are put back.
                has_run(chain(others.values(), reached.protected()))


def _nothing() -> None:
    return None


def _may_be_refused(tensor: torch.Tensor, replaceable: set[int]) -> bool:
    """Whether a stand-in can take its place: see NOTE [ What was written since forward ]."""
    return id(tensor) in replaceable and type(tensor) in PLAIN and is_strided(tensor)
