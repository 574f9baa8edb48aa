"""The public call that brings a process near to its device, and what it gives back.

NOTE [ Whose affinity it is ]

A thread's affinity belongs to whoever set it first. So nothing is done to a process that may not run everywhere
already, whether a launcher, ``taskset`` or the cpuset of a container said so: the kernel tells all of them in one mask.
Nor to one whose OpenMP was told where its threads go. In a process that is free, a single thread may have been pinned
all the same, and it stays where it is: only threads that may run everywhere are changed, and on the way back only those
that are still as they were left.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from spillway.runtime.accelerator import pci_address
from spillway.runtime.host_memory import count_nodes, near_node, node_cpus, online_cpus
from spillway.runtime.which_device import which_device

_THREADS = Path("/proc/self/task")
_NOT_BINDING = {"OMP_PROC_BIND": {"false"}, "KMP_AFFINITY": {"none", "disabled"}}
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True)
class Affinity:
    """What :func:`bind_to_device` did, and the way back. Also a context manager, which undoes it in the end.

    Example:
        >>> with spillway.bind_to_device() as affinity:  # doctest: +SKIP
        ...     print(affinity.why_not or f"on CPUs {sorted(affinity.after)} of node {affinity.node}")
        ...     train()
    """

    device: torch.device
    """The device that the process was to be near to."""
    node: int | None
    """The device's NUMA node; ``None``: unknown."""
    before: frozenset[int]
    """The CPUs that the process might run on."""
    after: frozenset[int]
    """The CPUs that it runs on since: those near to the device, or the same as before."""
    why_not: str | None = None
    """Why nothing was done; ``None`` if something was."""
    _bound: list[bool] = field(default_factory=list, repr=False, compare=False)

    def undo(self) -> None:
        """Let the threads run where they might before, but for those that somebody else has moved meanwhile.

        A second time, and where nothing was done, it does nothing.
        """
        if self._bound:
            self._bound.clear()
            _move_threads(self.after, self.before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


def bind_to_device(device: torch.device | str | None = None) -> Affinity:
    """Let this process run only on the CPUs that are near to its device, unless somebody else has said where it runs.

    On a machine of several NUMA nodes, memory and CPUs of the device's own are the ones from which copies go at full
    rate. This restricts all threads that there are, and with them the threads and processes that they start later, on
    Linux. Call it early: memory that was touched before stays where it is. Torch keeps its number of threads, which
    ``torch.set_num_threads(len(affinity.after))`` lowers.

    Nothing is done, and :attr:`Affinity.why_not` says so, where the process may not run on every CPU already (by a
    launcher, ``taskset``, ``numactl``, a container), where OpenMP was told where its threads go (``OMP_PROC_BIND``,
    ``OMP_PLACES``, ``GOMP_CPU_AFFINITY``, ``KMP_AFFINITY``), for the CPU itself, on a machine of one node, and where
    the system does not say which node is near. A thread that was pinned by itself stays where it is.

    Args:
        device: with an index, or the current one of its type; ``None``: the current accelerator, or else the CPU.

    Returns:
        What was done. It need not be kept; :meth:`Affinity.undo` gives it back.

    Raises:
        UsageError: for something that is no device, or that is not there.

    Example:
        >>> torch.accelerator.set_device_index(local_rank)  # doctest: +SKIP
        >>> affinity = spillway.bind_to_device()  # doctest: +SKIP
    """
    device = which_device(device)
    return _bind(device, None if device.type == "cpu" else pci_address(device), Path("/"), os.environ)


def _bind(device: torch.device, address: str | None, root: Path, environment: Mapping[str, str]) -> Affinity:
    """The same for the device at a PCI address. ``root`` is where ``/sys`` is."""
    if not hasattr(os, "sched_setaffinity"):
        return Affinity(device, None, frozenset(), frozenset(), "this system has no call for it; Linux has")
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
    """Why the process stays as it is. See NOTE [ Whose affinity it is ]."""
    if device.type == "cpu":
        return "every CPU is near to itself"
    nodes, online = count_nodes(root), online_cpus(root)
    if nodes < 2:
        return "the machine has one node" if nodes else "the system names no nodes"
    if not before >= online:
        return (
            f"somebody has restricted the process already, to {len(before)} of {len(online)} CPUs: a launcher, "
            f"taskset, numactl or a container"
        )
    for name in _BINDING:
        value = environment.get(name, "")
        if value and not _NOT_BINDING.get(name, set()) & set(value.lower().split(",")):
            return f"{name} is set, to {value!r}, and says where threads go"
    if node is None:
        return f"the system does not say which node {device} is near to"
    if not near:
        return f"node {node}, which {device} is near to, has no CPU"
    return None if near < before else f"all CPUs are on node {node}, which {device} is near to"


def _move_threads(source: frozenset[int], target: frozenset[int]) -> None:
    """Those that may run on just ``source``, to ``target``."""
    seen: set[int] = set()
    # A thread starts with the mask of the one that starts it, which may not have been moved yet.
    while new := {int(thread.name) for thread in _THREADS.iterdir()} - seen:
        for thread in new:
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(thread) == source:
                    os.sched_setaffinity(thread, target)
        seen |= new
