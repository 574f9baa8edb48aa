"""Hugging Face's ``accelerate``: ``accelerator.prepare``, and then ``spillway.attach`` to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn import Module

from spillway.attaching import Attached
from spillway.attaching import attached_to as _attached_to
from spillway.errors import UsageError
from spillway.integrations import AttachOptions

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped, import-not-found, unused-ignore]

__all__ = ["attached_to", "prepare"]


def prepare(accelerator: Accelerator, model: Module, *more: Any, **options: Any) -> Any:
    """``accelerator.prepare(model, *more)``, and then ``spillway.attach`` to the model with these options.

    The loop does not change: ``accelerator.accumulate``, ``backward``, ``clip_grad_norm_``, ``autocast``,
    ``unwrap_model``, ``save_state`` and ``load_state`` work as before. Losses, gradients and weights are the same, bit
    for bit. Spillway attaches to the model itself, inside of accelerate's wrappers.

    Args:
        accelerator: the accelerator.
        model: the model to train.
        more: optimizer, loaders or a schedule to prepare.
        options: of :func:`spillway.attach`, such as ``budget="40GiB"``. Without options, all blocks are recomputed.

    Returns:
        The result of ``accelerator.prepare``: the model alone, or a tuple in the order of the arguments.

    Raises:
        UsageError: for an invalid option; for an accelerator that compiles or checkpoints the model; and whatever
            ``attach`` refuses, after the model was prepared.

    Example:
        >>> model, optimizer, loader = prepare(accelerator, model, optimizer, loader, budget="40GiB")  # doctest: +SKIP
        >>> attached_to(model).stats().offloaded_bytes  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module as the first of all that is prepared")
    checked = AttachOptions(options)
    _refuse(accelerator, recomputes=checked.recomputes)
    prepared = accelerator.prepare(model, *more)
    checked.attach(_inner(prepared[0] if more else prepared))
    return prepared


def attached_to(model: Module) -> Attached:
    """The :class:`spillway.Attached` of a prepared model: its statistics, its plan, and ``remove()``.

    Args:
        model: the result of :func:`prepare`, or the model in it.

    Raises:
        UsageError: if nothing is attached.

    Example:
        >>> attached_to(model).explain()  # doctest: +SKIP
    """
    found = _attached_to(_inner(model))
    if found is None:
        raise UsageError(f"nothing is attached to this {type(model).__name__}; give a model that prepare() returned")
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
            f"dynamo_backend={compiler.backend.value!r} compiles the whole model, which bypasses Spillway; say 'no' "
            f"and compile the blocks before preparing: `for block in model.layers: block.compile()`"
        )
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if recomputes and fsdp is not None and fsdp.activation_checkpointing:
        raise UsageError(
            "the FSDP plugin has activation_checkpointing=True, so blocks would be recomputed twice; leave it out"
        )
