"""What is known of optimizer classes."""

from __future__ import annotations

import inspect
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
    def of(cls, optimizer_class: type[Optimizer], what: str = "optimizer_class") -> Kind:
        """What is known of a class.

        Of a class that is not torch's own nothing is known: it steps all parameters in one call, whole.

        Args:
            optimizer_class: the class.
            what: whose name is in errors.

        Raises:
            UsageError: if it is no optimizer class.
            UnsupportedError: if it is one that cannot step parameter by parameter on the host.
        """
        if not isinstance(optimizer_class, type) or not issubclass(optimizer_class, Optimizer):
            raise UsageError(f"{what}: got {optimizer_class!r}, expected a class, like torch.optim.AdamW")
        for refused, why in _REFUSED.items():
            if issubclass(optimizer_class, refused):
                raise UnsupportedError(
                    f"{what}: got {optimizer_class.__name__}, expected another: {why}; use it as it is"
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
        defaults = dict(optimizer_class([dummy], **for_host(given)).defaults)
    except TypeError as error:
        raise UsageError(f"{optimizer_class.__name__}: got {sorted(given)}, which it refuses: {error}") from error
    unknown = [name for name in given if name not in defaults]
    if unknown:
        raise UsageError(f"{optimizer_class.__name__}: got {unknown}, expected some of {sorted(defaults)}")
    return {**defaults, **{name: given[name] for name in given if name in ("fused", *_FLAGS_OF_DEVICES)}}


def taken_by(optimizer_class: type[Optimizer], given: dict[str, Any]) -> dict[str, Any]:
    """What of some arguments a class's constructor takes."""
    parameters = inspect.signature(optimizer_class).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


@dataclass(frozen=True, slots=True)
class Arguments:
    """What was given for one class, or two, taken apart."""

    host: dict[str, Any]
    """For the host's class."""
    device: dict[str, Any]
    """For the device's."""
    defaults: dict[str, Any]
    """Of both: what groups begin with."""
    own: dict[str, Any]
    """What the device's class says of itself in its groups, where the host's class says something else."""

    @classmethod
    def of(cls, host_class: type[Optimizer], device_class: type[Optimizer], given: dict[str, Any]) -> Arguments:
        """Take them apart.

        Raises:
            UsageError: a name that neither takes, or one that was not given and that they do not agree about.
        """
        if device_class is host_class:
            return cls(given, given, defaults_of(host_class, given), {})
        host, device = taken_by(host_class, given), taken_by(device_class, given)
        names = f"{host_class.__name__} and {device_class.__name__}"
        unknown = sorted(given.keys() - host.keys() - device.keys())
        if unknown:
            raise UsageError(f"{names}: got {unknown}, expected arguments that one of them takes")
        of_host, of_device = defaults_of(host_class, host), defaults_of(device_class, device)
        unlike = {name: value for name, value in of_device.items() if name in of_host and of_host[name] != value}
        # What no constructor takes is what a class is, and no setting.
        settings = taken_by(host_class, taken_by(device_class, unlike))
        if settings:
            raise UsageError(f"{names}: got no {sorted(settings)}, of which their defaults differ, expected them")
        return cls(host, device, {**of_device, **of_host, **given}, unlike)


def check_parameters(
    optimizer_class: type[Optimizer], parameters: Sequence[torch.Tensor], given: dict[str, Any]
) -> None:
    """Raise what the constructor finds wrong with parameters: ``Muon`` refuses all but matrices."""
    like = [
        torch.nn.Parameter(torch.empty(one.shape, dtype=one.dtype, device="meta"), requires_grad=False)
        for one in parameters
    ]
    optimizer_class(like, **for_host(given))


def for_host(given: dict[str, Any]) -> dict[str, Any]:
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


def written_by_step(group: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What a step has put into a group: some classes count there, or keep what they have found out."""
    return {name: value for name, value in group.items() if name != "params" and before.get(name) is not value}


def step_of(optimizer_class: type[Optimizer]) -> Callable[[Optimizer], object]:
    """The class's own step, without the hooks and labels that torch puts around it: a step of a piece is not a step."""
    step: Any = optimizer_class.step
    inner: Callable[[Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner
