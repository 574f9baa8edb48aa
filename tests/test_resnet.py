"""The example of a ResNet-50, small: bit for bit as without Spillway, in either of its words, and its benchmark."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import spillway
from spillway.compat.haiscale import CPUOffload

ROOT = Path(__file__).parent.parent
SMALL = {"depths": (1, 2, 1, 1), "width": 8, "classes": 10}


@pytest.fixture(scope="module")
def resnet50() -> ModuleType:
    spec = importlib.util.spec_from_file_location("resnet50", ROOT / "examples" / "resnet50.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_has_the_parameters_of_a_resnet_50(resnet50: ModuleType) -> None:
    with torch.device("meta"):
        model = resnet50.ResNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == 53
    assert model(torch.randn(2, 3, 224, 224, device="meta")).shape == (2, 1000)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("words", ["spillway", "haiscale"])
def test_two_steps_of_a_small_one_are_bit_for_bit_the_plain_ones(
    resnet50: ModuleType, ratio: float, words: str, tmp_path: Path
) -> None:
    with spillway.Session(window=0, spill_directory=tmp_path, allow_memory_filesystem=True) as session:
        session.use_as_default()
        contexts: list[spillway.offload] = []

        def around() -> CPUOffload | spillway.offload:
            if words == "haiscale":
                context = CPUOffload(ratio, "stages")
                contexts.append(context.hook)
                return context
            contexts.append(spillway.offload(ratio=ratio, tag="stages", min_bytes=0))
            return contexts[-1]

        results = []
        for more in ((), (around,)):
            torch.manual_seed(0)
            results.append(resnet50.train(resnet50.ResNet(*more, **SMALL), images=4, size=32, steps=2))
        assert len(results[0]) == len(results[1]) > 100
        assert all(map(torch.equal, *results))
        first, second = (context.stats() for context in contexts)
        assert first.offloaded_bytes == first.saved_bytes > 0
        assert ratio - 0.1 < (second.saved_bytes - second.kept_bytes) / second.saved_bytes <= ratio
        assert session.used_bytes == (0, 0)


def test_the_program_says_what_left(resnet50: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--images=4", "--size=32", "--width=8", "--steps=2", "--window=0", "--depths", "1", "1", "1", "1"]
    for words in ([], ["--haiscale"]):
        resnet50.main([*small, *words])
        said = capsys.readouterr().out
        found = re.fullmatch(
            r"of (\d+\.\d) MiB that the stages saved in the last step, (\d+\.\d) MiB were offloaded and (\d+\.\d) MiB "
            r"reloaded; "
            r"losses, weights and statistics are equal, bit for bit\n",
            said,
        )
        assert found is not None, said
        saved, left, back = map(float, found.groups())
        assert 0 < back <= left < saved


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_benchmark_prints_a_table_and_writes_it_down(tmp_path: Path) -> None:
    file = tmp_path / "resnet.json"
    sizes = ["--images=2", "--size=32", "--width=4", "--steps=1", "--warmup=1", "--window=0", "--device=cpu"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "resnet.py"), *sizes, f"--json={file}", "--ratios", "0", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["ratio", "plain", "0", "1"]
    assert all(line.endswith("yes") for line in lines[1:4])
    result = json.loads(file.read_text())
    assert {"date", "versions", "hardware", "options", "rows"} == set(result)
    plain, none, all_of_them = result["rows"]
    assert plain["offloaded_bytes"] == none["offloaded_bytes"] == 0 < all_of_them["offloaded_bytes"]
    assert plain["digest"] == none["digest"] == all_of_them["digest"]
