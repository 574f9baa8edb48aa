"""Fixtures of what is tried on regions: see ``regions.py``."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch.distributed

import spillway
from recompute.regions import PLACES, Place, Regions
from spillway.testing import AdversaryBackend
from support import assert_nothing_left

_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture(params=PLACES, ids=str)
def place(request: pytest.FixtureRequest) -> Place:
    place: Place = request.param
    return place


@pytest.fixture
def regions(request: pytest.FixtureRequest, place: Place, tmp_path: Path) -> Iterator[Regions]:
    """A session of its own for each test, of which nothing may be left when the test ends."""
    adversary = AdversaryBackend() if place.adversary else None
    more = {} if adversary is None else {"backend": adversary.serve}
    with spillway.Session(
        window=place.window, spill_directory=tmp_path, allow_memory_filesystem=True, **more
    ) as session:
        yield Regions(session, place, adversary)
        # The traceback of a test that failed holds its graphs.
        if not request.node.stash.get(_failed, False):
            assert_nothing_left(session)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the garbage collector: what dies here, dies by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of one process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which later call is compared depends on how many functions there were before: tests of samples say so."""
    monkeypatch.setattr("spillway.checkpointing.learned._EVERY", 1 << 40)
