"""Hugging Face's ``Trainer``, and TRL's, which are made of it: one callback that attaches while it trains.

NOTE [ Where a trainer's model is attached to ]

``on_train_begin`` comes when the model is on its device, has its mixed precision, and is wrapped. It is given the model
that is inside of DDP, which DDP calls like any other, or the one that FSDP2 has sharded: that is what is attached to.
A trainer that goes past the model's call (by ``model.forward``, or by a part of it) would leave what is attached
unused, without a word: so the end of each step looks whether there was a call.

NOTE [ A step that raises ]

The trainer has no event for it. What is attached stays on the model then, where evaluation does not see it, until the
next training of that model begins with such a callback, or until ``remove()``, or the end of ``with callback:``.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import nullcontext, suppress
from types import FrameType, TracebackType
from typing import Any

from torch.nn import Module
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from spillway.attaching import Attached, attached_to
from spillway.errors import UsageError
from spillway.integrations.loggers import scalars
from spillway.integrations.options import AttachOptions

__all__ = ["SpillwayCallback"]

_SAME_OPTIONS = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default", "early_stop": True}
"""Options that checkpointing and :class:`spillway.Recompute` share, with our defaults."""
_left: weakref.WeakSet[Attached] = weakref.WeakSet()
"""What callbacks attached: they, and nobody's else, may be taken off by another callback."""


class SpillwayCallback(TrainerCallback):
    """Attaches to the model of a ``transformers.Trainer`` while it trains, and to none of its evaluations.

    Losses, gradients and weights are bit for bit those of the same trainer without it. So is the trainer's number of
    items in a batch, which goes to the model as ever.

    Args:
        log: whether numbers of the last step (:func:`spillway.integrations.loggers.scalars`) are added to what the
            trainer logs of its steps, as ``spillway/peak_bytes`` and so on. The callback then takes its place before
            all others of the trainer's, so that they are given these, too.
        options: of :func:`spillway.attach`: ``budget="40GiB"``, ``plan=...`` or ``policy=...``, and all that goes
            with them. Without any, all blocks are recomputed.

    Raises:
        UsageError: for an option that ``attach`` has not. When training begins: where the trainer checkpoints,
            offloads or compiles by itself, and whatever ``attach`` refuses. At the end of a step: where the trainer
            does not call the model.

    Example:
        >>> callback = SpillwayCallback(budget="40GiB", log=True)  # doctest: +SKIP
        >>> Trainer(model, args, train_dataset=data, callbacks=[callback]).train()  # doctest: +SKIP
        >>> print(callback.attached.explain())  # doctest: +SKIP
    """

    def __init__(self, *, log: bool = False, **options: Any) -> None:
        self._options = AttachOptions(options)
        self._log = log
        self._attached: Attached | None = None

    @property
    def attached(self) -> Attached | None:
        """What is attached, or was until training ended; ``None`` before."""
        return self._attached

    def remove(self) -> None:
        """Take everything off the model: for when a step has raised. A second time, it does nothing."""
        if self._attached is not None:
            self._attached.remove()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        model: Module = kwargs["model"]
        _refuse(args, recomputes=self._options.recomputes)
        # See NOTE [ A step that raises ].
        self.remove()
        left = attached_to(model)
        if left is not None and left in _left:
            left.remove()
        self._attached = self._options.attach(model)
        _left.add(self._attached)
        if self._log:
            _put_first(self, sys._getframe(1))

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._check_called()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._check_called()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs["logs"]
        # What it logs of evaluation and of the whole has no loss by that name.
        if self._log and self._attached is not None and "loss" in logs:
            numbers = scalars(self._attached)
            logs.update(numbers)
            # The trainer has put a copy there already.
            state.log_history[-1].update(numbers)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.remove()

    def __enter__(self) -> SpillwayCallback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What went wrong inside is what is to be heard of.
        with suppress(UsageError) if kind is not None else nullcontext():
            self.remove()

    def _check_called(self) -> None:
        if self._attached is not None and not self._attached.passes:
            raise UsageError(
                "got a step in which the trainer never called the model, but its forward or a part of it, expected "
                "model(**inputs), since nothing of what was attached was used; call the model in compute_loss, or use "
                "spillway.offload there instead of this callback"
            )


def _refuse(args: TrainingArguments, *, recomputes: bool) -> None:
    """What the trainer does itself to save memory, or to the model."""
    if getattr(args, "activation_offloading", False):
        raise UsageError(
            "got activation_offloading=True, which takes all that autograd saves before Spillway can, expected False; "
            "leave it out, and give SpillwayCallback a budget or a policy"
        )
    if args.torch_compile:
        raise UsageError(
            "got torch_compile=True, which compiles the whole model and so goes past what is attached, expected False; "
            "compile the blocks before training: `for block in model.model.layers: block.compile()`"
        )
    if not recomputes:
        return
    fsdp = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    # The first is what the second is called since transformers 5.
    given = [
        name for name in ("activation_checkpointing", "gradient_checkpointing") if getattr(args, name, False) is True
    ][:1]
    given += (
        ["fsdp_config['activation_checkpointing']"]
        if str(fsdp.get("activation_checkpointing")).lower() == "true"
        else []
    )
    if given:
        raise UsageError(
            f"got {' and '.join(given)} in the trainer's arguments, expected no checkpointing but Spillway's, or "
            f"blocks would be computed a third time; say gradient_checkpointing=False, which is not the default of "
            f"TRL's trainers, and {_equivalent(args)} does the same, or give SpillwayCallback an offload policy, which "
            f"recomputes nothing"
        )


def _equivalent(args: TrainingArguments) -> str:
    """The callback that checkpoints as the trainer was told to."""
    told = getattr(args, "activation_checkpointing_kwargs", None) or getattr(
        args, "gradient_checkpointing_kwargs", None
    )
    told = told if isinstance(told, dict) else {}
    every = told.get("every_n_layers", 1)
    # The second is TRL's.
    how = [how for name, how in (("offload", 'offload="inputs"'), ("selective", 'save="attention"')) if told.get(name)]
    how += [f"{name}={told[name]!r}" for name in _SAME_OPTIONS if name in told and told[name] != _SAME_OPTIONS[name]]
    options = [f"every={every}"] if every != 1 else []
    options += [f"policy=spillway.Recompute({', '.join(how)})"] if how else []
    return f"SpillwayCallback({', '.join(options)})"


def _put_first(callback: TrainerCallback, frame: FrameType) -> None:
    """Before reporters, which trainers put before the user's callbacks: each changes what the next is given to log.

    No callback is given the trainer's list of them, but who calls it has it.
    """
    handler = frame.f_locals.get("self")
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)
