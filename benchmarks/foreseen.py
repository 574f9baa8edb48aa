"""The smallest GPU budgets of long sequences, for full fine-tuning with weights and optimizer in CPU memory; simulated.

    python benchmarks/foreseen.py --json foreseen.json

Nothing runs: the model is on ``meta``, and the profile comes from its operators and a table of hardware. The loss is
summed over checkpointed pieces of the sequence. Each row is one length of one sequence, and one limit of CPU memory for
activations. Weights, gradients and the optimizer's state take 16 bytes a parameter beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import spillway
from _llama import SHAPES, Layer, make_stack
from _table import describe_hardware, describe_versions, gib
from longest import Whole


@dataclass
class Row:
    """A sequence, and a limit of CPU memory for activations."""

    tokens: int
    host_bytes: int
    least_budget: int
    parameters: int


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    for tokens in options.tokens:
        stack = make_stack(options.shape, options.layers, tokens, torch.device("meta"), torch.bfloat16)
        with torch.device("meta"):
            model = Whole(stack, SHAPES[options.shape].hidden, options.vocabulary).to(torch.bfloat16)
            batch = torch.empty(1, tokens, dtype=torch.int64)
        known = {"hardware": options.hardware, "stream": "auto"}
        profile = spillway.profile(model, batch, blocks=Layer, optimizer="offloaded", **known)
        for limit in options.host:
            nbytes = spillway.units.parse_bytes(limit)
            try:
                spillway.plan(profile, budget=1, host_budget=nbytes, **known)
            except spillway.BudgetError as error:
                yield Row(tokens, nbytes, error.least, sum(each.numel() for each in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--tokens", nargs="*", type=int, default=[65536, 131072, 262144])
    parser.add_argument("--host", nargs="*", default=["16GiB", "128GiB"], help="CPU memory for activations")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for row in rows_of(options):
        rows.append(row)
        print(
            f"{row.tokens} tokens, {gib(row.host_bytes)} of CPU memory: a budget of {gib(row.least_budget)}", flush=True
        )
    if options.json:
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": describe_versions(),
            "hardware": describe_hardware(torch.device("cpu")),
            "options": {key: value for key, value in vars(options).items() if key != "json"},
            "rows": [asdict(each) for each in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
