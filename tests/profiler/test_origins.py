"""The module and the source line of each operator in a profile, and in its report."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway.planner.profile import Profile
from spillway.planner.report.facts import facts_of
from spillway.planner.report.page import to_page

HERE = Path(__file__).name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner = nn.Sequential(nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.up(x))
        return x + self.down(y) * 2


FIRST = Block.forward.__code__.co_firstlineno
WANTED = {
    "aten::addmm.default": [("up", FIRST + 1), ("down", FIRST + 2)],
    "aten::gelu.default": [("inner.0", FIRST + 1)],
    "aten::mul.Tensor": [("", FIRST + 2)],
    "aten::add.Tensor": [("", FIRST + 2)],
}


def profile_of(device: str) -> Profile:
    model = nn.Sequential(*(Block() for _ in range(3))).to(device)
    return spillway.profile(model, torch.randn(8, 16, device=device), hardware="h100" if device == "meta" else None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_each_operator_has_the_module_and_the_line_that_it_comes_from(device: str) -> None:
    operators = profile_of(device).kinds[0].operators
    for name, wanted in WANTED.items():
        found = [(each.module, each.line) for each in operators if each.name == name]
        assert found == [(module, f"{HERE}:{line}") for module, line in wanted], name


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y


def test_a_block_of_torchs_own_has_the_line_that_calls_it() -> None:
    kind, *_ = spillway.profile(Whole(), torch.randn(8, 16), blocks="blocks.*").kinds
    line = f"{HERE}:{Whole.forward.__code__.co_firstlineno + 1}"
    assert {(each.module, each.line) for each in kind.operators if "relu" in each.name} == {("1", line)}


def test_the_report_says_where_operators_come_from() -> None:
    pytest.importorskip("plotly", reason="the page is drawn by plotly")
    profile, hardware = profile_of("meta"), spillway.Hardware.named("h100")
    page = to_page(facts_of(profile, spillway.plan(profile, budget="1GiB", hardware=hardware), hardware))
    assert f"<td><code>inner.0 at {HERE}:{FIRST + 1}</code></td>" in page
    assert f"<td><code>{HERE}:{FIRST + 2}</code></td>" in page


@pytest.mark.filterwarnings("error:Using `torch.compile", "ignore:The .grad attribute")
def test_a_block_with_a_compiled_module_in_it_is_profiled_without_hooks() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(Block(), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x) * 2
            return y

    operators = spillway.profile(nn.Sequential(*(Outer() for _ in range(3))), torch.randn(8, 16)).kinds[0].operators
    line = Outer.forward.__code__.co_firstlineno + 1
    assert {each.module for each in operators} == {""}
    assert f"{HERE}:{line}" in {each.line for each in operators}
