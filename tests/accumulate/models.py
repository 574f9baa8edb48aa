"""Models of blocks, and a training loop that gives all that it has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway

WORDS, WIDTH, LENGTH = 17, 8, 5


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, *, ends_with_dropout: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + functional.scaled_dot_product_attention(query, key, value)
        return x + self.dropout(self.down(functional.gelu(self.up(x))))


class Transformer(nn.Module):
    """Tied embeddings, dropout, and positions that each block reads."""

    def __init__(self, depth: int = 3, way: str = "") -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.way = way

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        positions = functional.dropout(self.positions * 0.5, 0.2)
        for block in self.blocks:
            # Two uses in each block: the order of their sum shows in the bits.
            x = x + positions * x.detach() + positions
            if self.way == "torch":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.way == "reentrant":
                x = checkpoint(block, x, use_reentrant=True)
            elif self.way == "spillway":
                x = spillway.recompute(block, x)
            else:
                x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Translator(nn.Module):
    """The decoder stands before the encoder. Each of its blocks reads the encoder's output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(2))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True) for _ in range(2))
        self.keys = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        memory = self.words(words)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.words(words.flip(-1))
        for keys, layer in zip(self.keys, self.decoder, strict=True):
            x = layer(x + keys(memory) * torch.sigmoid(memory), memory)
        return functional.linear(x, self.words.weight)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.blocks = nn.Sequential(*(Residual(4) for _ in range(3)))
        self.head = nn.Linear(4, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        images = words[:, None, :, None].float() * torch.linspace(0, 1, LENGTH, device=words.device)
        out: Tensor = self.head(self.blocks(self.first(images)).mean((2, 3)))
        return out[:, None].expand(-1, LENGTH, -1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                # Not all micro-batches use each expert.
                out[rows] = expert(x[rows]) * weight[rows, None]
        return x + out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


class Dropped(Transformer):
    """Leaves blocks out at random."""

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            if torch.rand(()) < 0.6:
                x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Untied(Transformer):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(torch.randn(WORDS, WIDTH))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "untied": Untied,
    "torch": lambda: Transformer(way="torch"),
    "spillway": lambda: Transformer(way="spillway"),
    "translator": Translator,
    "images": Images,
    "mixture": Mixture,
    "dropped": Dropped,
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (1 + place % 3, LENGTH), generator=generator) for place in range(count)]


def loss_of(model: nn.Module, words: Tensor) -> tuple[Tensor, int]:
    loss = functional.cross_entropy(model(words).flatten(0, 1), words.flatten(), reduction="sum")
    return loss, words.numel()


def trained(
    model: nn.Module,
    loader: Sequence[Tensor],
    *,
    steps: int = 3,
    make: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    **options: Any,
) -> list[Any]:
    """Everything that training has changed."""
    torch.manual_seed(5)
    optimizer = make(model.parameters())
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.extend(gradients(model)))
    accumulator = spillway.Accumulator(model, optimizer, steps=steps, **options)
    for words in accumulator(loader):
        loss, weight = loss_of(model, words)
        accumulator.backward(loss, weight=weight)
        if accumulator.stepped and accumulator.last is not None:
            last = accumulator.last
            found += [torch.tensor([float(last.loss), float(last.weight)]), torch.get_rng_state()]
            found += [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
            if last.gradient_norm is not None:
                found.append(torch.tensor(float(last.gradient_norm)))
    accumulator.close()
    if isinstance(optimizer, spillway.OffloadedOptimizer):
        optimizer.synchronize()
        optimizer.close()
    found += [each.detach().clone() for each in (*model.parameters(), *model.buffers())]
    return found


def gradients(model: nn.Module) -> list[Any]:
    return [None if each.grad is None else each.grad.clone() for each in model.parameters()]


def assert_equal(ours: list[Any], plain: list[Any]) -> None:
    assert len(ours) == len(plain) > 0
    for one, other in zip(ours, plain, strict=True):
        assert one is other is None or torch.equal(one, other)
