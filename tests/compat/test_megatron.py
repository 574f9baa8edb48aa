"""Megatron-Core's names over our engine: each fact of theirs that a program may lean on, and what became of it."""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.utils.checkpoint import checkpoint

import spillway
from spillway import EventKind, EventList
from spillway.compat import megatron
from spillway.compat.megatron import (
    ChunkOffloadHandler,
    GPUTensorPool,
    HybridDeviceOptimizer,
    OffloadTensorGroup,
    OffloadTensorPool,
    PipelineOffloadManager,
)
from spillway.compat.megatron import FineGrainedActivationOffloadingInterface as Interface
from spillway.saved_tensors.order import PastGroup
from spillway.testing import AdversaryBackend
from support import assert_identical, assert_nothing_left, grads

ROOT = Path(__file__).parent.parent.parent
NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
NEWER_NAMES = ("fused_group_mlp", "gdp_qkv")
ROWS, WIDTH, HEADS = 64, 32, 4
ACTIVATION = ROWS * WIDTH
"""Elements of what goes from layer to layer."""
KiB = 2**10


class Home:
    """A session that is the default one, and chunks in it that send the CPU's tensors to a tier."""

    def __init__(self, session: spillway.Session, tier: str, events: EventList) -> None:
        self.session, self.tier, self.events = session, tier, events

    @property
    def manager(self) -> PipelineOffloadManager:
        return PipelineOffloadManager.get_instance()

    def chunk(self, stage: int | None = None, stages: int | None = None, size: int = 1, **options: Any) -> None:
        Interface.init_chunk_handler(stages, stage, size, **{"tier": self.tier, **options})

    @property
    def current(self) -> ChunkOffloadHandler:
        chunk = self.manager.cur_forward_chunk()
        assert chunk is not None
        return chunk

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.events.events)

    def nbytes(self, kind: EventKind) -> int:
        return sum(event.nbytes for event in self.events.events if event.kind is kind)


@contextlib.contextmanager
def home_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, window: int, *, adversary: bool = False
) -> Iterator[Home]:
    backend = AdversaryBackend() if adversary else None
    more: dict[str, Any] = {} if backend is None else {"backend": backend.serve}
    monkeypatch.setattr(spillway.Session, "_default", None)
    events = EventList()
    with spillway.Session(
        window=window, spill_directory=tmp_path, allow_memory_filesystem=True, recorder=events, **more
    ) as session:
        session.use_as_default()
        yield Home(session, tier, events)
        Interface.reset()
        gc.collect()
        if backend is not None:
            backend.check()
        assert_nothing_left(session)


@pytest.fixture(params=["host", "disk", "adversary", "window"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """Each tier, the backend that is as late as it may be, and a window in which some are under way at once."""
    tier = "disk" if request.param == "disk" else "host"
    window = 24 * KiB if request.param in ("adversary", "window") else 0
    with home_on(tmp_path, monkeypatch, tier, window, adversary=request.param == "adversary") as home:
        yield home


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    with home_on(tmp_path, monkeypatch, "host", 0) as home:
        yield home


# A GPT as Megatron builds one: its groups, where it has them.


class Attention(nn.Module):
    def __init__(self, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear_qkv, self.linear_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.core = core

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [each.view(ROWS, HEADS, -1).transpose(0, 1) for each in (q, k, v)]
        weights = (heads[0] @ heads[1].transpose(1, 2)).softmax(-1)
        return (weights @ heads[2]).transpose(0, 1).reshape(ROWS, WIDTH)

    def forward(self, x: Tensor, on: bool) -> Tensor:
        with Interface(on, x, "qkv_linear") as x:
            qkv = self.linear_qkv(x).chunk(3, dim=-1)
        if on:
            qkv = Interface.group_commit(qkv, name="qkv_linear", forced_released_tensors=[])
        group = Interface(on, qkv[0], "core_attn")
        with group as q:
            context = self.core(self.attend, q, *qkv[1:])
        context = group.group_offload(context)
        with Interface(on, context, "attn_proj") as context:
            out = self.linear_proj(context)
        return Interface.group_commit(out, "attn_proj", [context]) if on else out


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, on: bool) -> Tensor:
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class Experts(nn.Module):
    """Two experts, to which tokens go by a router: how many to each differs from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.fc1 = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.fc2 = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor, on: bool) -> Tensor:
        scores = self.router(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for number in range(2):
            rows = (chosen == number).nonzero()[:, 0]
            tokens = x[rows]
            with Interface(on, tokens, "expert_fc1") as tokens:
                hidden = self.fc1[number](tokens)
            if on:
                hidden = Interface.group_commit(hidden, "expert_fc1", forced_released_tensors=[tokens])
            with Interface(on, hidden, "moe_act") as hidden:
                act = gelu(hidden)
            done = self.fc2[number](act)
            if on:
                done = Interface.group_commit(done, "moe_act", forced_released_tensors=[hidden], delay_offload=True)
            out = out.index_add(0, rows, done * scores[rows, number, None])
        return out


class Layer(nn.Module):
    def __init__(self, mlp: nn.Module, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(core)
        self.mlp_norm, self.mlp = nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor, on: bool) -> Tensor:
        with Interface(on, x, "attn_norm") as x:
            normed = self.norm(x)
        x = x + self.attention(normed, on)
        if on:
            x = Interface.group_commit(x, name="attn_norm")
        with Interface(on, x, "mlp_norm") as x:
            normed = self.mlp_norm(x)
        x = x + self.mlp(normed, on)
        return Interface.group_commit(x, "mlp_norm") if on else x


class Part(nn.Module):
    """Some layers, and what begins or ends the model where it does."""

    def __init__(self, stage: int, stages: int, core: Callable[..., Tensor]) -> None:
        super().__init__()
        self.stage, self.stages = stage, stages
        self.embedding = nn.Embedding(48, WIDTH) if stage == 0 else None
        self.layers = nn.ModuleList(Layer(Experts() if place % 2 else Dense(), core) for place in range(2))
        self.head = nn.Linear(WIDTH, 48) if stage == stages - 1 else None

    def forward(self, x: Tensor, on: bool) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, on)
        if on:
            megatron.fine_grained_offloading_group_flush_delayed_groups()
        return x if self.head is None else cross_entropy(self.head(x), torch.arange(ROWS) % 48)


def direct(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    return function(*args)


def parts(stages: int = 1, core: Callable[..., Tensor] = direct) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Part(stage, stages, core) for stage in range(stages))


def tokens(number: int) -> Tensor:
    return torch.randint(48, (ROWS,), generator=torch.Generator().manual_seed(number))


Plan = list[tuple[str, int, int]]
"""What a rank does: forward ("F") or backward ("B"), of which stage and micro-batch."""


def one_f_one_b(micro_batches: int, alive: int) -> Plan:
    plan = [("F", 0, number) for number in range(alive)]
    for number in range(micro_batches):
        plan.append(("B", 0, number))
        if number + alive < micro_batches:
            plan.append(("F", 0, number + alive))
    return plan


def interleaved(micro_batches: int) -> Plan:
    forward = [("F", stage, number) for stage in range(2) for number in range(micro_batches)]
    return forward + [("B", stage, number) for stage in (1, 0) for number in range(micro_batches)]


PLANS: dict[str, Plan] = {
    "one after the other": one_f_one_b(3, 1),
    "1F1B": one_f_one_b(5, 3),
    "all forward first": one_f_one_b(3, 3),
    "interleaved": interleaved(3),
}


def iterate(
    model: nn.ModuleList, plan: Plan, chunk: Callable[[int, int], None] | None = None, seed: int = 0
) -> list[Tensor]:
    """Losses and gradients of one iteration; of each micro-batch, the stages hand on what they compute."""
    model.zero_grad()
    stages = len(model)
    given: dict[tuple[int, int], Tensor] = {}
    made: dict[tuple[int, int], Tensor] = {}
    results: list[Tensor] = []
    for what, stage, number in plan:
        if what == "F":
            before = made.get((stage - 1, number))
            x = tokens(seed + number) if before is None else before.detach().requires_grad_()
            given[stage, number] = x
            if chunk is not None:
                chunk(stage, stages)
            made[stage, number] = model[stage](x, chunk is not None)
            if stage == stages - 1:
                results.append(made[stage, number].detach().clone())
        else:
            out = made.pop((stage, number))
            out.backward(None if stage == stages - 1 else given[stage + 1, number].grad)
            del out
    return results + [gradient.clone() for gradient in grads(*model.parameters())]


# Bit for bit, whatever the schedule.


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covered(times=2)
def test_losses_and_gradients_are_those_of_plain_pytorch_whatever_the_schedule(anywhere: Home, plan: str) -> None:
    model = parts(2 if plan == "interleaved" else 1)
    for iteration in range(3):
        # Routing, and so the shapes of what experts save, differs from iteration to iteration.
        expected = iterate(model, PLANS[plan], seed=10 * iteration)
        got = iterate(model, PLANS[plan], anywhere.chunk, seed=10 * iteration)
        assert_identical(got, expected)
        del got
        Interface.reset()
    assert anywhere.count(EventKind.TAKE) > 0
    assert anywhere.manager.offload_summary_total_bytes > 0


def test_every_group_of_the_model_leaves_in_the_first_iteration(here: Home) -> None:
    model = parts()
    here.chunk()
    loss = model[0](tokens(0), True)
    chunk = here.current
    found = [group.name for group in chunk.offload_groups]
    dense, experts = NAMES[:5], (*NAMES[:5], "expert_fc1", "moe_act", "expert_fc1", "moe_act")
    assert found == [*dense, *experts]
    assert all(group.offload and group.total_tensor_count > 0 for group in chunk.offload_groups)
    assert chunk.stats().offloaded_bytes == sum(group.total_offload_bytes for group in chunk.offload_groups)
    assert {group.name: group.kept_bytes for group in chunk.stats().groups} == dict.fromkeys(NAMES, 0)
    loss.backward()


def test_a_group_leaves_at_its_commit_and_not_before(here: Home) -> None:
    leaf = torch.randn(ACTIVATION, requires_grad=True)
    here.chunk()
    with Interface(True, leaf * 1, "mlp_norm") as x:
        y = x.exp().sin()
    assert here.count(EventKind.LEAVE) == 0
    y = y.cos()  # outside, nothing is seen
    assert Interface.group_commit(y, "mlp_norm") is y
    assert here.count(EventKind.LEAVE) == 1
    assert here.nbytes(EventKind.LEAVE) == 4 * ACTIVATION
    y.sum().backward()


# Memory.


def alive_after(forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of storages that are alive on the device after a forward, of those that it made; and what it gave."""
    from torch.utils._python_dispatch import TorchDispatchMode

    storages: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()

    class Meter(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, Tensor):
                    storages[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
            return out

    with Meter():
        out = forward()
    return sum(storages.values()), out


def push_out(home: Home) -> None:
    """A storage leaves when the next one wants its place."""
    with spillway.offload(session=home.session, min_bytes=0, window=0, tier="host", tag="push out"):
        pushing = torch.ones(2, requires_grad=True).exp()
    del pushing


def test_memory_falls_by_what_the_groups_say(here: Home) -> None:
    """With a window of 0, only the storage that left last is still held, until the next one leaves."""
    layers = nn.ModuleList(Layer(Dense(), direct) for _ in range(4))
    x = torch.randn(ROWS, WIDTH)

    def forward(on: bool) -> Tensor:
        if on:
            here.chunk()
        hidden = x * 1
        for layer in layers:
            hidden = layer(hidden, on)
        if on:
            push_out(here)
        return hidden

    plain, out = alive_after(lambda: forward(False))
    out.sum().backward()
    del out
    for iteration in range(3):
        held, out = alive_after(lambda: forward(True))
        groups = here.current.offload_groups
        leave = sum(group.total_offload_bytes for group in groups if group.offload)
        assert [group.offload for group in groups] == [True] * (15 if iteration else 20) + [False] * 5 * bool(iteration)
        assert plain - held == leave
        out.sum().backward()
        del out
        Interface.reset()
        assert here.manager.offload_summary_total_bytes == leave if iteration else leave * 3 / 4


# M4: what stays.


def stack(layers: int, home: Home, **options: Any) -> tuple[Tensor, ChunkOffloadHandler]:
    """A chunk of so many layers with a group of 8 KiB of each of two names; and a loss."""
    home.chunk(**options)
    x = torch.linspace(0, 1, ACTIVATION).requires_grad_() * 1
    for _ in range(layers):
        with Interface(True, x, "mlp_norm") as x:
            y = x.exp()
        y = Interface.group_commit(y, "mlp_norm")
        with Interface(True, y, "moe_act") as y:
            x = y.sin().cos() * 0.5
        x = Interface.group_commit(x, "moe_act")
    return x.sum(), home.current


def iteration(
    home: Home, chunks: int = 1, layers: int = 3, *, backwards: bool = False, **options: Any
) -> list[list[bool]]:
    """Which groups of each chunk leave, in an iteration where backward takes the chunks in their order, or in reverse.

    A chunk of which something leaves is the current one in its backward.
    """
    made = [stack(layers, home, **options) for _ in range(chunks)]
    leaving = [[group.offload for group in chunk.offload_groups] for _, chunk in made]
    while made:
        loss, chunk = made.pop(-1 if backwards else 0)
        loss.backward()
        leaves = any(group.offload for group in chunk.offload_groups)
        assert (home.manager.cur_backward_chunk() is chunk) == leaves
        del loss, chunk
    Interface.reset()
    return leaving


def test_after_the_first_iteration_the_last_group_of_each_name_stays_in_the_chunk_that_backward_wants_first(
    here: Home,
) -> None:
    assert iteration(here, chunks=2) == [[True] * 6] * 2
    for _ in range(2):
        assert iteration(here, chunks=2) == [[True, True, True, True, False, False], [True] * 6]


def test_with_backward_in_reverse_it_is_the_last_chunk_whose_groups_stay(here: Home) -> None:
    for _ in range(3):
        leaving = iteration(here, chunks=3, backwards=True)
    assert leaving == [[True] * 6, [True] * 6, [True, True, True, True, False, False]]
    # All of them are away when backward begins, and of the first order, the first one only.
    assert here.manager.offload_summary_total_bytes == 16 * 4 * ACTIVATION
    Interface.reset_instance()
    iteration(here, chunks=3)
    assert here.manager.offload_summary_total_bytes == 4 * 4 * ACTIVATION


def test_a_chunk_of_which_nothing_leaves_any_more_stays_the_first(here: Home) -> None:
    iteration(here, chunks=2, layers=1)
    for _ in range(3):
        assert iteration(here, chunks=2, layers=1) == [[False] * 2, [True] * 2]


def test_the_summary_is_empty_before_the_first_iteration_ends_and_leaves_out_what_stays(here: Home) -> None:
    manager = here.manager
    loss, chunk = stack(3, here)
    assert (manager.offload_summary_bytes, manager.offload_summary_total_bytes) == ({}, 0)
    by_name = dict.fromkeys(("mlp_norm", "moe_act"), 0)
    for group in chunk.offload_groups[:4]:
        by_name[group.name] += group.total_offload_bytes
    loss.backward()
    del loss, chunk
    Interface.reset()
    assert manager.offload_summary_bytes == by_name
    assert manager.offload_summary_total_bytes == sum(by_name.values()) > 0


@pytest.mark.parametrize(
    ("fraction", "first", "second"), [(0.0, 0, 0), (0.1, 1, 1), (0.4, 3, 4), (0.5, 3, 4), (0.9, 6, 8), (1.0, 6, 8)]
)
def test_the_fraction_is_one_share_of_a_chunks_eligible_groups(
    here: Home, fraction: float, first: int, second: int
) -> None:
    # Of the first chunk's eight groups, the last of each name stays anyway.
    iteration(here, chunks=2, layers=4, activation_offload_fraction=fraction)
    for _ in range(2):
        leaving = iteration(here, chunks=2, layers=4, activation_offload_fraction=fraction)
        assert leaving == [[place < offloaded for place in range(8)] for offloaded in (first, second)]


def test_the_fraction_counts_names_together(here: Home) -> None:
    def leaving(*names: str) -> list[bool]:
        here.chunk(activation_offload_fraction=0.5)
        x = torch.linspace(0, 1, ACTIVATION).requires_grad_() * 1
        for name in names:
            with Interface(True, x, name) as x:
                x = x.sin()
            x = Interface.group_commit(x, name)
        found = [group.offload for group in here.current.offload_groups]
        x.sum().backward()
        Interface.reset()
        return found

    # A share of each name would keep one group of each.
    names = ("moe_act", "moe_act", "moe_act", "gdp_qkv", "gdp_qkv", "gdp_qkv")
    leaving(*names)
    assert leaving(*names) == [True, True, False, False, False, False]


def test_a_difference_in_bytes_stays_on_each_rank_after_the_first_in_all_chunks_together(here: Home) -> None:
    loss, chunk = stack(3, here)
    sizes = [group.total_offload_bytes for group in chunk.offload_groups]
    loss.backward()
    del loss, chunk
    # Of the first chunk, all that the margin left; and one group of the second.
    more = sum(sizes[:4]) + sizes[-1]
    options = {"pp_rank": 2, "delta_offload_bytes_across_pp_ranks": more // 2}
    Interface.reset_instance()
    iteration(here, chunks=2, **options)
    assert iteration(here, chunks=2, **options) == [[False] * 6, [True] * 5 + [False]]
    Interface.reset_instance()
    options["pp_rank"] = 0
    iteration(here, chunks=2, **options)
    assert iteration(here, chunks=2, **options)[1] == [True] * 6


def test_rules_over_several_passes_take_margin_and_bytes_once() -> None:
    past = [PastGroup("a", 4), PastGroup("b", 2), PastGroup("a", 4), PastGroup("b", 2)]
    rules = spillway.Groups(margin=1, fewer_bytes=9).over([past, past])
    assert [(each.margin, each.fewer_bytes) for each in rules] == [(1, 9), (0, 3)]
    assert [sorted(each.staying(past)) for each in rules] == [[0, 1, 2, 3], [3]]
    assert spillway.Groups().staying([PastGroup("a", 4), PastGroup("a", 0)]) == set()


# M3: the next chunk.


def test_what_the_next_chunk_wants_first_is_fetched_when_a_backward_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with home_on(tmp_path, monkeypatch, "host", 32 * KiB) as home:
        ahead = []
        for _ in range(3):
            losses = [stack(3, home)[0] for _ in range(4)]
            losses.pop(0).backward()
            home.session.synchronize()
            runtime = home.session.runtime(torch.device("cpu"))
            ahead.append(runtime.mover.counts()["returning bytes"])
            for loss in losses:
                loss.backward()
            del losses, loss
            Interface.reset()
        # In the first iteration nobody knows which chunk is next.
        assert ahead[0] == 0
        assert 0 < ahead[1] <= 32 * KiB
        assert ahead[2] == ahead[1]


# Hazards 46 and 47.


def test_an_evaluation_before_and_between_takes_nothing_of_the_first_iteration(here: Home) -> None:
    model = parts()
    expected = iterate(model, PLANS["1F1B"])
    for number in range(3):
        with torch.no_grad():
            here.chunk()
            model[0](tokens(0), True)
        assert here.manager.cur_forward_chunk() is None
        Interface.reset()
        got = iterate(model, PLANS["1F1B"], here.chunk)
        with torch.no_grad():
            before = here.manager.cur_forward_chunk()
            here.chunk()
            model[0](tokens(0), True)
            assert here.manager.cur_forward_chunk() is before
        assert_identical(got, expected)
        assert (here.manager.offload_summary_total_bytes > 0) == (number > 0)
        Interface.reset()


def test_an_evaluation_with_gradients_on_is_no_first_iteration(here: Home) -> None:
    stack(3, here)
    Interface.reset()
    assert here.manager.offload_summary_bytes == {}
    assert iteration(here) == [[True] * 6]


def test_more_micro_batches_than_in_the_first_iteration_leave_all_the_same(anywhere: Home) -> None:
    model = parts()
    for micro_batches in (2, 5, 3):
        plan = one_f_one_b(micro_batches, 2)
        anywhere.events.events.clear()
        assert_identical(iterate(model, plan, anywhere.chunk), iterate(model, plan))
        assert all(any(g.offload for g in chunk.offload_groups) for chunk in anywhere.manager._chunks.values())
        assert len(anywhere.manager._chunks) == micro_batches
        Interface.reset()


def test_other_shapes_than_in_the_first_iteration_leave_all_the_same(anywhere: Home) -> None:
    def step(rows: int, on: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(WIDTH, WIDTH)
        x = torch.ones(rows, WIDTH)
        if on:
            anywhere.chunk()
        for _ in range(3):
            with Interface(on, x, "mlp_norm") as x:
                y = layer(x).exp().sin()
            x = Interface.group_commit(y, "mlp_norm") if on else y
        x.sum().backward()
        return list(grads(*layer.parameters()))

    for rows in (64, 32, 96, 64):
        assert_identical(step(rows, True), step(rows, False))
        assert anywhere.current.offload_groups[0].offload
        Interface.reset()


# M5, M6: which tensors.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("elements", "leaves"), [(1023, False), (1024, True)])
def test_the_least_size_is_in_elements_whatever_the_dtype(
    here: Home, dtype: torch.dtype, elements: int, leaves: bool
) -> None:
    here.chunk(size=1024)
    with Interface(True, torch.ones(elements, dtype=dtype).requires_grad_() * 1, "moe_act") as x:
        y = x.sin()
    Interface.group_commit(y, "moe_act")
    assert here.current.min_offloaded_tensor_size == 1024
    assert here.current.tensor_need_offloading_checker(x) is leaves
    assert here.current.offload_groups[0].total_tensor_count == leaves
    assert here.count(EventKind.LEAVE) == leaves
    y.sum().backward()


def test_the_managers_default_is_a_mebi_element(here: Home) -> None:
    here.manager.init_model_chunk_offload_handler(1, 0)
    assert here.current.min_offloaded_tensor_size == 1024 * 1024


def mark(tensor: Tensor, how: str) -> None:
    if how.startswith("mark"):
        getattr(Interface, how)(tensor)
        assert tensor.offloading_activation is False  # type: ignore[attr-defined]
    elif how == "manager":
        PipelineOffloadManager.get_instance().mark_not_offloadable(tensor)
    else:
        setattr(tensor, how, how != "offloading_activation")


@pytest.mark.parametrize(
    "how",
    ["mark_not_offloadable", "mark_not_offload", "manager", "offloading_activation", "_TE_do_not_offload"],
)
@pytest.mark.parametrize("view", [False, True])
def test_a_marked_tensor_stays_and_so_do_views_of_it(here: Home, how: str, view: bool) -> None:
    here.chunk()
    leaf = torch.ones(ACTIVATION, requires_grad=True)
    with Interface(True, leaf * 1, "moe_act") as x:
        mark(x, how)
        y = (x.view(2, -1).sin() if view else x.sin()).cos()
    Interface.group_commit(y, "moe_act")
    assert not here.current.tensor_need_offloading_checker(x.view(2, -1) if view else x)
    # What cos() saves leaves.
    assert here.count(EventKind.LEAVE) == 1
    y.sum().backward()


def test_no_tensor_may_be_marked_and_parameters_never_leave(here: Home) -> None:
    Interface.mark_not_offloadable(None)
    Interface.mark_not_offload(None)
    here.chunk()
    weight = nn.Parameter(torch.ones(ACTIVATION))
    with Interface(True, weight, "moe_act") as x:
        y = x.sin()
    Interface.group_commit(y, "moe_act")
    assert not here.current.tensor_need_offloading_checker(weight)
    assert here.count(EventKind.LEAVE) == 0


def test_views_leave_as_their_base_once(here: Home) -> None:
    here.chunk()
    with Interface(True, torch.ones(4, ACTIVATION, requires_grad=True) * 1, "core_attn") as x:
        y = x.t().sin().sum() + x.view(-1).cos().sum() + x[:3].exp().sum() + x.sin().sum()
    Interface.group_commit(y, "core_attn")
    group = here.current.offload_groups[0]
    # x by all of them, and the result of exp().
    assert (group.total_tensor_count, group.total_offload_bytes) == (2, 7 * ACTIVATION * 4)
    assert here.nbytes(EventKind.LEAVE) == 7 * ACTIVATION * 4
    y.backward()


# M7: forced release.


def released(home: Home, make: Callable[[Tensor], Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf; a tensor that a group saved and was told to release; and a loss."""
    leaf = torch.linspace(0, 1, ACTIVATION, requires_grad=True)
    x = make(leaf * 2)
    with Interface(True, x, "expert_fc1") as x:
        y = x.sin()
    y = Interface.group_commit(y, "expert_fc1", forced_released_tensors=[x], **options)
    return leaf, x, y.sum()


@pytest.mark.parametrize("view", [False, True])
def test_a_tensor_is_released_that_somebody_still_holds(anywhere: Home, view: bool) -> None:
    anywhere.chunk()
    leaf, held, loss = released(anywhere, (lambda x: x.view(2, -1)) if view else (lambda x: x))
    assert held.untyped_storage().nbytes() == 4
    assert held.isnan().all()
    loss.backward()
    assert_identical(list(grads(leaf)), [(leaf.detach() * 2).cos() * 2])


def test_what_stays_or_is_too_small_or_marked_is_not_released(here: Home) -> None:
    def touched(size: int = 1, make: Callable[[Tensor], Tensor] = lambda x: x) -> bool:
        here.chunk(size=size)
        _, held, loss = released(here, make)
        loss.backward()
        Interface.reset()
        return bool(held.isnan().any())

    assert not touched(size=ACTIVATION + 1)
    Interface.reset_instance()
    assert not touched(make=lambda x: Interface.mark_not_offloadable(x) or x)  # type: ignore[func-returns-value]
    assert touched()
    # Of one group, none leaves after the first iteration that had one leave.
    assert not touched()


def test_memory_that_another_tensor_sees_is_an_error_and_not_a_silent_loss(here: Home) -> None:
    here.chunk()
    others: list[Tensor] = []

    def make(x: Tensor) -> Tensor:
        others.append(x.detach())
        return x

    with pytest.raises(spillway.UsageError, match="1 other tensor"):
        released(here, make)


# M8: delay.


def test_a_delayed_group_leaves_when_it_is_flushed(anywhere: Home) -> None:
    anywhere.chunk()
    losses = []
    for _ in range(2):
        leaf, held, loss = released(anywhere, lambda x: x, delay_offload=True)
        losses.append((leaf, loss))
        assert held.isnan().all()
    assert anywhere.count(EventKind.LEAVE) == 0
    Interface.flush_delayed_groups()
    assert anywhere.count(EventKind.LEAVE) == 2
    for leaf, loss in losses:
        loss.backward()
        assert_identical(list(grads(leaf)), [(leaf.detach() * 2).cos() * 2])


def test_what_was_never_flushed_is_dropped_at_a_reset_and_keeps_its_data(anywhere: Home) -> None:
    anywhere.chunk()
    leaf, _, loss = released(anywhere, lambda x: x, delay_offload=True)
    Interface.reset()
    Interface.flush_delayed_groups()
    assert anywhere.count(EventKind.LEAVE) == 0
    loss.backward()
    assert_identical(list(grads(leaf)), [(leaf.detach() * 2).cos() * 2])


def test_in_the_newer_call_a_group_is_delayed_only_within_a_replay(anywhere: Home) -> None:
    def offloads() -> int:
        leaf = torch.linspace(0, 1, ACTIVATION, requires_grad=True)
        commits = (
            lambda x, name: Interface(True, x, name).group_offload(x, delay_offload=True),
            lambda x, name: megatron.fine_grained_offloading_group_offload(x, name, delay_offload=True),
        )
        x, before = leaf * 1, anywhere.count(EventKind.LEAVE)
        for commit, name in zip(commits, NEWER_NAMES, strict=True):
            with Interface(True, x, name) as x:
                y = x.sin()
            x = commit(y, name)
        losses.append((leaf, x.sum()))
        return anywhere.count(EventKind.LEAVE) - before

    losses: list[tuple[Tensor, Tensor]] = []
    anywhere.chunk()
    assert not anywhere.manager.in_replay
    assert offloads() == 2
    Interface.enter_replay()
    assert anywhere.manager.in_replay
    assert offloads() == 0
    Interface.exit_replay()
    # The flush comes after the replay.
    Interface.flush_delayed_groups()
    assert anywhere.count(EventKind.LEAVE) == 4
    assert offloads() == 2
    for leaf, loss in losses:
        expected = torch.autograd.grad(leaf.sin().sin().sum(), leaf)
        loss.backward()
        assert_identical(list(grads(leaf)), list(expected))


# M9: in flight.


@pytest.mark.parametrize(("most", "held"), [(None, 6), (2, 2), (1, 1), (0, 1)])
def test_so_many_groups_of_a_name_are_on_their_way_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, held: int
) -> None:
    with home_on(tmp_path, monkeypatch, "host", 2**20) as home:
        home.chunk(max_inflight_offloads=most)
        x = torch.ones(ACTIVATION, requires_grad=True) * 1
        for _ in range(6):
            with Interface(True, x, "mlp_norm") as x:
                x = x.sin()
            x = Interface.group_commit(x, "mlp_norm")
        assert home.count(EventKind.LEAVE) - home.count(EventKind.RELEASE) == held
        x.sum().backward()


# M10: disabled.


def test_disabled_nothing_happens_and_live_graphs_come_back(anywhere: Home) -> None:
    def group(x: Tensor) -> Tensor:
        with Interface(True, x, "moe_act") as x:
            y = x.sin()
        return Interface.group_commit(y, "moe_act")

    leaf = torch.linspace(0, 1, ACTIVATION, requires_grad=True)
    anywhere.chunk()
    x = group(leaf * 2)
    open_before = Interface(True, x, "mlp_norm")
    with open_before:
        x = x.cos()
    Interface.disable_offload()
    assert not anywhere.current.do_offload
    begun = len(anywhere.current.offload_groups)
    x = group(x)
    assert open_before.group_offload(x) is x
    with Interface(True, x, "mlp_norm"):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert len(anywhere.current.offload_groups) == begun == 2
    assert anywhere.count(EventKind.LEAVE) == 1
    megatron.fine_grained_offloading_enable_offload()
    assert anywhere.current.do_offload
    x = group(x)
    assert anywhere.count(EventKind.LEAVE) == 2
    x.sum().backward()
    plain = leaf.detach().clone().requires_grad_()
    (plain * 2).sin().cos().sin().sin().sum().backward()
    assert_identical(list(grads(leaf)), list(grads(plain)))
    megatron.fine_grained_offloading_disable_offload()
    Interface.enable_offload()


# The interface.


def test_it_gives_the_tensor_and_has_its_arguments_as_attributes(here: Home) -> None:
    x = torch.ones(3)
    for offload in (False, True):
        context = Interface(offload, x, "qkv_linear")
        assert (context.offload, context.tensor, context.name) == (offload, x, "qkv_linear")
        with context as same:
            assert same is x
        assert context.group_offload(x) is x


def test_without_a_chunk_start_and_commit_give_back_what_they_are_given(here: Home) -> None:
    x = torch.ones(3, requires_grad=True)
    assert megatron.fine_grained_offloading_group_start(x) is x
    assert megatron.fine_grained_offloading_group_start(x, "moe_act") is x
    for value in (x, (x, 1), [x], (), []):
        assert Interface.group_commit(value, "moe_act") is value
        assert megatron.fine_grained_offloading_group_commit(value, "moe_act", [x], True) is value
    assert here.manager.cur_forward_chunk() is here.manager.cur_backward_chunk() is None
    with Interface(True, x, "moe_act"):
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_tuple_or_list_is_committed_and_stays_what_it_is(here: Home) -> None:
    for number, kind in enumerate((tuple, list)):
        here.chunk()
        with Interface(True, torch.ones(ACTIVATION, requires_grad=True) * 1, "qkv_linear") as x:
            out = kind((x.sin(), 7))
        assert Interface.group_commit(out, "qkv_linear") == out
        assert type(out) is kind
        assert here.count(EventKind.LEAVE) == number + 1
        with Interface(True, out[0], "moe_act") as x:
            saves = x.sin()
        empty = kind()
        assert Interface.group_commit(empty, "moe_act") is empty
        assert here.count(EventKind.LEAVE) == number + 1
        del saves


def test_hooks_are_there_inside_only_also_where_something_is_raised(here: Home) -> None:
    here.chunk()
    leaf = torch.ones(ACTIVATION, requires_grad=True)
    with contextlib.suppress(ZeroDivisionError), Interface(True, leaf * 1, "moe_act") as x:
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        y = x.sin()
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    # What it has stays, whoever commits it.
    Interface.group_commit(y, "moe_act")
    assert here.count(EventKind.LEAVE) == 0
    y.sum().backward()
    del y, x
    Interface.reset()
    assert here.manager.offload_summary_bytes == {}


def test_a_group_that_is_never_committed_stays_and_is_told_of(here: Home) -> None:
    here.chunk()
    chunk = here.current
    with Interface(True, torch.ones(ACTIVATION, requires_grad=True) * 1, "moe_act") as x:
        y = x.sin()
    here.chunk()
    assert chunk.stats().notes == ("group 'moe_act' was started and not committed: it stayed",)
    assert here.count(EventKind.LEAVE) == 0
    y.sum().backward()


def test_the_context_is_the_manager_or_nothing(here: Home) -> None:
    manager = here.manager
    assert Interface.get_context(True) is manager
    here.chunk()
    megatron.fine_grained_offloading_group_start(torch.ones(1), "moe_act")
    with Interface.get_context(True):
        y = (torch.ones(ACTIVATION, requires_grad=True) * 1).sin()
        with Interface.get_context(False):
            y = y.cos()
    Interface.group_commit(y, "moe_act")
    assert here.count(EventKind.LEAVE) == 2
    y.sum().backward()


def test_groups_may_overlap_and_are_committed_by_name(here: Home) -> None:
    here.chunk()
    x = torch.ones(ACTIVATION, requires_grad=True) * 1
    with Interface(True, x, "attn_norm"):
        y = x.sin()
    with Interface(True, y, "core_attn"):
        z = y.sin()
        with Interface(True, z, "moe_act"):
            z = z.sin()
        z = Interface.group_commit(z, "moe_act")
        z = z.sin()
    for name, count in (("attn_norm", 2), ("core_attn", 4)):
        Interface.group_commit(z, name)
        assert here.count(EventKind.LEAVE) == count
    assert [group.total_tensor_count for group in here.current.offload_groups] == [1, 2, 1]
    z.sum().backward()


def test_a_chunk_begins_by_position_or_by_name_in_either_release(here: Home) -> None:
    for args, options in (
        ((1, 0, 8), {}),
        ((None, None, 8), {}),
        ((2, 1, 8), {"pp_rank": 3, "delta_offload_bytes_across_pp_ranks": 5}),
        ((3, 2, 1, 8), {}),
        ((3, None, None, 8, 5, 0.5), {}),
        ((3, 2, 1, 8, 5, 0.5, 4), {}),
        ((), {"pp_rank": 0, "vp_size": None, "vp_stage": None, "min_offloaded_tensor_size": 8}),
    ):
        Interface.init_chunk_handler(*args, **options)
        assert here.current.min_offloaded_tensor_size == 8
    assert here.manager._rules == spillway.Groups(margin=1)
    Interface.init_chunk_handler(3, 2, 1, 8, 5, 0.5, 4)
    assert here.manager._rules == spillway.Groups(margin=1, fraction=0.5, fewer_bytes=15, in_flight=4)


@pytest.mark.parametrize(
    ("args", "options", "says"),
    [
        ((2, 2, 8), {}, "vp_stage: got 2, expected a number from 0 to 1"),
        ((1, 0, 8.5), {}, "min_offloaded_tensor_size: got 8.5"),
        ((1, 0, -1), {}, "min_offloaded_tensor_size: got -1"),
        ((0, 1, 0, 8, 0, 1.0, None, 1), {}, "got 8 positional arguments"),
        ((0, 1, 0, 8), {"pp_rank": 1}, "got 4 positional arguments"),
        ((1, 0, 8), {"activation_offload_fraction": 2}, "fraction: got 2"),
        ((1, 0, 8), {"tier": "tape"}, "tier: got 'tape'"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_an_error(here: Home, args: Any, options: Any, says: str) -> None:
    with pytest.raises(spillway.UsageError, match=says):
        Interface.init_chunk_handler(*args, **options)
    assert here.manager.cur_forward_chunk() is None


def test_signatures_are_theirs() -> None:
    def names(function: Callable[..., Any], count: int) -> list[str]:
        return list(inspect.signature(function).parameters)[:count]

    assert names(Interface, 3) == ["offload", "tensor", "name"]
    chunk = ["vp_size", "vp_stage", "min_offloaded_tensor_size"]
    assert names(Interface.init_chunk_handler, 3) == chunk
    assert names(PipelineOffloadManager.init_model_chunk_offload_handler, 4)[1:] == chunk
    commit = ["tensor", "name", "forced_released_tensors", "delay_offload"]
    assert names(Interface.group_commit, 4) == names(megatron.fine_grained_offloading_group_commit, 4) == commit
    assert names(megatron.fine_grained_offloading_group_offload, 4) == commit
    assert names(Interface.reset, 1) == names(PipelineOffloadManager.reset, 2)[1:] == ["process_group"]
    assert names(megatron.print_offload_summary_table, 3) == ["total_offload_bytes", "duplicates", "process_group"]
    assert GPUTensorPool is OffloadTensorPool
    assert names(Interface.group_offload, 4) == ["self", commit[0], *commit[2:]]
    assert names(megatron.fine_grained_offloading_group_start, 2) == ["tensor", "name"]
    assert names(megatron.fine_grained_offloading_backward_record, 2) == ["tensor", "event"]
    assert str(inspect.signature(GPUTensorPool)).startswith("(device: 'torch.device | str' = 'cuda', pin_memory: ")
    assert names(ChunkOffloadHandler.find_group_with_name, 3) == ["self", "name", "start_index"]


# The manager, chunks and groups.


def test_the_instance_hangs_on_the_default_session(here: Home, tmp_path: Path) -> None:
    manager = here.manager
    assert PipelineOffloadManager.get_instance() is manager
    Interface.reset_instance()
    assert here.manager is not manager
    manager = here.manager
    with spillway.Session(spill_directory=tmp_path, allow_memory_filesystem=True) as other:
        other.use_as_default()
        assert here.manager is not manager
        reference = weakref.ref(other)
    here.session.use_as_default()
    del other
    gc.collect()
    assert reference() is None
    assert here.manager is manager


def test_a_new_instance_begins_anew_and_live_graphs_come_back(anywhere: Home) -> None:
    leaf = torch.linspace(0, 1, ACTIVATION, requires_grad=True)
    iteration(anywhere)
    anywhere.chunk()
    with Interface(True, leaf * 2, "moe_act") as x:
        y = x.sin()
    y = Interface.group_commit(y, "moe_act")
    del x
    Interface.reset_instance()
    y.sum().backward()
    assert_identical(list(grads(leaf)), [(leaf.detach() * 2).cos() * 2])
    assert iteration(anywhere) == [[True] * 6]


def test_chunks_and_groups_can_be_read(here: Home) -> None:
    here.chunk()
    assert here.current.is_empty_chunk()
    loss, chunk = stack(2, here)
    assert not chunk.is_empty_chunk()
    assert not chunk.is_empty_chunk("moe_act")
    assert chunk.is_empty_chunk("qkv_linear")
    first, second = (chunk.find_group_with_name("moe_act", start) for start in (0, 2))
    assert first == chunk.offload_groups[1]
    assert second == chunk.offload_groups[3]
    assert chunk.find_group_with_name("moe_act", 4) is None
    assert chunk.get_max_deduplicated_groups() == 2
    assert chunk.do_offload
    assert (first.offload, first.total_offload_bytes, first.total_tensor_count) == (True, 4 * ACTIVATION, 1)
    loss.backward()
    assert here.manager.cur_backward_chunk() is chunk


def test_the_streams_are_the_sessions_lanes(here: Home) -> None:
    lanes = here.session.runtime(torch.device("cpu")).mover.streams
    assert (here.manager.d2h_stream, here.manager.h2d_stream) == lanes
    assert here.manager.cpu_tensor_pool is here.manager.cpu_tensor_pool
    taken = here.manager.cpu_tensor_pool.allocate((3,))
    Interface.reset()
    assert here.manager.cpu_tensor_pool.allocate((3,)) is taken


def test_host_memory_is_shared_by_chunks_and_reused(here: Home) -> None:
    reserved = []
    for _ in range(3):
        iteration(here, chunks=3)
        reserved.append(here.session.host_bytes)
    assert reserved[0] == reserved[1] == reserved[2]


# M13: CUDA graphs, as far as a CPU can tell.


def test_on_the_cpu_records_are_identities(here: Home) -> None:
    x = torch.ones(3, requires_grad=True)
    event = object()
    assert megatron.fine_grained_offloading_backward_record(x, event) is x
    assert Interface.backward_record(x) is x
    megatron.fine_grained_offloading_forward_record(event)
    Interface.forward_record(event)
    Interface.forward_record()


class Noted:
    """An event that notes when it is recorded."""

    def __init__(self) -> None:
        self.count = 0

    def record(self) -> None:
        self.count += 1


@contextlib.contextmanager
def as_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Home, AdversaryBackend]]:
    """The adversary, whose tensors are taken for those of an accelerator."""
    adversary = AdversaryBackend()
    monkeypatch.setattr(spillway.Session, "_default", None)
    for module in (megatron, megatron.manager):
        monkeypatch.setattr(module, "which_device", lambda: torch.device("cuda", 0))
    with spillway.Session(window=64 * KiB, backend=adversary.serve, spill_directory=tmp_path) as session:
        session.use_as_default()
        session._runtimes[torch.device("cuda", 0)] = session.runtime(torch.device("cpu"))  # type: ignore[assignment]
        yield Home(session, "host", EventList()), adversary
        del session._runtimes[torch.device("cuda", 0)]


def test_records_record_their_event_and_wait_for_their_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with as_accelerator(tmp_path, monkeypatch) as (home, adversary):
        waits: list[Any] = []
        lanes = home.session.runtime(torch.device("cpu")).mover.streams
        monkeypatch.setattr(adversary, "wait", lambda lane, event: waits.append((lane, event.line)))
        compute, event = adversary.compute(), Noted()
        Interface.forward_record(event)
        assert (waits.pop(), event.count) == ((compute, lanes[0]), 1)
        leaf = torch.ones(3, requires_grad=True)
        for forms in (megatron.fine_grained_offloading_backward_record, Interface.backward_record):
            out = forms(leaf * 2, event)
            assert waits == []
            out.sum().backward()
            assert waits.pop() == (adversary.compute(), lanes[1])
        Interface.forward_record()
        Interface.backward_record(leaf * 2).sum().backward()
        assert (len(waits), event.count) == (2, 3)
        assert_identical(list(grads(leaf)), [torch.full((3,), 6.0)])


def test_the_event_for_graphs_is_recorded_where_none_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    def make(device: torch.device) -> Noted:
        made.append(device)
        return Noted()

    monkeypatch.setattr(megatron.manager, "_make_event", make)
    monkeypatch.setattr(megatron.manager, "_make_stream", make)
    with as_accelerator(tmp_path, monkeypatch) as (home, _):
        Interface.forward_record()
        event = Interface.cuda_graph_event()
        assert event is Interface.cuda_graph_event() is home.manager.cuda_graph_event
        Interface.forward_record()
        assert event.count == 1
        Interface.backward_record(torch.ones(3, requires_grad=True) * 2).sum().backward()
        assert event.count == 2
        Interface.forward_record(Noted())
        assert event.count == 2
        assert Interface.cuda_graph_stream() is home.manager.cuda_graph_stream
        assert made == [torch.device("cuda", 0)] * 2


@pytest.mark.skipif(torch.accelerator.is_available(), reason="looks for no accelerator")
def test_without_an_accelerator_there_is_no_stream_and_no_event_for_graphs(here: Home) -> None:
    assert Interface.cuda_graph_stream() is None
    assert Interface.cuda_graph_event() is None


def forward_of_layers(
    home: Home, layers: nn.ModuleList, x: Tensor, *, on: bool = True, recorded: bool = True
) -> Tensor:
    """A chunk as it is captured: backward ends, and forward does, with a wait for a lane."""
    if on:
        home.chunk()
    hidden = Interface.backward_record(x * 1, Noted()) if on and recorded else x * 1
    for layer in layers:
        hidden = layer(hidden, on)
    if on and recorded:
        Interface.forward_record(Noted())
    return hidden.square().sum()


@pytest.mark.parametrize("whole", [False, True])
def test_a_layer_or_an_iteration_may_be_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """The adversary has the rules of captures: one ends with a single stream. Nothing is replayed."""
    with as_accelerator(tmp_path, monkeypatch) as (home, adversary):
        layers = nn.ModuleList(Layer(Dense(), direct) for _ in range(3))
        x = torch.randn(ROWS, WIDTH, requires_grad=True)

        def gradients() -> list[Tensor]:
            found = [gradient.clone() for gradient in grads(x, *layers.parameters())]
            for leaf in (x, *layers.parameters()):
                leaf.grad = None
            return found

        forward_of_layers(home, layers, x, on=False).backward()
        expected = gradients()
        for _ in range(2):  # host memory is registered before a capture
            forward_of_layers(home, layers, x).backward()
            Interface.reset()
            gradients()
        if whole:
            with adversary.capturing():
                forward_of_layers(home, layers, x).backward()
                Interface.reset()
        else:
            with adversary.capturing():
                loss = forward_of_layers(home, layers, x)
            with adversary.capturing():
                loss.backward()
            del loss
            Interface.reset()
        assert_identical(gradients(), expected)
        adversary.check()
        home.session.release_graphs()


def test_without_a_record_a_capture_ends_with_two_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.ModuleList(Layer(Dense(), direct) for _ in range(2))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    alive: list[Tensor] = []
    # Closing finds the copy that nobody waited for once more.
    with contextlib.suppress(spillway.RaceError), as_accelerator(tmp_path, monkeypatch) as (home, adversary):
        forward_of_layers(home, layers, x).backward()
        with adversary.capturing():
            alive.append(forward_of_layers(home, layers, x, recorded=False))
    assert "a capture ended while compute had not waited for all that is on out" in str(adversary.faults[0])


# M14: the table.


def test_the_table_has_ranks_groups_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    megatron.print_offload_summary_table({"moe_act": 3 << 20, "attn_norm": 1 << 19})
    assert capsys.readouterr().out.splitlines() == [
        "offloaded, MiB:",
        "rank  attn_norm moe_act total",
        "0          0.50    3.00  3.50",
        "total      0.50    3.00  3.50",
    ]
    megatron.print_offload_summary_table({})
    assert "total" in capsys.readouterr().out


def test_in_a_process_group_the_first_rank_prints_what_all_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = spillway.StepStats(offloaded_bytes=1 << 20, groups=(spillway.GroupStats("b", offloaded_bytes=1 << 20),))

    process_group = object()

    def gather(rows: list[Any], own: Any, group: Any) -> None:
        assert group in (None, process_group)
        redundant = {"b": (2, 3 << 20), "c": (0, 0)} if group is process_group else {}
        others = redundant if isinstance(own, dict) else spillway.SummaryRow(1 - dist.get_rank(), other)
        rows[:] = [own, others] if dist.get_rank() == 0 else [others, own]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        megatron.print_offload_summary_table({"a": 2 << 20})
        printed = capsys.readouterr().out.splitlines()
        assert [line.split() for line in printed[2:]] == [
            ["0", "2.00", "0.00", "2.00"],
            ["1", "0.00", "1.00", "1.00"],
            ["total", "2.00", "1.00", "3.00"],
        ][: 3 * (rank == 0)]
        megatron.print_offload_summary_table({"a": 2 << 20}, {"a": (1, 1 << 20)}, process_group=process_group)
        assert (
            capsys.readouterr().out.splitlines()
            == [
                *printed,
                "redundant copies:",
                "rank 0, a: 1, 1.0 MiB",
                "rank 1, b: 2, 3.0 MiB",
            ][: 8 * (rank == 0)]
        )


def test_a_process_group_without_rank_0_prints_on_its_first_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gather(rows: list[Any], own: Any, group: Any) -> None:
        rows[:] = [{}, {}] if isinstance(own, dict) else [spillway.SummaryRow(rank, None) for rank in (2, 3)]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    for rank in (2, 3):
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        megatron.print_offload_summary_table({}, {}, process_group=object())
        assert bool(capsys.readouterr().out) == (rank == 2)


def test_a_debug_message_is_printed_on_one_rank_while_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (megatron.DEBUG, megatron.DEBUG_RANK) == (False, 0)
    megatron.debug_rank("silent")
    monkeypatch.setattr(megatron, "DEBUG", True)
    megatron.debug_rank("told")
    monkeypatch.setattr(megatron, "DEBUG_RANK", 1)
    megatron.debug_rank("elsewhere")
    assert capsys.readouterr().out == "told\n"


# The pool.


def test_a_pool_hands_out_again_what_came_back() -> None:
    pool = GPUTensorPool("cpu")
    first, second = pool.allocate((2, 3)), pool.allocate(torch.Size([2, 3]), dtype=torch.float32)
    assert (first.shape, first.dtype, first.device.type) == ((2, 3), torch.float32, "cpu")
    assert first is not second
    pool.free(first)
    assert pool.allocate((3, 2)) is not first
    assert pool.allocate((2, 3), torch.bfloat16) is not first
    assert pool.allocate((2, 3)) is first
    status = pool.get_pool_status((2, 3), torch.float32)
    assert status == {
        "shape": (2, 3),
        "dtype": torch.float32,
        "total_count": 2,
        "allocated_count": 2,
        "free_count": 0,
        "utilization": 100.0,
    }
    pool.free(second)
    assert pool.get_pool_status((2, 3), torch.float32)["utilization"] == 50.0
    everything = pool.get_pool_status()
    assert everything["global_stats"] == {
        "total_allocated": 4,
        "current_in_use": 3,
        "allocation_requests": 5,
        "free_requests": 2,
        "pool_hits": 1,
        "pool_misses": 4,
    }
    assert set(everything["pools"]) == {((2, 3), torch.float32), ((3, 2), torch.float32), ((2, 3), torch.bfloat16)}
    assert everything["pools"][(2, 3), torch.float32] == pool.get_pool_status((2, 3), torch.float32)


def test_a_pool_refuses_what_is_not_handed_out() -> None:
    pool = GPUTensorPool("cpu")
    tensor = pool.allocate((2,))
    for foreign in (torch.empty(2), torch.empty(5), tensor.view(2)):
        with pytest.raises(ValueError, match="free: this tensor of shape"):
            pool.free(foreign)
    pool.free(tensor)
    with pytest.raises(ValueError, match="is not in use") as caught:
        pool.free(tensor)
    assert isinstance(caught.value, spillway.SpillwayError)
    with pytest.raises(ValueError, match="without a dtype"):
        pool.get_pool_status((2,))
    with pytest.raises(ValueError, match="nothing of shape"):
        pool.get_pool_status((3,), torch.float32)


def test_a_pool_is_reset_and_cleared() -> None:
    pool = GPUTensorPool("cpu")
    tensor = pool.allocate((2,))
    pool.reset()
    assert pool.get_pool_status()["global_stats"]["current_in_use"] == 0
    assert pool.allocate((2,)) is tensor
    reference = weakref.ref(tensor)
    del tensor
    pool.clear()
    assert reference() is None
    assert pool.get_pool_status()["pools"] == {}
    reference = weakref.ref(pool.allocate((2,)))
    assert reference() is not None
    del pool
    assert reference() is None
    assert GPUTensorPool().device == torch.device("cuda")


# M2, M17, M19, M21.


def test_any_module_is_a_group_by_a_pattern_without_an_edit(here: Home) -> None:
    model = nn.ModuleDict({"embedding": nn.Linear(WIDTH, WIDTH), "mlp": nn.Linear(WIDTH, WIDTH)})
    model.head = nn.Linear(WIDTH, WIDTH)
    model.forward = lambda x: model.head(model["mlp"](model["embedding"](x).sin()).sin()).sum()  # type: ignore[method-assign]
    del model.forward

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = model.head(model["mlp"](model["embedding"](x).sin()).sin()).sum()
            return out

    whole, x = Whole(), torch.randn(ROWS, WIDTH)
    whole(x).backward()
    expected = [gradient.clone() for gradient in grads(*whole.parameters())]
    whole.zero_grad()
    patterns = {"embedding": "*.embedding", "mlp": "*.mlp", "logits": "*.head"}
    with spillway.attach(whole, groups=patterns, min_bytes=0) as attached:
        whole(x).backward()
        assert {group.name: group.saved_bytes for group in attached.stats().groups} == dict.fromkeys(
            patterns, ROWS * WIDTH * 4
        )
    assert_identical(list(grads(*whole.parameters())), expected)


RECOMPUTE: dict[str, Callable[..., Tensor]] = {
    "checkpoint": lambda function, *args: checkpoint(function, *args, use_reentrant=False),
    "reentrant checkpoint": lambda function, *args: checkpoint(function, *args, use_reentrant=True),
    "region": lambda function, *args: spillway.recompute(function, *args),
}


@pytest.mark.parametrize("how", RECOMPUTE)
def test_other_modules_may_be_recomputed_inside_of_a_group(anywhere: Home, how: str) -> None:
    expected = iterate(parts(), PLANS["1F1B"])
    model = parts(core=RECOMPUTE[how])
    for _ in range(2):
        assert_identical(iterate(model, PLANS["1F1B"], anywhere.chunk), expected)
        Interface.reset()


def test_regions_and_groups_of_the_engine_inside_belong_to_the_chunk(here: Home) -> None:
    here.chunk()
    leaf = torch.ones(ACTIVATION, requires_grad=True)
    with Interface(True, leaf * 1, "core_attn") as x:
        y = spillway.recompute(torch.sin, x, offload="inputs")
        with spillway.group("inner"):
            y = y.cos()
    Interface.group_commit(y, "core_attn")
    assert [group.name for group in here.current.offload_groups] == ["core_attn", "inner"]
    assert here.current.stats().offloaded_bytes == 2 * 4 * ACTIVATION
    y.sum().backward()


@pytest.mark.parametrize("how", RECOMPUTE)
@pytest.mark.parametrize("disabled", [False, True])
def test_a_whole_layer_with_its_groups_may_be_recomputed(anywhere: Home, how: str, disabled: bool) -> None:
    """Its second run starts and commits nothing, also where offloading was disabled or reset in between."""
    layer = Layer(Experts(), direct)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    layer(x, False).sum().backward()
    expected = [gradient.clone() for gradient in grads(x, *layer.parameters())]
    for leaf in (x, *layer.parameters()):
        leaf.grad = None
    anywhere.chunk()
    loss = RECOMPUTE[how](lambda x: layer(x, True), x * 1).sum()
    begun = len(anywhere.current.offload_groups)
    if disabled:
        Interface.disable_offload()
    loss.backward()
    Interface.enable_offload()
    assert_identical(list(grads(x, *layer.parameters())), expected)
    assert len(anywhere.current.offload_groups) == begun


def test_a_groups_leaving_shows_by_its_name_in_a_trace(here: Home) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss, _ = stack(2, here)
        loss.backward()
    labels = {event.name for event in profile.events() if event.name.startswith("spillway.")}
    assert {"spillway.leave mlp_norm", "spillway.leave moe_act", "spillway.take"} <= labels


def test_transformer_engine_is_told_inside_where_it_is_installed(here: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = types.ModuleType("cpu_offload")
    engine.CPUOffloadEnabled = False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.cpu_offload", engine)
    x = torch.ones(3, requires_grad=True)
    with Interface(True, x, "moe_act"):
        assert not engine.CPUOffloadEnabled
    here.chunk()
    with contextlib.suppress(ZeroDivisionError), Interface(True, x, "moe_act"):
        assert engine.CPUOffloadEnabled
        raise ZeroDivisionError
    assert not engine.CPUOffloadEnabled


# The page.


EQUIVALENT = {
    *(f"FineGrainedOffloading{each}Function" for each in ("GroupStart", "GroupCommit", "BackwardRecord")),
    *("_get_pool_key", "_calculate_memory_size"),
    *("push_tensor", "pop_tensor", "update_offload_info"),
    *(f"{what}_{way}_event" for what in ("record", "wait") for way in ("offload", "reload")),
    *("OFFLOAD_MGR", "push", "flush", "push_offload_groups", "pop_forward_chunk", "pop_backward_chunk"),
    *("front_backward_chunk", "post_warmup_callback", "on_save_for_backward", "on_get_saved_tensor"),
    *("offload", "reload", "reset", "tensor_push", "tensor_pop", "find_next_group", "finish_all_groups"),
    *("should_bulk_offload", "bulk_offload", "bulk_offload_group", "bulk_reload", "bulk_reload_group"),
    "pre_reload_last_layer",
    *(f"on_group_{what}_{way}" for what in ("start", "commit") for way in ("forward", "backward")),
    *("cpu_optimizers", "gpu_optimizer", "sub_optimizers", "build_cpu_optimizer_list", "sub_optimizer_kwargs"),
    *("cpu_param_groups", "gpu_param_groups", "gpu_params_map_cpu_copy", "cpu_copys_map_gpu_param"),
    *("param_to_fp32_param", "fp32_param_to_orig_param", "param_to_inner_param", "inner_param_to_orig_param"),
    *("cpu_copy_map_grad", "master_param", "decoupled_grad", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"),
    *("step", "duplicate_storage_tensor_count", "duplicate_storage_bytes"),
}
CLASSES = (
    Interface,
    PipelineOffloadManager,
    ChunkOffloadHandler,
    OffloadTensorGroup,
    OffloadTensorPool,
    HybridDeviceOptimizer,
)


def test_the_page_says_of_every_name_what_it_is_here() -> None:
    page = (ROOT / "docs" / "compat" / "megatron.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)", row[0])}
    names = set(megatron.__all__) | EQUIVALENT
    for each in CLASSES:
        names |= {name for name in vars(each) if not name.startswith("_")}
    for function in (
        Interface,
        Interface.init_chunk_handler,
        Interface.group_commit,
        Interface.backward_record,
        ChunkOffloadHandler.find_group_with_name,
        PipelineOffloadManager.init_model_chunk_offload_handler,
        megatron.print_offload_summary_table,
        Interface.reset,
        OffloadTensorPool,
        HybridDeviceOptimizer,
    ):
        names |= set(inspect.signature(function).parameters) - {"self", "newer", "options"}
    names |= {"min_offloaded_tensor_size", "offloading_activation", "_TE_do_not_offload"}
    assert names - told == set()
    assert told - names == set()
    assert all(len(row) == 2 and row[1].strip() for row in rows)
    assert "compat/megatron.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_all_is_what_is_there() -> None:
    public = {
        name
        for name, value in vars(megatron).items()
        if getattr(value, "__module__", "").startswith(megatron.__name__) and not name.startswith("_")
    }
    assert public | {"DEBUG", "DEBUG_RANK"} == set(megatron.__all__)
    for each in (*CLASSES, *(getattr(megatron, name) for name in megatron.__all__ if not name.startswith("DEBUG"))):
        assert inspect.getdoc(each)
