"""The site of the documentation: what it is made of, and, where MkDocs is installed, that it can be built."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import spillway

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = DOCS / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_every_page_is_in_the_navigation_and_once() -> None:
    named = re.findall(r"([\w/-]+\.md)$", SETTINGS[SETTINGS.index("\nnav:") :], re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What the headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}


def test_every_link_between_files_leads_somewhere() -> None:
    pages = [ROOT / "README.md", ROOT / "README.zh-CN.md", *DOCS.rglob("*.md")]
    seen = 0
    for page in pages:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([\w.-]+))?\)", without_code(page)):
            if "://" in target:
                continue
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{page.name}: {target}#{anchor}"
            seen += 1
    assert seen > 150


def test_the_files_that_pages_name_exist() -> None:
    root = DOCS.parent
    folders = {path.name for path in (root / "src" / "spillway").iterdir() if path.is_dir()}
    pages = [*DOCS.rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    named = {name for page in pages for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", page.read_text("utf-8"))}
    ours = {name for name in named if name.split("/")[0] in folders}
    assert len(ours) > 40
    assert not [name for name in ours if not (root / "src" / "spillway" / name).is_file()]


def test_every_public_name_is_in_the_reference() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md")))
    names = re.findall(r"^::: (spillway\.[\w.]+)$", text, re.MULTILINE)
    assert len(names) == len(set(names))
    shown = {name.removeprefix("spillway.") for name in names}
    assert re.search(r"^::: spillway\.errors\n    options:\n      members: true$", text, re.MULTILINE)
    errors = importlib.import_module("spillway.errors")
    shown |= {each for each, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert set(spillway.__all__) - shown == {"__version__"}


# Pictures.


def test_the_pictures_are_what_the_script_draws() -> None:
    drawn = module(PICTURES / "draw.py").PICTURES
    assert set(drawn) >= {"step", "entry", "streams", "plan"}
    for name, draw in drawn.items():
        assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == draw()


@pytest.mark.parametrize("name", ["step", "entry", "streams", "plan"])
def test_a_picture_holds_all_of_its_words_and_takes_the_colour_around_it(name: str) -> None:
    root = ElementTree.parse(PICTURES / f"{name}.svg").getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert root.attrib["role"] == "img" and root.attrib["aria-label"]
    for text in root.iter(f"{SVG}text"):
        # About the width of a letter of this size.
        long = 6.3 * len(text.text or "")
        left = float(text.attrib["x"]) - (long / 2 if text.attrib["text-anchor"] == "middle" else 0)
        assert left >= 0 and left + long <= width and 0 < float(text.attrib["y"]) <= height, text.text
        assert "fill" not in text.attrib
    style = root.find(f"{SVG}style")
    assert style is not None and style.text is not None
    assert "prefers-color-scheme:dark" in style.text and "text{fill:currentColor}" in style.text


def test_a_picture_stands_in_its_page() -> None:
    page = module(DOCS / "inline.py").on_page_content
    made = page('<p><img alt="A step" src="../pictures/step.svg" /> and <img alt="" src="pictures/photo.png" /></p>')
    assert made.startswith("<p><svg ") and made.endswith('</svg> and <img alt="" src="pictures/photo.png" /></p>')


# Docstrings.


@pytest.fixture
def markdown() -> object:
    pytest.importorskip("griffe", reason="the site's extra is not installed: pip install 'spillway[docs]'")
    return module(DOCS / "roles.py")


def test_roles_become_links_and_code_becomes_fenced(markdown: ModuleType) -> None:
    import griffe

    scope = griffe.visit("spillway.some", filepath=Path("some.py"), code="class Thing: ...\n")
    text = (
        "Gives ``x``, a :class:`Thing`, or :func:`~spillway.plan`; see :mod:`a <spillway.types>`.\n\n"
        "So::\n\n    y = 1\n\nEnd."
    )
    assert markdown.markdown(text, scope).splitlines() == [
        'Gives `x`, a <autoref optional identifier="spillway.some.Thing">`Thing`</autoref>, or '
        '<autoref optional identifier="spillway.plan">`plan`</autoref>; see '
        '<autoref optional identifier="spillway.types">`a`</autoref>.',
        "",
        "So:",
        "",
        "```python",
        "y = 1",
        "```",
        "",
        "End.",
    ]
    flagged = "Example:\n    >>> y = 1  # doctest: +SKIP"
    assert markdown.markdown(flagged, scope) == "Examples:\n    >>> y = 1"


# All of it.


class Fetched(HTMLParser):
    """What a browser fetches for a page without being asked."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video", "audio", "embed"):
            self.urls += [values.get("src") or ""]
        if tag == "link" and values.get("rel") not in ("canonical", "next", "prev"):
            self.urls += [values.get("href") or ""]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_warning_and_fetches_nothing_from_the_network(tmp_path: Path) -> None:
    for needed in ("material", "mkdocstrings"):
        pytest.importorskip(needed, reason="the site's extra is not installed: pip install 'spillway[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))
    for page in pages:
        fetched = Fetched()
        fetched.feed(page.read_text(encoding="utf-8"))
        assert not [url for url in fetched.urls if re.match(r"\w+:|//", url)], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet
    reference = "".join(page.read_text(encoding="utf-8") for page in (tmp_path / "reference").glob("*.html"))
    assert all(f'id="spillway.{name}"' in reference for name in ("offload", "attach", "Session", "plan", "StepStats"))
    assert not re.search(r'id="spillway\.[\w.]*\._(?!_call__)', reference)
    assert not re.search(r":(?:class|func|meth|attr|data|mod):|\.\. \w+::|doctest:|</?autoref", reference)
    assert '<svg xmlns="http://www.w3.org/2000/svg" class="picture"' in (tmp_path / "index.html").read_text()
    # The index is a script, since pages in files may not fetch; what it is of can be looked for.
    index = json.loads((tmp_path / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert (tmp_path / "search" / "search_index.js").exists()
    assert any("CorruptError" in entry["text"] for entry in index["docs"])
    assert not list(tmp_path.rglob("*.py"))
