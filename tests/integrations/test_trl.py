"""TRL's SFTTrainer with the callback, against the same trainer without it."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.llama import TOKENS, WAYS, llama, same, tokenizer, weights
from spillway import Session
from spillway.attaching import attached_to
from support import assert_nothing_left

trl = pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from spillway.integrations.transformers import SpillwayCallback  # noqa: E402

# It asks transformers by names that are old.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]


def answers() -> Any:
    random = torch.Generator().manual_seed(0)
    words = [torch.randint(2, TOKENS, (4 + number,), generator=random).tolist() for number in range(12)]
    return datasets.Dataset.from_list(
        [{"prompt": "w2 w3", "completion": " ".join(f"w{word}" for word in each)} for each in words]
    )


def trainer_of(folder: Path, callback: SpillwayCallback | None = None, **options: Any) -> Any:
    given = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    given |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "bf16": False}
    given |= {"dataloader_pin_memory": False, "gradient_checkpointing": False}
    return trl.SFTTrainer(
        llama(),
        args=trl.SFTConfig(str(folder), **given | options),
        train_dataset=answers(),
        processing_class=tokenizer(),
        callbacks=[] if callback is None else [callback],
    )


def compare(folder: Path, way: str, **options: Any) -> None:
    plain = trainer_of(folder, **options)
    plain.train()
    with Session(window=0) as session:
        callback = SpillwayCallback(session=session, min_bytes=0, **WAYS[way])
        ours = trainer_of(folder, callback, **options)
        ours.train()
        assert callback.attached is not None and callback.attached.stats().offloaded_bytes > 0
        assert attached_to(ours.model) is None
        gc.collect()
        assert_nothing_left(session)
    losses = [[entry.get("loss") for entry in trainer.state.log_history] for trainer in (plain, ours)]
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert same(weights(ours.model), weights(plain.model))


def test_supervised_tuning_is_that_of_the_trainer_without(tmp_path: Path) -> None:
    compare(tmp_path, "saved_by", gradient_accumulation_steps=2)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"bf16": True}, {"packing": True, "max_length": 16}, {"loss_type": "dft"}])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_supervised_tuning(tmp_path: Path, way: str, options: dict[str, Any]) -> None:
    compare(tmp_path, way, **options)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_supervised_tuning_of_adapters(tmp_path: Path, way: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    trained = []
    with Session(window=0) as session:
        for callback in (None, SpillwayCallback(session=session, min_bytes=0, **WAYS[way])):
            trainer = trainer_of(tmp_path, callback)
            torch.manual_seed(0)
            model = peft.get_peft_model(trainer.model, peft.LoraConfig(task_type="CAUSAL_LM", r=4))
            again = trl.SFTTrainer(
                model,
                args=trainer.args,
                train_dataset=answers(),
                processing_class=tokenizer(),
                callbacks=[] if callback is None else [callback],
            )
            again.train()
            trained.append(weights(again.model))
    assert callback is not None and callback.attached.stats().offloaded_bytes > 0
    assert same(*trained)


def test_the_checkpointing_that_trl_does_by_default_is_replaced(tmp_path: Path) -> None:
    options = {"gradient_checkpointing": trl.SFTConfig.gradient_checkpointing}
    assert options == {"gradient_checkpointing": True}
    compare(tmp_path, "saved_by", **options)
