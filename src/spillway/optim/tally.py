"""What one step costs."""

from __future__ import annotations

import time
from collections.abc import Iterable

from spillway.optim.balance import Seen
from spillway.optim.shared import Shared
from spillway.records import OptimizerStats
from spillway.runtime.ledger import Stalls


class Tally:
    """One step, from the end of the one before."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ended = self._began
        self._waits: list[Stalls] = []
        self._sent = self._received = self._reserved = 0
        self.on_host = 0
        """Elements that the host steps."""
        self.streamed = 0
        """Elements that the device steps with state that comes for that."""
        self.host_seconds = 0.0
        """How long the host computes."""
        self.read_bytes = 0
        """Of the spill file."""
        self.written_bytes = 0
        """Likewise."""

    def finish(self) -> None:
        """Wait until all that was stepped is in its place; raises what went wrong with that."""

    def end(self, shared: Iterable[Shared]) -> None:
        """Compute waits for all that was queued."""
        self._ended = time.perf_counter()
        for one in shared:
            one.traffic.settle()
            one.traffic.unstage()
            one.forget_factor()
            waits, sent, received = one.traffic.count_anew()
            self._waits.append(waits)
            self._sent += sent
            self._received += received
            self._reserved += one.traffic.arena.reserved_bytes

    def stats(self) -> OptimizerStats:
        """What it cost."""
        return OptimizerStats(
            stepped_on_host=self.on_host,
            streamed=self.streamed,
            host_seconds=self.host_seconds,
            stall_seconds=sum(waits.seconds() for waits in self._waits),
            sent_bytes=self._sent,
            received_bytes=self._received,
            host_bytes=self._reserved,
            read_bytes=self.read_bytes,
            written_bytes=self.written_bytes,
        )

    def seen(self) -> Seen:
        """What it took, for a choice."""
        stats = self.stats()
        return Seen(self._ended - self._began, stats.stall_seconds, stats.host_seconds)
