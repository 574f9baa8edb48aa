"""What kernels take for themselves while they run, where it is known and large.

What is not here is taken to need nothing: on CUDA convolutions (cuDNN chooses, up to what it is given), sorts and
reductions. Products take their workspace once, for good: :func:`standing_workspace`. On the CPU, a convolution computes
in a layout of its own, and what it gives is a copy.
"""

from __future__ import annotations

from typing import Any

import torch

from spillway.planning.hardware import Hardware
from spillway.regions.schema import argument

_LARGE = ("H100", "H200", "H800", "GH200", "B100", "B200", "GB200", "B300")
_LARGE_BYTES = 32 << 20
_BYTES = 8_519_680
"""What cuBLAS is given, by torch's ``CUDABlas.cpp``: 2 times 4 MiB and 8 times 16 KiB, or 32 MiB since Hopper."""
_TILE = 128


def standing_workspace(device: torch.device, hardware: Hardware) -> int:
    """Bytes that products have on a device from the first one on."""
    if device.type == "cpu":
        return 0
    return _LARGE_BYTES if any(name in hardware.name for name in _LARGE) else _BYTES


def workspace_of(
    device: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[int, ...]:
    """Bytes of each allocation that an operator has while it runs, and gives back."""
    name = func._schema.name
    if device.type == "cpu":
        if name not in ("aten::convolution", "aten::convolution_backward"):
            return ()
        first = output[0] if isinstance(output, (list, tuple)) else output
        return () if first is None else (first.nbytes,)
    if name == "aten::_scaled_dot_product_cudnn_attention":
        # As it was measured (``tests/planning/llama_8b_block.json``).
        return (512,)
    if name.startswith("aten::_scaled_dot_product_") and name.endswith("attention_backward"):
        names = [each.name for each in func._schema.arguments]
        query, key, value = (argument(args, kwargs, names.index(each)) for each in ("query", "key", "value"))
        return _backward(name, query, key, value)
    return ()


def _backward(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """Gradients of queries are summed up in ``float32``; those of shared keys are first made for each head."""
    batch, heads, length, size = query.shape
    rows = batch * heads * (-(-length // _TILE) * _TILE)
    sums, dots = 4 * rows * size, 4 * rows
    if key.shape[1] == heads:
        return sums, dots
    shared = heads // key.shape[1]
    return sums, dots, shared * key.numel() * key.itemsize, shared * value.numel() * value.itemsize
