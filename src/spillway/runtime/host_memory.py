"""How much host memory a process may use, and which of it is near to a device. Read from the system's own files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from spillway.errors import UsageError

_ROOT = Path("/")

# What launchers say: torchrun, Open MPI, Intel MPI and MPICH, Slurm.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes of this training run on the machine, by what the launcher says; 1 if it says nothing.

    Args:
        environment: where it says so.

    Raises:
        UsageError: if that is no number of processes.
    """
    for name in _LOCAL_RANKS:
        said = environment.get(name)
        if said is not None:
            if not said.isascii() or not said.isdigit() or int(said) == 0:
                raise UsageError(
                    f"{name}: got {said!r} in the environment, expected how many processes run on this machine, a "
                    f"whole number of at least 1; set it right, or unset it"
                )
            return int(said)
    return 1


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes that this process may use: what the machine has, or less where a control group says so (a container).

    Args:
        root: where ``/proc`` and ``/sys`` are.
    """
    import psutil  # not at the top: only a session needs it, and it takes long

    return min([psutil.virtual_memory().total, *_group_limits(root)])


def _group_limits(root: Path) -> list[int]:
    """The limits of the process's control groups, of both versions, and of the groups above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside of a container the path may be the host's, and its own group is the top.
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == top or top in folder.parents:
                limits += _number_in(folder / name)
    return limits


def _number_in(file: Path) -> list[int]:
    try:
        return [int(file.read_text(encoding="ascii"))]
    except (OSError, ValueError):
        # There is no such group here, or its limit is the word "max".
        return []


def near_cpus(pci_address: str, root: Path = _ROOT) -> set[int]:
    """The CPUs on the NUMA node of a PCI device, which get memory of that node; empty where it makes no difference.

    Args:
        pci_address: as ``"0000:3b:00.0"``.
        root: where ``/sys`` is.
    """
    device = root / "sys/bus/pci/devices" / pci_address
    node = _number_in(device / "numa_node")
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if not node or node[0] < 0 or len(nodes) < 2:
        return set()
    try:
        text = (root / f"sys/devices/system/node/node{node[0]}/cpulist").read_text(encoding="ascii")
    except OSError:
        return set()
    return _cpus(text)


def _cpus(text: str) -> set[int]:
    """``"0-3,8"`` is 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
