"""The directory of the spill file: on a file system that is not held in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from spillway.errors import SpillPathError


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


_DEFAULT_PLACES: tuple[Callable[[], str], ...] = (tempfile.gettempdir, lambda: "/var/tmp", os.getcwd)
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_MEMORY_DEVICES = ("/dev/ram", "/dev/zram")
_EXPECTED = "expected a directory on a disk in which files can be made; set SPILLWAY_DIR or give another one"


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
