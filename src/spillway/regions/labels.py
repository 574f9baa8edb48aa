"""Operators that belong to no region: the profiler's marks, and what FSDP does between two of its own.

FSDP2 gathers parameters in the hooks of modules, under labels for the profiler. In a re-run it gathers nothing, if its
parameters are still there: its operators are no part of what the region computes, and are let through unseen.
"""

from __future__ import annotations

from typing import Any

import torch

_ENTER = torch.ops.profiler._record_function_enter_new.default
_EXIT = torch.ops.profiler._record_function_exit._RecordFunction
_LABEL = "FSDP::"
_CASTS = "FSDP::cast_forward"
"""Casts of a module's inputs and outputs, which are computed again like anything else."""


class Unseen:
    """Follows the labels of one run."""

    def __init__(self) -> None:
        self.depth = 0
        """How many labels are open, from the first that hides what is below it."""
        self.any = False
        """Whether anything was hidden."""

    def __call__(self, operator: Any, args: tuple[Any, ...]) -> bool:
        """Whether the region does not see this operator."""
        if operator is _ENTER:
            label = str(args[0])
            if self.depth or (label.startswith(_LABEL) and not label.startswith(_CASTS)):
                self.depth += 1
                self.any = True
            return True
        if operator is _EXIT:
            self.depth = max(0, self.depth - 1)
            return True
        return self.depth > 0
