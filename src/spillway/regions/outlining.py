"""Writes a tape's outline, from a call whose operators are compared with the tape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodDescriptorType, MethodWrapperType, NoneType
from types import WrapperDescriptorType as SlotType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from spillway.capture.identity import ViewRecipe
from spillway.regions.following import Following
from spillway.regions.globals import Ambience
from spillway.regions.outline import PASSES, Line, Outline, Role, settings_now
from spillway.regions.steps import Spot
from spillway.regions.tape import Tape
from spillway.regions.tensors import PLAIN, is_strided

_CALLABLES = (
    *(BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, SlotType),
    *(FunctionType, OpOverload, OpOverloadPacket),
)
_CONSTANTS = frozenset(
    (
        *(int, float, bool, complex, str, NoneType, EllipsisType),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    )
)
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled


class _Unfit(Exception):  # noqa: N818  (no error of anybody's: there is no outline)
    """What was seen does not say all that the function does."""


class Outlining(TorchFunctionMode):
    """Sees which of torch's functions a call calls, beside a mode that compares its operators with a tape.

    Args:
        tape: what is compared with.
        mode: compares.
        inputs: what the function is called with.
    """

    def __init__(self, tape: Tape, mode: Following, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tape = tape
        self._mode = mode
        self._ambience = Ambience.now()
        self._is_fit = not _any_autocast()
        self._lines: list[Line] = []
        self._place = 0
        """How many of the tape's operators are told."""
        self._versions: list[int] = []
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Role]] = {}
        """By the identities of tensors: these, their versions, and their roles."""
        self._met = set(tape.inputs)
        """Values that a role lies in."""
        self._inputs: list[Role] = []
        try:
            self._inputs += [self._add(tensor, value) for tensor, value in zip(inputs, tape.inputs, strict=True)]
        except _Unfit:
            self._is_fit = False

    def outline(self) -> Outline | None:
        """The outline, after a call that did all that is on the tape; ``None``: there is none."""
        mode = self._mode
        if not self._is_fit or mode.has_cast or self._place < len(self._tape.steps) or Ambience.now() != self._ambience:
            return None
        return Outline(self._lines, self._inputs, self._versions, self._ambience)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        begin = self._mode.place
        if not self._is_fit or begin != self._place or _any_autocast():
            # Something ran that none of torch's functions called.
            self._is_fit = False
            return func(*args, **kwargs)
        grad, settings = torch.is_grad_enabled(), settings_now()
        output = func(*args, **kwargs)
        if self._mode.is_lost:
            self._is_fit = False
            return output
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            try:
                if func not in PASSES or self._computes():
                    self._lines.append(self._line(func, args, kwargs, output, grad, settings))
            except _Unfit:
                self._is_fit = False
        self._place = self._mode.place
        return output

    def _computes(self) -> bool:
        """Whether what runs is more than views."""
        steps = self._tape.steps[self._place : self._mode.place]
        return any(step.makes or step.writes >= 0 or step.is_random or step.renames >= 0 for step in steps)

    def _line(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
        grad: bool,
        settings: tuple[Any, ...],
    ) -> Line:
        if not isinstance(func, _CALLABLES) or (isinstance(func, FunctionType) and not _is_torchs(func)):
            raise _Unfit
        line = Line(
            func,
            tuple([self._pattern(arg) for arg in args]),
            {name: self._pattern(value) for name, value in kwargs.items()},
        )
        begin = self._place
        steps = self._tape.steps[begin : self._mode.place]
        read = {value for step in steps for value in step.reads}
        drawing = [begin + place for place, step in enumerate(steps) if step.is_random]
        if any(step.writes >= 0 for step in steps) or len(drawing) > 1 or read & self._tape.outside - self._met:
            raise _Unfit
        line.makes = frozenset[int]().union(*(step.made for step in steps))
        line.draws, line.grad = drawing[0] if drawing else -1, grad
        if any(step.numerics is not None for step in steps):
            line.settings = settings
        line.single = isinstance(output, torch.Tensor)
        outputs = (output,) if line.single else output
        if isinstance(outputs, (list, tuple)) and all(isinstance(each, torch.Tensor) for each in outputs):
            line.gives = tuple((place, self._role(each)) for place, each in enumerate(outputs))
        elif steps:
            # Data becomes numbers.
            raise _Unfit
        # Of what is made here, nobody has another name than what is given.
        line.renames = frozenset(step.renames for step in steps if step.renames >= 0) - line.makes
        return line

    def _pattern(self, value: Any) -> Any:
        """An argument with roles in place of tensors."""
        kind = type(value)
        if kind in _CONSTANTS:
            return value
        if kind in (list, tuple, torch.Size):
            return kind(self._pattern(each) for each in value) if kind is not torch.Size else value
        if kind is slice:
            if {type(value.start), type(value.stop), type(value.step)} <= {int, NoneType}:
                return value
            raise _Unfit
        return self._role(value)

    def _role(self, tensor: Any) -> Role:
        """That of a tensor, which may be met for the first time."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            if tensor._version != known[1]:
                raise _Unfit
            return known[2]
        if type(tensor) not in PLAIN or not is_strided(tensor) or tensor.is_inference():
            raise _Unfit
        value = self._mode.value_in(tensor.untyped_storage())
        if value is None:
            raise _Unfit
        return self._add(tensor, value)

    def _add(self, tensor: torch.Tensor, value: int) -> Role:
        if type(tensor) not in PLAIN or not is_strided(tensor) or tensor.is_inference():
            raise _Unfit
        view, version = ViewRecipe.of(tensor), tensor._version
        if view.conj or view.neg:
            raise _Unfit
        role = Role(len(self._versions), Spot(value, view), requires_grad=tensor.requires_grad, version=version)
        self._versions.append(version)
        self._met.add(value)
        self._known[id(tensor)] = weakref.ref(tensor), tensor._version, role
        return role


def _is_torchs(func: FunctionType) -> bool:
    """Whether it is known to hang on nothing but what it is given."""
    return func.__module__ in ("torch.functional", "torch.nn.functional", "torch._tensor")
