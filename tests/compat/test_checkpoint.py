"""torch's own checkpointing and ``save_on_cpu``: what has another form here, and that their page says all of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import spillway
from support import assert_identical, assert_nothing_left, grads, mlp

PAGE = Path(__file__).parent.parent.parent / "docs" / "compat" / "checkpoint.md"


@pytest.fixture
def session(tmp_path: Path) -> Iterator[spillway.Session]:
    with spillway.Session(window=0, spill_directory=tmp_path, allow_memory_filesystem=True) as made:
        yield made
        assert_nothing_left(made)


def results(call: Callable[[Tensor], Tensor], module: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 64).reshape(4, 16).requires_grad_()
    module.zero_grad()
    y = call(x * 1)
    y.square().sum().backward()
    return [y.detach(), *(gradient.clone() for gradient in grads(x, *module.parameters()))]


# The curried form.


OPTIONS: list[dict[str, Any]] = [{}, {"save": "matmul"}, {"offload": "inputs"}, {"use_reentrant": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_alone_give_a_wrapper(session: spillway.Session, options: dict[str, Any]) -> None:
    module = mlp(16, 32, 16)
    plain = results(module, module)
    wrap = spillway.recompute(session=session, **options)
    for _ in range(3):
        assert_identical(results(wrap(module), module), plain)
    assert session.stats().recomputed_bytes > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_wrapper_is_a_decorator_of_functions_and_methods(
    session: spillway.Session, options: dict[str, Any]
) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(16, 32, 16)

        @spillway.recompute(session=session, **options)
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            """Doc."""
            return (self.inner(x) * scale).sin()

    block = Block()
    assert (Block.forward.__name__, Block.forward.__doc__) == ("forward", "Doc.")

    @spillway.recompute(session=session, **options)
    def function(x: Tensor) -> Tensor:
        return block.inner(x).cos()

    for call, plain in (
        (lambda x: block(x, scale=0.5), lambda x: (block.inner(x) * 0.5).sin()),
        (function, lambda x: block.inner(x).cos()),
    ):
        expected = results(plain, block)
        for _ in range(2):
            assert_identical(results(call, block), expected)
    assert session.stats().recomputed_bytes > 0


def test_it_gives_what_torchs_own_gives(session: spillway.Session) -> None:
    if "function" not in inspect.signature(checkpoint).parameters or (
        inspect.signature(checkpoint).parameters["function"].default is inspect.Parameter.empty
    ):
        pytest.skip("this torch has no curried form")
    module = mlp(16, 32, 16)
    theirs = results(checkpoint(use_reentrant=False)(module), module)
    assert_identical(results(spillway.recompute(session=session)(module), module), theirs)


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [((), {"sav": "matmul"}, "got sav without a function"), ((None, 3), {}, "got 3 without a function")],
)
def test_what_is_no_option_needs_a_function(args: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    with pytest.raises(spillway.UsageError, match=says):
        spillway.recompute(*args, **options)


# Saved outputs: written in place, and hooks around.


def written(weight: Tensor) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        product = x @ weight
        shown = product + 1
        product.mul_(2)
        return product.sin() * shown

    return function


def test_a_saved_output_that_is_written_in_place_is_an_error_or_recomputed(session: spillway.Session) -> None:
    holder = nn.Linear(16, 16, bias=False)
    function = written(holder.weight)
    plain = results(function, holder)

    def policy(answer: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
        def decide(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return answer if operator is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

        return decide

    for how in ({"policy": policy(CheckpointPolicy.PREFER_SAVE)}, {"save": "matmul"}):
        assert_identical(
            results(lambda x, how=how: spillway.recompute(function, x, session=session, **how), holder), plain
        )
    must = policy(CheckpointPolicy.MUST_SAVE)
    with pytest.raises(spillway.RecomputeError, match="in place"):
        results(lambda x: spillway.recompute(function, x, session=session, policy=must), holder)


@pytest.mark.parametrize("how", ["save", "offload"])
def test_hooks_around_see_the_inputs_and_no_saved_output(session: spillway.Session, how: str) -> None:
    # What is under 1 MiB is not offloaded.
    module = mlp(16, 2**17, 16)
    plain = results(module, module)
    seen: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor

    def call(x: Tensor) -> Tensor:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return spillway.recompute(module, x, session=session, **{how: "matmul"})

    for _ in range(2):
        # The first call of its kind tells which tensors the products give.
        seen.clear()
        assert_identical(results(call, module), plain)
        assert seen == [(4, 16)]
    # offload= sends them away by itself.
    assert (session.stats().offloaded_bytes > 0) == (how == "offload")


# The page.


NEWER = {"respect_saved_tensors_hooks", "device_type", "allow_cache_entry_mutation", "early_stop"}
"""Names that not every torch has that is served."""
OF_TRANSFORMERS = {"activation_checkpointing_enable", "every_n_layers", "offload", "activation_checkpointing_kwargs"}


def test_the_page_says_of_every_name_what_it_is_here() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", row[0])))}
    names = NEWER | OF_TRANSFORMERS | {each.name for each in CheckpointPolicy if "OFFLOAD" in each.name}
    for function in (checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts, save_on_cpu):
        names |= {function.__name__, *inspect.signature(function).parameters}
    assert names - {"args", "kwargs"} - told == set()
    assert all(len(row) == 2 and row[1].strip(" |") for row in rows)
