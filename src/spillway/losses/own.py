"""The loss functions that models of transformers have of their own.

NOTE [ Only while it is called ]

Such a model finds its loss function in an attribute of its own, if a user has put one there. It is where the stand-in
is put, while the model is called in training, and taken away again. So whoever copies the model, saves it, asks it for
its loss function or gives it another one finds nothing of this.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from spillway.losses.in_rows import InRows

_NAME, _PLACE = "loss_function", "_loss_function"
_LIBRARY = "transformers.modeling_utils"


class OwnLoss:
    """The ``loss_function`` of a module. See NOTE [ Only while it is called ].

    Args:
        module: one that has the property of transformers' models.
    """

    def __init__(self, module: Module) -> None:
        self._module = weakref.ref(module)
        self.kind = type(module).__name__
        self.is_in_rows = False
        """Whether the last loss was computed in rows."""

    @contextmanager
    def in_rows(self, spare: int) -> Iterator[None]:
        """Inside, it is computed in rows, but where a user has put one there.

        Args:
            spare: bytes that there are for the loss beyond what it needs in rows.
        """
        module = self._module()
        if module is None or _PLACE in vars(module) or _PLACE in module._modules:
            yield
            return
        stand_in = vars(module)[_PLACE] = InRows(lambda: _found_in(module), spare)
        try:
            yield
        finally:
            if vars(module).get(_PLACE) is stand_in:
                del vars(module)[_PLACE]
            self.is_in_rows = stand_in.is_used


class _Without:
    """A module as if nothing were in that place."""

    def __init__(self, module: Module) -> None:
        self._of = module

    def __getattr__(self, name: str) -> Any:
        if name == _PLACE:
            raise AttributeError(name)
        return getattr(self._of, name)


def _found_in(module: Module) -> Callable[..., Any]:
    """The module's own. Not asked for before it is used: where there is none, transformers warns."""
    function: Callable[..., Any] = getattr(type(module), _NAME).fget(_Without(module))
    return function


def own_losses(model: Module) -> list[OwnLoss]:
    """Those of the outermost modules of a model that have one."""
    found = [each for each in model.modules() if _has_own(each)]
    inner = {id(part) for each in found for part in each.modules() if part is not each}
    return [OwnLoss(each) for each in found if id(each) not in inner]


def _has_own(module: Module) -> bool:
    """Whether it has transformers' own property, and no subclass's."""
    found = getattr(type(module), _NAME, None)
    return isinstance(found, property) and getattr(found.fget, "__module__", None) == _LIBRARY
