"""A random program, run plainly and with Spillway from the same seed, and compared bit for bit."""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import itertools
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FunctionType, GeneratorType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import spillway
from allocations import count_exactly
from budgets import budget_of, hardware
from fuzz import pieces
from fuzz.programs import Program, describe, smaller
from spillway.errors import SpillwayError

OPTIONS = (
    *("save", "offload", "policy", "use_reentrant", "early_stop", "watch", "verify", "drop_output"),
    "determinism_check",
)
_TOLD = 40
"""Characters by which errors are known again."""
STATIC = 16 << 20
"""Bytes that a process is said to have beside a step."""


@dataclass
class Course:
    """What a run came to."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    error: BaseException | None = None
    end: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How the two runs compare.

    Args:
        kind: ``equal``; ``same error``; ``refused``: a typed error of Spillway's; ``needless``: such an error where
            torch's own checkpoint gives what plain PyTorch does; ``wrong``; ``crash``: an error that plain PyTorch does
            not give; ``unnoticed``: plain PyTorch's error is not given.
        what: more of it.
    """

    kind: str
    what: str = ""

    @property
    def is_fault(self) -> bool:
        return self.kind in ("wrong", "crash", "unnoticed")


def compare(program: Program) -> Outcome:
    """Run it both ways."""
    code = compile(program.text(), f"<program {program.seed}>", "exec")
    plain = _run(program, code, _plain(), nullcontext)
    budgets: list[int | str | None] = ["1TiB"] if program.has_budget else [None]
    for budget in budgets:
        with tempfile.TemporaryDirectory() as path, _exact_memory(program):
            session = spillway.Session(spill_directory=path, allow_memory_filesystem=True)
            attached: list[spillway.Attached] = []
            ours = _run(program, code, _ours(session, budget, attached), session.close)
        outcome = _outcome(plain, ours, _known_errors(program))
        if outcome.kind == "equal" and budget == "1TiB" and attached[0].profile is not None:
            budgets.append(budget_of(attached[0].profile, _share_of(program)))
    if _needs_torchs(program, outcome):
        torchs = _run(program, code, _torchs(), nullcontext)
        if _outcome(plain, torchs, []).kind == "equal":
            return Outcome("needless", outcome.what)
    return outcome


def _share_of(program: Program) -> float:
    """Where the budget is between the least one, and what a step takes that keeps everything."""
    found = re.search(r"budget='(\d+)%'", program.attach)
    assert found is not None
    return int(found[1]) / 100


def _needs_torchs(program: Program, outcome: Outcome) -> bool:
    """Whether the outcome hangs on what torch's own checkpoint does."""
    told = ("expected that output to stay as it was", "BudgetError")
    # Both branches of a hidden flag may save the same: then torch's checkpoint gives the right bits.
    hidden = any(name.startswith("hidden") for name in program.names)
    refused = outcome.kind == "refused" and not any(each in outcome.what for each in told)
    return refused and not hidden


def find_fault(program: Program) -> Outcome | None:
    """The outcome, if it is a fault."""
    outcome = compare(program)
    return outcome if outcome.is_fault else None


def shrunk(program: Program, fault: Outcome) -> Program:
    """The least program that has a fault of the same kind."""
    reduced = True
    while reduced:
        reduced = False
        for less in smaller(program):
            with contextlib.suppress(SyntaxError):
                found = compare(less)
                if (found.kind, found.what[:_TOLD]) == (
                    fault.kind,
                    fault.what[:_TOLD],
                ) or found.kind == fault.kind == "wrong":
                    program, reduced = less, True
                    break
    return program


def told(program: Program, fault: Outcome) -> str:
    """What a failure says: the seed, the fault, and the least program that has it."""
    return f"seed {program.seed}: {fault.kind}: {fault.what}\n{describe(shrunk(program, fault))}"


def _known_errors(program: Program) -> list[str]:
    """Errors with which a program may end beside what it gives plainly, for reasons that are known."""
    errors: list[str] = []
    if "swapped tensors" in program.names:
        # Torch swaps no tensor that has a weak reference, and a tape has one from the third call on.
        errors.append("because it has weakref associated with it")
    if "strided nested tensor" in program.names:
        # Torch's own checkpoint cannot, either.
        errors.append("NestedTensorImpl doesn't support sizes")
    return errors


def _outcome(plain: Course, ours: Course, known_errors: list[str]) -> Outcome:
    if isinstance(ours.error, SpillwayError):
        if plain.error is not None:
            return Outcome("same error", f"{type(ours.error).__name__}")
        return Outcome("refused", f"{type(ours.error).__name__}: {str(ours.error)[:160]}")
    for number, (mine, theirs) in enumerate(zip(ours.steps, plain.steps, strict=False)):
        for name in theirs:
            why = _differs(mine.get(name), theirs[name])
            if why:
                return Outcome("wrong", f"step {number}: {name}: {why}")
    if ours.error is not None and any(each in str(ours.error) for each in known_errors):
        return Outcome("refused", f"{type(ours.error).__name__}: {str(ours.error)[:160]}")
    if ours.error is not None and type(ours.error) is not type(plain.error):
        return Outcome("crash", f"{type(ours.error).__name__}: {str(ours.error)[:300]}")
    if plain.error is not None and any(each in str(plain.error) for each in known_errors):
        return Outcome("same error", f"{type(plain.error).__name__}: {str(plain.error)[:160]}")
    if plain.error is not None and ours.error is None:
        return Outcome("unnoticed", f"{type(plain.error).__name__}: {str(plain.error)[:160]}")
    if plain.error is not None:
        return Outcome("same error", f"{type(plain.error).__name__}: {str(plain.error)[:160]}")
    for name in plain.end:
        why = _differs(ours.end.get(name), plain.end[name])
        if why:
            return Outcome("wrong", f"at the end: {name}: {why}")
    return Outcome("equal")


def _differs(mine: Any, theirs: Any) -> str:
    if type(mine) is not type(theirs) and not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
        return f"{type(mine).__name__} where plain PyTorch has {type(theirs).__name__}"
    if isinstance(theirs, Tensor):
        if theirs.is_meta or isinstance(theirs, FakeTensor):
            return "" if (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape) else "another dtype or shape"
        if theirs.layout is not torch.strided:
            mine, theirs = mine.to_dense(), theirs.to_dense()
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return f"{mine.dtype} {tuple(mine.shape)} where plain PyTorch has {theirs.dtype} {tuple(theirs.shape)}"
        if torch.equal(mine, theirs) or torch.allclose(mine, theirs, rtol=0, atol=0, equal_nan=True):
            return ""
        apart = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        return f"apart by {apart:.2g} of the largest"
    if isinstance(theirs, (list, tuple)):
        if len(mine) != len(theirs):
            return f"{len(mine)} where plain PyTorch has {len(theirs)}"
        return next(filter(None, map(_differs, mine, theirs)), "")
    if isinstance(theirs, float) and theirs != theirs:
        return "" if mine != mine else f"{mine} where plain PyTorch has nan"
    return "" if mine == theirs else f"{str(mine)[:60]} where plain PyTorch has {str(theirs)[:60]}"


def _plain() -> Any:
    """What stands for Spillway in a plain run."""

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: value for name, value in kwargs.items() if name not in OPTIONS})

    return SimpleNamespace(
        recompute=recompute,
        offload=lambda **_: nullcontext(),
        attach=lambda model, **_: None,
        Recompute=spillway.Recompute,
        saved_by=spillway.saved_by,
        policies=spillway.policies,
    )


def _torchs() -> Any:
    """What stands for Spillway where regions are those of ``torch.utils.checkpoint``."""

    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    def attach(model: nn.Module, *, blocks: tuple[type, ...] = (), **_: Any) -> None:
        for module in model.modules():
            if isinstance(module, blocks):
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)

    return SimpleNamespace(**{**vars(_plain()), "recompute": recompute, "attach": attach})


def _ours(session: spillway.Session, budget: int | str | None, attached: list[spillway.Attached]) -> Any:
    def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return spillway.recompute(function, *args, session=session, **kwargs)

    def offload(**options: Any) -> Any:
        return spillway.offload(session=session, **options)

    def attach(model: nn.Module, **options: Any) -> Any:
        if budget is not None:
            options |= {"budget": budget, "hardware": hardware()}
        attached.append(spillway.attach(model, session=session, **options))
        return attached[-1]

    return SimpleNamespace(
        recompute=recompute,
        offload=offload,
        attach=attach,
        Recompute=spillway.Recompute,
        saved_by=spillway.saved_by,
        policies=spillway.policies,
    )


def _run(program: Program, code: Any, under: Any, close: Callable[[], object]) -> Course:
    course = Course()
    space = {
        "__name__": "fuzz.program",
        **{name: value for name, value in vars(pieces).items() if not name.startswith("_")},
        "FakeTensorMode": FakeTensorMode,
        "F": functional,
        "SimpleNamespace": SimpleNamespace,
        "collections": collections,
        "functools": functools,
        "io": io,
        "itertools": itertools,
        "checkpoint": checkpoint,
        "nn": nn,
        "np": np,
        "random": random,
        "spillway": under,
        "torch": torch,
    }
    with _settings(), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage", UserWarning)
        warnings.filterwarnings("ignore", "TF32 acceleration", UserWarning)
        torch.manual_seed(program.seed)
        random.seed(program.seed)
        np.random.seed(program.seed % 2**32)
        pieces.CALLS[0] = 0
        pieces.COUNTS.clear()
        exec(code, space)  # the text is ours
        model = None
        try:
            try:
                with _device(program.device):
                    for model, results in space["steps"](under):
                        gradients = {f"gradient of {name}": each.clone() for name, each in results["gradient"].items()}
                        state = {name: _copy(value) for name, value in _state(model).items()}
                        course.steps.append({"loss": results["loss"], **gradients, **state})
            finally:
                closed = close()
                del closed
        except Exception as error:  # noqa: BLE001  (whatever it is, it is compared)
            course.error = error.with_traceback(None)
        if model is not None:
            course.end = {name: _copy(value) for name, value in {**_state(model), **_globals(space)}.items()}
    return course


def _globals(space: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "random of Python's": random.getstate(),
        "random of NumPy's": str(np.random.get_state()),
        "random of torch's": torch.get_rng_state(),
        "CALLS": pieces.CALLS[0],
        "COUNTS": pieces.COUNTS,
        "SEEN": space.get("SEEN"),
        "stamp": vars(pieces.stamp),
        "remember": pieces.remember.__defaults__,
    }


def _state(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers, and whatever else its modules have as attributes."""
    found: dict[str, Any] = dict(model.named_parameters())
    for path, module in model.named_modules():
        for name, value in [*module.__dict__.items(), *module._buffers.items()]:
            if not name.startswith("_") and not isinstance(value, itertools.cycle):
                found[f"{path}.{name}"] = value
        found[f"{path}'s class"] = getattr(type(module), "count", None)
    return found


def _copy(value: Any) -> Any:
    """What can be compared of a value, whatever happens to it later."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [_copy(each) for each in value]
    if isinstance(value, dict):
        return [(_copy(key), _copy(each)) for key, each in value.items()]
    for kind, read in _READ.items():
        if isinstance(value, kind):
            return _copy(read(value))
    return type(value).__name__


_READ: dict[Any, Callable[[Any], Any]] = {
    torch.Generator: torch.Generator.get_state,
    random.Random: random.Random.getstate,
    np.random.Generator: lambda generator: str(generator.bit_generator.state),
    np.random.RandomState: lambda generator: str(generator.get_state()),
    np.ndarray: np.ndarray.tolist,
    bytearray: list,
    SimpleNamespace: vars,
    pieces.Slotted: lambda slotted: slotted.count,
    io.StringIO: io.StringIO.getvalue,
    functools.partial: lambda partial: partial.args,
    itertools.count: str,
    GeneratorType: lambda generator: generator.gi_frame.f_locals,
    FunctionType: lambda function: [cell.cell_contents for cell in function.__closure__ or ()],
}
"""How to read what has no values of its own."""


def _device(name: str) -> Any:
    """Where tensors are made."""
    if name == "fake":
        return FakeTensorMode(allow_non_fake_inputs=True)
    return torch.device(name) if name == "meta" else nullcontext()


@contextmanager
def _exact_memory(program: Program) -> Iterator[None]:
    """Where a plan is sought, memory is counted to the byte."""
    with pytest.MonkeyPatch.context() as patch:
        if program.has_budget:
            count_exactly(patch, lambda: STATIC)
        yield


@contextmanager
def _settings() -> Iterator[None]:
    """Global settings are what they were, afterwards. Scripted functions are not optimized after some calls."""
    dtype = torch.get_default_dtype()
    try:
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            yield
    finally:
        torch.set_default_dtype(dtype)
        torch.backends.mkldnn.set_flags(True)  # type: ignore[no-untyped-call]
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
