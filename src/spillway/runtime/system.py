"""The machine of this process: devices, CPU memory, NUMA nodes, file systems; and its CPU affinity.

NOTE [ Affinities that are left alone ]

A process that may not run on every CPU is left alone: the kernel tells of launchers, ``taskset`` and containers in one
mask. In a process that may run everywhere, a single thread may have been pinned, and it stays pinned: only threads that
may run everywhere are moved. The way back moves only threads that still have the affinity that they were given here.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from spillway.errors import SpillPathError, UsageError

_ROOT = Path("/")
_CPU_INFO = Path("/proc/cpuinfo")
_THREADS = Path("/proc/self/task")
_DEFAULT_PLACES: tuple[Callable[[], str], ...] = (tempfile.gettempdir, lambda: "/var/tmp", os.getcwd)
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_MEMORY_DEVICES = ("/dev/ram", "/dev/zram")
_EXPECTED = "expected a directory on a disk in which files can be made; set SPILLWAY_DIR or give another one"
_NOT_BINDING = {"OMP_PROC_BIND": {"false"}, "KMP_AFFINITY": {"none", "disabled"}}
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")

# Launchers say how many processes run: torchrun, Open MPI, Intel MPI and MPICH, Slurm.
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")


HOST_SHARE = 0.7
"""The default budget, as a share of the CPU memory that the process may use: the program needs some itself."""


def number_of_launcher(names: Sequence[str], what: str, least: int) -> int:
    """The number in the first of these variables that the launcher has set; ``least`` without one.

    Raises:
        UsageError: the variable is no such number.
    """
    name = next((name for name in names if name in os.environ), None)
    if name is None:
        return least
    said = os.environ[name]
    if not said.isascii() or not said.isdigit() or int(said) < least:
        raise UsageError(
            f"{name}: got {said!r} in the environment, expected {what}, an integer of at least {least}; set it right, "
            f"or unset it"
        )
    return int(said)


def local_ranks() -> int:
    """How many processes of this job run on the machine, according to the launcher; 1 without one."""
    return number_of_launcher(_LOCAL_RANKS, "the number of processes on this machine", 1)


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


def pci_address(device: torch.device) -> str | None:
    """A device's PCI address, as ``"0000:3b:00.0"``; ``None`` where torch does not know it."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


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
        raise UsageError(
            f"device: got {device}, expected one that is here: torch {torch.__version__} finds no {device.type} "
            f"device. Give {str(accelerator or 'cpu')!r}, or leave it out"
        )
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


class Mount(NamedTuple):
    """A mounted file system."""

    point: str
    kind: str
    """Its type, as ``"ext4"``."""
    device: str


def mounts() -> list[Mount]:
    """All mounted file systems, in the order in which they were mounted."""
    import psutil  # not at the top: only a session that spills to disk needs it

    return [Mount(part.mountpoint, part.fstype, part.device) for part in psutil.disk_partitions(all=True)]


def choose_directory(
    directory: str | os.PathLike[str] | None, allow_memory_filesystem: bool, mounts: Sequence[Mount]
) -> Path:
    """The absolute path of the directory for the spill file.

    ``None`` means ``$SPILLWAY_DIR``, or else the first of the temporary directory, ``/var/tmp`` and the working
    directory that is on a disk, or in memory if that is allowed. Raises ``SpillPathError`` if none can be used.
    """
    named = directory if directory is not None else os.environ.get("SPILLWAY_DIR") or None
    if named is not None:
        return _usable(named, allow_memory_filesystem, mounts)
    refusals: dict[str, None] = {}  # each once, in order
    for in_memory in (False, True) if allow_memory_filesystem else (False,):
        for place in _DEFAULT_PLACES:
            try:
                return _usable(place(), in_memory, mounts)
            except (SpillPathError, OSError) as error:  # OSError: no temporary or no working directory at all
                refusals[str(error)] = None
    raise SpillPathError(
        "spill file: found no directory for it; set SPILLWAY_DIR or give a directory on a disk. Tried:\n  "
        + "\n  ".join(refusals)
    )


def _usable(place: str | os.PathLike[str], allow_memory_filesystem: bool, mounts: Sequence[Mount]) -> Path:
    """The directory's absolute path, if it can be used."""
    try:
        path = Path(place).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of symbolic links
        raise SpillPathError(f"spill file: got {os.fspath(place)!r} ({error}), {_EXPECTED}") from error
    if not path.is_dir():
        raise SpillPathError(f"spill file: got {str(path)!r}, which is not a directory, {_EXPECTED}")
    if not os.access(path, os.W_OK | os.X_OK):
        raise SpillPathError(f"spill file: got {str(path)!r}, which is not writable, {_EXPECTED}")
    mount = mount_of(path, mounts)
    in_memory = mount.kind in _MEMORY_FILESYSTEMS or mount.device.startswith(_MEMORY_DEVICES)
    if in_memory and not allow_memory_filesystem:
        raise SpillPathError(
            f"spill file: got {str(path)!r} on {mount.point!r} ({mount.kind}), which is host memory: spilling there "
            f"saves nothing; {_EXPECTED}, or allow_memory_filesystem=True"
        )
    return path


def mount_of(path: Path, mounts: Sequence[Mount]) -> Mount:
    """The file system of a path: the deepest mount above it, and of two at one point the later one."""
    above = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(Path(mount.point).parts), default=Mount("/", "", ""))


@dataclass(frozen=True)
class Affinity:
    """The result of :func:`bind_to_device`. As a context manager, it undoes the binding in the end.

    Example:
        >>> with spillway.bind_to_device() as affinity:  # doctest: +SKIP
        ...     print(affinity.why_not or f"on CPUs {sorted(affinity.after)} of node {affinity.node}")
        ...     train()
    """

    device: torch.device
    """The device to be near to."""
    node: int | None
    """The device's NUMA node; ``None``: unknown."""
    before: frozenset[int]
    """The CPUs that the process could run on."""
    after: frozenset[int]
    """The CPUs that it runs on now: those near to the device, or the same as before."""
    why_not: str | None = None
    """Why nothing was done; ``None``: the process is bound."""
    _bound: list[bool] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Let the threads run where they could before, except those that were moved meanwhile. Idempotent."""
        if self._bound:
            self._bound.clear()
            _move_threads(self.after, self.before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.undo()


def bind_to_device(device: torch.device | str | None = None) -> Affinity:
    """Let this process run only on the CPUs near to its GPU, unless its affinity is already set.

    On a machine with several NUMA nodes, copies reach full bandwidth from the memory and the CPUs of the GPU's own
    node. On Linux, this binds all threads of the process, and so the threads and processes that they start later. Call
    it early: memory that was touched before stays where it is. Torch keeps its number of threads, which
    ``torch.set_num_threads(len(affinity.after))`` lowers.

    Nothing is done, and :attr:`Affinity.why_not` says why:

    - if the process may not run on every CPU (by a launcher, ``taskset``, ``numactl``, a container),
    - if OpenMP binds threads (``OMP_PROC_BIND``, ``OMP_PLACES``, ``GOMP_CPU_AFFINITY``, ``KMP_AFFINITY``),
    - for the CPU, on a machine with one node, and if the system does not say which node is near.

    Args:
        device: with an index, or the current one of its type; ``None``: the current accelerator, or else the CPU.

    Returns:
        The affinity before and after, with :meth:`Affinity.undo` to undo the binding.

    Raises:
        UsageError: for anything that is not a device of this machine.

    Example:
        >>> torch.accelerator.set_device_index(local_rank)  # doctest: +SKIP
        >>> affinity = spillway.bind_to_device()  # doctest: +SKIP
    """
    device = which_device(device)
    return _bind(device, None if device.type == "cpu" else pci_address(device), Path("/"), os.environ)


def _bind(device: torch.device, address: str | None, root: Path, environment: Mapping[str, str]) -> Affinity:
    """The same for the device at a PCI address. ``root`` is the directory of ``/sys``."""
    if not hasattr(os, "sched_setaffinity"):
        return Affinity(device, None, frozenset(), frozenset(), "only Linux can bind a process")
    before = frozenset(os.sched_getaffinity(os.getpid()))
    node = None if address is None else near_node(address, root)
    near = frozenset() if node is None else before & node_cpus(node, root)
    why_not = _why_not(device, node, before, near, root, environment)
    if why_not is not None:
        return Affinity(device, node, before, before, why_not)
    try:
        _move_threads(before, near)
    except OSError as error:
        _move_threads(near, before)
        return Affinity(device, node, before, before, f"the system refused: {error}")
    return Affinity(device, node, before, near, _bound=[True])


def _why_not(
    device: torch.device,
    node: int | None,
    before: frozenset[int],
    near: frozenset[int],
    root: Path,
    environment: Mapping[str, str],
) -> str | None:
    """Why nothing is done. See NOTE [ Affinities that are left alone ]."""
    if device.type == "cpu":
        return "the device is the CPU"
    nodes, online = count_nodes(root), _cpus_in(root / "sys/devices/system/cpu/online")
    if nodes < 2:
        return "the machine has one NUMA node" if nodes else "the system names no NUMA nodes"
    if not before >= online:
        return (
            f"the process is bound to {len(before)} of {len(online)} CPUs already, by a launcher, taskset, numactl or "
            f"a container"
        )
    for name in _BINDING:
        value = environment.get(name, "")
        if value and not _NOT_BINDING.get(name, set()) & set(value.lower().split(",")):
            return f"{name} is {value!r}, which binds threads"
    if node is None:
        return f"the system does not say which NUMA node {device} is near to"
    if not near:
        return f"NUMA node {node} of {device} has no CPU"
    return None if near < before else f"all CPUs are on NUMA node {node} of {device}"


def _move_threads(source: frozenset[int], target: frozenset[int]) -> None:
    """Move the threads whose affinity is exactly ``source`` to ``target``."""
    seen: set[int] = set()
    # A thread that starts meanwhile has the affinity of its parent, which may not have been moved yet.
    while new := {int(thread.name) for thread in _THREADS.iterdir()} - seen:
        for thread in new:
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(thread) == source:
                    os.sched_setaffinity(thread, target)
        seen |= new
