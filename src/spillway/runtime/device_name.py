"""What a device is called, for people and for the names of files."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

_CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: torch.device) -> str:
    """The accelerator's name by its driver, or the processor's."""
    if device.type == "cpu":
        return cpu_name()
    # torch.accelerator knows no names; the module of the device's type does, where it has one.
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def cpu_name() -> str:
    """The processor's, by the kernel, or its architecture."""
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
