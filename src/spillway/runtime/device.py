"""The runtime of one device: its backend, arena, mover and tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from spillway.errors import BackendError
from spillway.runtime.accelerator import AcceleratorBackend
from spillway.runtime.arena import Arena
from spillway.runtime.backend import Backend, quiet
from spillway.runtime.cpu import CpuBackend
from spillway.runtime.cuda_graphs import CapturedRuntime
from spillway.runtime.disk import DiskTier
from spillway.runtime.mover import Mover
from spillway.runtime.spill_file import SpillFile
from spillway.runtime.tiers import HostTier, Tier
from spillway.types import Recorder

MakeBackend = Callable[[torch.device], Backend]


class Runtime(Protocol):
    """A device's runtime, or its runtime for work that is captured into a graph."""

    backend: Backend
    mover: Mover
    nothing: torch.Tensor

    @property
    def window(self) -> int: ...

    def tier(self, name: str) -> Tier: ...

    def join(self) -> None:
        """A forward pass ends."""
        ...


class DeviceRuntime:
    """The runtime of one device.

    Args:
        backend: the device.
        file: gives the spill file, when the disk tier is first used.
        window: the in-flight limit: bytes that may be LEAVING, and bytes that may be RETURNING, at once.
        host_budget: most bytes of CPU memory.
        recorder: receives every event.
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
        """An empty tensor on the device: the data of every tracker."""
        self._file = file
        self._recorder = recorder
        self._tiers: dict[str, Tier] = {}
        self._captured: CapturedRuntime | None = None

    @property
    def window(self) -> int:
        """The in-flight limit, in bytes."""
        return self.mover.window

    def tier(self, name: str) -> Tier:
        """The tier ``"host"`` or ``"disk"``; ``"auto"`` is CPU memory for an accelerator, and disk for the CPU."""
        tier = self._tiers.get(name)
        if tier is None:
            if name == "auto":
                tier = self.tier("disk" if self.backend.device.type == "cpu" else "host")
            else:
                tier = self._make_tier(name)
            self._tiers[name] = tier
        return tier

    def spill_file(self) -> SpillFile:
        """The session's spill file, made on first use. Raises ``SpillPathError`` if none can be made."""
        return self._file()

    def join(self) -> None:
        """Nothing has to be waited for."""

    def captured(self) -> CapturedRuntime:
        """The runtime for work that is captured into a graph."""
        if self._captured is None:
            streams = dict(zip(("out", "back"), self.mover.streams, strict=True))
            self._captured = CapturedRuntime(
                self.backend, streams, self.arena, self.nothing, window=self.window, recorder=self._recorder
            )
        return self._captured

    def release_graphs(self) -> int:
        """Free the CPU memory of captured graphs that are gone; returns its bytes."""
        return 0 if self._captured is None else self._captured.release()

    def used_host_bytes(self) -> int:
        """Bytes of CPU memory in slots."""
        self.mover.read_notes()
        with quiet():
            return self.arena.used_bytes

    def synchronize(self) -> None:
        """Wait for every write that is under way."""
        with self.mover.exclusive():
            for tier in set(self._tiers.values()):
                tier.synchronize()

    def trim(self) -> int:
        """Give unused CPU memory back to the system; returns its bytes."""
        with self.mover.exclusive():
            return self.arena.trim()

    def close(self) -> None:
        """Stop. Offloaded bytes are lost."""
        if self._captured is not None:
            self._captured.close()
        self.mover.close()
        self.backend.close()
        self._tiers.clear()
        self.arena.close()

    def _make_tier(self, name: str) -> Tier:
        out, back = self.mover.streams
        if name == "host":
            return HostTier(self.backend, self.arena, out=out, back=back)
        return DiskTier(self.backend, self.arena, self._file(), out=out, back=back, staging=self.window)


def backend_for(device: torch.device, *, streams: Mapping[str, torch.Stream] | None = None) -> Backend:
    """The backend of a device, on the user's ``streams`` if there are any. Raises ``BackendError`` if there is none."""
    if device.type == "cpu":
        return CpuBackend(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        return AcceleratorBackend(device, streams=streams)
    raise BackendError(
        f"got a saved tensor on {device}, expected the CPU or {accelerator or 'an accelerator that torch knows'}; "
        f"leave it to spillway.keep(), or give Session a backend that serves {device.type}"
    )
