"""Where nothing is to be gained, nothing is done, and ``stats()`` says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import spillway
from spillway.policies import Offload
from spillway.runtime.cpu import CpuBackend

MIB = 1 << 20


class Roomy(CpuBackend):
    """A device of 1 GiB."""

    unreserved = 1024 * MIB

    def memory_info(self) -> tuple[int, int] | None:
        return self.unreserved, 1024 * MIB


class Unified(CpuBackend):
    """A device whose memory is the host's own."""

    unified = True


def step(context: spillway.offload, elements: int = MIB) -> spillway.StepStats:
    """Saves two storages of so many floats, above ``min_bytes``."""
    leaf = torch.ones(elements, requires_grad=True)
    with context:
        loss = (leaf * 2).sin().cos().sum()
    loss.backward()
    return context.stats()


@pytest.fixture
def session(tmp_path: Path) -> Iterator[spillway.Session]:
    with spillway.Session(backend=Roomy, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        yield session


@pytest.fixture
def roomy(session: spillway.Session) -> Roomy:
    backend = session.runtime(torch.device("cpu")).backend
    assert isinstance(backend, Roomy)
    return backend


def test_h37_a_short_step_is_left_alone_from_the_second_on(session: spillway.Session) -> None:
    first, second, third = (step(spillway.offload(session=session)) for _ in range(3))
    assert first.saved_bytes == 8 * MIB
    assert first.offloaded_bytes + first.reused_bytes >= 8 * MIB
    for stats in (second, third):
        assert stats.saved_bytes == 0
        assert "Offloading is disabled" in stats.notes[0]
        assert "8.0 MiB" in stats.notes[0]


def test_a_step_that_saves_much_is_not(session: spillway.Session) -> None:
    for _ in range(3):
        assert step(spillway.offload(session=session), 3 * MIB).saved_bytes == 24 * MIB


def test_nor_is_one_on_a_device_that_is_nearly_full(session: spillway.Session, roomy: Roomy) -> None:
    roomy.unreserved = 50 * MIB
    for _ in range(3):
        assert step(spillway.offload(session=session)).saved_bytes == 8 * MIB


def test_a_workload_that_grows_is_judged_anew(session: spillway.Session, roomy: Roomy) -> None:
    step(spillway.offload(session=session))
    assert step(spillway.offload(session=session)).saved_bytes == 0
    roomy.unreserved -= 40 * MIB
    assert step(spillway.offload(session=session), 3 * MIB).saved_bytes == 24 * MIB
    assert step(spillway.offload(session=session), 3 * MIB).saved_bytes == 24 * MIB
    assert step(spillway.offload(session=session)).saved_bytes == 8 * MIB
    assert step(spillway.offload(session=session)).saved_bytes == 0


def test_a_short_evaluation_does_not_let_training_stand_aside(session: spillway.Session) -> None:
    """With gradients on, as by one who forgot: its graph is dropped."""
    for _ in range(2):
        with spillway.offload(session=session):
            (torch.ones(MIB, requires_grad=True) * 2).sin()
        assert step(spillway.offload(session=session), 3 * MIB).saved_bytes == 24 * MIB


@pytest.mark.parametrize(
    "told", [{"ratio": 1.0}, {"min_bytes": 0}, {"tier": "host"}, {"window": "1MiB"}, {"policy": Offload()}], ids=str
)
def test_whoever_says_something_is_obeyed(session: spillway.Session, told: dict[str, object]) -> None:
    for _ in range(3):
        assert step(spillway.offload(session=session, **told)).saved_bytes == 8 * MIB  # type: ignore[arg-type]


def test_a_mark_is_obeyed(session: spillway.Session) -> None:
    kept = torch.ones(4)
    step(spillway.offload(session=session))
    spillway.keep_tensor(kept, session=session)
    assert step(spillway.offload(session=session)).saved_bytes == 8 * MIB


def test_a_mark_inside_of_a_disabled_context_warns_and_is_obeyed_from_the_next_pass_on(
    session: spillway.Session,
) -> None:
    step(spillway.offload(session=session))
    x = torch.ones(4, requires_grad=True)
    with spillway.offload(session=session), pytest.warns(UserWarning, match="has no effect in this pass"):
        spillway.offload_tensor(x * 1, session=session)
    assert step(spillway.offload(session=session)).saved_bytes == 8 * MIB


def test_a_tag_is_judged_by_itself(session: spillway.Session) -> None:
    for _ in range(2):
        step(spillway.offload(session=session, tag="small"))
    assert step(spillway.offload(session=session, tag="other")).saved_bytes == 8 * MIB


def test_an_unfinished_pass_judges_nothing(session: spillway.Session) -> None:
    def fail() -> None:
        leaf = torch.ones(MIB, requires_grad=True)
        with spillway.offload(session=session):
            (leaf * 2).sin()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert step(spillway.offload(session=session)).saved_bytes == 8 * MIB


def test_h37_nothing_moves_to_host_memory_that_is_the_devices_own(tmp_path: Path) -> None:
    with spillway.Session(backend=Unified, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        for _ in range(2):
            stats = step(spillway.offload(session=session, tier="host", min_bytes=0))
            assert stats.kept_bytes == stats.saved_bytes == 8 * MIB
            assert stats.host_bytes == 0
            assert "shares its memory with the CPU" in stats.notes[0]
        assert step(spillway.offload(session=session, tier="disk", min_bytes=0)).kept_bytes == 0
