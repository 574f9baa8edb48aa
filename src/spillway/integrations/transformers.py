"""Hugging Face's ``Trainer``, and TRL's trainers, which derive from it: a callback that attaches during training.

NOTE [ The attached model ]

``on_train_begin`` comes when the model is on its device, has its mixed precision, and is wrapped. Its argument is the
model inside of DDP, or the one that FSDP2 has sharded. A trainer may call ``model.forward`` or a part of the model, and
so bypass Spillway. So the end of each step checks that the model was called.

NOTE [ A step that raises ]

The trainer has no event for an exception. The model stays attached then, which does not affect evaluation. It is
detached when training begins again with such a callback, or by ``callback.attached.remove()``.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.nn import Module
from transformers import TrainerCallback, TrainerState, TrainingArguments

from spillway.attaching import Attached, attached_to
from spillway.errors import UsageError
from spillway.integrations import AttachOptions
from spillway.integrations.loggers import scalars

__all__ = ["SpillwayCallback"]

_by_callbacks: weakref.WeakSet[Attached] = weakref.WeakSet()
"""Only these may be removed by another callback."""


class SpillwayCallback(TrainerCallback):
    """Attaches to the model of a ``transformers.Trainer`` while it trains. Evaluation is not affected.

    Losses, gradients and weights are bit for bit those of the same trainer without it.

    Args:
        log: whether to add numbers of the last step (:func:`spillway.integrations.loggers.scalars`) to the trainer's
            logs, such as ``spillway/peak_bytes``. Callbacks that come later in the trainer's list get them too. The
            trainer puts the reporters of ``report_to`` first, so pass them after this callback: see the example.
        options: of :func:`spillway.attach`, such as ``budget="40GiB"``, ``plan=...`` or ``policy=...``. Without
            options, all blocks are recomputed.

    Raises:
        UsageError: for an invalid option. When training begins: if the trainer itself checkpoints, offloads or
            compiles; with ``log``, for reporters of ``report_to``; and for what ``attach`` refuses. At the end of a
            step: if the trainer has not called the model.

    Example:
        >>> callback = SpillwayCallback(budget="40GiB", log=True)  # doctest: +SKIP
        >>> args = TrainingArguments("out", report_to="none")  # doctest: +SKIP
        >>> callbacks = [callback, TensorBoardCallback()]  # doctest: +SKIP
        >>> Trainer(model, args, train_dataset=data, callbacks=callbacks).train()  # doctest: +SKIP
        >>> print(callback.attached.explain())  # doctest: +SKIP
    """

    def __init__(self, *, log: bool = False, **options: Any) -> None:
        self._options = AttachOptions(options)
        self._log = log
        self.attached: Attached | None = None
        """The result of :func:`spillway.attach` in the current or the last training; ``None`` before."""

    def on_train_begin(self, args: TrainingArguments, *_: Any, **kwargs: Any) -> None:
        model: Module = kwargs["model"]
        _refuse(args, recomputes=self._options.recomputes)
        if self._log and args.report_to:
            raise UsageError(
                f"log=True: the trainer runs the reporters of report_to={args.report_to!r} before this callback, so "
                f"they would miss its numbers; say report_to='none', and pass them after it: "
                f"callbacks=[SpillwayCallback(log=True), ...]"
            )
        # See NOTE [ A step that raises ].
        for left in (self.attached, attached_to(model)):
            if left is not None and left in _by_callbacks:
                left.remove()
        self.attached = self._options.attach(model)
        _by_callbacks.add(self.attached)

    def on_substep_end(self, *_: Any, **kwargs: Any) -> None:
        if self.attached is not None and not self.attached.passes:
            raise UsageError(
                "the trainer never called the model in this step, but its forward or a part of it, which bypasses "
                "Spillway; call model(**inputs) in compute_loss, or use spillway.offload there instead of this callback"
            )

    on_step_end = on_substep_end

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **kwargs: Any) -> None:
        logs: dict[str, float] = kwargs["logs"]
        # Only logs of training steps have this loss.
        if self._log and self.attached is not None and "loss" in logs:
            numbers = scalars(self.attached)
            logs.update(numbers)
            # The trainer has already appended a copy.
            state.log_history[-1].update(numbers)

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        if self.attached is not None:
            self.attached.remove()


def _refuse(args: TrainingArguments, *, recomputes: bool) -> None:
    """Raise if the trainer itself offloads or compiles, or wraps blocks in checkpoints."""
    if getattr(args, "activation_offloading", False):
        raise UsageError(
            "activation_offloading=True offloads all saved tensors before Spillway sees them; leave it out, and give "
            "SpillwayCallback a budget or a policy"
        )
    if args.torch_compile:
        raise UsageError(
            "torch_compile=True compiles the whole model, which bypasses Spillway; leave it out, and compile the "
            "blocks before training: `for block in model.model.layers: block.compile()`"
        )
    if not recomputes:
        return
    fsdp = args.fsdp_config if isinstance(args.fsdp_config, dict) else {}
    if str(fsdp.get("activation_checkpointing")).lower() == "true":
        raise UsageError(
            "fsdp_config['activation_checkpointing'] wraps blocks in checkpoints, so they would be recomputed twice. "
            "Leave it out: SpillwayCallback() recomputes all blocks. Or give the callback an offload policy, which "
            "recomputes nothing"
        )
