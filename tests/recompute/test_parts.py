"""What is computed again is computed in parts, each when backward first asks for something of it, and new decisions
about a function need no new tape. See NOTE [ Parts ] in ``regions/tape.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from recompute.regions import HiddenList, Regions, one_place
from recompute.test_tapes import Block, followed, gradients_of, leaf, tapes_of
from spillway.operators import Planned, full_name
from spillway.records import Decision
from support import assert_identical, grads

pytestmark = one_place

SUMS = {"kept": {"save": ["aten::add.Tensor"]}, "sent": {"offload": ["inputs", "aten::add.Tensor"]}}


@pytest.fixture(autouse=True)
def _by_tapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that preserve nothing go by tapes here, as calls do that keep or offload what operators give."""
    monkeypatch.setattr("spillway.recomputing._is_plain", lambda *_: False)


class Log(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """The operators that run under it, by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def logged() -> Iterator[list[str]]:
    """The operators that run within, in their order."""
    log = Log()
    with log:
        yield log.names


def loss_of(regions: Regions, function: Callable[..., Any], x: Tensor, **how: Any) -> Tensor:
    with regions.offload():
        loss: Tensor = spillway.recompute(function, x * 1, session=regions.session, **how).square().mean()
        return loss


def places(names: list[str]) -> tuple[int, int, int, int]:
    """Where the MLP and attention are computed again, and where their backwards come."""
    attention = next(place for place, name in enumerate(names) if "attention" in name and "backward" not in name)
    backward = next(place for place, name in enumerate(names) if "attention" in name and "backward" in name)
    return names.index("gelu"), names.index("gelu_backward"), attention, backward


def test_what_hangs_together_is_computed_at_once(regions: Regions) -> None:
    block = Block()
    followed(regions, block)
    loss = loss_of(regions, block, leaf())
    with logged() as names:
        loss.backward()
    mlp, mlp_backward, attention, _ = places(names)
    assert attention < mlp < mlp_backward


def test_a_part_that_nobody_asks_for_is_not_computed(regions: Regions) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().exp().tanh(), x.cos().exp().sigmoid()

    def run(regions: Regions | None, number: int) -> list[Tensor]:
        x = leaf()
        if regions is None:
            first, second = function(x * 1)
        else:
            with regions.offload():
                first, second = spillway.recompute(function, x * 1, session=regions.session)
        asked = first if number % 2 else second
        with logged() as names:
            asked.sum().backward(retain_graph=True)
        if regions is not None and number > 2:
            # Of the sine's own backward there is another cosine.
            assert names.count("exp") == 1
            assert ("sigmoid_backward" in names) == (number % 2 == 0)
        if number % 3 == 0:
            asked.sum().backward(retain_graph=True)
            (first.sum() + second.sum()).backward()
        return [*grads(x)]

    for number in range(9):
        assert_identical(run(regions, number), run(None, number))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_what_two_parts_are_handed_is_written_meanwhile(regions: Regions) -> None:
    """Neither has it any more: both compute it again, with all that it hangs on."""
    shown = HiddenList()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        shown[:] = [y.detach()]
        return (y + 1).exp().tanh(), (y + 2).cos().sigmoid()

    def run(regions: Regions | None, write: bool) -> list[Tensor]:
        x = leaf()
        if regions is None:
            first, second = function(x * 1)
        else:
            with regions.offload():
                first, second = spillway.recompute(
                    function, x * 1, session=regions.session, save=["aten::sin", "inputs"]
                )
        first.sum().backward(retain_graph=True)
        if write:
            shown[0].zero_()
        second.sum().backward()
        return [*grads(x)]

    for number in range(6):
        assert_identical(run(regions, number > 2), run(None, False))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


# New decisions.


def planned(block: Block, seed: int, inputs: Decision = Decision.KEEP) -> dict[str, Any]:
    """Decisions at random about what its operators give."""
    draws = random.Random(seed)
    with logged() as names, spillway.offload(policy=spillway.policies.Keep(), min_bytes=0):
        log: list[Any] = []

        class Operators(Log):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                log.append(func)
                return func(*args, **(kwargs or {}))

        with Operators():
            block(leaf())
    assert len(names) == len(log)
    choices = [Decision.RECOMPUTE, Decision.RECOMPUTE, Decision.KEEP, Decision.OFFLOAD]
    decisions = {
        place: (full_name(func), decision)
        for place, func in enumerate(log)
        if not func.is_view and (decision := draws.choice(choices)) is not Decision.RECOMPUTE
    }
    return {"policy": Planned(decisions, inputs)}


@pytest.mark.parametrize("watch", [True, False], ids=["watched", "unwatched"])
@pytest.mark.parametrize("inputs", [Decision.KEEP, Decision.OFFLOAD], ids=lambda each: each.value)
@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 40))])
def test_other_decisions_need_no_other_tape(regions: Regions, seed: int, inputs: Decision, watch: bool) -> None:
    block = Block()
    followed(regions, block)
    for number in range(3):
        how = {**planned(block, 100 * seed + number, inputs), "watch": watch}
        for _ in range(2):
            block.calls = 0
            ours = gradients_of(regions, block, seed=seed, **how)
            assert watch is False or block.calls == 1
            assert_identical(ours, gradients_of(None, block, seed=seed))
    tapes = tapes_of(regions.session)
    assert len(tapes) == 4 and None not in tapes


def test_a_function_that_changes_loses_the_tapes_of_all_decisions(regions: Regions) -> None:
    block = Block()
    followed(regions, block)
    how = planned(block, 1)
    gradients_of(regions, block, **how)
    assert len(tapes_of(regions.session)) == 2
    block.scale = 0.5
    assert_identical(gradients_of(regions, block, seed=7, **how), gradients_of(None, block, seed=7))
    assert tapes_of(regions.session) == []
    for seed in (8, 9, 10):
        assert_identical(gradients_of(regions, block, seed=seed, **how), gradients_of(None, block, seed=seed))
    assert [tape is not None for tape in tapes_of(regions.session)] == [True]


def test_of_a_function_without_a_tape_none_is_made(regions: Regions) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        y.detach().numpy()[...] *= 2
        return y.exp().tanh()

    decided = {"policy": Planned({2: ("aten::exp.default", Decision.KEEP)})}
    for how in ({}, {}, {}, decided, decided, decided):
        assert_identical(gradients_of(regions, function, **how), gradients_of(None, function))
    assert set(tapes_of(regions.session)) == {None}
