"""Every wait of the state stores is needed: without it, something fails under the adversary."""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Iterator, Sequence

import pytest

from optim.store_scenarios import SCENARIOS
from removal import Without, parsed
from spillway.errors import SpillwayError
from spillway.optim import chunks, cpu_store, gpu_store, gradient, offloaded_gradient, state_store, transfers
from spillway.runtime import arena

# What waits, and what lets others wait.
WAITS = ("wait", "synchronize", "finish", "_finish_oldest", "settle", "after", "append", "run")

# Of these, what orders no accesses.
ELSEWHERE = {
    # The gradient is waited for where it is read, too: this tells waiting from computing.
    "step.wait()",
    # What is there in vain is waited for in the test of an arena that is full.
    "self._finish_oldest()",
    # The worker waits for a step that failed. So only a copy in that failed itself needs this, which no scenario has.
    "one.pinned.after('in', transfer.arrived)",
    # The device of the adversary has no kernels that are queued when its memory is freed.
    "self.pinned.after('mapped', self._backend.record(self._backend.compute()))",
    # This bounds the memory of parameters that were read.
    "transfer.cost.given_out.append(end)",
    "self._given_out.popleft().finish()",
    # A test of leftovers needs this: memory of another optimizer's.
    "pinned.synchronize()",
    # This is no wait, and of classes of one's own.
    "groups.setdefault(held.group, {**transfer.settings, 'params': []})['params'].append(own)",
}


# Of the same files; tests of waits, overlap and leftovers need their waits.
NOT_OF_STORES = (
    gradient.Gradient,
    gradient.DeviceContext,
    gradient.Snapshot,
    gradient.Factor,
    state_store.StepCost,
    transfers.Transfers,
    arena.Arena,
)


def _waits() -> Iterator[tuple[object, str, int, str]]:
    for module in (
        state_store,
        chunks,
        cpu_store,
        gpu_store,
        gradient,
        offloaded_gradient,
        transfers,
        arena,
    ):
        owners = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == module.__name__]
        for owner in (*owners, module):
            if owner in NOT_OF_STORES:
                continue
            for name, member in vars(owner).items():
                if inspect.isfunction(member) and member.__code__.co_filename == module.__file__:
                    finder = Without(-1, WAITS, ELSEWHERE)
                    finder.visit(parsed(member))
                    for number, text in enumerate(finder.found):
                        yield owner, name, number, text


CASES = list(_waits())


def _fails(ways: Sequence[str] = ("device", "disk", "host", "split")) -> str | None:
    for scenario, of in (each for each in SCENARIOS if each[1].name in ways):
        try:
            scenario(of)
        except (SpillwayError, AssertionError, AttributeError, LookupError, ValueError) as error:
            return repr(error)
    return None


def test_nothing_fails_with_all_waits_in_place() -> None:
    assert _fails() is None


@pytest.mark.parametrize(
    ("owner", "name", "number", "text"),
    [pytest.param(*case, id=f"{getattr(case[0], '__name__', '')}.{case[1]}-{case[2]}") for case in CASES],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_this_wait_something_fails(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int, text: str
) -> None:
    function = vars(owner)[name]
    module = inspect.getmodule(function)
    assert module is not None
    tree = ast.fix_missing_locations(Without(number, WAITS, ELSEWHERE).visit(parsed(function)))
    namespace = dict(vars(module))
    flags = __future__.annotations.compiler_flag
    exec(compile(tree, str(module.__file__), "exec", flags=flags), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    ways = {gpu_store: ("device", "split"), cpu_store: ("host", "split", "disk")}
    assert (_fails(ways[module]) if module in ways else _fails()) is not None, f"{name} without `{text}`: nothing fails"
