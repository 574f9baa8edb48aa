"""Spillway: the training-memory manager for PyTorch.

Of everything that autograd saves for the backward pass it decides, tensor by tensor, what to keep on the device and
what to offload to host memory or disk; the gradients are bit for bit those of plain PyTorch. Start with
:class:`offload`.
"""

import importlib
from typing import TYPE_CHECKING

import spillway.requirements  # noqa: F401  (first: it says so if torch is too old for what follows)

# isort: split
from spillway import policies
from spillway.attaching import Attached, attach
from spillway.binding import Affinity, bind_to_device
from spillway.capture.inspection import saved_tensors
from spillway.errors import (
    BackendError,
    BudgetError,
    CorruptError,
    InplaceError,
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
from spillway.events import Event, EventKind, EventList
from spillway.grouping import group
from spillway.groups import Groups
from spillway.offloading import keep, keep_tensor, offload, offload_tensor
from spillway.operators import OperatorCall, saved_by
from spillway.recomputing import Recompute, recompute
from spillway.records import Decision, GroupStats, OptimizerStats, SavedTensor, SavedTensorReport, StepStats
from spillway.report.table import Summary, SummaryRow
from spillway.session import Session
from spillway.summarizing import summary

if TYPE_CHECKING:
    from spillway.accumulate import Accumulator, DeviceNumber, WindowStep, split_equals_whole
    from spillway.budgeting import plan, profile, simulate
    from spillway.optim.optimizer import OffloadedOptimizer
    from spillway.planning.hardware import Hardware
    from spillway.planning.plan import Plan
    from spillway.planning.profile import Profile
    from spillway.planning.timeline import Timeline
    from spillway.sizes import longest

__version__ = "0.1.0.dev0"

__all__ = [
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
    "WindowStep",
    "__version__",
    "attach",
    "bind_to_device",
    "group",
    "keep",
    "keep_tensor",
    "longest",
    "offload",
    "offload_tensor",
    "plan",
    "policies",
    "profile",
    "recompute",
    "saved_by",
    "saved_tensors",
    "simulate",
    "split_equals_whole",
    "summary",
]

_LATER = {
    **dict.fromkeys(["Accumulator", "DeviceNumber", "WindowStep", "split_equals_whole"], "spillway.accumulate"),
    "OffloadedOptimizer": "spillway.optim.optimizer",
    **dict.fromkeys(["plan", "profile", "simulate"], "spillway.budgeting"),
    "longest": "spillway.sizes",
    "Hardware": "spillway.planning.hardware",
    "Plan": "spillway.planning.plan",
    "Profile": "spillway.planning.profile",
    "Timeline": "spillway.planning.timeline",
}
"""Names whose rooms are imported when they are first asked for: who does without does not wait for them."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
