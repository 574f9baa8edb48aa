"""What the process may use of the machine, and which of it is near: read from imagined files."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from spillway.runtime.system import memory_limit, near_cpus

TOTAL = psutil.virtual_memory().total


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, TOTAL),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, TOTAL),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "1000000\n"}, 1_000_000),
        ({"proc/self/cgroup": "0::/job/a\n", "sys/fs/cgroup/job/memory.max": "2000000\n"}, 2_000_000),
        (
            {
                "proc/self/cgroup": "0::/job/a\n",
                "sys/fs/cgroup/job/memory.max": "2000000\n",
                "sys/fs/cgroup/job/a/memory.max": "1500000\n",
            },
            1_500_000,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,memory:/docker/1234\n1:name=systemd:/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
            },
            3_000_000,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{TOTAL * 4}\n"}, TOTAL),
    ],
)
def test_the_limit_is_the_least_of_all(tmp_path: Path, files: dict[str, str], limit: int) -> None:
    assert memory_limit(write(tmp_path, files)) == limit


ADDRESS = "0000:3b:00.0"


def machine(node: str, nodes: int = 2) -> dict[str, str]:
    lists = {
        f"sys/devices/system/node/node{number}/cpulist": f"{8 * number}-{8 * number + 3},{40 + number}\n"
        for number in range(nodes)
    }
    return {f"sys/bus/pci/devices/{ADDRESS}/numa_node": f"{node}\n", **lists}


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        (machine("1"), {8, 9, 10, 11, 41}),
        (machine("0"), {0, 1, 2, 3, 40}),
        (machine("-1"), set()),
        (machine("0", nodes=1), set()),
        (machine("7"), set()),
        ({}, set()),
    ],
)
def test_cpus_of_the_node_of_a_device(tmp_path: Path, files: dict[str, str], cpus: set[int]) -> None:
    assert near_cpus(ADDRESS, write(tmp_path, files)) == cpus
