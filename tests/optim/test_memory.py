"""Bytes for each parameter: the table of the page on the optimizer, measured."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import spillway
from spillway import OffloadedOptimizer
from spillway.optim.offloaded_gradient import OffloadedGradient
from spillway.optim.tensors import CHUNK
from spillway.testing import AdversaryBackend

PAGE = Path(__file__).parents[2] / "docs" / "optimizer.md"
ELEMENTS = 1 << 20
KINDS: dict[str, tuple[torch.dtype, torch.dtype | str | None]] = {
    "`bfloat16`, master": (torch.bfloat16, "auto"),
    "`bfloat16`, no master": (torch.bfloat16, None),
    "`float32`": (torch.float32, "auto"),
}
MOMENTS = ("exp_avg", "exp_avg_sq")


def rows() -> Iterator[tuple[str, bool, bool, tuple[int, int, int]]]:
    text = PAGE.read_text(encoding="utf-8")
    table = re.search(r"<!-- memory: begin.*?-->\n(.*?)<!-- memory: end", text, re.DOTALL)
    assert table is not None
    for line in table[1].splitlines()[2:]:
        kind, held, accumulates, *numbers = (cell.strip() for cell in line.split("|")[1:-1])
        found = tuple(int(re.sub(r"(^|\s*\+ )window", "", number) or 0) for number in numbers)
        assert len(found) == 3
        for several in {"yes": [True], "no": [False], "either": [False, True]}[accumulates]:
            yield kind, held == "yes", several, found


ROWS = list(rows())


def test_the_table_has_a_row_for_every_kind() -> None:
    assert {row[:3] for row in ROWS} == {
        (kind, held, several) for kind in KINDS for held in (True, False) for several in (True, False)
    }


@pytest.mark.parametrize(("kind", "held", "accumulates", "expected"), ROWS)
def test_a_parameter_takes_the_bytes_that_the_page_says(
    kind: str, held: bool, accumulates: bool, expected: tuple[int, int, int], adversary: AdversaryBackend
) -> None:
    dtype, master = KINDS[kind]
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=dtype))
    # As on a device; and nothing is on its way when it is looked at.
    with spillway.Session(window=0, backend=adversary.serve) as session:
        optimizer = OffloadedOptimizer(
            [parameter], torch.optim.AdamW, fraction=float(held), master_dtype=master, session=session
        )
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range(1 + accumulates):
                (parameter * 2).sum().backward()
            optimizer.step()
            optimizer.synchronize()
        gradient = parameter.grad
        assert gradient is not None
        # A held parameter's master is pinned.
        counted = MOMENTS if held else (*MOMENTS, "master")
        kept = sum(value.nbytes for name, value in optimizer.state[parameter].items() if name in counted)
        sums = sum(
            one.tensor().nbytes for gone in optimizer._placement.held.values() if (one := gone.gradient.sum) is not None
        )
        pinned = session.used_bytes[0]
        on_device = parameter.nbytes
        if held:
            on_host = kept + sums
            assert isinstance(gradient, OffloadedGradient)
        else:
            on_host = sums
            on_device += gradient.nbytes + kept
        assert (on_device, pinned, on_host) == tuple(each * ELEMENTS for each in expected)
        optimizer.close()
        assert session.used_bytes == (0, 0)


def test_without_offloaded_gradients_they_are_on_the_device_and_sums_nowhere_else() -> None:
    parameter = torch.nn.Parameter(torch.ones(ELEMENTS, dtype=torch.bfloat16))
    with spillway.Session(window=0) as session:
        optimizer = OffloadedOptimizer([parameter], torch.optim.AdamW, offload_gradients=False, session=session)
        for _ in range(2):
            (parameter * 2).sum().backward()
        optimizer.step()
        assert type(parameter.grad) is torch.Tensor
        assert not any(held.gradient.sum for held in optimizer._placement.held.values())
        optimizer.close()


def test_where_pinned_memory_is_full_an_error_says_so() -> None:
    with spillway.Session(host_budget="64KiB") as session:
        parameter = torch.nn.Parameter(torch.ones(CHUNK // 16))
        optimizer = OffloadedOptimizer([parameter], torch.optim.AdamW, session=session)
        with pytest.raises(spillway.TierFullError, match="host memory"):
            (parameter * 2).sum().backward()
        optimizer.close()
