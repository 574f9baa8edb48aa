"""A pass in pieces, for code whose groups begin at one call and end at another.

Where :class:`~spillway.offload` is around a whole forward, a chunk sees only what is saved inside of
:meth:`Chunk.inside`, which is entered for a few operators at a time; in between, nothing is installed in autograd. What
was learned of a forward belongs to the session, by tag, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks

from spillway.capture.groups import Group
from spillway.capture.handles import Handle
from spillway.capture.hooks import Pass, in_backward
from spillway.errors import UsageError
from spillway.groups import Groups, PastGroup, check_name
from spillway.offloading import hooks_of, keep, within
from spillway.policies import Policy, check_tier, wants_modules, wants_operators
from spillway.records import StepStats
from spillway.regions.rerun import in_rerun
from spillway.session import Session


class Chunk:
    """One pass in pieces: one micro-batch's forward through one part of a model, say.

    Args:
        tag: names the code, for what is learned.
        groups: rules about groups; nothing else leaves.
        policy: is asked about what is saved in groups. ``None``: all of it leaves.
        tier: ``"host"``, ``"disk"``, or ``"auto"``, as for :class:`~spillway.offload`.
        spares: is asked about each tensor that autograd saves, the very object: its storage stays if this is true.
        on_backward: called when backward first asks for something that was to leave.
        session: ``None``: the default one.

    Raises:
        UsageError: an argument that cannot be meant.
        SessionError: if the session cannot be used here.

    Example:
        >>> chunk = Chunk(tag="stage 0", groups=spillway.Groups())  # doctest: +SKIP
        >>> chunk.start("attention")  # doctest: +SKIP
        >>> with chunk.inside():  # doctest: +SKIP
        ...     hidden = attention(hidden)
        >>> chunk.commit("attention")  # doctest: +SKIP
        >>> chunk.end()  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        tag: str,
        groups: Groups,
        policy: Policy | None = None,
        tier: str = "auto",
        spares: Callable[[torch.Tensor], bool] | None = None,
        on_backward: Callable[[], object] | None = None,
        session: Session | None = None,
    ) -> None:
        if wants_modules(policy) or wants_operators(policy):
            raise UsageError(f"policy: got {policy!r}, expected one that asks for no module or operator")
        self.session = Session.default() if session is None else session
        self.session.check_open()
        self.tag = tag
        self._spares = spares
        self._pass = Pass(
            self.session,
            policy,
            self.session.memory(tag),
            min_bytes=0,
            tag=tag,
            tier=check_tier(tier),
            window=None,
            locator=None,
            on_backward=on_backward,
            groups=groups,
        )
        self._has_failed = False

    @property
    def groups(self) -> Sequence[Group]:
        """Those that have begun, in order."""
        return self._pass.groups.all

    @property
    def is_live(self) -> bool:
        """Whether what the calling thread saves now may leave: not in a backward, without gradients, if disabled."""
        return self.session.enabled and _builds_a_graph()

    def inside(self) -> AbstractContextManager[None]:
        """A context: what autograd saves inside belongs to the innermost group that has begun and not ended."""
        return self._inside() if self.is_live else aside()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        with hooks_of(self._pack), within(self.session, self._pass):
            yield

    def start(self, name: str) -> Group | None:
        """A group begins; ``None`` where nothing may leave now.

        Raises:
            UsageError: for a name that is none.
        """
        check_name(name)
        return self._pass.groups.start(name) if self.is_live else None

    def commit(self, name: str, *, release: Iterable[torch.Tensor] = (), delay: bool = False) -> bool:
        """The first open group of that name ends, and leaves, if it does not stay by the rules.

        Args:
            name: of the group.
            release: tensors whose memory is to be free then, as for :class:`~spillway.group`.
            delay: do not send it now, but at the next :meth:`Session.flush_groups`.

        Returns:
            Whether there was one. It stays as it is if nothing may leave now.
        """
        group = self._pass.groups.find_open(name) if _builds_a_graph() else None
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
        """Something was raised in the group: what it has stays, and nothing is learned of the chunk."""
        self._has_failed = True
        if group is not None and group in self._pass.groups.open:
            self._pass.groups.give_up(group)

    def stays(self, group: Group) -> bool:
        """Whether the group stays by the rules."""
        return self._pass.groups.stays(group)

    def past(self) -> list[PastGroup]:
        """Its groups so far, as :meth:`Groups.staying` wants them."""
        return self._pass.groups.past()

    def end(self) -> None:
        """The forward is over. Groups that were not committed stay, and :meth:`stats` says so."""
        for group in self._pass.groups.abandon():
            self._pass.ledger.note(f"group {group.name!r} was started and not committed: it stayed")
        self._pass.end(completed=not self._has_failed)

    def stats(self) -> StepStats:
        """Bytes and seconds so far, of its backward too."""
        return self.session.stats_of(self._pass.ledger)

    def _pack(self, tensor: torch.Tensor) -> Handle:
        if self._spares is not None and self._spares(tensor):
            self.session.marks.set(tensor, offload=False)
        return self._pass.pack(tensor)


def aside() -> AbstractContextManager[None]:
    """In place of :meth:`Chunk.inside` where nothing is to leave.

    Somebody around who counts what is saved, as a checkpoint does, is to see as much of it in both runs.
    """
    return keep() if _top_saved_tensors_default_hooks(True) is not None else nullcontext()


def _builds_a_graph() -> bool:
    return torch.is_grad_enabled() and not in_backward() and not in_rerun()
