"""An optimizer of the user's class that owns nothing: parameters and states are lent to it for a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.optim.kinds import step_of
from spillway.optim.layout import State
from spillway.runtime.labels import label


class Inner:
    """Steps what it is given.

    Args:
        optimizer_class: the class.
        given: what its constructor is given.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: Mapping[str, Any]) -> None:
        self._class = optimizer_class
        self._given = dict(given)
        self._step = step_of(optimizer_class)
        self._optimizer: Optimizer | None = None

    def step(
        self, parameters: Sequence[torch.nn.Parameter], states: Sequence[State | None], settings: Mapping[str, Any]
    ) -> list[State]:
        """Step parameters by their gradients, which are gone then.

        Args:
            parameters: of one group.
            states: of each, ``None`` for one that was never stepped.
            settings: of the group.

        Returns:
            Their states after the step.
        """
        optimizer = self._made([one for one, state in zip(parameters, states, strict=True) if state is None], settings)
        for parameter, state in zip(parameters, states, strict=True):
            if state:
                optimizer.state[parameter] = state
        # Fused SGD takes those that have momentum already, or those that have none yet.
        fresh = [one for one in parameters if not optimizer.state.get(one)]
        known = [one for one in parameters if optimizer.state.get(one)]
        try:
            for some in (fresh, known):
                if some:
                    optimizer.param_groups = [{**settings, "params": some}]
                    with label("optimizer piece"):
                        self._step(optimizer)
            return [dict(optimizer.state.get(parameter, {})) for parameter in parameters]
        finally:
            optimizer.param_groups = []
            optimizer.state.clear()
            for parameter in parameters:
                parameter.grad = None

    def begun(self, like: torch.Tensor, settings: Mapping[str, Any]) -> State:
        """The state that the constructor of the class makes for a parameter: for most none."""
        parameter = torch.nn.Parameter(like, requires_grad=False)
        made = self._class([{**settings, "params": [parameter]}], **self._given)
        return dict(made.state.get(parameter, {}))

    def _made(self, new: Sequence[torch.nn.Parameter], settings: Mapping[str, Any]) -> Optimizer:
        """The optimizer, with what the constructor of the class makes for parameters that are new."""
        if self._optimizer is None or new:
            made = self._class([{**settings, "params": list(new)}], **self._given)
            if self._optimizer is None:
                self._optimizer = made
            self._optimizer.state.update(made.state)
        return self._optimizer
