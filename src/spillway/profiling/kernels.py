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
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spillway.errors import UnsupportedError
from spillway.profiling.attentions import attention_on_cpu, attention_on_cuda

aten = torch.ops.aten

Kernel = Callable[..., Any]

_KEY = "AutogradMeta"
_MOST_IMAGES = 880801
"""Of what has more rows, cuDNN normalises no batch."""


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
                self._library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
                for name in _NAMES:
                    self._library.impl(name, _stand_in(name), _KEY)  # type: ignore[no-untyped-call]

    def give_back(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._library is not None:
                self._library._destroy()  # type: ignore[no-untyped-call]
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
    """What torch has for all devices; ``decompose`` would take what is written for compilers."""
    return _overload(name)._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


_NAMES = (
    *("scaled_dot_product_attention", "dropout", "batch_norm", "_fused_rms_norm"),
    *("lstm.input", "lstm.data", "gru.input", "gru.data"),
    *("rnn_tanh.input", "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"),
)
_here = _Here()
_registered = _Registered()


def _on_cpu() -> dict[str, Kernel]:
    return {"scaled_dot_product_attention": attention_on_cpu}


def _on_cuda(attention: str) -> dict[str, Kernel]:
    recurrent = {name: _refuse(name) for name in _NAMES if name.startswith(("lstm", "gru", "rnn"))}
    return {
        "scaled_dot_product_attention": attention_on_cuda(attention),
        "dropout": _dropout,
        "batch_norm": _batch_norm,
        "_fused_rms_norm": _rms_norm,
        **recurrent,
    }


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
    return _RmsNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]


def _refuse(name: str) -> Kernel:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(
            f"profile: got aten::{name} without its hardware, whose kernels there save what is not known, expected "
            f"operators that are modelled; profile the model on the device itself"
        )

    return refuse
