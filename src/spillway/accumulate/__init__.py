"""Gradient accumulation: micro-batches give the gradients of the whole batch.

``accumulator`` is the public class, and ``options`` checks its arguments. ``stepping`` holds the order of operations
from the summed losses to the optimizer's step. ``gradients`` normalises, clips and sums in float32. ``wrappers`` drives
DDP and FSDP2. ``splits`` checks any training step.
"""

from spillway.accumulate.accumulator import Accumulator
from spillway.accumulate.splits import split_equals_whole
from spillway.accumulate.stepping import AccumulationStep, DeviceNumber

__all__ = ["AccumulationStep", "Accumulator", "DeviceNumber", "split_equals_whole"]
