"""What a notebook shows of Spillway's objects, and the notebook of the examples."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path
from typing import Any

import pytest

import spillway
from running.scripts import keep_hardware
from spillway.units import format_html

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"


class Tags(html.parser.HTMLParser):
    """All tags are closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def text_of(shown: Any) -> str:
    tags = Tags()
    tags.feed(shown._repr_html_())
    assert tags.open == []
    return tags.text


@pytest.mark.timeout(120)
def test_the_notebook_runs_and_its_objects_are_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPILLWAY_CACHE", str(keep_hardware(tmp_path / "cache")))
    cells = [
        "".join(each["source"]) for each in json.loads(NOTEBOOK.read_text())["cells"] if each["cell_type"] == "code"
    ]
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = {}
    for cell in cells:
        exec(compile(cell, str(NOTEBOOK), "exec"), names)
        last = cell.splitlines()[-1]
        if last in names:
            shown[last] = text_of(names[last])
    assert list(shown) == ["stats", "profile", "plan", "attached"]
    assert "recomputed_bytes" not in shown["stats"] and "recomputed " in shown["stats"]
    assert "reloaded_bytes" in shown["stats"]
    assert "5 like 1: 7 operators save" in shown["profile"] and str(names["profile"]) in shown["profile"]
    assert shown["plan"].replace("\n", "") == str(names["plan"]).replace("\n", "")
    assert "Attached to Sequential, 6 blocks" in shown["attached"] and "peak" in shown["attached"]


def test_html_is_escaped() -> None:
    assert format_html("<b>&\n<i>") == "<details><summary>&lt;b&gt;&amp;</summary><pre>&lt;i&gt;</pre></details>"
    assert text_of(spillway.StepStats(saved_bytes=1 << 20, notes=("a < b",))).endswith("a < b")
