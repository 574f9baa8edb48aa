"""What a machine can do, measured and kept."""

from __future__ import annotations

import os
import stat
import time
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from spillway.errors import SpillPathError, TierFullError, UsageError
from spillway.planner.hardware import Hardware
from spillway.profiler import machine
from spillway.profiler.machine import (
    MOST_SAMPLES,
    cache_directory,
    cache_file,
    keep,
    known_hardware,
    measure_drive,
    measure_hardware,
    measure_link,
    rate_of,
)
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes
from spillway.runtime.cpu import CpuBackend
from spillway.runtime.system import memory_limit

CPU = torch.device("cpu")
SECONDS = 0.3
"""For a whole machine: too short for good figures, and long enough for all that is done."""


class Work:
    """Work that takes a while by a clock of its own. The first time takes longer."""

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        self.now = 0.0
        self.seconds = seconds
        self.first = first
        self.begun = 0
        self.waits = 0

    def queue(self) -> None:
        self.begun += 1
        self.now += self.first if self.begun == 1 else self.seconds

    def wait(self) -> None:
        self.waits += 1

    def rate(self, seconds: float, **arguments: float) -> float:
        return rate_of(self.queue, self.wait, 100.0, seconds, clock=lambda: self.now, **arguments)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    try:
        machine.SpillFile(tmp_path).close()
    except SpillPathError:
        pytest.skip("the temporary directory is in memory")
    return tmp_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPILLWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_rate_is_the_amount_by_the_time_without_the_warm_up() -> None:
    assert Work(0.5, first=9.0).rate(60.0) == pytest.approx(200.0)


def test_what_is_short_is_repeated_until_it_can_be_timed() -> None:
    work = Work(0.001, first=0.001)
    assert work.rate(10.0) == pytest.approx(100_000.0)
    # Once to warm up, then 1, 2, 4, 8, 16 and 32 times; that is long enough, and is done until there are nine.
    assert work.begun == 1 + 31 + MOST_SAMPLES * 32
    assert work.waits == 1 + 5 + MOST_SAMPLES


def test_repeats_are_bounded_where_they_need_room() -> None:
    work = Work(1e-6, first=1e-6)
    work.rate(10.0, most_repeats=6)
    assert work.begun == 1 + 3 + MOST_SAMPLES * 4


def test_what_takes_longer_than_there_is_time_for_is_done_once() -> None:
    work = Work(50.0, first=50.0)
    assert work.rate(1.0) == pytest.approx(2.0)
    assert work.begun == 1


def test_measuring_ends_when_its_time_is_over() -> None:
    work = Work(0.4, first=0.4)
    work.rate(2.0)
    assert work.now <= 2.0


def test_one_slow_sample_does_not_count() -> None:
    work = Work(0.5, first=0.5)

    def queue() -> None:
        work.queue()
        if work.begun == 4:
            work.now += 20

    assert rate_of(queue, work.wait, 100.0, 60.0, clock=lambda: work.now) == pytest.approx(200.0)


class Watched(CpuBackend):
    """Notes which of its copies go to memory of the host, and which come from there."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.slabs: set[int] = set()
        self.copies: list[tuple[Stream, bool, bool]] = []

    def host_slab(self, nbytes: int) -> torch.Tensor:
        slab = super().host_slab(nbytes)
        self.slabs.add(slab.data_ptr())
        return slab

    def copy(self, lane: Stream, destination: Bytes, source: Bytes) -> None:
        self.copies.append((lane, destination.address in self.slabs, source.address in self.slabs))
        super().copy(lane, destination, source)


def test_copies_go_to_host_memory_and_come_from_there_on_lanes_of_their_own() -> None:
    with closing(Watched()) as backend:
        link = measure_link(backend, 4096, SECONDS)
    assert min(link.out, link.back, link.both) > 0
    (out, *_), (back, *_) = backend.copies[0], backend.copies[-1]
    assert out is not back
    assert set(backend.copies) == {(out, True, False), (back, False, True)}


def test_the_disk_is_written_and_read_and_nothing_is_left(directory: Path) -> None:
    free = psutil.disk_usage(str(directory)).free
    with closing(CpuBackend(CPU)) as backend:
        found = measure_drive(backend, directory, SECONDS)
    assert found.write > 0
    assert found.read > 0
    assert found.directory == directory.resolve()
    assert found.free_bytes == pytest.approx(free, rel=0.2)
    assert list(directory.iterdir()) == []


def test_little_of_a_full_disk_is_written(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 40 MiB are free: a twentieth is two.
    usage = lambda path: psutil.disk_usage(str(path))._replace(free=40 << 20)  # noqa: E731
    files: list[machine.SpillFile] = []

    class Kept(machine.SpillFile):
        def close(self) -> None:
            files.append(self)
            self.most = self.used_bytes
            super().close()

    monkeypatch.setattr(machine.shutil, "disk_usage", usage)
    monkeypatch.setattr(machine, "SpillFile", Kept)
    with closing(CpuBackend(CPU)) as backend:
        assert measure_drive(backend, directory, SECONDS).read > 0
    assert [file.most for file in files] == [2 << 20]


def test_a_disk_that_is_full_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = lambda path: psutil.disk_usage(str(path))._replace(free=10 << 20)  # noqa: E731
    monkeypatch.setattr(machine.shutil, "disk_usage", usage)
    with closing(CpuBackend(CPU)) as backend, pytest.raises(TierFullError, match=r"got 10\.0 MiB of free space"):
        measure_drive(backend, directory, SECONDS)


def test_a_machine_is_measured_in_the_time_that_is_given(directory: Path) -> None:
    parts: list[str] = []
    random = torch.random.get_rng_state()
    start = time.perf_counter()
    hardware = measure_hardware("cpu", spill_directory=directory, seconds=SECONDS, on_part=parts.append)
    # A loaded machine may take long over what is done once.
    assert time.perf_counter() - start < 20
    assert parts == ["copies", "matrix products", "memory", "disk"]
    assert hardware.name
    assert hardware.device_bytes == hardware.host_bytes == memory_limit()
    assert hardware.disk_bytes is not None
    assert hardware.disk_bytes > 0
    assert "measured on cpu with torch" in hardware.source
    # Faster than a tape, slower than anything that is built.
    bandwidth = hardware.bandwidths[0]
    for rate in (bandwidth.out, bandwidth.back, bandwidth.both, hardware.memory_bandwidth):
        assert 1e7 < rate < 1e13
    assert 1e8 < hardware.flops < 1e15
    assert Hardware.from_json(hardware.to_json()) == hardware
    assert torch.equal(random, torch.random.get_rng_state())
    assert list(directory.iterdir()) == []


def test_without_a_place_to_spill_to_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(tmp_path / "absent"))
    hardware = measure_hardware("cpu", seconds=SECONDS)
    assert (hardware.disk_write, hardware.disk_read, hardware.disk_bytes) == (None, None, None)
    assert "no disk to spill to" in hardware.source


def test_a_directory_that_is_named_has_to_be_there(tmp_path: Path) -> None:
    with pytest.raises(SpillPathError, match="absent"):
        measure_hardware("cpu", spill_directory=tmp_path / "absent", seconds=SECONDS)


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match=r"seconds: got .*, expected a time above 0"):
        measure_hardware("cpu", seconds=seconds)


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(UsageError, match="device: got"):
        measure_hardware("meta")


def test_a_machine_is_measured_once(cache: Path, directory: Path) -> None:
    parts: list[str] = []
    given = {"spill_directory": directory, "seconds": SECONDS, "on_part": parts.append}
    first = known_hardware("cpu", **given)
    assert len(parts) == 4
    assert replace(known_hardware("cpu", **given), disk_bytes=first.disk_bytes) == first
    assert len(parts) == 4
    [file] = cache.iterdir()
    assert file.name.startswith("hardware-")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert Hardware.load(file) == first
    assert known_hardware("cpu", **given, fresh=True).bandwidths != first.bandwidths
    assert len(parts) == 8
    assert Hardware.load(file).bandwidths != first.bandwidths
    # Another directory is another disk.
    (directory / "other").mkdir()
    known_hardware("cpu", **{**given, "spill_directory": directory / "other"})
    assert len(parts) == 12
    assert len(list(cache.iterdir())) == 2


def kept_here(cache: Path) -> Path:
    file = cache_file(machine.device_name(CPU), machine.platform.node(), torch.__version__, os.environ["SPILLWAY_DIR"])
    assert file is not None
    assert file.parent == cache
    return file


@pytest.mark.parametrize("text", ["", "{}", Hardware.named("h200").to_json().replace('"schema": 2', '"v": 2')])
def test_a_file_that_does_not_validate_is_measured_anew(
    text: str, cache: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(directory))
    file = kept_here(cache)
    cache.mkdir()
    file.write_text(text, encoding="utf-8")
    measured = known_hardware("cpu", seconds=SECONDS)
    assert measured.name != "NVIDIA H200"
    assert Hardware.load(file) == measured
    assert list(cache.iterdir()) == [file]


def test_what_was_kept_has_as_many_bytes_as_there_are_now(
    cache: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(directory))
    old = replace(Hardware.named("h200"), device_bytes=1, host_bytes=1, disk_bytes=1)
    keep(old, kept_here(cache))
    now = known_hardware("cpu")
    assert (now.device_bytes, now.host_bytes) == (memory_limit(), memory_limit())
    assert now.disk_bytes == pytest.approx(psutil.disk_usage(str(directory)).free, rel=0.2)
    assert replace(now, device_bytes=1, host_bytes=1, disk_bytes=1) == old


def test_what_was_kept_without_a_disk_is_measured_anew_when_there_is_one(
    cache: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILLWAY_DIR", str(directory / "disk"))
    without = known_hardware("cpu", seconds=SECONDS)
    assert without.disk_read is None
    assert known_hardware("cpu", seconds=SECONDS).bandwidths == without.bandwidths
    (directory / "disk").mkdir()
    assert known_hardware("cpu", seconds=SECONDS).disk_read is not None


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SPILLWAY_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"SPILLWAY_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/spillway"),
        ({"XDG_CACHE_HOME": "b", "HOME": "/c"}, "/c/.cache/spillway"),
        ({"HOME": "/c"}, "/c/.cache/spillway"),
        ({}, None),
    ],
)
def test_the_cache_is_where_the_user_has_it(environment: dict[str, str], folder: str | None) -> None:
    assert cache_directory(environment) == (folder and Path(folder))


def test_a_file_is_of_one_device_machine_torch_and_directory_and_names_no_machine() -> None:
    home = {"HOME": "/home"}
    names = {
        cache_file(device, host, version, directory, home)
        for device in ("NVIDIA H200", "NVIDIA H100")
        for host in ("secret", "other")
        for version in ("2.13.0+cpu", "2.11.0")
        for directory in (None, "/disk")
    }
    assert len(names) == 16
    assert all(name is not None and "secret" not in name.name for name in names)
    assert any(name is not None and name.name.startswith("hardware-nvidia-h200-2.13.0-cpu-") for name in names)


def test_what_cannot_be_kept_is_said_and_returned(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPILLWAY_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match=r"could not be saved .*Set SPILLWAY_CACHE to a writable directory") as told:
        hardware = known_hardware("cpu", spill_directory=directory, seconds=SECONDS)
    assert hardware.flops > 0
    assert [warning.filename for warning in told] == [__file__]


def test_a_write_that_fails_leaves_what_was_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = cache / "hardware-x.json"
    keep(Hardware.named("h200"), file)

    def refuse(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.warns(UserWarning, match="No space left"):
            keep(Hardware.named("a100"), file)
    assert Hardware.load(file) == Hardware.named("h200")
    assert list(cache.iterdir()) == [file]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        keep(Hardware.named("a100"), file)
    assert Hardware.load(file) == Hardware.named("a100")
