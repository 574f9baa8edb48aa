"""haiscale's ``CPUOffload``: a ratio of what a part of a forward saves goes to host memory, by tag.

A ``CPUOffload`` is a :class:`spillway.offload` of :class:`spillway.policies.Ratio`, without a least size, into the
host tier, in the default session. What is known of a tag belongs to that session; :class:`TagInfo` reads it there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import TracebackType
from typing import ClassVar

import torch

from spillway.capture.hooks import Pass
from spillway.capture.order import Memory
from spillway.errors import UsageError
from spillway.offloading import offload
from spillway.policies import Ratio
from spillway.runtime.backend import Lane
from spillway.session import Session
from spillway.units import format_bytes

__all__ = ["CPUOffload", "TagInfo"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TagInfo:
    """What the default session knows of a tag, for reading.

    Args:
        tag: the tag. One that nobody has used is in its first iteration.
    """

    tag: str

    @property
    def is_first_iter(self) -> bool:
        """Whether no pass has counted yet what it saves."""
        return not self._memory.total_bytes

    @property
    def total_activations_memory(self) -> int:
        """Bytes that the last finished pass saved, evaluations left out; in the first iteration, those saved so far."""
        current = self._current
        return self._memory.total_bytes or (0 if current is None else current.ledger.saved_bytes)

    @property
    def current_offload_memory(self) -> int:
        """Bytes that have left in the pass that the calling thread is in; 0 outside of one."""
        current = self._current
        return 0 if current is None else current.decider.offloaded_bytes

    @property
    def stream(self) -> Lane:
        """The stream of copies out of the current accelerator (or the CPU's lane), which all tags share."""
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        return Session.default().runtime(device).mover.lanes[0]

    def reset_current_offload_memory(self) -> None:
        """Count anew in the pass that the calling thread is in. An exit does so by itself."""
        current = self._current
        if current is not None:
            current.decider.offloaded_bytes = 0

    @property
    def _memory(self) -> Memory:
        return Session.default().memory(self.tag)

    @property
    def _current(self) -> Pass | None:
        return Session.default().passes.under(self.tag)


@dataclass(frozen=True, eq=False)
class CPUOffload:
    """What autograd saves inside goes to host memory, up to a ratio of the bytes that the tag's passes save.

    The first pass of a tag offloads all, and counts. One ``with`` is one pass; make a new object for each, with
    whatever ratio, or enter one again.

    Args:
        offload_ratio: from 0 to 1.
        tag: names the code inside, for what is learned.

    Raises:
        UsageError: a ratio that is no number from 0 to 1, a tag that is no string.

    Example:
        >>> with CPUOffload(0.5, "encoder"):  # doctest: +SKIP
        ...     hidden = self.encoder(hidden)
    """

    offload_ratio: float
    tag: str
    hook: offload = field(init=False, repr=False)
    """The context that does it; ``hook.stats()`` says what it did."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        info = TagInfo(self.tag)
        was_first = info.is_first_iter
        self.hook.__exit__(kind, error, trace)
        if was_first and not info.is_first_iter:
            total = info.total_activations_memory
            _log.info("tag %r: a pass saves %d bytes (%s)", self.tag, total, format_bytes(total))
