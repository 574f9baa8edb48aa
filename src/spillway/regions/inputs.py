"""What holds the inputs of a region until it runs again.

``torch.utils.checkpoint`` saves them through the hooks that are in force around the region. The hooks here go in
between: they send the inputs away or keep them, if the region says so, and leave it to the hooks around otherwise. An
input that the region itself wrote comes back as it was before (``trace.py`` has a copy of that), and nobody complains
of its version. Of an input that several ranks have, each may hold a part: see ``partition.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass
from spillway.capture.identity import ViewRecipe
from spillway.records import Decision
from spillway.regions.partition import PartHandle, Partition
from spillway.regions.region import Region
from spillway.regions.tensors import is_strided


def hook_for(decision: Decision | None, passage: Pass) -> Callable[[torch.Tensor], Handle]:
    """What is called with each input of a call that no other hooks but a pass's are around.

    Args:
        decision: what is done with them; ``None``: what the pass does, if it is around.
        passage: the pass of the call.
    """
    if decision is None:
        around = _top_saved_tensors_default_hooks(True)
        return KeptHandle if around is None else around[0]
    return KeptHandle if decision is Decision.KEEP else passage.pack_to_leave


class InputHandle:
    """Stands for one input of a region."""

    __slots__ = ("_packed", "_place", "_recipe", "_region", "_unpack")

    def __init__(
        self,
        packed: Any,
        unpack: Callable[[Any], torch.Tensor],
        region: Region,
        place: int | None,
        recipe: ViewRecipe | None,
    ) -> None:
        self._packed = packed
        self._unpack = unpack
        self._region = region
        self._place = place
        self._recipe = recipe

    def unpack(self) -> torch.Tensor:
        before = None if self._place is None else self._region.input_before(self._place)
        if before is None or self._recipe is None:
            return self._unpack(self._packed)
        return self._recipe.rebuild(before, 0)


class InputHooks:
    """The hooks around the call of a region. Its pack hook is the one by which a region knows whose pass it is in.

    Args:
        region: whose inputs they are.
        tensors: the inputs.
        passage: the pass of the region.
        decision: what is done with them, or ``None``: what the hooks around do.
        partition: how they are split over ranks, of which each does that with its part; ``None``: not at all.
    """

    def __init__(
        self,
        region: Region,
        tensors: Sequence[torch.Tensor],
        passage: Pass,
        decision: Decision | None,
        partition: Partition | None = None,
    ) -> None:
        self._passage = passage
        self._partition = partition
        self._region = region
        self._tensors = tensors
        around = _top_saved_tensors_default_hooks(True)
        self._pack: Callable[[torch.Tensor], Any] = KeptHandle
        self._unpack: Callable[[Any], torch.Tensor] = unpack
        if decision is not None and decision is not Decision.KEEP:
            self._pack = passage.pack_to_leave
        elif decision is None and around is not None:
            self._pack, self._unpack = around

    @contextmanager
    def pushed(self) -> Iterator[None]:
        """A context in which they are in force."""
        try:
            with saved_tensors_hooks(self.pack, unpack):
                yield
        finally:
            # Autograd holds on to the pack hook for as long as to what it packed.
            self._tensors = ()

    def pack(self, tensor: torch.Tensor) -> InputHandle:
        place = next((place for place, each in enumerate(self._tensors) if each is tensor), None)
        plain = type(tensor) is torch.Tensor and is_strided(tensor)
        recipe = ViewRecipe.of(tensor) if plain else None
        if self._partition is not None and place is not None and self._partition.splits(tensor):
            nothing = self._passage.nothing(tensor.device)
            part = PartHandle(tensor, self._partition, self._pack, self._unpack, nothing)
            return InputHandle(part, unpack, self._region, place, recipe)
        return InputHandle(self._pack(tensor), self._unpack, self._region, place, recipe)
