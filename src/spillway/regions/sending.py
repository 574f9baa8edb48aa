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
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.capture.dynamo import keep_out, untraced
from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass, refuse_transforms
from spillway.capture.identity import is_parameter
from spillway.operators import Choices, Planned
from spillway.records import Decision
from spillway.regions.recording import Recording
from spillway.regions.schema import Facts
from spillway.regions.tensors import below_modes, tensors_in
from spillway.regions.trace import Trace

_Saved = tuple[torch.dtype, int, Decision | None]
"""Type and number of dimensions of what was saved, and what was decided. ``None``: it is alive anyway."""
_Arguments = tuple[tuple[torch.dtype, int], ...]
_MOST_ORDERS = 8
_KEEP = Decision.KEEP


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
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        arguments = tuple([(tensor.dtype, tensor.dim()) for tensor in tensors])
        order = self._orders.pop(arguments, None)
        call: _Call = _Seen(passage, self.planned, tensors) if order is None else _Followed(passage, order)
        del tensors
        try:
            with saved_tensors_hooks(call.pack, unpack), call.watching():
                output = function(*args, **kwargs)
        finally:
            order = call.end()
        if order is not None:
            if len(self._orders) >= _MOST_ORDERS:
                self._orders.clear()
            self._orders[arguments] = order
        with torch._C._DisableTorchDispatch():
            passage.flush()
        return output


class _Call:
    """One call: its pack hook."""

    def __init__(self, passage: Pass) -> None:
        self._passage = passage

    def pack(self, tensor: torch.Tensor) -> Handle:
        """The hook."""
        with below_modes(tensor):
            decision = self.decided(tensor)
            self._passage.advance()
            if decision is None:
                return KeptHandle(tensor)
            if decision is _KEEP and type(tensor) is torch.Tensor:
                return self._passage.keep(tensor)
            return self._passage.save(tensor, decision)

    def decided(self, tensor: torch.Tensor) -> Decision | None:
        """What becomes of what is saved now."""
        raise NotImplementedError

    def watching(self) -> AbstractContextManager[object]:
        """A context around the function."""
        return nullcontext()

    def end(self) -> Sequence[_Saved] | None:
        """The function has ended; gives what the next call goes by, if it has come to its end."""
        raise NotImplementedError


class _Followed(_Call):
    """A call that goes by the order of an earlier one."""

    def __init__(self, passage: Pass, order: Sequence[_Saved]) -> None:
        super().__init__(passage)
        self._order = order
        self._place = 0
        self._differs = False

    def decided(self, tensor: torch.Tensor) -> Decision | None:
        place = self._place
        self._place += 1
        if not self._differs and place < len(self._order):
            dtype, dim, decision = self._order[place]
            if tensor.dtype is dtype and tensor.dim() == dim:
                return decision
        self._differs = True
        return Decision.KEEP

    def end(self) -> Sequence[_Saved] | None:
        return None if self._differs or self._place < len(self._order) else self._order


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

    def decided(self, tensor: torch.Tensor) -> Decision | None:
        decision = self._by_maker(tensor)
        self._order.append((tensor.dtype, tensor.dim(), decision))
        return decision

    def end(self) -> Sequence[_Saved]:
        self._trace = _Makers()
        return tuple(self._order)

    def _by_maker(self, tensor: torch.Tensor) -> Decision | None:
        trace = self._trace
        values = [value for part in tensors_in((tensor,)) if (value := trace.values.find(part)) is not None]
        makers = [trace.makers[value] for value in values if value in trace.makers]
        if makers:
            planned = {self._planned.decision(trace.calls.index(maker), maker.func) for maker in makers}
            decision = planned.pop()
            return Decision.KEEP if planned or decision is Decision.RECOMPUTE else decision
        if is_parameter(tensor) or not values or not self._inputs.issuperset(values):
            return None
        # What needs no grad, as a mask, is not this block's alone.
        return self._planned.inputs if tensor.requires_grad else None
