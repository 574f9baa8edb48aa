"""The parameters that step on their device, with masters there where they need one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.kinds import step_of, written_by_step
from spillway.optim.masters import take
from spillway.optim.sharding import local_of
from spillway.optim.states import MASTER, device_copy


class DevicePart:
    """Steps parameters where they are, by an optimizer of the user's class.

    Args:
        optimizer_class: the class.
        given: what the user gave for it.
        own: what its groups say, whatever the user's say.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any], own: dict[str, Any]) -> None:
        self._class = optimizer_class
        self._given = given
        self._own = own
        self._step = step_of(optimizer_class)
        self._inner: Optimizer | None = None
        self._masters: dict[torch.Tensor, torch.nn.Parameter] = {}
        self._work: dict[torch.Tensor, tuple[int, torch.dtype]] = {}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._work

    def __iter__(self) -> Any:
        return iter(self._work)

    def add(self, parameter: torch.Tensor, group: int, work_dtype: torch.dtype) -> None:
        """One that steps here."""
        self._work[parameter] = (group, work_dtype)

    def discard(self, parameter: torch.Tensor) -> dict[Any, Any]:
        """One that does no more; its state, its master among it."""
        state = self.state_of(parameter)
        if self._inner is not None:
            stepped = self._stepped(parameter)
            if stepped is not None:
                self._inner.state.pop(stepped, None)
        self._masters.pop(parameter, None)
        del self._work[parameter]
        return state

    def step(self, groups: Sequence[dict[str, Any]]) -> None:
        """Step those that have a gradient."""
        taking = {}
        for index, group in enumerate(groups):
            mine = [parameter for parameter, (of, _) in self._work.items() if of == index]
            settings = {name: value for name, value in group.items() if name != "params"} | self._own
            prepared = [self._with_gradient(one) for one in mine if one.grad is not None]
            if prepared:
                taking[index] = {**settings, "params": prepared}
        if not taking:
            return
        inner = self._inner_with(list(taking.values()))
        taking = {index: {**inner.defaults, **group} for index, group in taking.items()}
        before = {index: dict(group) for index, group in taking.items()}
        inner.param_groups = list(taking.values())
        self._step(inner)
        inner.param_groups = []
        for index, group in taking.items():
            groups[index].update(written_by_step(group, before[index]))
        with torch.no_grad():
            for parameter, master in self._masters.items():
                if master.grad is not None:
                    parameter.copy_(master)
                    master.grad = None

    def state_of(self, parameter: torch.Tensor) -> dict[Any, Any]:
        """As the plain optimizer would have it, and the master."""
        stepped = self._stepped(parameter)
        state = {} if self._inner is None or stepped is None else dict(self._inner.state.get(stepped, {}))
        if stepped is not None and stepped is not parameter:
            state[MASTER] = stepped.detach()
        return state

    def begin_state(self, parameter: torch.Tensor, settings: dict[str, Any]) -> None:
        """One that has not stepped gets the state that the class's constructor makes."""
        self._inner_with([{**settings, "params": [self._ready(parameter)]}])

    def put_state(self, parameter: torch.Tensor, state: dict[Any, Any], settings: dict[str, Any]) -> None:
        """Its state is this, on its device, copied there. Without a master, one is taken from the parameter."""
        dtype = self._work[parameter][1]
        on_device = bool(settings.get("capturable") or settings.get("fused"))
        state = {
            key: device_copy(key, value, parameter, dtype, step_on_device=on_device) for key, value in state.items()
        }
        master = state.pop(MASTER, None)
        if dtype != local_of(parameter).dtype:
            self._forget_master(parameter)
            if master is None:
                self._ready(parameter)
            else:
                self._masters[parameter] = torch.nn.Parameter(master.to(dtype), requires_grad=False)
        stepped = self._masters.get(parameter, parameter)
        inner = self._inner_with([{**settings, "params": [stepped]}])
        inner.param_groups = []
        if state:
            inner.state[stepped] = state
        else:
            inner.state.pop(stepped, None)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Each master is what its parameter says."""
        for parameter, master in self._masters.items():
            master.copy_(parameter)

    def close(self) -> None:
        """Give masters and state back."""
        self._masters.clear()
        self._inner = None

    def _stepped(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self._work[parameter][1] == local_of(parameter).dtype:
            return parameter
        return self._masters.get(parameter)

    def _forget_master(self, parameter: torch.Tensor) -> None:
        master = self._masters.pop(parameter, None)
        if master is not None and self._inner is not None:
            self._inner.state.pop(master, None)

    def _with_gradient(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is stepped for it, with its gradient."""
        stepped = self._ready(parameter)
        if stepped is not parameter:
            assert parameter.grad is not None
            stepped.grad = parameter.grad.detach().to(stepped.dtype)
        return stepped

    @torch.no_grad()
    def _ready(self, parameter: torch.Tensor) -> torch.Tensor:
        """What is stepped for it, which says what the parameter says."""
        dtype = self._work[parameter][1]
        if dtype == local_of(parameter).dtype:
            return parameter
        master = self._masters.get(parameter)
        if master is None:
            master = self._masters[parameter] = torch.nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        else:
            take(local_of(master), local_of(parameter).detach())
        return master

    def _inner_with(self, groups: list[dict[str, Any]]) -> Optimizer:
        missing = [{**group, "params": [one for one in group["params"] if not self._has(one)]} for group in groups]
        missing = [group for group in missing if group["params"]]
        if missing or self._inner is None:
            new = self._class(missing or groups, **self._given)
            if self._inner is None:
                self._inner = new
            for parameter, state in new.state.items():
                self._inner.state.setdefault(parameter, state)
        return self._inner

    def _has(self, parameter: torch.Tensor) -> bool:
        return self._inner is not None and parameter in self._inner.state
