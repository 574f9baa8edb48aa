"""Prints results of ``step.py`` as the README has them: ``python benchmarks/_table.py results/FILE.json ...``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

GIB = 2**30


def compared(digest: str, plain: str) -> str:
    return "not compared" if not digest else "yes" if digest == plain else "NO"


def ratio(seconds: float, bound: float) -> str:
    return f"{seconds / bound:.3f}"


def paired(quartiles: list[float]) -> str:
    """The median of steps over plain ones right before them, and its quartiles."""
    return "-" if not quartiles else "{1:.3f} ({0:.3f} to {2:.3f})".format(*quartiles)


def conditions(result: dict[str, Any]) -> str:
    """What was run, where and when."""
    options = result["options"]
    window = "" if options["window"] is None else f", window {options['window']}"
    return (
        f"{options['layers']} layers, {options['seq']} tokens{window}; median of {options['steps']} steps; "
        f"{result['hardware']['device']}, torch {result['versions']['torch'].partition('+')[0]}; {result['date'][:10]}:"
    )


def lines(result: dict[str, Any]) -> list[str]:
    plain = result["rows"][0]
    in_pairs = any(row.get("paired") for row in result["rows"])
    extra = " paired |" if in_pairs else ""
    table = [
        f"| method | step | of keep |{extra} of the bound | first step | activation peak | of keep | identical |",
        "|---|---|---|---|---|---|---|---|" + "---|" * in_pairs,
    ]
    for row in result["rows"]:
        bound = row["bound_seconds"]
        moved = row["stats"].get("offloaded_bytes", 0)
        extra = f"| {paired(row.get('paired', []))} " if in_pairs else ""
        table.append(
            f"| `{row['method']}` | {row['step_seconds'] * 1e3:.0f} ms "
            f"| {row['step_seconds'] / plain['step_seconds']:.2f} {extra}"
            f"| {ratio(row['step_seconds'], bound) if moved else '-'} "
            f"| {row['first_seconds']:.1f} s "
            f"| {row['peak_bytes'] / GIB:.2f} GiB | {row['peak_bytes'] / plain['peak_bytes']:.1%} "
            f"| {compared(row['digest'], plain['digest'])} |"
        )
    return table


if __name__ == "__main__":
    for name in sys.argv[1:]:
        result = json.loads(Path(name).read_text())
        print("\n".join([conditions(result), "", *lines(result), ""]))
