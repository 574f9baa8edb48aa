"""The ranks that train one model together, and hence need one plan.

NOTE [ One plan for many ranks ]

Under FSDP2, a recomputed block may gather its shards once more. If another rank does not recompute that block, both
wait for each other for ever. Under DDP, ranks with several plans would wait for the slowest. So ranks that share a
model's parameters find one plan, and go through the stages of the search in step:

- A stage ends when it has ended on each rank.
- The profile is that of the rank that saves most, with the largest static bytes of all.
- Hardware is the first rank's, and free CPU memory the least of all. The first rank's plan counts.
- The highest peak is validated. Once a plan is active and timed, ranks do not communicate; one above the budget notes
  it.

Ranks communicate in calls of the model that all of them make. Under DDP these are the calls in which it reduces
gradients: a rank may call the model under ``no_sync``, or without the wrapper, as often as it likes.

The groups are found when the model is first called: that of a ``DistributedDataParallel`` around it or in it, that of
an ``FullyShardedDataParallel``, and the mesh dimensions of ``DTensor`` parameters. A pipeline's stage shares none.

Ranks may also communicate inside of blocks, as tensor parallel layers of plain parameters do. If they recomputed other
blocks, each would wait for collectives of the others. Their groups are found when blocks are measured.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from spillway._torch import active_ddp, may_end_early
from spillway.checkpointing.blocks import FSDP, is_a
from spillway.errors import SpillwayError, UnsupportedError, UsageError
from spillway.planner.profile import Outside, Profile

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


class RankGroup:
    """Ranks, by their process groups: one for each dimension of a mesh. See NOTE [ One plan for many ranks ].

    If a ``DistributedDataParallel`` shares the model, it is the ``wrapper``.
    """

    def __init__(self, groups: Sequence[ProcessGroup] = (), wrapper: Module | None = None) -> None:
        self._groups = groups
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    @property
    def alone(self) -> bool:
        return not self._groups

    def joined(self, groups: Sequence[ProcessGroup]) -> RankGroup:
        """These ranks, and those of other groups. All of them call it, with the groups in one order."""
        known = {id(group): group for group in (*self._groups, *groups) if group.size() > 1}
        if len(known) == len(self._groups):
            return self
        return RankGroup([*known.values()], None if self._wrapper is None else self._wrapper())

    def are_all_here(self, model: Module) -> bool:
        """Whether all of them make the call of the model that begins now."""
        wrapper: Any = None if self._wrapper is None else self._wrapper()
        if wrapper is None:
            return True
        return bool(wrapper.require_backward_grad_sync) and (active_ddp() is wrapper or wrapper in model.modules())

    def share(self, what: str, make: Callable[[], T]) -> list[T]:
        """Make the value of a name on each rank, and give all values to all ranks, in one order. All ranks call it.

        Raises:
            SpillwayError: the error of ``make``.
            UnsupportedError: on the other ranks, with the first error's words.
            UsageError: if ranks share values of different names, or one may have left the others.
        """
        if not self._groups:
            return [make()]
        wrapper = None if self._wrapper is None else self._wrapper()
        if wrapper is not None and may_end_early(wrapper):
            raise UsageError(
                "got a model within DistributedDataParallel.join() while its ranks search a plan, in which a rank "
                "without inputs cannot take part. Train without join() until the plan is active "
                "(attached.stage == 'active'), give each rank the same plan: attach(model, plan=...), or call "
                "join(throw_on_early_termination=True)."
            )
        mine: list[tuple[str, str | None, T | None]] = [(what, "an error that is not Spillway's", None)]
        try:
            mine = [(what, None, make())]
        except SpillwayError as error:
            mine = [(what, str(error), None)]
            raise
        finally:
            # The others wait for this rank, even if it has failed.
            for group in self._groups:
                mine = [each for part in _gathered(mine, group) for each in part]
        if len({name for name, _, _ in mine}) > 1:
            raise UsageError(
                f"got ranks of one model that are at different places of its training ({what} here), expected that all "
                f"train it for as many calls; let them, or give each one the same plan: attach(model, plan=...)"
            )
        other = next((text for _, text, _ in mine if text is not None), None)
        if other is not None:
            raise UnsupportedError(f"Another rank of this model had an error: {other}")
        return [value for _, _, value in mine]  # type: ignore[misc]


ALONE = RankGroup()
"""A process that shares its model with no other."""


def ranks_of(model: Module) -> RankGroup:
    """The ranks that train a model together with this process. Call it on all of them, within the model's call.

    They use the model's own groups: making others of the same ranks was seen to hang.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return ALONE
    # The wrapper may be in the model, or around its call.
    wrapper: Any = next((each for each in model.modules() if isinstance(each, DistributedDataParallel)), active_ddp())
    found = {id(group): group for group in _groups_of(model, wrapper)}
    return RankGroup([group for group in found.values() if group.size() > 1], wrapper)


def _groups_of(model: Module, wrapper: Any) -> Iterator[ProcessGroup]:
    if wrapper is not None:
        yield wrapper.process_group
    for module in model.modules():
        if is_a(module, *FSDP):
            flat: Any = module
            yield flat.process_group
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    sharded = [each for each in model.parameters() if kind is not None and isinstance(each, kind)]
    for mesh in {id(each.device_mesh): each.device_mesh for each in sharded}.values():
        yield from mesh.get_all_groups()


def _gathered(mine: T, group: ProcessGroup) -> list[T]:
    import torch.distributed

    found: list[Any] = [None] * group.size()
    try:
        torch.distributed.all_gather_object(found, mine, group=group)
    except RuntimeError as error:
        raise UsageError(
            f"got no answer of the other ranks of this model ({error}), expected that all train it for as many calls "
            f"until a plan is active; let them, or give each one the same plan: attach(model, plan=...)"
        ) from error
    return found


def shared_profile(profiles: Sequence[Profile]) -> Profile:
    """One profile for all ranks."""
    largest = max(profiles, key=lambda profile: profile.saved_bytes)
    fullest = max(profiles, key=lambda profile: profile.static_bytes)
    return replace(
        largest,
        static_bytes=fullest.static_bytes,
        static=fullest.static,
        before=_fullest(largest.before, [each.before for each in profiles]),
        middle=_fullest(largest.middle, [each.middle for each in profiles]),
        late=None if largest.late is None else _fullest(largest.late, [each.late for each in profiles if each.late]),
        after=_fullest(largest.after, [each.after for each in profiles]),
    )


def _fullest(part: Outside, parts: Sequence[Outside]) -> Outside:
    return replace(
        part,
        peak_bytes=max(each.peak_bytes for each in parts),
        change_bytes=max(each.change_bytes for each in parts),
    )
