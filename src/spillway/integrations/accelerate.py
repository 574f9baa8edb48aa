"""Hugging Face's ``accelerate``: what ``accelerator.prepare`` gives, with the model attached."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from spillway.attaching import Attached
from spillway.attaching import attached_to as _attached_to
from spillway.errors import UsageError
from spillway.integrations.options import AttachOptions

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]

__all__ = ["attached_to", "prepare"]


def prepare(accelerator: Accelerator, model: Module, *more: Any, **options: Any) -> Any:
    """``accelerator.prepare(model, *more)``, and then ``spillway.attach`` to the model, with these options.

    The loop stays as it is: ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``, ``autocast``,
    ``unwrap_model``, ``save_state`` and ``load_state`` do what they did, and losses, gradients and weights are bit for
    bit those without. What is attached is on the model itself, inside of what accelerate wraps it in.

    Args:
        accelerator: whose ``prepare`` it is.
        model: the model to train.
        more: what else is to be prepared: the optimizer, loaders, a schedule.
        options: of :func:`spillway.attach`, such as ``budget="40GiB"``. Without any, all blocks are recomputed.

    Returns:
        What ``accelerator.prepare`` gives: the model alone, or a tuple in the order of the arguments.

    Raises:
        UsageError: for an option that ``attach`` has not; for an accelerator that compiles the model, or that
            checkpoints it; and whatever ``attach`` refuses. What that refuses has been prepared already.

    Example:
        >>> model, optimizer, loader = prepare(accelerator, model, optimizer, loader, budget="40GiB")  # doctest: +SKIP
        >>> attached_to(model).stats().offloaded_bytes  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module, before all else that is prepared")
    checked = AttachOptions(options)
    _refuse(accelerator, recomputes=checked.recomputes)
    prepared = accelerator.prepare(model, *more)
    checked.attach(_inner(prepared[0] if more else prepared))
    return prepared


def attached_to(model: Module) -> Attached:
    """What is attached to a model that was prepared: its statistics, its plan, and ``remove()``.

    Args:
        model: what :func:`prepare` gave, or the model in it.

    Raises:
        UsageError: if nothing is.
    """
    found = _attached_to(_inner(model))
    if found is None:
        raise UsageError(
            f"got {type(model).__name__}, to which nothing is attached, expected a model that prepare() gave, and from "
            f"which nothing was removed"
        )
    return found


def _inner(model: Module) -> Module:
    from accelerate.utils import (  # type: ignore[import-untyped, import-not-found, unused-ignore]
        extract_model_from_parallel,
    )

    inner: Module = extract_model_from_parallel(model)
    return inner


def _refuse(accelerator: Accelerator, *, recomputes: bool) -> None:
    compiler = getattr(accelerator.state, "dynamo_plugin", None)
    if compiler is not None and compiler.backend.value != "NO":
        raise UsageError(
            f"got an accelerator with dynamo_backend={compiler.backend.value!r}, which compiles the model and so goes "
            f"past what is attached, expected 'no'; compile the blocks before preparing: "
            f"`for block in model.layers: block.compile()`"
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if recomputes and fsdp is not None and fsdp.activation_checkpointing:
        raise UsageError(
            "got an FSDP plugin with activation_checkpointing=True, expected no checkpointing but Spillway's, or "
            "blocks would be computed a third time; leave it out"
        )
