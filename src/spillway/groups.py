"""Which groups of saved tensors leave, and which stay: rules over what the pass before was like.

A *group* is what is saved inside of one ``with spillway.group(name)``: it leaves together. A name may have any number
of groups in a pass, one for each layer, say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from spillway.errors import UsageError
from spillway.units import parse_bytes


class PastGroup(NamedTuple):
    """One group of a pass that has ended."""

    name: str
    nbytes: int
    """Bytes that were saved in it and could leave."""


@dataclass(frozen=True)
class Groups:
    """Only what is saved inside of groups leaves, and of these groups the ones that the rules say.

    The first pass under a tag, and one that finds other groups than the last had, offloads every group. After that the
    rules apply; each takes groups from the end, which backward wants first.

    Args:
        patterns: for :func:`~spillway.attach`: names of groups, each with a pattern of dotted module names as in a
            shell, or several: what a module that matches saves is a group. Of the modules that match, only the
            outermost are taken. Without, the code says it: ``with spillway.group(name)``.
        margin: how many of the last groups of each name stay.
        fewer_bytes: so many bytes more stay, in whole groups, the last first: for pipeline ranks that need not save as
            much as the first one. Bytes, or a size like ``"2GiB"``.
        fraction: the share of the remaining groups of a pass that is offloaded, whatever their names: the first ones,
            rounded up. From 0 to 1.
        in_flight: how many groups of a name may be on their way out at once, for each name or for all; compute waits
            for the oldest. ``None``: as many as the window holds.

    Raises:
        UsageError: for arguments that cannot be meant.
        SizeError: for a size that is none.

    Example:
        >>> groups = spillway.Groups({"attention": "*.self_attn", "mlp": "*.mlp"}, margin=1)  # doctest: +SKIP
        >>> attached = spillway.attach(model, groups=groups)  # doctest: +SKIP
    """

    patterns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    margin: int = 0
    fraction: float = 1.0
    fewer_bytes: int | str = 0
    in_flight: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping):
            raise UsageError(f"patterns: got {self.patterns!r}, expected a mapping from names of groups to patterns")
        for name, pattern in self.patterns.items():
            check_name(name)
            patterns = (pattern,) if isinstance(pattern, str) else pattern
            if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
                raise UsageError(f"group {name!r}: got {pattern!r}, expected a pattern of module names, or several")
        if type(self.margin) is not int or self.margin < 0:
            raise UsageError(f"margin: got {self.margin!r}, expected a whole number of groups, 0 or more")
        if (
            isinstance(self.fraction, bool)
            or not isinstance(self.fraction, (int, float))
            or not 0 <= self.fraction <= 1
        ):
            raise UsageError(f"fraction: got {self.fraction!r}, expected a number from 0 to 1")
        object.__setattr__(self, "fewer_bytes", parse_bytes(self.fewer_bytes, what="fewer_bytes"))
        limits = self.in_flight.values() if isinstance(self.in_flight, Mapping) else (self.in_flight,)
        if any(limit is not None and (type(limit) is not int or limit < 1) for limit in limits):
            raise UsageError(
                f"in_flight: got {self.in_flight!r}, expected a whole number of at least 1, a mapping from names to "
                f"such, or None"
            )

    def staying(self, past: Sequence[PastGroup]) -> frozenset[int]:
        """Which groups stay in a pass like one that had these: their places among all."""
        stay: set[int] = set()
        by_name: dict[str, list[int]] = {}
        for place, group in enumerate(past):
            by_name.setdefault(group.name, []).append(place)
        for places in by_name.values():
            stay.update(places[max(len(places) - self.margin, 0) :])
        # A group that had nothing may have something the next time: an expert that got no tokens, say.
        eligible = [place for place, group in enumerate(past) if place not in stay and group.nbytes]
        fewer = self.fewer_bytes
        assert isinstance(fewer, int)
        while eligible and past[eligible[-1]].nbytes <= fewer:
            fewer -= past[eligible[-1]].nbytes
            stay.add(eligible.pop())
        if self.fraction < 1:
            # Rounding first: 0.07 * 100 is a little more than 7.
            leaving = eligible[: math.ceil(round(self.fraction * len(eligible), 9))]
            stay.update(range(leaving[-1] + 1 if leaving else 0, len(past)))
        return frozenset(stay)

    def over(self, passes: Sequence[Sequence[PastGroup]]) -> list[Groups]:
        """The rules of each of several passes that are alive together, so that they hold of all of them.

        ``margin`` and ``fewer_bytes`` are taken from the passes that backward wants first; ``fraction`` is of each.

        Args:
            passes: their groups, in the order in which backward comes to the passes.
        """
        rules: list[Groups] = []
        rest = self
        for past in passes:
            whole = replace(rest, fraction=1.0)
            kept = whole.staying(past) - replace(whole, fewer_bytes=0).staying(past)
            rules.append(rest)
            fewer = rest.fewer_bytes
            assert isinstance(fewer, int)
            rest = replace(rest, margin=0, fewer_bytes=fewer - sum(past[place].nbytes for place in kept))
        return rules

    def most_in_flight(self, name: str) -> int | None:
        """How many groups of the name may be on their way out at once."""
        return self.in_flight.get(name) if isinstance(self.in_flight, Mapping) else self.in_flight


def check_name(name: object) -> str:
    """The name of a group, or :class:`~spillway.errors.UsageError`."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"group: got {name!r}, expected a name, which is a string that is not empty")
    return name
