"""torchtune's names over our engine: each fact of theirs that a program may lean on, and what became of it."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib.util
import inspect
import logging
import pickle
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import spillway
from spillway import EventKind, EventList
from spillway.compat import torchtune
from spillway.compat.torchtune import NoOpManager, OffloadActivations, get_act_offloading_ctx_manager
from spillway.testing import AdversaryBackend
from support import Saves, assert_identical, assert_nothing_left, grads, mlp

ROOT = Path(__file__).parent.parent.parent
KiB = 2**10


class Places:
    """A session, and contexts in it that send the CPU's tensors away too."""

    def __init__(self, session: spillway.Session, tier: str, events: EventList) -> None:
        self.session, self.tier, self.events = session, tier, events

    def __call__(self, **options: Any) -> OffloadActivations:
        return OffloadActivations(**{"tier": self.tier, "session": self.session, **options})

    def around(self, model: nn.Module, **options: Any) -> Any:
        return get_act_offloading_ctx_manager(
            model, True, **{"tier": self.tier, "session": self.session, "min_offload_size": 0, **options}
        )

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.events.events)

    def nbytes(self, kind: EventKind) -> int:
        return sum(event.nbytes for event in self.events.events if event.kind is kind)

    def push_out(self) -> None:
        """A storage leaves when the next one wants its place."""
        with spillway.offload(session=self.session, min_bytes=0, window=0, tier="host", tag="push out"):
            pushing = torch.ones(2, requires_grad=True).exp()
        del pushing


@contextlib.contextmanager
def places(tmp_path: Path, tier: str, window: int, *, adversary: bool = False) -> Iterator[Places]:
    backend = AdversaryBackend() if adversary else None
    more: dict[str, Any] = {} if backend is None else {"backend": backend.serve}
    events = EventList()
    with spillway.Session(
        window=window, spill_directory=tmp_path, allow_memory_filesystem=True, recorder=events, **more
    ) as session:
        yield Places(session, tier, events)
        gc.collect()
        if backend is not None:
            backend.check()
        assert_nothing_left(session)
        assert not torchtune._entered()


@pytest.fixture(params=["host", "disk", "adversary"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    """Each tier, and the backend that is as late as it may be. Of nothing anything may be left when a test ends."""
    tier = "disk" if request.param == "disk" else "host"
    with places(tmp_path, tier, 0, adversary=request.param == "adversary") as made:
        yield made


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Places]:
    with places(tmp_path, "host", 0) as made:
        yield made


@pytest.fixture
def memory_in_use(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Per cent of the system's memory in use, as psutil has it."""
    real, percent = psutil.virtual_memory, [10.0]
    monkeypatch.setattr(psutil, "virtual_memory", lambda: real()._replace(percent=percent[0]))
    return percent


@pytest.fixture(autouse=True)
def _plenty_of_memory(memory_in_use: list[float]) -> None:
    """Whatever the machine does, no test but that of the warning gets one."""


def exponentials(count: int, nbytes: int = 4 * KiB) -> torch.Tensor:
    """A loss for which autograd saves so many tensors, each of so many bytes."""
    return torch.stack([torch.ones(nbytes // 4, requires_grad=True).exp().sum() for _ in range(count)]).sum()


# A stack of decoder layers, as transformers has them.


def llama() -> tuple[nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).train(), torch.randint(96, (2, 24))


def train(context: AbstractContextManager[Any], how: str, *, inside: bool, steps: int = 2) -> list[torch.Tensor]:
    """Losses and gradients of some steps, under one context that is entered again for each."""
    model, tokens = llama()
    results: list[torch.Tensor] = []
    with contextlib.ExitStack() as stack:
        if how.startswith("checkpoint"):
            model.gradient_checkpointing_enable({"use_reentrant": how == "checkpoint-reentrant"})
        elif how == "recompute":
            attached = spillway.attach(
                model, policy=spillway.Recompute(offload=["inputs", spillway.saved_by("attention")])
            )
            stack.callback(attached.remove)
        elif how == "around":
            get_act_offloading_ctx_manager(model, True)
        for _ in range(steps):
            model.zero_grad()
            with context:
                loss = model(tokens, labels=tokens).loss
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            results += [loss.detach(), *(gradient.clone() for gradient in grads(*model.parameters()))]
    return results


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
@pytest.mark.parametrize("how", ["plain", "checkpoint", "checkpoint-reentrant", "recompute", "around"])
def test_losses_and_gradients_of_a_llama_are_those_of_plain_pytorch(anywhere: Places, how: str, inside: bool) -> None:
    expected = train(contextlib.nullcontext(), how="plain", inside=inside)
    context = anywhere()
    assert_identical(train(context, how, inside=inside), expected)
    assert context.stats().offloaded_bytes > 0
    # What is saved first is away when backward comes to it.
    assert anywhere.count(EventKind.TAKE) > 0


# T1, T2, T15: construction.


def test_it_is_constructed_as_theirs_is() -> None:
    parameters = list(inspect.signature(OffloadActivations).parameters.values())
    theirs = {each.name: each.default for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert list(theirs.items()) == [
        ("use_pin_memory", True),
        ("use_streams", True),
        ("max_fwd_stash_size", 5),
        ("min_offload_size", 1024),
    ]


@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_one_object_is_entered_again_every_step(anywhere: Places, inside: bool) -> None:
    context = anywhere()
    for _ in range(4):
        leaf = torch.linspace(0, 1, 4096, requires_grad=True)
        with context:
            loss = leaf.exp().sin().exp().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        plain = torch.linspace(0, 1, 4096, requires_grad=True)
        plain.exp().sin().exp().sum().backward()
        assert_identical(list(grads(leaf)), list(grads(plain)))
        assert context.stats().offloaded_bytes > 0


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("size", [0, -1, 1.5, None])
def test_a_stash_of_less_than_one_is_a_value_error_and_one_of_ours(size: Any, streams: bool) -> None:
    with pytest.raises(ValueError, match=f"max_fwd_stash_size: got {size}, expected at least 1") as caught:
        OffloadActivations(max_fwd_stash_size=size, use_streams=streams)
    assert isinstance(caught.value, spillway.SpillwayError)


def test_its_attributes_are_theirs_and_count_when_they_are_set(here: Places) -> None:
    context = here(use_pin_memory=False, use_streams=False, max_fwd_stash_size=3, min_offload_size=64)
    assert (context.use_pin_memory, context.use_streams) == (False, False)
    assert (context.max_fwd_stash_size, context.min_tensor_size_bytes) == (3, 64)
    assert context.virtual_memory_safe_pct == 60
    for smallest, kept in ((64, 0), (8 * KiB, 12 * KiB)):
        context.min_tensor_size_bytes = smallest
        with context:
            loss = exponentials(3)
        loss.backward()
        assert context.stats().kept_bytes == kept
    context.max_fwd_stash_size = 0
    with pytest.raises(spillway.UsageError, match="max_fwd_stash_size"):
        context.__enter__()


# T3: what is offloaded.


def test_what_has_at_least_so_many_bytes_is_offloaded(here: Places) -> None:
    context = here(min_offload_size=1024)
    for nbytes, moved in ((1020, 0), (1024, 1024)):
        with context:
            loss = exponentials(1, nbytes)
        loss.backward()
        assert context.stats().offloaded_bytes == moved


def test_parameters_and_buffers_stay(here: Places) -> None:
    weight, buffer = nn.Parameter(torch.randn(64, 64)), nn.Buffer(torch.randn(64, 64))
    leaf = torch.ones(1, requires_grad=True)
    with here():
        loss = Saves.apply(leaf, weight, buffer).sum()
    assert here.count(EventKind.LEAVE) == 0
    loss.backward()


def test_without_an_accelerator_it_is_made_and_entered_and_does_nothing(tmp_path: Path) -> None:
    with spillway.Session(window=0) as session:
        context = OffloadActivations(session=session)
        with context:
            loss = exponentials(3)
        loss.backward()
        assert context.stats().offloaded_bytes == 0
        assert session.disk_bytes == session.host_bytes == 0
        assert session._file is None
        del loss
        assert_nothing_left(session)


def test_only_an_accelerators_tensors_leave_unless_a_tier_is_named() -> None:
    record = spillway.SavedTensor(4096, torch.Size([1024]), torch.float32, torch.device("cpu"), 0, None, 0, None)
    assert torchtune._on_accelerators(record) is spillway.Decision.KEEP
    for name in ("cuda:0", "xpu:1", "mtia:0"):
        away = record._replace(device=torch.device(name))
        assert torchtune._on_accelerators(away) is spillway.Decision.OFFLOAD


def test_the_disk_tier_takes_the_cpus_tensors_too(tmp_path: Path) -> None:
    with places(tmp_path, "disk", 0) as there:
        with there():
            loss = exponentials(3)
        there.push_out()
        assert there.session.used_bytes[1] > 0
        loss.backward()
        del loss


# T4, T5: lanes and the stash.


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("streams", [True, False])
def test_streams_and_pinning_may_be_on_or_off(anywhere: Places, streams: bool, pinned: bool) -> None:
    expected = train(contextlib.nullcontext(), "plain", inside=False, steps=1)
    context = anywhere(use_streams=streams, use_pin_memory=pinned)
    assert_identical(train(context, "plain", inside=False, steps=1), expected)
    assert context.stats().offloaded_bytes > 0


@pytest.mark.parametrize(("size", "streams", "held"), [(1, True, 2), (5, True, 10), (10, True, 20), (5, False, 1)])
def test_a_stash_is_held_as_fifths_of_the_window(tmp_path: Path, size: int, streams: bool, held: int) -> None:
    """Ten of the tensors fill the session's window."""
    with places(tmp_path, "host", 40 * KiB) as there:
        with there(max_fwd_stash_size=size, use_streams=streams) as context:
            loss = exponentials(24)
        assert there.count(EventKind.LEAVE) == 24
        assert there.count(EventKind.RELEASE) == 24 - held
        loss.backward()
        del loss
        # What is still there is used as it is; the rest comes back.
        assert there.count(EventKind.REUSE) == held
        assert context.stats().reused_bytes == held * 4 * KiB
        assert context.stats().reloaded_bytes == (24 - held) * 4 * KiB


# T6: the system's memory.


def test_too_much_memory_in_use_is_said_once_in_the_life_of_the_object(
    here: Places, memory_in_use: list[float]
) -> None:
    context = here()
    memory_in_use[0] = 87.5
    with context:
        loss = exponentials(3)
    with pytest.warns(UserWarning, match=r"87.5 % of the system's memory is in use, more than 60 %"):
        loss.backward()
    with context:
        loss = exponentials(3)
    loss.backward()


@pytest.mark.parametrize(("percent", "safe", "pinned"), [(60.0, 60, True), (87.5, 90, True), (87.5, 60, False)])
def test_as_much_memory_in_use_as_is_safe_is_not_said(
    here: Places, memory_in_use: list[float], percent: float, safe: float, pinned: bool
) -> None:
    context = here(use_pin_memory=pinned)
    context.virtual_memory_safe_pct = safe
    memory_in_use[0] = percent
    with context:
        loss = exponentials(3)
    loss.backward()
    # It is looked at once: what is used later is not said either.
    memory_in_use[0] = 99.0
    with context:
        loss = exponentials(3)
    loss.backward()


# T7, T13: what came back lives as long as somebody uses it, and no longer.


class GivesViews(torch.autograd.Function):
    """Its gradients are views of what it saved."""

    @staticmethod
    def forward(ctx: Any, first: torch.Tensor, second: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return (first * second).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        upper, lower = saved.chunk(2)
        return upper, lower.t().contiguous().t() if gradient.numel() > 1 else lower, None


def test_gradients_that_are_views_of_what_came_back_stay_valid(anywhere: Places) -> None:
    leaves = [torch.ones(8, 16, requires_grad=True) for _ in range(2)]
    wanted = torch.randn(16, 16)
    with anywhere():
        loss = GivesViews.apply(*leaves, wanted.clone())
    anywhere.push_out()
    loss.backward()
    del loss
    # What would be written over them, were their memory given back.
    for _ in range(3):
        with anywhere():
            again = exponentials(6, 1024)
        again.backward()
    del again
    assert_identical(list(grads(*leaves)), list(wanted.chunk(2)))
    del leaves


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_views_that_a_checkpoints_second_run_saves_of_what_came_back_stay_valid(
    anywhere: Places, reentrant: bool
) -> None:
    def block(hidden: torch.Tensor) -> torch.Tensor:
        upper, lower = hidden.chunk(2)
        return torch.cat([upper @ lower.t(), lower.sin() @ upper.cos().t()]) * hidden[:, :8].exp()

    def step(context: AbstractContextManager[Any]) -> Iterator[torch.Tensor]:
        leaf = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with context:
            hidden = leaf * 1
            for _ in range(3):
                hidden = checkpoint(block, hidden, use_reentrant=reentrant).tanh()
            loss = hidden.square().sum()
        del hidden
        loss.backward()
        yield from grads(leaf)

    assert_identical(list(step(anywhere(min_offload_size=0))), list(step(contextlib.nullcontext())))
    assert anywhere.count(EventKind.TAKE) > 0


class Watches(torch.autograd.Function):
    """Notes in backward which storages that came back for earlier nodes are alive."""

    seen: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[int] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.clone())
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Watches.alive.append(sum(seen() is not None for seen in Watches.seen))
        (saved,) = ctx.saved_tensors
        Watches.seen.append(weakref.ref(saved.untyped_storage()))
        return gradient * saved


def test_what_came_back_is_freed_after_the_node_that_used_it(here: Places) -> None:
    Watches.seen, Watches.alive = [], []
    with here():
        hidden = torch.randn(1024, requires_grad=True)
        for _ in range(5):
            hidden = Watches.apply(hidden)
        loss = hidden.sum()
    del hidden
    loss.backward()
    assert len(Watches.seen) == 5
    # The last is used as it is, and nothing is fetched ahead with a window of 0.
    assert Watches.alive == [0, 0, 0, 0, 0]
    assert all(seen() is None for seen in Watches.seen)


class RunsAnother(torch.autograd.Function):
    """Reads what it saved before and after a backward of its own, as a checkpoint does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        x, result = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(inner.exp().sum(), inner)
        return gradient * result * 2 - gradient * slope


def test_a_backward_within_a_backward_frees_nothing_of_the_outer_one(anywhere: Places) -> None:
    def step(context: AbstractContextManager[Any]) -> Iterator[torch.Tensor]:
        leaf = torch.linspace(-1, 1, 1024).requires_grad_()
        with context:
            hidden = leaf * 0.5
            for _ in range(4):
                hidden = RunsAnother.apply(hidden).tanh()
            loss = hidden.sum()
        del hidden
        loss.backward()
        yield from grads(leaf)

    assert_identical(list(step(anywhere())), list(step(contextlib.nullcontext())))
    assert anywhere.count(EventKind.TAKE) > 0


# T8: no-op.


def test_the_innermost_manager_wins_and_one_instance_is_entered_again(here: Places) -> None:
    still = NoOpManager()
    with here() as outer:
        kept = [exponentials(1)]
        with still:
            kept.append(exponentials(1))
            with still:
                kept.append(exponentials(1))
            kept.append(exponentials(1))
            with here() as inner:
                kept.append(exponentials(1))
    assert outer.stats().offloaded_bytes == inner.stats().offloaded_bytes == 4 * KiB
    assert here.count(EventKind.LEAVE) == 2
    torch.stack(kept).sum().backward()


# T9: the head.


class Stack(nn.Module):
    """A body and a head by any name."""

    def __init__(self, name: str, head: Any = None) -> None:
        super().__init__()
        self.body = mlp(32, 32, 32)
        self.path = name.split(".")
        setattr(self, self.path[0], head if head is not None else nn.Linear(32, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head: Any = self
        for name in self.path:
            head = getattr(head, name)
        return head(self.body(x)).exp()


class Tied:
    """A head that is no module, and has one."""

    def __init__(self) -> None:
        self.linear = nn.Linear(32, 16)


class Decoder(nn.Module):
    """Has the head of a multimodal model."""

    def __init__(self, head: Any = None) -> None:
        super().__init__()
        self.output = head if head is not None else nn.Linear(32, 16)


class Wrapper(nn.Module):
    """Has another module by some name, which may have dots."""

    def __init__(self, path: str, model: nn.Module) -> None:
        super().__init__()
        first, _, rest = path.partition(".")
        setattr(self, first, Wrapper(rest, model) if rest else model)
        self.inner = (model,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner[0](x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "output": lambda: Stack("output"),
    "lm_head": lambda: Stack("lm_head"),
    "head": lambda: Stack("head"),
    "output.linear": lambda: Stack("output.linear", Tied()),
    "decoder.output": lambda: Stack("decoder.output", Decoder()),
    "decoder.output.linear": lambda: Stack("decoder.output.linear", Decoder(Tied())),
    "PEFT": lambda: Wrapper("base_model.model", Stack("lm_head")),
    "DDP": lambda: Wrapper("module", Stack("output")),
    "DDP and PEFT": lambda: Wrapper("module", Wrapper("base_model.model", Stack("lm_head"))),
    "compiled": lambda: Wrapper("_orig_mod", Stack("output")),
}


def head_hooks(model: nn.Module) -> int:
    return sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in all_modules(model))


def all_modules(model: nn.Module) -> list[nn.Module]:
    tied = [getattr(each, "output", None) for each in model.modules()]
    return [*model.modules(), *(each.linear for each in tied if isinstance(each, Tied))]


@pytest.mark.parametrize("kind", MODELS)
def test_what_the_head_saves_stays_and_all_else_leaves(here: Places, kind: str) -> None:
    model, batch = MODELS[kind](), torch.randn(64, 32)
    model(batch).sum().backward()
    expected = [gradient.clone() for gradient in grads(*model.parameters())]
    model.zero_grad()
    with here(min_offload_size=0) as everything:
        loss = model(batch).sum()
    loss.backward()
    model.zero_grad()
    context = here.around(model)
    with context:
        loss = model(batch).sum()
    loss.backward()
    assert_identical(list(grads(*model.parameters())), expected)
    # The head's input, which nobody else saves.
    assert everything.stats().offloaded_bytes - context.stats().offloaded_bytes == 64 * 32 * 4
    assert head_hooks(model) == 2


def test_a_head_tied_to_the_embedding_of_a_llama_is_found(here: Places) -> None:
    model, tokens = llama()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    context = here.around(model)
    assert head_hooks(model) == head_hooks(model.lm_head) == 2
    with context:
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert context.stats().offloaded_bytes > 0


def test_a_second_call_stacks_no_second_hook_also_on_a_copy_or_pickle(here: Places) -> None:
    model = Stack("output")
    for _ in range(3):
        here.around(model)
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        here.around(same)
        assert head_hooks(same) == 2
        with here.around(same):
            loss = same(torch.randn(8, 32)).sum()
        loss.backward()


def test_disabled_it_is_the_null_context_and_touches_no_model() -> None:
    model = Stack("output")
    with get_act_offloading_ctx_manager(model, False) as nothing:
        assert nothing is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert head_hooks(model) == 0


def test_a_model_without_a_head_is_a_warning_that_can_be_left_out(here: Places) -> None:
    model = mlp(8, 8)
    with pytest.warns(UserWarning, match=r"Sequential has no output head by one of the names"):
        context = here.around(model)
    assert isinstance(context, OffloadActivations)
    here.around(model, warn_if_no_head=False)


def test_registering_is_said_to_the_debug_log_and_not_printed(
    here: Places, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="spillway"):
        here.around(Wrapper("module", Stack("lm_head")))
        here.around(Stack("output"))
    assert [record.levelno for record in caplog.records] == [logging.DEBUG] * 2
    assert "module.lm_head (Linear)" in caplog.messages[0]
    assert capsys.readouterr() == ("", "")


class Fails(nn.Linear):
    """A head that does not work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        raise ZeroDivisionError("in the head")


def test_an_exception_in_the_head_leaves_no_hook(here: Places) -> None:
    model = Stack("output", Fails(32, 16))
    context = here.around(model)
    for _ in range(2):
        with context:
            with pytest.raises(ZeroDivisionError):
                model(torch.randn(8, 32))
            # What comes next is offloaded again, and not the head's.
            loss = exponentials(1)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not torchtune._entered()
        loss.backward()
    gc.collect()


def test_an_exception_before_the_head_was_entered_leaves_the_hooks_of_others(here: Places) -> None:
    def fail(*call: Any) -> None:
        raise ZeroDivisionError("before the head")

    model = Stack("output")
    context = here.around(model)
    model.output.register_forward_pre_hook(fail, prepend=True)
    with context, NoOpManager():
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(8, 32))
        exponentials(1).backward()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    gc.collect()


def test_the_heads_hooks_do_nothing_where_nobody_sees_what_is_saved(here: Places) -> None:
    model, x = Stack("output"), torch.randn(8, 32)
    here.around(model)
    # torch.func allows no saved-tensor hooks: entering one would be an error.
    gradient = torch.func.grad(lambda x: model(x).sum())(x)
    leaf = x.clone().requires_grad_()
    model(leaf).sum().backward()
    assert_identical([gradient], list(grads(leaf)))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_a_head_within_a_checkpoint_counts_the_same_in_both_runs(anywhere: Places, reentrant: bool) -> None:
    model, batch = Stack("output"), torch.randn(64, 32)
    model(batch).sum().backward()
    expected = [gradient.clone() for gradient in grads(*model.parameters())]
    context = anywhere.around(model)
    for region in (
        lambda x: checkpoint(model, x, use_reentrant=reentrant),
        lambda x: spillway.recompute(model, x, session=anywhere.session, use_reentrant=reentrant),
    ):
        model.zero_grad()
        with context:
            loss = region(batch.clone().requires_grad_()).sum()
        loss.backward()
        assert_identical(list(grads(*model.parameters())), expected)


# T10: quantised subclasses.


class NF4Tensor(torch.Tensor):
    """Has what torchao's has as far as autograd is concerned: two tensors, and operators by unpacking."""

    codes: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scales: torch.Tensor) -> NF4Tensor:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scales.dtype, device=codes.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> NF4Tensor:
        return NF4Tensor(parts["codes"], parts["scales"])

    def unpacked(self) -> torch.Tensor:
        return self.codes.to(self.scales.dtype) * self.scales

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes, args[0].scales)
        return func(*pytree.tree_map_only(cls, cls.unpacked, args), **(kwargs or {}))


NF4Tensor.__module__ = "torchao.dtypes.nf4tensor"


def quantised() -> NF4Tensor:
    return NF4Tensor(torch.arange(-128, 128, dtype=torch.int8).repeat(16, 1), torch.linspace(0.1, 1, 16)[:, None])


def with_torchao(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = types.ModuleType("torchao")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchao", module)


@pytest.mark.parametrize("version", ["0.5.0", "0.6.0.dev20240916+cpu"])
def test_nf4_of_too_old_a_torchao_is_a_runtime_error_that_names_the_version(
    here: Places, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    with_torchao(monkeypatch, version)
    with here():
        loss = exponentials(2)  # of tensors that are none, nothing is asked
        with pytest.raises(RuntimeError, match=re.escape("0.6.0.dev20240917")) as caught:
            Saves.apply(torch.ones(1, requires_grad=True), quantised())
        assert isinstance(caught.value, spillway.SpillwayError)
        with NoOpManager():
            Saves.apply(torch.ones(1, requires_grad=True), quantised())
    del caught
    gc.collect()
    loss.backward()


@pytest.mark.parametrize("version", ["0.6.0.dev20240917", "0.6.0", "0.13.0+git"])
def test_nf4_leaves_by_its_parts_and_comes_back(
    anywhere: Places, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    with_torchao(monkeypatch, version)
    leaf = torch.ones(1, requires_grad=True)
    wanted = quantised().unpacked().float().sum()
    with anywhere():
        loss = Saves.apply(leaf, quantised()).sum()
    anywhere.push_out()
    assert anywhere.nbytes(EventKind.LEAVE) >= 16 * 256
    loss.backward()
    assert_identical(list(grads(leaf)), [wanted.reshape(1)])


def test_float8_comes_back_bit_for_bit(anywhere: Places) -> None:
    values = torch.linspace(-400, 400, 4096).to(torch.float8_e4m3fn)
    leaf = torch.ones(1, requires_grad=True)
    with anywhere():
        loss = Saves.apply(leaf, values.clone())
    anywhere.push_out()
    node: Any = loss.grad_fn
    (back,) = node.saved_tensors
    assert back.dtype is torch.float8_e4m3fn
    assert torch.equal(back.view(torch.uint8), values.view(torch.uint8))
    del back, node


def test_without_torchao_nothing_is_said(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    spec = importlib.util.spec_from_file_location("without_torchao", torchtune.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with module.OffloadActivations():
        torch.ones(3, requires_grad=True).exp().sum().backward()
    assert capfd.readouterr() == ("", "")


# T11: what TRL's does beside.


def test_views_of_parameters_stay(here: Places) -> None:
    weight, leaf = nn.Parameter(torch.randn(64, 64)), torch.ones(1, requires_grad=True)
    with here():
        loss = Saves.apply(leaf, weight.t(), weight[:32], weight.view(-1), weight.detach().view(-1)).sum()
        moved = here.count(EventKind.LEAVE)
    loss.backward()
    assert moved == 0


def test_the_local_part_of_a_distributed_parameter_stays(here: Places, one_rank: None) -> None:
    from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

    mesh = DeviceMesh("cpu", [0])
    model = Stack("output")
    weight = nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
    model.register_parameter("weight", weight)
    leaf = torch.ones(1, requires_grad=True)
    with here.around(model):
        saves = Saves.apply(leaf, weight, weight.to_local(), weight.to_local().t())
    assert here.count(EventKind.LEAVE) == 0
    del saves


def test_one_storage_leaves_once_however_many_tensors_are_saved_of_it(here: Places) -> None:
    leaf, x = torch.ones(1, requires_grad=True), torch.randn(64, 64)
    with here():
        loss = Saves.apply(leaf, x, x, x.t(), x.view(-1), x[:40]).sum()
    assert here.nbytes(EventKind.LEAVE) == 64 * 64 * 4
    loss.backward()


def test_a_broadcast_tensor_leaves_by_the_bytes_that_it_has(anywhere: Places) -> None:
    leaf, row = torch.ones(1, requires_grad=True), torch.randn(1, 1024)
    with anywhere():
        loss = Saves.apply(leaf, row.clone().expand(512, 1024))
    anywhere.push_out()
    assert anywhere.nbytes(EventKind.LEAVE) <= 1024 * 4 + 8
    node: Any = loss.grad_fn
    (back,) = node.saved_tensors
    assert back.stride() == (0, 1)
    assert back.untyped_storage().nbytes() == 1024 * 4
    assert torch.equal(back, row.expand(512, 1024))
    del back, node


@pytest.mark.parametrize("kind", ["transposed", "every second", "channels last", "column"])
def test_tensors_that_are_not_contiguous_come_back_with_their_strides(anywhere: Places, kind: str) -> None:
    def make() -> torch.Tensor:
        x = torch.arange(2.0 * 32 * 32 * 4).view(2, 32, 32, 4)
        return {
            "transposed": x[0].transpose(0, 1),
            "every second": x[:, ::2, 1::2],
            "channels last": x.permute(0, 3, 1, 2),
            "column": x.view(-1, 4)[:, 1],
        }[kind]

    with anywhere():
        loss = Saves.apply(torch.ones(1, requires_grad=True), make())
    anywhere.push_out()
    node: Any = loss.grad_fn
    (back,) = node.saved_tensors
    assert_identical([back], [make()])
    assert not back.is_contiguous()
    del back, node


# T12: checkpoints.


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
def test_of_checkpointed_blocks_only_what_the_checkpoints_keep_is_offloaded(
    anywhere: Places, reentrant: bool, inside: bool
) -> None:
    block, batch = mlp(32, 64, 64, 32), torch.randn(16, 32, requires_grad=True)
    with anywhere() as context:
        hidden = batch * 2
        for _ in range(3):
            hidden = checkpoint(block, hidden, use_reentrant=reentrant)
        loss = hidden.sum()
        del hidden
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    assert context.stats().saved_bytes == 3 * batch.nbytes
    # With backward inside, the last is asked for before it leaves.
    assert context.stats().offloaded_bytes == (2 if inside else 3) * batch.nbytes


# Other than theirs.


def test_hooks_of_others_around_and_within_are_left_alone(here: Places) -> None:
    seen: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.numel())
        return tensor

    with here(), saved_tensors_hooks(note, lambda tensor: tensor):
        loss = exponentials(2)
    assert len(seen) >= 2
    assert here.count(EventKind.LEAVE) == 0
    loss.backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_model_with_a_head_that_is_left_alone_runs(here: Places) -> None:
    model, batch = Stack("output"), torch.randn(8, 32)
    model(batch).sum().backward()
    expected = [gradient.clone() for gradient in grads(*model.parameters())]
    model.zero_grad()
    compiled = torch.compile(model, backend="eager")
    with here.around(compiled):
        loss = compiled(batch).sum()
    loss.backward()
    assert_identical(list(grads(*model.parameters())), expected)
    assert not torchtune._entered()


# The page.


def test_the_page_says_of_every_name_what_it_is_here() -> None:
    page = (ROOT / "docs" / "compat" / "torchtune.md").read_text(encoding="utf-8")
    told = {
        name
        for line in page.splitlines()
        if line.startswith("|")
        for name in re.findall(r"`([\w.]+)", line.split("|")[1])
    }
    names = set(torchtune.__all__)
    for public in (OffloadActivations, get_act_offloading_ctx_manager):
        names |= set(inspect.signature(public).parameters)
    names |= {name for name in vars(OffloadActivations()) if not name.startswith("_")}
    # Theirs that have no counterpart are told too.
    names |= {"tracker", "fwd_stash", "bwd_tensor_stash", "bwd_ev_stash", "tensor_id"}
    assert names - told == set()
    assert "compat/torchtune.md" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
