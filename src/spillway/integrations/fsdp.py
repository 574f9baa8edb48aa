"""Budgets of processes that share a machine, for FSDP2, DDP, HSDP and tensor parallelism.

``spillway.offload``, ``recompute`` and ``attach`` work on wrapped models without this, and never move a parameter.
"""

from __future__ import annotations

import socket

import torch.distributed

from spillway.errors import UsageError
from spillway.runtime.system import local_ranks
from spillway.units import parse_bytes


def local_share(total: int | str, *, group: torch.distributed.ProcessGroup | None = None) -> int:
    """This rank's equal share of its machine's memory, in bytes: for the budgets of a session.

    Args:
        total: bytes for all ranks on the machine, or a size like ``"256GiB"``.
        group: count its ranks on this host instead of asking the launcher, for processes that
            ``torch.multiprocessing`` has started. All ranks of the group have to call this.

    Returns:
        The share, rounded down to whole bytes.

    Raises:
        SizeError: if ``total`` is no size.
        UsageError: if the launcher (torchrun, MPI, Slurm) has set invalid environment variables, or this process is not
            in the group.

    Example:
        >>> budget = local_share("256GiB")  # under torchrun --nproc-per-node 8: 32 GiB  # doctest: +SKIP
        >>> session = spillway.Session(host_budget=budget, disk_budget=local_share("4TiB"))  # doctest: +SKIP
        >>> session.use_as_default()  # doctest: +SKIP
    """
    nbytes = parse_bytes(total, what="total")
    if group is None:
        return nbytes // local_ranks()
    if torch.distributed.get_rank(group) < 0:
        raise UsageError("group: this process is not in it; give a group that it is in, such as the default one")
    hosts: list[str | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(hosts, socket.gethostname(), group=group)
    return nbytes // hosts.count(socket.gethostname())
