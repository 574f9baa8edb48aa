"""The kernels that a target would run: which, what autograd saves for them, and their bytes and FLOPs.

NOTE [ Kernels of a target ]

A step without the hardware runs on ``meta`` tensors. torch's ``derivatives.yaml`` says what autograd saves for an
operator, on all devices alike. So saved tensors are right if the same operators reach autograd. Some composite
operators choose others by the device. A target's choice replaces them here, at ``AutogradMeta``, while a step runs, in
its thread. Other threads get torch's own.

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

On the CPU, attention is ``_scaled_dot_product_flash_attention_for_cpu`` without dropout, and math with it. The rest is
as on ``meta``. The fused root mean square norm has no formula on ``meta`` that autograd sees: it has one here.

NOTE [ Attention kernels ]

torch takes the first kernel of a list that the arguments allow. cuDNN comes first on NVIDIA's Hopper and later, flash
elsewhere; ``attention=`` names another. Flash and cuDNN want 16 bits and no mask, efficient wants as many heads of keys
as of queries. torch's own switches (``torch.nn.attention.sdpa_kernel``) count, too.

NOTE [ Workspaces ]

Only the operators listed here take memory while they run. On CUDA that leaves out convolutions (cuDNN chooses), sorts
and reductions. Matrix products keep their workspace from the first one on. On the CPU, a convolution computes in a
layout of its own, and its output is a copy.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from spillway._torch import arguments_of, below_autograd, composite, end_library, schema_of, storage_key
from spillway.checkpointing.schema import OperatorFacts, argument
from spillway.checkpointing.tensors import tensors_in
from spillway.errors import UnsupportedError, UsageError
from spillway.planner.hardware import Effort, Hardware, Precision, Work

aten = torch.ops.aten

Kernel = Callable[..., Any]

ATTENTIONS = ("flash", "cudnn", "efficient", "math")

_HALVES = (torch.float16, torch.bfloat16)
_SINCE_HOPPER = ("H100", "H200", "H800", "GH200", "B100", "B200", "GB200", "B300")
_KEY = "AutogradMeta"
_MOST_HEAD_SIZE = 256
"""The limit of flash and cuDNN attention."""
_MOST_BATCH = 880801
"""The limit of cuDNN's batch norm."""

# Which kernels


def first_attention(attention: str | None, hardware: Hardware) -> str:
    """Which kernel of attention is tried first. See NOTE [ Attention kernels ]."""
    if attention is None:
        return "cudnn" if _is_since_hopper(hardware) else "flash"
    if attention not in ATTENTIONS:
        raise UsageError(f"attention: got {attention!r}, expected one of {', '.join(map(repr, ATTENTIONS))}, or None")
    return attention


@contextmanager
def kernels_of(device: torch.device, attention: str) -> Iterator[None]:
    """A context in which this thread's ``meta`` tensors take the kernels of a target. See NOTE [ Kernels of a target ].

    On CUDA, ``attention`` names the kernel of attention that is tried first. One thread at a time can be in it, once.
    """
    order, others = ["cpu", "math"], {}
    if device.type == "cuda":
        order, others = [attention, *(each for each in ("flash", "efficient", "math") if each != attention)], _ON_CUDA
    chosen: dict[str, Kernel] = {**others, "scaled_dot_product_attention": _attention(order)}
    thread = threading.get_ident()

    def replacement(name: str) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            is_here = threading.get_ident() == thread
            return chosen[name](*args, **kwargs) if is_here else _torchs(name, *args, **kwargs)

        return kernel

    with _alone:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        try:
            for name in chosen:
                library.impl(name, replacement(name), _KEY)  # type: ignore[no-untyped-call]
            yield
        finally:
            end_library(library)


def _torchs(name: str, *args: Any, **kwargs: Any) -> Any:
    packet, _, overload = name.partition(".")
    return composite(getattr(getattr(aten, packet), overload or "default"), *args, **kwargs)


def _dropout(input: torch.Tensor, p: float, train: bool) -> Any:  # noqa: A002  (torch's name)
    if p == 0 or not train or not input.numel():
        return input
    return aten.native_dropout(input, p, train)[0] if p < 1 else _torchs("dropout", input, p, train)


def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *options: Any
) -> Any:
    weighted = weight is not None and bias is not None and weight.dtype is not torch.bfloat16
    wide = x.dtype is not torch.bfloat16 and x.dim() >= 3 and x.shape[0] <= _MOST_BATCH
    tracked = (mean is None) is (variance is None) and (mean is not None or training)
    *numbers, cudnn = options
    args = (x, weight, bias, mean, variance, training, *numbers)
    if not (weighted and wide and tracked and cudnn and training):
        return _torchs("batch_norm", *args, cudnn)
    return aten.cudnn_batch_norm(*args)[0]


class _RmsNorm(torch.autograd.Function):
    """See NOTE [ Kernels of a target ]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: Any, eps: Any) -> Any:
        with below_autograd():
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


def _refuse(name: str) -> Kernel:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"profile without the hardware: autograd's saved tensors for aten::{name} on CUDA are not modelled; "
            f"profile the model on the device itself"
        )

    return refuse


_RECURRENT = tuple(
    f"{kind}.{overload}" for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu") for overload in ("input", "data")
)
_ON_CUDA: dict[str, Kernel] = {
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    "_fused_rms_norm": _RmsNorm.apply,
    **{name: _refuse(name) for name in _RECURRENT},
}
_alone = threading.Lock()

# Attention


def _attention(order: Sequence[str]) -> Kernel:
    """Attention by the first of these kernels that the arguments allow."""

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        args = query, key, value, attn_mask, dropout_p, is_causal
        taken = next(name for name in order if _allows(name, *args, **options))
        return _KERNELS[taken](*args, **options)

    return attend


def _allows(
    name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, dropout: float, causal: bool,
    *, enable_gqa: bool = False, **_: Any,
) -> bool:  # fmt: skip
    """Whether a kernel takes such arguments. See NOTE [ Attention kernels ]."""
    switches: Any = torch.backends.cuda
    if name == "math":
        return True
    if query.dim() != 4 or (mask is not None and causal):
        return False
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return False
    if name == "cpu":
        fits = query.shape[-1] == key.shape[-1] == value.shape[-1] and key.shape[:2] == value.shape[:2]
        shared = enable_gqa and key.shape[1] and query.shape[1] % key.shape[1] == 0
        return not dropout and fits and bool(shared or query.shape[:2] == key.shape[:2])
    if 0 in (query.numel(), key.numel()):
        return False
    if name == "efficient":
        same = query.shape[:2] == key.shape[:2] == value.shape[:2]
        return same and query.dtype is not torch.float64 and bool(switches.mem_efficient_sdp_enabled())
    narrow = query.dtype in _HALVES and mask is None and query.shape[-1] == key.shape[-1] <= _MOST_HEAD_SIZE
    if name == "flash":
        return narrow and value.shape[-1] == query.shape[-1] and bool(switches.flash_sdp_enabled())
    return narrow and query.shape[-1] % 8 == 0 and bool(switches.cudnn_sdp_enabled())


def _wants_sums(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A mask as a summand of the scores."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    return torch.where(mask, torch.scalar_tensor(0.0, dtype=query.dtype, device=query.device), -torch.inf)


def _cpu(q: Any, k: Any, v: Any, mask: Any, dropout: float, causal: bool, *, scale: Any = None, **_: Any) -> Any:
    mask = _added(mask, q)
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, attn_mask=mask, scale=scale)[0]


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


_KERNELS = {"cpu": _cpu, "flash": _flash, "cudnn": _cudnn, "efficient": _efficient, "math": _math}

_PRODUCT_BYTES, _PRODUCT_BYTES_SINCE_HOPPER = 8_519_680, 32 << 20
"""Workspaces of cuBLAS, by torch's ``CUDABlas.cpp``: 2 times 4 MiB and 8 times 16 KiB, or 32 MiB since Hopper."""
_TILE = 128


def _is_since_hopper(hardware: Hardware) -> bool:
    return any(name in hardware.name for name in _SINCE_HOPPER)


def standing_workspace(device: torch.device, hardware: Hardware) -> int:
    """Bytes that matrix products keep on a device from the first one on."""
    if device.type == "cpu":
        return 0
    return _PRODUCT_BYTES_SINCE_HOPPER if _is_since_hopper(hardware) else _PRODUCT_BYTES


def workspace_of(
    device: torch.device, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> tuple[int, ...]:
    """Bytes of each allocation that an operator has while it runs. See NOTE [ Workspaces ]."""
    name = _name_of(func)
    if device.type == "cpu":
        if name not in ("aten::convolution", "aten::convolution_backward"):
            return ()
        first = output[0] if isinstance(output, (list, tuple)) else output
        return () if first is None else (first.nbytes,)
    if name == "aten::_scaled_dot_product_cudnn_attention":
        # As measured (``tests/planner/llama_8b_block.json``).
        return (512,)
    if not (name.startswith("aten::_scaled_dot_product_") and name.endswith("attention_backward")):
        return ()
    query, key, value = (_argument(func, args, kwargs, each) for each in ("query", "key", "value"))
    # Gradients of queries are summed up in float32; those of shared keys and values are first made for each head.
    batch, heads, length, size = query.shape
    rows = batch * heads * (-(-length // _TILE) * _TILE)
    sums, dots = 4 * rows * size, 4 * rows
    if key.shape[1] == heads:
        return sums, dots
    shared = heads // key.shape[1]
    return sums, dots, shared * key.numel() * key.itemsize, shared * value.numel() * value.itemsize


_CONVOLUTIONS = ("aten::convolution", "aten::cudnn_convolution", "aten::_convolution", "aten::convolution_backward")
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")
_GATHERS = frozenset(
    {
        *("aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::take"),
        *("aten::take_along_dim", "aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    }
)
"""Operators that read only as much of their first tensor as they give."""
_ALLOCATES = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})


def effort_of(
    func: Any, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Effort | None:
    """FLOPs and bytes of a call; ``None`` if it launches nothing: a view, an allocation.

    FLOPs are those of torch's own formulas (``torch.utils.flop_counter``).
    """
    # Slow to import.
    from torch.utils.flop_counter import flop_registry

    name = schema_of(func).name
    inputs = tensors_in((*args, *kwargs.values()))
    outputs = tensors_in((output,))
    given = {storage_key(tensor.untyped_storage()) for tensor in inputs}
    is_view = all(storage_key(tensor.untyped_storage()) in given for tensor in outputs)
    if name in _ALLOCATES or (not facts.writes and is_view):
        return None
    formula = flop_registry.get(func.overloadpacket)
    flops = 0.0 if formula is None else float(formula(*args, **kwargs, out_val=output))
    # torch counts all tiles of a causal attention. Kernels skip half of them.
    if formula is not None and _argument(func, args, kwargs, "is_causal"):
        flops /= 2
    work = Work.MEMORY if formula is None else Work.PRODUCT
    if name.startswith(_ATTENTION):
        work = Work.ATTENTION_BACKWARD if "backward" in name else Work.ATTENTION
    elif name in _CONVOLUTIONS:
        work = Work.CONVOLUTION
    written = tensors_in(argument(args, kwargs, key) for key in facts.writes)
    known = {id(tensor) for tensor in inputs}
    made = _touched([tensor for tensor in outputs if id(tensor) not in known]) + _touched(written)
    # A gather reads as much as it gives.
    read = made + _touched(inputs[1:]) if name in _GATHERS else _touched(inputs)
    return Effort(work, flops, made + read, _precision(name, inputs))


def _name_of(func: Any) -> str:
    """An operator's name without its overload."""
    name: str = func.name()
    return name.partition(".")[0]


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """The argument of this name; ``None`` if the operator has none."""
    names = [each.name for each in arguments_of(func)]
    return argument(args, kwargs, names.index(name)) if name in names else None


def _touched(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of tensors, each element that an expanded one repeats counted once."""
    total = 0
    for tensor in tensors:
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        total += tensor.itemsize * math.prod(size if stride else min(size, 1) for size, stride in sizes)
    return total


def _precision(name: str, inputs: Sequence[torch.Tensor]) -> Precision:
    """The first factor's. torch rounds 32 bits if it is told to; in convolutions, unless it is told not to."""
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)
    if dtype in _HALVES or dtype.itemsize == 1:
        return Precision.HALF
    if dtype is torch.float64:
        return Precision.DOUBLE
    products_round = torch.get_float32_matmul_precision() != "highest"
    rounds = torch.backends.cudnn.allow_tf32 if name in _CONVOLUTIONS else products_round
    return Precision.TENSOR_FLOAT if rounds else Precision.SINGLE
