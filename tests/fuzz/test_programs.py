"""Random programs give with Spillway what they give without: every bit, Python's state included, or a typed error."""

from __future__ import annotations

import pytest

from fuzz.programs import Program
from fuzz.twins import find_fault, told

CASES = 300
MANY = 10_000
AT_ONCE = 50
MANY_AT_ONCE = 500


def check(seeds: range) -> None:
    for seed in seeds:
        program = Program.random(seed)
        fault = find_fault(program)
        assert fault is None, told(program, fault)


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_programs_are_bit_for_bit_what_they_are_without_spillway(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, MANY, MANY_AT_ONCE))
def test_many_programs_are_bit_for_bit_what_they_are_without_spillway(first: int) -> None:
    check(range(first, first + MANY_AT_ONCE))
