"""A callback that attaches Spillway to the models that a ``LightningModule`` trains.

NOTE [ Models that a step calls ]

``attach`` needs the module that a step calls. ``training_step`` is no module's call: it may call ``self``, a module of
``self``, or a module inside of that. So when training starts, a :class:`FirstCall` takes each module's call over. The
outermost module with blocks that is called in training is attached right there, and then called. So even the first step
uses it.

Under DDP and FSDP, Lightning makes the whole step the ``forward`` of the ``LightningModule`` for that time. That
call is no model's forward, and may contain the backward. So it bypasses what is attached.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module

from spillway._torch import own_call, tree_leaves
from spillway.attaching import Attached
from spillway.attaching.call import ModuleCall
from spillway.attaching.validation import groups_of
from spillway.checkpointing.blocks import Named, find_blocks, is_called, walk
from spillway.errors import UsageError
from spillway.integrations import AttachOptions, FirstCall
from spillway.profiler.machine import known_hardware

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    # Two packages have the same classes. Use the one that the user has imported.
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

_SHOWN = 6


class SpillwayCallback(Callback):
    """Attaches Spillway to the models that ``training_step`` calls, during a fit.

    The first step attaches to the outermost module that is called, has trainable parameters, and has repeated blocks.
    An offload policy needs no blocks. Losses, gradients and weights are bit for bit those of the same fit without it.
    Validation and checkpoints are not affected. After the fit, also after an exception, the model is as before.

    Args:
        model: name of the only module of the ``LightningModule`` to attach to, such as ``"net"``, or ``""`` for itself.
            ``None``: find it.
        options: of :func:`spillway.attach`: ``budget``, ``plan``, ``policy``, ``blocks`` and others. Names of blocks
            are within the attached module. Without options, all blocks are recomputed. With ``stream``, trained weights
            are streamed if ``configure_optimizers`` gives their :class:`~spillway.OffloadedOptimizer`.

    Raises:
        UsageError: here, for an invalid option. In a fit: for what ``attach`` refuses, in the first step; after the
            first batch, if it called nothing to attach to; after the first epoch, if ``model`` was not called; if a
            budget or a plan would apply to two models; for several of these callbacks, unless each has a ``model`` and
            only one has a budget.

    Example:
        >>> trainer = Trainer(callbacks=[SpillwayCallback(budget="40GiB")])  # doctest: +SKIP
        >>> trainer.fit(module)  # doctest: +SKIP
    """

    def __init__(self, *, model: str | None = None, **options: Any) -> None:
        if model is not None and not isinstance(model, str):
            raise UsageError(f"model: got {model!r:.200}, expected the name of a module of the LightningModule")
        super().__init__()
        self._model = model
        self._options = AttachOptions(options)
        self._has_budget = options.get("budget") is not None
        self.attached: dict[str, Attached] = {}
        """Results of :func:`spillway.attach` in the current or last fit, by module name: plans and statistics."""
        self._refused: dict[str, str] = {}
        """Modules that were called but cannot be attached to, in the order of calls, and why."""
        self._calls: dict[int, ModuleCall] = {}
        """Calls that are taken over during a fit, by the ids of their modules."""
        self._kind = ""
        self._forward: object = None
        """The root's own ``forward``, if it has one."""
        self._batches = 0
        self._optimizers: Sequence[object] = ()
        """Those of a fit. ``configure_optimizers`` has made them, and they have the states of a checkpoint."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        self.attached, self._refused, self._batches = {}, {}, 0
        _refuse_others(self, trainer)
        if self._has_budget and self._options.options.get("hardware") is None:
            # Measure it now, not in the middle of the first step, which finds what was measured.
            known_hardware(trainer.strategy.root_device)
        self._optimizers = trainer.optimizers
        self._kind, self._forward = type(pl_module).__name__, pl_module.__dict__.get("forward")
        modules = [each for each in (Named("", pl_module), *walk(pl_module)) if is_called(each.module)]
        name = self._model
        if name is None:
            wanted = [each for each in modules if next(each.module.parameters(), None) is not None]
        else:
            wanted = [each for each in modules if each.name == name]
        if name is not None and not wanted:
            known = ", ".join(repr(each.name) for each in modules[1 : _SHOWN + 1])
            raise UsageError(f"model: got {name!r}, expected the name of a module of {self._kind}: {known}, ...")
        for each in wanted:
            self._calls.setdefault(id(each.module), FirstCall(each, partial(self._called, each.name)))
        for call in self._calls.values():
            call.install()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        # A named model may be called later, like one of the two in a GAN.
        if self._model is None:
            self._check()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batches:
            self._check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # The exception of the fit matters more.
        with suppress(UsageError):
            self._remove()

    def _remove(self) -> None:
        """Restore all modules. A second call does nothing."""
        with ExitStack() as every:
            every.callback(self._calls.clear)
            for attached in self.attached.values():
                every.callback(attached.remove)
            for call in self._calls.values():
                every.callback(call.uninstall)

    def _called(self, name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A module is called in training. Returns whether it is attached now."""
        if not name and _is_step(module, self._forward):
            return False
        if self._model is None and not self._is_wanted(name, module, args, kwargs):
            return False
        if self.attached and any(self._options.options.get(each) is not None for each in ("budget", "plan")):
            first = next(iter(self.attached))
            raise UsageError(
                f"the training_step of {self._kind} calls {first!r} and {name!r}, but a budget or a plan is for one "
                f"model; say SpillwayCallback(model={first!r}, ...), or call both in the forward of one module"
            )
        self._uninstall(module)
        self.attached[name] = self._options.attach(module, self._optimizers)
        if not name:
            self._calls[id(module)] = _Bypass(module, self._forward)
            self._calls[id(module)].install()
        return True

    def _is_wanted(self, name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it is trained, and has the blocks or groups of the options."""
        leaves = (*module.parameters(), *tree_leaves((args, kwargs)))
        if not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            # It may be frozen only for now, like one model of a GAN.
            return False
        try:
            _find_parts(module, self._options)
        except UsageError as error:
            # The error itself would hold the arguments of the call.
            self._refused[name] = str(error)
            self._calls.pop(id(module)).uninstall()
            return False
        return True

    def _check(self) -> None:
        """Raise :class:`UsageError` if nothing was attached."""
        if self.attached:
            return
        if self._model is not None:
            raise UsageError(
                f"model: no training_step of {self._kind} has called {self._model!r} in training mode with gradients; "
                f"name the module that it calls, or leave out model to have it found"
            )
        called = list(self._refused)[:_SHOWN]
        names = ", ".join(repr(name) if name else "itself" for name in called) or "no module with parameters"
        why = f". About {called[0]!r}: {self._refused[called[0]]}" if called else ""
        raise UsageError(
            f"the training_step of {self._kind} called {names}, but no module with blocks; move the loop over the "
            f"blocks into a module's forward, say blocks=..., or give an offload policy, which needs no blocks{why}"
        )

    def _uninstall(self, module: Module) -> None:
        """Restore a module, the modules in it, and those around it."""
        inside = {id(each) for each in module.modules()}
        for key, call in list(self._calls.items()):
            other = call.module()
            if other is None or key in inside or any(each is module for each in other.modules()):
                call.uninstall()
                del self._calls[key]


class _Bypass(ModuleCall):
    """Bypasses what is attached to a ``LightningModule`` when its call is a whole step."""

    def __init__(self, root: Module, forward: object) -> None:
        super().__init__(Named("", root))
        self._forward = forward

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_step(module, self._forward):
            return self.plain(module, args, kwargs)
        return own_call(module)(*args, **kwargs)


def _is_step(root: Module, own: object) -> bool:
    """Whether the forward of a ``LightningModule`` is a step now: see NOTE [ Models that a step calls ]."""
    forward = root.__dict__.get("forward")
    # Lightning restores the class's forward, bound to the instance, even if the instance had none.
    return forward is not own and getattr(forward, "__func__", None) is not type(root).forward


def _find_parts(module: Module, options: AttachOptions) -> None:
    """Raise :class:`UsageError` if a module does not have the blocks or groups of the options."""
    if options.recomputes or options.options.get("keep_last"):
        find_blocks(module, options.options.get("blocks"))
    elif (groups := groups_of(options.options.get("groups"))) is not None:
        for patterns in groups.patterns.values():
            find_blocks(module, [patterns] if isinstance(patterns, str) else list(patterns), what="groups")


def _refuse_others(callback: SpillwayCallback, trainer: Trainer) -> None:
    """Raise if other callbacks of this class conflict with this one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined, unused-ignore]
    ours = [each for each in callbacks if isinstance(each, SpillwayCallback)]
    if len(ours) > 1 and callback._model is None:
        raise UsageError(
            f"the trainer has {len(ours)} SpillwayCallbacks, and one has no model, so both may find the same; say "
            f"SpillwayCallback(model=..., ...) for each"
        )
    # Each resets the peak memory that the other measures.
    if callback._has_budget and sum(each._has_budget for each in ours) > 1:
        raise UsageError(
            f"the trainer has {len(ours)} SpillwayCallbacks, and several have a budget, so each would measure the "
            f"steps of the others; give the others a plan or a policy"
        )
