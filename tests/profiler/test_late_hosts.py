"""A call whose operators were queued too late to be timed is watched again, a few times."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spillway.checkpointing.recorder import Recorder
from spillway.checkpointing.selectors import Choices
from spillway.profiler.probe import Probe


class Work:
    """What keeps a device busy."""

    def __init__(self, *, has_ended: bool) -> None:
        self.has_ended = has_ended

    def query(self) -> bool:
        return self.has_ended


def ended(before: Probe | None, work: Any) -> Probe:
    probe = Probe(torch.device("cpu"), before)
    assert not probe.is_complete
    probe._busy = work
    probe.ended(Recorder(Choices()))
    return probe


def test_a_call_is_watched_again_until_its_host_was_in_time() -> None:
    first = ended(None, Work(has_ended=True))
    assert not first.is_complete
    assert ended(first, Work(has_ended=False)).is_complete


def test_a_host_that_is_always_late_is_put_up_with() -> None:
    probe = None
    for complete in (False, False, True):
        probe = ended(probe, Work(has_ended=True))
        assert probe.is_complete is complete


@pytest.mark.parametrize("work", [None, Work(has_ended=False)])
def test_where_nothing_was_late_once_is_enough(work: Any) -> None:
    assert ended(None, work).is_complete
