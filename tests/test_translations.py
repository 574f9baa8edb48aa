"""What is told in two languages is the same: the same code, and the same numbers in the same places of tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAIRS = [("README.md", "README.zh-CN.md"), ("docs/tutorial.md", "docs/zh/tutorial.md")]

pairs = pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=["readme", "tutorial"])


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(page: str) -> list[str]:
    """All that is fenced, with its language."""
    return re.findall(r"^```(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def tables(page: str) -> list[list[list[list[str]]]]:
    """The numbers in each cell of each row of each table, without the headings and what links lead to."""
    found: list[list[list[list[str]]]] = []
    before = False
    for line in page.splitlines():
        is_row = line.startswith("|")
        if is_row and not before:
            found.append([])
        if is_row:
            cells = re.sub(r"\]\([^)]*\)", "]", line).strip("|").split("|")
            found[-1].append([re.findall(r"\d+(?:\.\d+)?", cell) for cell in cells])
        before = is_row
    return found


def links(page: str) -> set[str]:
    """What is linked from a page, but the other language of a page."""
    return {target for target in re.findall(r"\]\(([^)]+)\)", page) if "zh" not in target and "README" not in target}


@pairs
def test_both_have_the_same_code(english: str, chinese: str) -> None:
    assert code(text(english)) == code(text(chinese)) != []


@pairs
def test_both_have_the_same_numbers_in_tables(english: str, chinese: str) -> None:
    here, there = (tables(text(name)) for name in (english, chinese))
    assert [[len(row) for row in table] for table in here] == [[len(row) for row in table] for table in there]
    assert here == there


@pairs
def test_both_have_the_same_headings_and_are_about_as_long(english: str, chinese: str) -> None:
    levels = [
        re.findall(r"^(#+) ", re.sub(r"^```.*?^```$", "", text(name), flags=re.M | re.S), re.M)
        for name in (english, chinese)
    ]
    assert levels[0] == levels[1] != []
    assert re.search(r"[\u4e00-\u9fff]", text(chinese)) is not None


def test_the_readmes_lead_to_the_same_pages() -> None:
    here, there = (text(name) for name in PAIRS[0])
    assert links(here) == links(there)
    assert all((ROOT / target.partition("#")[0]).exists() for target in links(here))


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert all(len(text(name).splitlines()) <= 160 for name in PAIRS[0])


def test_a_number_that_differs_is_found() -> None:
    page = text(PAIRS[0][1])
    figure = re.search(r"\| (\d\.\d{3}) \|", page)
    assert figure is not None
    assert tables(page.replace(f"| {figure[1]} |", "| 9.999 |")) != tables(page)
