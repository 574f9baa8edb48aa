"""Profiles of sizes that were not run, from the profiles of other sizes.

NOTE [ Two sizes tell a third ]

Bytes of tensors are a constant and a share for each element of a sequence or batch. Two profiles tell both, for each
value, workspace and peak. Times are taken to be straight lines, too, though those of attention grow with the square.
That is enough to tell what fits. Two profiles with other operators or blocks, as where the size selects a kernel, tell
nothing.

NOTE [ One size tells a larger one ]

One profile does not tell constants: all but parameters' bytes are taken to grow with the inputs. That is too much for
constants, and too little for what grows with the square, as attention does that saves its matrix.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from spillway.planner.profile import Profile, Static, Value

_STATIC = frozenset(field.name for field in fields(Static))
"""Bytes, too: the batch is among them."""
_FIXED = frozenset({"host", "host_seconds", "backward_change_bytes", "cached_bytes"})
"""Fields of blocks that do not grow with the inputs."""


def scaled(first: Profile, second: Profile, sizes: tuple[int, int], size: int) -> Profile | None:
    """The profile of another size than these two; ``None`` if the profiles are not of one structure.

    See NOTE [ Two sizes tell a third ].
    """
    try:
        found: Profile = _between(first, second, (size - sizes[0]) / (sizes[1] - sizes[0]))
    except _UnlikeError:
        return None
    return found


def enlarged(profile: Profile, factor: float) -> Profile:
    """The profile of inputs that are larger by a factor, at least 1. See NOTE [ One size tells a larger one ].

    CPU times, and what comes after the blocks (an optimizer, mostly), stay as they are.
    """
    before, middle = (_grown(each, factor) for each in (profile.before, profile.middle))
    late = None if profile.late is None else _grown(profile.late, factor)
    pairs = ((before, profile.before), (middle, profile.middle), (late, profile.late))
    more = sum(new.change_bytes - old.change_bytes for new, old in pairs if new is not None and old is not None)
    return replace(
        profile,
        kinds=tuple(_grown(kind, factor) for kind in profile.kinds),
        before=before,
        middle=middle,
        late=late,
        # The tensors that they hold are freed there.
        after=replace(profile.after, change_bytes=profile.after.change_bytes - more),
        held_bytes=round(profile.held_bytes * factor),
    )


def _grown(record: Any, factor: float) -> Any:
    """A record whose bytes and seconds are so many times as large, but for those that do not grow with the inputs."""
    if not is_dataclass(record) or (isinstance(record, Value) and record.is_cast):
        return record
    changed: dict[str, Any] = {}
    for name in {field.name for field in fields(record)} - _FIXED:
        value = getattr(record, name)
        if isinstance(value, tuple):
            changed[name] = tuple(_grown(each, factor) for each in value)
        elif name.endswith("bytes"):
            changed[name] = round(value * factor)
        elif name.endswith("seconds"):
            changed[name] = value * factor
        else:
            changed[name] = _grown(value, factor)
    return replace(record, **changed)  # type: ignore[type-var]


def risen(profile: Profile, nbytes: int, *, has_gradients: bool = False) -> Profile:
    """The profile of steps that begin with so many bytes more.

    If the profiled step was an optimizer's first, its state is not made again. With ``has_gradients``, gradients of
    blocks are among the bytes: backward adds to them, and does not make them.
    """
    static = profile.static
    freed = profile.gradient_bytes + (0 if static is None else static.gradients)
    made = min(max(profile.after.change_bytes + freed, 0), nbytes)
    return replace(
        profile,
        static_bytes=profile.static_bytes + nbytes,
        static=None if static is None else replace(static, other=static.other + nbytes),
        after=replace(profile.after, peak_bytes=max(profile.after.peak_bytes - made, 0)),
        kinds=tuple(
            replace(kind, backward_change_bytes=min(kind.backward_change_bytes, 0)) if has_gradients else kind
            for kind in profile.kinds
        ),
    )


class _UnlikeError(Exception):
    """Two profiles are not of one structure."""


def _between(first: Any, second: Any, share: float) -> Any:
    if is_dataclass(first) and type(first) is type(second):
        names = [field.name for field in fields(first)]
        values = {name: _of_field(name, getattr(first, name), getattr(second, name), share) for name in names}
        return replace(first, **values)  # type: ignore[type-var]
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(_between(*pair, share) for pair in zip(first, second, strict=True))
    if type(first) is not type(second) or first != second:
        raise _UnlikeError
    return first


def _of_field(name: str, first: Any, second: Any, share: float) -> Any:
    are_bytes = name in _STATIC or (name.endswith("bytes") and name != "min_bytes")
    if are_bytes and isinstance(first, int) and isinstance(second, int):
        nbytes = round(first + share * (second - first))
        return nbytes if name.endswith("change_bytes") else max(nbytes, 0)
    if isinstance(first, float) and isinstance(second, float):
        return max(first + share * (second - first), 0.0)
    try:
        return _between(first, second, share)
    except _UnlikeError:
        # Without its parts, a backward is taken to need its most all the time. CPU times say nothing of what fits.
        instead = {"gap": first, "backward_parts": (), "host": None}
        if name not in instead:
            raise
        return instead[name]
