"""A pool of tensors by shape and dtype."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spillway.errors import UsageError

_Pool = tuple[tuple[int, ...], torch.dtype]
_COUNTS = (
    *("total_allocated", "current_in_use", "allocation_requests"),
    *("free_requests", "pool_hits", "pool_misses"),
)


class OffloadTensorPool:
    """A pool of tensors by shape and dtype, on any device.

    It is for your own tensors. The engine's CPU memory is elsewhere: see ``Session.host_bytes``.

    Args:
        device: of the tensors.
        pin_memory: whether CPU tensors are pinned.

    Example:
        >>> pool = OffloadTensorPool("cpu")
        >>> first = pool.allocate((2, 3))
        >>> pool.free(first)
        >>> pool.allocate((2, 3)) is first
        True
    """

    def __init__(self, device: torch.device | str = "cuda", pin_memory: bool = False) -> None:
        self.device = torch.device(device)
        self.pin_memory = pin_memory
        self._pools: dict[_Pool, _TensorPool] = {}
        self._counts: Counter[str] = Counter()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor with undefined content: a freed one, or a new one.

        Args:
            shape: its shape.
            dtype: its dtype.
        """
        key = (tuple(shape), dtype)
        pool = self._pools.setdefault(key, _TensorPool())
        self._counts["allocation_requests"] += 1
        if pool.free:
            self._counts["pool_hits"] += 1
            tensor = pool.free.popleft()
        else:
            tensor = torch.empty(key[0], dtype=dtype, device=self.device, pin_memory=self.pin_memory)
            self._counts["pool_misses"] += 1
            self._counts["total_allocated"] += 1
        pool.used[id(tensor)] = tensor
        return tensor

    def free(self, tensor: torch.Tensor) -> None:
        """Return a tensor to the pool.

        Raises:
            UsageError: a ``ValueError``: the tensor is not from this pool, or was freed already.
        """
        pool = self._pools.get((tuple(tensor.shape), tensor.dtype))
        if pool is None or pool.used.pop(id(tensor), None) is None:
            raise UsageError(
                f"free: this tensor of shape {list(tensor.shape)} and {tensor.dtype} is not in use; free each tensor "
                f"that allocate() has returned once, and the same object"
            )
        self._counts["free_requests"] += 1
        pool.free.append(tensor)

    def get_pool_status(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Numbers of tensors, for one shape and dtype or for all.

        Args:
            shape: of the tensors; ``None``: all, by ``(shape, dtype)`` under ``"pools"``, with ``"global_stats"``.
            dtype: required with a shape.

        Returns:
            For one: ``shape``, ``dtype``, ``total_count``, ``allocated_count``, ``free_count``, and ``utilization`` in
            per cent.

        Raises:
            UsageError: a ``ValueError``: a shape without a dtype, or an unknown one.
        """
        if shape is None:
            counts = {**self._counts, "current_in_use": sum(len(pool.used) for pool in self._pools.values())}
            return {
                "global_stats": {name: counts.get(name, 0) for name in _COUNTS},
                "pools": {key: self.get_pool_status(*key) for key in self._pools},
            }
        key = (tuple(shape), dtype)
        if dtype is None:
            raise UsageError(f"get_pool_status: got shape {key[0]} without a dtype; say dtype=")
        pool = self._pools.get((key[0], dtype))
        if pool is None:
            raise UsageError(
                f"get_pool_status: nothing of shape {key[0]} and {dtype} was allocated; there are "
                f"{sorted(map(str, self._pools))}"
            )
        used, free = len(pool.used), len(pool.free)
        return {
            "shape": key[0],
            "dtype": dtype,
            "total_count": used + free,
            "allocated_count": used,
            "free_count": free,
            "utilization": 100 * used / max(used + free, 1),
        }

    def reset(self) -> None:
        """Count all tensors as free, also those in use."""
        for pool in self._pools.values():
            pool.free.extend(pool.used.values())
            pool.used.clear()

    def clear(self) -> None:
        """Release all tensors."""
        self._pools.clear()


GPUTensorPool = OffloadTensorPool
"""The name in older releases."""


@dataclass(slots=True)
class _TensorPool:
    """The tensors of one shape and dtype."""

    free: deque[torch.Tensor] = field(default_factory=deque)
    used: dict[int, torch.Tensor] = field(default_factory=dict)
