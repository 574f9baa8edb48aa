"""The decision about each saved storage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spillway.errors import PolicyError
from spillway.policies import Policy
from spillway.saved_tensors.groups import Group, PassGroups
from spillway.saved_tensors.identity import StorageMarks
from spillway.types import Decision, SavedTensor

if TYPE_CHECKING:
    from spillway.saved_tensors.locator import Locator

# A member of an enum costs a search of its class each time that it is named.
_KEEP, _OFFLOAD = Decision.KEEP, Decision.OFFLOAD


@dataclass(eq=False)
class Decider:
    """Decides by, in this order: the user's marks, the size, a given decision or the policy, the rules about groups."""

    policy: Policy | None
    groups: PassGroups
    marks: StorageMarks[bool]
    min_bytes: int
    tag: str | None
    locator: Locator | None
    offloaded_bytes: int = 0
    """Bytes offloaded so far, for the policy to read. An adapter may reset it."""
    total_bytes: int | None = None
    """Bytes that the last similar pass saved, for the policy to read."""
    count: int = 0
    """Storages that were saved so far, also those that are decided about elsewhere."""
    part_of: type[torch.Tensor] | None = None
    """The wrapper subclass whose parts are decided about."""

    def __call__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        decided: Decision | None,
        group: Group | None,
    ) -> Decision:
        """The decision about ``nbytes`` of a storage, for the first tensor over them that was saved."""
        position = self.count
        self.count += 1
        marked = self.marks.get(storage)
        if marked is not None:
            return _OFFLOAD if marked else _KEEP
        if nbytes < self.min_bytes:
            return _KEEP
        if decided is not None:
            return decided if group is None else self._in_group(group, nbytes, decided)
        if self.policy is None:
            return self._in_group(group, nbytes, _OFFLOAD)
        module, function = self.locator.here() if self.locator is not None else (None, None)
        saved = SavedTensor(
            nbytes,
            tensor.shape,
            tensor.dtype,
            tensor.device,
            position,
            self.tag,
            self.offloaded_bytes,
            self.total_bytes,
            module,
            function,
            self.part_of,
            None if group is None else group.name,
        )
        decision = self.policy(saved)
        if not isinstance(decision, Decision) or decision is Decision.RECOMPUTE:
            raise PolicyError(
                f"policy {self.policy!r}: got {decision!r} for {saved}, expected a spillway.Decision; return one of "
                f"{', '.join(str(member) for member in Decision if member is not Decision.RECOMPUTE)}. To recompute, "
                f"use spillway.recompute."
            )
        return self._in_group(group, nbytes, decision)

    def _in_group(self, group: Group | None, nbytes: int, decision: Decision) -> Decision:
        """Apply the rules about groups to a decision to offload."""
        if decision is _KEEP:
            return decision
        if group is not None:
            group.nbytes += nbytes
            group.count += 1
        return _KEEP if self.groups.stays(group) else decision
