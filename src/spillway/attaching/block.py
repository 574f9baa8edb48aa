"""A block's call: its forward as a region, with what it saves sent away, or left alone by the policy around it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import _global_forward_pre_hooks
from torch.nn.parameter import is_lazy

from spillway.attaching.call import ModuleCall, is_attached
from spillway.attaching.forward import RegionForward, has_hooks
from spillway.attaching.steering import Steers
from spillway.blocks import Named
from spillway.capture.alone import LeftAlone
from spillway.capture.location import Locator
from spillway.checkpointing.observer import Observer
from spillway.errors import RecomputeError, UsageError
from spillway.offloading import keep
from spillway.recomputing import Recompute, call_untraced_region
from spillway.regions.rerun import in_rerun
from spillway.session import Session


class KeptCall(ModuleCall):
    """The call of a block whose saved tensors stay, whatever the policy around it says."""

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with keep():
            return self.plain(module, args, kwargs)


class RegionCall(ModuleCall):
    """The call of a block whose forward is a region.

    Args:
        named: the block.
        how: the options of the region.
        session: ``None``: the default one.
        others: all blocks that are regions.
    """

    def __init__(self, named: Named, how: Recompute, session: Session | None, others: Iterable[Named]) -> None:
        super().__init__(named)
        self.how: Recompute | None = how
        """``None``: for now, there is no region."""
        self.pilot: Steers | None = None
        """Who says how, if somebody does, and wants to know of each call."""
        self.observer: Observer | None = None
        self.runner: Callable[..., Any] = call_untraced_region
        """What runs it as a region."""
        inside = {id(module) for module in named.module.modules()} - {id(named.module)}
        self.has_inner = any(id(other.module) in inside for other in others)
        """Whether there are regions inside."""
        self._session = session
        self._number = _Number()
        self._alone = LeftAlone()
        self._is_lazy = _has_lazy(named.module)
        self._forward = RegionForward(self.module, self.region)

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Its first call makes its parameters, which a re-run would find made.
        if self._is_lazy:
            self._is_lazy = _has_lazy(module)
        if self._is_lazy:
            return self.plain(module, args, kwargs)
        if self.pilot is None:
            return self._run(module, args, kwargs)
        number = self.pilot.block_begins(self, module, args, kwargs)
        self._number.now = number
        output = self._run(module, args, kwargs)
        self.pilot.block_ended(number, output)
        return output

    def _run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.how is None:
            return self._alone.run(module._call_impl if self.before is None else self.before, args, kwargs)
        if self.before is not None:
            return self.region(module, self.before, args, kwargs)
        if not has_hooks(module):
            return self.region(module, self._forward.own(module), args, kwargs)
        with self._forward.in_place(module):
            return self.plain(module, args, kwargs)

    def region(self, module: Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The region. See NOTE [ Hooks of a block ] in ``forward.py``."""
        for value in (*args, *kwargs.values()):
            kind: Any = type(value)
            if _is_cache(kind):
                self.refuse(
                    UsageError(
                        f"got a {type(value).__name__} as an argument of {self.named(module)}, which writes its keys "
                        f"and values there, expected none, since recomputing the block would write them a second time; "
                        f"call the model with use_cache=False, and without a cache of your own"
                    )
                )
                return forward(*args, **kwargs)
        how = self.how
        if how is None:
            return forward(*args, **kwargs)
        run = _Run(self, module, forward, how, self._number.now)
        return self.runner(how, run, args, kwargs, self._session, self.observer)


class _Run:
    """What a region runs, first and again: like a bound method, it says by ``__self__`` of which module it is."""

    def __init__(
        self,
        call: RegionCall,
        module: Module,
        forward: Callable[..., Any],
        how: Recompute,
        number: int,
    ) -> None:
        self.__self__ = module
        self._call = call
        self._forward = forward
        self._wants_modules = how.choices.wants_modules
        self._number = number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._call.removed:
            self._check_inner()
        if not in_rerun():
            pilot = self._call.pilot
            if pilot is None:
                return self._call_forward(args, kwargs)
            begin = time.perf_counter()
            output = self._call_forward(args, kwargs)
            pilot.block_ran(self._number, time.perf_counter() - begin)
            return output
        with self.rerunning():
            return self._call_forward(args, kwargs)

    @contextmanager
    def rerunning(self) -> Iterator[None]:
        """A context around what runs again."""
        pilot = self._call.pilot
        if pilot is None:
            yield
            return
        pilot.rerun_begins(self._number)
        try:
            yield
        finally:
            pilot.rerun_ended(self._number)

    def _call_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._wants_modules:
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
        if self._call.has_inner or any(map(is_attached, inner)):
            raise RecomputeError(
                f"got a backward after remove(), through {self._call.name!r}, which has or had recomputed blocks "
                f"inside, expected it before, since the block cannot run again as it ran first; call backward, then "
                f"remove()"
            )


class _Number(threading.local):
    """Which call of a block in its pass the calling thread is in."""

    now = -1


@cache
def _is_cache(kind: Any) -> bool:
    """Whether it is one of transformers' caches of keys and values."""
    return hasattr(kind, "get_seq_length") and not issubclass(kind, torch.Tensor)


def _has_lazy(module: Module) -> bool:
    return any(is_lazy(tensor) for tensor in (*module.parameters(), *module.buffers()))


def _locator_of(hook: object) -> Locator | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, Locator) else None
