"""The loss functions that models have of their own, as those of transformers do."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from spillway.losses.in_rows import InRows

_NAME = "loss_function"


class OwnLoss:
    """The ``loss_function`` of a module whose class has it as a property that may be set, as transformers' models do.

    Args:
        module: such a module.
        spare: bytes that there are for the loss beyond what it needs in rows.
    """

    def __init__(self, module: Module, spare: Callable[[], int]) -> None:
        self._module = weakref.ref(module)
        self.kind = type(module).__name__
        self._stand_in = InRows(self._find, spare)
        before = dict(vars(module))
        setattr(module, _NAME, self._stand_in)
        self._added = vars(module).keys() - before.keys()
        # What a user has put there stays.
        vars(module).update(before)

    @property
    def is_ours(self) -> bool:
        """Whether the module's own was there, and no user's."""
        return bool(self._added)

    @property
    def is_in_rows(self) -> bool:
        """Whether the last loss was computed in rows."""
        return self._stand_in.is_used

    def give_back(self) -> None:
        """The module has its own again, or what somebody has put there since."""
        module = self._module()
        for name in self._added if module is not None else ():
            if vars(module).get(name) is self._stand_in:
                delattr(module, name)

    def _find(self) -> Callable[..., Any]:
        """The module's own. Not asked for before it is used: where there is none, transformers warns."""
        module = self._module()
        assert module is not None
        ours = {name: vars(module).pop(name) for name in self._added}
        try:
            function: Callable[..., Any] = getattr(module, _NAME)
        finally:
            vars(module).update(ours)
        return function


def own_losses(model: Module, spare: Callable[[], int]) -> list[OwnLoss]:
    """Take the place of the outermost that a model has, but of one that a user has set."""
    found = [each for each in model.modules() if _has_own(each)]
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    losses = [OwnLoss(each, spare) for each in found if id(each) not in inner]
    return [loss for loss in losses if loss.is_ours]


def _has_own(module: Module) -> bool:
    found = getattr(type(module), _NAME, None)
    return isinstance(found, property) and found.fset is not None
