"""TRL's ``OffloadActivations`` over Spillway's engine.

TRL's arguments have another order than torchtune's, and TRL keeps more output heads. Contexts, hooks and warnings are
those of :mod:`spillway.compat.torchtune`. ``docs/compat/trl.md`` maps each name and lists the differences.
"""

from __future__ import annotations

from torch.nn import Module

from spillway.compat import torchtune
from spillway.compat.torchtune import NoOpManager
from spillway.offloading import keep_tensor
from spillway.session import Session

__all__ = ["NoOpManager", "OffloadActivations", "get_act_offloading_ctx_manager"]

_HEADS = (
    *("output", "output.linear", "lm_head", "decoder.output", "decoder.output.linear", "decoder.lm_head"),
    *("language_model.lm_head", "final_layer_norm", "ln_f", "head"),
)
_LIGER = "liger"
"""A module with this in its name computes the output head within its loss."""


class OffloadActivations(torchtune.OffloadActivations):
    """:class:`spillway.compat.torchtune.OffloadActivations` with TRL's order of positional arguments.

    Example:
        >>> context = OffloadActivations(True, True, 4096)
        >>> with context:  # doctest: +SKIP
        ...     loss = model(batch).loss
        >>> loss.backward()  # doctest: +SKIP
    """

    def __init__(
        self,
        use_pin_memory: bool = True,
        use_streams: bool = True,
        min_offload_size: int = 1024,
        max_fwd_stash_size: int = 5,
        *,
        tier: str | None = None,
        session: Session | None = None,
    ) -> None:
        super().__init__(use_pin_memory, use_streams, max_fwd_stash_size, min_offload_size, tier=tier, session=session)

    def update_model_params(self, model: Module) -> None:
        """Keep the memory of a model's parameters, also views of it and parts of distributed parameters.

        Call it again after parameters were given other memory.
        """
        for parameter in model.parameters():
            keep_tensor(parameter, session=self._session)


def get_act_offloading_ctx_manager(
    model: Module,
    use_pin_memory: bool = True,
    use_streams: bool = True,
    min_offload_size: int = 1024,
    max_fwd_stash_size: int = 5,
    warn_if_no_head: bool = True,
    *,
    tier: str | None = None,
    session: Session | None = None,
) -> OffloadActivations:
    """A context for training steps that offloads all but the model's output head and its parameters.

    The head is found by name: those of :func:`spillway.compat.torchtune.get_act_offloading_ctx_manager`, the
    ``lm_head`` of a ``decoder``, ``final_layer_norm`` and ``ln_f``. Modules with ``liger`` in their name are kept too.

    Arguments, errors and warnings are those of the other one.

    Example:
        >>> context = get_act_offloading_ctx_manager(model)  # doctest: +SKIP
    """
    context = OffloadActivations(
        use_pin_memory, use_streams, min_offload_size, max_fwd_stash_size, tier=tier, session=session
    )
    context.update_model_params(model)
    torchtune.keep_head(model, _HEADS, warn_if_no_head=warn_if_no_head)
    for name, module in model.named_modules():
        if _LIGER in name.lower():
            torchtune.keep_saved_by(name, module)
    return context
