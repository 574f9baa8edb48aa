"""Docstrings as the site shows them: roles and literal blocks of Sphinx become Markdown, when they are collected."""

from __future__ import annotations

import re
import textwrap
from html import escape
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:class|func|meth|attr|data|exc|mod|obj):`(?P<short>~?)(?P<target>[\w.]+)(?:\(\))?`")
TITLED = re.compile(r":(?:py:)?(?:class|func|meth|attr|data|exc|mod|obj):`(?P<title>[^`<]+?)\s*<(?P<target>[\w.]+)>`")
LITERAL = re.compile(r"^(?P<indent> *)(?P<words>[^\n]*)::\n\n(?P<code>(?:(?P=indent) +[^\n]*\n|[ ]*\n)+)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)
FLAGS = re.compile(r" *# doctest: \+\w+$", re.MULTILINE)
DOUBLE = re.compile(r"(?<!`)``([^`]+)``(?!`)")


def linked(title: str, target: str) -> str:
    """A reference that is a link where the site has the name, and plain code where it has not."""
    return f'<autoref optional identifier="{escape(target)}">`{title}`</autoref>'


def fenced(match: re.Match[str]) -> str:
    indent, code = match["indent"], textwrap.dedent(match["code"]).strip("\n")
    language = "python" if re.search(r"^(with|from|import|for|def|>>>|@)\b|[=(]", code, re.MULTILINE) else "text"
    if re.search("[├└│─]", code):
        language = "text"
    block = "\n".join([f"```{language}", code, "```"])
    words = f"{indent}{match['words'].rstrip()}:\n\n" if match["words"].strip() else ""
    return words + textwrap.indent(block, indent) + "\n\n"


def markdown(text: str, scope: griffe.Object) -> str:
    """A docstring in Markdown.

    Args:
        text: it, with Sphinx's roles, literal blocks and double backticks.
        scope: whose it is: names without a path are looked up from there.
    """

    def target(name: str) -> str:
        try:
            return scope.resolve(name)
        except griffe.NameResolutionError:
            return name if name.startswith("spillway.") else f"spillway.{name}"

    def role(match: re.Match[str]) -> str:
        name = match["target"]
        return linked(name.rpartition(".")[2] if match["short"] else name, target(name))

    text = EXAMPLE.sub(r"\1Examples:", FLAGS.sub("", text))
    text = LITERAL.sub(fenced, text + "\n").rstrip("\n")
    text = TITLED.sub(lambda match: linked(match["title"], target(match["target"])), text)
    return DOUBLE.sub(r"`\1`", ROLE.sub(role, text))


class Roles(griffe.Extension):
    """Rewrites each docstring once, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            scope = obj if obj.is_module or obj.is_class else (obj.parent or obj)
            obj.docstring.value = markdown(obj.docstring.value, scope)
