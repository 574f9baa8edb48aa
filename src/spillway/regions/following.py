"""Compares the operators of a call with those on a tape: see NOTE [ How a call is followed ] in ``followed.py``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spillway.regions.generators import GeneratorState, state_of
from spillway.regions.globals import Numerics
from spillway.regions.mode import OperatorMode
from spillway.regions.progress import Progress, nothing
from spillway.regions.schema import facts_of
from spillway.regions.steps import Spot, Step
from spillway.regions.tape import Tape
from spillway.regions.tensors import Tracker, aliases_of, is_strided
from spillway.regions.trace import is_cast

_SEQUENCES = (list, tuple)
_CAST = torch.ops.aten._to_copy.default


class Following(Progress, OperatorMode):  # type: ignore[no-untyped-call]
    """Compares operators with a tape's; arguments are those of :class:`Progress`."""

    def __init__(self, tape: Tape, inputs: Sequence[torch.Tensor], states: dict[int, GeneratorState]) -> None:
        super().__init__(tape, inputs, states)
        self._made: list[Callable[[], torch.Tensor | None]] = [nothing] * tape.count
        """Of each value, what the operator gave that made it: who reads the same tensor need not be looked at twice."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.is_lost:
            return self._unfollowed(func, args, kwargs or {})
        place = self.place
        step = self._steps[place] if place < len(self._steps) else None
        if func is _CAST and is_cast(args):
            output = func(*args, **(kwargs or {}))
            if is_strided(output):
                self._casts.append(weakref.ref(output.untyped_storage()))
            return output
        if step is None or step.func is not func:
            facts = facts_of(func)
            if facts.ignored or facts.is_label:
                return func(*args, **(kwargs or {}))
            return self._unfollowed(func, args, kwargs or {})
        if not self._is_like(step, args, kwargs):
            return self._unfollowed(func, args, kwargs or {})
        output = self._run(place, step, args, kwargs)
        self.place = place + 1
        if step.makes:
            self._take(step, output)
        elif step.renames in self._handed:
            self.trackers.append((step.renames, Tracker(output)))
        return output

    def _run(self, place: int, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """What an operator gives that is the tape's next one."""
        if step.is_random:
            self._states[place] = state_of(args, kwargs or {})
        return step.func(*args, **kwargs) if kwargs else step.func(*args)

    def _unfollowed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Something that is on no tape."""
        self.is_lost = True
        return self.write(func, args, kwargs)

    def _is_like(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether the step was given the same."""
        if len(args) != len(step.args):
            return False
        for place, spot in step.spots:
            tensor = args[place]
            if spot.is_made and self._made[spot.value]() is tensor:
                continue
            if not (self.knows(tensor, spot) or self._meets(tensor, spot)):
                return False
        for place, want in step.constants:
            arg = args[place]
            if arg is not want and not same(arg, want):
                return False
        for place, parts in step.lists:
            given = args[place]
            if type(given) not in _SEQUENCES or len(given) != len(parts):
                return False
            for arg, part in zip(given, parts, strict=True):
                known = (self.knows(arg, part) or self._meets(arg, part)) if type(part) is Spot else same(arg, part)
                if not known:
                    return False
        if kwargs or step.kwargs:
            kwargs = kwargs or {}
            if kwargs.keys() != step.kwargs.keys():
                return False
            for name, want in step.kwargs.items():
                if not same(kwargs[name], want):
                    return False
        return step.numerics is None or self._is_set_for(step.numerics)

    def _is_set_for(self, numerics: Numerics) -> bool:
        """Whether a step that ran under these settings would be the same now."""
        return numerics == Numerics.now()

    def _take(self, step: Step, output: Any) -> None:
        """The step has made this."""
        outputs = (output,) if step.single else output
        if type(outputs) not in _SEQUENCES:
            self.is_lost = True
            return
        for index, spot in step.makes:
            tensor = outputs[index] if index < len(outputs) else None
            if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
                self.is_lost = True
                return
            value = spot.value
            self._memory[value] = weakref.ref(tensor.untyped_storage())
            if value in self._handed:
                self.held[value] = aliases_of([tensor])[0], step.decision
            self._made[value] = weakref.ref(tensor)


def same(arg: Any, want: Any) -> bool:
    """Whether two arguments without tensors are the same to the letter: 0.0 is not -0.0, nor is 1 True."""
    kind = type(want)
    if kind is list:
        return type(arg) in _SEQUENCES and len(arg) == len(want) and all(map(same, arg, want))
    if type(arg) is not kind or arg != want:
        return False
    # Of what is equal, and no zero, there is one way to write it.
    return kind is int or (kind is float and want != 0) or repr(arg) == repr(want)
