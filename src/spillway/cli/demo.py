"""``spillway demo``: the training of ``training.py`` in several ways, side by side, as ``spillway bench`` does it."""

from __future__ import annotations

import typer

import spillway
from spillway.cli.bench import Steps, Table, Ways, compare
from spillway.cli.plan import hardware_of
from spillway.errors import SpillwayError

_MODULE = "spillway.cli.training"


class DemoError(SpillwayError, RuntimeError):
    """A way failed, or its numbers differ from the baseline's."""


def demo(
    context: typer.Context,
    ways: Ways = "baseline,recompute,offload,budget=60%",
    steps: Steps = 16,
    json: Table = None,
) -> None:
    """Train a small GPT on real text in several ways; compare time, memory, losses and gradients.

    Other options are the training's: --device, --layers, --width, --sequence, --batch and --data.
    """
    spillway._require_torch()
    from spillway.cli.running.script import Script
    from spillway.cli.training import parse

    settings = parse(context.args)
    if "budget=" in ways:
        # Before processes start that would disturb it.
        hardware_of(None, settings.device)
    results = compare(Script(_MODULE, context.args, is_module=True), ways, steps, json)
    outputs = {result.output for result in results.values() if not result.error}
    if failed := [way for way, result in results.items() if result.error]:
        raise DemoError(f"{', '.join(failed)}: no step was measured. The table says why")
    if len(outputs) > 1:
        raise DemoError("losses or gradients are not bit for bit the same in all ways. This is a bug; report it")
