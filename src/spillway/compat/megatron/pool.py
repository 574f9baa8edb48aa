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
    """Tensors that are handed out, given back, and handed out again, by shape and dtype. On any device.

    The engine's own host memory is no such pool (see ``Session.host_bytes``); this one is for your own tensors.

    Args:
        device: where they are made.
        pin_memory: whether they are pinned, on the CPU.

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
        """A tensor with unknown content: one that was given back, or a new one.

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
        """Give one back.

        Raises:
            UsageError: a ``ValueError``: the tensor is not from here, or was given back already.
        """
        pool = self._pools.get((tuple(tensor.shape), tensor.dtype))
        if pool is None or pool.used.pop(id(tensor), None) is None:
            raise UsageError(
                f"free: got a tensor of shape {list(tensor.shape)} and {tensor.dtype} that is not handed out, expected "
                f"one that allocate() gave and that was not given back since; free each once, the very object"
            )
        self._counts["free_requests"] += 1
        pool.free.append(tensor)

    def get_pool_status(self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Counts of tensors: of one shape and dtype, or of all.

        Args:
            shape: whose tensors; ``None``: all, by ``(shape, dtype)`` under ``"pools"``, with ``"global_stats"``.
            dtype: has to be said with a shape.

        Returns:
            Of one: ``shape``, ``dtype``, ``total_count``, ``allocated_count``, ``free_count``, and ``utilization``,
            which is per cent.

        Raises:
            UsageError: a ``ValueError``: a shape without a dtype, or one of which there never was a tensor.
        """
        if shape is None:
            counts = {**self._counts, "current_in_use": sum(len(pool.used) for pool in self._pools.values())}
            return {
                "global_stats": {name: counts.get(name, 0) for name in _COUNTS},
                "pools": {key: self.get_pool_status(*key) for key in self._pools},
            }
        key = (tuple(shape), dtype)
        if dtype is None:
            raise UsageError(f"get_pool_status: got shape {key[0]} without a dtype, expected both; say dtype=")
        pool = self._pools.get((key[0], dtype))
        if pool is None:
            raise UsageError(
                f"get_pool_status: got {key[0]} and {dtype}, expected one of {sorted(map(str, self._pools))}; nothing "
                f"of that shape and dtype was allocated"
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
        """All count as free, also those that are handed out."""
        for pool in self._pools.values():
            pool.free.extend(pool.used.values())
            pool.used.clear()

    def clear(self) -> None:
        """Let go of all of them."""
        self._pools.clear()


GPUTensorPool = OffloadTensorPool
"""The name of older releases."""


@dataclass(slots=True)
class _TensorPool:
    """The tensors of one shape and dtype."""

    free: deque[torch.Tensor] = field(default_factory=deque)
    used: dict[int, torch.Tensor] = field(default_factory=dict)
