"""Megatron-Core's optimizer by its names: against the same written out by hand, and what programs lean on."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import SGD, Adam, AdamW, Optimizer

import spillway
from spillway import OffloadedOptimizer, UnsupportedError, UsageError
from spillway.compat.megatron import HybridDeviceOptimizer
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.testing import AdversaryBackend

WIDTH = 24
ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLASSES: dict[str, tuple[type[Optimizer], type[Optimizer], dict[str, Any]]] = {
    "adam": (Adam, Adam, ADAM),
    "adamw, adam": (AdamW, Adam, ADAM),
    "sgd": (SGD, SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
}


@pytest.fixture(params=["plain", "adversary"])
def session(request: pytest.FixtureRequest) -> Iterator[spillway.Session]:
    adversary = AdversaryBackend() if request.param == "adversary" else None
    with spillway.Session(backend=adversary.serve) if adversary else spillway.Session() as session:
        yield session
    if adversary is not None:
        adversary.check()


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.LayerNorm(WIDTH)).to(dtype)


def backward(trained: nn.Module) -> None:
    trained(torch.randn(4, WIDTH, dtype=next(trained.parameters()).dtype)).square().mean().backward()


def train(trained: nn.Module, optimizer: Optimizer, steps: int = 3, seed: int = 1) -> None:
    torch.manual_seed(seed)
    for _ in range(steps):
        backward(trained)
        optimizer.step()
        optimizer.zero_grad()


def hybrid(trained: nn.Module, **options: Any) -> HybridDeviceOptimizer:
    options = {"cpu_optimizer_cls": Adam, **(ADAM if "cpu_optimizer_cls" not in options else {}), **options}
    return HybridDeviceOptimizer(trained.parameters(), **options)


def first_until(parameters: list[Tensor], fraction: float) -> int:
    """How many of the first parameters reach the fraction."""
    wanted, taken, count = fraction * sum(each.numel() for each in parameters), 0, 0
    while taken < wanted:
        taken += parameters[count].numel()
        count += 1
    return count


class ByHand(Optimizer):
    """The same written out: copies of the first parameters, in ``float32`` if wanted, and a class for each side."""

    def __init__(
        self, parameters: list[Tensor], fraction: float, classes: Any, options: dict[str, Any], fp32: bool
    ) -> None:
        super().__init__(parameters, {})
        cut = first_until(parameters, fraction)
        self.copies = [nn.Parameter(each.detach().to(torch.float32 if fp32 else each.dtype)) for each in parameters]
        for copy, each in zip(self.copies, parameters, strict=True):
            assert copy is not each
        host, device = classes
        # Torch's fused SGD leaves parameters of narrow types as they are.
        fused = host is not torch.optim.SGD or self.copies[0].dtype == torch.float32
        self.inner = [host(self.copies[:cut], fused=fused, **options)] if cut else []
        self.inner += [device(self.copies[cut:], **options)] if cut < len(parameters) else []

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        for copy, each in zip(self.copies, parameters, strict=True):
            copy.grad = None if each.grad is None else each.grad.to(copy.dtype)
        for inner in self.inner:
            inner.step()
        for copy, each in zip(self.copies, parameters, strict=True):
            each.copy_(copy)


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, one.parameters(), other.parameters()))


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("moved", [(0, True), (0.5, True), (0.5, False), (1.0, True)])
@pytest.mark.parametrize("precision", [(torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)])
def test_it_is_the_same_written_out_by_hand(
    session: spillway.Session, classes: str, moved: tuple[float, bool], precision: tuple[torch.dtype, bool]
) -> None:
    (host, device, options), (fraction, overlap), (dtype, fp32) = CLASSES[classes], moved, precision
    plain, ours = model(dtype), model(dtype)
    train(plain, ByHand(list(plain.parameters()), fraction, (host, device), options, fp32))
    optimizer = HybridDeviceOptimizer(
        ours.parameters(),
        offload_fraction=fraction,
        cpu_optimizer_cls=host,
        gpu_optimizer_cls=device,
        param_update_in_fp32=fp32,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        session=session,
        **options,
    )
    train(ours, optimizer)
    assert_same(ours, plain)
    optimizer.close()
    assert session.used_bytes == (0, 0)


def test_the_arguments_are_theirs_in_their_order_with_their_defaults() -> None:
    parameters = inspect.signature(HybridDeviceOptimizer).parameters
    theirs = [(name, each.default) for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert theirs == [
        ("params", inspect.Parameter.empty),
        ("offload_fraction", 0.5),
        ("cpu_optimizer_cls", None),
        ("gpu_optimizer_cls", None),
        ("param_update_in_fp32", False),
        ("pin_cpu_grads", True),
        ("pin_cpu_params", True),
        ("overlap_cpu_optimizer_d2h_h2d", True),
    ]
    optimizer = HybridDeviceOptimizer(model().parameters(), 0.25, SGD, SGD, True, False, False, False, lr=0.1)
    for name, expected in (*zip(dict(theirs[1:]), (0.25, SGD, SGD, True, False, False, False), strict=True),):
        assert getattr(optimizer, name) == expected
    assert optimizer.sub_optimizer_kwargs == {"lr": 0.1}
    assert isinstance(optimizer, OffloadedOptimizer)


@pytest.mark.parametrize("fraction", [0, 0.3, 0.5, 1])
def test_the_first_parameters_step_on_the_host_until_the_fraction_is_reached(fraction: float) -> None:
    trained = model()
    parameters = list(trained.parameters())
    optimizer = hybrid(trained, offload_fraction=fraction)
    cut = first_until(parameters, fraction)
    assert [optimizer.holds(each) for each in parameters] == [True] * cut + [False] * (len(parameters) - cut)


def test_one_class_is_that_of_both_sides_and_none_is_an_error() -> None:
    for options in ({"cpu_optimizer_cls": SGD}, {"gpu_optimizer_cls": SGD}, {"cpu_optimizer_cls": SGD}):
        plain, ours = model(), model()
        train(plain, SGD(plain.parameters(), lr=0.1))
        train(ours, HybridDeviceOptimizer(ours.parameters(), **options, lr=0.1))
        assert_same(ours, plain)
    with pytest.raises(UsageError, match="cpu_optimizer_cls, gpu_optimizer_cls: both are None"):
        HybridDeviceOptimizer(model().parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"^exp_avg_dtype: not supported"):
        hybrid(model(), exp_avg_dtype=torch.float16)
    with pytest.raises(ValueError, match="fraction: got 2"):
        hybrid(model(), offload_fraction=2)


def test_groups_keep_what_else_they_have_and_arguments_that_no_class_takes_are_in_them() -> None:
    trained = model()
    groups = [
        {"params": [*trained[0].parameters(), *trained[1].parameters()], "wd_mult": 1.0, "lr_mult": 1e-4},
        {"params": [*trained[2].parameters(), *trained[3].parameters()], "wd_mult": 0.0, "lr": 0.5},
    ]
    optimizer = HybridDeviceOptimizer(groups, cpu_optimizer_cls=Adam, **ADAM, fused=True, bias_correction=True)
    optimizer.add_param_group({"params": [*trained[4].parameters()]})
    one, two, three = optimizer.param_groups
    assert (one["wd_mult"], one["lr_mult"], one["lr"]) == (1.0, 1e-4, ADAM["lr"])
    assert (two["wd_mult"], two["lr"]) == (0.0, 0.5)
    assert all(group["bias_correction"] is True for group in (one, two, three))
    assert not any("offload_fraction" in group or "cpu_optimizer_cls" in group for group in (one, two, three))
    train(trained, optimizer)


def test_one_can_be_made_anew_from_anothers_defaults() -> None:
    plain, ours = model(), model()
    first = hybrid(ours, offload_fraction=0.5, param_update_in_fp32=True, bias_correction=True)
    again = HybridDeviceOptimizer(params=[{"params": list(ours.parameters())}], **first.defaults)
    assert again.defaults == first.defaults
    assert [again.holds(each) for each in ours.parameters()] == [first.holds(each) for each in ours.parameters()]
    del first
    train(plain, Adam(plain.parameters(), fused=True, **ADAM))
    again.param_groups[0].update(fused=True)
    train(ours, again)
    assert_same(ours, plain)


def test_with_overlap_gradients_leave_in_backward_and_without_they_stay() -> None:
    for overlap in (True, False):
        trained = model()
        optimizer = hybrid(trained, offload_fraction=0.5, overlap_cpu_optimizer_d2h_h2d=overlap)
        backward(trained)
        away = [isinstance(each.grad, OffloadedGradient) for each in trained.parameters()]
        assert away == [overlap and optimizer.holds(each) for each in trained.parameters()]


@pytest.mark.parametrize("pinned", [True, False])
def test_pin_switches_change_nothing(pinned: bool) -> None:
    plain, ours = model(), model()
    train(plain, hybrid(plain))
    train(ours, hybrid(ours, pin_cpu_grads=pinned, pin_cpu_params=pinned))
    assert_same(ours, plain)


def test_a_gradient_that_becomes_none_is_not_stepped_again() -> None:
    """Hazard 56."""
    trained = model()
    optimizer = hybrid(trained, offload_fraction=1.0)
    train(trained, optimizer)
    before = [each.detach().clone() for each in trained.parameters()]
    trained[0].weight.grad = torch.ones(WIDTH, WIDTH)
    optimizer.step()
    changed = [not torch.equal(*pair) for pair in zip(before, trained.parameters(), strict=True)]
    assert changed == [True, *[False] * (len(before) - 1)]


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masters_are_taken_from_new_parameters(session: spillway.Session, fraction: float, dtype: torch.dtype) -> None:
    """Hazard 55, also where the weights were written through ``.data``, which no version tells of."""
    trained = model(dtype)
    optimizer = HybridDeviceOptimizer(
        trained.parameters(), fraction, SGD, param_update_in_fp32=True, lr=1.0, session=session
    )
    train(trained, optimizer)
    for each in trained.parameters():
        each.data.copy_(torch.full_like(each, 0.5))
        each.grad = torch.full_like(each, 2**-12)
    optimizer.update_fp32_param_by_new_param()
    optimizer.step()
    expected = 0.5 - 2**-12
    for each in trained.parameters():
        assert bool((each == torch.tensor(expected).to(dtype)).all())
        if dtype is torch.bfloat16:
            assert bool((optimizer.state[each]["master"] == expected).all())
    optimizer.close()


@pytest.mark.parametrize("fraction", [0, 0.5, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dummy_step_makes_the_state_and_changes_nothing_else(
    session: spillway.Session, fraction: float, dtype: torch.dtype
) -> None:
    trained = model(dtype)
    options = {"param_update_in_fp32": True, "session": session}
    optimizer = HybridDeviceOptimizer(trained.parameters(), fraction, AdamW, **options, **ADAM)
    before = [each.detach().clone() for each in trained.parameters()]
    optimizer.dummy_step()
    assert all(map(torch.equal, trained.parameters(), before))
    assert all(each.grad is None for each in trained.parameters())
    assert optimizer.param_groups[0]["lr"] == ADAM["lr"]
    names = {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if dtype is torch.bfloat16 else set())
    assert all(optimizer.state[each].keys() == names for each in trained.parameters())
    states = [{name: value.clone() for name, value in optimizer.state[each].items()} for each in trained.parameters()]
    optimizer.dummy_step()
    for each, state in zip(trained.parameters(), states, strict=True):
        assert all(torch.equal(optimizer.state[each][name], value) for name, value in state.items())
    optimizer.close()


def test_the_state_of_a_dummy_step_is_there_also_where_parameters_come_back_in_forward() -> None:
    trained = model()
    optimizer = hybrid(trained)
    optimizer.overlap_forward(trained, blocks=nn.Linear)
    optimizer.dummy_step()
    assert len(optimizer.state) == len(list(trained.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_may_be_loaded_into_the_tensors_of_a_dummy_step(dtype: torch.dtype) -> None:
    plain, ours = model(dtype), model(dtype)
    expected = hybrid(plain, param_update_in_fp32=True)
    train(plain, expected)
    optimizer = hybrid(ours, param_update_in_fp32=True)
    optimizer.dummy_step()
    ours.load_state_dict(plain.state_dict())
    saved, made = expected.state_dict()["state"], optimizer.state_dict()["state"]
    assert saved.keys() == made.keys()
    for number, state in saved.items():
        for name, value in state.items():
            made[number][name].copy_(value)
    train(plain, expected, seed=2)
    train(ours, optimizer, seed=2)
    assert_same(ours, plain)


def saved_and_loaded(value: Any) -> Any:
    """By way of a file, with nothing in it but tensors and plain values."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("other", [0.25, 1.0])
def test_a_state_is_saved_under_their_name_of_a_master_and_resumes_with_any_fraction(
    fraction: float, other: float
) -> None:
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    options = {"param_update_in_fp32": True, "fused": True}
    expected = hybrid(plain, offload_fraction=fraction, **options)
    train(plain, expected)
    saved = saved_and_loaded(expected.state_dict())
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq", "master_param"} for state in saved["state"].values())
    ours.load_state_dict(plain.state_dict())
    optimizer = hybrid(ours, offload_fraction=other, **options)
    optimizer.load_state_dict(saved)
    train(plain, expected, seed=2)
    train(ours, optimizer, seed=2)
    assert_same(ours, plain)


def test_the_engines_own_name_of_a_master_is_known_too() -> None:
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    engine = OffloadedOptimizer(plain.parameters(), Adam, **ADAM)
    train(plain, engine)
    ours.load_state_dict(plain.state_dict())
    optimizer = hybrid(ours, offload_fraction=1.0, param_update_in_fp32=True)
    optimizer.load_state_dict(engine.state_dict())
    train(plain, engine, seed=2)
    train(ours, optimizer, seed=2)
    assert_same(ours, plain)


def test_it_goes_through_torchs_distributed_checkpoint() -> None:
    plain, ours = model(torch.bfloat16), model(torch.bfloat16)
    expected = hybrid(plain, param_update_in_fp32=True)
    train(plain, expected)
    optimizer = hybrid(ours, param_update_in_fp32=True)
    ours.load_state_dict(plain.state_dict())
    set_optimizer_state_dict(ours, optimizer, get_optimizer_state_dict(plain, expected))
    train(plain, expected, seed=2)
    train(ours, optimizer, seed=2)
    assert_same(ours, plain)


def test_a_decoupled_gradient_is_the_gradient_and_may_be_of_another_type() -> None:
    plain = [nn.Parameter(torch.ones(WIDTH)) for _ in range(4)]
    ours = [nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16)) for _ in range(4)]
    expected = Adam(plain, fused=True, **ADAM)
    optimizer = HybridDeviceOptimizer(ours, 0.5, Adam, param_update_in_fp32=True, fused=True, **ADAM)
    for step in range(3):
        for number, (one, two) in enumerate(zip(plain, ours, strict=True)):
            one.grad = torch.randn(WIDTH)
            two.decoupled_grad = one.grad.clone()
            two.grad = torch.ones_like(two)
            if step == 1 and number in (0, 3):
                one.grad = two.decoupled_grad = None
        expected.step()
        optimizer.step()
        for one, two in zip(plain, ours, strict=True):
            assert torch.equal(optimizer.state[two]["master"], one)
            assert torch.equal(two, one.to(torch.bfloat16))
    optimizer.zero_grad(set_to_none=False)
    assert all(bool((each.decoupled_grad == 0).all()) for each in ours)
    optimizer.zero_grad()
    assert all(each.decoupled_grad is None and each.grad is None for each in ours)


def test_parts_of_parameters_may_be_stepped_as_a_sharded_optimizer_does() -> None:
    """Views of flat memory that require no grad, with gradients that are put there by hand."""
    memory = torch.randn(4 * WIDTH, dtype=torch.bfloat16)
    shards = [memory[start : start + WIDTH] for start in range(0, 4 * WIDTH, WIDTH)]
    plain = [nn.Parameter(each.float()) for each in shards]
    expected = Adam(plain, fused=True, **ADAM)
    optimizer = HybridDeviceOptimizer(shards, 0.5, Adam, param_update_in_fp32=True, fused=True, **ADAM)
    for _ in range(3):
        for one, two in zip(plain, shards, strict=True):
            two.grad = torch.randn(WIDTH, dtype=torch.bfloat16)
            one.grad = two.grad.float()
        expected.step()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(memory, torch.cat([each.detach().to(torch.bfloat16) for each in plain]))


def test_a_closure_is_called_once_and_its_loss_is_given() -> None:
    trained = model()
    optimizer = hybrid(trained, offload_fraction=0.5)
    calls = []

    def closure() -> Tensor:
        calls.append(None)
        optimizer.zero_grad()
        loss: Tensor = trained(torch.ones(2, WIDTH)).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert len(calls) == 1


def test_step_hooks_and_schedulers_see_one_optimizer() -> None:
    trained = model()
    optimizer = hybrid(trained, offload_fraction=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train(trained, optimizer, steps=1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == ADAM["lr"] / 2
    assert seen == ["before", "after"]
