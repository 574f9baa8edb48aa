from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch.distributed

import spillway
from support import WAYS, Trial, Way, assert_nothing_left


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    way: Way = request.param
    return way


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Pairwise: each value of a test's other parameters meets each tier and each window, but not each pair of them.

    ``make test-all`` runs the whole product.
    """
    if "not long" not in config.option.markexpr:
        return
    places: dict[object, dict[str, int]] = {}
    kept, left_out = [], []
    for item in items:
        way = item.callspec.params.get("way") if hasattr(item, "callspec") else None
        others = item.callspec.id.replace(str(way), "").strip("-") if isinstance(way, Way) else ""
        if Path(__file__).parent in item.path.parents and others:
            known = places.setdefault((item.path, item.originalname), {})  # type: ignore[attr-defined]
            place = known.setdefault(others, len(known))
            is_on_diagonal = (way.tier == WAYS[0].tier) == (way.window == WAYS[0].window)
            if is_on_diagonal == bool(place % 2):
                left_out.append(item)
                continue
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_failed] = item.stash.get(_failed, False) or report.failed
    return report


@pytest.fixture
def session(
    request: pytest.FixtureRequest, way: Way, events: spillway.EventList, tmp_path: Path
) -> Iterator[spillway.Session]:
    """A session of its own for each test, of which nothing may be left when the test ends."""
    with spillway.Session(
        window=way.window, spill_directory=tmp_path, allow_memory_filesystem=True, recorder=events
    ) as session:
        yield session
        # The traceback of a test that failed holds its graphs.
        if not request.node.stash.get(_failed, False):
            assert_nothing_left(session)


@pytest.fixture
def events() -> spillway.EventList:
    return spillway.EventList()


@pytest.fixture
def trial(session: spillway.Session, events: spillway.EventList, way: Way) -> Trial:
    return Trial(session, events, way)


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
