"""The public class: micro-batches, from the first forward to the optimizer's step."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from spillway.accumulate.gradients import (
    WEIGHTED,
    Float32Sums,
    Weight,
    Writer,
    check_loss,
    checked_weight,
    narrow,
)
from spillway.accumulate.options import check_arguments, steps_in_backward
from spillway.accumulate.stepping import AccumulationStep, Stepper, Totals
from spillway.accumulate.wrappers import Wrappers
from spillway.errors import UsageError
from spillway.runtime.backend import label, on_error

Batch = TypeVar("Batch")

_END: Any = object()


class State(enum.Enum):
    """Progress of an accumulation step, by the micro-batches that have run their backward."""

    EMPTY = "empty"
    FILLING = "filling"
    FULL = "full"
    """The last one has: a step is due."""
    SPOILED = "spoiled"
    """A backward or a step failed: the gradients are invalid."""
    CLOSED = "closed"


@dataclass(eq=False)
class _MicroBatch:
    """The open micro-batch."""

    weight: Weight | None
    last: bool
    """Whether it ends its accumulation step."""
    in_loop: bool
    """Whether a loop over a loader opened it. Then its backward also steps if it is the last one."""
    dropped: bool
    """Whether its accumulation step is dropped at its end."""
    had_backward: bool = False
    switches: ExitStack = field(default_factory=ExitStack)
    """Sets the switches of DDP and FSDP2 back."""


class Accumulator:
    """Accumulates gradients over micro-batches. The result equals the gradients of the whole batch.

    As a loop, which opens and closes micro-batches and steps the optimizer:

        >>> accumulator = spillway.Accumulator(model, optimizer, steps=8, max_norm=1.0)  # doctest: +SKIP
        >>> for batch in accumulator(loader):  # doctest: +SKIP
        ...     loss_sum, tokens = forward(model, batch)
        ...     accumulator.backward(loss_sum, weight=tokens)
        ...     if accumulator.stepped:
        ...         print(f"{accumulator.last.index}: {accumulator.last.loss:.4f}")

    or by hand:

        >>> for batch in batches:  # doctest: +SKIP
        ...     with accumulator.micro(weight=batch.tokens):
        ...         accumulator.backward(forward(model, batch))
        >>> record = accumulator.step()  # doctest: +SKIP

    With ``"tokens"`` and ``"samples"`` pass *sums* of losses (``reduction="sum"``) and their weights. Gradients are
    divided by the total weight over all micro-batches and ranks. With ``"steps"`` pass means. Each micro-batch has one
    backward. Its forward and its backward are inside of it.

    Under DDP and FSDP2 all ranks need the same number of micro-batches, each with a backward. A micro-batch without
    tokens has ``weight=0`` and a loss of 0 that depends on the model.

    The CPU stalls only in torch's ``GradScaler.step``, and when you read numbers of ``accumulator.last``. With a
    scaler, a scheduler and a fused optimizer, the scheduler stalls too.

    The accumulator clears the gradients of the optimizer's parameters when an accumulation step begins and after the
    optimizer has stepped. An exception before the backward of a micro-batch drops that micro-batch only. An exception
    in a backward, in a step, or in the forward of an FSDP2 module invalidates the gradients: call :meth:`discard`.

    Args:
        model: the model, after it was wrapped by DDP or ``fully_shard``.
        optimizer: any ``torch.optim.Optimizer``.
        steps: micro-batches per accumulation step.
        normalize: divisor of the gradients: ``"tokens"`` or ``"samples"`` (the given weights), ``"steps"``
            (micro-batches and ranks; each loss is divided before its backward), or ``"sum"`` (no division).
        max_norm: clip the normalised gradients to this norm, once per accumulation step. ``math.inf`` only measures
            it. ``None``: neither.
        scaler: a ``torch.amp.GradScaler`` for this optimizer only, updated once per accumulation step.
        scheduler: stepped once per accumulation step, if the optimizer has stepped.
        grad_dtype: ``torch.float32`` sums, normalises and clips gradients of bfloat16 and float16 parameters in
            float32. The optimizer gets the parameter's dtype. ``None``: all in the parameter's dtype.
        partial: what to do with the last micro-batches of a loader: ``"scale"`` steps, normalised by their own weight;
            ``"drop"`` clears their gradients; ``"carry"`` keeps them for the next pass.
        sync: which micro-batches reduce gradients over ranks: the ``"last"`` one, or ``"every"`` one. With
            ``"every"``, FSDP2 holds only a shard of the gradients between micro-batches.
        group: process group or device mesh over which the data of ranks differ. ``None``: that of DDP or FSDP2.

    Raises:
        UsageError: for invalid arguments or an invalid order of calls.
        UnsupportedError: for FSDP's first generation, ``replicate()``, and a torch with an unknown DDP or FSDP2.
    """

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        *,
        steps: int,
        normalize: str = "tokens",
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        scheduler: Any = None,
        grad_dtype: torch.dtype | None = None,
        partial: str = "scale",
        sync: str = "last",
        group: Any = None,
    ) -> None:
        options = {"normalize": normalize, "partial": partial, "sync": sync}
        check_arguments(model, optimizer, steps, max_norm, scaler, scheduler, grad_dtype, **options)
        self._optimizer = optimizer
        self._steps = steps
        self._normalize = normalize
        self._partial = partial
        self._places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        # An optimizer with float32 master weights may sum in float32 itself.
        widens = grad_dtype is not None and not getattr(optimizer, "accumulates_in_master_dtype", False)
        self._wrappers = Wrappers(model, sync, group, waits=widens)
        writers, widened = self._wrappers.writers(), self._parameters() if widens else ()
        self._sums = Float32Sums((each, writers.get(id(each), Writer.AUTOGRAD)) for each in widened)
        enabled = scaler if scaler is not None and scaler.is_enabled() else None
        self._stepper = Stepper(
            optimizer, self._wrappers, self._sums, steps, normalize, max_norm, scaler=enabled, scheduler=scheduler
        )
        self._finalizer = weakref.finalize(self, narrow, self._sums.parameters)
        self._finalizer.atexit = False
        self._index = 0
        self._state = State.EMPTY
        self.micro_batches = 0
        """Number of micro-batches of the current accumulation step that have run their backward."""
        self._reduced = False
        self._micro: _MicroBatch | None = None
        self._totals = Totals(self._wrappers.groups)
        self.last: AccumulationStep | None = None
        """Results of the last accumulation step; ``None`` before the first."""
        self.stepped = False
        """Whether the optimizer has stepped since the current micro-batch began."""

    def __call__(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Iterate over a loader once. Each batch is a micro-batch, and the optimizer steps after every ``steps``.

        Call :meth:`backward` for each batch in the loop's body. A batch without one (``continue``) does not count. The
        last backward of an accumulation step also steps the optimizer; then :attr:`stepped` is true.

        The next batch is fetched before this one is returned, to know which is the last of the pass. It is not if this
        batch completes an accumulation step, or with ``partial="carry"``.

        Raises:
            UsageError: in the middle of an accumulation step, unless ``partial`` is ``"carry"``.
        """
        self._check_no_micro()
        if self._state is not State.EMPTY and not (self._state is State.FILLING and self._partial == "carry"):
            raise UsageError(
                f"the accumulation step is {self._state.value} ({self._progress}), so a "
                f"new pass over a loader cannot begin; call step() or discard() first, or say partial='carry'"
            )
        return self._pass(iter(loader))

    def _pass(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        batch = next(batches, _END)
        idle = batch is not _END
        while batch is not _END:
            fills = self.micro_batches + 1 == self._steps
            looks_ahead = not fills and self._partial != "carry"
            following = next(batches, _END) if looks_ahead else _END
            ends = looks_ahead and following is _END
            with self._open(None, last=fills or ends, in_loop=True, dropped=ends and self._partial == "drop"):
                micro = self._micro
                yield batch
            idle = idle and not (micro is not None and micro.had_backward)
            batch = following if looks_ahead else next(batches, _END)
        self._end_pass(idle=idle)

    def _end_pass(self, *, idle: bool) -> None:
        """Handle micro-batches that are left: the last batch had no backward, or they are carried."""
        if idle:
            raise UsageError(
                "no batch of this pass had a backward; call accumulator.backward(loss) for loss.backward()"
            )
        if self._state is not State.FILLING or self._partial == "carry":
            return
        if self._partial == "drop":
            self.discard()
        elif self._reduced:
            self.step()
        else:
            self._state = State.SPOILED
            raise UsageError(
                f"the last micro-batch of the pass had no backward, so gradients of {self._progress} are not reduced "
                f"over ranks; give it weight=0 and a loss of 0 that depends on the model, and call discard() now"
            )

    def micro(self, *, weight: Weight | None = None, last: bool = False) -> AbstractContextManager[None]:
        """A context for the forward and backward of one micro-batch.

        Args:
            weight: its tokens or samples, if known already; else pass them to :meth:`backward`.
            last: whether it ends the accumulation step early: then it reduces gradients over ranks.

        Raises:
            UsageError: inside of another one; after ``steps`` of them; for an invalid weight.
        """
        if self._state is State.FULL:
            raise UsageError(f"all {self._steps} micro-batches have run; call step() first, or raise steps")
        last = last or self.micro_batches + 1 == self._steps
        return self._open(None if weight is None else checked_weight(weight), last=last, in_loop=False)

    @contextmanager
    def _open(self, weight: Weight | None, *, last: bool, in_loop: bool, dropped: bool = False) -> Iterator[None]:
        self._check_no_micro()
        if self._state is State.EMPTY:
            self._optimizer.zero_grad(set_to_none=True)
        micro = self._micro = _MicroBatch(weight, last, in_loop, dropped)
        self.stepped = False
        try:
            self._wrappers.switch(micro.switches, last=last)
            yield
        finally:
            if self._micro is micro:
                self._leave(micro)

    def _leave(self, micro: _MicroBatch) -> None:
        self._micro = None
        micro.switches.close()
        if not micro.had_backward and not self._wrappers.leave(last=micro.last):
            self._state = State.SPOILED

    def backward(self, loss: Tensor, *, weight: Weight | None = None) -> None:
        """Run the backward of the micro-batch. In a loop, the last one also steps the optimizer.

        An ``OffloadedOptimizer(step_in_backward=True)`` steps during the last one of an accumulation step.

        Args:
            loss: one element: a sum with ``"tokens"`` and ``"samples"``, a mean with ``"steps"``. Do not scale it.
            weight: its tokens or samples, unless they were passed to :meth:`micro`: a number, or a tensor of one
                element on any device, which is read without a stall. If one on an accelerator is negative or not a
                number, the gradients become not a number.

        Raises:
            UsageError: outside of a micro-batch; for a second backward in one; without a weight, or with two; for a
                loss without a backward; if DDP or FSDP2 left gradients unreduced.
        """
        micro = self._micro
        if micro is None:
            raise UsageError(
                "backward() was called outside of a micro-batch; call it, with the forward before it, inside of "
                "`with accumulator.micro():` or `for batch in accumulator(loader):`"
            )
        self._check_usable()
        if micro.had_backward:
            raise UsageError("this micro-batch has run its backward already; add the losses, and call backward() once")
        check_loss(loss)
        weight = self._weight(micro, weight)
        reduces = self._wrappers.reduces(last=micro.last)
        with on_error(self._spoil):
            self._totals.add(loss, weight)
            if micro.last:
                self._totals.reduce()
            self._sums.before_backward(reduces=reduces)
            loss = self._stepper.scaled(loss)
            with self._steps_of_optimizer(micro):
                loss.backward()  # type: ignore[no-untyped-call]
            self._sums.after_backward(reduces=reduces)
            self._wrappers.check(last=micro.last)
        micro.had_backward = True
        self.micro_batches += 1
        self._reduced = self._wrappers.completes(last=micro.last)
        self._state = State.FULL if micro.last else State.FILLING
        if micro.last and micro.in_loop:
            if micro.dropped:
                self._clear()
            else:
                self.step()

    def step(self) -> AccumulationStep:
        """Normalise and clip the gradients, and step the optimizer. A loop calls this itself.

        Returns:
            Results of the accumulation step; also :attr:`last`.

        Raises:
            UsageError: without a backward; if gradients are not reduced over ranks, because no micro-batch was the
                last one.
        """
        self._check_usable()
        if self._micro is not None and not self._micro.had_backward:
            raise UsageError("step() was called in a micro-batch before its backward; call it afterwards")
        if self._state is State.EMPTY:
            raise UsageError("step() was called before any backward; call backward() first")
        if not self._reduced:
            raise UsageError(
                f"step() was called after {self._progress}, whose gradients are not "
                f"reduced over ranks; open the last one by accumulator.micro(last=True), or call discard()"
            )
        with on_error(self._spoil), label("accumulation_step"):
            record = self._stepper.step(self._parameters(), self._totals, self._index)
        self.last, self.stepped = record, True
        self._index += 1
        self._clear()
        return record

    def _steps_of_optimizer(self, micro: _MicroBatch) -> AbstractContextManager[object]:
        """A context for a backward: an optimizer that steps in backward does so in the last one only."""
        optimizer: Any = self._optimizer
        if not steps_in_backward(optimizer):
            return nullcontext()
        if not micro.last or micro.dropped or self._wrappers.is_any:
            # Wrappers reduce gradients after autograd has added them.
            return cast("AbstractContextManager[object]", optimizer.accumulate())
        normalize = self._stepper.normalize_each(self._parameters(), self._totals)
        return cast("AbstractContextManager[object]", optimizer.last_backward(normalize))

    def _spoil(self) -> None:
        self._state = State.SPOILED

    def discard(self) -> None:
        """Clear the gradients of the current accumulation step and start a new one. Closes an open micro-batch.

        Call it after an error in a backward or a step. It also resets DDP and FSDP2 (from torch 2.13 on).
        """
        if self._state is State.CLOSED:
            return
        if self._micro is not None:
            self._leave(self._micro)
        self._wrappers.discard(failed=self._state is State.SPOILED)
        self._stepper.discard()
        self._clear()

    def close(self) -> None:
        """Discard the current accumulation step. Later calls raise; a second ``close()`` does nothing."""
        self.discard()
        self._state = State.CLOSED
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """The number of accumulation steps, for a resumed run.

        Save model, optimizer, scaler and scheduler yourself. Gradients are not saved, so call this between accumulation
        steps: after a step, or after :meth:`discard`.

        Raises:
            UsageError: in the middle of an accumulation step, also a carried one.
        """
        self._check_usable()
        if self._state is not State.EMPTY or (self._micro is not None and not self._micro.had_backward):
            raise UsageError(
                f"state_dict() was called in the middle of an accumulation step ({self._progress}), whose gradients "
                f"cannot be saved; save where accumulator.stepped is true, or call discard() and resume with the first "
                f"batch of this accumulation step"
            )
        return {"index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave. Discard the current accumulation step first.

        Raises:
            UsageError: in the middle of an accumulation step; for an invalid state.
        """
        self._check_usable()
        if self._state is not State.EMPTY:
            raise UsageError(
                f"load_state_dict() was called in the middle of an accumulation step ({self._progress}); call "
                f"discard() first"
            )
        index = state.get("index") if isinstance(state, dict) else None
        if not isinstance(index, int) or set(state) != {"index"}:
            raise UsageError(f"got {state!r:.200}, expected what state_dict() of an Accumulator gave")
        self._index = index

    def __repr__(self) -> str:
        return f"<spillway.Accumulator step {self._index}, {self._state.value}, {self.micro_batches} of {self._steps}>"

    @property
    def _progress(self) -> str:
        return f"{self.micro_batches} of {self._steps} micro-batches"

    def _clear(self) -> None:
        """Start a new accumulation step."""
        self._sums.narrow()
        self._optimizer.zero_grad(set_to_none=True)
        self._state = State.EMPTY
        self.micro_batches = 0
        self._reduced = False
        self._totals = Totals(self._wrappers.groups)

    def _parameters(self) -> list[Parameter]:
        """Parameters of the optimizer, in the order of ``model.parameters()``, in which torch clips them."""
        own = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return sorted(own, key=lambda parameter: self._places.get(id(parameter), len(self._places)))

    def _weight(self, micro: _MicroBatch, weight: Weight | None) -> Weight:
        if weight is not None and micro.weight is not None:
            raise UsageError(f"weight: got {micro.weight!r} from micro() and {weight!r} from backward(); give it once")
        if weight is not None:
            return checked_weight(weight)
        if micro.weight is not None:
            return micro.weight
        if self._normalize in WEIGHTED:
            raise UsageError(
                f"weight: normalize={self._normalize!r} divides by the number of {self._normalize}, and this "
                f"micro-batch has none; give it to micro() or backward(), or for mean losses say normalize='steps'"
            )
        return 1.0

    def _check_no_micro(self) -> None:
        self._check_usable()
        if self._micro is not None:
            raise UsageError(
                "another micro-batch is still open; leave its `with` or its loop first, close() an iterator that you "
                "hold, or call discard()"
            )

    def _check_usable(self) -> None:
        if self._state is State.CLOSED:
            raise UsageError("this Accumulator is closed; make a new one")
        if self._state is State.SPOILED:
            raise UsageError(
                "a backward or step of this accumulation step failed, so its gradients are invalid; call discard() "
                "and start again"
            )
