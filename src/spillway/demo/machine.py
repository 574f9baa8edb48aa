"""What the demo ran on: hardware and versions, as they stand beside its figures."""

from __future__ import annotations

import os
import platform

import psutil
import torch

import spillway
from spillway.runtime.device_name import cpu_name, device_name


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """The device, the processor with the cores that this process may use, the memory in bytes, the system."""
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Of Spillway, torch and Python."""
    return {
        "spillway": spillway.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
