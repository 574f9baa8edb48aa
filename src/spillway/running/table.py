"""What came of a script, for people: at most 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from spillway.errors import printable
from spillway.running.outcome import RootOutcome, RunOutcome
from spillway.units import format_bytes, format_seconds

WIDEST = 80
"""Columns, as every terminal has them."""
NOTHING_CALLED = (
    "No module was called as model(...) in training with gradients on, in this process. Spillway does not see child "
    "processes: start each of them with spillway run, as torchrun does."
)
"""Why nothing was attached, where there is no other reason."""
_HEADINGS = ("", "peak", "step", "stall", "kept", "sent", "recomputed")
_COLUMN = 11


def table(outcome: RunOutcome) -> str:
    """All of it, as lines of text."""
    return "\n".join(_lines(outcome))


def _lines(outcome: RunOutcome) -> Iterator[str]:
    attached = f"{len(outcome.roots)} model{'' if len(outcome.roots) == 1 else 's'} attached"
    ranks = f" (rank {outcome.rank})" if outcome.rank else ""
    yield f"spillway{ranks}: {attached}, {outcome.steps} optimizer step{'' if outcome.steps == 1 else 's'}"
    for root in outcome.roots:
        yield ""
        yield from _of_root(root, outcome.seconds)
    for each in outcome.not_attached:
        yield ""
        yield from wrapped(f"{_counted(each.kind, each.count)} not attached: {each.reason}", "  ")
    if not outcome.roots and not outcome.not_attached:
        yield ""
        yield from wrapped(NOTHING_CALLED)


def _of_root(root: RootOutcome, seconds: float | None) -> Iterator[str]:
    budget = "" if root.budget is None else f" of {format_bytes(root.budget)}"
    stage = "" if root.stage is None else f", {root.stage}"
    yield from wrapped(f"{root.kind}: {root.blocks} blocks, {root.way}{budget}{stage}", "  ")
    if root.missing is not None:
        yield from wrapped(f"no plan yet: it takes {root.missing}", "  ")
    yield _row(_HEADINGS)
    stats = root.stats
    if root.predicted_seconds is not None and root.predicted_peak is not None:
        stall = root.predicted_stall_seconds
        yield _row(
            (
                "predicted",
                format_bytes(root.predicted_peak),
                format_seconds(root.predicted_seconds),
                "-" if stall is None else format_seconds(stall),
                *map(_bytes, (root.predicted_kept_bytes, root.predicted_sent_bytes)),
                "-" if root.predicted_rerun_seconds is None else format_seconds(root.predicted_rerun_seconds),
            )
        )
    yield _row(
        (
            "measured",
            format_bytes(root.peak),
            "-" if seconds is None else format_seconds(seconds),
            format_seconds(stats.stall_seconds),
            *map(_bytes, (stats.kept_bytes, stats.offloaded_bytes, stats.recomputed_bytes)),
        )
    )
    for note in root.notes:
        yield from wrapped(f"note: {note}", "  ")


def _counted(kind: str, count: int) -> str:
    return kind if count == 1 else f"{count} x {kind}"


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _row(cells: tuple[str, ...]) -> str:
    first, *others = cells
    return f"  {first:<9}" + "".join(f"{cell:>{_COLUMN}}" for cell in others)


def wrapped(text: str, indent: str = "") -> list[str]:
    """A sentence as lines of at most :data:`WIDEST` columns."""
    return textwrap.wrap(printable(text), WIDEST, subsequent_indent=indent + "  ", initial_indent=indent) or [""]
