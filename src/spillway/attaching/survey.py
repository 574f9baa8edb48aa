"""What is measured of a model before there is a plan for it: bytes in one pass, and times in another one.

The stages are those of NOTE [ How a plan is found ] in ``pilot.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spillway.planning.profile import Profile
from spillway.planning.scaling import enlarged, risen
from spillway.profiling.compile import compile_profile
from spillway.profiling.probe import Probe
from spillway.profiling.watch import Watched

if TYPE_CHECKING:
    from spillway.profiling.meter import Known

_MOST_OTHERS = 4
_MOST_STRANGERS = 32


@dataclass(frozen=True, slots=True)
class _Weighed:
    """The pass in which bytes were measured."""

    watched: Watched
    inputs: int


class Survey:
    """See the top of this file.

    Args:
        model: its class.
        device: where it computes.
        min_bytes: what is smaller does not leave.
        tell: what of the device's bytes can be told, now. ``None``: nothing can.
    """

    def __init__(
        self, model: str, device: torch.device, *, min_bytes: int, tell: Callable[[], Known] | None = None
    ) -> None:
        self._model = model
        self._device = device
        self._min_bytes = min_bytes
        self._tell = tell
        self._known: Known | None = None
        """As it was when the step began that is weighed."""
        self._weighed: _Weighed | None = None
        self._others = 0
        """Passes of other kinds of blocks than the one that was weighed."""
        self._strangers = 0
        self.is_rough = False
        """Whether bytes are those of a pass with kinds of blocks that had not come before."""
        self.inputs = 0
        """Bytes of the model's inputs in the profile."""

    def begin(self) -> None:
        """The step begins in which bytes are measured."""
        self._known = None if self._tell is None else self._tell()

    def weigh(self, watched: Watched, inputs: int) -> None:
        """It has ended.

        Args:
            watched: its pass.
            inputs: bytes of the model's inputs.
        """
        self._weighed, self._others = _Weighed(watched, inputs), 0

    def takes_stranger(self) -> bool:
        """Whether a pass counts in which a kind of block was traced: not before it is known that none comes twice."""
        self._strangers += 1
        self.is_rough = self._strangers > _MOST_STRANGERS
        return self.is_rough

    def passes_over(self, watched: Watched) -> bool:
        """Whether a pass is of other kinds of blocks than the one that was weighed, and these may come again."""
        if self._is_as_weighed(watched):
            return False
        self._others += 1
        return self._others <= _MOST_OTHERS

    def profile(self, watched: Watched, probes: Mapping[Hashable, Probe]) -> Profile:
        """The profile of the model.

        Args:
            watched: the pass in which times were measured.
            probes: of one call of each kind of block.
        """
        weighed = self._weighed
        assert weighed is not None
        if not self._is_as_weighed(watched):
            # Bytes decide about what fits: those of that pass, and its times as they are.
            watched = weighed.watched
        self.inputs = weighed.inputs
        # The profile says all that it has, shorter.
        self._weighed = None
        return compile_profile(
            watched,
            weighed.watched,
            probes,
            model=self._model,
            device=self._device,
            min_bytes=self._min_bytes,
            known=self._known,
        )

    def enlarged(self, profile: Profile, inputs: int) -> Profile:
        """Its profile for inputs of so many bytes, if they are larger."""
        return enlarged(profile, max(inputs / max(self.inputs, 1), 1.0))

    def risen(self, profile: Profile, nbytes: int) -> Profile:
        """A profile for a step that is about to begin, with so many bytes more than the one that was weighed."""
        known = None if self._tell is None else self._tell()
        more = 0 if known is None or self._known is None else known.gradients - self._known.gradients
        return risen(profile, nbytes, has_gradients=2 * more > profile.gradient_bytes > 0)

    def reset(self) -> None:
        """All begins anew."""
        self._weighed = None
        self._strangers = 0
        self.is_rough = False

    def _is_as_weighed(self, watched: Watched) -> bool:
        assert self._weighed is not None
        return _kinds(self._weighed.watched) == _kinds(watched)


def _kinds(watched: Watched) -> list[Hashable]:
    return [call.kind for call in watched.calls]
