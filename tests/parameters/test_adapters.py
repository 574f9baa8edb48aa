"""Streamed weights of a real model with real adapters: training and generation have the bits of the resident model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spillway
from runtime.scenarios import adversary_session
from spillway import policies

peft = pytest.importorskip("peft", reason="peft is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, eos_token_id=1
    )
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def train(trained: Any) -> list[Tensor]:
    """Losses, what the model writes after each step, and the weights in the end."""
    optimizer = torch.optim.AdamW([each for each in trained.parameters() if each.requires_grad], lr=1e-2)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        tokens = torch.randint(2, 64, (2, 12))
        loss = trained.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
        asked = tokens[:, :4]
        how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        found.append(trained.eval().generate(input_ids=asked, attention_mask=torch.ones_like(asked), **how))
    return [*found, *(each.detach().clone() for each in trained.parameters())]


@pytest.mark.parametrize("policy", [spillway.Recompute(), policies.Keep()], ids=["recomputed", "kept"])
def test_llama_with_adapters(policy: Any) -> None:
    wanted, streamed = train(model()), model()
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    with (
        adversary_session(window=1024) as (_, session),
        spillway.attach(streamed, policy=policy, stream=layer, min_bytes=0, session=session) as attached,
    ):
        got = train(streamed)
        assert len(attached.streamed) == 3
    assert all(map(torch.equal, got, wanted))
