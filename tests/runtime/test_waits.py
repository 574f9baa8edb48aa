"""Every wait in the runtime is needed: without it, something fails under the adversary."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

import pytest
import torch

from removal import Without, parsed
from runtime.scenarios import SCENARIOS
from spillway.errors import SpillwayError
from spillway.runtime import arena, mover, queues, tiers
from spillway.runtime.arena import Arena, Pinned

WAITS = ("wait", "timed_wait", "synchronize")

# A condition of a loop, not an order of accesses: without it the loop spins, and is right all the same.
SPINS_WITHOUT = {"self._ended.wait()"}


def _waits() -> Iterator[tuple[type, str, int, str]]:
    for module in (mover, queues, tiers, arena):
        for cls in vars(module).values():
            # Scenarios of the optimizer need the waits of pinned memory: tests/optim/test_store_waits.py.
            if not inspect.isclass(cls) or cls.__module__ != module.__name__ or cls is Pinned:
                continue
            for name, member in vars(cls).items():
                function = inspect.unwrap(member) if callable(member) else member
                if inspect.isfunction(function) and function.__code__.co_filename == module.__file__:
                    finder = Without(-1, WAITS, SPINS_WITHOUT)
                    finder.visit(parsed(function))
                    for number, text in enumerate(finder.found):
                        yield cls, name, number, text


CASES = list(_waits())


def _fails() -> str | None:
    for scenario in SCENARIOS:
        try:
            scenario()
        except (SpillwayError, AssertionError, AttributeError) as error:
            return repr(error)
    return None


def test_all_waits_are_found() -> None:
    assert len(CASES) >= 12
    assert {cls.__name__ for cls, *_ in CASES} == {
        "ComputeStreams",
        "PrefetchQueue",
        "HostTier",
        "StagedReads",
        "DiskTier",
        "DirectDiskTier",
        "Arena",
    }


def test_nothing_fails_with_all_waits_in_place() -> None:
    assert _fails() is None


# Trimming is the one place that only a unit test can reach: whoever frees a block has made compute wait already.
@pytest.mark.parametrize(
    ("cls", "name", "number", "text"),
    [pytest.param(*case, id=f"{case[0].__name__}.{case[1]}-{case[2]}") for case in CASES if case[0] is not Arena],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_this_wait_something_fails(
    monkeypatch: pytest.MonkeyPatch, cls: type, name: str, number: int, text: str
) -> None:
    function = inspect.unwrap(vars(cls)[name])
    tree = ast.fix_missing_locations(Without(number, WAITS, SPINS_WITHOUT).visit(parsed(function)))
    namespace = dict(vars(inspect.getmodule(cls)))  # type: ignore[arg-type]
    exec(compile(tree, inspect.getsourcefile(cls), "exec"), namespace)
    monkeypatch.setattr(cls, name, namespace[name])
    assert _fails() is not None, f"{cls.__name__}.{name} without `{text}`: nothing fails"


def test_trim_waits_for_what_still_reads_a_slab() -> None:
    class Pending:
        waited = False

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            self.waited = True

    memory = Arena(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), capacity=1 << 20)
    event = Pending()
    memory.free(memory.allocate(4096), (event,))
    assert memory.trim() > 0
    assert event.waited
