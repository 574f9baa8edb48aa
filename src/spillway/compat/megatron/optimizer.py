"""Megatron-Core's hybrid optimizer: a part of its state and step is on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.errors import UnsupportedError, UsageError
from spillway.optim.optimizer import OffloadedOptimizer
from spillway.optim.optimizer_class import MASTER, taken_by
from spillway.session import Session

_ARGUMENTS = (
    *("offload_fraction", "cpu_optimizer_cls", "gpu_optimizer_cls", "param_update_in_fp32"),
    *("pin_cpu_grads", "pin_cpu_params", "overlap_cpu_optimizer_d2h_h2d"),
)
"""Arguments that are attributes and defaults, but no settings of a group."""
_NEWER = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_THEIR_MASTER = "master_param"
_DECOUPLED = "decoupled_grad"


class HybridDeviceOptimizer(OffloadedOptimizer):
    """An optimizer that steps a fraction of the accelerator's elements on the CPU, and the rest on the accelerator.

    A :class:`spillway.OffloadedOptimizer` by other names. ``docs/compat/megatron.md`` lists the differences.

    Args:
        params: parameters, or parameter groups with any other keys.
        offload_fraction: fraction of the accelerator's elements that are stepped on the CPU. Parameters are taken in
            order until it is reached. Parameters on the CPU are always stepped there.
        cpu_optimizer_cls: the class that steps on the CPU. ``None``: the other one.
        gpu_optimizer_cls: the class that steps on the accelerator. ``None``: the other one.
        param_update_in_fp32: whether parameters of a narrower dtype have fp32 master weights.
        pin_cpu_grads: without effect, like the next one: all transfers use the session's pinned memory.
        pin_cpu_params: see there.
        overlap_cpu_optimizer_d2h_h2d: whether gradients are offloaded during backward. If not, they stay on the
            accelerator until they are cleared, and are copied in ``step()``.
        session: its pinned memory is used. ``None``: the default one.
        kwargs: for the classes: each gets those that it accepts. All others are put into the groups.

    Raises:
        UsageError: without a class, or for another invalid argument.
        UnsupportedError: for an unsupported class or parameter.

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
            raise UsageError("cpu_optimizer_cls, gpu_optimizer_cls: both are None; give at least one optimizer class")
        if newer := [name for name in _NEWER if name in kwargs]:
            raise UnsupportedError(
                f"{', '.join(newer)}: not supported; param_update_in_fp32=True keeps master weights and moments in fp32"
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
        # A new optimizer with these defaults is the same.
        self.defaults.update({**others, **{name: getattr(self, name) for name in _ARGUMENTS}})
        self.register_step_pre_hook(_take_decoupled)
        self.register_state_dict_post_hook(partial(_rename, before=MASTER, after=_THEIR_MASTER))
        self.register_load_state_dict_pre_hook(partial(_rename, before=_THEIR_MASTER, after=MASTER))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group. The fraction is taken of each group by itself."""
        super().add_param_group(param_group)
        for name in _ARGUMENTS:
            self.param_groups[-1].pop(name, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those in ``decoupled_grad``."""
        super().zero_grad(set_to_none)
        for group in self.param_groups:
            for parameter in group["params"]:
                decoupled = getattr(parameter, _DECOUPLED, None)
                if decoupled is not None and set_to_none:
                    setattr(parameter, _DECOUPLED, None)
                elif decoupled is not None:
                    decoupled.zero_()

    def update_fp32_param_by_new_param(self) -> None:
        """Set the fp32 master weights from the parameters: :meth:`refresh_master_weights`."""
        self.refresh_master_weights()

    def dummy_step(self) -> None:
        """Create the optimizer state, to load a checkpoint in place: a step with gradients and learning rates of 0.

        It changes no parameter and no existing state. It clears all gradients.
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
    """Use ``decoupled_grad`` in place of ``grad``."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _DECOUPLED):
                decoupled = getattr(parameter, _DECOUPLED)
                parameter.grad = None
                if decoupled is not None and decoupled.dtype != parameter.dtype:
                    parameter.grad_dtype = None  # allows any dtype
                parameter.grad = decoupled


def _rename(optimizer: Optimizer, state_dict: dict[str, Any], *, before: str, after: str) -> dict[str, Any]:
    states = {
        number: {after if name == before else name: value for name, value in state.items()}
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}
