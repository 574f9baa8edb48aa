"""How the demo looks in a terminal: progress while it runs, then a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box, progress
from rich.console import Console, RenderableType
from rich.table import Table

from spillway.demo.records import Message, Outcome, Report, Row, Started, Step
from spillway.demo.ways import WAYS
from spillway.units import format_bytes, format_seconds


class Progress:
    """A bar per way, or a line per step where the output is no terminal. A context manager.

    Args:
        console: where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, progress.TaskID] = {}
        self._steps = 0
        self._bars = progress.Progress(
            progress.TextColumn("{task.description:<11}"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def begin(self, way: str, steps: int) -> None:
        """A way's process is being started."""
        self._steps = steps
        self._tasks[way] = self._bars.add_task(way, total=steps, note="starting")

    def show(self, way: str, message: Message) -> None:
        """Something happened."""
        if isinstance(message, Step):
            note = f"loss {message.loss:.3f}   {format_seconds(message.seconds)} a step"
            self._bars.update(self._tasks[way], completed=message.index + 1, note=note)
            self._line(f"{way:<11} step {message.index + 1}/{self._steps}   {note}")
        elif isinstance(message, Started):
            parameters, text = f"{message.parameters / 1e6:.1f} M parameters", format_bytes(message.text_bytes)
            self._bars.update(self._tasks[way], note=f"{parameters}, {text} of text")
            self._line(f"{way:<11} {parameters}, {text} of text")
        elif isinstance(message, Outcome):
            # A limit of time may have made them fewer than was planned.
            self._bars.update(self._tasks[way], total=len(message.losses))

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False)


def comparison(report: Report) -> Iterator[RenderableType]:
    """The table of the ways, and what its columns mean."""
    settings = report.settings
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "way" else "right", vertical="bottom", no_wrap=True)
    reference = next((row for row in report.rows if row.way == "keep"), None)
    for row in report.rows:
        table.add_row(*_cells(row, reference))
    yield ""
    yield table
    yield ""
    yield (
        f"{report.hardware['device']}, {report.hardware['threads']} threads, torch {report.versions['torch']}; "
        f"{settings['layers']} layers of {settings['width']}, {settings['batch']} x {settings['sequence']} tokens, "
        f"{settings['steps']} steps."
    )
    yield (
        f"peak: {report.rows[0].peak_source}. activations: the peak above what was held just before the first "
        "step; gradients and optimizer state are in it. step: median of all but the first, of planned those with its "
        "plan. moved: bytes that left in one step. identical: every loss, and all gradients of the first and last "
        "step, bit for bit those of keep."
    )
    yield from (row.note for row in report.rows if row.note)
    for row in report.rows:
        if reference is not None and row.identical is None:
            yield f"{row.way} is not compared: {WAYS[row.way].not_compared}."


_HEADINGS = (
    "way",
    "step\ntime",
    "of\nkeep",
    "\ntok/s",
    "\npeak",
    "activa-\ntions",
    "of\nkeep",
    "\nmoved",
    "\nloss",
    "iden-\ntical",
)


def _cells(row: Row, reference: Row | None) -> list[str]:
    return [
        row.way,
        format_seconds(row.step_seconds),
        _share(row.step_seconds, reference.step_seconds if reference else 0),
        _thousands(row.tokens_per_second),
        format_bytes(row.peak_bytes),
        format_bytes(row.activation_peak_bytes),
        _share(row.activation_peak_bytes, reference.activation_peak_bytes if reference else 0),
        format_bytes(row.moved_bytes) if row.moved_bytes else "-",
        f"{row.loss:.4f}",
        {True: "yes", False: "NO", None: "-"}[row.identical],
    ]


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"


def _thousands(number: float) -> str:
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 100_000 else f"{number / 1000:,.0f}k"
