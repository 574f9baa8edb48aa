"""The chunks of an iteration and their groups: a forward pass in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from spillway._torch import base_of
from spillway.offloading import builds_a_graph, hooks_of
from spillway.policies import check_tier
from spillway.saved_tensors.groups import Group, Groups, PassGroups, check_name
from spillway.saved_tensors.handles import Handle
from spillway.saved_tensors.hooks import ForwardScope, SavedState
from spillway.saved_tensors.identity import is_parameter, reach, why_unmovable
from spillway.saved_tensors.scopes import within_scope
from spillway.session import Session
from spillway.types import Decision, SavedTensor, StepStats


class ChunkOffloadHandler:
    """The forward of one micro-batch through one virtual stage. Public names are read only.

    Its groups begin in one call and end in another. Only tensors saved inside of :meth:`_inside` belong to it. It is
    entered for a few operators at a time. In between, no hooks are installed. Learned state belongs to the session, by
    ``tag``. ``on_backward`` is called when backward asks for the first offloaded tensor.
    """

    def __init__(
        self,
        session: Session,
        tag: str,
        min_offloaded_tensor_size: int,
        *,
        groups: Groups,
        tier: str,
        on_backward: Callable[[], object],
    ) -> None:
        session.check_open()
        self.min_offloaded_tensor_size = min_offloaded_tensor_size
        """Least size of an offloaded tensor, in elements."""
        self._session = session
        self._state = session.of(SavedState)
        self._scope = ForwardScope(
            session,
            self._by_elements,
            self._state.learned(tag),
            min_bytes=0,
            tag=tag,
            tier=check_tier(tier),
            on_backward=on_backward,
            groups=groups,
        )
        self._has_failed = False

    @property
    def do_offload(self) -> bool:
        """Whether offloading is enabled: for all chunks or for none."""
        return self._session.enabled

    @property
    def offload_groups(self) -> list[OffloadTensorGroup]:
        """Its groups so far, in the order in which they started."""
        return [OffloadTensorGroup(self._scope.groups, group) for group in self._scope.groups.all]

    def find_group_with_name(self, name: str, start_index: int = 0) -> OffloadTensorGroup | None:
        """The first group of that name from ``start_index`` on; ``None`` if there is none."""
        return next((group for group in self.offload_groups[start_index:] if group.name == name), None)

    def is_empty_chunk(self, name: str | None = None) -> bool:
        """Whether it has no group, or none of that name."""
        return not self.offload_groups if name is None else self.find_group_with_name(name) is None

    def get_max_deduplicated_groups(self) -> int:
        """Number of distinct group names."""
        return len({group.name for group in self._scope.groups.all})

    def tensor_need_offloading_checker(self, tensor: torch.Tensor) -> bool:
        """Whether an offloaded group would offload the tensor, judging by its kind, size and marks."""
        if is_parameter(tensor) or why_unmovable(tensor) is not None or _is_marked(tensor):
            return False
        storage = tensor.untyped_storage()
        nbytes = reach(tensor, storage.nbytes())[1]
        return self._state.marks.get(storage) is not False and self._is_large(nbytes, tensor.dtype)

    def stats(self) -> StepStats:
        """Bytes and seconds of its forward and backward so far, also by groups. Megatron has no such method."""
        return self._session.stats_of(self._scope.ledger)

    def _is_live(self) -> bool:
        """Whether tensors saved now may be offloaded: not in a backward, without gradients, or if disabled."""
        return self._session.enabled and builds_a_graph()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Tensors saved inside belong to the innermost group that has begun and not ended."""
        with hooks_of(self._pack), within_scope(self._scope):
            yield

    def _start(self, name: str) -> Group | None:
        """A group begins; ``None`` where nothing may be offloaded now."""
        check_name(name)
        return self._scope.groups.start(name) if self._is_live() else None

    def _commit(self, name: str, *, release: Iterable[torch.Tensor], delay: bool) -> None:
        """End the first open group of that name, if there is one, and offload it if the rules do not keep it.

        The memory of the tensors ``release`` is freed then, as for :class:`~spillway.group`. With ``delay``, it is
        offloaded at the next :meth:`Session.flush_groups`. Nothing changes if no graph is built now.
        """
        groups = self._scope.groups
        opened = groups.open if builds_a_graph() else []
        group = next((group for group in opened if group.name == name), None)
        if group is None:
            return
        if not self._session.enabled:
            groups.give_up(group)
            return
        groups.end(group, release=release, later=delay)
        if delay:
            self._session.delay(lambda: groups.send(group), group.has_nothing_to_send)

    def _fail(self, group: Group) -> None:
        """An exception was raised in the group: its tensors are kept, and nothing is learned of the chunk."""
        self._has_failed = True
        if group in self._scope.groups.open:
            self._scope.groups.give_up(group)

    def _end(self) -> None:
        """The forward is over. Groups that were not committed are kept, and :meth:`stats` notes it."""
        for group in self._scope.groups.abandon():
            self._scope.ledger.note(f"group {group.name!r} was started and not committed: it stayed")
        self._scope.end(completed=not self._has_failed)

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if _is_marked(tensor):
            self._state.marks.set(tensor, False)
        return self._scope.pack(tensor)

    def _by_elements(self, saved: SavedTensor) -> Decision:
        return Decision.OFFLOAD if self._is_large(saved.nbytes, saved.dtype) else Decision.KEEP

    def _is_large(self, nbytes: int, dtype: torch.dtype) -> bool:
        return nbytes >= self.min_offloaded_tensor_size * dtype.itemsize


@dataclass(frozen=True)
class OffloadTensorGroup:
    """One group of a chunk. Read only."""

    _groups: PassGroups
    _group: Group

    @property
    def name(self) -> str:
        """Its name; groups of a chunk may share one."""
        return self._group.name

    @property
    def offload(self) -> bool:
        """Whether it is offloaded."""
        return not self._groups.stays(self._group)

    @property
    def total_offload_bytes(self) -> int:
        """Bytes of its tensors that are large enough and not marked. They are offloaded if the group is."""
        return self._group.nbytes

    @property
    def total_tensor_count(self) -> int:
        """Number of their storages."""
        return self._group.count


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether the tensor, or the one that it is a view of, is marked as not offloadable."""
    return any(
        getattr(each, "offloading_activation", None) is False
        or getattr(each, "_TE_do_not_offload", False)
        or getattr(each, "_do_not_offload", False)
        for each in (tensor, base_of(tensor))
    )
