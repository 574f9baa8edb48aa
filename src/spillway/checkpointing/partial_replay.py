"""A replay that leaves out operators.

NOTE [ A partial replay ]

The function's own code runs. A dispatch mode sees its operators, in the order of the program. Preserved values are
handed in, and operators that the replay does not need are left out. The replay is partial only as long as the function
follows its program:

* Each operator must be the program's next one. One that is left out must have arguments of the same shapes, strides
  and dtypes, and the same others, but for numbers that it computes with: Python code may ask for the shape of what it
  would return.
* No operator that runs may read memory without content, and no recomputed tensor may lie there. If an operator is left
  out, the memory that it writes counts as such, whether or not the function made it: it may be a buffer.
* No operator may write memory that was handed in: it has its last content from the start, and backward uses it.
* Each preserved tensor that the replay saves must lie in the memory that was handed in. So the replay goes on until
  each handed-in value was saved once.

Otherwise the replay ends, and the function is replayed whole, without the mode.

NOTE [ Kernels that no mode sees ]

A kernel that is launched without the dispatcher (Triton's, an extension's) reads and writes unseen. An operator may
then seem unneeded although it is needed. So the first partial replay is compared in full with forward, and fills memory
without content with NaN.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from spillway._torch import disable_dispatch, schema_of, storage_key
from spillway.checkpointing.ambient import default_generator, device_of
from spillway.checkpointing.program import Argument, Decisions, Operator, Preserved, form_of
from spillway.checkpointing.recorder import HiddenOperators, advance, is_cast
from spillway.checkpointing.schema import argument, facts_of
from spillway.checkpointing.tensors import OperatorMode, strided_parts, tensors_in
from spillway.planner.needed import Act
from spillway.runtime.bytes import Bytes
from spillway.saved_tensors.identity import ViewRecipe

_RUN, _GIVE = Act.RUN, Act.GIVE


class Differs(Exception):  # noqa: N818  (not shown to users: the function is replayed whole)
    """The function does not follow its program."""


class PartialReplay(OperatorMode):
    """The mode of NOTE [ A partial replay ]. ``given`` returns a preserved value as the tensor of its operator."""

    def __init__(
        self, decisions: Decisions, given: Callable[[int], torch.Tensor | None], *, draws: bool, poisons: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decisions = decisions
        self._operators, self._acts = decisions.program.operators, decisions.acts
        self._given = given
        self._draws = draws
        self._poisons = poisons
        self._hidden = HiddenOperators()
        self._place = 0
        self._empty: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Memory without content, or with content that is too old."""
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        """Memory without content that was made here."""
        self._handed: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Memory that was handed in, by values."""
        self.differs: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.differs is not None:
            raise Differs(self.differs)
        operator, facts = self._operators[self._place] if self._place < len(self._operators) else None, facts_of(func)
        if facts.casts and is_cast(args):
            self._check_reads(func, args, kwargs)
            return func(*args, **kwargs)
        if operator is None or operator.func is not func or self._hidden.depth:
            if facts.ignored or ((facts.is_label or self._hidden.depth) and self._hidden(func, args)):
                return func(*args, **kwargs)
            raise self._other(f"operator {self._place} is {func}, not {operator and operator.func}")
        act = self._acts[self._place]
        self._place += 1
        targets = _storages([argument(args, kwargs, key) for key in facts.writes]) if facts.writes else ()
        if any(handed() is target for target in targets for handed in self._handed.values()):
            raise self._other(f"{func} writes a tensor that was preserved")
        if act is _RUN:
            if self._empty and not operator.is_view:
                self._check_reads(func, args, kwargs)
            return func(*args, **kwargs) if kwargs else func(*args)
        if operator.draws and self._draws:
            advance(default_generator(device_of(args, kwargs)), operator.draws)
        with disable_dispatch():
            if form_of(operator.facts, args, kwargs) != operator.form:
                raise self._other(f"operator {self._place - 1}, {func}, has other arguments")
            self._empty.update((storage_key(target), weakref.ref(target)) for target in targets)
            return self._hand_out(operator, act, args, kwargs)

    def saves(self, number: int, tensor: torch.Tensor) -> None:
        """Check a tensor that the replay saves: a preserved one was handed in, and a recomputed one has content."""
        how = self.decisions.saved[number] if number < len(self.decisions.saved) else False
        if isinstance(how, Preserved):
            self._check_preserved(how.value, tensor)
        elif isinstance(how, list):
            plain = strided_parts(tensor)
            if len(plain) != len(how):
                raise self._other("it saves a tensor of other parts than the one that was preserved")
            for each, part in zip(how, plain, strict=True):
                self._check_preserved(each.value, part)
        elif number in self.decisions.recomputed and any(map(self._is_empty, _storages((tensor,)))):
            raise self._other("it saves a tensor that was not recomputed")

    def _check_preserved(self, value: int, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        handed = self._handed.get(value)
        if handed is None:
            # Its operator ran, or was left out.
            if self._acts[self.decisions.program.makers[value]] is _RUN or self._is_empty(storage):
                return
        elif handed() is storage:
            return
        raise self._other("it saves another tensor than the one that was preserved")

    def was_unpacked(self) -> Differs:
        """The error if the function takes a gradient of what it computes."""
        return self._other("it takes a gradient of what it computes")

    def is_held(self) -> bool:
        """Whether memory without content is still alive after the replay."""
        return any(storage() is not None for storage in self._made)

    def _check_reads(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(map(self._is_empty, _storages((*args, *kwargs.values())))):
            raise self._other(f"{func} reads a tensor that was not recomputed")

    def _is_empty(self, storage: torch.UntypedStorage) -> bool:
        known = self._empty.get(storage_key(storage))
        return known is not None and known() is storage

    def _other(self, differs: str) -> Differs:
        self.differs = differs
        return Differs(differs)

    def _hand_out(self, operator: Operator, act: Act, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        makes = iter(operator.makes)
        outputs: list[Any] = []
        for output in operator.outputs:
            if isinstance(output, ViewRecipe):
                value = next(makes)
                tensor = self._preserved(value) if act is _GIVE else None
                outputs.append(self._without_content(output) if tensor is None else tensor)
            elif isinstance(output, Argument):
                outputs.append(argument(args, kwargs, output.key))
            else:
                outputs.append(output)
        if operator.single:
            return outputs[0]
        # As the kernel returns it: one list, or a tuple of outputs.
        return outputs if len(schema_of(operator.func).returns) == 1 else tuple(outputs)

    def _preserved(self, value: int) -> torch.Tensor | None:
        tensor = self._given(value)
        if tensor is None:
            return None
        # An alias each time: autograd gives it a history, which would hold the owner of the handle.
        storage = tensor.untyped_storage()
        self._handed[value] = weakref.ref(storage)
        return ViewRecipe.of(tensor).rebuild(storage, 0)

    def _without_content(self, recipe: ViewRecipe) -> torch.Tensor:
        tensor = torch.empty_strided(recipe.size, recipe.stride, dtype=recipe.dtype, device=recipe.device)
        storage = tensor.untyped_storage()
        if self._poisons:
            Bytes(storage, 0, storage.nbytes()).tensor().fill_(0xFF)
        self._empty[storage_key(storage)] = memory = weakref.ref(storage)
        self._made.append(memory)
        return tensor


def _storages(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    """Memory of the tensors among arguments. Some layouts have no storage."""
    found = []
    for tensor in tensors_in(values):
        try:
            found.append(tensor.untyped_storage())
        except (NotImplementedError, RuntimeError):
            continue
    return found
