"""A forward pass in pieces, for Megatron-Core's chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from spillway.offloading import builds_a_graph, hooks_of, keep_if_counted, within_scope
from spillway.policies import Policy, check_tier
from spillway.saved_tensors.groups import Group, Groups, check_name
from spillway.saved_tensors.handles import Handle
from spillway.saved_tensors.hooks import ForwardScope, SavedState
from spillway.saved_tensors.order import PastGroup
from spillway.session import Session
from spillway.types import StepStats


class Chunk:
    """A pass in pieces, for code whose groups begin in one call and end in another, such as a micro-batch's forward.

    Only tensors saved inside of :meth:`inside` belong to it. It is entered for a few operators at a time. In between,
    no hooks are installed. Learned state belongs to the session, by tag.

    Args:
        tag: names the code, for learned state.
        groups: rules about groups; no other tensors are offloaded.
        policy: is asked about tensors saved in groups.
        tier: ``"host"``, ``"disk"``, or ``"auto"``, as for :class:`~spillway.offload`.
        spares: called with each saved tensor, the very object: its storage is kept if this is true.
        on_backward: called when backward asks for the first offloaded tensor.
        session: moves the bytes.
    """

    def __init__(
        self,
        *,
        tag: str,
        groups: Groups,
        policy: Policy,
        tier: str,
        spares: Callable[[torch.Tensor], bool],
        on_backward: Callable[[], object],
        session: Session,
    ) -> None:
        self.session = session
        self.session.check_open()
        self._state = session.of(SavedState)
        self._spares = spares
        self._pass = ForwardScope(
            session,
            policy,
            self._state.learned(tag),
            min_bytes=0,
            tag=tag,
            tier=check_tier(tier),
            on_backward=on_backward,
            groups=groups,
        )
        self._has_failed = False

    @property
    def groups(self) -> Sequence[Group]:
        """The groups that have begun, in order."""
        return self._pass.groups.all

    @property
    def is_live(self) -> bool:
        """Whether tensors saved now may be offloaded: not in a backward, without gradients, or if disabled."""
        return self.session.enabled and builds_a_graph()

    def is_spared(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage was marked to be kept."""
        return self._state.marks.get(storage) is False

    def inside(self) -> AbstractContextManager[None]:
        """A context: tensors saved inside belong to the innermost group that has begun and not ended."""
        return self._inside() if self.is_live else keep_if_counted()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with hooks_of(self._pack), within_scope(self.session, self._pass):
            yield

    def start(self, name: str) -> Group | None:
        """A group begins; ``None`` where nothing may be offloaded now."""
        check_name(name)
        return self._pass.groups.start(name) if self.is_live else None

    def commit(self, name: str, *, release: Iterable[torch.Tensor] = (), delay: bool = False) -> bool:
        """The first open group of that name ends, and is offloaded if the rules do not keep it.

        Args:
            name: of the group.
            release: tensors whose memory is to be freed then, as for :class:`~spillway.group`.
            delay: do not offload it now, but at the next :meth:`Session.flush_groups`.

        Returns:
            Whether there was one. If nothing may be offloaded now, it is not changed.
        """
        opened = self._pass.groups.open if builds_a_graph() else []
        group = next((group for group in opened if group.name == name), None)
        if group is None:
            return False
        if not self.session.enabled:
            self._pass.groups.give_up(group)
            return True
        self._pass.groups.end(group, release=release, later=delay)
        if delay:
            self.session.delay(lambda: self._pass.groups.send(group))
        return True

    def fail(self, group: Group | None) -> None:
        """An exception was raised in the group: its tensors are kept, and nothing is learned of the chunk."""
        self._has_failed = True
        if group is not None and group in self._pass.groups.open:
            self._pass.groups.give_up(group)

    def stays(self, group: Group) -> bool:
        """Whether the rules keep the group."""
        return self._pass.groups.stays(group)

    def past(self) -> list[PastGroup]:
        """Its groups so far, for :meth:`Groups.staying`."""
        return self._pass.groups.past()

    def end(self) -> None:
        """The forward is over. Groups that were not committed are kept, and :meth:`stats` notes it."""
        for group in self._pass.groups.abandon():
            self._pass.ledger.note(f"group {group.name!r} was started and not committed: it stayed")
        self._pass.end(completed=not self._has_failed)

    def stats(self) -> StepStats:
        """Bytes and seconds so far, of its backward too."""
        return self.session.stats_of(self._pass.ledger)

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if self._spares(tensor):
            self._state.marks.set(tensor, False)
        return self._pass.pack(tensor)
