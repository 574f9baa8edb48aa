"""Draws the pictures of the pages: ``python docs/pictures/draw.py`` writes the SVG files beside it.

Ink is the colour of the text around a picture, and all other colours are of middle lightness, so that a picture is
right on a light page and on a dark one. A picture that is opened alone asks the system which of the two it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

BLUE, GREEN, ORANGE, GREY = "#3b82d6", "#2e9d5b", "#d07a1f", "#8a8f98"
"""Compute and GPU memory; offloading; reloading; everything else."""

STYLE = (
    ".picture{color:#24292f;max-width:100%;height:auto}"
    "@media (prefers-color-scheme:dark){.picture{color:#e6edf3}}"
    ".picture text{fill:currentColor}.picture .faint{opacity:.72}"
)


def words(x: float, y: float, text: str, *, at: str = "middle", bold: bool = False, faint: bool = False) -> str:
    more = (' font-weight="600"' if bold else "") + (' class="faint"' if faint else "")
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{at}"{more}>{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, *lines: str, colour: str = GREY) -> Iterator[str]:
    """A box with lines in its middle, of which the first is bold where there are several."""
    yield (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" fill="{colour}" fill-opacity="0.16" '
        f'stroke="{colour}" stroke-width="1.5"/>'
    )
    for number, line in enumerate(lines):
        below = (number - (len(lines) - 1) / 2) * 16 + 4
        yield words(x + width / 2, y + height / 2 + below, line, bold=number == 0 and len(lines) > 1, faint=number > 0)


def arrow(*points: tuple[float, float], colour: str = GREY, dashed: bool = False) -> Iterator[str]:
    """Lines from point to point, with a head at the last one."""
    (x, y), (to, down) = points[-2:]
    side, fall = (to > x) - (to < x), (down > y) - (down < y)
    path = " ".join(f"{a:g},{b:g}" for a, b in points)
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dashes}/>'
    back, wide = (to - 7 * side, down - 7 * fall), (4 * fall, 4 * side)
    corners = ((to, down), (back[0] + wide[0], back[1] + wide[1]), (back[0] - wide[0], back[1] - wide[1]))
    yield f'<polygon points="{" ".join(f"{a:g},{b:g}" for a, b in corners)}" fill="{colour}"/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def step() -> str:
    """The way of saved tensors in a step."""

    def parts() -> Iterator[str]:
        blocks = ("block 1", "block 2", "block n")
        for number, name in enumerate(blocks):
            x = 130 + 190 * number
            yield from box(x, 24, 120, 36, name, colour=BLUE)
            yield from box(x, 300, 120, 36, name, colour=BLUE)
            yield from arrow((x + 40, 60), (x + 40, 100), colour=GREEN)
            yield from arrow((x + 40, 260), (x + 40, 300), colour=ORANGE)
            if number < len(blocks) - 1:
                yield from arrow((x + 120, 42), (x + 190, 42), colour=BLUE)
                yield from arrow((x + 190, 318), (x + 120, 318), colour=BLUE)
        yield from arrow((630, 42), (700, 42), (700, 318), (630, 318), colour=BLUE)
        yield words(700, 30, "loss")
        yield words(16, 47, "forward", at="start", bold=True)
        yield words(16, 323, "backward", at="start", bold=True)
        yield from box(130, 100, 450, 42, "offload stream", "copies in order, up to the in-flight limit", colour=GREEN)
        yield from box(
            130, 160, 450, 42, "CPU memory or disk", "pinned, in exact sizes; an anonymous file", colour=GREY
        )
        yield from box(
            130, 220, 450, 40, "reload stream", "prefetches in the order of the last backward", colour=ORANGE
        )
        yield from arrow((355, 142), (355, 160), colour=GREEN)
        yield from arrow((355, 202), (355, 220), colour=ORANGE)
        # The last saved tensor is still on the GPU.
        yield from arrow((608, 60), (608, 300), dashed=True)
        yield words(16, 366, "Dashed: a tensor that is still on the GPU is used as it is.", at="start", faint=True)

    return picture(740, 378, "A step: saved tensors are offloaded in forward, and prefetched for backward", parts())


def entry() -> str:
    """The life of one storage."""

    def parts() -> Iterator[str]:
        states = (
            (20, "RESIDENT", "on the GPU", BLUE),
            (210, "LEAVING", "being offloaded", GREEN),
            (420, "AWAY", "offloaded", GREY),
            (610, "RETURNING", "being reloaded", ORANGE),
        )
        widths = (130, 160, 130, 150)
        for (x, name, what, colour), width in zip(states, widths, strict=True):
            yield from box(x, 90, width, 50, name, what, colour=colour)
        yield from arrow((150, 115), (210, 115), colour=GREEN)
        yield from arrow((370, 115), (420, 115), colour=GREEN)
        yield from arrow((550, 115), (610, 115), colour=ORANGE)
        yield words(180, 82, "queued", faint=True)
        yield words(395, 82, "copied, freed", faint=True)
        yield words(580, 82, "needed next", faint=True)
        yield from arrow((290, 90), (290, 40), (100, 40), (100, 90), colour=BLUE)
        yield words(195, 32, "backward asked for it first: used as it is", faint=True)
        yield from arrow((685, 140), (685, 190), (60, 190), (60, 140), colour=BLUE)
        yield words(372, 183, "on the GPU: backward uses it", faint=True)
        yield words(372, 222, "When autograd drops the last handle, in any state, all memory of the entry is freed.")

    return picture(780, 236, "An entry: resident, being offloaded, offloaded, being reloaded, resident", parts())


def streams() -> str:
    """The streams over one step of four blocks: drawn, not measured."""

    def bar(x: float, y: float, width: float, text: str, colour: str) -> Iterator[str]:
        yield from box(x, y, width, 30, text, colour=colour)

    def parts() -> Iterator[str]:
        rows = (("compute", 40), ("out", 90), ("back", 140))
        for name, y in rows:
            yield words(16, y + 20, name, at="start", bold=True)
            yield f'<path d="M90 {y + 36}H764" stroke="{GREY}" stroke-opacity="0.35"/>'
        for number in range(4):
            yield from bar(90 + 66 * number, 40, 62, f"F{number + 1}", BLUE)
        # The last block offloads nothing, and the second only its inputs.
        for x, width, text in ((152, 52, "1"), (218, 26, "2"), (284, 52, "3")):
            yield from bar(x, 90, width, text, GREEN)
        for x, width, text in ((354, 86, "B4"), (444, 86, "B3"), (568, 86, "B2"), (658, 86, "B1")):
            yield from bar(x, 40, width, text, BLUE)
        yield from bar(534, 40, 30, "R2", ORANGE)
        for x, width, text in ((358, 52, "3"), (414, 26, "2"), (444, 52, "1")):
            yield from bar(x, 140, width, text, ORANGE)
        yield f'<path d="M352 24V182" stroke="{GREY}" stroke-dasharray="4 3"/>'
        yield words(220, 26, "forward", faint=True)
        yield words(556, 26, "backward", faint=True)
        notes = (
            "F1 to F4, B4 to B1: blocks. R2: block 2 is recomputed from its inputs before its backward.",
            "Block 4 keeps its tensors, since backward needs them at once. The others are reloaded in order.",
            "A gap in compute would be a stall: a copy that is not done yet.",
        )
        for number, line in enumerate(notes):
            yield words(90, 212 + 19 * number, line, at="start", faint=True)

    return picture(780, 262, "The streams compute, out and back over one step", parts())


def plan() -> str:
    """From the first steps to an active plan."""

    def parts() -> Iterator[str]:
        top = (
            (10, 165, "profile", "three steps:", "operators, bytes, times"),
            (205, 165, "options", "a few for each", "kind of block"),
            (400, 165, "solver", "one option a block,", "by simulated steps"),
            (595, 175, "plan", "a decision for each value,", "peak and seconds"),
        )
        for number, (x, width, *lines) in enumerate(top):
            yield from box(x, 60, width, 66, *lines, colour=(ORANGE, GREY, GREY, BLUE)[number])
            if number < 3:
                yield from arrow((x + width, 93), (x + 195, 93))
        yield from box(205, 8, 360, 30, "bandwidths, the budget, allowed means", colour=GREY)
        yield from arrow((288, 38), (288, 60))
        yield from arrow((482, 38), (482, 60))
        yield from box(605, 170, 160, 46, "validate", "the peak of a real step", colour=BLUE)
        yield from arrow((685, 126), (685, 170))
        yield from box(410, 170, 160, 46, "above the budget", "plan for less", colour=GREEN)
        yield from arrow((605, 193), (570, 193))
        yield from arrow((490, 170), (490, 126))
        yield from box(605, 260, 160, 46, "active", "the peak is measured", colour=BLUE)
        yield from arrow((685, 216), (685, 260))
        yield from arrow((605, 283), (100, 283), (100, 126), dashed=True)
        yield words(352, 276, "inputs are much larger: profile again", faint=True)

    return picture(785, 318, "How a plan is found: profile, options, solver, plan, validation", parts())


def icon() -> str:
    """The site's: water over an edge."""
    parts = (
        f'<path d="M2 7H9C12 7 13 9 13 13" fill="none" stroke="{BLUE}" stroke-width="2.4" stroke-linecap="round"/>',
        f'<path d="M2 12H6C8 12 9 13 9 15" fill="none" stroke="{GREEN}" stroke-width="2.4" stroke-linecap="round"/>',
    )
    return "\n".join(['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 18">', *parts, "</svg>"]) + "\n"


PICTURES = {"step": step, "entry": entry, "streams": streams, "plan": plan, "favicon": icon}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(), encoding="utf-8")
