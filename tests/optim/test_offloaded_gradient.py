"""What a gradient is to those who look at it while its bytes are on the host."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

import spillway
from optim.support import batches, here, is_away, loss_of, offloaded, same_bits, saved, train, wide
from spillway import OffloadedOptimizer, UnsupportedError
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.optim.transfers import Transfers


@pytest.fixture
def away(session: spillway.Session) -> Any:
    """A parameter and its gradient, which is ``[[0, 1, 2], [3, 4, 5]]``."""
    parameter = Parameter(torch.zeros(2, 3))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=session)
    (parameter * torch.arange(6.0).view(2, 3)).sum().backward()
    yield parameter.grad
    optimizer.close()
    assert session.used_bytes == (0, 0)


def test_it_is_a_tensor_like_any_other(away: Tensor) -> None:
    assert is_away(away)
    assert isinstance(away, Tensor)
    assert (away.shape, away.stride(), away.dtype, away.device) == ((2, 3), (3, 1), torch.float32, torch.device("cpu"))
    assert (away.ndim, away.numel(), away.itemsize, away.nbytes) == (2, 6, 4, 24)
    assert away.is_leaf
    assert not away.requires_grad
    assert away.grad_fn is None
    assert away.layout == torch.strided
    assert not away.is_sparse
    assert away.is_contiguous()
    assert away.detach() is away or is_away(away.detach())
    assert len(away) == 2


@pytest.mark.parametrize("show", [repr, str, "{}".format, "{!r}".format], ids=["repr", "str", "format", "format-repr"])
def test_it_is_printed_without_being_brought_back(show: Callable[[Any], str], away: Tensor) -> None:
    assert show(away) == "OffloadedGradient(size=(2, 3), dtype=torch.float32, device='cpu')"


VIEWS: dict[str, Callable[[Tensor], object]] = {
    "an index": lambda g: g[0],
    "a slice": lambda g: g[:, 1:],
    "view": lambda g: g.view(-1),
    "flatten": lambda g: g.flatten(),
    "transpose": lambda g: g.t(),
    "unsqueeze": lambda g: g.unsqueeze(0),
    "expand": lambda g: g.expand(4, 2, 3),
    "chunk": lambda g: g.chunk(2),
    "as_strided": lambda g: g.as_strided((6,), (1,)),
    "iteration": lambda g: list(g),
    "writing to a part": lambda g: g.__setitem__(0, 1.0),
    "several at once": lambda g: torch._foreach_mul_([g[0], g[1]], 2.0),
}


@pytest.mark.parametrize("name", VIEWS, ids=lambda name: name.replace(" ", "-"))
def test_views_of_it_are_refused(name: str, away: Tensor) -> None:
    with pytest.raises(UnsupportedError, match=r"aten\..* would make a view of a gradient"):
        VIEWS[name](away)
    assert same_bits(away.clone(), torch.arange(6.0).view(2, 3))
    assert same_bits(away.clone()[0], torch.arange(3.0))


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, copy.copy, saved, lambda g: pickle.loads(pickle.dumps(g)), lambda g: g.clone()],
    ids=["deepcopy", "copy", "save", "pickle", "clone"],
)
def test_a_copy_is_a_plain_tensor(copied: Callable[[Tensor], Tensor], away: Tensor) -> None:
    result = copied(away)
    assert type(result) is Tensor
    assert same_bits(result, torch.arange(6.0).view(2, 3))
    result.zero_()
    assert same_bits(away.clone(), torch.arange(6.0).view(2, 3))


def test_copies_of_several_that_are_one_are_one(away: Tensor) -> None:
    one, other = copy.deepcopy([away, away])
    assert one is other


@pytest.mark.parametrize("memory", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_model_is_copied_while_its_gradients_are_away(memory: Any, session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.SGD, session, lr=0.1)(model)
    loss_of(model, batches(1)[0]).backward()
    before = [here(one.grad) for one in model.parameters()]
    twin = memory(model)
    assert all(one.grad is None for one in twin.parameters())
    assert not any(one._post_accumulate_grad_hooks for one in twin.parameters())
    loss_of(twin, batches(1)[0]).backward()
    assert not any(is_away(one.grad) for one in twin.parameters())
    assert all(same_bits(here(one.grad), value) for one, value in zip(model.parameters(), before, strict=True))
    optimizer.close()


def test_a_tensor_that_is_no_parameter_is_copied_with_its_gradient(session: spillway.Session) -> None:
    leaf = torch.zeros(3, requires_grad=True)
    optimizer = OffloadedOptimizer([leaf], torch.optim.SGD, lr=1.0, session=session)
    (leaf * torch.arange(3.0)).sum().backward()
    twin = copy.deepcopy(leaf)
    assert type(twin.grad) is Tensor
    assert same_bits(twin.grad, torch.arange(3.0))
    optimizer.close()


def test_one_that_is_kept_lives_as_long_as_it_is(cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(torch.optim.SGD, cpu_session, lr=0.1)(model)
    data = batches(3)
    loss_of(model, data[0]).backward()
    kept = model.first.weight.grad
    value = here(kept)
    model.zero_grad()
    for batch in data[1:]:
        train(model, optimizer, [batch])
    assert kept is not None
    assert same_bits(kept.clone(), value)
    assert same_bits(kept.mul_(2.0).clone(), value * 2)
    kept.add_(value)
    assert same_bits(kept.clone(), value * 2 + value)
    kept.zero_()
    assert same_bits(kept.norm(), torch.zeros(()))
    optimizer.zero_grad()
    optimizer.synchronize()
    used = cpu_session.used_bytes[0]
    dead = weakref.ref(kept)
    del kept
    gc.collect()
    assert dead() is None
    assert cpu_session.used_bytes[0] <= used
    optimizer.close()
    assert cpu_session.used_bytes == (0, 0)


def test_the_parameter_alone_keeps_it(session: spillway.Session) -> None:
    parameter = Parameter(torch.zeros(3))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=session)
    parameter.sum().backward()
    dead = weakref.ref(parameter.grad)
    gc.collect()
    assert dead() is parameter.grad
    parameter.grad = None
    assert dead() is None
    optimizer.close()


def test_a_class_of_tensors_of_ones_own_is_computed_with(away: Tensor) -> None:
    class Own(torch.Tensor):
        pass

    own = torch.ones(2, 3).as_subclass(Own)
    assert same_bits((own + away).as_subclass(Tensor), 1 + torch.arange(6.0).view(2, 3))


def test_modes_see_what_is_done_to_it(away: Tensor) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import FlopCounterMode

    class Counts(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.seen += 1
            return function(*args, **(kwargs or {}))

    with Counts(), FlopCounterMode(display=False):
        away.mul_(2.0)
        away.add_(torch.ones(2, 3))
        result = away.clone()
    assert same_bits(result, 1 + 2 * torch.arange(6.0).view(2, 3))
    assert Counts.seen > 0


def test_inference_tensors_are_factors_too(away: Tensor) -> None:
    with torch.inference_mode():
        factor = torch.tensor(0.5)
    away.mul_(factor)
    assert same_bits(away.clone(), torch.arange(6.0).view(2, 3) * 0.5)
    with torch.inference_mode():
        away.mul_(torch.tensor(4.0))
    assert same_bits(away.clone(), torch.arange(6.0).view(2, 3) * 2)


def test_factors_of_other_devices_and_types(away: Tensor) -> None:
    away.mul_(torch.tensor(3))
    away.div_(torch.tensor(2, dtype=torch.int64))
    away.mul_(True)
    away.mul_(torch.tensor([2.0]))
    assert same_bits(away.clone(), torch.arange(6.0).view(2, 3) * 3 / 2 * 2)
    with pytest.raises(RuntimeError):
        away.mul_(1j)
    assert type(away) is OffloadedGradient


class _Reuses(torch.autograd.Function):
    """Its gradient is in memory that the caller reuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return x * 1

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.gradient(), None


def backward_of(parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
    _Reuses.apply(parameter, gradient).sum().backward()


def add_by_operator(parameter: Tensor, buffer: Tensor) -> None:
    parameter.grad += buffer


def add_gradient_of_another(parameter: Tensor, buffer: Tensor) -> None:
    other = Parameter(torch.zeros_like(buffer))
    other.grad = buffer
    assert parameter.grad is not None
    parameter.grad.add_(other.grad)


def add_in_a_hook(parameter: Tensor, buffer: Tensor) -> None:
    def add(_: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.add_(buffer)

    hook = parameter.register_hook(add)
    (parameter * 2).sum().backward()
    hook.remove()


def keep_in_a_hook(parameter: Tensor, buffer: Tensor, of: Callable[[Tensor], Tensor]) -> None:
    kept: list[Tensor] = []
    hook = parameter.register_hook(lambda gradient: kept.append(of(gradient)))
    (parameter * 2).sum().backward()
    hook.remove()
    kept[0].zero_()


def keep_as_a_gradient(parameter: Tensor, buffer: Tensor) -> None:
    other = Parameter(torch.zeros_like(buffer))
    hook = parameter.register_hook(lambda gradient: setattr(other, "grad", gradient))
    (parameter * 2).sum().backward()
    hook.remove()
    assert other.grad is not None
    other.grad.zero_()


ADDITIONS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda p, b: p.grad.add_(b),  # type: ignore[union-attr]
    "in Python": add_by_operator,
    "a plain gradient": add_gradient_of_another,
    "in a hook": add_in_a_hook,
    "kept by a hook": lambda p, b: keep_in_a_hook(p, b, lambda g: g),
    "kept by a hook, by an alias": lambda p, b: keep_in_a_hook(p, b, lambda g: g.detach()),
    "kept by a hook, as a gradient": keep_as_a_gradient,
    "of a function": lambda p, b: backward_of(p, lambda: b),
    "of a function, a view": lambda p, b: backward_of(p, lambda: b.view(-1)),
    "of a function, an alias": lambda p, b: backward_of(p, b.detach),
}


@pytest.mark.parametrize("numel", [5, 1 << 18], ids=["small", "large"])
@pytest.mark.parametrize("name", ADDITIONS, ids=lambda name: name.replace(" ", "-").replace(",", ""))
def test_a_tensor_that_was_added_may_be_written(name: str, numel: int, session: spillway.Session) -> None:
    ours, plain = (Parameter(torch.zeros(numel)) for _ in range(2))
    optimizer = OffloadedOptimizer([ours], torch.optim.SGD, lr=1.0, session=session)
    for parameter in (ours, plain):
        (parameter * 3).sum().backward()
        buffer = torch.arange(float(numel))
        for _ in range(2):
            ADDITIONS[name](parameter, buffer)
            buffer.mul_(-2)
    assert is_away(ours.grad)
    assert same_bits(here(ours.grad), here(plain.grad))
    optimizer.close()


@pytest.mark.parametrize("make", [lambda g: g * 2, lambda g: (g * 2).view(9).view(3, 3)], ids=["whole", "view"])
def test_gradients_that_autograd_adds_are_not_copied(
    make: Callable[[Tensor], Tensor], cpu_session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, sent, send = [], [], Transfers.send

    def note(transfers: Transfers, tensor: Tensor) -> Any:
        sent.append(tensor.data_ptr())
        return send(transfers, tensor)

    def gradient() -> Tensor:
        gradient = make(torch.ones(3, 3))
        made.append(gradient.data_ptr())
        return gradient

    monkeypatch.setattr(Transfers, "send", note)
    parameter = Parameter(torch.zeros(3, 3))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=cpu_session)
    for _ in range(3):
        backward_of(parameter, gradient)
    assert sent[1:] == made[1:]
    optimizer.close()


def test_a_gradient_without_memory_is_refused_by_dlpack(session: spillway.Session) -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = OffloadedOptimizer(layer.parameters(), torch.optim.SGD, session=session, lr=0.1)
    layer(torch.ones(2, 4)).sum().backward()
    with pytest.raises(UnsupportedError, match=r"p\.grad\.clone\(\)"):
        torch.from_dlpack(layer.weight.grad)
    assert torch.equal(torch.from_dlpack(layer.weight.grad.clone()), torch.full((4, 4), 2.0))  # type: ignore[union-attr]
    optimizer.close()


def test_collectives_that_would_write_reloaded_bytes_are_refused(session: spillway.Session) -> None:
    layer = torch.nn.Linear(4, 4)
    optimizer = spillway.OffloadedOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1, session=session)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            layer(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        with pytest.raises(spillway.UnsupportedError, match="offload_gradients=False"):
            dist.all_reduce(layer.weight.grad)
        with pytest.raises(spillway.UnsupportedError, match="offload_gradients=False"):
            dist.broadcast(layer.weight.grad.data, 0)  # type: ignore[union-attr]
    finally:
        dist.destroy_process_group()
