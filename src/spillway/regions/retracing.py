"""Runs a function again by a tape: what nobody needs is left out. See NOTE [ Unwatched calls ] in ``unwatched.py``.

NOTE [ When to look ]

Each operator that a mode sees takes the host several times as long as to call it. Before the first one that is left out
there is nothing to be seen: all of it runs, and whatever it is, it is what the function does. So the mode begins where
autograd saves the last thing before that operator (by the order in which things are saved, as on the tape). That is
within an operator, which had begun without the mode and is not seen, or has been through; which of both it was shows by
the next one, and what runs inside of it is let pass. What was made before is taken to be what the tape says when it is
first read: if it is not, it was not in the first run either, and what is handed in later is from there.

A mode is pushed there only if the function is in none of its own: torch takes the last one off its stack when one ends.
Where it cannot be pushed, nothing is left out; nor where another thread has just entered one. Where the next operator
is none that was expected, all runs again, and from then on such calls are looked at from the beginning.

When there is nothing more to leave out, it looks away, and it goes where autograd next saves what an operator has just
made. Not before: what torch's dispatcher was told of a mode holds for an operator that has begun, until its kernel has
run. And not within what torch transforms (``torch.func``), which sets the dispatcher back, at the end of each operator,
to how it was before: to a mode that is not there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Never

import torch
from torch.utils._python_dispatch import _pop_mode, _push_mode, is_in_torch_dispatch_mode

from spillway.capture.identity import ViewRecipe
from spillway.regions.following import Following
from spillway.regions.globals import Numerics
from spillway.regions.progress import nothing
from spillway.regions.replay import Differs
from spillway.regions.steps import Spot, Step
from spillway.regions.tape import Base, Tape
from spillway.regions.tensors import is_strided

_CALLER = "spillway.regions.unwatched"
_TRANSFORMS = ("torch._functorch", "torch.fx", "torch._dynamo")

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Retracing(Following):  # type: ignore[no-untyped-call]
    """Compares operators with a tape's, and leaves out those that need not run.

    Args:
        tape: these.
        inputs: what the function is called with.
        base_of: fetches the memory of what was preserved.

    Raises:
        Differs: from within any operator, once one of them was not the one on the tape.
    """

    def __init__(self, tape: Tape, inputs: Sequence[torch.Tensor], base_of: Callable[[int], Base]) -> None:
        super().__init__(tape, inputs, {})
        # What is handed in is held by whoever handed it.
        self._handed = frozenset()
        self.looks_from, self.place = tape.look_from
        """Where autograd saves the last thing before it looks at operators; -1: it does from the beginning."""
        self.is_looking = False
        """Whether operators come by it."""
        self._has_entered = False
        self._is_waiting = False
        """Whether it has yet to see where it is."""
        self._modes = torch._C._len_torch_dispatch_stack(), bool(is_in_torch_dispatch_mode())
        """How many were there before, and whether torch knows of any."""
        self._runs, self._given = tape.again
        self._base_of = base_of
        self._left_until = tape.left_until
        self._left: list[weakref.ref[torch.UntypedStorage]] = []
        """What was handed out unwritten, or is not written as it should be."""
        self._lent: list[tuple[torch.UntypedStorage, int]] = []
        """Memory of what was handed in, and how many had held it by then."""
        self.has_ended = False
        """Whether nobody looks any more."""

    def look(self) -> None:
        """Look at operators from here on, be it within one. See NOTE [ When to look ]."""
        # A mode that the function is in would be left in the place of this one. It may stand aside just now.
        if (torch._C._len_torch_dispatch_stack(), is_in_torch_dispatch_mode()) == self._modes:
            self.__enter__()  # type: ignore[no-untyped-call]
            self.is_looking = self._has_entered = True
            self._is_waiting = self.looks_from >= 0

    def leave(self) -> None:
        """The function is over."""
        if self._has_entered:
            if not self.is_looking:
                _push_mode(self)
            self._has_entered = self.is_looking = False
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def differs(self) -> Never:
        """The function does something else."""
        self.is_lost = True
        raise Differs

    def _unfollowed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.differs()

    def _is_set_for(self, numerics: Numerics) -> bool:
        # What runs does so under the settings that the function finds, as it did first; what is handed in is what it
        # gave then.
        return True

    def _run(self, place: int, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if place not in self._runs and step.writes >= 0:
            # What it would write is nobody's, and so may be what it reads. Who holds it is to read it no more.
            self._left.append(weakref.ref(args[0].untyped_storage()))
            return args[0]
        if place in self._runs or not step.makes or step.others is None:
            return super()._run(place, step, args, kwargs)
        with torch._C._DisableTorchDispatch():
            outputs = list(step.others)
            for index, spot in step.makes:
                if spot.value in self._given:
                    storage, low = self._base_of(spot.value)
                    self._lent.append((storage, _holders_of(storage)))
                    if spot.start < low or spot.end - low > storage.nbytes():
                        self.differs()
                    outputs[index] = spot.view.rebuild(storage, low)
                else:
                    # Nobody reads it. While the function's own code holds it, its memory is there.
                    memory = torch.empty(spot.end, dtype=torch.uint8, device=spot.view.device).untyped_storage()
                    self._left.append(weakref.ref(memory))
                    outputs[index] = spot.view.rebuild(memory, 0)
        if step.single:
            return outputs[0]
        return outputs if len(step.func._schema.returns) == 1 else tuple(outputs)

    def recognizes(self, tensor: torch.Tensor, spot: Spot) -> bool:
        """Whether what autograd saves is what it saves on the tape. It may have been made before anybody looked."""
        return self.knows(tensor, spot) or self._meets(tensor, spot)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to leave out."""
        return self.place > self._left_until

    def end_at(self, tensor: torch.Tensor) -> None:
        """Look at no more operators, if none can read what was handed out unwritten, or write to what was handed in.

        Args:
            tensor: what autograd saves.
        """
        if not self.has_ended:
            is_lent = any(_holders_of(storage) > count for storage, count in self._lent)
            self.has_ended = not is_lent and not self.is_kept
            if not self.has_ended:
                return
            # What the function has let go of, nobody needs to hold for it.
            self._lent.clear()
        is_innermost = torch._C._len_torch_dispatch_stack() == self._modes[0] + 1
        if is_innermost and _has_just_made(tensor) and not _is_transformed():
            # What else torch remembers of modes is put back in its order, when those of the function have ended.
            self.is_looking = False
            _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.has_ended:
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._is_waiting:
            steps, place = self._steps, self.place
            if func is not steps[place].func and func is not steps[place + 1].func:
                # Of one that had begun.
                return func(*args, **kwargs) if kwargs else func(*args)
            self._is_waiting = False
            self.place += func is not steps[place].func
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def is_kept(self) -> bool:
        """Whether somebody has kept what nobody has written."""
        return any(storage() is not None for storage in self._left)

    def _meets(self, tensor: Any, spot: Spot) -> bool:
        if isinstance(tensor, torch.Tensor) and is_strided(tensor):
            storage = tensor.untyped_storage()
            if any(left() is storage for left in self._left):
                return False
            value = spot.value
            if self._memory[value] is nothing and value in self._tape.unseen and ViewRecipe.of(tensor) == spot.view:
                self._memory[value] = weakref.ref(storage)
                return True
        return super()._meets(tensor, spot)

    def _take(self, step: Step, output: Any) -> None:
        super()._take(step, output)
        if self.is_lost:
            self.differs()


def _has_just_made(tensor: torch.Tensor) -> bool:
    """Whether the operator for which autograd saves a tensor has made it: nodes are numbered as they are made."""
    # A view of what was written has a new node as soon as it is asked for it. What is written in place may be cloned
    # before.
    if type(tensor) is not torch.Tensor or tensor._is_view():
        return False
    node = tensor.grad_fn
    return node is not None and node._sequence_nr() + 1 == _next_node() and node.name() != "CloneBackward0"


def _is_transformed() -> bool:
    """Whether somebody between the function that runs again and this may be transforming it, by who has called whom."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name == _CALLER:
            return False
        # What is written by a compiler has no name, or may call anything.
        if name is None or name.startswith(_TRANSFORMS):
            return True
        frame = frame.f_back
    return True


def _holders_of(storage: torch.UntypedStorage) -> int:
    """How many tensors, and others, hold some memory."""
    return int(torch._C._storage_Use_Count(storage._cdata))
