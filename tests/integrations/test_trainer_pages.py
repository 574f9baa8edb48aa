"""What the pages on trainers and loggers show, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import spillway
from integrations.llama import HARDWARE

PAGES = Path(__file__).parents[2] / "docs" / "integrations"

NEEDS = {"transformers": ["transformers", "accelerate"], "accelerate": ["accelerate"], "loggers": []}


@pytest.mark.parametrize("name", NEEDS)
def test_the_example_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for library in NEEDS[name]:
        pytest.importorskip(library, reason=f"{library} is not installed")
    if name == "accelerate":
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    monkeypatch.chdir(tmp_path)
    # Nobody measures a machine here.
    monkeypatch.setattr("spillway.attaching.budget.known_hardware", lambda device: HARDWARE)
    torch.manual_seed(0)
    code = re.findall(r"^```python\n(.*?)^```", (PAGES / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    assert code
    names: dict[str, Any] = {"__name__": "page"}
    with spillway.Session() as session, monkeypatch.context() as patch:
        patch.setattr(spillway.Session, "default", classmethod(lambda cls: session))
        exec(compile("\n".join(code), f"{name}.md", "exec"), names)


def test_the_table_of_loggers_has_all_names_of_a_plan() -> None:
    from spillway.integrations import loggers

    page = (PAGES / "loggers.md").read_text(encoding="utf-8")
    named = re.findall(r'yield "(plan/\w+)"', Path(loggers.__file__).read_text(encoding="utf-8"))
    assert len(named) == 8
    assert [name for name in named if f"`{name}`" not in page] == []
