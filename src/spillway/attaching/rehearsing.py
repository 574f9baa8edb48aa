"""From what a user says of hardware that is not there to the profile of a step on it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from spillway.attaching.attached import attach
from spillway.attaching.budgeted import device_of
from spillway.attaching.rehearsal import Rehearsal
from spillway.errors import UnsupportedError, UsageError
from spillway.planning.hardware import Hardware
from spillway.planning.profile import Profile
from spillway.profiling.attentions import first_attention
from spillway.profiling.fakes import META, FakeDevice
from spillway.profiling.kernels import kernels_of
from spillway.profiling.standins import OptimizerOf, StandIns, state_sizes
from spillway.profiling.workspaces import standing_workspace
from spillway.session import MIN_BYTES
from spillway.units import parse_bytes

_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a step would run."""

    device: torch.device
    hardware: Hardware
    attention: str
    optimizer: OptimizerOf | float | None

    @classmethod
    def of(cls, hardware: Hardware, device: object, attention: str | None, optimizer: Any) -> Target:
        """As the user says it.

        Raises:
            UsageError: for what cannot be meant.
        """
        if device is not None and device not in _DEVICES:
            raise UsageError(f"device: got {device!r}, expected one of {', '.join(map(repr, _DEVICES))}, or None")
        number = isinstance(optimizer, (int, float)) and not isinstance(optimizer, bool)
        given = optimizer is None or (number and optimizer >= 0 and math.isfinite(optimizer))
        if isinstance(optimizer, torch.optim.Optimizer) or not (given or callable(optimizer)):
            raise UsageError(
                f"optimizer: got {optimizer!r:.200}, expected a class such as torch.optim.AdamW, a function from a "
                f"list of parameters to an optimizer, bytes for each element of a parameter, or None"
            )
        found = torch.device(_DEVICES[0] if device is None else str(device))
        return cls(found, hardware, first_attention(attention, hardware), optimizer)


def rehearse(
    model: Module,
    batch: Any,
    loss_of: Callable[[Module, Any], torch.Tensor],
    blocks: Any,
    target: Target,
) -> Profile | None:
    """The profile of a step on a target; ``None`` if no backward came through the blocks.

    Args:
        model: in training mode, on any device; it is not touched.
        batch: likewise.
        loss_of: calls a model with a batch, and gives a number.
        blocks: as for :func:`spillway.attach`.
        target: where it would run.

    Raises:
        UnsupportedError: for operators whose outcome on the target is not known.
    """
    device_of(model)
    stand_ins = StandIns()
    step = _Step(model, loss_of)
    state, there = stand_ins.state(step), stand_ins.batch(batch)
    fake = FakeDevice(target.device, target.hardware)
    fake.hold(_static(fake, target, state))
    for tensor in (*state.values(), *tree_leaves(there)):
        if isinstance(tensor, torch.Tensor):
            fake.number_of(tensor)
    for tensor, stand_in in stand_ins.pairs():
        fake.contents.know(stand_in, tensor)
    pilot = Rehearsal(type(model).__name__, fake, min_bytes=parse_bytes(MIN_BYTES, what="min_bytes"))
    with attach(model, blocks=blocks) as attached, kernels_of(target.device, target.attention), fake:
        attached.follow(pilot)
        try:
            functional_call(step, state, (there,)).backward()
        except RuntimeError as error:
            if "meta tensor" not in str(error):
                raise
            raise UnsupportedError(
                f"profile: got a step that asks for the content of a tensor ({error}), which there is none of without "
                f"the hardware, expected one that hangs on shapes alone; profile the model on the device itself"
            ) from error
        pilot.finish()
    return pilot.profile


def _static(fake: FakeDevice, target: Target, state: dict[str, torch.Tensor]) -> int:
    """Bytes of what no operator is seen to read: the state of an optimizer, the workspace of products."""
    trained = list({id(each): each for each in state.values() if each.is_leaf and each.requires_grad}.values())
    if target.optimizer is None:
        sizes = []
    elif callable(target.optimizer):
        sizes = state_sizes(trained, target.optimizer)
    else:
        sizes = [math.ceil(target.optimizer * each.numel()) for each in trained]
    return sum(map(fake.rounded, sizes)) + standing_workspace(target.device, target.hardware)


class _Step(Module):
    """A model and its loss, so that both see the tensors that stand for the model's own."""

    def __init__(self, model: Module, loss_of: Callable[[Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss_of(self.model, batch)


def is_elsewhere(model: Module, batch: Any) -> bool:
    """Whether there is nothing to be measured: tensors without memory."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves(batch)]
    return any(isinstance(each, torch.Tensor) and each.device == META for each in tensors)
