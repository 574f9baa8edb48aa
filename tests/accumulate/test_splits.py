"""``split_equals_whole``: right steps pass, and wrong ones are named for what they are."""

from __future__ import annotations

import itertools
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import spillway
from accumulate.loops import PADDING, Batch, averaged, batches, fresh, summed
from spillway import SplitError, UsageError, split_equals_whole
from spillway.accumulate.splits import cut, splits_of

BATCH = batches(1, rows=6)[0]
EVEN = BATCH[0], BATCH[0].roll(1, 1)
"""All rows have as many words."""


def words_of(batch: Batch) -> int:
    return int((batch[1] != PADDING).sum())


def right(model: nn.Module) -> Callable[[list[Batch]], None]:
    """Sums, divided by the words of all."""

    def step(micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (summed(model, batch)[0] / sum(map(words_of, micro_batches))).backward()

    return step


def mean_of_means(model: nn.Module) -> Callable[[list[Batch]], None]:
    def step(micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            (averaged(model, batch)[0] / len(micro_batches)).backward()

    return step


def sum_of_means(model: nn.Module) -> Callable[[list[Batch]], None]:
    def step(micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            averaged(model, batch)[0].backward()

    return step


def first_only(model: nn.Module) -> Callable[[list[Batch]], None]:
    """Divides what is a part of the whole already."""

    def step(micro_batches: list[Batch]) -> None:
        for batch in micro_batches:
            loss = summed(model, batch)[0] / sum(map(words_of, micro_batches))
            (loss / len(micro_batches)).backward()

    return step


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_right_step_passes_in_every_type(dtype: torch.dtype) -> None:
    model = fresh(dtype=dtype)
    found = split_equals_whole(right(model), BATCH, model=model)
    assert 0 < found < torch.finfo(dtype).eps * 8


def test_an_accumulator_passes_however_it_is_used() -> None:
    model = fresh().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def loop(micro_batches: list[Batch]) -> None:
        window = spillway.Accumulator(model, optimizer, steps=len(micro_batches))
        for batch in window(micro_batches):
            loss, words = summed(model, batch)
            window.backward(loss, weight=words)

    def partial(micro_batches: list[Batch]) -> None:
        window = spillway.Accumulator(model, optimizer, steps=100, max_norm=0.1)
        for batch in window(micro_batches):
            loss, words = summed(model, batch)
            window.backward(loss, weight=words)

    def scaled(micro_batches: list[Batch]) -> None:
        scaler = torch.amp.GradScaler("cpu")
        window = spillway.Accumulator(model, optimizer, steps=len(micro_batches), scaler=scaler)
        for batch in micro_batches:
            with window.micro(weight=words_of(batch)):
                window.backward(summed(model, batch)[0])
        window.step()

    for step in (loop, partial, scaled):
        assert 0 < split_equals_whole(step, BATCH, model=model, optimizer=optimizer) < 1e-14


@pytest.mark.parametrize("replaced", [False, True])
def test_every_step_begins_from_where_everything_was(replaced: bool) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("count", torch.zeros(()))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    random = torch.get_rng_state()
    drawn = set()

    def step(micro_batches: list[Tensor]) -> None:
        drawn.add(torch.rand(1).item())
        for batch in micro_batches:
            (model(batch).square().sum() * 2**model.count).backward()
        if replaced:
            model.count = model.count + 1
        else:
            model.count.add_(1)
        optimizer.step()
        with torch.no_grad():
            model[0].weight.zero_()

    split_equals_whole(step, torch.ones(4, 3), model=model, optimizer=optimizer)
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert optimizer.state_dict()["state"] == {}
    assert torch.equal(torch.get_rng_state(), random) and len(drawn) == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks


Step = Callable[[nn.Module], Callable[[list[Batch]], None]]

WRONG: dict[str, tuple[Step, Batch, tuple[int, ...], str]] = {
    "means of ragged micro-batches": (
        mean_of_means,
        BATCH,
        (1, 5),
        "no constant factor. A mean of means over micro-batches of different weight",
    ),
    "means added up": (
        sum_of_means,
        EVEN,
        (2, 2, 2),
        "they are 3 times as large.*means of 3 micro-batches are summed, but not divided by 3",
    ),
    "divided twice": (first_only, BATCH, (3, 3), r"they are 0.5 \(1/2\) times as large.*divided by 2 again"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_step_is_named_for_what_it_is(name: str) -> None:
    make, batch, split, words = WRONG[name]
    model = fresh().double()
    rows = batch[0][: sum(split)], batch[1][: sum(split)]
    with pytest.raises(SplitError, match=words) as caught:
        split_equals_whole(make(model), rows, model=model, splits=[split])
    assert isinstance(caught.value, AssertionError)
    message = str(caught.value)
    assert f"differ between micro-batches of {split} rows and the whole batch" in message
    assert any(f"'{parameter}'" in message for parameter, _ in model.named_parameters())
    assert "and 4 others differ" in message
    with pytest.raises(SplitError):
        split_equals_whole(make(model), rows, model=model)


def test_a_constant_factor_is_named_as_the_fraction_that_it_is() -> None:
    model = fresh()

    def step(micro_batches: list[Batch]) -> None:
        # Normalised by places, of which one in eight is padding, where the whole is by words.
        for batch in micro_batches:
            (summed(model, batch)[0] / (7 if len(micro_batches) > 1 else 8)).backward()

    with pytest.raises(SplitError, match=r"1.14286 \(8/7\) times as large.*may be a mean of means"):
        split_equals_whole(step, BATCH, model=model)


def test_even_micro_batches_do_not_find_a_mean_of_means_and_ragged_ones_do() -> None:
    model = fresh().double()
    split_equals_whole(mean_of_means(model), EVEN, model=model, splits=[(3, 3), (2, 2, 2), (1,) * 6])
    with pytest.raises(SplitError):
        split_equals_whole(mean_of_means(model), EVEN, model=model, splits=[(2, 4)])


def test_a_gradient_that_only_the_whole_has_is_a_difference() -> None:
    model = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1)])

    def step(micro_batches: list[Tensor]) -> None:
        for batch in micro_batches:
            model[0](batch).sum().backward()
        if len(micro_batches) == 1:
            (model[1].weight.sum() * 0).backward()

    with pytest.raises(SplitError, match=r"gradients of '1\.weight'"):
        split_equals_whole(step, torch.ones(2, 2), model=model)


def test_bits_may_be_asked_for() -> None:
    model = nn.Linear(2, 1, bias=False)

    def step(micro_batches: list[Tensor]) -> None:
        for batch in micro_batches:
            model(batch).sum().backward()

    assert split_equals_whole(step, torch.ones(5, 2), model=model, exact=True) == 0
    uneven = torch.tensor([[1e8, 1.0], [-1e8, 1.0], [1.0, 1.0]])
    with pytest.raises(SplitError, match=r"The tolerance is 0 \(the same bits\)"):
        split_equals_whole(step, uneven, model=model, exact=True)


def test_what_ought_to_be_zero_may_be_noise() -> None:
    """A bias before a softmax over all of it has no gradient, but for what rounding leaves."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.weight + self.shift).log_softmax(-1)

    torch.manual_seed(0)
    model, batch = Shifted(), (torch.randn(6, 5), torch.randint(7, (6,)))

    def step(micro_batches: list[Any]) -> None:
        for x, y in micro_batches:
            (nn.functional.nll_loss(model(x), y, reduction="sum") / 6).backward()

    split_equals_whole(step, batch, model=model)


def test_steps_that_prove_nothing_are_refused() -> None:
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = right(model)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"batch": torch.ones(1, 2)}, "batch: it has 1 row"),
        ({"batch": (torch.ones(2), torch.ones(3))}, r"batch: got tensors of \[2, 3\] rows"),
        ({"batch": []}, r"batch: got tensors of \[\] rows"),
        ({"splits": [(3, 4)]}, r"splits: got \(3, 4\), expected numbers of rows, at least 1 each, whose sum is 6"),
        ({"splits": []}, "expected at least one"),
        ({"tolerance": 0.0}, "tolerance: got 0.0"),
        ({"tolerance": 0.1, "exact": True}, "tolerance: got 0.1 with exact=True"),
        ({"step": lambda _: None}, "step: got 1 steps of the optimizer with gradients of 0 parameters"),
        ({"optimizer": optimizer}, "step: got 0 steps of the optimizer"),
    ]
    for options, words in calls:
        arguments: dict[str, Any] = {"step": step, "batch": BATCH, "model": model, **options}
        with pytest.raises(UsageError, match=words):
            split_equals_whole(arguments.pop("step"), arguments.pop("batch"), **arguments)
    count = itertools.count(1)
    with pytest.raises(UsageError, match="different gradients for the same batch"):
        split_equals_whole(lambda parts: (summed(model, parts[0])[0] * next(count)).backward(), BATCH, model=model)
    with pytest.raises(UsageError, match="gradients of the whole batch are not finite"):
        split_equals_whole(lambda parts: (summed(model, parts[0])[0] * float("inf")).backward(), BATCH, model=model)


def test_a_small_batch_has_all_its_splits_and_a_large_one_some() -> None:
    assert len(set(splits_of(6, 16, 0))) == 31
    assert sorted(splits_of(3, 1, 0)) == [(1, 1, 1), (1, 2), (2, 1)]
    drawn = list(splits_of(100, 16, 0))
    assert len(set(drawn)) == len(drawn) == 16
    assert drawn[0] == (50, 50) and all(sum(split) == 100 for split in drawn)
    assert drawn == list(splits_of(100, 16, 0)) != list(splits_of(100, 16, 1))
    assert (1,) * 8 in set(splits_of(8, 16, 0))


class Named(NamedTuple):
    x: Tensor
    y: Any


def test_batches_of_many_forms_are_cut_by_rows() -> None:
    x = torch.arange(10).reshape(5, 2)
    batch = {"x": x, "more": (x[:, 0], [x, "name"]), "named": Named(x, 3)}
    one, other = cut(batch, (2, 3))
    assert torch.equal(one["x"], x[:2]) and torch.equal(other["x"], x[2:])
    assert torch.equal(other["more"][0], x[2:, 0]) and other["more"][1][1] == "name"
    assert isinstance(one["named"], Named) and one["named"].y == 3 and torch.equal(one["named"].x, x[:2])


@pytest.mark.parametrize("kind", [partial(defaultdict, list), OrderedDict, UserDict])
def test_dictionaries_of_any_class_are_cut(kind: Callable[[dict[str, Any]], Any]) -> None:
    batch = kind({"x": torch.arange(5), "name": "batch"})
    one, other = cut(batch, (2, 3))
    assert type(one) is type(batch) and one["name"] == "batch"
    assert torch.equal(one["x"], torch.arange(2)) and torch.equal(other["x"], torch.arange(2, 5))
    assert torch.equal(batch["x"], torch.arange(5))
