"""Spillway: the training-memory manager for PyTorch.

Of everything that autograd saves for the backward pass it decides, tensor by tensor, what to keep on the device and
what to offload to host memory or disk; the gradients are bit for bit those of plain PyTorch. Start with
:class:`offload`.
"""

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from spillway import policies
    from spillway.accumulate import Accumulator, DeviceNumber, WindowStep, split_equals_whole
    from spillway.attaching import Attached, attach
    from spillway.binding import Affinity, bind_to_device
    from spillway.budgeting import plan, profile, simulate
    from spillway.capture.decide import saved_tensors
    from spillway.capture.groups import Groups
    from spillway.events import Event, EventKind, EventList
    from spillway.losses import cross_entropy
    from spillway.offloading import group, keep, keep_tensor, offload, offload_tensor
    from spillway.operators import OperatorCall, saved_by, within
    from spillway.optim.optimizer import OffloadedOptimizer
    from spillway.planning.hardware import Hardware
    from spillway.planning.plan import Plan
    from spillway.planning.profile import Profile
    from spillway.planning.timeline import Timeline
    from spillway.recomputing import Recompute, recompute
    from spillway.records import Decision, GroupStats, OptimizerStats, SavedTensor, SavedTensorReport, StepStats
    from spillway.session import Session
    from spillway.sizes import longest
    from spillway.summarizing import Summary, SummaryRow, summary

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
    "cross_entropy",
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
    "within",
]

_ROOMS = {
    "accumulate": ["Accumulator", "DeviceNumber", "WindowStep", "split_equals_whole"],
    "attaching": ["Attached", "attach"],
    "binding": ["Affinity", "bind_to_device"],
    "budgeting": ["plan", "profile", "simulate"],
    "capture.decide": ["saved_tensors"],
    "capture.groups": ["Groups"],
    "events": ["Event", "EventKind", "EventList"],
    "losses": ["cross_entropy"],
    "offloading": ["group", "keep", "keep_tensor", "offload", "offload_tensor"],
    "operators": ["OperatorCall", "saved_by", "within"],
    "optim.optimizer": ["OffloadedOptimizer"],
    "planning.hardware": ["Hardware"],
    "planning.plan": ["Plan"],
    "planning.profile": ["Profile"],
    "planning.timeline": ["Timeline"],
    "recomputing": ["Recompute", "recompute"],
    "records": ["Decision", "GroupStats", "OptimizerStats", "SavedTensor", "SavedTensorReport", "StepStats"],
    "session": ["Session"],
    "sizes": ["longest"],
    "summarizing": ["Summary", "SummaryRow", "summary"],
}
"""Public names by the room that they are in. A room is imported when one of its names is first asked for: who does
without does not wait for it, and the command line can say what its commands are before torch is there."""

_LATER = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    value: object
    if name == "policies":
        _require_torch()
        return importlib.import_module("spillway.policies")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _require_torch()
    value = getattr(importlib.import_module(f"spillway.{_LATER[name]}"), name)
    globals()[name] = value
    return value


def _require_torch() -> None:
    # First: it says so if torch is too old for what follows.
    importlib.import_module("spillway.requirements")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, "policies"})
