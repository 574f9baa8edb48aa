"""Gradient accumulation: why the usual loop is wrong, and an accumulation step that is right.

    python examples/tutorial/gradient_accumulation.py

A small language model over bytes learns from lines of this file: sequences of very different lengths. A batch of 16
lines is trained in 4 micro-batches. ``docs/accumulation.md`` explains it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import spillway

STEPS, ROWS, LENGTH, WIDTH, PADDING = 4, 4, 96, 64, -100
LINES = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line]


class Model(nn.Module):
    """Predicts each byte from the two before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.body = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))

    def forward(self, text: Tensor) -> Tensor:
        x = self.bytes(text)
        out: Tensor = self.body(torch.cat([x, x.roll(1, 1)], -1))
        return out


def batches(device: torch.device) -> list[Tensor]:
    """The lines in order, padded to one length, a few rows each."""
    rows = torch.full((len(LINES) // ROWS * ROWS, LENGTH), PADDING)
    for row, line in zip(rows, LINES, strict=False):
        text = torch.tensor(list(line.encode()))[:LENGTH]
        row[: len(text)] = text
    return list(rows.to(device).split(ROWS))


def loss_sum(model: nn.Module, text: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of all bytes but the padding, and how many bytes that are."""
    logits = model(text[:, :-1].clamp(min=0))
    following = text[:, 1:]
    loss = functional.cross_entropy(logits.flatten(0, 1), following.flatten(), ignore_index=PADDING, reduction="sum")
    return loss, (following != PADDING).sum()


Train = Callable[[nn.Module, torch.optim.Optimizer, list[Tensor]], None]
"""Trains a model for one accumulation step."""


def tutorial(model: nn.Module, optimizer: torch.optim.Optimizer, window: list[Tensor]) -> None:
    """WRONG: a mean of means. A byte of a short micro-batch counts more than one of a long micro-batch."""
    for text in window:
        loss, count = loss_sum(model, text)
        (loss / count / len(window)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, window: list[Tensor]) -> None:
    """Right: sums, divided by the count of the whole step. A count is known with its loss."""
    accumulator = spillway.Accumulator(model, optimizer, steps=len(window))
    for text in accumulator(window):
        loss, count = loss_sum(model, text)
        accumulator.backward(loss, weight=count)


def gradients(train: Train, micro_batches: list[Tensor], device: torch.device) -> list[Tensor]:
    """The gradients that the optimizer gets."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken: list[Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: taken.extend(each.grad.clone() for each in model.parameters() if each.grad is not None)
    )
    train(model, optimizer, micro_batches)
    return taken


def compare(device: torch.device) -> None:
    """Gradients of four micro-batches beside those of the same rows as one batch."""
    window = batches(device)[:STEPS]
    whole = torch.cat([each.flatten() for each in gradients(accumulated, [torch.cat(window)], device)])
    counts = [int((text[:, 1:] != PADDING).sum()) for text in window]
    print(
        f"{STEPS} micro-batches of {', '.join(map(str, counts))} bytes; their gradient beside that of the whole batch:"
    )
    for name, train in (("loss / steps", tutorial), ("spillway.Accumulator", accumulated)):
        ours = torch.cat([each.flatten() for each in gradients(train, window, device)])
        print(f"  {name:24}off by {((ours - whole).norm() / whole.norm()).item():.0e} of its norm")


def check(device: torch.device) -> None:
    """The result of testing your own training step."""
    batch = torch.cat(batches(device)[:STEPS])[[0, 1, 5, 6, 10, 12]]
    model = Model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print("spillway.split_equals_whole, over all 31 splits of 6 rows:")
    for name, train in (("loss / steps", tutorial), ("spillway.Accumulator", accumulated)):
        try:
            spillway.split_equals_whole(
                lambda parts, train=train: train(model, optimizer, parts), batch, model=model, optimizer=optimizer
            )
        except spillway.SplitError as error:
            print(f"  {name:24}{str(error).partition(' that are not')[0]} differ")
        else:
            print(f"  {name:24}passes")


def ones(grad_dtype: torch.dtype | None) -> float:
    """600 gradients of 1, added up for a bfloat16 weight."""
    weight = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.zeros_(weight.weight)
    # A step of length 1: the weight is minus the sum of the gradients.
    optimizer = torch.optim.SGD(weight.parameters(), lr=1.0)
    window = spillway.Accumulator(weight, optimizer, steps=600, normalize="sum", grad_dtype=grad_dtype)
    for x in window([torch.ones(1, 1, dtype=torch.bfloat16)] * 600):
        window.backward(weight(x).sum())
    return -weight.weight.item()


def train(device: torch.device) -> None:
    """All together: a clipped gradient, a schedule, a record of every step."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    window = spillway.Accumulator(model, optimizer, steps=STEPS, max_norm=1.0, scheduler=scheduler)
    print("window    loss    norm    bytes    micro-batches    learning rate")
    for epoch in range(10):
        for text in window(batches(device)):
            with spillway.offload():
                loss, count = loss_sum(model, text)
            window.backward(loss, weight=count)
            if window.stepped and window.last is not None and epoch in (0, 9):
                did = window.last
                print(
                    f"{did.index:6}{did.loss:8.3f}{did.gradient_norm:8.3f}{did.weight:9.0f}{did.micro_batches:17}"
                    f"{did.learning_rates[0]:17.5f}"
                )


def main() -> None:
    """Compare, check, add up, train."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or torch.device("cpu")
    compare(device)
    check(device)
    print(f"600 ones in bfloat16: {ones(None):.0f}; with grad_dtype=torch.float32: {ones(torch.float32):.0f}")
    train(device)


if __name__ == "__main__":
    main()
