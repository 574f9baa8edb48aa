"""A block's call: its forward is checkpointed, or left alone by the policy around it.

NOTE [ Hooks of a block ]

They run outside of the checkpointed forward, once, as they do without one. A hook that keeps its arguments must not get
in backward what a replay did not compute, and FSDP's hooks gather parameters. So the block's ``forward`` is
checkpointed. While hooks run around it, the checkpointed one replaces the instance's ``forward``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from spillway._torch import global_pre_hooks, has_global_hook, hooks_of, own_call
from spillway.attaching.call import ModuleCall, is_attached
from spillway.attaching.validation import cache_error
from spillway.checkpointing.blocks import Named
from spillway.checkpointing.python_state import LatestState
from spillway.errors import RecomputeError
from spillway.recomputing import Recompute, call_checkpointed_untraced
from spillway.saved_tensors.handles import in_replay
from spillway.saved_tensors.kept import PassthroughBlock
from spillway.saved_tensors.locator import Locator
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.attaching.blocks import BlockTracing
    from spillway.profiler.probe import ProfilerListener
    from spillway.profiler.step_trace import StepTracer

    Traced = tuple[StepTracer, int]


class BlockForward:
    """A block's checkpointed forward, which replaces its ``forward`` while calls are in their hooks.

    See NOTE [ Hooks of a block ]. ``checkpointed`` gets module, forward and arguments, and is not kept alive.
    """

    def __init__(self, module: weakref.ref[Module], checkpointed: Callable[..., Any]) -> None:
        self._module = module
        self._checkpointed = weakref.WeakMethod(checkpointed)
        self._lock = threading.Lock()
        self._calls = 0
        self.stands_for: Callable[..., Any] | None = None
        """The instance's own forward, if it has one."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, checkpointed = self._module(), self._checkpointed()
        assert module is not None
        forward = self.own(module)
        # Another thread may call it without gradients, or when the block is detached.
        if checkpointed is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpointed(module, forward, args, kwargs)

    def own(self, module: Module) -> Callable[..., Any]:
        """The module's forward but for this. A class's is bound as Python binds it: a static one is not."""
        forward: Any = module.forward
        if forward is self:
            forward = self.stands_for
        if forward is None:
            forward = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
            if hasattr(type(forward), "__get__"):
                forward = forward.__get__(module, type(module))
        found: Callable[..., Any] = forward
        return found

    @contextmanager
    def in_place(self, module: Module) -> Iterator[None]:
        with self._lock:
            if not self._calls:
                self.stands_for = module.__dict__.get("forward")
                module.__dict__["forward"] = self
            self._calls += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls -= 1
                if not self._calls and module.__dict__.get("forward") is self:
                    if self.stands_for is None:
                        del module.__dict__["forward"]
                    else:
                        module.__dict__["forward"] = self.stands_for

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy that another thread makes meanwhile runs its own forward.
        return getattr, (self._module(), "forward")


class BlockCall(ModuleCall):
    """The call of a block whose forward is checkpointed. ``others`` are all checkpointed blocks."""

    def __init__(self, named: Named, how: Recompute, session: Session | None, others: Iterable[Named]) -> None:
        super().__init__(named)
        self._latest = LatestState()
        self.module = weakref.ref(named.module, self._latest.forget)
        self.how: Recompute | None = how
        """``None``: for now, it is not checkpointed."""
        self.tracing: BlockTracing | None = None
        """Traces each call, for a profile or a plan."""
        self.listener: ProfilerListener | None = None
        """With it, calls are profiled."""
        inside = {id(module) for module in named.module.modules()} - {id(named.module)}
        self.has_inner = any(id(other.module) in inside for other in others)
        """Whether there are checkpointed blocks inside."""
        self._session = session
        self._traced = _Traced()
        self._alone = PassthroughBlock()
        self._is_lazy = _has_lazy(named.module)
        self._forward = BlockForward(self.module, self.checkpointed)

    def uninstall(self) -> bool:
        self._latest.forget()
        return super().uninstall()

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The first call of a lazy module makes its parameters, which a replay would find made.
        if self._is_lazy:
            self._is_lazy = _has_lazy(module)
        if self._is_lazy:
            return self.plain(module, args, kwargs)
        if self.tracing is None:
            return self._run(module, args, kwargs)
        traced = self._traced.now = self.tracing.block_begins(self, module, args, kwargs)
        output = self._run(module, args, kwargs)
        if traced is not None:
            tracer, number = traced
            tracer.block_ended(number, output)
        return output

    def _run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.how is None:
            self._latest.forget()
        if self.how is None and self.streamed is not None:
            # Without hooks, autograd would hold the copies of its parameters.
            return self.plain(module, args, kwargs)
        if self.how is None:
            return self._alone.run(own_call(module) if self.before is None else self.before, args, kwargs)
        if self.before is not None:
            return self.checkpointed(module, self.before, args, kwargs)
        if not (any(hooks_of(module)) or has_global_hook()):
            return self.checkpointed(module, self._forward.own(module), args, kwargs)
        with self._forward.in_place(module):
            return self.plain(module, args, kwargs)

    def checkpointed(
        self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a forward checkpointed. See NOTE [ Hooks of a block ]."""
        error = cache_error(self.name, module, args, kwargs)
        if error is not None:
            self.refuse(error)
            return forward(*args, **kwargs)
        how = self.how
        if how is None:
            return forward(*args, **kwargs)
        run = _Run(self, module, forward, how, self._traced.now)
        around = None if self.streamed is None else self.streamed.in_replay
        profiled = None if self.listener is None else self.listener.call
        return call_checkpointed_untraced(how, run, args, kwargs, self._session, profiled, around, self._latest)


class _Run:
    """The function that is checkpointed. Like a bound method, it has its module as ``__self__``."""

    def __init__(
        self, call: BlockCall, module: Module, forward: Callable[..., Any], how: Recompute, traced: Traced | None
    ) -> None:
        self.__self__ = module
        self._call = call
        self._forward = forward
        self._wants_modules = how.choices.wants_modules
        self._traced = traced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call.removed:
            # A replay must find the checkpointed blocks inside that forward found.
            inner = (module for module in self.__self__.modules() if module is not self.__self__)
            if self._call.has_inner or any(map(is_attached, inner)):
                raise RecomputeError(
                    f"A backward came after remove(), through {self._call.name!r}, which has or had recomputed blocks "
                    f"inside, so it cannot be replayed as it ran. Call backward first, then remove()"
                )
        if self._traced is None:
            return self._call_forward(args, kwargs)
        tracer, number = self._traced
        if not in_replay():
            begin = time.perf_counter()
            output = self._call_forward(args, kwargs)
            tracer.block_ran(number, time.perf_counter() - begin)
            return output
        tracer.replay_begins(number)
        try:
            return self._call_forward(args, kwargs)
        finally:
            tracer.replay_ended(number)

    def _call_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._wants_modules:
            return self._forward(*args, **kwargs)
        # The module's call began before the locator was there.
        owners = [getattr(hook, "__self__", None) for hook in global_pre_hooks.values()]
        locators = [owner for owner in owners if isinstance(owner, Locator)]
        for locator in locators:
            locator._before(self.__self__, args)
        try:
            return self._forward(*args, **kwargs)
        finally:
            for locator in locators:
                locator._after(self.__self__, args, None)


class _Traced(threading.local):
    """How the calling thread's call of a block is traced, if it is."""

    now: Traced | None = None


def _has_lazy(module: Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))
