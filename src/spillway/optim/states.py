"""A parameter's state, as it is saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from spillway.errors import UsageError
from spillway.optim.held import Held
from spillway.optim.layout import Place
from spillway.optim.sharding import local_of

MASTER = "master"
"""The name of a master among a parameter's state."""

STEP = "step"
"""The name of the count of steps, whose type is not the parameter's."""
_NUMBERS = {STEP, "mu_product", "eta", "mu"}
"""States of torch's own classes that are numbers, also where the parameter is one."""


class Saved:
    """The states of a dictionary that is being loaded.

    ``Optimizer.load_state_dict`` checks the groups and takes them over, and moves every state to its parameter's
    device, in its parameter's type. So it is given none, by hooks that run when the user's own have.
    """

    def __init__(self) -> None:
        self._states: dict[Any, dict[Any, Any]] = {}
        self._numbers: list[Any] = []

    def take(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What runs before: note the states, and give a dictionary without them."""
        self._states = state_dict["state"]
        self._numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        return {**state_dict, "state": {}}

    def in_order(self) -> list[dict[Any, Any]]:
        """The states, in the order of the parameters."""
        return [self._states.get(number, {}) for number in self._numbers]


class Shown(dict[Any, Any]):
    """A parameter's state, as it is seen between steps: ``optimizer.state[parameter]``.

    A tensor that lies elsewhere comes when a value is asked for, and all of the parameter's come with it. What is
    written into a tensor, or put in its place, is what the next step begins with. Python's own dictionary reads values
    past ``__getitem__``, so whatever reads one has a method here.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._as_shown: dict[Any, Any] = {}
        self._fetch: Callable[[], Mapping[Any, Any]] | None = None

    def show(self, state: Mapping[Any, Any], fetch: Callable[[], Mapping[Any, Any]]) -> None:
        """This is the state now.

        Args:
            state: with a :class:`~spillway.optim.layout.Place` for each tensor that lies elsewhere.
            fetch: gives all of it.
        """
        self.clear()
        self.update(state)
        self._as_shown = dict(state)
        self._fetch = fetch

    def is_as_shown(self) -> bool:
        """Whether no value was put in the place of another."""
        shown = self._as_shown
        return len(self) == len(shown) and all(super(Shown, self).get(name) is shown[name] for name in shown)

    def _have_all(self) -> None:
        if self._fetch is not None and any(isinstance(value, Place) for value in super().values()):
            for name, value in self._fetch().items():
                if isinstance(super().get(name), Place):
                    self[name] = self._as_shown[name] = value

    def __getitem__(self, name: Any) -> Any:
        if isinstance(super().__getitem__(name), Place):
            self._have_all()
        return super().__getitem__(name)

    def get(self, name: Any, default: Any = None) -> Any:
        return self[name] if super().__contains__(name) else default

    def values(self) -> Any:
        self._have_all()
        return super().values()

    def items(self) -> Any:
        self._have_all()
        return super().items()

    def pop(self, *given: Any) -> Any:
        self._have_all()
        return super().pop(*given)

    def popitem(self) -> Any:
        self._have_all()
        return super().popitem()

    def setdefault(self, name: Any, default: Any = None) -> Any:
        self._have_all()
        return super().setdefault(name, default)

    def copy(self) -> dict[Any, Any]:
        return dict(self)

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return dict(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)


class Hook:
    """A handle that can be closed."""

    def __init__(self, handle: RemovableHandle) -> None:
        self._handle = handle

    def close(self) -> None:
        """Take the hook off."""
        self._handle.remove()


def check_shapes(state: dict[Any, Any], parameter: torch.Tensor, *, fused: bool) -> None:
    """Refuse a state whose tensors would be read and written past their ends.

    Args:
        state: of a parameter, as it was saved.
        parameter: which is to have it.
        fused: whether it may be stepped by a fused kernel, which looks at no size but the parameter's.

    Raises:
        UsageError: a tensor of another shape than the parameter's.
    """
    for key, value in state.items():
        must_fit = (key == MASTER or (fused and key != STEP)) and isinstance(value, torch.Tensor)
        if must_fit and value.shape != parameter.shape:
            raise UsageError(
                f"{key}: got a state of shape {tuple(value.shape)} for a parameter of {tuple(parameter.shape)}, "
                f"expected the parameter's shape; load the state of the same model"
            )


def follow_first(states: Sequence[dict[Any, Any]]) -> None:
    """Numbers of a parameter's pieces are those of the first, which is seen, and may have been written."""
    for name, value in states[0].items() if len(states) > 1 else ():
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            for other in states[1:]:
                other[name].copy_(value)


def host_copy(key: Any, value: Any, held: Held) -> Any:
    """A value of a state, as the host's step wants it: its own, in the master's type, with the parameter's strides."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = local_of(value).detach()
    dtype = held.work_dtype if _is_of_elements(key, value, held.local()) else value.dtype
    if key == STEP or value.ndim == 0:
        return value.to("cpu", torch.float32 if key == STEP else dtype, copy=True)
    if value.shape == held.local().shape:
        return held.new_host_tensor(dtype).copy_(value)
    return value.to("cpu", dtype, copy=True)


def device_copy(key: Any, value: Any, parameter: torch.Tensor, work_dtype: torch.dtype, *, step_on_device: bool) -> Any:
    """A value of a state, as the device's step wants it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if key == STEP:
        return value.to(parameter.device, torch.float32, copy=True) if step_on_device else value.to("cpu", copy=True)
    dtype = work_dtype if _is_of_elements(key, value, parameter) else value.dtype
    return value.to(parameter.device, dtype, copy=True)


def _is_of_elements(key: Any, value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether a state is of a parameter's elements, and of the type that they are stepped in.

    A number (the product of momenta of ``NAdam``) has a type of its own, which the plain class loses in loading.
    """
    is_number = key in _NUMBERS or (value.ndim == 0 and parameter.ndim > 0)
    return not is_number and (value.is_floating_point() or value.is_complex())
