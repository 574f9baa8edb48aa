"""Rates of copies, as the engine makes them: on its own lanes, from and to memory that its own backend gives.

So on an accelerator these are pinned copies on streams, over whatever link there is, and on the CPU copies from host
memory to host memory in a thread each, with one code for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from spillway.planning.hardware import Link
from spillway.profiling.rate import rate_of
from spillway.runtime.backend import Backend, Lane
from spillway.runtime.bytes import Bytes


class Copies:
    """What is copied between one device and host memory, both ways.

    Args:
        backend: of the device.
        nbytes: of one copy. They are held four times: here and there, for each way.
    """

    def __init__(self, backend: Backend, nbytes: int) -> None:
        self.nbytes = nbytes
        self._backend = backend
        self._out, self._back = backend.lane("out"), backend.lane("back")
        host = [Bytes.of(backend.host_slab(nbytes).fill_(1)) for _ in range(2)]
        device = [Bytes.of(device_memory(backend, nbytes)) for _ in range(2)]
        wait_for_compute(backend)
        self._ways: dict[Lane, tuple[Bytes, Bytes]] = {
            self._out: (host[0], device[0]),
            self._back: (device[1], host[1]),
        }

    def out(self) -> None:
        """Queue a copy to host memory."""
        self._queue(self._out)

    def back(self) -> None:
        """Queue a copy to the device."""
        self._queue(self._back)

    def both(self) -> None:
        """Queue one each way."""
        self._queue(self._out)
        self._queue(self._back)

    def wait(self) -> None:
        """Block until all of them are done."""
        for event in [self._backend.record(lane) for lane in self._ways]:
            event.synchronize()

    def _queue(self, lane: Lane) -> None:
        destination, source = self._ways[lane]
        self._backend.copy(lane, destination, source)


def link_rates(all_copies: Sequence[Copies], seconds: float) -> Link:
    """What each of the devices has while all of them copy.

    Args:
        all_copies: of each device, of as many bytes.
        seconds: that this may take.
    """
    nbytes = all_copies[0].nbytes

    def wait() -> None:
        for copies in all_copies:
            copies.wait()

    def rate(queue: Callable[[Copies], None], amount: int) -> float:
        # A call queues on every device, and the amount is one device's: so the rate is.
        def queue_all() -> None:
            for copies in all_copies:
                queue(copies)

        return rate_of(queue_all, wait, amount, seconds / 3)

    out, back = rate(Copies.out, nbytes), rate(Copies.back, nbytes)
    return Link(active=len(all_copies), out=out, back=back, both=rate(Copies.both, 2 * nbytes))


def memory_rate(backend: Backend, nbytes: int, seconds: float) -> float:
    """Bytes in a second that the device reads and writes in its own memory, both counted.

    Args:
        backend: of the device.
        nbytes: of one copy. They are held twice.
        seconds: that this may take.
    """
    source, destination = device_memory(backend, nbytes), device_memory(backend, nbytes)

    def queue() -> None:
        destination.copy_(source)

    return rate_of(queue, lambda: wait_for_compute(backend), 2 * nbytes, seconds)


def device_memory(backend: Backend, nbytes: int) -> torch.Tensor:
    """So many bytes of the device, written: pages that nobody has written are not there yet, and read too fast."""
    return torch.empty(nbytes, dtype=torch.uint8, device=backend.device).fill_(1)


def wait_for_compute(backend: Backend) -> None:
    """Block until the compute lane has done what it was given."""
    backend.record(backend.compute()).synchronize()
