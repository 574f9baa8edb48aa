"""The page on how Spillway works names every note in the code, and the file that has it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "spillway"


def test_the_page_names_every_note_and_its_file() -> None:
    notes = {
        (title, str(path.relative_to(SOURCE)))
        for path in SOURCE.rglob("*.py")
        for title in re.findall(r"^\s*NOTE \[ ([^\]]+) \]", path.read_text(), re.MULTILINE)
    }
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    table = page.partition("| note | file |\n|---|---|\n")[2].partition("\n\n")[0]
    rows = [re.fullmatch(r"\| (.+) \| `(.+)` \|", line) for line in table.splitlines()]
    assert {(title, row[2]) for row in rows if row for title in row[1].split("; ")} == notes
