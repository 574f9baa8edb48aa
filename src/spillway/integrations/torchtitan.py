"""torchtitan (0.3): Spillway in place of its activation checkpointing.

torchtitan builds a model on the meta device, applies activation checkpointing, compiles the blocks, shards them,
allocates their memory and loads them. So Spillway attaches when the model is first called in training.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.nn import Module
from torchtitan.distributed.activation_checkpoint import (  # type: ignore[import-not-found, unused-ignore]
    ActivationCheckpointing,
)

from spillway.attaching import Attached
from spillway.checkpointing.blocks import Named
from spillway.errors import UsageError
from spillway.integrations import AttachOptions, FirstCall
from spillway.planner.plan import Plan
from spillway.recomputing import Recompute


class SpillwayAC(ActivationCheckpointing):  # type: ignore[misc, unused-ignore]
    """Trains with a budget, with a plan, or with checkpointed blocks.

    Its ``Config`` is a value for ``Trainer.Config.activation_checkpoint``. Give it ``budget`` or ``plan``, or for
    checkpointed blocks ``save`` and ``offload``. Without any of these, blocks are recomputed in backward.

    Example:
        >>> config = llama3_8b()  # doctest: +SKIP
        >>> config.activation_checkpoint = SpillwayAC.Config(budget="60GiB")  # doctest: +SKIP
        >>> config.training.disable_cuda_graphs = True  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc, unused-ignore]
        """Options for the activations of the model's layers."""

        budget: str | None = None
        """Most bytes that a step may allocate on the device, such as ``"60GiB"``."""

        host_budget: str | None = None
        """With a budget: most bytes of CPU memory."""

        plan: str | None = None
        """Path of a saved plan."""

        save: list[str] = field(default_factory=list)
        """In checkpointed blocks: activations to keep. Words of :func:`spillway.recompute`, such as ``"attention"``."""

        offload: list[str] = field(default_factory=list)
        """In checkpointed blocks: activations to offload, such as ``"inputs"``."""

        min_bytes: str | None = None
        """Do not offload smaller tensors. ``None``: 1 MiB."""

    def __init__(self, config: SpillwayAC.Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        self.attached: Attached | None = None
        """The result of :func:`spillway.attach`, once the model was called in training."""
        self._options = _options_of(config)

    def apply(self, model: Module) -> None:
        """Attach to the model when it is first called in training.

        Args:
            model: a model whose blocks are its ``layers``.

        Raises:
            UsageError: for a model without ``layers``. In the first step: for what :func:`spillway.attach` refuses.
        """
        if not isinstance(getattr(model, "layers", None), Module):
            raise UsageError(
                f"got a {type(model).__name__} without layers, which are the blocks of torchtitan's models; for "
                f"another model, use spillway.attach(model, blocks=...)"
            )
        first = FirstCall(Named("", model), lambda model, args, kwargs: self._attach(first, model))
        first.install()

    def _attach(self, first: FirstCall, model: Module) -> bool:
        first.uninstall()
        self.attached = self._options.attach(model)
        return True


def _options_of(config: SpillwayAC.Config) -> AttachOptions:
    if config.debug:
        raise UsageError("debug: Spillway has no debug record of a recomputation; say debug=False")
    how = Recompute(
        save=config.save,
        offload=config.offload,
        preserve_rng_state=config.preserve_rng_state,
        determinism_check=config.determinism_check,
    )
    is_planned = config.budget is not None or config.plan is not None
    return AttachOptions(
        {
            "blocks": "layers.*",
            "min_bytes": config.min_bytes,
            "budget": config.budget,
            "host_budget": config.host_budget,
            "plan": None if config.plan is None else Plan.load(config.plan),
            "policy": how if config.save or config.offload or not is_planned else None,
        }
    )
