"""What an operator computes and moves, by its arguments and what it gave: the effort that a roofline wants to know.

Floating-point operations are counted by torch's own formulas (``torch.utils.flop_counter``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spillway.planning.roofline import Effort, Precision, Work
from spillway.regions.schema import Facts, argument
from spillway.regions.tensors import split, tensors_in

_HALVES = (torch.float16, torch.bfloat16)
_CONVOLUTIONS = ("aten::convolution", "aten::cudnn_convolution", "aten::_convolution", "aten::convolution_backward")
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")

_GATHERS = frozenset(
    {
        *("aten::embedding", "aten::index_select", "aten::gather", "aten::index", "aten::take"),
        *("aten::take_along_dim", "aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    }
)
"""Operators that read of their first tensor no more than they give."""
_NOTHING = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty"})
"""Operators that allocate, and no more."""


def effort_of(func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Effort | None:
    """The effort of a call; ``None`` if it launches nothing: a view, an allocation.

    Args:
        func: the overload.
        facts: what its schema says.
        args: its arguments.
        kwargs: by keyword.
        output: what it gave.
    """
    name = func._schema.name
    inputs, _ = split(args, kwargs)
    outputs = tensors_in(output if isinstance(output, (list, tuple)) else (output,))
    if name in _NOTHING or (not facts.writes and _is_view(inputs, outputs)):
        return None
    return Effort(_work(name, func), _flops(func, args, kwargs, output), _nbytes(name, facts, args, kwargs, inputs,
                  outputs), _precision(name, inputs))  # fmt: skip


def _is_view(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Whether it gave nothing but what lies in its arguments."""
    known = {tensor.untyped_storage()._cdata for tensor in inputs}
    return all(tensor.untyped_storage()._cdata in known for tensor in outputs)


def _work(name: str, func: Any) -> Work:
    if name.startswith(_ATTENTION):
        return Work.ATTENTION_BACKWARD if "backward" in name else Work.ATTENTION
    if name in _CONVOLUTIONS:
        return Work.CONVOLUTION
    return Work.PRODUCT if func._overloadpacket in _formulas() else Work.MEMORY


def _formulas() -> dict[Any, Any]:
    # Here and not above: it takes a while to import.
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    formula = _formulas().get(func._overloadpacket)
    if formula is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=output))
    names = [each.name for each in func._schema.arguments]
    # Torch counts all tiles of a causal attention, of which kernels skip half.
    if "is_causal" in names and argument(args, kwargs, names.index("is_causal")):
        flops /= 2
    return flops


def _nbytes(
    name: str,
    facts: Facts,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> int:
    written = tensors_in(argument(args, kwargs, key) for key in facts.writes)
    known = {id(tensor) for tensor in inputs}
    made = sum(_touched(tensor) for tensor in outputs if id(tensor) not in known) + sum(map(_touched, written))
    if name in _GATHERS:
        return 2 * made + sum(_touched(tensor) for tensor in inputs[1:])
    return made + sum(map(_touched, inputs))


def _touched(tensor: torch.Tensor) -> int:
    """Bytes of it: of what is expanded, those that there are."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.itemsize


def _precision(name: str, inputs: Sequence[torch.Tensor]) -> Precision:
    """Of the first factor. Torch may round 32 bits, if it was told to; of convolutions, unless it was told not to."""
    dtype = next((tensor.dtype for tensor in inputs if tensor.is_floating_point()), torch.float32)
    if dtype in _HALVES or dtype.itemsize == 1:
        return Precision.HALF
    if dtype is torch.float64:
        return Precision.DOUBLE
    if name in _CONVOLUTIONS:
        rounds = torch.backends.cudnn.allow_tf32
    else:
        rounds = torch.get_float32_matmul_precision() != "highest"
    return Precision.TENSOR_FLOAT if rounds else Precision.SINGLE
