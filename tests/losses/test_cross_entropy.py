"""Cross entropy in rows is torch's own, bit for bit."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway.losses import cross_entropy as room

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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 0, 5, 9999])
@pytest.mark.parametrize("cast", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classes", [7, 97, 1025, 4099])
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


def test_twice_through_one_graph() -> None:
    logits = logits_of(torch.float32)
    loss = spillway.cross_entropy(logits, targets_of())
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)


KEEP = partial(spillway.offload, policy=spillway.policies.Keep())


@dataclass
class Alone:
    """A loss of logits that an operator has made which saves nothing, and whether the gradient was written there."""

    loss: torch.Tensor
    source: torch.Tensor
    is_in_place: list[bool]

    @classmethod
    def of(cls, dtype: torch.dtype, hold: Callable[[torch.Tensor, torch.Tensor], object] = lambda *_: None) -> Alone:
        """Names are let go of, but for what is held of the logits, and of their rows."""
        source = logits_of(dtype)
        logits = (source + 0).view(3, -1, CLASSES)
        rows = logits.view(-1, CLASSES)
        where, found = rows.data_ptr(), list[bool]()
        logits.register_hook(lambda gradient: found.append(gradient.data_ptr() == where))
        loss = spillway.cross_entropy(rows, targets_of(), dtype=torch.float32)
        loss.held = hold(logits, rows)  # type: ignore[attr-defined]
        return cls(loss, source, found)

    def gradient(self, **how: bool) -> torch.Tensor:
        (found,) = torch.autograd.grad(self.loss, self.source, **how)
        return found

    def expected(self) -> torch.Tensor:
        (found,) = torch.autograd.grad(functional.cross_entropy(self.source.float(), targets_of()), self.source)
        return found


@pytest.mark.parametrize("hooks", [nullcontext, KEEP])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_written_where_logits_were_that_nobody_has(
    dtype: torch.dtype, hooks: Callable[[], AbstractContextManager[object]]
) -> None:
    with hooks():
        alone = Alone.of(dtype)
    assert torch.equal(alone.gradient(), alone.expected())
    assert alone.is_in_place == [True]


HOLD: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "the logits": lambda logits, rows: logits,
    "their rows": lambda logits, rows: rows,
    "what they are views of": lambda logits, rows: rows._base,
    "a part": lambda logits, rows: logits[1:, 3],
    "no history": lambda logits, rows: rows.detach(),
    "data": lambda logits, rows: logits.data,
    "an array": lambda logits, rows: rows.detach().numpy(),
    "a capsule": lambda logits, rows: torch.utils.dlpack.to_dlpack(rows.detach()),
    "the memory": lambda logits, rows: logits.untyped_storage(),
    "what is saved": lambda logits, rows: logits.square(),
    "what is saved of rows": lambda logits, rows: rows.square(),
    "a second loss": lambda logits, rows: spillway.cross_entropy(rows, targets_of()),
    "one of other rows": lambda logits, rows: spillway.cross_entropy(logits.view(-1, CLASSES), targets_of()),
}


@pytest.mark.parametrize("hooks", [nullcontext, KEEP])
@pytest.mark.parametrize("held", HOLD)
def test_logits_that_somebody_has_stay_what_they_are(
    held: str, hooks: Callable[[], AbstractContextManager[object]]
) -> None:
    before: list[torch.Tensor] = []

    def hold(logits: torch.Tensor, rows: torch.Tensor) -> object:
        before.append(rows.detach().clone())
        return HOLD[held](logits, rows)

    with hooks():
        alone = Alone.of(torch.float32, hold)
    assert torch.equal(alone.gradient(), alone.expected())
    assert alone.is_in_place == [False]
    found: Any = alone.loss.held  # type: ignore[attr-defined]
    logits = before[0]
    if isinstance(found, torch.Tensor) and found.dim() == 0:
        (second,) = torch.autograd.grad(found, alone.source)
        assert torch.equal(second, alone.expected())
    elif held.startswith("what is saved"):
        (second,) = torch.autograd.grad(found.sum(), alone.source)
        assert torch.equal(second.view(-1, CLASSES), 2 * logits)
    elif held == "the memory":
        assert torch.equal(torch.empty(0).set_(found), logits.flatten())
    elif held == "a capsule":
        assert torch.equal(torch.from_dlpack(found), logits)
    elif held == "a part":
        assert torch.equal(found, logits.view(3, -1, CLASSES)[1:, 3])
    else:
        assert torch.equal(torch.as_tensor(found).view(-1, CLASSES), logits)


def test_an_operator_that_saves_what_it_gives_has_it() -> None:
    weight = logits_of(torch.float32, 16, CLASSES)
    features = logits_of(torch.float32, 16).detach()

    def gradient(loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        (found,) = torch.autograd.grad(loss(torch.tanh(functional.linear(features, weight)), targets_of()), weight)
        return found

    assert torch.equal(gradient(spillway.cross_entropy), gradient(functional.cross_entropy))


def test_a_graph_that_is_kept_has_its_logits() -> None:
    alone = Alone.of(torch.float32)
    first = alone.gradient(retain_graph=True)
    second = alone.gradient()
    assert alone.is_in_place == [False, True]
    assert torch.equal(first, second)
    assert torch.equal(first, alone.expected())


def test_a_backward_that_fails_half_way_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, plain, parts = Alone.of(torch.float32), room._log_softmax, list[int]()

    def fails(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        parts.append(len(logits))
        if len(parts) == 3:
            raise torch.OutOfMemoryError("no memory")
        return plain(logits, dtype)

    monkeypatch.setattr(room, "_log_softmax", fails)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        alone.gradient()
    for how in ({}, {"retain_graph": True}, {"create_graph": True}):
        with pytest.raises(spillway.RecomputeError, match=r"second backward .* failed half-way.*run the forward again"):
            alone.gradient(**how)


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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
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
    assert not room.gains(ROWS, CLASSES, torch.float32)
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


def test_logits_without_content_need_a_few_parts_alone() -> None:
    source = torch.zeros(ROWS, CLASSES, device="meta", requires_grad=True)
    logits = source + 0
    where, found = logits.untyped_storage()._cdata, list[bool]()
    logits.register_hook(lambda gradient: found.append(gradient.untyped_storage()._cdata == where))
    loss = spillway.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.int64, device="meta"))
    del logits
    loss.backward()
    assert found == [True]


def test_the_first_loss_may_be_anywhere() -> None:
    class Holding(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.held: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.held.append(func(*args, **(kwargs or {})))
            return self.held[-1]

    def seen() -> int:
        with Holding() as holding:
            alone = Alone.of(torch.float32)
        assert torch.equal(alone.gradient(), alone.expected())
        assert alone.is_in_place == [False]
        return len(holding.held)

    room._known.clear()
    first = seen()
    # What is tried once, nobody sees.
    assert first == seen()
    expected = room._tried(True, False)
    room._known.clear()
    with torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert room._tried(True, False) == expected


def test_who_traces_the_first_loss_holds_nothing_of_it() -> None:
    room._known.clear()
    threading.settrace(lambda *_: None)
    try:
        assert room._tried(True, False) is None
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
    assert Alone.of(torch.float32).gradient() is not None
    assert room._known


OTHER_USES: dict[str, Callable[[torch.Tensor, Callable[..., torch.Tensor]], torch.Tensor]] = {
    "a loss of their sizes": lambda x, loss: loss(x) + 1e-2 * x.logsumexp(1).square().mean(),
    "one before": lambda x, loss: 1e-2 * x.logsumexp(1).square().mean() + loss(x),
    "a sine": lambda x, loss: x.sin().sum() + loss(x),
    "an exponential": lambda x, loss: loss(x.exp()) + x.exp().sum(),
    "what they are made of": lambda x, loss: loss(x.tanh()) + loss(x),
    "two losses": lambda x, loss: loss(x) + 0.5 * loss(x),
    "one loss": lambda x, loss: loss(x),
}


@pytest.mark.parametrize("use", OTHER_USES)
@pytest.mark.parametrize(
    "hooks", [nullcontext, spillway.offload, partial(spillway.offload, policy=spillway.policies.Keep())]
)
@pytest.mark.parametrize(
    "how", [{}, {"save": "inputs"}, {"watch": False}, {"save": ["inputs", torch.ops.aten.mul]}, None]
)
@pytest.mark.parametrize("made", [True, False])
def test_other_uses_of_logits_that_a_region_or_a_context_has(
    use: str, hooks: Callable[[], AbstractContextManager[object]], how: dict[str, Any] | None, made: bool
) -> None:
    target = targets_of()

    def function(x: torch.Tensor, loss: Callable[..., torch.Tensor]) -> torch.Tensor:
        return OTHER_USES[use](x * 3 if made else x, lambda logits: loss(logits, target))

    def region(x: torch.Tensor) -> torch.Tensor:
        return function(x, spillway.cross_entropy)

    for _ in range(1 if how is None or "watch" not in how else 4):
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


class Foreign(torch.autograd.Function):
    """Gives memory that is not torch's own."""

    held: Any = None

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Foreign.held = x.detach().numpy() * 3
        return torch.from_numpy(Foreign.held)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


@pytest.mark.parametrize("added", [True, False])
def test_memory_that_is_not_torchs_own_stays_what_it_is(added: bool) -> None:
    source = logits_of(torch.float32)
    logits = Foreign.apply(source)  # type: ignore[no-untyped-call]
    if added:
        logits.add_(source)
    before = Foreign.held.copy()
    loss = spillway.cross_entropy(logits, targets_of())
    del logits
    loss.backward()
    assert (Foreign.held == before).all()


def test_shared_memory_stays_what_it_is() -> None:
    logits = logits_of(torch.float32) + 0
    loss = spillway.cross_entropy(logits, targets_of())
    logits.untyped_storage().share_memory_()
    where, found = logits.data_ptr(), list[bool]()
    logits.register_hook(lambda gradient: found.append(gradient.data_ptr() == where))
    del logits
    loss.backward()
    assert found == [False]


def test_a_gradient_holds_no_larger_memory() -> None:
    source = logits_of(torch.float32, rows=20 * ROWS)
    logits = (source + 0)[:ROWS]
    loss = spillway.cross_entropy(logits, targets_of())
    found: list[int] = []
    logits.register_hook(lambda gradient: found.append(gradient.untyped_storage().nbytes()))
    nbytes = logits.nbytes
    del logits
    loss.backward()
    assert found == [nbytes]


def test_a_second_backward_is_torchs_own_error() -> None:
    alone = Alone.of(torch.float32)
    alone.gradient()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        alone.gradient()
