"""Hazard 23: distributed tensors, in a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor

import spillway
from spillway import EventKind
from support import Context, Trial, grads, mlp


@pytest.fixture
def mesh(one_rank: None) -> DeviceMesh:
    return DeviceMesh("cpu", [0])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_h23_a_dtensor_leaves_by_its_local_part(trial: Trial, mesh: DeviceMesh, placement: Any) -> None:
    torch.manual_seed(0)
    wanted = distribute_tensor(torch.randn(16, 32), mesh, [placement])
    torch.manual_seed(0)
    back = trial.round_trip(lambda: distribute_tensor(torch.randn(16, 32), mesh, [placement]))
    assert isinstance(back, DTensor)
    assert back.placements == wanted.placements
    assert back.device_mesh == wanted.device_mesh
    assert back.shape == wanted.shape
    assert back.stride() == wanted.stride()
    assert torch.equal(back.to_local(), wanted.to_local())
    assert trial.nbytes(EventKind.TAKE) == wanted.to_local().nbytes


def test_h23_operators_on_dtensors(trial: Trial, mesh: DeviceMesh) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = distribute_tensor(torch.randn(16, 32), mesh, [Shard(0)]).requires_grad_()
        weight = distribute_tensor(torch.randn(32, 32), mesh, [Replicate()]).requires_grad_()
        with context():
            hidden = (leaf @ weight).sin()
            hidden = torch.nn.functional.layer_norm(hidden, (32,)) * hidden.t().exp().t()
            loss = hidden.redistribute(mesh, [Replicate()]).to_local().square().sum()
        del hidden
        loss.backward()
        yield from [gradient.full_tensor() for gradient in grads(leaf, weight)]  # type: ignore[attr-defined]

    trial(step)


def test_h23_tensor_parallel(trial: Trial, mesh: DeviceMesh) -> None:
    """Sharded linear layers: parameters are DTensors, activations are plain, DTensors, and plain again."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def step(context: Context) -> Iterator[torch.Tensor]:
        model = mlp(32, 64, 32)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        batch = torch.randn(8, 32, requires_grad=True)
        with context():
            loss = model(batch * 2).square().mean()
        loss.backward()
        yield loss.detach()
        yield from grads(batch)
        yield from [gradient.full_tensor() for gradient in grads(*model.parameters())]  # type: ignore[attr-defined]

    trial(step)


def test_h19_h23_sharded_parameters_and_views_of_them_stay(trial: Trial, mesh: DeviceMesh) -> None:
    weight = torch.nn.Parameter(distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)]))
    leaf = distribute_tensor(torch.randn(8, 64), mesh, [Replicate()]).requires_grad_()
    with trial.offload():
        loss = torch.nn.functional.linear(leaf, weight).to_local().sum() + (leaf @ weight.view(64, 64)).to_local().sum()
    assert trial.nbytes(EventKind.LEAVE) < weight.to_local().nbytes
    loss.backward()


@pytest.mark.parametrize("context", ["offload", "keep"])
def test_h23_a_dtensor_changed_in_place(trial: Trial, mesh: DeviceMesh, context: str) -> None:
    leaf = distribute_tensor(torch.randn(16, 32), mesh, [Shard(0)]).requires_grad_()
    with trial.offload() if context == "offload" else spillway.keep():
        hidden = leaf * 2
        loss = hidden.sin().to_local().sum()
    trial.push_out()
    with torch.no_grad():
        hidden.mul_(2)
    with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
        loss.backward()
