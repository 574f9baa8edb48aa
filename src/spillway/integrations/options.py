"""What a trainer's user says of ``spillway.attach``: checked at once, and used when the model is there."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from spillway.attaching import Attached, attach, policy_named
from spillway.blocks import perhaps
from spillway.errors import UsageError
from spillway.recomputing import Recompute

_KNOWN = tuple(inspect.signature(attach).parameters)[1:]


@dataclass(frozen=True)
class AttachOptions:
    """Options of :func:`spillway.attach`, by name.

    Raises:
        UsageError: for a name that it has not.
    """

    options: dict[str, Any]

    def __post_init__(self) -> None:
        for name in self.options:
            if name not in _KNOWN:
                raise UsageError(
                    f"got {name}={self.options[name]!r:.200}, expected options of spillway.attach: "
                    f"{perhaps(name, _KNOWN)}there are {', '.join(_KNOWN)}"
                )
        if isinstance(self.options.get("policy"), str):
            policy_named(self.options["policy"])

    @property
    def recomputes(self) -> bool:
        """Whether blocks are made regions, which must not be checkpointed a second time."""
        policy = self.options.get("policy")
        if isinstance(policy, str):
            policy = policy_named(policy)
        return isinstance(policy, Recompute) if policy is not None else self.options.get("groups") is None

    def attach(self, model: Module) -> Attached:
        """Attach; raises what :func:`spillway.attach` does."""
        return attach(model, **self.options)
