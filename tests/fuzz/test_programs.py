"""Random programs give with Spillway what they give without: every bit, Python's state included, or a typed error.

Each lot runs in a process of its own. What other tests have compiled there changes which kernels a recomputed function
takes (NOTE [ Kernels under a mode ]), and a program that ends the process ends no other test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spillway

CASES = 120
MANY = 10_000
AT_ONCE = 120
MANY_AT_ONCE = 500
_FOLDERS = (Path(spillway.__file__).parents[1], Path(__file__).parents[1])
_CHECK = """
import sys
import torch
from fuzz.programs import Program
from fuzz.twins import find_fault, told

torch.set_num_threads(1)
first, last = map(int, sys.argv[1:])
for seed in range(first, last):
    print("seed", seed, flush=True)
    program = Program.random(seed)
    fault = find_fault(program)
    if fault is not None:
        sys.exit(told(program, fault))
"""


def check(first: int, last: int) -> None:
    path = os.pathsep.join(map(str, _FOLDERS))
    done = subprocess.run(
        [sys.executable, "-c", _CHECK, str(first), str(last)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[done.stdout.rfind("seed ") :] if done.returncode < 0 else done.stdout
    assert done.stdout.count("seed ") == last - first


@pytest.mark.parametrize("first", range(0, CASES, AT_ONCE))
def test_programs_are_bit_for_bit_what_they_are_without_spillway(first: int) -> None:
    check(first, first + AT_ONCE)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, MANY, MANY_AT_ONCE))
def test_many_programs_are_bit_for_bit_what_they_are_without_spillway(first: int) -> None:
    check(first, first + MANY_AT_ONCE)
