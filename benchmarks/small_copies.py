"""Delay of a small copy from CPU memory behind large ones that another stream has queued before it.

A GPU has one engine for such copies: see NOTE [ Copies of other code ] in ``spillway/runtime/accelerator.py``. Eight
storages of 235 MiB are copied whole, in parts by one stream, and in parts by two streams in turn; meanwhile a third one
copies 0.8 MB twelve times, with pauses. CUDA only.

    python benchmarks/small_copies.py --json small_copies.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path

import torch

LARGE, COUNT = 235 << 20, 8
SMALL, TIMES = 852448, 12
WAYS = ("one stream", "two streams")
PARTS = (LARGE, 64 << 20, 32 << 20, 16 << 20, 8 << 20)


class Copies:
    """The copies, and their streams."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.empty(LARGE, dtype=torch.uint8, pin_memory=True)
        self.there = torch.empty(LARGE, dtype=torch.uint8, device=device)
        self.small_host = torch.empty(SMALL, dtype=torch.uint8, pin_memory=True)
        self.small_there = torch.empty(SMALL, dtype=torch.uint8, device=device)
        self.stream, self.beside, self.compute = (torch.cuda.Stream(device) for _ in range(3))

    def large(self, way: str, part: int) -> None:
        """Copy all, by one stream, or by two in turn, each of which waits for the other."""
        turns = itertools.cycle((self.stream, self.beside) if way == "two streams" else (self.stream,))
        here = next(turns)
        for start in (start for _ in range(COUNT) for start in range(0, LARGE, part)):
            with torch.cuda.stream(here):
                self.there[start : start + part].copy_(self.host[start : start + part], non_blocking=True)
            before, here = here, next(turns)
            if before is not here:
                here.wait_event(before.record_event())
        self.stream.wait_stream(self.beside)

    def measure(self, way: str, part: int) -> tuple[float, list[float]]:
        """Bytes a second of the large copies, and milliseconds of each small copy."""
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            # Until all is queued.
            torch.cuda._sleep(20_000_000)
            begin.record()
        self.beside.wait_event(begin)
        self.large(way, part)
        end.record(self.stream)
        small = []
        with torch.cuda.stream(self.compute):
            torch.cuda._sleep(26_000_000)
            for _ in range(TIMES):
                since, until = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                since.record()
                self.small_there.copy_(self.small_host, non_blocking=True)
                until.record()
                small.append((since, until))
                torch.cuda._sleep(3_000_000)
        torch.cuda.synchronize()
        return COUNT * LARGE / (begin.elapsed_time(end) / 1e3), [since.elapsed_time(until) for since, until in small]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    copies, rows = Copies(device), []
    for way, part in itertools.product(WAYS, PARTS):
        copies.measure(way, part)
        rate, waits = copies.measure(way, part)
        rows.append({"way": way, "part_bytes": part, "rate": rate, "wait_ms": waits})
        print(
            f"{way:12} {part >> 20:4} MiB  {rate / 1e9:5.1f} GB/s  a small copy: {statistics.median(waits):.3f} ms, "
            f"at most {max(waits):.3f}",
            flush=True,
        )
    if options.json is not None:
        about = {"date": datetime.now(UTC).isoformat(), "device": torch.cuda.get_device_name(device), "rows": rows}
        options.json.write_text(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
