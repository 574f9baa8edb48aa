"""What a training loop may do to ``p.grad`` while its bytes are on the host: all that it may do to a plain one.

Each deed is done to a plain model and to one with an :class:`~spillway.OffloadedOptimizer`, between two backwards and a
step; parameters, state and all that the deed gives are to be equal bit for bit.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

import spillway
from optim.support import (
    assert_same_state,
    assert_same_values,
    batches,
    here,
    loss_of,
    offloaded,
    plainly,
    same_bits,
    wide,
)
from spillway import OffloadedOptimizer, UsageError
from spillway.optim.offloaded_gradient import OffloadedGradient

Deed = Callable[[Module, torch.optim.Optimizer], Any]


def each(model: Module) -> Iterator[Tensor]:
    for parameter in model.parameters():
        assert parameter.grad is not None
        yield parameter.grad


def some(model: Module) -> Tensor:
    return next(each(model))


def grads(model: Module) -> list[Tensor]:
    return list(each(model))


def no_grad(model: Module, deed: Callable[[Tensor], object]) -> None:
    with torch.no_grad():
        for gradient in each(model):
            deed(gradient)


def set_by_hand(model: Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * (number + 1))


def drop(model: Module, names: Sequence[int]) -> None:
    for number, parameter in enumerate(model.parameters()):
        if number in names:
            parameter.grad = None


def swap(model: Module) -> None:
    """Let two gradients of one shape change places."""
    one, other = model.blocks[0].up.bias, model.blocks[1].up.bias  # type: ignore[union-attr, index]
    one.grad, other.grad = other.grad, one.grad


def keep_and_add(model: Module) -> None:
    """The gradients of one loss are kept, and added to those of another."""
    kept = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, batches(1, seed=7)[0]).backward()
    for parameter, old in zip(model.parameters(), kept, strict=True):
        assert parameter.grad is not None and old is not None
        parameter.grad += old * 2


def put_back(model: Module) -> None:
    """Another loss between, whose gradients are not to count."""
    kept = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    loss_of(model, batches(1, seed=7)[0]).backward()
    for parameter, old in zip(model.parameters(), kept, strict=True):
        parameter.grad = old


def with_data(model: Module) -> None:
    for gradient in each(model):
        gradient.data.mul_(0.3)


def new_data(model: Module) -> None:
    for number, gradient in enumerate(each(model)):
        gradient.data = gradient.data * 0.3 if number else -gradient.data


def new_data_of_a_buffer(model: Module) -> list[Tensor]:
    kept = grads(model)
    for gradient in kept:
        buffer = torch.full_like(gradient, 0.25)
        gradient.data = gradient.data
        gradient.data = buffer
        if isinstance(gradient, OffloadedGradient):
            buffer.zero_()
        gradient.mul_(3)
    return kept


def out_of_backward(model: Module) -> list[Tensor]:
    batch = batches(1, seed=7)[0]
    return list(torch.autograd.grad(loss_of(model, batch), list(model.parameters())))


def gathered(model: Module) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in (g.clone() for g in each(model))])


DEEDS: dict[str, Deed] = {
    "nothing": lambda m, o: None,
    "the optimizer clears": lambda m, o: o.zero_grad(),
    "the optimizer fills with zeros": lambda m, o: o.zero_grad(set_to_none=False),
    "the model clears": lambda m, o: m.zero_grad(),
    "the model fills with zeros": lambda m, o: m.zero_grad(set_to_none=False),
    "some are dropped": lambda m, o: drop(m, [0, 3, 4]),
    "set by hand": lambda m, o: set_by_hand(m),
    "set and added to": lambda m, o: (set_by_hand(m), loss_of(m, batches(1, seed=5)[0]).backward())[:0],
    "exchanged": lambda m, o: swap(m),
    "kept and added": lambda m, o: keep_and_add(m),
    "put back": lambda m, o: put_back(m),
    "a clone in its place": lambda m, o: [setattr(p, "grad", here(p.grad)) for p in m.parameters()][:0],
    "multiplied": lambda m, o: no_grad(m, lambda g: g.mul_(0.3)),
    "multiplied twice": lambda m, o: no_grad(m, lambda g: g.mul_(0.3).mul_(0.7)),
    "multiplied by a tensor": lambda m, o: no_grad(m, lambda g: g.mul_(torch.tensor(0.3))),
    "multiplied by a tensor that changes": lambda m, o: [
        g.mul_(factor) for factor in [torch.ones(())] for g in each(m) if factor.add_(0.1) is not None
    ][:0],
    "multiplied by itself": lambda m, o: no_grad(m, lambda g: g.mul_(g)),
    "divided": lambda m, o: no_grad(m, lambda g: g.div_(3)),
    "divided with rounding": lambda m, o: no_grad(m, lambda g: g.div_(0.01, rounding_mode="floor")),
    "times, in Python": lambda m, o: [p.grad.__imul__(0.3) for p in m.parameters()][:0],
    "negated": lambda m, o: no_grad(m, lambda g: g.neg_()),
    "noise": lambda m, o: no_grad(m, lambda g: g.add_(torch.full_like(g, 0.01))),
    "weight decay": lambda m, o: [p.grad.add_(p.detach(), alpha=0.1) for p in m.parameters()][:0],
    "added to itself": lambda m, o: no_grad(m, lambda g: g.add_(g)),
    "a number added": lambda m, o: no_grad(m, lambda g: g.add_(0.5)),
    "subtracted": lambda m, o: no_grad(m, lambda g: g.sub_(0.5)),
    "copied to": lambda m, o: no_grad(m, lambda g: g.copy_(torch.full_like(g, 0.25))),
    "filled": lambda m, o: no_grad(m, lambda g: g.fill_(0.25)),
    "clamped": lambda m, o: no_grad(m, lambda g: g.clamp_(-0.01, 0.02)),
    "freed of nan": lambda m, o: no_grad(m, lambda g: torch.nan_to_num(g, out=g)),
    "out of an operator": lambda m, o: no_grad(m, lambda g: torch.add(g, 1.0, out=g)),
    "masked": lambda m, o: no_grad(m, lambda g: g.masked_fill_(torch.ones_like(g) > 0.5, 0.125)),
    "centred": lambda m, o: no_grad(m, lambda g: g.sub_(g.mean())),
    "through data": lambda m, o: with_data(m),
    "given other data": lambda m, o: new_data(m),
    "given other data, and kept": lambda m, o: new_data_of_a_buffer(m),
    "clipped": lambda m, o: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01),
    "clipped, in a loop": lambda m, o: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, foreach=False),
    "clipped, by foreach": lambda m, o: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, foreach=True),
    "clipped to the largest": lambda m, o: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, float("inf")),
    "clipped, and found finite": lambda m, o: torch.nn.utils.clip_grad_norm_(
        m.parameters(), 0.01, error_if_nonfinite=True
    ),
    "clipped in parts": lambda m, o: [
        torch.nn.utils.clip_grad_norm_(list(m.parameters())[:3], 0.01),
        torch.nn.utils.clip_grad_norm_(list(m.parameters())[3:], 0.002),
    ],
    "clipped by values": lambda m, o: torch.nn.utils.clip_grad_value_(m.parameters(), 0.003),
    "clipped by values, in a loop": lambda m, o: torch.nn.utils.clip_grad_value_(m.parameters(), 0.003, foreach=False),
    "clipped by norm and values": lambda m, o: [
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01),
        torch.nn.utils.clip_grad_value_(m.parameters(), 0.0003),
    ],
    "clipped by its parts": lambda m, o: [
        norm := torch.nn.utils.get_total_norm(grads(m)),
        torch.nn.utils.clip_grads_with_norm_(m.parameters(), 0.01, norm),
    ],
    "foreach mul": lambda m, o: torch._foreach_mul_(grads(m), 0.3),
    "foreach mul by a tensor": lambda m, o: torch._foreach_mul_(grads(m), torch.tensor(0.3)),
    "foreach mul by several": lambda m, o: torch._foreach_mul_(grads(m), [0.1 * n for n in range(len(grads(m)))]),
    "foreach div": lambda m, o: torch._foreach_div_(grads(m), 3.0),
    "foreach add": lambda m, o: torch._foreach_add_(grads(m), grads(m), alpha=0.5),
    "foreach norm": lambda m, o: torch._foreach_norm(grads(m)),
    "foreach norm of an order": lambda m, o: torch._foreach_norm(grads(m), 1.0),
    "foreach zero": lambda m, o: torch._foreach_zero_(grads(m)),
    "foreach, some of them plain": lambda m, o: [
        setattr(next(m.parameters()), "grad", here(some(m))),
        torch._foreach_mul_(grads(m), 0.3),
        torch._foreach_zero_(grads(m)[1:]),
    ][:0],
    "read": lambda m, o: [
        value
        for g in each(m)
        for value in (g.clone(), g.norm(), g.abs().max(), g.isnan().any(), g.isfinite().all(), g.square().sum(), g * 2)
    ],
    "read as numbers": lambda m, o: [(g.sum().item(), float(g.mean()), g.clone().tolist()) for g in each(m)],
    "norms": lambda m, o: [
        value
        for g in each(m)
        for value in (
            torch.linalg.vector_norm(g),
            torch.linalg.vector_norm(g, 1.0),
            torch.linalg.vector_norm(g, 0),
            torch.linalg.vector_norm(g, -float("inf")),
            torch.linalg.vector_norm(g, 2, dtype=torch.float64),
            torch.linalg.vector_norm(g, keepdim=True),
        )
    ],
    "norms of rows": lambda m, o: [torch.linalg.vector_norm(g, dim=0) for g in each(m) if g.ndim],
    "on the CPU": lambda m, o: [value for g in each(m) for value in (g.cpu(), g.to(torch.float64), g.float())],
    "gathered": lambda m, o: gathered(m),
    "to numpy": lambda m, o: [g.clone().numpy().tolist() for g in each(m)],
    "compared": lambda m, o: [(g == g).all() for g in each(m)],
    "scattered to": lambda m, o: no_grad(m, lambda g: g.masked_scatter_(torch.ones_like(g) > 0, torch.ones_like(g))),
    "autograd.grad": lambda m, o: out_of_backward(m),
    "detached": lambda m, o: [g.detach().clone() for g in each(m)],
    "gradients of other tensors": lambda m, o: [torch.zeros_like(g).add_(g).sub_(g * 0.5) for g in each(m)],
    "in an inference mode": lambda m, o: in_inference_mode(m),
}


def in_inference_mode(model: Module) -> list[Tensor]:
    with torch.inference_mode():
        return [gradient.abs().sum().item() for gradient in each(model)]


@pytest.mark.parametrize(
    ("session", "before"), [("cpu", 0), ("adversary", 2)], indirect=["session"], ids=["one", "after-two-backwards"]
)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda name: name.replace(" ", "-"))
@pytest.mark.covered
def test_a_deed_is_done_as_to_plain_gradients(deed: str, before: int, session: spillway.Session) -> None:
    models = wide(), wide()
    # Torch's fused SGD takes no parameters of which some have stepped and some have not.
    optimizer_class: type[Optimizer] = torch.optim.Adagrad if deed == "some are dropped" else torch.optim.SGD
    defaults = {"lr": 0.1, "weight_decay": 0.01, **({"momentum": 0.9} if optimizer_class is torch.optim.SGD else {})}
    optimizers = (
        plainly(optimizer_class, **defaults)(models[0]),
        offloaded(optimizer_class, session, **defaults)(models[1]),
    )
    for number, batch in enumerate(batches(3)):
        results = []
        for model, optimizer in zip(models, optimizers, strict=True):
            for more in batches(before if number == 1 else 0, seed=9):
                loss_of(model, more).backward()
            loss_of(model, batch).backward()
            results.append(DEEDS[deed](model, optimizer))
            if number == 1:
                loss_of(model, batch * 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_results(results[1], results[0])
        assert_same_values(models[1], models[0])
    ours = optimizers[1]
    assert isinstance(ours, OffloadedOptimizer)
    assert_same_state(ours.state_dict(), optimizers[0].state_dict())
    del results
    ours.close()
    if session.used_bytes != (0, 0):
        gc.collect()
    assert session.used_bytes == (0, 0)


def assert_same_results(got: Any, expected: Any) -> None:
    if isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same_results(one, other)
    else:
        assert same_bits(*(one.clone() if isinstance(one, Tensor) else one for one in (got, expected)))


LAZY: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: torch.complex(torch.arange(5.0), torch.ones(5)).conj(),
    "negative": lambda: torch._neg_view(torch.arange(5.0)),
    "negative, with gaps": lambda: torch.complex(torch.arange(5.0), torch.ones(5)).conj().imag,
}


@pytest.mark.parametrize(
    "way",
    [{}, {"offload_gradients": False}, {"step_on": "gpu", "offload_gradients": False}, {"tier": "disk"}],
    ids=["host", "on-the-device", "streamed", "disk"],
)
@pytest.mark.parametrize("count", [1, 2], ids=["one", "two"])
@pytest.mark.parametrize("name", LAZY, ids=lambda name: name.replace(" ", "-").replace(",", ""))
def test_gradients_that_have_a_conjugate_or_negative_bit(
    name: str, count: int, way: dict[str, Any], session: spillway.Session
) -> None:
    ours, plain = (Parameter(torch.ones_like(LAZY[name]().resolve_conj().resolve_neg())) for _ in range(2))
    optimizer = OffloadedOptimizer([ours], torch.optim.SGD, lr=0.1, session=session, foreach=False, **way)
    reference = torch.optim.SGD([plain], lr=0.1, foreach=False)
    for parameter, one in ((ours, optimizer), (plain, reference)):
        # A hook's new tensor becomes the gradient, as it is.
        parameter.register_hook(lambda _: LAZY[name]())
        for _ in range(count):
            (parameter * 2).abs().sum().backward()
        one.step()
    assert same_bits(here(ours.grad).resolve_conj().resolve_neg(), here(plain.grad).resolve_conj().resolve_neg())
    assert same_bits(ours, plain)
    optimizer.close()


@pytest.mark.parametrize("data", [torch.zeros(3), torch.zeros(2, 3, device="meta")], ids=["shape", "device"])
def test_data_of_another_kind_is_refused(data: Tensor, session: spillway.Session) -> None:
    parameter = Parameter(torch.zeros(2, 3))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=session)
    parameter.sum().backward()
    assert parameter.grad is not None
    with pytest.raises(UsageError, match=r"got data of shape .* which has shape \(2, 3\)"):
        parameter.grad.data = data
    assert same_bits(here(parameter.grad), torch.ones(2, 3))
    optimizer.close()


@pytest.mark.parametrize(
    "way",
    [{}, {"step_on": "gpu"}, {"step_on": "gpu", "pieces": 2}, {"tier": "disk"}],
    ids=["host", "streamed", "streamed-in-pieces", "disk"],
)
@pytest.mark.parametrize("how", ["sum", "norm", "factor", "write"])
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="a torch whose gradients have their tensor's type")
def test_wider_gradients_are_summed_in_their_type(
    how: str, way: dict[str, Any], session: spillway.Session, pieces_of: Callable[[int], None]
) -> None:
    way = dict(way)
    pieces_of(way.pop("pieces", 1 << 20))
    ours, plain = (Parameter(torch.zeros(37, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = OffloadedOptimizer([ours], torch.optim.SGD, lr=1.0, session=session, master_dtype=None, **way)
    if how == "sum":
        # The first sums are narrow.
        for _ in range(2):
            ours.sum().backward()
        optimizer.zero_grad()
    for _ in range(2):
        for parameter in (ours, plain):
            parameter.grad_dtype = torch.float32  # type: ignore[attr-defined]
            for _ in range({"sum": 600, "norm": 2}.get(how, 1)):
                parameter.backward(torch.linspace(1, 2, 37))
            assert parameter.grad is not None
            if how == "factor":
                parameter.grad.mul_(1.3)
                parameter.grad.mul_(0.7)
            if how == "write":
                parameter.grad.add_(torch.linspace(1, 2, 37), alpha=-2)
        assert ours.grad is not None and plain.grad is not None
        assert same_bits(here(ours.grad), plain.grad)
        if how == "norm":
            assert same_bits(ours.grad.norm(), plain.grad.norm())
        expected = ours.detach() - plain.grad.bfloat16()
        optimizer.step()
        optimizer.zero_grad()
        plain.grad = None
        assert same_bits(ours, expected)
    optimizer.close()


@pytest.mark.parametrize("numel", [5, 1 << 18], ids=["small", "large"])
def test_a_gradient_that_was_set_may_be_written_after_the_step(numel: int, session: spillway.Session) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(numel, 1, bias=False), torch.nn.Linear(1, 1))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.SGD, lr=1.0, session=session)
    optimizer.overlap_forward(model, blocks=torch.nn.Linear)
    buffers = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for number in range(3):
        for parameter, buffer in zip(model.parameters(), buffers, strict=True):
            parameter.grad = buffer.fill_(number + 1)
        optimizer.step()
        for value, buffer in zip(expected, buffers, strict=True):
            value.sub_(number + 1)
            buffer.fill_(100)
        optimizer.zero_grad()
    optimizer.synchronize()
    assert_same_values(model.parameters(), expected)
    optimizer.close()


def test_its_own_data_keep_the_bits_of_sums(session: spillway.Session) -> None:
    parameter = Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=session)
    for factor in (1.0, 2.0**-12):
        (parameter * factor).sum().backward()
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data
    torch.nn.Module.to(torch.nn.ParameterList([parameter]), torch.bfloat16)
    optimizer.step()
    assert same_bits(optimizer.state[parameter]["master"], torch.full((3,), -1 - 2.0**-12))
    optimizer.close()


def test_data_of_a_gradient_that_a_step_reads(session: spillway.Session) -> None:
    models = wide(), wide()
    options = {"step_on": "gpu", "offload_gradients": False, "foreach": False, "lr": 0.1, "momentum": 0.9}
    ours = offloaded(torch.optim.SGD, session, **options)(models[0])
    ours.overlap_forward(models[0])
    reference = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9, foreach=False)
    for batch in batches(3):
        for model, optimizer in zip(models, (ours, reference), strict=True):
            loss_of(model, batch).backward()
            optimizer.step()
            new_data(model)
    ours.synchronize()
    assert_same_values(models[0], models[1])
    ours.close()
