"""A parameter's optimizer state as users see and edit it, and copies of states that are loaded."""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from spillway._torch import distributed_with, tree_leaves, tree_map_only, version_of
from spillway.errors import UsageError
from spillway.optim.chunks import Slot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import MASTER, State
from spillway.optim.tensors import flat, is_distributed, local_of

STEP = "step"
"""The name of the count of steps. Its type is not the parameter's."""
_NUMBERS = {STEP, "mu_product", "eta", "mu"}
"""States of torch's classes that are numbers, also for a parameter without dimensions."""


def _after_loading(method: Callable[..., Any]) -> Any:
    """A method of a dictionary that reads all values, after they were loaded."""

    def read(self: StateView, *given: Any) -> Any:
        self._load()
        return method(self, *given)

    return read


class StateView(dict[Any, Any]):
    """``optimizer.state[parameter]``: a parameter's state between steps.

    A tensor that is elsewhere is loaded when a value is read, with all others of the parameter. The next step begins
    with the user's writes to a tensor, and with a value that is put in its place. Python's own dictionary reads values
    without ``__getitem__``, so every method that reads one is overridden.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._shown: State = {}
        self._fetch: Callable[[], State] | None = None

    def show(self, state: State, fetch: Callable[[], State]) -> None:
        self.clear()
        self.update(state)
        self._shown = dict(state)
        self._fetch = fetch

    def shown(self, name: Any) -> Any:
        return self._shown.get(name)

    def shown_tensors(self) -> list[torch.Tensor]:
        return [value for value in self._shown.values() if isinstance(value, torch.Tensor)]

    def is_unedited(self) -> bool:
        """Whether the user put no value in the place of another."""
        shown = self._shown
        return len(self) == len(shown) and all(super(StateView, self).get(name) is shown[name] for name in shown)

    def _load(self) -> None:
        if self._fetch is not None and any(isinstance(value, Slot) for value in super().values()):
            for name, value in self._fetch().items():
                if isinstance(super().get(name), Slot):
                    self[name] = self._shown[name] = value

    def __getitem__(self, name: Any) -> Any:
        if isinstance(super().__getitem__(name), Slot):
            self._load()
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if super().__contains__(name) else default

    values = _after_loading(dict.values)
    items = _after_loading(dict.items)
    pop = _after_loading(dict.pop)
    popitem = _after_loading(dict.popitem)
    setdefault = _after_loading(dict.setdefault)
    copy = _after_loading(dict.copy)
    __or__ = _after_loading(dict.__or__)
    __ror__ = _after_loading(dict.__ror__)
    __repr__ = _after_loading(dict.__repr__)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class StateViews:
    """``optimizer.state``: a view for every parameter that has a state. ``open_state`` loads all of a state."""

    def __init__(
        self,
        state_of: Callable[[torch.Tensor], State],
        open_state: Callable[[torch.Tensor], State],
        *,
        notes_writes: bool,
    ) -> None:
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        """As the user sees and edits it."""
        self.is_stale = False
        """Whether a step failed, so that all views have to be made again."""
        self._state_of = state_of
        self._open_state = open_state
        self._notes_writes = notes_writes
        self._views: dict[torch.Tensor, StateView] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._views

    def show(self, parameter: torch.Tensor) -> None:
        """Let the view show what a parameter's state is now."""
        state = self._state_of(parameter)
        if not state:
            self._views.pop(parameter, None)
            self.state.pop(parameter, None)
            return
        view = self._views.setdefault(parameter, StateView())
        if self._notes_writes:
            state = {name: _of_own_version(value, view.shown(name)) for name, value in state.items()}
        # Weak: a view that the user keeps keeps no optimizer.
        me, mine = weakref.ref(self), weakref.ref(view)

        def fetch() -> State:
            views = me()
            if views is None or views._views.get(parameter) is not mine():
                raise UsageError(
                    "got a state of a closed OffloadedOptimizer, or of a parameter whose state has moved. Read "
                    "optimizer.state[parameter] again, and close() last."
                )
            return as_distributed(views._open_state(parameter), parameter)

        view.show(as_distributed(state, parameter), fetch)
        self.state[parameter] = view

    def show_all(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the views again, if a step has failed."""
        if self.is_stale:
            self.is_stale = False
            for parameter in parameters:
                self.show(parameter)

    def edited(self, parameter: torch.Tensor) -> State | None:
        """The state that the user has put in the place of a parameter's own; ``None`` if there is none."""
        now, view = self.state.get(parameter), self._views.get(parameter)
        if (view is not None and view.is_unedited() and now is view) or (view is None and not now):
            return None
        return dict(now or {})

    def versions(self) -> list[tuple[torch.Tensor, int]]:
        """The tensors that the user may have, with their versions, which only the user's writes change."""
        values = (local_of(one) for view in self._views.values() for one in view.shown_tensors())
        return [(value, version_of(value)) for value in values]

    def with_states(self, states: Mapping[torch.Tensor, State]) -> defaultdict[torch.Tensor, Any]:
        """``optimizer.state`` with these states in place of the views, for a state dict."""
        state = defaultdict(dict, {key: value for key, value in self.state.items() if key not in self._views})
        state.update({one: as_distributed(_copyable(found, one), one) for one, found in states.items() if found})
        return state

    def clear(self) -> None:
        self._views.clear()
        self.state.clear()


def _of_own_version(value: Any, before: Any) -> Any:
    """A tensor that shares a state's memory, but not its version: the same one as before, if the memory is the same."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(before, torch.Tensor):
        before = local_of(before)
        if _memory_of(before) == _memory_of(value):
            return before
    return value.data


def _memory_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _copyable(state: State, parameter: torch.Tensor) -> State:
    """A state whose tensors begin their storages: torch cannot copy a DTensor over any other."""
    if not is_distributed(parameter):
        return state
    return {
        key: value.clone() if isinstance(value, torch.Tensor) and value.storage_offset() else value
        for key, value in state.items()
    }


def as_distributed(state: State, parameter: torch.Tensor) -> State:
    """A state whose tensors are distributed as the parameter is."""
    if not is_distributed(parameter):
        return dict(state)
    shape = local_of(parameter).shape
    return {
        key: distributed_with(value, parameter)
        if isinstance(value, torch.Tensor) and value.shape == shape and value.ndim > 0
        else value
        for key, value in state.items()
    }


def check_shapes(state: State, parameter: torch.Tensor, *, fused: bool) -> None:
    """Refuse a state of another shape than the parameter's: a fused kernel would write past the state's end."""
    for key, value in state.items():
        must_fit = (key == MASTER or (fused and key != STEP)) and isinstance(value, torch.Tensor)
        if must_fit and value.shape != parameter.shape:
            raise UsageError(
                f"{key}: got a state of shape {tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}. "
                f"Load the state of the same model."
            )


def of_this_torch(state: State) -> State:
    """A saved state of a class of torch's. An earlier torch counted steps in an ``int``."""
    steps = state.get(STEP)
    return {**state, STEP: torch.tensor(float(steps))} if type(steps) is int else state


def follow_first(states: Sequence[State]) -> None:
    """Set the numbers of a parameter's pieces from those of the first. Users see, and may write, the first."""
    for name, value in states[0].items() if len(states) > 1 else ():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            for other in states[1:]:
                other[name].copy_(value)


def part_of(value: Any, held: HostParameter, start: int, numel: int) -> Any:
    """A part of a state's tensor of elements; anything else whole. Each piece has numbers of its own."""
    if not isinstance(value, torch.Tensor) or numel == held.numel:
        return value
    return flat(value, start, numel) if value.numel() == held.numel else value.clone()


def with_tensors(value: Any, put: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value of a state, which may be anything, with its tensors elsewhere; itself if all are there."""
    tensors = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
    return value if all(put(one) is one for one in tensors) else tree_map_only(torch.Tensor, put, value)


def loaded_copies(states: Iterable[tuple[torch.Tensor, torch.dtype, State]]) -> list[State]:
    """Copies of saved states, given with their parameters and types of steps. Shared tensors stay shared.

    As in the plain class, tensors of elements get the type of the step, also those in lists and dictionaries.
    """
    copies: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copied(key: Any, parameter: torch.Tensor, dtype: torch.dtype, value: torch.Tensor) -> torch.Tensor:
        into = dtype if _has_elements(key, value, parameter) else value.dtype
        if (id(value), into) not in copies:
            copies[id(value), into] = value.detach().to(into, copy=True)
        return copies[id(value), into]

    return [
        {
            key: tree_map_only(torch.Tensor, partial(copied, key, parameter, dtype), value)
            for key, value in state.items()
        }
        for parameter, dtype, state in states
    ]


def host_copy(key: Any, value: Any, held: HostParameter) -> Any:
    """A copy of a state's value for a step on the CPU: in the type of the step, with the parameter's strides."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = local_of(value).detach()
    dtype = held.work_dtype if _has_elements(key, value, held.local()) else value.dtype
    if key == STEP or value.ndim == 0:
        return value.to("cpu", torch.float32 if key == STEP else dtype, copy=True)
    if value.shape == held.local().shape:
        return held.new_host_tensor(dtype).copy_(value)
    return value.to("cpu", dtype, copy=True)


def device_copy(key: Any, value: Any, parameter: torch.Tensor, work_dtype: torch.dtype, *, step_on_device: bool) -> Any:
    """A copy of a state's value for a step on the GPU."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if key == STEP:
        return value.to(parameter.device, torch.float32, copy=True) if step_on_device else value.to("cpu", copy=True)
    dtype = work_dtype if _has_elements(key, value, parameter) else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def _has_elements(key: Any, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state has the type in which the parameter's elements are stepped.

    A number (``mu_product`` of ``NAdam``) has a type of its own, which the plain class loses when it loads a state.
    """
    is_number = key in _NUMBERS or (value.ndim == 0 and parameter.ndim > 0)
    return not is_number and (value.is_floating_point() or value.is_complex())
