"""Small fits of Lightning, with and without the callback, which must give the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import spillway
from budgets import hardware
from integrations.training import local
from spillway.attaching.call import PLACE
from steps import Block

WIDTH, FEATURES, ROWS, BATCH = 32, 8, 64, 16

WAYS: dict[str, dict[str, Any]] = {
    "regions": {"policy": spillway.Recompute(offload="inputs")},
    "offload": {"policy": spillway.policies.Ratio(1)},
    "budget": {"budget": "1TiB", "hardware": hardware()},
}


class Net(nn.Module):
    """A stem, blocks that repeat, and a head."""

    def __init__(self, features: int = FEATURES, out: int = 1) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(features, WIDTH), nn.Linear(WIDTH, out)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))


class Recorded(LightningModule):
    """Writes down each loss, and each gradient before a step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.fails_at = -1
        self.error: type[BaseException] = ValueError
        self.make()

    def make(self) -> None:
        self.net = Net()

    def predicted(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = functional.dropout(self.predicted(batch), 0.2).square().mean()
        if index == self.fails_at:
            raise self.error("on purpose")
        self.seen.append(loss.detach())
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(self.predicted(batch).sum().detach())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen += [local(each.grad).detach().clone() for each in self.parameters() if each.grad is not None]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Own(Recorded):
    """Its own forward is the model."""

    def make(self) -> None:
        self.stem, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def predicted(self, x: Tensor) -> Tensor:
        return self(x)


class Within(Recorded):
    """The step goes past the outermost module, to one inside of it."""

    def make(self) -> None:
        self.outer = nn.ModuleDict({"inner": Net(out=WIDTH), "head": nn.Linear(WIDTH, 1)})

    def predicted(self, x: Tensor) -> Tensor:
        return self.outer["head"](self.outer["inner"](x))


class Pair(Recorded):
    """Two models in one step."""

    def make(self) -> None:
        self.encoder, self.decoder = Net(out=WIDTH), Net(features=WIDTH)

    def predicted(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Looping(Recorded):
    """The loop over the blocks is in no module's forward."""

    def predicted(self, x: Tensor) -> Tensor:
        return self.net.head(self.net.body(self.net.stem(x)))


class Gan(Recorded):
    """Two models and two optimizers that take turns, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def make(self) -> None:
        self.generator, self.critic = Net(out=FEATURES), Net()

    def training_step(self, batch: Tensor, index: int) -> None:
        makes, judges = self.optimizers()
        noise = torch.randn_like(batch)
        self.toggle_optimizer(judges)
        loss = self.critic(self.generator(noise).detach()).mean() - self.critic(batch).mean()
        judges.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(judges, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        judges.step()
        self.untoggle_optimizer(judges)
        self.seen.append(loss.detach())
        if index % 2:
            self.toggle_optimizer(makes)
            loss = -self.critic(self.generator(noise)).mean()
            makes.zero_grad()
            self.manual_backward(loss)
            makes.step()
            self.untoggle_optimizer(makes)
            self.seen.append(loss.detach())

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.seen.append(self.critic(batch).sum().detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.01) for each in (self.generator, self.critic)]


@dataclass
class Course:
    """What a fit gave."""

    module: Recorded
    trainer: Trainer
    tensors: list[Tensor] = field(default_factory=list)

    def __eq__(self, other: object) -> bool:
        """Bit for bit."""
        assert isinstance(other, Course)
        assert self.tensors
        assert not any(each.isnan().any() for each in self.tensors)
        return len(self.tensors) == len(other.tensors) and all(map(torch.equal, self.tensors, other.tensors))


def loader(rows: int = ROWS) -> DataLoader[Any]:
    return DataLoader(torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(3)), batch_size=BATCH)  # type: ignore[arg-type]


def trainer_of(*callbacks: Callback, **options: Any) -> Trainer:
    """One that is quiet, and writes nothing."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    how = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **quiet, **options}
    return Trainer(callbacks=list(callbacks), **how)


def fit(make: Callable[[], Recorded], *callbacks: Callback, ckpt_path: str | None = None, **options: Any) -> Course:
    """A fit with validation in between; the same weights and data each time."""
    torch.manual_seed(0)
    module = make()
    trainer = trainer_of(*callbacks, **options)
    trainer.fit(module, loader(), loader(BATCH), ckpt_path=ckpt_path)
    weights = [local(each).detach().clone() for each in module.state_dict().values()]
    return Course(module, trainer, [*module.seen, *weights])


def assert_untouched(module: nn.Module) -> None:
    """No call of a module in it is taken over."""
    assert not [name for name, each in module.named_modules() if PLACE in each.__dict__]
