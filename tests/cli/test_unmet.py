"""Nothing silently does nothing: what was asked for and did not come about is told by the exit code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import spillway
from running.scripts import MODELS, TRAINING, Folder, Server, keep_hardware
from spillway.planner.profile import Profile
from spillway.units import format_bytes

LLAMA = Profile.load(Path(__file__).parents[1] / "planner" / "llama_8b_block.json")
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(7):
    call(torch.randint(64, (2, 16))).backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained")
"""
COMPILED = MODELS + "model = GPT()\ncall = torch.compile(model, backend='eager')\n" + LOOP
BY_HAND = MODELS + "model = GPT()\ncall = model.forward\n" + LOOP
CHECKPOINTS = (
    MODELS
    + (
        "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper\n"
        "model = call = GPT()\nmodel.blocks[0] = checkpoint_wrapper(model.blocks[0])\n"
    )
    + LOOP
)
REPLICATED = MODELS + "model = call = nn.DataParallel(GPT())\n" + LOOP
WITHOUT_BLOCKS = (
    MODELS
    + """
class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(64, 32), nn.GRU(32, 32, 2), nn.Linear(32, 1)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0]).square().mean()

model = call = Tagger()
"""
    + LOOP
)
NEVER_CALLED = MODELS + "model = GPT()\nprint('trained')\n"
TRANSFORMERS = """
import torch, transformers
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, vocab_size=64
)
model = transformers.LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
model.train()
call = lambda ids: model(input_ids=ids, labels=ids).loss
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("unmet")
    folder = Folder(path, keep_hardware(path / "cache"))
    folder.write("train.py", TRAINING)
    return folder


UNMET = [
    pytest.param(COMPILED, "compile", id="compiled"),
    pytest.param(BY_HAND, "call model(...)", id="forward"),
    pytest.param(CHECKPOINTS, "checkpoints already", id="checkpointing"),
    pytest.param(REPLICATED, "DistributedDataParallel", id="DataParallel"),
    pytest.param(WITHOUT_BLOCKS, "blocks=nn.GRU takes each GRU", id="no blocks"),
    pytest.param(NEVER_CALLED, "No module was called as model(...)", id="never called"),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("text", "reason"), UNMET)
def test_a_budget_with_nothing_attached_ends_with_3(text: str, reason: str, folder: Folder, server: Server) -> None:
    script = folder.write("script.py", text)
    done = server.told(folder.path, "run", "--budget", "3GiB", "-o", "out.json", script.name)
    assert done.code == 3, done.err
    assert done.out == "trained\n"
    assert "error: --budget 3GiB was not met, since nothing was attached: the table says why" in done.err
    assert "Traceback" not in done.err
    said = " ".join(done.err[done.err.index("\nspillway: 0 models attached") :].split())
    assert reason in said
    assert json.loads((folder.path / "out.json").read_text())["models"] == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("text", "reason"), [UNMET[1], UNMET[5]])
def test_the_scripts_exit_code_stands_where_the_user_says_so_or_asked_for_nothing(
    text: str, reason: str, folder: Folder, server: Server
) -> None:
    script = folder.write("script.py", text)
    for options in (["--best-effort", "--budget", "3GiB"], []):
        done = server.told(folder.path, "run", *options, script.name)
        assert (done.code, done.out) == (0, "trained\n")
        assert reason in " ".join(done.err.split())
        assert "error:" not in done.err
    failing = folder.write("failing.py", text + "raise SystemExit(5)\n")
    assert server.told(folder.path, "run", "--budget", "3GiB", failing.name).code == 5
    ending = folder.write("ending.py", text + "raise SystemExit(0)\n")
    assert server.told(folder.path, "run", "--budget", "3GiB", ending.name).code == 3
    quiet = server.told(folder.path, "run", "--quiet", "--budget", "3GiB", script.name)
    assert quiet.code == 3
    assert quiet.err.startswith("error: --budget 3GiB was not met, since nothing was attached: ")
    assert reason in quiet.err
    assert quiet.err.count("\n") == 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [["--policy", "offload"], ["--ratio", "0.5"]])
def test_any_other_way_that_was_asked_for_ends_with_3_too(options: list[str], folder: Folder, server: Server) -> None:
    script = folder.write("script.py", NEVER_CALLED)
    done = server.told(folder.path, "run", *options, script.name)
    assert done.code == 3
    assert f"error: {' '.join(options)} was not met" in done.err


@pytest.mark.timeout(120)
def test_checkpointing_of_transformers_is_replaced_and_said(folder: Folder, server: Server) -> None:
    pytest.importorskip("transformers")
    script = folder.write("hugging.py", TRANSFORMERS + LOOP)
    done = server.told(folder.path, "run", "--budget", "3GiB", script.name)
    assert (done.code, done.out) == (0, "trained\n"), done.err
    assert done.err.count("spillway: LlamaForCausalLM: gradient_checkpointing of the model is switched off") == 1
    assert "LlamaForCausalLM: 3 blocks, budget 3GiB, active" in done.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("steps", "left"), [(1, "3 more calls"), (2, "2 more calls"), (3, "1 more call ")])
def test_a_script_that_ends_before_there_is_a_plan_is_told_what_it_takes(
    steps: int, left: str, folder: Folder, server: Server
) -> None:
    done = server.told(folder.path, "run", "--budget", "3GiB", "-o", "short.json", "train.py", steps)
    assert done.code == 3
    assert f"the script ended before there was a plan (GPT takes {left}" in done.err
    assert f"no plan yet: it takes {left}" in " ".join(done.err.split())
    [root] = json.loads((folder.path / "short.json").read_text())["models"]
    assert left in root["missing"] + " "


THREADED = (
    MODELS
    + """
import threading

def train():
    model = call = GPT()
"""
    + LOOP.replace("\n", "\n    ")
    + "\nthreading.Thread(target=train).start()\n"
)


@pytest.mark.timeout(120)
def test_what_threads_train_after_the_script_has_ended_counts(folder: Folder, server: Server) -> None:
    script = folder.write("threaded.py", THREADED)
    done = server.told(folder.path, "run", "--budget", "3GiB", script.name)
    assert (done.code, done.out) == (0, "trained\n"), done.err
    script = folder.write("threaded.py", THREADED.replace("model = call = GPT()", "call = (model := GPT()).forward"))
    done = server.told(folder.path, "run", "--budget", "3GiB", script.name)
    assert (done.code, done.out) == (3, "trained\n"), done.err
    assert done.err.splitlines()[-1].startswith("error: --budget 3GiB was not met, since nothing was attached")


POOLED = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1)\npool.submit(int).result()\n"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("text", "code"), [(TRAINING, 0), (NEVER_CALLED, 3)])
def test_a_pool_of_threads_that_idles_is_not_waited_for(text: str, code: int, folder: Folder, server: Server) -> None:
    script = folder.write("pooled.py", POOLED + text)
    done = server.told(folder.path, "run", "--budget", "3GiB", script.name, 5)
    assert done.code == code, done.err


@pytest.mark.timeout(120)
def test_stacks_of_recurrent_layers_have_a_plan(folder: Folder, server: Server) -> None:
    text = WITHOUT_BLOCKS.replace("nn.GRU(32, 32, 2)", "nn.ModuleList(nn.GRU(32, 32) for _ in range(3))").replace(
        "return self.head(self.rnn(self.embed(tokens))[0])",
        "x = self.embed(tokens)\n        for rnn in self.rnn:\n            x = rnn(x)[0]\n        return self.head(x)",
    )
    script = folder.write("stack.py", text)
    done = server.told(folder.path, "run", "--budget", "3GiB", script.name)
    assert done.code == 0, done.err
    assert "Tagger: 3 blocks, budget 3GiB, active" in done.err


# What is missing is said before training.


def test_a_report_without_plotly_is_refused_before_training(folder: Folder, server: Server) -> None:
    code = "import sys; sys.modules['plotly'] = None; from spillway.cli.app import main; main()"
    for module in ("plotly", "plotly.graph_objects"):
        code = f"import sys; sys.modules[{module!r}] = None; from spillway.cli.app import main; main()"
        words = ["spillway", "run", "--budget", "3GiB", "--report", "page.html", "train.py", "1"]
        done = server.run(folder.path, code, *words)
        assert (done.code, done.out) == (2, "")
        assert "pip install 'spillway[report]'" in done.err
    for options in (["--policy", "keep"], ["--ratio", "0.5"]):
        done = server.told(folder.path, "run", *options, "--report", "page.html", "train.py", "1")
        assert (done.code, done.out) == (2, "")
        assert "got --report without a budget" in done.err


def test_options_after_the_script_are_pointed_out(folder: Folder, server: Server) -> None:
    script = folder.write("args.py", "import sys\nprint(sys.argv[1:])\n")
    words = ["--budget=1GiB", "--lr", "3", "--plan", "x", "--", "--policy"]
    done = server.told(folder.path, "run", script.name, *words)
    assert done.code == 0
    assert done.out == f"{words}\n"
    first = done.err.splitlines()[0]
    assert first == (
        "spillway: --budget and --plan after args.py: the script gets them. Options of spillway run stand before "
        "args.py."
    )
    for quiet in (
        ["--quiet", script.name, "--budget", "1"],
        [script.name, "--lr", "1"],
        ["--best-effort", "--budget", "1GiB", script.name, "--budget", "1"],
    ):
        assert "the script gets" not in server.told(folder.path, "run", *quiet).err
    profiled = server.told(folder.path, "profile", script.name, "--steps", "3")
    assert "spillway: --steps after args.py: the script gets it. Options of spillway profile" in profiled.err


def test_a_plan_of_a_cpus_profile_for_a_gpu_says_whose_times_it_has(folder: Folder, server: Server) -> None:
    replace(LLAMA, device="cpu", calls=LLAMA.calls[:2]).save(folder.path / "cpu.json")
    replace(LLAMA, calls=LLAMA.calls[:2]).save(folder.path / "cuda.json")
    note = "the times of operators are this profile's, which a CPU took; only the bandwidths are those of NVIDIA H100"
    arguments = ["--budget", "50%", "--hardware", "h100"]
    done = server.told(folder.path, "plan", "cpu.json", *arguments, "-o", "cpu-plan.json")
    assert note in " ".join(done.out.split())
    machine = server.told(folder.path, "plan", "cpu.json", *arguments, "--json")
    assert note in machine.err
    assert spillway.Plan.from_json(machine.out).device == "cpu"
    told = server.told(folder.path, "report", "cpu.json", "cpu-plan.json", "--text", "--hardware", "h100")
    assert note in " ".join(told.out.split())
    other = server.told(folder.path, "plan", "cuda.json", *arguments)
    here = server.told(folder.path, "plan", "cpu.json", "--budget", "50%")
    assert other.code == here.code == 0
    assert "which a CPU took" not in other.out + here.out


@pytest.mark.timeout(120)
def test_run_takes_the_words_of_plan(folder: Folder, server: Server) -> None:
    text = TRAINING.replace("torch.randint(64, (4, 64))", "torch.randint(64, (16, 256))")
    script = folder.write("large.py", text)
    options = ["--budget", "60%", "--hardware", "h100", "-o", "words.json"]
    done = server.told(folder.path, "run", *options, script.name, 8)
    assert done.code == 0, done.err
    [root] = json.loads((folder.path / "words.json").read_text())["models"]
    assert root["predicted_peak"] <= root["budget"]
    assert f"GPT: 4 blocks, budget 60% ({format_bytes(root['budget'])}), active" in done.err
    assert root["missing"] is None
    size = server.told(folder.path, "run", "--budget", "3G", "-o", "words.json", "train.py", 7)
    assert size.code == 0, size.err
    [root] = json.loads((folder.path / "words.json").read_text())["models"]
    assert root["budget"] == 3 << 30
