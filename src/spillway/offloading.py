"""The public contexts: what autograd saves inside goes out, or stays.

They push saved-tensor hooks and pop them, whatever happens in between, and hold no state of their own but the passes
that are under way: what is learned belongs to the session, by tag.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks

from spillway.capture.alone import see_again
from spillway.capture.dynamo import keep_out
from spillway.capture.handles import pack_kept, unpack
from spillway.capture.hooks import Pass, in_backward, refuse_transforms
from spillway.capture.location import Locator
from spillway.capture.order import Memory
from spillway.errors import UsageError
from spillway.groups import Groups
from spillway.policies import Policy, Ratio, check_tier, wants_modules, wants_operators
from spillway.records import StepStats
from spillway.regions.rerun import in_rerun
from spillway.runtime.ledger import Ledger
from spillway.session import MIN_BYTES, Session
from spillway.units import parse_bytes, parse_share


class _ActivePasses(threading.local):
    """The ``offload`` contexts that the thread is inside of, the innermost last; ``None`` for one that stands aside."""

    def __init__(self) -> None:
        self.passes: list[tuple[Session, Pass] | None] = []


_active = _ActivePasses()


def innermost_pass() -> tuple[Session, Pass] | None:
    """The pass of the innermost ``offload`` context that the calling thread is inside of, with its session."""
    return _active.passes[-1] if _active.passes else None


@contextmanager
def within(session: Session, current: Pass) -> Iterator[None]:
    """Inside, this is the calling thread's innermost pass: what regions and groups do belongs to it."""
    session.passes.enter(current)
    _active.passes.append((session, current))
    try:
        yield
    finally:
        _active.passes.pop()
        session.passes.leave()


class offload(ContextDecorator):  # noqa: N801  (a verb: people write ``with spillway.offload():``)
    """What autograd saves inside leaves the device, and is back in time for backward.

    A context manager and a decorator. One object may be entered again, nested and from several threads; a new object
    for every call is just as good, since what is learned (the order of backward, the bytes of a pass) belongs to the
    session, by ``tag``. Backward may run inside or outside. Gradients are bit for bit those without it.

    Parameters and buffers never move, nor do views of them, nor what cannot be rebuilt exactly (sparse, quantised,
    nested); ``spillway.saved_tensors`` lists what would. Inside of a backward (a checkpoint's re-run) nothing moves.

    Args:
        ratio: offload the first tensors of a pass, up to this ratio of its bytes; the first pass under a tag
            offloads all, and counts (an evaluation, whose graph is dropped, does not). From 0 to 1. ``None``: all,
            unless it is found that nothing is to be gained: a context that is told nothing (no ratio, policy, size,
            tier or window) stands aside where a pass saves less than a 64th of an accelerator's memory and there is
            room, and ``stats().notes`` says so.
        tag: names the code inside, for what is learned: one for each model. ``None`` is a tag like any other.
        min_bytes: leave smaller tensors where they are. Bytes, or a size like ``"4MiB"``. ``None``: 1 MiB, below which
            a copy does not reach a link's rate.
        tier: ``"host"``, ``"disk"``, or ``"auto"``: host memory for an accelerator's tensors, disk for the CPU's.
        window: bytes that may be on their way out at once, or a share of the session's, like ``"40%"``. ``None``: all
            of that.
        policy: decides instead of ``ratio``, about tensors of at least ``min_bytes``: any callable from
            :class:`~spillway.SavedTensor` to :class:`~spillway.Decision`. :mod:`spillway.policies` has some.
        groups: rules about groups (:class:`~spillway.group`): only what is saved inside of one leaves, and of groups
            those that the rules name. A ratio or a policy is asked, too.
        on_backward: called without arguments when backward first asks for something of a pass that was to leave (of
            each device, if there are several), in the thread that asks; what it raises is raised there.
        session: ``None``: the default one.

    Raises:
        UsageError: an argument that cannot be meant.
        PolicyError: on saving, if the policy answers with something else than a decision.
        UnsupportedError: on entering, inside of ``torch.func`` transforms, which allow no saved-tensor hooks.
        TierError: on saving or in backward, if bytes cannot be stored or brought back.
        InplaceError: in backward, if a saved tensor was changed in place: autograd's own error.

    Example:
        >>> with spillway.offload():  # doctest: +SKIP
        ...     loss = model(batch)
        >>> loss.backward()  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        ratio: float | None = None,
        tag: str | None = None,
        min_bytes: int | str | None = None,
        tier: str = "auto",
        window: int | str | None = None,
        policy: Policy | None = None,
        groups: Groups | None = None,
        on_backward: Callable[[], object] | None = None,
        session: Session | None = None,
    ) -> None:
        if groups is not None and not isinstance(groups, Groups):
            raise UsageError(f"groups: got {groups!r}, expected a spillway.Groups or None")
        if groups is not None and groups.patterns:
            raise UsageError(
                f"groups: got patterns of modules, {dict(groups.patterns)!r}, expected rules only, since what is saved "
                f"inside of `with spillway.group(name)` is a group here; give patterns to spillway.attach"
            )
        if policy is not None and ratio is not None:
            raise UsageError(f"got both ratio={ratio!r} and a policy, expected one of them; a policy can contain Ratio")
        if policy is not None and not callable(policy):
            raise UsageError(f"policy: got {policy!r}, expected a callable from SavedTensor to Decision")
        if on_backward is not None and not callable(on_backward):
            raise UsageError(f"on_backward: got {on_backward!r}, expected a callable without arguments")
        if tag is not None and not isinstance(tag, str):
            raise UsageError(f"tag: got {tag!r}, expected a string or None")
        self._told_nothing = (ratio, min_bytes, window, policy, groups, tier) == (*[None] * 5, "auto")
        # Everything is the usual case, and needs nobody asked.
        self._policy = Ratio(ratio) if ratio is not None else policy
        if ratio == 1:
            self._policy = None
        self._min_bytes = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")
        if session is not None and not isinstance(session, Session):
            raise UsageError(f"session: got {session!r}, expected a spillway.Session or None")
        self._tag = tag
        self._tier = check_tier(tier)
        self._window = None if window is None else parse_share(window, what="window")
        self._groups = groups
        self._on_backward = on_backward
        self._session = session
        self._local = threading.local()
        self._last: tuple[Session, Ledger] | None = None

    def __enter__(self) -> Self:
        session = self._session if self._session is not None else Session.default()
        session.check_open()
        memory, locator = self._memory_in(session), None
        if self._told_nothing and memory.gains_nothing() and not session.marks.any:
            with ExitStack() as stack:
                if _top_saved_tensors_default_hooks(True) is not None:
                    # Somebody around counts what is saved (a checkpoint does): as much as before, and as in a re-run.
                    stack.enter_context(hooks_of(pack_kept))
                self._passes().append((stack.pop_all(), session, _Aside(memory.gain.why_none)))
            _active.passes.append(None)
            return self
        with ExitStack() as stack:
            modules, operators = wants_modules(self._policy), wants_operators(self._policy)
            if modules or operators:
                locator = stack.enter_context(Locator(modules=modules, operators=operators))
            current = Pass(
                session,
                self._policy,
                memory,
                min_bytes=self._min_bytes,
                tag=self._tag,
                tier=self._tier,
                window=self._window,
                locator=locator,
                told_nothing=self._told_nothing,
                on_backward=self._on_backward,
                groups=self._groups,
            )
            stack.enter_context(hooks_of(pack_kept if in_backward() or in_rerun() else current.pack))
            self._passes().append((stack.pop_all(), session, current))
            session.passes.enter(current)
        _active.passes.append((session, current))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.passes.pop()
        hooks, session, current = self._passes().pop()
        if isinstance(current, Pass):
            session.passes.leave()
        try:
            hooks.__exit__(kind, error, trace)
        finally:
            current.end(completed=kind is None)
            self._last = session, current.ledger

    def stats(self) -> StepStats:
        """Bytes and seconds of the last pass through this object that has ended, as far as its backward has come."""
        if self._last is None:
            return StepStats()
        session, ledger = self._last
        return session.stats_of(ledger)

    def _memory_in(self, session: Session) -> Memory:
        """What is known of the code inside."""
        return session.memory(self._tag)

    def _passes(self) -> list[tuple[ExitStack, Session, Pass | _Aside]]:
        if not hasattr(self._local, "passes"):
            self._local.passes = []
        passes: list[tuple[ExitStack, Session, Pass | _Aside]] = self._local.passes
        return passes


class _Aside:
    """A pass that is left alone."""

    def __init__(self, why: str | None) -> None:
        self.ledger = Ledger(notes=[] if why is None else [why])

    def end(self, *, completed: bool) -> None:
        """Nothing was done."""


class keep(ContextDecorator):  # noqa: N801  (a verb, like offload)
    """What autograd saves inside stays on the device, whatever ``offload`` is around it.

    For what backward wants first, such as an output head. Autograd's check of in-place changes is made as ever.

    Raises:
        UnsupportedError: on entering, inside of ``torch.func`` transforms.

    Example:
        >>> with spillway.offload():  # doctest: +SKIP
        ...     hidden = body(batch)
        ...     with spillway.keep():
        ...         loss = head(hidden)
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __enter__(self) -> None:
        hooks = hooks_of(pack_kept)
        hooks.__enter__()
        if not hasattr(self._local, "hooks"):
            self._local.hooks = []
        self._local.hooks.append(hooks)

    def __exit__(self, *error: Any) -> None:
        self._local.hooks.pop().__exit__(*error)


def keep_tensor(tensor: torch.Tensor, *, session: Session | None = None) -> torch.Tensor:
    """Whatever autograd saves of this tensor's storage stays on the device, for as long as the storage lives.

    Args:
        tensor: any tensor, or view: its whole storage is meant.
        session: ``None``: the default one.

    Returns:
        The same tensor.

    Example:
        >>> hidden = spillway.keep_tensor(block(hidden))  # doctest: +SKIP
    """
    _mark(tensor, session, offload=False)
    return tensor


def offload_tensor(tensor: torch.Tensor, *, session: Session | None = None) -> torch.Tensor:
    """Whatever autograd saves of this tensor's storage leaves, whatever the policy and its size.

    It takes an ``offload`` context to see what is saved: ``with spillway.offload(policy=Keep()):`` around the model
    offloads marked tensors and nothing else.

    Args:
        tensor: any tensor, or view: its whole storage is meant.
        session: ``None``: the default one.

    Returns:
        The same tensor.

    Raises:
        UsageError: outside of any ``offload`` context with gradients on, where it could do nothing.

    Example:
        >>> with spillway.offload(policy=spillway.policies.Keep()):  # doctest: +SKIP
        ...     hidden = spillway.offload_tensor(first(batch))
        ...     loss = second(hidden)
    """
    if not _active.passes and torch.is_grad_enabled():
        raise UsageError(
            "offload_tensor: got a call outside of any spillway.offload context, expected one around the code that "
            "saves the tensor, since nothing else sees what is saved; write `with "
            "spillway.offload(policy=spillway.policies.Keep()):` around the model to offload marked tensors only"
        )
    _mark(tensor, session, offload=True)
    return tensor


def _mark(tensor: torch.Tensor, session: Session | None, *, offload: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"got {tensor!r}, expected a tensor")
    session = session if session is not None else Session.default()
    session.check_open()
    see_again()
    session.marks.set(tensor, offload=offload)


def hooks_of(pack: Callable[[torch.Tensor], Any]) -> saved_tensors_hooks:
    """A context: autograd calls ``pack`` with what it saves, and unpacks the handles that this gives."""
    refuse_transforms()
    keep_out()
    return saved_tensors_hooks(pack, unpack)
