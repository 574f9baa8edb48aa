"""Gradient accumulation: windows of micro-batches whose gradients are those of the whole batch.

``accumulator`` is the public class; ``options``, ``states`` and ``checks`` are its words. ``totals`` adds up what a
window weighs, over ranks too; ``stepping`` has the order of operations from there to the optimizer's step, with
``gradients``, which normalises and clips, and ``widening``, which adds up in float32.
``wrappers`` are the modules that average gradients over ranks, in ``ddp`` and ``fsdp``. ``record`` is what a step
gives. ``splits`` checks anybody's step; ``batches`` cuts a batch for it, and ``comparison`` says what is wrong.
"""

from spillway.accumulate.accumulator import Accumulator
from spillway.accumulate.record import DeviceNumber, WindowStep
from spillway.accumulate.splits import split_equals_whole

__all__ = ["Accumulator", "DeviceNumber", "WindowStep", "split_equals_whole"]
