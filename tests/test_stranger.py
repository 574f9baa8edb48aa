"""A stranger's path: two scripts that know nothing of Spillway, run within budgets, from the command line alone.

What they print, losses among it, is what they print without, but for times; the peak that the plan was checked in is
within the budget.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from running.scripts import Folder, keep_hardware

ROOT = Path(__file__).parents[1]

NANO = """
import argparse

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(1)


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), SelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, width, layers, heads, context):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return functional.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=14)
parser.add_argument("--batch-size", type=int, default=48)
args = parser.parse_args()

torch.manual_seed(1337)
text = torch.randint(96, (20_000,))
model = GPT(vocabulary=96, width=128, layers=4, heads=4, context=128)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(args.steps):
    starts = torch.randint(len(text) - 129, (args.batch_size,))
    rows = torch.stack([text[start : start + 129] for start in starts])
    loss = model(rows[:, :-1], rows[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(f"step {step}: loss {loss.item().hex()}", flush=True)
"""

TRAINER = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

torch.set_num_threads(1)
set_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
)
rows = [{"input_ids": row, "labels": row} for row in torch.randint(96, (512, 128))]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "out", max_steps=14, per_device_train_batch_size=48, logging_steps=1, save_strategy="no", report_to=[],
        disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, logging_nan_inf_filter=False,
    ),
    train_dataset=rows,
)
trainer.train()
for row in trainer.state.log_history[:-1]:
    print(row["step"], row["loss"], row["grad_norm"], flush=True)
print(sum(parameter.double().sum().item() for parameter in model.parameters()).hex())
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def walk(folder: Folder, script: str, python: str, **environment: str) -> None:
    """The path: the script alone, its profile, a plan for half of what it saves, and the script within that."""
    file = folder.write("train.py", script)

    def command(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [python, *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=folder.path,
            env={**folder.environment(HF_HUB_OFFLINE="1"), **environment},
            timeout=600,
        )

    def said(*arguments: object) -> str:
        done = command(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    alone = said(file)
    assert "0x" in alone
    said("-m", "spillway", "profile", "-o", "profile.json", file)
    plan = json.loads(said("-m", "spillway", "plan", "profile.json", "--budget", "60%", "--json"))
    budget = first = plan["budget"] + (24 << 20)
    for _ in range(3):
        done = command("-m", "spillway", "run", "--budget", budget, "-o", "run.json", "--report", "run.html", file)
        if done.returncode == 0:
            break
        # What a CPU's process has beside a step is not the same in two of them: then as the error says, and some more.
        least = re.search(
            r"The smallest .*budget.* is .* \((\d+) bytes\)|[Gg]ive a budget of ([\d.]+) MiB", done.stderr
        )
        assert least is not None, done.stderr
        budget = int(1.1 * (int(least[1]) if least[1] else float(least[2]) * 2**20))
    else:
        raise AssertionError(done.stderr)
    assert timeless(done.stdout) == timeless(alone), "it prints something else within a budget"
    (root,) = json.loads((folder.path / "run.json").read_text())["models"]
    assert root["stage"] == "active"
    assert root["peak"] <= root["budget"] == budget
    done_otherwise = root["predicted_offloaded_bytes"] + root["predicted_recompute_seconds"]
    assert done_otherwise > 0 or budget != first, "all of it fits: this proves nothing"
    assert "<html" in (folder.path / "run.html").read_text()
    if script is not NANO:
        return
    small = command("-m", "spillway", "run", "--budget", "1MiB", file)
    assert small.returncode == 1
    assert "No plan fits" in small.stderr
    assert "Traceback" not in small.stderr


def timeless(text: str) -> list[str]:
    """Its lines, but those that say how long something took."""
    return [line for line in text.splitlines() if "per_second" not in line]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "cache").mkdir()
    return Folder(tmp_path, keep_hardware(tmp_path / "cache"))


@pytest.mark.long
def test_an_unmodified_training_loop(folder: Folder) -> None:
    pytest.importorskip("plotly")
    walk(folder, NANO, sys.executable)


@pytest.mark.long
def test_an_unmodified_script_with_a_trainer(folder: Folder) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    walk(folder, TRAINER, sys.executable)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_from_a_fresh_environment(folder: Folder) -> None:
    """As a stranger installs it, in an environment with nothing else."""
    home = folder.path / "environment"
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = str(home / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, "torch"], check=True)
    subprocess.run([*install, f"{ROOT}[report]", "transformers", "accelerate"], check=True)
    for name, script in (("loop", NANO), ("trainer", TRAINER)):
        (folder.path / name).mkdir()
        walk(Folder(folder.path / name, folder.cache), script, python, PYTHONPATH="")
