"""haiscale's ``CPUOffload``: offloads a ratio of the activations of a part of the model, by tag.

A ``CPUOffload`` is a :class:`spillway.offload` with the policy :class:`spillway.policies.Ratio`, without a least size,
into CPU memory, in the default session. The session learns by tag, and :class:`TagInfo` shows what it has learned.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from spillway.errors import UsageError
from spillway.offloading import offload
from spillway.policies import Ratio
from spillway.runtime.backend import Stream
from spillway.runtime.system import which_device
from spillway.saved_tensors.hooks import ForwardScope, SavedState
from spillway.saved_tensors.order import LearnedOrders
from spillway.saved_tensors.scopes import innermost_scope
from spillway.session import Session
from spillway.units import format_bytes

__all__ = ["CPUOffload", "TagInfo"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TagInfo:
    """The default session's record of a tag. Read only.

    Args:
        tag: the tag. An unused one is in its first iteration.
    """

    tag: str

    @property
    def is_first_iter(self) -> bool:
        """Whether no forward pass has counted its bytes yet."""
        return not self._memory.total_bytes

    @property
    def total_activations_memory(self) -> int:
        """Bytes that the last forward pass with gradients saved; in the first one, the bytes so far."""
        current = self._current
        return self._memory.total_bytes or (current.ledger.saved_bytes if current else 0)

    @property
    def current_offload_memory(self) -> int:
        """Bytes offloaded in the current forward pass of the calling thread; 0 outside of one."""
        current = self._current
        return 0 if current is None else current.decider.offloaded_bytes

    @property
    def stream(self) -> Stream:
        """The offload stream of the current accelerator or of the CPU, which all tags share."""
        return Session.default().runtime(which_device()).mover.streams[0]

    def reset_current_offload_memory(self) -> None:
        """Count from 0 again in the current forward pass of the calling thread. Every exit does so."""
        if self._current is not None:
            self._current.decider.offloaded_bytes = 0

    @property
    def _memory(self) -> LearnedOrders:
        return Session.default().of(SavedState).learned(self.tag)

    @property
    def _current(self) -> ForwardScope | None:
        return innermost_scope(Session.default(), self.tag)


@dataclass(frozen=True, eq=False)
class CPUOffload:
    """Offloads tensors that autograd saves inside, up to a ratio of the bytes that the tag saves, from 0 to 1.

    The first forward pass of a tag offloads everything and counts the bytes. Each ``with`` is one forward pass. Make a
    new object for each, with any ratio, or enter the same one again.

    Raises:
        UsageError: if the ratio is no number from 0 to 1, or the tag is no string.

    Example:
        >>> with CPUOffload(0.5, "encoder"):  # doctest: +SKIP
        ...     hidden = encoder(hidden)
    """

    offload_ratio: float
    tag: str
    hook: offload = field(init=False, repr=False)
    """The :class:`spillway.offload`; ``hook.stats()`` has the statistics."""

    _tag_infos: ClassVar[dict[str, TagInfo]] = {}

    def __post_init__(self) -> None:
        if not isinstance(self.tag, str):
            raise UsageError(f"tag: got {self.tag!r}, expected a string; give each part of the model a name of its own")
        hook = offload(policy=Ratio(self.offload_ratio), tag=self.tag, min_bytes=0, tier="host")
        object.__setattr__(self, "hook", hook)
        if self.tag not in self._tag_infos:
            self._tag_infos[self.tag] = TagInfo(self.tag)
            _log.info("tag %r: registered with offload ratio %s", self.tag, self.offload_ratio)

    @classmethod
    def get_tensor_memory(cls, x: torch.Tensor) -> int:
        """Bytes of a tensor's elements."""
        return x.element_size() * x.numel()

    def __enter__(self) -> None:
        self.hook.__enter__()

    def __exit__(self, *error: Any) -> None:
        info = TagInfo(self.tag)
        was_first = info.is_first_iter
        self.hook.__exit__(*error)
        if was_first and not info.is_first_iter:
            total = info.total_activations_memory
            _log.info("tag %r: a forward pass saves %d bytes (%s)", self.tag, total, format_bytes(total))
