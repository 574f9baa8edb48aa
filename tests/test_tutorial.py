"""The tutorial's programs run as a user would run them, and the snippets of its pages say what is true."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import spillway
from running.scripts import Server, keep_hardware

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "tutorial"
PAGES = ROOT / "docs"


def python(*arguments: str, cwd: Path | None = None) -> str:
    """The output of a process of its own. One thread: a test shares its cores with others."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


Lines = Callable[[object], list[str]]
"""Runs a program, and returns the lines that it prints."""


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """Runs a program as ``python`` would, in a session of its own, and returns the lines that it prints."""
    with spillway.Session() as session:
        monkeypatch.setattr(spillway.Session, "default", classmethod(lambda cls: session))

        def run(program: object) -> list[str]:
            capsys.readouterr()
            runpy.run_path(str(program), run_name="__main__")
            return capsys.readouterr().out.splitlines()

        yield run


def example(name: str) -> ModuleType:
    """A program of the tutorial as a module."""
    spec = importlib.util.spec_from_file_location(f"tutorial_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def shortened(name: str, setting: str, shorter: str, folder: Path) -> str:
    """A program of the tutorial with another line of settings."""
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert text.count(setting) == 1
    program = folder / f"{name}.py"
    program.write_text(text.replace(setting, shorter), encoding="utf-8")
    return str(program)


@pytest.fixture
def known_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can do is known, and nothing of it is kept in the user's cache."""
    monkeypatch.setenv("SPILLWAY_CACHE", str(keep_hardware(tmp_path / "cache")))


@pytest.mark.parametrize("steps", [10, pytest.param(100, marks=pytest.mark.long)])
def test_the_layer_trains_to_the_same_losses_in_every_way(steps: int, tmp_path: Path, lines_of: Lines) -> None:
    program = shortened("recompute", "\nSTEPS = 100\n", f"\nSTEPS = {steps}\n", tmp_path)
    lines = lines_of(program)
    assert lines[-1] == f"all {steps} losses are equal"
    rows = {line[:32].strip(): line[32:].split() for line in lines[2:-1]}
    assert list(rows) == ["plain", "attention away", "products kept"]
    kept = {name: float(row[0]) for name, row in rows.items()}
    away = {name: float(row[2]) for name, row in rows.items()}
    assert kept["attention away"] < kept["products kept"] < kept["plain"]
    assert away["attention away"] > 0 == away["plain"] == away["products kept"]
    assert len({tuple(row[-2:]) for row in rows.values()}) == 1
    first, last = map(float, rows["plain"][-2:])
    assert last < first - steps / 100


def test_the_toy_is_wrong_and_the_two_forms_beside_it_are_right(tmp_path: Path, lines_of: Lines) -> None:
    sizes = "BLOCKS, WIDTH, ROWS = 8, 256, {}\n"
    lines = lines_of(shortened("offload_simple", sizes.format(2048), sizes.format(1024), tmp_path))
    assert lines[0].endswith("tensor([1., 1., 1.]), through the toy: tensor([2., 2., 2.])")
    rows = {line.split()[0]: line.split(maxsplit=7)[1:] for line in lines[3:]}
    hidden, kept, away = ({name: int(row[place]) for name, row in rows.items()} for place in (0, 2, 4))
    assert hidden == {"plain": 7, "toy": 7, "offload_tensor": 1, "recompute": 1}
    assert kept == {"plain": 72, "toy": 72, "offload_tensor": 64, "recompute": 0}
    assert away == {"plain": 0, "toy": 0, "offload_tensor": 8, "recompute": 8}
    right = "equal to plain, bit for bit"
    verdicts = {name: row[6] for name, row in rows.items()}
    assert verdicts.pop("toy").startswith("WRONG: the first block's are 128 times too large")
    assert verdicts == {"plain": right, "offload_tensor": right, "recompute": right}


def test_the_optimizer_on_the_host_computes_what_the_loop_written_out_does(lines_of: Lines) -> None:
    lines = lines_of(EXAMPLES / "optimizer_offload.py")
    rows = {line[:24].strip(): line[24:].split() for line in lines[2:6]}
    assert list(rows) == ["on the device", "on the host, by hand", "OffloadedOptimizer", "half of it"]
    count = int(lines[0].split()[0])
    on_device = {name: int(row[0]) for name, row in rows.items()}
    # A master and two moments, of four bytes each.
    assert on_device["on the device"] == 12 * count
    assert on_device["on the host, by hand"] == on_device["OffloadedOptimizer"] == 0
    assert 0 < on_device["half of it"] <= 6 * count
    first, last = ([float(row[place]) for row in rows.values()] for place in (1, 2))
    assert len(set(first)) == len(set(last[:3])) == 1
    assert last[0] < first[0] - 1
    assert abs(last[3] - last[0]) < 0.1
    assert lines[6:] == [
        "OffloadedOptimizer and by hand: all 20 losses are equal",
        "saved half-way and loaded: all 20 losses are equal",
    ]


def test_the_optimizer_on_the_host_makes_the_masters_of_the_loop_written_out() -> None:
    example_of = example("optimizer_offload")
    cpu = torch.device("cpu")
    models = [example_of.make_model(cpu) for _ in range(2)]
    written = example_of.WrittenOut(models[0], on_host=True)
    ours = example_of.Offloaded(models[1], fraction=1.0)
    for model, way in zip(models, (written, ours), strict=True):
        example_of.train(model, way, 0, 3)
    for parameter, master in zip(ours.parameters, written.masters, strict=True):
        state, expected = ours.optimizer.state[parameter], written.optimizer.state[master]
        assert torch.equal(state["master"], master)
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_the_toy_doubles_a_gradient_once_for_each_time_that_it_is_passed() -> None:
    toy = example("offload_simple").ToyOffload
    x = torch.randn(4, requires_grad=True)
    (toy.apply(toy.apply(toy.apply(x)))).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [8.0] * 4


def test_the_layer_is_the_same_however_it_is_called() -> None:
    recompute = example("recompute")
    torch.manual_seed(0)
    layer, x = recompute.DecoderLayer(), torch.randn(2, 16, recompute.WIDTH, requires_grad=True)
    state = torch.get_rng_state()
    results = []
    for call in recompute.WAYS.values():
        torch.set_rng_state(state)
        layer.zero_grad()
        x.grad = None
        y = call(layer, x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


def test_a_window_is_the_whole_batch_and_a_mean_of_means_is_not(lines_of: Lines) -> None:
    lines = lines_of(EXAMPLES / "gradient_accumulation.py")
    off = {line[2:26].strip(): float(line[26:].split()[2]) for line in lines[1:3]}
    assert off["loss / steps"] > 0.1 and off["spillway.Accumulator"] < 1e-6
    said = {line[2:26].strip(): line[26:] for line in lines[4:6]}
    assert said["loss / steps"].startswith("gradients of ") and said["spillway.Accumulator"] == "passes"
    assert lines[6] == "600 ones in bfloat16: 256; with grad_dtype=torch.float32: 600"
    rows = [line.split() for line in lines[8:]]
    assert [int(row[0]) for row in rows] == [*range(8), *range(72, 80)]
    assert float(rows[-1][1]) < float(rows[0][1]) - 2
    assert float(rows[0][-1]) > float(rows[-1][-1])


@pytest.mark.parametrize("windows", [2, pytest.param(6, marks=pytest.mark.long)])
def test_all_of_it_together_trains_to_the_same_weights(windows: int, tmp_path: Path, lines_of: Lines) -> None:
    program = shortened(
        "all_together", "WINDOWS, MAX_NORM = 4, 6, 1.0\n", f"WINDOWS, MAX_NORM = 4, {windows}, 1.0\n", tmp_path
    )
    lines = lines_of(program)
    assert [line[:20].strip() for line in lines[:3]] == ["plain", "saved tensors away", "all together"]
    assert len({line[20:] for line in lines[:3]}) == 1
    assert lines[3] == "all losses and weights are equal"


@pytest.mark.long
def test_half_way_to_the_least_is_kept_to_with_the_losses_and_weights_of_plain_training(known_machine: None) -> None:
    lines = python("-W", "error", str(EXAMPLES / "budget.py")).splitlines()
    assert lines[0].startswith("stage 'active', budget ")
    promised = re.match(r"peak ([\d.]+) MiB of ([\d.]+) MiB, in ", lines[1])
    assert promised is not None
    assert 0 < float(promised[1]) <= float(promised[2])
    blocks = [line.split() for line in lines[2:6]]
    assert [line[0] for line in blocks] == ["0:", "1:", "2:", "3:"]
    # There is no memory for all: some is recomputed or offloaded.
    assert any("offloads" in line for line in blocks)
    assert lines[6:] == ["stage: active", "all 6 losses and all weights are equal"]


def test_the_budget_of_the_example_is_between_keeping_all_and_keeping_least(known_machine: None) -> None:
    budget = example("budget")
    profile = spillway.profile(budget.make_model(torch.device("cpu")), torch.randn(2048, budget.WIDTH))
    found = budget.find_budget(profile)
    with pytest.raises(spillway.BudgetError) as refused:
        spillway.plan(profile, budget=budget.NOTHING)
    most = spillway.plan(profile, budget=budget.ANY, allow={"keep"}).predicted_peak
    assert refused.value.least < found == (refused.value.least + most) // 2 < most


CODE = [
    "accumulation",
    "compat/checkpoint",
    "groups",
    "howto-frozen-weights",
    "howto-full-finetune",
    "howto-long-context",
    "howto-parking",
    "howto-plan",
    "howto-stalls",
    "losses",
    "optimizer",
    "planning",
    "policies",
    "recompute",
    "replays",
    "several",
    "start",
    "testing",
    "tutorial",
]
"""Pages whose snippets make a program each."""

RUN_PAGES = """
import pathlib, re, sys, traceback
failed = []
for name in sys.argv[1:]:
    text = pathlib.Path(name).read_text(encoding="utf-8")
    code = "\\n\\n".join(re.findall(r"^```python\\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    try:
        assert code, "no snippet"
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        traceback.print_exc()
        failed.append(name)
sys.exit(f"snippets of {failed} failed" if failed else 0)
"""


def test_the_snippets_of_each_page_run_one_after_the_other(tmp_path: Path, server: Server) -> None:
    pages = [str(PAGES / f"{page}.md") for page in CODE]
    done = server.run(tmp_path, f"import warnings; warnings.simplefilter('error')\n{RUN_PAGES}", "pages", *pages)
    assert done.code == 0, done.err


@pytest.mark.long
def test_the_snippets_on_adapters_run(tmp_path: Path, known_machine: None) -> None:
    for library in ("trl", "peft", "transformers", "datasets"):
        pytest.importorskip(library, reason=f"{library} is not installed")
    python("-c", RUN_PAGES, str(PAGES / "howto-lora.md"), cwd=tmp_path)


def test_the_snippets_of_the_readme_run_each_by_itself(known_machine: None) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for snippet in snippets:
        if "Trainer(" in snippet:
            continue  # the trainers' own pages show it, and are run
        blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(3))
        model = torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1))  # of one row, one number: a loss
        exec(snippet, {"torch": torch, "spillway": spillway, "model": model, "batch": torch.randn(1, 8)})
    assert len(snippets) == 3


def test_the_page_shows_the_programs_as_they_are() -> None:
    page = (PAGES / "tutorial.md").read_text(encoding="utf-8")
    shown = re.search(r"^attention_away = .*$", page, re.MULTILINE)
    assert shown is not None and shown[0] in (EXAMPLES / "recompute.py").read_text(encoding="utf-8")
    toy = (EXAMPLES / "offload_simple.py").read_text(encoding="utf-8")
    for line in ('ctx.on_host = x.detach().to("cpu", copy=True)', "return x.view_as(x)", "return grad + grad"):
        assert line in page and line in toy
