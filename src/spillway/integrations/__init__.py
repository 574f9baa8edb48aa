"""Trainers and other libraries under Spillway, one file each.

They share the user's options for ``spillway.attach``, and attaching at a module's first call. Trainers build a model
long before they train it: on the meta device, to be compiled, sharded, moved and loaded. So the options are checked at
once, and some integrations attach only when the model is first called in training.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from spillway.attaching import Attached, as_policy, attach
from spillway.attaching.call import ModuleCall
from spillway.attaching.validation import check_options
from spillway.checkpointing.blocks import Named, perhaps
from spillway.errors import UsageError
from spillway.parameters.streamable import trainer_of
from spillway.recomputing import Recompute

_KNOWN = tuple(inspect.signature(attach).parameters)[1:]


@dataclass(frozen=True)
class AttachOptions:
    """Options of :func:`spillway.attach`, by name, which are checked at once."""

    options: dict[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.options.items():
            if name not in _KNOWN:
                raise UsageError(
                    f"{name}={value!r:.200}: spillway.attach has no option {name!r}; {perhaps(name, _KNOWN)}there are "
                    f"{', '.join(_KNOWN)}"
                )
        as_policy(self.options.get("policy"))
        check_options(self.options)

    @property
    def recomputes(self) -> bool:
        """Whether blocks are checkpointed, so that the trainer must not checkpoint them too."""
        policy = as_policy(self.options.get("policy"))
        return isinstance(policy, Recompute) if policy is not None else self.options.get("groups") is None

    def attach(self, model: Module, optimizers: Iterable[object] = ()) -> Attached:
        """Attach to a model. Raises what :func:`spillway.attach` does.

        With ``stream`` and no ``optimizer``, one of these optimizers that holds its parameters steps streamed ones.
        """
        options = self.options
        if options.get("stream") is not None and options.get("optimizer") is None:
            options = {**options, "optimizer": trainer_of(model, optimizers)}
        return attach(model, **options)


class FirstCall(ModuleCall):
    """Takes a module's call over until it is called in training mode with gradients.

    ``attach`` is called then. If it attaches to the module, it gives this call back first and returns ``True``; the
    module is then called again. See NOTE [ How a module's call is taken over ] in ``attaching/call.py``.
    """

    def __init__(self, named: Named, attach: Callable[[Module, tuple[Any, ...], dict[str, Any]], bool]) -> None:
        super().__init__(named)
        self._attach = attach

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module(*args, **kwargs) if self._attach(module, args, kwargs) else self.plain(module, args, kwargs)
