"""How far a call has come along a tape: see NOTE [ How a call is followed ] in ``followed.py``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spillway.capture.identity import ViewRecipe
from spillway.records import Decision
from spillway.regions.generators import GeneratorState
from spillway.regions.outside import refuse_written
from spillway.regions.schema import argument, facts_of
from spillway.regions.steps import Spot
from spillway.regions.tape import Tape
from spillway.regions.tensors import PLAIN, Tracker, aliases_of, is_strided, tensors_in
from spillway.regions.trace import leaf_of
from spillway.runtime.bytes import Bytes


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


class Progress:
    """How far a call has come along a tape, and what of it is at hand.

    Args:
        tape: what the function did before.
        inputs: what it is called with.
        states: takes the states of generators before steps that draw.
    """

    def __init__(self, tape: Tape, inputs: Sequence[torch.Tensor], states: dict[int, GeneratorState]) -> None:
        super().__init__()
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
        for tensor, value in zip(inputs, tape.inputs, strict=True):
            self._memory[value] = weakref.ref(tensor.untyped_storage())

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

    def is_as_held(self, value: int) -> bool:
        """Whether what is held of a value was not written since."""
        return value not in self.before

    def write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What an operator gives that is on no tape. What it writes, the tape may have read: that is copied first."""
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

    def _meets(self, tensor: Any, spot: Spot) -> bool:
        """Whether it comes from outside, and is read for the first time. Whatever it is: it is what the tape gets."""
        value = spot.value
        if value not in self._tape.outside or value in self._met or type(tensor) not in PLAIN:
            return False
        if not is_strided(tensor) or ViewRecipe.of(tensor) != spot.view:
            return False
        self._met.add(value)
        storage = tensor.untyped_storage()
        if value in self._tape.needed:
            is_cast = bool(self._casts) and tensor._base is None and any(cast() is storage for cast in self._casts)
            self.outside[value] = FromOutside(tensor, is_cast=is_cast)
        self._memory[value] = weakref.ref(storage)
        return True


def nothing() -> None:
    """In place of a reference to what is not known."""
