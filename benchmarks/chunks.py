"""Counts prefetched and late reloads of a pipeline's chunks. It measures no times.

    python benchmarks/chunks.py

One process plays one stage of twelve linear layers. The in-flight limit is four of the 24 storages that a chunk saves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import spillway
from spillway import Event, EventKind, EventList

WIDTH, STORAGE = 64, 64 * 64 * 4
SCHEDULES = {
    "1F1B, first of four ranks": "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
    "1F1B, last rank": "F0 B0 F1 B1 F2 B2 F3 B3",
    "GPipe": "F0 F1 F2 F3 B0 B1 B2 B3",
    "zero bubble": "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
}


def counts(events: Sequence[Event]) -> tuple[int, int, int]:
    """Storages that were prefetched, reloaded when backward asked, or not offloaded yet."""
    ahead = demand = here = 0
    for before, event in zip([None, *events], events, strict=False):
        if event.kind is EventKind.TAKE:
            asked_first = before is not None and before.kind is EventKind.RETURN and before.entry == event.entry
            demand, ahead = demand + asked_first, ahead + (not asked_first)
        here += event.kind is EventKind.REUSE
    return ahead, demand, here


def step(
    model: nn.Module, order: Sequence[tuple[str, str]], context: Callable[[str], spillway.offload], events: EventList
) -> list[str]:
    """Run one step in this order, and count for each backward."""
    graphs: dict[str, tuple[Tensor, Tensor]] = {}
    weights: dict[str, list[dict[str, object]]] = {}
    lines = []
    for action, number in order:
        if action == "F":
            x = torch.randn(WIDTH, WIDTH, requires_grad=True)
            with context(number):
                graphs[number] = x, model(x)
            continue
        events.events.clear()
        if action == "W":
            stage_backward_weight(model.parameters(), weights.pop(number))
        else:
            x, out = graphs.pop(number)
            gradient = torch.ones_like(out)
            if action == "B":
                out.backward(gradient)
            else:
                _, weights[number] = stage_backward_input([out], [gradient], [x], model.parameters())
            del x, out
        ahead, demand, here = counts(events.events)
        lines.append(f"{action}{number}: {ahead:2} ahead, {demand:2} on demand, {here} still here")
    return lines


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(*(each for _ in range(12) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    for name, order in SCHEDULES.items():
        events = EventList()
        actions = [(action[0], action[1:]) for action in order.split()]
        with spillway.Session(window=4 * STORAGE, recorder=events) as session:

            def context(number: str, session: spillway.Session = session) -> spillway.offload:
                return spillway.offload(ratio=1.0, min_bytes=0, tier="host", tag=number, session=session)

            for _ in range(3):
                lines = step(model, actions, context, events)
        print(f"{name}, third step:", *lines, sep="\n  ")


if __name__ == "__main__":
    main()
