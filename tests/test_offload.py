"""What the public calls mean, on small real models."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway import Decision, EventKind, EventList, SavedTensor, Session, StepStats
from spillway.policies import AllOf, Keep, MinBytes, Modules, Offload, Operators, Ratio
from spillway.saved_tensors.hooks import SavedState
from steps import (
    KiB,
    Result,
    assert_no_hook,
    assert_nothing_left,
    failing,
    small_batch,
    small_model,
    small_resnet,
    step,
)

TIERS = pytest.mark.parametrize("tier", ["host", "disk"])


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(window=0, spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


def exponentials(sizes: list[int]) -> Tensor:
    """A loss for which autograd saves a tensor of each size in KiB, in this order."""
    total = torch.zeros(())
    for size in sizes:
        total = total + torch.ones(size * KiB // 4, requires_grad=True).exp().sum()
    return total


def run(context: AbstractContextManager[Any], sizes: list[int]) -> None:
    with context:
        loss = exponentials(sizes)
    loss.backward()


def leaving(context: spillway.offload, sizes: list[int]) -> list[int]:
    """Which of the sizes, distinct powers of two, were decided to leave in a pass over them."""
    run(context, sizes)
    stats = context.stats()
    assert stats.saved_bytes == sum(sizes) * KiB
    went = (stats.saved_bytes - stats.kept_bytes) // KiB
    return [size for size in sizes if size & went]


# A context and a decorator


@TIERS
def test_a_step_is_bit_for_bit_the_plain_one_and_moves_bytes(session: Session, tier: str) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    context = spillway.offload(tier=tier, min_bytes=0, session=session)
    for _ in range(3):
        assert step(model, x, context) == plain
        assert context.stats().reloaded_bytes > 0
        assert_nothing_left(session)


@TIERS
def test_a_resnet_is_bit_for_bit_the_plain_one(session: Session, tier: str) -> None:
    plain, ours = small_resnet(), small_resnet()
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    context = spillway.offload(tier=tier, min_bytes=0, ratio=0.6, tag="resnet", session=session)
    for _ in range(3):
        assert step(ours, x, context) == step(plain, x)
        assert all(map(torch.equal, ours.buffers(), plain.buffers()))
        assert context.stats().reloaded_bytes > 0
    stats = context.stats()
    assert 0.5 <= (stats.saved_bytes - stats.kept_bytes) / stats.saved_bytes <= 0.6


def test_entering_gives_itself_and_backward_may_run_inside(session: Session) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    model.zero_grad()
    with spillway.offload(min_bytes=0, session=session) as context:
        loss = model(x).square().mean()
        loss.backward()
    assert context.stats().saved_bytes > 0
    assert Result(loss.detach(), [p.grad for p in model.parameters()]) == plain


def test_a_decorated_function_is_one_pass_a_call(session: Session) -> None:
    context = spillway.offload(min_bytes=0, ratio=0.5, session=session)

    @context
    def forward(sizes: list[int], *, scale: float) -> Tensor:
        """The doc."""
        return exponentials(sizes) * scale

    assert forward.__name__ == "forward" and forward.__doc__ == "The doc."
    for expected in ([4, 2, 1], [2, 1], [2, 1]):
        forward([4, 2, 1], scale=2.0).backward()
        stats = context.stats()
        assert stats.saved_bytes - stats.kept_bytes == sum(expected) * KiB
        assert_no_hook()


def test_a_decorated_function_may_call_itself(session: Session) -> None:
    @spillway.offload(min_bytes=0, session=session)
    def power(x: Tensor, depth: int) -> Tensor:
        x = x.sin()
        return power(x, depth - 1).cos() if depth else x

    def plain(x: Tensor, depth: int) -> Tensor:
        x = x.sin()
        return plain(x, depth - 1).cos() if depth else x

    x = small_batch().requires_grad_()
    (expected,) = torch.autograd.grad(plain(x, 4).sum(), x)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(power(x, 4).sum(), x)
        assert torch.equal(gradient, expected)
        assert_no_hook()


def test_a_decorated_function_may_be_called_from_threads(session: Session) -> None:
    model = small_model()
    context = spillway.offload(min_bytes=0, session=session)

    @context
    def forward(x: Tensor) -> Tensor:
        out: Tensor = model(x).square().mean()
        return out

    batches = [small_batch(rows=rows) for rows in (16, 24, 32, 40)]
    expected = [torch.autograd.grad(model(x).square().mean(), list(model.parameters())) for x in batches]
    meeting = threading.Barrier(len(batches))

    def work(x: Tensor) -> list[tuple[Tensor, ...]]:
        results = []
        for _ in range(5):
            meeting.wait(60)
            results.append(torch.autograd.grad(forward(x), list(model.parameters())))
            assert_no_hook()
        return results

    with ThreadPoolExecutor(len(batches)) as pool:
        for mine, results in zip(expected, pool.map(work, batches), strict=True):
            for gradients in results:
                assert all(map(torch.equal, gradients, mine))


@TIERS
def test_a_graph_made_in_one_thread_may_run_backward_in_another(session: Session, tier: str) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    model.zero_grad()
    with spillway.offload(min_bytes=0, tier=tier, session=session):
        loss = model(x).square().mean()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    assert Result(loss.detach(), [p.grad for p in model.parameters()]) == plain


def test_the_innermost_context_decides(session: Session) -> None:
    outer = spillway.offload(min_bytes=0, tag="outer", session=session)
    inner = spillway.offload(min_bytes=0, tag="inner", policy=Keep(), session=session)
    with outer:
        first = exponentials([1])
        with inner:
            second = exponentials([2])
        third = exponentials([4])
    (first + second + third).backward()
    assert outer.stats().saved_bytes == 5 * KiB
    assert inner.stats() == replace(inner.stats(), saved_bytes=2 * KiB, kept_bytes=2 * KiB, offloaded_bytes=0)


def test_one_object_may_be_entered_while_it_is_entered(session: Session) -> None:
    context = spillway.offload(min_bytes=0, session=session)
    with context:
        first = exponentials([1])
        with context:
            second = exponentials([2])
        assert context.stats().saved_bytes == 2 * KiB
        third = exponentials([4])
    assert context.stats().saved_bytes == 5 * KiB
    (first + second + third).backward()


def test_stats_before_the_first_pass_are_empty() -> None:
    assert spillway.offload().stats() == StepStats()


# Ratio


def test_a_first_pass_offloads_everything_whatever_the_ratio(session: Session) -> None:
    for ratio in (0.0, 0.5, 1.0):
        context = spillway.offload(ratio=ratio, tag=f"first {ratio}", min_bytes=0, session=session)
        assert leaving(context, [8, 4, 2, 1]) == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.0, []), (0.1, [1]), (0.5, [4, 2, 1]), (0.7, [8, 2]), (0.8, [8, 4]), (1.0, [8, 4, 2, 1])]
)
def test_later_passes_offload_in_packing_order_what_fits(session: Session, ratio: float, expected: list[int]) -> None:
    context = spillway.offload(ratio=ratio, min_bytes=0, session=session)
    leaving(context, [8, 4, 2, 1])
    for _ in range(3):
        assert leaving(context, [8, 4, 2, 1]) == expected


def test_new_objects_share_what_the_tag_has_learned_and_have_ratios_of_their_own(session: Session) -> None:
    def context(ratio: float, tag: str | None) -> spillway.offload:
        return spillway.offload(ratio=ratio, tag=tag, min_bytes=0, session=session)

    assert leaving(context(0.5, "a"), [4, 2, 1]) == [4, 2, 1]
    assert leaving(context(0.5, "a"), [4, 2, 1]) == [2, 1]
    assert leaving(context(0.2, "a"), [4, 2, 1]) == [1]
    assert leaving(context(0.2, "b"), [4, 2, 1]) == [4, 2, 1]
    assert leaving(context(0.2, None), [4, 2, 1]) == [4, 2, 1]
    assert leaving(context(0.2, "b"), [4, 2, 1]) == [1]
    assert leaving(context(0.9, "a"), [4, 2, 1]) == [4, 2]


def test_one_with_is_one_pass_so_a_tag_around_several_blocks_applies_to_each(session: Session) -> None:
    def both() -> list[list[int]]:
        return [
            leaving(spillway.offload(ratio=0.5, tag="block", min_bytes=0, session=session), [4, 2, 1]) for _ in "12"
        ]

    assert both() == [[4, 2, 1], [2, 1]]
    assert both() == [[2, 1], [2, 1]]


def test_several_tags_in_one_forward_each_have_their_ratio(session: Session) -> None:
    for expected in ((7, 7), (3, 6)):
        a = spillway.offload(ratio=0.5, tag="a", min_bytes=0, session=session)
        b = spillway.offload(ratio=0.9, tag="b", min_bytes=0, session=session)
        with a:
            first = exponentials([4, 2, 1])
        with b:
            second = exponentials([4, 2, 1])
        (first + second).backward()
        left = tuple((context.stats().saved_bytes - context.stats().kept_bytes) // KiB for context in (a, b))
        assert left == expected


def test_a_first_pass_that_saved_nothing_stays_first(session: Session) -> None:
    context = spillway.offload(ratio=0.5, min_bytes=0, session=session)
    with torch.no_grad(), context:
        exponentials([4, 2, 1])
    with context:
        pass
    assert leaving(context, [4, 2, 1]) == [4, 2, 1]
    assert leaving(context, [4, 2, 1]) == [2, 1]


def test_a_first_pass_that_raised_stays_first(session: Session) -> None:
    context = spillway.offload(ratio=0.5, min_bytes=0, session=session)

    def raising() -> None:
        with context:
            exponentials([4])
            raise KeyError

    failing(KeyError, raising)
    assert leaving(context, [4, 2, 1]) == [4, 2, 1]
    assert leaving(context, [4, 2, 1]) == [2, 1]


def test_a_later_pass_that_raised_changes_nothing(session: Session) -> None:
    context = spillway.offload(ratio=0.5, min_bytes=0, session=session)
    leaving(context, [4, 2, 1])

    def raising() -> None:
        with context:
            exponentials([4])
            raise KeyError

    failing(KeyError, raising)
    assert leaving(context, [4, 2, 1]) == [2, 1]


def test_an_evaluation_pass_in_between_changes_nothing(session: Session) -> None:
    context = spillway.offload(ratio=0.5, min_bytes=0, session=session)
    leaving(context, [4, 2, 1])
    with torch.no_grad(), context:
        exponentials([4, 2, 1])
    assert leaving(context, [4, 2, 1]) == [2, 1]


def test_a_ratio_is_learned_anew_when_shapes_change(session: Session) -> None:
    context = spillway.offload(ratio=0.5, min_bytes=0, session=session)
    leaving(context, [4, 2, 1])
    assert leaving(context, [16, 32, 8]) == [16, 32, 8]
    assert leaving(context, [16, 32, 8]) == [16, 8]
    assert leaving(context, [4, 2, 1]) == [2, 1], "both shapes are remembered"


def test_a_ratio_follows_when_all_but_the_first_shape_change(session: Session) -> None:
    context = spillway.offload(ratio=0.5, min_bytes=0, session=session)
    leaving(context, [4, 2, 1])
    leaving(context, [4, 8, 16, 32])
    assert leaving(context, [4, 8, 16, 32]) == [4, 8, 16]


def test_the_bytes_of_a_pass_count_a_storage_once_and_no_parameter(session: Session) -> None:
    context = spillway.offload(min_bytes=0, session=session)
    x = torch.ones(KiB, requires_grad=True).exp()
    layer = nn.Linear(16, 16)
    with context:
        y = x * x + x.view(64, 16).t().sin().t().flatten() + layer(x.view(64, 16)).flatten()
    y.sum().backward()
    assert context.stats().saved_bytes == 4 * KiB


# What leaves, and where to


def test_small_tensors_stay(session: Session) -> None:
    assert leaving(spillway.offload(session=session), [512, 128]) == []
    assert leaving(spillway.offload(session=session, tag="at least"), [1024, 512]) == [1024]
    assert leaving(spillway.offload(session=session, min_bytes="4KiB", tag="4KiB"), [4, 2, 8]) == [4, 8]


def test_small_tensors_count_for_the_ratio_all_the_same(session: Session) -> None:
    context = spillway.offload(session=session, min_bytes="4KiB", ratio=0.6, tag="counted")
    assert leaving(context, [4, 2, 8, 1]) == [4, 8]
    assert leaving(context, [4, 2, 8, 1]) == [4], "0.6 of 15 KiB, not of 12, but 8 does not fit after 4"
    assert leaving(context, [8, 2, 4, 1]) == [8, 4], "another first shape: a first pass"
    assert leaving(context, [8, 2, 4, 1]) == [8]


@pytest.mark.parametrize(("tier", "place"), [("auto", "disk"), ("disk", "disk"), ("host", "host")])
def test_the_tier_is_where_the_bytes_are(session: Session, tier: str, place: str) -> None:
    context = spillway.offload(min_bytes=0, tier=tier, session=session)
    with context:
        loss = exponentials([4, 2, 1])
    host, disk = session.used_bytes
    assert (disk > 0) == (place == "disk")
    assert (context.stats().disk_bytes > 0) == (place == "disk")
    if place == "host":
        assert host >= 7 * KiB
        assert session.disk_bytes == 0
    loss.backward()
    del loss


def test_a_policy_may_name_the_tier_of_each_tensor(session: Session) -> None:
    def policy(saved: SavedTensor) -> Decision:
        return {4: Decision.OFFLOAD_HOST, 8: Decision.OFFLOAD_DISK, 2: Decision.OFFLOAD}.get(
            saved.nbytes // KiB, Decision.KEEP
        )

    context = spillway.offload(min_bytes=0, tier="host", policy=policy, session=session)
    with context:
        loss = exponentials([4, 8, 2, 1])
    # The bytes begin where they begin in memory, which may take a page more.
    assert 8 * KiB <= session.used_bytes[1] <= 12 * KiB
    assert context.stats().kept_bytes == KiB
    assert context.stats().offloaded_bytes == 14 * KiB
    loss.backward()
    del loss


@pytest.mark.parametrize("window", [0, 4 * KiB, "10KiB", 64 * KiB])
@pytest.mark.parametrize("per_session", [True, False])
@TIERS
def test_no_more_than_the_window_is_on_its_way_out(
    tmp_path: Path, window: int | str, per_session: bool, tier: str
) -> None:
    limit = spillway.units.parse_bytes(window)
    events = EventList()
    options = {"window": window} if per_session else {}
    with Session(spill_directory=tmp_path, recorder=events, **options) as session:  # type: ignore[arg-type]
        with spillway.offload(min_bytes=0, tier=tier, session=session, window=None if per_session else window) as _:
            loss = exponentials([4] * 10)
        on_the_way, most = 0, 0
        for event in events.events:
            on_the_way += {EventKind.LEAVE: event.nbytes, EventKind.RELEASE: -event.nbytes}[event.kind]
            most = max(most, on_the_way)
        assert most == max(min(limit, 40 * KiB) // (4 * KiB), 1) * 4 * KiB
        loss.backward()
        del loss
        assert_nothing_left(session)


# Policies


class Spy:
    """A policy that remembers what it was asked."""

    def __init__(self, answer: Callable[[SavedTensor], Decision], **wants: bool) -> None:
        self.asked: list[SavedTensor] = []
        self.answer = answer
        for name, value in wants.items():
            setattr(self, name, value)

    def __call__(self, saved: SavedTensor) -> Decision:
        self.asked.append(saved)
        return self.answer(saved)


def test_a_policy_is_told_what_it_may_decide_by(session: Session) -> None:
    spy = Spy(lambda saved: Decision.KEEP if saved.position == 1 else Decision.OFFLOAD)
    for total in (None, 7 * KiB):
        spy.asked.clear()
        run(spillway.offload(policy=spy, min_bytes=0, tag="spied", session=session), [4, 2, 1])
        assert [saved.nbytes for saved in spy.asked] == [4 * KiB, 2 * KiB, KiB]
        assert [saved.position for saved in spy.asked] == [0, 1, 2]
        assert [saved.offloaded_bytes for saved in spy.asked] == [0, 4 * KiB, 4 * KiB]
        assert [saved.total_bytes for saved in spy.asked] == [total] * 3
        first = spy.asked[0]
        assert (first.shape, first.dtype, first.device.type) == ((KiB,), torch.float32, "cpu")
        assert (first.tag, first.module, first.operator) == ("spied", None, None)


def test_a_policy_is_not_asked_about_small_tensors(session: Session) -> None:
    spy = Spy(lambda saved: Decision.OFFLOAD)
    run(spillway.offload(policy=spy, min_bytes="2KiB", session=session), [4, 1, 2])
    assert [saved.nbytes for saved in spy.asked] == [4 * KiB, 2 * KiB]


def test_a_policy_learns_the_module_if_it_wants_to(session: Session) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    spy = Spy(lambda saved: Decision.OFFLOAD, wants_modules=True)
    assert step(model, x, spillway.offload(policy=spy, min_bytes=0, session=session)) == plain
    modules = [saved.module for saved in spy.asked]
    assert set(modules) >= {"0.norm", "0.up", "0", "1.down", "2.norm", ""}
    assert all(saved.operator is None for saved in spy.asked)
    assert_no_hook()


def test_a_policy_learns_the_operator_if_it_wants_to(session: Session) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    spy = Spy(lambda saved: Decision.OFFLOAD, wants_operators=True)
    assert step(model, x, spillway.offload(policy=spy, min_bytes=0, session=session)) == plain
    operators = {saved.operator for saved in spy.asked}
    assert operators >= {"torch.nn.functional.layer_norm", "torch.nn.functional.gelu", "torch.nn.functional.linear"}
    assert all(saved.module is None for saved in spy.asked)
    assert_no_hook()


def test_modules_by_pattern(session: Session) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    context = spillway.offload(policy=Modules("1*"), min_bytes=0, session=session)
    for _ in range(2):
        assert step(model, x, context) == plain
        in_block = [line for line in spillway.list_saved_tensors(model, x) if line.module.startswith("1")]
        stats = context.stats()
        assert stats.saved_bytes - stats.kept_bytes == sum(line.nbytes for line in in_block)
        assert stats.kept_bytes > 0


def test_operators_by_pattern(session: Session) -> None:
    model, x = small_model(), small_batch()
    plain = step(model, x)
    context = spillway.offload(policy=Operators("*.gelu"), min_bytes=0, session=session)
    for _ in range(2):
        assert step(model, x, context) == plain
        stats = context.stats()
        assert stats.saved_bytes - stats.kept_bytes == 3 * 64 * 64 * 4


def test_policies_compose(session: Session) -> None:
    policy = AllOf(MinBytes("4KiB"), Modules("[02]*", Ratio(1), Operators("*.linear", Offload("host"))))
    model, x = small_model(), small_batch()
    plain = step(model, x)
    context = spillway.offload(policy=policy, min_bytes=0, session=session)
    for _ in range(2):
        assert step(model, x, context) == plain
        assert 0 < context.stats().kept_bytes < context.stats().saved_bytes
    assert_no_hook()


# Single tensors


def test_keep_leaves_what_is_saved_inside(session: Session) -> None:
    context = spillway.offload(min_bytes=0, session=session)
    with context:
        first = exponentials([4])
        with spillway.keep():
            kept = exponentials([8])
        last = exponentials([1])
    assert context.stats().saved_bytes == 5 * KiB, "what keep() holds is not seen"
    (first + kept + last).backward()


def test_keep_is_a_decorator_and_may_be_entered_again() -> None:
    keep = spillway.keep()

    @keep
    def head(x: Tensor, depth: int) -> Tensor:
        return head(x.exp(), depth - 1) if depth else x

    with keep, keep:
        head(torch.ones(2, requires_grad=True), 3).sum().backward()
    assert_no_hook()


def test_a_tensor_that_is_marked_stays_with_all_its_views(session: Session) -> None:
    context = spillway.offload(min_bytes=0, session=session)
    x = torch.ones(KiB, requires_grad=True).exp()
    with context:
        assert spillway.keep_tensor(x[:10], session=session)._base is x
        y = x.sin() + x.view(32, 32).t().cos().flatten()
    assert context.stats().kept_bytes == context.stats().saved_bytes == 4 * KiB
    y.sum().backward()
    assert_no_hook()


@TIERS
def test_a_plain_offload_between_two_layers(session: Session, tier: str) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    x = small_batch()

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            out: Tensor = self.second(spillway.offload_tensor(hidden, session=session))
            return out

    model = Toy()
    plain = Result(*gradients_of(model, x))
    context = spillway.offload(policy=Keep(), tier=tier, session=session)
    for _ in range(3):
        assert step(model, x, context) == plain
        stats = context.stats()
        assert stats.saved_bytes - stats.kept_bytes == 64 * 32 * 4, "hidden, small as it is, and nothing else"


def gradients_of(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """As plain PyTorch has them: the marks are made in a context that moves nothing."""
    with spillway.offload(policy=Keep(), session=Session(host_budget=0)), spillway.keep():
        loss = model(x).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.detach(), list(gradients)


def test_a_mark_wins_over_the_policy_and_the_size_and_the_last_mark_counts(session: Session) -> None:
    def leaves(*marks: Callable[..., Tensor], policy: Any) -> bool:
        context = spillway.offload(policy=policy, min_bytes="1GiB", session=session)
        x = torch.ones(8, requires_grad=True).exp()
        with context:
            for mark in marks:
                assert mark(x, session=session) is x
            y = x.sin()
        y.sum().backward()
        return context.stats().kept_bytes == 0

    assert leaves(spillway.offload_tensor, policy=Keep())
    assert not leaves(policy=Offload())
    assert not leaves(spillway.offload_tensor, spillway.keep_tensor, policy=Offload())
    assert leaves(spillway.keep_tensor, spillway.offload_tensor, policy=Keep())


def test_a_mark_for_a_tensor_that_was_kept_before_still_sends_it(session: Session) -> None:
    x = torch.ones(KiB, requires_grad=True).exp()
    context = spillway.offload(policy=Keep(), session=session)
    with context:
        first = x.sin()
        spillway.offload_tensor(x, session=session)
        second = x.cos()
    assert context.stats().offloaded_bytes == 4 * KiB
    (first + second).sum().backward()


def test_a_mark_ends_with_its_storage(session: Session) -> None:
    spillway.keep_tensor(torch.ones(4), session=session)
    assert len(session.of(SavedState).marks._marks) == 0


# What would be saved


def test_saved_tensors_lists_what_offload_moves(session: Session) -> None:
    model, x = small_model(), small_batch()
    lines = spillway.list_saved_tensors(model, x)
    assert_no_hook()
    context = spillway.offload(min_bytes=0, session=session)
    with context:
        loss = model(x).sum()
    assert sum(line.nbytes for line in lines if line.moves) == context.stats().saved_bytes
    del loss
    norm = [line for line in lines if line.module == "1.norm"]
    assert {line.operator for line in norm} == {"torch.nn.functional.layer_norm"}
    assert next(line.shape for line in norm if line.moves) == (64, 32)
    weights = [line for line in lines if not line.moves]
    assert weights and all("parameter" in line.reason and line.nbytes == 0 for line in weights)
    assert Counter(line.device.type for line in lines) == {"cpu": len(lines)}


def test_saved_tensors_counts_a_storage_once() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() + x.t().cos()

    first, second = spillway.list_saved_tensors(Twice(), torch.ones(3, 3, requires_grad=True))
    assert (first.nbytes, first.moves, second.nbytes, second.moves) == (36, True, 0, True)
    assert second.reason == "shares its bytes with one above"


def test_saved_tensors_says_why_a_tensor_stays() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            sparse = torch.eye(3).to_sparse()
            return torch.sparse.mm(sparse, x) * self.table

    reasons = {line.reason for line in spillway.list_saved_tensors(Odd(), torch.ones(3, 3, requires_grad=True))}
    assert any("sparse" in reason for reason in reasons)
    assert "an alias of a parameter or buffer" in reasons


def test_saved_tensors_works_under_no_grad_and_survives_a_model_that_raises() -> None:
    with torch.no_grad():
        assert spillway.list_saved_tensors(small_model(), small_batch())

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("here")

    failing(KeyError, lambda: spillway.list_saved_tensors(Raises(), torch.ones(1)))
    assert_no_hook()


# Sessions


@pytest.fixture
def no_default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Session, "_default", None)
    yield
    if Session._default is not None:
        Session._default.close()


@pytest.mark.usefixtures("no_default")
def test_the_default_session_is_made_once_and_again_when_it_is_closed() -> None:
    first = Session.default()
    assert Session.default() is first
    context = spillway.offload(min_bytes=0)
    run(context, [4, 2])
    assert first.disk_bytes > 0
    first.close()
    second = Session.default()
    assert second is not first
    run(context, [4, 2])
    assert context.stats().offloaded_bytes > 0
    assert second.disk_bytes > 0


@pytest.mark.usefixtures("no_default")
def test_a_session_may_be_made_the_default(tmp_path: Path) -> None:
    with Session(spill_directory=tmp_path, window=0) as mine:
        mine.use_as_default()
        assert Session.default() is mine
        with spillway.offload(min_bytes=0):
            loss = exponentials([4, 2])
        assert mine.used_bytes[1] > 0
        loss.backward()
        del loss
        x = spillway.keep_tensor(torch.ones(3))
        assert mine.of(SavedState).marks.get(x.untyped_storage()) is False
    assert Session.default() is not mine


@pytest.mark.usefixtures("no_default")
def test_importing_and_building_contexts_makes_no_session() -> None:
    spillway.offload()
    spillway.offload(tier="disk")
    assert Session._default is None


@TIERS
def test_two_sessions_never_meet(tmp_path: Path, tier: str) -> None:
    events = EventList(), EventList()
    model, x = small_model(), small_batch()
    plain = step(model, x)
    with (
        Session(window=0, spill_directory=tmp_path, recorder=events[0]) as one,
        Session(window=0, spill_directory=tmp_path, recorder=events[1]) as two,
    ):
        contexts = [spillway.offload(min_bytes=0, tier=tier, ratio=0.9, session=session) for session in (one, two)]
        model.zero_grad()
        losses = []
        for context in contexts:
            with context:
                losses.append(model(x).square().mean())
        assert min(sum(one.used_bytes), sum(two.used_bytes)) > 0
        losses.pop(1).backward()
        assert sum(two.used_bytes) == 0
        assert_nothing_left(two)
        first_half = [p.grad.clone() for p in model.parameters()]
        assert all(map(torch.equal, first_half, plain.gradients))
        assert sum(one.used_bytes) > 0
        two.close()
        model.zero_grad()
        losses.pop().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain.gradients, strict=True))
        one.synchronize()
        assert events[0].schedule() == events[1].schedule()
        assert_nothing_left(one)


def test_nested_contexts_of_two_sessions_share_no_entry(tmp_path: Path) -> None:
    with Session(window=0, spill_directory=tmp_path) as one, Session(window=0, spill_directory=tmp_path) as two:
        x = torch.ones(KiB, requires_grad=True).exp()
        outer = spillway.offload(min_bytes=0, session=one)
        inner = spillway.offload(min_bytes=0, session=two)
        with outer:
            first = x.sin()
            with inner:
                second = x.cos()
        assert outer.stats().offloaded_bytes == inner.stats().offloaded_bytes == 4 * KiB
        (first + second).sum().backward()
        del first, second, x
        assert_nothing_left(one)
        assert_nothing_left(two)


# Stats


@TIERS
@pytest.mark.parametrize("window", [0, "16KiB", "1MiB"])
@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_stats_add_up(tmp_path: Path, tier: str, window: int | str, ratio: float) -> None:
    """Every byte saved is kept, offloaded or held back; and every one that was not kept comes back or is reused."""
    model, x = small_model(), small_batch()
    with Session(window=window, spill_directory=tmp_path) as session:
        context = spillway.offload(min_bytes=0, tier=tier, ratio=ratio, session=session)
        for number in range(4):
            with context:
                loss = model(x).square().mean()
            before = context.stats()
            held = before.saved_bytes - before.kept_bytes - before.offloaded_bytes
            assert held >= 0
            assert held == 0 or number > 0, "nothing is known in the first pass, so nothing is held back"
            assert before.reloaded_bytes == before.reused_bytes == 0
            loss.backward()
            del loss
            after = context.stats()
            assert after.reloaded_bytes + after.reused_bytes == after.saved_bytes - after.kept_bytes
            assert after.reloaded_bytes <= after.offloaded_bytes == before.offloaded_bytes
            assert after.recomputed_bytes == 0
            assert after.stall_seconds >= before.stall_seconds >= 0
            assert after.peak_bytes > 0
            assert after.host_bytes == session.host_bytes and after.disk_bytes == session.disk_bytes
            assert_nothing_left(session)


def test_stats_of_a_second_backward_count_what_came_back_again(session: Session) -> None:
    context = spillway.offload(min_bytes=0, session=session)
    with context:
        loss = exponentials([4, 2, 1])
    loss.backward(retain_graph=True)
    first = context.stats()
    loss.backward()
    second = context.stats()
    assert second.reloaded_bytes == 2 * first.reloaded_bytes
    assert second.reused_bytes == first.reused_bytes
    del loss


# Schedules, as lists of events


def three_layers(x: Tensor) -> Tensor:
    """Saves three tensors of 4 KiB, entries 0, 1 and 2; backward asks for 2, 1 and 0."""
    return x.exp().exp().exp().sum()


def layer() -> Tensor:
    return torch.zeros(KiB, requires_grad=True)


def schedules(window: int, tier: str, directory: Path, passes: int = 3) -> list[list[str]]:
    """What happens in each pass, as ``"leave 0"``, with entries counted from the first of the pass."""
    events = EventList()
    lines = []
    with Session(window=window, spill_directory=directory, recorder=events) as session:
        for number in range(passes):
            with spillway.offload(min_bytes=0, tier=tier, session=session):
                loss = three_layers(layer())
            loss.backward()
            del loss
            session.synchronize()  # a handle of what is away is given back by the next call
            lines.append([f"{kind} {entry - 3 * number}" for kind, entry in events.schedule()])
            events.events.clear()
        assert_nothing_left(session)
    return lines


@TIERS
def test_schedule_in_a_large_window_nothing_goes_from_the_second_pass_on(tmp_path: Path, tier: str) -> None:
    first, *later = schedules(64 * KiB, tier, tmp_path)
    assert first == [
        "leave 0",
        "leave 1",
        "leave 2",
        *("reuse 2", "drop 2"),
        *("reuse 1", "drop 1"),
        *("reuse 0", "drop 0"),
    ]
    for schedule in later:
        assert schedule == ["reuse 2", "drop 2", "reuse 1", "drop 1", "reuse 0", "drop 0"]


@TIERS
def test_schedule_in_a_window_of_one_tensor(tmp_path: Path, tier: str) -> None:
    first, *later = schedules(4 * KiB, tier, tmp_path)
    back = ["reuse 2", "return 1", "drop 2", "take 1", "return 0", "drop 1", "take 0", "drop 0"]
    assert first == ["leave 0", "release 0", "leave 1", "release 1", "leave 2", *back]
    for schedule in later:
        assert schedule == ["leave 0", "release 0", "leave 1", "release 1", *back], "the tail is not sent"


@TIERS
def test_schedule_without_a_window_fetches_nothing_ahead(tmp_path: Path, tier: str) -> None:
    first, *later = schedules(0, tier, tmp_path)
    back = ["reuse 2", "drop 2", "return 1", "take 1", "drop 1", "return 0", "take 0", "drop 0"]
    assert first == ["leave 0", "release 0", "leave 1", "release 1", "leave 2", *back]
    for schedule in later:
        assert schedule == ["leave 0", "release 0", "leave 1", "release 1", *back]


@TIERS
def test_schedule_of_a_backward_in_forward_order_is_guessed_in_reverse_and_then_learned(
    tmp_path: Path, tier: str
) -> None:
    events = EventList()
    lines = []
    with Session(window=4 * KiB, spill_directory=tmp_path, recorder=events) as session:
        for number in range(2):
            with spillway.offload(min_bytes=0, tier=tier, session=session):
                losses = [layer().exp().sum() for _ in range(4)]
            events.events.clear()
            while losses:
                losses.pop(0).backward()
            lines.append([f"{kind} {entry - 4 * number}" for kind, entry in events.schedule()])
    first, second = lines
    # In reverse nothing comes after 0, and what comes after the others was used before them.
    assert first == [
        *("return 0", "take 0", "drop 0"),
        *("return 1", "take 1", "drop 1"),
        *("return 2", "take 2", "drop 2"),
        *("reuse 3", "drop 3"),
    ]
    assert second == [
        *("return 0", "take 0", "return 1", "drop 0"),
        *("take 1", "return 2", "drop 1"),
        *("take 2", "drop 2"),
        *("reuse 3", "drop 3"),
    ]


def test_schedule_of_a_graph_that_is_dropped(tmp_path: Path) -> None:
    events = EventList()
    with Session(window=4 * KiB, spill_directory=tmp_path, recorder=events) as session:
        with spillway.offload(min_bytes=0, session=session):
            loss = three_layers(layer())
        del loss
        assert events.schedule()[:5] == [
            ("leave", 0),
            ("release", 0),
            ("leave", 1),
            ("release", 1),
            ("leave", 2),
        ]
        session.synchronize()
        assert sorted(events.schedule()[5:]) == [("drop", 0), ("drop", 1), ("drop", 2)]
        assert_nothing_left(session)


def test_event_numbers_name_storages_and_their_bytes(session: Session) -> None:
    events = EventList()
    with Session(window=0, recorder=events) as session:
        with spillway.offload(min_bytes=0, tier="host", session=session):
            loss = exponentials([4, 2, 1])
        loss.backward()
        assert {(event.entry, event.nbytes) for event in events.events} == {(0, 4 * KiB), (1, 2 * KiB), (2, KiB)}
        seconds = [event.seconds for event in events.events]
        assert seconds == sorted(seconds)


@pytest.mark.parametrize(("window", "held"), [("0%", 0), ("50%", 2), ("100%", 4), (None, 4), ("200%", 8), (8 * KiB, 2)])
def test_a_window_may_be_a_share_of_the_sessions(tmp_path: Path, window: int | str | None, held: int) -> None:
    events = EventList()
    with Session(window=16 * KiB, recorder=events) as session:
        context = spillway.offload(session=session, min_bytes=0, tier="host", window=window)
        with context:
            loss = exponentials([4] * 12)
        # Twelve have left; those that are still held are not released.
        released = sum(event.kind is EventKind.RELEASE for event in events.events)
        assert released == 12 - max(held, 1)
        loss.backward()
        del loss
        assert_nothing_left(session)


def test_whoever_wants_to_know_is_told_when_backward_begins(session: Session) -> None:
    told: list[str] = []
    context = spillway.offload(session=session, min_bytes=0, tier="host", on_backward=lambda: told.append("backward"))
    for steps in (1, 2):
        with context:
            loss = exponentials([4, 4])
            told.append("forward")
        loss.backward()
        assert told == ["forward", "backward"] * steps


def test_nobody_is_told_of_a_backward_that_asks_for_nothing_that_was_to_leave(session: Session) -> None:
    with spillway.offload(session=session, policy=Keep(), on_backward=pytest.fail) as context:
        loss = exponentials([4, 4])
    loss.backward()
    assert context.stats().kept_bytes > 0


def test_what_is_raised_when_backward_begins_is_raised_there_and_leaves_nothing(session: Session) -> None:
    def refuse() -> None:
        raise ZeroDivisionError("told")

    with spillway.offload(session=session, min_bytes=0, tier="host", on_backward=refuse):
        loss = exponentials([4, 4])
    failing(ZeroDivisionError, loss.backward, match="told")
    del loss
    torch.ones(1, requires_grad=True).sum().backward()
