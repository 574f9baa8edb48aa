"""Streamed parameters: the bits of plain training, at most two blocks on the device, and all as it was afterwards.

The device is the adversary's: a copy is done as late as its events allow, and a use before it is an error.
"""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import spillway
from adapted import Block, Scaled
from allocations import count_exactly
from runtime.scenarios import adversary_session
from spillway import EventKind, EventList, policies
from spillway._torch import in_backward
from spillway.errors import InplaceError, RecomputeError, TierFullError, UnsupportedError, UsageError
from spillway.parameters import homes
from spillway.parameters import streamed as streamed_file
from spillway.parameters.homes import StreamedParameter
from spillway.runtime.bytes import Bytes
from spillway.saved_tensors.identity import is_streamed, unset_streamed
from spillway.testing import AdversaryBackend
from support import assert_nothing_left

WIDTH, BLOCKS = 16, 4


class Convolution(nn.Module):
    """A frozen convolution in channels-last memory, and batch norm, whose buffers stay on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(1, 4, 3, padding=1).requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(4)
        self.narrow = nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        image = x.unflatten(1, (1, 4, WIDTH // 4))
        return x + self.narrow(torch.relu(self.norm(self.wide(image)))).flatten(1)


class Attention(nn.Module):
    """Frozen, but for the output."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.Linear(WIDTH, 3 * WIDTH).requires_grad_(False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).unbind(-3)
        return x + self.out(functional.scaled_dot_product_attention(q, k, v).flatten(-2))


class Model(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inputs = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        y: Tensor = self.head(x)
        return y


def train(model: nn.Module, steps: int = 4, *, micro_batches: int = 2, together: bool = False) -> list[Tensor]:
    """Losses, gradients and the weights in the end. If ``together``, all forwards come before the backwards."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    found: list[Tensor] = []
    for step in range(steps):
        losses = []
        for number in range(micro_batches):
            torch.manual_seed(10 * step + number)
            losses.append(model(torch.randn(6, 4)).square().mean())
            if not together:
                losses[-1].backward()
        for loss in losses if together else ():
            loss.backward()
        found += [each.detach().clone() for each in losses]
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(each.detach().clone() for each in model.state_dict().values())]


def same(got: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


@contextmanager
def streamed(model: nn.Module, **options: Any) -> Iterator[tuple[spillway.Attached, spillway.Session]]:
    """The model with streamed blocks under the adversary. In the end nothing is left."""
    window, recorder = options.pop("window", 1024), EventList() if options.pop("recorder", False) else None
    with adversary_session(window=window, recorder=recorder) as (_, session):
        more = {"stream": "layers.*", "min_bytes": 0, "policy": policies.Keep(), **options}
        attached = spillway.attach(model, session=session, **more)
        try:
            yield attached, session
        finally:
            attached.remove()
        gc.collect()
        assert_nothing_left(session)
    assert not any(map(is_streamed, model.parameters()))


HOWS: dict[str, Any] = {
    "recomputed": lambda: spillway.Recompute(),
    "matmuls kept": lambda: spillway.Recompute(save="matmul"),
    "matmuls offloaded": lambda: spillway.Recompute(offload="matmul"),
    "inputs offloaded": lambda: spillway.Recompute(offload=["inputs"]),
    "reentrant": lambda: spillway.Recompute(use_reentrant=True),
    "compared": lambda: spillway.Recompute(verify="always"),
    "offloaded": lambda: policies.Offload(),
    "half offloaded": lambda: policies.Ratio(0.5),
    "kept": lambda: policies.Keep(),
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("block", [Block, Convolution, Attention])
@pytest.mark.covered
def test_training_has_the_bits_of_a_model_that_is_resident(block: type[nn.Module], how: str) -> None:
    wanted = train(Model(block))
    model = Model(block)
    with streamed(model, policy=HOWS[how]()) as (attached, _):
        assert same(train(model), wanted)
        assert attached.streamed == tuple(f"layers.{number}" for number in range(BLOCKS))
        assert attached.stats().reloaded_bytes > 0


@pytest.mark.parametrize("how", ["recomputed", "matmuls kept", "offloaded", "kept"])
@pytest.mark.parametrize("window", [0, 1 << 20])
def test_several_graphs_wait_for_their_backwards(how: str, window: int) -> None:
    wanted = train(Model(), micro_batches=3, together=True)
    model = Model()
    with streamed(model, policy=HOWS[how](), window=window):
        assert same(train(model, micro_batches=3, together=True), wanted)


@pytest.mark.parametrize("how", ["recomputed", "kept"])
def test_at_most_two_blocks_are_on_the_device_and_none_between_calls(how: str) -> None:
    model, made = Model(), []
    forward: list[int] = []
    backward: list[int] = []
    adversary = AdversaryBackend()
    empty = adversary.empty

    def counted(nbytes: int) -> Any:
        memory = empty(nbytes)
        made.append((nbytes, weakref.ref(memory.storage)))
        return memory

    def alive() -> int:
        return sum(nbytes for nbytes, storage in made if storage() is not None)

    adversary.empty = counted  # type: ignore[method-assign]
    block = sum(each.nbytes for each in model.layers[0].parameters() if not each.requires_grad)
    with spillway.Session(backend=adversary.serve, window=block) as session:
        attached = spillway.attach(model, policy=HOWS[how](), stream="layers.*", min_bytes=0, session=session)
        # A replay undoes what a hook writes to lists that it can reach, and these methods hide theirs.
        seen = [forward.append, backward.append]
        for layer in model.layers:
            layer.first.down.register_forward_hook(lambda *_: seen[in_backward()](alive() // block))  # type: ignore[union-attr]
        for _ in range(3):
            forward.clear()
            backward.clear()
            loss = model(torch.randn(6, 4)).sum()
            assert alive() == 0
            loss.backward()
            del loss
            assert alive() == 0
        assert forward == [2, 2, 2, 1]
        assert backward == ([2, 2, 2, 1] if how == "recomputed" else [])
        with torch.no_grad():
            model.eval()(torch.randn(6, 4))
        assert alive() == 0
        attached.remove()
    adversary.check()


def test_between_calls_parameters_are_there_to_be_read_written_and_saved() -> None:
    plain, model = Model(), Model()
    other = {name: 2 * value for name, value in plain.state_dict().items()}
    wanted: list[Tensor] = []
    with streamed(model) as (_, _):
        got: list[Tensor] = []
        for each, found in ((plain, wanted), (model, got)):
            found += train(each, 1)
            copied = copy.deepcopy(each)
            buffer = io.BytesIO()
            torch.save(each.state_dict(), buffer)
            buffer.seek(0)
            assert all(torch.equal(value, each.state_dict()[name]) for name, value in torch.load(buffer).items())
            with torch.no_grad():
                for parameter in each.layers.parameters():
                    parameter.mul_(0.5)
            found += train(each, 1)
            # No version tells of this.
            each.layers[0].first.base.weight.data.add_(1)  # type: ignore[operator, union-attr]
            found += train(each, 1)
            each.load_state_dict(other)
            found += [*train(each, 1), *train(copied, 1)]
        assert same(got, wanted)


def test_evaluation_without_gradients_and_in_inference_mode() -> None:
    plain, model = Model().eval(), Model().eval()
    x = torch.randn(6, 4)
    with streamed(model), torch.no_grad():
        assert torch.equal(model(x), plain(x))
        with torch.inference_mode():
            assert torch.equal(model(x), plain(x))
        assert torch.equal(model.layers[2](torch.ones(2, WIDTH)), plain.layers[2](torch.ones(2, WIDTH)))
        # At rest, they are no inference tensors.
        for each in (model, plain):
            each.layers[0].first.base.weight.mul_(2)  # type: ignore[operator, union-attr]
    assert same(train(model.train(), 1), train(plain.train(), 1))


class Odd(Model):
    """Some blocks run twice, some not, and in another order each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.inputs(x)
        for number in [(0, 0, 2), (3, 1), (2, 1, 0, 2)][self.calls % 3]:
            x = self.layers[number](x)
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize("how", ["recomputed", "offloaded", "kept"])
def test_blocks_run_twice_not_at_all_and_in_another_order(how: str) -> None:
    wanted = train(Odd(), 6)
    model = Odd()
    with streamed(model, policy=HOWS[how]()):
        assert same(train(model, 6), wanted)


@pytest.mark.parametrize("how", ["recomputed", "kept"])
def test_a_graph_is_gone_through_twice_and_differentiated_twice(how: str) -> None:
    def step(model: Model) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(6, 4, requires_grad=True)
        loss = model(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first.square().sum().backward(retain_graph=True)
        loss.backward()
        return [first.detach(), *(each.grad for each in model.parameters() if each.grad is not None), x.grad]  # type: ignore[list-item]

    wanted, model = step(Model()), Model()
    with streamed(model, policy=HOWS[how]()):
        assert same(step(model), wanted)


def test_the_users_own_checkpoint_and_modes() -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inputs(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            y: Tensor = self.head(x)
            return y

    wanted = train(Checkpointed())
    model, plain = Checkpointed(), Checkpointed()
    with streamed(model):
        assert same(train(model), wanted)
        counts = []
        for each in (model, plain):
            with FlopCounterMode(display=False) as counter:
                each(torch.randn(6, 4)).sum().backward()
            counts.append(counter.get_total_flops())
        assert counts[0] == counts[1]


def test_shared_small_and_trainable_parameters_stay_on_the_device() -> None:
    model = Model()
    model.layers[1].first.base.weight = model.layers[0].first.base.weight  # type: ignore[union-attr]
    model.layers[2].norm.weight.requires_grad_(True)  # type: ignore[union-attr]
    plain = copy.deepcopy(model)
    with streamed(model, min_bytes=WIDTH * 4 * 4 + 1):
        names = {name for name, each in model.named_parameters() if is_streamed(each)}
        expected = {f"layers.{number}.{part}.base.weight" for number in range(BLOCKS) for part in ("first", "second")}
        assert names == expected - {"layers.0.first.base.weight", "layers.1.first.base.weight"}
        assert same(train(model), train(plain))


def test_an_error_in_forward_leaves_everything_at_rest() -> None:
    model, plain = Model(), Model()

    def fail(*_: object) -> None:
        raise ValueError("mine")

    with streamed(model):
        train(model, 1)
        hook = model.layers[2].first.register_forward_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(ValueError, match="mine"):
            model(torch.randn(6, 4))
        hook.remove()
        model.load_state_dict(plain.state_dict())
        assert same(train(model), train(plain))


@pytest.mark.parametrize("how", ["recomputed", "kept"])
def test_a_backward_after_removal_has_the_right_gradients(how: str) -> None:
    model, plain = Model(), Model()
    memory = [each.data_ptr() for each in model.head.parameters()]
    x = torch.randn(6, 4)
    torch.manual_seed(3)
    plain(x).sum().backward()
    with streamed(model, policy=HOWS[how]()) as (attached, session):
        train(model, 1)
        model.load_state_dict(Model().state_dict())
        model.zero_grad()
        torch.manual_seed(3)
        loss = model(x).sum()
        attached.remove()
        # The memory of the homes would be used again for these.
        with spillway.offload(session=session, min_bytes=0, window=0, tier="host"):
            other = Model()(x)
        loss.backward()
        del loss, other
        gc.collect()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad is None if theirs.grad is None else torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    assert [each.data_ptr() for each in model.head.parameters()] == memory
    model.zero_grad()
    copied = copy.deepcopy(model)
    assert same(train(model), train(copied))


def test_a_graph_that_is_dropped_leaves_nothing() -> None:
    model = Model()
    with streamed(model, policy=policies.Keep()) as (attached, _):
        for _ in range(3):
            loss = model(torch.randn(6, 4)).sum()
            del loss
        assert attached.passes == 3


@pytest.mark.parametrize("how", ["recomputed", "matmuls kept", "offloaded", "kept"])
def test_a_write_between_forward_and_backward_is_an_error_as_in_autograd(how: str) -> None:
    plain, model = Model(), Model()
    with streamed(model, policy=HOWS[how]()):
        train(model, 2)
        for each, error in ((plain, RuntimeError), (model, (InplaceError, RecomputeError))):
            loss = each(torch.randn(6, 4)).sum()
            with torch.no_grad():
                each.layers[1].first.base.weight.mul_(2)  # type: ignore[operator, union-attr]
            with pytest.raises(error, match=r"modified by an inplace operation|was written in place"):
                loss.backward()
            del loss
        # The next step is right, and with it all of the failed one is gone.
        model.load_state_dict(plain.state_dict())
        model.zero_grad()
        plain.zero_grad()
        assert same(train(model, 1), train(plain, 1))


def test_a_block_that_is_written_while_another_one_runs_is_copied_again() -> None:
    plain, model = Model(), Model()
    ahead: list[Any] = []

    def write(layers: Any) -> None:
        for use in ahead[0]._ahead._fetched[2] if ahead and ahead[0]._ahead._fetched else ():
            # Its copy has read the content from before.
            use.entry.copied.synchronize()
        with torch.no_grad():
            layers[1].first.base.weight.mul_(0.9)

    for each in (plain, model):
        each.layers[0].register_forward_hook(lambda *_, layers=each.layers: write(layers))  # type: ignore[misc]
    wanted = train(plain)
    with streamed(model) as (attached, _):
        ahead.append(attached._root.streams)
        assert same(train(model), wanted)
        ahead.clear()


def frozen_bytes(model: Model) -> int:
    return sum(each.nbytes for each in model.layers.parameters() if not each.requires_grad)


@pytest.mark.parametrize("how", ["recomputed", "matmuls kept", "kept"])
def test_each_parameter_is_copied_once_for_forward_and_once_for_backward(how: str) -> None:
    model = Model()
    with streamed(model, policy=HOWS[how](), recorder=True) as (attached, session):
        train(model, 2)
        copied: EventList = session._recorder  # type: ignore[assignment]
        copied.events.clear()
        model(torch.randn(6, 4)).sum().backward()
        nbytes = sum(event.nbytes for event in copied.events if event.kind is EventKind.RETURN)
        assert frozen_bytes(model) < nbytes <= 2 * frozen_bytes(model)
        assert attached.stats().reloaded_bytes == nbytes
        if how == "recomputed":
            assert nbytes == 2 * frozen_bytes(model)


class Listed(TorchDispatchMode):
    """Lists the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_modes_of_the_user_see_the_models_operators_alone() -> None:
    plain, model = Model().eval(), Model().eval()
    seen = []
    with streamed(model), torch.no_grad():
        for each in (plain, model):
            with Listed() as mode:
                each(torch.ones(6, 4))
            seen.append(mode.seen)
    assert seen[0] == seen[1]


def test_a_home_is_not_written_again_before_its_copy_has_ended() -> None:
    model = Model()
    with streamed(model) as (attached, _):
        streams: Any = attached._root.streams
        uses = streams.fetched(streams.blocks[0], is_replay=False)
        assert all(use.parameter.home.before_write() for use in uses)
        del uses, streams


# Code that reads a parameter at rest, where it must not: at rest there is nothing but NaN in these tests.


class Checkpointed(Model):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__(Scaled)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        y: Tensor = self.head(x)
        return y


@pytest.fixture
def nothing_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def rest(self: StreamedParameter, entry: object) -> None:
        self.own().data = torch.full_like(self.own(), float("nan"))

    def leave(self: StreamedParameter, device: torch.device | None = None) -> None:
        rest(self, None)
        unset_streamed(self.own())

    monkeypatch.setattr(StreamedParameter, "rest", rest)
    monkeypatch.setattr(StreamedParameter, "check", lambda self: None)
    monkeypatch.setattr(StreamedParameter, "leave", leave)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    found = []
    for step in range(3):
        torch.manual_seed(step)
        call(torch.randn(6, WIDTH if call is not model else 4, requires_grad=True)).square().sum().backward()
        found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
    return found


@pytest.mark.usefixtures("nothing_at_rest")
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("block", [Scaled, Block, Convolution, Attention])
@pytest.mark.covered
def test_backward_never_reads_a_parameter_at_rest(block: type[nn.Module], how: str) -> None:
    plain, model = Model(block), Model(block)
    wanted = gradients(plain, plain)
    with streamed(model, policy=HOWS[how]()):
        assert same(gradients(model, model), wanted)


@pytest.mark.usefixtures("nothing_at_rest")
@pytest.mark.parametrize("block", [Scaled, Block])
def test_neither_does_it_without_spillways_hooks(block: type[nn.Module]) -> None:
    for find in (lambda model: model, lambda model: model.layers[1]):
        plain, model = Model(block).eval(), Model(block).eval()
        wanted = gradients(plain, find(plain))
        with streamed(model):
            assert same(gradients(model, find(model)), wanted)


@pytest.mark.usefixtures("nothing_at_rest")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_nor_in_the_users_own_checkpoint(use_reentrant: bool) -> None:
    plain, model = Checkpointed(use_reentrant=use_reentrant), Checkpointed(use_reentrant=use_reentrant)
    wanted = gradients(plain, plain)
    with streamed(model):
        assert same(gradients(model, model), wanted)


# Writes.


@pytest.mark.parametrize("how", ["recomputed", "kept"])
def test_a_write_after_a_call_or_a_backward_comes_after_all_copies_of_a_home(how: str) -> None:
    """The adversary says whether a write of compute's is ordered after copies that read the same bytes."""
    model = Model()
    with streamed(model, policy=HOWS[how]()) as (attached, session):
        streams: Any = attached._root.streams
        backend = session.runtime(torch.device("cpu")).backend

        def write() -> None:
            for block in streams.blocks:
                for parameter in block.parameters:
                    backend.compute_access(Bytes.of(parameter.at_rest))

        for _ in range(3):
            loss = model(torch.randn(6, 4)).sum()
            write()
            loss.backward()
            write()
            with torch.no_grad():
                model.layers[1](torch.randn(6, WIDTH))  # type: ignore[union-attr,index]
            write()
        del loss


class Averaging(Block):
    """Its forward writes a frozen parameter, in place or by other data."""

    replaces = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        mean = 0.9 * self.norm.bias.detach() + 0.1 * y.detach().mean(0)
        if self.replaces:
            self.norm.bias.data = mean
        else:
            with torch.no_grad():
                self.first.base.bias.mul_(0.9)
        return y


class Replacing(Averaging):
    replaces = True


@pytest.mark.parametrize("block", [Averaging, Replacing])
def test_what_a_block_writes_into_its_parameters_is_in_their_homes(block: type[nn.Module]) -> None:
    plain, model = Model(block), Model(block)
    for each in (plain, model):
        # In place, autograd would refuse: the weight is needed.
        each.layers[0].first.base.bias.mul_(1)  # type: ignore[operator, union-attr]
    wanted = train(plain, micro_batches=1)
    with streamed(model):
        assert same(train(model, micro_batches=1), wanted)


def test_a_block_is_fetched_ahead_only_within_a_pass() -> None:
    plain, model = Model().eval(), Model().eval()
    x = torch.randn(6, WIDTH)
    with streamed(model), torch.no_grad():
        for _ in range(3):
            model(torch.randn(6, 4))
            for number in range(BLOCKS):
                for each in (plain, model):
                    each.layers[number].first.base.weight.data.add_(0.1)  # type: ignore[operator, union-attr]
                assert torch.equal(model.layers[number](x), plain.layers[number](x))


def test_no_block_is_fetched_in_vain_after_backwards_in_a_row() -> None:
    model = Model()
    with streamed(model, policy=spillway.Recompute(), recorder=True) as (_, session):
        # The second backward follows on the first: its last block must not be expected after the first block.
        train(model, 2, micro_batches=2, together=True)
        copied: EventList = session._recorder  # type: ignore[assignment]
        for _ in range(2):
            copied.events.clear()
            model(torch.randn(6, 4)).sum().backward()
            assert session.runtime(torch.device("cpu")).mover.counts()["returning bytes"] == 0
            nbytes = sum(event.nbytes for event in copied.events if event.kind is EventKind.RETURN)
            assert nbytes == 2 * frozen_bytes(model)


def test_an_error_of_a_fetch_ahead_is_none_of_the_block_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = Model(), Model()
    wanted = train(plain)
    with streamed(model) as (attached, _):
        streams: Any = attached._root.streams
        fetched, calls = streams.fetched, []

        def failing(block: Any, **options: Any) -> Any:
            calls.append(block)
            if len(calls) % 3 == 0 and sys._getframe(1).f_code.co_name == "fetch_next":
                raise torch.OutOfMemoryError("no memory")
            return fetched(block, **options)

        monkeypatch.setattr(streams, "fetched", failing)
        assert same(train(model), wanted)
        monkeypatch.undo()


# Threads, interrupts, nesting.


def test_threads_evaluate_one_model() -> None:
    plain, model = Model().eval(), Model().eval()
    x = torch.randn(6, 4)
    wanted, faults = plain(x).detach(), []

    def evaluate() -> None:
        for _ in range(20):
            with torch.no_grad():
                try:
                    faults.extend([] if torch.equal(model(x), wanted) else ["other bits"])
                except spillway.SpillwayError as error:
                    faults.append(str(error))

    with spillway.Session() as session, spillway.attach(model, stream="layers.*", min_bytes=0, session=session):
        threads = [threading.Thread(target=evaluate) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not faults
        assert session.runtime(torch.device("cpu")).mover.counts()["returning bytes"] == 0


class Nested(Model):
    """A block calls another one."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x)
        first: Any = self.layers[0].first
        hook = first.register_forward_hook(lambda _, args, output: output + self.layers[1](args[0]).sum())
        try:
            x = self.layers[2](self.layers[0](self.layers[0](x)))
        finally:
            hook.remove()
        y: Tensor = self.head(x)
        return y


def test_a_block_calls_another_one() -> None:
    wanted, model = train(Nested()), Nested()
    with streamed(model):
        assert same(train(model), wanted)


# Python handles a signal at a call or a jump: not between a body and the end of torch's own contexts around it.
_UNTOLD = ("__del__", "load", "_copy", "_unseen")


def test_an_interrupt_anywhere_leaves_a_model_that_trains() -> None:
    plain, model = Model(), Model()
    wanted = train(plain, 1)
    files = (homes.__file__, streamed_file.__file__)
    with streamed(model):
        train(model, 2)
        for number in range(1, 400, 3):
            left = number

            def trace(frame: Any, event: str, _: object) -> Any:
                nonlocal left
                # An error in a finaliser is none.
                if frame.f_code.co_filename in files and event == "line" and frame.f_code.co_name not in _UNTOLD:
                    left -= 1
                    if left == 0:
                        raise KeyboardInterrupt
                return trace

            sys.settrace(trace)
            try:
                model(torch.randn(6, 4)).sum().backward()
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
        model.load_state_dict(Model().state_dict())
        model.zero_grad()
        assert same(train(model, 1), wanted)


def test_what_an_interrupt_left_on_the_device_is_put_to_rest_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, rest = Model(), Model(), StreamedParameter.rest
    wanted = train(plain, 1)

    def interrupted(self: StreamedParameter, entry: Any) -> None:
        monkeypatch.setattr(StreamedParameter, "rest", rest)
        raise KeyboardInterrupt

    with streamed(model):
        monkeypatch.setattr(StreamedParameter, "rest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(torch.randn(6, 4))
        assert same(train(model, 1), wanted)


def test_removal_in_the_middle_of_a_forward() -> None:
    model, plain = Model(), Model()
    with streamed(model) as (attached, _):
        train(model, 1)
        hook = model.layers[1].first.register_forward_hook(lambda *_: attached.remove())  # type: ignore[union-attr]
        model(torch.randn(6, 4))
        hook.remove()
        assert not any(map(is_streamed, model.parameters()))
        model.load_state_dict(plain.state_dict())
        model.zero_grad()
        assert same(train(model), train(plain))


def test_inference_mode_leaves_no_inference_tensors() -> None:
    model = Model()
    with adversary_session(window=1024) as (_, session):
        with torch.inference_mode():
            attached = spillway.attach(model, stream="layers.*", min_bytes=0, session=session)
            model.eval()(torch.randn(6, 4))
        assert not any(each.is_inference() for each in model.parameters())
        with torch.inference_mode():
            attached.remove()
        assert not any(each.is_inference() for each in model.parameters())


def test_transforms_of_functions_are_refused() -> None:
    model = Model().eval()
    with streamed(model), pytest.raises(UnsupportedError, match=r"torch\.func transform"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(6, 4))


# Budgets.


@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_budget_is_kept_to_with_streamed_weights(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Also with two plans, one after the other, of one session's."""
    static = 16 << 20
    count_exactly(monkeypatch, lambda: static)

    def steps(model: Model, attached: spillway.Attached | None, count: int) -> list[Tensor]:
        found = []
        for step in range(count):
            torch.manual_seed(step)
            loss = model(torch.randn(512, 4)).square().mean()
            loss.backward()
            found += [each.grad.clone() for each in model.parameters() if each.grad is not None]
            model.zero_grad()
            if attached is not None and attached.stage == "active":
                break
        return found

    options: dict[str, Any] = {"allow": {"keep", "recompute"}, "hardware": "h200", "stream": "layers.*", "min_bytes": 0}
    wanted, peak, budget = steps(Model(), None, 20), 0, 1 << 30
    for _ in range(2):
        model = Model()
        with (
            spillway.Session(window="64KiB") as session,
            spillway.attach(model, budget=budget, session=session, **options) as attached,
        ):
            got = steps(model, attached, 20)
            assert attached.stage == "active" and attached.measured is not None, attached.explain()
            assert all(map(torch.equal, got, wanted))
            assert attached.measured.peak_bytes <= budget
            peak = peak or attached.measured.peak_bytes
            budget = static + int((peak - static) * share)


# Errors.


def test_errors_say_what_to_do_and_change_nothing() -> None:
    model = Model()
    with adversary_session(window=1024) as (_, session):
        memory = [each.data_ptr() for each in model.parameters()]
        for options, message in (
            ({"stream": "layers.*"}, "expected frozen parameters"),
            ({"stream": ["layers.*", "layers.0.first"], "min_bytes": 0}, "not nested"),
            ({"device": "cpu"}, "without stream="),
            ({"stream": "nothing.*"}, "nothing"),
        ):
            with pytest.raises(UsageError, match=message):
                spillway.attach(model, session=session, **options)  # type: ignore[arg-type]
        assert [each.data_ptr() for each in model.parameters()] == memory
        assert_nothing_left(session)
    with adversary_session(host_budget="8KiB") as (_, session):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(TierFullError, match="host_budget"):
            spillway.attach(model, stream="layers.*", min_bytes=0, session=session)
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        gc.collect()
        assert_nothing_left(session)
    assert not any(map(is_streamed, model.parameters()))


def test_parameters_may_be_unfrozen_and_frozen() -> None:
    def all_of(model: Any) -> list[Tensor]:
        found = train(model, 1)
        for layer in model.layers:
            layer.first.base.weight.requires_grad_(True)
        found += train(model, 2)

        # Once its next block is fetched ahead, too.
        def unfreeze(*_: object) -> None:
            model.layers[1].second.base.weight.requires_grad_(True)

        hook = model.layers[0].register_forward_hook(unfreeze)
        found += train(model, 2)
        hook.remove()
        for layer in model.layers:
            layer.first.base.weight.requires_grad_(False)
            layer.first.base.weight.grad = None
        return [*found, *train(model, 1)]

    wanted = all_of(Model())
    model = Model()
    with streamed(model):
        assert same(all_of(model), wanted)


def test_a_parameter_that_was_moved_is_refused() -> None:
    model = Model()
    with streamed(model):
        train(model, 1)
        weight: Any = model.layers[1].first.base.weight  # type: ignore[union-attr]
        home = weight.data
        weight.data = home.clone()
        with pytest.raises(UsageError, match=r"layers\.1\.first\.base\.weight is streamed, and was moved"):
            model(torch.randn(6, 4))
        weight.data = home.double()
        with pytest.raises(UsageError, match=r"torch\.float64"):
            model(torch.randn(6, 4))
        weight.data = home
        train(model, 1)
        del home


def test_a_model_that_was_cast_stays_so_when_it_is_detached() -> None:
    model = Model()
    with streamed(model):
        train(model, 1)
        wanted = [each.detach().double() for each in model.parameters()]
        model.double()
    assert same(list(model.parameters()), wanted)
    assert {each.dtype for each in model.parameters()} == {torch.float64}
