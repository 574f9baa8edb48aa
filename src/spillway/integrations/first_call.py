"""A module's call until it is called to be trained: what is to be attached then, and not before.

Trainers build a model long before they train it: on no device at all, to be compiled, sharded, moved and loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from spillway.attaching.call import ModuleCall
from spillway.blocks import Named


class FirstCall(ModuleCall):
    """Waits in the place of a module's call (NOTE [ How a module's call is taken over ] in ``attaching/call.py``).

    Args:
        named: the module.
        attach: called with the module and the arguments of its call, in training mode with gradients on. Where it
            attaches to the module, it gives this back before, and says ``True``: the module is then called anew.
    """

    def __init__(self, named: Named, attach: Callable[[Module, tuple[Any, ...], dict[str, Any]], bool]) -> None:
        super().__init__(named)
        self._attach = attach

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module(*args, **kwargs) if self._attach(module, args, kwargs) else self.plain(module, args, kwargs)
