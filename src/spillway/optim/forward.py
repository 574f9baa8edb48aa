"""Parameters that come back while the next forward runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from spillway.blocks import Blocks, find_blocks
from spillway.errors import UsageError

Wait = Callable[[Iterable[Tensor]], None]


class ForwardOverlap:
    """Hooks on a model: a block waits for its parameters when it is called, the model for all that are in no block.

    A parameter that is in a block and elsewhere too counts as in no block. Modules that have parameters of their own
    wait for them as well, for calls that come by neither, and for state dictionaries.

    Args:
        model: the model.
        wait: lets compute wait for some parameters.
        blocks: which modules are the blocks, as for :func:`spillway.attach`.

    Raises:
        UsageError: if it is no module, or has none that are blocks.
    """

    def __init__(self, model: Module, wait: Wait, *, blocks: Blocks | None = None) -> None:
        if not isinstance(model, Module):
            raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
        # Dynamo breaks the graph for it. What is in a block has been waited for by the block.
        untraced: Wait = torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
        self._handles: list[RemovableHandle] = []
        found = [named.module for named in find_blocks(model, blocks)]
        inside = {module for block in found for module in block.modules()}
        outside = {id(one) for module in model.modules() if module not in inside for one in _own(module)}
        shared = _of_several(found) | outside
        for block in found:
            self._hook(block, _Before(untraced, [one for one in block.parameters() if id(one) not in shared]))
        for module in model.modules():
            before = _BeforePart(wait, _own(module)) if module in inside else _Before(untraced, _own(module))
            self._hook(module, before, of_states=True)
        self._hook(model, _Before(untraced, [one for one in model.parameters() if id(one) in shared]))
        self._covered = list(model.parameters())
        self._ids = {id(one) for one in self._covered}

    def covers(self, parameter: Tensor) -> bool:
        """Whether some module waits for a parameter."""
        return id(parameter) in self._ids

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, module: Module, before: _Before, *, of_states: bool = False) -> None:
        if before.parameters:
            self._handles.append(module.register_forward_pre_hook(before, prepend=True))
            if of_states:
                self._handles.append(module.register_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
                self._handles.append(module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]


class _Before:
    """A hook that waits. In a copy of the module, pickled ones too, it is one that does nothing, of Python's own."""

    def __init__(self, wait: Wait, parameters: list[Tensor]) -> None:
        self.parameters = parameters
        self._wait = wait

    def __call__(self, *_: Any) -> None:
        self._wait(self.parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _BeforePart(_Before):
    """The same for a part of a block, which is called by itself now and then. What is compiled calls the block."""

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._wait(self.parameters)


def _own(module: Module) -> list[Tensor]:
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def _of_several(blocks: list[Module]) -> set[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for block in blocks:
        mine = {id(parameter) for parameter in block.parameters()}
        twice |= seen & mine
        seen |= mine
    return twice
