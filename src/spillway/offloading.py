"""The public contexts ``offload``, ``keep`` and ``group``, and marks on single tensors.

The contexts push saved-tensor hooks and pop them. Each time that ``offload`` is entered, a pass begins, a
:class:`~spillway.saved_tensors.hooks.ForwardScope`, whose ``pack`` is the hook. The order of backward that passes teach
belongs to the session, by tag.

From a saved tensor to its copy: ``pack`` makes an entry for the tensor's storage, which waits until the operator that
saved it has run (``ForwardScope.advance``). Then ``Mover.put`` queues the entry, a tier gives it memory, and the
backend copies the bytes on the stream ``out``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, nullcontext
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway._torch import in_backward, keep_out, refuse_transforms, top_hooks
from spillway.errors import UsageError
from spillway.policies import Policy, Ratio, check_tier, wants_modules, wants_operators
from spillway.runtime.entry import ByteCounters
from spillway.saved_tensors.groups import Group, Groups, check_name
from spillway.saved_tensors.handles import KeptHandle, in_replay, unpack
from spillway.saved_tensors.hooks import ForwardScope, SavedState
from spillway.saved_tensors.order import LearnedOrders
from spillway.saved_tensors.scopes import entered_scopes, restore_hooks, within_scope
from spillway.session import MIN_BYTES, Session
from spillway.types import StepStats
from spillway.units import parse_bytes, parse_share


def hooks_of(pack: Callable[[torch.Tensor], Any]) -> saved_tensors_hooks:
    """A context of saved-tensor hooks: ``pack`` gives autograd a handle of each saved tensor.

    Backward unpacks the handle. ``torch.func`` refuses such hooks, and Dynamo has to leave their code out.
    """
    refuse_transforms()
    keep_out()
    return saved_tensors_hooks(pack, unpack)


def builds_a_graph() -> bool:
    """Whether saved tensors belong to a forward that can be offloaded."""
    return torch.is_grad_enabled() and not in_backward() and not in_replay()


class offload(ContextDecorator):  # noqa: N801  (a verb: people write ``with spillway.offload():``)
    """Offload the tensors that autograd saves inside, and reload them in time for backward.

    A context manager and a decorator. One object may be entered again, nested and from several threads. A new object
    per call works as well: learned state (the order of backward, the bytes of a pass) belongs to the session, by
    ``tag``. Backward may run inside or outside. Gradients are bit for bit those without it.

    These tensors are kept: parameters and their views, tensors that cannot be rebuilt exactly (sparse, quantised,
    nested), and tensors saved inside a backward (a checkpoint's replay). A module's buffer is offloaded like other
    tensors, which frees nothing, since the module holds it. :func:`spillway.list_saved_tensors` names the others.

    With no option that says how much is offloaded and where, a context on an accelerator is disabled if offloading
    gains nothing: if an earlier pass saved less than 1/64 of the device's memory, and eight times the saved bytes are
    free. ``stats().notes`` says so. ``ratio=1`` offloads all in any case.

    Args:
        ratio: offload the first tensors of a pass, up to this share of its bytes, from 0 to 1. The first pass under a
            tag offloads all and counts them (an evaluation, whose graph is dropped, does not count). ``None``: all.
        tag: names the code inside, for learned state: one for each model. ``None`` is a tag like any other.
        min_bytes: keep smaller tensors. Bytes, or a size like ``"4MiB"``. ``None``: 1 MiB, below which a copy does not
            reach the PCIe bandwidth.
        tier: ``"host"``, ``"disk"``, or ``"auto"``: CPU memory for an accelerator's tensors, disk for the CPU's.
        window: the in-flight limit: bytes that may be on their way out at once, or a share of the session's limit, like
            ``"40%"``. ``None``: all of that.
        policy: decides instead of ``ratio``, about tensors of at least ``min_bytes``: any callable from
            :class:`~spillway.SavedTensor` to :class:`~spillway.Decision`. :mod:`spillway.policies` has some.
        groups: rules about groups (:class:`~spillway.group`): only tensors saved inside groups are offloaded, and only
            in groups that the rules name. A ratio or a policy is asked, too.
        on_backward: called without arguments when backward asks for the first offloaded tensor of a pass, once per
            device, in the asking thread. Its exceptions are raised there.
        session: ``None``: the default one.

    Raises:
        UsageError: an invalid argument.
        PolicyError: on saving, if the policy returns no decision.
        UnsupportedError: on entering, inside of ``torch.func`` transforms, which allow no saved-tensor hooks.
        TierError: on saving or in backward, if bytes cannot be stored or reloaded.
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
                f"groups: got patterns of modules, {dict(groups.patterns)!r}, expected rules only. Here the code names "
                f"groups, by `with spillway.group(name)`. Give patterns to spillway.attach."
            )
        if policy is not None and ratio is not None:
            raise UsageError(f"got both ratio={ratio!r} and a policy, expected one of them; a policy can contain Ratio")
        # A Recompute is called with a function.
        if isinstance(policy, type) or not (policy is None or callable(policy)) or hasattr(policy, "use_reentrant"):
            raise UsageError(
                f"policy: got {policy!r:.200}, expected a callable from SavedTensor to Decision. To recompute, use "
                f"spillway.recompute, or give a spillway.Recompute to spillway.attach"
            )
        if on_backward is not None and not callable(on_backward):
            raise UsageError(f"on_backward: got {on_backward!r}, expected a callable without arguments")
        if tag is not None and not isinstance(tag, str):
            raise UsageError(f"tag: got {tag!r}, expected a string or None")
        if session is not None and not isinstance(session, Session):
            raise UsageError(f"session: got {session!r}, expected a spillway.Session or None")
        # Then a pass may be disabled: see the docstring.
        self._has_no_options = (ratio, min_bytes, window, policy, groups, tier) == (*[None] * 5, "auto")
        # Without a policy everything is offloaded, as by a ratio of 1, and no call is made for each tensor.
        self._policy = policy if ratio in (None, 1) else Ratio(ratio)
        self._min_bytes = parse_bytes(MIN_BYTES if min_bytes is None else min_bytes, what="min_bytes")
        self._tag = tag
        self._tier = check_tier(tier)
        self._window = None if window is None else parse_share(window, what="window")
        self._groups = groups
        self._on_backward = on_backward
        self._session = session
        self._local = _Entered()
        self._last: tuple[Session, ByteCounters] | None = None

    def __enter__(self) -> Self:
        session = self._session if self._session is not None else Session.default()
        session.check_open()
        learned = self._orders_in(session)
        with ExitStack() as stack:
            if self._has_no_options and learned.gains_nothing() and not session.of(SavedState).marks.any:
                why = learned.benefit.why_none
                ledger = ByteCounters(notes=[] if why is None else [why])
                # Hooks around this context may count saved tensors (a checkpoint's do): as many as before.
                stack.enter_context(keep_if_counted())
                stack.enter_context(within_scope(None))
            else:
                ledger = self._enter(session, learned, stack)
            self._local.entered.append((stack.pop_all(), session, ledger))
        return self

    def _enter(self, session: Session, learned: LearnedOrders, stack: ExitStack) -> ByteCounters:
        """Begin a pass that ``stack`` ends; gives its counters."""
        modules, operators = wants_modules(self._policy), wants_operators(self._policy)
        locator = None
        if modules or operators:
            from spillway.saved_tensors.locator import Locator

            locator = Locator(modules=modules, operators=operators)
        current = ForwardScope(
            session,
            self._policy,
            learned,
            min_bytes=self._min_bytes,
            tag=self._tag,
            tier=self._tier,
            window=self._window,
            locator=locator,
            may_be_disabled=self._has_no_options,
            on_backward=self._on_backward,
            groups=self._groups,
        )
        hooks = hooks_of(KeptHandle if in_backward() or in_replay() else current.pack)
        stack.push(lambda kind, *_: current.end(completed=kind is None))
        if locator is not None:
            stack.enter_context(locator)
        stack.enter_context(hooks)
        stack.enter_context(within_scope(current))
        return current.ledger

    def __exit__(self, *error: Any) -> None:
        stack, session, ledger = self._local.entered.pop()
        self._last = session, ledger
        stack.__exit__(*error)

    def stats(self) -> StepStats:
        """Bytes and seconds of the last finished pass through this object, and of its backward so far."""
        if self._last is None:
            return StepStats()
        session, ledger = self._last
        return session.stats_of(ledger)

    def _orders_in(self, session: Session) -> LearnedOrders:
        """The orders that earlier passes of the code inside have taught. An attached model has its own."""
        return session.of(SavedState).learned(self._tag)


class _Entered(threading.local):
    """The contexts that the calling thread has entered with one object, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.last: tuple[ForwardScope, Group] | None = None
        """The last group that ended."""


class keep(ContextDecorator):  # noqa: N801  (a verb, like offload)
    """Keep the tensors that autograd saves inside on the device, whatever ``offload`` is around it.

    For the code whose backward runs first, such as an output head. In-place changes raise autograd's error as usual.

    Raises:
        UnsupportedError: on entering, inside of ``torch.func`` transforms.

    Example:
        >>> with spillway.offload():  # doctest: +SKIP
        ...     hidden = body(batch)
        ...     with spillway.keep():
        ...         loss = head(hidden)
    """

    def __init__(self) -> None:
        self._local = _Entered()

    def __enter__(self) -> None:
        hooks = hooks_of(KeptHandle)
        hooks.__enter__()
        self._local.entered.append(hooks)

    def __exit__(self, *error: Any) -> None:
        self._local.entered.pop().__exit__(*error)


def keep_if_counted() -> AbstractContextManager[None]:
    """A context for code whose tensors are kept. Hooks around it that count saved tensors see as many as usual."""
    return keep() if top_hooks(True) is not None else nullcontext()


def keep_tensor(tensor: torch.Tensor, *, session: Session | None = None) -> torch.Tensor:
    """Keep everything that autograd saves of this tensor's storage, as long as the storage lives.

    Args:
        tensor: any tensor or view. The mark is on its whole storage.
        session: ``None``: the default one.

    Returns:
        The same tensor.

    Example:
        >>> hidden = spillway.keep_tensor(block(hidden))  # doctest: +SKIP
    """
    _mark(tensor, session, offload=False)
    return tensor


def offload_tensor(tensor: torch.Tensor, *, session: Session | None = None) -> torch.Tensor:
    """Offload everything that autograd saves of this tensor's storage, whatever the policy and its size.

    An ``offload`` context must be around the code that saves it. ``with spillway.offload(policy=Keep()):`` around the
    model offloads marked tensors and nothing else.

    Args:
        tensor: any tensor or view. The mark is on its whole storage.
        session: ``None``: the default one.

    Returns:
        The same tensor.

    Raises:
        UsageError: with gradients on, outside of any ``offload`` context, where it would do nothing.

    Warns:
        UserWarning: inside of a context that is disabled, since offloading gains nothing. The mark enables it from the
            next pass on.

    Example:
        >>> with spillway.offload(policy=spillway.policies.Keep()):  # doctest: +SKIP
        ...     hidden = spillway.offload_tensor(first(batch))
        ...     loss = second(hidden)
    """
    scopes = entered_scopes()
    if not scopes and torch.is_grad_enabled():
        raise UsageError(
            "offload_tensor was called outside of any spillway.offload context, so Spillway does not see what autograd "
            "saves. To offload marked tensors only, write `with spillway.offload(policy=spillway.policies.Keep()):` "
            "around the model."
        )
    if scopes and scopes[-1] is None:
        warnings.warn(
            "offload_tensor has no effect in this pass: the spillway.offload context around it is disabled, since "
            "offloading gains nothing. It is enabled from the next pass on. Pass ratio=1.0 to have it always enabled.",
            stacklevel=2,
        )
    _mark(tensor, session, offload=True)
    return tensor


def _mark(tensor: torch.Tensor, session: Session | None, *, offload: bool) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"got {tensor!r}, expected a tensor")
    session = session if session is not None else Session.default()
    session.check_open()
    restore_hooks()
    session.of(SavedState).marks.set(tensor, offload)


class group(ContextDecorator):  # noqa: N801  (read aloud: with group("core_attn"))
    """Make the tensors that autograd saves inside a group, which is offloaded together when the context exits.

    A context manager and a decorator for the code of a model. The :class:`~spillway.offload` context around it decides.
    With ``groups=spillway.Groups(...)`` only groups are offloaded, by these rules. Without, a group only sets when its
    tensors are offloaded, and counts them by name (``stats().groups``). Outside of any such context, in a backward, and
    with gradients off, it does nothing. Groups may be nested: the innermost counts.

    Args:
        name: of the group. Groups of one name are counted together.
        release: tensors whose memory is to be freed once the group is offloaded, though the program still holds them:
            each gets one element in place of its memory, not a number, at every place. :meth:`release` names more.
            Tensors that are not offloaded with the group are not changed.
        delay: do not offload the group when the context exits, but at the next :meth:`Session.flush_groups
            <spillway.Session.flush_groups>`.

    Raises:
        UsageError: an invalid or empty name; on exit, a tensor to release whose memory another tensor sees, or an exit
            in another thread.

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
        scopes = entered_scopes()
        current = scopes[-1] if scopes and builds_a_graph() else None
        if current is None or not current.session.enabled:
            self._local.entered.append(None)
            return self
        restore_hooks()
        self._local.entered.append((current, current.groups.start(self._name), list(self._to_release)))
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._local.entered:
            raise UsageError(
                f"group {self._name!r}: got an exit in a thread that has not entered it, expected the same"
            )
        entered = self._local.entered.pop()
        if entered is None:
            return
        current, started, release = entered
        if error[0] is not None:
            current.groups.give_up(started)
            return
        current.groups.end(started, release=release, later=self._delay)
        self._local.last = current, started
        if self._delay:
            current.session.delay(lambda: current.groups.send(started), started.has_nothing_to_send)

    def offload(self) -> None:
        """Offload the last delayed group that the calling thread ended with this object.

        This, :meth:`settle` and :meth:`fetch` control by hand when one group is offloaded and reloaded.

        Example:
            >>> with spillway.group("layer 3", delay=True) as group:  # doctest: +SKIP
            ...     hidden = layer(hidden)
            >>> group.offload()  # start the copies  # doctest: +SKIP
            >>> group.settle()  # free the device's memory when they are done  # doctest: +SKIP
            >>> group.fetch()  # reload it now  # doctest: +SKIP
        """
        if self._local.last is not None:
            current, group = self._local.last
            current.groups.send(group)

    def settle(self) -> None:
        """Free the device's memory of that group: compute waits for the copies that are under way."""
        if self._local.last is not None:
            self._local.last[1].settle()

    def fetch(self) -> None:
        """Reload that group now, ahead of backward and whatever the in-flight limit.

        Raises:
            TierError: if bytes cannot be reloaded.
            torch.OutOfMemoryError: if they do not fit.
        """
        if self._local.last is not None:
            self._local.last[1].fetch()

    def release(self, *tensors: torch.Tensor) -> None:
        """Name tensors whose memory is to be freed once the group is offloaded. For use inside of the context.

        Raises:
            UsageError: outside of the context.
        """
        if not self._local.entered:
            raise UsageError("release: got a call outside of the group's context, expected one inside; write `with`")
        entered = self._local.entered[-1]
        if entered is not None:
            entered[2].extend(tensors)
