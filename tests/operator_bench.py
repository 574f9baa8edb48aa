"""Runs one sample of an operator or module plainly and through each tier, and compares every bit.

Each sample runs from the same inputs and the same generator state: plainly, and through the host tier, the disk tier,
or both. Outputs and gradients must agree in dtype, shape, stride, flags and every byte.

Two tricks make sure that what is saved really leaves and really comes back. The operator works on copies that die with
the forward (``Copy``), since a storage that is still alive is used again without a fetch. And the last thing saved in
each context is a plug, so that the window, which is empty, is wanted by something after the operator.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import spillway
from spillway import EventKind
from spillway.saved_tensors.hooks import SavedState

IGNORED = [
    pytest.mark.filterwarnings(f"ignore:{message}:UserWarning")
    for message in (
        # What PyTorch says of its own operators when they are called.
        r"torch.(cholesky|lu|lu_solve|qr|triangular_solve) is deprecated",
        r"`nn.functional.upsample_(nearest|bilinear)` is deprecated",
        r"Using torch.cross without specifying the dim arg is deprecated",
        r"stft with return_complex=False is deprecated",
        r"index_reduce\(\) is in beta",
        r"Sparse ... tensor support is in beta",
        r"ComplexHalf support is experimental",
        r"A window was not provided",
        r"Using padding='same' with even kernel lengths",
        r"dropout2d",
        r"reduction",
        r"linear_cross_entropy",
        r"enable_nested_tensor is True",
        r"Casting complex values to real",
    )
]

NOT_DETERMINISTIC = {
    "linalg_lstsq": "the driver gelsy reads pivots that nobody wrote; the other drivers are compared",
    "linalg_lstsq_grad_oriented": "as linalg_lstsq",
}
"""Operators of which two plain runs differ. They run all the same, and must give everything back."""


def is_deterministic(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether two plain runs agree, as far as is known."""
    if "lstsq" in name:
        return kwargs.get("driver") != "gelsy"
    return name not in NOT_DETERMINISTIC


DTYPES = (torch.float64, torch.complex128, torch.float32, torch.bfloat16, torch.float16)
"""What an operator runs in: the first of these in which it has a gradient."""

TIERS = ("host", "disk")


_NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""What PyTorch says of a kernel, where it is asked for deterministic ones."""


class Copy(torch.autograd.Function):
    """The same tensor over a storage of its own. It saves nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return copy_of(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Plug(torch.autograd.Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return torch.zeros((), device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in every bit, over a copy of the whole storage: stride, offset and flags are the same."""
    tensor = tensor.detach()
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_nested:
        return tensor.clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())
    torch._C._set_conj(copy, tensor.is_conj())
    torch._C._set_neg(copy, tensor.is_neg())
    return copy


class Bits(NamedTuple):
    """All that can be compared of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: tuple[Any, ...]
    content: bytes

    @classmethod
    def of(cls, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach()
        if value.is_nested or value.layout is not torch.strided:
            value = value.to_padded_tensor(0.0) if value.is_nested else value.to_dense()
        layout = (value.stride(), value.is_conj(), value.is_neg(), value._is_zerotensor())
        flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
        flat.copy_(value.reshape(-1))
        return cls(value.dtype, tuple(value.shape), layout, flat.view(torch.uint8).cpu().numpy().tobytes())


class Outcome(NamedTuple):
    """What a run gave: its outputs, gradients and what else it changed, or the error that it ended with."""

    outputs: Any = ()
    grads: Any = ()
    others: Any = ()
    error: str | None = None


@dataclass(frozen=True)
class Call:
    """What is run once."""

    forward: Callable[[Any], Any]
    """Takes the copied inputs."""
    parameters: Sequence[torch.Tensor] = ()
    """What has gradients besides the inputs."""
    others: Callable[[], Iterator[torch.Tensor]] = lambda: iter(())
    """What else may have changed afterwards: the buffers of a module."""


@dataclass(frozen=True)
class Sample:
    """What is run several times: the same call, made anew from the same generator state, on copies of ``inputs``."""

    make: Callable[[], Call]
    inputs: Any
    deterministic: bool = True


class Bench:
    """One session for all samples, and what went through it."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.unstable: set[str] = set()
        """Operators of which two plain runs were seen to differ."""
        self.moved: dict[str, Counter[EventKind]] = {tier: Counter() for tier in TIERS}
        self._tier = TIERS[0]
        self.session = spillway.Session(window="64KiB", recorder=self._count)
        self.operators: set[str] = set()
        self.samples = 0
        self.refused = 0

    def _count(self, event: spillway.Event) -> None:
        self.moved[self._tier][event.kind] += 1

    def offload(self, tier: str) -> AbstractContextManager[None]:
        self._tier = tier
        policy = spillway.policies.Offload()
        return spillway.offload(policy=policy, min_bytes=0, window=0, tier=tier, session=self.session)

    def check_given_back(self, name: str) -> None:
        """Nothing is held once the last graph is gone."""
        self.session.synchronize()
        if self.session.used_bytes != (0, 0) or len(self.session.of(SavedState).identity):
            # After an error in backward, torch's engine keeps what was ready to run, until a later backward.
            torch.ones(1, requires_grad=True).sum().backward()
            gc.collect()
        assert self.session.used_bytes == (0, 0), f"{name}: bytes on (host, disk) are still held"
        assert len(self.session.of(SavedState).identity) == 0, f"{name}: storages are still known"

    def _run(self, sample: Sample, tier: str, *, twice: bool) -> Outcome:
        return run(sample, lambda: self.offload(tier), self.device, twice=twice)

    def _is_unstable(self, sample: Sample, tier: str, plain: Outcome, *, twice: bool) -> bool:
        """Whether plain runs differ from each other, or some of ours are equal: atomic additions, in any order."""
        return any(run(sample, nullcontext, self.device, twice=twice) != plain for _ in range(4)) or any(
            self._run(sample, tier, twice=twice) == plain for _ in range(4)
        )

    def check(
        self,
        name: str,
        samples: Callable[[], Iterator[Sample]],
        *,
        most: int | None = None,
        twice: bool = False,
        errors: bool = False,
    ) -> int:
        """Compare samples, plain against each tier; returns how many there were.

        Args:
            name: of the operator.
            samples: makes them.
            most: how many are compared, drawn from all, with the tiers in turn; ``None``: all, with each tier.
            twice: with second derivatives.
            errors: whether a sample may end with an error, which must then be the same one.
        """
        torch.manual_seed(0)
        count = 0
        some = None if most is None else drawn(samples(), most)
        for sample in samples() if some is None else some:
            with warnings.catch_warnings(record=True) as said:
                warnings.filterwarnings("always", message=f".*{_NOT_DETERMINISTIC}")
                plain = run(sample, nullcontext, self.device, twice=twice)
            assert errors or plain.error is None, f"{name}, sample {count}: plain PyTorch refuses it: {plain.error}"
            self.refused += plain.error is not None
            # Of several samples that are drawn, each goes through one tier: the operator does not see which.
            for tier in TIERS if some is None or len(some) == 1 else [TIERS[count % len(TIERS)]]:
                ours = self._run(sample, tier, twice=twice)
                if ours == plain or not sample.deterministic:
                    continue
                if any(_NOT_DETERMINISTIC in str(warning.message) for warning in said):
                    self.unstable.add(name)
                    continue
                if self.device != "cpu" and self._is_unstable(sample, tier, plain, twice=twice):
                    self.unstable.add(name)
                    continue
                again = run(sample, nullcontext, self.device, twice=twice)
                alone = "" if again == plain else " (and two plain runs differ from each other)"
                pytest.fail(f"{name}, sample {count}, {tier}: not equal{alone}: {difference(plain, ours)}")
            count += 1
        self.operators.add(name)
        self.samples += count
        self.check_given_back(name)
        return count


def ask_for_determinism(device: str) -> None:
    """On an accelerator, before every run: some samples are made by code that switches it off again."""
    if device != "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)


def run(sample: Sample, context: Callable[[], AbstractContextManager[Any]], device: str, *, twice: bool) -> Outcome:
    torch.manual_seed(1)
    ask_for_determinism(device)
    call = sample.make()
    leaves: list[torch.Tensor] = []
    inputs = [pytree.tree_map_only(torch.Tensor, Copies(leaves), sample.inputs)]
    leaves.extend(call.parameters)
    try:
        return forward_backward(call, inputs, leaves, context, device, twice=twice)
    except Warning:
        raise
    except Exception as error:  # noqa: BLE001  (whatever plain PyTorch raises must come here too)
        # Ours on a change in place is a RuntimeError of a class of its own.
        kind = RuntimeError if isinstance(error, RuntimeError) else type(error)
        return Outcome(error=f"{kind.__name__}: {error}")


class Copies:
    """Copies tensors, each of them once: the same tensor twice is the same copy twice."""

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        self._leaves = leaves
        self._copies: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._copies:
            copy = copy_of(tensor)
            if tensor.requires_grad:
                self._leaves.append(copy.requires_grad_())
                copy = Copy.apply(copy)
            self._copies[id(tensor)] = copy
        return self._copies[id(tensor)]


def forward_backward(
    call: Call,
    inputs: list[Any],
    leaves: list[torch.Tensor],
    context: Callable[[], AbstractContextManager[Any]],
    device: str,
    *,
    twice: bool,
) -> Outcome:
    """``inputs`` holds the arguments, and is emptied, so that nothing but the graph holds them afterwards."""
    with context():
        output = call.forward(inputs.pop())
        outputs = [
            Copy.apply(each) if each.requires_grad else copy_of(each)
            for each in pytree.tree_leaves(output)
            if isinstance(each, torch.Tensor)
        ]
        del output
        plug = Plug.apply(torch.ones(1, device=device, requires_grad=True) * 2)
    differentiable = [each for each in outputs if each.requires_grad]
    if twice:
        with context():
            grads = derivatives(differentiable, leaves, create_graph=True)
        more = derivatives([each for each in grads if each is not None and each.requires_grad], leaves)
    else:
        grads, more = derivatives(differentiable, leaves), ()
    del plug
    return Outcome(
        [Bits.of(each) for each in outputs],
        [Bits.of(each) for each in (*grads, *more)],
        [Bits.of(each) for each in call.others()],
    )


def derivatives(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], *, create_graph: bool = False
) -> Sequence[torch.Tensor | None]:
    """Gradients of the outputs in the leaves, from fixed seeds."""
    if not outputs or not leaves:
        return ()
    generator = torch.Generator().manual_seed(2)
    seeds = [
        torch.randn(each.shape, dtype=torch.float32, generator=generator).to(each.device, each.dtype)
        for each in outputs
    ]
    return torch.autograd.grad(outputs, leaves, seeds, allow_unused=True, create_graph=create_graph)


def difference(plain: Outcome, ours: Outcome) -> str:
    if plain.error is not None or ours.error is not None:
        return f"plain ended with {plain.error!r}, ours with {ours.error!r}"
    for kind, left, right in zip(Outcome._fields, plain, ours, strict=True):
        if left != right and isinstance(left, list):
            for place, (a, b) in enumerate(zip(left, right, strict=True)):
                if a != b and isinstance(a, Bits) and isinstance(b, Bits):
                    fields = [name for name, x, y in zip(Bits._fields, a, b, strict=True) if x != y]
                    return f"{kind}[{place}] of shape {a.shape} in {fields}: {a[:3]} and {b[:3]}"
                if a != b:
                    return f"{kind}[{place}]: {a} and {b}"
    return "nothing that can be named"


# What is run: operators as functions, operators in place, modules.


def first_dtype(supported: Any) -> torch.dtype | None:
    return next((dtype for dtype in DTYPES if dtype in supported), None)


def _sample_inputs(operator: Any, dtype: torch.dtype, device: str) -> Iterator[Any]:
    """What ``operator.sample_inputs`` gives. That one reads the sources of the whole stack, to find a ``TestCase``."""
    from torch.testing._internal.common_utils import set_rng_seed  # needs what not every machine has

    set_rng_seed()
    for each in operator.sample_inputs_func(operator, device, dtype, requires_grad=True):
        yield each
        set_rng_seed()


def operator_samples(
    operator: Any, dtype: torch.dtype, device: str = "cpu", *, inplace: bool = False
) -> Iterator[Sample]:
    function = operator.get_inplace() if inplace else operator
    for each in _sample_inputs(operator, dtype, device):
        if inplace and each.broadcasts_input:
            continue  # the result does not fit into the input

        def forward(inputs: Any, finish: Callable[[Any], Any] = each.output_process_fn_grad) -> Any:
            subject, args, kwargs = inputs
            result = function(subject, *args, **kwargs)
            return result if inplace else finish(result)

        yield Sample(
            lambda forward=forward: Call(forward),
            (each.input, each.args, each.kwargs),
            deterministic=is_deterministic(operator.formatted_name, each.kwargs),
        )


def module_samples(info: Any, dtype: torch.dtype, device: str = "cpu", *, training: bool) -> Iterator[Sample]:
    inputs = info.module_inputs_func(info, device=device, dtype=dtype, requires_grad=True, training=training)
    for each in inputs:
        if each.forward_input is None:
            continue  # it tells how the module is made, and calls it with nothing

        def make(arguments: Any = each.constructor_input) -> Call:
            module = info.module_cls(*arguments.args, **arguments.kwargs).to(device=device, dtype=dtype).train(training)

            def forward(inputs: Any) -> Any:
                args, kwargs = inputs
                return module(*args, **kwargs)

            return Call(forward, tuple(module.parameters()), module.buffers)

        yield Sample(make, (each.forward_input.args, each.forward_input.kwargs))


def drawn(samples: Iterator[Sample], most: int) -> list[Sample]:
    """The same ones each time, by a die: of a product of options, every n-th sample may leave one out."""
    every = list(samples)
    return [every[place] for place in sorted(random.Random(0).sample(range(len(every)), min(most, len(every))))]


def name_of(entry: Any) -> str:
    name: str = entry.formatted_name
    return name
