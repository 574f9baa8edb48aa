"""What autograd holds in place of a preserved tensor, or of one of the function's own, that is a view of a handle's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spillway.capture.handles import Handle
from spillway.capture.identity import ViewRecipe
from spillway.regions.tensors import below_modes


class ViewHandle:
    """Stands for a view of the tensor that another handle stands for.

    Args:
        handle: of the whole tensor.
        whole: where that lay in its memory when it was saved.
        recipe: where the view lies.
        back: gives the whole tensor for the handle.
    """

    __slots__ = ("_back", "_handle", "_recipe", "_start")

    def __init__(
        self,
        handle: Handle | Any,
        whole: ViewRecipe,
        recipe: ViewRecipe,
        back: Callable[[Any], torch.Tensor],
    ) -> None:
        self._handle = handle
        self._back = back
        self._recipe = recipe
        self._start = recipe.offset - whole.offset

    def unpack(self) -> torch.Tensor:
        whole = self._back(self._handle)
        with below_modes(whole):
            return view_of(whole.detach(), self._recipe, int(whole.storage_offset()) + self._start)

    def is_intact(self) -> bool:
        """Whether it was not written since, as far as versions tell."""
        return bool(self._handle.is_intact())


def view_of(tensor: torch.Tensor, recipe: ViewRecipe, offset: int) -> torch.Tensor:
    """A view of a tensor without history, on its counter of versions, that begins there in its memory."""
    return tensor.as_strided(recipe.size, recipe.stride, offset)
