"""Inputs that all ranks of a group share: each rank keeps a part, and the ranks gather them for the replay.

Ranks that share a layer (tensor parallel) run it on the same input, and each of them would hold all of it until
backward. Instead each rank clones a part, in the order of memory, and drops the input. Before a replay, the ranks
gather the parts: one collective for each input. All ranks must run the same program, so that the order is the same.
Whether an input is split depends on shape, strides and dtype only, never on addresses. A gathered input has the same
distance from an aligned address as the original: kernels choose their code by it, and so their last bits.

The caller says that the ranks have the same input. This is checked at the first call of a function, or at each call on
request. All ranks exchange a number for shapes and strides and a fingerprint, so all of them raise, or none.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from spillway._torch import disable_dispatch
from spillway.checkpointing.checks import fingerprint_of
from spillway.checkpointing.tensors import is_dense
from spillway.errors import UsageError
from spillway.runtime.bytes import over
from spillway.saved_tensors.handles import TrackedHandle
from spillway.saved_tensors.identity import ALIGNMENT, ViewRecipe, is_parameter, why_unmovable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from spillway.checkpointing.learned import LearnedFunction


class Partition:
    """Splits inputs over the ranks of a group that have the same inputs."""

    def __init__(self, group: ProcessGroup | DeviceMesh, *, always_checks: bool) -> None:
        self._group = _group_of(group)
        self._always_checks = always_checks
        self.ranks = torch.distributed.get_world_size(self._group)
        self.rank = torch.distributed.get_rank(self._group)
        if self.rank < 0:
            raise UsageError(
                f"partition_inputs: got a group that rank {torch.distributed.get_rank()} is not in. All ranks of "
                f"the group run the function on the same inputs. Give each rank the group that it is in."
            )

    def splits(self, tensor: torch.Tensor) -> bool:
        """Whether an input is split. All ranks with the same input agree."""
        return (
            tensor.requires_grad
            and not is_parameter(tensor)
            and tensor.numel() >= self.ranks
            and why_unmovable(tensor) is None
            and not (tensor.is_conj() or tensor.is_neg())
            and is_dense(tensor)
        )

    def check(self, tensors: Sequence[torch.Tensor], known: LearnedFunction) -> None:
        """Compare inputs over ranks, at a function's first call or always. All ranks raise ``UsageError``, or none."""
        if known.ranks_agreed and not self._always_checks:
            return
        split = [tensor for tensor in tensors if self.splits(tensor)]
        # A rank may split none of its inputs. It takes part all the same, or the others would wait.
        devices = [tensor.device for tensor in (*split, *tensors)]
        if not devices:
            return
        with torch.no_grad(), disable_dispatch():
            # Python's hash differs from process to process.
            text = repr([(tuple(each.shape), each.stride(), str(each.dtype)) for each in split])
            structure = torch.tensor(zlib.crc32(text.encode()), dtype=torch.int64, device=devices[0])
            mine = torch.stack([structure, _contents(split, devices[0])])
            all_of_them = mine.new_empty(self.ranks * len(mine))
            torch.distributed.all_gather_into_tensor(all_of_them, mine, group=self._group)
            first, *others = all_of_them.view(self.ranks, -1).tolist()
        for rank, (shapes, content) in enumerate(others, 1):
            if [shapes, content] == first:
                continue
            what = "other shapes, strides or dtypes" if shapes != first[0] else "another content"
            raise UsageError(
                f"partition_inputs: the inputs have {what} in rank {rank} of the group than in rank 0. Each rank keeps "
                f"a part of them, so all must have the same. Give the group over which inputs are replicated (tensor "
                f"parallel, not data parallel), or leave the option out."
            )
        known.ranks_agreed = True

    def handle_of_part(
        self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> PartHandle:
        """A handle of an input, of which this rank keeps its part, by these hooks."""
        return PartHandle(tensor, self, pack(self.part_of(tensor)), unpack)

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of an input that this rank keeps: a copy, in one dimension."""
        chunk = self._chunk(tensor.numel())
        start = min(self.rank * chunk, tensor.numel())
        end = min(start + chunk, tensor.numel())
        with torch.no_grad(), disable_dispatch():
            offset = int(tensor.storage_offset()) + start
            return over(tensor.untyped_storage(), tensor.dtype, offset, (end - start,), (1,)).clone()

    def gather(self, part: torch.Tensor, recipe: ViewRecipe, phase: int) -> torch.Tensor:
        """The input, gathered from the parts of all ranks, which must all call it.

        ``phase`` is the distance of its first element from an aligned address, in bytes.
        """
        chunk = self._chunk(recipe.size.numel())
        with torch.no_grad(), disable_dispatch():
            if part.numel() < chunk:
                part = torch.cat([part, part.new_zeros(chunk - part.numel())])
            memory = part.new_empty(self.ranks * chunk + ALIGNMENT // part.itemsize)
            offset = (phase - memory.data_ptr()) % ALIGNMENT // part.itemsize
            # As bytes: not every library of collectives knows every dtype.
            whole = memory[offset : offset + self.ranks * chunk].view(torch.uint8)
            torch.distributed.all_gather_into_tensor(whole, part.view(torch.uint8), group=self._group)
            return over(memory.untyped_storage(), recipe.dtype, offset, recipe.size, recipe.stride)

    def _chunk(self, numel: int) -> int:
        """Elements of a part. The last parts may be shorter."""
        return -(-numel // self.ranks)


class PartHandle(TrackedHandle):
    """Stands for an input of which this rank keeps a part, which is ``packed``."""

    __slots__ = ("_packed", "_partition", "_phase", "_unpack")

    def __init__(
        self, tensor: torch.Tensor, partition: Partition, packed: Any, unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        super().__init__(tensor, torch.empty(0, device=tensor.device))
        self._partition = partition
        self._packed, self._unpack = packed, unpack
        self._phase = tensor.data_ptr() % ALIGNMENT

    def unpack(self) -> torch.Tensor:
        self._check()
        return self._with_data(self._partition.gather(self._unpack(self._packed), self._recipe, self._phase))


def _group_of(group: Any) -> ProcessGroup:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise UsageError(
            f"partition_inputs: {group!r} needs torch.distributed, which is not initialized. Call "
            f"torch.distributed.init_process_group() first."
        )
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise UsageError(
                f"partition_inputs: got a mesh of {group.ndim} dimensions, expected one; give the dimension over which "
                f"inputs are the same, as in mesh['tp']"
            )
        group = group.get_group()
    # A process outside a group gets a number for it. For that number torch says that the rank is -1.
    if group is torch.distributed.GroupMember.NON_GROUP_MEMBER or isinstance(group, torch.distributed.ProcessGroup):
        found: Any = group
        return found  # type: ignore[no-any-return]
    raise UsageError(f"partition_inputs: got {group!r}, expected a torch.distributed.ProcessGroup or a DeviceMesh")


def _contents(split: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """A hash of all their bits."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in split:
        # At an odd offset, sums take narrower words. Ranks may have the input at other offsets.
        bits = fingerprint_of(tensor.clone() if tensor.storage_offset() else tensor)
        # A plain tensor that needs a gradient has one.
        assert bits is not None
        total = total * 31 + bits
    return total
