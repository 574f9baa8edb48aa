"""The options of ``spillway run`` and ``spillway bench``, and what they attach to a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spillway.cli import AUTO, LIMITS, OFF, WAYS, asked, variable
from spillway.cli.plan import POLICIES
from spillway.errors import UnsupportedError, UsageError
from spillway.units import parse_bytes, read_budget

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from spillway.attaching import Attached
    from spillway.parameters.streamable import Trainer

BASELINE = "baseline"
"""The way of ``spillway bench`` that attaches nothing."""
DEFAULT_SHARE = 0.9
"""Share of an accelerator's memory that is the default budget. The rest is for the driver and fragmentation."""
NOTHING_TO_STREAM = (
    "stream: no block has a weight of 1 MiB or more that is frozen, or stepped by a spillway.OffloadedOptimizer. All "
    "weights stay on the GPU"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One way to treat each model. Without any of the first four, the device decides: see :meth:`attach`.

    Raises:
        UsageError: for two ways, or an invalid value.
    """

    budget: str | None = None
    policy: str | None = None
    ratio: float | None = None
    plan: Path | None = None
    stream: str | None = None
    host_budget: str | None = None
    disk_budget: str | None = None
    allow: Sequence[str] | None = None
    hardware: str | None = None
    from_environment: bool = False
    """Whether messages call the options by their variables."""

    @classmethod
    def of_environment(cls) -> RunOptions:
        """The options that the variables of the environment give."""
        given: dict[str, Any] = dict(asked())
        if not given and os.environ.get(variable("budget")) == OFF:
            raise UsageError(
                f"got {variable('budget')}={OFF} in the environment and spillway run without a way: the variable says "
                f"that nothing is managed. Unset it, give --budget, or start the script with python"
            )
        if given.get("budget") == AUTO:
            del given["budget"]
        if "plan" in given:
            given["plan"] = Path(given["plan"])
        if "allow" in given:
            given["allow"] = split_words(given["allow"])
        if "ratio" in given:
            # Other words are refused below.
            with suppress(ValueError):
                given["ratio"] = float(given["ratio"])
        return cls(**given, from_environment=True)

    def to_environment(self) -> dict[str, str | None]:
        """The variables that give child processes these options; ``None``: not set."""
        values: dict[str, object] = {name: getattr(self, name) for name in (*WAYS, *LIMITS)}
        if self.plan is not None:
            values["plan"] = self.plan.absolute()
        if self.allow is not None:
            values["allow"] = ",".join(self.allow)
        if self.hardware is not None and Path(self.hardware).is_file():
            values["hardware"] = Path(self.hardware).absolute()
        if not self._given(WAYS):
            values["budget"] = AUTO
        return {variable(name): None if value is None else str(value) for name, value in values.items()}

    def __post_init__(self) -> None:
        given = self._given(WAYS)
        if len(given) > 1:
            raise UsageError(f"got {' and '.join(given)}, expected one of them: each says what is done")
        if self.budget is not None:
            read_budget(self.budget, what=self._name("budget"))
        if self.stream not in (None, AUTO):
            raise UsageError(
                f"{self._name('stream')}: got {self.stream!r}, expected {AUTO}: the plan chooses the blocks. To name "
                f"them, call spillway.attach(model, stream=...) in the script"
            )
        for name in ("host_budget", "disk_budget"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), what=self._name(name))
        if self.policy is not None and self.policy not in POLICIES:
            raise UsageError(f"{self._name('policy')}: got {self.policy!r}, expected one of {', '.join(POLICIES)}")
        if self.ratio is not None and not (isinstance(self.ratio, float) and 0 <= self.ratio <= 1):
            raise UsageError(
                f"{self._name('ratio')}: got {self.ratio!r}, expected a number from 0 (keep all) to 1 (offload all)"
            )
        # Planning takes a while to import.
        if self.allow is not None:
            from spillway.planner.plan import check_allow

            check_allow(self.allow, self._name("allow"))
        if self.hardware is not None:
            from spillway.planner.hardware import Hardware

            Hardware.of(self.hardware)
        if self.plan is not None:
            from spillway.planner.plan import Plan

            Plan.load(self.plan)

    def _name(self, option: str) -> str:
        return variable(option) if self.from_environment else f"--{option.replace('_', '-')}"

    def _given(self, names: Sequence[str]) -> list[str]:
        return [self._name(name) for name in names if getattr(self, name) is not None]

    @property
    def option(self) -> str:
        """The way as it was asked for; empty: the device decides."""
        return "".join(self._given(WAYS))

    @property
    def asked_for(self) -> str:
        """The way and its value, as the user gave them."""
        name = next((each for each in WAYS if getattr(self, each) is not None), "budget")
        value = AUTO if getattr(self, name) is None else getattr(self, name)
        return f"{self._name(name)}{'=' if self.from_environment else ' '}{value}"

    @property
    def is_measured(self) -> bool:
        """Whether there is a budget, and so a profile."""
        import torch

        return self.budget is not None or (not self.option and torch.accelerator.is_available())

    def check_machine(self) -> None:
        """Raise :class:`~spillway.errors.UsageError` for limits of a budget if there is no budget."""
        limits, budget = self._given(LIMITS), self._name("budget")
        if limits and not self.is_measured:
            where = f"beside {self.option}, expected {budget}"
            if not self.option:
                where = f"without {budget}, which has no default without a GPU"
            raise UsageError(f"got {' and '.join(limits)} {where}. Only the plan of a budget uses such options")

    def budget_on(self, device: torch.device) -> str | int | None:
        """The budget of a model on a device; ``None``: it has none."""
        from spillway.runtime.system import memory_info

        return self.budget if self.option or device.type == "cpu" else int(memory_info(device)[1] * DEFAULT_SHARE)

    def attach(self, model: Module) -> tuple[Attached, str, list[str]]:
        """Attach to a model, and name the way, with notes. The default: 90 % of a GPU's memory, or ``offload``."""
        from spillway import policies
        from spillway.attaching import attach
        from spillway.attaching.collector import device_of

        if self.plan is not None:
            from spillway.planner.plan import Plan

            return attach(model, plan=Plan.load(self.plan)), "plan", []
        if self.ratio is not None:
            return attach(model, policy=policies.Ratio(self.ratio)), f"ratio {self.ratio:g}", []
        budget = self.budget_on(device_of(model))
        if budget is None:
            policy = self.policy or "offload"
            return attach(model, policy=policy), policy, []
        limits: dict[str, Any] = {name: getattr(self, name) for name in LIMITS}
        notes: list[str] = []
        if self.stream is not None:
            limits["optimizer"], notes = _streaming(model)
            if NOTHING_TO_STREAM in notes:
                del limits["stream"]
        way = "budget" if self.budget is None else f"budget {self.budget}"
        return attach(model, budget=budget, **limits), way, notes


def _streaming(model: Module) -> tuple[Trainer | None, list[str]]:
    """The script's optimizer that can step streamed weights of a model, and notes on weights that are not streamed."""
    from torch.optim import Optimizer

    from spillway.checkpointing.blocks import find_blocks
    from spillway.cli.running.models import alive
    from spillway.parameters.streamable import streamable, trainer_of
    from spillway.session import MIN_BYTES

    notes: list[str] = []
    optimizer = trainer_of(model, alive(Optimizer))
    try:
        if optimizer is not None:
            optimizer.check_streaming()
    except (UsageError, UnsupportedError) as error:
        optimizer, notes = None, [f"trained weights are not streamed: {error}"]
    blocks = [(each.name, each.module) for each in find_blocks(model, None)]
    if not streamable(blocks, model, MIN_BYTES, lambda each: optimizer is not None and optimizer.holds(each)):
        return None, [*notes, NOTHING_TO_STREAM]
    return optimizer, notes


def options_of_way(way: str) -> RunOptions | None:
    """A way of ``spillway bench``, such as ``"ratio=0.5"``, as options; ``None`` for the baseline."""
    name, sign, value = way.partition("=")
    if way == BASELINE:
        return None
    if way in POLICIES:
        return RunOptions(policy=way)
    try:
        if sign and name == "budget":
            return RunOptions(budget=value)
        if sign and name == "plan":
            return RunOptions(plan=Path(value))
        if sign and name == "ratio" and value.replace(".", "", 1).isdecimal():
            return RunOptions(ratio=float(value))
    except UsageError as error:
        raise UsageError(f"--ways: got {way!r}: {str(error).removeprefix(f'--{name}: ')}") from error
    raise UsageError(
        f"--ways: got {way!r}, expected baseline, recompute, offload, ratio=0.5, budget=20GiB or plan=FILE"
    )


def split_words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(each.strip() for each in text.split(","))
