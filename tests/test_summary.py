"""What groups did on every rank: the table, and how it is gathered."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist

import spillway
from integrations.ranks import World
from spillway import GroupStats, StepStats, Summary, SummaryRow

MIB = 1 << 20


def stats(offloaded: int = 0, **groups: int) -> StepStats:
    """So many MiB that left, in groups, and beside them."""
    parts = tuple(GroupStats(name, offloaded_bytes=count * MIB) for name, count in groups.items())
    return StepStats(offloaded_bytes=(offloaded + sum(groups.values())) * MIB, groups=parts)


def first_table(summary: Summary, width: int = 80) -> list[str]:
    return summary.to_text(width).split("\n\nall,")[0].splitlines()


def test_ranks_are_rows_and_groups_are_columns_with_sums_of_both() -> None:
    summary = Summary((SummaryRow(0, stats(mlp=1, attention=2)), SummaryRow(1, stats(mlp=4))))
    assert summary.groups == ("attention", "mlp")
    assert summary.offloaded_bytes == {"attention": 2 * MIB, "mlp": 5 * MIB}
    assert first_table(summary) == [
        "offloaded, MiB:",
        "rank  attention  mlp total",
        "0          2.00 1.00  3.00",
        "1          0.00 4.00  4.00",
        "total      2.00 5.00  7.00",
    ]


def test_what_left_in_no_group_has_a_column_of_its_own() -> None:
    assert first_table(Summary((SummaryRow(0, stats(3, mlp=1)), SummaryRow(1, None)))) == [
        "offloaded, MiB:",
        "rank   mlp no group total",
        "0     1.00     3.00  4.00",
        "1     0.00     0.00  0.00",
        "total 1.00     3.00  4.00",
    ]


def test_what_each_rank_counted() -> None:
    counted = StepStats(
        saved_bytes=8 * MIB,
        kept_bytes=2 * MIB,
        offloaded_bytes=6 * MIB,
        reloaded_bytes=5 * MIB,
        reused_bytes=MIB,
        recomputed_bytes=MIB // 2,
        stall_seconds=0.0125,
    )
    assert Summary((SummaryRow(4, counted), SummaryRow(5, None))).to_text() == (
        "all, MiB:\n"
        "rank  saved kept offloaded reloaded reused recomputed\n"
        "4      8.00 2.00      6.00     5.00   1.00       0.50\n"
        "5         -    -         -        -      -          -\n"
        "total  8.00 2.00      6.00     5.00   1.00       0.50\n"
        "\n"
        "over the step:\n"
        "rank stall, s\n"
        "4       0.013\n"
        "5           -"
    )


def test_rates_are_over_the_seconds_that_somebody_measured_and_else_are_left_out() -> None:
    counted = StepStats(offloaded_bytes=3 * 10**9, reloaded_bytes=10**9)
    measured, unmeasured = SummaryRow(0, counted, 2.0), SummaryRow(1, counted)
    assert (measured.out_bytes_per_second, measured.back_bytes_per_second) == (1.5e9, 0.5e9)
    assert (unmeasured.out_bytes_per_second, unmeasured.back_bytes_per_second) == (None, None)
    lines = Summary((measured, unmeasured)).to_text().splitlines()[-4:]
    assert lines == [
        "over the step:",
        "rank GB/s out GB/s back stall, s",
        "0        1.50      0.50    0.000",
        "1           -         -    0.000",
    ]
    assert "GB/s" not in Summary((unmeasured,)).to_text()


def test_ordinary_figures_fit_80_columns() -> None:
    large = StepStats(*(123_456 * MIB for _ in range(6)), stall_seconds=12.345)
    rows = tuple(SummaryRow(rank, large, 1.0) for rank in range(1000, 1004))
    lines = Summary(rows).to_text().splitlines()
    assert len(lines) == 14 and max(map(len, lines)) <= 80


def test_more_groups_than_a_line_holds_go_on_below_with_the_ranks_again() -> None:
    groups = {f"layers.{number}.self_attention": number for number in range(9)}
    lines = first_table(Summary((SummaryRow(0, stats(**groups)), SummaryRow(1, None))))
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("rank") for line in lines) == 4
    assert sum("layers.8.self_attention" in line for line in lines) == 1
    assert any(line.startswith("total") and line.endswith(f"{sum(range(9))}.00") for line in lines)


def test_a_name_that_is_wider_than_the_table_is_cut() -> None:
    table = first_table(Summary((SummaryRow(0, stats(**{"x" * 200: 1})),)), width=30)
    assert max(map(len, table)) <= 30 and "xxx..." in table[1]


@pytest.mark.parametrize("width", [19, 80.0, None, True])
def test_a_width_that_cannot_be_meant(width: Any) -> None:
    with pytest.raises(spillway.UsageError, match=r"width: got .*, expected an integer of at least 20"):
        Summary(()).to_text(width)


def test_one_process_without_a_process_group_has_one_row() -> None:
    summary = spillway.summary(stats(mlp=1), seconds=0.5)
    assert summary.rows == (SummaryRow(0, stats(mlp=1), 0.5),)
    assert spillway.summary(None).rows == (SummaryRow(0, None),)


def test_the_first_rank_prints_and_the_others_do_not() -> None:
    rows = (SummaryRow(2, stats(mlp=1)), SummaryRow(3, None))
    first, second = io.StringIO(), io.StringIO()
    Summary(rows, 2).print(first)
    Summary(rows, 3).print(second)
    assert first.getvalue() == f"{Summary(rows)}\n" and second.getvalue() == ""
    assert Summary(rows, 2) == Summary(rows, 3)


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_seconds_that_nobody_can_have_measured(seconds: Any) -> None:
    with pytest.raises(spillway.UsageError, match="seconds: got"):
        spillway.summary(None, seconds=seconds)


def test_something_else_than_stats() -> None:
    context: Any = spillway.offload()
    with pytest.raises(spillway.UsageError, match=r"stats: got .*, expected a spillway.StepStats"):
        spillway.summary(context)


def test_a_real_step_in_groups() -> None:
    with spillway.Session(window=0) as session:
        context = spillway.offload(session=session, groups=spillway.Groups(), min_bytes=0, tier="host")
        x = torch.randn(256, 1024, requires_grad=True)
        with context:
            with spillway.group("exp"):
                hidden = x.exp()
            with spillway.group("sin"):
                loss = (hidden * 2).sin().sum()
        loss.backward()
        del hidden, loss
        summary = spillway.summary(context.stats())
        assert summary.offloaded_bytes == {"exp": MIB, "sin": MIB}
        assert summary.rows[0].ungrouped_bytes == 0


def ranks_case() -> None:
    number = dist.get_rank()
    ours = stats(mlp=1) if number == 0 else stats(attention=2)
    summary = spillway.summary(ours, seconds=1.0 + number)
    assert summary.rows == (SummaryRow(0, stats(mlp=1), 1.0), SummaryRow(1, stats(attention=2), 2.0))
    assert summary.groups == ("attention", "mlp")
    printed = io.StringIO()
    summary.print(printed)
    assert bool(printed.getvalue()) == (number == 0)
    assert spillway.summary(ours if number else None).rows[0].stats is None
    alone = dist.new_group([1])
    if number == 1:
        only = spillway.summary(ours, process_group=alone)
        assert only.rows == (SummaryRow(1, ours),) and only.rank == 1
    else:
        with pytest.raises(spillway.UsageError, match="that rank 0 is not in"):
            spillway.summary(ours, process_group=alone)


@pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed")
@pytest.mark.timeout(120)
def test_every_rank_has_the_value_of_all(world: World) -> None:
    world.run(ranks_case)
