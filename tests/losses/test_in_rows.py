"""Loss functions of models are computed in rows, bit for bit, or as they are."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway
from allocations import count_exactly
from spillway._torch import disable_function
from spillway.attaching.call import PLACE
from spillway.checkpointing import losses as room
from spillway.checkpointing.losses import loss_in_rows, own_losses

ROWS, WORDS = 140, 53


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and models here are taken for those of the library."""
    names = {(__name__, each.__qualname__) for each in (*IN_ROWS, *OTHERS, failing)}
    monkeypatch.setattr(room, "_KNOWN", names)
    monkeypatch.setattr(room, "_LIBRARY", __name__)


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budgets do not depend on what the process holds beside the model."""
    count_exactly(monkeypatch, lambda: 16 << 20)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is gained with any number of bytes."""
    monkeypatch.setattr(room, "_LEAST_BYTES", 1)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What torch's own cross entropy was given."""
    seen: list[Tensor] = []
    plain = torch._C._nn.cross_entropy_loss

    def counted(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(logits)
        return plain(logits, *args, **kwargs)

    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", counted)
    return seen


def shifted(logits: Tensor, labels: Tensor, *, items: Tensor | None = None) -> Tensor:
    """As those of transformers do."""
    logits = logits.float()
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    logits, labels = logits.view(-1, WORDS), labels.view(-1).to(logits.device)
    if items is None:
        return functional.cross_entropy(logits, labels, ignore_index=-100)
    return functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / items


def sliced(logits: Tensor, labels: Tensor) -> Tensor:
    """As those of transformers 4 did."""
    logits = logits.float()
    return nn.CrossEntropyLoss()(logits[..., :-1, :].contiguous().view(-1, WORDS), labels[..., 1:].reshape(-1))


def as_they_are(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").sum()


def regularised(logits: Tensor, labels: Tensor) -> Tensor:
    """Uses what is cast a second time: gradients are added before they are cast back."""
    logits = logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + logits.logsumexp(-1).square().mean()


def twice(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.float().flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten()) + functional.cross_entropy(logits, labels.flatten() // 2)


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """Takes rows several times."""
    rows = torch.arange(2 * ROWS) % ROWS
    return functional.cross_entropy(logits.float().view(-1, WORDS)[rows], labels.flatten()[rows])


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2, WORDS)
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), weight)


def in_the_middle(logits: Tensor, labels: Tensor) -> Tensor:
    """Classes come second, not last."""
    return functional.cross_entropy(logits.float().transpose(1, 2), labels)


def looked_at(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.float()
    scale = 2.0 if logits.dtype is torch.float32 else 3.0
    return scale * functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def given_back(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def written(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.float()
    logits /= 0.7
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def fixed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits, labels)


def helped(logits: Tensor, labels: Tensor) -> Tensor:
    return fixed_cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def failing(logits: Tensor, labels: Tensor) -> Tensor:
    logits.float().flatten()
    raise KeyError("mine")


IN_ROWS: list[Callable[..., Any]] = [shifted, as_they_are, helped]
OTHERS: list[Callable[..., Any]] = [
    sliced,
    regularised,
    twice,
    picked,
    smoothed,
    weighted,
    in_the_middle,
    looked_at,
    given_back,
    written,
]


class InRows:
    """A loss function, computed in rows where that saves memory."""

    def __init__(self, function: Callable[..., Any], spare: int) -> None:
        self._function, self._spare, self.is_used = function, spare, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        loss, self.is_used = loss_in_rows(self._function, self._spare, *args, **kwargs)
        return loss


def run(function: Callable[..., Any], dtype: torch.dtype, **more: Any) -> list[Tensor]:
    """What it gives, and the gradient of the logits."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, ROWS // 2, WORDS, generator=generator).mul(5).to(dtype).requires_grad_()
    labels = torch.randint(WORDS, (2, ROWS // 2), generator=generator)
    given = function(logits.clone(), labels, **more)
    outputs = list(given) if isinstance(given, tuple) else [given]
    torch.autograd.backward([each.sum() * 0.7 for each in outputs])
    assert logits.grad is not None
    return [*(each.detach() for each in outputs), logits.grad]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("function", IN_ROWS, ids=lambda each: each.__name__)
def test_its_cross_entropy_is_in_rows(
    function: Callable[..., Any], dtype: torch.dtype, small: None, full: list[Tensor]
) -> None:
    expected = run(function, dtype)
    full.clear()
    loss = InRows(function, 0)
    assert same(run(loss, dtype), expected)
    assert loss.is_used
    assert not full


KERNEL = """
def kernel(logits, labels):
    with disable_function():  # as code in C++, which no mode sees
        return functional.nll_loss(logits.log_softmax(1), labels)
def around(logits, labels):
    return kernel(logits.float().flatten(0, 1), labels.flatten())
"""


@pytest.mark.parametrize("place", ["cross_entropy", "fixed_cross_entropy", "itself"])
def test_a_kernel_of_another_library_gets_cast_logits(place: str, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    other: dict[str, Any] = {"disable_function": disable_function, "functional": functional}
    exec(KERNEL, other)
    function: Callable[..., Any] = helped
    if place == "itself":
        function = functools.wraps(helped)(other["around"])
    elif place == "cross_entropy":
        monkeypatch.setattr(functional, "cross_entropy", other["kernel"])
    else:
        monkeypatch.setitem(globals(), place, other["kernel"])
    loss = InRows(function, 0)
    assert same(run(loss, torch.bfloat16), run(function, torch.bfloat16))
    assert not loss.is_used


def test_arguments_are_handed_on(small: None, full: list[Tensor]) -> None:
    items = torch.tensor(41)
    expected = run(shifted, torch.bfloat16, items=items)
    full.clear()
    assert same(run(InRows(shifted, 0), torch.bfloat16, items=items), expected)
    assert not full


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", OTHERS, ids=lambda each: each.__name__)
def test_what_else_it_does_is_done_as_it_is(function: Callable[..., Any], dtype: torch.dtype, small: None) -> None:
    expected = run(function, dtype)
    loss = InRows(function, 0)
    assert same(run(loss, dtype), expected)
    assert same(run(loss, dtype), expected)


@pytest.mark.parametrize("function", OTHERS, ids=lambda each: each.__name__)
def test_what_is_cast_is_not_used_in_two_ways(function: Callable[..., Any], small: None, full: list[Tensor]) -> None:
    loss = InRows(function, 0)
    run(loss, torch.bfloat16)
    assert not loss.is_used
    assert full[-1].dtype is torch.float32


def test_little_is_done_as_it_is(full: list[Tensor]) -> None:
    loss = InRows(shifted, 0)
    run(loss, torch.bfloat16)
    assert not loss.is_used
    assert full


def test_where_there_is_room_it_is_done_as_it_is(small: None, full: list[Tensor]) -> None:
    nbytes = 4 * ROWS * WORDS * 4
    for spare, is_used in ((nbytes - 1, True), (nbytes, False)):
        loss = InRows(shifted, spare)
        run(loss, torch.bfloat16)
        assert loss.is_used is is_used


def test_what_torch_refuses_it_refuses_with_its_own_words(small: None) -> None:
    loss = InRows(as_they_are, 0)
    with pytest.raises(IndexError, match="Target 53 is out of bounds"):
        run(lambda logits, labels: loss(logits, labels * 0 + WORDS), torch.bfloat16)


def test_errors_are_the_functions_own(small: None) -> None:
    with pytest.raises(KeyError, match="mine"):
        run(InRows(failing, 0), torch.bfloat16)
    assert not torch.overrides._get_current_function_mode_stack()


class Model(nn.Module):
    """With a loss as transformers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
        self.head = nn.Linear(16, WORDS, bias=False)
        self.kind: Callable[..., Any] = shifted

    @property
    def loss_function(self) -> Callable[..., Tensor]:
        if hasattr(self, "_loss_function"):
            found: Callable[..., Tensor] = self._loss_function
            return found
        return self.kind

    @loss_function.setter
    def loss_function(self, function: Callable[..., Tensor]) -> None:
        self._loss_function = function

    def forward(self, labels: Tensor) -> Tensor:
        hidden = self.words(labels)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.loss_function(self.head(hidden), labels)


def model_of(dtype: torch.dtype = torch.bfloat16) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype).train()


def steps(model: Model, count: int = 8) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(count):
        labels = torch.randint(WORDS, (2, ROWS // 2), generator=torch.Generator().manual_seed(step))
        loss = model(labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *(each.detach().clone() for each in model.parameters())]


def test_a_slice_of_logits_is_cast_as_it_is(small: None, full: list[Tensor]) -> None:
    """The cast lays it out anew, so that it can be viewed. The rest is in rows."""

    def of_slice(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda logits, labels: function(logits[:, 7:], labels[:, 7:])

    expected = run(of_slice(shifted), torch.bfloat16)
    loss = InRows(shifted, 0)
    assert same(run(of_slice(loss), torch.bfloat16), expected)
    assert loss.is_used


def test_what_nobody_knows_is_done_as_it_is_and_once(small: None) -> None:
    calls = []

    def scripted(logits: Tensor, labels: Tensor) -> Tensor:
        calls.append(None)
        return shifted(logits, labels)

    loss = InRows(scripted, 0)
    expected = run(scripted, torch.bfloat16)
    assert same(run(loss, torch.bfloat16), expected)
    assert not loss.is_used
    assert len(calls) == 2


def test_a_mode_of_a_users_sees_all(small: None) -> None:
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            factor = 2 if func is functional.cross_entropy else 1
            return factor * func(*args, **(kwargs or {})) if factor == 2 else func(*args, **(kwargs or {}))

    def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(logits: Tensor, labels: Tensor) -> Any:
            with Doubling():
                return function(logits, labels)

        return called

    expected = run(doubled(shifted), torch.bfloat16)
    assert same(run(doubled(InRows(shifted, 0)), torch.bfloat16), expected)
    with torch.device("cpu"):
        loss = InRows(shifted, 0)
        run(loss, torch.bfloat16)
    assert loss.is_used


def test_a_model_that_is_planned_for_has_its_loss_in_rows(small: None, full: list[Tensor]) -> None:
    expected = steps(model_of())
    model = model_of()
    before = dict(vars(model))
    full.clear()
    with spillway.Session() as session, spillway.attach(model, budget="1GiB", session=session) as attached:
        found = steps(model, 1)
        assert not full
        assert vars(model).keys() == before.keys() | {PLACE}
        assert model.loss_function is shifted
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for other in (copied, loaded):
        assert other.loss_function is shifted
        assert vars(other).keys() == before.keys()
    model = model_of()
    full.clear()
    with spillway.Session() as session, spillway.attach(model, budget="1GiB", session=session) as attached:
        found = steps(model)
        assert attached.stage == "active"
        assert "the loss of Model is computed in rows" not in attached.explain()
    # In the last steps there is room for all of it.
    assert full
    assert same(found, expected)
    assert vars(model).keys() == before.keys()


def test_within_a_tight_budget_it_stays_in_rows(small: None, full: list[Tensor]) -> None:
    expected = steps(model_of(), 10)
    full.clear()
    with spillway.Session() as session:
        model = model_of()
        with spillway.attach(model, session=session, budget="1GiB") as attached:
            steps(model)
            profile = attached.profile
            assert profile is not None
        budget = (spillway.plan(profile, budget="1GiB").predicted_peak) + 1000
        full.clear()
        model = model_of()
        with spillway.attach(model, session=session, plan=spillway.plan(profile, budget=budget)) as attached:
            found = steps(model, 10)
            assert "the loss of Model is computed in rows" in attached.explain()
    assert not full
    assert same(found, expected)


@pytest.mark.parametrize("before", [False, True])
def test_a_users_own_loss_is_left_alone(before: bool, small: None, full: list[Tensor]) -> None:
    expected, model = model_of(), model_of()
    for each in (expected, model)[: 2 if before else 1]:
        each.loss_function = as_they_are
    with spillway.attach(model, budget="1GiB"):
        model.loss_function = as_they_are
        found = steps(model, 2)
        assert len(full) == 2
        assert model.loss_function is as_they_are
    assert same(found, steps(expected, 2))
    assert model.loss_function is as_they_are


def test_a_loss_that_is_a_module_is_where_the_model_has_it(small: None) -> None:
    class Mine(nn.Module):
        def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
            return regularised(logits, labels)

    expected, model = model_of(), model_of()
    expected._loss_function, model._loss_function = Mine(), Mine()
    with spillway.attach(model, budget="1GiB"):
        found = steps(model, 2)
    assert same(found, steps(expected, 2))


def test_a_loss_that_a_subclass_finds_is_left_alone(small: None) -> None:
    class Other(Model):
        @property
        def loss_function(self) -> Callable[..., Tensor]:
            return regularised

    Other.loss_function.fget.__module__ = "elsewhere"  # type: ignore[attr-defined]
    assert len(own_losses(Model())) == 1
    assert not own_losses(Other())


def test_another_loss_of_the_library_is_taken_when_it_is_asked_for(small: None, full: list[Tensor]) -> None:
    model, plain = model_of(), model_of()
    with spillway.attach(model, budget="1GiB"):
        steps(model, 1)
        model.kind = plain.kind = as_they_are
        steps(plain, 1)
        full.clear()
        found = steps(model, 1)
        assert not full
    expected = model_of()
    steps(expected, 1)
    expected.kind = as_they_are
    assert same(found, steps(expected, 1))


def test_a_loss_function_may_be_called_after_the_model(small: None) -> None:
    class Later(Model):
        def forward(self, labels: Tensor) -> Any:
            hidden = self.words(labels)
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            return self.loss_function, self.head(hidden)

    torch.manual_seed(0)
    model = Later().to(torch.bfloat16).train()
    labels = torch.randint(WORDS, (2, ROWS // 2))
    with spillway.attach(model, budget="1GiB"):
        function, logits = model(labels)
        loss = function(logits, labels)
        loss.backward()
    assert torch.equal(loss, shifted(logits, labels))
    assert "_loss_function" not in vars(model)


def test_nothing_is_left_where_a_call_fails_or_attaching_is_refused(small: None) -> None:
    model = model_of()
    before = set(vars(model))
    model.kind = failing
    with spillway.attach(model, budget="1GiB") as attached:
        with pytest.raises(KeyError, match="mine"):
            steps(model, 1)
        assert vars(model).keys() - {PLACE} == before
        attached.remove()
    with pytest.raises(spillway.UsageError):
        spillway.attach(model, budget="1GiB", blocks=["layers.*", "layers.0.*"])
    assert vars(model).keys() == before


def test_without_a_budget_it_is_left_alone(full: list[Tensor], small: None) -> None:
    model = model_of()
    with spillway.attach(model):
        steps(model, 1)
    assert full
