"""Bytes and seconds, to and from text; and numbers among arguments.

``parse_bytes("24GiB") == 24 * 2**30`` and ``format_bytes(24 * 2**30) == "24.0 GiB"``. ``GiB`` is 2**30 bytes, ``GB`` is
10**9. A letter alone, ``"24G"``, is the binary unit, as Slurm, Docker and ``ls -h`` have it.
"""

from __future__ import annotations

import html
import math
import numbers
import re
from typing import TypeGuard

from spillway.errors import SizeError, printable

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter + "b"] = 1000**_power
    _UNITS[_letter + "ib"] = _UNITS[_letter] = 1024**_power

_SIZE = re.compile(r"\s*(\d+(?:_\d+)*(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"\s*(\d+(?:\.\d*)?)\s*%\s*")
_MOST_SHARE = 10.0
"""A larger share of the peak without Spillway was meant as something else."""
_FRACTION = re.compile(r"\s*(\d+\.\d*|\.\d+)\s*")
"""A decimal fraction without a unit."""


def parse_bytes(size: int | str, *, what: str = "size") -> int:
    """A size as a number of bytes.

    Args:
        size: bytes as an ``int``, or a number with a unit: ``"1.5 GiB"``, ``"200MB"``, ``"24G"``. A fraction of a byte
            is rounded up.
        what: the name of the argument, for the message.

    Raises:
        SizeError: if ``size`` is neither, or is negative or not finite.

    Example:
        >>> parse_bytes("24GiB")
        25769803776
    """
    if isinstance(size, int) and not isinstance(size, bool):
        if size < 0:
            raise SizeError(f"{what}: got {size}, expected at least 0 bytes")
        return size
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _UNITS.get((match[2] or "b").lower()) if match else None
    if match is None or factor is None:
        raise SizeError(
            f"{what}: got {size!r}, expected bytes as an int or a number with a unit (B, kB, KiB, K, and so on to "
            f'P); write it like "512MiB" or "24GB"'
        )
    return math.ceil(float(match[1].replace("_", "")) * factor)


def parse_share(size: int | str, *, what: str = "size") -> int | float:
    """A size as a number of bytes, or a share, ``"40%"``, as a float: 0.4. It may exceed 100%.

    Example:
        >>> parse_share("40%"), parse_share("1KiB")
        (0.4, 1024)
    """
    share = _SHARE.fullmatch(size) if isinstance(size, str) else None
    return parse_bytes(size, what=what) if share is None else float(share[1]) / 100


def read_budget(budget: int | float | str, *, what: str = "budget") -> int | float:
    """A budget as bytes, an int, or as a share of the peak of a step that keeps everything, a float.

    Args:
        budget: bytes or a size, as for :func:`parse_bytes`; or a share: a float, ``"50%"`` or ``"0.5"``. Integers and
            strings like ``"2K"`` are bytes.
        what: the name of the argument, for the message.

    Raises:
        SizeError: if ``budget`` is none of these, or a share above 10.

    Example:
        >>> read_budget("60%"), read_budget("2K")
        (0.6, 2048)
    """
    share = budget
    if isinstance(share, str):
        share = float(share) if _FRACTION.fullmatch(share) else parse_share(share, what=what)
    if not isinstance(share, float):
        return parse_bytes(share, what=what)
    if not 0 <= share <= _MOST_SHARE:
        raise SizeError(
            f"{what}: got {budget!r}, expected bytes as an int, or a share between 0 and {_MOST_SHARE:.0f} of the peak "
            f"of a step that keeps everything"
        )
    return share


def is_number(value: object) -> TypeGuard[float]:
    """Whether an argument is a real number, and no boolean."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def format_bytes(nbytes: float) -> str:
    """Bytes for people, in binary units: ``format_bytes(1536) == "1.5 KiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def format_seconds(seconds: float) -> str:
    """Seconds for people: ``format_seconds(0.0123) == "12.3 ms"``."""
    if seconds == 0 or abs(seconds) >= 1:
        return f"{seconds:.2f} s"
    if abs(seconds) >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} us"


def format_html(text: str) -> str:
    """Text for a notebook's cell: its first line, which opens the other lines, if there are any.

    Example:
        >>> format_html("2 blocks")
        '<p>2 blocks</p>'
    """
    first, *others = [html.escape(printable(line)) for line in text.splitlines()]
    if not others:
        return f"<p>{first}</p>"
    return f"<details><summary>{first}</summary><pre>{chr(10).join(others)}</pre></details>"
