"""Vertical order: the bits of plain accumulation, block by block."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import spillway
from accumulate.models import MODELS, Transformer, assert_equal, batches, loss_of, made, threads_of_backwards, trained
from spillway.testing import AdversaryBackend
from test_leaks import ended

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    # The traceback of a test that failed holds its threads.
    before = threads_of_backwards()
    yield
    # They end with their accumulators.
    assert ended(threads_of_backwards, before)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("name", list(MODELS))
def test_any_model_has_the_bits_of_plain_accumulation(name: str, steps: int) -> None:
    loader = batches(2 * steps + steps // 2)
    plain = trained(made(name), "horizontal", loader, steps=steps)
    assert_equal(trained(made(name), "vertical", loader, steps=steps), plain)


def test_threads_are_kept_for_later_steps_and_end_with_the_accumulator() -> None:
    """Torch caches plans of cuDNN in each thread, and never frees them."""
    model, ran = made("untied"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = spillway.Accumulator(model, optimizer, steps=3, order="vertical")
    next(model.parameters()).register_hook(lambda _: ran.append((threading.get_ident(), torch.get_num_threads())))
    before, others = torch.get_num_threads(), threads_of_backwards()
    try:
        for count in (1, 2):
            # Each thread has a number of its own.
            torch.set_num_threads(count)
            for place, batch in enumerate(batches(3)):
                with accumulator.micro(last=place == 2):
                    loss, weight = loss_of(model, batch)
                    accumulator.backward(loss, weight=weight)
            accumulator.step()
            assert threads_of_backwards() - others == 3
    finally:
        torch.set_num_threads(before)
    idents, counts = zip(*ran, strict=True)
    assert len(set(idents)) == 3
    assert set(idents[:3]) == set(idents[3:])
    assert counts == (1, 1, 1, 2, 2, 2)
    accumulator.close()
    assert threads_of_backwards() == others


def arrivals(order: str, name: str = "untied", steps: int = 2) -> list[str]:
    """Names of parameters, in the order in which gradients are added to them."""
    model, found = made(name), []
    for parameter_name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=parameter_name: found.append(name))
    trained(model, order, batches(steps), steps=steps)
    return found


def test_a_block_s_gradients_are_complete_before_those_of_the_block_before_it_begin() -> None:
    vertical, horizontal = arrivals("vertical"), arrivals("horizontal")
    assert sorted(vertical) == sorted(horizontal)
    for earlier, later in (("blocks.0.", "blocks.1."), ("blocks.1.", "blocks.2."), ("words.", "blocks.0.")):
        begins = min(place for place, name in enumerate(vertical) if name.startswith(earlier))
        ends = max(place for place, name in enumerate(vertical) if name.startswith(later))
        assert ends < begins
    assert horizontal.index("blocks.0.up.weight") < len(horizontal) // 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 0.1},
        {"normalize": "steps"},
        {"normalize": "sum"},
        {"partial": "drop"},
        {"partial": "carry"},
        {"max_norm": 1.0, "scaler": "scaler"},
    ],
    ids=str,
)
def test_all_options_have_the_bits_of_plain_accumulation(options: dict[str, Any]) -> None:
    found = []
    for order in ("horizontal", "vertical"):
        more = {**options, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**4)} if "scaler" in options else options
        found.append(trained(made("transformer"), order, batches(8), **more))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize("name", ["transformer", "spillway"])
def test_sums_in_float32_and_a_scheduler(name: str) -> None:
    def run(order: str) -> list[Any]:
        model = made(name).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return trained(
            model, order, batches(7), make=lambda _: optimizer, scheduler=scheduler, grad_dtype=torch.float32
        )

    assert_equal(run("vertical"), run("horizontal"))


def by_hand(order: str, *, last: bool) -> list[Any]:
    model = made("transformer")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accumulator = spillway.Accumulator(model, optimizer, steps=4, order=order)
    torch.manual_seed(1)
    for place, words in enumerate(batches(3)):
        # An error before backward drops that micro-batch only.
        with contextlib.suppress(ZeroDivisionError), accumulator.micro():
            loss_of(model, words)
            raise ZeroDivisionError
        with accumulator.micro(weight=words.numel(), last=last and place == 2):
            accumulator.backward(loss_of(model, words)[0])
    assert (next(model.parameters()).grad is None) == (order == "vertical" and not last)
    record = accumulator.step()
    return [torch.tensor(float(record.loss)), *(each.detach() for each in model.parameters())]


@pytest.mark.parametrize("last", [True, False])
def test_micro_batches_by_hand(last: bool) -> None:
    assert_equal(by_hand("vertical", last=last), by_hand("horizontal", last=last))


def under_autocast(order: str, *, shared_casts: bool) -> list[Any]:
    """With one context around all micro-batches, they share autocast's casts of weights: nodes of two graphs."""
    model = made("spillway" if shared_casts else "transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = spillway.Accumulator(model, optimizer, steps=3, order=order)
    torch.manual_seed(1)
    context = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    outer, inner = (context, contextlib.nullcontext) if shared_casts else (contextlib.nullcontext, context)
    for _ in range(2):
        with outer():
            for words in accumulator(batches(3)):
                with inner():
                    loss, weight = loss_of(model, words)
                accumulator.backward(loss, weight=weight)
    return [each.detach() for each in model.parameters()]


@pytest.mark.parametrize("shared_casts", [True, False])
def test_autocast(shared_casts: bool) -> None:
    plain = under_autocast("horizontal", shared_casts=shared_casts)
    assert_equal(under_autocast("vertical", shared_casts=shared_casts), plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("way", ["policy", "offload", "budget", "compile"])
def test_the_rest_of_spillway_and_compiled_blocks(way: str) -> None:
    def run(order: str) -> list[Any]:
        model = made("untied")
        with contextlib.ExitStack() as stack:
            if way == "policy":
                stack.callback(spillway.attach(model, policy=spillway.Recompute()).remove)
            elif way == "budget":
                # Other tests have made this process as large as it is.
                stack.callback(spillway.attach(model, budget="64GiB").remove)
            elif way == "offload":
                stack.enter_context(spillway.offload(min_bytes=1))
            else:
                for block in model.blocks:  # type: ignore[union-attr]
                    block.compile(backend="aot_eager")
            return trained(model, order, batches(18), steps=3)

    assert_equal(run("vertical"), run("horizontal"))


def test_hooks_of_tensors_run_once_and_where_they_would() -> None:
    class Hooked(Transformer):
        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words)
            for block in self.blocks:
                x = block(x)
                x.register_hook(lambda grad: grad * 1.5)
            out: Tensor = self.head(self.norm(x))
            return out

    def run(order: str) -> list[Any]:
        torch.manual_seed(0)
        model = Hooked()
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 0.7)
        return trained(model, order, batches(6))

    assert_equal(run("vertical"), run("horizontal"))


class Ambient(torch.autograd.Function):
    """Its backward reads what threads have of their own."""

    seen: list[Any] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Ambient.seen.append(
            (
                torch.get_default_device(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.is_grad_enabled(),
                torch.get_num_threads(),
                VARIABLE.get(),
            )
        )
        return grad


import contextvars  # noqa: E402

VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


class Seeing(Transformer):
    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = super().forward(words)
        return Ambient.apply(out)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_backward_finds_what_its_caller_has(device: str | None) -> None:
    found = {}
    token = VARIABLE.set(7)
    for order in ("horizontal", "vertical"):
        model = Seeing()
        accumulator = spillway.Accumulator(model, torch.optim.SGD(model.parameters(), lr=1), steps=2, order=order)
        Ambient.seen.clear()
        for words in accumulator(batches(2)):
            loss, weight = loss_of(model, words)
            with torch.device(device) if device else contextlib.nullcontext(), torch.autocast("cpu", torch.float16):
                accumulator.backward(loss, weight=weight)
        found[order] = list(Ambient.seen)
        assert torch.get_default_device() == torch.device("cpu")
    VARIABLE.reset(token)
    assert found["vertical"] == found["horizontal"]
    assert len(found["vertical"]) == 2


def offloaded(session: spillway.Session, **options: Any) -> Make:
    return lambda parameters: spillway.OffloadedOptimizer(
        parameters, torch.optim.AdamW, lr=0.01, session=session, **options
    )


@pytest.mark.parametrize("backend", ["cpu", "adversary"])
@pytest.mark.parametrize("name", ["transformer", "mixture", "spillway"])
def test_an_optimizer_that_steps_in_backward_steps_once(name: str, backend: str) -> None:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve if backend == "adversary" else None) as session:
        loader = batches(8)
        plain = trained(made(name), "horizontal", loader, make=offloaded(session))
        ours = trained(made(name), "vertical", loader, make=offloaded(session, step_in_backward=True))
        assert_equal(ours, plain)
        assert_equal(trained(made(name), "vertical", loader, make=offloaded(session)), plain)
        fused = lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True)  # noqa: E731
        assert_equal(ours, trained(made(name), "horizontal", loader, make=fused))
    adversary.check()


@pytest.mark.parametrize("offloads", [True, False])
def test_gradients_in_bfloat16(offloads: bool) -> None:
    """An optimizer that steps in backward gets sums in the parameter's dtype, without ``offload_gradients``."""
    with spillway.Session() as session:
        make, loader = offloaded(session, offload_gradients=offloads), batches(8)
        plain = trained(made("transformer").bfloat16(), "horizontal", loader, make=make)
        assert_equal(trained(made("transformer").bfloat16(), "vertical", loader, make=make), plain)
        if not offloads:
            make = offloaded(session, step_in_backward=True)
            assert_equal(trained(made("transformer").bfloat16(), "vertical", loader, make=make), plain)


@pytest.mark.parametrize("normalize", ["tokens", "steps", "sum"])
@pytest.mark.parametrize("partial", ["scale", "drop", "carry"])
def test_steps_in_backward_with_any_end_of_a_loader(normalize: str, partial: str) -> None:
    options = {"normalize": normalize, "partial": partial}
    with spillway.Session() as session:
        plain = trained(made("mixture"), "horizontal", batches(8), make=offloaded(session), **options)
        make = offloaded(session, step_in_backward=True)
        assert_equal(trained(made("mixture"), "vertical", batches(8), make=make, **options), plain)


@settings(derandomize=True, deadline=None, max_examples=60, database=None)
@given(
    name=st.sampled_from([*MODELS]),
    steps=st.integers(1, 5),
    count=st.integers(1, 9),
    normalize=st.sampled_from(["tokens", "steps", "sum"]),
    partial=st.sampled_from(["scale", "drop", "carry"]),
    max_norm=st.sampled_from([None, 0.1]),
    frozen=st.sets(st.integers(0, 20), max_size=4),
)
def test_any_accumulation_has_the_bits_of_plain_accumulation(
    name: str, steps: int, count: int, normalize: str, partial: str, max_norm: float | None, frozen: set[int]
) -> None:
    def run(order: str) -> list[Any]:
        model = made(name)
        for place, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(place not in frozen)
        options = {"normalize": normalize, "partial": partial, "max_norm": max_norm}
        return trained(model, order, batches(count), steps=steps, **options)

    assert_equal(run("vertical"), run("horizontal"))


def test_some_of_the_blocks() -> None:
    for blocks in ("blocks.[02]", nn.LayerNorm, ["blocks.1"]):
        plain = trained(made("untied"), "horizontal", batches(6))
        assert_equal(trained(made("untied"), "vertical", batches(6), blocks=blocks), plain)
