"""Which rank this process is, and which files are its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from spillway.errors import UsageError

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
"""What launchers say: torchrun, Open MPI, MPICH and Intel MPI, Slurm."""


def rank_of(environment: Mapping[str, str] = os.environ) -> int:
    """The process's number among all of the training, by what the launcher says; 0 if it says nothing.

    Raises:
        UsageError: if that is no number.
    """
    for name in _RANKS:
        said = environment.get(name)
        if said is not None:
            if not said.isascii() or not said.isdigit():
                raise UsageError(
                    f"{name}: got {said!r} in the environment, expected the number of this process among all, a whole "
                    f"number of at least 0; set it right, or unset it"
                )
            return int(said)
    return 0


def numbered(path: Path, what: str, number: int) -> Path:
    """The same for all numbers but 0, which have it in their names: ``plan.json``, ``plan.rank1.json``.

    Example:
        >>> numbered(Path("plan.json"), "rank", 1).name
        'plan.rank1.json'
    """
    return path.with_name(f"{path.stem}.{what}{number}{path.suffix}") if number else path
