"""The plugin for axolotl, through axolotl's interface: with axolotl itself where it is installed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pydantic
import pytest

import spillway
from integrations.llama import BUDGET, HARDWARE, llama, same, sentences, weights

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

PLUGIN = "spillway.integrations.axolotl.SpillwayPlugin"
STEPS = 7


class BasePlugin:
    """What a plugin inherits: each hook does nothing."""

    def register(self, cfg: Any) -> None: ...

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """axolotl's module of plugins, or a stand-in for it."""
    if importlib.util.find_spec("axolotl") is None:
        for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin  # type: ignore[attr-defined]
    yield
    sys.modules.pop(PLUGIN.rpartition(".")[0], None)


class Schema(pydantic.BaseModel):
    """As axolotl's own: one of its keys, to which those of plugins are added."""

    base_model: str | None = None


def named(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def configured(**keys: Any) -> tuple[Any, Any]:
    """The plugin, and the keys of a YAML file in axolotl's schema, which drops unknown ones."""
    plugin = named(PLUGIN)()
    plugin.register(keys)
    schema = type("Config", (Schema, named(plugin.get_input_args())), {})
    found: dict[str, Any] = schema(**keys).model_dump(exclude_none=True)
    defaults = {"spillway_budget": None, "spillway_host_budget": None}
    return plugin, SimpleNamespace(**defaults | found)


def trained(folder: Path, **keys: Any) -> tuple[list[Any], Any, Any]:
    model, callbacks, plugin = llama(), [], None
    if keys:
        plugin, config = configured(base_model="llama", **keys)
        assert plugin.callback is None
        callbacks = plugin.add_callbacks_pre_trainer(config, model)
    args = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        gradient_checkpointing=True,
    )
    trainer = transformers.Trainer(model, args, train_dataset=sentences(), callbacks=callbacks)
    trainer.train()
    return [each.get("loss") for each in trainer.state.log_history], weights(model), plugin


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
def test_a_budget_in_the_file_is_a_budget_of_the_trainer(
    base: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway.attaching.budget.known_hardware", lambda device: HARDWARE)
    given: list[dict[str, Any]] = []

    def attach(model: Any, **options: Any) -> spillway.Attached:
        given.append(options)
        return spillway.attach(model, **options)

    monkeypatch.setattr("spillway.integrations.attach", attach)
    losses, found, plugin = trained(tmp_path, spillway_budget=BUDGET, spillway_host_budget="1GiB")
    expected, wanted, _ = trained(tmp_path)
    assert losses == expected
    assert same(found, wanted)
    assert plugin.callback.attached.stage == "active"
    assert given == [{"budget": BUDGET, "host_budget": "1GiB"}]


def test_a_budget_in_the_file_may_be_a_share(base: None) -> None:
    assert configured(spillway_budget="60%")[1].spillway_budget == "60%"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "spillway_budget\n  Field required"),
        ({"spillway_budget": "12 parsecs"}, "spillway_budget\n.*12 parsecs"),
        ({"spillway_budget": "1GiB", "spillway_host_budget": "much"}, "spillway_host_budget\n.*much"),
    ],
    ids=["none", "budget", "host_budget"],
)
def test_a_file_without_a_proper_budget_is_refused(base: None, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        configured(**keys)
