"""What Spillway does shows in a profiler's trace under its own names."""

from __future__ import annotations

import pytest
import torch

import spillway


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_phase_has_a_name_in_a_trace(tier: str) -> None:
    with spillway.Session(window=0) as session:
        leaf = torch.randn(4096, requires_grad=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            with spillway.offload(session=session, tier=tier, min_bytes=0):
                loss = (leaf * 1).sin().exp().sum()
            loss.backward()
    names = {event.name for event in profile.events() if event.name.startswith("spillway.")}
    assert names == {"spillway.leave", "spillway.release", "spillway.fetch", "spillway.take"}
