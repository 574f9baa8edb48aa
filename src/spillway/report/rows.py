"""What a plan does with each call of a block, and why, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from spillway.planning.outcome import Outcome
from spillway.planning.plan import BlockPlan, Plan
from spillway.planning.profile import BlockProfile, Profile
from spillway.planning.tasks import Option
from spillway.records import Decision
from spillway.units import format_bytes


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """An operator of a block that makes something."""

    place: int
    """How many operators of the block run before it."""
    operator: str
    decision: str
    nbytes: int
    """Of what it makes."""
    seconds: float
    """Of one run, in forward."""
    reason: str


@dataclass(frozen=True, slots=True)
class Row:
    """One call of a block."""

    name: str
    """The module's, dotted."""
    decision: str
    """In a word or three."""
    inputs: str
    """What is done with its inputs."""
    kept_bytes: int
    """On the device from its forward to its backward, its inputs included."""
    sent_bytes: int
    recomputed_bytes: int
    """Of what autograd saves, what is computed again."""
    rerun_seconds: float
    reason: str
    operators: tuple[OperatorRow, ...]

    @property
    def what(self) -> Row:
        """All but its name: equal for blocks that are treated alike."""
        return replace(self, name="")


def rows_of(profile: Profile, plan: Plan, options: Sequence[Option]) -> tuple[Row, ...]:
    """The calls of blocks, in the order of the forward.

    Args:
        profile: of a step.
        plan: of this profile's model.
        options: what the plan does with each call.
    """
    return tuple(
        _row(profile.kinds[call.kind], block, option, profile.min_bytes)
        for call, block, option in zip(profile.calls, plan.blocks, options, strict=True)
    )


def _row(kind: BlockProfile, block: BlockPlan, option: Option, min_bytes: int) -> Row:
    outcome = Outcome.of(kind, option.decisions, min_bytes)
    operators = tuple(_operators(kind, block, option, outcome))

    def total(numbers: Iterable[int]) -> int:
        return sum(kind.values[number].nbytes for number in numbers)

    return Row(
        name=block.name,
        decision=_decision(block, outcome),
        inputs=_WORDS[block.inputs],
        kept_bytes=total(outcome.stays),
        sent_bytes=total(outcome.leaves),
        recomputed_bytes=total(outcome.again),
        rerun_seconds=block.rerun_seconds,
        reason=_reason(block, operators),
        operators=operators,
    )


_WORDS = {
    Decision.KEEP: "keep",
    Decision.OFFLOAD: "offload",
    Decision.OFFLOAD_HOST: "offload to host memory",
    Decision.OFFLOAD_DISK: "offload to the disk",
    Decision.RECOMPUTE: "recompute",
}


def _decision(block: BlockPlan, outcome: Outcome) -> str:
    words = [*(["offload"] if outcome.leaves else []), *(["recompute"] if outcome.again else [])]
    return " and ".join(words) if words and not block.plain else "keep"


def _operators(kind: BlockProfile, block: BlockPlan, option: Option, outcome: Outcome) -> Iterable[OperatorRow]:
    planned = {each.place: each for each in block.operators}
    for place, each in enumerate(kind.operators):
        if not each.makes:
            continue
        nbytes = sum(kind.values[number].nbytes for number in each.makes)
        price = f"{each.seconds / nbytes * 1e12:.1f} ps a byte" if nbytes else "no bytes"
        if place in planned:
            decision, reason = _WORDS[planned[place].decision], planned[place].reason
        elif block.plain:
            decision, reason = "keep", "the block is left alone" if block.plain else "shapes or the host hang on it"
        elif place in outcome.runs:
            decision, reason = "recompute", f"runs again: {price}"
        elif option.decisions[each.makes[0]] is Decision.RECOMPUTE or outcome.stays.isdisjoint(each.makes):
            decision, reason = "let go", "backward does not need it"
        else:
            decision, reason = "keep", f"stays: {price} to compute again"
        yield OperatorRow(place, each.name, decision, nbytes, each.seconds, reason)


def _reason(block: BlockPlan, operators: Sequence[OperatorRow]) -> str:
    """Why a block is treated so: what its bytes cost to compute again, of each sort."""
    if block.plain:
        return "There is room for all of it: nothing leaves, and nothing runs again."
    parts = []
    for sort, word in (("offload", "leave"), ("keep", "stay"), ("recompute", "run again")):
        those = [each for each in operators if each.decision.startswith(sort) and each.nbytes]
        if those:
            prices = sorted(each.seconds / each.nbytes * 1e12 for each in those)
            nbytes = format_bytes(sum(each.nbytes for each in those))
            parts.append(
                f"{len(those)} operators {word} ({nbytes}, {prices[0]:.1f} to {prices[-1]:.1f} ps a byte to compute)"
            )
    inputs = "stay" if block.inputs is Decision.KEEP else "leave"
    return f"{'; '.join([*parts, f'inputs {inputs}'])}."
