"""A block of which nothing is computed again: what it saves leaves or stays by the order in which it is saved.

NOTE [ By the order ]

A plan names operators. To know which one made what is saved, each must be seen, and that takes the host several times
as long as to queue it. But a block saves the same things in the same order in each of its calls. So its operators are
seen in one call, and it is written down what was decided about the first, the second, the third thing that was saved;
the calls after that go by this order, and operators are not looked at.

Nothing hangs on it but memory: whatever leaves comes back as it was, and nothing is computed again. Where what is saved
is of another type or has another number of dimensions than it had, the order is another one: the rest stays, and in the
next call operators are seen again. Calls whose arguments are told apart in that way have orders of their own.

Autograd holds the pack hook for as long as what it packed, and so the call: what that has seen goes when it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.dynamo import keep_out, untraced
from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass, refuse_transforms
from spillway.capture.identity import is_parameter
from spillway.capture.keeping import Keeping
from spillway.operators import Choices, Planned
from spillway.records import Decision
from spillway.regions.recording import Recording
from spillway.regions.schema import Facts
from spillway.regions.tensors import PLAIN, below_modes, tensors_in
from spillway.regions.trace import Trace

_Arguments = tuple[tuple[torch.dtype, int], ...]
_MOST_ORDERS = 8
_KEEP = Decision.KEEP
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Saved(NamedTuple):
    """Something that was saved."""

    dtype: torch.dtype
    dim: int
    decision: Decision | None
    """``None``: it is alive anyway."""
    size: torch.Size | None = None
    """Where the function has made it, and it stays, if it is known what was counted of it."""
    nbytes: int = 0
    """What was counted."""


class Sending:
    """Calls a function whose saved tensors leave or stay as a plan says. See NOTE [ By the order ].

    Args:
        planned: the decisions. What it does not name stays.
    """

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self._orders: dict[_Arguments, Sequence[_Saved]] = {}

    @untraced
    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], passage: Pass
    ) -> Any:
        """What the function gives, called once in a pass."""
        refuse_transforms()
        keep_out()
        tensors = [leaf for value in (*args, *kwargs.values()) for leaf in _tensors_of(value)]
        arguments = tuple([(tensor.dtype, tensor.dim()) for tensor in tensors])
        order = self._orders.pop(arguments, None)
        call: _Call = _Seen(passage, self.planned, tensors) if order is None else _Followed(passage, order)
        del tensors
        try:
            with saved_tensors_hooks(call.packing(), unpack), call.watching():
                output = function(*args, **kwargs)
            call.gave(output)
        finally:
            order = call.end()
        if order is not None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            self._orders[arguments] = order
        with torch._C._DisableTorchDispatch():
            passage.flush()
        return output


def _tensors_of(value: Any) -> Sequence[torch.Tensor]:
    """Those in an argument, which mostly is one, or none."""
    if type(value) in PLAIN:
        return (value,)
    return () if value is None else [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


class _Call:
    """One call."""

    def __init__(self, passage: Pass) -> None:
        self._passage = passage
        self._keeping = Keeping(passage)

    def packing(self) -> Callable[[torch.Tensor], Handle]:
        """The hook."""
        raise NotImplementedError

    def watching(self) -> AbstractContextManager[object]:
        """A context around the function."""
        return nullcontext()

    def gave(self, output: Any) -> None:
        """What the function gives."""
        self._keeping.end(output)

    def end(self) -> Sequence[_Saved] | None:
        """The function has ended; gives what the next call goes by, if it has come to its end."""
        self._keeping.end()
        return None


class _Followed(_Call):
    """A call that goes by the order of an earlier one."""

    def __init__(self, passage: Pass, order: Sequence[_Saved]) -> None:
        super().__init__(passage)
        self._order = order
        self._rest = list(order)
        """What is to be saved, as long as nothing else was."""
        self._following = iter(self._rest)
        self._differs = False

    def packing(self) -> Callable[[torch.Tensor], Handle]:
        follow, keep, passage = self._following.__next__, self._keeping.again, self._passage
        leaving = passage.waiting

        def pack(tensor: torch.Tensor) -> Handle:
            if _modes() > 0:
                return self._pack_below(tensor)
            try:
                dtype, dim, decision, size, nbytes = follow()
            except StopIteration:
                return self._pack_another(tensor)
            if tensor.dtype is not dtype or tensor.dim() != dim:
                return self._pack_another(tensor)
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            if decision is None:
                return KeptHandle(tensor)
            if size is not None and type(tensor) is torch.Tensor and tensor.shape == size:
                return keep(tensor, nbytes)
            passage.advance()
            if decision is _KEEP and type(tensor) is torch.Tensor:
                return passage.keep(tensor)
            return passage.save(tensor, decision)

        return pack

    def _pack_below(self, tensor: torch.Tensor) -> Handle:
        """The same, where somebody's mode is in force, which is not to see it."""
        foreseen = next(self._following, None)
        with below_modes(tensor):
            if foreseen is None or (tensor.dtype, tensor.dim()) != foreseen[:2]:
                return self._pack_another(tensor)
            self._passage.advance()
            return KeptHandle(tensor) if foreseen.decision is None else self._passage.save(tensor, foreseen.decision)

    def _pack_another(self, tensor: torch.Tensor) -> Handle:
        """What was not saved before, or comes after such."""
        self._differs = True
        self._rest.clear()
        self._passage.advance()
        return self._passage.save(tensor, _KEEP)

    def end(self) -> Sequence[_Saved] | None:
        super().end()
        return None if self._differs or length_hint(self._following) else self._order


class _Makers(Trace):
    """Of what is written it need not know what it was before: nothing runs again."""

    def written(
        self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], reads: tuple[int, ...], *, seen: int
    ) -> tuple[int, ...]:
        return ()


class _Seen(_Call):
    """A call whose operators are seen."""

    def __init__(self, passage: Pass, planned: Planned, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(passage)
        self._planned = planned
        self._trace = _Makers()
        self._trace.take_inputs(tensors)
        self._inputs = {value for values in self._trace.inputs for value in values}
        self._order: list[_Saved] = []

    def watching(self) -> AbstractContextManager[object]:
        return Recording(self._trace, Choices((), (), None), None, root=None, draws=False)

    def packing(self) -> Callable[[torch.Tensor], Handle]:
        return self._pack

    def _pack(self, tensor: torch.Tensor) -> Handle:
        with below_modes(tensor):
            decision, is_made = self._by_maker(tensor)
            self._passage.advance()
            nbytes = None
            if decision is None:
                handle: Handle = KeptHandle(tensor)
            elif decision is _KEEP and is_made and type(tensor) is torch.Tensor:
                handle, nbytes = self._keeping.learn(tensor)
            else:
                handle = self._passage.save(tensor, decision)
            size = None if nbytes is None else tensor.shape
            self._order.append(_Saved(tensor.dtype, tensor.dim(), decision, size, nbytes or 0))
            return handle

    def end(self) -> Sequence[_Saved]:
        super().end()
        self._trace = _Makers()
        return tuple(self._order)

    def _by_maker(self, tensor: torch.Tensor) -> tuple[Decision | None, bool]:
        """What is decided, and whether the function has made it."""
        trace = self._trace
        values = [value for part in tensors_in((tensor,)) if (value := trace.values.find(part)) is not None]
        makers = [trace.makers[value] for value in values if value in trace.makers]
        if makers:
            planned = {self._planned.decision(trace.calls.index(maker), maker.func) for maker in makers}
            decision = planned.pop()
            return _KEEP if planned or decision is Decision.RECOMPUTE else decision, True
        if is_parameter(tensor) or not values or not self._inputs.issuperset(values):
            return None, False
        # What needs no grad, as a mask, is not this block's alone.
        return self._planned.inputs if tensor.requires_grad else None, False
