"""Pipeline stages within a budget on an accelerator: each bit is that of plain steps, peaks are kept to and foreseen.

One process has all the stages here; several devices are in ``test_many_devices.py``.
"""

from __future__ import annotations

import gc
import statistics
from itertools import pairwise

import pytest
import torch

import spillway
from integrations.test_planned_stages import Stage, any_order, assert_same, one_forward_one_backward, steps
from spillway.integrations.pipelining import offload_stages

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WIDTH, ROWS, BLOCKS = 1024, 8192, 4
NEAR, FAR = 0.02, 0.03
"""How far the predicted peak may be from the measured one, of all that is allocated: the median, and each."""
MOST_STEPS = 24


def made(count: int, device: str) -> list[Stage]:
    return [Stage(index, width=WIDTH, blocks=BLOCKS, device=device) for index in range(count)]


@pytest.mark.parametrize(("stages", "most"), [(1, 4), (2, 2)])
def test_budgets_of_stages_are_kept_to_and_foreseen(stages: int, most: int) -> None:
    device = "cuda:0"
    turns = one_forward_one_backward(most + 2, most, stages)
    budget: int | str = "64GiB"
    peaks, offs = [], []
    for share in (None, 0.7, 0.4):
        # Stages and optimizers of before are in circles. What goes when plans are made would be counted to be there.
        gc.collect()
        with spillway.Session() as session:
            ours = made(stages, device)
            with offload_stages(ours, budget=budget, session=session) as offloaded:
                done = 0
                for _ in steps(ours, [turns] * MOST_STEPS, rows=ROWS, gives=False):
                    done += 1
                    if offloaded.stage == "active":
                        break
                assert offloaded.measured is not None, offloaded.explain()
                plan = offloaded.plans[0]
                static = offloaded._rank.stages[0].profile.static_bytes  # type: ignore[union-attr]
                off = plan.predicted_peak / offloaded.measured - 1
                print(
                    f"{stages} stages, {share}: {offloaded.measured / 2**30:.3f} GiB, {100 * off:+.2f} %, {done} steps"
                )
                assert abs(off) <= FAR, offloaded.explain()
                offs.append(abs(off))
                peaks.append(offloaded.measured)
                moved = offloaded.stats().offloaded_bytes + offloaded.stats().recomputed_bytes
                assert (moved > 0) is (share is not None)
            assert share is None or peaks[-1] <= budget
        budget = static + int((peaks[0] - static) * (0.7 if share is None else 0.4))
    assert all(one > other for one, other in pairwise(peaks))
    assert statistics.median(offs) <= NEAR


@pytest.mark.parametrize("allow", ["host", "recompute"])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_stages_in_any_order_train_as_without(seed: int, allow: str) -> None:
    device = "cuda:0"
    turns = any_order(seed, 2, 3)
    torch.use_deterministic_algorithms(True)
    try:
        plain = list(steps(made(2, device), [turns] * 7, rows=512))
        with spillway.Session(window="16MiB") as session:
            ours = made(2, device)
            options = {"allow": {allow}, "session": session}
            with offload_stages(ours, budget="64GiB", **options) as offloaded:  # type: ignore[arg-type]
                assert_same(list(steps(ours, [turns] * 7, rows=512)), plain)
                stats = offloaded.stats()
                assert (stats.offloaded_bytes if allow == "host" else stats.recomputed_bytes) > 0
    finally:
        torch.use_deterministic_algorithms(False)
