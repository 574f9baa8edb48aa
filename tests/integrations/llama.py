"""A Llama of random weights that nobody has to download, and sentences for it, for tests of Hugging Face's trainers."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway import Hardware, Recompute

# Before anything of theirs is imported: nothing is to be looked for on any hub.
os.environ["HF_HUB_OFFLINE"] = "1"

TOKENS, LENGTH = 61, 16

BUDGET = "100GiB"
"""More than a process has here, where other tests ran in it before."""

# A link that nobody has to measure.
HARDWARE = Hardware.named("h200")

WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": Recompute(offload="inputs")},
    "saved_by": {"policy": Recompute(offload=["inputs", spillway.saved_by("attention")])},
    "offload": {"policy": spillway.policies.Ratio(1)},
    "groups": {"groups": {"mlp": "*.mlp"}},
}
"""Options of what attaches, without a session."""


def llama(**changes: Any) -> nn.Module:
    """Three layers, with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": TOKENS, "use_cache": False}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**options | {"pad_token_id": 0, "max_position_embeddings": 64} | changes))


def tokenizer() -> Any:
    """A word for each token: ``w2``, ``w3`` and others."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, TOKENS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")


def sentences(count: int = 16, *, uneven: bool = False) -> list[dict[str, Tensor]]:
    """What a data set has. Uneven: of some, half of the labels do not count."""
    random = torch.Generator().manual_seed(0)
    found = []
    for number in range(count):
        ids = torch.randint(1, TOKENS, (LENGTH,), generator=random)
        labels = ids.clone()
        if uneven and number % 3:
            labels[: LENGTH // 2] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def weights(model: nn.Module) -> list[Tensor]:
    """All of a model's."""
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) > 0 and all(map(torch.equal, left, right))


def pairs(*axes: Any, usual: Any) -> list[Any]:
    """Each value of each axis, with all that there is of the others: long, but for those with the usual values."""
    found = []
    for each in itertools.product(*axes):
        odd = sum(value != normal for value, normal in zip(each, usual, strict=True))
        found.append(pytest.param(*each, marks=[pytest.mark.long] if odd > 1 else []))
    return found
