"""What the gradients of one device share: the way out, the host lane, and the numbers they are multiplied with."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from spillway.errors import UsageError
from spillway.optim.parcels import Sent
from spillway.optim.traffic import Traffic
from spillway.runtime.backend import Event, HostLane


class Measured(Protocol):
    """A gradient, as the others of its device know it."""

    def measure(self, order: float) -> None:
        """Have the host take its norm, if it has come, and is not known."""


_SCRATCH = 1 << 22
"""Elements that are cast at a time, before they are added."""


class Factor:
    """A number that gradients are multiplied with, or divided by; on the host once it has come."""

    def __init__(self, operation: str, value: torch.Tensor | float, sent: Sent | None, traffic: Traffic) -> None:
        self.operation = operation
        self.given = value
        self._sent = sent
        self._traffic = traffic
        self._value: torch.Tensor | float | None = value if sent is None else None
        self._is_power: bool | None = None
        # Who clears a gradient that was multiplied, never asks for the number.
        self._release: weakref.finalize[Any, Any] | None = None
        if sent is not None:
            self._release = weakref.finalize(self, traffic.give_back, sent)
            self._release.atexit = False

    def apply(self, tensor: torch.Tensor) -> None:
        """Multiply; for the host lane."""
        getattr(tensor, self.operation)(self.value())

    def applied(self, tensor: torch.Tensor, scratch: torch.Tensor | None) -> torch.Tensor:
        """The product, in scratch if there is some; for the host lane."""
        product: torch.Tensor = getattr(torch, self.operation[:-1])(tensor, self.value(), out=scratch)
        return product

    def value(self) -> torch.Tensor | float:
        """It; for the host lane."""
        if self._value is None:
            assert self._sent is not None and self._release is not None
            self._value = self._traffic.read(self._sent).clone().reshape(())
            self._release()
        return self._value

    def apply_there(self, tensor: torch.Tensor) -> None:
        """Multiply what is on the device, as compute."""
        getattr(tensor, self.operation)(self.given)

    def is_power_of_two(self) -> bool:
        """Whether the product with it has the same digits; waits for it."""
        if self._is_power is None:
            self._is_power = math.frexp(abs(float(self.given)))[0] == 0.5
        return self._is_power

    def of_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of what it was applied to."""
        value = self.given.abs() if isinstance(self.given, torch.Tensor) else abs(self.given)
        return norm * value if self.operation == "mul_" else norm / value


class Shared:
    """What the gradients of one device have in common.

    Args:
        traffic: of the device.
        lane: the host lane.
        hands: threads that compute for it.
        check: raises if what moves the bytes is gone: where it is, a copy would be waited for for ever.
        pins_sums: whether gradients add up in pinned memory, since copies are to read them.
    """

    def __init__(
        self,
        traffic: Traffic,
        lane: HostLane,
        hands: HostLane,
        check: Callable[[], None],
        *,
        pins_sums: bool = False,
    ) -> None:
        self.traffic = traffic
        self.lane = lane
        self.hands = hands
        self.pins_sums = pins_sums
        self.closed = False
        self._check = check
        self.accumulates = False
        """Whether a second gradient came in one window, ever."""
        self.norms: set[float] = set()
        """Orders of norms that were asked for: they are taken on the device from now on, before a gradient leaves."""
        self._factor: tuple[torch.Tensor, int | None, Factor] | None = None
        self.expected = 0
        """How many gradients of a parameter came in the last step's window."""
        self._gradients: weakref.WeakSet[Measured] = weakref.WeakSet()
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._adding: deque[tuple[int, Event]] = deque()
        self._adding_lock = threading.Lock()

    def check(self) -> None:
        """Raise if no byte can be moved any more.

        Raises:
            SessionError: the session is closed, or another process's.
            UsageError: the optimizer is closed.
        """
        self._check()
        if self.closed:
            raise UsageError(
                "got a gradient of an OffloadedOptimizer that is closed, expected an open one: its bytes are gone; "
                "close() after the last use of what was kept of its gradients"
            )

    def close(self, *, lost: bool) -> None:
        """Nothing more comes: do what was queued, and end.

        Args:
            lost: whether what moves the bytes is gone.
        """
        self.lane.close()
        self.hands.close()
        if not lost:
            self.traffic.settle()
            # After a step that failed.
            self.traffic.unstage()
        self.forget_factor()
        self._adding.clear()
        self.closed = True

    def factor(self, operation: str, value: torch.Tensor | float) -> Factor:
        """One for all gradients that are multiplied with the same tensor."""
        if not isinstance(value, torch.Tensor):
            return Factor(operation, value, None, self.traffic)
        last = self._factor
        # One of inference has no version: it may be another number by now.
        version = None if value.is_inference() else value._version
        known = last is not None and last[0] is value and version is not None and last[1] == version
        if last is None or not known or last[2].operation != operation:
            given = value.detach().clone()
            here = Factor(operation, given, self.traffic.send(given), self.traffic)
            self.traffic.flush()
            last = self._factor = (value, version, here)
        return last[2]

    def scratch(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for gradients that are cast; for the host lane."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(_SCRATCH, dtype=dtype, device="cpu")
        return self._scratch[dtype]

    def forget_factor(self) -> None:
        """A step has been: a tensor that comes now is another."""
        self._factor = None

    def add(self, gradient: Measured) -> None:
        """One more, of a parameter of this device."""
        self._gradients.add(gradient)

    def gradients(self) -> list[Measured]:
        """All of them."""
        return list(self._gradients)

    def add_later(self, nbytes: int, task: Callable[[], None]) -> None:
        """Queue an addition that gives pinned memory back; past the window, wait for the oldest."""
        # Backward may run in several threads.
        with self._adding_lock:
            while self._adding and sum(size for size, _ in self._adding) + nbytes > self.traffic.window:
                self._adding.popleft()[1].synchronize()
            self._adding.append((nbytes, self.lane.run(task)))
