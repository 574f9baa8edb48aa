"""Kernels of scaled dot product attention, and which of them a device takes.

NOTE [ Which attention ]

Torch takes the first of a list that the arguments allow; on devices of NVIDIA's Hopper generation and later cuDNN comes
first, and flash elsewhere. ``attention=`` says which comes first. What the arguments do not allow falls to the next:
flash and cuDNN want 16 bits and no mask, efficient wants as many heads of keys as of queries. Torch's own switches
(``torch.nn.attention.sdpa_kernel``) are kept to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from spillway.errors import UsageError
from spillway.planning.hardware import Hardware

aten = torch.ops.aten

ATTENTIONS = ("flash", "cudnn", "efficient", "math")

Kernel = Callable[..., Any]

_torch: Any = torch.backends.cuda

_HALVES = (torch.float16, torch.bfloat16)
_PREFER_CUDNN = ("H100", "H200", "H800", "GH200", "B100", "B200", "GB200", "B300")
_HEADS = 256
"""The widest head that flash and cuDNN take."""


def first_attention(attention: str | None, hardware: Hardware) -> str:
    """Which kernel of attention is tried first. See NOTE [ Which attention ].

    Raises:
        UsageError: for a name that is not known.
    """
    if attention is None:
        return "cudnn" if any(name in hardware.name for name in _PREFER_CUDNN) else "flash"
    if attention not in ATTENTIONS:
        raise UsageError(f"attention: got {attention!r}, expected one of {', '.join(map(repr, ATTENTIONS))}, or None")
    return attention


def attention_on_cuda(first: str) -> Kernel:
    """What a CUDA device runs for ``scaled_dot_product_attention``.

    Args:
        first: which kernel is tried first.
    """
    order = [first, *(each for each in ("flash", "efficient", "math") if each != first)]

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        taken = next(name for name in order if _allows(name, query, key, value, attn_mask, causal=is_causal))
        return _KERNELS[taken](query, key, value, attn_mask, dropout_p, is_causal, **options)

    return attend


def _allows(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> bool:
    """Whether a kernel takes such arguments. See NOTE [ Which attention ]."""
    if name == "math":
        return True
    if query.dim() != 4 or (mask is not None and causal) or 0 in (query.numel(), key.numel()):
        return False
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    if name == "efficient":
        same = query.shape[:2] == key.shape[:2] == value.shape[:2]
        return same and query.dtype is not torch.float64 and _torch.mem_efficient_sdp_enabled()
    narrow = query.dtype in _HALVES and mask is None and query.shape[-1] == key.shape[-1] <= _HEADS
    if name == "flash":
        return narrow and value.shape[-1] == query.shape[-1] and _torch.flash_sdp_enabled()
    return narrow and query.shape[-1] % 8 == 0 and _torch.cudnn_sdp_enabled()


def _wants_sums(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask as what is added to the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device), -torch.inf)


def _flash(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, scale: Any = None, **_: Any) -> Any:
    size = q.shape[-1]
    scale = size**-0.5 if scale is None else scale
    if size % 8:
        q, k, v = (functional.pad(tensor, (0, 8 - size % 8)) for tensor in (q, k, v))
    out = aten._scaled_dot_product_flash_attention(q, k, v, dropout, causal, scale=scale)[0]
    return out if out.shape[-1] == size else out[..., :size]


def _cudnn(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, scale: Any = None, **_: Any) -> Any:
    sums = _wants_sums(q, k, v)
    return aten._scaled_dot_product_cudnn_attention(q, k, v, mask, sums, dropout, causal, scale=scale)[0]


def _efficient(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, scale: Any = None, **_: Any) -> Any:
    mask = _added(mask, q)
    if mask is not None:
        length = k.shape[-2]
        if mask.shape[-1] == length and length % 8:
            mask = functional.pad(mask, (0, 8 - length % 8))[..., :length]
        mask = mask.expand(*q.shape[:2], q.shape[-2], length)
    sums = _wants_sums(q, k, v)
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, sums, dropout, causal, scale=scale)[0]


def _math(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, **options: Any) -> Any:
    return aten._scaled_dot_product_attention_math(q, k, v, _added(mask, q), dropout, causal, **options)[0]


_KERNELS: dict[str, Kernel] = {"flash": _flash, "cudnn": _cudnn, "efficient": _efficient, "math": _math}


def attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """What a CPU runs for ``scaled_dot_product_attention``."""
    fits = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    shared = options.get("enable_gqa") and key.shape[1] and query.shape[1] % key.shape[1] == 0
    alike = key.shape[:2] == value.shape[:2] and (query.shape[:2] == key.shape[:2] or shared)
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if dropout_p or not (fits and alike and dense) or (attn_mask is not None and is_causal):
        return _math(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mask = _added(attn_mask, query)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=options.get("scale")
    )[0]
