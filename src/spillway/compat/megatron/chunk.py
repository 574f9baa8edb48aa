"""A chunk and its groups, for reading; and which of their tensors may leave."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spillway.capture.groups import Group
from spillway.capture.identity import is_parameter, reach, why_unmovable
from spillway.chunks import Chunk
from spillway.records import Decision, SavedTensor, StepStats


@dataclass(frozen=True)
class AtLeast:
    """A policy: what has at least so many elements leaves."""

    elements: int

    def __call__(self, saved: SavedTensor) -> Decision:
        return Decision.OFFLOAD if saved.nbytes >= self.elements * saved.dtype.itemsize else Decision.KEEP


class OffloadTensorGroup:
    """One group of a chunk, for reading."""

    def __init__(self, chunk: Chunk, group: Group) -> None:
        self._chunk = chunk
        self._group = group

    @property
    def name(self) -> str:
        """Whose it is; many groups of a chunk may have one name."""
        return self._group.name

    @property
    def offload(self) -> bool:
        """Whether it leaves, and does not stay by the rules."""
        return not self._chunk.stays(self._group)

    @property
    def total_offload_bytes(self) -> int:
        """Bytes that were saved in it first, large enough and not marked: those that leave if the group does."""
        return self._group.nbytes

    @property
    def total_tensor_count(self) -> int:
        """Of how many storages these are; aliases count once."""
        return self._group.count


class ChunkOffloadHandler:
    """One micro-batch's forward through one virtual stage, for reading."""

    def __init__(self, chunk: Chunk, min_offloaded_tensor_size: int) -> None:
        self._min_elements = min_offloaded_tensor_size
        self._chunk = chunk
        self._groups: list[OffloadTensorGroup] = []

    @property
    def min_offloaded_tensor_size(self) -> int:
        """Least size of what leaves, in elements."""
        return self._min_elements

    @property
    def do_offload(self) -> bool:
        """Whether anything may leave: of all chunks, or of none."""
        return self._chunk.session.enabled

    @property
    def offload_groups(self) -> list[OffloadTensorGroup]:
        """Its groups so far, in the order in which they began."""
        for group in self._chunk.groups[len(self._groups) :]:
            self._groups.append(OffloadTensorGroup(self._chunk, group))
        return list(self._groups)

    def find_group_with_name(self, name: str, start_index: int = 0) -> OffloadTensorGroup | None:
        """The first group of that name, from the one at ``start_index`` on; ``None`` if there is none."""
        return next((group for group in self.offload_groups[start_index:] if group.name == name), None)

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether it has no group, or none of that name."""
        return not self.offload_groups if name is None else self.find_group_with_name(name) is None

    def get_max_deduplicated_groups(self) -> int:
        """How many names its groups have."""
        return len({group.name for group in self.offload_groups})

    def tensor_need_offloading_checker(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor would leave if it were saved in a group that does: by its kind, size and marks."""
        if is_parameter(tensor) or why_unmovable(tensor) is not None or is_marked(tensor):
            return False
        storage = tensor.untyped_storage()
        if self._chunk.session.marks.get(storage) is False:
            return False
        nbytes = reach(tensor, storage.nbytes())[1]
        return nbytes >= self._min_elements * tensor.dtype.itemsize

    def stats(self) -> StepStats:
        """Bytes and seconds so far, forward and backward, in all and by groups (not there)."""
        return self._chunk.stats()


def is_marked(tensor: torch.Tensor) -> bool:
    """Whether somebody has said of it, or of what it is a view of, that it is not to leave."""
    return any(
        getattr(each, "offloading_activation", None) is False
        or getattr(each, "_TE_do_not_offload", False)
        or getattr(each, "_do_not_offload", False)
        for each in (tensor, tensor._base)
    )
