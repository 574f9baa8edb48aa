"""Spillway as one of torchtitan's ways of activation checkpointing (torchtitan 0.3).

torchtitan builds a model on no device, applies activation checkpointing, compiles the blocks, shards them, gives them
memory and loads them. So nothing is attached before the model is called to be trained for the first time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn import Module

from spillway.attaching import Attached, attach
from spillway.blocks import Named
from spillway.errors import UsageError
from spillway.integrations.first_call import FirstCall
from spillway.planning.plan import Plan
from spillway.recomputing import Recompute

if TYPE_CHECKING:
    # What is known of it here, so that types are the same whether it is installed or not.
    class ActivationCheckpointing:
        """torchtitan's."""

        @dataclass(kw_only=True, slots=True)
        class Config:
            """torchtitan's."""

            _owner: ClassVar[type | None] = None
            preserve_rng_state: bool = True
            determinism_check: str = "default"
            debug: bool = False

        config: Config

        def __init__(self, config: Config, dump_folder: str = "") -> None: ...

else:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing


class SpillwayAC(ActivationCheckpointing):
    """Trains within a budget, by a plan, or with regions: a value for ``Trainer.Config.activation_checkpoint``.

    Its configuration has one of ``budget`` and ``plan``, or says of regions what they ``save`` and ``offload``. Without
    any of these, blocks are computed again in backward.

    Example:
        >>> config = llama3_8b()  # doctest: +SKIP
        >>> config.activation_checkpoint = SpillwayAC.Config(budget="60GiB")  # doctest: +SKIP
        >>> config.training.disable_cuda_graphs = True  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):
        """What is done with what the layers of the model save."""

        budget: str | None = None
        """Bytes that a step may have allocated on the device, such as ``"60GiB"``."""

        host_budget: str | None = None
        """With a budget: bytes of host memory that may be used."""

        plan: str | None = None
        """Path of a plan that was saved before."""

        save: list[str] = field(default_factory=list)
        """With regions: what is kept. Words as for :func:`spillway.recompute`, such as ``"attention"``."""

        offload: list[str] = field(default_factory=list)
        """With regions: what leaves, such as ``"inputs"``."""

        min_bytes: str | None = None
        """Leave smaller tensors where they are. ``None``: 1 MiB."""

    def __init__(self, config: SpillwayAC.Config, dump_folder: str = "") -> None:
        super().__init__(config, dump_folder)
        self.attached: Attached | None = None
        """What was attached, once the model has been called to be trained."""
        self._options = _options_of(config)

    def apply(self, model: Module) -> None:
        """Attach to the model when it is first called to be trained.

        Args:
            model: whose ``layers`` are its blocks.

        Raises:
            UsageError: for a model without ``layers``. In the first step: for what :func:`spillway.attach` refuses.
        """
        if not isinstance(getattr(model, "layers", None), Module):
            raise UsageError(f"got a {type(model).__name__} without layers, expected a model as torchtitan's are")
        first = FirstCall(Named("", model), lambda model, args, kwargs: self._attach(first, model))
        first.take()

    def _attach(self, first: FirstCall, model: Module) -> bool:
        first.give_back()
        self.attached = attach(model, blocks="layers.*", **self._options)
        return True


def _options_of(config: SpillwayAC.Config) -> dict[str, Any]:
    ways = [name for name in ("budget", "plan") if getattr(config, name) is not None]
    if config.save or config.offload:
        ways.append("save and offload")
    if len(ways) > 1:
        raise UsageError(f"got {' and '.join(ways)}, expected one of them, since each says what becomes of a layer")
    if config.host_budget is not None and config.budget is None:
        raise UsageError("host_budget: got it without a budget, expected one, since it says how it is planned for")
    if config.debug:
        raise UsageError("debug: got True, expected False, since there is no such record of a region")
    options: dict[str, Any] = {"min_bytes": config.min_bytes}
    if config.budget is not None:
        return {**options, "budget": config.budget, "host_budget": config.host_budget}
    if config.plan is not None:
        return {**options, "plan": Plan.load(config.plan)}
    how = Recompute(
        save=config.save,
        offload=config.offload,
        preserve_rng_state=config.preserve_rng_state,
        determinism_check=config.determinism_check,
    )
    return {**options, "policy": how}
