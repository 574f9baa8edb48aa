"""All that moves the bytes of one device: its backend, its arena, its mover and its tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from spillway.errors import BackendError
from spillway.events import Recorder
from spillway.runtime.accelerator import AcceleratorBackend
from spillway.runtime.arena import Arena
from spillway.runtime.backend import Backend
from spillway.runtime.capturing import CapturedRuntime
from spillway.runtime.cpu import CpuBackend
from spillway.runtime.disk import SpillFile
from spillway.runtime.disk_tiers import DirectDiskTier, StagedDiskTier
from spillway.runtime.mover import Mover
from spillway.runtime.tasks import quiet
from spillway.runtime.tiers import HostTier, Tier

MakeBackend = Callable[[torch.device], Backend]


class Runtime(Protocol):
    """What moves a device's bytes now: its runtime, or the one for what is captured into a graph."""

    backend: Backend
    mover: Mover
    nothing: torch.Tensor

    @property
    def window(self) -> int: ...

    def tier(self, name: str) -> Tier: ...

    def join(self) -> None:
        """A pass ends."""
        ...


class DeviceRuntime:
    """The runtime of one device.

    Args:
        backend: the device.
        file: where the disk tier's bytes go. It is made when the first of them goes there.
        window: bytes that may be LEAVING, and bytes that may be RETURNING, at once.
        host_budget: most bytes of host memory.
        recorder: told of everything that happens.
    """

    def __init__(
        self,
        backend: Backend,
        file: Callable[[], SpillFile],
        *,
        window: int,
        host_budget: int,
        recorder: Recorder | None = None,
    ) -> None:
        self.backend = backend
        self.arena = Arena(backend.host_slab, capacity=host_budget)
        self.mover = Mover(backend, window=window, recorder=recorder)
        self.nothing = torch.empty(0, device=backend.device)
        """What a tracker's data is."""
        self._file = file
        self._recorder = recorder
        self._tiers: dict[str, Tier] = {}
        self._captured: CapturedRuntime | None = None

    @property
    def window(self) -> int:
        """Bytes that may be LEAVING, and bytes that may be RETURNING, at once."""
        return self.mover.window

    def tier(self, name: str) -> Tier:
        """The tier ``"host"`` or ``"disk"``; ``"auto"`` is host memory for an accelerator, and disk for the CPU."""
        tier = self._tiers.get(name)
        if tier is None:
            if name == "auto":
                tier = self.tier("disk" if self.backend.device.type == "cpu" else "host")
            else:
                tier = self._make_tier(name)
            self._tiers[name] = tier
        return tier

    def spill_file(self) -> SpillFile:
        """The session's file on disk; made when first asked for.

        Raises:
            SpillPathError: if none can be made.
        """
        return self._file()

    def join(self) -> None:
        """Nothing has to be waited for."""

    def captured(self) -> CapturedRuntime:
        """The runtime for what is captured into a graph."""
        if self._captured is None:
            lanes = dict(zip(("out", "back"), self.mover.lanes, strict=True))
            self._captured = CapturedRuntime(
                self.backend, lanes, self.arena, self.nothing, window=self.window, recorder=self._recorder
            )
        return self._captured

    def release_graphs(self) -> int:
        """Give back the host memory of captured graphs, which are gone; returns its bytes."""
        return 0 if self._captured is None else self._captured.release()

    def used_host_bytes(self) -> int:
        """Bytes of host memory in slots."""
        self.mover.read_notes()
        with quiet():
            return self.arena.used_bytes

    def synchronize(self) -> None:
        """Wait until every write that is under way has ended."""
        with self.mover.exclusive():
            for tier in set(self._tiers.values()):
                tier.synchronize()

    def trim(self) -> int:
        """Give host memory that nobody uses back to the system; returns its bytes."""
        with self.mover.exclusive():
            return self.arena.trim() + sum(tier.trim() for tier in set(self._tiers.values()))

    def close(self) -> None:
        """Stop. What is away is lost."""
        if self._captured is not None:
            self._captured.close()
        self.mover.close()
        self.backend.close()
        self._tiers.clear()
        self.arena.close()

    def _make_tier(self, name: str) -> Tier:
        out, back = self.mover.lanes
        if name == "host":
            return HostTier(self.backend, self.arena, out=out, back=back)
        if self.backend.direct_disk:
            return DirectDiskTier(self.backend, self._file(), out=out, back=back)
        return StagedDiskTier(self.backend, self.arena, self._file(), out=out, back=back, staging=self.window)


def backend_for(device: torch.device, *, streams: Mapping[str, torch.Stream] | None = None) -> Backend:
    """The backend that serves a device, on streams of the user's if there are any.

    Raises:
        BackendError: if none does.
    """
    if device.type == "cpu":
        return CpuBackend(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return AcceleratorBackend(device, streams=streams)
    raise BackendError(
        f"got a saved tensor on {device}, expected the CPU or {accelerator or 'an accelerator that torch knows'}; "
        f"leave it to spillway.keep(), or give Session a backend that serves {device.type}"
    )
