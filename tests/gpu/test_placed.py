"""Plans on a GPU that choose which weights stay there (``stream="auto"``): bits, peaks and budgets."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from adapted import Block, FeedForward

pytestmark = pytest.mark.gpu

WIDTH, BLOCKS, STEPS, MiB = 2048, 8, 20, 1 << 20
DEVICE = torch.device("cuda", 0)


class Model(nn.Module):
    """Blocks with dropout between them."""

    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList((FeedForward if is_trained else Block)(WIDTH) for _ in range(BLOCKS))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 8)
        self.to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x))
        y: Tensor = self.head(x)
        return y


class Training:
    def __init__(self, session: spillway.Session, *, is_trained: bool, device: torch.device | str = "cpu") -> None:
        self.session, self.is_trained = session, is_trained
        self.model = Model(is_trained=is_trained).to(device)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer: Any = torch.optim.AdamW(trained, lr=1e-3, fused=True)
        if is_trained:
            self.optimizer = spillway.OffloadedOptimizer(
                trained, torch.optim.AdamW, lr=1e-3, fused=True, step_on="gpu", session=session
            )

    def attach(self, budget: int) -> spillway.Attached:
        more = {"optimizer": self.optimizer} if self.is_trained else {}
        return spillway.attach(
            self.model, budget=budget, stream="auto", blocks="layers.*", device=DEVICE, session=self.session, **more
        )

    def step(self, number: int) -> Tensor:
        torch.manual_seed(number)
        x = torch.randn(8, 1024, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        loss = self.model(x).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def content(self) -> list[Tensor]:
        """Parameters, and the optimizer's state in order."""
        found = [each.detach().cpu() for each in self.model.parameters()]
        for state in self.optimizer.state_dict()["state"].values():
            found += [each.cpu() for each in state.values() if isinstance(each, Tensor)]
        return found

    def end(self) -> None:
        if self.is_trained:
            self.optimizer.close()


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session() as made:
        yield made


@pytest.mark.parametrize("is_trained", [False, True], ids=["frozen", "trained"])
def test_bits_and_budgets(session: spillway.Session, is_trained: bool) -> None:
    plain = Training(session, is_trained=is_trained, device=DEVICE)
    losses = [plain.step(number) for number in range(STEPS)]
    wanted = [*(each.cpu() for each in losses), *plain.content()]
    plain.end()
    del plain, losses
    gc.collect()
    level = torch.cuda.memory_allocated()
    counts, most = [], 0
    for share in (0.0, 0.75, 0.5):
        loop = Training(session, is_trained=is_trained)
        budget = level + int(share * most) if share else 1 << 40
        with loop.attach(budget) as attached:
            found, peak, last, plan = [], 0, 0, None
            for number in range(STEPS):
                is_active = attached.stage == "active"
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                found.append(loop.step(number).cpu())
                torch.cuda.synchronize()
                if is_active:
                    last = torch.cuda.max_memory_allocated()
                    peak = max(peak, last)
                    # Two plans may run in turn. The first step of each learns its order.
                    before, plan = plan, attached.plan
                    if plan is before:
                        assert plan is not None
                        assert abs(plan.predicted_peak / last - 1) < 0.03, (share, plan.predicted_peak, last)
            plan = attached.plan
            assert plan is not None and last and peak <= budget, attached.explain()
            assert len(attached.streamed) == BLOCKS - len(plan.resident)
            most = most or peak - level
            counts.append(len(plan.resident))
            got = [*found, *loop.content()]
        assert len(got) == len(wanted) and all(map(torch.equal, got, wanted)), share
        assert all(each.device.type == "cpu" for each in loop.model.parameters())
        loop.end()
        del loop, attached, plan
        gc.collect()
        assert torch.cuda.memory_allocated() <= level + MiB
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < BLOCKS, counts
