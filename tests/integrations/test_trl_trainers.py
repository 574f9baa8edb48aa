"""TRL's trainers for answers, preferences and rewards: with the callback and in a managed script, bits are the same."""

from __future__ import annotations

import gc
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integrations.llama import BUDGET, TOKENS, WAYS, llama, same, tokenizer, weights
from running.scripts import Folder, Server, keep_hardware
from spillway import Session
from spillway.attaching import attached_to
from spillway.cli.running.models import ScriptObserver
from spillway.cli.running.options import RunOptions
from support import assert_nothing_left

trl = pytest.importorskip("trl", reason="trl is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from spillway.integrations.transformers import SpillwayCallback  # noqa: E402

# TRL asks transformers and torch by names that are old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*DPOTrainer.*:FutureWarning"),
]

STEPS = 7
"""With a budget, the plan is active in the last."""
COLUMNS = {"SFT": ["prompt", "completion"], "DPO": ["prompt", "chosen", "rejected"], "GRPO": ["prompt"]}

TRAINED = [
    pytest.param("SFT", True, id="SFT-lora"),
    pytest.param("DPO", False, id="DPO-full"),
    pytest.param("GRPO", True, id="GRPO-lora"),
    *(
        pytest.param(kind, adapters, marks=pytest.mark.long)
        for kind, adapters in (("SFT", False), ("DPO", True), ("GRPO", False))
    ),
]


def rows(kind: str) -> Any:
    """Sentences of one length, so that no step is larger than the first."""
    random = torch.Generator().manual_seed(0)

    def sentence() -> str:
        return " ".join(f"w{word}" for word in torch.randint(2, TOKENS, (6,), generator=random).tolist())

    return datasets.Dataset.from_list([{name: sentence() for name in COLUMNS[kind]} for _ in range(2 * STEPS)])


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 7) for each in completions]


class Flags(transformers.TrainerCallback):  # type: ignore[misc]
    """Sees at each step's end whether layers checkpoint themselves: TRL switches that off and on within a step."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step_end(self, *_: Any, model: nn.Module, **__: Any) -> None:
        self.seen.append(any(getattr(each, "gradient_checkpointing", False) for each in model.modules()))


def trained(kind: str, folder: Path, *callbacks: Any, adapters: bool, **options: Any) -> Any:
    """A trainer that has trained a model from a folder, as scripts do."""
    if not (folder / "llama").exists():
        llama(eos_token_id=1, bos_token_id=1).save_pretrained(folder / "llama")
    more: dict[str, Any] = {}
    given = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    given |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False}
    given |= {"dataloader_pin_memory": False}
    if kind == "GRPO":
        # With a penalty, a second model or the model without its adapters runs in each step.
        given |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
        # A batch that is larger than any before would be planned for again.
        given["generation_kwargs"] = {"min_new_tokens": 6}
        more["reward_funcs"] = reward
    if adapters:
        more["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules="all-linear")
    torch.manual_seed(0)
    trainer = getattr(trl, f"{kind}Trainer")(
        str(folder / "llama"),
        args=getattr(trl, f"{kind}Config")(str(folder / "out"), **given | options),
        train_dataset=rows(kind),
        processing_class=tokenizer(),
        callbacks=list(callbacks),
        **more,
    )
    trainer.train()
    return trainer


def bits(trainer: Any) -> tuple[list[float | None], list[Tensor]]:
    return [each.get("loss") for each in trainer.state.log_history], weights(trainer.model)


def assert_same(found: Any, plain: Any) -> None:
    (losses, trained), (expected, wanted) = bits(found), bits(plain)
    assert losses == expected
    # The last entry sums up.
    assert len(losses) == STEPS + 1 and len(set(losses)) > STEPS // 2
    assert same(trained, wanted)


@pytest.mark.parametrize(("kind", "adapters"), TRAINED)
def test_a_trainer_gives_the_bits_of_the_same_script_without(kind: str, adapters: bool, tmp_path: Path) -> None:
    flags = Flags()
    plain = trained(kind, tmp_path, flags, adapters=adapters)
    assert flags.seen == [True] * STEPS, "TRL checkpoints by default"

    with Session(window=0) as session:
        flags, callback = Flags(), SpillwayCallback(session=session, min_bytes=0, **WAYS["saved_by"])
        found = trained(kind, tmp_path, callback, flags, adapters=adapters)
        assert flags.seen == [False] * STEPS
        assert callback.attached is not None and callback.attached.passes == STEPS
        assert callback.attached.stats().offloaded_bytes > 0 and callback.attached.stats().recomputed_bytes > 0
        assert attached_to(found.model) is None
        assert_same(found, plain)
        del found
        gc.collect()
        assert_nothing_left(session)

    flags, observer = Flags(), ScriptObserver(RunOptions(budget=BUDGET, hardware="h200").attach)
    try:
        found = trained(kind, tmp_path, flags, adapters=adapters)
        [managed] = observer.models.managed
        assert managed.attached.stage == "active"
        assert flags.seen == [False] * STEPS
    finally:
        observer.end()
        observer.models.close()
    assert_same(found, plain)


SCRIPT = """
import hashlib
import sys
import torch

torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])

import datasets, peft, trl
from integrations.llama import tokenizer

torch.manual_seed(0)
trainer = trl.GRPOTrainer(
    sys.argv[2],
    reward_funcs=lambda completions, **_: [float(sum(map(ord, each)) % 7) for each in completions],
    args=trl.GRPOConfig(
        "out", max_steps=7, per_device_train_batch_size=2, num_generations=2, max_completion_length=6, beta=0.1,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, logging_steps=1,
        learning_rate=1e-2, dataloader_pin_memory=False, generation_kwargs={"min_new_tokens": 6},
    ),
    train_dataset=datasets.Dataset.from_list([{"prompt": f"w{each} w4"} for each in range(5, 19)]),
    processing_class=tokenizer(),
    peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules="all-linear"),
)
trainer.train()
print("losses", *(each["loss"].hex() for each in trainer.state.log_history if "loss" in each))
weights = b"".join(value.numpy().tobytes() for _, value in sorted(trainer.model.state_dict().items()))
print("weights", hashlib.sha256(weights).hexdigest())
"""


def test_an_unmodified_script_runs_within_a_budget_of_the_environment(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(eos_token_id=1, bos_token_id=1).save_pretrained(tmp_path / "llama")
    Folder(tmp_path, keep_hardware(tmp_path / "cache")).write("train.py", SCRIPT)
    arguments = ["train.py", str(Path(__file__).parents[1]), str(tmp_path / "llama")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # Without Spillway in this process, which has imported trl already.
    runpy.run_path("train.py", run_name="__main__")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("losses ", "weights "))]
    # As spillway.pth does when Python starts.
    code = """
import runpy, sys
import spillway.cli.startup
spillway.cli.startup.arm()
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    managed = server.run(tmp_path, code, *arguments, SPILLWAY_BUDGET=BUDGET)
    assert managed.code == 0, managed.err
    assert len(told) == 2 and all(line in managed.out.splitlines() for line in told)
    assert f"PeftModelForCausalLM: 3 blocks, budget {BUDGET}, active" in managed.err
