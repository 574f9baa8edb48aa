"""The gradient of one parameter, on the host: what came, what it adds up to, and what it is to be multiplied with.

The first that comes is kept as it came (``raw``). With a second, and from then on with the first of each window too,
all are added up on the host in the master's type, in the order in which they came (``sum``). A multiplication is a note
(``factors``) until somebody reads the gradient. See NOTE [ Who may touch what ].
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from spillway.errors import UnsupportedError
from spillway.optim.away import AwayGradient
from spillway.optim.parcels import Sent
from spillway.optim.traffic import Traffic, is_dense
from spillway.runtime.backend import Event, HostLane

if TYPE_CHECKING:
    from spillway.optim.held import Held

CHUNK = 1 << 22
"""Elements that are worked on at a time: what is between two passes over them stays in the caches."""


_arrivals = itertools.count(1)


class Factor:
    """A number that gradients are multiplied with, or divided by; on the host once it has come."""

    def __init__(self, operation: str, value: torch.Tensor | float, sent: Sent | None, traffic: Traffic) -> None:
        self.operation = operation
        self.given = value
        self._sent = sent
        self._traffic = traffic
        # A step that is skipped reads none.
        self._end = None if sent is None else weakref.finalize(self, traffic.give_back, sent)
        self._value: torch.Tensor | float | None = value if sent is None else None

    def apply(self, tensor: torch.Tensor) -> None:
        """Multiply; for the host lane."""
        getattr(tensor, self.operation)(self.value())

    def value(self) -> torch.Tensor | float:
        """It; for the host lane."""
        if self._value is None:
            assert self._sent is not None
            self._value = self._sent.read(self._traffic).clone().reshape(())
            assert self._end is not None
            self._end()
        return self._value

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
    """

    def __init__(self, traffic: Traffic, lane: HostLane, hands: HostLane) -> None:
        self.traffic = traffic
        self.lane = lane
        self.hands = hands
        self.accumulates = False
        """Whether a second gradient came in one window, ever."""
        self.norms: set[float] = set()
        """Orders of norms that were asked for: they are taken on the device from now on, before a gradient leaves."""
        self._factor: tuple[torch.Tensor, int, Factor] | None = None
        self.expected = 0
        """How many gradients of a parameter came in the last step's window."""
        self._gradients: list[weakref.ref[Gradient]] = []
        self._adding: deque[tuple[int, Event]] = deque()

    def factor(self, operation: str, value: torch.Tensor | float) -> Factor:
        """One for all gradients that are multiplied with the same tensor."""
        if not isinstance(value, torch.Tensor):
            return Factor(operation, value, None, self.traffic)
        last = self._factor
        if last is None or last[0] is not value or last[1] != value._version or last[2].operation != operation:
            given = value.detach().clone()
            here = Factor(operation, given, self.traffic.send(given), self.traffic)
            self.traffic.flush()
            last = self._factor = (value, value._version, here)
        return last[2]

    def forget_factor(self) -> None:
        """A step has been: a tensor that comes now is another."""
        self._factor = None

    def add(self, gradient: Gradient) -> None:
        """One more, of a parameter of this device."""
        self._gradients.append(weakref.ref(gradient))

    def gradients(self) -> Iterator[Gradient]:
        """All of them."""
        for reference in self._gradients:
            gradient = reference()
            if gradient is not None:
                yield gradient

    def add_later(self, nbytes: int, task: Callable[[], None]) -> None:
        """Queue an addition that gives pinned memory back; past the window, wait for the oldest."""
        while self._adding and sum(size for size, _ in self._adding) + nbytes > self.traffic.window:
            self._adding.popleft()[1].synchronize()
        self._adding.append((nbytes, self.lane.run(task)))


@dataclass(eq=False, slots=True)
class Snapshot:
    """A gradient as it is when all that was queued is done; for the host lane."""

    raw: Sent | None
    sum: Sum | None
    factors: tuple[Factor, ...]
    kept: bool
    """Whether the raw gradient stays as it came, and its factors are noted still."""

    _read: torch.Tensor | None = None

    def read(self, traffic: Traffic) -> torch.Tensor:
        """The gradient as it came, flat, when it is there."""
        if self._read is None:
            assert self.raw is not None
            self._read = self.raw.read(traffic)
        return self._read

    def is_there(self) -> bool:
        """Whether it has come to the host, as far as it is not being added up."""
        return self.raw is None or (self.raw.parcel.arrived is not None and self.raw.parcel.arrived.query())

    def wait(self, traffic: Traffic) -> None:
        """Until all of it is on the host."""
        if self.raw is not None:
            self.read(traffic)
        for factor in self.factors:
            factor.value()


@dataclass(eq=False, slots=True)
class Sum:
    """A gradient's sum, in memory of its own; touched by the host lane."""

    tensor: torch.Tensor


@dataclass(eq=False)
class Gradient:
    """The gradient of a held parameter."""

    held: Held
    shared: Shared
    raw: Sent | None = None
    sum: Sum | None = None
    summed: bool = False
    """Whether ``sum`` holds what came."""
    factors: list[Factor] = field(default_factory=list)
    norms: dict[float, torch.Tensor] = field(default_factory=dict)
    """Of the one gradient that came, before the factors; on the device."""
    reader: Event | None = None
    """The end of the last step that reads it."""
    came: int = 0
    """When the last one came, among all."""
    count: int = 0
    """How many came."""
    _measured: dict[float, tuple[Event, list[float]]] = field(default_factory=dict)
    """Norms that the host took, or is about to, with the factors of then."""
    _away: AwayGradient | None = None

    def __post_init__(self) -> None:
        self.shared.add(self)

    def begin(self, tensor: torch.Tensor) -> None:
        """This is the gradient now, whatever it was."""
        self.clear()
        self.arrive(tensor)

    def stand_in(self, tensor: torch.Tensor) -> AwayGradient:
        """What stands in the place of a gradient that left."""
        if self._away is None or self._away.dtype != tensor.dtype or self._away.device != tensor.device:
            self._away = AwayGradient(self, self.held.local(), tensor.dtype)
        return self._away

    def arrive(self, tensor: torch.Tensor) -> None:
        """One more has come: it leaves for the host, and is added."""
        tensor = _to_send(tensor, self.held.local())
        # In an order that loses nothing should the memory not do.
        sent = self.shared.traffic.send(tensor)
        self.came = next(_arrivals)
        self.count += 1
        self._measured = {}
        alone = self.raw is None and not self.summed
        self.norms = {} if not alone or self.shared.accumulates else self._norms_of(tensor)
        if not alone:
            self.shared.accumulates = True
            self._settle()
            self._add(sent, first=False)
        elif self.shared.accumulates:
            self._add(sent, first=True)
        else:
            self.raw = sent
        if self.count == self.shared.expected and not self.norms:
            # The last one, if it goes as in the step before.
            for order in self.shared.norms:
                self.measure(order)

    def scale(self, operation: str, value: torch.Tensor | float) -> None:
        """Multiply (``"mul_"``), or divide (``"div_"``)."""
        self.factors.append(self.shared.factor(operation, value))

    def fill_with_zeros(self) -> None:
        """It is there, and zero."""
        self.clear()
        total = self._sum()
        self.summed = True

        def fill() -> None:
            total.tensor.zero_()

        self.shared.lane.run(fill)

    def clear(self) -> None:
        """Nothing has come."""
        self._have_read()
        if self.raw is not None:
            self.shared.traffic.give_back(self.raw)
        self.raw = None
        self.summed = False
        self.factors = []
        self.norms = {}
        self._measured = {}
        self.count = 0

    def replace(self, tensor: torch.Tensor) -> None:
        """Somebody computed another in its place."""
        self.begin(tensor)

    def snapshot(self) -> Snapshot:
        """It, for somebody who applies the factors."""
        self._have_read()
        self.shared.traffic.flush()
        kept = self.raw is not None and self.raw.dtype != self.held.work_dtype
        taken = Snapshot(self.raw, self.sum if self.summed else None, tuple(self.factors), kept)
        if not kept:
            for norm in self.norms:
                for factor in self.factors:
                    self.norms[norm] = factor.of_norm(self.norms[norm])
            if self.factors:
                self._measured = {}
            self.factors = []
        return taken

    def _have_read(self) -> None:
        """Wait for the hands that read it; what is queued in the host lane from now on comes after."""
        if self.reader is not None:
            self.reader.synchronize()
            self.reader = None

    def norm(self, order: float) -> torch.Tensor:
        """Its norm of an order, in the type that it is stepped in; a tensor without dimensions, on the device."""
        if order <= 0 or math.isnan(order):
            whole: torch.Tensor = torch.linalg.vector_norm(self.restore(), order)
            return whole
        self.shared.norms.add(order)
        norm = self.norms.get(order)
        if norm is not None:
            for factor in self.factors:
                norm = factor.of_norm(norm)
            return norm
        if self.factors or order not in self._measured:
            # Who asks for one norm asks for all: the hands take the others meanwhile.
            for gradient in self.shared.gradients():
                gradient.measure(order)
        done, found = self._measured[order]
        done.synchronize()
        return torch.tensor(found[0], dtype=_real(self.held.work_dtype), device=self.held.local().device)

    def measure(self, order: float) -> None:
        """Have the host take its norm, if it has come, and is not known."""
        known = order in self.norms or (order in self._measured and not self.factors)
        if known or not (self.raw is not None or self.summed):
            return
        values, shared, held = self.snapshot(), self.shared, self.held
        found: list[float] = []

        def measure() -> None:
            found.append(float(torch.linalg.vector_norm(held.whole(values), order)))

        def when_there() -> Event:
            values.wait(shared.traffic)
            return shared.hands.run(measure)

        self.reader = shared.lane.run(when_there)
        self._measured = {**({} if values.factors else self._measured), order: (self.reader, found)}

    def has_nonfinite(self) -> torch.Tensor:
        """1 if an element is infinite or no number, else 0; on the device."""
        return (~self.norm(math.inf).isfinite()).float()

    def restore(self) -> torch.Tensor:
        """The gradient, on the device, in the type in which it came."""
        held, traffic = self.held, self.shared.traffic
        away = self._away
        dtype = away.dtype if away is not None else held.local().dtype
        like = held.local()
        target = torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)
        values, ready = self.snapshot(), traffic.now()

        def bring() -> Event:
            block = traffic.pinned(target.numel() * dtype.itemsize)
            traffic.host_view(block, dtype, target.numel(), write=True).copy_(held.whole(values).view(-1))
            back = traffic.receive([(target, 0, block.first(target.numel() * dtype.itemsize))], ready)
            traffic.arena.free(block, (back,))
            return back

        traffic.wait(self.shared.lane.run(bring))
        return target

    def _norms_of(self, tensor: torch.Tensor) -> dict[float, torch.Tensor]:
        with torch.no_grad():
            work = self.held.work_dtype
            return {order: torch.linalg.vector_norm(tensor, order, dtype=work) for order in self.shared.norms}

    def _settle(self) -> None:
        """What has come so far becomes the sum, with its factors."""
        self._have_read()
        if self.raw is not None:
            self._add(self.raw, first=True)
            self.raw = None
        if self.factors:
            total, factors = self._sum(), tuple(self.factors)

            def apply() -> None:
                for factor in factors:
                    factor.apply(total.tensor)

            self.shared.lane.run(apply)
            self.factors = []

    def _add(self, sent: Sent, *, first: bool) -> None:
        total, traffic = self._sum(), self.shared.traffic

        def add() -> None:
            add_to(total.tensor, sent.read(traffic), first=first)
            traffic.give_back(sent)

        traffic.flush()
        self.shared.add_later(sent.nbytes, add)
        self.summed = True

    def _sum(self) -> Sum:
        if self.sum is None:
            self.sum = Sum(self.held.new_host_tensor(self.held.work_dtype).view(-1))
        return self.sum


def add_to(total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """Add a flat gradient to a flat sum of the same or a wider type, or let it be the sum."""
    for start in range(0, total.numel(), CHUNK):
        part, new = total[start : start + CHUNK], gradient[start : start + CHUNK]
        if first:
            part.copy_(new)
        elif new.dtype == part.dtype:
            part.add_(new)
        else:
            # By way of scratch: an addition of two types is far slower than a cast and an addition.
            part.add_(new.to(part.dtype))


def _to_send(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient with its parameter's strides.

    Raises:
        UnsupportedError: if it is sparse.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"got a gradient of layout {tensor.layout}, expected a dense one; leave the parameter to an optimizer of "
            f"its own, or make the embedding with sparse=False"
        )
    if tensor.stride() == like.stride() and is_dense(tensor):
        return tensor.detach()
    with torch.no_grad():
        return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
