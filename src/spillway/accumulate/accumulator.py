"""The public class: a window of micro-batches, from the first forward to the optimizer's step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from spillway.accumulate.checks import check_arguments, check_loss, checked_weight
from spillway.accumulate.options import Normalize, Partial, Sync, chosen
from spillway.accumulate.record import WindowStep
from spillway.accumulate.states import MicroBatch, State, Weight
from spillway.accumulate.stepping import Stepper
from spillway.accumulate.totals import Totals
from spillway.accumulate.widening import Float32Sums, Home, narrow
from spillway.accumulate.wrappers import Wrappers
from spillway.errors import UsageError
from spillway.runtime.labels import label

Batch = TypeVar("Batch")

_END: Any = object()


class Accumulator:
    """Accumulates gradients over windows of micro-batches, so that they are those of the whole batch.

    As a loop, which opens and closes micro-batches and steps by itself:

        >>> window = spillway.Accumulator(model, optimizer, steps=8, max_norm=1.0)  # doctest: +SKIP
        >>> for batch in window(loader):  # doctest: +SKIP
        ...     loss_sum, tokens = forward(model, batch)
        ...     window.backward(loss_sum, weight=tokens)
        ...     if window.stepped:
        ...         print(f"{window.last.index}: {window.last.loss:.4f}")

    or by hand:

        >>> for batch in batches:  # doctest: +SKIP
        ...     with window.micro(weight=batch.tokens):
        ...         window.backward(forward(model, batch))
        >>> record = window.step()  # doctest: +SKIP

    With ``"tokens"`` and ``"samples"`` give *sums* of losses (``reduction="sum"``) and what they are sums over:
    gradients are divided by the total over the window and over all ranks. A mean of means is something else, unless
    all micro-batches weigh the same. With ``"steps"`` give means. A micro-batch has one backward, and its forward and
    its backward are inside of it.

    Under DDP and FSDP2 all ranks must have as many micro-batches in a window, and each of them a backward; one without
    tokens has ``weight=0`` and a loss of 0 that hangs on the model. What they average is put right. Of a model that
    nothing wraps, gradients stay those of this rank.

    Nothing waits for a device but what torch's ``GradScaler.step`` waits for, and what you read of ``window.last``.
    (With a scaler, a scheduler, and an optimizer that looks for infinities itself, as fused ones do, the scheduler has
    to wait, too.)

    The gradients of the optimizer's parameters belong to the window while there is one: they are cleared when it begins
    and when it has stepped.

    An exception in a micro-batch before its backward leaves the window as it was, without that micro-batch. One in a
    backward or a step, or in the forward of what FSDP2 wraps, spoils the window: call :meth:`discard`, and go on with a
    new one. Neither leaves a switch of DDP or FSDP2 behind.

    Args:
        model: what is trained, wrapped (DDP, ``fully_shard``) by now.
        optimizer: any ``torch.optim.Optimizer``.
        steps: micro-batches in a window.
        normalize: what gradients are divided by: ``"tokens"`` or ``"samples"`` (the weights that you give), ``"steps"``
            (micro-batches, and ranks; each loss is divided before its backward), or ``"sum"`` (nothing).
        max_norm: clip gradients, once a window and normalised, by their norm, which is then in the record;
            ``math.inf`` only measures it. ``None``: neither.
        scaler: a ``torch.amp.GradScaler``, for this optimizer only: updated once a window.
        scheduler: stepped once a window, if the optimizer has stepped.
        grad_dtype: ``torch.float32`` adds gradients of bfloat16 and float16 parameters up in float32, normalises and
            clips them so, and gives the optimizer the parameter's own type. ``None``: in the parameter's own type.
        partial: what becomes of the window that the end of a loader leaves unfilled: ``"scale"`` steps, normalised by
            what there is; ``"drop"`` clears its gradients; ``"carry"`` keeps it for the next pass.
        sync: which micro-batches reduce gradients over ranks: the ``"last"`` of a window, or ``"every"`` one, with
            which FSDP2 never holds more than a shard between them.
        group: process group, or device mesh, over which the data of ranks differ. ``None``: those of DDP or FSDP2.

    Raises:
        UsageError: for arguments that cannot be meant, or calls in an order that cannot.
        UnsupportedError: for FSDP's first generation, ``replicate()``, and a torch whose FSDP2 cannot be read.
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
        check_arguments(model, optimizer, steps, max_norm, scaler, scheduler, grad_dtype)
        self._optimizer = optimizer
        self._steps = steps
        self._normalize = chosen(Normalize, normalize, what="normalize")
        self._partial = chosen(Partial, partial, what="partial")
        self._order = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        parameters = self._parameters()
        # An optimizer may do so itself, where its gradients are.
        widens = grad_dtype is not None and not getattr(optimizer, "accumulates_in_master_dtype", False)
        self._wrappers = Wrappers(model, chosen(Sync, sync, what="sync"), group, waits=widens)
        self._sums: Float32Sums | None = None
        if widens:
            homes = self._wrappers.homes()
            self._sums = Float32Sums((each, homes.get(id(each), Home.AUTOGRAD)) for each in parameters)
        self._stepper = Stepper(
            optimizer,
            self._wrappers,
            self._sums,
            steps=steps,
            normalize=self._normalize,
            max_norm=max_norm,
            scaler=scaler if scaler is not None and scaler.is_enabled() else None,
            scheduler=scheduler,
        )
        narrows = () if self._sums is None else self._sums.parameters
        self._finalizer = weakref.finalize(self, narrow, narrows)
        self._finalizer.atexit = False
        self._index = 0
        self._state = State.EMPTY
        self._count = 0
        self._reduced = False
        self._micro: MicroBatch | None = None
        self._totals = Totals(self._wrappers.groups)
        self._last: WindowStep | None = None
        self._stepped = False

    @property
    def last(self) -> WindowStep | None:
        """The record of the last window that stepped; ``None`` before the first."""
        return self._last

    @property
    def stepped(self) -> bool:
        """Whether a window has stepped since the current micro-batch began: in a loop, whether its backward did it."""
        return self._stepped

    @property
    def micro_batches(self) -> int:
        """How many have had their backward in the window that is under way."""
        return self._count

    def __call__(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """One pass over a loader: its batches are micro-batches, and windows step as they fill.

        Each batch gets its :meth:`backward` in the loop's body; one that gets none (``continue``) does not count. The
        last backward of a window steps, and then :attr:`stepped` says so.

        To know which micro-batch is the last of a pass, the next one is fetched before this one is handed out, unless
        this one fills the window anyway: right after a full window, a loader has given what was used, and not more.
        (With ``partial="carry"`` it need not be known.)

        Raises:
            UsageError: if there is a window already, and ``partial`` is not ``"carry"``.
        """
        self._check_no_micro()
        if self._state is not State.EMPTY and not (self._state is State.FILLING and self._partial is Partial.CARRY):
            raise UsageError(
                f"got a pass over a loader with a window that is {self._state.value} ({self._count} of {self._steps} "
                f"micro-batches), expected an empty one; call step() or discard(), or say partial='carry'"
            )
        return self._pass(iter(loader))

    def _pass(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        batch = next(batches, _END)
        idle = batch is not _END
        while batch is not _END:
            fills = self._count + 1 == self._steps
            looks = not fills and self._partial is not Partial.CARRY
            following = next(batches, _END) if looks else _END
            ends = looks and following is _END
            with self._open(None, last=fills or ends, in_loop=True, dropped=ends and self._partial is Partial.DROP):
                micro = self._micro
                yield batch
            idle = idle and not (micro is not None and micro.had_backward)
            batch = following if looks else next(batches, _END)
        self._end_pass(idle=idle)

    def _end_pass(self, *, idle: bool) -> None:
        """After the last batch: a window is left only if that batch got no backward, or the window is carried."""
        if idle:
            raise UsageError(
                "got a pass over a loader in which no batch had a backward, expected one for each; call "
                "window.backward(loss) where loss.backward() was"
            )
        if self._state is not State.FILLING or self._partial is Partial.CARRY:
            return
        if self._partial is Partial.DROP:
            self.discard()
        elif self._reduced:
            self.step()
        else:
            self._state = State.SPOILED
            raise UsageError(
                f"got no backward in the last micro-batch of a pass, with {self._count} before it in the window, "
                f"expected one, since gradients are reduced over ranks in it; have one of a loss of 0 that hangs on "
                f"the model, with weight=0, and call discard() now"
            )

    def micro(self, *, weight: Weight | None = None, last: bool = False) -> AbstractContextManager[None]:
        """A context for one micro-batch's forward and backward.

        Args:
            weight: its tokens or samples, if they are known by now; else give them to :meth:`backward`.
            last: whether it ends a window that is not full: gradients are reduced over ranks in it.

        Raises:
            UsageError: within another one; in a window that is full; for a weight that is negative or not a number.
        """
        if self._state is State.FULL:
            raise UsageError(
                f"got a micro-batch more than the {self._steps} of the window, expected step() first, or a larger steps"
            )
        last = last or self._count + 1 == self._steps
        return self._open(None if weight is None else checked_weight(weight), last=last, in_loop=False)

    @contextmanager
    def _open(self, weight: Weight | None, *, last: bool, in_loop: bool, dropped: bool = False) -> Iterator[None]:
        self._check_no_micro()
        if self._state is State.EMPTY:
            self._optimizer.zero_grad(set_to_none=True)
        micro = self._micro = MicroBatch(weight, last, in_loop, dropped)
        self._stepped = False
        try:
            self._wrappers.switch(micro.switches, last=last)
            yield
        finally:
            if self._micro is micro:
                self._leave(micro)

    def _leave(self, micro: MicroBatch) -> None:
        """Close a micro-batch, with its backward or without.

        An exception in a loop's body does not come to the loop, which is only left. So nobody is asked for one.
        """
        self._micro = None
        micro.switches.close()
        if not micro.had_backward and not self._wrappers.leave(last=micro.last):
            self._state = State.SPOILED

    def backward(self, loss: Tensor, *, weight: Weight | None = None) -> None:
        """The micro-batch's backward. In a loop, the last one of a window also steps.

        Args:
            loss: of one element: a sum with ``"tokens"`` and ``"samples"``, a mean with ``"steps"``. It is not scaled
                by anybody.
            weight: the tokens or samples that it is a sum over, unless :meth:`micro` was given them: a number, or a
                tensor of one element on any device, which nobody waits for. One on a device that is negative or not a
                number makes the gradients of the window not a number.

        Raises:
            UsageError: outside of a micro-batch; a second time in one; without a weight, or with two; for a loss that
                nothing can be derived from; for parameters that DDP or FSDP2 would leave unreduced.
        """
        micro = self._micro
        if micro is None:
            raise UsageError(
                "got a backward outside of a micro-batch, expected one inside of `with window.micro():` or of "
                "`for batch in window(loader):`, with the forward before it"
            )
        self._check_usable()
        if micro.had_backward:
            raise UsageError("got a second backward in a micro-batch, expected one; add the losses up")
        check_loss(loss)
        weight = self._weight(micro, weight)
        reduces = self._wrappers.reduces(last=micro.last)
        with contextlib.ExitStack() as unless_done:
            unless_done.callback(self._spoil)
            self._totals.add(loss, weight)
            if micro.last:
                self._totals.reduce()
            if self._sums is not None:
                self._sums.before_backward(reduces=reduces)
            self._stepper.scaled(loss).backward()  # type: ignore[no-untyped-call]
            if self._sums is not None:
                self._sums.after_backward(reduces=reduces)
            self._wrappers.check(last=micro.last)
            unless_done.pop_all()
        micro.had_backward = True
        self._count += 1
        self._reduced = self._wrappers.completes(last=micro.last)
        self._state = State.FULL if micro.last else State.FILLING
        if micro.last and micro.in_loop:
            if micro.dropped:
                self._clear()
            else:
                self.step()

    def step(self) -> WindowStep:
        """Normalise, clip, and step, with what micro-batches there are. In a loop this happens by itself.

        Returns:
            What the window did; also :attr:`last`.

        Raises:
            UsageError: without a backward; if DDP or FSDP2 have not reduced the gradients, since no micro-batch was
                said to be the last one.
        """
        self._check_usable()
        if self._micro is not None and not self._micro.had_backward:
            raise UsageError("got a step in a micro-batch before its backward, expected it after")
        if self._state is State.EMPTY:
            raise UsageError("got a step of a window without a backward, expected at least one")
        if not self._reduced:
            raise UsageError(
                f"got a step after {self._count} of {self._steps} micro-batches, whose gradients are not reduced over "
                f"ranks, expected that the last one is known when it begins; open it by window.micro(last=True), or "
                f"call discard()"
            )
        with contextlib.ExitStack() as unless_done, label("window_step"):
            unless_done.callback(self._spoil)
            totals = self._totals.finish()
            record = self._stepper.step(self._parameters(), totals, index=self._index, count=self._count)
            unless_done.pop_all()
        self._last, self._stepped = record, True
        self._index += 1
        self._clear()
        return record

    def _spoil(self) -> None:
        """Something was raised in the middle: what the window has is neither the whole nor nothing."""
        self._state = State.SPOILED

    def discard(self) -> None:
        """Clear the gradients of the window that is under way, and begin a new one. An open micro-batch is closed.

        After an error in a backward or a step this is what there is to do. Where DDP has begun to reduce, or FSDP2 was
        in the middle of something, it is made ready for the next forward (FSDP2 from torch 2.13 on).
        """
        if self._state is State.CLOSED:
            return
        if self._micro is not None:
            self._leave(self._micro)
        self._wrappers.discard(failed=self._state is State.SPOILED)
        self._stepper.discard()
        self._clear()

    def close(self) -> None:
        """Discard the window that is under way, and be of no more use. A second time, it does nothing."""
        self.discard()
        self._state = State.CLOSED
        self._finalizer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the number of windows. Model, optimizer, scaler and scheduler save themselves.

        Gradients are in no checkpoint. So this is for between windows: after a step, or after :meth:`discard`.

        Raises:
            UsageError: in the middle of a window, a carried one too.
        """
        self._check_usable()
        if self._state is not State.EMPTY or (self._micro is not None and not self._micro.had_backward):
            raise UsageError(
                f"got state_dict() in the middle of a window ({self._count} of {self._steps} micro-batches), whose "
                f"gradients no checkpoint holds, expected it between windows; save where window.stepped is true, or "
                f"call discard() and have the resumed run begin with this window's first batch"
            )
        return {"index": self._index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken. A window that is under way must be discarded first.

        Raises:
            UsageError: in the middle of a window; for something else than a state.
        """
        self._check_usable()
        if self._state is not State.EMPTY:
            raise UsageError(
                f"got load_state_dict() in the middle of a window ({self._count} of {self._steps} micro-batches), "
                f"expected it between windows; call discard() first"
            )
        index = state.get("index") if isinstance(state, dict) else None
        if not isinstance(index, int) or set(state) != {"index"}:
            raise UsageError(f"got {state!r:.200}, expected what state_dict() of an Accumulator gave")
        self._index = index

    def __repr__(self) -> str:
        return f"<spillway.Accumulator window {self._index}, {self._state.value}, {self._count} of {self._steps}>"

    def _clear(self) -> None:
        """Begin a new window."""
        if self._sums is not None:
            self._sums.narrow()
        self._optimizer.zero_grad(set_to_none=True)
        self._state = State.EMPTY
        self._count = 0
        self._reduced = False
        self._totals = Totals(self._wrappers.groups)

    def _parameters(self) -> list[Parameter]:
        """The optimizer's, in the model's order, as ``model.parameters()`` is clipped."""
        own = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return sorted(own, key=lambda parameter: self._order.get(id(parameter), len(self._order)))

    def _weight(self, micro: MicroBatch, weight: Weight | None) -> Weight:
        if weight is not None and micro.weight is not None:
            raise UsageError(f"weight: got {weight!r} and {micro.weight!r}, from micro() too, expected one of them")
        if weight is not None:
            return checked_weight(weight)
        if micro.weight is not None:
            return micro.weight
        if self._normalize.weighs:
            raise UsageError(
                f"weight: got none with normalize={self._normalize.value!r}, expected how many {self._normalize.value} "
                f"the loss is a sum over, at micro() or at backward(); for a loss that is a mean say normalize='steps'"
            )
        return 1.0

    def _check_no_micro(self) -> None:
        self._check_usable()
        if self._micro is not None:
            raise UsageError(
                "got a micro-batch within another, expected one after the other; leave the `with` or the loop first, "
                "and close() an iterator that you hold, or call discard()"
            )

    def _check_usable(self) -> None:
        if self._state is State.CLOSED:
            raise UsageError("got a call of an Accumulator that is closed, expected one that is not; make a new one")
        if self._state is State.SPOILED:
            raise UsageError(
                "got a window in which a backward or a step has failed, expected none: its gradients are of no use; "
                "call discard(), and begin a new one"
            )
