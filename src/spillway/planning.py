"""The public calls of planning: a profile of a step, a plan within a budget, the step that it is predicted to be.

Each is a function of the one before; only :func:`profile` runs anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from spillway.attaching import attach
from spillway.attaching.budget import allowed
from spillway.attaching.collector import ProfileCollector, tensors_of
from spillway.attaching.meta_profile import is_on_meta, profile_on_meta
from spillway.errors import UnsupportedError, UsageError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import Plan, program_of
from spillway.planner.planner import POINTS, Curve, divided, make_curve, make_plan, rates_of
from spillway.planner.profile import Profile
from spillway.planner.timeline import Timeline, simulate_program
from spillway.profiler.compile import without_lead
from spillway.profiler.machine import known_hardware
from spillway.profiler.meta_device import OptimizerOf
from spillway.runtime.system import local_ranks
from spillway.session import Session

Loss = Callable[[Any], torch.Tensor]
"""From what the model gave to a number."""

_MOST_STEPS = 4
WINDOW = 512 << 20
"""Bytes in flight, unless a window is given."""


def profile(
    model: Module,
    batch: Any,
    *,
    loss: Loss | None = None,
    blocks: Any = None,
    session: Session | None = None,
    hardware: Hardware | str | None = None,
    device: str | None = None,
    attention: str | None = None,
    optimizer: torch.optim.Optimizer | OptimizerOf | float | None = None,
) -> Profile:
    """Measure what a step of a model does, in little memory: a step that is recomputed and whose inputs are away.

    Two forwards and backwards are run, without an optimizer. Parameters, gradients, buffers and random generators are
    afterwards what they were.

    With ``hardware``, nothing is measured: the step is worked out for hardware that need not be there. The model may be
    on ``meta``, or anywhere; tensors on ``meta`` stand for its own, nothing is computed, no memory is allocated and no
    generator is moved. Bytes and lifetimes are those of the kernels that the target would run, times are estimates
    (``docs/planning.md`` says of what, and how near).

    Args:
        model: in training mode.
        batch: what the model is called with: a tuple of arguments, a dictionary of keyword arguments (or a mapping,
            such as what a tokenizer of transformers gives), or one argument.
        loss: from what the model gives to a scalar. ``None``: the model's ``loss`` attribute or first output, or the
            mean of its squares if that is no scalar.
        blocks: which modules are blocks, as for :func:`spillway.attach`.
        session: ``None``: the default one.
        hardware: what the target can do; a name: ``"h200"``, ``"h100"``, ``"a100"``, ``"rtx4090"``; or a file of
            :meth:`Hardware.save`. ``None``: the step is measured where the model is.
        device: with hardware: the target's type, ``"cuda"`` or ``"cpu"``. ``None``: ``"cuda"``.
        attention: with hardware: which of torch's kernels of attention is tried first on a CUDA device: ``"flash"``,
            ``"cudnn"``, ``"efficient"`` or ``"math"``. ``None``: as torch does on it.
        optimizer: the optimizer, whose state :attr:`Profile.static` then tells apart; it makes no step. ``None``: its
            state is in what is not told apart. With hardware: whose state is there when a step begins, a class such as
            ``torch.optim.AdamW``, a function from a list of parameters to an optimizer, or bytes for each element of a
            trained parameter; ``None``: no state.

    Raises:
        UsageError: for a model in evaluation mode, or arguments that cannot be meant.
        UnsupportedError: where no backward came through the blocks; with hardware, for operators that hang on the
            content of tensors, or whose kernels are not modelled.

    Example:
        >>> profile = spillway.profile(model, tokens, loss=lambda logits: logits.mean())  # doctest: +SKIP
        >>> print(spillway.plan(profile, budget="20GiB"))  # doctest: +SKIP
        >>> profile = spillway.profile(model, tokens, hardware="h100", optimizer=torch.optim.AdamW)  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if isinstance(batch, Mapping):
        # Others are no trees of tensors to torch.
        batch = dict(batch)
    if not model.training:
        raise UsageError("model: got one in evaluation mode, expected one in training mode; call model.train()")
    if hardware is not None:
        found = profile_on_meta(
            model,
            batch,
            lambda model, batch: scalar_of(call(model, batch), loss),
            blocks=blocks,
            hardware=Hardware.of(hardware),
            target=device,
            attention=attention,
            optimizer=optimizer,
        )
        if found is None:
            raise _without_backward(model, 1)
        return found
    given = [name for name, option in (("device", device), ("attention", attention)) if option is not None]
    if given:
        raise UsageError(
            f"got {', '.join(given)} without hardware, expected them beside it, since a step that is measured has its "
            f"own; give hardware=..."
        )
    if is_on_meta(model, batch):
        raise UsageError(
            "got a model or a batch on the meta device, which has no memory to measure, expected one on a device that "
            "computes; say what it would run on: hardware='h100'"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer: got {optimizer!r:.200}, expected the torch.optim.Optimizer of the model, or None; a class, or "
            f"bytes an element, is for hardware that is not there: give hardware=... beside it"
        )
    collector = ProfileCollector(model, session, stepped=optimizer)
    with as_it_was(model, batch), attach(model, blocks=blocks, session=session) as attached:
        attached.follow(collector)
        for _ in range(_MOST_STEPS):
            scalar_of(call(model, batch), loss).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            collector.finish()
            if collector.profile is not None:
                # Whether the loop that it is for waits for the device is not known.
                return without_lead(collector.profile)
    raise _without_backward(model, _MOST_STEPS)


def plan(
    profile: Profile,
    *,
    budget: int | float | str,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    hardware: Hardware | str | None = None,
    window: int | str | None = None,
) -> Plan:
    """The plan with the shortest step within a budget: a decision for each operator of each block.

    The same arguments give the same plan, in every process. Which values are worth preserving is found by minimum cuts
    (``spillway/planner/options.py``), which block does what by a linear programme and a search over simulated steps
    (``spillway/planner/solve.py``).

    Args:
        profile: of a step, by :func:`profile` or :attr:`Attached.profile <spillway.Attached.profile>`.
        budget: bytes that a step may have allocated on the device, all included, or a size like ``"40GiB"``. Or a
            share, ``0.5`` or ``"50%"``: what is there when the step begins, and this share of what a step that keeps
            everything has beyond that at its peak.
        host_budget: bytes of host memory that may be used. ``None``: any.
        disk_budget: bytes of disk. ``None``: any.
        allow: what may be done, of ``"keep"``, ``"host"``, ``"disk"`` and ``"recompute"``. ``None``: all but
            ``"disk"`` for an accelerator, all but ``"host"`` for the CPU.
        hardware: what the machine can do; a name: ``"h200"``, ``"h100"``, ``"a100"``, ``"rtx4090"``; or a file of
            :meth:`Hardware.save`. ``None``: this machine, as it was measured.
        window: bytes that may be on their way at once, at most. ``None``: what is best, about 512 MiB.

    Raises:
        BudgetError: if nothing fits; it names the least budget that does.
        UsageError: for arguments that cannot be meant.

    Example:
        >>> spillway.plan(profile, budget="20GiB", hardware="h100").predicted_seconds  # doctest: +SKIP
    """
    found, options = _planned_with(profile, hardware, window, allow)
    return make_plan(profile, found, budget=budget, host_budget=host_budget, disk_budget=disk_budget, **options)


def sweep(
    profile: Profile,
    *,
    allow: Collection[str] | None = None,
    hardware: Hardware | str | None = None,
    window: int | str | None = None,
    points: int = POINTS,
    on_point: Callable[[int, int], None] | None = None,
) -> Curve:
    """Plans for several budgets: what a step takes over the most that it has on the device.

    Args:
        profile: as for :func:`plan`, and so are the next three.
        allow: what may be done.
        hardware: what the machine can do.
        window: bytes that may be on their way at once.
        points: how many budgets, each of which takes as long as a plan does.
        on_point: is told how many plans have been made, and of how many, after each.

    Raises:
        UsageError: for arguments that cannot be meant.
    """
    found, options = _planned_with(profile, hardware, window, allow)
    return make_curve(profile, found, points=points, on_point=on_point, **options)


def _planned_with(
    profile: Profile, hardware: Hardware | str | None, window: int | str | None, allow: Collection[str] | None
) -> tuple[Hardware, dict[str, Any]]:
    """The hardware and the options of plans, as they are meant."""
    if not isinstance(profile, Profile):
        raise UsageError(f"profile: got {profile!r:.200}, expected a spillway.Profile, as spillway.profile() makes it")
    device = torch.device(profile.device)
    return hardware_of(hardware, device), {
        "window": WINDOW if window is None else window,
        "may_grow": window is None,
        "allow": allowed(device, allow),
        "active": local_ranks(),
    }


def simulate(profile: Profile, plan: Plan, *, hardware: Hardware | str | None = None) -> Timeline:
    """The step that a plan is predicted to be: what each lane does when, and the bytes on each tier.

    Args:
        profile: of a step.
        plan: of this profile's model.
        hardware: as for :func:`plan`.

    Raises:
        UsageError: for a plan of another model, or arguments that cannot be meant.

    Example:
        >>> spillway.simulate(profile, plan).stall_seconds  # doctest: +SKIP
    """
    found, _ = _planned_with(profile, hardware, None, None)
    rates = rates_of(plan, found, active=local_ranks())
    part = divided(profile, 1.0 if plan.optimizer_fraction is None else plan.optimizer_fraction, found)
    return simulate_program(program_of(part, plan), rates, spans=True)


def _without_backward(model: Module, steps: int) -> UnsupportedError:
    return UnsupportedError(
        f"profile: got {steps} step{'s' if steps > 1 else ''} of {type(model).__name__} without a backward through its "
        f"blocks, expected one; give a loss that depends on all blocks"
    )


def hardware_of(hardware: Hardware | str | None, device: torch.device) -> Hardware:
    """What is meant, or what was measured of this machine."""
    if hardware is not None:
        return Hardware.of(hardware)
    here = torch.accelerator.current_accelerator()
    if device.type != "cpu" and (here is None or here.type != device.type):
        raise UsageError(
            f"hardware: got None for a profile of {device.type}, which is not here, expected what it would run on; "
            f"give hardware='h100', or what the profile was made for"
        )
    return known_hardware(device)


def call(model: Module, batch: Any) -> Any:
    """Call a model with a batch, as :func:`profile` is given it."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def scalar_of(output: Any, loss: Loss | None) -> torch.Tensor:
    """What backward begins with."""
    value: Any = getattr(output, "loss", None) if loss is None else loss(output)
    if loss is None and value is None:
        value = next(iter(tensors_of(output)), None)
    if loss is None and isinstance(value, torch.Tensor) and value.numel() != 1:
        value = value.float().square().mean()
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UsageError(f"loss: got {value!r:.200}, expected a tensor with one number; give profile(..., loss=...)")
    number: torch.Tensor = value
    return number


@contextlib.contextmanager
def as_it_was(model: Module, batch: Any) -> Iterator[None]:
    """Gradients, buffers and generators are put back."""
    inputs = [tensor for tensor in tensors_of(batch) if tensor.is_leaf]
    gradients = [(leaf, leaf.grad) for leaf in (*model.parameters(), *inputs)]
    # A forward may write into a buffer, or put another tensor in its place.
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    devices = [] if device.type == "cpu" else [device]
    for leaf, _ in gradients:
        leaf.grad = None
    try:
        with torch.random.fork_rng(devices, device_type="cuda" if not devices else device.type):
            yield
    finally:
        for leaf, gradient in gradients:
            leaf.grad = gradient
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer
