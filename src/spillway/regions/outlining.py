"""Writes a tape's outline, beside the tape."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, EllipsisType, FunctionType, MethodDescriptorType, MethodWrapperType, NoneType
from types import WrapperDescriptorType as SlotType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from spillway.regions.outline import PASSES, Line, Outline, Role, roles_in, settings_now
from spillway.regions.scribe import Scribe

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
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack
"""What ``torch.func`` does around."""
_OTHERS = (torch.Tensor.data.__get__,)  # type: ignore[attr-defined]
"""What gives another name for memory, with a version of its own."""


class _Unfit(Exception):  # noqa: N818  (no error of anybody's: there is no outline)
    """What was seen does not say all that the function does."""


class Outlining(TorchFunctionMode):
    """Sees which of torch's functions a function calls, beside a mode that writes down its operators.

    Args:
        scribe: writes them.
        inputs: what the function is called with.
    """

    def __init__(self, scribe: Scribe, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._scribe = scribe
        # By a mode around, functions may do anything.
        self._is_fit = not (_any_autocast() or torch._C._len_torch_function_stack())
        self._lines: list[Line] = []
        self._place = 0
        """How many of the operators are told."""
        self._roles: list[Role] = []
        self._known: dict[int, tuple[Callable[[], Any], int, Role]] = {}
        """By the identities of tensors: these, their versions, and their roles."""
        self._met: set[int] = set()
        """Values that a role lies in, or that a line has made."""
        self._inputs: list[Role] = []
        try:
            self._inputs += map(self._role, inputs)
        except _Unfit:
            self._is_fit = False

    def outline(self) -> Outline | None:
        """The outline, when the function has ended; ``None``: there is none."""
        scribe = self._scribe
        if not self._is_fit or scribe.has_cast or scribe.is_untold or self._place < len(scribe.steps):
            return None
        return Outline(self._lines, self._inputs, self._roles)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_fit or len(self._scribe.steps) != self._place or _any_autocast() or _transforms() is not None:
            # Something ran that none of torch's functions called.
            self._is_fit = False
            return func(*args, **kwargs)
        grad, settings = torch.is_grad_enabled(), settings_now(func)
        output = func(*args, **kwargs)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            try:
                if func not in PASSES or self._computes():
                    self._lines.append(self._line(func, args, kwargs, output, grad, settings))
            except _Unfit:
                self._is_fit = False
        self._place = len(self._scribe.steps)
        return output

    def _computes(self) -> bool:
        """Whether what runs is more than views."""
        steps = self._scribe.steps[self._place :]
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
        if not isinstance(func, _CALLABLES) or func in _OTHERS:
            raise _Unfit
        is_python = False
        if isinstance(func, FunctionType):
            is_python = True
            if not _is_torchs(func):
                raise _Unfit
        line = Line(
            func,
            tuple([self._pattern(arg) for arg in args]),
            {name: self._pattern(value) for name, value in kwargs.items()},
        )
        begin = self._place
        steps = self._scribe.steps[begin:]
        read = {value for step in steps for value in step.reads}
        drawing = [begin + place for place, step in enumerate(steps) if step.is_random]
        line.makes = frozenset[int]().union(*(step.made for step in steps))
        if any(step.writes >= 0 for step in steps) or len(drawing) > 1 or not read <= self._met | line.makes:
            raise _Unfit
        self._met |= line.makes
        line.reads = frozenset(role.spot.value for role in roles_in((*line.args, *line.kwargs.values())))
        line.grad = grad
        if drawing:
            (line.draws,) = drawing
            line.device = self._scribe.steps[line.draws].makes[0][1].view.device
        if is_python or any(step.numerics is not None or not step.reads for step in steps):
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
        if tensor is not None and known is not None and known[0]() is tensor:
            if tensor._version != known[1]:
                raise _Unfit
            if tensor.requires_grad is known[2].requires_grad:
                return known[2]
        # What is no tensor may hold any, or anything else.
        spot = None if not isinstance(tensor, torch.Tensor) or tensor.is_inference() else self._scribe.spot_of(tensor)
        if spot is None:
            raise _Unfit
        version = tensor._version
        role = Role(len(self._roles), spot, requires_grad=tensor.requires_grad, version=version)
        self._roles.append(role)
        self._met.add(spot.value)
        self._known[id(tensor)] = weakref.ref(tensor), tensor._version, role
        return role


def _is_torchs(func: FunctionType) -> bool:
    """Whether it is known to hang on nothing but what it is given."""
    return func.__module__ in ("torch.functional", "torch.nn.functional", "torch._tensor")
