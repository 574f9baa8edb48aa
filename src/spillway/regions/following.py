"""Compares the operators of a call with those on a tape: see NOTE [ How a call is followed ] in ``followed.py``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spillway.capture.identity import ViewRecipe
from spillway.records import Decision
from spillway.regions.generators import GeneratorState, state_of
from spillway.regions.globals import Numerics
from spillway.regions.mode import OperatorMode
from spillway.regions.outside import refuse_written
from spillway.regions.schema import argument, facts_of
from spillway.regions.steps import Spot, Step
from spillway.regions.tape import Tape
from spillway.regions.tensors import PLAIN, Tracker, aliases_of, is_strided, tensors_in
from spillway.regions.trace import is_cast, leaf_of
from spillway.runtime.bytes import Bytes

_SEQUENCES = (list, tuple)
_CAST = torch.ops.aten._to_copy.default


class FromOutside:
    """A tensor that the function read and did not make.

    Args:
        tensor: as it was read.
        is_cast: whether a leaf was cast to it within the call: an older cast may be of other bytes than the leaf has.
    """

    __slots__ = ("_dtype", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor, *, is_cast: bool) -> None:
        node = tensor.grad_fn if is_cast else None
        leaf = leaf_of(node) if node is not None and node.name() == "ToCopyBackward0" else None
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


class Following(OperatorMode):
    """Compares operators with a tape's.

    Args:
        tape: these.
        inputs: what the function is called with.
        states: takes the states of generators before steps that draw.
    """

    def __init__(self, tape: Tape, inputs: Sequence[torch.Tensor], states: dict[int, GeneratorState]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps = tape.steps
        self._states = states
        self.place = 0
        """How many of the tape's operators have run."""
        self.is_lost = False
        """Whether something else was done than is on the tape."""
        self.held: dict[int, tuple[torch.Tensor, Decision]] = {}
        """What is preserved for what runs again and was not saved yet, with what becomes of it."""
        self.outside: dict[int, FromOutside] = {}
        self.before: dict[int, torch.Tensor] = {}
        """Of what was written since, all bytes as they were."""
        self.trackers: list[tuple[int, Tracker]] = []
        """Of preserved values, tensors that autograd does not know to share their memory."""
        self._tape = tape
        self._handed = tape.handed
        self._met: set[int] = set()
        """Values from outside that were read."""
        self._casts: list[weakref.ref[torch.UntypedStorage]] = []
        """What leaves were cast to."""
        self._memory: list[Callable[[], torch.UntypedStorage | None]] = [nothing] * tape.count
        """Of each value, if it is known."""
        self._made: list[Callable[[], torch.Tensor | None]] = [nothing] * tape.count
        """Of each value, what the operator gave that made it: who reads the same tensor need not be looked at twice."""
        for tensor, value in zip(inputs, tape.inputs, strict=True):
            self._memory[value] = weakref.ref(tensor.untyped_storage())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_lost:
            return self._unfollowed(func, args, kwargs or {})
        place = self.place
        step = self._steps[place] if place < len(self._steps) else None
        if func is _CAST and is_cast(args):
            output = func(*args, **(kwargs or {}))
            if is_strided(output):
                self._casts.append(weakref.ref(output.untyped_storage()))
            return output
        if step is None or step.func is not func:
            facts = facts_of(func)
            if facts.ignored or facts.is_label:
                return func(*args, **(kwargs or {}))
            return self._unfollowed(func, args, kwargs or {})
        if not self._is_like(step, args, kwargs):
            return self._unfollowed(func, args, kwargs or {})
        output = self._run(place, step, args, kwargs)
        self.place = place + 1
        if step.makes:
            self._take(step, output)
        elif step.renames in self._handed:
            self.trackers.append((step.renames, Tracker(output)))
        return output

    def _run(self, place: int, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """What an operator gives that is the tape's next one."""
        if step.is_random:
            self._states[place] = state_of(args, kwargs or {})
        return step.func(*args, **kwargs) if kwargs else step.func(*args)

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
        for value in (*self._tape.needed, *self.held):
            if value not in self.before and self._memory[value]() is storage:
                with torch._C._DisableTorchDispatch():
                    self.before[value] = Bytes(storage, 0, storage.nbytes()).tensor().clone()

    def knows(self, tensor: Any, spot: Spot) -> bool:
        """Whether it is a tensor in a value's memory, as the tape says that it lies there."""
        return (
            type(tensor) in PLAIN
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and self._memory[spot.value]() is tensor.untyped_storage()
            and tensor.shape == spot.size
            and tensor.stride() == spot.stride
            and tensor.storage_offset() == spot.offset
            and tensor.dtype is spot.dtype
        )

    def _is_like(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether the step was given the same."""
        if len(args) != len(step.args):
            return False
        for place, spot in step.spots:
            tensor = args[place]
            if spot.is_made and self._made[spot.value]() is tensor:
                continue
            if not (self.knows(tensor, spot) or self._meets(tensor, spot)):
                return False
        for place, want in step.constants:
            arg = args[place]
            if arg is not want and not _same(arg, want):
                return False
        for place, parts in step.lists:
            given = args[place]
            if type(given) not in _SEQUENCES or len(given) != len(parts):
                return False
            for arg, part in zip(given, parts, strict=True):
                known = (self.knows(arg, part) or self._meets(arg, part)) if type(part) is Spot else _same(arg, part)
                if not known:
                    return False
        if kwargs or step.kwargs:
            kwargs = kwargs or {}
            if kwargs.keys() != step.kwargs.keys():
                return False
            for name, want in step.kwargs.items():
                if not _same(kwargs[name], want):
                    return False
        return step.numerics is None or self._is_set_for(step.numerics)

    def _is_set_for(self, numerics: Numerics) -> bool:
        """Whether a step that ran under these settings would be the same now."""
        return numerics == Numerics.now()

    def _meets(self, tensor: Any, spot: Spot) -> bool:
        """Whether it comes from outside, and is read for the first time. Whatever it is: it is what the tape gets."""
        value = spot.value
        if value not in self._tape.outside or value in self._met or type(tensor) not in PLAIN:
            return False
        if not is_strided(tensor) or ViewRecipe.of(tensor) != spot.view:
            return False
        self._met.add(value)
        if value in self._tape.needed:
            storage = tensor.untyped_storage()
            is_cast = tensor._base is None and any(cast() is storage for cast in self._casts)
            self.outside[value] = FromOutside(tensor, is_cast=is_cast)
        self._memory[value] = weakref.ref(tensor.untyped_storage())
        return True

    def _take(self, step: Step, output: Any) -> None:
        """The step has made this."""
        outputs = (output,) if step.single else output
        if type(outputs) not in _SEQUENCES:
            self.is_lost = True
            return
        for index, spot in step.makes:
            tensor = outputs[index] if index < len(outputs) else None
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
                self.is_lost = True
                return
            value = spot.value
            self._memory[value] = weakref.ref(tensor.untyped_storage())
            if value in self._handed:
                self.held[value] = aliases_of([tensor])[0], step.decision
            self._made[value] = weakref.ref(tensor)


def _same(arg: Any, want: Any) -> bool:
    """Whether two arguments without tensors are the same to the letter: 0.0 is not -0.0, nor is 1 True."""
    kind = type(want)
    if kind is list:
        return type(arg) in _SEQUENCES and len(arg) == len(want) and all(map(_same, arg, want))
    if type(arg) is not kind or arg != want:
        return False
    # Of what is equal, and no zero, there is one way to write it.
    return kind is int or (kind is float and want != 0) or repr(arg) == repr(want)


def nothing() -> None:
    """In place of a reference to what is not known."""
