"""The machine of this process: devices, CPU memory and NUMA nodes, read from the system's own files."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from spillway.errors import UsageError

_ROOT = Path("/")
_CPU_INFO = Path("/proc/cpuinfo")

# Launchers say how many processes run: torchrun, Open MPI, Intel MPI and MPICH, Slurm.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


HOST_SHARE = 0.7
"""The default budget, as a share of the CPU memory that the process may use: the program needs some itself."""


def local_ranks(environment: Mapping[str, str] = os.environ) -> int:
    """How many processes of this job run on the machine, according to the launcher; 1 without one.

    Raises:
        UsageError: the launcher's variable is no number of processes.
    """
    for name in _LOCAL_RANKS:
        said = environment.get(name)
        if said is not None:
            if not said.isascii() or not said.isdigit() or int(said) == 0:
                raise UsageError(
                    f"{name}: got {said!r} in the environment, expected the number of processes on this machine, at "
                    f"least 1; set it right, or unset it"
                )
            return int(said)
    return 1


def many_processes() -> bool:
    """Whether this process trains in a process group of several."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def memory_limit(root: Path = _ROOT) -> int:
    """Bytes of CPU memory that this process may use: those of the machine, or of its control group (a container)."""
    import psutil  # not at the top: only a session needs it, and it takes long

    return min([psutil.virtual_memory().total, *_group_limits(root)])


def host_budget() -> int:
    """The default budget of CPU memory: a share of :func:`memory_limit`, divided by the ranks on the machine."""
    return int(memory_limit() * HOST_SHARE) // local_ranks()


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
    """The CPUs on the NUMA node of a PCI device (``"0000:3b:00.0"``); empty on a machine with one node."""
    node = near_node(pci_address, root)
    return set() if node is None or count_nodes(root) < 2 else node_cpus(node, root)


def near_node(pci_address: str, root: Path = _ROOT) -> int | None:
    """The NUMA node of a PCI device; ``None`` where the system does not say."""
    node = _number_in(root / "sys/bus/pci/devices" / pci_address / "numa_node")
    return node[0] if node and node[0] >= 0 else None


def count_nodes(root: Path = _ROOT) -> int:
    """How many NUMA nodes the machine has; 0 where the system does not say."""
    return len(list((root / "sys/devices/system/node").glob("node[0-9]*")))


def node_cpus(node: int, root: Path = _ROOT) -> set[int]:
    """The CPUs of a NUMA node; empty if it has none, or is not there."""
    return _cpus_in(root / f"sys/devices/system/node/node{node}/cpulist")


def online_cpus(root: Path = _ROOT) -> set[int]:
    """The CPUs that the system runs on; empty where it does not say."""
    return _cpus_in(root / "sys/devices/system/cpu/online")


def _cpus_in(file: Path) -> set[int]:
    """``"0-3,8"`` names 0, 1, 2, 3 and 8."""
    found: set[int] = set()
    try:
        text = file.read_text(encoding="ascii")
    except OSError:
        return found
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def which_device(device: torch.device | str | None = None) -> torch.device:
    """The device of a user's argument, with an index unless it is the CPU.

    ``None`` is the current accelerator, or the CPU where there is none.

    Raises:
        UsageError: no device, or one that this machine does not have.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        device = accelerator if accelerator is not None else torch.device("cpu")
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f'device: got {device!r}, expected a device such as "cuda:0", or None') from error
    if device.type == "cpu":
        return torch.device("cpu")
    if accelerator is None or accelerator.type != device.type:
        raise UsageError(f"device: got {device}, expected {accelerator or 'the CPU'}, which is here, or None")
    count = torch.accelerator.device_count()
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= count:
        raise UsageError(f"device: got {device}, expected an index below {count}, as many as are here")
    return torch.device(device.type, index)


def memory_info(device: torch.device) -> tuple[int, int]:
    """Free bytes of an accelerator, and all of them."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else torch.accelerator.get_memory_info(device)


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
