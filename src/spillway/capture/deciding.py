"""What becomes of each storage that a pass saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spillway.capture.groups import Group, PassGroups
from spillway.capture.identity import Marks
from spillway.capture.location import Locator
from spillway.errors import PolicyError
from spillway.policies import Keep, Policy
from spillway.records import Decision, SavedTensor

# A member of an enum costs a search of its class each time that it is named.
_KEEP, _OFFLOAD = Decision.KEEP, Decision.OFFLOAD


class Decider:
    """Asks, in turn: the user's marks, the size, whoever has decided already or the policy, and the rules about groups.

    Args:
        policy: decides; ``None`` offloads everything.
        groups: of the pass.
        marks: what the user said of storages.
        min_bytes: smaller tensors are kept, and the policy is not asked.
        tag: of the pass, for the policy to read.
        locator: knows module and operator, if the policy wants them.
    """

    def __init__(
        self,
        policy: Policy | None,
        groups: PassGroups,
        marks: Marks,
        *,
        min_bytes: int,
        tag: str | None,
        locator: Locator | None,
    ) -> None:
        self._policy = policy
        self._groups = groups
        self._marks = marks
        self._min_bytes = min_bytes
        self._tag = tag
        self._locator = locator
        self._count = 0
        self._part_of: type[torch.Tensor] | None = None
        self.offloaded_bytes = 0
        """Bytes that left so far, for the policy to read. Set to 0, it lets a ratio begin anew."""
        self.total_bytes: int | None = None
        """Bytes that the last pass like this one saved, for the policy to read."""

    @contextmanager
    def inside(self, wrapper: type[torch.Tensor]) -> Iterator[None]:
        """A context: what is decided about is a part of such a wrapper."""
        outer, self._part_of = self._part_of, wrapper
        try:
            yield
        finally:
            self._part_of = outer

    @property
    def keeps_all(self) -> bool:
        """Whether the policy has nothing leave, and groups neither."""
        return isinstance(self._policy, Keep) and self._groups.rules is None

    def pass_over(self) -> None:
        """Somebody else has decided about the next one."""
        self._count += 1

    def __call__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        decided: Decision | None,
        group: Group | None,
    ) -> Decision:
        """The decision about so many bytes of a storage, which a tensor has brought in."""
        position = self._count
        self._count += 1
        marks = self._marks
        if marks.any:
            marked = marks.get(storage)
            if marked is not None:
                return _OFFLOAD if marked else _KEEP
        if nbytes < self._min_bytes:
            return _KEEP
        if decided is not None:
            return decided if group is None else self._in_group(group, nbytes, decided)
        if self._policy is None:
            return self._in_group(group, nbytes, _OFFLOAD)
        module, function = self._locator.here() if self._locator is not None else (None, None)
        saved = SavedTensor(
            nbytes,
            tensor.shape,
            tensor.dtype,
            tensor.device,
            position,
            self._tag,
            self.offloaded_bytes,
            self.total_bytes,
            module,
            function,
            self._part_of,
            None if group is None else group.name,
        )
        decision = self._policy(saved)
        if not isinstance(decision, Decision) or decision is Decision.RECOMPUTE:
            raise PolicyError(
                f"policy {self._policy!r}: got {decision!r} for {saved}, expected a spillway.Decision; return one of "
                f"{', '.join(str(member) for member in Decision if member is not Decision.RECOMPUTE)}, and put what is "
                f"to be computed again into a spillway.recompute"
            )
        return self._in_group(group, nbytes, decision)

    def _in_group(self, group: Group | None, nbytes: int, decision: Decision) -> Decision:
        """What the rules about groups say of what would leave."""
        if decision is _KEEP:
            return decision
        if group is not None:
            group.nbytes += nbytes
            group.count += 1
        return _KEEP if self._groups.stays(group) else decision
