"""Losses of transformers' own models, in rows within a budget."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from integrations.llama import BUDGET, HARDWARE, llama, same, sentences, weights
from spillway.checkpointing import losses as room
from spillway.checkpointing.losses import own_losses

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

WORDS = 61


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Something is gained with any number of bytes; gives what torch's own cross entropy was given."""
    monkeypatch.setattr(room, "_LEAST_BYTES", 1)
    seen: list[Tensor] = []
    plain = torch._C._nn.cross_entropy_loss

    def counted(logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(logits)
        return plain(logits, *args, **kwargs)

    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", counted)
    return seen


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=64, use_cache=False)
    return transformers.GPT2LMHeadModel(config)


MODELS = {"llama": lambda: llama(vocab_size=WORDS), "gpt2": gpt2}
GIVEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "items": {"num_items_in_batch": 37},
    "items on the device": {"num_items_in_batch": torch.tensor(37)},
    "shifted": {"shift_labels": torch.arange(120).reshape(2, 60) % WORDS},
}


def one_step(model: nn.Module, **given: Any) -> list[Tensor]:
    words = torch.randint(WORDS, (2, 60), generator=torch.Generator().manual_seed(1))
    labels = words.clone()
    labels[:, :7] = -100
    output = model(input_ids=words, labels=labels, **given)
    output.loss.backward()
    found = [output.loss.detach(), output.logits.detach()]
    found += [each.grad for each in model.parameters() if each.grad is not None]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_models_own(name: str, given: str, dtype: torch.dtype, small: list[Tensor]) -> None:
    expected = one_step(MODELS[name]().to(dtype).train(), **GIVEN[given])
    small.clear()
    model = MODELS[name]().to(dtype).train()
    (loss,) = own_losses(model)
    with loss.in_rows(0):
        found = one_step(model, **GIVEN[given])
    assert loss.is_in_rows
    assert not small
    assert same(found, expected)
    assert vars(model).keys() == vars(MODELS[name]()).keys()


def test_what_has_no_loss_is_not_asked_for_it(caplog: pytest.LogCaptureFixture) -> None:
    inner = llama().model.train()
    words = torch.randint(WORDS, (2, 60), generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings(), spillway.attach(inner, budget=BUDGET, hardware=HARDWARE):
        warnings.simplefilter("error")
        inner(input_ids=words).last_hidden_state.sum().backward()
        copy.deepcopy(inner)
    assert not caplog.records


def test_a_loss_that_is_put_into_the_librarys_list_is_taken_as_it_is(
    small: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.loss.loss_utils import LOSS_MAPPING

    known = LOSS_MAPPING["ForCausalLM"]
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", lambda *args, **kwargs: 2 * known(*args, **kwargs))
    expected = one_step(llama(vocab_size=WORDS).train())
    model = llama(vocab_size=WORDS).train()
    (loss,) = own_losses(model)
    with loss.in_rows(0):
        assert same(one_step(model), expected)
    assert not loss.is_in_rows


def test_a_profile_without_the_hardware_knows_that_it_is_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def profiled(least: int) -> spillway.Profile:
        monkeypatch.setattr(room, "_LEAST_BYTES", least)
        with torch.device("meta"):
            model = llama(vocab_size=32000).to(torch.bfloat16).train()
            words = torch.empty(4, 512, dtype=torch.int64)
        batch = {"input_ids": words, "labels": words}
        return spillway.profile(model, batch, loss=lambda output: output.loss, hardware="h200")

    logits = 4 * 512 * 32000 * 2
    ours, plain = (profiled(least).middle.peak_bytes for least in (1, 1 << 60))
    # Cast logits, logarithms, and the gradients of both are twice as large as logits, each.
    assert ours < 2.8 * logits
    assert plain > 5.5 * logits


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_inside_of_an_adapter(small: list[Tensor]) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapted() -> nn.Module:
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_dropout=0.0)
        made: nn.Module = peft.get_peft_model(llama(vocab_size=WORDS), config).train()
        return made

    torch.manual_seed(3)
    expected = one_step(adapted())
    small.clear()
    torch.manual_seed(3)
    model = adapted()
    (loss,) = own_losses(model)
    assert loss.kind == "LlamaForCausalLM"
    with loss.in_rows(0):
        assert same(one_step(model), expected)
    assert not small


def test_a_trainer_has_it_within_a_budget(tmp_path: Path, small: list[Tensor]) -> None:
    pytest.importorskip("accelerate")
    from spillway.integrations.transformers import SpillwayCallback

    def train(*callbacks: Any) -> tuple[list[float], list[Tensor]]:
        given: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 8, "logging_steps": 1}
        given |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        trainer = transformers.Trainer(
            llama(),
            transformers.TrainingArguments(str(tmp_path), dataloader_pin_memory=False, **given),
            train_dataset=sentences(),
            callbacks=list(callbacks),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights(trainer.model)

    expected = train()
    assert len(small) == 4
    small.clear()
    with spillway.Session() as session:
        # Four steps: those in which is looked for a plan.
        found = train(SpillwayCallback(budget=BUDGET, hardware=HARDWARE, session=session, min_bytes=0))
    assert not small
    assert found[0] == expected[0]
    assert same(found[1], expected[1])
