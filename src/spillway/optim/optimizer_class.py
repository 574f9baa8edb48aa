"""Traits of an optimizer class, and how parameters are stepped by one."""

from __future__ import annotations

import copy
import inspect
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch.optim import Optimizer

from spillway._torch import tree_map_only, version_of
from spillway.errors import UnsupportedError, UsageError
from spillway.runtime.backend import label

State = dict[Hashable, Any]
"""A parameter's state: tensors, numbers, and a ``Slot`` (``states.py``) for each tensor that is elsewhere."""
Settings = dict[str, Any]
"""A param group's entries, without its parameters."""
MASTER = "master"
"""The name of the fp32 master weight in a parameter's state."""

_WIDE = frozenset({torch.float32, torch.float64})
_ALL = _WIDE | {torch.bfloat16, torch.float16}
_FUSED_ON_CPU: dict[type[Optimizer], frozenset[torch.dtype]] = {
    torch.optim.Adam: _ALL,
    torch.optim.AdamW: _ALL,
    torch.optim.Adagrad: _ALL,
    # The kernel for narrow types leaves parameters as they are, and reads past the end of its momentum.
    torch.optim.SGD: _WIDE,
}
_REFUSED = {
    torch.optim.SparseAdam: "its gradients are sparse",
    torch.optim.LBFGS: "each of its steps evaluates the model several times, over all parameters as one vector",
}
_GPU_FLAGS = {"foreach": False, "capturable": False}
_TINY_SIZES = (3, 5, 7, 11, 13, 17)
"""Dimensions of the tiny parameter of a prediction. They differ, so that each can be recognised in a state's shape."""


@dataclass(frozen=True, slots=True)
class ClassTraits:
    """How the step of an optimizer class can be taken apart."""

    fused: frozenset[torch.dtype]
    """The types with a fused kernel on the CPU. It steps a piece of a tensor to the same bits as the whole."""
    steps_alone: bool
    """Whether the class steps each parameter by itself, so that some may step before others."""
    begins_with_state: bool
    """Whether the constructor makes states. Then a state dict has them before the first step."""

    @classmethod
    def of(cls, optimizer_class: type[Optimizer], what: str = "optimizer_class") -> ClassTraits:
        """The traits of a class. A class that is not torch's own is assumed to step all parameters in one call."""
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
            raise UsageError(f"{what}: got {optimizer_class!r}, expected an optimizer class, like torch.optim.AdamW")
        for refused, why in _REFUSED.items():
            if issubclass(optimizer_class, refused):
                name = optimizer_class.__name__
                raise UnsupportedError(f"{what}: {name} cannot be offloaded: {why}. Use {name} itself.")
        return cls(
            fused=_FUSED_ON_CPU.get(optimizer_class, frozenset()),
            steps_alone=f"{optimizer_class.__module__}.".startswith("torch.optim."),
            begins_with_state=issubclass(optimizer_class, torch.optim.Adagrad),
        )

    def is_fused(self, group: Mapping[str, Any], dtype: torch.dtype) -> bool:
        """Whether the CPU steps parameters of this type in this group by a fused kernel."""
        return dtype in self.fused and group.get("fused") is not False


@dataclass(frozen=True, slots=True)
class ClassArguments:
    """The user's arguments for one class, or for the CPU's and the GPU's class."""

    cpu: dict[str, Any]
    device: dict[str, Any]
    defaults: dict[str, Any]
    """The settings of a new group."""
    device_only: dict[str, Any]
    """Group entries of the GPU's class that differ from those of the CPU's class."""

    @classmethod
    def of(cls, cpu_class: type[Optimizer], device_class: type[Optimizer], given: dict[str, Any]) -> ClassArguments:
        """Divide arguments between two classes."""
        if device_class is cpu_class:
            return cls(given, given, _defaults_of(cpu_class, given), {})
        cpu, device = taken_by(cpu_class, given), taken_by(device_class, given)
        names = f"{cpu_class.__name__} and {device_class.__name__}"
        unknown = sorted(given.keys() - cpu.keys() - device.keys())
        if unknown:
            raise UsageError(f"{names}: got {unknown}, expected arguments that one of them takes")
        of_cpu, of_device = _defaults_of(cpu_class, cpu), _defaults_of(device_class, device)
        unlike = {name: value for name, value in of_device.items() if name in of_cpu and of_cpu[name] != value}
        # An entry that no constructor takes describes the class, and is no setting.
        settings = taken_by(cpu_class, taken_by(device_class, unlike))
        if settings:
            raise UsageError(f"{names} have different defaults of {sorted(settings)}. Pass these arguments.")
        return cls(cpu, device, {**of_device, **of_cpu, **given}, unlike)


def taken_by(optimizer_class: type[Optimizer], given: dict[str, Any]) -> dict[str, Any]:
    """Those of some arguments that a class's constructor takes."""
    parameters = inspect.signature(optimizer_class).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def _defaults_of(optimizer_class: type[Optimizer], given: dict[str, Any]) -> dict[str, Any]:
    """All defaults of an optimizer of the class. Errors of its constructor are raised."""
    dummy = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
    if given.get("differentiable"):
        raise UnsupportedError("differentiable=True: an offloaded step is not part of an autograd graph. Leave it out.")
    try:
        defaults = dict(optimizer_class([dummy], **for_cpu(given)).defaults)
    except TypeError as error:
        raise UsageError(f"{optimizer_class.__name__} refuses the arguments {sorted(given)}: {error}") from error
    unknown = [name for name in given if name not in defaults]
    if unknown:
        raise UsageError(f"{optimizer_class.__name__}: got {unknown}, expected some of {sorted(defaults)}")
    return {**defaults, **{name: given[name] for name in given if name in ("fused", *_GPU_FLAGS)}}


def check_parameters(
    optimizer_class: type[Optimizer], parameters: Sequence[torch.Tensor], given: dict[str, Any]
) -> None:
    """Raise what the constructor raises for parameters of these shapes: ``Muon`` accepts matrices only."""
    like = [
        torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=False)
        for one in parameters
    ]
    optimizer_class(like, **for_cpu(given))


def for_cpu(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments without those that a constructor refuses for tensors on the CPU."""
    return {name: value for name, value in given.items() if name not in ("fused", *_GPU_FLAGS)}


def settings_of(group: dict[str, Any], *, device: str | None = None) -> dict[str, Any]:
    """A group without its parameters, as it is now. The user may write a tensor in place before a queued step runs."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device or tensor.device, copy=True)

    return {
        name: value if is_plain(value) else tree_map_only(torch.Tensor, copied, value)
        for name, value in group.items()
        if name not in ("params", "param_names")
    }


_PLAIN = frozenset((NoneType, bool, int, float, str))


def is_plain(setting: object) -> bool:
    """Whether a setting is a number or the like, or a tuple of them, which cannot be written in place."""
    kind = type(setting)
    return kind in _PLAIN or (kind is tuple and all(type(one) in _PLAIN for one in setting))  # type: ignore[attr-defined]


def cpu_settings_of(group: dict[str, Any], *, fused: bool) -> dict[str, Any]:
    """A group's settings for a step on the CPU."""
    settings = settings_of(group, device="cpu")
    settings.update({name: value for name, value in _GPU_FLAGS.items() if name in settings})
    if "fused" in settings:
        settings["fused"] = fused and settings["fused"] is not False
    return settings


def stamp_of(setting: Any) -> Any:
    """Changes when a setting does, also in place. It reads no value on the GPU, which would wait for the GPU."""
    return setting if is_plain(setting) else copy.deepcopy(tree_map_only(torch.Tensor, _stamp, setting))


def _stamp(setting: torch.Tensor) -> object:
    if setting.device.type == "cpu":
        return setting.tolist()
    return id(setting), None if setting.is_inference() else version_of(setting)


class GroupWrites:
    """Finds the group entries that a step changes. Some classes count steps there, or keep results."""

    def __init__(self, group: Settings) -> None:
        self._group = group
        self._before = {name: (value, stamp_of(value)) for name, value in group.items() if name != "params"}

    def apply_to(self, own: Settings) -> None:
        """Change the same entries of the user's group. A tensor that was written in place stays the user's."""
        for name, value in self._group.items():
            before, stamp = self._before.get(name, (None, None))
            if name == "params" or (before is value and stamp_of(value) == stamp):
                continue
            mine = own.get(name)
            if before is value and isinstance(value, torch.Tensor) and isinstance(mine, torch.Tensor):
                mine.detach().copy_(value)
            else:
                own[name] = value


class _Made:
    optimizer: Optimizer | None = None


class _MadeByThread(threading.local, _Made):
    pass


class BorrowingOptimizer:
    """Steps parameters and states that the caller lends for each step. Several threads may step at once.

    A class of the user's own may keep on its object what it counts, or knows of its parameters. So there is one object
    for all threads, and it is made of all parameters that the first step has.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: Mapping[str, Any]) -> None:
        self._class = optimizer_class
        self._steps_alone = ClassTraits.of(optimizer_class).steps_alone
        self._given = dict(given)
        step: Any = optimizer_class.step
        # Without torch's hooks and labels: a step of a piece is not the user's step.
        self._step: Callable[[Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
        self._made = _MadeByThread() if self._steps_alone else _Made()
        self._others: dict[Any, Any] = {}
        """Entries of the class's state that are no parameter's: a count of steps, or what it knows of all of them."""

    def begin(self, groups: Sequence[dict[str, Any]], new: Collection[torch.Tensor]) -> dict[Any, State]:
        """The states that the class's constructor makes for the new parameters of some groups. Most make none."""
        needs_all = not self._steps_alone and self._made.optimizer is None
        given = [{**group, "params": [one for one in group["params"] if needs_all or one in new]} for group in groups]
        given = [group for group in given if group["params"]]
        if not given:
            return {}
        optimizer = self._class(given, **self._given)
        states = {one: state for one, state in self._of_parameters(optimizer.state).items() if one in new}
        optimizer.state, optimizer.param_groups = defaultdict(dict), []
        self._made.optimizer = self._made.optimizer or optimizer
        return states

    def step(self, groups: list[dict[str, Any]], states: defaultdict[torch.Tensor, State]) -> None:
        """Step the parameters of groups by their gradients, in one call."""
        optimizer = self._made.optimizer
        if optimizer is None:
            # Muon takes matrices only.
            optimizer = self._class([torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))], **self._given)
            self._of_parameters(optimizer.state)
            self._made.optimizer = optimizer
        states.update(self._others)
        optimizer.state, optimizer.param_groups = states, groups
        try:
            with label("parameter step"):
                self._step(optimizer)
            stepped = () if self._steps_alone else (one for group in groups for one in group["params"])
            if any(MASTER in states.get(one, ()) for one in stepped):
                raise UnsupportedError(
                    f"{self._class.__name__} keeps an entry {MASTER!r} in a parameter's state, which is the name of "
                    f"fp32 master weights here. Rename it. Parameters that it wrote in place may have changed."
                )
        finally:
            self._others = {key: value for key, value in states.items() if not isinstance(key, torch.Tensor)}
            optimizer.state, optimizer.param_groups = defaultdict(dict), []

    def _of_parameters(self, made: Mapping[Any, Any]) -> dict[Any, State]:
        """The states of parameters that a constructor has made. Other entries are kept from the first time."""
        self._others = {**{key: made[key] for key in made if not isinstance(key, torch.Tensor)}, **self._others}
        return {key: state for key, state in made.items() if isinstance(key, torch.Tensor)}

    def step_each(
        self,
        parameters: Sequence[torch.nn.Parameter],
        settings: Mapping[str, Any],
        states: defaultdict[torch.Tensor, State],
    ) -> None:
        """Step parameters of one group, by a class that steps each by itself."""
        # Fused SGD takes parameters that all have momentum, or that all have none yet.
        fresh = [one for one in parameters if not states.get(one)]
        known = [one for one in parameters if states.get(one)]
        for some in (fresh, known):
            if some:
                self.step([{**settings, "params": some}], states)


class StatePrediction:
    """Predicts the state that a class makes for a parameter, by stepping a tiny one.

    A state tensor with dimensions of the tiny parameter is expected to have those of every parameter of as many
    dimensions. Everything else is expected to be the same for all.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: Mapping[str, Any]) -> None:
        self._optimizer = BorrowingOptimizer(optimizer_class, given)
        self._seen: dict[Hashable, tuple[tuple[int, ...], State]] = {}

    def state(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, settings: Mapping[str, Any]
    ) -> State:
        """A parameter's state after its first step in a type, in meta tensors. Those of its shape have its strides."""
        sizes, seen = self._state_of_tiny(len(shape), dtype, settings)
        # State tensors may have the parameter's dimensions, or as many elements.
        actual = {math.prod(sizes): math.prod(shape), 1: 1, **dict(zip(sizes[::-1], shape[::-1], strict=True))}
        state: State = {}
        for name, value in seen.items():
            state[name] = value
            if isinstance(value, torch.Tensor):
                if tuple(value.shape) == sizes:
                    state[name] = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
                else:
                    found = [actual.get(size, size) for size in value.shape]
                    state[name] = torch.empty(found, dtype=value.dtype, device="meta")
        return state

    def nbytes(self, shape: Sequence[int], dtype: torch.dtype, settings: Mapping[str, Any]) -> int:
        strides = torch.empty(shape, device="meta").stride()
        state = self.state(shape, strides, dtype, settings)
        return sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))

    def _state_of_tiny(
        self, dimensions: int, dtype: torch.dtype, settings: Mapping[str, Any]
    ) -> tuple[tuple[int, ...], State]:
        # A state depends on which settings are on, not on their values: a learning rate changes all the time.
        switches = tuple(
            (name, bool(value)) for name, value in settings.items() if isinstance(value, (bool, int, float))
        )
        key = (dimensions, dtype, switches)
        if key not in self._seen:
            sizes = (*_TINY_SIZES[:dimensions], *(2 for _ in range(dimensions - len(_TINY_SIZES))))
            tiny = torch.nn.Parameter(torch.ones(sizes, dtype=dtype, device="cpu"), requires_grad=False)
            tiny.grad = torch.full(sizes, 1e-3, dtype=dtype, device="cpu")
            plain = cpu_settings_of(dict(settings), fused=False)
            states = defaultdict(dict, self._optimizer.begin([{**plain, "params": [tiny]}], {tiny}))
            with torch.no_grad():
                self._optimizer.step_each([tiny], plain, states)
            self._seen[key] = (sizes, states[tiny])
        return self._seen[key]
