"""The call of an attached module, in the place of its own.

NOTE [ How a module's call is taken over ]

``Module.__call__`` first looks for one attribute of the instance, ``_compiled_call_impl``, and calls that instead of
itself. The attribute exists for ``module.compile()``, and ``Module.__getstate__`` leaves it out: copies and pickles do
not have it. A :class:`ModuleCall` is put there, which has a weak reference to its module. State dictionaries, hooks,
classes and parameters are unchanged. A copy runs its own weights, and is not attached. (An instance's ``forward`` would
be copied, and would run the original's weights.) If a class has a ``__getstate__`` that leaves nothing out, the copy of
a :class:`ModuleCall` is ``None``, as torch's own class attribute is.

NOTE [ Copies that share it ]

``copy.copy`` of a module with such a ``__getstate__``, and ``DataParallel`` for its replicas, copy the dictionary and
not its values. Two modules then have one :class:`ModuleCall`, and only the frame of ``Module.__call__`` tells which one
is called. So such a copy, too, runs its own weights and is not attached. Replicas in training are refused: they would
save everything without notice.

NOTE [ Compiled blocks ]

A block that was compiled before (``block.compile()``) has the attribute already. The checkpointed forward runs it, and
it is put back in the end. Compiling an attached module replaces the :class:`ModuleCall` without notice: so each call of
the model checks for that, and so does ``remove``. A module compiled around a block is refused where it can be seen: its
trace would go past the block's call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch.nn import Module

from spillway._torch import callback
from spillway.blocks import Named
from spillway.errors import BudgetError, SpillwayError, UnsupportedError, UsageError
from spillway.offloading import group

PLACE = "_compiled_call_impl"

_TORCHS = Module._wrapped_call_impl.__code__

REFUSALS = (UsageError, UnsupportedError, BudgetError)
"""Errors of a call that are raised before anything of it has run."""


class ModuleCall:
    """What a module's call is. See NOTE [ How a module's call is taken over ]."""

    def __init__(self, named: Named) -> None:
        self.name = named.name
        self.kind = type(named.module).__name__
        self.module = weakref.ref(named.module)
        self.before: Callable[..., Any] | None = named.module.__dict__.get(PLACE)
        """What was there."""
        self._had_place = PLACE in named.module.__dict__
        self.removed = False
        self.group: str | None = None
        """Name of the group that it is."""
        self.told: Callable[[SpillwayError], None] | None = None
        """Is told of an error, instead of raising it. The call then goes on as if not attached."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Mostly it is torch's frame that calls this, and tells which module is called.
        frame = sys._getframe(1)
        module: Module | None = frame.f_locals["self"] if frame.f_code is _TORCHS else self.module()
        assert module is not None
        if module is not self.module():
            # See NOTE [ Copies that share it ].
            if module.__dict__.get("_is_replica") and module.training and torch.is_grad_enabled():
                self.refuse(
                    UnsupportedError(
                        f"got a call of a replica of {Named(self.name, module)}, which is attached, on another device, "
                        f"expected one device in each process; use torch.nn.parallel.DistributedDataParallel"
                    )
                )
            return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.removed or not (module.training and torch.is_grad_enabled()):
            if not (self.removed or module.training):
                self.evaluates()
            return self.plain(module, args, kwargs)
        # First: where something is compiled, Python that is called from here is traced.
        if is_compiled_around():
            self.refuse(
                UnsupportedError(
                    f"got {Named(self.name, module)}, which is attached, inside of torch.compile, expected it outside, "
                    f"since what is compiled goes past what was attached; compile the blocks, and before attaching: "
                    f"`for block in blocks: block.compile()`"
                )
            )
            return self.plain(module, args, kwargs)
        if is_traced():
            return self.plain(module, args, kwargs)
        if self.group is None:
            return self.run(module, args, kwargs)
        with group(self.group):
            return self.run(module, args, kwargs)

    def refuse(self, error: SpillwayError) -> None:
        """Raise an error, or tell it."""
        if self.told is None:
            raise error
        self.told(error)

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, in training."""
        return self.plain(module, args, kwargs)

    def evaluates(self) -> None:
        """It is about to be called in evaluation."""

    def plain(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as it was."""
        before: Callable[..., Any] = module._call_impl if self.before is None else self.before
        return before(*args, **kwargs)

    def take(self) -> None:
        """Attach it to the module."""
        module = self.module()
        assert module is not None
        module.__dict__[PLACE] = self

    def give_back(self) -> bool:
        """Detach it; ``False`` if another call was put there meanwhile."""
        self.removed = True
        module = self.module()
        if module is None:
            return True
        if module.__dict__.get(PLACE) is not self:
            # Attaching may have failed half way.
            return module.__dict__.get(PLACE) is self.before
        if self._had_place:
            module.__dict__[PLACE] = self.before
        else:
            del module.__dict__[PLACE]
        return True

    def collision(self) -> str:
        """The error where the module was compiled meanwhile."""
        return (
            f"got {repr(self.name) if self.name else 'the model'} ({self.kind}) compiled after attaching, which took "
            f"the place of what was attached, expected it before, so that what is compiled runs inside; call "
            f"attached.remove(), compile the blocks, and attach again"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def is_attached(module: Module) -> bool:
    """Whether a module's call is taken over."""
    return isinstance(module.__dict__.get(PLACE), ModuleCall)


def is_compiled_around() -> bool:
    """Whether the calling code runs inside of a compiled function: Python that it calls is traced."""
    return callback() not in (None, False)


def is_traced() -> bool:
    """Whether the call is only recorded: by ``torch.jit.trace``, by ``torch.fx``, or for export."""
    return (
        torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    )
