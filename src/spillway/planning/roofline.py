"""How long an operator takes on hardware that is not there: a roofline, from what it computes and what it moves.

NOTE [ Roofline ]

An operator takes as long as its arithmetic at the rate that such operators reach, or as its bytes at the memory's
rate, whichever is longer, and no less than a launch (Williams, Waterman and Patterson 2009). The shares below are of
the rate of a large product of matrices as :class:`Hardware` has it. They were read off measurements of an H200, of
which tests hold the figures: the operators of a block of Llama-8B (``tests/planning/llama_8b_block.json``), plain steps
of such blocks with 8192 and with 32768 tokens, and of ResNet-50 (``benchmarks/results/``). Other devices are taken to
reach the same shares. What a data sheet promises is first cut down to what an H200 reaches of its own.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from spillway.planning.hardware import Hardware


class Work(enum.Enum):
    """What an operator mostly does."""

    PRODUCT = "product"
    """Products of matrices."""
    ATTENTION = "attention"
    """Fused attention. Of a causal one, half of the products count."""
    ATTENTION_BACKWARD = "attention backward"
    CONVOLUTION = "convolution"
    MEMORY = "memory"
    """All others. The arithmetic that they do is not counted."""


class Precision(enum.Enum):
    """In which arithmetic a product is computed."""

    HALF = "half"
    """16 bits."""
    TENSOR_FLOAT = "tensor-float"
    """32 bits in memory, 19 in the factors."""
    SINGLE = "single"
    DOUBLE = "double"


_SHARES = {
    # 5.34 ms in the block for 3.57e12 operations, where 780e12 a second would take 4.58.
    Work.PRODUCT: 0.86,
    # 0.61 in the block; what is left of the forward of longer ones, when all else is taken off, comes to 0.74.
    Work.ATTENTION: 0.67,
    # What is left of the two backwards, in between.
    Work.ATTENTION_BACKWARD: 0.62,
    # Of a step of ResNet-50 in float32, rounded for tensor cores, with channels first: a slow case, and the only one.
    Work.CONVOLUTION: 0.2,
    Work.MEMORY: 1.0,
}
"""Of the rate of products, what such operators reach."""
_REACHED_FLOPS = 780 / 989
_REACHED_MEMORY = 4.1 / 4.8
"""What an H200 was measured to reach, over its data sheet."""
_LAUNCH = 2e-6
"""Seconds of the shortest kernel."""
_TENSOR_FLOAT = 0.5
_SINGLE = 1 / 15
"""Of the rate in half precision: 67e12 of 989e12 on an H100, 19.5e12 of 312e12 on an A100."""
_SINGLE_GEFORCE = 0.5
"""82.6e12 of 165e12 on an RTX 4090."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What an operator computes and moves."""

    work: Work
    flops: float
    """Floating-point operations, an addition being one."""
    nbytes: int
    """Bytes that it reads and writes."""
    precision: Precision = Precision.HALF


def seconds_of(effort: Effort, hardware: Hardware) -> float:
    """How long it takes. See NOTE [ Roofline ].

    Args:
        effort: what is to be done.
        hardware: what does it.

    Example:
        >>> copy = Effort(Work.MEMORY, 0, 2 << 30)
        >>> round(seconds_of(copy, Hardware.named("h200")) * 1e3, 2)
        0.52
    """
    promised = hardware.is_promised
    memory = hardware.memory_rate * (_REACHED_MEMORY if promised else 1.0)
    flops = hardware.flops * (_REACHED_FLOPS if promised else 1.0) * _share(effort.precision, hardware)
    return max(effort.flops / (flops * _SHARES[effort.work]), effort.nbytes / memory, _LAUNCH)


def _share(precision: Precision, hardware: Hardware) -> float:
    if precision is Precision.HALF:
        return 1.0
    if precision is Precision.TENSOR_FLOAT:
        return _TENSOR_FLOAT
    single = _SINGLE_GEFORCE if "GeForce" in hardware.name else _SINGLE
    return single if precision is Precision.SINGLE else single / 2
