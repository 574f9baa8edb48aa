"""``spillway demo``: the training of ``training.py`` in several ways, side by side, as ``spillway bench`` does it."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING

import typer

import spillway
from spillway.cli.bench import Steps, Table, Ways, compare
from spillway.cli.plan import hardware_of
from spillway.errors import SpillwayError

if TYPE_CHECKING:
    import torch

_MODULE = "spillway.cli.training"


class DemoError(SpillwayError, RuntimeError):
    """A way failed, or its numbers differ from the baseline's."""


def demo(
    context: typer.Context,
    ways: Ways = "baseline,recompute,offload,budget=60%",
    steps: Steps = 16,
    json: Table = None,
) -> None:
    """Train a small GPT on real text in several ways; compare time, memory, losses and gradients.

    Other options are the training's: --device, --layers, --width, --sequence, --batch and --data.
    """
    spillway._require_torch()
    from spillway.cli.running.script import Script
    from spillway.cli.training import parse

    settings = parse(context.args)
    if "budget=" in ways:
        # Before processes start that would disturb it.
        hardware_of(None, settings.device)
    results = compare(Script(_MODULE, context.args, is_module=True), ways, steps, json)
    outputs = {result.output for result in results.values() if not result.error}
    if failed := [way for way, result in results.items() if result.error]:
        raise DemoError(f"{', '.join(failed)}: no step was measured. The table says why")
    if len(outputs) > 1:
        raise DemoError("losses or gradients are not bit for bit the same in all ways. This is a bug; report it")


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """The device, the processor with the cores that this process may use, the memory in bytes, the system."""
    import psutil
    import torch

    from spillway.runtime.system import cpu_name, device_name

    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of Spillway, torch and Python."""
    import torch

    return {"spillway": spillway.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
