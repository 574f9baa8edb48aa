"""Steers the blocks of a pipeline stage: see NOTE [ How the stages of a rank find their plans ] in ``ranks.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from spillway.attaching.pilot import Pilot, Stage
from spillway.attaching.steering import Steered
from spillway.attaching.treating import LEAST, learned_by
from spillway.planning.plan import Plan
from spillway.planning.stages import StageProfile
from spillway.session import Session

_MOST_MISSED = 3


class StagePilot(Pilot):
    """Steers the blocks of one stage. Of a step, one chunk is watched.

    Args:
        index: the stage's place in the pipeline.
        model: class of its module.
        device: where it computes.
        session: ``None``: the default one.
        options: of :class:`~spillway.attaching.pilot.Pilot`.
    """

    def __init__(self, index: int, model: str, device: torch.device, session: Session | None, **options: Any) -> None:
        super().__init__(model, device, session, budget=None, planner=None, **options)
        self.index = index
        self.on_growth: Callable[[StagePilot, int, int], None] | None = None
        """Is told of larger inputs than ever: bytes before, and now."""
        self.is_turn = False
        """Whether the chunk that goes forward now is the one that is watched."""
        self._has_come_back = False
        """Whether a backward came through it."""
        self._largest = 0
        self._missed = 0
        """Steps in which nothing was seen of its chunk."""
        self.is_left_alone = False

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A chunk goes forward."""
        nbytes = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        before, self._largest = self._largest, max(self._largest, nbytes)
        if nbytes > before and before and self.on_growth is not None:
            self.on_growth(self, before, nbytes)
        if self.is_turn:
            super().begin(model, args, kwargs)

    def evaluates(self) -> None:
        """It is for the rank's pilot to say when a step ends."""

    @property
    def _lead(self) -> float:
        """Its chunks come one after the other, and what the host is ahead where one begins is not a step's."""
        return 0.0

    def block_begins(self, call: Steered, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """A block is called; -1: of a chunk that nobody watches."""
        if self.is_turn:
            return super().block_begins(call, module, args, kwargs)
        call.observer = None
        return -1

    def leave(self) -> None:
        """Other chunks have their turns now."""
        self.is_turn = False
        if self._watch is not None:
            self._watch.leave()

    def come_back(self) -> None:
        """The backward of the chunk that is watched begins."""
        if self._watch is not None:
            self._watch.come_back()

    def count(self) -> bool:
        """A step has ended in which its first chunk was to be watched; whether it is left alone from now on."""
        self._missed = 0 if self._has_come_back else self._missed + 1
        self._has_come_back = False
        if self._missed >= _MOST_MISSED:
            self.is_left_alone = True
            for block in self._blocks:
                block.how = None
        return self.is_left_alone

    def take_least(self) -> None:
        """Blocks take the least memory."""
        for block in self._blocks:
            block.how = LEAST

    def seek(self) -> None:
        """Nothing is known of the stage any more: blocks take the least memory."""
        self._ended = None
        self.drop()
        self._start_anew()
        self.profile = self.plan = None
        self.is_left_alone, self._missed = False, 0

    def end(self) -> None:
        """The backward of the chunk that is watched has ended."""
        self._ended = self._finish()
        self._has_come_back = self._ended is not None

    def conclude(self) -> None:
        """The step has ended.

        Raises:
            UnsupportedError: where no backward came through a block.
        """
        ended, self._ended = self._ended, None
        self._advance(ended)

    def hold(self, plan: Plan) -> None:
        """Blocks do as a plan says."""
        self.plan, self.stage = plan, Stage.HOLDING
        self.apply(plan)

    def profiled(self, parameters: Sequence[torch.nn.Parameter]) -> StageProfile:
        """What is known of a chunk.

        Args:
            parameters: of the stage.
        """
        assert self.profile is not None
        # Other chunks may be larger than the first.
        profile = self._survey.enlarged(self.profile, self._largest)
        new = sum(each.nbytes for each in parameters if each.requires_grad and each.grad is None)
        return StageProfile(self.index, profile, profile.held_bytes, new)

    def trim(self) -> None:
        """What came back lay in memory that is kept for more of it. As long as nothing does, that is activations'."""
        self._used_session.trim(self._device)

    @property
    def measured_inputs(self) -> int:
        """Bytes of the inputs that the profile was measured with."""
        return self._survey.inputs

    @property
    def tried(self) -> int:
        """How often calls of its blocks cost more than they do."""
        return learned_by(self._blocks, self._used_session)
