"""Compares the calls of torch's functions with a tape's outline: see NOTE [ Outlines ] in ``outline.py``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spillway.errors import RecomputeError
from spillway.regions.following import same
from spillway.regions.generators import GeneratorState, default_generator, state_now
from spillway.regions.mode import OperatorMode
from spillway.regions.outline import PASSES, Line, Outline, Role, settings_now
from spillway.regions.progress import Progress, nothing
from spillway.regions.steps import Spot
from spillway.regions.tape import Tape
from spillway.regions.tensors import PLAIN, Tracker, aliases_of, is_strided

_SEQUENCES = (list, tuple)
_NO_NAMES: dict[str, Any] = {}
_records: Callable[[], bool] = torch.is_grad_enabled
_any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
_transforms: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


class Skimming(Progress, TorchFunctionMode):
    """See NOTE [ Outlines ].

    Args:
        tape: what the function did before.
        outline: of the tape.
        inputs: what it is called with.
        states: takes the states of generators before steps that draw.

    Raises:
        RecomputeError: from within a function that gives another kind of tensor for the same arguments.
    """

    def __init__(
        self, tape: Tape, outline: Outline, inputs: Sequence[torch.Tensor], states: dict[int, GeneratorState]
    ) -> None:
        super().__init__(tape, inputs, states)
        self._lines = outline.lines
        self._count = len(outline.lines)
        self._number = 0
        """How many of them were called."""
        self._running: Line | None = None
        self.is_running = False
        """Whether one does: no mode sees what is called within."""
        self._has_saved = False
        """Whether it has had something saved that the tape makes."""
        self._of_values = outline.of_values
        self._seen: list[Callable[[], Any]] = [nothing] * len(outline.roles)
        """Of each role, the tensor."""
        self._versions = [role.version for role in outline.roles]
        """What they are to be at."""
        self._begun = set(tape.made)
        """Values whose versions are known."""
        self._held_as_made = tape.held_as_made
        self._held_at: dict[int, int] = {}
        """Of what is held, its version."""
        for role, tensor in zip(outline.inputs, inputs, strict=True):
            if not self._is_another(role, tensor):
                self.is_lost = True

    @property
    def is_over(self) -> bool:
        """Whether all lines were called."""
        return self._number == self._count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        number = self._number
        if self.is_lost or number == self._count:
            return self._unfollowed(func, args, kwargs or {})
        line = self._lines[number]
        # What asks for an attribute is another object each time.
        if (func is not line.func and func != line.func) or _transforms() is not None:
            return self._unfollowed(func, args, kwargs or {})
        if not self._is_like(line, args, kwargs):
            return self._unfollowed(func, args, kwargs or {})
        if line.draws >= 0:
            self._states[line.draws] = GeneratorState(line.device, state_now(default_generator(line.device)))
        self._running, self.is_running, self._has_saved = line, True, False
        has_ended = False
        try:
            output = func(*args, **kwargs) if kwargs else func(*args)
            has_ended = True
        finally:
            # Where it fails, some of its operators have run.
            self.is_lost = self.is_lost or not has_ended
            self._running, self.is_running = None, False
        self._number = number + 1
        if line.gives:
            self._take(line, output)
        return output

    def saves(self, tensor: torch.Tensor, spot: Spot) -> bool:
        """Whether what autograd saves is what it saves on the tape."""
        value = spot.value
        self._has_saved = True
        line = self._running
        if self._memory[value] is nothing and line is not None and value in line.makes:
            # The line makes it, and has not given it yet, nor may it.
            if type(tensor) not in PLAIN or not is_strided(tensor):
                return False
            storage = tensor.untyped_storage()
            if any(self._memory[read]() is storage for read in line.reads):
                return False
            self._memory[value] = weakref.ref(storage)
        return self.knows(tensor, spot)

    def left(self) -> Iterator[tuple[int, torch.Tensor, int]]:
        """Of values that are computed again, tensors that outlive the call, and the versions that were saved."""
        for role in self._tape.roles_again:
            tensor = self._seen[role.number]()
            if tensor is not None:
                yield role.spot.value, tensor, self._versions[role.number]

    def _unfollowed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Something that has no line."""
        if func in PASSES:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.is_lost = True
        with _Lost(self):
            return func(*args, **kwargs)

    def _is_like(self, line: Line, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
        """Whether the line was given the same."""
        if len(args) != line.count or _records() is not line.grad or _any_autocast():
            return False
        seen, versions = self._seen, self._versions
        for place, number, requires_grad, role in line.roles:
            tensor = args[place]
            if tensor is not None and seen[number]() is tensor:
                if tensor._version != versions[number] or tensor.requires_grad is not requires_grad:
                    return False
            elif not self._is_another(role, tensor):
                return False
        for place, want in line.constants:
            arg = args[place]
            if arg is not want and not same(arg, want):
                return False
        for place, parts in line.lists:
            if not self._are_like(args[place], parts):
                return False
        if kwargs or line.kwargs:
            kwargs = kwargs or _NO_NAMES
            # What is given by keyword is not told apart by its order.
            if kwargs.keys() != line.kwargs.keys():
                return False
            for name, want in line.kwargs.items():
                arg = kwargs[name]
                if arg is not want and not self._is_as(arg, want):
                    return False
        return line.settings is None or line.settings == settings_now(line.func)

    def _are_like(self, args: Any, parts: Sequence[Any]) -> bool:
        if type(args) not in _SEQUENCES or len(args) != len(parts):
            return False
        return all(map(self._is_as, args, parts))

    def _is_as(self, arg: Any, want: Any) -> bool:
        kind = type(want)
        if kind is Role:
            number = want.number
            if arg is None or self._seen[number]() is not arg:
                return self._is_another(want, arg)
            return bool(arg._version == self._versions[number] and arg.requires_grad is want.requires_grad)
        if kind in _SEQUENCES:
            return type(arg) is kind and self._are_like(arg, want)
        return same(arg, want)

    def _is_another(self, role: Role, tensor: Any) -> bool:
        """Whether a tensor that was not seen yet, or in another object, is the one that has the role."""
        spot = role.spot
        value = spot.value
        # What nobody knows comes from outside.
        is_like = self._meets(tensor, spot) if self._memory[value] is nothing else self.knows(tensor, spot)
        if not is_like or tensor.requires_grad is not role.requires_grad or tensor.is_inference():
            return False
        version = tensor._version
        if value not in self._begun:
            self._begun.add(value)
            further = version - role.version
            for each in self._of_values[value] if further else ():
                self._versions[each.number] = each.version + further
        if version != self._versions[role.number]:
            return False
        self._seen[role.number] = weakref.ref(tensor)
        return True

    def _take(self, line: Line, output: Any) -> None:
        """The line has given this."""
        memory, handed = self._memory, self._handed
        for place, role in line.gives:
            tensor, spot = output if line.single else output[place], role.spot
            value = spot.value
            storage, known = tensor.untyped_storage(), memory[value]
            if known is nothing:
                memory[value] = weakref.ref(storage)
                is_there = True
            else:
                is_there = known() is storage
            if not is_there or tensor.shape != spot.size or tensor.dtype is not spot.dtype:
                self.is_lost = True
                if not self._has_saved:
                    return
                raise RecomputeError(
                    f"got {tensor.dtype} of {list(tensor.shape)} from {line.func}, expected {spot.dtype} of "
                    f"{list(spot.size)}, as it gave before for the same arguments; leave what hangs on more than these "
                    f"outside of the region"
                )
            self._seen[role.number] = weakref.ref(tensor)
            if value in handed:
                self._hold(line, tensor, spot)

    def _hold(self, line: Line, tensor: torch.Tensor, spot: Spot) -> None:
        """A value that is handed in is seen."""
        value = spot.value
        if value in line.renames:
            self.trackers.append((value, Tracker(tensor)))
        held = self._held_as_made.get(value)
        if held is not None and spot.start <= held.start and spot.end >= held.end and value not in self.held:
            self.held[value] = aliases_of([tensor])[0], held.decision
            self._held_at[value] = tensor._version

    def is_as_held(self, value: int) -> bool:
        return value not in self.before and self.held[value][0]._version == self._held_at[value]


class _Lost(OperatorMode):  # type: ignore[no-untyped-call]
    """Sees what operators write that are on no tape."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._progress = progress

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._progress.write(func, args, kwargs or {})
