"""TRL's names over our engine: its order of arguments, its heads, and its trainer with our context."""

from __future__ import annotations

import gc
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spillway
from spillway import EventKind, EventList
from spillway.compat import torchtune, trl
from support import Saves, assert_identical, assert_nothing_left, grads, mlp

ROOT = Path(__file__).parent.parent.parent
HEAD_INPUT = 64 * 32 * 4
"""Bytes that the head of a :class:`Stack` saves and nothing else does."""


@pytest.fixture
def events() -> EventList:
    return EventList()


@pytest.fixture
def session(tmp_path: Path, events: EventList) -> Iterator[spillway.Session]:
    with spillway.Session(window=0, spill_directory=tmp_path, recorder=events) as made:
        yield made
        gc.collect()
        assert_nothing_left(made)
        assert not torchtune._entered()


def left(events: EventList) -> int:
    """How many tensors of 1 KiB or more were offloaded."""
    return sum(event.kind is EventKind.LEAVE and event.nbytes >= 1024 for event in events.events)


class Stack(nn.Module):
    """A body and a head, or several, by any path."""

    def __init__(self, *paths: str) -> None:
        super().__init__()
        self.body = mlp(32, 32, 32)
        self.paths = paths
        for path in paths:
            *outer, last = path.split(".")
            holder: nn.Module = self
            for name in outer:
                if not hasattr(holder, name):
                    holder.add_module(name, nn.Module())
                holder = getattr(holder, name)
            holder.add_module(last, nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        for path in self.paths:
            x = self.get_submodule(path)(x).exp()
        return x


def exponentials() -> torch.Tensor:
    """A loss, for which autograd saves two tensors: a storage leaves when the next one wants its place."""
    return torch.ones(2, requires_grad=True).exp().exp().sum()


def step(model: nn.Module, context: Any) -> list[torch.Tensor]:
    batch = torch.linspace(-1, 1, 64 * 32).reshape(64, 32)
    model.zero_grad()
    with context:
        loss = model(batch).sum()
    loss.backward()
    return [gradient.clone() for gradient in grads(*model.parameters())]


@pytest.mark.parametrize("name", ["OffloadActivations", "get_act_offloading_ctx_manager"])
def test_signatures_are_those_of_the_trl_that_is_installed(name: str) -> None:
    theirs = pytest.importorskip("trl.models.activation_offloading", reason="trl is not installed")

    def arguments(function: Callable[..., Any]) -> list[tuple[str, Any]]:
        return [(each.name, each.default) for each in inspect.signature(function).parameters.values()]

    ours = inspect.signature(getattr(trl, name)).parameters.values()
    assert arguments(getattr(theirs, name)) == [
        (each.name, each.default) for each in ours if each.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert (
        arguments(trl.OffloadActivations.update_model_params)[1:]
        == arguments(theirs.OffloadActivations.update_model_params)[1:]
    )


def test_the_third_argument_is_a_size_and_the_fourth_a_stash(session: spillway.Session) -> None:
    context = trl.OffloadActivations(True, False, 2048, 3, session=session)
    assert (context.min_tensor_size_bytes, context.max_fwd_stash_size) == (2048, 3)
    assert (context.use_pin_memory, context.use_streams) == (True, False)
    made = trl.get_act_offloading_ctx_manager(Stack("head"), True, False, 2048, 3, session=session)
    assert (made.min_tensor_size_bytes, made.max_fwd_stash_size, made.use_streams) == (2048, 3, False)
    other = torchtune.OffloadActivations(True, False, 3, 2048, session=session)
    assert (other.min_tensor_size_bytes, other.max_fwd_stash_size) == (2048, 3)
    with pytest.raises(ValueError, match="max_fwd_stash_size: got 0"):
        trl.OffloadActivations(True, True, 1024, 0)


def test_tensors_of_fewer_bytes_stay(session: spillway.Session, events: EventList) -> None:
    for size, leaves in ((4096, 1), (4097, 0)):
        before = left(events)
        with trl.OffloadActivations(True, True, size, tier="host", session=session):
            loss = torch.ones(1024, requires_grad=True).exp().sum()
        assert left(events) - before == leaves
        loss.backward()


def around(model: nn.Module, session: spillway.Session, **options: Any) -> trl.OffloadActivations:
    return trl.get_act_offloading_ctx_manager(model, min_offload_size=0, tier="host", session=session, **options)


@pytest.mark.parametrize("path", [*trl._HEADS, "liger_loss", "inner.LigerHead"])
def test_what_the_head_saves_stays_and_all_else_leaves(session: spillway.Session, path: str) -> None:
    model = Stack(path)
    expected = step(model, trl.NoOpManager())
    everything = trl.OffloadActivations(True, True, 0, tier="host", session=session)
    assert_identical(step(model, everything), expected)
    context = around(model, session, warn_if_no_head="liger" not in path.lower())
    assert_identical(step(model, context), expected)
    assert everything.stats().offloaded_bytes - context.stats().offloaded_bytes == HEAD_INPUT


@pytest.mark.parametrize(
    ("paths", "spared"),
    [
        (["ln_f", "lm_head"], ["lm_head"]),
        (["final_layer_norm", "decoder.lm_head"], ["decoder.lm_head"]),
        (["ln_f", "head"], ["ln_f"]),
        (["liger_loss", "lm_head"], ["lm_head", "liger_loss"]),
    ],
    ids=str,
)
def test_one_head_and_every_module_of_liger_are_spared_once(
    session: spillway.Session, paths: list[str], spared: list[str]
) -> None:
    model = Stack(*paths)
    for _ in range(2):
        context = around(model, session)
    assert {
        name: len(module._forward_hooks) for name, module in model.named_modules() if module._forward_hooks
    } == dict.fromkeys(spared, 1)
    assert_identical(step(model, context), step(model, trl.NoOpManager()))


def test_a_model_without_a_head_is_a_warning_that_can_be_left_out(session: spillway.Session) -> None:
    with pytest.warns(UserWarning, match=r"Sequential has no output head .*final_layer_norm, ln_f, head") as caught:
        trl.get_act_offloading_ctx_manager(mlp(8, 8), session=session)
    assert caught[0].filename == __file__
    trl.get_act_offloading_ctx_manager(mlp(8, 8), warn_if_no_head=False, session=session)


def test_parameters_stay_in_every_form_once_their_model_was_seen(session: spillway.Session, events: EventList) -> None:
    model, leaf = mlp(64, 64), torch.ones(1, requires_grad=True)
    weight = model[0].weight
    context = trl.OffloadActivations(True, True, 0, tier="host", session=session)
    for leaves in (1, 0):
        before = left(events)
        with context:
            saves = Saves.apply(leaf, weight.detach().t(), weight.data[:32]).sum()
            after = exponentials()
        assert left(events) - before == leaves
        (saves + after).backward()
        context.update_model_params(model)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_the_local_part_of_a_distributed_parameter_stays(
    session: spillway.Session, events: EventList, one_rank: None
) -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    model = Stack("ln_f")
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 64), DeviceMesh("cpu", [0]), [Shard(0)]))
    model.register_parameter("weight", weight)
    leaf = torch.ones(1, requires_grad=True)
    with trl.get_act_offloading_ctx_manager(model, min_offload_size=0, tier="host", session=session):
        saves = Saves.apply(leaf, weight, weight.to_local(), weight.to_local().t())
    assert left(events) == 0
    del saves


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_trls_trainer_runs_with_our_context_in_place_of_its_own(
    session: spillway.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = pytest.importorskip("integrations.test_trl", reason="trl is not installed")
    sft = pytest.importorskip("trl.trainer.sft_trainer", reason="trl is not installed")
    plain = tests.trainer_of(tmp_path)
    plain.train()
    made: list[trl.OffloadActivations] = []

    def ours(model: nn.Module) -> trl.OffloadActivations:
        made.append(trl.get_act_offloading_ctx_manager(model, tier="host", session=session))
        return made[-1]

    monkeypatch.setattr(sft, "get_act_offloading_ctx_manager", ours)
    trainer = tests.trainer_of(tmp_path, activation_offloading=True)
    trainer.train()
    assert made[0].stats().offloaded_bytes > 0
    assert tests.same(tests.weights(trainer.model), tests.weights(plain.model))


def test_the_page_says_of_every_name_what_it_is_here() -> None:
    page = (ROOT / "docs" / "compat" / "trl.md").read_text(encoding="utf-8")
    told = {
        name
        for line in page.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`([\w.]+)", line.split("|")[1])
    }
    names = {*trl.__all__, "update_model_params"}
    for public in (trl.OffloadActivations, trl.get_act_offloading_ctx_manager):
        names |= set(inspect.signature(public).parameters)
    names |= {name for name in vars(trl.OffloadActivations()) if not name.startswith("_")}
    assert names - told == set()
    assert all(f"`{head}`" in page for head in trl._HEADS)
    assert "compat/trl.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_page_says_of_every_name_of_the_trl_that_is_installed() -> None:
    theirs = pytest.importorskip("trl.models.activation_offloading", reason="trl is not installed")
    page = (ROOT / "docs" / "compat" / "trl.md").read_text(encoding="utf-8")
    source = inspect.getsource(theirs.OffloadActivations)
    attributes = set(re.findall(r"\bself\.([a-z]\w*)\b(?: =|: )", source))
    names = attributes | {name for name in vars(theirs.OffloadActivations) if not name.startswith("_")}
    assert {name for name in names if f"`{name}`" not in page} == set()
