"""Where what was measured of machines is kept, and how: one small file each, whole or not there."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from spillway.errors import UsageError
from spillway.planning.hardware import Hardware

_LETTERS = 12
"""Letters of a hash: enough to tell the machines of one user apart."""


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The user's directory for what can be had again; ``None`` for a user without a home.

    Args:
        environment: ``$SPILLWAY_CACHE`` says which, or else ``$XDG_CACHE_HOME`` and ``$HOME`` above which.
    """
    named = environment.get("SPILLWAY_CACHE")
    if named:
        return Path(named).absolute()
    above = Path(environment.get("XDG_CACHE_HOME", ""))
    # The standard has it that a relative one is none.
    if above.is_absolute():
        return above / "spillway"
    home = Path(environment.get("HOME", ""))
    return home / ".cache" / "spillway" if home.is_absolute() else None


def cache_file(
    device: str, host: str, torch_version: str, directory: str | None, environment: Mapping[str, str] = os.environ
) -> Path | None:
    """The file of one kind of device, on one machine, with one torch and one directory to spill to.

    Args:
        device: its name.
        host: the machine's name. It is in the file's name as a hash only, since files get shown to others.
        torch_version: as torch has it.
        directory: to spill to; ``None``: the default.
        environment: as for :func:`cache_directory`.
    """
    folder = cache_directory(environment)
    if folder is None:
        return None
    machine = hashlib.sha256("\0".join([host, *([] if directory is None else [directory])]).encode()).hexdigest()
    return folder / f"hardware-{_plain(device)}-{_plain(torch_version)}-{machine[:_LETTERS]}.json"


def read_kept(file: Path) -> Hardware | None:
    """What was kept; ``None`` if there is no such file, or something else is in it: then it has to be measured."""
    try:
        return Hardware.load(file)
    except UsageError:
        return None


def keep(hardware: Hardware, file: Path | None) -> None:
    """Write it for the next time, for nobody else to read. Whoever reads it meanwhile has the old one or the new one.

    Warns:
        UserWarning: if it cannot be written.
    """
    if file is None:
        _warn("there is no home directory")
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Made with mode 0600, and beside the file: only within a file system a name can be taken over at once.
        handle, draft = tempfile.mkstemp(prefix=".hardware-", dir=file.parent)
        try:
            with open(handle, "w", encoding="utf-8") as writing:
                writing.write(hardware.to_json())
            os.replace(draft, file)
        except OSError:
            with suppress(OSError):
                os.unlink(draft)
            raise
    except OSError as error:
        _warn(str(error))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _warn(why: str) -> None:
    warnings.warn(
        f"spillway: what was measured of this machine could not be kept ({why}), so that it will be measured again; "
        f"set SPILLWAY_CACHE to a directory that can be written",
        stacklevel=4,
    )
