"""The runtime of one device: its backend, arena, mover and tiers. Captured work has another: ``captured.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import torch

from spillway.errors import BackendError
from spillway.runtime.arena import Arena
from spillway.runtime.backend import Backend, quiet
from spillway.runtime.mover import Mover
from spillway.runtime.tiers import HostTier, Tier
from spillway.types import Recorder

if TYPE_CHECKING:
    from spillway.runtime.captured import CapturedRuntime
    from spillway.runtime.spill_file import SpillFile

# Modules that few programs need are imported where they are: those of the disk, of captures, and of the other backend.

Runtime: TypeAlias = "DeviceRuntime | CapturedRuntime"


class DeviceRuntime:
    """The runtime of one device. ``window`` limits the bytes that may be LEAVING, and RETURNING, at once."""

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
        self.spill_file = file
        """Gives the session's spill file, made on first use. Raises ``SpillPathError`` if none can be made."""
        self.recorder = recorder
        self._tiers: dict[str, Tier] = {}
        self._captured: CapturedRuntime | None = None

    def tier(self, name: str) -> Tier:
        """The tier ``"host"`` or ``"disk"``; ``"auto"`` is CPU memory for an accelerator, and disk for the CPU."""
        tier = self._tiers.get(name)
        if tier is None:
            out, back = self.mover.streams
            if name == "auto":
                tier = self.tier("disk" if self.backend.device.type == "cpu" else "host")
            elif name == "host":
                tier = HostTier(self.backend, self.arena, out=out, back=back)
            else:
                from spillway.runtime.disk_tier import DirectDiskTier, DiskTier

                limit, file = self.mover.window, self.spill_file()
                make = DirectDiskTier if self.backend.direct_disk else DiskTier
                tier = make(self.backend, self.arena, file, out=out, back=back, staging=limit)
            self._tiers[name] = tier
        return tier

    def join(self) -> None:
        """Nothing has to be waited for."""

    def captured(self) -> Runtime:
        if self._captured is None:
            from spillway.runtime.captured import CapturedRuntime

            self._captured = CapturedRuntime(self)
        return self._captured

    def release_graphs(self) -> int:
        return 0 if self._captured is None else self._captured.release()

    def used_host_bytes(self) -> int:
        self.mover.read_notes()
        with quiet():
            return self.arena.used_bytes

    def synchronize(self) -> None:
        with self.mover.exclusive():
            for tier in set(self._tiers.values()):
                tier.synchronize()

    def trim(self) -> int:
        with self.mover.exclusive():
            return self.arena.trim() + sum(tier.trim() for tier in set(self._tiers.values()))

    def close(self) -> None:
        """Stop. Offloaded bytes are lost."""
        if self._captured is not None:
            self._captured.close()
        self.mover.close()
        self.backend.close()
        self._tiers.clear()
        self.arena.close()


def backend_for(device: torch.device, *, streams: Mapping[str, torch.Stream] | None = None) -> Backend:
    """The backend of a device, on the user's ``streams`` if there are any. Raises ``BackendError`` if there is none."""
    if device.type == "cpu":
        from spillway.runtime.cpu import CpuBackend

        return CpuBackend(device)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:
        from spillway.runtime.accelerator import AcceleratorBackend

        return AcceleratorBackend(device, streams=streams)
    raise BackendError(
        f"A saved tensor is on {device}, and no backend serves that device here. Spillway serves the CPU"
        f"{f' and {accelerator}' if accelerator else ''}. Keep the tensor with spillway.keep(), or give Session a "
        "backend."
    )
