"""Checks what the demo has written: python .ci/check_demo.py demo.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ALL_BYTES = 4 << 30
"""Most bytes of all ways' processes together."""
PLANNED = "budget=60%"
LESS_THAN_BASELINE = {"recompute": 0.6, "offload": 0.6, PLANNED: 0.9}
"""Most of the baseline's activations that each way may have."""
FEWEST_COUNTED = 5
"""Steps that the time of a plan is the median of, at least."""


def faults(report: dict[str, Any]) -> list[str]:
    """What is wrong, a sentence each."""
    rows = {row["way"]: row["answer"] for row in report["rows"]}
    if rows.keys() != {"baseline", *LESS_THAN_BASELINE}:
        return [f"the ways are {', '.join(rows)}"]
    found = [f"{way}: {row['error']}" for way, row in rows.items() if row["error"]]
    if found:
        return found
    baseline = rows["baseline"]
    found = [f"{way} is not bit for bit the baseline" for way in rows if rows[way]["output"] != baseline["output"]]
    for way, share in LESS_THAN_BASELINE.items():
        ratio = rows[way]["activation_bytes"] / baseline["activation_bytes"]
        if ratio > share:
            found.append(f"{way} takes {ratio:.0%} of the baseline's activation bytes, more than {share:.0%}")
    planned = rows[PLANNED]
    budget = planned["outcome"]["models"][0]["budget"]
    if planned["peak_bytes"] > budget:
        found.append(f"{PLANNED} takes {planned['peak_bytes']:,} bytes, more than its budget {budget:,}")
    if len(planned["seconds"]) < FEWEST_COUNTED:
        found.append(f"{PLANNED} is timed over {len(planned['seconds'])} steps with its plan")
    if (everything := sum(row["peak_bytes"] for row in rows.values())) > ALL_BYTES:
        found.append(f"all ways together take {everything:,} bytes")
    return found


if __name__ == "__main__":
    told = faults(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if told:
        sys.exit("the demo: " + "; ".join(told))
