"""A parameter's state, as it is saved and loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from spillway.errors import UsageError
from spillway.optim.held import Held
from spillway.optim.sharding import local_of

MASTER = "master"
"""The name of a master among a parameter's state."""

STEP = "step"
"""The name of the count of steps, whose type is not the parameter's."""


class Saved:
    """The states of a dictionary that is being loaded.

    ``Optimizer.load_state_dict`` checks the groups and takes them over, and moves every state to its parameter's
    device, in its parameter's type. So it is given none, by hooks that run when the user's own have.
    """

    def __init__(self) -> None:
        self._states: dict[Any, dict[Any, Any]] = {}
        self._numbers: list[Any] = []

    def take(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
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


def host_copy(key: Any, value: Any, held: Held) -> Any:
    """A value of a state, as the host's step wants it: its own, in the master's type, as the parameter lies in memory.

    Raises:
        UsageError: a tensor of the parameter's rank and another shape.
    """
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = local_of(value).detach()
    dtype = held.work_dtype if value.is_floating_point() or value.is_complex() else value.dtype
    if key == STEP or value.ndim == 0:
        return value.to("cpu", torch.float32 if key == STEP else dtype, copy=True)
    if value.shape == held.local().shape:
        return held.new_host_tensor(dtype).copy_(value)
    if key == MASTER:
        raise UsageError(
            f"master: got shape {tuple(value.shape)}, expected {tuple(held.local().shape)}, the parameter's"
        )
    return value.to("cpu", dtype, copy=True)


def device_copy(key: Any, value: Any, parameter: torch.Tensor, work_dtype: torch.dtype, *, step_on_device: bool) -> Any:
    """A value of a state, as the device's step wants it."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    value = value.detach()
    if key == STEP:
        return value.to(parameter.device, torch.float32, copy=True) if step_on_device else value.to("cpu", copy=True)
    dtype = work_dtype if value.is_floating_point() else value.dtype
    return value.to(parameter.device, dtype, copy=True)
