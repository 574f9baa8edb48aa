"""Groups: they leave together when they end, by rules, and gradients stay as they are."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spillway
from spillway.saved_tensors.groups import Group, _nonsense
from spillway.saved_tensors.order import PastGroup
from spillway.testing import AdversaryBackend
from spillway.types import EventKind, EventList

LAYERS = 4
WIDTH = 32
ONE = 8 * WIDTH * 4
"""Bytes of what one operator saves."""


class Layer(nn.Module):
    """Two parts; each saves its input and the result of its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        with spillway.group("mix"):
            x = self.mix(x)
        with spillway.group("mlp"):
            return self.mlp(x).exp()


class Unmarked(Layer):
    """The same without a word of groups."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.mlp(self.mix(x)).exp()
        return result


def stack(kind: type[Layer] = Layer, layers: int = LAYERS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(layers)))


def gradients(model: nn.Module, context: Any = None, *, through: Callable[[], object] = lambda: None) -> list[Tensor]:
    model.zero_grad()
    x = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()
    with contextlib.nullcontext() if context is None else context:
        loss = model(x).sum()
    through()
    loss.backward()
    return [loss.detach(), *(leaf.grad.clone() for leaf in (x, *model.parameters()) if leaf.grad is not None)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.fixture
def events() -> EventList:
    return EventList()


@pytest.fixture(params=["adversary", "adversary-roomy"])
def session(request: pytest.FixtureRequest, events: EventList) -> Iterator[spillway.Session]:
    window = 0 if request.param == "adversary" else 1 << 20
    with spillway.Session(backend=AdversaryBackend().serve, window=window, recorder=events) as session:
        yield session
        session.forget_groups()
        gc.collect()
        session.synchronize()
        assert session.used_bytes == (0, 0)


def grouped(session: spillway.Session, **rules: Any) -> spillway.offload:
    return spillway.offload(groups=spillway.Groups(**rules), min_bytes=0, session=session)


def by_name(stats: spillway.StepStats) -> dict[str, spillway.GroupStats]:
    return {group.name: group for group in stats.groups}


# What leaves, and when.


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"margin": 1},
        {"fraction": 0.5},
        {"fewer_bytes": ONE},
        {"in_flight": 1},
        {"in_flight": {"mlp": 2}},
        {"margin": 1, "fraction": 0.3, "fewer_bytes": "1KiB", "in_flight": 2},
    ],
    ids=str,
)
def test_every_rule_gives_the_same_bits(session: spillway.Session, rules: dict[str, Any]) -> None:
    model = stack()
    plain = gradients(model)
    context = grouped(session, **rules)
    for _ in range(4):
        assert same(gradients(model, context), plain)
        assert context.stats().offloaded_bytes + context.stats().reused_bytes > 0


def test_only_what_groups_save_leaves(session: spillway.Session) -> None:
    context = grouped(session)
    gradients(stack(), context)
    stats, groups = context.stats(), by_name(context.stats())
    assert list(groups) == ["mix", "mlp"]
    # `exp` saves in no one's name but the group's; the loss, a sum, saves nothing.
    assert stats.saved_bytes == sum(group.saved_bytes for group in groups.values())
    assert stats.kept_bytes == 0
    outside = spillway.offload(groups=spillway.Groups(), min_bytes=0, session=session)
    gradients(stack(Unmarked), outside)
    assert outside.stats().kept_bytes == outside.stats().saved_bytes > 0
    assert outside.stats().offloaded_bytes == 0
    assert outside.stats().groups == ()


def test_without_rules_a_group_only_says_when(session: spillway.Session) -> None:
    context = spillway.offload(min_bytes=0, session=session)
    model = nn.Sequential(stack(layers=1), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    plain = gradients(model)
    assert same(gradients(model, context), plain)
    stats, groups = context.stats(), by_name(context.stats())
    assert stats.kept_bytes == 0
    assert sum(group.saved_bytes for group in groups.values()) < stats.saved_bytes


def test_a_group_leaves_when_it_ends(session: spillway.Session, events: EventList) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    with grouped(session):
        with spillway.group("one"):
            y = x.exp().exp().exp()
            assert not events.events
        left = [event for event in events.events if event.kind is EventKind.LEAVE]
        assert len(left) == 3
    y.sum().backward()


def test_groups_in_groups_leave_one_by_one(session: spillway.Session, events: EventList) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    count = lambda: len([event for event in events.events if event.kind is EventKind.LEAVE])  # noqa: E731
    context = grouped(session)
    with context:
        with spillway.group("outer"):
            y = x.exp()
            with spillway.group("inner"):
                y = y.exp()
            assert count() == 1
            y = y.exp()
        assert count() == 3
    y.sum().backward()
    assert {name: group.saved_bytes for name, group in by_name(context.stats()).items()} == {
        "outer": 2 * ONE,
        "inner": ONE,
    }


def test_of_a_name_only_so_many_are_on_their_way_out() -> None:
    most = {}
    for limit in (None, 1, 2):
        events = EventList()
        with spillway.Session(backend=AdversaryBackend().serve, window=1 << 20, recorder=events) as session:
            gradients(stack(), grouped(session, in_flight=limit))
        leaving = peak = 0
        for event in events.events:
            leaving += {EventKind.LEAVE: 1, EventKind.RELEASE: -1}.get(event.kind, 0)
            peak = max(peak, leaving)
        most[limit] = peak
    # A layer's two groups save three tensors, and the first one the input, too.
    assert most == {1: 4, 2: 7, None: 13}


# Rules, as values.


PAST = [PastGroup(name, nbytes) for name, nbytes in [("a", 10), ("b", 1), ("a", 10), ("b", 1), ("a", 10), ("b", 1)]]


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        ({}, set()),
        ({"margin": 1}, {4, 5}),
        ({"margin": 9}, {0, 1, 2, 3, 4, 5}),
        ({"fraction": 0.0}, {0, 1, 2, 3, 4, 5}),
        ({"fraction": 0.34}, {3, 4, 5}),
        ({"fraction": 0.5}, {3, 4, 5}),
        ({"fewer_bytes": 11, "fraction": 0.5}, {2, 3, 4, 5}),
        ({"margin": 1, "fraction": 0.5}, {2, 3, 4, 5}),
        ({"fewer_bytes": 1}, {5}),
        ({"fewer_bytes": 10}, {5}),
        ({"fewer_bytes": 11}, {5, 4}),
        ({"margin": 1, "fewer_bytes": "11B"}, {5, 4, 3, 2}),
        ({"fewer_bytes": 1000}, {0, 1, 2, 3, 4, 5}),
    ],
    ids=str,
)
def test_which_groups_stay(rules: dict[str, Any], stay: set[int]) -> None:
    assert spillway.Groups(**rules).staying(PAST) == stay


def test_an_empty_group_stays_by_its_own_rules_alone() -> None:
    past = [PastGroup("a", 10), PastGroup("a", 0)]
    assert spillway.Groups().staying(past) == set()
    assert spillway.Groups(fewer_bytes=10).staying(past) == {0}
    assert spillway.Groups(margin=1).staying(past) == {1}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 100)), max_size=12),
    st.integers(0, 4),
    st.floats(0, 1),
    st.integers(0, 300),
)
def test_rules_take_groups_from_the_end(past: list[tuple[str, int]], margin: int, fraction: float, fewer: int) -> None:
    groups = [PastGroup(*each) for each in past]
    by_margin = spillway.Groups(margin=margin).staying(groups)
    for name in "abc":
        places = [place for place, group in enumerate(groups) if group.name == name]
        stays = [place in by_margin for place in places]
        assert stays == sorted(stays)
        assert sum(stays) == min(margin, len(places))
    more = spillway.Groups(margin=margin, fewer_bytes=fewer).staying(groups)
    assert by_margin <= more
    assert sum(groups[place].nbytes for place in more - by_margin) <= fewer
    share = spillway.Groups(margin=margin, fewer_bytes=fewer, fraction=fraction).staying(groups)
    assert more <= share
    eligible = [place for place, group in enumerate(groups) if place not in more and group.nbytes]
    stays = [place in share for place in eligible]
    assert stays == sorted(stays)
    assert abs(stays.count(False) - fraction * len(eligible)) < 1
    assert stays.count(False) >= fraction * len(eligible) - 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {"patterns": "mlp"},
        {"patterns": {"": "*.mlp"}},
        {"patterns": {"mlp": 3}},
        {"patterns": {"mlp": [nn.Linear]}},
        {"margin": -1},
        {"margin": True},
        {"fraction": 1.5},
        {"fraction": True},
        {"in_flight": 0},
        {"in_flight": {"mlp": 0.5}},
    ],
    ids=str,
)
def test_rules_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(spillway.UsageError, match="got"):
        spillway.Groups(**wrong)
    with pytest.raises(spillway.UsageError, match="groups"):
        spillway.offload(groups=wrong)  # type: ignore[arg-type]


def test_patterns_belong_to_attach() -> None:
    with pytest.raises(spillway.UsageError, match="attach"):
        spillway.offload(groups=spillway.Groups({"mlp": "*.mlp"}))


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_that_is_none_is_refused(name: Any) -> None:
    with pytest.raises(spillway.UsageError, match="group"):
        spillway.group(name)


# The first pass offloads all; then rules apply, and they follow what changes.


def test_rules_apply_from_the_second_pass_on() -> None:
    with spillway.Session(backend=AdversaryBackend().serve, window=0) as session:
        model, context = stack(), grouped(session, margin=1)
        gradients(model, context)
        first = context.stats()
        assert first.kept_bytes == 0
        gradients(model, context)
        second = by_name(context.stats())
        assert {name: group.kept_bytes for name, group in second.items()} == {"mix": ONE, "mlp": 2 * ONE}


def test_other_groups_than_the_last_pass_had_leave_all() -> None:
    with spillway.Session(backend=AdversaryBackend().serve, window=0) as session:
        context = grouped(session, margin=2)
        models = [stack(), stack(layers=6)]
        plain = [gradients(model) for model in models]
        for _ in range(3):
            for model, expected in zip(models, plain, strict=True):
                assert same(gradients(model, context), expected)
        # Four layers after six: none of them is among the last two of six.
        gradients(models[0], context)
        assert context.stats().kept_bytes == 0
        gradients(models[0], context)
        assert context.stats().kept_bytes == 6 * ONE

        def renamed(x: Tensor) -> Tensor:
            with spillway.group("other"):
                return x.exp()

        x = torch.randn(8, WIDTH, requires_grad=True)
        with context:
            y = renamed(x)
        assert context.stats().kept_bytes == 0
        y.sum().backward()


def test_the_same_places_under_other_names_leave_all() -> None:
    with spillway.Session(backend=AdversaryBackend().serve, window=0) as session:
        context = grouped(session, margin=1)
        kept = []
        for names in ("ab", "ab", "ba", "ba"):
            y = torch.randn(8, WIDTH, requires_grad=True)
            with context:
                for name in names:
                    with spillway.group(name):
                        y = y.exp()
            kept.append(context.stats().kept_bytes)
            y.sum().backward()
        assert kept == [0, 2 * ONE, 0, 2 * ONE]


@pytest.mark.parametrize("again", ["in-backward", "for-whoever-looks"])
def test_what_runs_again_begins_no_groups(again: str) -> None:
    def part(x: Tensor) -> Tensor:
        with spillway.group("one"):
            return x.sin().exp()

    with spillway.Session(backend=AdversaryBackend().serve, window=0) as session:
        context = grouped(session, margin=1)
        kept = []
        for runs_again in (True, False):
            x = torch.randn(8, WIDTH, requires_grad=True)
            with context:
                if again == "in-backward":
                    loss = checkpoint(part, x, use_reentrant=False).sum()
                    if runs_again:
                        loss.backward()
                else:
                    node: Any = spillway.recompute(part, x, session=session).grad_fn
                    assert not runs_again or node._saved_result is not None
                y = part(x)
            kept.append(context.stats().kept_bytes)
            y.sum().backward()
        # The checkpoint saved the input before. Ours left it alone, since it is a leaf.
        assert kept[1] - kept[0] == (ONE if again == "in-backward" else 2 * ONE), "the last group stays"


def test_an_evaluation_without_gradients_changes_nothing() -> None:
    with spillway.Session(backend=AdversaryBackend().serve, window=0) as session:
        model, context = stack(), grouped(session, margin=1)
        gradients(model, context)
        with torch.no_grad(), context:
            model(torch.randn(8, WIDTH))
        assert context.stats().groups == ()
        gradients(model, context)
        assert context.stats().kept_bytes > 0


# Delay, release, switch off.


def test_a_delayed_group_leaves_when_it_is_flushed(session: spillway.Session, events: EventList) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(x.exp().exp().sum(), x)[0]
    context = grouped(session)
    with context, spillway.group("late", delay=True):
        y = x.exp().exp()
    assert not events.events
    session.flush_groups()
    assert [event.kind for event in events.events].count(EventKind.LEAVE) == 2
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


@pytest.mark.parametrize("what", ["never", "forgotten", "after-backward"])
def test_a_delayed_group_that_is_not_flushed_loses_nothing(session: spillway.Session, what: str) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(x.exp().exp().sum(), x)[0]
    context = grouped(session)
    with context, spillway.group("late", delay=True):
        y = x.exp().exp()
    if what == "forgotten":
        session.forget_groups()
        session.flush_groups()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)
    assert context.stats().offloaded_bytes == 0
    del y
    session.flush_groups()
    assert context.stats().offloaded_bytes == 0


@pytest.mark.parametrize("by_hand", [False, True])
def test_delayed_groups_that_are_never_flushed_do_not_add_up(session: spillway.Session, by_hand: bool) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    delayed = spillway.group("late", delay=True)
    groups = weakref.WeakSet[Group]()
    for _ in range(5):
        with grouped(session):
            with delayed:
                y = x.exp()
            groups.add(delayed._local.last[1])
            if by_hand:
                delayed.offload()
        y.sum().backward()
        del y
        gc.collect()
        assert len(groups) <= 2


def test_what_is_released_is_free_and_shows_that_it_is_gone(session: spillway.Session) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(x.exp().exp().sum(), x)[0]
    with grouped(session), spillway.group("one") as one:
        hidden = x.exp()
        y = hidden.exp()
        one.release(hidden)
    assert hidden.shape == (8, WIDTH)
    assert hidden.untyped_storage().nbytes() == 4
    assert hidden.detach().isnan().all()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)


def test_what_something_else_sees_is_not_released(session: spillway.Session) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    hidden = x * 1
    view = hidden[1:]
    with grouped(session), pytest.raises(spillway.UsageError, match="still see"), spillway.group("one") as one:  # noqa: PT012
        y = hidden.exp()
        z = hidden.sin()
        one.release(hidden)
    assert not hidden.detach().isnan().any()
    assert torch.equal(view, hidden[1:])
    (y + z).sum().backward()


@pytest.mark.parametrize("who", ["autograd", "keep"])
@pytest.mark.parametrize("what", ["leaf", "index", "result"])
def test_what_another_graph_saved_is_not_released(session: spillway.Session, what: str, who: str) -> None:
    # Autograd saves the very tensor, and no alias, where there are no hooks.
    x = torch.randn(8, WIDTH, requires_grad=True)
    index = torch.arange(4)
    result = x * 1
    released, function = {
        "leaf": (x, lambda: x.sin()),
        "index": (index, lambda: x[index]),
        "result": (result, lambda: result.sin()),
    }[what]
    plain = torch.autograd.grad(function().sum() + function().sum(), x, retain_graph=True)[0]
    with spillway.keep() if who == "keep" else contextlib.nullcontext():
        other = function()
    with grouped(session), pytest.raises(spillway.UsageError, match="still see"), spillway.group("one") as one:  # noqa: PT012
        y = function()
        one.release(released)
    assert torch.equal(torch.autograd.grad(other.sum() + y.sum(), x)[0], plain)


def test_a_released_index_is_none(session: spillway.Session) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    index = torch.arange(4)
    plain = torch.autograd.grad(x[index].sum(), x)[0]
    with grouped(session), spillway.group("one", release=[index]):
        y = x[index]
    with pytest.raises(IndexError):
        x[index]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], plain)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz],
    ids=str,
)
def test_what_was_released_is_not_a_number_of_any_dtype(dtype: torch.dtype) -> None:
    nonsense = _nonsense(torch.zeros(2, dtype=dtype))
    parts = torch.view_as_real(nonsense) if dtype.is_complex else nonsense.float()
    assert parts.isnan().all()


def test_what_stays_is_not_released(session: spillway.Session) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    for outer in (contextlib.nullcontext(), grouped(session, fraction=0.0), grouped(session, fraction=0.0)):
        with outer, spillway.group("one") as one:
            hidden = x.exp()
            y = hidden.exp()
            others = torch.ones(3)
            one.release(others)
            if outer is not None and not isinstance(outer, spillway.offload):
                one.release(hidden)
        assert not hidden.detach().isnan().any()
        assert torch.equal(others, torch.ones(3))
        y.sum().backward()


@pytest.mark.parametrize("wrong", [3, None, "hidden"])
def test_only_tensors_are_released(session: spillway.Session, wrong: Any) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    with grouped(session), pytest.raises(spillway.UsageError, match="release"), spillway.group("one", release=[wrong]):
        x.exp()


def test_a_group_ends_in_the_thread_that_began_it() -> None:
    with pytest.raises(spillway.UsageError, match="not entered"):
        spillway.group("one").__exit__(None, None, None)


def test_release_belongs_inside() -> None:
    with pytest.raises(spillway.UsageError, match="outside"):
        spillway.group("one").release(torch.ones(1))


def test_switched_off_nothing_leaves_and_what_is_away_comes_back(session: spillway.Session) -> None:
    model = stack()
    plain = gradients(model)
    context = grouped(session)

    def switch_off() -> None:
        session.enabled = False

    assert same(gradients(model, context, through=switch_off), plain)
    assert context.stats().offloaded_bytes + context.stats().reused_bytes > 0
    assert same(gradients(model, context), plain)
    assert context.stats().offloaded_bytes == 0
    assert context.stats().groups == ()
    session.enabled = True
    assert same(gradients(model, context), plain)
    assert context.stats().groups


def test_by_hand(session: spillway.Session, events: EventList) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    plain = torch.autograd.grad(x.exp().sin().exp().sum(), x)[0]
    kinds = lambda: [event.kind for event in events.events]  # noqa: E731
    one = spillway.group("one", delay=True)
    one.offload()
    with grouped(session):
        with one:
            y = x.exp().sin().exp()
        assert kinds() == []
        one.offload()
        left = kinds().count(EventKind.LEAVE)
        assert left == 2
        one.settle()
        assert kinds().count(EventKind.RELEASE) == left
        session.flush_groups()
        assert kinds().count(EventKind.LEAVE) == left
    result = y.detach().clone()
    loss = y.sum()
    del y
    one.fetch()
    assert kinds().count(EventKind.RETURN) == left
    one.fetch()
    assert kinds().count(EventKind.RETURN) == left
    loss.backward()
    assert kinds().count(EventKind.RETURN) == left
    assert x.grad is not None
    assert torch.equal(x.grad, plain)
    assert torch.isfinite(result).all()


# Where there is nothing to do, and where something goes wrong.


def test_outside_of_an_offload_context_a_group_does_nothing() -> None:
    model = stack()
    assert same(gradients(model), gradients(stack(Unmarked)))


def test_a_group_belongs_to_the_thread_that_entered_it(session: spillway.Session) -> None:
    seen: list[Any] = []
    context = grouped(session)
    x = torch.randn(8, WIDTH, requires_grad=True)

    def other() -> None:
        y = x.exp()
        seen.append(torch.autograd.grad(y.sum(), x)[0])

    with context, spillway.group("one"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(seen) == 1
    assert context.stats().saved_bytes == 0


def test_an_error_inside_of_a_group_leaves_nothing_behind(session: spillway.Session) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    context = grouped(session)
    kept: list[Tensor] = []

    def fail() -> None:
        raise ZeroDivisionError

    with context:
        with pytest.raises(ZeroDivisionError), spillway.group("one"):  # noqa: PT012  (the context is what is tested)
            kept.append(x.exp())
            fail()
        with spillway.group("two"):
            y = kept[0].exp()
    y.sum().backward()
    with pytest.raises(ZeroDivisionError), context, spillway.group("three"):  # noqa: PT012
        kept.append(x.exp())
        fail()
    kept.clear()
    model = stack()
    assert same(gradients(model, context), gradients(model))


def test_a_group_may_outlive_a_pass_that_failed(session: spillway.Session, events: EventList) -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)

    def parts() -> Iterator[Tensor]:
        with spillway.group("one"):
            yield x.exp()

    generator = parts()
    with contextlib.suppress(ZeroDivisionError), grouped(session):
        y = next(generator)
        raise ZeroDivisionError
    next(generator, None)
    assert not events.events, "what had not left stays"
    y.sum().backward()


def test_a_closed_session_holds_nothing_that_was_delayed() -> None:
    x = torch.randn(8, WIDTH, requires_grad=True)
    with spillway.Session(backend=AdversaryBackend().serve, window=0) as session:
        with grouped(session), spillway.group("late", delay=True):
            y = x.exp()
        storage = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert storage() is None


def test_a_group_is_a_decorator_too(session: spillway.Session) -> None:
    @spillway.group("function")
    def function(x: Tensor) -> Tensor:
        return x.exp()

    x = torch.randn(8, WIDTH, requires_grad=True)
    context = grouped(session)
    with context:
        y = function(function(x))
    y.sum().backward()
    assert [group.name for group in context.stats().groups] == ["function"]


# With regions, and by pattern.


@pytest.mark.parametrize(
    "how",
    [
        *({}, {"offload": "inputs"}, {"save": "matmul"}, {"offload": "pointwise"}),
        *({"use_reentrant": True}, {"use_reentrant": True, "offload": "inputs"}),
    ],
    ids=str,
)
def test_groups_around_and_inside_of_regions(session: spillway.Session, how: dict[str, Any]) -> None:
    model = stack()
    plain = gradients(model)
    region = spillway.Recompute(**how)

    class Around(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for layer in model:
                with spillway.group("layer"):
                    x = region(layer, x)
            return x

    around = Around()
    around.model = model
    context = grouped(session, margin=1)
    for _ in range(3):
        assert same(gradients(around, context), plain)


def test_by_pattern_without_a_word_in_the_model(session: spillway.Session) -> None:
    model = stack(Unmarked)
    plain = gradients(model)
    before = {name: sorted(vars(module)) for name, module in model.named_modules()}
    with spillway.attach(model, groups={"mix": "*.mix", "mlp": ["*.mlp"]}, min_bytes=0, session=session) as attached:
        for _ in range(3):
            assert same(gradients(model), plain)
        assert [group.name for group in attached.stats().groups] == ["mix", "mlp"]
        assert attached.stats().kept_bytes < attached.stats().saved_bytes
        assert attached.blocks == ()
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == before


def test_by_pattern_with_regions_and_rules(session: spillway.Session) -> None:
    model = stack(Unmarked)
    plain = gradients(model)
    groups = spillway.Groups({"mix": "*.mix", "mlp": "*.mlp"}, margin=1)
    policy = spillway.Recompute(offload="inputs")
    with spillway.attach(model, policy=policy, blocks="*.mlp", groups=groups, min_bytes=0, session=session) as attached:
        for _ in range(3):
            assert same(gradients(model), plain)
        assert len(attached.blocks) == LAYERS
        assert attached.stats().recomputed_bytes > 0
        assert {group.name for group in attached.stats().groups} == {"mix", "mlp"}


def test_patterns_that_cannot_be_meant_are_refused() -> None:
    model = stack(Unmarked)
    with pytest.raises(spillway.UsageError, match="none of the"):
        spillway.attach(model, groups={"mix": "*.nothing"})
    with pytest.raises(spillway.UsageError, match="expected it in one"):
        spillway.attach(model, groups={"mix": "*.mix", "again": "0.*"})
    with pytest.raises(spillway.UsageError, match="groups"):
        spillway.attach(model, groups=3)  # type: ignore[arg-type]
    assert same(gradients(model), gradients(stack(Unmarked)))


# Any way of using them.


PARTS = st.recursive(
    st.just("op"),
    lambda inner: st.tuples(st.sampled_from("abc"), st.booleans(), st.lists(inner, max_size=3)),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(PARTS, min_size=1, max_size=4),
    st.fixed_dictionaries(
        {
            "margin": st.integers(0, 2),
            "fraction": st.sampled_from([0.0, 0.5, 1.0]),
            "fewer_bytes": st.sampled_from([0, ONE]),
            "in_flight": st.sampled_from([None, 1, 2]),
        }
    ),
    st.sampled_from([0, 2 * ONE, 1 << 20]),
    st.booleans(),
)
def test_any_nesting_gives_the_same_bits(parts: list[Any], rules: dict[str, Any], window: int, flushed: bool) -> None:
    def run(part: Any, x: Tensor) -> Tensor:
        if part == "op":
            return (x * x.tanh()).sigmoid()
        name, delay, inner = part
        with spillway.group(name, delay=delay):
            for each in inner:
                x = run(each, x)
        return x

    def step(context: Any, between: Callable[[], object] = lambda: None) -> Tensor:
        x = torch.linspace(-1, 1, 8 * WIDTH, requires_grad=True)
        with context:
            y = x
            for part in parts:
                y = run(part, y)
        between()
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    plain = step(contextlib.nullcontext())
    with spillway.Session(backend=AdversaryBackend().serve, window=window) as session:
        context = grouped(session, **rules)
        for _ in range(3):
            assert torch.equal(step(context, session.flush_groups if flushed else lambda: None), plain)
        session.forget_groups()
        session.synchronize()
        assert session.used_bytes == (0, 0)
