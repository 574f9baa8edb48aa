"""Profiles of steps that were not run: of larger inputs, or with more bytes in use at their begin.

NOTE [ One size tells a larger one ]

One profile does not tell constants: all but parameters' bytes are taken to grow with the inputs. That is too much for
constants, and too little for what grows with the square, as attention does that saves its matrix.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

from spillway.planner.profile import Profile, Value

_FIXED = frozenset({"host", "host_seconds", "backward_change_bytes", "cached_bytes"})
"""Fields of blocks that do not grow with the inputs."""


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
