"""The values of the demo: what a child is told, what it says while it runs, and what comes out in the end."""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass

from spillway.errors import SpillwayError, UsageError

HEAD_WIDTH = 64
"""Width of an attention head, where the model is at least that wide."""


class DemoError(SpillwayError, RuntimeError):
    """A way of the demo ended before its time, or not as it has to. The message says which, and how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training, the same for every way but for its name."""

    way: str
    device: str
    layers: int
    width: int
    sequence: int
    batch: int
    seed: int = 0
    data: str | None = None
    """A file or folder to train on; ``None`` is the Python standard library's own source."""
    window: str | None = None
    """Bytes that may be leaving at once, as Spillway is given them; ``None`` leaves it to Spillway."""
    budget: str | None = None
    """Bytes that ``planned`` may have at most, as Spillway is given them; ``None``: the middle of most and least."""

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(1, self.width // HEAD_WIDTH)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence

    @property
    def learning_rate(self) -> float:
        """The highest at which this model settles at once, without a warm-up: smaller for a wider one."""
        return 1e-3 * min(1.0, 384 / self.width)

    def check(self) -> None:
        """Refuse a shape that no model can have.

        Raises:
            UsageError: if the width cannot be divided among the heads, or a number is below 1.
        """
        for name in ("layers", "width", "sequence", "batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.width % self.heads:
            raise UsageError(f"width: got {self.width}, expected a multiple of {HEAD_WIDTH}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The child is ready for its first step."""

    parameters: int
    text_bytes: int


class Order(enum.Enum):
    """What the parent tells a child that waits: a line each."""

    STEP = "step"
    """Do one more."""
    LAST_STEP = "last"
    """Do one more, and tell the outcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step is done."""

    index: int
    """From 0."""
    loss: float
    seconds: float
    settled: bool = True
    """Whether all later steps are done as this one was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All steps are done."""

    step_seconds: float
    """Median over all steps but the first, in which pools and caches are made, and those in which a plan is found."""
    all_step_seconds: list[float]
    tokens_per_second: float
    peak_bytes: int
    """Device bytes, or resident bytes of the process on the CPU, at their highest from the first step on."""
    baseline_bytes: int
    """The same just before the first step."""
    peak_source: str
    """Who measured the peak."""
    moved_bytes: int
    """Bytes that left in the last step: of activations, or of gradients."""
    losses: list[float]
    fingerprint: str
    """SHA-256 of the exact bytes of every loss and of all gradients of the first and of the last step."""
    counted_steps: int = 0
    """Steps that ``step_seconds`` is the median of."""
    budget_bytes: int | None = None
    """The budget, of a way that has one."""
    note: str = ""
    """A sentence for below the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Spillway, or the demo, raised one of its own errors."""

    message: str
    usage: bool
    """Whether an argument was at fault."""


Message = Started | Step | Outcome | Refused
"""What a child says."""

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Started, Step, Outcome, Refused)}


def encode(message: Message) -> str:
    """A message as a line of JSON, without its end."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def decode(line: str) -> Message:
    """The message that :func:`encode` made a line of.

    Raises:
        DemoError: if it made no such line.
    """
    try:
        fields = json.loads(line)
        return _KINDS[fields.pop("kind")](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DemoError(f"got {line.strip()!r} from a child, expected one of the demo's messages") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way, as the table and the JSON file show it."""

    way: str
    step_seconds: float
    tokens_per_second: float
    peak_bytes: int
    activation_peak_bytes: int
    """``peak_bytes`` above what was held just before the first step: activations, gradients, optimizer state."""
    moved_bytes: int
    loss: float
    """Of the last step."""
    identical: bool | None
    """Whether every loss and the gradients are bit for bit those of ``keep``; ``None`` where that is not compared."""
    losses: list[float]
    all_step_seconds: list[float]
    baseline_bytes: int
    peak_source: str
    fingerprint: str
    counted_steps: int = 0
    budget_bytes: int | None = None
    note: str = ""


def make_row(way: str, outcome: Outcome, reference: Outcome | None) -> Row:
    """A way's row, with ``reference`` the outcome of ``keep`` if it is to be compared with that."""
    return Row(
        way=way,
        activation_peak_bytes=outcome.peak_bytes - outcome.baseline_bytes,
        loss=outcome.losses[-1],
        identical=None if reference is None else outcome.fingerprint == reference.fingerprint,
        **asdict(outcome),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that ``--json`` writes."""

    rows: list[Row]
    hardware: dict[str, str | int]
    versions: dict[str, str]
    settings: dict[str, str | int | float | None]
    """Of the training, the same for every way."""
    malloc: str
    """How the C library's ``malloc`` is set in every child on the CPU; empty on an accelerator."""

    def to_json(self) -> str:
        """The report as JSON, with the names of its fields."""
        return json.dumps(asdict(self), indent=2) + "\n"
