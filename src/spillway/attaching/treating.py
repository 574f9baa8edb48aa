"""How blocks are called: in the least memory, by a plan, or as a whole, so that tapes of them are written."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from spillway.errors import UsageError
from spillway.operators import Planned
from spillway.planning.plan import BlockPlan, Plan
from spillway.planning.profile import Profile
from spillway.recomputing import Recompute
from spillway.records import Decision
from spillway.regions.script import Script
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.attaching.block import RegionCall

LEAST = Recompute(offload="inputs")
"""What takes the least memory: everything is computed again, and inputs are away meanwhile."""


def treat_by(plan: Plan, blocks: Sequence[RegionCall], *, is_whole: bool = True) -> None:
    """From the next call on, blocks do as a plan says.

    Args:
        plan: of them.
        blocks: all of the model.
        is_whole: whether it has to name all that are trained. Otherwise those that were not called where it was made
            take the least memory.

    Raises:
        UsageError: if it is of another model.
    """
    known = {block.name: block for block in plan.blocks}
    names = {call.name for call in blocks}
    frozen = {call.name for call in blocks if call.name not in known and _is_frozen(call)}
    if known.keys() | frozen != names and (is_whole or not known.keys() <= names):
        odd = sorted((known.keys() | frozen) ^ names)
        raise UsageError(
            f"plan: got one for {plan.model} with {len(known)} blocks, expected the {len(names)} of this model "
            f"({', '.join(map(repr, odd[:3]))} only one of them has); make a plan of this model's own profile"
        )
    for call in blocks:
        block = known.get(call.name)
        call.how = None if call.name in frozen else LEAST if block is None else how_of(block)


def treat_whole(blocks: Iterable[RegionCall], session: Session) -> bool:
    """From the next call on, blocks that are computed again are so as a whole: where no tape was tried yet.

    Returns:
        Whether there are such blocks.
    """
    found = False
    for block in blocks:
        planned = None if block.how is None else block.how.policy
        if isinstance(planned, Planned) and planned.recomputes and not _script(block, session).is_known:
            block.how = Recompute(policy=Planned({}, planned.inputs))
            found = True
    return found


def calls_of(blocks: Iterable[RegionCall], session: Session) -> dict[str, Set[Hashable]]:
    """What each block's calls were like since this was last asked."""
    return {block.name: _script(block, session).came() for block in blocks}


def tried_by(blocks: Iterable[RegionCall], session: Session) -> int:
    """How often calls of blocks cost more than calls do: see :attr:`~spillway.regions.script.Script.tried`."""
    return sum(_script(block, session).tried for block in blocks if block.module() is not None)


def told_of(
    profile: Profile, blocks: Iterable[RegionCall], session: Session, calls: Mapping[str, Set[Hashable]]
) -> Profile:
    """The profile, with the kinds of blocks of which each has a tape of such calls."""
    have = {block.name: _script(block, session).tells(calls[block.name]) for block in blocks}
    told = [True] * len(profile.kinds)
    for each in profile.calls:
        told[each.kind] &= have[each.name]
    kinds = zip(profile.kinds, told, strict=True)
    return replace(profile, kinds=tuple(replace(kind, is_told=is_told) for kind, is_told in kinds))


def _script(block: RegionCall, session: Session) -> Script:
    module = block.module()
    assert module is not None
    return session.proofs(weakref.ref(module)).script


def _is_frozen(call: RegionCall) -> bool:
    module = call.module()
    return module is not None and not any(parameter.requires_grad for parameter in module.parameters())


def how_of(block: BlockPlan) -> Recompute | None:
    """How a block is called; ``None``: it is left alone."""
    if block.plain:
        return None
    decisions = {each.place: (each.operator, each.decision) for each in block.operators}
    inputs = Decision.KEEP if block.inputs is Decision.RECOMPUTE else block.inputs
    return Recompute(policy=Planned(decisions, inputs, block.recomputes), watch=block.watched)
