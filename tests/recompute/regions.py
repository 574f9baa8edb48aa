"""What the tests of regions share: steps run plainly and recomputed, and compared bit for bit.

A *step* is a function of a :class:`Call`. It makes its own inputs, calls its functions by ``call(function, ...)``
within ``call.context()``, runs its backward as it likes, and gives back the tensors that must be equal.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

import spillway
from spillway.saved_tensors.handles import in_replay
from spillway.testing import AdversaryBackend
from support import assert_identical, assert_nothing_left, grads

OPTIONS = (
    *("save", "offload", "policy", "use_reentrant", "early_stop", "preserve_rng_state", "determinism_check"),
    *("drop_output", "session", "verify"),
)


@dataclass(frozen=True)
class Place:
    """Where bytes go, how many of them at once, and whether by the backend that is late and poisons."""

    tier: str
    window: int
    adversary: bool = False

    def __str__(self) -> str:
        return f"{self.tier}-window-{self.window}{'-adversary' * self.adversary}"


PLACES = [Place("host", 0), Place("disk", 1024), Place("host", 0, adversary=True)]

CHOICES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "some offloaded": {"offload": ["inputs", "pointwise"]},
    "save": {"save": ["pointwise", "random"]},
    "offload": {"offload": ["inputs", "matmul", "norm", "random"]},
    "saved_by": {"offload": [spillway.saved_by("matmul"), spillway.saved_by("pointwise")]},
}
REENTRANT_CHOICES: dict[str, dict[str, Any]] = {"nothing": {}, "inputs away": {"offload": ["inputs"]}}

modes = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
choices = pytest.mark.parametrize("how", CHOICES.values(), ids=CHOICES)
backward_place = pytest.mark.parametrize("inside", [False, True], ids=["backward-outside", "backward-inside"])
ways = pytest.mark.parametrize(
    "how",
    [
        *({**how, "use_reentrant": False} for how in CHOICES.values()),
        *({**how, "use_reentrant": True} for how in REENTRANT_CHOICES.values()),
    ],
    ids=[*CHOICES, *(f"{name}-reentrant" for name in REENTRANT_CHOICES)],
)
"""All choices in both modes, as options."""

hides = pytest.mark.parametrize("hides", [True, False], ids=["hidden", "seen"])
"""Whether Spillway sees the Python state of the test's function. Tests of a replay's checks hide it."""

one_place = pytest.mark.parametrize("place", PLACES[-1:], ids=str, indirect=True)
"""For what does not depend on where bytes go: the adversary, which shows what nobody computed."""

few_places = pytest.mark.parametrize(
    "place",
    [*(pytest.param(each, marks=pytest.mark.long) for each in PLACES[:-1]), PLACES[-1]],
    ids=[str(each) for each in PLACES],
    indirect=True,
)
"""For long matrices of what depends on it little: the adversary; by the host and the disk in ``make test-all``."""


class HiddenList(list[Any]):
    """A list that Spillway does not open: see NOTE [ Python state ]."""

    __slots__ = ()


class HiddenAttribute:
    """An attribute that Spillway does not see, since its values lie in the class.

    Args:
        default: the value of objects that have set none.
    """

    __slots__ = ("_default", "_values")

    def __init__(self, default: Any) -> None:
        self._default = default
        self._values: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def __get__(self, owner: Any, kind: type) -> Any:
        return self if owner is None else self._values.get(owner, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        self._values[owner] = value


Step = Callable[["Call"], Iterable[torch.Tensor]]


class Call:
    """How a step calls its functions: plainly, or recomputed with these options."""

    def __init__(self, regions: Regions | None, **options: Any) -> None:
        self.regions = regions
        self.options = options

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.regions is None:
            return function(*args, **{key: value for key, value in kwargs.items() if key not in OPTIONS})
        return spillway.recompute(function, *args, **{"session": self.regions.session, **self.options, **kwargs})

    def context(self, **options: Any) -> AbstractContextManager[object]:
        """An ``offload`` around, which by itself keeps all: small tensors leave where a region says so."""
        return contextlib.nullcontext() if self.regions is None else self.regions.offload(**options)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, called so."""
        return lambda *args, **kwargs: self(function, *args, **kwargs)


class Regions:
    """Runs steps plainly and recomputed in one session, and compares them."""

    last = HiddenAttribute(None)

    def __init__(self, session: spillway.Session, place: Place, adversary: AdversaryBackend | None) -> None:
        self.session = session
        self.place = place
        self.adversary = adversary

    def offload(self, **options: Any) -> spillway.offload:
        self.last = spillway.offload(
            **{
                "session": self.session,
                "min_bytes": 0,
                "tier": self.place.tier,
                "policy": spillway.policies.Keep(),
                **options,
            }
        )
        return self.last

    def __call__(self, step: Step, *, passes: int = 2, collect: bool = False, **options: Any) -> None:
        """Compare: the first pass records what the functions do, the next one goes by that.

        Args:
            step: see the top of this file.
            passes: how many.
            collect: whether the step itself leaves cycles behind, for the garbage collector.
            options: for each call.
        """
        expected = plain(step)
        for _ in range(passes):
            got = seeded(step, Call(self, **options))
            assert_identical(got, expected)
            del got
            if collect:
                gc.collect()
            self.assert_nothing_left()

    def right_or_refused(self, step: Step, *, passes: int = 2, **options: Any) -> None:
        """For what may be refused by an error that says so: it must not be wrong."""
        expected = plain(step)
        for _ in range(passes):
            try:
                got = seeded(step, Call(self, **options))
            except (spillway.SpillwayError, CheckpointError):
                # The engine keeps what an interrupted backward held, until the next one.
                torch.ones(1, requires_grad=True).sum().backward()
                gc.collect()
            else:
                assert_identical(got, expected)
                del got
            self.assert_nothing_left()

    def compare(self, function: Callable[..., Any], *args: Any, seed: int = 7, **options: Any) -> None:
        """Compare one call of a function, which may have been called before, with a plain one."""
        ours = gradients_of(self, function, *args, seed=seed, **options)
        assert_identical(ours, gradients_of(None, function, *args, seed=seed))

    def compare_often(self, function: Callable[..., Any], *args: Any, calls: int = 4, **options: Any) -> None:
        """Compare several calls of a function. The first one is recorded, and the second one is compared in full."""
        for seed in range(calls):
            self.compare(function, *args, seed=seed, **options)
            self.assert_nothing_left()

    def was_whole(self) -> bool:
        """Whether a function in the latest context was replayed whole, since it was not as its program says."""
        assert self.last is not None
        return any("was recomputed whole" in note for note in self.last.stats().notes)

    def push_out(self) -> None:
        """Send away what is still on its way out."""
        push_out(self.session)

    def assert_nothing_left(self) -> None:
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not in_replay()
        assert not torch.nn.modules.module._global_forward_pre_hooks
        if self.adversary is not None:
            self.adversary.check()
        assert_nothing_left(self.session)


def push_out(session: spillway.Session) -> None:
    """A storage leaves when the next one wants its place."""
    with spillway.offload(session=session, min_bytes=0, window=0, tier="host", tag="push out"):
        pushing = torch.ones(2, requires_grad=True).exp()
    del pushing
    session.synchronize()


def plain(step: Step) -> list[torch.Tensor]:
    return seeded(step, Call(None))


def seeded(step: Step, call: Call) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [tensor.detach().clone() for tensor in step(call)]


def pointwise_chain(x: torch.Tensor) -> torch.Tensor:
    """Saves inputs and outputs of each kind."""
    return ((x.sin() * 3).exp() * x.cos()).tanh().sigmoid() * 2


class Block(torch.nn.Module):
    """Attention and MLP: norms, matmuls, softmax, dropout, views, residuals."""

    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm, self.qkv = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.drop = torch.nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.drop((q @ k.transpose(-1, -2)).softmax(-1)) @ v
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(x))))


def loss_of(out: Any) -> torch.Tensor:
    """A sum in which each element of each output counts differently."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
    losses = [
        (tensor.abs() if tensor.is_complex() else tensor).flatten().double()
        * torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        for tensor in tensors
        if tensor.requires_grad
    ]
    return torch.stack([loss.sum() for loss in losses]).sum()


def gradients(*roots: torch.Tensor | torch.nn.Module) -> Iterator[torch.Tensor]:
    """Of leaves and modules, which must have some."""
    for root in roots:
        for leaf in [root] if isinstance(root, torch.Tensor) else root.parameters():
            assert leaf.grad is not None
            yield leaf.grad


def leaf(*sizes: int, seed: int = 1) -> torch.Tensor:
    """A leaf with the same numbers each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(sizes or (2, 5, 16)), generator=generator, requires_grad=True)


def gradients_of(
    regions: Regions | None, function: Callable[..., Any], *args: Any, seed: int = 0, **options: Any
) -> list[torch.Tensor]:
    """Loss and gradients of one call, recomputed or (without ``regions``) plain: of its input, and of parameters."""
    call = Call(regions, **options)
    torch.manual_seed(seed)
    x = leaf()
    with call.context():
        loss = call(function, x * 1, *args).square().mean()
    loss.backward()
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    found = [loss.detach(), *grads(x, *(each for each in parameters if each.grad is not None))]
    for parameter in parameters:
        parameter.grad = None
    return found


class Operators(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """A mode that only looks: the names of operators that run under it, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def operators_of_backward(
    regions: Regions | None, function: Callable[..., Any], *args: Any, **options: Any
) -> list[str]:
    """What runs in the backward of one call."""
    call = Call(regions, **options)
    with call.context():
        loss = call(function, leaf() * 1, *args).sum()
    with Operators() as operators:
        loss.backward()
    if isinstance(function, torch.nn.Module):
        function.zero_grad()
    return operators.names


class CountedBlock(torch.nn.Module):
    """Attention and an MLP with random numbers, which count their calls. (Dropout writes in place on a CPU.)"""

    calls = HiddenAttribute(0)

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.qkv = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)
        self.out = torch.nn.Linear(16, 16)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.dropout = dropout
        self.scale = 1.0
        self.register_buffer("bias", torch.linspace(0, 1, 16))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(-2)) * self.scale + self.bias
        kept = torch.bernoulli(torch.full_like(x, 1 - self.dropout))
        return x + self.down(functional.gelu(self.up(x * kept)))


class Changing(torch.nn.Module):
    """Reads, deep inside, what tests change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.scale, self.eps = 1.0, 1e-5
        self.table = torch.zeros(16)
        self.kind = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.layer_norm(x + self.table, (16,), eps=self.eps) * self.scale
        if self.kind:
            y = y.tanh()
        return x + self.down(functional.silu(self.up(y)))
