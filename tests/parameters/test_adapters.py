"""Streamed weights of a real model with real adapters: training and generation have the bits of the resident model."""

from __future__ import annotations

from pathlib import Path
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


def bare(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, eos_token_id=1, **sizes, **options))


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, lora)


def model() -> Any:
    return adapted(bare())


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


@pytest.mark.parametrize("tied", [False, True])
def test_llama_that_is_built_on_meta_and_read_from_its_folder(tmp_path: Path, tied: bool) -> None:
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    bare(tie_word_embeddings=tied).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    kind = transformers.AutoModelForCausalLM
    wanted = train(adapted(kind.from_pretrained(tmp_path, dtype=torch.bfloat16)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    with accelerate.init_empty_weights(include_buffers=False):
        empty = kind.from_config(config, dtype=torch.bfloat16)
    assert all(each.is_meta for each in empty.parameters())
    with adversary_session(window=1024) as (_, session):
        spillway.load_weights(empty, tmp_path, device="cpu", session=session)
        streamed = adapted(empty)
        with spillway.attach(streamed, stream="*.layers.*", min_bytes=0, session=session) as attached:
            assert len(attached.streamed) == 3
            assert all(map(torch.equal, train(streamed), wanted))
