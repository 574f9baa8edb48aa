"""Puts pictures into the page itself, so that they take its colours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PICTURE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="(?:\.\./)*(?P<path>pictures/[\w-]+\.svg)"\s*/?>')


def on_page_content(html: str, **kwargs: Any) -> str:
    """Puts each drawing of ``docs/pictures`` where its image was.

    Args:
        html: a page's content.
        kwargs: what else MkDocs gives, which is not needed.
    """
    return PICTURE.sub(lambda match: (DOCS / match["path"]).read_text(encoding="utf-8").strip(), html)
