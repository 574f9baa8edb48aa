"""The decision about each saved storage, and the list of the tensors that a model would save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway._torch import storage_key, storage_parts
from spillway.errors import PolicyError
from spillway.policies import Keep, Policy
from spillway.saved_tensors.groups import Group, PassGroups
from spillway.saved_tensors.handles import KeptHandle, unpack
from spillway.saved_tensors.identity import StorageMarks, is_parameter, reach, why_unmovable
from spillway.saved_tensors.locator import Locator as Locator
from spillway.types import Decision, SavedTensor

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
    _count: int = 0
    _part_of: type[torch.Tensor] | None = None

    @contextmanager
    def inside(self, wrapper: type[torch.Tensor]) -> Iterator[None]:
        """Inside, decisions are about parts of a wrapper subclass."""
        outer, self._part_of = self._part_of, wrapper
        try:
            yield
        finally:
            self._part_of = outer

    @property
    def keeps_all(self) -> bool:
        return isinstance(self.policy, Keep) and self.groups.rules is None

    def pass_over(self) -> None:
        """The next storage is decided elsewhere."""
        self._count += 1

    def __call__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        decided: Decision | None,
        group: Group | None,
    ) -> Decision:
        """The decision about ``nbytes`` of a storage, for the first tensor over them that was saved."""
        position = self._count
        self._count += 1
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
            self._part_of,
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


@dataclass(frozen=True, slots=True)
class SavedTensorReport:
    """One line of :func:`spillway.list_saved_tensors`: a tensor that autograd would save."""

    nbytes: int
    """Bytes that would be offloaded. 0 for an alias of bytes that are listed already."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    module: str
    """Dotted path of the module whose forward saved it; ``""`` is the model itself."""
    operator: str
    """The torch function that saved it, as ``torch.nn.functional.linear``."""
    moves: bool
    """Whether Spillway would offload it."""
    reason: str
    """Why, or why not."""


def list_saved_tensors(model: torch.nn.Module, *args: Any, **kwargs: Any) -> list[SavedTensorReport]:
    """Run one forward and list the tensors that autograd saves, in order. Nothing is offloaded.

    The operator is the outermost torch function that ran; ``""`` for a custom ``autograd.Function``. Small tensors are
    listed as movable: ``min_bytes`` belongs to the context.

    Args:
        model: called as ``model(*args, **kwargs)`` with gradients on. Its buffers may change (batch norm), as in any
            forward.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        A record for each saved tensor: bytes, module path, operator, whether it is worth offloading, and why not.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [(line.operator, line.moves) for line in list_saved_tensors(layer, torch.ones(2, 4))]
        [('torch.nn.functional.linear', True)]
    """
    lines: list[SavedTensorReport] = []
    # Holding the storages keeps each address unique.
    seen: dict[int, torch.UntypedStorage] = {}
    locator = Locator(modules=True, operators=True)

    def pack(tensor: torch.Tensor) -> KeptHandle:
        module, operator = locator.here()
        for part in storage_parts(tensor):
            nbytes, moves, reason = _judge(tensor, part, locator, seen)
            lines.append(
                SavedTensorReport(
                    nbytes, tuple(part.shape), part.dtype, part.device, module or "", operator or "", moves, reason
                )
            )
        return KeptHandle(tensor)

    with torch.enable_grad(), locator, saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return lines


def _judge(
    whole: torch.Tensor, part: torch.Tensor, locator: Locator, seen: dict[int, torch.UntypedStorage]
) -> tuple[int, bool, str]:
    """Bytes to offload for a part of a saved tensor, whether it would be offloaded, and why (not)."""
    if is_parameter(whole):
        return 0, False, "a parameter or buffer, or a view of one"
    reason = why_unmovable(part)
    if reason is not None:
        return part.numel() * part.element_size(), False, reason
    storage = part.untyped_storage()
    if locator.is_parameter_storage(storage):
        return 0, False, "an alias of a parameter or buffer"
    if storage_key(storage) in seen:
        return 0, True, "shares its bytes with one above"
    seen[storage_key(storage)] = storage
    return reach(part, storage.nbytes())[1], True, "saved for the first time"
