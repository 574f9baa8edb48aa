"""A plan: a decision for everything that the blocks of a model save, and what it is predicted to come to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter

from spillway.errors import printable
from spillway.planning.files import STRICT, Count, Seconds, read_file, read_json, write_file
from spillway.planning.profile import Again, BlockProfile
from spillway.planning.tasks import Option, Phase
from spillway.records import Decision
from spillway.units import format_bytes, format_seconds

SCHEMA = 3


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """What is done with what one operator of a block gives.

    One that is not named is computed again, or stays where nothing is (:attr:`BlockPlan.recomputes`).
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    place: Count
    """How many operators of the block run before it."""
    operator: str
    """As ``"aten::mm.default"``."""
    decision: Decision
    nbytes: Count
    reason: str


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What is done with one call of a block."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    name: str
    """The module's, dotted."""
    plain: bool
    """Whether it is left alone, and saves what it saves."""
    inputs: Decision
    """What is done with its inputs."""
    operators: tuple[OperatorPlan, ...]
    kept_bytes: int
    """On the device between its forward and its backward."""
    sent_bytes: Count
    """Leave it."""
    rerun_seconds: Seconds
    """What is computed again."""
    recomputes: bool = True
    """Whether anything is; else what is not named stays."""

    def __str__(self) -> str:
        name = printable(self.name)
        if self.plain:
            return f"{name}: keeps all of its {format_bytes(self.kept_bytes)}"
        again = f"{format_seconds(self.rerun_seconds)} again" if self.recomputes else "nothing again"
        return (
            f"{name}: keeps {format_bytes(self.kept_bytes)}, sends away {format_bytes(self.sent_bytes)}, computes "
            f"{again}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Decisions for a step. A value: made by :func:`spillway.plan`, applied by ``spillway.attach(model, plan=...)``."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    model: str
    """Class of the model."""
    device: str
    budget: Count
    """Bytes that may be allocated on the device at most."""
    window: Annotated[int, Field(ge=1)]
    """Bytes that may be on their way out at once."""
    predicted_peak: Count
    """Most bytes that are allocated on the device at once."""
    predicted_seconds: Seconds
    """Of a step."""
    stall_seconds: Seconds
    """Of these, waits for the lanes."""
    peak_task: str
    """In what the peak is."""
    host_bytes: Count
    disk_bytes: Count
    blocks: tuple[BlockPlan, ...]
    """In the order of the forward."""
    method: str
    """How it was found."""
    bound_seconds: Seconds | None = None
    """What no plan can be faster than, if that is known."""
    ahead: Annotated[int, Field(ge=1)] | None = None
    """Bytes that may be fetched ahead; ``None``: as many as may be on their way out."""
    optimizer_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the elements of an ``OffloadedOptimizer``, how many are stepped on the host; ``None``: it is not the plan's
    to say."""
    schema: int = SCHEMA

    def to_json(self) -> str:
        """As JSON, with the schema's version."""
        return _PLAN.dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The plan that :meth:`to_json` wrote.

        Raises:
            UsageError: for anything else.
        """
        return read_json(_PLAN, text, "plan", SCHEMA)  # type: ignore[no-any-return]

    def save(self, path: str | Path) -> None:
        """Write it to a file.

        Raises:
            UsageError: if there can be no such file.
        """
        write_file(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read it from a file; raises as :meth:`from_json` does, and where there is no such file."""
        return cls.from_json(read_file(path, "Plan"))

    @property
    def sent_bytes(self) -> int:
        """What leaves the device in a step."""
        return sum(block.sent_bytes for block in self.blocks)

    @property
    def rerun_seconds(self) -> float:
        """What is computed again in a step."""
        return sum(block.rerun_seconds for block in self.blocks)

    def __str__(self) -> str:
        task = printable(self.peak_task)
        lines = [
            f"{format_bytes(self.predicted_peak)} of {format_bytes(self.budget)}, in {task}; a step of "
            f"{format_seconds(self.predicted_seconds)}: {format_bytes(self.sent_bytes)} leave, "
            f"{format_seconds(self.rerun_seconds)} are computed again, {format_seconds(self.stall_seconds)} waited for"
        ]
        if self.optimizer_fraction is not None:
            lines.append(f"  optimizer: {self.optimizer_fraction:.0%} of it on the host")
        lines += [f"  {block}" for block in self.blocks]
        return "\n".join(lines)


def planned_block(name: str, block: BlockProfile, option: Option) -> BlockPlan:
    """An option in words."""
    sent = {each.key for task in option.forward for each in task.sends}
    reruns = any(task.phase is Phase.RERUN for task in option.backward)
    inputs = [number for number, value in enumerate(block.values) if value.is_input]
    operators = []
    for place, each in enumerate(block.operators):
        if not each.makes or each.again is not Again.FREE:
            continue
        decision = option.decisions[each.makes[0]]
        leaves = not sent.isdisjoint(each.makes)
        if decision is Decision.RECOMPUTE or not (reruns or leaves):
            continue
        nbytes = sum(block.values[number].nbytes for number in each.makes)
        price = each.seconds / nbytes * 1e12 if nbytes else 0.0
        operators.append(
            OperatorPlan(
                place,
                each.name,
                decision if leaves else Decision.KEEP,
                nbytes,
                f"{'leaves' if leaves else 'stays'}: {price:.1f} ps a byte to compute again",
            )
        )
    leaving = [option.decisions[number] for number in inputs if number in sent]
    return BlockPlan(
        name=name,
        plain=not sent and not reruns,
        inputs=leaving[0] if leaving else Decision.KEEP,
        operators=tuple(operators),
        kept_bytes=option.kept_bytes,
        sent_bytes=option.sent_bytes,
        rerun_seconds=option.rerun_seconds,
        recomputes=reruns,
    )


_PLAN: TypeAdapter[Any] = TypeAdapter(Plan)
