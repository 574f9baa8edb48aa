"""Prints results of the benchmarks as the pages have them: ``python benchmarks/_table.py results/FILE.json ...``."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import spillway
from spillway.runtime.system import cpu_name, device_name

GIB = 2**30

Result = dict[str, Any]
"""The result of a benchmark: ``date``, ``versions``, ``hardware``, ``options`` and ``rows``."""

RENAMED = {
    "masters": "fp32 master weights",
    "nothing sent": "nothing offloaded",
    " sent": " offloaded",
    "gradients away": "gradients offloaded",
    "regions": "halves",
    "keep's peak": "the baseline's peak",
    "on the device": "on the GPU",
    "budget of its peak": "budget: its peak + 1 %",
}
"""Words in the names of ways, and their replacements. Older files have the former."""

BASELINE = "relative to baseline"


def compared(digest: str, plain: str) -> str:
    return "not compared" if not digest else "yes" if digest == plain else "NO"


def ratio(seconds: float, bound: float) -> str:
    return f"{seconds / bound:.3f}"


def paired(quartiles: list[float]) -> str:
    """The median of steps over plain ones right before them, and its quartiles."""
    return "-" if not quartiles else "{1:.3f} ({0:.3f} to {2:.3f})".format(*quartiles)


def ranged(row: dict[str, Any]) -> str:
    """The median step, and the least and the most that one took."""
    middle, low, high = (f"{row[key] * 1e3:.0f}" for key in ("step_seconds", "step_min", "step_max"))
    return f"{middle} ms" if low == high else f"{middle} ms ({low} to {high})"


def runs_of(options: dict[str, Any]) -> str:
    runs = {1: "one run", 2: "mean of two runs"}.get(options["runs"], f"median of {options['runs']} runs")
    return f"{runs} of {options['together']} step{'s' * (options['together'] > 1)}"


def gib(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"


def counted(numel: int) -> str:
    return f"{numel / 1e9:.2f} G" if numel >= 1e9 else f"{numel / 1e6:.0f} M"


def named(way: str) -> str:
    """The name of a way in today's words."""
    for old, new in RENAMED.items():
        way = way.replace(old, new)
    return way


def table(*rows: list[str]) -> list[str]:
    """The first row is the heading."""
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in rows)
    return [head, "|" + "---|" * len(rows[0]), *rest]


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """The device, the processor with the cores that this process may use, the memory in bytes, the system."""
    return {
        "device": device_name(device),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of Spillway, torch and Python."""
    return {"spillway": spillway.__version__, "torch": str(torch.__version__), "python": platform.python_version()}


def where_and_when(result: Result) -> str:
    version = result["versions"]["torch"].partition("+")[0]
    when = f"; {result['date'][:10]}" if "date" in result else ""
    return f"{result['hardware']['device']}, torch {version}{when}:"


# step.py: one method a row.


def of_steps(result: Result) -> list[str]:
    options = result["options"]
    window = "" if options["window"] is None else f", in-flight limit {options['window']}"
    conditions = (
        f"{options['layers']} layers, {options['seq']} tokens{window}; median of {options['steps']} steps; "
        f"{where_and_when(result)}"
    )
    plain = result["rows"][0]
    in_pairs = any(row.get("paired") for row in result["rows"])
    heading = ["method", "step", BASELINE, *(["paired"] if in_pairs else []), "relative to the bound", "first step"]
    rows = []
    for row in result["rows"]:
        moved = row["stats"].get("offloaded_bytes", 0)
        rows.append(
            [
                f"`{row['method']}`",
                f"{row['step_seconds'] * 1e3:.0f} ms",
                f"{row['step_seconds'] / plain['step_seconds']:.2f}",
                *([paired(row.get("paired", []))] if in_pairs else []),
                ratio(row["step_seconds"], row["bound_seconds"]) if moved else "-",
                f"{row['first_seconds']:.1f} s",
                gib(row["peak_bytes"]),
                f"{row['peak_bytes'] / plain['peak_bytes']:.1%}",
                compared(row["digest"], plain["digest"]),
            ]
        )
    return [conditions, "", *table([*heading, "activation peak", BASELINE, "identical"], *rows)]


# parallel.py: one way a row, of a pipeline or of FSDP2.


def of_ranks(result: Result) -> list[str]:
    options, ranks = result["options"], result["options"]["ranks"]
    where = f"median of {options['steps']} steps; {ranks} x {where_and_when(result)}"
    sharded = options.get("sharded_layers", options["layers"])
    size = {
        "pipeline": f"1F1B, {options['layers']} layers a stage, {2 * ranks} micro-batches of {options['seq']} tokens",
        "fsdp": f"FSDP2, {sharded} layers, {options['seq']} tokens a rank",
    }
    made = []
    for part in dict.fromkeys(row["part"] for row in result["rows"]):
        ways = [row for row in result["rows"] if row["part"] == part]
        plain = ways[0]
        rows = [
            [
                named(row["way"]),
                ranged(row),
                ratio(row["step_seconds"], plain["step_seconds"]),
                gib(row["peak_bytes"]),
                f"{row['peak_bytes'] / plain['peak_bytes']:.1%}",
                compared(row["digest"], plain["digest"]),
            ]
            for row in ways
        ]
        heading = ["way", "step", BASELINE, "activation peak of rank 0", BASELINE, "identical"]
        made += [f"{size[part]}; {where}", "", *table(heading, *rows)]
    return made


# optimizer.py: one way a row.


def of_optimizers(result: Result) -> list[str]:
    options, rates = result["options"], result["host_gigabytes_a_second"]
    memory = "CPU memory not measured"
    if rates["stream"]:
        memory = (
            f"CPU memory {rates['stream']:.0f} GB/s, in place {rates['stream_in_place']:.0f}, "
            f"a step of `float32` {rates['step']:.0f}"
        )
    micro = "one micro-batch" if options["micro"] == 1 else f"{options['micro']} micro-batches"
    batch = f"{options['batch']} x " if options.get("batch", 1) > 1 else ""
    conditions = (
        f"{counted(result['rows'][0]['parameters'])} parameters, {options['layers']} layers, {micro} of "
        f"{batch}{options['seq']} tokens; {runs_of(options)}; {memory}; {where_and_when(result)}"
    )
    present = [row for row in result["rows"] if not row["absent"]]
    device = next((row for row in present if named(row["way"]) == "on the GPU"), None)
    rows = [
        [
            named(row["way"]),
            ranged(row),
            f"{row['step_seconds'] / device['step_seconds']:.2f}" if device else "-",
            ratio(row["step_seconds"], row["bound_seconds"]) if row["bound_seconds"] else "-",
            gib(row["peak_bytes"]),
            gib(row["stats"]["host_bytes"]) if row["stats"] else "-",
        ]
        for row in present
    ]
    heading = ["way", "step", "relative to the GPU", "relative to the bound", "GPU peak", "pinned by Spillway"]
    return [conditions, "", *table(heading, *rows)]


# pareto.py: one method or one budget a row.


def of_budgets(result: Result) -> list[str]:
    options = result["options"]
    conditions = (
        f"{options['layers']} layers of {options['shape']}, {options['seq']} tokens; median of {options['runs']} runs "
        f"of {options['together']} steps; {where_and_when(result)}"
    )
    plain = result["rows"][0]["peak_bytes"]
    rows = []
    for row in result["rows"]:
        if row["failed"]:
            continue
        plan = row["plan"]
        rows.append(
            [
                f"plan within {row['asked']}" if plan else f"`{row['way']}`",
                ranged(row),
                f"{row['of_keep']:.3f}" if row["of_keep"] else "-",
                f"{row['of_best']:.3f} of `{row['best']}`" if row["best"] else "-",
                gib(row["peak_bytes"]),
                f"{row['peak_bytes'] / plain:.1%}" if plain else "-",
                gib(row["budget_bytes"]) if plan else "-",
                f"{plan['predicted_seconds'] * 1e3:.0f} ms, {gib(plan['predicted_peak_bytes'])}" if plan else "-",
                f"{plan['solving_seconds']:.1f} s, {plan['steps_until_holding']} steps" if plan else "-",
            ]
        )
    heading = [
        "way",
        "step",
        BASELINE,
        "relative to the best other",
        "activation peak",
        BASELINE,
        "budget",
        "predicted",
    ]
    return [conditions, "", *table([*heading, "found in"], *rows)]


# budgets.py: one budget of one model a row.


def of_pairs(result: Result) -> list[str]:
    """Peaks and errors of the budgets of each model."""
    rows = [["model", "budgets", "within budget", "error of the peak, median", "at most", "error of the step, median"]]
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        its = [row for row in result["rows"] if row["model"] == model]
        peaks, steps = (
            sorted(abs(row[f"predicted_{what}"] - row[what]) / row[what] for row in its) for what in ("peak", "seconds")
        )
        kept = sum(row["peak"] <= row["budget"] for row in its)
        offs = (f"{off:.1%}" for off in (statistics.median(peaks), peaks[-1], statistics.median(steps)))
        rows.append([model, str(len(its)), str(kept), *offs])
    return [where_and_when(result), "", *table(*rows)]


# resnet.py: one ratio a row.


def of_ratios(result: Result) -> list[str]:
    options = result["options"]
    conditions = (
        f"{options['images']} images of {options['size']} x {options['size']}; median of {options['steps']} steps; "
        f"{where_and_when(result)}"
    )
    plain = result["rows"][0]
    rows = [
        [
            row["ratio"],
            ranged(row),
            f"{row['step_seconds'] / plain['step_seconds']:.2f}",
            gib(row["peak_bytes"]),
            f"{row['peak_bytes'] / plain['peak_bytes']:.0%}",
            gib(row["offloaded_bytes"]) if row["offloaded_bytes"] else "-",
            compared(row["digest"], plain["digest"]),
        ]
        for row in result["rows"]
    ]
    return [conditions, "", *table(["ratio", "step", BASELINE, "peak", BASELINE, "offloaded", "identical"], *rows)]


# spillway demo: one way a row.


def of_ways(result: Result) -> list[str]:
    settings = result["settings"]
    conditions = (
        f"{settings['layers']} layers of width {settings['width']}, {settings['batch']} x {settings['sequence']} "
        f"tokens; {settings['steps']} steps; {where_and_when(result)}"
    )
    plain = result["rows"][0]
    rows = [
        [
            named(row["way"]),
            f"{row['step_seconds'] * 1e3:.0f} ms",
            f"{row['step_seconds'] / plain['step_seconds']:.2f}",
            gib(row["activation_peak_bytes"]),
            f"{row['activation_peak_bytes'] / plain['activation_peak_bytes']:.0%}",
            gib(row["moved_bytes"]) if row["moved_bytes"] else "-",
            {True: "yes", False: "NO", None: "not compared"}[row["identical"]],
        ]
        for row in result["rows"]
    ]
    return [
        conditions,
        "",
        *table(["way", "step", BASELINE, "activation peak", BASELINE, "offloaded", "identical"], *rows),
    ]


# trainer.py: one way a row.


def of_trainers(result: Result) -> list[str]:
    options = result["options"]
    conditions = (
        f"{options['layers']} layers of width {options['hidden']}, {options['tokens']} tokens; median of "
        f"{options['timed']} steps; {where_and_when(result)}"
    )
    plain = result["rows"][0]
    rows = [
        [
            named(row["way"]),
            f"{row['step_seconds'] * 1e3:.0f} ms ({row['step_min'] * 1e3:.0f} to {row['step_max'] * 1e3:.0f})",
            f"{row['step_seconds'] / plain['step_seconds']:.3f}",
            gib(row["peak_bytes"]),
            f"{row['peak_bytes'] / plain['peak_bytes']:.1%}",
            gib(row["budget"]) if row["budget"] else "-",
            f"{row['predicted_seconds'] * 1e3:.0f} ms, {gib(row['predicted_peak'])}" if row["budget"] else "-",
            {True: "yes", False: "NO", None: "not compared"}[row["identical"]],
        ]
        for row in result["rows"]
    ]
    heads = ["way", "step", BASELINE, "peak", BASELINE, "budget", "predicted", "identical"]
    return [conditions, "", *table(heads, *rows)]


# libraries.py: one way of one fine-tune a row.


def of_libraries(result: Result) -> list[str]:
    rows = []
    for row in result["rows"]:
        plain = next(each for each in result["rows"] if each["library"] == row["library"])
        rows.append(
            [
                row["library"],
                named(row["way"]),
                ranged(row),
                f"{row['step_seconds'] / plain['step_seconds']:.3f}",
                gib(row["peak_bytes"]),
                gib(row["budget"]) if row["budget"] else "-",
                f"{row['predicted_seconds'] * 1e3:.0f} ms, {gib(row['predicted_peak'])}" if row["budget"] else "-",
                "yes" if row["identical"] else "NO",
            ]
        )
    heads = ["fine-tune", "way", "step", BASELINE, "peak", "budget", "predicted", "identical"]
    return [f"median of {result['options']['steps']} steps; {where_and_when(result)}", "", *table(heads, *rows)]


# losses.py: one way with one vocabulary a row.


def of_losses(result: Result) -> list[str]:
    options = result["options"]
    conditions = (
        f"{options['rows']} rows of logits in bfloat16, computed in float32; median of {options['runs']} runs of 10; "
        f"{where_and_when(result)}"
    )
    plain = {row["classes"]: row["seconds"] for row in reversed(result["rows"])}
    rows = [
        [
            row["loss_of"],
            str(row["classes"]),
            f"{row['seconds'] * 1e3:.2f} ms",
            f"{row['seconds'] / plain[row['classes']]:.2f}",
            gib(row["peak_bytes"]),
            f"{row['peak_bytes'] / row['logits_bytes']:.2f}",
            "yes" if row["identical"] else "NO",
        ]
        for row in result["rows"]
    ]
    heads = ["loss", "classes", "forward and backward", "of torch's own", "peak above the logits", "of the logits"]
    return [conditions, "", *table([*heads, "identical"], *rows)]


# streams.py: one way with one number of tokens a row.


def of_streams(result: Result) -> list[str]:
    options = result["options"]
    conditions = (
        f"LoRA, {options['layers']} layers of {options['shape']}; median of {options['runs']} steps; one copy "
        f"{result['rows'][0]['bandwidth'] / 1e9:.0f} GB/s; {where_and_when(result)}"
    )
    plain: dict[int, Result] = {}
    rows = []
    for row in result["rows"]:
        resident = plain.setdefault(row["tokens"], row)
        rows.append(
            [
                str(row["tokens"]),
                named(row["way"]),
                ranged(row),
                ratio(row["step_seconds"], resident["step_seconds"]),
                ratio(row["step_seconds"], row["bound_seconds"]),
                gib(row["peak_bytes"]),
                f"{row['peak_bytes'] / resident['peak_bytes']:.1%}",
                gib(row["copied_bytes"]) if row["copied_bytes"] else "-",
                "yes" if row["is_same"] else "NO",
            ]
        )
    heads = ["tokens", "way", "step", "relative to resident", "relative to the bound", "peak", "relative to resident"]
    return [conditions, "", *table([*heads, "copied in a step", "identical"], *rows)]


# weights.py: one budget a row.


def of_placed(result: Result) -> list[str]:
    options = result["options"]
    kind = "LoRA" if options["kind"] == "lora" else "full fine-tuning"
    conditions = (
        f"{kind}, {options['layers']} layers of {options['shape']}, {result['rows'][0]['tokens']} tokens; "
        f"{runs_of(options)}; copies {result['copies'] / 1e9:.0f} GB/s; "
        f"{where_and_when(result)}"
    )
    rows = [
        [
            gib(row["budget"]),
            f"{row['resident_blocks']} of {row['blocks']}",
            gib(row["peak_bytes"]),
            f"{row['predicted_peak'] / row['peak_bytes'] - 1:+.1%}",
            ranged(row),
            f"{row['predicted_seconds'] * 1e3:.0f} ms",
            ratio(row["step_seconds"], row["placed_bound"]),
        ]
        for row in result["rows"]
    ]
    heads = ["budget", "blocks with weights on the GPU", "peak", "prediction off", "step", "predicted"]
    return [conditions, "", *table([*heads, "relative to the bound"], *rows)]


# parking.py: one parking a row.


def of_parkings(result: Result) -> list[str]:
    copy, rows = result["copy"], result["rows"]
    conditions = (
        f"{result['options']['layers']} layers of {result['options']['shape']}, and a model of 0.6B with gradients and "
        f"state; medians; one pinned copy {copy['out'] / 1e9:.0f} GB/s out, {copy['back'] / 1e9:.0f} back; "
        f"{where_and_when(result)}"
    )
    cells = []
    for model, way in {(row["model"], row["way"]): None for row in rows}:
        of_way = [row for row in rows if (row["model"], row["way"]) == (model, way)]

        def middle(key: str, of_way: list[dict[str, Any]] = of_way) -> float:
            return float(statistics.median(row[key] for row in of_way))

        cells.append(
            [
                model,
                way,
                gib(middle("parked_bytes")),
                gib(middle("copied_bytes")),
                f"{middle('out_seconds') * 1e3:.0f} ms",
                f"{middle('out_rate'):.2f}",
                f"{middle('back_seconds') * 1e3:.0f} ms",
                f"{middle('back_rate'):.2f}",
                f"{max(row['pinned_bytes'] / row['parked_bytes'] for row in of_way):.3f}",
                f"{min(row['freed_bytes'] / row['parked_bytes'] for row in of_way):.4f}",
            ]
        )
    heads = ["model", "way", "parked", "copied out", "out", "rate out", "back", "rate back", "pinned", "freed"]
    return [conditions, "", *table(heads, *cells)]


# foreseen.py: one length and one limit of CPU memory a row.


def of_foreseen(result: Result) -> list[str]:
    options = result["options"]
    version = result["versions"]["torch"].partition("+")[0]
    conditions = (
        f"{counted(result['rows'][0]['parameters'])} parameters, {options['layers']} layers of {options['shape']}, one "
        f"sequence; simulated for {options['hardware']}, torch {version}; {result['date']}:"
    )
    rows = [[str(row["tokens"]), gib(row["host_bytes"]), gib(row["least_budget"])] for row in result["rows"]]
    return [conditions, "", *table(["tokens", "CPU memory for activations", "smallest budget"], *rows)]


KINDS: dict[str, Callable[[Result], list[str]]] = {
    "activation_peak_bytes": of_ways,
    "method": of_steps,
    "part": of_ranks,
    "asked": of_budgets,
    "stages_peak": of_pairs,
    "losses": of_trainers,
    "library": of_libraries,
    "loss_of": of_losses,
    "ratio": of_ratios,
    "placed_bound": of_placed,
    "parked_bytes": of_parkings,
    "least_budget": of_foreseen,
    "parameters": of_optimizers,
    "copied_bytes": of_streams,
}
"""By what a row has that those of the other benchmarks have not."""


def lines(result: Result) -> list[str]:
    return next(made(result) for key, made in KINDS.items() if key in result["rows"][0])


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print("\n".join([*lines(json.loads(Path(name).read_text())), ""]))
