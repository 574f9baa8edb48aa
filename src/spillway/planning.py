"""The public calls of planning: profile a step, plan it within a budget, simulate the plan, find the longest sequence.

Each is a function of the one before; only :func:`profile` and :func:`longest` run anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn import Module

from spillway.attaching import attach
from spillway.attaching.blocks import tensors_of
from spillway.attaching.budget import allowed
from spillway.attaching.collector import ProfileCollector
from spillway.attaching.meta_profile import is_on_meta, profile_on_meta
from spillway.attaching.model import ModelCall
from spillway.errors import BudgetError, UnsupportedError, UsageError
from spillway.planner.hardware import Hardware
from spillway.planner.plan import Plan, program_of
from spillway.planner.planner import make_plan, planning_rates, profile_for
from spillway.planner.profile import Profile
from spillway.planner.solve import aim_at
from spillway.planner.timeline import Timeline, simulate_program
from spillway.profiler.machine import known_hardware
from spillway.profiler.meta_device import OptimizerOf
from spillway.profiler.meter import allocated
from spillway.runtime.system import local_ranks
from spillway.session import Session
from spillway.units import parse_bytes

Loss = Callable[[Any], torch.Tensor]
"""From the output of a model to a scalar."""

_MOST_STEPS = 4
WINDOW = 512 << 20
"""The in-flight limit in bytes, unless given."""
_TRIES = 3
"""Plans for one size."""
_SLACK = 1 << 20
_FARTHEST = 64
"""Predictions go up to this many times the largest size that was run."""


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
    optimizer: torch.optim.Optimizer | OptimizerOf | float | Literal["offloaded"] | None = None,
    stream: Any = None,
) -> Profile:
    """Measure a training step in little memory: blocks are recomputed, and their inputs offloaded.

    Two forwards and backwards are run, without an optimizer. Parameters, gradients, buffers and random generators are
    restored.

    With ``hardware``, nothing is measured: the step is predicted for hardware that need not be present. The model may
    be on ``meta``, or anywhere; tensors on ``meta`` stand for its own, nothing is computed, no memory is allocated and
    no generator is advanced. Bytes and lifetimes are those of the kernels that the target would run, and times are
    estimates (``docs/planning.md`` has their errors).

    Args:
        model: in training mode.
        batch: the arguments of the model: a tuple of arguments, a dictionary of keyword arguments (or a mapping, such
            as the output of a tokenizer of transformers), or one argument.
        loss: from the model's output to a scalar. ``None``: the output's ``loss`` attribute or its first tensor, or the
            mean of its squares if that is no scalar.
        blocks: the modules that are blocks, as for :func:`spillway.attach`.
        session: ``None``: the default one.
        hardware: the target: ``"h200"``, ``"h100"``, ``"a100"``, ``"rtx4090"``, or a file of :meth:`Hardware.save`.
            ``None``: the step is measured on the model's device.
        device: with hardware: the target's type, ``"cuda"`` or ``"cpu"``. ``None``: ``"cuda"``.
        attention: with hardware: the attention kernel that torch tries first on a CUDA device: ``"flash"``,
            ``"cudnn"``, ``"efficient"`` or ``"math"``. ``None``: torch's own order.
        optimizer: the optimizer, whose state :attr:`Profile.static` then shows; it makes no step. With hardware: the
            optimizer whose state is in memory when a step begins: a class such as ``torch.optim.AdamW``, a function
            from a list of parameters to an optimizer, or bytes for each element of a trained parameter. ``None``: its
            state is not shown, and with hardware there is none. ``"offloaded"``, with hardware: an
            :class:`~spillway.OffloadedOptimizer` that has all state in CPU memory, and gradients as they arrive.
        stream: with hardware: blocks whose weights are in CPU memory, as for :func:`spillway.attach`; ``"auto"``: all.
            They are frozen, or the optimizer is ``"offloaded"``.

    Raises:
        UsageError: for a model in evaluation mode, or invalid arguments.
        UnsupportedError: if no backward came through the blocks; with hardware, for operators that depend on the
            content of tensors, or whose kernels are not modelled.

    Example:
        >>> profile = spillway.profile(model, tokens, loss=lambda logits: logits.mean())  # doctest: +SKIP
        >>> print(spillway.plan(profile, budget="20GiB"))  # doctest: +SKIP
        >>> profile = spillway.profile(model, tokens, hardware="h100", optimizer=torch.optim.AdamW)  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if isinstance(batch, Mapping):
        # Torch does not look for tensors in other mappings.
        batch = dict(batch)
    if not model.training:
        raise UsageError("The model is in evaluation mode, and a profile needs a training step. Call model.train().")
    if not torch.is_grad_enabled():
        raise UsageError("Gradients are off here, and a profile needs a backward. Call it outside of torch.no_grad().")
    if loss is not None and not callable(loss):
        raise UsageError(f"loss: got {loss!r:.200}, expected a function from the model's output to a scalar, or None")
    if hardware is not None:
        found = profile_on_meta(
            model,
            batch,
            lambda model, batch: _scalar(_call(model, batch), loss),
            blocks=blocks,
            hardware=Hardware.of(hardware),
            target=device,
            attention=attention,
            optimizer=None if optimizer == "offloaded" else optimizer,
            stream=stream,
            is_offloaded=optimizer == "offloaded",
        )
        if found is None:
            raise _without_backward(model)
        return found
    for name, option in (("device", device), ("attention", attention), ("stream", stream)):
        if option is not None:
            raise UsageError(f"{name}={option!r} is for hardware that need not be present. Give hardware=... with it.")
    if is_on_meta(model, batch):
        raise UsageError(
            "The model or the batch is on the meta device, which has no memory to measure. Give the hardware to "
            "profile for, such as hardware='h100'."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer: got {optimizer!r:.200}, expected the model's torch.optim.Optimizer or None. A class, or bytes "
            f"an element, needs hardware=... with it."
        )
    collector = ProfileCollector(model, session, stepped=optimizer)
    with _restored(model, batch), attach(model, blocks=blocks, session=session):
        ModelCall.of(model).hand_to(collector)
        for _ in range(_MOST_STEPS):
            _scalar(_call(model, batch), loss).backward()  # type: ignore[no-untyped-call]
            model.zero_grad(set_to_none=True)
            collector.finish()
            if collector.profile is not None:
                return collector.profile
    raise _without_backward(model)


def plan(
    profile: Profile,
    *,
    budget: int | float | str,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    hardware: Hardware | str | None = None,
    window: int | str | None = None,
    stream: Literal["auto"] | None = None,
) -> Plan:
    """The plan with the shortest step within a budget: a decision for each operator of each block.

    The same arguments give the same plan, in every process. The values that are worth preserving are found by minimum
    cuts (``spillway/planner/options.py``), and the options of blocks by a search over simulated steps
    (``spillway/planner/solve.py``).

    Args:
        profile: of a step, by :func:`profile` or :attr:`Attached.profile <spillway.Attached.profile>`.
        budget: bytes that a step may have allocated on the GPU, all included, or a size like ``"40GiB"``. Or a share,
            ``0.5`` or ``"50%"``, of the memory that a step without Spillway adds at its peak to the memory in use when
            it begins.
        host_budget: bytes of CPU memory that may be used. ``None``: any.
        disk_budget: bytes of disk. ``None``: any.
        allow: the allowed decisions of ``"keep"``, ``"host"``, ``"disk"`` and ``"recompute"``. ``None``: all but
            ``"disk"`` for a GPU, all but ``"host"`` for the CPU.
        hardware: the machine to plan for: ``"h200"``, ``"h100"``, ``"a100"``, ``"rtx4090"``, or a file of
            :meth:`Hardware.save`. ``None``: this machine, as measured.
        window: the in-flight limit in bytes, at most. ``None``: the best one, about 512 MiB.
        stream: ``"auto"``: blocks that are streamed in the profile may have their weights on the GPU all the time.
            ``None``: they are streamed.

    Raises:
        BudgetError: if nothing fits; it names the smallest budget that does.
        UsageError: for invalid arguments.

    Example:
        >>> spillway.plan(profile, budget="20GiB", hardware="h100").predicted_seconds  # doctest: +SKIP
    """
    found = _hardware_for(profile, hardware)
    if stream not in (None, "auto"):
        raise UsageError(f'stream: got {stream!r}, expected "auto" or None. The profile has the streamed blocks')
    return make_plan(
        profile,
        found,
        budget=budget,
        window=WINDOW if window is None else window,
        may_grow=window is None,
        host_budget=host_budget,
        disk_budget=disk_budget,
        allow=allowed(torch.device(profile.device), allow),
        places_weights=stream == "auto",
    )


def simulate(profile: Profile, plan: Plan, *, hardware: Hardware | str | None = None) -> Timeline:
    """The predicted step of a plan: the work of each stream over time, and the bytes on each tier.

    Args:
        profile: of a step.
        plan: for this profile's model.
        hardware: as for :func:`plan`.

    Raises:
        UsageError: for a plan of another model, or invalid arguments.

    Example:
        >>> spillway.simulate(profile, plan).stall_seconds  # doctest: +SKIP
    """
    found = _hardware_for(profile, hardware)
    if not isinstance(plan, Plan):
        raise UsageError(f"plan: got {plan!r:.200}, expected a spillway.Plan, as spillway.plan() makes it")
    rates = planning_rates(found, plan.window)
    return simulate_program(program_of(profile_for(profile, plan, found), plan), rates, spans=True)


def longest(
    step: Callable[[int], tuple[Module, Any]],
    *,
    budget: int | str,
    host_budget: int | str | None = None,
    disk_budget: int | str | None = None,
    allow: Collection[str] | None = None,
    loss: Loss | None = None,
    at_least: int = 1,
    multiple_of: int = 1,
    most: int | None = None,
    hardware: Hardware | str | None = None,
    session: Session | None = None,
    attention: str | None = None,
    optimizer: OptimizerOf | float | None = None,
) -> int:
    """The largest size, of a sequence or a batch, with which a step fits a budget.

    Two sizes are profiled, and the least bytes of their plans predict those of larger ones. The largest that is
    predicted to fit is profiled itself. If that was wrong, the search goes on between or beyond, and
    adds the largest excess of a step over its prediction. The result was profiled at that very size, and trained for
    two steps with its plan; if these exceeded the budget, with a plan for a smaller one.

    Args:
        step: from a size to a model and a batch of that size, as for :func:`spillway.profile`.
        budget: bytes, or a size, as for :func:`spillway.plan`. No share: all sizes are within a share of themselves.
        host_budget: as for :func:`spillway.plan`, and no more than the session may use.
        disk_budget: as for :func:`spillway.plan`.
        allow: as for :func:`spillway.plan`.
        loss: as for :func:`spillway.profile`.
        at_least: a size that is known to fit.
        multiple_of: sizes are multiples of this.
        most: the largest size to try. ``None``: any.
        hardware: as for :func:`spillway.plan`. With a model on ``meta``, also as for :func:`spillway.profile`: then
            nothing is run, and nothing trained.
        session: ``None``: the default one.
        attention: for a model on ``meta``, as for :func:`spillway.profile`.
        optimizer: for a model on ``meta``, as for :func:`spillway.profile`.

    Raises:
        BudgetError: if not even ``at_least`` fits.
        UsageError: for invalid arguments.

    Example:
        >>> spillway.longest(lambda n: (model, tokens(n)), budget="40GiB", multiple_of=1024)  # doctest: +SKIP
    """
    if not callable(step):
        raise UsageError(f"step: got {step!r:.200}, expected a function from a size to a model and a batch")
    sizes_given = (at_least, multiple_of, at_least if most is None else most)
    if not all(type(each) is int and each >= 1 for each in sizes_given) or (most is not None and most < at_least):
        raise UsageError(
            f"got at_least={at_least!r}, multiple_of={multiple_of!r} and most={most!r}, expected integers of at least "
            f"1, and most not below at_least"
        )
    sizes = _SizeSearch(
        step=lambda units: step(units * multiple_of),
        budget=parse_bytes(budget, what="budget"),
        limits={"host_budget": host_budget, "disk_budget": disk_budget, "allow": allow},
        loss=loss,
        session=session if session is not None else Session.default(),
        target={"hardware": hardware, "attention": attention, "optimizer": optimizer},
    )
    first = -(-at_least // multiple_of)
    if not sizes.fits(first):
        # Raises a BudgetError with the smallest budget, if no plan fits.
        sizes.plan(sizes.profile(first), sizes.budget)
        raise UsageError(
            f"at_least: a plan for size {at_least} fits the budget, but its steps exceed it. Give a smaller size, or a "
            f"larger budget."
        )
    return multiple_of * sizes.largest(first, None if most is None else max(most // multiple_of, first))


@dataclass
class _SizeSearch:
    """The search of :func:`longest`, in units of ``multiple_of``."""

    step: Callable[[int], tuple[Module, Any]]
    budget: int
    limits: dict[str, Any]
    """Other limits of plans."""
    loss: Loss | None
    session: Session
    target: dict[str, Any]
    """Hardware and options for a model on ``meta``."""
    is_on_meta: bool = False
    least: dict[int, int] = field(default_factory=dict)
    """The least bytes that a plan was found to need, by the profiled sizes."""
    excess: int = 0
    """The largest excess of a step over its predicted peak."""

    def largest(self, low: int, limit: int | None) -> int:
        """The largest size that fits, from one that does, up to a limit."""
        high = None if limit is None else limit + 1
        while high is None or high - low > 1:
            size = self._next(low, high)
            if self.fits(size):
                low = size
                predicted = self._predicted()
                if predicted is not None and predicted <= low:
                    break
            else:
                high = size
        return low

    def fits(self, size: int) -> bool:
        """Whether a size fits, by its profile and two steps with its plan, or with a plan for a smaller budget."""
        aim = aim_at(self.budget)
        try:
            profile = self.profile(size)
            for number in range(_TRIES):
                plan = self.plan(profile, aim)
                peak = self._peak(size, plan)
                over = peak - self.budget
                self.excess = max(self.excess, peak - plan.predicted_peak)
                if over <= 0:
                    return True
                # The peak of a step varies a little: each excess makes the next plan smaller by more.
                aim -= (over + _SLACK) * 2**number
                if aim <= 0:
                    break
        except (BudgetError, torch.OutOfMemoryError):
            pass
        return False

    def profile(self, size: int) -> Profile:
        model, batch = self._made(size)
        self.is_on_meta = is_on_meta(model, batch)
        target = self.target if self.is_on_meta else {}
        if not self.is_on_meta:
            # Buffers for tensors of another size do not fit these, and count.
            self.session.trim()
        found = profile(model, batch, loss=self.loss, session=self.session, **target)
        try:
            self.least[size] = self.plan(found, 0).predicted_peak
        except BudgetError as error:
            self.least[size] = error.least
        return found

    def _made(self, size: int) -> tuple[Module, Any]:
        made = self.step(size)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise UsageError(f"step: got {made!r:.200} from it, expected a tuple of a model and a batch")
        return made[0], made[1]

    def plan(self, profile: Profile, budget: int) -> Plan:
        return plan(profile, budget=budget, hardware=self.target["hardware"], **self._limits(profile))

    def _next(self, low: int, high: int | None) -> int:
        """The next size to run, above one that fits and below one that does not."""
        predicted = self._predicted()
        if predicted is not None and low < predicted and (high is None or predicted < high - 1):
            return predicted
        # There was no prediction, or it was wrong.
        return 2 * low if high is None or (predicted is None and 2 * low < high) else (low + high) // 2

    def _predicted(self) -> int | None:
        """The largest size that is predicted to fit: least bytes are taken to grow in a straight line.

        ``None``: there are no two profiles.
        """
        if len(self.least) < 2:
            return None
        (one, at_one), (other, at_other) = sorted(self.least.items())[-2:]
        farthest, budget = _FARTHEST * other, min(aim_at(self.budget), self.budget - self.excess)
        if at_other <= at_one:
            return farthest
        return max(min(one + (budget - at_one) * (other - one) // (at_other - at_one), farthest), 0)

    def _limits(self, profile: Profile) -> dict[str, Any]:
        """Limits of plans for a profile: no more CPU memory than the session may use."""
        device, given = torch.device(profile.device), self.limits["host_budget"]
        limits = self.limits | {"allow": allowed(device, self.limits["allow"])}
        if not self.is_on_meta:
            available = self.session.unused_host_bytes(device)
            limits["host_budget"] = (
                available if given is None else min(parse_bytes(given, what="host_budget"), available)
            )
        return limits

    def _peak(self, size: int, plan: Plan) -> int:
        """The peak of the second of two steps with the plan, on a GPU. The first one traces the blocks."""
        model, batch = self._made(size)
        if self.is_on_meta:
            return 0
        device = torch.device(plan.device)
        with _restored(model, batch), attach(model, plan=plan, session=self.session):
            for _ in range(2):
                if device.type != "cpu":
                    torch.accelerator.reset_peak_memory_stats(device)
                _scalar(_call(model, batch), self.loss).backward()  # type: ignore[no-untyped-call]
                model.zero_grad(set_to_none=True)
        return 0 if device.type == "cpu" else allocated(device)[1]


def _hardware_for(profile: Profile, hardware: Hardware | str | None) -> Hardware:
    """The hardware, given or that of this machine."""
    if not isinstance(profile, Profile):
        raise UsageError(f"profile: got {profile!r:.200}, expected a spillway.Profile, as spillway.profile() makes it")
    device, here = torch.device(profile.device), torch.accelerator.current_accelerator()
    if hardware is None and device.type != "cpu" and (here is None or here.type != device.type):
        raise UsageError(
            f"hardware: the profile is for {device.type}, which this machine does not have. Give the hardware to plan "
            f"for, such as hardware='h100', or the one that the profile was made for."
        )
    found = known_hardware(device) if hardware is None else Hardware.of(hardware)
    return found.shared_by(local_ranks())


def _without_backward(model: Module) -> UnsupportedError:
    return UnsupportedError(
        f"No backward came through the blocks of {type(model).__name__}, so it cannot be profiled. Give a loss that "
        f"depends on all blocks."
    )


def _call(model: Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _scalar(output: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar that backward begins with."""
    value: Any = getattr(output, "loss", None) if loss is None else loss(output)
    if loss is None and value is None:
        value = next(iter(tensors_of(output)), None)
    if loss is None and isinstance(value, torch.Tensor) and value.numel() != 1:
        value = value.float().square().mean()
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        raise UsageError(f"loss: got {value!r:.200}, expected a tensor with one number; give profile(..., loss=...)")
    if not value.requires_grad:
        raise UsageError(
            "loss: got a number that depends on no trainable parameter, so it has no backward. Unfreeze what is "
            "trained (requires_grad_()), and detach nothing in the loss"
        )
    number: torch.Tensor = value
    return number


@contextlib.contextmanager
def _restored(model: Module, batch: Any) -> Iterator[None]:
    """Restore gradients, buffers and generators at the end."""
    inputs = [tensor for tensor in tensors_of(batch) if tensor.is_leaf]
    gradients = [(leaf, leaf.grad) for leaf in (*model.parameters(), *inputs)]
    # A forward may write into a buffer, or replace it by another tensor.
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
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
                setattr(module, name, buffer)
