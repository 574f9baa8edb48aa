"""The call of an attached module, which replaces its own.

NOTE [ How a module's call is taken over ]

``Module.__call__`` first looks for one attribute of the instance, ``_compiled_call_impl``, and calls that instead of
itself. The attribute exists for ``module.compile()``, and ``Module.__getstate__`` leaves it out: copies and pickles do
not have it. A :class:`ModuleCall` is put there, which has a weak reference to its module. State dictionaries, hooks,
classes and parameters are unchanged. A copy runs its own weights, and is not attached. (An instance's ``forward`` would
be copied, and would run the original's weights.) A class may have a ``__getstate__`` that leaves nothing out: the copy
of a :class:`ModuleCall` is ``None``, as torch's own class attribute is.

NOTE [ Copies that share it ]

``copy.copy`` of a module with such a ``__getstate__``, and ``DataParallel`` for its replicas, copy the dictionary and
not its values. Two modules then have one :class:`ModuleCall`, and only the frame of ``Module.__call__`` tells which one
is called. So such a copy, too, runs its own weights and is not attached. Replicas in training are refused: they would
save everything without notice.

NOTE [ Compiled blocks ]

A block that was compiled before (``block.compile()``) has the attribute already. The checkpointed forward runs it, and
it is put back in the end. Compiling an attached module replaces the :class:`ModuleCall` without notice: so each call of
the model checks for that, and so does ``remove``. A module compiled around a block is refused if it can be seen: its
trace would bypass the block's call.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch.nn import Module

from spillway._torch import CALLING, IS_REPLICA, callback, is_fx_tracing, own_call, tracing_state
from spillway._torch import PLACE as PLACE
from spillway.checkpointing.blocks import Named
from spillway.errors import BudgetError, SpillwayError, UnsupportedError, UsageError
from spillway.offloading import group, keep
from spillway.parameters.streamed import StreamedBlock

REFUSALS = (UsageError, UnsupportedError, BudgetError)
"""Errors of a call that are raised before anything of it has run."""


class ModuleCall:
    """Replaces a module's call. See NOTE [ How a module's call is taken over ].

    If it ``keeps``, the tensors that the module saves are kept, whatever the policy around it says.
    """

    def __init__(self, named: Named, *, keeps: bool = False) -> None:
        self.name = named.name
        self.kind = type(named.module).__name__
        self.module = weakref.ref(named.module)
        self.before: Callable[..., Any] | None = named.module.__dict__.get(PLACE)
        """The call that was there."""
        self._had_call = PLACE in named.module.__dict__
        self._keeps = keeps
        self.removed = False
        self.group: str | None = None
        """Name of the group that the module is."""
        self.streamed: StreamedBlock | None = None
        """With it, the module's parameters are on the device only during its calls."""
        self.on_error: Callable[[SpillwayError], None] | None = None
        """Is called with an error, instead of raising it, and may raise its own. Otherwise the call goes on as if not
        attached."""
        self.give_way: Callable[[], object] | None = None
        """Removes it, since the user calls ``attach``; ``None``: the user has attached it, and has to remove it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Mostly torch's frame calls this, and tells which module is called.
        frame = sys._getframe(1)
        module: Module | None = frame.f_locals["self"] if frame.f_code is CALLING else self.module()
        assert module is not None
        if module is not self.module():
            # See NOTE [ Copies that share it ].
            if module.__dict__.get(IS_REPLICA) and module.training and torch.is_grad_enabled():
                self.refuse(
                    UnsupportedError(
                        f"A replica of {Named(self.name, module)} was called on another device, and only the original "
                        f"is attached. Use torch.nn.parallel.DistributedDataParallel, with one device in each process"
                    )
                )
            return own_call(module)(*args, **kwargs)
        if self.streamed is None:
            return self._call(module, args, kwargs)
        with ExitStack() as stack:
            try:
                stack.enter_context(self.streamed.in_use())
            except REFUSALS as error:
                self.refuse(error)
            return self._call(module, args, kwargs)

    def _call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.removed or not (module.training and torch.is_grad_enabled()):
            if not (self.removed or module.training):
                self.evaluates()
            return self.plain(module, args, kwargs)
        # First: inside of a compiled function, Python that is called from here is traced.
        if is_compiled_around():
            self.refuse(
                UnsupportedError(
                    f"{Named(self.name, module)} is attached, and was called inside of torch.compile, whose trace "
                    f"bypasses the attached call. Compile the blocks instead, before attaching: "
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
        """Raise an error, or hand it to :attr:`on_error`."""
        if self.on_error is None:
            raise error
        self.on_error(error)

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call, in training."""
        with keep() if self._keeps else nullcontext():
            return self.plain(module, args, kwargs)

    def evaluates(self) -> None:
        """The module is about to be called in evaluation."""

    def plain(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call without Spillway."""
        return (own_call(module) if self.before is None else self.before)(*args, **kwargs)

    def install(self) -> None:
        module = self.module()
        assert module is not None
        module.__dict__[PLACE] = self

    def uninstall(self) -> bool:
        """Detach it; ``False`` if another call was put there meanwhile."""
        self.removed = True
        module = self.module()
        if module is None:
            return True
        own = module.__dict__
        if own.get(PLACE) is not self:
            # Attaching may have failed half way.
            return own.get(PLACE) is self.before
        if self._had_call:
            own[PLACE] = self.before
        else:
            del own[PLACE]
        return True

    def collision(self) -> UsageError:
        """The error if the module was compiled meanwhile."""
        return UsageError(
            f"{repr(self.name) if self.name else 'the model'} ({self.kind}) was compiled after attaching, which "
            f"replaced the attached call. Call attached.remove(), compile the blocks, and attach again"
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
    return tracing_state() is not None or torch.compiler.is_compiling() or is_fx_tracing()
