"""Every wait of a parking is needed: without it, something fails under the adversary."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from parking.test_parked import batch, copied, same, settle, tensors_of, trained
from removal import Without, parsed
from runtime.scenarios import adversary_session
from spillway.errors import SpillwayError, TransferError
from spillway.parking import parked, storages
from spillway.runtime.bytes import Bytes
from spillway.runtime.spill_file import SpillFile
from spillway.testing import AdversaryBackend

WAITS = ("wait", "synchronize")

BUT = {"torch.accelerator.synchronize(device)", "self.synchronize()", "failed.synchronize()"}
"""Kernels of all streams, which the adversary does not see; the end of a parking whose copies are done; copies after
one that failed, which are done in order."""


def a_model_that_goes_and_returns(tier: str, session: spillway.Session, adversary: AdversaryBackend) -> None:
    model, optimizer = trained()
    # Those of gradients come at once, and with them what was queued before.
    optimizer.zero_grad()
    wanted = copied(tensors_of(model, optimizer))
    with adversary.stream("first"):
        parking = spillway.park(model, optimizer=optimizer, tier=tier, session=session)
        parking.unpark()
    with adversary.stream("other"):
        model.scale.clone()
    with adversary.stream("first"):
        # It need not know of the use on the other stream.
        adversary.compute_access(Bytes.of(model.scale.detach()))
    assert same(tensors_of(model, optimizer), wanted)
    parking.synchronize()
    with adversary.stream("third"):
        adversary.record(adversary.compute())
        adversary.compute_access(Bytes.of(model.layers[0].up.weight.detach()))


def raw_storages(tier: str, session: spillway.Session, adversary: AdversaryBackend) -> None:
    """All is there after ``synchronize()``, also for code that no guard sees."""
    model, _ = trained()
    views = [each.detach().view(-1) for each in model.parameters()]
    wanted = copied(views)
    parking = spillway.park(model, tier=tier, session=session)
    parking.unpark()
    parking.synchronize()
    assert same(views, wanted)


def a_parking_while_copies_are_under_way(tier: str, session: spillway.Session, adversary: AdversaryBackend) -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    wanted = copied(tensors_of(model))
    for _ in range(2):
        spillway.park(model, tier=tier, session=session).unpark()
    assert same(tensors_of(model), wanted)


def memory_that_compute_has_used(tier: str, session: spillway.Session, adversary: AdversaryBackend) -> None:
    """Compute writes a storage just before it is parked, and the memory that it is reloaded into."""
    layer = nn.Linear(4, 4, bias=False)
    adversary.compute_access(Bytes.of(layer.weight.detach()))
    parking = spillway.park(layer, tier=tier, session=session)
    fill = torch.UntypedStorage.resize_

    def used(storage: torch.UntypedStorage, nbytes: int) -> Any:
        made = fill(storage, nbytes)
        if nbytes:
            # A kernel that is queued now comes after all that the CPU has waited for.
            adversary.record(adversary.compute())
            adversary.compute_access(Bytes(storage, 0, nbytes))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", used)
        parking.unpark()
    parking.synchronize()


def a_disk_that_cannot_be_written(tier: str, session: spillway.Session, adversary: AdversaryBackend) -> None:
    """Nothing is emptied before its bytes are on disk."""
    if tier == "host":
        return
    model, _ = trained()
    wanted = copied(tensors_of(model))

    def broken(*_: object, **__: object) -> None:
        raise TransferError("no disk")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpillFile, "write", broken)
        with pytest.raises(TransferError, match="no disk"):
            spillway.park(model, tier=tier, session=session)
    assert same(tensors_of(model), wanted)
    model(batch()).sum().backward()


SCENARIOS: list[Callable[[str, spillway.Session, AdversaryBackend], None]] = [
    a_model_that_goes_and_returns,
    raw_storages,
    a_parking_while_copies_are_under_way,
    memory_that_compute_has_used,
    a_disk_that_cannot_be_written,
]


def _functions() -> Iterator[tuple[Any, str, Any]]:
    for module in (parked, storages):
        for owner in (module, *vars(module).values()):
            if owner is module or (inspect.isclass(owner) and owner.__module__ == module.__name__):
                for name, member in vars(owner).items():
                    is_alias = getattr(member, "__name__", name) != name
                    if inspect.isfunction(member) and not is_alias and member.__code__.co_filename == module.__file__:
                        yield owner, name, member


def _waits() -> Iterator[Any]:
    for owner, name, function in _functions():
        finder = Without(-1, WAITS, BUT)
        finder.visit(parsed(function))
        for number, text in enumerate(finder.found):
            yield pytest.param(owner, name, number, text, id=f"{name}-{number}")


CASES = list(_waits())


def _fails() -> str | None:
    for scenario in SCENARIOS:
        for tier in ("host", "disk"):
            try:
                with adversary_session() as (adversary, session):
                    scenario(tier, session, adversary)
                    settle(session)
            except (SpillwayError, AssertionError, RuntimeError, pytest.fail.Exception) as error:
                return f"{scenario.__name__}: {error!r}"
    return None


def test_all_waits_are_found() -> None:
    assert {case.values[1] for case in CASES} == {"_send", "unpark", "park", "arrive", "synchronize"}
    assert len(CASES) == 9


def test_nothing_fails_with_all_waits_in_place() -> None:
    assert _fails() is None


@pytest.mark.parametrize(("owner", "name", "number", "text"), CASES)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_this_wait_something_fails(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int, text: str
) -> None:
    function = vars(owner)[name]
    tree = ast.fix_missing_locations(Without(number, WAITS, BUT).visit(parsed(function)))
    namespace = dict(vars(inspect.getmodule(function)))  # type: ignore[arg-type]
    exec(compile(tree, inspect.getsourcefile(function), "exec"), namespace)  # type: ignore[arg-type]
    monkeypatch.setattr(owner, name, namespace[name])
    if name == "park":
        monkeypatch.setattr(spillway, name, namespace[name])
    assert _fails() is not None, f"{name} without `{text}`: nothing fails"
