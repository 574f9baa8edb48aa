"""Checks what the demo has written: python .ci/check_demo.py demo.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ALL_BYTES = 4 << 30
"""Most bytes of all ways' processes together."""
LESS_THAN_BASELINE = {"checkpoint": 0.6, "offload": 0.6, "planned": 0.9}
"""Most of the baseline's activations that each way may have."""
FEWEST_COUNTED = 5
"""Steps that the time of a plan is the median of, at least."""


def faults(report: dict[str, Any]) -> list[str]:
    """What is wrong, a sentence each."""
    rows = {row["way"]: row for row in report["rows"]}
    if rows.keys() != {"baseline", *LESS_THAN_BASELINE}:
        return [f"the ways are {', '.join(rows)}"]
    found = [f"{way} is not bit for bit the baseline" for way, row in rows.items() if row["identical"] is not True]
    baseline = rows["baseline"]["activation_peak_bytes"]
    for way, share in LESS_THAN_BASELINE.items():
        bytes_of_way = rows[way]["activation_peak_bytes"]
        if bytes_of_way > share * baseline:
            ratio = bytes_of_way / baseline
            found.append(f"{way} takes {ratio:.0%} of the baseline's activation bytes, more than {share:.0%}")
    planned = rows["planned"]
    if planned["peak_bytes"] > planned["budget_bytes"]:
        found.append(f"planned takes {planned['peak_bytes']:,} bytes, more than its budget {planned['budget_bytes']:,}")
    if planned["counted_steps"] < FEWEST_COUNTED:
        found.append(f"planned is timed over {planned['counted_steps']} steps with its plan")
    if (everything := sum(row["peak_bytes"] for row in rows.values())) > ALL_BYTES:
        found.append(f"all ways together take {everything:,} bytes")
    return found


if __name__ == "__main__":
    told = faults(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    if told:
        sys.exit("the demo: " + "; ".join(told))
