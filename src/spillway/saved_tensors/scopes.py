"""The passes that the calling thread is inside of, as checkpointed functions and groups find them.

A pass is a :class:`~spillway.saved_tensors.hooks.ForwardScope`. Code that only hands tensors to it need not know how it
decides, groups and orders them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import spillway.saved_tensors
from spillway._torch import top_hooks

if TYPE_CHECKING:
    from spillway.saved_tensors.hooks import ForwardScope
    from spillway.session import Session


class _Entered(threading.local):
    def __init__(self) -> None:
        self.scopes: list[ForwardScope | None] = []


_entered = _Entered()


def entered_scopes() -> list[ForwardScope | None]:
    """The passes that the calling thread is inside of, the innermost last; ``None`` for a disabled context."""
    return _entered.scopes


@contextmanager
def within_scope(current: ForwardScope | None) -> Iterator[None]:
    """Inside, this is the calling thread's innermost pass, for checkpointed blocks and groups."""
    _entered.scopes.append(current)
    try:
        yield
    finally:
        _entered.scopes.pop()


def scope_of_hooks() -> ForwardScope | None:
    """The pass whose hooks are the innermost saved-tensor hooks; ``None`` if there are others, or none."""
    hooks = top_hooks(True)
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, spillway.saved_tensors.ForwardScope) else None


def innermost_scope(session: Session, tag: str | None) -> ForwardScope | None:
    """The innermost pass of a session, under a tag, that the calling thread is inside of."""
    scopes = (each for each in reversed(_entered.scopes) if each is not None)
    return next((each for each in scopes if each.session is session and each.tag == tag), None)


def current_scope(session: Session) -> ForwardScope:
    """The innermost pass that the calling thread is inside of, or else an unscoped one.

    That one ends when backward asks for a tensor of it, or when its graph is gone: tensors saved after that belong to
    another forward. It also ends when a capture begins or ends.
    """
    for entered in reversed(_entered.scopes):
        if entered is not None and entered.session is session:
            return entered
    unscoped: ForwardScope | None = getattr(session.unscoped, "scope", None)
    if unscoped is not None:
        devices = unscoped.devices
        if devices.are_elsewhere or unscoped.was_recomputed or devices.were_asked or devices.were_dropped:
            # If a capture has begun or ended, waiting tensors stay on the device.
            unscoped.end(completed=not devices.are_elsewhere)
            unscoped = None
    if unscoped is None:
        unscoped = session.unscoped.scope = spillway.saved_tensors.unscoped_scope(session)
    return unscoped
