"""The profile of a size that nobody has run: from those of two others.

NOTE [ Two sizes tell a third ]

In a sequence or a batch, bytes of tensors are a constant and a share for each element: two profiles tell both, for each
value, workspace and peak. Times (all that is no whole number) are not: attention's grow with the square. They are taken
to be straight lines too, which is enough for what fits; how fast it is, is for a profile of that very size to say.
Where the two profiles have other operators or blocks, as where a kernel is chosen by the size, nothing is told.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from spillway.planning.profile import Profile, Static

_STATIC = frozenset(field.name for field in fields(Static))
"""Bytes, too: the batch is among them."""


def scaled(first: Profile, second: Profile, sizes: tuple[int, int], size: int) -> Profile | None:
    """The profile of a third size.

    Args:
        first: of the first of the sizes.
        second: of the second.
        sizes: two different ones.
        size: the third.

    Returns:
        ``None``: the two are not of one structure. See NOTE [ Two sizes tell a third ].
    """
    share = (size - sizes[0]) / (sizes[1] - sizes[0])
    found = _between(first, second, share)
    return found if isinstance(found, Profile) else None


class _Other:
    """There is no such value."""


_OTHER = _Other()


def _between(first: Any, second: Any, share: float) -> Any:
    if type(first) is not type(second):
        return _OTHER
    if is_dataclass(first):
        names = [field.name for field in fields(first)]
        values = {name: _of_field(name, getattr(first, name), getattr(second, name), share) for name in names}
        return _OTHER if _OTHER in values.values() else replace(first, **values)  # type: ignore[type-var]
    if isinstance(first, tuple):
        if len(first) != len(second):
            return _OTHER
        parts = [_between(one, other, share) for one, other in zip(first, second, strict=True)]
        return _OTHER if _OTHER in parts else tuple(parts)
    return first if first == second else _OTHER


def _of_field(name: str, first: Any, second: Any, share: float) -> Any:
    are_bytes = name in _STATIC or (name.endswith("bytes") and name != "min_bytes")
    if are_bytes and isinstance(first, int) and isinstance(second, int):
        nbytes = round(first + share * (second - first))
        return nbytes if name.endswith("change_bytes") else max(nbytes, 0)
    if isinstance(first, float) and isinstance(second, float):
        return max(first + share * (second - first), 0.0)
    if name == "is_told":
        return first and second
    found = _between(first, second, share)
    # Without its parts, a backward is taken to need its most all the time.
    if name == "backward_parts" and found is _OTHER:
        return ()
    # What the host takes says nothing of what fits.
    return None if name == "host" and found is _OTHER else found
