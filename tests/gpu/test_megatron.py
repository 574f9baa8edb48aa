"""Megatron-Core's names on an accelerator: groups, released memory, events between streams and lanes; its optimizer."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import spillway
from spillway.compat.megatron import FineGrainedActivationOffloadingInterface as Interface
from spillway.compat.megatron import HybridDeviceOptimizer, PipelineOffloadManager

pytestmark = pytest.mark.gpu

ROWS, WIDTH, LAYERS = 4096, 1024, 6
ACTIVATION = ROWS * WIDTH * 4


class Layer(nn.Module):
    """A feed-forward layer with three groups, and the events that a captured one would have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, on: bool) -> torch.Tensor:
        with Interface(on, x, "mlp_norm") as x:
            normed = self.norm(x)
        with Interface(on, normed, "expert_fc1") as normed:
            hidden = self.fc1(normed)
        if on:
            hidden = Interface.group_commit(hidden, "expert_fc1", [normed])
        with Interface(on, hidden, "moe_act") as hidden:
            act = nn.functional.gelu(hidden)
        out: torch.Tensor = x + self.fc2(act)
        if on:
            out = Interface.group_commit(out, "moe_act", [hidden], delay_offload=True)
            Interface.flush_delayed_groups()
            out = Interface.group_commit(out, "mlp_norm")
            Interface.forward_record(torch.Event(device=out.device))
            out = Interface.backward_record(out, torch.Event(device=out.device))
        return out


def test_groups_of_several_chunks_leave_and_come_back(
    device: torch.device, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spillway.Session, "_default", None)
    torch.manual_seed(0)
    with device:
        layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        batches = torch.randn(3, ROWS, WIDTH)

    def step(on: bool) -> list[torch.Tensor]:
        layers.zero_grad()
        losses = []
        for batch in batches:
            if on:
                Interface.init_chunk_handler(1, 0, 1024 * 1024)
            hidden = batch
            for layer in layers:
                hidden = layer(hidden, on)
            losses.append(hidden.square().mean())
        for loss in losses:
            loss.backward()
        return [loss.detach() for loss in losses] + [
            parameter.grad.clone() for parameter in layers.parameters() if parameter.grad is not None
        ]

    with spillway.Session(window=4 * ACTIVATION) as session:
        session.use_as_default()
        expected = step(on=False)
        for _ in range(3):
            assert all(map(torch.equal, step(on=True), expected))
            Interface.reset()
        manager = PipelineOffloadManager.get_instance()
        # Of the first chunk all but the last layer leave: what the norm, the first linear and the GELU read.
        assert manager.offload_summary_total_bytes >= (LAYERS - 1) * 4 * ACTIVATION
        assert manager.d2h_stream != manager.h2d_stream
        del manager
        gc.collect()
        session.synchronize()
        assert session.used_bytes == (0, 0)


def test_a_fraction_of_the_devices_elements_steps_on_the_host_and_the_rest_on_the_device(
    device: torch.device, deterministic: None
) -> None:
    """Against copies, ``float32`` masters, and a class for each side, written out."""
    torch.manual_seed(0)
    sizes = (WIDTH, 2 * WIDTH, WIDTH)
    on_cpu = nn.Parameter(torch.randn(WIDTH, dtype=torch.bfloat16))
    on_device = [nn.Parameter(torch.randn(size, WIDTH, dtype=torch.bfloat16, device=device)) for size in sizes]
    # Half of the device's elements are reached by the second; the one on the CPU, in their midst, is not counted.
    parameters = [on_device[0], on_cpu, *on_device[1:]]
    host = [nn.Parameter(each.detach().float().cpu()) for each in parameters[:3]]
    rest = [nn.Parameter(on_device[2].detach().float())]
    options = {"lr": 0.01, "weight_decay": 0.1}
    by_hand = [torch.optim.AdamW(host, fused=True, **options), torch.optim.AdamW(rest, fused=True, **options)]
    with spillway.Session() as session:
        optimizer = HybridDeviceOptimizer(
            parameters, 0.5, torch.optim.AdamW, param_update_in_fp32=True, session=session, fused=True, **options
        )
        assert [optimizer.holds(each) for each in parameters] == [True, True, True, False]
        for _ in range(3):
            for each, master in zip(parameters, [*host, *rest], strict=True):
                each.grad = torch.randn_like(each)
                master.grad = each.grad.to(master.device, torch.float32)
            for each in by_hand:
                each.step()
            optimizer.step()
            optimizer.zero_grad()
        for each, master in zip(parameters, [*host, *rest], strict=True):
            assert torch.equal(optimizer.state[each]["master"], master)
            assert torch.equal(each, master.to(each.device, torch.bfloat16))
            assert optimizer.state[each]["exp_avg"].device == master.device
        optimizer.close()
        assert session.used_bytes == (0, 0)
