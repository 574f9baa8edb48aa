"""The loss functions that models have of their own, as those of transformers do."""

from __future__ import annotations

import weakref
from collections.abc import Callable

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
        before = set(vars(module))
        self._stand_in = InRows(getattr(module, _NAME), spare)
        setattr(module, _NAME, self._stand_in)
        self._added = vars(module).keys() - before

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


def own_losses(model: Module, spare: Callable[[], int]) -> list[OwnLoss]:
    """Take the place of the outermost that a model has, but of one that a user has set."""
    found = [each for each in model.modules() if _may_have(each)]
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    return [OwnLoss(each, spare) for each in found if id(each) not in inner and _has_own(each)]


def _may_have(module: Module) -> bool:
    found = getattr(type(module), _NAME, None)
    return isinstance(found, property) and found.fset is not None


def _has_own(module: Module) -> bool:
    # What transformers knows no loss of would warn when it is asked.
    if getattr(module, "loss_type", _NAME) is None:
        return False
    function = getattr(module, _NAME)
    return callable(function) and not any(value is function for value in vars(module).values())
