"""What is known of optimizer classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.errors import UnsupportedError, UsageError

_WIDE = frozenset({torch.float32, torch.float64})
_ALL = _WIDE | {torch.bfloat16, torch.float16}
_FUSED_ON_HOST: dict[type[Optimizer], frozenset[torch.dtype]] = {
    torch.optim.Adam: _ALL,
    torch.optim.AdamW: _ALL,
    torch.optim.Adagrad: _ALL,
    # The one for narrow types leaves parameters as they are, and reads past the end of its momentum.
    torch.optim.SGD: _WIDE,
}
_REFUSED = {
    torch.optim.SparseAdam: "its gradients are sparse",
    torch.optim.LBFGS: "each of its steps evaluates the model several times, over all parameters as one vector",
}
_FLAGS_OF_DEVICES = {"foreach": False, "capturable": False}


@dataclass(frozen=True, slots=True)
class Kind:
    """An optimizer class, as far as its step can be taken apart."""

    fused: frozenset[torch.dtype]
    """The types in which it has a fused kernel on the host, which steps a piece to the same bits as the whole."""
    alone: bool
    """Whether it steps each parameter by itself, so that some may step before others."""
    begins_with_state: bool
    """Whether its constructor makes states, and not its first step: a state that is saved before that has them."""

    @classmethod
    def of(cls, optimizer_class: type[Optimizer]) -> Kind:
        """What is known of a class.

        Of a class that is not torch's own nothing is known: it steps all parameters in one call, whole.

        Raises:
            UsageError: if it is no optimizer class.
            UnsupportedError: if it is one that cannot step parameter by parameter on the host.
        """
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
            raise UsageError(f"optimizer_class: got {optimizer_class!r}, expected a class, like torch.optim.AdamW")
        for refused, why in _REFUSED.items():
            if issubclass(optimizer_class, refused):
                raise UnsupportedError(
                    f"optimizer_class: got {optimizer_class.__name__}, expected another: {why}; use it as it is"
                )
        known = f"{optimizer_class.__module__}.".startswith("torch.optim.")
        return cls(
            fused=_FUSED_ON_HOST.get(optimizer_class, frozenset()),
            alone=known,
            begins_with_state=issubclass(optimizer_class, torch.optim.Adagrad),
        )


def defaults_of(optimizer_class: type[Optimizer], given: dict[str, Any]) -> dict[str, Any]:
    """All defaults of an optimizer of the class. Whatever its constructor finds wrong, it raises."""
    dummy = torch.nn.Parameter(torch.zeros(1, 1, device="cpu"))
    if given.get("differentiable"):
        raise UnsupportedError("differentiable: got True, expected False: the step is not part of a graph")
    try:
        defaults = dict(optimizer_class([dummy], **_for_the_host(given)).defaults)
    except TypeError as error:
        raise UsageError(f"{optimizer_class.__name__}: got {sorted(given)}, which it refuses: {error}") from error
    unknown = [name for name in given if name not in defaults]
    if unknown:
        raise UsageError(f"{optimizer_class.__name__}: got {unknown}, expected some of {sorted(defaults)}")
    return {**defaults, **{name: given[name] for name in given if name in ("fused", *_FLAGS_OF_DEVICES)}}


def check_parameters(
    optimizer_class: type[Optimizer], parameters: Sequence[torch.Tensor], given: dict[str, Any]
) -> None:
    """Raise what the constructor finds wrong with parameters: ``Muon`` refuses all but matrices."""
    like = [
        torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=False)
        for one in parameters
    ]
    optimizer_class(like, **_for_the_host(given))


def _for_the_host(given: dict[str, Any]) -> dict[str, Any]:
    """Without what is only for devices, which would be refused of a tensor on the host."""
    return {name: value for name, value in given.items() if name not in ("fused", *_FLAGS_OF_DEVICES)}


def on_host(group: dict[str, Any], *, fused: bool) -> dict[str, Any]:
    """A group's settings, as they are for a step on the host.

    Args:
        group: of the user's optimizer.
        fused: whether the parameters can be stepped by a fused kernel.
    """
    settings = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    for name, value in settings.items():
        if isinstance(value, torch.Tensor):
            settings[name] = value.detach().to("cpu", copy=True)
    settings.update({name: value for name, value in _FLAGS_OF_DEVICES.items() if name in settings})
    if "fused" in settings:
        settings["fused"] = fused and settings["fused"] is not False
    return settings


def step_of(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The class's own step, without the hooks and labels that torch puts around it: a step of a piece is not a step."""
    step: Any = optimizer_class.step
    inner: Callable[[Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner
