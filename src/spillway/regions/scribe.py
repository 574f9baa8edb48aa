"""Writes a tape while a function runs: see NOTE [ Tapes ] in ``tape.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spillway.capture.identity import ViewRecipe
from spillway.regions.calls import Call
from spillway.regions.generators import GeneratorState, generator_of
from spillway.regions.schema import facts_of_call
from spillway.regions.tape import Spot, Step, Untold
from spillway.regions.tensors import PLAIN, are_numbers, is_strided
from spillway.regions.values import Values

_COLLECTIVES = frozenset(("c10d", "_c10d_functional", "c10d_functional", "_dtensor"))
"""Libraries whose operators wait for other ranks."""
_UNWRITTEN = frozenset(
    (
        *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::empty_permuted", "aten::new_empty"),
        *("aten::new_empty_strided", "aten::empty_quantized"),
    )
)
"""Operators that give memory with anything in it."""


class Scribe(TorchDispatchMode):
    """Writes down every operator. Its hook for what is saved is :meth:`pack`.

    Args:
        inputs: what the function is called with.
        calls: what it did in its first run, from whose states of generators is drawn.

    Raises:
        Untold: if inputs cannot be told apart; from within an operator, or where something is saved.
    """

    supports_higher_order_operators = True

    def __init__(self, inputs: Sequence[torch.Tensor], calls: Sequence[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls
        self.is_untold = False
        """Whether it was raised: the function may have caught it."""
        self.steps: list[Step] = []
        self.states: dict[int, GeneratorState] = {}
        """Of generators, before steps that draw."""
        self.outside: dict[int, torch.Tensor] = {}
        """What was read and not made, by value."""
        self.count = 0
        """How many values there are."""
        self._values = Values()
        self._spots: dict[tuple[int, ViewRecipe], Spot] = {}
        # Two inputs in one memory may be in two when they come back.
        self.inputs = [self._spot(tensor).value for tensor in inputs]
        if self.count < len(self.inputs):
            self._fail()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Without a wrapper against Dynamo around each operator: see ``dynamo.py``."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What a compiled function does inside is one operator's business."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        facts = facts_of_call(func, args)
        if facts.ignored:
            return func(*args, **kwargs)
        if facts.is_label and not str(args[:1]).startswith("('FSDP::"):
            return func(*args, **kwargs)
        told = isinstance(func, torch._ops.OpOverload) and func.namespace not in _COLLECTIVES
        if not told or facts.is_label or facts.writes or facts.is_settled:
            self._fail()
        if not are_numbers(tuple(kwargs.values())):
            self._fail()
        place = len(self.steps)
        if place >= len(self._calls) or self._calls[place].func is not func:
            self._fail()
        step = Step(func, tuple([self._told(arg) for arg in args]), dict(kwargs), is_random=facts.is_random)
        if facts.is_random:
            before = self._calls[place].before
            if before is None:
                self._fail()
            generator_of(args, kwargs, before.device).set_state(before.state)
            self.states[place] = before
        output = func(*args, **kwargs)
        if func._schema.name in _UNWRITTEN and output.numel():
            self._fail()
        self._made(step, output)
        if not (step.makes or facts.is_view) and step.single:
            step.renames = self._spot(output).value
        self.steps.append(step)
        return output

    def spot_of(self, tensor: torch.Tensor) -> Spot | None:
        """Where a tensor that is saved lies; ``None``: it was never seen."""
        if type(tensor) not in PLAIN or not is_strided(tensor) or tensor.is_complex() or tensor.is_neg():
            self._fail()
        value = self._values.find(tensor)
        return None if value is None else self._at(value, tensor)

    def _fail(self) -> NoReturn:
        self.is_untold = True
        raise Untold

    def _told(self, value: Any) -> Any:
        if type(value) in PLAIN:
            return self._spot(value)
        if type(value) in (list, tuple):
            return [self._told(each) for each in value]
        if isinstance(value, torch.Tensor) or not are_numbers((value,)):
            self._fail()
        return value

    def _spot(self, tensor: torch.Tensor) -> Spot:
        """Where an argument lies."""
        if type(tensor) not in PLAIN or not is_strided(tensor) or tensor.is_complex() or tensor.is_neg():
            self._fail()
        value = self._values.find_or_name(tensor, self.count)
        if value == self.count:
            self.count += 1
            self.outside[value] = tensor
        if self._values.opaque is not None:
            self._fail()
        return self._at(value, tensor)

    def _at(self, value: int, tensor: torch.Tensor) -> Spot:
        view = ViewRecipe.of(tensor)
        key = (value, view)
        spot = self._spots.get(key)
        if spot is None:
            spot = self._spots[key] = Spot(value, view)
        return spot

    def _made(self, step: Step, output: Any) -> None:
        step.single = isinstance(output, torch.Tensor)
        makes = []
        for index, tensor in enumerate([output] if step.single else output):
            if not isinstance(tensor, torch.Tensor):
                if not are_numbers((tensor,)):
                    self._fail()
                continue
            if type(tensor) is not torch.Tensor or not is_strided(tensor) or tensor.is_complex() or tensor.is_neg():
                self._fail()
            if self._values.find_or_name(tensor, self.count) == self.count:
                makes.append((index, self._at(self.count, tensor)))
                self.count += 1
        step.makes = tuple(makes)
