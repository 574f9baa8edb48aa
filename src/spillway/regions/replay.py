"""The re-run of a region: which of its operators run again, and the mode that sees to it.

NOTE [ What must run again ]

Backward wants some of what autograd saved to be computed again. Going through the trace from its end, an operator must
run if it makes or writes a value that is wanted; then what it read is wanted too. Where its output was kept or
offloaded, it is handed in instead, and nothing is wanted for its sake. What nobody wants is not run: its output is
handed back unwritten. Views always run: they compute nothing.

NOTE [ What the trace does not see ]

A kernel that is launched without the dispatcher (Triton's, an extension's) reads and writes unseen, so that an operator
may seem unwanted whose output such a kernel reads. So a pruned re-run is trusted only after it was seen to be right:
the first time, the region runs once for that alone, pruned, with NaN in all that was not computed, and must give the
bits that the first run gave, of which fingerprints were taken. Where none were (a second kind of re-run of the same
function), it runs whole too, for these (``trial.py``, ``proofs.py``).
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from spillway.capture.identity import is_parameter, is_wrapper
from spillway.errors import RecomputeError
from spillway.regions.calls import Argument, Call, Form
from spillway.regions.generators import GeneratorState, generator_of, put_state, state_now
from spillway.regions.labels import Unseen
from spillway.regions.mode import OperatorMode
from spillway.regions.outside import Outside
from spillway.regions.schema import argument, facts_of
from spillway.regions.tensors import alias_of, is_hollow, is_strided, split, tensors_in
from spillway.regions.trace import Trace
from spillway.regions.values import Values
from spillway.runtime.bytes import over

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Act(enum.IntEnum):
    """What a re-run does with an operator. An integer, since the hash of any other enum is a function of Python's."""

    RUN = 0
    """It runs again."""
    GIVE = 1
    """What was kept or offloaded is handed in."""
    SKIP = 2
    """Nobody wants it: its output is handed back unwritten."""


class Differs(Exception):  # noqa: N818  (no error of anybody's: the re-run starts anew)
    """A re-run did something else than the first run."""


def acts_of(trace: Trace, wanted: Iterable[tuple[int, int]]) -> list[Act]:
    """What to do with each operator of the trace. See NOTE [ What must run again ].

    Args:
        trace: of the first run.
        wanted: values to be computed again, each with the number of operators that had run when it was saved.
    """
    if trace.values.opaque is not None:
        return whole(trace)
    at: dict[int, list[int]] = {}
    for value, place in wanted:
        at.setdefault(place, []).append(value)
    want: set[int] = set(at.get(len(trace.calls), ()))
    acts: list[Act] = []
    for place in range(len(trace.calls) - 1, -1, -1):
        call = trace.calls[place]
        act = _act_on(call, want)
        want.difference_update(call.makes)
        if act is Act.RUN and not call.is_only_a_view:
            want.update(call.reads)
            want.update(call.writes)
        acts.append(act)
        want.update(at.get(place, ()))
    acts.reverse()
    return acts


def _act_on(call: Call, want: set[int]) -> Act:
    if call.is_settled:
        return Act.GIVE
    if not call.plain or call.facts.reshapes or not want.isdisjoint(call.writes):
        return Act.RUN
    if want.isdisjoint(call.makes):
        # A function may keep a constant that it makes, for later: that must be one.
        return Act.SKIP if call.depends else Act.RUN
    return Act.GIVE if call.is_given else Act.RUN


def whole(trace: Trace) -> list[Act]:
    """Everything runs again, but what it must not."""
    return [Act.GIVE if call.is_settled else Act.RUN for call in trace.calls]


class Replay(OperatorMode):
    """Sees the operators of a re-run, and leaves out those that need not run.

    Args:
        trace: of the first run.
        acts: what to do with each.
        inputs: what the function is called with.
        poisoned: whether what is not computed is filled with NaN.

    Raises:
        Differs: from within any operator, once one of them was not the one of the first run.
    """

    def __init__(
        self,
        trace: Trace,
        acts: list[Act],
        inputs: Sequence[torch.Tensor],
        *,
        poisoned: Callable[[torch.device], bool],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._acts = acts
        self._poisoned = poisoned
        self._unseen = Unseen()
        self._inputs = inputs
        self._values = Values()
        self._scratch: dict[int, torch.UntypedStorage] = {}
        self._held: dict[int, torch.Tensor] = {}
        """By value, what the first run read from outside, where this run finds another tensor."""
        self._own: set[int] = set()
        """Targets that were made anew, and are written themselves."""
        # By now, since the function's Python state is set back when it is called.
        self._generators = {key: (each, state_now(each)) for key, (each, _) in trace.generators.items()}
        if trace.reentrant:
            # These are leaves here, and casts of leaves are told from casts of these.
            for tensor, values in zip(inputs, trace.inputs, strict=True):
                for part, value in zip(tensors_in((tensor,)), values, strict=False):
                    self._values.name(part, value)
        self._place = 0
        self.has_inner = False
        """Whether another region is called in this run: in the reentrant mode, what that one reads is its own."""
        self.watched: list[weakref.ref[torch.UntypedStorage]] | None = None
        """What was handed out unwritten, if somebody wants to know."""
        self.differs: str | None = None
        self._node = 0
        """The number of the next node of autograd's, when the last operator had run."""
        self._ending: Callable[[], None] | None = None
        """What ends the run, at its next operator."""
        self.runs_last = False
        """Whether the operator that ends the run is to run: it writes what was saved before it."""
        self.was_asked = False
        """Whether a gradient that is taken inside asked for something that this run does not compute."""
        self.is_over = False
        """Whether the run has ended: what its graph was given is no more asked for by the function itself."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._place < len(self._trace.calls) and self._trace.calls[self._place].func is func:
            facts = self._trace.calls[self._place].facts
        else:
            facts = facts_of(func)
        if facts.ignored or ((facts.is_label or self._unseen.depth) and self._unseen(func, args)):
            return func(*args, **kwargs)
        if facts.casts and self._trace.is_cast(self._values, args) and not self._was_counted(func, args[0]):
            return func(*args, **kwargs)
        call = self._next(func, *split(args, kwargs))
        if self._ending is not None and not self.runs_last:
            self._end()
        act = self._acts[self._place]
        self._place += 1
        if act is Act.RUN:
            output = self._run(call, args, kwargs)
        else:
            self._set_generator(call.after, args, kwargs)
            with torch._C._DisableTorchDispatch():
                output = _given(call) if act is Act.GIVE else self._unwritten(call, args, kwargs)
        self._name(call, output)
        self._node = _next_node()
        if self._ending is not None:
            self._end()
        return output

    def check_place(self, place: int) -> None:
        """The run saves something, which the first run saved after so many operators."""
        if self.differs is None and place != self._place:
            self.differs = f"it saves a tensor after {self._place} operators, and the first run did after {place}"
            raise Differs(self.differs)

    def ends_by(self, end: Callable[[], None]) -> None:
        """All that is wanted is there: this ends the run, by an error.

        Autograd saves the inputs of an operator before the mode sees it. Then the run ends at the next operator, when
        that was compared with the first run's. An operator saves its own output under the number of its own node.
        """
        if _next_node() == self._node:
            with _disable_current_modes():
                end()
        else:
            self._ending = end

    def _end(self) -> None:
        end, self._ending = self._ending, None
        assert end is not None
        with _disable_current_modes():
            end()

    def as_in_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the first run had where this run has a tensor: itself, or what is handed in instead."""
        if type(tensor) is not torch.Tensor:
            return tensor
        with torch._C._DisableTorchDispatch():
            instead: torch.Tensor = self.instead(tensor)
            return instead

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether an operator has read or made it."""
        return self._values.find(tensor) is not None

    def _was_counted(self, func: Any, tensor: torch.Tensor) -> bool:
        """Whether a cast of an input that is a leaf here was one of an alias in the first run (FSDP2 makes such)."""
        calls = self._trace.calls
        call = calls[self._place] if self._place < len(calls) else None
        if call is None or call.func is not func or not any(tensor is each for each in self._inputs):
            return False
        return any(call.reads == values for values in self._trace.inputs)

    def _next(self, func: Any, tensors: list[torch.Tensor], constants: tuple[Any, ...]) -> Call:
        """The call of the first run that this one is."""
        trace = self._trace
        if self.differs is None:
            if self._place >= len(trace.calls):
                self.differs = f"one more operator, {func}"
            else:
                call = trace.calls[self._place]
                if call.func is not func:
                    self.differs = f"operator {self._place} is {func}, and was {call.func}"
                elif not _same(call.constants, constants):
                    self.differs = f"operator {self._place}, {func}, has other arguments"
                elif not self._reads_the_same(call, tensors):
                    self.differs = f"operator {self._place}, {func}, reads other tensors"
                else:
                    return call
        raise Differs(self.differs)

    def _reads_the_same(self, call: Call, tensors: list[torch.Tensor]) -> bool:
        if len(tensors) != len(call.reads):
            return False
        for tensor, value in zip(tensors, call.reads, strict=True):
            known = self._values.find(tensor)
            if known == value:
                continue
            outside = self._trace.outside.get(value)
            if outside is None or known is not None:
                return False
            self._values.name(tensor, value)
            if self._trace.is_cast_of_another(value, tensor):
                return False
            if outside.is_another(tensor) and not self._may_differ(value, outside, tensor):
                return False
        return True

    def _may_differ(self, value: int, outside: Outside, tensor: torch.Tensor) -> bool:
        """Whether the re-run may read another tensor from outside than the first run did."""
        if value in self._trace.targets:
            self._own.add(value)
            return True
        # In the reentrant mode backward goes through the graph of this run.
        if self._trace.reentrant and (outside.has_gradient or self.has_inner):
            raise RecomputeError(
                f"got a re-run that reads another tensor of shape {list(tensor.shape)} where the first run read one "
                f"that is still there, or had another content, expected the same, or its gradient would be lost; give "
                f"it to the region as an argument (torch.func.functional_call: inside the region, with the parameters "
                f"as arguments)"
            )
        if not outside.stands_for(tensor):
            return False
        assert outside.held is not None
        self._held[value] = outside.held
        return True

    def _run(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._set_generator(call.before, args, kwargs)
        # A view keeps to the real bytes: whoever computes with it is given the copy.
        if call.is_only_a_view or not (self._trace.writes_outside or self._held):
            return call.func(*args, **kwargs)
        output = call.func(*self.instead(args), **self.instead(kwargs))
        return _as_the_caller_knows_it(call, output, args, kwargs)

    def is_made_anew(self, tensor: torch.Tensor) -> bool:
        """Whether it was computed again: by an operator, or unseen."""
        value = self._values.find(tensor)
        if value is None:
            return not is_parameter(tensor)
        maker = self._trace.makers.get(value)
        return value in self._trace.targets if maker is None else not maker.is_given

    def _set_generator(self, moment: GeneratorState | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if moment is None:
            return
        generator = generator_of(args, kwargs, moment.device)
        self._generators.setdefault(id(generator), (generator, state_now(generator)))
        put_state(generator, moment.state)

    def __exit__(self, *error: Any) -> None:
        self.is_over = True
        # It holds what holds this.
        self._ending = None
        for generator, state in self._generators.values():
            put_state(generator, state)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def instead(self, values: Any) -> Any:
        """The same arguments, with a copy in place of what the region writes and did not make."""
        if isinstance(values, torch.Tensor):
            value = self._values.find(values)
            outside = None if value is None else self._trace.outside.get(value)
            if value in self._held and (outside is None or outside.before is None):
                held = self._held[value]
                if is_hollow(held) or not is_strided(held):
                    return held
                offset = int(values.storage_offset())
                return over(held.untyped_storage(), values.dtype, offset, values.shape, values.stride())
            if self._held and is_wrapper(values):
                self._refuse_wrapper(values)
            if value is None or value in self._own or outside is None or outside.before is None:
                return values
            if value not in self._scratch:
                with torch._C._DisableTorchDispatch():
                    self._scratch[value] = outside.before.clone().untyped_storage()
                self._values.name(over(self._scratch[value], torch.uint8, 0, (0,), (1,)), value)
            offset = int(values.storage_offset())
            return over(self._scratch[value], values.dtype, offset, values.shape, values.stride())
        if isinstance(values, dict):
            return {key: self.instead(value) for key, value in values.items()}
        if isinstance(values, (list, tuple)):
            return type(values)(self.instead(value) for value in values)
        return values

    def _refuse_wrapper(self, wrapper: torch.Tensor) -> None:
        """Of a tensor that is made of several, no part can be exchanged."""
        if any(self._values.find(part) in self._held for part in tensors_in((wrapper,))):
            raise RecomputeError(
                f"A recomputed function reads another {type(wrapper).__name__} than in its first run. Spillway cannot "
                f"hand in the first one. Pass it to the function as an argument."
            )

    def _unwritten(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = []
        for form in call.forms:
            if isinstance(form, Form):
                output = form.unwritten(poisoned=self._poisoned(form.device))
                if self.watched is not None:
                    self.watched.append(weakref.ref(output.untyped_storage()))
                outputs.append(output)
            elif isinstance(form, Argument):
                output = argument(args, kwargs, form.key)
                if self.watched is not None:
                    # It is not written as it should be.
                    own = (part for part in tensors_in((output,)) if self._values.find(part) not in self._trace.outside)
                    self.watched.extend(weakref.ref(part.untyped_storage()) for part in own)
                outputs.append(output)
            else:
                outputs.append(form)
        return outputs[0] if call.single else _sequence(call, outputs)

    def _name(self, call: Call, output: Any) -> None:
        if len(call.makes) == 1 and call.single and call.plain:
            form = call.forms[0]
            if output.dtype is not form.dtype or output.shape != form.size:
                self.differs = f"{call.func} gave {output.dtype} of {list(output.shape)}, and had given {form}"
                raise Differs(self.differs)
            self._values.name(output, call.makes[0])
        elif call.makes:
            parts = tensors_in((output,) if call.single else output)
            new = [part for part in parts if self._values.find(part) not in call.reads]
            for part, value in zip(new, call.makes, strict=False):
                self._values.name(part, value)


def _same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    # Not a number is not equal to itself.
    return a == b or repr(a) == repr(b)


def _given(call: Call) -> Any:
    assert call.given is not None
    handles = iter(call.given)
    # A new alias each time: autograd gives it a history, which would come to hold what holds the handle.
    outputs = [alias_of(next(handles).unpack()) if isinstance(form, Form) else form for form in call.forms]
    if call.is_settled:
        outputs = [each.clone() if isinstance(each, torch.Tensor) else each for each in outputs]
    return outputs[0] if call.single else _sequence(call, outputs)


def _sequence(call: Call, outputs: list[Any]) -> Any:
    """As the operator's kernel gives it: one list, or a tuple of outputs."""
    returns = call.func._schema.returns
    return outputs if len(returns) == 1 else tuple(outputs)


def _as_the_caller_knows_it(call: Call, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The outputs that are arguments, by the arguments that the caller gave; others as they are."""
    outputs = [output] if call.single else list(output)
    returned = call.facts.returned or ()
    for index, key in enumerate(returned):
        if key is not None:
            outputs[index] = argument(args, kwargs, key)
    return outputs[0] if call.single else _sequence(call, outputs)
