"""Writes a tape while a function runs: see NOTE [ Tapes ] in ``tape.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spillway.capture.identity import ViewRecipe
from spillway.regions.calls import Call
from spillway.regions.generators import GeneratorState, generator_of, put_state
from spillway.regions.mode import OperatorMode
from spillway.regions.schema import Facts, facts_of_call
from spillway.regions.steps import Spot, Step
from spillway.regions.tensors import PLAIN, are_numbers, is_strided
from spillway.regions.trace import is_cast
from spillway.regions.values import Values

OWN = frozenset(("aten", "prims"))
"""Libraries whose operators hang on what they are given, and on settings that are known."""
_PEEKS = frozenset(("numpy", "data_ptr", "__dlpack__", "__array__", "_to_dlpack"))
_FIRST = (0,)
_UNWRITTEN = frozenset(
    (
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty"),
        *("aten::new_empty_strided", "aten::empty_quantized"),
    )
)
"""Operators that give memory with anything in it."""


def is_own(func: Any) -> bool:
    """Whether it is an operator of one of those libraries."""
    return isinstance(func, torch._ops.OpOverload) and func.namespace in OWN


def writes_its_first(facts: Facts) -> bool:
    """Whether all that an operator does is to write its first argument, by what it is given, and to give that back."""
    is_alone = facts.writes == _FIRST and facts.returned == _FIRST
    return is_alone and not (facts.reshapes or facts.is_random or facts.is_view)


class Scribe(OperatorMode):
    """Writes down every operator.

    Where something cannot be told, the function goes on, and :attr:`is_untold` says so: no error of ours comes up in
    it.

    Args:
        inputs: what the function is called with.
        calls: what it did in its first run, from whose states of generators is drawn.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], calls: Sequence[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self.is_untold = False
        """Whether there is no tape."""
        self.has_cast = False
        """Whether autocast has cast anything."""
        self.steps: list[Step] = []
        self.states: dict[int, GeneratorState] = {}
        """Of generators, before steps that draw."""
        self.outside: dict[int, torch.Tensor] = {}
        """What was read and not made, by value."""
        self.count = 0
        """How many values there are."""
        self._made: set[int] = set()
        """Those that the function made."""
        self._values = Values()
        self._spots: dict[tuple[int, ViewRecipe], Spot] = {}
        # Two inputs in one memory may be in two when they come back.
        self.inputs = [spot.value for tensor in inputs if (spot := self._spot(tensor)) is not None]
        if self.count < len(inputs):
            self.is_untold = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_untold:
            return func(*args, **kwargs)
        facts = facts_of_call(func, args)
        if facts.ignored or (facts.is_label and not str(args[:1]).startswith("('FSDP::")):
            return func(*args, **kwargs)
        if facts.casts and is_cast(args):
            self.has_cast = True
            # By autocast, which does it now and then. What it gives comes from outside: see NOTE [ Autocast's casts ].
            return func(*args, **kwargs)
        step = self._step(func, facts, args, kwargs)
        if step is None:
            self.is_untold = True
            return func(*args, **kwargs)
        output = func(*args, **kwargs)
        if self._ends(step, facts, output):
            self.steps.append(step)
        else:
            self.is_untold = True
        return output

    def spot_of(self, tensor: torch.Tensor) -> Spot | None:
        """Where a tensor that is saved lies; ``None``: it was never seen, or cannot be told."""
        if not _is_plain(tensor):
            return None
        value = self._values.find(tensor)
        return None if value is None else self._at(value, tensor)

    def _step(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """An operator that is about to run; ``None``: it cannot be told."""
        if not is_own(func):
            return None
        if facts.is_label or facts.is_settled or not are_numbers(tuple(kwargs.values())):
            return None
        if facts.writes and not writes_its_first(facts):
            return None
        place = len(self.steps)
        if place >= len(self._calls) or self._calls[place].func is not func:
            return None
        told = tuple([self._told(arg) for arg in args])
        if any(each is _UNTOLD for each in told) or self._values.opaque is not None:
            return None
        if facts.is_random:
            before = self._calls[place].before
            if before is None:
                return None
            put_state(generator_of(args, kwargs, before.device), before.state)
            self.states[place] = before
        step = Step(func, told, dict(kwargs), is_random=facts.is_random)
        if facts.writes:
            (written, *_) = told
            if type(written) is not Spot or written.value not in self._made:
                return None
            step.writes = written.value
        return step

    def _ends(self, step: Step, facts: Facts, output: Any) -> bool:
        """It has run; whether that can be told."""
        step.single = isinstance(output, torch.Tensor)
        outputs = [output] if step.single else output
        if not isinstance(outputs, (list, tuple)):
            return False
        if step.func._schema.name in _UNWRITTEN and output.numel():
            return False
        makes = []
        others = list(outputs)
        for index, tensor in enumerate(outputs):
            if not isinstance(tensor, torch.Tensor):
                if not are_numbers((tensor,)):
                    return False
                continue
            others[index] = None
            if type(tensor) is not torch.Tensor or not _is_plain(tensor):
                return False
            if self._values.find_or_name(tensor, self.count) == self.count:
                spot = self._at(self.count, tensor)
                spot.is_made = True
                makes.append((index, spot))
                self._made.add(self.count)
                self.count += 1
        step.makes = tuple(makes)
        if len(makes) == sum(isinstance(each, torch.Tensor) for each in outputs):
            step.others = tuple(others)
        if not (makes or facts.is_view) and step.single:
            renamed = self._spot(output)
            if renamed is None:
                return False
            step.renames = renamed.value
        return self._values.opaque is None

    def _told(self, value: Any) -> Any:
        if type(value) in PLAIN:
            spot = self._spot(value)
            return _UNTOLD if spot is None else spot
        if type(value) in (list, tuple):
            parts = [self._told(each) for each in value]
            return _UNTOLD if any(each is _UNTOLD for each in parts) else parts
        return value if not isinstance(value, torch.Tensor) and are_numbers((value,)) else _UNTOLD

    def _spot(self, tensor: torch.Tensor) -> Spot | None:
        """Where an argument lies; ``None``: it cannot be told."""
        if not _is_plain(tensor):
            return None
        value = self._values.find_or_name(tensor, self.count)
        if value == self.count:
            self.count += 1
            self.outside[value] = tensor
        return self._at(value, tensor)

    def _at(self, value: int, tensor: torch.Tensor) -> Spot:
        view = ViewRecipe.of(tensor)
        key = (value, view)
        spot = self._spots.get(key)
        if spot is None:
            spot = self._spots[key] = Spot(value, view)
        return spot


class Peeks(TorchFunctionMode):
    """Sees whether anybody asks where a tensor's bytes are: who knows that may write them, and no operator tells."""

    def __init__(self) -> None:
        self.any = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.any |= getattr(func, "__name__", "") in _PEEKS
        return func(*args, **(kwargs or {}))


_UNTOLD = object()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory, and how it lies there, say all of it."""
    plain = type(tensor) in PLAIN and is_strided(tensor)
    return plain and not (tensor.is_quantized or tensor.is_complex() or tensor.is_neg())
