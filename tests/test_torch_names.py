"""The private names of torch in ``spillway/_torch.py`` do what their lines say."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import GraphExecGroup

from spillway import _torch

# cli, integrations, compat


def test_own_call_runs_hooks_but_not_what_replaces_the_call() -> None:
    calls = []
    model = nn.Linear(2, 2)
    model.register_forward_pre_hook(lambda module, args: calls.append("hook"))
    model._compiled_call_impl = lambda x: calls.append("replaced")
    model(torch.ones(2))
    assert calls == ["replaced"]
    assert torch.is_tensor(_torch.own_call(model)(torch.ones(2)))
    assert calls == ["replaced", "hook"]


def test_the_frame_of_a_call_has_the_module() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_code is _torch.call_code:
                    owners.append(frame.f_locals["self"])
                frame = frame.f_back
            return x

    owners: list[nn.Module] = []
    model = nn.Sequential(Looks())
    model(torch.ones(1))
    assert owners == [model[0], model]


def test_pre_hooks_are_found() -> None:
    def hook(module: nn.Module, args: object) -> None: ...

    model = nn.Linear(2, 2)
    assert not _torch.pre_hooks_of(model)
    handle = model.register_forward_pre_hook(hook)
    assert list(_torch.pre_hooks_of(model).values()) == [hook]
    handle.remove()
    assert not _torch.pre_hooks_of(model)


def test_a_view_has_its_base() -> None:
    tensor = torch.ones(4)
    assert _torch.base_of(tensor) is None
    assert _torch.base_of(tensor[1:].view(3, 1)) is tensor


def test_the_exec_group_is_the_one_that_is_entered() -> None:
    assert _torch.exec_group() is None
    with GraphExecGroup() as group:
        assert _torch.exec_group() is group
    assert _torch.exec_group() is None


def test_leaves_come_in_order() -> None:
    assert _torch.tree_leaves(([1, {"a": 2}], (3,), 4)) == [1, 2, 3, 4]
