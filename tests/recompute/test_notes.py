"""What a region says of what was done otherwise than its user may think."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import spillway
from recompute.regions import Block, Regions, one_place


@one_place
@pytest.mark.parametrize(
    ("how", "names"),
    [
        ({"offload": "*.q_prj"}, "'*.q_prj'"),
        ({"save": "convolution"}, "'convolution'"),
        ({"save": spillway.saved_by("attention")}, "saved_by(selector='attention')"),
        ({"save": spillway.within("up", "softmax")}, "within(module='up', selector='softmax')"),
        ({"save": ["matmul", "drop*"]}, None),
        ({"save": spillway.within("up", "matmul")}, None),
        ({"save": spillway.saved_by("softmax"), "offload": "inputs"}, None),
    ],
    ids=str,
)
def test_a_selector_that_names_nothing_is_said(regions: Regions, how: dict[str, Any], names: str | None) -> None:
    block, context = Block(), regions.offload()
    with context:
        out = spillway.recompute(block, torch.randn(2, 4, 16, requires_grad=True), session=regions.session, **how)
    assert not context.stats().notes, "another region may still run it"
    out.sum().backward()
    said = [note for note in context.stats().notes if "decided nothing" in note]
    assert (said == []) if names is None else (names in said[0])


async def waits(x: torch.Tensor) -> torch.Tensor:
    return x.sin()


def yields(x: torch.Tensor) -> Any:
    yield x.sin()


class Yields(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        yield x.sin()


@one_place
@pytest.mark.parametrize("function", [waits, yields, Yields()], ids=["coroutine", "generator", "module"])
def test_a_function_that_runs_after_its_call_is_told_and_called_plainly(regions: Regions, function: Any) -> None:
    x = torch.randn(4, requires_grad=True)
    context = regions.offload()
    with context:
        made = spillway.recompute(function, x * 1, session=regions.session)
        if function is waits:
            with pytest.raises(StopIteration) as ended:
                made.send(None)
            out = ended.value.value
        else:
            (out,) = made
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    (note,) = context.stats().notes
    assert (
        "is a generator or a coroutine, which runs after its call. Its saved tensors are kept, not recomputed" in note
    )


@one_place
def test_what_regions_outside_of_any_context_cost_is_read_from_the_session(regions: Regions) -> None:
    session, x = regions.session, torch.randn(64, requires_grad=True)
    assert session.stats() == spillway.StepStats()
    for _ in range(2):
        out = spillway.recompute(lambda x: x.sin().exp().cos(), x * 1, save="nothing::*", session=session)
        out.sum().backward()
        stats = session.stats()
        assert stats.recomputed_bytes == x.nbytes, "the exponential; the input is held"
        assert "'nothing::*' decided nothing: it names no operator that ran, or others do, too" in stats.notes


@one_place
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_bytes_count_a_storage_once(regions: Regions, reentrant: bool) -> None:
    context = regions.offload()

    def region(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        return y.exp() * y.t().cos().t() * y.square()

    with context:
        out = spillway.recompute(
            region, torch.randn(8, 8, requires_grad=True) * 1, session=regions.session, use_reentrant=reentrant
        )
    out.sum().backward()
    # y, its exponential, its cosine, the product of the two, and its square.
    assert context.stats().recomputed_bytes == 5 * 8 * 8 * 4
