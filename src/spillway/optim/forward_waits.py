"""Hooks by which each block of a model waits for its stepped parameters when it is called."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from spillway.checkpointing.blocks import Blocks, find_blocks
from spillway.errors import UsageError

Wait = Callable[[Iterable[Tensor]], None]


def wait_in_forward(model: Module, wait: Wait, blocks: Blocks | None) -> list[RemovableHandle]:
    """Hook each block of a model, so that it waits for its parameters when it is called.

    The model waits for parameters that are in no block, or in a block and elsewhere too. Modules that have parameters
    of their own wait for them as well: for calls that come by neither, and for state dicts.
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {type(model).__name__}, expected a torch.nn.Module")
    # Dynamo breaks the graph for it. A block has waited for what is in it.
    untraced: Wait = torch.compiler.disable(wait)  # type: ignore[no-untyped-call]
    handles: list[RemovableHandle] = []

    def hook(module: Module, before: _Before, *, of_states: bool = False) -> None:
        if before.parameters:
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            if of_states:
                handles.append(module.register_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
                handles.append(module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]

    found = [named.module for named in find_blocks(model, blocks)]
    inside = {module for block in found for module in block.modules()}
    outside = {one for module in model.modules() if module not in inside for one in module.parameters(recurse=False)}
    in_blocks = Counter(parameter for block in found for parameter in block.parameters())
    of_model = outside.union(one for one, blocks_with_it in in_blocks.items() if blocks_with_it > 1)
    for block in found:
        hook(block, _Before(untraced, [one for one in block.parameters() if one not in of_model]))
    for module in model.modules():
        in_block = module in inside
        hook(
            module,
            _Before(wait if in_block else untraced, module.parameters(recurse=False), in_block=in_block),
            of_states=True,
        )
    hook(model, _Before(untraced, [one for one in model.parameters() if one in of_model]))
    return handles


class _Before:
    """A hook that waits. In a copy of the module, also a pickled one, it is a hook of Python's that does nothing.

    Compiled code calls a block, which has waited for the modules in it. Only an eager call may be of such a module.
    """

    def __init__(self, wait: Wait, parameters: Iterable[Tensor], *, in_block: bool = False) -> None:
        self.parameters = list(parameters)
        self._wait = wait
        self._in_block = in_block

    def __call__(self, *_: Any) -> None:
        if not (self._in_block and torch.compiler.is_compiling()):
            self._wait(self.parameters)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")
