"""What cannot be meant is refused when the optimizer is made, by an error that says what was expected."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import Parameter

import spillway
from optim.support import batches, offloaded, train, wide
from spillway import OffloadedOptimizer, SessionError, UnsupportedError, UsageError

AdamW = torch.optim.AdamW


class Case(NamedTuple):
    """Arguments that are refused."""

    name: str
    arguments: dict[str, Any]
    error: type[Exception]
    said: str
    optimizer_class: Any = AdamW
    params: Callable[[], Any] = lambda: [Parameter(torch.ones(2, 2))]


class NeedsRate(torch.optim.Optimizer):
    def __init__(self, params: Any, rate: float) -> None:
        super().__init__(params, {"rate": rate})


def same_twice() -> list[Parameter]:
    return [Parameter(torch.ones(1))] * 2


MUON = getattr(torch.optim, "Muon", None)

CASES = [
    Case("no class", {}, UsageError, r"optimizer_class: got 3, expected an optimizer class", 3),
    Case("a name", {}, UsageError, r"optimizer_class: got 'AdamW', expected an", "AdamW"),
    Case("another class", {}, UsageError, r"optimizer_class: got <class 'torch.nn.*Linear'>, exp", torch.nn.Linear),
    Case("LBFGS", {}, UnsupportedError, r"LBFGS cannot be offloaded: .* Use LBFGS itself", torch.optim.LBFGS),
    Case("SparseAdam", {}, UnsupportedError, r"SparseAdam cannot be offloaded", torch.optim.SparseAdam),
    Case("an unknown default", {"momentum": 0.9}, UsageError, r"AdamW refuses the arguments \['momentum'\]"),
    Case("a default missing", {}, UsageError, r"NeedsRate refuses the arguments \[\]: .*'rate'", NeedsRate),
    Case("a negative lr", {"lr": -1.0}, ValueError, r"Invalid learning rate: -1.0"),
    Case("wrong betas", {"betas": (2.0, 0.9)}, ValueError, r"Invalid beta parameter"),
    Case("differentiable", {"differentiable": True}, UnsupportedError, r"differentiable=True: an offloaded step"),
    Case("fraction above", {"fraction": 1.5}, UsageError, r"fraction: got 1.5, expected 'auto', or a number from 0"),
    Case("fraction below", {"fraction": -0.1}, UsageError, r"fraction: got -0.1"),
    Case("fraction nan", {"fraction": float("nan")}, UsageError, r"fraction: got nan"),
    Case("fraction of a kind", {"fraction": "half"}, UsageError, r"fraction: got 'half'"),
    Case("fraction a flag", {"fraction": True}, UsageError, r"fraction: got True"),
    Case("master of no type", {"master_dtype": "wide"}, UsageError, r"master_dtype: got 'wide', expected 'auto', No"),
    Case("master of integers", {"master_dtype": torch.int32}, UsageError, r"master_dtype: got torch.int32"),
    Case("complex master", {"master_dtype": torch.complex64}, UsageError, r"master_dtype: got torch.complex64"),
    Case("no threads", {"threads": 0}, UsageError, r"threads: got 0, expected an integer of at least 1, or None"),
    Case("half a thread", {"threads": 1.5}, UsageError, r"threads: got 1.5"),
    Case("threads a flag", {"threads": True}, UsageError, r"threads: got True"),
    Case("gradients of a kind", {"offload_gradients": "no"}, UsageError, r"offload_gradients: got 'no', expected True"),
    Case("gradients a number", {"offload_gradients": 1}, UsageError, r"offload_gradients: got 1"),
    Case("no session", {"session": "default"}, UsageError, r"session: got 'default', expected a spillway.Session, or"),
    Case("no parameters", {}, ValueError, r"optimizer got an empty parameter list", AdamW, list),
    Case("one tensor", {}, TypeError, r"should be an iterable", AdamW, lambda: torch.ones(2)),
    Case("no tensors", {}, TypeError, r"optimizer can only optimize Tensors", AdamW, lambda: [1, 2]),
    Case("no leaf", {}, ValueError, r"can't optimize a non-leaf", AdamW, lambda: [Parameter(torch.ones(2)) * 2]),
    Case("twice in a group", {}, UserWarning, r"duplicate parameters", AdamW, same_twice),
    Case("no params in a group", {}, KeyError, r"params", AdamW, lambda: [{"lr": 0.1}]),
    Case("a vector for Muon", {}, ValueError, r"Muon only supports 2D", MUON, lambda: [Parameter(torch.ones(3))]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_arguments_that_are_refused(case: Case, cpu_session: spillway.Session) -> None:
    params = case.params()
    arguments = {"session": cpu_session, **case.arguments}
    with pytest.raises(case.error, match=case.said):
        OffloadedOptimizer(params, case.optimizer_class, **arguments)
    assert cpu_session.used_bytes == (0, 0)
    if isinstance(params, list) and params and isinstance(params[0], Parameter):
        assert not params[0]._post_accumulate_grad_hooks


def test_a_closed_session_is_refused() -> None:
    session = spillway.Session()
    session.close()
    with pytest.raises(SessionError, match="got a closed session, expected an open one"):
        offloaded(AdamW, session)(wide())


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_an_optimizer_is_not_copied(copier: Callable[[Any], Any], cpu_session: spillway.Session) -> None:
    model = wide()
    optimizer = offloaded(AdamW, cpu_session)(model)
    train(model, optimizer, batches(1))
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled: .* load this one's state_dict"):
        copier(optimizer)
    optimizer.close()


def test_what_it_looks_like(cpu_session: spillway.Session) -> None:
    optimizer = offloaded(AdamW, cpu_session, lr=0.5)(wide())
    assert repr(optimizer).startswith("OffloadedOptimizer (\nParameter Group 0\n    amsgrad: False")
    assert "lr: 0.5" in repr(optimizer)
    assert optimizer.defaults["lr"] == 0.5
    optimizer.close()


@pytest.mark.parametrize("threads", [1, 3, None])
def test_threads_of_the_step_are_its_own(
    threads: int | None, cpu_session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    # Not even for the moment in which a thread of the user's may begin.
    monkeypatch.setattr(torch, "set_num_threads", None)
    model = wide()
    seen = []

    class Asks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.append(torch.get_num_threads())

    optimizer = OffloadedOptimizer(model.parameters(), Asks, lr=0.1, threads=threads, session=cpu_session)
    train(model, optimizer, batches(2))
    assert torch.get_num_threads() == before
    assert seen[0] == seen[1]
    if threads is not None:
        assert seen[0] == threads
    optimizer.close()


def test_a_group_that_the_class_refuses_is_not_added(cpu_session: spillway.Session) -> None:
    optimizer = OffloadedOptimizer([Parameter(torch.ones(2, 2))], torch.optim.Muon, session=cpu_session)
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        optimizer.add_param_group({"params": [good := Parameter(torch.ones(2, 2)), Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    assert not good._post_accumulate_grad_hooks
    optimizer.close()
