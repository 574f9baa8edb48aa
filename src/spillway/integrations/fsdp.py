"""Training in many processes: FSDP2, DDP, HSDP, tensor parallel.

``spillway.offload``, ``recompute`` and ``attach`` need nothing of this: they work on wrapped models as on others, and
never move a parameter. What a process cannot know by itself is how many others share the machine.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import torch.distributed

from spillway.errors import UsageError
from spillway.runtime.host_memory import local_ranks
from spillway.units import parse_bytes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def local_share(total: int | str, *, group: ProcessGroup | None = None) -> int:
    """This rank's share of what its machine has, in bytes: for the budgets of a session, which are one process's own.

    Args:
        total: what all ranks on the machine may use together, in bytes, or as a size like ``"256GiB"``.
        group: count its ranks that run on the same host, instead of believing the launcher: for processes that were
            started by ``torch.multiprocessing`` or by hand. All ranks of the group have to call this.

    Returns:
        An equal share, rounded down to whole bytes.

    Raises:
        SizeError: if ``total`` is no size.
        UsageError: if the launcher (torchrun, MPI, Slurm) says nonsense in the environment, or this process is not in
            the group.

    Example:
        >>> budget = local_share("256GiB")  # under torchrun --nproc-per-node 8: 32 GiB  # doctest: +SKIP
        >>> session = spillway.Session(host_budget=budget, disk_budget=local_share("4TiB"))  # doctest: +SKIP
        >>> session.use_as_default()  # doctest: +SKIP
    """
    nbytes = parse_bytes(total, what="total")
    if group is None:
        return nbytes // local_ranks()
    if torch.distributed.get_rank(group) < 0:
        raise UsageError("group: got one that this process is not in, expected one that it is in, such as the default")
    hosts: list[str | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(hosts, socket.gethostname(), group=group)
    return nbytes // hosts.count(socket.gethostname())
