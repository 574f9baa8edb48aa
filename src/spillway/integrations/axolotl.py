"""axolotl: a plugin that gives its trainers the callback of transformers' ``Trainer``.

axolotl merges :class:`SpillwayArgs` into the schema of its YAML file, and asks each plugin for callbacks before it
makes the trainer. It drops keys that no schema has, so the options are checked there.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin  # type: ignore[import-untyped, import-not-found, unused-ignore]
from pydantic import BaseModel, field_validator
from torch.nn import Module

from spillway.integrations.transformers import SpillwayCallback
from spillway.units import read_budget

__all__ = ["SpillwayArgs", "SpillwayPlugin"]


class SpillwayArgs(BaseModel):
    """The plugin's keys in axolotl's YAML file: ``spillway_budget`` is required, ``spillway_host_budget`` is not.

    Raises:
        ValidationError: of pydantic, for a missing budget, or one that is no size.

    Example:
        >>> SpillwayArgs(spillway_budget="24GiB").spillway_host_budget  # doctest: +SKIP
    """

    spillway_budget: int | float | str
    spillway_host_budget: int | str | None = None

    @field_validator("spillway_budget", "spillway_host_budget")
    @classmethod
    def _is_size(cls, size: int | float | str | None) -> int | float | str | None:
        if size is not None:
            read_budget(size)
        return size


class SpillwayPlugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Trains within a memory budget: each trainer gets a :class:`~spillway.integrations.transformers.SpillwayCallback`.

    Example:
        In axolotl's YAML file::

            plugins: [spillway.integrations.axolotl.SpillwayPlugin]
            spillway_budget: 24GiB
    """

    callback: SpillwayCallback | None = None
    """The callback of the trainer; its ``attached`` has the plan. ``None`` before the model is loaded."""

    def get_input_args(self) -> str:
        """The name of the schema of the plugin's keys."""
        return f"{__name__}.{SpillwayArgs.__name__}"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Module) -> list[SpillwayCallback]:
        """The callback, with the options of the YAML file."""
        self.callback = SpillwayCallback(budget=cfg.spillway_budget, host_budget=cfg.spillway_host_budget)
        return [self.callback]
