"""Which kernels a target would run, where torch chooses them by the device: so that autograd saves what it would there.

NOTE [ Kernels of a target ]

A step without the hardware runs on ``meta`` tensors. (Tensors of torch's ``FakeTensorMode`` on a device that this build
of torch does not know end the process as soon as autograd asks for the device's guard.) What autograd saves is said by
torch's ``derivatives.yaml`` for each operator that reaches autograd, whatever the device: so it is right for ``meta``
as soon as the same operators reach it. Those that do not are the composite ones which look at the device and then call
another. They are few, and a target's choice stands in for them here, below ``AutogradMeta``, for as long as a step is
run, in the thread that runs it. Other threads get torch's own.

=========================== ============================================================== ==========================
torch's                     on CUDA                                                        where torch says so
=========================== ============================================================== ==========================
scaled_dot_product_         flash: output, log-sum-exp (float32, batch x heads x length),  ``attention.cpp``,
attention                   two numbers of the generator; cuDNN: the same; efficient: the  ``sdp_utils.cpp``; shapes:
                            same, lengths rounded up to 32; math: the products and the     ``_meta_registrations.py``
                            softmax
dropout                     ``native_dropout``: a mask of a byte for each element          ``Dropout.cpp``
batch_norm                  ``cudnn_batch_norm`` unless it is bfloat16 or has no weights:  ``Normalization.cpp``
                            input, mean and deviation, and a reserve of no bytes
rms_norm                    ``_fused_rms_norm``: input, weight, and the reciprocal root    ``layer_norm.cpp``
                            (float32, one for each row)
lstm, gru, rnn              ``_cudnn_rnn``: not modelled, and refused                      ``RNN.cpp``
=========================== ============================================================== ==========================

On the CPU, attention is ``_scaled_dot_product_flash_attention_for_cpu`` where nothing is dropped, and math otherwise;
all else is as ``meta`` has it. Layer and group norm, embeddings, softmax, cross entropy, linear layers and convolutions
reach autograd as the same operators everywhere. (The statistics of norms may have another width on the CPU.)

The fused root mean square norm has no formula for ``meta`` that autograd could see: it has one here, and it saves its
input when it has run, where torch's saves it just before.

NOTE [ Which attention ]

Torch takes the first of a list that the arguments allow; on devices of NVIDIA's Hopper generation and later cuDNN comes
first, and flash elsewhere. ``attention=`` says which comes first. What the arguments do not allow falls to the next:
flash and cuDNN want 16 bits and no mask, efficient wants as many heads of keys as of queries. Torch's own switches
(``torch.nn.attention.sdpa_kernel``) are kept to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from spillway.errors import UnsupportedError, UsageError
from spillway.planning.hardware import Hardware

aten = torch.ops.aten

ATTENTIONS = ("flash", "cudnn", "efficient", "math")

_KEY = "AutogradMeta"
_HALVES = (torch.float16, torch.bfloat16)
_PREFER_CUDNN = ("H100", "H200", "H800", "GH200", "B100", "B200", "GB200", "B300")
_HEADS = 256
"""The widest head that flash and cuDNN take."""
_MOST_IMAGES = 880801
"""Of what has more rows, cuDNN normalises no batch."""


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


@contextmanager
def kernels_of(device: torch.device, attention: str) -> Iterator[None]:
    """A context in which this thread's ``meta`` tensors take the kernels of a target. See NOTE [ Kernels of a target ].

    Args:
        device: the target's.
        attention: which kernel of attention is tried first, of a CUDA device.
    """
    before, _here.chosen = _here.chosen, _on_cpu() if device.type == "cpu" else _on_cuda(attention)
    _registered.take()
    try:
        yield
    finally:
        _registered.give_back()
        _here.chosen = before


Kernel = Callable[..., Any]


class _Here(threading.local):
    chosen: dict[str, Kernel] | None = None
    """By name of operator, what this thread's target runs for it."""


class _Registered:
    """The stand-ins in torch's table of operators, for as long as anybody needs them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._library: torch.library.Library | None = None

    def take(self) -> None:
        with self._lock:
            self._count += 1
            if self._library is None:
                self._library = torch.library.Library("aten", "IMPL")  # noqa: TOR901  (taken back by give_back)
                for name in _NAMES:
                    self._library.impl(name, _stand_in(name), _KEY)

    def give_back(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._library is not None:
                self._library._destroy()
                self._library = None


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _stand_in(name: str) -> Kernel:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        chosen = None if _here.chosen is None else _here.chosen.get(name)
        return _torchs(name, *args, **kwargs) if chosen is None else chosen(*args, **kwargs)

    return kernel


def _torchs(name: str, *args: Any, **kwargs: Any) -> Any:
    """What torch has for all devices. (``decompose`` would take one that is written for compilers.)"""
    return _overload(name)._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


_NAMES = (
    *("scaled_dot_product_attention", "dropout", "batch_norm", "_fused_rms_norm"),
    *("lstm.input", "lstm.data", "gru.input", "gru.data"),
    *("rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"),
)
_here = _Here()
_registered = _Registered()


def _on_cpu() -> dict[str, Kernel]:
    return {"scaled_dot_product_attention": _attention_on_cpu}


def _on_cuda(attention: str) -> dict[str, Kernel]:
    order = [attention, *(each for each in ("flash", "efficient", "math") if each != attention)]

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Any:
        taken = next(name for name in order if _allows(name, query, key, value, attn_mask, dropout_p, is_causal))
        return _ATTENTIONS[taken](query, key, value, attn_mask, dropout_p, is_causal, **options)

    recurrent = {name: _refuse(name) for name in _NAMES if name.startswith(("lstm", "gru", "rnn"))}
    return {
        "scaled_dot_product_attention": attend,
        "dropout": _dropout,
        "batch_norm": _batch_norm,
        "_fused_rms_norm": _rms_norm,
        **recurrent,
    }


# Attention.


def _allows(
    name: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
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
        return same and query.dtype is not torch.float64 and torch.backends.cuda.mem_efficient_sdp_enabled()
    narrow = query.dtype in _HALVES and mask is None and query.shape[-1] == key.shape[-1] <= _HEADS
    if name == "flash":
        return narrow and value.shape[-1] == query.shape[-1] and torch.backends.cuda.flash_sdp_enabled()
    return narrow and query.shape[-1] % 8 == 0 and torch.backends.cuda.cudnn_sdp_enabled()


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


_ATTENTIONS: dict[str, Kernel] = {"flash": _flash, "cudnn": _cudnn, "efficient": _efficient, "math": _math}


def _attention_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    fits = query.dim() == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1]
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2]
    dense = all(tensor.stride(-1) == 1 for tensor in (query, key, value))
    if dropout_p or not (fits and alike and dense) or (attn_mask is not None and is_causal):
        return _math(query, key, value, attn_mask, dropout_p, is_causal, **options)
    mask = _added(attn_mask, query)
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask, scale=options.get("scale")
    )[0]


# All others.


def _dropout(input: torch.Tensor, p: float, train: bool) -> Any:  # noqa: A002  (torch's name)
    if p == 0 or not train or not input.numel():
        return input
    return aten.native_dropout(input, p, train)[0] if p < 1 else _torchs("dropout", input, p, train)


def _batch_norm(
    input: torch.Tensor,  # noqa: A002  (torch's name)
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Any:
    args = (input, weight, bias, mean, variance, training, momentum, eps)
    weighted = weight is not None and bias is not None and weight.dtype is not torch.bfloat16
    wide = input.dtype is not torch.bfloat16 and input.dim() >= 3 and input.shape[0] <= _MOST_IMAGES
    tracked = (mean is None) is (variance is None) and (mean is not None or training)
    if not (weighted and wide and tracked and cudnn and training):
        return _torchs("batch_norm", *args, cudnn)
    return aten.cudnn_batch_norm(*args)[0]


class _RmsNorm(torch.autograd.Function):
    """See NOTE [ Kernels of a target ]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: Any, eps: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            out, root = aten._fused_rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, root)
        ctx.mark_non_differentiable(root)
        ctx.set_materialize_grads(False)
        ctx.shape = shape
        return out, root

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, root = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[2]]
        dx, dw = aten._fused_rms_norm_backward(gradients[0], x, ctx.shape, root, weight, wanted)
        return dx, None, dw, None


def _rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None) -> Any:
    return _RmsNorm.apply(x, shape, weight, eps)


def _refuse(name: str) -> Kernel:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"profile: got aten::{name} without its hardware, whose kernels there save what is not known, expected "
            f"operators that are modelled; profile the model on the device itself"
        )

    return refuse
