"""A call of a function that is compared with a tape, and of which backward has only the tape run again.

NOTE [ How a call is followed ]

The function runs, under a mode that compares each operator with the tape's next one, and under hooks that give
autograd handles of what is to be computed. What the tape needs handed in is held: tensors from outside as they are, the
function's own tensors and what is preserved as was decided about them. When backward asks for the first handle, the
tape runs, and has what the other handles stand for, too; each lets go of its own when it is asked, or dies.

Where an operator, or what is saved, is not what the tape has next, the call is *lost*: what comes after is kept. What
came before stands as it is, for it hangs on nothing that came later.

Autograd owns the handles, these own the call, and that owns the handles of what is handed in. It owns no output.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.capture.handles import Handle, KeptHandle, check_version, unpack
from spillway.capture.hooks import Pass, in_backward
from spillway.capture.identity import ViewRecipe, reach
from spillway.records import Decision
from spillway.regions.generators import GeneratorState, state_of
from spillway.regions.globals import Globals, Numerics
from spillway.regions.outside import refuse_written
from spillway.regions.schema import argument, facts_of
from spillway.regions.tape import Base, Spot, Step, Tape
from spillway.regions.tensors import PLAIN, Tracker, aliases_of, below_modes, is_strided, storage_bytes, tensors_in
from spillway.regions.trace import is_cast, leaf_of
from spillway.runtime.bytes import Bytes

_RECOMPUTE, _KEEP = Decision.RECOMPUTE, Decision.KEEP

_SEQUENCES = (list, tuple)
_CAST = torch.ops.aten._to_copy.default
Rerunning = Callable[[], AbstractContextManager[object]]
"""A context around what runs again."""


def may_follow(tape: Tape, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what comes back of the function's tensors, if they leave, is all that the tape reads of their memory."""
    for tensor, value in zip(tensors, tape.inputs, strict=True):
        extent = tape.extents.get(value)
        if extent is not None:
            start, nbytes = reach(tensor, tensor.untyped_storage().nbytes())
            if extent[0] < start or extent[1] > start + nbytes:
                return False
    return True


class Followed:
    """One call. See NOTE [ How a call is followed ].

    Args:
        tape: what the function did before.
        passage: the pass that the call belongs to.
        inputs: what is done with the function's tensors; ``None``: what the hooks around do.
        aliases: whether what comes from outside may have been sent away by the pass.
        rerunning: a context around what runs again.
    """

    def __init__(
        self, tape: Tape, passage: Pass, inputs: Decision | None, *, aliases: bool, rerunning: Rerunning
    ) -> None:
        self._tape = tape
        self._passage = passage
        self._inputs = inputs
        self._aliases = aliases
        self._rerunning = rerunning
        self._globals = Globals.now()
        self._mode: _Following | None = None
        self._packed = 0
        self._lock = threading.Lock()
        self._given: dict[int, tuple[Handle, ViewRecipe]] = {}
        """What is handed in to the tape, by its values, and how it lay."""
        self._outside: dict[int, _FromOutside] = {}
        self._before: dict[int, torch.Tensor] = {}
        """Of what the function wrote when it was lost, all bytes as they were."""
        self._trackers: list[tuple[int, Tracker]] = []
        self._states: dict[int, GeneratorState] = {}
        self._handles: dict[int, weakref.ref[TapeHandle]] = {}
        """Of what is computed again, by its place."""
        self._results: dict[int, torch.Tensor] = {}

    def run(self, function: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, bool]:
        """What the function gives, and whether it did all that is on the tape, and nothing else.

        Args:
            function: the call.
            tensors: its tensors.
        """
        self._mode = mode = _Following(self._tape, tensors, self._states)
        try:
            with torch._C._DisableTorchDispatch():
                self._save_inputs(tensors)
            with saved_tensors_hooks(self._pack, unpack), mode:
                output = function()
            is_whole = not mode.is_lost and (mode.place, self._packed) == (len(self._tape.steps), len(self._tape.saved))
        finally:
            # Some of the graph may be used, even if the function has failed.
            with torch._C._DisableTorchDispatch():
                for value, (tensor, decision) in mode.held.items():
                    self._given[value] = self._passage.save(tensor, decision), ViewRecipe.of(tensor)
                self._outside.update(mode.outside)
                self._before, self._trackers = mode.before, mode.trackers
                self._passage.flush()
            # Autograd holds the pack hook for as long as what it packed.
            self._mode = None
        return output, is_whole

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        pack: Callable[[torch.Tensor], Handle] = KeptHandle
        if self._inputs is None:
            around = _top_saved_tensors_default_hooks(True)
            if around is not None:
                pack = around[0]
        elif self._inputs is not _KEEP:
            pack = self._passage.pack_to_leave
        needed, leave = self._tape.needed, pack is not KeptHandle
        for tensor, value in zip(tensors, self._tape.inputs, strict=True):
            # What leaves here is not held by what else autograd saves of it.
            if leave or value in needed:
                # Another name for a leaf: its memory may be another one by then, as plain PyTorch would not notice.
                handle = pack(tensor if leave else tensor.detach())
                if value in needed:
                    self._given[value] = handle, ViewRecipe.of(tensor)

    # What autograd saves.

    def _pack(self, tensor: torch.Tensor) -> Any:
        with below_modes(tensor):
            return self._pack_here(tensor)

    def _pack_here(self, tensor: torch.Tensor) -> Handle:
        mode, place = self._mode, self._packed
        self._packed += 1
        if mode is None or in_backward():
            # By somebody who goes through the graph within the call, and whom no tape knows of.
            if mode is not None:
                mode.is_lost = True
            return KeptHandle(tensor)
        self._passage.advance()
        if place >= len(self._tape.saved):
            mode.is_lost = True
        if mode.is_lost:
            return self._passage.save(tensor, _KEEP)
        spot, decision, is_parameter = self._tape.saved[place]
        if spot is None:
            return self._passage.alias(tensor) if self._aliases and not is_parameter else KeptHandle(tensor)
        if not mode.knows(tensor, spot):
            mode.is_lost = True
            return self._passage.save(tensor, _KEEP)
        if decision is not _RECOMPUTE:
            handle = self._passage.save(tensor, decision)
            held = mode.held.pop(spot.value, None)
            if held is not None:
                self._given[spot.value] = self._passage.another(handle, *held), ViewRecipe.of(held[0])
            return handle
        computed = TapeHandle(self, place, tensor, spot.view, self._passage.nothing(spot.view.device))
        self._handles[place] = weakref.ref(computed)
        return computed

    # What is computed again.

    def compute(self, place: int) -> torch.Tensor:
        """What autograd saved at a place."""
        with self._lock:
            result = self._results.pop(place, None)
            if result is None:
                self._play()
                result = self._results.pop(place)
            return result

    def forget(self, place: int) -> None:
        """Nobody will ask for it."""
        # Without the lock: a handle may die within what holds it.
        self._results.pop(place, None)

    def _play(self) -> None:
        mode = self._mode
        if mode is not None:
            # Within the function itself: what it has come to is there.
            self._outside.update(mode.outside)
            self._before = mode.before
        alive = [place for place, handle in self._handles.items() if handle() is not None]
        wanted = None if len(alive) == self._tape.computed else sorted(alive)
        lost = {value for value, (handle, _) in self._given.items() if not handle.is_intact()}
        lost.update(value for value, tracker in self._trackers if tracker.was_written)
        lost.difference_update(self._tape.inputs)
        made: list[torch.Tensor] = []

        def give(place: int, tensor: torch.Tensor) -> None:
            handle = self._handles.get(place)
            if handle is not None and handle() is not None:
                self._results[place] = tensor
                made.append(tensor)

        self._passage.was_recomputed = True
        self._passage.ledger.note_unused(self._tape.unused)
        with torch._C._DisableTorchDispatch() if mode is not None else self._rerunning(), self._globals.in_force():
            self._tape.play(self._tape.runs(wanted, lost), self._base, self._states, give)
        self._passage.ledger.recomputed_bytes += storage_bytes(made)

    def _base(self, value: int) -> Base:
        """Memory that the tape does not make."""
        before = self._before.get(value)
        if before is not None:
            return Base(before.untyped_storage())
        given = self._given.get(value)
        if given is not None:
            handle, view = given
            tensor = handle.unpack()
            low = (view.offset - int(tensor.storage_offset())) * view.dtype.itemsize
            return Base(tensor.untyped_storage(), low)
        if self._mode is not None and value in self._mode.held:
            return Base(self._mode.held[value][0].untyped_storage())
        return Base(self._outside[value].tensor().untyped_storage())


class TapeHandle:
    """Stands for a tensor that is computed again when it is asked for."""

    __slots__ = ("__weakref__", "_call", "_place", "_tracker", "_version", "_view")

    def __init__(
        self, call: Followed, place: int, tensor: torch.Tensor, view: ViewRecipe, nothing: torch.Tensor
    ) -> None:
        # What the finaliser reads comes first.
        self._call = call
        self._place = place
        self._view = view
        self._version = tensor._version
        self._tracker = tensor.detach()
        self._tracker.data = nothing

    def unpack(self) -> torch.Tensor:
        if self._tracker._version != self._version:
            check_version(self._tracker, self._version, self._view)
        return self._call.compute(self._place)

    def is_intact(self) -> bool:
        return self._tracker._version == self._version

    def __del__(self) -> None:
        self._call.forget(self._place)


class _FromOutside:
    """A tensor that the function read and did not make."""

    __slots__ = ("_dtype", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        node = tensor.grad_fn
        cast = node is not None and node.name() == "ToCopyBackward0" and tensor._base is None
        leaf = leaf_of(node) if cast and node is not None else None
        if leaf is not None and (leaf.stride() != tensor.stride() or leaf.device != tensor.device):
            leaf = None
        self._dtype = tensor.dtype
        """What autocast has cast is dropped, and cast again."""
        # Not the tensor itself: a leaf may be given other memory by then, as plain PyTorch would not notice either.
        self._tensor = aliases_of([tensor if leaf is None else leaf])[0]
        self._version = -1 if tensor.is_inference() else self._tensor._version

    def tensor(self) -> torch.Tensor:
        if self._version != -1 and self._tensor._version != self._version:
            refuse_written(self._tensor, self._version)
        return self._tensor if self._tensor.dtype is self._dtype else self._tensor.to(self._dtype)


class _Following(TorchDispatchMode):
    """Compares operators with a tape's.

    Args:
        tape: these.
        inputs: what the function is called with.
        states: takes the states of generators before steps that draw.
    """

    supports_higher_order_operators = True

    def __init__(self, tape: Tape, inputs: Sequence[torch.Tensor], states: dict[int, GeneratorState]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = tape.steps
        self._states = states
        self.place = 0
        """How many of the tape's operators have run."""
        self.is_lost = False
        """Whether something else was done than is on the tape."""
        self.held: dict[int, tuple[torch.Tensor, Decision]] = {}
        """What is preserved and was not saved yet, with what becomes of it."""
        self.outside: dict[int, _FromOutside] = {}
        self.before: dict[int, torch.Tensor] = {}
        """Of what was written since, all bytes as they were."""
        self.trackers: list[tuple[int, Tracker]] = []
        """Of preserved values, tensors that autograd does not know to share their memory."""
        self._preserved: set[int] = set()
        self._tape = tape
        self._met: set[int] = set()
        """Values from outside that were read."""
        self._memory: list[Callable[[], torch.UntypedStorage | None]] = [_nothing] * tape.count
        """Of each value, if it is known."""
        for tensor, value in zip(inputs, tape.inputs, strict=True):
            self._memory[value] = weakref.ref(tensor.untyped_storage())

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a wrapper against Dynamo around each operator: see ``dynamo.py``."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled function does inside is one operator's business."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_lost:
            return self._unfollowed(func, args, kwargs or {})
        place = self.place
        step = self._steps[place] if place < len(self._steps) else None
        if func is _CAST and is_cast(args):
            return func(*args, **(kwargs or {}))
        if step is None or step.func is not func:
            facts = facts_of(func)
            if facts.ignored or facts.is_label:
                return func(*args, **(kwargs or {}))
            return self._unfollowed(func, args, kwargs or {})
        if not self._is_like(step, args, kwargs):
            return self._unfollowed(func, args, kwargs or {})
        if step.is_random:
            self._states[place] = state_of(args, kwargs or {})
        output = func(*args, **kwargs) if kwargs else func(*args)
        self.place = place + 1
        if step.makes:
            self._made(step, output)
        elif step.renames in self._preserved:
            self.trackers.append((step.renames, Tracker(output)))
        return output

    def _unfollowed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Something that is on no tape. What it writes, the tape may have read: that is copied first."""
        self.is_lost = True
        for key in facts_of(func).writes:
            for tensor in tensors_in((argument(args, kwargs, key),)):
                self._keep_bytes(tensor)
        return func(*args, **kwargs)

    def _keep_bytes(self, tensor: torch.Tensor) -> None:
        if not is_strided(tensor):
            return
        storage = tensor.untyped_storage()
        for value in self._tape.needed:
            if value not in self.before and self._memory[value]() is storage:
                with torch._C._DisableTorchDispatch():
                    self.before[value] = Bytes(storage, 0, storage.nbytes()).tensor().clone()

    def knows(self, tensor: Any, spot: Spot) -> bool:
        """Whether it is a tensor in a value's memory, as the tape says that it lies there."""
        if (type(tensor) is not torch.Tensor and type(tensor) not in PLAIN) or not is_strided(tensor):
            return False
        return (
            self._memory[spot.value]() is tensor.untyped_storage()
            and tensor.shape == spot.size
            and tensor.stride() == spot.stride
            and tensor.storage_offset() == spot.offset
            and tensor.dtype is spot.dtype
        )

    def _is_like(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether the step was given the same."""
        if len(args) != len(step.args) or len(kwargs or ()) != len(step.kwargs):
            return False
        for place, spot in step.spots:
            if not (self.knows(args[place], spot) or self._meets(args[place], spot)):
                return False
        for place, want in step.constants:
            if not _same(args[place], want):
                return False
        for place, parts in step.lists:
            given = args[place]
            if type(given) not in _SEQUENCES or len(given) != len(parts):
                return False
            for arg, part in zip(given, parts, strict=True):
                known = (self.knows(arg, part) or self._meets(arg, part)) if type(part) is Spot else _same(arg, part)
                if not known:
                    return False
        if kwargs:
            for name, want in step.kwargs.items():
                if name not in kwargs or not _same(kwargs[name], want):
                    return False
        return step.numerics is None or step.numerics == Numerics.now()

    def _meets(self, tensor: Any, spot: Spot) -> bool:
        """Whether it comes from outside, and is read for the first time. Whatever it is: it is what the tape gets."""
        value = spot.value
        if value not in self._tape.outside or value in self._met or type(tensor) not in PLAIN:
            return False
        if not is_strided(tensor) or ViewRecipe.of(tensor) != spot.view:
            return False
        self._met.add(value)
        if value in self._tape.needed:
            self.outside[value] = _FromOutside(tensor)
        self._memory[value] = weakref.ref(tensor.untyped_storage())
        return True

    def _made(self, step: Step, output: Any) -> None:
        outputs = (output,) if step.single else output
        if type(outputs) not in _SEQUENCES:
            self.is_lost = True
            return
        for index, spot in step.makes:
            tensor = outputs[index] if index < len(outputs) else None
            if type(tensor) is not torch.Tensor or not is_strided(tensor):
                self.is_lost = True
                return
            self._memory[spot.value] = weakref.ref(tensor.untyped_storage())
            if step.decision is not _RECOMPUTE:
                self._preserved.add(spot.value)
                self.held[spot.value] = aliases_of([tensor])[0], step.decision


def _same(arg: Any, want: Any) -> bool:
    """Whether two arguments without tensors are the same to the letter: 0.0 is not -0.0, nor is 1 True."""
    if arg is want:
        return True
    kind = type(want)
    if kind is list:
        alike = type(arg) in _SEQUENCES and len(arg) == len(want)
        return alike and all(x is y or _same(x, y) for x, y in zip(arg, want, strict=True))
    return type(arg) is kind and arg == want and (kind is int or repr(arg) == repr(want))


def _nothing() -> None:
    return None
