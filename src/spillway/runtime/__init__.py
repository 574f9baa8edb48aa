"""Moves bytes between a device and the tiers, and knows nothing of autograd.

Top down: ``device.py``, ``mover.py``, ``queues.py``, ``tiers.py``, ``backend.py``. A session makes what is named here.
"""

from spillway.runtime.accelerator import backend_for
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.spill_file import SpillFile
from spillway.runtime.system import host_budget

__all__ = ["DeviceRuntime", "SpillFile", "backend_for", "host_budget"]
