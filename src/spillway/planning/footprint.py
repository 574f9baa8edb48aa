"""What an option comes to, in a few numbers: enough to say what a step takes at least, without a simulation.

NOTE [ Footprints ]

An option's tasks are walked once, alone, as if the window were empty and nothing waited: what leaves is gone at once,
what comes back is there when it is taken, and not earlier. The bytes of a step are then sums of such numbers over the
blocks before and after, and the real ones are never less, for a window only keeps storages longer.

A copy out begins after the task that sends, and all but a window's bytes have left when the sends are done. So the
clock is never less than "lane's end - window / rate", and what the block computes after that send comes on top:
``out_need`` is the largest of those sums. In the same way ``back_need`` is the largest of "bytes up to a take / rate +
what is computed from there on".

What a block keeps of its output and the next one of its input is the same, and counts once: that hangs on both, and is
taken off the sum where two blocks meet.

A task ends no earlier than the host has queued it (NOTE [ The host ] in ``timeline.py``), and what the block computes
after it comes on top: ``forward_host_need`` and ``backward_host_need`` are what comes of both, counted from when the
host gets to the block. Where no lane is waited for, they and the seconds say exactly what a simulation says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spillway.planning.tasks import Option, Rates, Sent, Task

NEVER = -1e30
"""Of a clock: a lane that carries nothing holds nobody up. Finite, since it is multiplied by 0."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Of one option: bytes, and seconds. See the note at the top of this file."""

    forward_seconds: float
    backward_seconds: float
    forward_host: float
    """Seconds that the host needs to queue its forward."""
    backward_host: float
    """Seconds that the host needs to queue its backward."""
    forward_host_need: float
    """Seconds from when the host gets to its forward to the end of that, on a device that waits for nothing else."""
    backward_host_need: float
    """The same of its backward."""
    forward_peak: float
    """Most bytes in its forward, beyond those when that begins."""
    backward_peak: float
    """Most bytes in its backward, beyond those when that begins."""
    kept: float
    """Bytes that its forward leaves behind."""
    back_change: float
    """Bytes that its backward adds, or frees where it is negative."""
    later_peak: float
    """Most bytes in its backward where its gradients are there already."""
    later_change: float
    """Bytes that such a backward adds, or frees."""
    sent: float
    """Bytes that leave, to any tier."""
    disk_sent: float
    """Of these, to the disk."""
    taken: float
    """Bytes that come back, from any tier."""
    disk_taken: float
    out_end: float
    """Seconds from its begin to the end of its copies out, on a lane that is free. :data:`NEVER` without copies."""
    out_need: float
    """Seconds of its copies, on a lane that is busy, and of what is computed after their sends."""
    out_free_need: float
    """The same on a lane that is free when it begins."""
    disk_need: float
    """Seconds of its writes, and of what is computed after their sends."""
    back_need: float
    """Seconds of its copies back, and of what is computed from their takes on."""
    read_need: float
    """Seconds of its reads, and of what is computed from their takes on."""
    output: float
    """Bytes that it keeps of its output, and that may be counted once more for the next block."""
    input: float
    """Bytes that it keeps of its inputs."""
    let_go: float
    """Bytes that it keeps no longer than to the end of all forwards."""
    biggest: float
    """Bytes of the largest storage that leaves."""
    plain: bool
    """Whether it sends only in forward and takes and drops only in backward."""


def footprint(option: Option, rates: Rates) -> Footprint:
    """What an option comes to.

    Args:
        option: one way to treat a block.
        rates: what the lanes carry.
    """
    sent = {one.key: one for task in option.forward for one in task.sends}
    here: set[int] = set()
    """Keys whose bytes count: taken, and not yet dropped."""
    forward = _Level(sent, here)
    for task in option.forward:
        forward.pass_by(task)
    backward, later = _Level(sent, set(here)), _Level(sent, here)
    for task in option.backward:
        backward.pass_by(task)
        later.pass_by(task.later())

    left = forward_seconds = sum(task.seconds for task in option.forward)
    nbytes = disk_nbytes = 0
    lane = 0.0
    out_need = out_free_need = disk_need = NEVER
    for task in option.forward:
        left -= task.seconds
        for one in task.sends:
            nbytes += one.nbytes
            lane = max(lane, forward_seconds - left) + one.nbytes / rates.out
            out_need = max(out_need, nbytes / rates.out + left)
            out_free_need = max(out_free_need, lane + left)
            if one.on_disk:
                disk_nbytes += one.nbytes
                disk_need = max(disk_need, disk_nbytes / rates.disk_write + left)

    left = backward_seconds = sum(task.seconds for task in option.backward)
    taken = disk_taken = 0
    back_need = read_need = NEVER
    seen: set[int] = set()
    for task in option.backward:
        for key in task.takes:
            if key in seen or key not in sent:
                continue
            seen.add(key)
            taken += sent[key].nbytes
            back_need = max(back_need, taken / rates.back + left)
            if sent[key].on_disk:
                disk_taken += sent[key].nbytes
                read_need = max(read_need, disk_taken / rates.disk_read + left)
        left -= task.seconds

    forward_host, forward_host_need = _host(option.forward, rates.host)
    backward_host, backward_host_need = _host(option.backward, rates.host)
    return Footprint(
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        forward_host=forward_host,
        backward_host=backward_host,
        forward_host_need=forward_host_need,
        backward_host_need=backward_host_need,
        forward_peak=forward.peak,
        backward_peak=backward.peak,
        kept=forward.now,
        back_change=backward.now,
        later_peak=later.peak,
        later_change=later.now,
        sent=nbytes,
        disk_sent=disk_nbytes,
        taken=taken,
        disk_taken=disk_taken,
        out_end=lane if nbytes else NEVER,
        out_need=out_need,
        out_free_need=out_free_need,
        disk_need=disk_need,
        back_need=back_need,
        read_need=read_need,
        output=option.output_bytes,
        input=option.input_bytes,
        let_go=option.let_go_bytes,
        biggest=max((one.nbytes for one in sent.values()), default=0),
        plain=not any(task.takes or task.drops for task in option.forward)
        and not any(task.sends for task in option.backward),
    )


def _host(tasks: Sequence[Task], times: float) -> tuple[float, float]:
    """Seconds until the host has queued all of them, and until they have ended on a device that was free."""
    queued = ended = 0.0
    for task in tasks:
        queued += task.host_seconds * times
        ended = max(ended + task.seconds, queued)
    return queued, ended


class _Level:
    """Bytes beyond those at the begin of a direction, with an empty window."""

    def __init__(self, sent: dict[int, Sent], here: set[int]) -> None:
        self._sent, self._here = sent, here
        self.now = 0
        self.peak = 0

    def pass_by(self, task: Task) -> None:
        """A task has run."""
        for key in task.takes:
            if key in self._sent and key not in self._here:
                self._here.add(key)
                self.now += self._sent[key].nbytes
        self.peak = max(self.peak, self.now + task.peak_bytes)
        self.now += task.change_bytes - sum(one.nbytes for one in task.sends)
        self.peak = max(self.peak, self.now)
        for key in task.drops:
            if key in self._here:
                self._here.remove(key)
                self.now -= self._sent[key].nbytes
