"""The passes that the calling thread is inside of, as checkpointed functions and groups find them.

A pass is a :class:`~spillway.saved_tensors.hooks.ForwardScope`. Code that only hands tensors to it need not know how it
decides, groups and orders them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spillway._torch import Hooks, pop_hooks, push_hooks, top_hooks, why_hooks_are_disabled
from spillway.saved_tensors.hooks import ForwardScope, SavedState
from spillway.session import MIN_BYTES, Session


class _Entered(threading.local):
    def __init__(self) -> None:
        self.scopes: list[ForwardScope | None] = []
        self.hidden: HiddenHooks | None = None


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
    return owner if isinstance(owner, ForwardScope) else None


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
        if devices.are_elsewhere or unscoped.was_recomputed or devices.are_done:
            # If a capture has begun or ended, waiting tensors stay on the device.
            unscoped.end(completed=not devices.are_elsewhere)
            unscoped = None
    if unscoped is None:
        learned = session.of(SavedState).learned(None)
        unscoped = ForwardScope(session, None, learned, min_bytes=MIN_BYTES, tag=None, tier="auto")
        session.unscoped.scope = unscoped
    return unscoped


class HiddenHooks:
    """The hooks of a pass that were taken off the stack. See NOTE [ Blocks without hooks ] in ``kept.py``."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks: Hooks | None = hooks
        self._outer = _entered.hidden
        self.was_wanted = False
        _entered.hidden = self

    def end(self) -> None:
        """Put them back: below all others."""
        if self._hooks is None:
            return
        above: list[Hooks] = []
        while (top := top_hooks(True)) is not None:
            above.append(top)
            pop_hooks()
        push_hooks(*self._hooks)
        for each in reversed(above):
            push_hooks(*each)
        self._hooks, _entered.hidden = None, self._outer


def restore_hooks() -> None:
    """Called in code that needs the pass to see its tensors: puts hidden hooks back."""
    hidden = _entered.hidden
    if hidden is not None:
        hidden.was_wanted = True
        if why_hooks_are_disabled() is None:
            hidden.end()
