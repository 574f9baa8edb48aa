"""The examples of one process, small: each compares itself with a plain run, and says what is true of what it saved."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from allocations import count_exactly
from running.scripts import keep_hardware
from steps import MiB

ROOT = Path(__file__).parent.parent
NAMES = [
    "full_finetune_8b",
    "gan",
    "llama_transformers",
    "long_sequence",
    "lora",
    "lora_70b",
    "mixture_of_experts",
    "vit",
]
ELSEWHERE = {
    "fsdp": "integrations/test_examples.py",
    "fsdp_halves": "integrations/test_examples.py",
    "host_optimizer_many": "integrations/test_examples.py",
    "pipelining": "integrations/test_schedules.py",
    "resnet50": "test_resnet.py",
    "tensor_parallel": "integrations/test_examples.py",
}
_LLAMA = ("transformers", "accelerate", "safetensors")
NEEDS = {"full_finetune_8b": _LLAMA, "llama_transformers": ("transformers",), "lora_70b": _LLAMA}

pytestmark = pytest.mark.timeout(240)


def example(name: str) -> ModuleType:
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where there is an accelerator; and what is measured of the machine stays here."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    monkeypatch.setenv("SPILLWAY_CACHE", str(tmp_path / "cache"))


def run(name: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that it prints."""
    module = example(name)
    capsys.readouterr()
    module.main(arguments)
    return capsys.readouterr().out.splitlines()


def test_each_example_is_run_by_a_test_and_stands_on_its_page() -> None:
    files = {file.stem for file in (ROOT / "examples").glob("*.py")}
    assert files == {*NAMES, *ELSEWHERE}
    for name, test in ELSEWHERE.items():
        assert name in (ROOT / "tests" / test).read_text(encoding="utf-8")
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    told = re.findall(r"examples/([a-z0-9_/]+)\.py", page)
    tutorial = {f"tutorial/{file.stem}" for file in (ROOT / "examples" / "tutorial").glob("*.py")}
    assert set(told) == files | tutorial


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 150


def test_a_vision_transformer_sends_inputs_and_attention_away(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("vit", capsys, "--images", "4", "--width", "64", "--depth", "3", "--window", "64KiB")
    found = re.fullmatch(
        r"3 blocks: in the last step ([\d.]+) MiB were offloaded and ([\d.]+) MiB recomputed; "
        r"losses and weights are equal, bit for bit",
        lines[0],
    )
    assert found is not None and len(lines) == 1, lines
    # 4 x 64 patches of 64 floats are 64 KiB: an input, four of attention, of three blocks, without what is held back.
    assert 0.5 <= float(found[1]) <= 3 * 5 / 16
    assert float(found[2]) > float(found[1])


def test_a_llama_of_transformers_has_its_layers_found(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("llama_transformers", capsys, "--layers", "3", "--width", "64", "--tokens", "256", "--window", "64KiB")
    found = re.fullmatch(
        r"3 layers, model.layers.0 to model.layers.2: in the last step ([\d.]+) MiB were offloaded and ([\d.]+) MiB .*",
        lines[0],
    )
    assert found is not None, lines
    assert float(found[1]) > 0 and float(found[2]) > 1
    assert lines[1:] == ["losses and weights are equal, bit for bit"]


def test_weights_in_cpu_memory_are_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = run("full_finetune_8b", capsys, "--layers", "2", "--tokens", "64", "--steps", "3")
    check_streamed(lines, layers=2)
    assert lines[2:] == ["losses, norms and weights are equal, bit for bit"]
    save_llama(tmp_path)
    lines = run("full_finetune_8b", capsys, "--weights", str(tmp_path), "--tokens", "64", "--steps", "2", "--alone")
    check_streamed(lines, layers=3)


def test_adapters_are_trained_on_weights_in_cpu_memory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_llama(tmp_path)
    lines = run("lora_70b", capsys, "--weights", str(tmp_path), "--on-disk", "--tokens", "64", "--steps", "3")
    check_streamed(lines, layers=3)
    assert lines[2:] == ["losses and adapters are equal, bit for bit"]
    lines = run("lora_70b", capsys, "--layers", "2", "--tokens", "64", "--steps", "1", "--alone")
    check_streamed(lines, layers=2)


def save_llama(folder: Path) -> None:
    """A small model's files, as on Hugging Face."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=3, **sizes)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def check_streamed(lines: list[str], layers: int) -> None:
    """The first run has its blocks' weights in CPU memory, and a second one has not."""
    for line, streamed in zip(lines, (layers, 0), strict=False):
        pattern = rf"{streamed} of {layers} blocks have .* CPU memory: \d+ tokens/s, loss [\d.]+, peaks: .*"
        assert re.fullmatch(pattern, line), line


def test_adapters_save_less_and_with_regions_nearly_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("lora", capsys, "--tokens", "512", "--width", "64", "--window", "128KiB")
    rows = {line[:20].strip(): line[20:].replace("MiB", "").split() for line in lines[1:4]}
    assert list(rows) == ["all, plain", "adapters, plain", "adapters, recompute"]
    trained, saved, left, again = ([float(row[place]) for row in rows.values()] for place in range(4))
    # Two thin matrices on each of two layers, 64 to 192, of four blocks.
    assert trained[1] == trained[2] == 4 * 2 * 8 * (64 + 192) < trained[0]
    assert saved[2] < saved[1] / 4 < saved[0] / 4
    assert left[0] == left[1] == again[0] == again[1] == 0
    assert left[2] > 0 and again[2] > saved[1] / 2
    assert lines[4:] == ["losses and adapters are equal, bit for bit"]


def test_each_token_meets_its_experts_again(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("mixture_of_experts", capsys, "--tokens", "256", "--layers", "2", "--experts", "4")
    for number in range(2):
        counts = re.fullmatch(rf"tokens of each expert of block {number}: \[(.*)\]", lines[number])
        assert counts is not None
        # Two experts for each token of three steps, and no token twice.
        assert sum(map(int, counts[1].split(","))) == 3 * 2 * 256
    found = re.search(r"(\d+) KiB were kept, (\d+) KiB offloaded and (\d+) KiB recomputed", lines[2])
    assert found is not None
    kept, left, again = map(int, found.groups())
    assert kept == 0 < min(left, again)
    assert lines[2].endswith("losses, weights and counts are equal, bit for bit")


def test_two_models_have_a_policy_each(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("gan", capsys, "--rows", "512", "--width", "64", "--window", "128KiB")
    pattern = r"(\w+): in its last pass ([\d.]+) MiB were offloaded and ([\d.]+) MiB recomputed"
    rows = {
        found[1]: (float(found[2]), float(found[3])) for line in lines[:2] if (found := re.fullmatch(pattern, line))
    }
    assert list(rows) == ["generator", "critic"]
    assert rows["generator"][1] > rows["generator"][0] > 0
    assert rows["critic"][0] > 1 and rows["critic"][1] == 0
    assert lines[2:] == ["losses and weights of both are equal, bit for bit"]


def test_a_longer_sequence_fits_where_a_plain_one_did(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # What a process has beside a step is the same each time.
    count_exactly(monkeypatch, lambda: 16 * MiB)
    keep_hardware(tmp_path / "cache")
    sizes = ("--least", "256", "--most", "1024", "--piece", "128", "--words", "64", "--width", "64", "--layers", "2")
    lines = run("long_sequence", capsys, *sizes)
    plain = re.fullmatch(r"a plain step of 512 tokens takes ([\d.]+) MiB, which is the budget", lines[0])
    longest = re.fullmatch(r"the longest sequence, of up to 1024 tokens, has (\d+)", lines[1])
    planned = re.match(r"peak ([\d.]+) MiB of ([\d.]+) MiB, in ", lines[3])
    assert plain is not None and longest is not None and planned is not None, lines
    assert int(longest[1]) > 512
    assert float(planned[1]) <= float(planned[2]) == float(plain[1])
    assert lines[-1] == "stage: active; losses and weights are equal, bit for bit"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_an_example_runs_as_it_is(name: str) -> None:
    for library in NEEDS.get(name, ()):
        pytest.importorskip(library)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "equal, bit for bit" in done.stdout and "DIFFERENT" not in done.stdout
