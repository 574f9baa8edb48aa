"""Where vertical order cannot have the bits of plain accumulation, an error says why, and nothing stays behind."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import spillway
from accumulate.models import (
    WIDTH,
    Block,
    Transformer,
    assert_equal,
    batches,
    loss_of,
    made,
    threads_of_backwards,
    trained,
)
from spillway import UnsupportedError, UsageError
from test_leaks import ended


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    # The traceback of a test that failed holds its threads.
    before = threads_of_backwards()
    yield
    # They end with their accumulators.
    assert ended(threads_of_backwards, before)
    assert not torch.nn.modules.module._global_forward_pre_hooks


def accumulator_of(model: nn.Module, **options: Any) -> spillway.Accumulator:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return spillway.Accumulator(model, optimizer, **{"steps": 3, "order": "vertical", **options})


def run(accumulator: spillway.Accumulator, model: nn.Module, count: int = 3) -> None:
    for words in accumulator(batches(count)):
        loss, weight = loss_of(model, words)
        accumulator.backward(loss, weight=weight)


def assert_works_again(accumulator: spillway.Accumulator, model: nn.Module, plain: nn.Module) -> None:
    """After an error in its first accumulation step, which has changed nothing."""
    with pytest.raises(UsageError, match="discard"):
        accumulator.step()
    accumulator.discard()
    for each in model.parameters():
        assert each.grad is None
        assert not each._post_accumulate_grad_hooks
    for order, of in ((accumulator, model), (accumulator_of(plain, order="horizontal"), plain)):
        torch.manual_seed(3)
        run(order, of)
    assert_equal(list(model.parameters()), list(plain.parameters()))


class Failing(torch.autograd.Function):
    """A block's backward, which fails in one micro-batch."""

    left = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Failing.left -= 1
        if Failing.left == 0:
            raise ZeroDivisionError("in a block")
        return grad


class FailingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return Failing.apply(super().forward(x))  # type: ignore[no-untyped-call]


def failing() -> Transformer:
    torch.manual_seed(0)
    model = Transformer()
    model.blocks[1] = FailingBlock()
    return model


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_error_in_the_middle_of_a_block(place: int) -> None:
    model, plain = failing(), failing()
    accumulator = accumulator_of(model)
    Failing.left = place
    with pytest.raises(ZeroDivisionError, match="in a block"):
        run(accumulator, model)
    Failing.left = 0
    assert_works_again(accumulator, model, plain)


@pytest.mark.parametrize("has_waited", [False, True])
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_ends_all_threads(has_waited: bool, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from spillway.accumulate import vertical

    model, plain = failing(), failing()
    accumulator = accumulator_of(model)
    wait, waits, left = vertical._Lane._wait, [], [times - 1]

    class Ended(threading.Event):
        """The second interrupt comes while the first one ends the backwards."""

        def wait(self, timeout: float | None = None) -> bool:
            if waits and left[0]:
                left[0] -= 1
                raise KeyboardInterrupt
            return super().wait(timeout)

    def interrupted(self: Any) -> None:
        waits.append(self)
        if len(waits) == 5 and not has_waited:
            raise KeyboardInterrupt
        wait(self)
        if len(waits) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(vertical._Lane, "_wait", interrupted)
    make = vertical._Lane.__init__

    def made(self: Any, *args: Any) -> None:
        make(self, *args)
        self._ended = Ended()

    monkeypatch.setattr(vertical._Lane, "__init__", made)
    with pytest.raises(KeyboardInterrupt):
        run(accumulator, model)
    assert not left[0]
    assert_works_again(accumulator, model, plain)


@pytest.mark.parametrize("is_given", [False, True])
def test_an_interrupt_while_a_thread_is_given_its_backward(is_given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from spillway.accumulate import vertical

    model, plain = failing(), failing()
    accumulator = accumulator_of(model)
    left = [2]

    class Interrupted(ThreadPoolExecutor):
        def submit(self, task: Callable[[], object]) -> Any:  # type: ignore[override]
            left[0] -= 1
            given = super().submit(task) if left[0] or is_given else None
            if not left[0]:
                raise KeyboardInterrupt
            return given

    monkeypatch.setattr(vertical, "ThreadPoolExecutor", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(accumulator, model)
    assert left[0] < 0
    assert_works_again(accumulator, model, plain)


@pytest.mark.parametrize("together", [True, False])
def test_settings_of_kernels_are_those_of_each_backward(together: bool) -> None:
    """They are the process's: one backward must not leave its own behind for another."""
    seen: list[tuple[int, bool]] = []

    class Sees(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, place: int) -> Tensor:
            ctx.place = place
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            seen.append((ctx.place, torch.are_deterministic_algorithms_enabled()))
            return grad, None

    blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = spillway.Accumulator(model, optimizer, steps=3, order="vertical", blocks=nn.Linear)
    try:
        for place in range(3):
            # The last backward runs them all.
            deterministic = place != 1 if together else place == 0
            torch.use_deterministic_algorithms(deterministic)
            with accumulator.micro(last=place == 2):
                x = torch.ones(2, 4)
                for block in blocks:
                    x = Sees.apply(block(x), place)  # type: ignore[no-untyped-call]
                accumulator.backward(x.sum(), weight=1)
        after = torch.are_deterministic_algorithms_enabled()
        accumulator.step()
    finally:
        torch.use_deterministic_algorithms(False)
    assert after is deterministic
    assert len(seen) == 9
    wanted = {place: (place != 1 if together else place == 0) for place in range(3)}
    assert all(found is wanted[place] for place, found in seen), seen


class DrawsInBackward(Failing):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + 0 * torch.rand_like(grad)


class Variant(Transformer):
    """Does something to the embeddings, before or between blocks."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor], way: str = "") -> None:
        torch.manual_seed(0)
        super().__init__(way=way)
        self.change = change
        self.calls = 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, words: Tensor) -> Tensor:
        x = self.change(self, self.words(words))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.way == "reentrant") if self.way else block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def test_a_backward_that_draws_random_numbers() -> None:
    model = Variant(lambda _, x: DrawsInBackward.apply(x))
    with pytest.raises(UsageError, match="drawn random numbers of cpu"):
        run(accumulator_of(model), model)
    # A single micro-batch has nothing after it.
    run(accumulator_of(model, steps=1), model, 1)


def test_a_block_that_is_called_again_after_another() -> None:
    model = Variant(lambda self, x: self.blocks[1](x))
    with pytest.raises(UsageError, match=r"'blocks.1' and 'blocks.0'|'blocks.0' and 'blocks.1'"):
        run(accumulator_of(model), model)


def test_blocks_in_another_order() -> None:
    class Shuffled(Transformer):
        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words)
            for place in random.sample(range(3), 3):
                x = self.blocks[place](x)
            out: Tensor = self.head(x)
            return out

    model = Shuffled()
    random.seed(0)
    with pytest.raises(UsageError, match="in different orders"):
        run(accumulator_of(model, steps=5), model, 5)


def test_blocks_without_a_node() -> None:
    model = made("transformer")
    for parameter in model.blocks.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    with pytest.raises(UsageError, match="no micro-batch has a parameter of a block"):
        run(accumulator_of(model), model)
    reentrant = Variant(lambda _, x: x, way="reentrant")
    with pytest.raises(UsageError, match="use_reentrant=False"):
        run(accumulator_of(reentrant), reentrant)


def test_a_weight_that_reentrant_checkpoints_share() -> None:
    class Shared(nn.Module):
        """The graph has the first block's own parameter, and not the shared one."""

        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.shared = nn.ParameterList([weight])

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x + checkpoint(lambda y: torch.tanh(y @ self.shared[0]), x, use_reentrant=True))

    model = Transformer()
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    model.blocks = nn.ModuleList(Shared(weight) for _ in range(3))
    with pytest.raises(UsageError, match="not in the graph"):
        run(accumulator_of(model), model)


def test_a_parameter_that_a_later_micro_batch_first_uses_in_a_later_block() -> None:
    def change(self: Any, x: Tensor) -> Tensor:
        self.calls += 1
        # The head's weight is the embedding's.
        return x if self.calls == 1 else x.detach()

    model = Variant(change)
    with pytest.raises(UsageError, match="added in another order"):
        run(accumulator_of(model), model)


class AskedBlock(Block):
    """Reads what the model has set, and not what it was called with."""

    model: Any = (None,)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.model[0].factor


def sets(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    self.factor = self.calls
    return x


@pytest.mark.parametrize("way", ["", "torch", "spillway"])
def test_blocks_that_read_what_each_forward_sets(way: str) -> None:
    def make() -> Variant:
        model = Variant(sets, way="torch" if way == "torch" else "")
        model.blocks = nn.ModuleList(AskedBlock() for _ in range(3))
        for block in model.blocks:
            block.model = (model,)
        return model

    def of(order: str) -> list[Any]:
        torch.manual_seed(0)
        model = make()
        if way == "spillway":
            spillway.attach(model, policy=spillway.Recompute())
        return trained(model, order, batches(6))

    plain = of("horizontal")
    if way == "torch":
        with pytest.raises(UnsupportedError, match="recomputed in backward by other code"):
            of("vertical")
    else:
        assert_equal(of("vertical"), plain)


def test_a_buffer_that_each_forward_writes() -> None:
    def writes(self: Any, x: Tensor) -> Tensor:
        self.scale.mul_(0.5)
        return x * self.scale.clone()

    assert_equal(trained(Variant(writes), "vertical", batches(6)), trained(Variant(writes), "horizontal", batches(6)))
    with pytest.raises(UnsupportedError, match="scale"):
        trained(Variant(writes, way="torch"), "vertical", batches(6))


class Mode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Mode, Dispatch])
def test_modes_cannot_follow(mode: Any) -> None:
    model = made("transformer")
    with mode(), pytest.raises(UsageError, match="under a dispatch or function mode"):
        run(accumulator_of(model), model)


def test_invalid_arguments() -> None:
    model = made("transformer")
    with pytest.raises(UsageError, match="order: got 'diagonal', expected 'horizontal' or 'vertical'"):
        accumulator_of(model, order="diagonal")
    with pytest.raises(UsageError, match=r"blocks: got 'blocks\.\*'"):
        accumulator_of(model, order="horizontal", blocks="blocks.*")
    with pytest.raises(UsageError, match="repeats no block"):
        accumulator_of(nn.Linear(2, 2))
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, step_in_backward=True)
    for option, value in (
        ("max_norm", 1.0),
        ("grad_dtype", torch.float32),
        ("scaler", torch.amp.GradScaler("cpu")),
    ):
        with pytest.raises(UsageError, match=f"{option}: .*step_in_backward"):
            spillway.Accumulator(model, optimizer, steps=2, order="vertical", **{option: value})  # type: ignore[arg-type]
    optimizer.close()


def test_micro_batches_that_share_the_first_node_of_a_piece() -> None:
    """With nothing before the first block, the nodes below it are casts that autocast has cached."""

    def train(order: str) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
        accumulator = accumulator_of(model, normalize="sum", order=order)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                for x in accumulator([torch.full((2, 4), float(each)) for each in range(3)]):
                    accumulator.backward(model(x).float().square().sum())
        return [each.detach() for each in model.parameters()]

    assert_equal(train("vertical"), train("horizontal"))


def test_no_hook_stays() -> None:
    model = made("transformer")
    optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, step_in_backward=True)
    before = [dict(each._post_accumulate_grad_hooks or {}) for each in model.parameters()]
    accumulator = spillway.Accumulator(model, optimizer, steps=2, order="vertical")
    losses, lanes = [], []
    for words in accumulator(batches(2)):
        loss, weight = loss_of(model, words)
        # The graph lives on, with all hooks of its nodes.
        losses.append(loss)
        accumulator.backward(loss, weight=weight)
        lanes += [weakref.ref(each) for each in accumulator._vertical._lanes]  # type: ignore[union-attr]
    gc.collect()
    assert accumulator.stepped
    assert len(lanes) == 1
    assert lanes[0]() is None
    assert [dict(each._post_accumulate_grad_hooks or {}) for each in model.parameters()] == before
    accumulator.close()
    optimizer.close()


def test_graphs_are_dropped() -> None:
    model = made("transformer")
    accumulator = accumulator_of(model, partial="drop")
    run(accumulator, model, 2)
    assert accumulator.micro_batches == 0
    with accumulator.micro(weight=1):
        accumulator.backward(loss_of(model, batches(1)[0])[0])
    accumulator.discard()
    with accumulator.micro(weight=1):
        accumulator.backward(loss_of(model, batches(1)[0])[0])
    accumulator.close()
    assert all(each.grad is None for each in model.parameters())
