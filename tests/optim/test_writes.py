"""Writes to parameters that no version tells of: a step starts from what parameters are, wherever state lies.

What is expected is a plain loop with ``float32`` copies. After a write each copy says what its parameter says, and
stays where it says the same, rounded.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import Module, Parameter

import spillway
from optim.plain_loop import Pair, pair
from optim.support import assert_same_values, batches, same_bits
from optim.test_edits import take_anew
from spillway import OffloadedOptimizer, UsageError
from support import pairwise

Write = Callable[[Module], object]


def clamp(model: Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def without_grad(model: Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.5)


def other_data(model: Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.5


def from_a_vector(model: Module) -> None:
    vector = torch.nn.utils.parameters_to_vector([one.data for one in model.parameters()])
    torch.nn.utils.vector_to_parameters(vector * 1.5, model.parameters())


def of_a_norm(model: Module) -> None:
    for parameter in model.parameters():
        parameter.data.div_(parameter.data.norm() + 1)


def several_at_once(model: Module) -> None:
    torch._foreach_mul_([parameter.data for parameter in model.parameters()], 1.5)


def by_numpy(model: Module) -> None:
    for parameter in model.parameters():
        array = parameter.data.view(torch.int16 if parameter.itemsize == 2 else torch.int32).numpy()
        # The sign of all of them.
        array ^= array.dtype.type(-(2 ** (8 * array.itemsize - 1)))


def by_the_storage(model: Module) -> None:
    for parameter in model.parameters():
        parameter.untyped_storage().copy_((parameter.data * 1.5).untyped_storage())


def by_an_alias_that_was_kept(model: Module) -> None:
    kept = [parameter.data for parameter in model.parameters()]
    for one in kept:
        one.neg_()


def loaded(model: Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def swapped(model: Module) -> None:
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, Parameter(parameter.data * 1.5))


def an_average_that_was_here(model: Module) -> None:
    weights = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.zero_()
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.data.copy_(weight)


def of_one_element(model: Module) -> None:
    model.last.weight.data[2, 3] = 7.0  # type: ignore[union-attr, index]


WRITES: list[Write] = [
    clamp,
    without_grad,
    other_data,
    from_a_vector,
    of_a_norm,
    several_at_once,
    by_numpy,
    by_the_storage,
    by_an_alias_that_was_kept,
    loaded,
    swapped,
    an_average_that_was_here,
    of_one_element,
]

ALWAYS = {clamp, other_data, by_numpy, swapped, an_average_that_was_here}

WAYS: dict[str, dict[str, Any]] = {
    "host": {},
    "half": {"fraction": 0.5},
    "all on the device": {"fraction": 0.0},
    "streamed": {"step_on": "gpu"},
    "split": {"step_on": "auto", "cpu_share": 0.5},
    "disk": {"tier": "disk"},
    "gradients stay": {"offload_gradients": False},
    "in backward": {"step_in_backward": True},
}


def name_of(value: Any) -> str:
    """The id of a test's argument."""
    return str(getattr(value, "__name__", value)).replace(" ", "-")


class _Both:
    """Our loop and the plain one, and a write to both."""

    def __init__(self, both: Pair, write: Write) -> None:
        self.both = both
        self._write = write

    def write(self) -> None:
        self._write(self.both.model)
        self._write(self.both.plain.model)

    def step(self, batch: torch.Tensor, *, between: bool = False) -> None:
        self.both.backward(batch)
        if between:
            self.write()
        take_anew(self.both.plain)
        self.both.step()
        self.both.zero_grad()
        self.both.assert_same()


def times(each: _Both, data: list[torch.Tensor], *, between: bool) -> None:
    """Before the first step, twice between two, and between a backward and its step."""
    each.write()
    each.step(data[0])
    each.write()
    each.step(data[1])
    each.step(data[2], between=between)
    each.write()
    each.write()
    each.step(data[3])


KINDS = [("cpu", torch.float32), ("adversary", torch.float32), ("adversary", torch.bfloat16)]
TYPES = pytest.mark.parametrize(
    ("session", "dtype"), KINDS, indirect=["session"], ids=["float32-in-place", "float32", "bfloat16"]
)
"""Parameters that are stepped as they lie, those that are read and have no master, and those that have one."""


@pytest.mark.parametrize(
    ("write", "way", "dtype", "session"),
    [
        pytest.param(write, way, dtype, session, marks=() if write in ALWAYS else pytest.mark.long)
        for write, way, (session, dtype) in pairwise(WRITES, WAYS, KINDS)
    ],
    indirect=["session"],
    ids=name_of,
)
def test_a_write_is_where_the_next_step_starts(
    write: Write, way: str, dtype: torch.dtype, session: spillway.Session
) -> None:
    both = pair(dtype, session, torch.optim.RMSprop, WAYS[way], lr=1e-2, weight_decay=0.1)
    between = not WAYS[way].get("step_in_backward") and write is not swapped
    times(_Both(both, write), batches(4, dtype), between=between)
    both.optimizer.close()


@pytest.mark.parametrize(
    "way", ["host", "streamed", "split", "disk", "in backward"], ids=lambda way: way.replace(" ", "-")
)
@TYPES
@pytest.mark.covered
def test_of_pieces(
    way: str,
    dtype: torch.dtype,
    session: spillway.Session,
    pieces_of: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces_of(64)
    monkeypatch.setattr("spillway.optim.state_store.CHUNK", 64)
    both = pair(dtype, session, torch.optim.AdamW, {**WAYS[way], "fused": True}, lr=1e-2)
    between = not WAYS[way].get("step_in_backward")
    times(_Both(both, of_one_element), batches(4, dtype), between=between)
    times(_Both(both, clamp), batches(4, dtype), between=between)
    times(_Both(both, other_data), batches(4, dtype), between=between)
    both.optimizer.close()


@TYPES
@pytest.mark.parametrize("given", [{}, {"step_in_backward": True}], ids=["host", "in-backward"])
def test_while_parameters_come_during_the_next_forward(
    given: dict[str, Any], dtype: torch.dtype, session: spillway.Session
) -> None:
    both = pair(dtype, session, torch.optim.RMSprop, given, lr=1e-2)
    both.optimizer.overlap_forward(both.model)
    for batch in batches(4, dtype):
        both.backward(batch)
        both.step()
        both.zero_grad()
        both.optimizer.synchronize()
        clamp(both.model)
        clamp(both.plain.model)
        take_anew(both.plain)
    assert_same_values(both.model, both.plain.model)
    both.optimizer.close()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "in backward"], ids=lambda way: way.replace(" ", "-"))
@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_of_the_step_that_writes(when: str, way: str, session: spillway.Session) -> None:
    both = pair(torch.bfloat16, session, torch.optim.RMSprop, WAYS[way], lr=1e-2)

    def ours(*_: object) -> None:
        clamp(both.model)

    def plains(*_: object) -> None:
        # What steps there are the copies, which the parameters follow after the step.
        if when == "post":
            both.plain.write_back()
        clamp(both.plain.model)
        take_anew(both.plain)

    for optimizer, hook in ((both.optimizer, ours), (both.plain.optimizer, plains)):
        register = optimizer.register_step_pre_hook if when == "pre" else optimizer.register_step_post_hook
        register(hook)
    for batch in batches(4, torch.bfloat16):
        both.backward(batch)
        both.step()
        both.zero_grad()
        assert_same_values(both.model, both.plain.model)
    both.optimizer.close()


def test_a_write_of_a_parameter_that_a_class_of_ones_own_steps(session: spillway.Session) -> None:
    class Own(torch.optim.SGD):
        pass

    both = pair(torch.bfloat16, session, Own, lr=1e-2, momentum=0.9)
    times(_Both(both, clamp), batches(4, torch.bfloat16), between=True)
    both.optimizer.close()


def test_the_sign_of_weights_stays_where_a_critic_is_clipped(session: spillway.Session) -> None:
    critics = [torch.nn.Linear(4, 4) for _ in range(2)]
    critics[1].load_state_dict(copy.deepcopy(critics[0].state_dict()))
    optimizers = [
        OffloadedOptimizer(critics[0].parameters(), torch.optim.RMSprop, lr=5e-2, session=session),
        torch.optim.RMSprop(critics[1].parameters(), lr=5e-2, foreach=False),
    ]
    for batch in torch.randn(5, 8, 4):
        for critic, optimizer in zip(critics, optimizers, strict=True):
            critic(batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.01, 0.01)
        assert_same_values(critics[0], critics[1])
    optimizers[0].close()  # type: ignore[attr-defined]


def test_memory_that_parameters_left_is_not_held_by_a_closed_optimizer(cpu_session: spillway.Session) -> None:
    parameter = Parameter(torch.ones(8))
    optimizer = OffloadedOptimizer([parameter], torch.optim.SGD, lr=1.0, session=cpu_session)
    parameter.sum().backward()
    optimizer.step()
    optimizer.close()
    assert same_bits(parameter, torch.zeros(8))
    left = weakref.ref(parameter.untyped_storage())
    parameter.data = torch.ones(4)
    assert left() is None


# States, which are seen and written between steps.

SEEN = {name: WAYS[name] for name in ("host", "half", "all on the device", "streamed", "disk", "in backward")}


def momenta(both: Pair) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for parameter, master in zip(both.model.parameters(), both.plain.masters, strict=True):
        yield both.optimizer.state[parameter], both.plain.optimizer.state[master]


def zeroed(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for state in (ours, plain):
        state["exp_avg"].zero_()


def other_steps(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for state in (ours, plain):
        state["step"].fill_(5.0)


def replaced(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for state in (ours, plain):
        state["exp_avg_sq"] = torch.ones_like(state["exp_avg"])


def updated(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for state in (ours, plain):
        state |= {"exp_avg": torch.ones_like(state["exp_avg"])}


def cleared(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    for state in (ours, plain):
        for name in ("step", "exp_avg", "exp_avg_sq"):
            del state[name]


@pytest.mark.parametrize(
    ("edit", "way", "dtype", "session", "pieces"),
    [
        (edit, way, dtype, session, pieces)
        for edit, way, (session, dtype), pieces in pairwise(
            [zeroed, other_steps, replaced, updated, cleared], SEEN, KINDS, [64, 1 << 22]
        )
    ],
    indirect=["session"],
    ids=name_of,
)
def test_a_state_is_seen_and_an_edit_of_it_is_where_the_next_step_starts(
    edit: Callable[[dict[str, Any], dict[str, Any]], None],
    way: str,
    dtype: torch.dtype,
    pieces: int,
    session: spillway.Session,
    pieces_of: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pieces_of(pieces)
    monkeypatch.setattr("spillway.optim.state_store.CHUNK", pieces)
    both = pair(dtype, session, torch.optim.AdamW, {**SEEN[way], "fused": True}, lr=1e-2)
    for number, batch in enumerate(batches(4, dtype)):
        both.backward(batch)
        both.step()
        both.zero_grad()
        both.assert_same()
        for ours, plain in momenta(both):
            assert all(same_bits(ours[name], plain[name]) for name in plain)
            assert {name: 0 for name in ours if name != "master"} == dict.fromkeys(plain, 0)
            assert all(isinstance(value, torch.Tensor) for value in {**ours}.values())
            if number % 2:
                edit(ours, plain)
    both.assert_same()
    both.optimizer.close()


@pytest.mark.parametrize("way", SEEN, ids=lambda way: way.replace(" ", "-"))
def test_all_states_are_taken_away(way: str, session: spillway.Session) -> None:
    both = pair(torch.float32, session, torch.optim.AdamW, {**SEEN[way], "fused": True}, lr=1e-2)
    for number, batch in enumerate(batches(4)):
        both.backward(batch)
        both.step()
        both.zero_grad()
        both.assert_same()
        if number == 1:
            both.plain.optimizer.state.clear()
            both.optimizer.state = type(both.optimizer.state)(dict)
            assert both.optimizer.state_dict()["state"] == {}
    both.optimizer.close()


@pytest.mark.parametrize("way", ["streamed", "disk"])
def test_what_is_seen_of_a_state_that_lies_elsewhere(way: str, session: spillway.Session) -> None:
    both = pair(torch.float32, session, torch.optim.AdamW, {**SEEN[way], "fused": True}, lr=1e-2)
    both.backward(batches(1)[0])
    both.step()
    for reading in (
        lambda state: state["exp_avg"],
        lambda state: state.get("exp_avg"),
        lambda state: dict(state)["exp_avg"],
        lambda state: dict(state.items())["exp_avg"],
        lambda state: list(state.values())[1],
        lambda state: state.copy()["exp_avg"],
        lambda state: (state | {})["exp_avg"],
        lambda state: ({} | state)["exp_avg"],
        lambda state: copy.deepcopy(state)["exp_avg"],
        lambda state: copy.copy(state)["exp_avg"],
        lambda state: state.setdefault("exp_avg"),
    ):
        both.backward(batches(1)[0])
        both.step()
        both.zero_grad()
        for ours, plain in momenta(both):
            assert same_bits(reading(ours), plain["exp_avg"])
            assert "Place" not in repr(ours)
            assert ours.get("nothing") is None
            assert isinstance(ours, dict)
    ours, _ = next(momenta(both))
    assert same_bits(ours.pop("exp_avg"), both.plain.optimizer.state[both.plain.masters[0]]["exp_avg"])
    both.optimizer.close()


def test_a_state_of_another_shape_is_refused(cpu_session: spillway.Session) -> None:
    both = pair(torch.float32, cpu_session, torch.optim.AdamW, lr=1e-2)
    both.backward(batches(1)[0])
    both.step()
    ours, _ = next(momenta(both))
    ours["exp_avg"] = torch.zeros(1)
    both.backward(batches(1)[0])
    with pytest.raises(UsageError, match="exp_avg: got a state of shape"):
        both.optimizer.step()
    both.optimizer.close()


def test_a_state_of_a_closed_optimizer_is_told(cpu_session: spillway.Session) -> None:
    parameter = Parameter(torch.ones(8))
    optimizer = OffloadedOptimizer([parameter], torch.optim.AdamW, session=cpu_session, tier="disk")
    parameter.sum().backward()
    optimizer.step()
    state = optimizer.state[parameter]
    optimizer.close()
    with pytest.raises(UsageError, match="closed"):
        state["exp_avg"]
