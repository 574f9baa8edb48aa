"""A parameter's state, as it is saved and loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from spillway.errors import UsageError
from spillway.optim.held import Held
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
