"""Binds a process to the CPUs near to its GPU.

NOTE [ Affinities that are left alone ]

A process that may not run on every CPU is left alone: the kernel tells of launchers, ``taskset`` and containers in one
mask. In a process that may run everywhere, a single thread may have been pinned, and it stays pinned: only threads that
may run everywhere are moved. The way back moves only threads that still have the affinity that they were given here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from spillway.runtime.accelerator import pci_address
from spillway.runtime.system import count_nodes, near_node, node_cpus, online_cpus, which_device

_THREADS = Path("/proc/self/task")
_NOT_BINDING = {"OMP_PROC_BIND": {"false"}, "KMP_AFFINITY": {"none", "disabled"}}
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


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
    nodes, online = count_nodes(root), online_cpus(root)
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
