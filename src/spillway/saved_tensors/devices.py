"""The devices of one pass: on each, its runtime, its tier, and the order in which backward asks for tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spillway.saved_tensors.order import AccessOrder, LearnedOrders, NextPassPredictor, PastGroup, offload_benefit
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.runtime.device import Runtime
    from spillway.runtime.tiers import Tier


@dataclass(slots=True, eq=False)
class PassDevice:
    """The state of a pass on one device."""

    runtime: Runtime
    tier: Tier
    """The tier of :attr:`Decision.OFFLOAD`."""
    order: AccessOrder


class PassDevices(dict[torch.device, PassDevice]):
    """The devices of one pass. Each is set up when it is first looked up.

    ``learned`` has the orders of earlier passes, and ``predictor_of`` gives the predictor of a device's next pass.
    """

    def __init__(
        self,
        session: Session,
        learned: LearnedOrders,
        predictor_of: Callable[[torch.device], NextPassPredictor],
        *,
        tier: str,
        window: int | float | None,
        on_backward: Callable[[], object] | None,
        tag: str | None,
    ) -> None:
        super().__init__()
        self._session, self._learned, self._predictor_of = session, learned, predictor_of
        self._tier, self._window, self._on_backward, self._tag = tier, window, on_backward, tag
        self._signature: tuple[torch.Size, torch.dtype, torch.device] | None = None
        """Shape, dtype and device of the first tensor: they tell which earlier pass this one is like."""
        self._turn = 0
        """See :meth:`~spillway.saved_tensors.order.NextPassPredictor.turn`."""

    def __missing__(self, device: torch.device) -> PassDevice:
        runtime = self._session.runtime(device)
        order = AccessOrder(window=runtime.mover.window, on_backward=self._on_backward)
        found = self[device] = PassDevice(runtime, runtime.tier(self._tier), order)
        return found

    def begin(self, first: torch.Tensor) -> AccessOrder | None:
        """Take over the learned order of an earlier pass, which the first tensor of this one tells. Returns it."""
        device = self[first.device]
        self._signature = (first.shape, first.dtype, first.device)
        # After this, dead handles are known to be dead.
        device.runtime.mover.read_notes()
        predictor = self._predictor_of(first.device)
        self._turn = predictor.turn()
        previous, alike = self._learned.recall(self._signature, self._turn)
        window = device.runtime.mover.limit(self._window)
        device.order = AccessOrder(previous, alike, window, self._on_backward, predictor, self._tag)
        return previous

    def end(self, total_bytes: int, groups: Sequence[PastGroup], *, may_be_disabled: bool) -> None:
        """The pass has ended, and is remembered with the bytes that it saved, and its groups.

        ``may_be_disabled``: later passes may be disabled, if offloading gains nothing.
        """
        for each in self.values():
            each.runtime.join()
        if self._signature is None:
            return
        # Tensors on other devices than the first one's have no learned order.
        device = self._signature[2]
        order = self[device].order
        order.total_bytes, order.groups = total_bytes, list(groups)
        if may_be_disabled:
            order.benefit = offload_benefit(total_bytes, [each.runtime.backend for each in self.values()])
        self._learned.keep(self._signature, self._turn, order)
        if not order.was_asked:
            self._predictor_of(device).add(order)

    @property
    def are_done(self) -> bool:
        """Whether backward has asked for an offloaded tensor, or the graph is gone before it did."""
        if any(each.order.was_asked for each in self.values()):
            return True
        for each in self.values():
            # After this, dead handles are known to be dead.
            each.runtime.mover.read_notes()
        orders = [each.order for each in self.values() if not each.order.is_empty]
        return bool(orders) and all(order.was_dropped for order in orders)

    @property
    def are_elsewhere(self) -> bool:
        """Whether a capture has begun or ended since the pass began."""
        return any(self._session.runtime(device) is not each.runtime for device, each in self.items())

    def poisons(self, device: torch.device) -> bool:
        """Whether the device's backend checks reads of unwritten memory."""
        return device.type != "meta" and self._session.runtime(device).backend.poisons

    def is_captured(self, device: torch.device) -> bool:
        """Whether the device's work is being captured into a graph."""
        if device.type == "meta":
            return False
        known = self.get(device)
        runtime = self._session.runtime(device) if known is None else known.runtime
        return runtime.backend.is_capturing()
