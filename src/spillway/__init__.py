"""Spillway: the training-memory manager for PyTorch.

For each tensor that autograd saves, Spillway decides whether to keep it on the GPU, offload it to CPU memory or disk,
or recompute it. Gradients are bit for bit those of plain PyTorch. Start with :class:`offload` or :func:`attach`.
"""

import importlib
import re
from typing import TYPE_CHECKING

from spillway.errors import (
    BackendError,
    BudgetError,
    CorruptError,
    InplaceError,
    ParkedError,
    PolicyError,
    RaceError,
    RecomputeError,
    SessionError,
    SizeError,
    SpillPathError,
    SpillwayError,
    SplitError,
    TierError,
    TierFullError,
    TransferError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from spillway import policies
    from spillway.accumulate import AccumulationStep, Accumulator, DeviceNumber, split_equals_whole
    from spillway.attaching import Attached, attach
    from spillway.checkpointing.losses import cross_entropy
    from spillway.checkpointing.selectors import OperatorCall, saved_by, within
    from spillway.offloading import group, keep, keep_tensor, offload, offload_tensor
    from spillway.optim.optimizer import OffloadedOptimizer
    from spillway.parameters.weights import load_weights
    from spillway.parking.parked import Parked, park, parked
    from spillway.planner.hardware import Hardware
    from spillway.planner.plan import Plan
    from spillway.planner.profile import Profile
    from spillway.planner.report.summary import Summary, SummaryRow, summary
    from spillway.planner.timeline import Timeline
    from spillway.planning import longest, plan, profile, simulate
    from spillway.recomputing import Recompute, recompute
    from spillway.runtime.system import Affinity, bind_to_device
    from spillway.saved_tensors.groups import Groups
    from spillway.saved_tensors.locator import SavedTensorReport, list_saved_tensors
    from spillway.session import Session
    from spillway.types import (
        Decision,
        Event,
        EventKind,
        EventList,
        GroupStats,
        OptimizerStats,
        SavedTensor,
        StepStats,
    )

__version__ = "0.1.0.dev0"

__all__ = [
    "AccumulationStep",
    "Accumulator",
    "Affinity",
    "Attached",
    "BackendError",
    "BudgetError",
    "CorruptError",
    "Decision",
    "DeviceNumber",
    "Event",
    "EventKind",
    "EventList",
    "GroupStats",
    "Groups",
    "Hardware",
    "InplaceError",
    "OffloadedOptimizer",
    "OperatorCall",
    "OptimizerStats",
    "Parked",
    "ParkedError",
    "Plan",
    "PolicyError",
    "Profile",
    "RaceError",
    "Recompute",
    "RecomputeError",
    "SavedTensor",
    "SavedTensorReport",
    "Session",
    "SessionError",
    "SizeError",
    "SpillPathError",
    "SpillwayError",
    "SplitError",
    "StepStats",
    "Summary",
    "SummaryRow",
    "TierError",
    "TierFullError",
    "Timeline",
    "TransferError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "attach",
    "bind_to_device",
    "cross_entropy",
    "group",
    "keep",
    "keep_tensor",
    "list_saved_tensors",
    "load_weights",
    "longest",
    "offload",
    "offload_tensor",
    "park",
    "parked",
    "plan",
    "policies",
    "profile",
    "recompute",
    "saved_by",
    "simulate",
    "split_equals_whole",
    "summary",
    "within",
]

_MODULES = {
    "accumulate": "AccumulationStep Accumulator DeviceNumber split_equals_whole",
    "attaching": "Attached attach",
    "checkpointing.losses": "cross_entropy",
    "checkpointing.selectors": "OperatorCall saved_by within",
    "offloading": "group keep keep_tensor offload offload_tensor",
    "optim.optimizer": "OffloadedOptimizer",
    "parameters.weights": "load_weights",
    "parking.parked": "Parked park parked",
    "planner.hardware": "Hardware",
    "planner.plan": "Plan",
    "planner.profile": "Profile",
    "planner.report.summary": "Summary SummaryRow summary",
    "planner.timeline": "Timeline",
    "planning": "longest plan profile simulate",
    "recomputing": "Recompute recompute",
    "runtime.system": "Affinity bind_to_device",
    "saved_tensors.groups": "Groups",
    "saved_tensors.locator": "SavedTensorReport list_saved_tensors",
    "session": "Session",
    "types": "Decision Event EventKind EventList GroupStats OptimizerStats SavedTensor StepStats",
}
"""Public names by module. A module is imported when one of its names is first used, so that the command line can
print its help before torch is imported."""

_LATER = {name: module for module, names in _MODULES.items() for name in names.split()}
_OLDEST_TORCH = (2, 11)


def __getattr__(name: str) -> object:
    if name != "policies" and name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_torch()
    if name == "policies":
        return importlib.import_module("spillway.policies")
    value: object = getattr(importlib.import_module(f"spillway.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def _require_torch() -> None:
    """Raise :class:`UnsupportedError` if torch is too old. Call this before an import that a newer torch needs."""
    import torch

    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if match is None or (int(match[1]), int(match[2])) < _OLDEST_TORCH:
        oldest = ".".join(map(str, _OLDEST_TORCH))
        raise UnsupportedError(
            f"got torch {torch.__version__}, expected {oldest} or later, since Spillway needs its saved-tensor hooks "
            f"and streams; pip install --upgrade torch"
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "policies"})
