"""Parameters that come back while the next forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from spillway.blocks import Blocks, find_blocks
from spillway.errors import UsageError

Wait = Callable[[Iterable[Tensor]], None]


class ForwardOverlap:
    """Hooks on a model: a block waits for its parameters when it is called, the model for all that are in no block.

    A parameter that is in a block and elsewhere too counts as in no block. Modules that have such parameters of their
    own wait for them as well, for calls that do not come by the model.

    Args:
        model: the model.
        wait: lets compute wait for some parameters.
        wait_for_all: lets compute wait for all of them.
        blocks: which modules are the blocks, as for :func:`spillway.attach`.

    Raises:
        UsageError: if it is no module, or has none that are blocks.
    """

    def __init__(
        self, model: Module, wait: Wait, wait_for_all: Callable[[], None], *, blocks: Blocks | None = None
    ) -> None:
        if not isinstance(model, Module):
            raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        self._wait = wait
        self._handles = []
        found = [named.module for named in find_blocks(model, blocks)]
        inside = {module for block in found for module in block.modules()}
        outside = {id(one) for module in model.modules() if module not in inside for one in _own(module)}
        shared = _of_several(found) | outside
        for block in found:
            self._hook(block, [one for one in block.parameters() if id(one) not in shared])
        for module in model.modules():
            self._hook(module, [one for one in _own(module) if id(one) in shared])
        self._hook(model, [one for one in model.parameters() if id(one) in shared])
        handle = model.register_state_dict_pre_hook(lambda *_: wait_for_all())  # type: ignore[no-untyped-call]
        self._handles.append(handle)

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: Module, parameters: list[Tensor]) -> None:
        if parameters:
            wait = self._wait

            def before(*_: Any) -> None:
                wait(parameters)

            self._handles.append(module.register_forward_pre_hook(before, prepend=True))


def _own(module: Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _of_several(blocks: list[Module]) -> set[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for block in blocks:
        mine = {id(parameter) for parameter in block.parameters()}
        twice |= seen & mine
        seen |= mine
    return twice
