"""Words and sentences: plain English and the field's terms, in sources, pages and the README.

It also runs as a script, on the files that are given: ``python tests/test_words.py src/spillway/session.py``.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

WORDS = {
    r"computed? again|run(s|ning)? again|ran again|re-run\w*|rerun\w*": "recompute; replay",
    r"sen[dt]s? away|(is|are|was|were) away|far away": "offload, is offloaded",
    r"com(e|es|ing) back|came back": "is reloaded",
    r"tapes?|outlines?|skim\w*|scribes?|belts?": "program, recorder, transfers",
    r"shel(f|ves)|pilots?|fates?|verdicts?|outsiders?": "store, controller, lifetimes, checks, tensors from outside",
    r"regions?": "checkpointed block, checkpointed function",
    r"lanes?": "stream",
    r"late hosts?|host is late|(un)?watched": "CPU-bound; traced",
    r"foretold|foretells?|foreseen": "predicted",
    r"stands? aside|stood aside": "is disabled",
    r"masters": "fp32 master weights",
    r"whole numbers?|truths": "integers, booleans",
    r"as ever|anew|till|none is": "unchanged, again, until, there is no",
    r"nobody|somebody|whoever|whomever": "the subject's name",
    r"rooms?": "package; memory",
}
"""Words that a reader of PyTorch would have to translate, and what to write."""

OPENINGS = ("Of", "What", "Where", "Whoever", "Whose")
"""No sentence begins with these."""

LONGEST = 34
"""Words in a sentence. About 20 is the aim."""

BANNED = re.compile("|".join(rf"\b(?:{words})\b" for words in WORDS), re.IGNORECASE)
_NO_PROSE = re.compile(r"``[^`]*``|:\w+:`[^`]*`|`[^`\n]*`|^\s*(>>>|\.\.\.).*$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_OPENING = re.compile(rf"(?:^|[.:!?]\s+|\n\s*(?:[-*#>|]+\s*)?)({'|'.join(OPENINGS)})\s+[a-z]")


def prose_of_page(text: str) -> str:
    """A page without code, addresses and comments."""
    text = re.sub(r"<!--.*?-->|<[a-z/][^>]*>", "", text, flags=re.S)
    text = re.sub(r"```.*?```|~~~.*?~~~", "", text, flags=re.S)
    return _LINK.sub(r"\1", re.sub(r"`[^`\n]*`", "x", text))


def prose_of_source(text: str) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and messages of a file, with their lines."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield (
                node.lineno,
                _NO_PROSE.sub("x", node.value),
            )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith(("#:", "# type:", "# noqa")):
            yield token.start[0], re.sub(r"`[^`]*`", "x", token.string.lstrip("# "))


def sentences(prose: str) -> Iterator[str]:
    """Sentences of running text: no tables, no headings, no lists of fields."""
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", prose):
        if "|" in paragraph or paragraph.lstrip().startswith("#"):
            continue
        yield from re.split(r"(?<=[.!?;:])\s+", " ".join(paragraph.split()))


def faults_of(prose: str) -> Iterator[str]:
    for found in BANNED.finditer(prose):
        word = found.group()
        better = next(better for words, better in WORDS.items() if re.fullmatch(words, word, re.IGNORECASE))
        yield f"{word!r}: write {better}"
    for found in _OPENING.finditer(prose):
        yield f"a sentence begins with {found.group(1)!r}: {' '.join(prose[found.start(1) :].split()[:6])}"
    for sentence in sentences(prose):
        if (count := len(sentence.split())) > LONGEST:
            yield f"a sentence of {count} words: {' '.join(sentence.split()[:8])} ..."


def faults_in(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    name = path.resolve().relative_to(ROOT)
    if path.suffix == ".py":
        return [f"{name}:{line}: {fault}" for line, prose in prose_of_source(text) for fault in faults_of(prose)]
    return [f"{name}: {fault}" for fault in faults_of(prose_of_page(text))]


def files() -> list[Path]:
    pages = [
        ROOT / "README.md",
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        ROOT / "CODE_OF_CONDUCT.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
    chinese = ROOT / "docs" / "zh"
    return [page for page in pages if chinese not in page.parents] + sorted((ROOT / "src").rglob("*.py"))


def test_the_check_finds_what_it_looks_for() -> None:
    assert list(faults_of("It is computed again. What leaves is kept.")) == [
        "'computed again': write recompute; replay",
        "a sentence begins with 'What': What leaves is kept.",
    ]
    assert not list(faults_of("Spillway offloads the tensor and reloads it before backward."))
    assert list(faults_of("word " * 40))
    assert [line for line, _ in prose_of_source('x = 1  # a note\n"""Some text."""\n')] == [2, 1]


def test_words_and_sentences_are_plain() -> None:
    faults = [fault for path in files() for fault in faults_in(path)]
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults)


if __name__ == "__main__":
    given = [Path(each) for each in sys.argv[1:]]
    found = [file for each in given for file in (sorted(each.rglob("*.[pm][yd]")) if each.is_dir() else [each])]
    faults = [fault for path in found for fault in faults_in(path)]
    print("\n".join(faults))
    sys.exit(bool(faults))
