"""Moves bytes between a device and the tiers, and knows nothing of autograd.

Top down: ``device.py``, ``mover.py``, ``queues.py``, ``tiers.py``, ``backend.py``. The files that know a particular
device, disk or machine are chosen here.
"""

from spillway.runtime import parts
from spillway.runtime.accelerator import backend_for
from spillway.runtime.cuda_graphs import CapturedRuntime
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.disk import DirectDiskTier, DiskTier
from spillway.runtime.spill_file import SpillFile
from spillway.runtime.system import host_budget

parts.parts = parts.Parts(DeviceRuntime, backend_for, CapturedRuntime, DiskTier, DirectDiskTier, SpillFile, host_budget)
