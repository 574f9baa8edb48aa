"""The public context of groups: what autograd saves inside leaves together."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import ContextDecorator
from types import TracebackType
from typing import Self

import torch

from spillway.capture.alone import see_again
from spillway.capture.groups import Group
from spillway.capture.hooks import Pass, in_backward
from spillway.errors import UsageError
from spillway.groups import check_name
from spillway.offloading import innermost_pass
from spillway.regions.rerun import in_rerun
from spillway.session import Session


class group(ContextDecorator):  # noqa: N801  (read aloud: with group("core_attn"))
    """What autograd saves inside is a group: it leaves together, when the context exits.

    A context manager and a decorator for the code of a model. The :class:`~spillway.offload` context around it decides:
    with ``groups=spillway.Groups(...)`` only groups leave, by the rules given there; without, a group says no more than
    when what is saved inside leaves, and counts it by name (``stats().groups``). Outside of any such context, in a
    backward, and with gradients off, it does nothing. Groups may be nested: the innermost counts.

    Args:
        name: of the group. Groups of one name are counted together.
        release: tensors whose memory is to be free once the group has left, though somebody still holds them: each is
            given one element in place of its memory, not a number, at every place. More can be named inside, by
            :meth:`release`. Those that do not leave with the group are left as they are.
        delay: do not send the group when the context exits, but at the next :meth:`Session.flush_groups
            <spillway.Session.flush_groups>`.

    Raises:
        UsageError: for a name that is none, or that is empty; on exit, for a tensor to release whose memory something
            else sees, and in another thread.

    Example:
        >>> with spillway.offload(groups=spillway.Groups(margin=1)):  # doctest: +SKIP
        ...     for layer in layers:
        ...         with spillway.group("attention"):
        ...             hidden = layer.attention(hidden)
        ...         hidden = layer.mlp(hidden)
    """

    def __init__(self, name: str, *, release: Iterable[torch.Tensor] = (), delay: bool = False) -> None:
        self._name = check_name(name)
        self._to_release = list(release)
        self._delay = delay
        self._local = _Entered()

    def __enter__(self) -> Self:
        found = innermost_pass() if torch.is_grad_enabled() and not in_backward() and not in_rerun() else None
        if found is None or not found[0].enabled:
            self._local.entered.append(None)
            return self
        see_again()
        session, current = found
        self._local.entered.append((session, current, current.groups.start(self._name), list(self._to_release)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._local.entered:
            raise UsageError(
                f"group {self._name!r}: got an exit in a thread that has not entered it, expected the same"
            )
        entered = self._local.entered.pop()
        if entered is None:
            return
        session, current, started, release = entered
        if kind is not None:
            current.groups.give_up(started)
            return
        current.groups.end(started, release=release, later=self._delay)
        self._local.last = current, started
        if self._delay:
            session.delay(lambda: current.groups.send(started))

    def leave(self) -> None:
        """Send the group that the calling thread has left last with this object, if it was delayed.

        This, :meth:`settle` and :meth:`fetch` say by hand when one group goes and comes.

        Example:
            >>> with spillway.group("layer 3", delay=True) as group:  # doctest: +SKIP
            ...     hidden = layer(hidden)
            >>> group.leave()  # start the copies  # doctest: +SKIP
            >>> group.settle()  # let go of the device's memory when they are done  # doctest: +SKIP
            >>> group.fetch()  # start the way back  # doctest: +SKIP
        """
        if self._local.last is not None:
            current, group = self._local.last
            current.groups.send(group)

    def settle(self) -> None:
        """Let go of the device's memory of that group: compute waits for the copies that are under way."""
        if self._local.last is not None:
            self._local.last[1].settle()

    def fetch(self) -> None:
        """Bring that group back now, ahead of backward and whatever the window.

        Raises:
            TierError: if bytes cannot be brought back.
            torch.OutOfMemoryError: if there is no room for them.
        """
        if self._local.last is not None:
            self._local.last[1].fetch()

    def release(self, *tensors: torch.Tensor) -> None:
        """Name tensors whose memory is to be free once the group has left. For use inside of the context.

        Raises:
            UsageError: outside of the context.
        """
        if not self._local.entered:
            raise UsageError("release: got a call outside of the group's context, expected one inside; write `with`")
        entered = self._local.entered[-1]
        if entered is not None:
            entered[3].extend(tensors)


class _Entered(threading.local):
    """What the calling thread has entered with one object, the innermost last; ``None`` where it does nothing."""

    def __init__(self) -> None:
        self.entered: list[tuple[Session, Pass, Group, list[torch.Tensor]] | None] = []
        self.last: tuple[Pass, Group] | None = None
