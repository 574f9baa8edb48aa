"""A small picture of points, as SVG: some joined by a line, the others alone, each with its name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 56
INK, FAINT, LINE = "#333333", "#e4e4e4", "#0b6bcb"
OTHERS = "#c2570c"
LETTER = 6.2
"""About the width of one, in the names."""


@dataclass(frozen=True)
class Point:
    """A name, where it is, and whether it is on the line."""

    name: str
    across: float
    up: float
    joined: bool


@dataclass(frozen=True)
class Axis:
    """From values to places, with round values to write beside it."""

    low: float
    high: float
    step: float
    begin: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float, *, low: float | None = None) -> Axis:
        """One that has all of the values on it; ``low`` is its first, or is found."""
        least, most = min(values) if low is None else low, max(values)
        step = round_step((most - least) / 8 or abs(most) or 1.0)
        first = math.floor(least / step) * step if low is None else low
        return cls(first, first + step * math.ceil((most - first) / step + 0.2), step, begin, end)

    def place(self, value: float) -> float:
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)

    def marks(self) -> Iterator[tuple[float, str]]:
        """Places with what is written there."""
        digits = max(0, -math.floor(math.log10(self.step)))
        for number in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + number * self.step
            yield self.place(value), f"{value:.{digits}f}"


def round_step(least: float) -> float:
    """The next of 1, 2, 5, 10, and so on."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{more}>{escape(words)}</text>'


def named(points: Sequence[Point], x: Axis, y: Axis) -> Iterator[str]:
    """The names, each beside its point where no other name or point is, as far as there is such a place."""
    taken = [(x.place(point.across) - 5, y.place(point.up) - 5, 10.0, 10.0) for point in points]
    for point in points:
        across, up, width = x.place(point.across), y.place(point.up), len(point.name) * LETTER
        places = [
            (across + side * 9 - (width if side < 0 else 0), up + down - 9)
            for down in (4, -8, 16, -20, 28, -32, 40)
            for side in (1, -1)
        ]
        inside = [each for each in places if each[0] > LEFT and each[0] + width < WIDTH - 4]
        free = [each for each in inside if not any(meet((*each, width, 12.0), other) for other in taken)]
        left, top = (free or inside or places)[0]
        taken.append((left, top, width, 12.0))
        yield text(left, top + 10, point.name, colour=LINE if point.joined else OTHERS)


def meet(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two boxes (left, top, width, height) have something in common."""
    return all(one[k] < other[k] + other[k + 2] and other[k] < one[k] + one[k + 2] for k in (0, 1))


def picture(points: Sequence[Point], *, across: str, up: str, joined: str, others: str) -> str:
    """The points as SVG.

    Args:
        points: at least one.
        across: words below the axis from left to right, which begins at 0.
        up: words beside the other one.
        joined: what the points on the line are.
        others: what the others are.
    """
    x = Axis.over([point.across for point in points], LEFT, WIDTH - RIGHT, low=0.0)
    y = Axis.over([point.up for point in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for place, value in x.marks():
        parts.append(f'<path d="M{place:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{FAINT}"/>')
        parts.append(text(place, HEIGHT - BOTTOM + 16, value, anchor="middle"))
    for place, value in y.marks():
        parts.append(f'<path d="M{LEFT} {place:.1f}H{WIDTH - RIGHT}" stroke="{FAINT}"/>')
        parts.append(text(LEFT - 8, place + 4, value, anchor="end"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, across, anchor="middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(text(18, middle, up, anchor="middle", more=f' transform="rotate(-90 18 {middle:.1f})"'))
    for number, (colour, words) in enumerate(((LINE, joined), (OTHERS, others))):
        parts.append(f'<circle cx="{LEFT + 8 + 180 * number}" cy="24" r="4" fill="{colour}"/>')
        parts.append(text(LEFT + 18 + 180 * number, 28, words))
    line = sorted((point for point in points if point.joined), key=lambda point: point.across)
    if len(line) > 1:
        places = " ".join(f"{x.place(point.across):.1f},{y.place(point.up):.1f}" for point in line)
        parts.append(f'<polyline points="{places}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
    for point in points:
        colour = LINE if point.joined else OTHERS
        parts.append(f'<circle cx="{x.place(point.across):.1f}" cy="{y.place(point.up):.1f}" r="4" fill="{colour}"/>')
    parts += named(points, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"
