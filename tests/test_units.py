"""Sizes and seconds, to and from what people write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import SizeError
from spillway.units import format_bytes, format_seconds, parse_bytes, parse_share, read_budget


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        (0, 0),
        (512, 512),
        ("0", 0),
        ("512", 512),
        ("512 b", 512),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        ("24GB", 24 * 10**9),
        ("2TiB", 2 * 2**40),
        ("1PB", 10**15),
        (" 1.5 MiB ", 3 * 2**19),
        (".5KiB", 512),
        ("1_000_000", 1_000_000),
        ("0.3B", 1),
        ("40G", 40 * 2**30),
        ("1.5k", 1536),
        ("2 T", 2 * 2**40),
    ],
)
def test_a_size_means_what_the_standard_says(size: int | str, nbytes: int) -> None:
    assert parse_bytes(size) == nbytes


@pytest.mark.parametrize(
    "size", ["12 parsecs", "", "MiB", "1e9", "-1", "-1MiB", "1 MiB 2", "1,5MiB", "inf", "nan", "1__0", -1]
)
def test_what_is_no_size_is_refused(size: int | str) -> None:
    with pytest.raises(SizeError, match=r"^window: got .*expected"):
        parse_bytes(size, what="window")


@pytest.mark.parametrize("size", [1.5, None, True, b"1MiB", [1]])
def test_what_is_neither_int_nor_string_is_refused(size: object) -> None:
    with pytest.raises(SizeError, match=r"got .*expected bytes as an int or a number with a unit"):
        parse_bytes(size)  # type: ignore[arg-type]


@given(st.integers(min_value=0, max_value=2**53))
def test_whole_bytes_are_exact_as_int_and_as_text(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes
    assert parse_bytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (24 * 2**30, "24.0 GiB"),
        (2**50, "1.0 PiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=0, max_value=2**59))
def test_bytes_for_people_can_be_read_back(nbytes: int) -> None:
    assert abs(parse_bytes(format_bytes(nbytes)) - nbytes) <= 0.05 * nbytes


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.00 s"), (1.5, "1.50 s"), (0.0123, "12.3 ms"), (2e-6, "2.0 us"), (-0.5, "-500.0 ms")]
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "share"), [("40%", 0.4), (" 12.5 % ", 0.125), ("0%", 0.0), ("200%", 2.0), ("1KiB", 1024), (7, 7)]
)
def test_a_share_is_a_float_and_bytes_are_an_int(size: int | str, share: float) -> None:
    assert parse_share(size) == share
    assert type(parse_share(size)) is type(share)


@pytest.mark.parametrize(
    ("budget", "read"), [("60%", 0.6), (0.6, 0.6), ("0.6", 0.6), ("40G", 40 * 2**30), (7, 7), ("7", 7), (1.0, 1.0)]
)
def test_a_budget_is_a_share_or_bytes(budget: float | str, read: float) -> None:
    assert read_budget(budget) == read
    assert type(read_budget(budget)) is type(read)


@pytest.mark.parametrize("size", ["%", "-1%", "1 %%", "x%", 0.4, None, "1e1%"])
def test_what_is_neither_a_share_nor_a_size_is_refused(size: object) -> None:
    with pytest.raises(SizeError, match=r"^window: got"):
        parse_share(size, what="window")  # type: ignore[arg-type]
