"""TRL's GRPO with the subclass of ``docs/howto-parking.md``: the bits of the trainer without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from parking.test_parking_elsewhere import Copying, same, synchronize

trl = pytest.importorskip("trl", reason="TRL is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


class Parking(trl.GRPOTrainer):  # type: ignore[misc]
    """Parks the reference model and the optimizer to generate, and the policy as well to score."""

    session: spillway.Session

    def _generate(self, prompts: Any) -> Any:
        others = [self.ref_model] if self.ref_model is not None else []
        with spillway.parked(*others, optimizer=self.optimizer, reuse=True, session=self.session) as parking:
            parked.append(parking.nbytes)
            return super()._generate(prompts)

    def _calculate_rewards(self, *args: Any) -> Any:
        with spillway.parked(self.model, optimizer=self.optimizer, session=self.session) as parking:
            parked.append(parking.nbytes)
            return super()._calculate_rewards(*args)


parked: list[int] = []


def trained(kind: Any, folder: Path, session: spillway.Session) -> list[torch.Tensor]:
    from datasets import Dataset

    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=3 + len(LETTERS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    words = tokenizer()
    for each in (transformers.LlamaForCausalLM(config), words):
        each.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        # Memory that is mapped from a file cannot be resized.
        parameter.data = parameter.data.clone()
    arguments = trl.GRPOConfig(
        str(folder / "out"),
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
        beta=0.1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a b c", "d e f", "g h i", "k l m"]}),
        processing_class=words,
        reward_funcs=lambda completions, **_: [float(len(each) % 5) for each in completions],
    )
    trainer.session = session
    trainer.train()
    synchronize(session)
    return [each.detach().clone() for each in trainer.model.parameters()]


@pytest.mark.filterwarnings("ignore")
def test_grpo_has_the_bits_of_the_trainer_that_parks_nothing(tmp_path: Path) -> None:
    with spillway.Session(backend=Copying) as session:
        wanted = trained(trl.GRPOTrainer, tmp_path, session)
        parked.clear()
        assert same(trained(Parking, tmp_path, session), wanted)
        weights = sum(each.nbytes for each in wanted)
        # To score: weights, and the two moments of AdamW, once it has stepped.
        assert parked[1] >= weights and min(parked[3::2]) >= 3 * weights
        assert min(parked[2::2]) >= 2 * weights
