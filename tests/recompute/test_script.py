"""What a region takes over from the last one of its function says what it would have found out by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from spillway.operators import Choices
from spillway.regions.calls import Call
from spillway.regions.packs import Pack, Packs
from spillway.regions.recording import Recording
from spillway.regions.replay import Act, acts_of
from spillway.regions.script import Script
from spillway.regions.trace import Trace

Function = Callable[[Tensor], Any]

FIXED = torch.linspace(0, 1, 64)
LEARNED = torch.linspace(0, 1, 64).requires_grad_()

FUNCTIONS: dict[str, Function] = {
    "sin": lambda x: x.sin().cos(),
    "other operator": lambda x: x.cos().sin(),
    "0.0": lambda x: x.exp() * 0.0,
    "-0.0": lambda x: x.exp() * -0.0,
    "0": lambda x: x.exp() * 0,
    "False": lambda x: x.exp() * False,
    "other argument": lambda x: (x.exp() * x).sin(),
    "itself": lambda x: (x.exp() * x.exp()).sin(),
    "a constant": lambda x: FIXED.sin() * x,
    "what needs grad": lambda x: LEARNED.sin() * x,
    "one value before": lambda x: (x.sin(), x.cos()),
    "a view before": lambda x: (x.view(8, 8), x.cos()),
    "another view before": lambda x: (x.view(4, 16), x.cos()),
    "other type": lambda x: x.double().sin(),
    "other shape": lambda x: x[:8].sin(),
    "contiguous already": lambda x: x.contiguous().view(8, 8).contiguous().sin(),
    "contiguous anew": lambda x: x.contiguous().view(8, 8).t().contiguous().sin(),
    "written": lambda x: x.exp().mul_(2).sin(),
    "not written": lambda x: x.exp().mul(2).sin(),
    "many": lambda x: [part.sin() for part in x.split(16)],
    "by number": lambda x: x.topk(3)[0].sin(),
    "one more": lambda x: x.sin().cos().exp(),
}


def recorded(function: Function, script: Sequence[Call | None] = (), save: Sequence[str] = ()) -> tuple[Trace, Any]:
    """The trace of a function, shared, and what it said before."""
    trace, start = Trace(), torch.linspace(-1, 1, 64).requires_grad_()
    trace.take_inputs([start])
    with Recording(trace, Choices(save), None, root=None, draws=False, script=script):
        function(start)
    said = [
        (
            *(call.func, repr(call.constants), call.reads, call.writes, call.makes, call.forms),
            *(call.depends, call.plain, call.aliases, call.single, call.decision, call.held is None),
        )
        for call in trace.calls
    ]
    makers = [(value, trace.calls.index(call)) for value, call in trace.makers.items()]
    known = said, makers, trace.count, trace.depends, trace.rewritten, sorted(trace.outside)
    trace.share()
    return trace, known


@pytest.mark.parametrize("save", [(), ("aten::exp", "aten::sin")], ids=str)
@pytest.mark.parametrize("before", FUNCTIONS)
def test_a_trace_says_the_same_whatever_was_done_before(before: str, save: tuple[str, ...]) -> None:
    script = recorded(FUNCTIONS[before])[0].shared
    for name, function in FUNCTIONS.items():
        assert recorded(function, script, save)[1] == recorded(function, (), save)[1], name


@pytest.mark.parametrize("what", ["nothing", "the last", "all"])
def test_what_is_to_be_done_is_what_follows_from_this_trace(what: str) -> None:
    script = Script()
    for function in FUNCTIONS.values():
        for save in ((), ("aten::exp", "aten::sin"), ()):
            trace = recorded(function, script.calls, save)[0]
            script.learn(trace)
            first = {"nothing": trace.count, "the last": trace.count - 1, "all": 0}[what]
            wanted = [(value, len(trace.calls)) for value in range(first, trace.count)]
            assert script.acts(trace, wanted) == acts_of(trace, wanted)
            assert script.acts(trace, wanted[1:]) == acts_of(trace, wanted[1:])
            assert script.acts(trace, wanted) == acts_of(trace, wanted)
            trace.values.opaque = "somebody says so"
            assert script.acts(trace, wanted) == acts_of(trace, wanted)


def test_a_rerun_is_trusted_only_if_it_is_the_very_one() -> None:
    script = Script()
    trace, another = (recorded(FUNCTIONS[name])[0] for name in ("sin", "other operator"))
    run, skip = [Act.RUN, Act.RUN], [Act.RUN, Act.SKIP]
    packs, others = Packs(stops_early=True), Packs(stops_early=True)
    for value, each in enumerate((packs, others)):
        pack = Pack(0, (value,))
        pack.wanted = True
        each.add(pack)
    assert not script.is_trusted(trace, run, packs)
    script.trust(trace, run, packs)
    assert script.is_trusted(recorded(FUNCTIONS["sin"])[0], [*run], packs)
    assert not script.is_trusted(another, run, packs)
    assert not script.is_trusted(trace, skip, packs)
    assert not script.is_trusted(trace, run, others)


def test_what_cannot_be_compared_is_not_remembered() -> None:
    odd = object()
    trace = recorded(FUNCTIONS["sin"])[0]
    trace.calls[0] = Call(torch.ops.aten.sin.default, trace.calls[0].facts, (0,), (odd,))
    trace.share()
    assert trace.shared[0] is None
    script, packs = Script(), Packs(stops_early=True)
    script.trust(trace, [Act.RUN, Act.RUN], packs)
    assert not script.is_trusted(trace, [Act.RUN, Act.RUN], packs)
