"""Names of other offloading systems over Spillway's engine: change the import and keep the code.

An adapter translates names, units and the shapes of calls. Copies, their order and all decisions are the engine's.
"""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """The current accelerator, or the CPU."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return torch.device("cpu")
    return torch.device(device.type, torch.accelerator.current_device_index())
