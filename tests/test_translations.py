"""A page in two languages has the same code, numbers, headings and links in both."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TRAINERS = ("trl", "axolotl", "llama-factory", "ms-swift", "unsloth")
PAIRS = {
    "README.md": "README.zh-CN.md",
    "docs/start.md": "docs/zh/start.md",
    "docs/which-way.md": "docs/zh/which-way.md",
    "docs/tutorial.md": "docs/zh/tutorial.md",
    "docs/integrations/transformers.md": "docs/zh/transformers.md",
    **{f"docs/integrations/{name}.md": f"docs/zh/{name}.md" for name in TRAINERS},
    "docs/troubleshooting.md": "docs/zh/troubleshooting.md",
}
ENGLISH = {chinese: english for english, chinese in PAIRS.items()}

pairs = pytest.mark.parametrize(("english", "chinese"), PAIRS.items(), ids=[Path(name).stem for name in PAIRS])


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code(page: str) -> list[tuple[str, int]]:
    """Each fenced block without its comments, and the number of these."""
    fenced = re.findall(r"^```(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [re.subn(r"((?:^|  | )#) .+$", r"\1", block, flags=re.MULTILINE) for block in fenced]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def tables(page: str) -> list[list[list[list[str]]]]:
    """The numbers in each cell of each row of each table, without addresses of links."""
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


def links(name: str) -> set[str]:
    """The files that a page links to, each by its English name, without the page in its other language."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose(text(name)))
    files = {os.path.normpath(Path(name).parent / target) for target in targets if "://" not in target}
    return {ENGLISH.get(file, file) for file in files} - {ENGLISH.get(name, name), PAIRS.get(name, name)}


@pairs
def test_both_have_the_same_code_but_for_comments(english: str, chinese: str) -> None:
    assert code(text(english)) == code(text(chinese))


@pairs
def test_both_have_the_same_numbers_in_tables(english: str, chinese: str) -> None:
    here, there = (tables(text(name)) for name in (english, chinese))
    assert [[len(row) for row in table] for table in here] == [[len(row) for row in table] for table in there]
    assert here == there


@pairs
def test_both_have_the_same_levels_of_headings_and_the_same_messages_in_them(english: str, chinese: str) -> None:
    here, there = (re.findall(r"^(#+) (?:(`.*`)$)?", prose(text(name)), re.M) for name in (english, chinese))
    assert here == there != []
    assert re.search(r"[\u4e00-\u9fff]", text(chinese)) is not None


@pairs
def test_both_lead_to_the_same_pages_and_to_each_other(english: str, chinese: str) -> None:
    assert links(english) == links(chinese)
    for one, other in ((english, chinese), (chinese, english)):
        assert f"]({os.path.relpath(other, Path(one).parent)})" in text(one)


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert all(len(text(name).splitlines()) <= 120 for name in ("README.md", PAIRS["README.md"]))


def test_a_number_that_differs_is_found() -> None:
    page = text(PAIRS["README.md"])
    figure = re.search(r"\| (\d\.\d{3}) \|", page)
    assert figure is not None
    assert tables(page.replace(f"| {figure[1]} |", "| 9.999 |")) != tables(page)


def test_code_that_differs_is_found() -> None:
    page = text("docs/start.md")
    assert code(page.replace("range(6)", "range(7)")) != code(page)
    assert code(page.replace("  # before the first step", "")) != code(page)
