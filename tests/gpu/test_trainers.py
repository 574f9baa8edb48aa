"""The trainers that people have, on an accelerator: with a callback and a budget, the bits are those without it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import spillway
from integrations.llama import llama, same, weights
from spillway.attaching import attached_to as attached_to_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning 2.6 asks torch 2.13 for a class that has a new name.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

STEPS = 20
LAST = 3
"""Steps at the end whose peak is looked at: by then the plan is held."""
PART = 0.6
"""Of what a plain step needs on top of what is there before it, the budget has so much."""
WORDS, LENGTH = 997, 1024


@dataclass
class Trained:
    """What a training gave."""

    losses: list[Any]
    weights: list[Tensor]
    level: int
    """Bytes that were allocated when its last step had ended."""
    peak: int
    """Most in its last steps."""
    logs: list[dict[str, Any]] = field(default_factory=list)
    attached: Any = None

    @property
    def budget(self) -> int:
        """That of the same training with less."""
        return self.level + int(PART * (self.peak - self.level))

    def assert_like(self, plain: Trained) -> None:
        assert self.losses == plain.losses
        assert self.losses
        assert same(self.weights, plain.weights)
        attached = self.attached
        assert attached.stage == "active"
        assert attached.measured.peak_bytes <= plain.budget
        assert self.peak <= plain.budget < plain.peak
        assert not all(block.plain for block in attached.plan.blocks)


class Meter:
    """The level and the peak of the last steps on a device, as somebody says when a step has ended."""

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device, self._steps = device, steps
        self._ended = 0
        self.level = self.peak = 0

    def step_ended(self) -> None:
        self._ended += 1
        if self._ended == self._steps - LAST:
            torch.accelerator.reset_peak_memory_stats(self._device)
        if self._ended == self._steps:
            self.level = torch.accelerator.memory_allocated(self._device)
            self.peak = torch.accelerator.max_memory_allocated(self._device)


def model() -> nn.Module:
    changes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8}
    return llama(**changes, vocab_size=WORDS, max_position_embeddings=LENGTH)


def sentences(count: int) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(1, WORDS, (count, LENGTH), generator=random)
    return [{"input_ids": row, "labels": row} for row in rows]


SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16 with a scaler": {"fp16": True},
    "accumulation": {"bf16": True, "gradient_accumulation_steps": 2},
    "evaluation": {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
}


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_trainer_of_transformers(setting: str, tmp_path: Path, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from spillway.integrations.transformers import SpillwayCallback

    class Measuring(transformers.TrainerCallback):
        def __init__(self, ours: SpillwayCallback | None) -> None:
            self.meter, self.ours, self.attached = Meter(device, STEPS), ours, None

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.meter.step_ended()
            if self.ours is not None:
                self.attached = self.ours.attached

    def train(ours: SpillwayCallback | None = None) -> Trained:
        measuring = Measuring(ours)
        given: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1}
        given |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
        given |= {"use_cpu": device.type == "cpu", **SETTINGS[setting]}
        trainer = transformers.Trainer(
            model(),
            transformers.TrainingArguments(str(tmp_path), **given),
            train_dataset=sentences(32),
            eval_dataset=sentences(4),
            callbacks=[*([] if ours is None else [ours]), measuring],
        )
        trainer.train()
        assert attached_to_model(trainer.model) is None
        history = trainer.state.log_history
        names = ("loss", "grad_norm", "eval_loss")
        # A norm may be none of a step that a scaler skips.
        losses = [repr(entry[name]) for entry in history for name in names if name in entry]
        meter = measuring.meter
        return Trained(losses, weights(trainer.model), meter.level, meter.peak, history, measuring.attached)

    plain = train()
    with spillway.Session() as session:
        ours = train(SpillwayCallback(budget=plain.budget, log=True, session=session))
    ours.assert_like(plain)
    entries = [entry for entry in ours.logs if "loss" in entry]
    assert entries[-1]["spillway/plan/active"] == 1.0


@pytest.mark.usefixtures("deterministic")
def test_a_trainer_of_transformers_with_its_optimizer_on_the_host(tmp_path: Path, device: torch.device) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from spillway.integrations.transformers import SpillwayCallback

    def train(optimizer: Callable[[Any], Any], *callbacks: Any) -> tuple[list[float], list[Tensor]]:
        given: dict[str, Any] = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "bf16": True}
        given |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
        trained = model().to(device)
        trainer = transformers.Trainer(
            trained,
            transformers.TrainingArguments(str(tmp_path), use_cpu=device.type == "cpu", max_grad_norm=0.0, **given),
            train_dataset=sentences(24),
            callbacks=list(callbacks),
            optimizers=(optimizer(trained.parameters()), None),
        )
        trainer.train()
        return [each["loss"] for each in trainer.state.log_history if "loss" in each], weights(trained)

    made: list[spillway.OffloadedOptimizer] = []

    def on_the_host(parameters: Any) -> spillway.OffloadedOptimizer:
        made.append(spillway.OffloadedOptimizer(parameters, torch.optim.SGD, lr=1e-2, momentum=0.9))
        return made[-1]

    plain = train(lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9))
    with spillway.Session() as session:
        policy = spillway.Recompute(offload="inputs")
        ours = train(on_the_host, SpillwayCallback(policy=policy, session=session))
    assert made[0].stats().stepped_on_host > 0
    made[0].close()
    # A processor adds and multiplies in other steps than the device: what is before the first update is the same.
    assert ours[0][0] == plain[0][0]
    assert all(torch.allclose(one, other, rtol=1e-2, atol=1e-4) for one, other in zip(ours[1], plain[1], strict=True))


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(functional.gelu(self.up(self.norm(x))), 0.1, self.training)
        return x + self.down(y)


class Net(nn.Module):
    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 1)
        self.layers = nn.ModuleList(Layer(width) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_a_trainer_of_lightning(precision: str, device: torch.device) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch import Callback, LightningModule

    from integrations.fits import assert_untouched, trainer_of
    from spillway.integrations.lightning import SpillwayCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.seen: list[float] = []

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = self.net(batch).float().square().mean()
            self.seen.append(loss.detach().item())
            return loss

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.seen.append(self.net(batch).float().sum().item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Measuring(Callback):
        def __init__(self, ours: SpillwayCallback | None) -> None:
            self.meter, self.ours, self.attached = Meter(device, STEPS), ours, None

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            self.meter.step_ended()
            if self.ours is not None:
                self.attached = self.ours.attached["net"]

    data = torch.randn(8 * STEPS, 512, 8, generator=torch.Generator().manual_seed(3))

    def train(ours: SpillwayCallback | None = None) -> Trained:
        torch.manual_seed(0)
        module, measuring = Module(), Measuring(ours)
        callbacks = [*([] if ours is None else [ours]), measuring]
        how = {"accelerator": device.type, "max_epochs": 1, "precision": precision, "num_sanity_val_steps": 0}
        trainer = trainer_of(*callbacks, val_check_interval=STEPS // 2, **how)
        trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(data[:8], batch_size=8))
        assert_untouched(module)
        meter = measuring.meter
        return Trained(module.seen, weights(module), meter.level, meter.peak, attached=measuring.attached)

    plain = train()
    with spillway.Session() as session:
        train_ours = train(SpillwayCallback(budget=plain.budget, session=session))
    train_ours.assert_like(plain)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("options", [{}, {"mixed_precision": "bf16"}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_loop_of_accelerate(options: dict[str, Any], device: torch.device) -> None:
    accelerate = pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState, GradientState

    from spillway.integrations.accelerate import attached_to, prepare

    def train(session: spillway.Session | None = None, budget: int = 0) -> Trained:
        # Both are one for the process, and keep what an earlier test said.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = accelerate.Accelerator(cpu=device.type == "cpu", **options)
        trained = model()
        parts = (
            trained,
            torch.optim.AdamW(trained.parameters(), lr=1e-3),
            DataLoader(sentences(4 * STEPS), batch_size=4),
        )
        if session is None:
            network, optimizer, loader = accelerator.prepare(*parts)
        else:
            network, optimizer, loader = prepare(accelerator, *parts, budget=budget, session=session)
        meter, losses = Meter(device, STEPS), []
        for batch in loader:
            with accelerator.accumulate(network):
                with accelerator.autocast() if "mixed_precision" in options else nullcontext():
                    loss = network(**batch).loss
                accelerator.backward(loss)
                losses.append(loss.item())
                if accelerator.sync_gradients:
                    losses.append(float(accelerator.clip_grad_norm_(network.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            del loss
            meter.step_ended()
        attached = None
        if session is not None:
            attached = attached_to(network)
            attached.remove()
        return Trained(losses, weights(accelerator.unwrap_model(network)), meter.level, meter.peak, attached=attached)

    plain = train()
    with spillway.Session() as session:
        ours = train(session, plain.budget)
    ours.assert_like(plain)
