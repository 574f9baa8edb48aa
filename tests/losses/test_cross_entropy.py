"""Cross entropy in rows is torch's own, bit for bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import spillway
from spillway.checkpointing import losses as room
from support import pairwise

ROWS, CLASSES = 333, 97


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is gained with any number of bytes."""
    monkeypatch.setattr(room, "_LEAST_BYTES", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Of how many rows logarithms were computed at a time."""
    plain, found = room._log_softmax, list[int]()

    def counted(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        found.append(len(logits))
        return plain(logits, dtype)

    monkeypatch.setattr(room, "_log_softmax", counted)
    return found


def logits_of(dtype: torch.dtype, classes: int = CLASSES, rows: int = ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(classes)
    return (torch.randn(rows, classes, generator=generator) * 5).to(dtype).requires_grad_()


def targets_of(classes: int = CLASSES, rows: int = ROWS, ignored: int = -100) -> torch.Tensor:
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(1))
    target[::3] = ignored
    return target


def both(logits: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and the gradient of the logits."""
    found = loss(logits)
    weights = torch.linspace(0.1, 1, found.numel()).reshape(found.shape).to(found.dtype)
    (gradient,) = torch.autograd.grad(found, logits, weights)
    return found.detach(), gradient


def same(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(
        torch.equal(mine, theirs) and mine.dtype is theirs.dtype and mine.stride() == theirs.stride()
        for mine, theirs in zip(one, other, strict=True)
    )


@pytest.mark.parametrize(
    ("classes", "dtype", "cast", "ignored", "reduction"),
    pairwise(
        [7, 97, 1025, 4099],
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
        [None, torch.float32],
        [-100, 0, 5, 9999],
        ["mean", "sum", "none"],
    ),
)
def test_it_is_torchs_own(
    classes: int, dtype: torch.dtype, cast: torch.dtype | None, ignored: int, reduction: str, calls: list[int]
) -> None:
    logits, target = logits_of(dtype, classes), targets_of(classes, ignored=ignored)
    expected = both(
        logits,
        lambda logits: functional.cross_entropy(
            logits if cast is None else logits.to(cast), target, ignore_index=ignored, reduction=reduction
        ),
    )
    found = both(
        logits,
        lambda logits: spillway.cross_entropy(logits, target, ignore_index=ignored, reduction=reduction, dtype=cast),
    )
    assert same(found, expected)
    assert len(calls) > 8
    assert max(calls) <= 32


@given(
    rows=st.integers(0, 700),
    classes=st.integers(1, 40),
    offset=st.integers(0, 7),
    ignored=st.floats(0, 1),
    turned=st.booleans(),
)
def test_of_any_shape_and_wherever_it_lies(rows: int, classes: int, offset: int, ignored: float, turned: bool) -> None:
    memory = torch.randn(rows * classes + offset, generator=torch.Generator().manual_seed(rows))
    lying = memory[offset:].view(classes, rows).t() if turned else memory[offset:].view(rows, classes)
    logits = lying.requires_grad_()
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(classes))
    target[torch.rand(rows, generator=torch.Generator().manual_seed(2)) < ignored] = -100
    expected = both(logits, lambda logits: functional.cross_entropy(logits, target, reduction="sum"))
    found = both(logits, lambda logits: spillway.cross_entropy(logits, target, reduction="sum"))
    assert same(found, expected)


def test_where_no_row_counts_it_is_torchs_nan() -> None:
    logits, target = logits_of(torch.float32), torch.full((ROWS,), -100)
    expected = both(logits, lambda logits: functional.cross_entropy(logits, target))
    found = both(logits, lambda logits: spillway.cross_entropy(logits, target))
    assert expected[0].isnan()
    assert found[0].isnan()
    assert torch.equal(found[1].nan_to_num(7), expected[1].nan_to_num(7))


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("cast", [None, torch.float32, torch.bfloat16])
def test_autocast_says_the_type(cast: torch.dtype | None, inside: bool, calls: list[int]) -> None:
    def ours(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return spillway.cross_entropy(logits, target, dtype=cast)

    def torchs(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits if cast is None else logits.to(cast), target)

    def run(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        features, weight = logits_of(torch.float32, 16), logits_of(torch.float32, 16, CLASSES)
        with torch.autocast("cpu", torch.bfloat16):
            logits = features @ weight.t()
            found = loss(logits, targets_of())
            if inside:
                found.backward()
        if not inside:
            found.backward()
        assert weight.grad is not None
        return found.detach(), weight.grad

    assert same(run(ours), run(torchs))
    # Logits that are cast to bfloat16 are cast once more.
    assert bool(calls) is (cast is not torch.bfloat16)


def test_a_gradient_of_a_gradient(calls: list[int]) -> None:
    def second(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits_of(torch.float64)
        (first,) = torch.autograd.grad(loss(logits, targets_of()), logits, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), logits)
        return first.detach(), found

    assert same(second(spillway.cross_entropy), second(functional.cross_entropy))
    assert calls


@pytest.mark.parametrize("batched", [False, True])
def test_hooks_of_the_logits_run_once(batched: bool) -> None:
    def gradients(loss: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        leaf = logits_of(torch.float64)
        logits = leaf * 2
        logits.retain_grad()
        logits.register_hook(lambda gradient: gradient * 3)
        found = loss(logits, targets_of())
        if batched:
            return torch.autograd.grad(found, leaf, torch.tensor([1.0, 0.5], dtype=leaf.dtype), is_grads_batched=True)
        found.backward(create_graph=True)
        assert leaf.grad is not None
        assert logits.grad is not None
        (second,) = torch.autograd.grad(leaf.grad.square().sum(), leaf)
        return leaf.grad.detach(), logits.grad.detach(), second

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward.. with create_graph")
        assert same(gradients(spillway.cross_entropy), gradients(functional.cross_entropy))


def test_twice_through_one_graph() -> None:
    logits = logits_of(torch.float32)
    loss = spillway.cross_entropy(logits, targets_of())
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)


def test_logits_that_are_written_before_backward_are_an_error() -> None:
    logits = logits_of(torch.float32).clone()
    loss = spillway.cross_entropy(logits, targets_of())
    with torch.no_grad():
        logits.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_nothing_but_the_logits_is_saved() -> None:
    saved: list[torch.Tensor] = []
    logits = logits_of(torch.bfloat16)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        spillway.cross_entropy(logits, targets_of(), dtype=torch.float32)
    large = [each for each in saved if each.numel() >= logits.numel()]
    assert [each.data_ptr() for each in large] == [logits.data_ptr()]


def test_its_logits_leave_with_the_rest() -> None:
    features = logits_of(torch.float32, 16)
    weight = logits_of(torch.float32, 16, CLASSES)
    with spillway.Session() as session:
        with spillway.offload(session=session, min_bytes=1) as passed:
            logits = features @ weight.t()
            loss = spillway.cross_entropy(logits, targets_of())
            nbytes = logits.nbytes
            del logits
        loss.backward()
        assert passed.stats().offloaded_bytes >= nbytes
    expected = copy.deepcopy((features.grad, weight.grad))
    features.grad = weight.grad = None
    functional.cross_entropy(features @ weight.t(), targets_of()).backward()
    for found, plain in zip(expected, (features.grad, weight.grad), strict=True):
        assert found is not None
        assert plain is not None
        assert torch.equal(found, plain)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_transforms_and_compiled_code_have_torchs_own(calls: list[int]) -> None:
    logits, target = logits_of(torch.float32).detach(), targets_of()
    gradient = torch.func.grad(lambda logits: spillway.cross_entropy(logits, target))(logits)
    assert torch.equal(gradient, torch.func.grad(lambda logits: functional.cross_entropy(logits, target))(logits))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits, torch.ones_like(logits))
        assert torch.autograd.forward_ad.unpack_dual(spillway.cross_entropy(dual, target)).tangent is not None
    assert not calls


def test_a_target_that_is_no_class_is_torchs_error() -> None:
    target = targets_of()
    target[200] = CLASSES
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        spillway.cross_entropy(logits_of(torch.float32), target)


def test_bad_arguments() -> None:
    logits, target = logits_of(torch.float32), targets_of()
    with pytest.raises(spillway.UsageError, match=r"got logits of shape \(1, 333, 97\).*flatten"):
        spillway.cross_entropy(logits[None], target)
    with pytest.raises(spillway.UsageError, match=r"a target of \(332,\)"):
        spillway.cross_entropy(logits, target[1:])
    with pytest.raises(spillway.UsageError, match="reduction: got 'avg', expected one of 'none', 'mean', 'sum'"):
        spillway.cross_entropy(logits, target, reduction="avg")


def test_a_few_rows_are_computed_at_once(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(room, "_LEAST_BYTES", 1 << 20)
    assert not room._is_worth_it(ROWS, CLASSES, torch.float32)
    spillway.cross_entropy(logits_of(torch.float32), targets_of())
    assert not calls


@pytest.mark.parametrize("ignored", [-1, 5])
def test_under_autocast_another_class_is_ignored(ignored: int) -> None:
    logits, target = logits_of(torch.bfloat16), targets_of(ignored=ignored)
    assert target[0] == ignored

    def loss(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def called(logits: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(logits, target, ignore_index=ignored)

        return called

    assert same(both(logits, loss(spillway.cross_entropy)), both(logits, loss(functional.cross_entropy)))


@pytest.mark.parametrize("ignored", [-100, 3, 255])
def test_targets_of_bytes_are_torchs_to_see_to(ignored: int) -> None:
    logits, target = logits_of(torch.float32, 200), targets_of(200, ignored=156).to(torch.uint8)
    expected = both(logits, lambda logits: functional.cross_entropy(logits, target, ignore_index=ignored))
    found = both(logits, lambda logits: spillway.cross_entropy(logits, target, ignore_index=ignored))
    assert same(found, expected)


@pytest.mark.parametrize("cast", [None, torch.float32])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_several_gradients_at_once(reduction: str, cast: torch.dtype | None) -> None:
    logits, target = logits_of(torch.bfloat16, rows=100), targets_of(rows=100)

    def gradients(loss: torch.Tensor) -> torch.Tensor:
        many = torch.eye(loss.numel(), dtype=loss.dtype) if loss.dim() else torch.tensor([1.0, 0.7], dtype=loss.dtype)
        (found,) = torch.autograd.grad(loss, logits, many, is_grads_batched=True)
        assert not found.requires_grad
        return found

    expected = functional.cross_entropy(logits if cast is None else logits.to(cast), target, reduction=reduction)
    found = spillway.cross_entropy(logits, target, reduction=reduction, dtype=cast)
    assert torch.equal(gradients(found), gradients(expected))


@pytest.mark.parametrize("rows", [65, 129, 257])
def test_a_last_row_of_its_own_of_logits_that_are_a_part(rows: int) -> None:
    whole = torch.randn(rows, 4109, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = targets_of(4099, rows)
    expected = both(whole, lambda whole: functional.cross_entropy(whole[:, 5:4104], target % 4099))
    found = both(whole, lambda whole: spillway.cross_entropy(whole[:, 5:4104], target % 4099))
    assert same(found, expected)


KEEP = partial(spillway.offload, policy=spillway.policies.Keep())
OTHER_USES: dict[str, Callable[[torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]] = {
    "a loss of their sizes": lambda x, loss: loss(x) + 1e-2 * x.logsumexp(1).square().mean(),
    "one before": lambda x, loss: 1e-2 * x.logsumexp(1).square().mean() + loss(x),
    "a sine": lambda x, loss: x.sin().sum() + loss(x),
    "an exponential": lambda x, loss: loss(x.exp()) + x.exp().sum(),
    "what they are made of": lambda x, loss: loss(x.tanh()) + loss(x),
    "two losses": lambda x, loss: loss(x) + 0.5 * loss(x),
    "one loss": lambda x, loss: loss(x),
}


@pytest.mark.parametrize(
    ("use", "hooks", "how", "made"),
    pairwise(
        OTHER_USES,
        [nullcontext, spillway.offload, KEEP],
        [{}, {"save": "inputs"}, {"save": ["inputs", torch.ops.aten.mul]}, None],
        [True, False],
    ),
)
def test_other_uses_of_logits_that_a_region_or_a_context_has(
    use: str, hooks: Callable[[], AbstractContextManager[object]], how: dict[str, Any] | None, made: bool
) -> None:
    target = targets_of()

    def function(x: torch.Tensor, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        return OTHER_USES[use](x * 3 if made else x, lambda logits: loss(logits, target))

    def region(x: torch.Tensor) -> torch.Tensor:
        return function(x, spillway.cross_entropy)

    source, plain = logits_of(torch.float32), logits_of(torch.float32)
    x = source + 0 if made else source
    before = x.detach().clone()
    with hooks():
        loss = region(x) if how is None else spillway.recompute(region, x, **how)
    if made:
        del x
    loss.backward()
    function(plain + 0, functional.cross_entropy).backward()
    assert source.grad is not None
    assert plain.grad is not None
    assert torch.equal(source.grad, plain.grad)
    assert torch.equal(source, before)
