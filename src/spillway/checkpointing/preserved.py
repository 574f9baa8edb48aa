"""What is preserved of one checkpointed call.

NOTE [ Preserved tensors ]

Which tensors are preserved is known by their numbers, once the first replay has recorded the program of such calls
(``recorder.py``). Of each value the whole tensor that an operator gave is kept or offloaded. Each saved tensor that
lies in it has a handle of its own, and so has the replay, if it is handed the value: what is offloaded stays on the
device, once it was reloaded, until each handle was asked for it.

A call may do something else than its program. So each tensor must lie in its memory as the program says, and two
tensors that are one value there must have one memory here. If not, the call drops what comes after it and is replayed
whole, and the next call is recorded anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass
from spillway.capture.identity import ViewRecipe
from spillway.capture.keeping import Keeping
from spillway.checkpointing.decisions import Decisions, Input, Preserved, PreservedParts
from spillway.checkpointing.program import lies_within
from spillway.records import Decision
from spillway.regions.tensors import PLAIN, below_modes, is_strided, tensors_in

_KEEP = Decision.KEEP
_weak = weakref.ref
Memory = Callable[[], torch.UntypedStorage | None]
Argument = tuple[Any, Callable[[Any], torch.Tensor], bool, bool]
"""One of the function's tensors: its handle, how to unpack it, whether it requires grad, and whether it is written."""


class PreservedTensors:
    """What is preserved of one call. See NOTE [ Preserved tensors ].

    Args:
        decisions: what is preserved of such calls.
        passage: the forward scope that the call belongs to.
        tensors: the function's tensors.
        arguments: the same, as the call holds them. Empty: they are split over ranks.
    """

    def __init__(
        self, decisions: Decisions, passage: Pass, tensors: Sequence[torch.Tensor], arguments: Sequence[Argument]
    ) -> None:
        self.decisions = decisions
        self.is_other = False
        """Whether the call saved something else than its program says."""
        self._passage = passage
        self._arguments = arguments
        self._inputs: list[tuple[ViewRecipe, Memory] | None] = [
            (ViewRecipe.of(each), _weak(each.untyped_storage())) if type(each) in PLAIN and is_strided(each) else None
            for each in tensors
        ]
        """Where the function's tensors lie in their memory, and that memory."""
        self._given: dict[int, Handle] = {}
        """Handles, by values."""
        self._memory: dict[int, Memory] = {}
        """In forward, the memory of what is preserved."""
        self._keeping = Keeping(passage)

    def pack(self, tensor: torch.Tensor, number: int) -> Handle | None:
        """A handle of a saved tensor; ``None``: it is dropped."""
        saved = self.decisions.saved
        how = saved[number] if number < len(saved) else False
        if how is False or self.is_other:
            return None
        if how is True and type(tensor) in PLAIN:
            return KeptHandle(tensor)
        if isinstance(how, PreservedParts):
            handle = self._pack_parts(tensor, how)
        else:
            handle = None if isinstance(how, bool) else self._pack(tensor, how)
        if handle is None and not (isinstance(how, Input) and not self._arguments):
            self.is_other = True
        return handle

    def _pack_parts(self, tensor: torch.Tensor, how: PreservedParts) -> Handle | None:
        plain = [part for part in tensors_in((tensor,)) if type(part) in PLAIN and is_strided(part)]
        if len(plain) != len(how.parts) or type(tensor) in PLAIN:
            return None
        if not all(self._pack(part, each) for part, each in zip(plain, how.parts, strict=True)):
            return None
        with below_modes(tensor):
            # Its parts are known by now.
            return self._passage.save(tensor, how.parts[0].decision)

    def _pack(self, tensor: torch.Tensor, how: Preserved | Input) -> Handle | None:
        recipe = how.recipe
        if type(tensor) not in PLAIN or tensor.shape != recipe.size or tensor.dtype is not recipe.dtype:
            return None
        if not recipe.is_of(tensor):
            return None
        return self._pack_input(tensor, how) if isinstance(how, Input) else self._pack_made(tensor, how)

    def _pack_input(self, tensor: torch.Tensor, how: Input) -> Handle | None:
        if not self._arguments:
            return None
        handle, back, _, is_written = self._arguments[how.place]
        known = self._inputs[how.place]
        if is_written or known is None or known[1]() is not tensor.untyped_storage():
            return None
        if not lies_within(how.recipe, known[0]):
            return None
        if type(handle) is KeptHandle:
            return KeptHandle(tensor)
        with below_modes():
            return self._passage.twin(handle, tensor) or ViewHandle(handle, known[0], how.recipe, back)

    def _pack_made(self, tensor: torch.Tensor, how: Preserved) -> Handle | None:
        value, whole = how.value, how.whole
        with below_modes():
            storage = tensor.untyped_storage()
            handle = self._given.get(value)
            if handle is None:
                self._memory[value] = _weak(storage)
                made = tensor if whole is how.recipe else view_of(tensor.detach(), whole, whole.offset)
                if how.decision is _KEEP:
                    handle = self._keeping.keep(made, value, self.decisions.kept_bytes)
                else:
                    self._passage.advance()
                    handle = self._passage.save_made(made, whole, how.decision)
                self._given[value] = handle
            elif self._memory[value]() is not storage:
                return None
            if type(handle) is KeptHandle:
                return KeptHandle(tensor)
            return self._passage.twin(handle, tensor) or ViewHandle(handle, whole, how.recipe, unpack)

    def forward_ended(self, output: Any, count: int) -> None:
        """The function has given this, or has failed, and autograd has saved so many tensors."""
        self._keeping.end(output)
        self._memory.clear()
        self._inputs.clear()
        self._arguments = ()
        if count != len(self.decisions.saved):
            self.is_other = True
        handed = set() if self.is_other else self.decisions.handed
        self._given = {value: handle for value, handle in self._given.items() if value in handed}

    def take(self) -> dict[int, Handle] | None:
        """The handles for a partial replay, which are not held here any more; ``None``: there can be none."""
        given, self._given = self._given, {}
        if self.is_other or not self.decisions.leaves_out or not given.keys() >= self.decisions.handed:
            return None
        return given if all(handle.is_intact() for handle in given.values()) else None


class ViewHandle:
    """Stands for a view of the tensor that another handle stands for.

    Args:
        handle: of the whole tensor.
        whole: where that lay in its memory when it was saved.
        recipe: where the view lies.
        back: gives the whole tensor for the handle.
    """

    __slots__ = ("_back", "_handle", "_recipe", "_start")

    def __init__(
        self, handle: Handle | Any, whole: ViewRecipe, recipe: ViewRecipe, back: Callable[[Any], torch.Tensor]
    ) -> None:
        self._handle = handle
        self._back = back
        self._recipe = recipe
        self._start = recipe.offset - whole.offset

    def unpack(self) -> torch.Tensor:
        whole = self._back(self._handle)
        with below_modes(whole):
            return view_of(whole.detach(), self._recipe, int(whole.storage_offset()) + self._start)

    def is_intact(self) -> bool:
        """Whether it was not written since, as far as versions tell."""
        return bool(self._handle.is_intact())


def view_of(tensor: torch.Tensor, recipe: ViewRecipe, offset: int) -> torch.Tensor:
    """A view of a tensor without history, on its counter of versions, that begins there in its memory."""
    return tensor.as_strided(recipe.size, recipe.stride, offset)
