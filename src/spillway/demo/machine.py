"""What the demo ran on: hardware and versions, as they stand beside its figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

import spillway

_CPU_INFO = Path("/proc/cpuinfo")


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """The device, the processor with the cores that this process may use, the memory in bytes, the system."""
    cpu = _cpu_name()
    return {
        "device": cpu if device.type == "cpu" else _accelerator_name(device),
        "cpu": cpu,
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


def _accelerator_name(device: torch.device) -> str:
    # torch.accelerator knows no names; the module of the device's type does, where it has one.
    module = torch.get_device_module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type


def _cpu_name() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
