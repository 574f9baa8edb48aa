"""Adapters on frozen bases, quantised ones too: what is attached gives the bits of training without it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from integrations.llama import BUDGET, HARDWARE, WAYS, llama, pairs, same, sentences
from spillway import Recompute, Session
from spillway.attaching import attached_to
from support import assert_nothing_left

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers, whose model is trained here, is not installed")

# It asks transformers by an old name, and misses what quantize_ does not tell it, merging of adapters.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning"),
]

STEPS = 3

Build = Callable[[], nn.Module]


def adapted(model: nn.Module, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    given = {"task_type": "CAUSAL_LM", "r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}
    return peft.get_peft_model(model, peft.LoraConfig(**given | options))


def with_input_grads(model: nn.Module) -> nn.Module:
    """As trainers that checkpoint have it."""
    model.enable_input_require_grads()  # type: ignore[operator]
    return model


def train(model: nn.Module, steps: int = STEPS) -> list[Tensor]:
    batch = {name: torch.stack([each[name] for each in sentences(4)]) for name in ("input_ids", "labels")}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert 0 < len(trained) < len(list(model.parameters()))
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    torch.manual_seed(2)
    found = []
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in trained)]
        optimizer.step()
        optimizer.zero_grad()
    return found + [parameter.detach().clone() for parameter in trained]


def compare(build: Build, way: dict[str, Any], *, steps: int = STEPS) -> spillway.Attached:
    plain = train(build(), steps)
    planned = "budget" in way
    with Session(window=None if planned else 0) as session:
        model = build()
        attached = spillway.attach(model, session=session, min_bytes=0, **way)
        ours = train(model, steps)
        assert planned or attached.stats().offloaded_bytes > 0, "nothing moved: this proves nothing"
        attached.remove()
        gc.collect()
        assert_nothing_left(session)
    assert same(ours, plain)
    return attached


BUILDS: dict[str, Build] = {
    "all layers": lambda: adapted(llama()),
    "first layer": lambda: adapted(llama(), layers_to_transform=[0]),
    "last layer": lambda: adapted(llama(), layers_to_transform=[2]),
    "middle layer, inputs with gradients": lambda: with_input_grads(adapted(llama(), layers_to_transform=[1])),
}


@pytest.mark.parametrize(("build", "way"), pairs(BUILDS, WAYS, usual=("all layers", "saved_by")))
def test_adapters_have_the_bits_of_plain_training(build: str, way: str) -> None:
    attached = compare(BUILDS[build], WAYS[way])
    if isinstance(WAYS[way].get("policy"), Recompute):
        assert attached.blocks == tuple(f"base_model.model.model.layers.{number}" for number in range(3))


@pytest.mark.parametrize(
    "build", [pytest.param(each, marks=[] if "input" in each else pytest.mark.long) for each in BUILDS]
)
def test_a_budget_for_adapters(build: str) -> None:
    attached = compare(BUILDS[build], {"budget": BUDGET, "hardware": HARDWARE}, steps=6)
    assert attached.stage == "active"


def test_frozen_weights_do_not_move_and_neither_do_adapters() -> None:
    """Twice as many weights, and not a byte more leaves than activations have."""
    moved = []
    for rank in (4, 8):
        with Session(window=0) as session:
            model = adapted(llama(), r=rank, lora_dropout=0.0)
            attached = spillway.attach(model, policy=spillway.policies.Ratio(1), session=session, min_bytes=0)
            train(model)
            moved.append(attached.stats().offloaded_bytes)
            attached.remove()
    tokens, adapters, number = 4 * 16, 3 * 2, 4
    # What A gives is saved for B: it has as many columns as the rank.
    assert moved[1] - moved[0] == tokens * adapters * (8 - 4) * number


# Quantised bases.


def torchao_int8() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama(hidden_size=64)
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    assert type(model.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")
    return adapted(model)


def bitsandbytes_of(bits: int) -> nn.Module:
    library = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    model = llama(hidden_size=64)
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                shape = (child.in_features, child.out_features)
                if bits == 8:
                    linear = library.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False, threshold=6.0)
                else:
                    linear = library.nn.Linear4bit(*shape, bias=False, compute_dtype=torch.float32, quant_type="nf4")
                linear.load_state_dict(child.state_dict())
                setattr(module, name, linear.to("cpu"))
    model.requires_grad_(False)
    assert not model.model.layers[0].mlp.up_proj.weight.is_floating_point()
    return adapted(model)


QUANTISED: dict[str, Build] = {
    "torchao int8": torchao_int8,
    "bitsandbytes int8": lambda: bitsandbytes_of(8),
    "bitsandbytes nf4": lambda: bitsandbytes_of(4),
}


@pytest.mark.parametrize(("base", "way"), pairs(QUANTISED, WAYS, usual=("torchao int8", "saved_by")))
def test_adapters_on_a_quantised_base(base: str, way: str) -> None:
    compare(QUANTISED[base], WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("base", QUANTISED)
def test_a_budget_for_adapters_on_a_quantised_base(base: str) -> None:
    assert compare(QUANTISED[base], {"budget": BUDGET, "hardware": HARDWARE}, steps=6).stage == "active"


def test_a_trainer_with_adapters_saves_what_it_saves_without(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from spillway.integrations.transformers import SpillwayCallback

    saved = []
    for callbacks in ([], [SpillwayCallback(**WAYS["recompute"])]):
        model = adapted(llama())
        options = {"max_steps": STEPS, "report_to": "none", "save_strategy": "no", "use_cpu": True}
        options |= {"disable_tqdm": True, "dataloader_pin_memory": False, "learning_rate": 1e-2}
        trainer = transformers.Trainer(
            model,
            transformers.TrainingArguments(str(tmp_path), **options),
            train_dataset=sentences(),
            callbacks=callbacks,
        )
        trainer.train()
        assert attached_to(model) is None
        folder = tmp_path / str(len(saved))
        trainer.save_model(str(folder))
        saved.append((folder / "adapter_model.safetensors").read_bytes())
    assert callbacks[0].attached.stats().recomputed_bytes > 0
    assert saved[0] == saved[1]
