"""How much longer the host took for the blocks of a plan than the profile says."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spillway.planning.plan import Plan
from spillway.planning.profile import BlockProfile, Profile
from spillway.planning.programs import options_of
from spillway.planning.tasks import Task
from spillway.profiling.watch import Watched

_WORTH = 1.1
"""What is less off than this is not worth another plan."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """What the host took in a planned step for each second that was predicted, of blocks that are not left alone."""

    forward: float = 1.0
    backward: float = 1.0

    @classmethod
    def of(cls, profile: Profile, plan: Plan, watched: Watched) -> Slowness:
        """That of a step that was watched.

        Args:
            profile: that the plan was made of.
            plan: which the step went by.
            watched: the step.
        """
        names = [call.name for call in watched.calls]
        if names != [block.name for block in plan.blocks]:
            return cls()
        forward, backward = [], []
        for number, (block, option) in enumerate(zip(plan.blocks, options_of(profile, plan), strict=True)):
            if block.plain:
                continue
            forward.append(_ratio(watched.host_seconds(("forward", number), ("end", number)), option.forward))
            until = ("back", number - 1) if number else ("first", 0)
            if until in watched.readings and ("back", number) in watched.readings:
                backward.append(_ratio(watched.host_seconds(("back", number), until), option.backward))
        # In forward the queue fills up. In backward it may be full: there the block counts that waited least. See
        # NOTE [ The host's clock ] in ``watch.py``.
        return cls(statistics.median(forward or [1.0]), min(backward, default=1.0))

    @classmethod
    def most(cls, ranks: Sequence[Slowness]) -> Slowness:
        """That of the slowest rank."""
        return cls(max(each.forward for each in ranks), max(each.backward for each in ranks))

    def least(self, other: Slowness) -> Slowness:
        """That of the faster one of two steps."""
        return Slowness(min(self.forward, other.forward), min(self.backward, other.backward))

    def matters_to(self, profile: Profile) -> bool:
        """Whether a plan should be made that knows of it: of a faster host, where the host is what a step waits for."""
        if max(self.forward, self.backward) > _WORTH:
            return True
        is_late = any(kind.host is not None and kind.host.region > kind.forward_seconds for kind in profile.kinds)
        return is_late and self.forward * _WORTH < 1.0

    def told(self, profile: Profile) -> Profile:
        """The profile, with what was seen. A block that waits less in backward than foreseen need not be fast."""
        return replace(profile, kinds=tuple(self._block(kind) for kind in profile.kinds))

    def _block(self, kind: BlockProfile) -> BlockProfile:
        if kind.host is None:
            return kind
        forward, backward = self.forward, max(self.backward, 1.0)
        host = replace(
            kind.host,
            plain=kind.host.plain * forward,
            region=kind.host.region * forward,
            rerun=kind.host.rerun * backward,
            backward=kind.host.backward * backward,
        )
        return replace(kind, host=host)


def _ratio(seconds: float, tasks: Sequence[Task]) -> float:
    predicted = sum(task.host_seconds for task in tasks)
    return seconds / predicted if predicted else 1.0
