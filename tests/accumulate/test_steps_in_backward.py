"""An optimizer that steps in backward, with several micro-batches: the last backward steps, with the bits of a sum on
the GPU."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import spillway
from accumulate.models import MODELS, Transformer, assert_equal, batches, loss_of, made, trained
from spillway.testing import AdversaryBackend

Make = Callable[[Any], torch.optim.Optimizer]


def offloaded(session: spillway.Session | None = None, **options: Any) -> Make:
    return lambda parameters: spillway.OffloadedOptimizer(
        parameters, torch.optim.AdamW, lr=0.01, session=session, **options
    )


def stepping(model: nn.Module, **options: Any) -> spillway.OffloadedOptimizer:
    return spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, step_in_backward=True, **options)


@pytest.mark.parametrize("step_on", ["cpu", "gpu"])
@pytest.mark.parametrize("backend", ["cpu", "adversary"])
@pytest.mark.parametrize("name", ["transformer", "mixture", "spillway", "dropped"])
def test_the_bits_of_steps_after_backward(name: str, backend: str, step_on: str) -> None:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve if backend == "adversary" else None) as session:
        loader, options = batches(8), {"step_on": step_on, "fused": True}
        plain = trained(made(name), loader, make=offloaded(session, offload_gradients=False, **options))
        assert_equal(trained(made(name), loader, make=offloaded(session, step_in_backward=True, **options)), plain)
        torchs = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)  # noqa: E731
        assert_equal(trained(made(name), loader, make=torchs), plain)
    adversary.check()


@pytest.mark.parametrize("step_on", ["cpu", "gpu"])
def test_gradients_in_bfloat16_are_added_up_in_bfloat16(step_on: str) -> None:
    with spillway.Session() as session:
        plain = trained(
            made("transformer").bfloat16(),
            batches(8),
            make=offloaded(session, offload_gradients=False, step_on=step_on),
        )
        make = offloaded(session, step_in_backward=True, step_on=step_on)
        assert_equal(trained(made("transformer").bfloat16(), batches(8), make=make), plain)


@settings(derandomize=True, deadline=None, max_examples=40, database=None)
@given(
    name=st.sampled_from([*MODELS]),
    steps=st.integers(1, 5),
    count=st.integers(1, 9),
    normalize=st.sampled_from(["tokens", "steps", "sum"]),
    partial=st.sampled_from(["scale", "drop", "carry"]),
    frozen=st.sets(st.integers(0, 20), max_size=4),
)
def test_any_accumulation_has_the_bits_of_steps_after_backward(
    name: str, steps: int, count: int, normalize: str, partial: str, frozen: set[int]
) -> None:
    def run(**options: Any) -> list[Any]:
        model = made(name)
        for place, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(place not in frozen)
        with spillway.Session() as session:
            make = offloaded(session, **options)
            return trained(model, batches(count), steps=steps, make=make, normalize=normalize, partial=partial)

    assert_equal(run(step_in_backward=True), run(offload_gradients=False))


def stepped_in_backward(model: nn.Module) -> set[str]:
    """Parameters whose gradients were taken over by a step."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[each] for each in names if type(each.grad) is not torch.Tensor and each.grad is not None}


def test_only_the_last_backward_steps() -> None:
    model = made("untied")
    with contextlib.closing(stepping(model)) as optimizer:
        accumulator = spillway.Accumulator(model, optimizer, steps=3)
        for place, words in enumerate(batches(3)):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            with accumulator.micro():
                loss, weight = loss_of(model, words)
                accumulator.backward(loss, weight=weight)
            found = stepped_in_backward(model)
            if place < 2:
                assert not found
                assert_equal([parameter.detach() for parameter in model.parameters()], before)
            else:
                assert found == {name for name, _ in model.named_parameters()}
        accumulator.step()
        assert all(parameter.grad is None for parameter in model.parameters())


def test_hooks_of_the_user_run_for_each_micro_batch() -> None:
    model, seen = made("untied"), []
    with contextlib.closing(stepping(model)) as optimizer:
        model.head.weight.register_post_accumulate_grad_hook(  # type: ignore[union-attr]
            lambda parameter: seen.append(parameter)
        )
        accumulator = spillway.Accumulator(model, optimizer, steps=3)
        for words in accumulator(batches(6)):
            loss, weight = loss_of(model, words)
            accumulator.backward(loss, weight=weight)
    assert len(seen) == 6


def test_accumulation_by_hand() -> None:
    def run(**options: Any) -> list[torch.Tensor]:
        model = made("transformer")
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)
        torch.manual_seed(0)
        for _ in range(3):
            for words in batches(3)[:2]:
                with optimizer.accumulate():
                    loss_of(model, words)[0].backward()
            assert not stepped_in_backward(model)
            loss_of(model, batches(3)[2])[0].backward()
            assert bool(stepped_in_backward(model)) is optimizer.steps_in_backward
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return [parameter.detach() for parameter in model.parameters()]

    assert_equal(run(step_in_backward=True), run(offload_gradients=False))


def test_a_step_without_a_last_backward() -> None:
    """``step()`` may come early, or after an error outside of a backward."""

    def run(**options: Any) -> list[torch.Tensor]:
        model = made("transformer")
        optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, **options)
        accumulator = spillway.Accumulator(model, optimizer, steps=4)
        torch.manual_seed(0)
        for words in batches(2):
            with accumulator.micro(weight=words.numel()):
                accumulator.backward(loss_of(model, words)[0])
        accumulator.step()
        optimizer.close()
        return [parameter.detach() for parameter in model.parameters()]

    assert_equal(run(step_in_backward=True), run(offload_gradients=False))


@pytest.mark.parametrize(
    "options",
    [{"max_norm": 1.0}, {"max_norm": math.inf}, {"grad_dtype": torch.float32}, {"scaler": torch.amp.GradScaler("cpu")}],
    ids=lambda options: next(iter(options)),
)
def test_what_changes_all_gradients_after_backward_is_refused(options: dict[str, Any]) -> None:
    model = Transformer().bfloat16()
    with contextlib.closing(stepping(model, master_dtype=None)) as optimizer:
        with pytest.raises(spillway.UsageError, match=f"{next(iter(options))}.*step_in_backward"):
            spillway.Accumulator(model, optimizer, steps=2, **options)
        for parameter in model.parameters():
            assert parameter.grad is None


def test_a_second_gradient_is_an_error_that_names_both_ways() -> None:
    model = nn.Linear(4, 4)
    with contextlib.closing(stepping(model)) as optimizer:
        model(torch.randn(2, 4)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        with pytest.raises(spillway.UsageError, match=r"spillway.Accumulator, or .*optimizer.accumulate\(\)"):
            model(torch.randn(2, 4)).sum().backward()
        optimizer.zero_grad()


class Positions(nn.Module):
    """Autograd takes over the gradient of ``positions``, and goes on to read the same memory for ``words``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.positions = nn.Parameter(torch.randn(5, 8))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(words) + self.positions.unsqueeze(0))
        return out


@pytest.mark.parametrize("step_on", ["cpu", "gpu"])
def test_a_gradient_is_normalised_without_a_write_to_memory_that_backward_still_reads(step_on: str) -> None:
    def run(make: Make) -> list[Any]:
        return trained(Positions(), [words for words in batches(6) if len(words) == 1], steps=1, make=make)

    plain = run(lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True))
    assert_equal(run(offloaded(step_in_backward=True, fused=True, step_on=step_on)), plain)


def test_a_last_backward_that_is_discarded_before_anything_has_stepped() -> None:
    """Small parameters wait for each other, and an error comes before the last of them."""

    def run(*, fails: bool) -> list[torch.Tensor]:
        model = made("untied")
        with contextlib.closing(stepping(model, lr=0.01)) as optimizer:
            accumulator = spillway.Accumulator(model, optimizer, steps=2)
            torch.manual_seed(0)
            if fails:
                failing = model.words.weight.register_hook(raise_error)  # type: ignore[union-attr]
                words = batches(1)[0]
                with torch.random.fork_rng([]):
                    loss = loss_of(model, words)[0]
                with pytest.raises(ZeroDivisionError), accumulator.micro(weight=words.numel(), last=True):
                    accumulator.backward(loss)
                failing.remove()
                accumulator.discard()
            for words in accumulator(batches(4)):
                loss, weight = loss_of(model, words)
                accumulator.backward(loss, weight=weight)
            optimizer.synchronize()
            return [parameter.detach().clone() for parameter in model.parameters()]

    assert_equal(run(fails=True), run(fails=False))


def raise_error(_: torch.Tensor) -> None:
    raise ZeroDivisionError


def test_after_some_parameters_have_stepped_a_discarded_backward_asks_for_a_checkpoint() -> None:
    model = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1200))
    with contextlib.closing(stepping(model, lr=0.01)) as optimizer:
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        accumulator = spillway.Accumulator(model, optimizer, steps=1)
        with accumulator.micro(weight=1):
            accumulator.backward(model(torch.ones(1, 1200)).sum())
        accumulator.discard()
        with (
            pytest.raises(spillway.UsageError, match="was discarded, some parameters have stepped: load the last"),
            accumulator.micro(weight=1),
        ):
            accumulator.backward(model(torch.ones(1, 1200)).sum())
        accumulator.discard()
        optimizer.load_state_dict(saved[1])
        model.load_state_dict(saved[0])
        with accumulator.micro(weight=1):
            accumulator.backward(model(torch.ones(1, 1200)).sum())
        accumulator.step()
