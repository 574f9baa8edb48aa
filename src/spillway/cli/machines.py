"""What commands that plan have in common: which machine is meant, and how long a thing takes, shown while it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from rich import progress
from rich.console import Console

from spillway.errors import BackendError, UsageError
from spillway.planning.hardware import PRESETS, Hardware
from spillway.planning.profile import Profile
from spillway.profiling.machine import known_hardware


def hardware_of(name: str | None, device: str) -> Hardware:
    """What a machine can do.

    Args:
        name: of a kind of device, or of a file of ``Hardware.save()``. ``None``: this machine, which is measured if it
            never was.
        device: that the profile is of.

    Raises:
        UsageError: for a name that is neither; for a device that is not here, and no name.
    """
    if name is not None:
        return Hardware.of(name)
    try:
        with working("measuring this machine, once") as tell:
            return known_hardware(torch.device(device), on_part=lambda part: tell(f"measuring {part}"))
    except (UsageError, BackendError) as error:
        raise UsageError(
            f"hardware: got none for a profile of {device}, which cannot be measured here ({error}), expected a name "
            f"({', '.join(PRESETS)}) or a file of Hardware.save(); give --hardware"
        ) from error


def note_of(profile: Profile, hardware: Hardware, *, is_named: bool) -> tuple[str, ...]:
    """What has to be said of a plan whose times are of one machine, and whose bandwidths of another.

    Args:
        profile: of a step.
        hardware: that is planned for.
        is_named: whether the user named it.
    """
    is_cpu = torch.device(profile.device).type == "cpu"
    if not is_named or not is_cpu or hardware.source.startswith("measured on cpu"):
        return ()
    return (
        f"the times of operators are this profile's, which a CPU took; only the bandwidths are those of "
        f"{hardware.name}. For its times, profile with spillway.profile(model, batch, hardware=...)",
    )


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Something takes a while: a moving sign on stderr, where that is a terminal. Gives what changes its words."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda words: None
        return
    with console.status(what) as status:
        yield status.update


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """Something is done so many times: a bar on stderr, or a line for each where that is no terminal.

    Gives what is told how many there are by now, and of how many.
    """
    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task(what, total=None)

        def tell(done: int, total: int) -> None:
            bars.update(bar, completed=done, total=total)
            if not console.is_terminal:
                console.print(f"{what}: {done}/{total}", highlight=False)

        yield tell
