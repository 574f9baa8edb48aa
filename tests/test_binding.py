"""A process goes near to its device, if nobody else has said where it runs, and back."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from spillway.runtime.system import _bind

DEVICE = torch.device("cuda", 0)
ADDRESS = "0000:3b:00.0"

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is known on Linux only")
HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
several = pytest.mark.skipif(len(HERE) < 2, reason="one CPU: there is nowhere to go")


def machine(root: Path, *nodes: list[int], near: int | None = 0, offline: int = 0) -> Path:
    """Imagined nodes of these CPUs, to one of which the device is near."""
    files = {
        "sys/devices/system/cpu/online": ",".join(
            str(cpu) for cpu in sorted({cpu for node in nodes for cpu in node} | set(HERE))
        ),
        **{
            f"sys/devices/system/node/node{number}/cpulist": ",".join(map(str, cpus))
            for number, cpus in enumerate(nodes)
        },
    }
    if near is not None:
        files[f"sys/bus/pci/devices/{ADDRESS}/numa_node"] = str(near)
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="ascii")
    return root


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Every test leaves the process where it was."""
    yield
    if HERE:
        for thread in os.listdir("/proc/self/task"):
            # One of another test's may end meanwhile.
            with contextlib.suppress(ProcessLookupError):
                assert os.sched_getaffinity(int(thread)) == set(HERE)


class Waiting(threading.Thread):
    """A thread that waits to be told to end."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.begun, self.told = threading.Event(), threading.Event()
        self.start()
        self.begun.wait()

    def run(self) -> None:
        self.begun.set()
        self.told.wait()

    def cpus(self) -> set[int]:
        assert self.native_id is not None
        return os.sched_getaffinity(self.native_id)

    def end(self) -> None:
        self.told.set()
        self.join()
        # Python has let go of it: the system may not have yet.
        while os.path.exists(f"/proc/self/task/{self.native_id}"):
            time.sleep(0.001)


@linux
@several
def test_all_threads_go_near_to_the_device_and_back(tmp_path: Path) -> None:
    early, near = Waiting(), {HERE[1]}
    affinity = _bind(DEVICE, ADDRESS, machine(tmp_path, HERE[:1], HERE[1:2], HERE[2:], near=1), {})
    late = Waiting()
    assert (affinity.device, affinity.node, affinity.why_not) == (DEVICE, 1, None)
    assert (affinity.before, affinity.after) == (set(HERE), near)
    assert os.sched_getaffinity(0) == early.cpus() == late.cpus() == near
    affinity.undo()
    assert os.sched_getaffinity(0) == early.cpus() == late.cpus() == set(HERE)
    early.end()
    late.end()


@linux
@several
def test_a_context_gives_back_in_the_end_also_after_an_error(tmp_path: Path) -> None:
    root = machine(tmp_path, HERE[:1], HERE[1:])
    with pytest.raises(ZeroDivisionError), _bind(DEVICE, ADDRESS, root, {}) as affinity:  # noqa: PT012
        assert os.sched_getaffinity(0) == affinity.after == set(HERE[:1])
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == set(HERE)


@linux
@several
def test_a_thread_that_somebody_pinned_stays_where_it_is(tmp_path: Path) -> None:
    root, pinned, moved = machine(tmp_path, HERE[:1], HERE[1:]), Waiting(), Waiting()
    assert pinned.native_id is not None and moved.native_id is not None
    os.sched_setaffinity(pinned.native_id, set(HERE[1:]))
    affinity = _bind(DEVICE, ADDRESS, root, {})
    assert affinity.why_not is None
    assert pinned.cpus() == set(HERE[1:]) and moved.cpus() == set(HERE[:1])
    os.sched_setaffinity(moved.native_id, set(HERE[1:]))
    affinity.undo()
    assert pinned.cpus() == moved.cpus() == set(HERE[1:])
    pinned.end()
    moved.end()


@linux
@several
def test_undone_twice_does_not_undo_what_came_after(tmp_path: Path) -> None:
    root = machine(tmp_path, HERE[:1], HERE[1:])
    first = _bind(DEVICE, ADDRESS, root, {})
    again = _bind(DEVICE, ADDRESS, root, {})
    assert again.why_not is not None and "bound to" in again.why_not
    again.undo()
    assert os.sched_getaffinity(0) == first.after
    first.undo()
    second = _bind(DEVICE, ADDRESS, root, {})
    first.undo()
    assert os.sched_getaffinity(0) == second.after
    second.undo()


@linux
@several
@pytest.mark.parametrize(
    ("name", "value", "binds"),
    [
        ("OMP_PROC_BIND", "close", True),
        ("OMP_PROC_BIND", "FALSE", False),
        ("OMP_PLACES", "cores", True),
        ("GOMP_CPU_AFFINITY", "0-3", True),
        ("KMP_AFFINITY", "granularity=fine,compact", True),
        ("KMP_AFFINITY", "verbose,none", False),
        ("KMP_AFFINITY", "", False),
        ("OMP_NUM_THREADS", "4", False),
    ],
)
def test_what_openmp_was_told_is_left_alone(tmp_path: Path, name: str, value: str, binds: bool) -> None:
    with _bind(DEVICE, ADDRESS, machine(tmp_path, HERE[:1], HERE[1:]), {name: value}) as affinity:
        assert (affinity.why_not == f"{name} is {value!r}, which binds threads") is binds
        assert (affinity.after == affinity.before) is binds


@linux
@several
def test_a_process_that_may_not_run_everywhere_stays_where_it_is(tmp_path: Path) -> None:
    others = [max(HERE) + 1, max(HERE) + 2]
    affinity = _bind(DEVICE, ADDRESS, machine(tmp_path, HERE[:1], HERE[1:] + others), {})
    assert affinity.after == affinity.before == set(HERE) and affinity.node == 0
    assert affinity.why_not == (
        f"the process is bound to {len(HERE)} of {len(HERE) + 2} CPUs already, by a launcher, taskset, numactl or a "
        f"container"
    )


@linux
@pytest.mark.parametrize(
    ("nodes", "near", "why"),
    [
        ([], 0, "the system names no NUMA nodes"),
        ([HERE], 0, "the machine has one NUMA node"),
        ([HERE, []], None, "the system does not say which NUMA node cuda:0 is near to"),
        ([HERE, []], -1, "the system does not say which NUMA node cuda:0 is near to"),
        ([HERE, []], 1, "NUMA node 1 of cuda:0 has no CPU"),
        ([HERE, []], 7, "NUMA node 7 of cuda:0 has no CPU"),
        ([HERE, []], 0, "all CPUs are on NUMA node 0 of cuda:0"),
    ],
)
def test_where_it_makes_no_difference_nothing_is_done_and_it_says_why(
    tmp_path: Path, nodes: list[list[int]], near: int | None, why: str
) -> None:
    affinity = _bind(DEVICE, ADDRESS, machine(tmp_path, *nodes, near=near), {})
    assert affinity.why_not == why
    assert affinity.before == affinity.after == set(HERE)
    affinity.undo()


@linux
@several
def test_a_system_that_refuses_is_quoted_and_nothing_is_left_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, real, calls = Waiting(), os.sched_setaffinity, []

    def refusing(thread: int, cpus: Any) -> None:
        calls.append(thread)
        if len(calls) == 2:
            raise PermissionError(1, "Operation not permitted")
        real(thread, cpus)

    monkeypatch.setattr(os, "sched_setaffinity", refusing)
    affinity = _bind(DEVICE, ADDRESS, machine(tmp_path, HERE[:1], HERE[1:]), {})
    assert affinity.why_not == "the system refused: [Errno 1] Operation not permitted"
    assert affinity.after == affinity.before
    waiting.end()


def test_a_system_without_the_call_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    affinity = _bind(DEVICE, ADDRESS, tmp_path, {})
    assert affinity.why_not == "only Linux can bind a process"
    monkeypatch.undo()


@linux
def test_the_cpu_is_near_to_itself() -> None:
    affinity = spillway.bind_to_device("cpu")
    assert affinity.device == torch.device("cpu") and affinity.node is None
    assert affinity.why_not == "the device is the CPU"
    assert spillway.bind_to_device(torch.device("cpu")) == affinity


def test_without_a_name_it_is_the_accelerator_or_the_cpu() -> None:
    with spillway.bind_to_device() as affinity:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        assert affinity.device.type == ("cpu" if accelerator is None else accelerator.type)


@pytest.mark.parametrize("device", ["no such device", 1.5, object(), "meta", "xla:0"])
def test_something_that_is_no_device_here(device: Any) -> None:
    with pytest.raises(spillway.UsageError, match="device: got"):
        spillway.bind_to_device(device)
