"""How blocks are called: in the least memory, or by a plan."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from spillway.errors import UsageError
from spillway.operators import Planned
from spillway.planning.plan import BlockPlan, Plan
from spillway.recomputing import Recompute
from spillway.records import Decision

if TYPE_CHECKING:
    from spillway.attaching.block import BlockCall

LEAST = Recompute(offload="inputs")
"""The least memory: everything is recomputed, and inputs are offloaded meanwhile."""


def apply_plan(plan: Plan, blocks: Sequence[BlockCall], *, is_whole: bool) -> None:
    """From the next call on, the blocks of a model do as a plan says.

    A whole plan has to name all blocks that are trained. With any other, the rest of them take the least memory.

    Raises:
        UsageError: if it is of another model.
    """
    known = {block.name: block for block in plan.blocks}
    names = {call.name for call in blocks}
    modules = {call.name: module for call in blocks if (module := call.module()) is not None}
    trained = {name for name, module in modules.items() if any(each.requires_grad for each in module.parameters())}
    frozen = modules.keys() - known.keys() - trained
    if known.keys() | frozen != names and (is_whole or not known.keys() <= names):
        odd = sorted((known.keys() | frozen) ^ names)
        raise UsageError(
            f"plan: got one for {plan.model} with {len(known)} blocks, expected the {len(names)} of this model "
            f"({', '.join(map(repr, odd[:3]))} only one of them has); make a plan of this model's own profile"
        )
    for call in blocks:
        block = known.get(call.name)
        call.how = None if call.name in frozen else LEAST if block is None else how_of(block)


def how_of(block: BlockPlan) -> Recompute | None:
    """How a block is called; ``None``: without recomputation or offloading."""
    if block.plain:
        return None
    decisions = {each.place: (each.operator, each.decision) for each in block.operators}
    inputs = Decision.KEEP if block.inputs is Decision.RECOMPUTE else block.inputs
    return Recompute(policy=Planned(decisions, inputs, block.recomputes))


def decisions_of(plan: Plan) -> Hashable:
    """All that a plan does, without its predictions."""
    blocks = tuple(
        (
            block.name,
            block.plain,
            block.recomputes,
            block.inputs,
            tuple((op.place, op.decision) for op in block.operators),
        )
        for block in plan.blocks
    )
    return blocks, plan.window, plan.ahead, plan.optimizer_fraction
