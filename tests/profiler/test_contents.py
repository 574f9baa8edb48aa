"""What is known of the content of tensors without the hardware."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway import UnsupportedError
from steps import failing

META = torch.device("meta")
ROWS = 6


class Asking(nn.Module):
    """A block whose path hangs on what a function says of what it is given."""

    def __init__(self, says: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(8, 8), nn.Linear(8, 8)
        self.says = says

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.narrow(x) if self.says(mask) else self.wide(self.wide(x))
        return found


class Model(nn.Module):
    def __init__(self, says: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(ROWS) % 2)
        self.blocks = nn.ModuleList(Asking(says) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def products(says: Callable[[Tensor], object], mask: Tensor) -> int:
    """How many a block has by its profile: one, or two."""
    batch = torch.empty(ROWS, 8), mask
    profile = spillway.profile(Model(says), batch, blocks="blocks.*", hardware="h100")
    kind = profile.kinds[-1]
    return sum("addmm" in each.name for each in kind.operators)


def padded(mask: Tensor) -> Tensor:
    """Of several, whether any leaves something out."""
    wider = torch.nn.functional.pad(mask.to(torch.int32), (1, 1), value=1)
    return (wider[1:-1].view(2, -1).cumsum(-1)[:, -1] == ROWS // 2).all()


def positions(mask: Tensor) -> Tensor:
    """From nothing but numbers of the program."""
    at = torch.arange(ROWS, device=mask.device).expand(2, ROWS)
    return ((at.diff(prepend=at[:, :1] - 1) != 1).cumsum(-1)[:, -1] == 0).all()


def written(mask: Tensor) -> Tensor:
    """In place, by way of a view."""
    count = torch.zeros(2, ROWS, dtype=torch.int64, device=mask.device)
    count[1].add_(mask)
    count.t()[0] += 1
    return count.sum() == ROWS + 2


def overwritten(mask: Tensor) -> Tensor:
    """With what nobody knows."""
    count = torch.zeros(ROWS, dtype=torch.int64, device=mask.device)
    count.copy_(torch.randint(2, (ROWS,), device=mask.device))
    return count.sum() == 0


def counted(mask: Tensor) -> bool:
    """A shape that hangs on content."""
    return len(mask.nonzero()) == ROWS


ALL, SOME = torch.ones(ROWS, dtype=torch.int64), torch.tensor([1, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("says", [padded, positions, written, counted], ids=lambda each: each.__name__)
def test_a_model_takes_the_path_that_it_would(says: Callable[[Tensor], object]) -> None:
    assert products(says, ALL) == 1
    assert products(says, SOME) == (1 if says is positions else 2)


@pytest.mark.parametrize("says", [padded, written, counted, overwritten], ids=lambda each: each.__name__)
def test_what_nobody_knows_is_refused(says: Callable[[Tensor], object]) -> None:
    there = ALL if says is overwritten else ALL.to(META)
    failing(UnsupportedError, lambda: products(says, there), match="values of tensors")


def test_what_floating_point_went_into_is_refused() -> None:
    failing(UnsupportedError, lambda: products(lambda mask: (mask.float() > 0).all(), ALL), match="values of tensors")


def test_nothing_of_a_batch_is_written() -> None:
    mask = ALL.clone()

    def emptied(mask: Tensor) -> bool:
        mask.zero_()
        return bool((mask == 0).all())

    assert products(emptied, mask) == 1
    assert torch.equal(mask, ALL)


def test_buffers_are_known_too() -> None:
    model = Model(lambda mask: True)
    seen: list[bool] = []
    model.blocks[0].says = lambda mask: seen.append(bool((model.table[1::2] == 1).all())) or True
    spillway.profile(model, (torch.empty(ROWS, 8), ALL), blocks="blocks.*", hardware="h100")
    assert seen == [True]
