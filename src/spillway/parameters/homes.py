"""The homes of streamed parameters: their pinned memory, and copies of it on the device.

NOTE [ Lifetimes of a home ]

The home is freed with its last owner, after its last copy. Owners are the parameter at rest, and the entries that a
graph holds. So :meth:`StreamedModel.remove` takes no memory from a graph that waits for its backward. Destinations on
the device are allocated on the compute stream that uses them, and freed by reference: a view that the program keeps
stays valid.

NOTE [ Gradients of streamed parameters ]

A parameter's memory is on the device while its block runs, and on the CPU at rest. When ``parameter.data`` moves to
another device, torch forgets the parameter's ``AccumulateGrad`` node. So each call of a block has a node of its own,
where a resident parameter has one node for all calls. That one gets the sum of the gradients of all calls, and adds it
to ``parameter.grad`` once. If several calls are in a graph, :class:`GradientArrivals` does the same: it takes
``parameter.grad`` away before the first gradient arrives, lets autograd add the others to that, and adds the sum to the
former gradient when the backward ends. Else a gradient is complete when it arrives.

Autograd adds to ``parameter.grad`` on the device: the gradient there is an ``OffloadedGradient``, which looks like a
tensor of the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn import Parameter

from spillway._torch import at_end_of_backward, graph_task, in_backward, version_of
from spillway.errors import UnsupportedError, UsageError
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes, over
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.entry import ByteCounters, State
from spillway.runtime.pinned import Pinned
from spillway.runtime.tiers import Tier
from spillway.saved_tensors.identity import SavedStorage, unset_streamed


class HomeTier(Tier):
    """The homes of parameters. A slot is a :class:`~spillway.runtime.pinned.Pinned`, which the mover never frees."""

    last: Event | None = None
    """The end of the copies that were queued last."""
    at_end: Callable[[], None]
    """Called at the end of a backward that has copied."""

    def reserve(self, source: Bytes) -> Pinned:
        raise AssertionError("homes are written at rest, not by copies out")

    def store(self, slots: Sequence[Pinned], sources: Sequence[Bytes]) -> Sequence[Event]:
        raise AssertionError("homes are written at rest, not by copies out")

    def load(self, slots: Sequence[Pinned], destinations: Sequence[Bytes]) -> Sequence[Event]:
        if in_backward():
            at_end_of_backward(self.at_end)
        try:
            for home, destination in zip(slots, destinations, strict=True):
                self._backend.copy(self._back, destination, home.range(0, destination.nbytes))
        finally:
            # Also after a failure: the other copies are under way.
            self.last = copied = self._backend.record(self._back)
            for home in slots:
                # Copies in are ordered by their stream: the last one says when all are done.
                home.after("load", copied)
        return [copied] * len(slots)

    def free(self, slot: Pinned) -> None:
        """The slot's owners free it. See NOTE [ Lifetimes of a home ]."""

    def settle(self) -> None:
        """Block until no copy reads a home. See NOTE [ Writes at rest ] in ``streamed.py``."""
        last, self.last = self.last, None
        if last is not None:
            last.synchronize()


class StreamedEntry(SavedStorage):
    """A parameter's content for one use of its block, and for the graph of that use."""

    __slots__ = ()

    def __init__(self, parameter: StreamedParameter, runtime: DeviceRuntime, tier: Tier, ledger: ByteCounters) -> None:
        home = parameter.home
        super().__init__(parameter.own(), home.block.storage, 0, home.nbytes, next(runtime.mover.numbers), ledger)
        # It begins in its slot, not on the device.
        self.release()
        self.state, self.tier, self.slot, self.alive = State.AWAY, tier, home, _nowhere
        runtime.mover.see(self)


class Use:
    """One use of a parameter by a call of its block, or one that is expected. It is over when this object dies."""

    round = -1
    """That of the entry when it was taken."""

    def __init__(self, parameter: StreamedParameter, entry: StreamedEntry) -> None:
        self.entry = entry
        self.parameter = parameter

    def __del__(self) -> None:
        # It runs also if the rest of the constructor was interrupted.
        if hasattr(self, "entry"):
            self.entry.mover.forget(self.entry, self.round)


class StreamedParameter:
    """A parameter with its home."""

    def __init__(self, name: str, parameter: Parameter, home: Pinned, computes_on: torch.device) -> None:
        self.name = name
        self.computes_on = computes_on
        self._parameter = weakref.ref(parameter)
        self.home = home
        self._form = parameter.dtype, parameter.shape, parameter.stride()
        self.device = parameter.device
        """The device that it was on."""
        self.latest: weakref.ref[SavedStorage] | None = None
        """The entry that was made last, which a graph may hold."""
        self.has_left = False
        self.at_rest = self._over(home.alias().untyped_storage())
        """The parameter's content between uses."""
        self.at_rest.copy_(parameter.detach())
        parameter.data = self.at_rest
        self.before_fetch: Callable[[], None] = _nowhere
        """An optimizer waits here for steps that write the home."""
        self.gradients: GradientArrivals | None = None
        """Those of a parameter that an optimizer trains."""
        self._stepped: int | None = None
        """The version that the last step gave it."""

    @property
    def is_alive(self) -> bool:
        return not self.has_left and self._parameter() is not None

    def own(self) -> Parameter:
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    def check(self) -> None:
        """Raise an error for a parameter that was moved, cast or unfrozen."""
        own = self.own()
        is_home = own.device.type == "cpu" and own.untyped_storage().data_ptr() == self.home.block.address
        if not is_home or (own.dtype, own.shape, own.stride()) != self._form:
            raise UsageError(
                f"{self.name} is streamed, and was moved or cast: got {own.dtype} {tuple(own.shape)} on {own.device} "
                f"in other memory, expected {self._form[0]} {tuple(self._form[1])} in its own CPU memory. Call "
                f"attached.remove(), then model.to(), and attach again"
            )
        if own.requires_grad and self.gradients is None:
            raise UnsupportedError(
                f"{self.name} is streamed, and got requires_grad=True, expected a frozen parameter, or one of an "
                f"OffloadedOptimizer. Call attached.remove(), and attach again, with optimizer="
            )

    def use(self, storage: torch.UntypedStorage) -> None:
        """The parameter's data is this storage."""
        self.own().data = self._over(storage)

    def rest(self, entry: StreamedEntry) -> None:
        """The parameter's data is its home, which gets what the block wrote meanwhile."""
        own, at_rest = self.own(), self.at_rest
        is_stepped = version_of(own) == self._stepped
        written = own.untyped_storage() is not entry.origin() or not (is_stepped or version_of(own) == entry.version)
        if written:
            if (own.dtype, own.shape) != self._form[:2]:
                raise UsageError(
                    f"{self.name} is streamed, and its block gave it other data: got {own.dtype} {tuple(own.shape)}, "
                    f"expected {self._form[0]} {tuple(self._form[1])}. Call attached.remove() first"
                )
            self.home.synchronize("load")
            at_rest.copy_(own.detach())
        own.data = at_rest

    def leave(self) -> None:
        """The parameter gets memory of its own, where it was."""
        if self.is_alive:
            own = self.own()
            gradient, own.grad = own.grad, None
            own.data = own.detach().to(self.device, copy=True)
            own.grad = None if gradient is None else gradient.to(self.device)
            unset_streamed(own)
        self.has_left = True

    # For an optimizer that steps it.

    def train(self, complete: Callable[[], None], before_fetch: Callable[[], None]) -> Callable[[], None]:
        """From now on an optimizer steps it. Gives a function that ends this.

        Args:
            complete: called when its gradient is complete, which is ``parameter.grad``, on the device.
            before_fetch: waits for the steps that write its home.
        """
        arrivals = self.gradients = GradientArrivals(self, complete)
        self.before_fetch = before_fetch

        def end() -> None:
            arrivals.remove()
            self.gradients, self.before_fetch = None, _nowhere

        return end

    def is_written(self) -> None:
        """A step writes the home. A copy on the device is of before."""
        self._stepped = version_of(self.own())

    @contextmanager
    def as_on_device(self) -> Iterator[None]:
        """Inside, it takes gradients that are on the device: torch refuses them for a tensor that is not."""
        own, now = self.own(), self.own().data
        if now.device != self.computes_on:
            own.data = torch.empty((), dtype=own.dtype, device=self.computes_on).expand(own.shape)
        try:
            yield
        finally:
            own.data = now

    def set_gradient(self, gradient: torch.Tensor | None) -> None:
        """Set its gradient, which is on the device."""
        with self.as_on_device():
            self.own().grad = gradient

    def _over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        dtype, size, stride = self._form
        return over(storage, dtype, 0, size, stride)


class GradientArrivals:
    """Says when the gradient of a streamed parameter is complete. See NOTE [ Gradients of streamed parameters ].

    Args:
        parameter: which it is.
        complete: called with a complete gradient in ``parameter.grad``, on the device.
    """

    def __init__(self, parameter: StreamedParameter, complete: Callable[[], None]) -> None:
        self._parameter = parameter
        self._complete = complete
        own = parameter.own()
        self._hooks = own.register_hook(self._begin), own.register_post_accumulate_grad_hook(self._end)  # type: ignore[no-untyped-call]
        self.uses = 0
        """Calls in forward whose gradients have not arrived."""
        self._task: int | None = None
        """The backward in which gradients of several calls are added up."""
        self._before: torch.Tensor | None = None
        """The gradient that was there before it."""

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, gradient: torch.Tensor | None) -> None:
        """Autograd is about to accumulate a gradient."""
        if gradient is None:
            return
        task = graph_task()
        if self._task not in (None, task):
            # That backward has failed.
            self._sum_is_complete()
        if self.uses > 1 and self._task is None:
            own = self._parameter.own()
            self._task, self._before = task, own.grad
            own.grad = None
            at_end_of_backward(self._sum_is_complete)

    def _end(self, _: torch.Tensor) -> None:
        """Autograd has accumulated it."""
        self.uses = max(self.uses - 1, 0)
        if self._task is None:
            self._complete()

    def _sum_is_complete(self) -> None:
        if self._task is None:
            return
        own, before = self._parameter.own(), self._before
        self._task = self._before = None
        total = own.grad
        if before is not None:
            self._parameter.set_gradient(before)
            if total is not None:
                with torch.no_grad():
                    before.add_(total)
        if total is not None:
            self._complete()


def _nowhere() -> None:
    return None
