"""Steps that are divided between the CPU and the GPU: ``step_on="auto"``.

On a CPU both stores have the same kernels. So every division gives the bits of the plain class, and a test compares
with it whatever a parameter's place is.
"""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import spillway
from optim.store_loops import SPLIT, Loop, assert_same_state, net, same, saved, small_pieces
from optim.store_scenarios import BreaksDown, Broken
from optim.support import assert_same_values
from spillway import OffloadedOptimizer, UnsupportedError, UsageError
from spillway.errors import TierFullError
from spillway.optim import state_store
from spillway.optim.options import MEASURED, WARM_UP, ShareTuner, StepTimes, alternating
from spillway.optim.state_store import StepCost
from spillway.testing import AdversaryBackend
from support import SlowBackend, pairwise

BF16, FLOAT = torch.bfloat16, torch.float32
KiB = 1024
STEPS = 20

CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {"lr": 1e-2, "fused": True}),
    "Adam": (Adam, {"lr": 1e-2, "fused": True}),
    "SGD": (SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "Adagrad": (Adagrad, {"lr": 0.05, "fused": True}),
}
LOOPS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clipped": ({"clip": 0.01}, {}),
    "accumulated": ({"micro": 2}, {}),
    # Torch's fused SGD leaves its momentum uninitialised if the first loss is infinite.
    "clipped and scaled": ({"clip": 0.01, "scale": 1024.0, "infinite": (2, 5)}, {}),
    "in backward": ({}, {"step_in_backward": True}),
    "gradients that stay": ({}, {"offload_gradients": False}),
}


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch)


@pytest.fixture
def hostile() -> Iterator[spillway.Session]:
    adversary = AdversaryBackend()
    with spillway.Session(backend=adversary.serve, window=16 * KiB) as session:
        yield session
        # The frames of errors hold chunks.
        gc.collect()
        assert session.used_bytes == (0, 0)
    adversary.check()


def split(
    model: nn.Module, session: spillway.Session, optimizer_class: type[Optimizer] = AdamW, **options: Any
) -> OffloadedOptimizer:
    given = {**SPLIT.options, **({"lr": 1e-2, "fused": True} if optimizer_class is AdamW else {}), **options}
    return OffloadedOptimizer(model.parameters(), optimizer_class, session=session, **given)


def plain_after(loop: Loop) -> nn.Module:
    model = net(loop.dtype)
    if loop.dtype == BF16:
        loop.run_in_float(model, AdamW, {"lr": 1e-2, "fused": True})
    else:
        loop.run(model, AdamW(model.parameters(), lr=1e-2, fused=True))
    return model


def on_cpu(optimizer: OffloadedOptimizer) -> list[bool]:
    """Whether the CPU steps each held parameter."""
    return [not one.store.steps_on_device for one in optimizer._placement.held.values()]


# The bits of the plain class.


@pytest.mark.parametrize(
    ("name", "dtype", "how", "overlaps", "checked"),
    pairwise(CLASSES, [FLOAT, BF16], LOOPS, [False, True], [False, True]),
    ids=str,
)
def test_many_steps_are_those_of_the_plain_class(
    name: str, dtype: torch.dtype, how: str, overlaps: bool, checked: bool
) -> None:
    optimizer_class, settings = CLASSES[name]
    kind, options = LOOPS[how]
    adversary = AdversaryBackend()
    loop, expected = (Loop(steps=STEPS, dtype=dtype, **kind) for _ in range(2))
    plain, mine = net(dtype), net(dtype)
    if dtype == BF16:
        reference = expected.run_in_float(plain, optimizer_class, settings)
    else:
        reference = optimizer_class(plain.parameters(), **settings)
        expected.run(plain, reference)
    with spillway.Session(backend=adversary.serve if checked else None, window=16 * KiB) as session:
        optimizer = split(mine, session, optimizer_class, **options, **settings)
        if overlaps:
            optimizer.overlap_forward(mine, blocks=nn.Linear)
        loop.run(mine, optimizer)
        stats = optimizer.stats()
        assert min(stats.stepped_on_host, stats.streamed) > 1000
        assert same(mine, plain)
        norms, plain_norms = ([one for one in some if one.isfinite()] for some in (loop.norms, expected.norms))
        assert all(torch.equal(one, other) for one, other in zip(norms, plain_norms, strict=True))
        masters = [one for group in reference.param_groups for one in group["params"]] if dtype == BF16 else None
        assert_same_state(optimizer.state_dict()["state"], reference.state_dict()["state"], masters=masters)
        optimizer.close()
        gc.collect()
        assert session.used_bytes == (0, 0)
    adversary.check()


@pytest.mark.parametrize("stream", ["states in", "states out", "parameters out", "parameters", "gradients"])
@pytest.mark.parametrize(("kind", "options"), list(LOOPS.values()), ids=list(LOOPS))
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.covered(times=2)
def test_copies_of_either_that_are_late(
    stream: str, kind: dict[str, Any], options: dict[str, Any], dtype: torch.dtype, pieces_of: Callable[[int], None]
) -> None:
    pieces_of(512)
    model, plain = net(dtype), plain_after(Loop(steps=6, dtype=dtype, **kind))
    with spillway.Session(backend=SlowBackend(stream, 0.001).serve, window=8 * KiB) as session:
        optimizer = split(model, session, **options)
        optimizer.overlap_forward(model, blocks=nn.Linear)
        Loop(steps=6, dtype=dtype, **kind).run(model, optimizer)
        optimizer.synchronize()
        assert same(model, plain)
        optimizer.close()
        assert session.used_bytes == (0, 0)


@pytest.mark.parametrize("moves", [False, True])
def test_each_parameter_has_the_bits_of_its_place(moves: bool, hostile: spillway.Session) -> None:
    torch.manual_seed(0)
    shapes = [(67,), (9, 11), (1030,), (20, 33), (5,), (700,)]
    mine = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain = [nn.Parameter(one.detach().clone()) for one in mine]
    # Without fused=True the class loops on the GPU. The CPU uses its fused kernel.
    kinds = {here: AdamW(plain, lr=1e-2, fused=here, foreach=False) for here in (True, False)}
    optimizer = OffloadedOptimizer(mine, AdamW, session=hostile, lr=1e-2, **SPLIT.options)
    for step in range(STEPS):
        if moves and step == STEPS // 2:
            list(optimizer._moves.to_stores(0.2))
            optimizer._steps.take_edits()
        gradients = [torch.randn(shape) for shape in shapes]
        for one, gradient in zip(mine, gradients, strict=True):
            one.grad = gradient
        optimizer.step()
        for here, reference in kinds.items():
            for one, gradient, is_here in zip(plain, gradients, on_cpu(optimizer), strict=True):
                one.grad = gradient if is_here is here else None
                other = kinds[not here].state
                if is_here is here and one in other:
                    reference.state[one] = other.pop(one)
            reference.step()
    optimizer.synchronize()
    assert_same_values(mine, plain)
    assert len(set(on_cpu(optimizer))) == 2
    # Only the fused kernel promises the same bits of a piece.
    assert [one.cut for one in optimizer._placement.held.values()] == on_cpu(optimizer)
    optimizer.close()


def test_a_state_goes_from_the_plain_class_to_both_and_back(hostile: spillway.Session) -> None:
    expected = plain_after(Loop(steps=6))
    model = net()
    plain = AdamW(model.parameters(), lr=1e-2, fused=True)
    loops = [Loop(steps=2, seed=seed) for seed in (1, 2, 3)]
    loops[0].run(model, plain)
    optimizer = split(model, hostile)
    optimizer.load_state_dict(saved(plain.state_dict()))
    loops[1].run(model, optimizer)
    plain.load_state_dict(saved(optimizer.state_dict()))
    optimizer.close()
    loops[2].run(model, plain)
    reference = net()
    again = AdamW(reference.parameters(), lr=1e-2, fused=True)
    for seed in (1, 2, 3):
        Loop(steps=2, seed=seed).run(reference, again)
    assert same(model, reference)
    assert not same(model, expected), "the batches of one loop differ from those of three"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_groups_that_are_added_and_fractions_that_change(share: float, hostile: spillway.Session) -> None:
    models = net(), net()
    optimizers: list[Any] = []
    for model, make in zip(models, (AdamW, OffloadedOptimizer), strict=True):
        first, *rest = model.parameters()
        more = {"optimizer_class": AdamW, "session": hostile, "step_on": "auto", "cpu_share": share}
        optimizer: Any = make([first], lr=1e-2, fused=True, **(more if make is OffloadedOptimizer else {}))
        optimizer.add_param_group({"params": rest, "lr": 1e-3})
        optimizers.append(optimizer)
    for seed, fraction in enumerate((0.5, 0.0, 1.0)):
        for model, optimizer in zip(models, optimizers, strict=True):
            Loop(steps=2, seed=seed).run(model, optimizer)
        optimizers[1].divide(fraction)
    assert same(*models)
    assert_same_state(optimizers[1].state_dict()["state"], optimizers[0].state_dict()["state"], masters=None)
    assert on_cpu(optimizers[1]) == alternating([one.numel() for one in models[1].parameters()], share)
    optimizers[1].close()


# Which parameter steps where.


def test_both_have_parameters_of_early_and_of_late_layers(hostile: spillway.Session) -> None:
    layers, width = 8, 16
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    for share in (0.25, 0.5, 0.6):
        optimizer = split(model, hostile, cpu_share=share)
        taken = on_cpu(optimizer)
        sizes = [parameter.numel() for parameter in model.parameters()]
        for seen in range(1, len(sizes) + 1):
            done = sum(size for size, here in zip(sizes[:seen], taken, strict=False) if here)
            assert abs(done - share * sum(sizes[:seen])) <= max(sizes) / 2
        optimizer.close()


def test_a_share_of_none_and_a_share_of_all() -> None:
    assert alternating([3, 0, 5], 1.0) == [True, True, True]
    assert alternating([3, 5], 0.0) == [False, False]


def test_a_parameter_keeps_its_place_when_the_gpu_keeps_others(hostile: spillway.Session) -> None:
    model = net()
    optimizer = split(model, hostile)
    whole = {id(one.parameter): one.store for one in optimizer._placement.held.values()}
    for fraction in (0.5, 1.0):
        optimizer.divide(fraction)
        assert all(whole[id(one.parameter)] is one.store for one in optimizer._placement.held.values())
    optimizer.close()


def test_without_a_gpu_the_cpu_steps_all_of_them(cpu_session: spillway.Session) -> None:
    model, plain = net(), plain_after(Loop(steps=WARM_UP + MEASURED + 2))
    optimizer = split(model, cpu_session, cpu_share=None)
    Loop(steps=WARM_UP + MEASURED + 2).run(model, optimizer)
    assert (optimizer.cpu_share, optimizer.stats().streamed) == (1.0, 0)
    assert same(model, plain)
    optimizer.close()


def test_a_number_holds_on_a_cpu_too(cpu_session: spillway.Session) -> None:
    model = net()
    optimizer = split(model, cpu_session)
    Loop(steps=1).run(model, optimizer)
    assert optimizer.cpu_share == 0.5
    assert optimizer.stats().streamed > 0
    optimizer.close()


@pytest.mark.parametrize(("step_on", "share"), [("cpu", 1.0), ("gpu", 0.0)])
def test_the_share_of_one_place(step_on: str, share: float, cpu_session: spillway.Session) -> None:
    optimizer = OffloadedOptimizer(net().parameters(), AdamW, session=cpu_session, step_on=step_on)
    assert optimizer.cpu_share == share
    optimizer.close()


# The share that is measured.


@pytest.mark.parametrize(
    ("seconds", "shares"),
    [
        ([1.0, 1.0], [0.0, 0.25, 0.0]),
        ([1.0, 0.98], [0.0, 0.25, 0.0]),
        ([1.0, 0.9, 0.95], [0.0, 0.25, 0.5, 0.25]),
        ([1.0, 0.9, 0.8], [0.0, 0.25, 0.5]),
    ],
)
def test_larger_shares_are_tried_as_long_as_steps_get_faster(seconds: list[float], shares: list[float]) -> None:
    tuner, found = ShareTuner(), [0.0]
    for one in seconds:
        assert not tuner.is_done
        # One step of several is slow.
        for each in (*[9.0] * WARM_UP, 9.0, *[one] * (MEASURED - 1)):
            share = tuner.note(StepTimes(each, 0.0, 0.0), found[-1])
            found += [] if share is None else [share]
    assert tuner.is_done
    assert found == shares


@pytest.mark.parametrize(("slower", "shares"), [(0.0, [0.0, 0.25, 0.0]), (-1.0, [0.0, 0.25, 0.5])], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}], ids=str)
def test_states_move_to_the_share_of_the_fastest_step(
    slower: float,
    shares: list[float],
    dtype: torch.dtype,
    options: dict[str, Any],
    hostile: spillway.Session,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 4 * (WARM_UP + MEASURED)
    model, plain = net(dtype), plain_after(Loop(steps=steps, dtype=dtype))
    optimizer = split(model, hostile, cpu_share=None, **options)
    monkeypatch.setattr(StepCost, "times", lambda _: StepTimes(2.0 + slower * optimizer.cpu_share, 0.0, 0.0))
    optimizer.overlap_forward(model, blocks=nn.Linear)
    seen: list[float] = []
    loop = Loop(steps=steps, dtype=dtype, each=lambda *_: seen.append(optimizer.cpu_share))
    loop.run(model, optimizer)
    optimizer.synchronize()
    assert same(model, plain)
    assert set(on_cpu(optimizer)) == ({False, True} if shares[-1] else {False})
    assert [one for one, _ in itertools.groupby(seen)] == shares
    optimizer.close()


@pytest.mark.parametrize("options", [{}, {"step_in_backward": True}, {"offload_gradients": False}], ids=str)
@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
def test_states_move_between_two_steps(
    options: dict[str, Any], dtype: torch.dtype, hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = iter([None, 0.9, None, 0.2, 0.5])
    monkeypatch.setattr(ShareTuner, "note", lambda *_, **__: next(shares, None))
    # Gradients of the next step are added to those of this one.
    loop = Loop(steps=10, dtype=dtype, micro=1 if options else 2)
    model, plain = net(dtype), plain_after(Loop(steps=10, dtype=dtype, micro=loop.micro))
    optimizer = split(model, hostile, cpu_share=None, **options)
    optimizer.overlap_forward(model, blocks=nn.Linear)
    places = []

    def each(*_: Any) -> None:
        # Each share is the last one otherwise.
        optimizer._moves._tuner = ShareTuner()
        places.append(tuple(on_cpu(optimizer)))

    loop.each = each
    loop.run(model, optimizer)
    optimizer.synchronize()
    assert len(set(places)) == 4
    assert optimizer.cpu_share == 0.5
    assert same(model, plain)
    optimizer.close()


def test_states_can_be_edited_after_a_move(hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShareTuner, "note", lambda *_, **__: 0.2)
    model = net(BF16)
    optimizer = split(model, hostile, cpu_share=None)
    before = on_cpu(optimizer)
    kept = {}

    def each(*_: Any) -> None:
        if not kept and optimizer.cpu_share == 0.2:
            kept.update({index: optimizer.state[one]["exp_avg"] for index, one in enumerate(model.parameters())})
            for tensor in kept.values():
                tensor.fill_(0.25)
            state = optimizer.state_dict()["state"]
            assert all((found["exp_avg"] == 0.25).all() for found in state.values())

    Loop(steps=5, dtype=BF16, each=each).run(model, optimizer)
    assert kept
    assert {*before, *on_cpu(optimizer)} == {True, False}
    assert before != on_cpu(optimizer)
    kept.clear()
    optimizer.close()


def test_another_run_with_the_chosen_number_has_the_same_places(
    hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShareTuner, "note", lambda *_, **__: 0.3)
    model = net()
    optimizer = split(model, hostile, cpu_share=None)
    Loop(steps=4).run(model, optimizer)
    assert optimizer.cpu_share == 0.3
    other = split(net(), hostile, cpu_share=optimizer.cpu_share)
    assert on_cpu(other) == on_cpu(optimizer)
    optimizer.close()
    other.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("place", ["host_copy", "part_of"])
@pytest.mark.parametrize("at", [1, 6])
def test_a_move_that_fails_loses_nothing(
    at: int, place: str, share: float, hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = net(BF16), net(BF16)
    # Several parameters have to move.
    optimizer = split(model, hostile, cpu_share=0.5 if share else 0.4)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with monkeypatch.context() as patch:
        broken = BreaksDown(getattr(state_store, place))
        broken.calls = 2 - at
        patch.setattr(state_store, place, broken)
        moved = []
        with pytest.raises(Broken):
            moved += map(id, optimizer._moves.to_stores(share))
    assert bool(moved) is (at > 5)
    for parameter, here in zip(model.parameters(), on_cpu(optimizer), strict=True):
        # Each is where it was, or where it was to go.
        assert id(parameter) not in moved or here is bool(share)
        optimizer._views.show(parameter)
    assert_same_state(optimizer.state_dict()["state"], before, masters=None)
    Loop(steps=2, dtype=BF16, seed=2).run(model, optimizer)
    other = split(plain, hostile)
    Loop(steps=2, dtype=BF16).run(plain, other)
    Loop(steps=2, dtype=BF16, seed=2).run(plain, other)
    assert same(model, plain)
    optimizer.close()
    other.close()


# Faults.


def failing(*_: Any, **__: Any) -> Any:
    raise TierFullError("no more")


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("store", [0, 1], ids=["gpu", "cpu"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_step_that_fails_in_one_store_leaves_no_parameter_in_between(
    store: int, early: bool, at: int, hostile: spillway.Session, pieces_of: Callable[[int], None]
) -> None:
    pieces_of(256)
    model = net(BF16)
    optimizer = split(model, hostile, step_in_backward=early)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    inner: Any = optimizer._placement.stores[store]._optimizer
    works = inner.step_each
    inner.step_each = BreaksDown(works)
    inner.step_each.calls = 3 - at
    model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
    with pytest.raises(Broken):  # noqa: PT012
        optimizer.step()
        optimizer.synchronize()
    inner.step_each = works
    optimizer.zero_grad()
    after = optimizer.state_dict()["state"]
    stepped = {True: 0, False: 0}
    for index, parameter in enumerate(model.parameters()):
        assert torch.equal(after[index]["master"].to(BF16), parameter), index
        old = after[index]["exp_avg"] == before[index]["exp_avg"]
        assert torch.equal(old, after[index]["exp_avg_sq"] == before[index]["exp_avg_sq"])
        here = optimizer._placement.held[parameter].store is optimizer._placement.stores[store]
        stepped[here] += int((~old).sum())
        # The other store has stepped all of its parameters.
        assert here or not old.any(), index
    assert stepped[False] > 1000
    del after
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    assert all(one.isfinite().all() for one in model.parameters())
    optimizer.close()
    gc.collect()


@pytest.mark.parametrize("store", [0, 1], ids=["gpu", "cpu"])
def test_nothing_is_stepped_where_one_store_has_no_memory(
    store: int, hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = net(BF16), plain_after(Loop(steps=4, dtype=BF16))
    optimizer = split(model, hostile)
    data = Loop(steps=4, dtype=BF16)

    def each(step: int, *_: Any) -> None:
        if step:
            return
        before = [one.detach().clone() for one in model.parameters()]
        model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
        with monkeypatch.context() as patch:
            patch.setattr(optimizer._placement.stores[store], "prepare", failing)
            with pytest.raises(TierFullError, match="no more"):
                optimizer.step()
        assert_same_values(model.parameters(), before)
        optimizer.zero_grad()

    data.each = each
    random = torch.get_rng_state()
    data.run(model, optimizer)
    torch.set_rng_state(random)
    assert optimizer.stats().streamed
    assert optimizer.state_dict()["state"][0]["step"] == 4
    del plain
    optimizer.close()


@pytest.mark.parametrize("early", [False, True])
def test_parameters_of_a_store_are_waited_for_where_the_other_could_not_begin(
    early: bool, hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(BF16)
    optimizer = split(model, hostile, step_in_backward=early)
    optimizer.overlap_forward(model, blocks=nn.Linear)
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    model(torch.randn(8, 33, dtype=BF16)).square().mean().backward()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._placement.stores[1], "step", failing)
        with pytest.raises(TierFullError, match="no more"):
            optimizer.step()
    assert not optimizer._steps.pending
    stepped = {one for one, here in zip(model.parameters(), on_cpu(optimizer), strict=True) if not here}
    optimizer.zero_grad()
    after = optimizer.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):
        assert torch.equal(after[index]["master"].to(BF16), parameter), index
        assert torch.equal(after[index]["exp_avg"], before[index]["exp_avg"]) == (parameter not in stepped)
    del after
    Loop(steps=2, dtype=BF16).run(model, optimizer)
    optimizer.close()


# Both at the same time.


def wait_until(reached: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not reached() and time.monotonic() < end:
        time.sleep(0.001)
    return reached()


def test_steps_on_the_gpu_do_not_wait_for_the_cpu(
    cpu_session: spillway.Session, pieces_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU has many chunks of the last layers, whose gradients come first. The GPU has the first weight.
    pieces_of(256)
    monkeypatch.setattr(state_store, "_TOGETHER", 1)
    model = net()
    optimizer = split(model, cpu_session, cpu_share=0.4, step_in_backward=True, threads=1)
    assert on_cpu(optimizer) == [False, *[True] * 5]
    optimizer.overlap_forward(model, blocks=nn.Linear)
    Loop(steps=2).run(model, optimizer)
    optimizer.synchronize()
    inner: Any = optimizer._placement.stores[1]._optimizer
    goes_on, works = threading.Event(), inner.step_each

    def late(*arguments: Any) -> Any:
        assert goes_on.wait(60)
        return works(*arguments)

    inner.step_each = late
    model(torch.randn(8, 33)).square().mean().backward()
    optimizer.step()
    held = list(optimizer._placement.held.values())
    ended = [one.updated for one in held if one.store.steps_on_device]
    waiting = [one.updated for one in held if not one.store.steps_on_device]
    try:
        assert wait_until(lambda: all(one is not None and one.query() for one in ended))
        assert not any(one is None or one.query() for one in waiting)
    finally:
        goes_on.set()
    optimizer.synchronize()
    assert all(one is not None and one.query() for one in waiting)
    optimizer.close()


def test_only_gradients_of_steps_on_the_gpu_stay_there(hostile: spillway.Session) -> None:
    model = net()
    optimizer = split(model, hostile, step_in_backward=True)
    Loop(steps=2).run(model, optimizer)
    model(torch.randn(8, 33)).square().mean().backward()
    expected = {one for one in optimizer._placement.held.values() if one.store.steps_on_device}
    assert set(optimizer._steps.lent) == expected
    optimizer.step()
    assert not set(optimizer._steps.lent)
    optimizer.close()


def test_costs_of_both_are_counted_and_no_profile_is_made(cpu_session: spillway.Session) -> None:
    model = net(BF16)
    optimizer = split(model, cpu_session)
    Loop(steps=3, dtype=BF16).run(model, optimizer)
    stats = optimizer.stats()
    assert stats.stepped_on_host + stats.streamed == sum(one.numel() for one in model.parameters())
    assert stats.host_seconds > 0
    # The CPU's time is that of a part.
    assert optimizer.profile() is None
    optimizer.close()


# Options that are refused.


class Own(AdamW):
    """A class that is not torch's."""


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"step_on": "both"}, UsageError, "step_on: got 'both', expected 'cpu', 'gpu' or 'auto'"),
        ({"step_on": 0.5}, UsageError, "step_on: got 0.5, expected 'cpu', 'gpu' or 'auto'"),
        ({"cpu_share": 1.5}, UsageError, r"cpu_share: got 1.5, expected None, or a number from 0 \(none on the CPU\)"),
        ({"cpu_share": True}, UsageError, "cpu_share: got True"),
        ({"cpu_share": "half"}, UsageError, "cpu_share: got 'half'"),
        ({"step_on": "gpu"}, UsageError, "cpu_share: got 0.5 with step_on='gpu'.*or leave cpu_share out"),
        ({"step_on": "cpu"}, UsageError, "cpu_share: got 0.5 with step_on='cpu'.*Pass step_on='auto'"),
        ({"fraction": "auto"}, UsageError, "fraction='auto' with step_on='auto'.*Give the fraction as a number"),
        ({"tier": "disk"}, UnsupportedError, 'tier="disk" with step_on="auto".*Leave one of the two out'),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(
    options: dict[str, Any], error: type[Exception], match: str, cpu_session: spillway.Session
) -> None:
    with pytest.raises(error, match=match):
        split(net(), cpu_session, **options)


def test_a_class_of_ones_own_is_refused(cpu_session: spillway.Session) -> None:
    with pytest.raises(UnsupportedError, match="Own with tier='host' and step_on='auto'"):
        split(net(), cpu_session, Own)


def test_in_a_process_group_the_number_has_to_be_given(
    hostile: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway.optim.moves.many_processes", lambda: True)
    model = net()
    optimizer = split(model, hostile, cpu_share=None)
    model(torch.randn(8, 33)).sum().backward()
    before = [one.detach().clone() for one in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"step_on='auto' in a process group.*Give the same cpu_share"):
        optimizer.step()
    assert_same_values(model.parameters(), before)
    optimizer.close()
    given = split(model, hostile)
    Loop(steps=1).run(model, given)
    given.close()
