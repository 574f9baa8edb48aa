"""The mode of a region's first run: it writes the trace, and decides about each operator's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spillway.capture.location import Locator
from spillway.errors import RecomputeError
from spillway.operators import Choices, OperatorCall
from spillway.records import Decision
from spillway.regions.calls import Call
from spillway.regions.generators import given_generator, state_of
from spillway.regions.labels import Unseen
from spillway.regions.mode import OperatorMode
from spillway.regions.schema import facts_of_call
from spillway.regions.tensors import aliases_of, are_same, nbytes_of, split
from spillway.regions.trace import Trace

_MOST_SETTLED_BYTES = 64 << 20


class Recording(OperatorMode):
    """Runs every operator, and notes it.

    Args:
        trace: what it is noted in.
        choices: what is kept and offloaded.
        on_call: told of every call that ended, with its new tensors.
        root: the module that paths of submodules begin below, if there is one.
        draws: whether states of generators are noted.
        script: what a region of the function did before.
    """

    def __init__(
        self,
        trace: Trace,
        choices: Choices,
        on_call: Callable[[Call, list[torch.Tensor]], None] | None,
        *,
        root: torch.nn.Module | None,
        draws: bool,
        script: Sequence[Call | None] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace = trace
        self._choices = choices
        self._on_call = on_call
        self._draws = draws
        self._script = script
        self._unseen = Unseen()
        self._decides = choices.any
        self._is_planned = choices.planned is not None
        self._locator = Locator(modules=True, operators=False, root=root) if choices.wants_modules else None

    @property
    def hides(self) -> bool:
        """Whether there was anything that belongs to no region."""
        return self._unseen.any

    def __enter__(self) -> Recording:
        if self._locator is not None:
            self._locator.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._locator is not None:
            self._locator.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        trace = self._trace
        if trace.is_paused:
            return func(*args, **kwargs)
        trace.is_in_gradient()
        place = len(trace.calls)
        like = self._script[place] if place < len(self._script) else None
        if like is None or like.func is not func or not like.facts.is_plain:
            like, facts = None, facts_of_call(func, args)
        else:
            facts = like.facts
        if facts.ignored or ((facts.is_label or self._unseen.depth) and self._unseen(func, args)):
            return func(*args, **kwargs)
        if facts.casts and trace.is_cast(trace.values, args):
            output = func(*args, **kwargs)
            trace.add_cast(args[0], output)
            return output
        seen = trace.count
        tensors, constants = split(args, kwargs)
        reads = trace.read(tensors)
        if like is not None and like.reads == reads and are_same(like.constants, constants):
            output = func(*args, **kwargs)
            new = trace.add_like(like, output)
            if new is not None:
                return self._ended(like, output, new, args, kwargs) if new else output
            call = Call(func, facts, reads, constants)
            return self._ended(call, output, trace.add(call, output), args, kwargs)
        call = Call(func, facts, reads, constants)
        if facts.writes:
            call.writes = trace.written(facts, args, kwargs, call.reads, seen=seen)
            for value in call.writes:
                self._is_written(value, call)
        if facts.is_random and self._draws:
            call.before = state_of(args, kwargs)
            if (own := given_generator(args, kwargs)) is not None:
                trace.generators.setdefault(id(own), (own, call.before.state))
        output = func(*args, **kwargs)
        if call.before is not None:
            call.after = state_of(args, kwargs)
        return self._ended(call, output, trace.add(call, output), args, kwargs)

    def _ended(self, call: Call, output: Any, new: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """A call has ended; gives its output."""
        if self._decides or call.facts.is_settled:
            decision, must = self._decision(call, output, new, args, kwargs)
            if decision is not Decision.RECOMPUTE:
                if call.is_shared:
                    call = self._trace.own_last()
                call.decision, call.must = decision, must
                # What the host or a shape hangs on is small, and may be written unseen: a copy of it is kept.
                aliases = aliases_of(new)
                if call.is_settled:
                    # No operator of a region around this one.
                    with torch._C._DisableTorchDispatch():
                        aliases = [alias.clone() for alias in aliases]
                call.held = [*aliases]
        if self._on_call is not None:
            self._on_call(call, new)
        return output

    def _decision(
        self, call: Call, output: Any, new: list[torch.Tensor], args: Any, kwargs: Any
    ) -> tuple[Decision, bool]:
        """What becomes of the call's new tensors, and whether it must be so."""
        if call.facts.is_settled and call.plain and sum(map(nbytes_of, new)) <= _MOST_SETTLED_BYTES:
            return Decision.KEEP, False
        if not new:
            return Decision.RECOMPUTE, False
        if self._is_planned:
            return self._choices.by_place(len(self._trace.calls) - 1, call.func), False
        must = False
        decision = self._choices.by_name(call.func)
        if decision is not Decision.KEEP and self._choices.asks:
            module = self._locator.here()[0] if self._locator is not None else None
            nbytes = sum(map(nbytes_of, new))
            asked = OperatorCall(call.func, module, len(self._trace.calls) - 1, nbytes)
            answer, must = self._choices.by_call(asked, output, args, kwargs)
            if decision is None or answer is Decision.KEEP:
                decision = answer
        return decision or Decision.RECOMPUTE, must

    def _is_written(self, value: int, writer: Call) -> None:
        """What was kept or offloaded of it is not what it will hold: its maker, and the writer, run again."""
        self._trace.rewritten.add(value)
        maker = self._trace.makers.get(value)
        if maker is None or not maker.is_given:
            return
        if maker.must:
            raise RecomputeError(
                f"got {writer.func}, which writes in place into the output of {maker.func}, expected that output to "
                f"stay as it was, since the policy says that it must be saved or offloaded; answer with a PREFER "
                f"value, which lets it be computed again, or write out of place"
            )
        maker.decision, maker.held = Decision.RECOMPUTE, None
