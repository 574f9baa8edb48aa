"""Prints a result of ``step.py`` as the table of the README: ``python benchmarks/_table.py results/FILE.json``."""

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


def lines(result: dict[str, Any]) -> list[str]:
    plain = result["rows"][0]
    table = [
        "| method | step | of keep | of the bound | first step | activation peak | of keep | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        bound = row["bound_seconds"]
        moved = row["stats"].get("offloaded_bytes", 0)
        table.append(
            f"| `{row['method']}` | {row['step_seconds'] * 1e3:.0f} ms "
            f"| {row['step_seconds'] / plain['step_seconds']:.2f} "
            f"| {ratio(row['step_seconds'], bound) if moved else '-'} "
            f"| {row['first_seconds']:.1f} s "
            f"| {row['peak_bytes'] / GIB:.2f} GiB | {row['peak_bytes'] / plain['peak_bytes']:.1%} "
            f"| {compared(row['digest'], plain['digest'])} |"
        )
    return table


if __name__ == "__main__":
    for line in lines(json.loads(Path(sys.argv[1]).read_text())):
        print(line)
