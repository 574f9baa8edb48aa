"""The gradient of one parameter, on the host: what came, what it adds up to, and what it is to be multiplied with.

The first that comes is kept as it came (``raw``). With a second, and from then on with the first of each window too,
all are added up on the host in the master's type, in the order in which they came (``sum``). A multiplication is a note
(``factors``) until somebody reads the gradient. See NOTE [ Who may touch what ].
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.away import AwayGradient
from spillway.optim.parcels import Sent
from spillway.optim.shared import Factor, Shared
from spillway.optim.sums import Counted, Sum
from spillway.optim.traffic import Traffic, Way, is_dense
from spillway.runtime.backend import Event, finish
from spillway.runtime.bytes import Cells


@dataclass(eq=False, slots=True)
class Snapshot:
    """A gradient as it is when all that was queued is done; for the host lane."""

    raw: Sent | None
    sum: Sum | None
    factors: tuple[Factor, ...]
    here: torch.Tensor | None = None
    """The gradient itself, if it never left the device where it is stepped."""
    _read: torch.Tensor | None = None

    def read(self, traffic: Traffic) -> torch.Tensor:
        """The gradient as it came, flat, when it is there."""
        if self._read is None:
            assert self.raw is not None
            self._read = traffic.read(self.raw)
        return self._read

    def stays(self, dtype: torch.dtype) -> bool:
        """Whether a step in a type can read it where it is."""
        return not self.factors and (self.raw is None or self.raw.dtype == dtype)

    @property
    def came(self) -> int:
        """When it left for the host, among all; what is being added up did before."""
        return 0 if self.raw is None else self.raw.parcel.number

    def wait(self, traffic: Traffic) -> None:
        """Until all of it is on the host."""
        if self.raw is not None:
            self.read(traffic)
        for factor in self.factors:
            factor.value()


class _Measured(NamedTuple):
    """A norm that the host takes."""

    done: Event
    found: list[float]
    """It, once that is done."""
    factors: tuple[Factor, ...]
    """What the gradient is multiplied with in it."""


class Owner(Counted, Protocol):
    """A parameter, as its gradient knows it."""

    def local(self) -> torch.Tensor:
        """The parameter's own bytes, on the device."""
        ...

    def empty_on_device(self, dtype: torch.dtype) -> torch.Tensor:
        """A tensor like the parameter."""
        ...

    def part(self, values: Snapshot, start: int, numel: int, scratch: torch.Tensor | None) -> torch.Tensor:
        """Elements of the gradient in the type of the step, with its factors."""
        ...

    def whole(self, values: Snapshot) -> torch.Tensor:
        """All of them, in the parameter's shape."""
        ...


@dataclass(eq=False)
class Gradient:
    """The gradient of a held parameter."""

    held: Owner
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
    count: int = 0
    """How many came."""
    sealed: bool = False
    """Whether its parameter was stepped by it: nothing may be done to it before ``step`` is called."""
    _measured: dict[float, _Measured] = field(default_factory=dict)
    """Norms that the host took, or is about to."""
    _away: weakref.ref[AwayGradient] | None = None

    def __post_init__(self) -> None:
        self.shared.add(self)

    def __del__(self) -> None:
        # Nobody waits here: tasks that read it hold it, so there are none.
        if self.raw is not None:
            self.shared.traffic.give_back(self.raw)

    @property
    def work_dtype(self) -> torch.dtype:
        """The type that it is stepped in."""
        return self.held.work_dtype

    def begin(self, tensor: torch.Tensor) -> None:
        """This is the gradient now, whatever it was."""
        self.clear()
        self.arrive(tensor)

    def stand_in(self, tensor: torch.Tensor) -> AwayGradient:
        """What stands in the place of a gradient that left."""
        away = AwayGradient(self, self.held.local(), tensor.dtype)
        # Weak: who holds it beside the parameter wants it as it is, when another comes.
        self._away = weakref.ref(away)
        return away

    def away(self) -> AwayGradient | None:
        """What stands in its place, if somebody holds that."""
        return None if self._away is None else self._away()

    def arrive(self, tensor: torch.Tensor) -> None:
        """One more has come: it leaves for the host, and is added."""
        self.shared.check()
        self._check_open()
        tensor = laid_out(tensor, self.held.local())
        # In an order that loses nothing should the memory not do.
        sent = self.shared.traffic.send(tensor)
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
        self._check_open()
        self.factors.append(self.shared.factor(operation, value))

    def fill_with_zeros(self) -> None:
        """It is there, and zero."""
        self._check_open()
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
        self._check_open()
        self.begin(tensor)

    def snapshot(self) -> Snapshot:
        """It, for somebody who applies the factors."""
        self._have_read()
        self.shared.traffic.flush()
        return Snapshot(self.raw, self.sum if self.summed else None, tuple(self.factors))

    def for_device(self, now: torch.Tensor) -> Snapshot:
        """What ``p.grad`` is now, for a step on the device, which applies the factors there: here it stays as it is."""
        if not isinstance(now, AwayGradient):
            self.clear()
            return Snapshot(None, None, (), here=laid_out(now, self.held.local()))
        self._have_read()
        self.shared.traffic.flush()
        return Snapshot(self.raw, self.sum if self.summed else None, tuple(self.factors))

    def _have_read(self) -> None:
        """Wait for the hands that read it; what is queued in the host lane from now on comes after."""
        if self.reader is not None:
            # What went wrong there is told to whoever waits for the parameter.
            finish(self.reader)
            self.reader = None

    def norm(self, order: float) -> torch.Tensor:
        """Its norm of an order, in the type that it is stepped in; a tensor without dimensions, on the device."""
        self.shared.check()
        if order > 0:
            self.shared.norms.add(order)
        if self._was_taken(order):
            norm = self.norms[order]
            for factor in self.factors:
                norm = factor.of_norm(norm)
            return norm
        if not self._is_measured(order):
            # Who asks for one norm asks for all: the hands take the others meanwhile.
            for gradient in self.shared.gradients():
                gradient.measure(order)
        measured = self._measured[order]
        measured.done.synchronize()
        return torch.tensor(measured.found[0], dtype=_real(self.held.work_dtype), device=self.held.local().device)

    def measure(self, order: float) -> None:
        """Have the host take its norm, if it has come, and is not known."""
        known = self._was_taken(order) or self._is_measured(order)
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
        self._measured[order] = _Measured(self.reader, found, values.factors)

    def _was_taken(self, order: float) -> bool:
        """Whether the norm that was taken on the device says what its own is, to the last bit."""
        return order in self.norms and all(order == math.inf or factor.is_power_of_two() for factor in self.factors)

    def _is_measured(self, order: float) -> bool:
        return order in self._measured and self._measured[order].factors == tuple(self.factors)

    def has_nonfinite(self) -> torch.Tensor:
        """1 if an element is infinite or no number, else 0; on the device."""
        if self.held.numel == 0:
            return torch.zeros((), device=self.held.local().device)
        return (~self.norm(math.inf).isfinite()).float()

    def restore(self, *, exact: bool = False) -> torch.Tensor:
        """The gradient, on the device, in the type in which it came; or at least that of the step, if ``exact``."""
        self.shared.check()
        held, traffic = self.held, self.shared.traffic
        away = self.away()
        dtype = away.dtype if away is not None else held.local().dtype
        if exact:
            dtype = torch.promote_types(dtype, held.work_dtype)
        target = held.empty_on_device(dtype)
        values, ready = self.snapshot(), traffic.now()

        def bring() -> Event:
            gradient = held.part(values, 0, held.numel, None)
            block = traffic.pinned(target.numel() * dtype.itemsize)
            traffic.host_view(block, dtype, target.numel(), write=True).copy_(gradient)
            back = traffic.receive([Way(target, 0, Cells(block.first(target.numel() * dtype.itemsize), dtype))], ready)
            traffic.arena.free(block, (back,))
            return back

        traffic.wait(self.shared.lane.run(bring))
        return target

    def _check_open(self) -> None:
        if self.sealed:
            raise UsageError(
                "got a gradient that is added to, multiplied or written between backward and step(), expected it as "
                "it came: step_in_backward=True has stepped its parameter; leave that out to accumulate, clip or scale"
            )

    def _norms_of(self, tensor: torch.Tensor) -> dict[float, torch.Tensor]:
        with torch.no_grad():
            work = self.held.work_dtype
            orders = [order for order in self.shared.norms if order != math.inf or tensor.numel()]
            if tensor.device.type == "cpu" or not tensor.numel():
                return {order: torch.linalg.vector_norm(tensor, order, dtype=work) for order in orders}
            # As clip_grad_norm_ takes it there: another kernel's last bit may be another.
            return {order: torch._foreach_norm([tensor], order, dtype=work)[0] for order in orders}

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
        total, shared, traffic = self._sum(), self.shared, self.shared.traffic

        def add() -> None:
            add_to(total.tensor, traffic.read(sent), first=first, scratch=shared.scratch(total.dtype))
            traffic.give_back(sent)

        traffic.flush()
        self.shared.add_later(sent.nbytes, add)
        self.summed = True

    def _sum(self) -> Sum:
        if self.sum is None:
            self.sum = Sum(self.held, self.shared.traffic, pinned=self.shared.pins_sums)
        return self.sum


def add_to(total: torch.Tensor, gradient: torch.Tensor, *, first: bool, scratch: torch.Tensor) -> None:
    """Add a flat gradient to a flat sum of the same or a wider type, or let it be the sum.

    Args:
        total: the sum.
        gradient: what is added.
        first: whether it is the sum.
        scratch: of the sum's type, as large as fits the caches.
    """
    size = scratch.numel()
    for start in range(0, total.numel(), size):
        part, new = total[start : start + size], gradient[start : start + size]
        if first:
            part.copy_(new)
        elif new.dtype == part.dtype:
            part.add_(new)
        else:
            # By way of scratch: an addition of two types is far slower than a cast and an addition.
            part.add_(scratch[: new.numel()].copy_(new))


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
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
