"""A callback that attaches Spillway to what a ``LightningModule`` trains.

NOTE [ What a step calls ]

``attach`` is given a module whose call is a step's forward. A ``LightningModule``'s ``training_step`` is no call of a
module: it calls ``self``, or modules that ``self`` holds, or modules within these. Which, only a step can tell. So when
training starts a :class:`FirstCall` waits in the place of each module's call. The outermost module that is called to be
trained, and that has blocks, is attached right there, and then called: so nothing of the first step goes past it.

DDP and FSDP are called in place of the ``LightningModule``, whose ``forward`` is for that moment the whole step, with
its backward, if the step does that by hand. That call is no forward of a model, and goes past what is attached.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from spillway.attaching import Attached, attach
from spillway.attaching.call import ModuleCall
from spillway.blocks import Named, find_blocks, is_called, walk
from spillway.errors import UsageError
from spillway.groups import Groups
from spillway.integrations.first_call import FirstCall
from spillway.profiling.machine import known_hardware
from spillway.recomputing import Recompute

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning" not in sys.modules:
    # Two packages with the same classes twice; whoever has imported one means that one.
    from pytorch_lightning import Callback
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:
        from pytorch_lightning import Callback

_SHOWN = 6
_OPTIONS = tuple(inspect.signature(attach).parameters)[1:]


class SpillwayCallback(Callback):
    """Attaches Spillway to what ``training_step`` calls, for as long as a fit trains.

    The first step that calls a model attaches to it (see the note at the top of this file): the outermost module that
    is called, has something to train, and repeats blocks. With an offload policy, blocks are not needed. Losses,
    gradients and weights are bit for bit those of the same fit without it. Validation is as ever, checkpoints hold
    nothing of it, and when the fit ends, also by an exception, nothing of it is left on the model.

    Args:
        model: name of a module of the ``LightningModule``, such as ``"net"``, or ``""`` for itself: attach to this one
            only. ``None``: to what is found.
        options: what :func:`spillway.attach` takes beside the model: ``budget``, ``plan``, ``policy``, ``blocks`` and
            the others. Names of blocks are those within the module that is attached. Without any, blocks are computed
            again.

    Raises:
        UsageError: here, for an option that ``attach`` does not have. In a fit: for what ``attach`` refuses, in the
            first step; after the first batch, if it called nothing that can be attached to; after the first epoch, if
            ``model`` was not called; where a budget or a plan meets two models; for several of these callbacks, unless
            each has a ``model``, and one of them at most a budget.

    Example:
        >>> trainer = Trainer(callbacks=[SpillwayCallback(budget="40GiB")])  # doctest: +SKIP
        >>> trainer.fit(module)  # doctest: +SKIP
    """

    def __init__(self, *, model: str | None = None, **options: Any) -> None:
        if model is not None and not isinstance(model, str):
            raise UsageError(
                f"model: got {model!r:.200}, expected the name of a module of the LightningModule, or None"
            )
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise UsageError(
                f"got {', '.join(map(repr, unknown))}, expected options of spillway.attach: {', '.join(_OPTIONS)}"
            )
        super().__init__()
        self._model = model
        self._options = options
        self._search: _Search | None = None
        self._attached: dict[str, Attached] = {}
        self._batches = 0

    @property
    def attached(self) -> Mapping[str, Attached]:
        """What was attached in this fit, or in the last one, by the names of the modules.

        Has the plans and the statistics, also after the fit.
        """
        return MappingProxyType(self._attached)

    @property
    def _has_budget(self) -> bool:
        return self._options.get("budget") is not None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()
        self._attached = {}
        self._batches = 0
        options = dict(self._options)
        _refuse_others(self, trainer)
        if self._has_budget and options.get("hardware") is None:
            # Now, and not in the middle of the first step.
            options["hardware"] = known_hardware(trainer.strategy.root_device)
        self._search = _Search(pl_module, self._model, options, self._attached)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batches += 1
        # A model that was named may have its turn later, as in a GAN whose two steps take turns.
        if self._model is None and self._search is not None:
            self._search.check()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._batches and self._search is not None:
            self._search.check()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        # What is wrong with the model was told by the exception, or is less than it.
        with suppress(UsageError):
            self._remove()

    def _remove(self) -> None:
        search, self._search = self._search, None
        if search is not None:
            search.remove()


class _Search:
    """Looks for what a step calls, and attaches to it. See NOTE [ What a step calls ].

    Args:
        root: the ``LightningModule``.
        name: of the only module to attach to; ``None``: any.
        options: of ``attach``.
        attached: what is attached is written there, by name.
    """

    def __init__(
        self, root: LightningModule, name: str | None, options: dict[str, Any], attached: dict[str, Attached]
    ) -> None:
        self._kind = type(root).__name__
        self._name = name
        self._options = options
        self._attached = attached
        self._refused: dict[str, str] = {}
        """What was called and is not attached to, in the order of the calls, and why."""
        self._waiting: dict[int, FirstCall] = {}
        self._own = root.__dict__.get("forward")
        self._past: _Past | None = None
        modules = [each for each in (Named("", root), *walk(root)) if is_called(each.module)]
        wanted = [each for each in modules if each.name == name or (name is None and _has_parameters(each.module))]
        if name is not None and not wanted:
            known = ", ".join(repr(each.name) for each in modules[1 : _SHOWN + 1])
            raise UsageError(f"model: got {name!r}, expected the name of a module of {self._kind}: {known}, ...")
        for each in wanted:
            self._waiting.setdefault(id(each.module), FirstCall(each, partial(self._called, each.name)))
        for call in self._waiting.values():
            call.take()

    def _called(self, name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A module is called to be trained. Whether it was attached."""
        if not name and _is_step(module, self._own):
            return False
        if self._name is None and not self._is_wanted(name, module, args, kwargs):
            return False
        if self._attached and any(self._options.get(each) is not None for each in ("budget", "plan")):
            first = next(iter(self._attached))
            raise UsageError(
                f"got a training_step of {self._kind} that calls {first!r} and {name!r}, with a budget or a plan, "
                f"expected one model, since the plan is of the pass through one; say which by "
                f"SpillwayCallback(model={first!r}, ...), or call both in the forward of one module"
            )
        self._give_back(module)
        self._attached[name] = attach(module, **self._options)
        if not name:
            self._past = _Past(module, self._own)
            self._past.take()
        return True

    def _is_wanted(self, name: str, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether it has something to train, and what the options are about."""
        if not any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad
            for leaf in (*module.parameters(), *tree_leaves((args, kwargs)))
        ):
            # Frozen, maybe for now: as whoever trains a GAN does with one of its models while the other has its turn.
            return False
        try:
            _find_parts(module, self._options)
        except UsageError as error:
            # Not the error itself, which holds on to the arguments of the call.
            self._refused[name] = str(error)
            self._waiting.pop(id(module)).give_back()
            return False
        return True

    def check(self) -> None:
        """That something was found.

        Raises:
            UsageError: if not.
        """
        if self._attached:
            return
        if self._name is not None:
            raise UsageError(
                f"model: got {self._name!r}, which no training_step of {self._kind} has called, expected a module that "
                f"it calls in training mode and with gradients; name the one that it calls, or leave out model, and "
                f"it is found"
            )
        called = list(self._refused)[:_SHOWN]
        names = ", ".join(repr(name) if name else "itself" for name in called) or "no module with parameters"
        raise UsageError(
            f"got a training_step of {self._kind} that called {names}, expected a call of a module with blocks in it; "
            f"move the loop over the blocks into a module's forward, say blocks=..., or give an offload policy, which "
            f"needs no blocks{''.join(f'. Of {name!r}: {self._refused[name]}' for name in called[:1])}"
        )

    def remove(self) -> None:
        """Nothing is left on the modules."""
        for call in self._waiting.values():
            call.give_back()
        self._waiting.clear()
        if self._past is not None:
            self._past.give_back()
        wrong: UsageError | None = None
        for attached in self._attached.values():
            try:
                attached.remove()
            except UsageError as error:
                wrong = error
        if wrong is not None:
            raise wrong

    def _give_back(self, module: Module) -> None:
        """Nobody waits for a module any more, nor for what is in it or around it."""
        inside = {id(each) for each in module.modules()}
        for key, call in list(self._waiting.items()):
            other = call.module()
            if other is None or key in inside or any(each is module for each in other.modules()):
                call.give_back()
                del self._waiting[key]


class _Past(ModuleCall):
    """In front of what is attached to a ``LightningModule``: a call that stands for a whole step goes past that.

    Args:
        root: the ``LightningModule``.
        own: the forward of the instance, if it has one of its own.
    """

    def __init__(self, root: Module, own: object) -> None:
        super().__init__(Named("", root))
        self._own = own

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_step(module, self._own):
            return self.plain(module, args, kwargs)
        call: Callable[..., Any] = module._call_impl
        return call(*args, **kwargs)


def _is_step(root: Module, own: object) -> bool:
    """Whether the forward of a ``LightningModule`` is for now a step: see NOTE [ What a step calls ]."""
    forward = root.__dict__.get("forward")
    # What Lightning puts back is the class's, bound to the instance, whether the instance had one before or not.
    return forward is not own and getattr(forward, "__func__", None) is not type(root).forward


def _find_parts(module: Module, options: Mapping[str, Any]) -> None:
    """Raise :class:`UsageError` if a module has no blocks or groups of those that the options are about."""
    policy, groups, blocks = (options.get(name) for name in ("policy", "groups", "blocks"))
    if isinstance(policy, Recompute) or (policy is None and groups is None) or options.get("keep_last"):
        find_blocks(module, blocks)
    elif groups is not None:
        named = groups.patterns if isinstance(groups, Groups) else groups
        for patterns in named.values():
            find_blocks(module, [patterns] if isinstance(patterns, str) else list(patterns))


def _has_parameters(module: Module) -> bool:
    return next(module.parameters(), None) is not None


def _refuse_others(callback: SpillwayCallback, trainer: Trainer) -> None:
    """What other callbacks of this class cannot be beside this one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined, unused-ignore]
    ours = [each for each in callbacks if isinstance(each, SpillwayCallback)]
    if len(ours) > 1 and callback._model is None:
        raise UsageError(
            f"got {len(ours)} SpillwayCallbacks, of which one has no model, expected a name in each, since two cannot "
            f"look for the same; say SpillwayCallback(model=..., ...)"
        )
    # Each would set back the peak that the other one measures.
    if callback._has_budget and sum(each._has_budget for each in ours) > 1:
        raise UsageError(
            f"got {len(ours)} SpillwayCallbacks, of which several have a budget, expected it in one, since each would "
            f"measure the steps of the others; give the others a plan or a policy"
        )
