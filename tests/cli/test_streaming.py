"""``spillway run --stream auto``: weights of an unmodified script in CPU memory, as the plan decides."""

from __future__ import annotations

import json
from typing import Any

import pytest

from running.scripts import MODELS, Folder, Server, keep_hardware
from spillway.cli.running.options import NOTHING_TO_STREAM, RunOptions

RUN = ["run", "--budget", "3GiB", "--stream", "auto", "-o", "out.json"]

TRAIN = """
import sys

def train(steps):
    for step in range(steps):
        loss = model(torch.randint(64, (4, 16)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item().hex())
        if "spillway" in sys.modules:
            from spillway.saved_tensors.identity import is_streamed
            print(f"step {step}:", sum(map(is_streamed, model.parameters())), "streamed", file=sys.stderr)

"""
MADE = MODELS + TRAIN + "torch.manual_seed(0)\nmodel = GPT(256, 3)\n"
# As adapters leave a model: 6 weights are frozen, of 1 MiB each.
FROZEN = (
    MADE
    + """
for block in model.blocks:
    block.up.requires_grad_(False)
    block.down.requires_grad_(False)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
"""
)
TRAINED = MADE + "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\n"
SMALL = TRAINED + "for block in model.blocks: block.norm.requires_grad_(False)\n"
OFFLOADED = (
    MADE
    + """
import spillway
optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, OPTIONS)
"""
)
CAST = """
train(2)
model.double().eval()
with torch.no_grad():
    print(model(torch.arange(32).view(2, 16)).item().hex(), model.blocks[0].up.weight.dtype)
model.train()
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
train(7)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("streaming")
    return Folder(path, keep_hardware(path / "cache"))


def run(server: Server, folder: Folder, text: str) -> tuple[dict[str, Any], str]:
    """The result of a script's only model, and stderr in one line. It prints the bits that it prints by itself."""
    script = folder.write("script.py", text)
    plain = server.run(folder.path, "import runpy; runpy.run_path(sys.argv[0])", script.name)
    assert plain.code == 0, plain.err
    done = server.spillway(folder.path, *RUN, script.name)
    assert (done.code, done.out) == (0, plain.out), done.err
    assert "Traceback" not in done.err
    [model] = json.loads((folder.path / "out.json").read_text())["models"]
    return model, " ".join(done.err.split())


def test_frozen_weights_are_streamed_as_the_plan_decides(server: Server, folder: Folder) -> None:
    model, told = run(server, folder, FROZEN + "train(8)")
    # All of them are streamed while steps are profiled.
    assert "step 1: 6 streamed" in told
    assert model["stage"] == "active" and model["notes"] == []
    assert f"GPT: 3 blocks ({model['streamed']} streamed), budget 3GiB, active" in told
    assert f"step 7: {2 * model['streamed']} streamed" in told


def test_a_frozen_encoder_is_streamed_all_the_time(server: Server, folder: Folder) -> None:
    frozen = "for each in (model.embed, model.blocks[0]): each.requires_grad_(False)\n"
    model, told = run(server, folder, MADE + frozen + TRAINED.removeprefix(MADE) + "train(8)")
    assert model["stage"] == "active" and "step 1: 2 streamed" in told and "step 7: 2 streamed" in told


def test_trained_weights_are_streamed_with_an_offloaded_optimizer(server: Server, folder: Folder) -> None:
    model, told = run(server, folder, OFFLOADED.replace("OPTIONS", "step_on='cpu'") + "train(8)")
    assert "step 1: 6 streamed" in told and model["streamed"] is not None and model["notes"] == []


@pytest.mark.parametrize(
    ("made", "why"),
    [(TRAINED, ""), (SMALL, ""), (OFFLOADED.replace("OPTIONS", "fraction=0.5"), "got an optimizer with a fraction")],
)
def test_with_nothing_to_stream_a_note_says_so_and_there_is_a_plan(
    made: str, why: str, server: Server, folder: Folder
) -> None:
    model, told = run(server, folder, made + "train(8)")
    assert model["stage"] == "active" and model["streamed"] is None
    assert model["notes"][-1] == NOTHING_TO_STREAM
    assert len(model["notes"]) == 1 + bool(why) and why in model["notes"][0]
    # As soon as it is known, and in the table.
    assert f"spillway: GPT: {NOTHING_TO_STREAM} step 0:" in told
    assert f"note: {NOTHING_TO_STREAM}" in told


def test_a_model_that_is_cast_meanwhile_stays_cast(server: Server, folder: Folder) -> None:
    model, told = run(server, folder, FROZEN + CAST)
    assert "step 1: 6 streamed" in told and "torch.float64" in (folder.path / "stdout").read_text()
    assert model["stage"] == "active"
    assert "attached again: blocks.0.up.weight is streamed, and was moved or cast" in model["notes"][0]


def test_child_processes_get_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    options = RunOptions(budget="3GiB", stream="auto")
    for name, value in options.to_environment().items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert RunOptions.of_environment() == RunOptions(budget="3GiB", stream="auto", from_environment=True)
