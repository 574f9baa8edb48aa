"""A call of a block of which nothing is recomputed: everything that autograd saves is kept or offloaded.

A plan names operators. Which of them made a saved tensor is known by its number from the program of such calls, so that
no mode is needed. Nothing but memory depends on it: what is offloaded comes back as it was. If a saved tensor is of
another type or shape than the program's, the call keeps the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import length_hint
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.handles import Handle, KeptHandle, unpack
from spillway.capture.hooks import Pass
from spillway.capture.kept import Keeping
from spillway.checkpointing.program import Program
from spillway.operators import Planned
from spillway.records import Decision
from spillway.regions.tensors import below_modes

_KEEP = Decision.KEEP
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class _Saved(NamedTuple):
    """A tensor that is to be saved."""

    number: int
    decision: Decision | None
    """``None``: it is alive anyway."""
    is_made: bool
    """Whether the function makes it."""
    dtype: torch.dtype | None
    size: torch.Size | None


class Order:
    """What is done with each tensor that autograd saves, in the order of saving.

    Args:
        program: what such calls do.
        planned: the plan. What it does not name is kept.
    """

    def __init__(self, program: Program, planned: Planned) -> None:
        self.program = program
        self.kept_bytes: dict[int, int] = {}
        """Bytes that were counted of what is kept, by numbers."""
        self.saved: Sequence[_Saved] = [self._saved(program, planned, number) for number in range(len(program.saved))]

    @staticmethod
    def _saved(program: Program, planned: Planned, number: int) -> _Saved:
        each = program.saved[number]
        value, recipe = each.value, each.recipe
        dtype, size = (None, None) if recipe is None else (recipe.dtype, recipe.size)
        maker = program.makers.get(-1 if value is None else value)
        if maker is not None:
            decision = planned.decision(maker, program.operators[maker].func)
            return _Saved(number, _KEEP if decision is Decision.RECOMPUTE else decision, True, dtype, size)
        is_input = value in program.inputs and not each.is_parameter
        # What needs no gradient, as a mask, is not this block's alone.
        decision_of_inputs = planned.inputs if is_input and each.requires_grad else None
        return _Saved(number, decision_of_inputs, False, dtype, size)


class PreservingCall:
    """One call.

    Args:
        order: what is done with each tensor.
        passage: the forward scope that the call belongs to.
    """

    def __init__(self, order: Order, passage: Pass) -> None:
        self._order = order
        self._passage = passage
        self._keeping = Keeping(passage)
        self._rest = list(order.saved)
        """What is to be saved, as long as nothing else was."""
        self._following = iter(self._rest)
        self._differs = False

    def run(self, function: Callable[[], Any]) -> tuple[Any, bool]:
        """What the function gives, and whether it saved what the program says, and nothing else."""
        output = None
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = function()
        finally:
            self._keeping.end(output)
            with below_modes():
                self._passage.flush()
        return output, not self._differs and not length_hint(self._following)

    def _packing(self) -> Callable[[torch.Tensor], Handle]:
        """The hook."""
        follow, passage = self._following.__next__, self._passage
        keep, kept_bytes, leaving = self._keeping.keep, self._order.kept_bytes, self._passage.waiting

        def pack(tensor: torch.Tensor) -> Handle:
            try:
                number, decision, is_made, dtype, size = follow()
            except StopIteration:
                return self._pack_another(tensor)
            if dtype is not None and (tensor.dtype is not dtype or tensor.shape != size):
                return self._pack_another(tensor)
            if leaving.nbytes and leaving.is_batch:
                passage.advance()
            if _modes() > 0:
                with below_modes(tensor):
                    return KeptHandle(tensor) if decision is None else passage.save(tensor, decision)
            if decision is None:
                return KeptHandle(tensor)
            if decision is _KEEP and is_made and type(tensor) is torch.Tensor:
                return keep(tensor, number, kept_bytes)
            passage.advance()
            return passage.save(tensor, decision)

        return pack

    def _pack_another(self, tensor: torch.Tensor) -> Handle:
        """Another tensor than the program's, or one that comes after such."""
        self._differs = True
        self._rest.clear()
        with below_modes(tensor):
            self._passage.advance()
            return self._passage.save(tensor, _KEEP)
