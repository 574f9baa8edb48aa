"""What steps of a plan take where the host is slower than it was when it was measured, by simulation.

The model is that of ``trainer.py``, transformers' Llama of width 2048 with 16 layers and 8192 tokens, profiled without
the hardware. Seconds of its layers, and what the host takes for them, are those that a run of ``trainer.py`` has
measured within gradient checkpointing's peak; the budget is that run's. Plans are made for hosts that may be late by
several factors (``late`` in ``planning/solve.py``; 1: by none), and simulated with hosts that are.

    python benchmarks/late_hosts.py trainer.json --json late.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import spillway
from spillway.planning import planner
from spillway.planning.profile import HostTimes, Profile

LATE = (1.0, 1.1, 1.2, 1.3)
HOSTS = (0.8, 1.0, 1.1, 1.2, 1.35, 1.5)
WITHIN, KEEP = "callback within it", "keep"


@dataclass
class Row:
    """One plan."""

    late: float
    """By which the host may be late."""
    seconds: dict[str, float]
    """Of a step, for each host: so many times as long as measured."""


def profiled(measured: Mapping[str, Any], hardware: str) -> Profile:
    """A step of the model, at the pace that was measured."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.zeros(1, 8192, dtype=torch.long)
    profile = spillway.profile(model, {"input_ids": ids, "labels": ids}, hardware=hardware, optimizer=torch.optim.AdamW)
    (kind,), (seen,) = profile.kinds, measured["kinds"]
    kind = replace(
        kind,
        forward_seconds=seen["forward_seconds"],
        backward_seconds=seen["backward_seconds"],
        host=HostTimes(**seen["host"]),
    )
    outside = {
        name: replace(
            getattr(profile, name),
            seconds=measured[name]["seconds"],
            host_seconds=measured[name]["host_seconds"],
        )
        for name in ("before", "middle", "after")
    }
    return replace(profile, kinds=(kind,), **outside)


def with_host(profile: Profile, factor: float) -> Profile:
    """The same with a host that takes so many times as long for blocks."""
    (kind,) = profile.kinds
    assert kind.host is not None
    host = HostTimes(**{name: value * factor for name, value in asdict(kind.host).items()})
    return replace(profile, kinds=(replace(kind, host=host),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a result of trainer.py")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args()
    run = json.loads(options.run.read_text())
    hardware = "h200" if "H200" in run["hardware"]["device"] else "h100"
    row = next(row for row in run["rows"] if row["way"] == WITHIN)
    keep = next(row for row in run["rows"] if row["way"] == KEEP)["step_seconds"]
    profile = profiled(row["profile"], hardware)
    print(f"{hardware}, within {row['budget'] / 2**30:.2f} GiB, ms; host of")
    print("planned for " + "".join(f"{host:8}" for host in HOSTS), flush=True)
    rows = []
    for late in LATE:
        planner.LATE = late
        plan = spillway.plan(profile, budget=row["budget"], hardware=hardware)
        seconds = {
            str(host): spillway.simulate(with_host(profile, host), plan, hardware=hardware).seconds for host in HOSTS
        }
        rows.append(Row(late, seconds))
        print(f"{late:11} " + "".join(f"{each * 1e3:8.1f}" for each in seconds.values()), flush=True)
    if options.json:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {"torch": torch.__version__, "spillway": spillway.__version__},
            "simulated": hardware,
            "run": options.run.name,
            "keep_seconds": keep,
            "rows": [asdict(each) for each in rows],
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
