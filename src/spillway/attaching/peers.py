"""The ranks that train one model together, and hence need one plan.

NOTE [ One plan for many ranks ]

Under FSDP2 a block that one rank computes again, and another one does not, may gather what is sharded inside of it
once more: the ranks would wait for each other for ever. Under DDP ranks with several plans would wait for the slowest.
So ranks that share a model's parameters find their plan together, and go through the stages of the search in step:

- A stage ends for all of them when it has ended for each.
- The profile is that of the rank that saves most; what is there before the step is that of the fullest.
- Hardware is the first rank's; room in host memory the least of all. Each rank solves, and the first one's plan counts.
- The peak that is checked is the highest one. While a plan is held it is looked at now and then, for it takes talking.

Who they are is read off the model when it is first called: the group of a ``DistributedDataParallel`` around it or in
it, of an ``FullyShardedDataParallel``, and the dimensions of the meshes that ``DTensor`` parameters (``fully_shard``,
tensor parallel) lie on. A pipeline's stage shares none, and finds its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from torch.nn import Module

from spillway.blocks import is_a
from spillway.errors import SpillwayError, UnsupportedError, UsageError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_DDP = "torch.nn.parallel.distributed"
_FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel"

T = TypeVar("T")


class Peers:
    """See NOTE [ One plan for many ranks ].

    Args:
        groups: their process groups, one for each dimension of a mesh. None: there is one rank.
    """

    def __init__(self, groups: Sequence[ProcessGroup] = ()) -> None:
        self._groups = groups

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return not self._groups

    def share(self, what: str, make: Callable[[], T]) -> list[T]:
        """Make something on each rank, and give all ranks what all have made, in one order. All have to call it.

        Args:
            what: it is, the same on all ranks.
            make: makes it.

        Raises:
            SpillwayError: what ``make`` raises here. On the ranks where it raises nothing:
            UnsupportedError: with the words of the first that did.
            UsageError: where ranks do not share the same.
        """
        if not self._groups:
            return [make()]
        failure: SpillwayError | None = None
        mine: list[tuple[str, str | None, T | None]]
        try:
            mine = [(what, None, make())]
        except SpillwayError as error:
            failure, mine = error, [(what, str(error), None)]
        for group in self._groups:
            mine = [each for part in _gathered(mine, group) for each in part]
        if failure is not None:
            raise failure
        if len({said for said, _, _ in mine}) > 1:
            raise UsageError(
                f"got ranks of one model that are at different places of its training ({what} here), expected that all "
                f"train it for as many calls; let them, or give each one the same plan: attach(model, plan=...)"
            )
        other = next((text for _, text, _ in mine if text is not None), None)
        if other is not None:
            raise UnsupportedError(f"got an error on another rank of this model, expected none: {other}")
        return [value for _, _, value in mine]  # type: ignore[misc]


def peers_of(model: Module | None) -> Peers:
    """Who trains a model together with this process. To be asked while the model is called, on all of its ranks.

    They get groups of their own, which talk by way of the host: what they say meets no collective of the model's, waits
    for no device, and takes none of its memory.
    """
    if model is None or not _is_initialized():
        return Peers()
    import torch.distributed

    found = {tuple(torch.distributed.get_process_group_ranks(group)): None for group in _groups_of(model)}
    return Peers([_group_of(ranks) for ranks in found if len(ranks) > 1])


_GROUPS: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], ProcessGroup]] = WeakKeyDictionary()
"""Of each world, those that were made: torch cannot make one anew of the same ranks where another one was destroyed."""


def _group_of(ranks: tuple[int, ...]) -> ProcessGroup:
    import torch.distributed

    world: Any = torch.distributed.group.WORLD
    known = _GROUPS.setdefault(world, {})
    if ranks not in known:
        known[ranks] = torch.distributed.new_group(
            list(ranks), backend="gloo", use_local_synchronization=True, group_desc="spillway plan"
        )
    return known[ranks]


def _is_initialized() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available() and distributed.is_initialized())


def _groups_of(model: Module) -> Iterator[ProcessGroup]:
    yield from _around()
    for module in model.modules():
        if is_a(module, _DDP, "DistributedDataParallel") or is_a(module, _FSDP, "FullyShardedDataParallel"):
            wrapped: Any = module
            yield wrapped.process_group
    meshes = {id(mesh): mesh for mesh in _meshes(model)}
    for mesh in meshes.values():
        yield from mesh.get_all_groups()


def _around() -> Iterable[ProcessGroup]:
    """That of the ``DistributedDataParallel`` whose call this is in: who is in it does not see it otherwise."""
    wrapper: Any = getattr(sys.modules.get(_DDP), "DistributedDataParallel", None)
    active = None if wrapper is None else wrapper._get_active_ddp_module()
    return () if active is None else (active.process_group,)


def _meshes(model: Module) -> Iterator[Any]:
    kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    for parameter in model.parameters():
        if kind is not None and isinstance(parameter, kind):
            yield parameter.device_mesh


def _gathered(mine: T, group: ProcessGroup) -> list[T]:
    import torch.distributed

    found: list[Any] = [None] * group.size()
    torch.distributed.all_gather_object(found, mine, group=group)
    return found
