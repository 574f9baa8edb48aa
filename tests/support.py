"""What tests share: training steps run plainly and under Spillway, and the proof that nothing is left of them.

A *step* is a function that makes its own inputs, enters ``context()`` around its forward, runs its backward as it
likes, and gives back the tensors that must be equal: losses and gradients.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import spillway
from spillway import EventKind, EventList
from spillway.runtime.backend import Stream
from spillway.runtime.bytes import Bytes, Cells
from spillway.runtime.cpu import CpuBackend
from spillway.saved_tensors.hooks import SavedState

CPU = torch.device("cpu")

FAILED = pytest.StashKey[bool]()
"""Whether a test has failed. Its traceback holds what it made, then, and nothing can be said of what is left."""

HOOKS_OF_SELECTIVE: list[dict[str, bool]] = (
    [{"respect_saved_tensors_hooks": False}, {"respect_saved_tensors_hooks": True}]
    if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    else [{}]
)
"""Options of a selective checkpoint inside of Spillway's contexts. Since torch 2.14, one of these has to be given."""

Context = Callable[..., AbstractContextManager[object]]
Step = Callable[[Context], Iterable[torch.Tensor]]


@dataclass(frozen=True)
class Way:
    """Where bytes go, and how many of them may be under way at once."""

    tier: str
    window: int

    def __str__(self) -> str:
        return f"{self.tier}-window-{self.window}"


# Window 0: each storage is away as soon as the next one leaves, and nothing is fetched ahead. 1 KiB: a few small
# tensors are under way at once, in both directions.
WAYS = [Way("host", 0), Way("host", 1024), Way("disk", 0), Way("disk", 1024)]


class Trial:
    """Runs steps plainly and under ``spillway.offload`` in one session, and compares them bit for bit."""

    def __init__(self, session: spillway.Session, events: EventList, way: Way) -> None:
        self.session = session
        self.events = events
        self.way = way

    def offload(self, **options: object) -> spillway.offload:
        """A context that sends everything away; ``options`` say otherwise."""
        return spillway.offload(**{"session": self.session, "min_bytes": 0, "tier": self.way.tier, **options})  # type: ignore[arg-type]

    def __call__(self, step: Step, *, passes: int = 3, moves: bool = True, **options: object) -> None:
        """Compare ``passes`` steps with a plain one: the first knows no order, the later ones have learned it.

        Args:
            step: see the top of this file.
            passes: how many.
            moves: whether something must have come back, without which a test of moving proves nothing.
            options: for ``offload``.
        """
        expected = run(step, lambda **_: contextlib.nullcontext())
        self.events.events.clear()
        for _ in range(passes):
            got = run(step, lambda **more: self.offload(**{**options, **more}))
            assert_identical(got, expected)
            del got
            assert_nothing_left(self.session)
        if moves:
            assert self.count(EventKind.TAKE) > 0, "nothing was brought back: the test proves nothing"

    def round_trip(self, make: Callable[[], torch.Tensor], **options: object) -> torch.Tensor:
        """What autograd gets back of a tensor that it saved, and that nobody else held meanwhile."""
        leaf = torch.ones(1, requires_grad=True)
        with self.offload(**options):
            out = Saves.apply(leaf, make())
        self.push_out()
        node: Any = out.grad_fn
        (tensor,) = node.saved_tensors
        return tensor  # type: ignore[no-any-return]

    def count(self, kind: EventKind) -> int:
        """How many storages it happened to."""
        return sum(event.kind is kind for event in self.events.events)

    def nbytes(self, kind: EventKind) -> int:
        """To how many bytes it happened."""
        return sum(event.nbytes for event in self.events.events if event.kind is kind)

    def push_out(self, device: torch.device | str = "cpu") -> None:
        """Send away whatever is still on its way out: a storage leaves when the next one wants its place."""
        with self.offload(window=0, tag="push out"):
            pushing = torch.ones(2, device=device, requires_grad=True).exp()
        del pushing


class Saves(torch.autograd.Function):
    """Saves tensors as they are. Its gradient is their weighted sum, so that two of them exchanged would show."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = sum((1 + place) * tensor.float().sum() for place, tensor in enumerate(ctx.saved_tensors))
        return gradient * total, *(None for _ in ctx.saved_tensors)


def run(step: Step, context: Context) -> list[torch.Tensor]:
    """The step from a fixed seed."""
    torch.manual_seed(0)
    return list(step(context))


def assert_identical(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Same bits, dtypes and strides."""
    assert len(got) == len(expected)
    for index, (ours, plain) in enumerate(zip(got, expected, strict=True)):
        assert ours.dtype == plain.dtype, index
        assert ours.device == plain.device, index
        assert ours.layout == plain.layout, index
        if plain.layout is torch.strided and not plain.is_nested:
            assert ours.stride() == plain.stride(), index
        assert torch.equal(ours, plain), f"result {index} differs from plain PyTorch's"


def assert_nothing_left(session: spillway.Session) -> None:
    """No hook, no byte, no entry."""
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch._C._len_torch_function_stack() == 0
    session.synchronize()
    assert session.used_bytes == (0, 0)
    assert len(session.of(SavedState).identity) == 0
    for runtime in session._runtimes.values():
        # Bytes that are counted as under way for ever would close the window for everything that comes later.
        counts = runtime.mover.counts()
        assert counts.pop("compute streams") >= 0
        assert not any(counts.values()), counts


def grads(*leaves: torch.Tensor) -> Iterator[torch.Tensor]:
    """The gradients of leaves that must have one."""
    for leaf in leaves:
        assert leaf.grad is not None
        yield leaf.grad


def mlp(*widths: int) -> torch.nn.Sequential:
    """Linear layers with GELUs between them."""
    layers: list[torch.nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [torch.nn.Linear(wide, narrow), torch.nn.GELU()]
    return torch.nn.Sequential(*layers[:-1])


def training_step(context: Context) -> Iterator[torch.Tensor]:
    model, batch = mlp(32, 128, 128, 128, 8), torch.randn(16, 32, requires_grad=True)
    with context():
        loss = model(batch).square().mean()
    loss.backward()
    yield loss.detach()
    yield from grads(*model.parameters(), batch)


def two_graphs(context: Context) -> Iterator[torch.Tensor]:
    model, batches = mlp(32, 64, 64, 8), torch.randn(2, 16, 32)
    losses = []
    for batch in batches:
        with context():
            losses.append(model(batch).square().mean())
    for loss in losses:
        loss.backward()
        yield from [gradient.clone() for gradient in grads(*model.parameters())]


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise KeyError("on purpose")


class SlowBackend(CpuBackend):
    """Each copy of one lane comes late; allocations are counted. All goes over lanes, as on an accelerator."""

    direct_disk = False

    def __init__(self, late: str, seconds: float = 0.002) -> None:
        super().__init__(CPU)
        self._late = late
        self._seconds = seconds
        self._named: dict[Stream, str] = {}
        self.slabs: list[int] = []
        self.allocating_threads: set[int] = set()

    def serve(self, device: torch.device) -> CpuBackend:
        return self

    def new_stream(self, name: str, *, first: bool = False) -> Stream:
        lane = super().new_stream(name, first=first)
        self._named[lane] = name
        return lane

    def copy(self, lane: Stream, destination: Bytes, source: Bytes) -> None:
        if self._named[lane] == self._late:
            lane.submit(lambda: time.sleep(self._seconds))  # type: ignore[attr-defined]
        super().copy(lane, destination, source)

    def convert(self, lane: Stream, destination: Cells, source: Cells) -> None:
        if self._named[lane] == self._late:
            lane.submit(lambda: time.sleep(self._seconds))  # type: ignore[attr-defined]
        super().convert(lane, destination, source)

    def host_slab(self, nbytes: int) -> torch.Tensor:
        self.slabs.append(nbytes)
        return super().host_slab(nbytes)

    def empty(self, nbytes: int) -> Bytes:
        self.allocating_threads.add(threading.get_ident())
        return super().empty(nbytes)


def session_on(backend: Any, way: Way, events: EventList, path: str | os.PathLike[str]) -> spillway.Session:
    return spillway.Session(
        backend=backend, window=way.window, spill_directory=path, allow_memory_filesystem=True, recorder=events
    )


def run_script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python's ``text`` in a process of its own, which imports the same Spillway."""
    source = str(Path(spillway.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def pairwise(*choices: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Some rows of the product of choices, so that each pair of values of two choices is in one of them.

    Example:
        >>> len(pairwise("ab", "cd", "ef"))
        4
    """

    def pairs(row: Sequence[int]) -> set[Any]:
        return set(itertools.combinations(enumerate(row), 2))

    values = [list(choice) for choice in choices]
    rows = list(itertools.product(*(range(len(each)) for each in values)))
    left = set[Any]().union(*map(pairs, rows))
    found = []
    while left:
        found.append(max(rows, key=lambda row: len(pairs(row) & left)))
        left -= pairs(found[-1])
    return [tuple(each[place] for each, place in zip(values, row, strict=True)) for row in found]
