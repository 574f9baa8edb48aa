"""The command line, one file a command; and the variables of the environment that give a program a command's options.

No file imports torch before its command runs: help is there at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

WAYS = ("budget", "policy", "ratio", "plan")
LIMITS = ("stream", "host_budget", "disk_budget", "allow", "hardware")
AUTO = "auto"
"""As a budget: the device decides, as with ``spillway run`` without options. As ``stream``: the plan decides."""
OFF = "off"
"""As a budget: nothing is managed, whatever else is set."""
QUIET = "SPILLWAY_QUIET"
HOOK = "spillway.pth"


def variable(option: str) -> str:
    """The variable of an option: ``"host_budget"`` is ``SPILLWAY_HOST_BUDGET``."""
    return f"SPILLWAY_{option.upper()}"


def asked(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The options of ``spillway run`` that the environment has. Empty: the process is not managed."""
    given = {name: value for name in (*WAYS, *LIMITS) if (value := environment.get(variable(name)))}
    return given if given.get("budget") != OFF and any(name in given for name in WAYS) else {}


def is_hooked() -> bool:
    """Whether Pythons of this environment read ``spillway.pth`` as they start."""
    return any(Path(folder, HOOK).is_file() for folder in sys.path)
