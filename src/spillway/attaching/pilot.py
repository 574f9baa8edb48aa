"""Finds the plan of an attached model within a budget, in the steps of the user's own loop, and holds it.

NOTE [ How a plan is found ]

Each call of the model in training is a pass, and each pass has a stage:

``TRACING``
    Blocks are recomputed and their inputs leave: the least memory there is. Of each kind of block one call is watched
    operator by operator.
``WEIGHING``
    The same, watched block by block, and within a block's backward wherever it is given what was saved: bytes.
``MEASURING``
    The same, watched at the ends of blocks only, since each look takes the host time: times, and by how much the host
    is ahead of the device at the end (``compile.py``). Of inputs of another size they say nothing: if four came, the
    times are those of the pass before.
    A pass that had no backward through the blocks is repeated, and so is one that traces or weighs, in which a kind of
    block came that was not traced before: it was, then.
``TRYING``
    The plan is in force. Regions whose decisions are new are tried (``docs/recompute.md``), and orders are learned.
``CHECKING``
    The plan is in force, and the step's peak is measured. If it is over the budget, a plan is made for a budget that is
    smaller by that, and is tried. If the host took longer than was foreseen, or less, a plan is made that knows of it,
    and another one if the host is slow for that, too; not by a step in which host memory was pinned in the background.
    If a step takes longer than was predicted all the same, torch's own checkpointing is tried, if it is within the
    budget. Of two plans the faster one is held: see NOTE [ Of two plans the faster one ] in ``contest.py``.
``HOLDING``
    Nothing is watched but the device's peak and the shapes of the model's inputs, at each call. A peak over the budget,
    and a plan is made for less; where there is none, such a step is noted, and a second one soon after it is an error.
    One of several ranks notes it, and goes on. A step that begins with more than was there when bytes were weighed (an
    optimizer's state, gradients of micro-batches before it) would be over the budget by that: there is a plan for it
    before it begins. Larger inputs take the least memory once; then there is a plan for the same profile, enlarged, or,
    if that would be too much, all begins anew.

A pass is looked at when the next one begins, since its step ends there. If the model is called in evaluation before
that, and the pass has had its backward, its step ends with that call: what an evaluation takes no plan makes less.
Called without gradients in training mode, it is a part of the step that it comes in. Passes of another thread than the
one that is watched are not looked at. Frozen blocks before all others save nothing: they are left alone.

An optimizer that was given steps all of its elements on the host as long as is measured; ``MEASURING`` goes on until
two of its steps were seen. Its state is moved between two passes. Ranks that share a model go through all this in step:
see NOTE [ One plan for many ranks ] in ``peers.py``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from spillway.attaching.aim import Aim
from spillway.attaching.contest import Contest, decisions
from spillway.attaching.peers import Peers, peers_of, shared_profile
from spillway.attaching.steering import Divided
from spillway.attaching.survey import Survey
from spillway.attaching.treating import LEAST, learned_by, treat_by
from spillway.attaching.watcher import Watcher
from spillway.errors import BudgetError, UsageError
from spillway.planning.plan import Plan
from spillway.planning.planner import parse_budget
from spillway.planning.profile import Profile
from spillway.profiling.compile import HostSlowdown, queues, without_lead
from spillway.profiling.meter import DeviceMemory
from spillway.profiling.watch import Watch, Watched
from spillway.session import Session
from spillway.units import format_bytes

if TYPE_CHECKING:
    from spillway.attaching.block import RegionCall
    from spillway.planning.curve import Curve
    from spillway.planning.hardware import Hardware
    from spillway.profiling.meter import Known

_MOST_UNCHECKED = 4
"""Steps over the budget that say nothing of the plan."""
MOST_GROWTH = 2
"""Of inputs, how many times as large ones may have a plan without a profile of their own."""
_MOST_WAITING = 256
"""Passes for which an optimizer's steps are waited for."""
_MOST_IDLE = 16
_GRAINS = 256
"""Into so many parts of the budget what a step begins with is rounded up."""
_MOST_TOLD = 2
"""Plans that know more of the host than the one before."""
MOST_APART = 16
"""Of two steps over the budget, how many there are from one to the other at most for the second to be an error."""
_EVALUATED = "an evaluation between two steps had a peak over the budget, which is of training alone"
_LEARNED = "a step with inputs of a new size, which is learned from, was over the budget"


class Stage(enum.Enum):
    """See NOTE [ How a plan is found ]."""

    TRACING = "tracing"
    WEIGHING = "weighing"
    MEASURING = "measuring"
    TRYING = "trying"
    CHECKING = "checking"
    HOLDING = "holding"


_SLOW = 1.05
"""Of a plan that took so much longer than predicted, torch's checkpointing may be faster."""
_CALLS_LEFT = {Stage.TRACING: 3, Stage.WEIGHING: 2, Stage.MEASURING: 1}
"""Of the model, after the one that the stage is of: the last makes the plan."""
_SEEKING = tuple(_CALLS_LEFT)
"""Before there is a profile."""
_LAG = 0.1
"""Seconds by which the device is behind the host where it is timed."""
_MOST_LEAD = 0.5
"""Seconds that a host is given ahead at most, however much it may have."""
_TIMED = (Stage.MEASURING, Stage.CHECKING)
"""Where it counts what the host takes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the checked step took."""

    peak_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Rival:
    """A plan that was within the budget, and what it was made of."""

    plan: Plan
    profile: Profile
    measured_profile: Profile | None
    measured: Measured


class Pilot(Watcher):
    """See NOTE [ How a plan is found ].

    Args:
        model: class of the model.
        device: where it computes.
        session: ``None``: the default one.
        min_bytes: what is smaller does not leave.
        budget: bytes that may be allocated on the device, or a share as a float, as for :func:`spillway.plan`, of each
            profile that is measured. ``None``: profile, and plan nothing, and ask nobody.
        planner: makes the plan of a profile within a budget, for some ranks.
        checkpointing: makes the plan of torch's own checkpointing.
        plan: a plan that there is already: it is held, and nothing is measured.
        optimizer: whose fraction on the host the plan says.
        sweep: plans for several budgets.
        hardware: what a plan is made for. ``None``: not known.
        known: what of the device's bytes can be told, now.
    """

    def __init__(
        self,
        model: str,
        device: torch.device,
        session: Session | None,
        *,
        min_bytes: int,
        budget: int | float | None,
        planner: Callable[[Profile, int, Peers], Plan] | None,
        checkpointing: Callable[[Profile, int, Peers], Plan] | None = None,
        plan: Plan | None = None,
        optimizer: Divided | None = None,
        sweep: Callable[[Profile], Curve] | None = None,
        hardware: Hardware | None = None,
        known: Callable[[], Known] | None = None,
    ) -> None:
        super().__init__(device, session)
        self._memory = DeviceMemory(device)
        self._survey = Survey(model, device, min_bytes=min_bytes, tell=known)
        self._share = budget if isinstance(budget, float) else None
        self._budget = budget if isinstance(budget, int) else None
        self._planner = planner
        self._checkpointing = checkpointing
        self._has_tried_checkpointing = False
        self._optimizer = optimizer
        self._waited = 0
        """Passes in which an optimizer had not yet stepped often enough."""
        self._peers: Peers | None = None if planner is not None else Peers()
        """``None``: the model was not called yet."""
        self._ended: Watched | None = None
        """What was seen of a pass after which came an evaluation, or one that not all ranks take part in."""
        self._held: int | None = None
        """Peak of the device when an evaluation began."""
        self._holds = 0
        """Passes in which a plan was held."""
        self._over_at: int | None = None
        """In which of them a step was over the budget last."""
        self._refused: int | None = None
        """The least that was there when a step began for which no plan was found."""
        self._unchecked = 0
        """Steps of the plan that were over the budget, and from which was learned."""
        self._tried = 0
        """How often blocks' calls cost more than they do."""
        self._told_hosts = 0
        """How often it was asked whether a plan is to know what the host took for the one before."""
        self._slowness: HostSlowdown | None = None
        """Of the host in checked steps of a plan: the least."""
        self._contest = Contest()
        """Times checked steps of the plan, within the budget."""
        self._rival: _Rival | None = None
        """The plan before, while one is checked that knows of the host."""
        self._aim = None if self._budget is None else Aim(self._budget)
        self._inputs = 0
        """Bytes of the largest inputs that the plan is for."""
        self._seen = 0
        """Of the inputs of this pass."""
        self._measured_profile: Profile | None = None
        self._has_outgrown = False
        """Whether this pass has larger inputs than the plan was for."""
        self.stage = Stage.TRACING if plan is None else Stage.HOLDING
        self._is_given = plan is not None
        self.profile: Profile | None = None
        self.sweep = sweep
        self.hardware = hardware
        self.plan = plan
        self.applied = 0
        """How often blocks were told to do as a plan says."""
        self.measured: Measured | None = None
        self.notes: list[str] = []

    @property
    def budget(self) -> int | None:
        """Bytes that a step may have; ``None``: none was asked for, or it is a share of what is not yet measured."""
        return self.plan.budget if self._is_given and self.plan is not None else self._budget

    @property
    def missing(self) -> str:
        """What a plan still needs; empty: there is one for what was measured last."""
        if self._is_given or self.stage not in _CALLS_LEFT:
            return ""
        if self._idle:
            return f"a backward pass through the blocks: the last {self._idle} calls of the model had none"
        if self._waited:
            return "two steps of the optimizer that attach() was given"
        calls = _CALLS_LEFT[self.stage] + (self._peers is None)
        return f"{calls} more call{'s' if calls > 1 else ''} of the model in training, after a backward pass each"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is to be done, in no block."""
        return self.stage is Stage.HOLDING and self.plan is not None and all(block.plain for block in self.plan.blocks)

    @property
    def spare_bytes(self) -> int:
        """What the budget leaves, if nothing is to be done in any block."""
        return self.plan.budget - self.plan.predicted_peak if self.is_plain and self.plan is not None else 0

    def take(self, blocks: Sequence[RegionCall]) -> None:
        """These are the blocks."""
        self._check_blocks(blocks)
        self._blocks = blocks
        for block in blocks:
            block.pilot = self
            block.how = LEAST
        if self.plan is not None:
            self.apply(self.plan)
        elif self._optimizer is not None:
            self._optimizer.divide(1.0)

    def _check_blocks(self, blocks: Sequence[RegionCall]) -> None:
        inner = next((block.name for block in blocks if block.has_inner), None)
        if inner is not None and self.plan is None:
            raise UsageError(
                f"blocks: got {inner!r}, which has others inside, with a budget, expected blocks one after the other; "
                f"name the outer ones or the inner ones"
            )

    def begin(self, model: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called: the step before has ended."""
        if self._watch is not None and self._is_strange(self._watch) and self._watch.thread.is_alive():
            return
        self._meet(model)
        assert self._peers is not None
        if not self._peers.are_all_here(model):
            # Of a call that not all ranks make nothing is learned; what was seen of the one before is kept.
            self._ended = self._finish() or self._ended
            return
        is_checked, applied = self.stage in (Stage.CHECKING, Stage.HOLDING), self.applied
        self._advance(self._finish() or self._ended)
        self._ended = None
        # A plan that was made anew since a step was too large is for what that began with, too.
        looks = not is_checked or self.applied == applied
        mine = sum(leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        holds = self.stage is Stage.HOLDING
        nbytes = mine if holds else max(self._peers.share("inputs", lambda: mine))
        if holds and not self._peers.alone:
            # Others may have other inputs, and do not begin anew.
            nbytes = min(nbytes, self._inputs)
        self._seen = nbytes
        if nbytes > self._inputs:
            if self._inputs and self.stage not in _SEEKING and not self._is_given:
                self._note(f"inputs of {format_bytes(nbytes)} came where there had been {format_bytes(self._inputs)}")
                self._outgrow(nbytes)
            self._inputs = nbytes
        if self._device.type == "cpu":
            # What came back lay in memory that is kept for more of it. As long as nothing does, that is activations'.
            self._used_session.trim(self._device)
        if looks:
            self._look_at_level()
        if self.stage is Stage.WEIGHING:
            self._survey.begin()
        if self.stage is not Stage.HOLDING:
            self._has_traced = False
            self._watch = self._new_watch()

    def finish(self) -> None:
        """The step has ended, though no other one begins yet."""
        self._advance(self._finish())

    def evaluates(self) -> None:
        """The model is called in evaluation."""
        if self.stage is Stage.HOLDING:
            if self._held is None:
                self._held = self._peak()
        elif self._watch is not None and self._watch.has_backward and not self._is_strange(self._watch):
            # Whoever evaluates may be one of several ranks: the others hear of it when the next pass begins.
            self._ended = self._finish()

    def drop(self) -> None:
        """Nothing is measured any more."""
        super().drop()
        self._give_window_back()

    # Stages.

    def _finish(self) -> Watched | None:
        found = super()._finish()
        if self._idle == _MOST_IDLE:
            self.note_once(
                f"{_MOST_IDLE} calls of the model had no backward before the next one, and nothing is learned of such: "
                f"a pipeline's stages have their budget by offload_stages(budget=...)"
            )
        return found

    def _meet(self, model: Module) -> None:
        """Find out who trains the model together. It may be wrapped later than it is first called."""
        if self._peers is None:
            self._peers = peers_of(model)
        elif self._peers.alone and self._planner is not None and self.stage is not Stage.HOLDING:
            self._peers = peers_of(model)
            if not self._peers.alone and self.stage is not Stage.TRACING:
                self._start_anew()

    def _advance(self, watched: Watched | None) -> None:
        """What the pass before has shown."""
        assert self._peers is not None
        if self.stage is Stage.HOLDING:
            self._hold()
            return
        if self._has_outgrown:
            self._has_outgrown = False
            if self._aim is not None:
                self._aim.reset()
            self.profile = self._enlarged()
            try:
                self._replan()
            except BudgetError:
                # What is enlarged may be too much. It is measured instead.
                self._start_anew()
            return
        # Not so in the first pass of all, or one without a backward.
        has_ended = watched is not None and self._is_seen(watched)
        if not all(self._peers.share(self.stage.value, lambda: has_ended)):
            return
        assert watched is not None
        if self.stage is Stage.TRACING:
            self.stage = Stage.WEIGHING
        elif self.stage is Stage.WEIGHING:
            self._survey.weigh(watched, self._seen)
            self.stage = Stage.MEASURING
        elif self.stage is Stage.MEASURING:
            self.profile = shared_profile(self._peers.share("profile", lambda: self._compiled(watched)))
            self._measured_profile = self.profile
            if self._share is not None:
                self._budget = parse_budget(self._share, self.profile)
                self._aim = Aim(self._budget)
            # They have all that they saw; the profile says it shorter.
            self._probes.clear()
            self._replan_for_largest()
        elif self.stage is Stage.TRYING:
            self.stage = Stage.CHECKING
            self._has_learned()
            self._unchecked = 0
        else:
            self._check(watched)

    def _is_seen(self, watched: Watched) -> bool:
        """Whether the pass that has ended shows all that its stage is for."""
        if self.stage is Stage.TRACING:
            return True
        if self._has_traced:
            # It is no measure of bytes, but if no size comes twice there is none.
            return self._survey.takes_stranger()
        if self.stage is not Stage.MEASURING:
            return True
        if self._survey.passes_over(watched):
            return False
        if self._optimizer is None or self._optimizer.profile() is not None:
            return True
        self._waited += 1
        if self._waited < _MOST_WAITING:
            return False
        self._note(f"the optimizer took no two steps in {_MOST_WAITING} calls of the model: all of it is on the host")
        self._optimizer = None
        return True

    def _compiled(self, watched: Watched) -> Profile:
        profile = self._survey.profile(watched, self._probes)
        # What the loop waits for after an evaluation was not seen, and an optimizer's step waits for gradients.
        if watched is self._ended or self._optimizer is not None:
            profile = without_lead(profile)
        return profile if self._optimizer is None else replace(profile, optimizer=self._optimizer.profile())

    def _replan_for_largest(self) -> None:
        """The first plan of a profile, for the largest inputs that came while it was made, if there is one for them."""
        measured, largest = self.profile, self._inputs
        if self._planner is not None and self._known_peers.alone and largest > self._survey.inputs:
            self.profile = self._enlarged()
            try:
                self._replan()
            except BudgetError:
                self.profile, self._inputs = measured, self._survey.inputs
            else:
                return
        try:
            self._replan()
        except BudgetError:
            # Who goes on all the same is told again, by what is measured then.
            is_rough = self._survey.is_rough
            self._start_anew()
            if not is_rough:
                raise

    def _enlarged(self) -> Profile:
        assert self._measured_profile is not None
        return self._survey.enlarged(self._measured_profile, self._inputs)

    def _outgrow(self, nbytes: int) -> None:
        """There are larger inputs than the plan is for."""
        is_far = nbytes > MOST_GROWTH * self._survey.inputs
        if self._measured_profile is None or is_far or not self._known_peers.alone:
            self._start_anew()
            return
        self._has_outgrown = True
        self._forget_host()
        self.stage = Stage.TRYING
        for block in self._blocks:
            block.how = LEAST

    def _replan(self) -> None:
        if self._planner is None or self._aim is None:
            return
        assert self.profile is not None
        self._slowness = None
        self._contest = Contest()
        self.plan = self._planner(self.profile, self._aim.nbytes, self._known_peers)
        self.apply(self.plan)
        self.stage = Stage.TRYING

    def _check(self, watched: Watched) -> None:
        assert self._budget is not None
        assert self._aim is not None
        # What is read at the begin was before it.
        mine = max(reading.peak for place, reading in watched.readings.items() if place[0] not in ("ahead", "begin"))
        peak = max(self._known_peers.share("checked", lambda: mine))
        learned = any(self._known_peers.share("learned", self._has_learned))
        self.measured = Measured(peak, watched.seconds(("begin", 0), ("done", 0)))
        if peak > self._budget and learned and self._unchecked < _MOST_UNCHECKED:
            # It says nothing of the plan. Another step is checked.
            self._unchecked += 1
            self.note_once(_LEARNED)
        elif peak > self._budget and self._rival is not None:
            self._go_back(self._rival, "took more than the budget")
        elif peak > self._budget:
            self._aim.back_off(peak, self._replan, self._note)
        elif self._rival is not None:
            self._compare(self._rival, watched, learned=learned)
        elif not self._asks_for_host(watched, learned=learned) and not self._tries_checkpointing():
            self.stage = Stage.HOLDING
            self._reset_peak()

    def _compare(self, rival: _Rival, watched: Watched, *, learned: bool) -> None:
        """A plan that knows of the host was checked: hold it, or the one before, or try one that knows yet more."""
        if self._contest.saw(watched, self._known_peers, is_odd=learned or self._is_growing()):
            self._see_host(watched)
        if not self._contest.is_over:
            return
        if self._contest.is_lost:
            self._go_back(rival, "was no faster")
            return
        self._rival = None
        if not self._tells_host() and not self._tries_checkpointing():
            self.stage = Stage.HOLDING
            self._reset_peak()

    def _tries_checkpointing(self) -> bool:
        """Whether torch's own checkpointing is to be tried: once, where a plan took longer than was predicted.

        No plan is to be slower than that, and what it takes is best known of all.
        """
        profile, plan, measured = self.profile, self.plan, self.measured
        if self._has_tried_checkpointing or self._checkpointing is None or self._aim is None or self._optimizer:
            return False
        assert profile is not None
        assert plan is not None
        assert measured is not None
        if profile.kinds[0].host is None:
            return False
        slow = measured.seconds > _SLOW * plan.predicted_seconds
        if not any(self._known_peers.share("slow", lambda: slow)):
            return False
        self._has_tried_checkpointing = True
        try:
            found = self._checkpointing(profile, self._aim.nbytes, self._known_peers)
        except BudgetError:
            return False
        if decisions(found) == decisions(plan):
            return False
        self._rival = _Rival(plan, profile, self._measured_profile, measured)
        self._contest = Contest(self._contest.timed)
        self.plan = found
        self.apply(found)
        self.stage = Stage.TRYING
        return True

    def _go_back(self, rival: _Rival, why: str) -> None:
        """Hold the plan before, which is tried and checked again: orders have been learned for another one."""
        self._rival = None
        self.profile, self._measured_profile, self.measured = rival.profile, rival.measured_profile, rival.measured
        self.plan = rival.plan
        self.apply(rival.plan)
        self._note(f"another plan {why}: the one before is active")
        self.stage = Stage.TRYING

    def _forget_host(self) -> None:
        """Whatever plan comes next is not known to suit it."""
        self._told_hosts = 0
        self._rival = None
        self._has_tried_checkpointing = False

    def _is_growing(self) -> bool:
        """Whether memory is pinned in the background, for a new plan: that makes a host slow."""
        return self._used_session.is_growing

    def _asks_for_host(self, watched: Watched, *, learned: bool) -> bool:
        """Whether there is a plan to try that knows how slow the host is, or that is to be seen again."""
        assert self.profile is not None
        if self._told_hosts or self.profile.kinds[0].host is None:
            return False
        if any(self._known_peers.share("growing", self._is_growing)):
            return True
        self._contest.saw(watched, self._known_peers, is_odd=learned)
        is_first = self._slowness is None
        # Where it was slow, it was so when this step began, or something else was.
        return (self._see_host(watched).matters_to(self.profile) and is_first) or self._tells_host()

    def _see_host(self, watched: Watched) -> HostSlowdown:
        """How slow the host was in a step, and in those before it: the least."""
        assert self.profile is not None
        assert self.plan is not None
        profile, plan = self.profile, self.plan
        slowness = HostSlowdown.most(
            self._known_peers.share("slowness", lambda: HostSlowdown.of(profile, plan, watched))
        )
        self._slowness = slowness if self._slowness is None else slowness.least(self._slowness)
        return self._slowness

    def _tells_host(self) -> bool:
        """Whether there is a plan to try that knows how slow the host was.

        It does other things than the one before, for which the host may be slow again: so there is a second one.
        """
        profile, plan, slowness = self.profile, self.plan, self._slowness
        assert profile is not None
        assert plan is not None
        assert self.measured is not None
        self._told_hosts += 1
        if self._told_hosts > _MOST_TOLD or slowness is None or not slowness.matters_to(profile):
            return False
        rival, timed = _Rival(plan, profile, self._measured_profile, self.measured), self._contest.timed
        self.profile = slowness.told(profile)
        if self._measured_profile is not None:
            self._measured_profile = slowness.told(self._measured_profile)
        try:
            self._replan()
        except BudgetError:
            # It is the same memory as before: there was a plan, and it is kept.
            self.profile, self._measured_profile = profile, rival.measured_profile
            return False
        assert self.plan is not None
        if decisions(self.plan) != decisions(plan) and self.plan.optimizer_fraction == plan.optimizer_fraction:
            # A step whose optimizer is another one's is compared with none.
            self._rival, self._contest = rival, Contest(timed)
        return True

    def _hold(self) -> None:
        if self._budget is None or self._aim is None:
            return
        self._holds += 1
        peak, self._held = self._peak() if self._held is None else self._held, None
        if peak <= self._budget < self._peak():
            self.note_once(_EVALUATED)
            self._reset_peak()
        if self._has_learned():
            self._reset_peak()
            if peak > self._budget:
                self.note_once(_LEARNED)
        elif peak > self._budget:
            if not self._known_peers.alone:
                self.note_once(f"a step of this rank had a peak over the budget of {format_bytes(self._budget)}")
                return
            self._note(f"a step had a peak of {format_bytes(peak)}, over the budget of {format_bytes(self._budget)}")
            self._forget_host()
            last, self._over_at = self._over_at, self._holds
            try:
                self._aim.back_off(peak, self._replan, self._note)
            except BudgetError:
                if last is not None and self._holds - last <= MOST_APART:
                    raise
                # That step is over, and what was different about it need not come again.
                self._note(f"no plan is for less: this one stays, if none of {MOST_APART} steps is over the budget")
                self._reset_peak()

    def _look_at_level(self) -> None:
        """Plan anew before a step that begins with more than the plan was made for, if it would be over the budget."""
        is_planned = self.stage in (Stage.TRYING, Stage.CHECKING, Stage.HOLDING) and not self._has_outgrown
        if not is_planned or self._aim is None or self._planner is None or self._is_given:
            return
        if self.stage is Stage.HOLDING and not self._known_peers.alone:
            return
        # What of an optimizer is on the device is the plan's to say.
        found = self._known_peers.share("level", lambda: None if self._optimizer is not None else self._level())
        levels = [level for level in found if level is not None]
        if len(levels) < len(found):
            return
        level, profile, plan = max(levels), self.profile, self.plan
        assert profile is not None
        assert plan is not None
        rise = level - profile.static_bytes
        is_refused = self._refused is not None and level >= self._refused
        if is_refused or rise <= self._aim.leaves(plan.predicted_peak):
            return
        assert self._budget is not None
        # Where it rises and rises, not every step has a plan of its own.
        grain = max(self._budget // _GRAINS, 1)
        more = -(-rise // grain) * grain
        before = profile, self._measured_profile
        seen = self._contest, self._slowness
        self.profile = self._survey.risen(profile, more)
        if self._measured_profile is not None:
            self._measured_profile = self._survey.risen(self._measured_profile, more)
        try:
            self._replan()
        except BudgetError:
            # It may be gone in time. If it is not, the step's peak tells.
            self.profile, self._measured_profile = before
            self._contest, self._slowness = seen
            self._refused = level
            return
        self._forget_host()
        self._note(
            f"planned anew for steps that begin with {format_bytes(level)}, where the one that was weighed had "
            f"{format_bytes(profile.static_bytes)}"
        )

    def _has_learned(self) -> bool:
        """Whether calls came that were learned from, since this was last asked."""
        before, self._tried = self._tried, learned_by(self._blocks, self._used_session)
        return self._tried != before

    def _start_anew(self) -> None:
        self.stage = Stage.TRACING
        self._has_outgrown = False
        self._probes.clear()
        self._survey.reset()
        self._forget_host()
        if self._aim is not None:
            self._aim.reset()
        self._waited, self._refused = 0, None
        for block in self._blocks:
            block.how = LEAST
        if self._optimizer is not None:
            self._optimizer.divide(1.0)
        self._give_window_back()

    def _give_window_back(self) -> None:
        """The session's own is in force again: other models use it, too."""
        if not self._used_session.closed:
            self._mover().claim(self, None)

    def apply(self, plan: Plan) -> None:
        """From the next call on, blocks do as the plan says.

        Raises:
            UsageError: if it is of another model.
        """
        treat_by(plan, self._blocks, is_whole=self._is_given)
        self.applied += 1
        self._mover().claim(self, plan.window, plan.ahead)
        if self._optimizer is not None and plan.optimizer_fraction is not None:
            self._optimizer.divide(plan.optimizer_fraction)

    @property
    def _known_peers(self) -> Peers:
        assert self._peers is not None
        return self._peers

    # What is looked at.

    @property
    def _traces(self) -> bool:
        return self.stage in (Stage.TRACING, Stage.WEIGHING)

    @property
    def _weighs(self) -> bool:
        return self.stage is Stage.WEIGHING

    @property
    def _lead(self) -> float:
        if self.stage is Stage.WEIGHING and queues(self._device):
            return _LAG
        if self.stage is not Stage.CHECKING or self.profile is None:
            return 0.0
        # A plan that counts on it is checked with it.
        return min(self.profile.lead_seconds, _MOST_LEAD)

    def _new_watch(self) -> Watch:
        if self.stage not in _TIMED:
            return super()._new_watch()
        lag = _LAG if self.stage is Stage.MEASURING else 0.0
        return Watch(self._device, self._carried, times_host=True, lag=lag, lead=self._lead)

    def _level(self) -> int:
        """Bytes that are there now, without those on their way."""
        return self._memory.level() - self._carried()

    def _peak(self) -> int:
        return self._memory.peak()

    def _reset_peak(self) -> None:
        self._memory.reset_peak()

    def note_once(self, what: str) -> None:
        """Say something of the search, or of what is held, if it was not said yet."""
        if what not in self.notes:
            self._note(what)

    def _note(self, what: str) -> None:
        self.notes.append(what)
