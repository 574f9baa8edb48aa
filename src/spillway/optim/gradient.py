"""The gradient of a parameter that is stepped on the CPU: its bytes, its norms, and how it is summed.

The first gradient that arrives is kept as it is (``raw``). From the first accumulation on, gradients are summed on the
CPU, in their order of arrival (``sum``): in the type of the step, or in their own if it is wider. Multiplications are
noted (``factors``), and applied when a step reads the gradient. See NOTE [ Threads ].
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from spillway._torch import foreach_norm, make_wrapper, version_of
from spillway.errors import UsageError
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.optim.tensors import flat, local_of, scratch_of, with_strides_of
from spillway.optim.transfers import SentTensor, Transfers, Upload
from spillway.runtime.arena import Pinned
from spillway.runtime.backend import Event, HostQueue, TaskEnd, finish
from spillway.runtime.bytes import Cells

if TYPE_CHECKING:
    from spillway.optim.host_parameter import HostParameter

_MOST_EXPONENT = 24
"""A power of two with a larger exponent may overflow with the squares of gradients, or lose digits of theirs."""


class Factor:
    """A number that gradients are multiplied with (``"mul_"``) or divided by (``"div_"``), or a copy of a tensor."""

    def __init__(self, operation: str, value: torch.Tensor | float, transfers: Transfers) -> None:
        self.operation = operation
        self.given = value
        self._value: torch.Tensor | float | None = value
        self._transfers = transfers
        if isinstance(value, torch.Tensor):
            self.given = value.detach().clone()
            self._value = None
            self._sent = transfers.send(self.given)
            # If the gradient is cleared, the number is never read.
            self._release = weakref.finalize(self, transfers.give_back, self._sent)
            self._release.atexit = False
            transfers.flush()

    def value(self) -> torch.Tensor | float:
        """The number; for the CPU worker thread."""
        if self._value is None:
            self._value = self._transfers.read(self._sent).clone().reshape(())
            self._release()
        return self._value

    def apply(self, tensor: torch.Tensor, *, on_device: bool = False) -> None:
        """Multiply in place: on the GPU, or in the CPU worker thread."""
        getattr(tensor, self.operation)(self.given if on_device else self.value())

    def applied(self, tensor: torch.Tensor, scratch: torch.Tensor | None) -> torch.Tensor:
        """The product, in scratch memory if there is some; for the CPU worker thread."""
        product: torch.Tensor = getattr(torch, self.operation[:-1])(tensor, self.value(), out=scratch)
        return product

    @functools.cached_property
    def keeps_digits(self) -> bool:
        """Whether products and their squares have the same digits, without overflow or underflow. Waits for it."""
        digits, exponent = math.frexp(abs(float(self.given)))
        return digits == 0.5 and abs(exponent) <= _MOST_EXPONENT

    def of_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The norm of the product, from the norm of the gradient, and in its type."""
        value = self.given.abs() if isinstance(self.given, torch.Tensor) else abs(self.given)
        return (norm * value if self.operation == "mul_" else norm / value).to(norm.dtype)


@dataclass(eq=False)
class DeviceContext:
    """The copy streams, threads and counts that all gradients of one GPU share."""

    transfers: Transfers
    lane: HostQueue
    """The CPU worker thread."""
    workers: HostQueue
    """Threads that compute for it."""
    stepper: HostQueue
    """The thread that queues steps on the GPU. It is the CPU worker thread if that has no steps on the CPU."""
    check_session: Callable[[], None]
    """Raises if the session is closed. Without it, waits for a copy would never end."""
    pins_sums: bool
    """Whether gradients are summed in pinned memory, because copies to the GPU read it."""
    closed: bool = False
    accumulates: bool = False
    """Whether a second gradient ever arrived before a step."""
    norms: set[float] = field(default_factory=lambda: {2.0})
    """Orders of norms that are taken on the GPU, before the offload: in the first step that of ``clip_grad_norm_``."""
    asked: set[float] = field(default_factory=set)
    """Orders of norms that were asked for."""
    expected: int = 0
    """How many gradients of a parameter arrived in the last accumulation step."""
    gradients: weakref.WeakSet[Gradient] = field(default_factory=weakref.WeakSet)
    _factor: tuple[torch.Tensor, int | None, Factor] | None = None
    _additions: deque[tuple[int, Event]] = field(default_factory=deque)
    _additions_lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise if bytes cannot be moved any more: the session or the optimizer is closed."""
        self.check_session()
        if self.closed:
            raise UsageError(
                "got a gradient of a closed OffloadedOptimizer, whose bytes are gone. Call close() after the "
                "last use of its gradients."
            )

    def close(self, *, lost: bool) -> None:
        for queue in (self.lane, self.workers, self.stepper):
            queue.close()
        if not lost:
            self.transfers.settle()
        self._factor = None
        self._additions.clear()
        self.closed = True

    def factor(self, operation: str, value: torch.Tensor | float) -> Factor:
        """One factor for all gradients that are multiplied with the same tensor."""
        if not isinstance(value, torch.Tensor):
            return Factor(operation, value, self.transfers)
        # An inference tensor has no version: its value may have changed.
        version = None if value.is_inference() else version_of(value)
        last = self._factor
        is_known = last is not None and last[0] is value and version is not None and last[1] == version
        if last is None or not is_known or last[2].operation != operation:
            last = self._factor = (value, version, Factor(operation, value, self.transfers))
        return last[2]

    def end_step(self) -> None:
        """A step has ended: the next tensor is another factor, and norms are taken if they were asked for."""
        self._factor = None
        self.norms = set(self.asked)

    def last_task(self) -> TaskEnd:
        """The end of all tasks that were given to the worker thread."""
        return self.lane.run(lambda: None)

    def add_later(self, nbytes: int, task: Callable[[], None]) -> None:
        """Queue an addition that frees pinned memory. Past the in-flight limit, wait for the oldest."""
        # Backward may run in several threads.
        with self._additions_lock:
            while self._additions and sum(size for size, _ in self._additions) + nbytes > self.transfers.window:
                self._additions.popleft()[1].synchronize()
            self._additions.append((nbytes, self.lane.run(task)))


class GradientSum:
    """CPU memory in which a parameter's gradients are summed; for the CPU worker thread."""

    def __init__(self, held: HostParameter, dtype: torch.dtype) -> None:
        transfers = held.context.transfers
        self.dtype = dtype
        self.pinned: Pinned | None = None
        self._backend = transfers.backend
        if held.context.pins_sums:
            self.pinned = Pinned(transfers.arena, held.numel * self.dtype.itemsize)
            self.pinned.synchronize()
            self._memory = Cells(self.pinned.bytes, self.dtype).tensor()
        else:
            self._memory = held.new_flat_tensor(self.dtype)

    def tensor(self) -> torch.Tensor:
        """The flat sum, which the thread may write."""
        if self.pinned is not None:
            # The last step's copy to the GPU reads it.
            self.pinned.synchronize("in")
            self._backend.host_access(self.pinned.block, write=True)
        return self._memory


@dataclass(eq=False, slots=True)
class Snapshot:
    """A parameter's gradient as it will be when all queued tasks are done; for the CPU worker thread."""

    held: HostParameter
    raw: SentTensor | None = None
    sum: GradientSum | None = None
    factors: tuple[Factor, ...] = ()
    on_device: torch.Tensor | None = None
    """The gradient itself, if it is on the GPU and is stepped there."""

    @property
    def number(self) -> int:
        """Its place in the order of arrival. A sum was there before."""
        return 0 if self.raw is None else self.raw.batch.number

    @property
    def needs_scratch(self) -> bool:
        """Whether a step needs a copy of it: in another type, or multiplied."""
        return bool(self.factors) or (self.raw is not None and self.raw.dtype != self.held.work_dtype)

    def wait(self) -> None:
        """Wait until it and its factors are on the CPU."""
        if self.raw is not None:
            self._read()
        for factor in self.factors:
            factor.value()

    def exact(
        self,
        start: int = 0,
        form: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
        scratch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """It in the type of the step or in its own, whichever is wider, with its factors; or a part of this form.

        If it changes, it is in scratch memory, if that is large enough.
        """
        held, factors = self.held, list(self.factors)
        found = self.sum.tensor() if self.sum is not None else self._read()
        found = found.as_strided(*(form or held.form), int(found.storage_offset()) + start)
        if scratch is not None:
            scratch = scratch.as_strided(*(form or held.form)) if found.numel() <= len(scratch) else None
        dtype = torch.promote_types(found.dtype, held.work_dtype)
        if scratch is not None and scratch.dtype != dtype:
            scratch = None
        if found.dtype != dtype:
            found = found.to(dtype) if scratch is None else scratch.copy_(found)
        elif factors:
            found = factors.pop(0).applied(found, scratch)
        for factor in factors:
            factor.apply(found)
        return found

    def _read(self) -> torch.Tensor:
        assert self.raw is not None
        return self.held.context.transfers.read(self.raw)


class _CpuNorm(NamedTuple):
    done: Event
    found: list[float]
    """The norm, once the task is done."""
    factors: tuple[Factor, ...]
    """The factors that it contains."""


@dataclass(eq=False)
class Gradient:
    """The gradient of a parameter that is stepped on the CPU."""

    held: HostParameter
    context: DeviceContext
    raw: SentTensor | None = None
    sum: GradientSum | None = None
    summed: bool = False
    """Whether ``sum`` has the gradient."""
    factors: list[Factor] = field(default_factory=list)
    norms: dict[float, torch.Tensor] = field(default_factory=dict)
    """Norms of a single gradient, without factors; on the GPU."""
    reader: Event | None = None
    """The end of the last step that reads it."""
    count: int = 0
    """How many gradients arrived."""
    dtype: torch.dtype = field(init=False)
    """The type of sums and norms: the step's, or that of the first gradient if it is wider."""
    sealed: bool = False
    """Whether it was stepped by during backward. It must not change before ``step`` is called."""
    _cpu_norms: dict[float, _CpuNorm] = field(default_factory=dict)
    _tensor: weakref.ref[OffloadedGradient] | None = None

    def __post_init__(self) -> None:
        self.dtype = self.held.work_dtype
        self.context.gradients.add(self)

    def __del__(self) -> None:
        # Tasks that read the gradient reference it, so there are none.
        if self.raw is not None:
            self.context.transfers.give_back(self.raw)

    def begin(self, tensor: torch.Tensor) -> None:
        self._check_open()
        self.clear()
        self.arrive(tensor)

    def stand_in(self, tensor: torch.Tensor) -> OffloadedGradient:
        """A tensor in the place of a gradient that was offloaded."""
        like = self.held.local()
        stand_in: OffloadedGradient = make_wrapper(
            OffloadedGradient, like.shape, dtype=tensor.dtype, device=like.device, strides=like.stride()
        )
        # Weak: the optimizer holds the parameter, which holds this tensor, and the collector does not see that.
        stand_in._home = weakref.ref(self)
        # Weak: a user who keeps it beside the parameter wants its value when the next gradient arrives.
        self._tensor = weakref.ref(stand_in)
        return stand_in

    def is_current(self) -> bool:
        """Whether the parameter's ``grad`` stands for this gradient, and not for another optimizer's."""
        found = self.held.parameter.grad
        local = None if found is None else local_of(found)
        return isinstance(local, OffloadedGradient) and local._home() is self

    def stand_in_if_alive(self) -> OffloadedGradient | None:
        """The tensor in its place, if it is still referenced."""
        return None if self._tensor is None else self._tensor()

    def arrive(self, tensor: torch.Tensor) -> None:
        """Offload a gradient, and add it."""
        self.context.check()
        self._check_open()
        if tensor.device != self.held.device:
            raise UsageError(
                f"got a gradient on {tensor.device} of a parameter that was on {self.held.device} when its "
                f"OffloadedOptimizer was made. Move a model before you make its optimizer."
            )
        tensor = with_strides_of(tensor, self.held.local())
        # First, since there may be no memory. Nothing is lost then.
        sent = self.context.transfers.send(tensor)
        self.count += 1
        self._cpu_norms = {}
        alone = self.raw is None and not self.summed
        if alone:
            self.dtype = torch.promote_types(tensor.dtype, self.held.work_dtype)
        self.norms = {} if not alone or self.context.accumulates else self._norms_of(tensor)
        if not alone:
            self.context.accumulates = True
            self._settle()
        if self.context.accumulates:
            self._add(sent, first=alone)
        else:
            self.raw = sent
        if self.count == self.context.expected and not self.norms:
            # Probably the last one: the step before had as many.
            for order in self.context.norms:
                self.measure(order)

    def scale(self, operation: str, value: torch.Tensor | float) -> None:
        self._check_open()
        self.factors.append(self.context.factor(operation, value))

    def fill_with_zeros(self) -> None:
        self._check_open()
        self.clear()
        total = self._sum()
        self.summed = True

        def fill() -> None:
            total.tensor().zero_()

        self.context.lane.run(fill)

    def clear(self) -> None:
        self._wait_for_reader()
        if self.raw is not None:
            self.context.transfers.give_back(self.raw)
        self.raw = None
        self.summed = False
        self.factors = []
        self.norms = {}
        self._cpu_norms = {}
        self.count = 0

    def snapshot(self, on_device: torch.Tensor | None = None) -> Snapshot:
        """The gradient, for a reader that applies the factors. ``on_device`` is the same, if it is still on the GPU."""
        self._wait_for_reader()
        self.context.transfers.flush()
        return Snapshot(self.held, self.raw, self.sum if self.summed else None, tuple(self.factors), on_device)

    def norm(self, order: float) -> torch.Tensor:
        """Its norm in the type of the step; a tensor without dimensions, on the GPU."""
        self.context.check()
        if order > 0:
            self.context.asked.add(order)
            self.context.norms.add(order)
        if self._has_device_norm(order):
            norm = self.norms[order]
            for factor in self.factors:
                norm = factor.of_norm(norm)
            return norm
        if not self._has_cpu_norm(order):
            # Code that asks for one norm asks for all: the workers take the others meanwhile.
            for gradient in list(self.context.gradients):
                gradient.measure(order)
        measured, local = self._cpu_norms[order], self.held.local()
        measured.done.synchronize()
        return torch.tensor(measured.found[0], dtype=self.dtype.to_real(), device=local.device)

    def measure(self, order: float) -> None:
        """Let the CPU take its norm, if there is a gradient and the norm is not known."""
        known = self._has_device_norm(order) or self._has_cpu_norm(order)
        if known or not (self.raw is not None or self.summed):
            return
        values, context = self.snapshot(), self.context
        found: list[float] = []

        def measure() -> None:
            found.append(float(torch.linalg.vector_norm(values.exact(), order)))

        def when_there() -> Event:
            values.wait()
            return context.workers.run(measure)

        self.reader = context.lane.run(when_there)
        self._cpu_norms[order] = _CpuNorm(self.reader, found, values.factors)

    def has_nonfinite(self) -> torch.Tensor:
        """1 if an element is infinite or NaN, else 0; on the GPU."""
        if self.held.numel == 0:
            return torch.zeros((), device=self.held.local().device)
        return (~self.norm(math.inf).isfinite()).float()

    def restore(self, *, exact: bool = False) -> torch.Tensor:
        """Reload the gradient in the type in which it arrived. If ``exact``, at least in the type of the step."""
        self.context.check()
        transfers, stand_in = self.context.transfers, self.stand_in_if_alive()
        dtype = stand_in.dtype if stand_in is not None else self.held.local().dtype
        if exact:
            dtype = torch.promote_types(dtype, self.held.work_dtype)
        memory = transfers.backend.empty(self.held.numel * dtype.itemsize)
        target = Cells(memory, dtype).tensor(self.held.form)
        values, ready = self.snapshot(), transfers.ready()

        def upload() -> Event:
            gradient, block = flat(values.exact()), transfers.pinned(target.nbytes)
            source = Cells(block.part(0, target.nbytes), dtype)
            transfers.host_view(source, write=True).copy_(gradient)
            end = transfers.receive([Upload(target, 0, source)], ready)
            transfers.arena.free(block, (end,))
            return end

        transfers.wait(self.context.lane.run(upload))
        return target

    def _wait_for_reader(self) -> None:
        """Wait until the workers have read it. Later tasks come after."""
        if self.reader is not None:
            # An error of that step is raised where its parameter is waited for.
            finish(self.reader)
            self.reader = None

    def _has_device_norm(self, order: float) -> bool:
        """Whether the norm that was taken on the GPU gives its own norm, to the last bit."""
        if order == math.inf or not self.factors:
            return order in self.norms
        # Small products of float16 lose digits.
        is_wide = self.held.work_dtype is not torch.float16
        return is_wide and order in self.norms and all(factor.keeps_digits for factor in self.factors)

    def _has_cpu_norm(self, order: float) -> bool:
        return order in self._cpu_norms and self._cpu_norms[order].factors == tuple(self.factors)

    def _check_open(self) -> None:
        if self.sealed:
            raise UsageError(
                "A gradient was added to, multiplied or written between backward and step(), but step_in_backward=True "
                "has stepped its parameter. Leave that option out to accumulate, clip or scale."
            )

    def _norms_of(self, tensor: torch.Tensor) -> dict[float, torch.Tensor]:
        with torch.no_grad():
            dtype = self.dtype
            orders = [order for order in self.context.norms if order != math.inf or tensor.numel()]
            if tensor.device.type == "cpu" or not tensor.numel():
                return {order: torch.linalg.vector_norm(tensor, order, dtype=dtype) for order in orders}
            # The kernel of clip_grad_norm_: another one's last bit may differ.
            return {order: foreach_norm([tensor], order, dtype=dtype)[0] for order in orders}

    def _settle(self) -> None:
        """The gradient so far becomes the sum, with its factors."""
        self._wait_for_reader()
        if self.raw is not None:
            self._add(self.raw, first=True)
            self.raw = None
        if self.factors:
            total, factors = self._sum(), tuple(self.factors)

            def apply() -> None:
                for factor in factors:
                    factor.apply(total.tensor())

            self.context.lane.run(apply)
            self.factors = []

    def _add(self, sent: SentTensor, *, first: bool) -> None:
        total, transfers = self._sum(), self.context.transfers

        def add() -> None:
            _add_to(total.tensor(), transfers.read(sent), first=first)
            transfers.give_back(sent)

        transfers.flush()
        self.context.add_later(sent.nbytes, add)
        self.summed = True

    def _sum(self) -> GradientSum:
        if self.sum is None or self.sum.dtype != self.dtype:
            self.sum = GradientSum(self.held, self.dtype)
        return self.sum


def _add_to(total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """Add a flat gradient to a flat sum of the same or a wider type. The first one is copied."""
    scratch = scratch_of(total.dtype)
    for part, new in zip(torch.split(total, len(scratch)), torch.split(gradient, len(scratch)), strict=True):
        if first:
            part.copy_(new)
        elif new.dtype == part.dtype:
            part.add_(new)
        else:
            # Through scratch: an addition of two types is far slower than a cast and an addition.
            part.add_(scratch[: new.numel()].copy_(new))
