"""The stages of the search for a plan.

NOTE [ Stages of a search ]

Each call of the model in training begins a step, and each step has a stage. A step is judged when the next one begins.

| stage | the step that has ended | the next stage |
|---|---|---|
| each but ``ACTIVE`` | had no backward through the blocks | the same |
| ``PROFILING_OPERATORS`` | | ``PROFILING_MEMORY`` |
| ``PROFILING_MEMORY``, ``PROFILING_TIME`` | had a new kind of block | the same |
| ``PROFILING_MEMORY`` | had known kinds | ``PROFILING_TIME`` |
| ``PROFILING_TIME`` | had the kinds of the step before | ``WARMING_UP`` with the first plan |
| ``WARMING_UP`` | | ``VALIDATING`` |
| ``VALIDATING`` | recorded or compared replays, and was above the budget | the same, four times at most |
| ``VALIDATING`` | was within the budget | ``ACTIVE``, or once ``VALIDATING`` with torch's checkpointing |
| ``VALIDATING`` | was above the budget | ``VALIDATING`` with another plan; on several ranks ``WARMING_UP`` |
| ``VALIDATING`` | had torch's checkpointing beside a plan | ``ACTIVE`` with the plan before |
| ``ACTIVE`` | was above the budget | ``WARMING_UP`` with another plan |

A step may also begin otherwise than those before, once a plan is applied. If it begins with more bytes than planned
for, the next stage is ``WARMING_UP`` with a plan for these. If its inputs are larger, it is ``WARMING_UP`` in the least
memory, then with a plan for them. If they are more than twice the profiled ones, or no plan is for them, it is
``PROFILING_OPERATORS``.
"""

from __future__ import annotations

import enum
import logging

_LOG = logging.getLogger("spillway.attach")


class Stage(enum.Enum):
    """See NOTE [ Stages of a search ]."""

    PROFILING_OPERATORS = "profiling operators"
    PROFILING_MEMORY = "profiling memory"
    PROFILING_TIME = "profiling time"
    WARMING_UP = "warming up"
    VALIDATING = "validating"
    ACTIVE = "active"

    def log(self, model: str) -> None:
        """Say in the log that the search for a model's plan has come to this stage."""
        _LOG.info("%s: %s", model, self.value)


PROFILING = (Stage.PROFILING_OPERATORS, Stage.PROFILING_MEMORY, Stage.PROFILING_TIME)


class Notes(list[str]):
    """Notes on a search for the user."""

    def once(self, what: str) -> None:
        if what not in self:
            self.append(what)
