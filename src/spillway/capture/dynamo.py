"""Keeps ``torch.compile`` out of the code here.

Below a compiled frame, Dynamo looks at every Python function that runs eagerly, hooks and finalisers too, and would
compile them. Where Dynamo is loaded, it is told once that the files of this package are not to be looked at; loading it
for that would take seconds.
"""

from __future__ import annotations

import sys
from typing import Any

_PACKAGE = __name__.partition(".")[0]


class _Told:
    done = False


def keep_out() -> None:
    """Tell Dynamo, if it is loaded and was not told."""
    if _Told.done:
        return
    # Another thread may be loading it just now.
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and hasattr(rules, "_recompile_re"):
        rules.add(_PACKAGE)
        _Told.done = True
