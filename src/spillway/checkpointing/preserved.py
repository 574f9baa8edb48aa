"""Tensors of one call that are kept or offloaded.

NOTE [ Preserved tensors ]

Once a replay has recorded the program of such calls, preserved tensors are known by their numbers. For each value the
whole tensor that an operator returned is kept or offloaded. Each saved tensor that lies in it has a handle of its own,
and so has the replay, if the value is handed in. A reloaded value stays on the device until all its handles were
unpacked.

A call may depart from its program. So each tensor must lie in its memory as the program says, and two tensors with one
value must share one memory. If not, the call drops all later tensors and is replayed whole, and the next call is
recorded again.

NOTE [ Nothing is recomputed ]

If a plan recomputes nothing of a block, all its saved tensors are kept or offloaded, by their numbers. No mode is
needed. Only memory depends on it, so sizes may differ from call to call, as those of a mixture's experts do. If a saved
tensor has another dtype or another number of dimensions than in the program, the call keeps the rest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway._torch import dispatch_modes, next_node, node_number
from spillway.checkpointing.program import Decisions, Preserved, Program
from spillway.checkpointing.selectors import Planned
from spillway.checkpointing.tensors import PLAIN, below_modes, is_plain, is_strided, strided_parts
from spillway.saved_tensors.handles import Handle, KeptHandle, OffloadedHandle, alias_handle, unpack
from spillway.saved_tensors.identity import ViewRecipe
from spillway.saved_tensors.kept import Keeping
from spillway.types import Decision

if TYPE_CHECKING:
    from spillway.checkpointing.learned import LearnedCalls
    from spillway.saved_tensors.hooks import ForwardScope

_KEEP = Decision.KEEP
_weak = weakref.ref
Memory = Callable[[], torch.UntypedStorage | None]


class PreservedTensors:
    """The tensors of NOTE [ Preserved tensors ] in one call. ``arguments``: handles of the function's tensors."""

    def __init__(
        self,
        decisions: Decisions,
        scope: ForwardScope,
        tensors: Sequence[torch.Tensor],
        arguments: Sequence[Any],
        reached: Sequence[torch.Tensor],
    ) -> None:
        self.decisions = decisions
        self.is_other = False
        """Whether the call departed from its program."""
        self.is_spent = False
        """Whether a partial replay has taken the handles."""
        self._scope = scope
        self._reached = reached
        self._first_node = next_node()
        self._inputs: list[tuple[Memory, Any]] = [
            (_weak(each.untyped_storage()), handle)
            for each, handle in zip(tensors, arguments, strict=True)
            if is_plain(each)
        ]
        """Memory of the function's tensors, and their handles."""
        self._given: dict[int, Handle] = {}
        self._memory: dict[int, Memory] = {}
        """In forward: memory of preserved values."""
        self._keeping = Keeping(scope)

    def pack(self, tensor: torch.Tensor, number: int) -> Handle | None:
        """A handle of a saved tensor; ``None``: it is dropped."""
        saved = self.decisions.saved
        how = saved[number] if number < len(saved) else False
        if how is False or self.is_other:
            return None
        if how is True and type(tensor) in PLAIN:
            with below_modes():
                return self._scope.keep_parameter(tensor, is_replayed=True)
        handle: Handle | None = None
        if how == "input":
            argument = self._argument_of(tensor)
            if argument is not None and type(argument) not in (KeptHandle, OffloadedHandle):
                # Other hooks hold the input: they may unpack it only once, for the replay.
                return None
            # If forward has written it since, an offloaded one has the bytes from before.
            if argument is not None and argument.is_intact():
                with below_modes():
                    handle = alias_handle(argument, tensor, self._scope.session)
        elif isinstance(how, list):
            handle = self._pack_parts(tensor, how)
        elif isinstance(how, Preserved) and self._is_like(tensor, how.recipe):
            handle = self._pack_made(tensor, how)
        self.is_other = handle is None
        return handle

    @staticmethod
    def _is_like(tensor: torch.Tensor, recipe: ViewRecipe) -> bool:
        """Whether it differs from the recipe in the offset alone."""
        return is_plain(tensor) and ViewRecipe.of(tensor)[:-1] == recipe[:-1]

    def _pack_parts(self, tensor: torch.Tensor, how: list[Preserved]) -> Handle | None:
        plain = strided_parts(tensor)
        if len(plain) != len(how) or type(tensor) in PLAIN:
            return None
        for part, each in zip(plain, how, strict=True):
            if not self._is_like(part, each.recipe) or self._pack_made(part, each) is None:
                return None
        with below_modes(tensor):
            # Its parts were saved before.
            return self._scope.save(tensor, how[0].decision)

    def _pack_made(self, tensor: torch.Tensor, how: Preserved) -> Handle | None:
        value, whole = how.value, how.whole
        if tensor.storage_offset() != how.recipe.offset or self._is_outside(tensor):
            return None
        with below_modes():
            storage = tensor.untyped_storage()
            handle = self._given.get(value)
            if handle is None:
                self._memory[value] = _weak(storage)
                made = tensor
                if whole != how.recipe:
                    made = tensor.detach().as_strided(whole.size, whole.stride, whole.offset)
                if how.decision is _KEEP:
                    handle = self._keeping.keep(made, value, self.decisions.kept_bytes)
                else:
                    self._scope.advance()
                    handle = self._scope.save(made, how.decision)
                self._given[value] = handle
            elif self._memory[value]() is not storage:
                return None
            return alias_handle(handle, tensor, self._scope.session)

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether the call did not make the tensor, which took the place of another one of the same shape."""
        node = tensor.grad_fn
        if tensor.requires_grad if node is None else node_number(node) < self._first_node:
            return True
        storage = tensor.untyped_storage()
        return self._argument_of(tensor) is not None or (
            node is None and any(is_strided(each) and each.untyped_storage() is storage for each in self._reached)
        )

    def _argument_of(self, tensor: torch.Tensor) -> Any:
        """The handle of the argument whose memory a tensor shares."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        return next((handle for memory, handle in self._inputs if memory() is storage), None)

    def forward_ended(self, output: Any, count: int) -> None:
        """Take the function's output, ``None`` if it failed, and the number of tensors that autograd saved."""
        self._keeping.end(output)
        self._memory.clear()
        self._inputs.clear()
        self._reached = []
        if count != len(self.decisions.saved):
            self.is_other = True
        handed = set() if self.is_other else self.decisions.handed
        self._given = {value: handle for value, handle in self._given.items() if value in handed}

    def pop_handles(self) -> dict[int, Handle] | None:
        """The handles for a partial replay, which are not held here any more; ``None`` if it is not possible."""
        given, self._given = self._given, {}
        if self.is_other or not self.decisions.leaves_out or not given.keys() >= self.decisions.handed:
            return None
        if not all(handle.is_intact() for handle in given.values()):
            return None
        self.is_spent = True
        return given


class _PlannedTensor(NamedTuple):
    """One saved tensor of a block of which a plan recomputes nothing."""

    number: int
    decision: Decision | None
    """``None``: it is kept, and not counted."""
    is_made: bool
    dtype: torch.dtype | None
    size: Any
    """Dtype and size are ``None`` if they are unknown."""


class SavingOrder:
    """Decisions about the saved tensors of a block, in the order of saving. Tensors without a decision are kept."""

    def __init__(self, program: Program, planned: Planned) -> None:
        self.program = program
        self.kept_bytes: dict[int, int] = {}
        """Counted bytes of kept tensors, by numbers."""
        self.saved: list[_PlannedTensor] = []
        for number, each in enumerate(program.saved):
            decision: Decision | None = None
            maker = program.makers.get(-1 if each.value is None else each.value)
            if maker is not None:
                decision = planned.decision(maker, program.operators[maker].func)
                decision = _KEEP if decision is Decision.RECOMPUTE else decision
            elif each.value in program.inputs and each.requires_grad and not each.is_parameter:
                # Tensors without grad, as masks, are shared with other blocks.
                decision = planned.inputs
            dtype, size = (None, None) if each.recipe is None else (each.recipe.dtype, each.recipe.size)
            self.saved.append(_PlannedTensor(number, decision, maker is not None, dtype, size))


class PreservingCall:
    """One call. See NOTE [ Nothing is recomputed ]."""

    def __init__(self, order: SavingOrder, scope: ForwardScope, learned: LearnedCalls) -> None:
        self._order = order
        self._scope = scope
        self._learned = learned
        self._keeping = Keeping(scope)
        self._rest = list(order.saved)
        """Saved tensors to come, as long as the call follows its program."""
        self._following = iter(self._rest)
        self._differs = False

    def run(self, forward: Callable[[], Any]) -> Any:
        output = None
        try:
            with saved_tensors_hooks(self._packing(), unpack):
                output = forward()
        finally:
            self._keeping.end(output)
            with below_modes():
                self._scope.waiting.send()
        if self._differs or length_hint(self._following):
            self._learned.differed(self._order.program, is_final=False)
        return output

    def _packing(self) -> Callable[[torch.Tensor], Handle]:
        follow, scope = self._following.__next__, self._scope
        keep, kept_bytes, leaving = self._keeping.keep, self._order.kept_bytes, self._scope.waiting

        def pack(tensor: torch.Tensor) -> Handle:
            try:
                number, decision, is_made, dtype, size = follow()
            except StopIteration:
                return self._pack_another(tensor)
            known = kept_bytes
            if dtype is not None and (tensor.dtype is not dtype or tensor.shape != size):
                if tensor.dtype is not dtype or tensor.dim() != len(size):
                    return self._pack_another(tensor)
                # The sizes of experts differ from call to call: their bytes are counted again.
                known = {}
            if leaving.nbytes and leaving.is_batch:
                scope.advance()
            if dispatch_modes() > 0:
                with below_modes(tensor):
                    return scope.keep_parameter(tensor) if decision is None else scope.save(tensor, decision)
            if decision is None:
                return scope.keep_parameter(tensor)
            if decision is _KEEP and is_made and type(tensor) is torch.Tensor:
                return keep(tensor, number, known)
            scope.advance()
            return scope.save(tensor, decision)

        return pack

    def _pack_another(self, tensor: torch.Tensor) -> Handle:
        """Keep a tensor from which on the call departs from its program."""
        self._differs = True
        self._rest.clear()
        with below_modes(tensor):
            self._scope.advance()
            return self._scope.save(tensor, _KEEP)
