"""Megatron-Core's optimizer with a part of its state and step on the host, by its names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.optimizer import OffloadedOptimizer
from spillway.optim.optimizer_class import taken_by
from spillway.optim.states import MASTER
from spillway.session import Session

_ARGUMENTS = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
)
"""What is an attribute, and a default, but no setting of a group."""
_NEWER = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_THEIR_MASTER = "master_param"
_DECOUPLED = "decoupled_grad"


class HybridDeviceOptimizer(OffloadedOptimizer):
    """An optimizer that steps a fraction of the device's elements on the host, and the rest on the device.

    A :class:`spillway.OffloadedOptimizer` by other names. ``docs/compat/megatron.md`` says what differs.

    Args:
        params: parameters, or groups of them, with whatever else a group has.
        offload_fraction: of the elements that are on a device, how many are stepped on the host: the first parameters,
            until it is reached. Those on the CPU are stepped there anyway.
        cpu_optimizer_cls: the class that steps on the host. ``None``: the other one.
        gpu_optimizer_cls: the class that steps on the device. ``None``: the other one.
        param_update_in_fp32: whether parameters of a narrower type have masters in ``float32``.
        pin_cpu_grads: without effect: what crosses the link is pinned, in the session's memory.
        pin_cpu_params: without effect, for that reason.
        overlap_cpu_optimizer_d2h_h2d: whether gradients leave during backward. If not, they stay on the device until
            they are cleared, and are copied in ``step()``.
        session: whose pinned memory is used. ``None``: the default one.
        kwargs: for the classes: each gets those that it takes. What neither takes is put into the groups.

    Raises:
        UsageError: neither class, or another argument that cannot be meant.
        UnsupportedError: a class or a parameter that cannot be served.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = HybridDeviceOptimizer(
        ...     model.parameters(), cpu_optimizer_cls=torch.optim.AdamW, gpu_optimizer_cls=torch.optim.AdamW, lr=3e-4
        ... )
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Iterable[Any],
        offload_fraction: float = 0.5,
        cpu_optimizer_cls: type[Optimizer] | None = None,
        gpu_optimizer_cls: type[Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        session: Session | None = None,
        **kwargs: Any,
    ) -> None:
        host_class, device_class = cpu_optimizer_cls or gpu_optimizer_cls, gpu_optimizer_cls or cpu_optimizer_cls
        if host_class is None or device_class is None:
            raise UsageError("cpu_optimizer_cls, gpu_optimizer_cls: got None, expected at least one optimizer class")
        newer = [name for name in _NEWER if name in kwargs]
        if newer:
            raise UnsupportedError(
                f"got {newer}, expected none of them: with param_update_in_fp32=True masters and moments are float32"
            )
        self.offload_fraction = offload_fraction
        self.cpu_optimizer_cls = cpu_optimizer_cls
        self.gpu_optimizer_cls = gpu_optimizer_cls
        self.param_update_in_fp32 = param_update_in_fp32
        self.pin_cpu_grads = pin_cpu_grads
        self.pin_cpu_params = pin_cpu_params
        self.overlap_cpu_optimizer_d2h_h2d = overlap_cpu_optimizer_d2h_h2d
        self.sub_optimizer_kwargs = kwargs
        taken = {**taken_by(host_class, kwargs), **taken_by(device_class, kwargs)}
        super().__init__(
            params,
            host_class,
            device_class=device_class,
            fraction=offload_fraction,
            hold="first",
            master_dtype=torch.float32 if param_update_in_fp32 else None,
            offload_gradients=overlap_cpu_optimizer_d2h_h2d,
            session=session,
            **taken,
        )
        others = {name: value for name, value in kwargs.items() if name not in taken}
        for group in self.param_groups:
            group.update({**others, **group})
        # Whoever makes one anew with these gets the same.
        self.defaults.update({**others, **{name: getattr(self, name) for name in _ARGUMENTS}})
        self.register_step_pre_hook(_take_decoupled)
        self.register_state_dict_post_hook(_by_their_name)
        self.register_load_state_dict_pre_hook(_by_our_name)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, of which the fraction is taken by itself."""
        super().add_param_group(param_group)
        for name in _ARGUMENTS:
            self.param_groups[-1].pop(name, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and attributes ``decoupled_grad``."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                decoupled = getattr(parameter, _DECOUPLED, None)
                if decoupled is not None and set_to_none:
                    setattr(parameter, _DECOUPLED, None)
                elif decoupled is not None:
                    decoupled.zero_()

    def update_fp32_param_by_new_param(self) -> None:
        """The masters are taken from the parameters anew: :meth:`refresh_masters`."""
        self.refresh_masters()

    def dummy_step(self) -> None:
        """Make the state, for loading a checkpoint in place: a step with gradients and learning rates of zero.

        It changes no parameter, and none that has state; all gradients are cleared.
        """
        self.zero_grad()
        rates = [group.get("lr") for group in self.param_groups]
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state.get(parameter):
                    parameter.grad = torch.zeros_like(parameter)
            if "lr" in group:
                group["lr"] = 0.0
        try:
            self.step()
            self.synchronize()
        finally:
            for group, rate in zip(self.param_groups, rates, strict=True):
                if "lr" in group:
                    group["lr"] = rate
            self.zero_grad()


def _take_decoupled(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A ``decoupled_grad`` is the gradient, whatever ``grad`` is."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _DECOUPLED):
                decoupled = getattr(parameter, _DECOUPLED)
                parameter.grad = None
                if decoupled is not None and decoupled.dtype != parameter.dtype:
                    parameter.grad_dtype = None  # any
                parameter.grad = decoupled


def _by_their_name(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _renamed(state_dict, MASTER, _THEIR_MASTER)


def _by_our_name(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return _renamed(state_dict, _THEIR_MASTER, MASTER)


def _renamed(state_dict: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    states = {
        number: {after if name == before else name: value for name, value in state.items()}
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
