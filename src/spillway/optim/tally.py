"""What one step costs."""

from __future__ import annotations

from collections.abc import Sequence

from spillway.optim.gradient import Shared
from spillway.records import OptimizerStats


class Tally:
    """Counts from when it is made until it is asked.

    Args:
        shared: of every device.
    """

    def __init__(self, shared: Sequence[Shared]) -> None:
        self._shared = shared
        self._before = self._counts()
        self.on_host = 0
        """Elements that the host steps."""
        self.streamed = 0
        """Elements that the device steps with state that comes for it."""
        self.host_seconds = 0.0

    def stats(self, *, read_bytes: int = 0, written_bytes: int = 0) -> OptimizerStats:
        """All of it.

        Args:
            read_bytes: of the spill file, in this step.
            written_bytes: likewise.
        """
        sent, received, waited = (now - then for now, then in zip(self._counts(), self._before, strict=True))
        return OptimizerStats(
            stepped_on_host=self.on_host,
            streamed=self.streamed,
            host_seconds=self.host_seconds,
            stall_seconds=waited,
            sent_bytes=int(sent),
            received_bytes=int(received),
            host_bytes=sum(one.traffic.arena.reserved_bytes for one in self._shared),
            read_bytes=read_bytes,
            written_bytes=written_bytes,
        )

    def _counts(self) -> tuple[float, float, float]:
        traffic = [one.traffic for one in self._shared]
        return (
            sum(one.sent_bytes for one in traffic),
            sum(one.received_bytes for one in traffic),
            sum(one.waits.seconds() for one in traffic),
        )
