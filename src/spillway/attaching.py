"""The public call that puts recomputed regions around the blocks of a model without editing it.

NOTE [ How a module's call is taken over ]

``Module.__call__`` looks at one attribute of the instance before anything else, ``_compiled_call_impl``, and calls that
instead of itself, if there is one. It is there for ``module.compile()``, and ``Module.__getstate__`` leaves it out, so
that copies and pickles do not have it. What is put there is a :class:`_Call`, which knows its module by a weak
reference. State dictionaries, hooks, classes and parameters are as they were; a copy runs its own weights, and has no
regions. (An instance's ``forward`` would be copied, and the copy would run the original's weights.) Where a class has a
``__getstate__`` of its own that leaves nothing out, the copy of a :class:`_Call` is ``None``, which is what torch's own
class attribute says.

NOTE [ Compiled blocks ]

A block that was compiled before (``block.compile()``) has the attribute already: that is what the region runs, and it
is put back in the end. Whoever compiles an attached module takes our place instead, and a region would be gone without
a word: so each call of the model looks, and so does ``remove``. What is compiled around a block would be traced through
the block's forward without its region, and is refused where it can be seen.

NOTE [ Hooks of a block ]

They run outside of its region, once, as they do without one: a hook that keeps what it is shown must not be shown in
backward what a re-run did not compute, and those of FSDP gather parameters. So the region is around the block's
``forward``. While hooks run around it, an instance's ``forward`` stands for the region: nothing else can be put there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from types import MethodType, TracebackType
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import _global_forward_pre_hooks, _has_any_global_hook

from spillway import policies
from spillway.blocks import (
    CHECKPOINTING_FLAGS,
    Blocks,
    Named,
    above,
    checkpointing,
    find_blocks,
    is_compiled,
    refuse_checkpointing,
    refuse_class,
    refuse_copies,
    walk,
)
from spillway.capture.location import Locator
from spillway.capture.region import Surroundings, surroundings
from spillway.errors import RecomputeError, UnsupportedError, UsageError
from spillway.offloading import keep, offload
from spillway.policies import Policy
from spillway.recomputing import Recompute, call_region
from spillway.records import StepStats
from spillway.session import Session

_PLACE = "_compiled_call_impl"

_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined, unused-ignore]


def attach(
    model: Module,
    *,
    policy: Recompute | Policy | None = None,
    blocks: Blocks | None = None,
    every: int = 1,
    first: int | None = None,
    keep_last: int = 0,
    session: Session | None = None,
) -> Attached:
    """Recompute the blocks of a model, or offload what it saves, without editing it. Call and train it as always.

    Each block's forward becomes a region (:func:`~spillway.recompute`), and each call of the model is one pass: what
    regions offload has one learned order. Gradients are bit for bit those of the plain model. Only modules in training
    mode with gradients on are touched; evaluation is as ever.

    The model itself is not changed: its class, state dictionary, parameters and hooks are what they were, a copy
    (``copy.deepcopy``, an average of weights) or a pickle runs its own weights and has no regions. DDP and FSDP2's
    ``fully_shard`` may come before or after. A block's own hooks run outside of its region, once.

    Compile blocks, not the model, and before attaching (``for block in model.layers: block.compile()``): an outer
    ``torch.compile`` traces through regions, which then save nothing.

    Args:
        model: a module whose call is a step's forward.
        policy: a :class:`~spillway.Recompute`, with the options of each region; ``None``: ``Recompute()``, which
            computes everything again. Or an offload policy (:mod:`spillway.policies`): then there are no regions, and
            a :class:`~spillway.offload` context with this policy around each call of the model.
        blocks: which modules are blocks: a class or a tuple of them; a pattern of dotted names as in a shell
            (``"layers.*"``, ``"*.mlp"``), whose ``*`` matches dots; a predicate ``(name, module) -> bool``; or a list
            of such. Of what a class or a pattern matches, only the outermost modules are taken: ``"layers.*"`` takes
            ``layers.0``, and not ``layers.0.mlp``. A predicate is taken at its word, and a list may name blocks within
            blocks. ``None``: those that the model repeats.
        every: recompute each so many-th block only: the first, and so on.
        first: recompute only so many of the first blocks. ``None``: all.
        keep_last: leave out so many of the last blocks, which backward wants first: what they save stays on the device.
        session: ``None``: the default one.

    Returns:
        What was attached; :meth:`Attached.remove` undoes it. It need not be kept.

    Raises:
        UsageError: for arguments that cannot be meant; blocks that are not found; a model that is attached, or that
            checkpoints by itself, already; one that is compiled around its blocks.
        UnsupportedError: for modules whose call cannot be taken over: scripted ones, or those of a class with a
            ``__call__`` or ``__deepcopy__`` of its own that goes past torch's.

    Example:
        >>> attached = spillway.attach(model, policy=spillway.Recompute(save="attention"))  # doctest: +SKIP
        >>> model(batch).loss.backward()  # doctest: +SKIP
        >>> attached.remove()  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if session is not None and not isinstance(session, Session):
        raise UsageError(f"session: got {session!r}, expected a spillway.Session or None")
    for name, number, least in (("every", every, 1), ("first", first, 0), ("keep_last", keep_last, 0)):
        if (number is None and name == "first") or (type(number) is int and number >= least):
            continue
        raise UsageError(f"{name}: got {number!r}, expected a whole number of at least {least}")
    modules = [Named("", model), *walk(model)]
    for each in modules:
        if isinstance(each.module.__dict__.get(_PLACE), _Call):
            raise UsageError(
                f"got {each}, which is attached already, expected a model that is not; call remove() of what the other "
                f"spillway.attach gave back, and say all in one"
            )
    refuse_copies(modules)
    how = Recompute() if policy is None else policy
    if isinstance(how, Recompute):
        refuse_checkpointing(modules)
        found = find_blocks(model, blocks)
        recomputed = found[: max(len(found) - keep_last, 0)][:first][::every]
        return _attach(model, recomputed, [], how, session)
    if isinstance(policy, type) or not callable(policy):
        raise UsageError(
            f"policy: got {policy!r}, expected a spillway.Recompute(...), an offload policy such as "
            f"spillway.policies.Ratio(0.5), or None"
        )
    if every != 1 or first is not None or (blocks is not None and not keep_last):
        raise UsageError(
            f"got every={every!r}, first={first!r} or blocks={blocks!r} with the offload policy {policy!r}, which "
            f"recomputes nothing, expected at most keep_last and the blocks that it counts; to recompute, give a "
            f"spillway.Recompute(offload=...)"
        )
    kept = find_blocks(model, blocks)[-keep_last:] if keep_last else []
    return _attach(model, [], kept, policy, session)


def _attach(
    model: Module, recomputed: list[Named], kept: list[Named], policy: Recompute | Policy, session: Session | None
) -> Attached:
    outer = above(model, [*recomputed, *kept])
    for each in (Named("", model), *recomputed, *kept):
        refuse_class(each)
    for each in outer:
        if is_compiled(each.module) or each.module.__dict__.get(_PLACE) is not None:
            raise UsageError(
                f"got {each} compiled around blocks, expected none, since what is compiled goes through the blocks "
                f"without their regions; compile the blocks instead, before attaching: "
                f"`for block in blocks: block.compile()`"
            )
    inner: list[_Call] = [
        _Region(each, policy, session, recomputed) for each in recomputed if isinstance(policy, Recompute)
    ]
    inner += [_Kept(each) for each in kept]
    # Here and not above: it takes a second, for which whoever trains waits anyway.
    from torch._dynamo.decorators import skip

    # Torch is not to trace it. It may what is called inside; torch.compiler.disable(recursive=False) forbids exporting.
    skip(_Call.__call__)
    root = _Root(model, inner, outer, policy, session)
    attached = Attached(root)
    try:
        for call in (root, *inner):
            call.take()
    except BaseException:
        attached.remove()
        raise
    return attached


class Attached:
    """What :func:`attach` put around a model. Also a context manager, which removes it in the end.

    It does not keep the model alive.

    Example:
        >>> with spillway.attach(model, blocks="layers.*", every=2) as attached:  # doctest: +SKIP
        ...     model(batch).loss.backward()
        >>> attached.stats().recomputed_bytes  # doctest: +SKIP
    """

    def __init__(self, root: _Root) -> None:
        self._root = root
        self._removed = False

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the recomputed blocks, in the order in which the model has them."""
        return tuple(call.name for call in self._root.inner if isinstance(call, _Region))

    def stats(self) -> StepStats:
        """Bytes and seconds of the last pass through the model that has ended, as far as its backward has come.

        Of a call inside of a :class:`~spillway.offload` context, that context knows.
        """
        return self._root.context.stats()

    def remove(self) -> None:
        """Take everything off the model, which is then as it was. A second time, it does nothing.

        Raises:
            UsageError: if a module was compiled after attaching. Everything of Spillway's is off the model all the
                same, and what was compiled is still there.
        """
        if self._removed:
            return
        self._removed = True
        strangers = [call for call in (self._root, *self._root.inner) if not call.give_back()]
        if strangers:
            raise UsageError(strangers[0].collision())

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A call of the model has raised the same already.
        with suppress(UsageError) if kind is not None else nullcontext():
            self.remove()

    def __repr__(self) -> str:
        names = self.blocks
        shown = ", ".join(names[:2] + (("...", names[-1]) if len(names) > 3 else names[2:]))
        what = f"{len(names)} blocks recomputed: {shown}" if names else f"policy {self._root.policy!r}"
        return f"<spillway.Attached to {self._root.kind}, {'removed' if self._removed else what}>"


class _Call:
    """What a module's call is. See NOTE [ How a module's call is taken over ]."""

    def __init__(self, named: Named) -> None:
        self.name = named.name
        self.kind = type(named.module).__name__
        self.module = weakref.ref(named.module)
        self.before: Callable[..., Any] | None = named.module.__dict__.get(_PLACE)
        """What was there."""
        self._had_place = _PLACE in named.module.__dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        if not (module.training and torch.is_grad_enabled()):
            return self.plain(module, args, kwargs)
        # First: where something is compiled, Python that is called from here is traced.
        if _callback() not in (None, False):
            raise UnsupportedError(
                f"got {self.named(module)}, which is attached, inside of torch.compile, expected it outside, since "
                f"what is compiled goes past what was attached; compile the blocks, and before attaching: "
                f"`for block in blocks: block.compile()`"
            )
        if _is_traced():
            return self.plain(module, args, kwargs)
        return self.run(module, args, kwargs)

    def named(self, module: Module) -> Named:
        """The module, for messages."""
        return Named(self.name, module)

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, in training."""
        raise NotImplementedError

    def plain(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it was."""
        before: Callable[..., Any] = module._call_impl if self.before is None else self.before
        return before(*args, **kwargs)

    def take(self) -> None:
        """Stand in the module's place."""
        module = self.module()
        assert module is not None
        module.__dict__[_PLACE] = self

    def give_back(self) -> bool:
        """Leave it as it was; ``False`` if somebody else stands there."""
        module = self.module()
        if module is None:
            return True
        if module.__dict__.get(_PLACE) is not self:
            # Not yet taken, if attaching failed half way.
            return module.__dict__.get(_PLACE) is self.before
        if self._had_place:
            module.__dict__[_PLACE] = self.before
        else:
            del module.__dict__[_PLACE]
        return True

    def collision(self) -> str:
        """What is to be said to whoever compiled the module meanwhile."""
        return (
            f"got {repr(self.name) if self.name else 'the model'} ({self.kind}) compiled after attaching, which took "
            f"the place of what was attached, expected it before, so that what is compiled runs inside; call "
            f"attached.remove(), compile the blocks, and attach again"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Root(_Call):
    """The model: all that its forward does is one pass."""

    def __init__(
        self,
        model: Module,
        inner: Sequence[_Call],
        outer: Sequence[Named],
        policy: Recompute | Policy,
        session: Session | None,
    ) -> None:
        super().__init__(Named("", model))
        self.inner = inner
        self.policy = policy
        self._recomputes = isinstance(policy, Recompute)
        self.context = offload(
            # What regions do not take is kept; their inputs, and what they offload, have their order here.
            policy=policies.Keep() if isinstance(policy, Recompute) else policy,
            tag=f"attached {self.kind}",
            session=session,
        )
        taken = {call.name for call in (self, *inner)}
        self._outer = [(each.name, weakref.ref(each.module)) for each in outer if each.name not in taken]
        self._here = _Here()

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._here.inside:
            return self.plain(module, args, kwargs)
        self._check()
        self._here.inside = True
        try:
            with self._pass():
                return self.plain(module, args, kwargs)
        finally:
            self._here.inside = False

    def _pass(self) -> AbstractContextManager[object]:
        """A pass around the call that somebody opened is the one that regions belong to: it must see the rest, too."""
        return nullcontext() if self._recomputes and surroundings() is Surroundings.PASS else self.context

    def _check(self) -> None:
        """What came upon the model since it was attached, and would undo it without a word."""
        for call in self.inner:
            module = call.module()
            if module is None:
                continue
            if module.__dict__.get(_PLACE) is not call:
                raise UsageError(call.collision())
            if isinstance(call, _Region):
                _refuse_flags(call.name, module)
        for name, reference in self._outer:
            module = reference()
            if module is None:
                continue
            if module.__dict__.get(_PLACE) is not None:
                raise UsageError(
                    f"got {name!r} compiled after attaching, around blocks, expected that none is; call "
                    f"attached.remove(), compile the blocks instead, and attach again"
                )
            if self._recomputes:
                _refuse_flags(name, module)


def _refuse_flags(name: str, module: Module) -> None:
    own = module.__dict__
    if any(own.get(flag) is True for flag in CHECKPOINTING_FLAGS):
        raise UsageError(checkpointing(Named(name, module)))


class _Here(threading.local):
    inside = False


class _Kept(_Call):
    """A block whose saved tensors stay, whatever the policy around it says."""

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with keep():
            return self.plain(module, args, kwargs)


class _Region(_Call):
    """A block whose forward is a region."""

    def __init__(self, named: Named, how: Recompute, session: Session | None, others: Iterable[Named]) -> None:
        super().__init__(named)
        self.how = how
        self.removed = False
        inside = {id(module) for module in named.module.modules()} - {id(named.module)}
        self.has_inner = any(id(other.module) in inside for other in others)
        """Whether there are regions inside."""
        self._session = session
        self._forward = _Forward(self)

    def give_back(self) -> bool:
        self.removed = True
        return super().give_back()

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.before is not None:
            return self.region(module, self.before, args, kwargs)
        if not _has_hooks(module):
            return self.region(module, self._forward.own(module), args, kwargs)
        with self._forward.in_place(module):
            return self.plain(module, args, kwargs)

    def region(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The region. See NOTE [ Hooks of a block ]."""
        for value in (*args, *kwargs.values()):
            if not isinstance(value, torch.Tensor) and hasattr(value, "get_seq_length"):
                raise UsageError(
                    f"got a {type(value).__name__} as an argument of {self.named(module)}, which writes "
                    f"its keys and values there, expected none, since recomputing the block would write them a second "
                    f"time; call the model with use_cache=False, or set model.config.use_cache = False"
                )
        return call_region(self.how, _Inside(self, module, forward), args, kwargs, self._session)


class _Inside:
    """What a region runs, first and again: like a bound method, it says of which module it is, and by what code.

    By the first, the reentrant mode finds parameters; by the second, regions of one class share what is known of them.
    """

    def __init__(self, region: _Region, module: Module, forward: Callable[..., Any]) -> None:
        self.__self__ = module
        self.__code__ = type(module)
        self._region = region
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._region.removed:
            self._check_inner()
        if not self._region.how.choices.wants_modules:
            return self._forward(*args, **kwargs)
        # The module's call went before the region, whose locator has not seen it.
        locators = [owner for hook in _global_forward_pre_hooks.values() if (owner := _locator_of(hook)) is not None]
        for locator in locators:
            locator._before(self.__self__, args)
        try:
            return self._forward(*args, **kwargs)
        finally:
            for locator in locators:
                locator._after(self.__self__, args, None)

    def _check_inner(self) -> None:
        """A re-run must find the regions inside of the region that the first run found."""
        inner = (module for module in self.__self__.modules() if module is not self.__self__)
        if self._region.has_inner or any(isinstance(module.__dict__.get(_PLACE), _Call) for module in inner):
            raise RecomputeError(
                f"got a backward after remove(), through {self._region.name!r}, which has or had recomputed blocks "
                f"inside, expected it before, since the block cannot run again as it ran first; call backward, then "
                f"remove()"
            )


def _locator_of(hook: object) -> Locator | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Locator) else None


class _Forward:
    """A block's region as its ``forward``, for as long as calls are in their hooks. See NOTE [ Hooks of a block ]."""

    def __init__(self, region: _Region) -> None:
        self._region = weakref.ref(region)
        self._lock = threading.Lock()
        self._calls = 0
        self._instance: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        region = self._region()
        assert region is not None
        module = region.module()
        assert module is not None
        forward = self.own(module)
        # Another thread may come by without gradients.
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return region.region(module, forward, args, kwargs)

    def own(self, module: Module) -> Callable[..., Any]:
        """The module's forward but for this."""
        forward = module.__dict__.get("forward")
        if forward is self:
            forward = self._instance
        return MethodType(type(module).forward, module) if forward is None else forward

    @contextmanager
    def in_place(self, module: Module) -> Iterator[None]:
        """While it lasts, the module's forward is this."""
        with self._lock:
            if not self._calls:
                self._instance = module.__dict__.get("forward")
                module.__dict__["forward"] = self
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls and module.__dict__.get("forward") is self:
                    if self._instance is None:
                        del module.__dict__["forward"]
                    else:
                        module.__dict__["forward"] = self._instance

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy that is made meanwhile, by another thread, runs its own forward.
        region = self._region()
        return getattr, (None if region is None else region.module(), "forward")


def _has_hooks(module: Module) -> bool:
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own or _has_any_global_hook())  # type: ignore[no-untyped-call]


def _is_traced() -> bool:
    """Whether the call is written down rather than made: by ``torch.jit.trace``, or for export."""
    return torch._C._get_tracing_state() is not None or torch.compiler.is_compiling()
