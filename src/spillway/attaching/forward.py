"""A stand-in for a block's ``forward``, which makes a region of it while hooks run around it.

NOTE [ Hooks of a block ]

They run outside of its region, once, as they do without one: a hook that keeps what it is shown must not be shown in
backward what a re-run did not compute, and those of FSDP gather parameters. So the region is around the block's
``forward``. While hooks run around it, an instance's ``forward`` stands for the region: nothing else can be put there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import _has_any_global_hook

Region = Callable[[Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a forward of a module, with arguments, as a region."""


class RegionForward:
    """A block's region as its ``forward``, for as long as calls are in their hooks. See NOTE [ Hooks of a block ].

    Args:
        module: the block.
        region: a bound method, which is not kept alive: its object owns this.
    """

    def __init__(self, module: weakref.ref[Module], region: Region) -> None:
        self._module = module
        self._region = weakref.WeakMethod(region)
        self._lock = threading.Lock()
        self._calls = 0
        self._instance: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, region = self._module(), self._region()
        assert module is not None
        forward = self.own(module)
        # Another thread may come by without gradients, or when the region has gone.
        if region is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return region(module, forward, args, kwargs)

    def own(self, module: Module) -> Callable[..., Any]:
        """The module's forward but for this."""
        forward: Callable[..., Any] | None = module.forward
        if forward is self:
            forward = self._instance
        return _of_class(module) if forward is None else forward

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
        return getattr, (self._module(), "forward")


def _of_class(module: Module) -> Callable[..., Any]:
    """The forward that a module's class has, bound as Python binds it: a static one is not."""
    forward: Any = next(vars(kind)["forward"] for kind in type(module).__mro__ if "forward" in vars(kind))
    bind = getattr(type(forward), "__get__", None)
    bound: Callable[..., Any] = forward if bind is None else bind(forward, module, type(module))
    return bound


def has_hooks(module: Module) -> bool:
    """Whether hooks run around a module's forward."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own or _has_any_global_hook())  # type: ignore[no-untyped-call]
