"""The callback of Lightning: the same bits as without it, and nothing left behind, however a fit goes."""

from __future__ import annotations

import copy
import os
import pickle
import re
import runpy
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import spillway
from budgets import budget_of, hardware
from integrations.fits import (
    BATCH,
    FEATURES,
    WAYS,
    Gan,
    Looping,
    Net,
    Own,
    Pair,
    Recorded,
    Within,
    assert_untouched,
    fit,
    loader,
    trainer_of,
)
from spillway.attaching.call import PLACE
from spillway.integrations.lightning import SpillwayCallback
from steps import assert_nothing_left

pytestmark = [
    # Of loaders without workers, and of a fit of fewer batches than there are between two lines of a log.
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    # Lightning 2.6 asks torch 2.13 for a class that has a new name.
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.timeout(240),
]


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    # Of 4 KiB: nearly all leaves. A plan needs a window.
    with spillway.Session(window=4096) as session:
        yield session
        assert_nothing_left(session)


def callback(way: str, session: spillway.Session, **options: Any) -> SpillwayCallback:
    return SpillwayCallback(session=session, min_bytes=0, **{**WAYS[way], **options})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "found"),
    [(Recorded, ["net"]), (Own, [""]), (Within, ["outer.inner"])],
)
def test_what_a_step_calls_is_attached(
    make: type[Recorded], found: list[str], way: str, session: spillway.Session
) -> None:
    # With an offload policy, whatever has parameters counts.
    found = [*found, "outer.head"] if way == "offload" and make is Within else found
    ours = callback(way, session)
    course = fit(make, ours)
    assert list(ours.attached) == found
    assert course == fit(make)
    stats = ours.attached[found[0]].stats()
    assert (stats.offloaded_bytes > 0) == (way != "budget")
    assert (stats.recomputed_bytes > 0) == (way == "regions")
    assert (ours.attached[found[0]].stage == "active") == (way == "budget")
    assert_untouched(course.module)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "16-true"},
        {"precision": "64-true"},
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "val_check_interval": 2},
        {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2, "max_epochs": 3},
        {"detect_anomaly": True},
    ],
    ids=lambda options: ", ".join(f"{name} {value}" for name, value in options.items()),
)
def test_a_fit_is_the_same_with_every_option(options: dict[str, Any], session: spillway.Session) -> None:
    ours = callback("regions", session)
    course = fit(Recorded, ours, **options)
    assert course == fit(Recorded, **options)
    assert ours.attached["net"].stats().recomputed_bytes > 0


@pytest.mark.parametrize("way", ["regions", "offload"])
def test_two_models_that_take_turns_are_both_attached(way: str, session: spillway.Session) -> None:
    ours = callback(way, session)
    course = fit(Gan, ours)
    assert course == fit(Gan)
    assert sorted(ours.attached) == ["critic", "generator"]
    assert all(each.stats().offloaded_bytes > 0 for each in ours.attached.values())
    assert_untouched(course.module)


def test_each_of_two_models_may_have_a_callback_of_its_own(session: spillway.Session) -> None:
    budget = callback("budget", session, model="critic")
    offload = callback("offload", session, model="generator")
    course = fit(Gan, budget, offload, max_epochs=3)
    assert course == fit(Gan, max_epochs=3)
    assert (list(budget.attached), list(offload.attached)) == (["critic"], ["generator"])
    assert budget.attached["critic"].stage == "active"
    assert offload.attached["generator"].stats().offloaded_bytes > 0


@pytest.mark.parametrize("way", ["regions", "offload"])
def test_two_models_in_one_step_are_both_attached(way: str, session: spillway.Session) -> None:
    ours = callback(way, session)
    assert fit(Pair, ours) == fit(Pair)
    assert sorted(ours.attached) == ["decoder", "encoder"]


def test_a_plan_that_was_made_before_is_held_from_the_first_step(session: spillway.Session) -> None:
    torch.manual_seed(0)
    profile = spillway.profile(Net(), torch.randn(BATCH, FEATURES), session=session)
    plan = spillway.plan(profile, budget=budget_of(profile, 0.3), hardware=hardware(), window=4096)
    assert not all(block.plain for block in plan.blocks)
    ours = SpillwayCallback(plan=plan, min_bytes=0, session=session)
    assert fit(Recorded, ours) == fit(Recorded)
    assert ours.attached["net"].plan is plan
    assert ours.attached["net"].stats().recomputed_bytes > 0


def test_what_is_around_an_attached_model_may_be_called_too(session: spillway.Session) -> None:
    class Around(Recorded):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def predicted(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x) - self(2 * x)

    ours = callback("regions", session)
    assert fit(Around, ours) == fit(Around)
    assert list(ours.attached) == ["net"]


def test_an_optimizer_that_asks_again_gets_the_same(session: spillway.Session) -> None:
    class Asking(Recorded):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    ours = callback("regions", session)
    course = fit(Asking, ours)
    assert course == fit(Asking)
    assert len(course.module.seen) > len(loader()) * 3


def test_an_average_of_weights_copies_nothing_of_it(session: spillway.Session) -> None:
    class Late(WeightAveraging):
        """Copies the model when it is attached, too."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            super().on_train_batch_end(trainer, pl_module, *others)
            assert pl_module.net.__dict__.get(PLACE) is not None
            self.copy = copy.deepcopy(pl_module)

    late = Late()
    course = fit(Recorded, callback("regions", session), late)
    assert course == fit(Recorded, WeightAveraging())
    assert not [each for each in late.copy.modules() if each.__dict__.get(PLACE) is not None]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ValueError("in backward")


class BreaksBackward(Recorded):
    def predicted(self, x: torch.Tensor) -> torch.Tensor:
        y = super().predicted(x)
        return Broken.apply(y) if len(self.seen) > 40 and self.training else y


class BreaksForward(Recorded):
    def make(self) -> None:
        super().make()
        self.net.blocks[1].register_forward_hook(self.complain)

    def complain(self, *args: object) -> None:
        if len(self.seen) > 40 and self.training:
            raise ValueError("in a block")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("make", "error"),
    [(Recorded, ValueError), (Recorded, KeyboardInterrupt), (BreaksForward, ValueError), (BreaksBackward, ValueError)],
)
def test_a_fit_that_fails_leaves_nothing_behind(
    make: type[Recorded], error: type[BaseException], way: str, session: spillway.Session
) -> None:
    made: list[Recorded] = []

    def failing() -> Recorded:
        module = make()
        made.append(module)
        if make is Recorded:
            module.fails_at, module.error = 2, error
        return module

    ours = callback(way, session)
    # Lightning ends the process where somebody interrupts.
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(failing, ours)
    assert "net" in ours.attached
    assert_untouched(made[0])
    # The callback can be used again.
    assert fit(Recorded, ours) == fit(Recorded)


def test_a_budget_that_cannot_be_met_ends_the_fit_and_leaves_nothing_behind(session: spillway.Session) -> None:
    ours = callback("budget", session, budget="1MiB")
    module = Recorded()
    with pytest.raises(spillway.BudgetError, match="smallest feasible budget"):
        trainer_of(ours).fit(module, loader())
    assert_untouched(module)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_checkpoint_holds_nothing_of_it_and_training_goes_on_from_it(
    session: spillway.Session, tmp_path: Path
) -> None:
    saved: dict[str, bytes] = {}
    for name, callbacks in (("plain", []), ("ours", [callback("regions", session)])):
        keeps = ModelCheckpoint(dirpath=tmp_path / name, filename="first", every_n_epochs=1, save_top_k=-1)
        fit(Recorded, *callbacks, keeps, enable_checkpointing=True, max_epochs=1)
        text = (tmp_path / name / "first.ckpt").read_bytes()
        assert b"spillway" not in text.lower()
        contents = torch.load(tmp_path / name / "first.ckpt", weights_only=False)
        # It is named after the folder that it is in.
        contents["callbacks"] = {}
        saved[name] = pickle.dumps(contents)
    assert len(saved["plain"]) == len(saved["ours"])
    path = str(tmp_path / "ours" / "first.ckpt")
    options = {"enable_checkpointing": True, "max_epochs": 3}
    courses = [
        fit(Recorded, *callbacks, ModelCheckpoint(tmp_path / f"{name} again"), ckpt_path=path, **options)
        for name, callbacks in (("plain", []), ("ours", [callback("regions", session)]))
    ]
    assert courses[0] == courses[1]
    assert courses[0].trainer.global_step == 3 * len(loader())


def test_a_fit_in_which_no_batch_is_trained_finds_nothing_and_says_nothing(session: spillway.Session) -> None:
    ours = callback("regions", session)
    trainer_of(ours, limit_train_batches=0).fit(Recorded(), loader())
    trainer_of(ours).validate(Recorded(), loader(), verbose=False)
    assert not ours.attached


def test_a_frozen_teacher_is_left_alone(session: spillway.Session) -> None:
    class Taught(Recorded):
        def make(self) -> None:
            super().make()
            self.teacher = Net().requires_grad_(False)

        def predicted(self, x: torch.Tensor) -> torch.Tensor:
            return self.teacher(x) - self.net(x)

    ours = callback("budget", session)
    assert fit(Taught, ours) == fit(Taught)
    assert list(ours.attached) == ["net"]


# What is refused.


def refused(module: Recorded, *callbacks: Callback, match: str) -> None:
    with pytest.raises(spillway.UsageError, match=match):
        trainer_of(*callbacks).fit(module, loader())
    assert_untouched(module)


def test_a_step_that_calls_no_module_with_blocks_is_told_so_after_one_batch(session: spillway.Session) -> None:
    module = Looping()
    refused(
        module,
        callback("regions", session),
        match=r"Looping called 'net.stem', 'net.blocks.0', .*move the loop.*About 'net.stem': .*repeats no block",
    )
    assert module.global_step == 1
    # A policy needs no blocks.
    offload = callback("offload", session)
    assert fit(Looping, offload) == fit(Looping)
    assert "net.blocks.1.up" not in offload.attached and "net.blocks.1" in offload.attached


def test_a_model_that_no_step_calls_is_named(session: spillway.Session) -> None:
    ours = callback("regions", session, model="outer.head")
    assert fit(Recorded, callback("regions", session, model="net")) == fit(Recorded)
    module = Within()
    module.outer["spare"] = Net()
    refused(
        module,
        callback("regions", session, model="outer.spare"),
        match=r"of Within has called 'outer.spare'",
    )
    assert module.global_step == len(loader())
    refused(
        Within(), callback("regions", session, model="inner"), match=r"got 'inner', expected the name .*'outer.inner'"
    )
    refused(Within(), ours, match="repeats no block")


def test_two_models_under_one_budget_are_refused(session: spillway.Session) -> None:
    refused(Pair(), callback("budget", session), match=r"calls 'encoder' and 'decoder', but a budget")
    both = [callback("budget", session, model=name) for name in ("encoder", "decoder")]
    refused(Pair(), *both, match="2 SpillwayCallbacks, and several have a budget")
    both = [callback("regions", session, model=name) for name in ("encoder", None)]
    refused(Pair(), *both, match="2 SpillwayCallbacks, and one has no model")
    both = [callback("regions", session, model=name) for name in ("encoder", "decoder")]
    assert fit(Pair, *both) == fit(Pair)


def test_what_attach_refuses_is_refused_in_the_first_step(session: spillway.Session) -> None:
    checkpoints = Recorded()
    checkpoints.net.blocks[0] = checkpoint_wrapper(checkpoints.net.blocks[0])
    refused(checkpoints, callback("regions", session), match="checkpoints already")
    assert not checkpoints.seen
    refused(Recorded(), callback("regions", session, blocks="layers.*"), match=r"called 'net'.*got 'layers\.\*'")


def test_what_is_compiled_meanwhile_is_told(session: spillway.Session) -> None:
    class Compiles(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
            pl_module.net.blocks[0].compile(backend="eager")

    module = Recorded()
    with pytest.raises(spillway.UsageError, match="compiled after attaching"):
        trainer_of(callback("regions", session), Compiles()).fit(module, loader())
    assert [name for name, each in module.named_modules() if PLACE in each.__dict__] == ["net.blocks.0"]


def test_options_that_attach_does_not_have_are_refused_at_once() -> None:
    with pytest.raises(spillway.UsageError, match=r"no option 'buget'; perhaps 'budget' .* there are policy, blocks"):
        SpillwayCallback(buget="1GiB")
    with pytest.raises(spillway.UsageError, match="every: got 0"):
        SpillwayCallback(every=0)
    with pytest.raises(spillway.UsageError, match="expected the name of a module"):
        SpillwayCallback(model=Net())  # type: ignore[arg-type]


def test_it_is_a_callback_of_the_package_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    other = types.ModuleType("pytorch_lightning")
    other.Callback = type("OtherCallback", (), {})  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
            patch.delitem(sys.modules, name)
        patch.delitem(sys.modules, "spillway.integrations.lightning")
        patch.setitem(sys.modules, "pytorch_lightning", other)
        again = runpy.run_module("spillway.integrations.lightning")
    assert again["SpillwayCallback"].__mro__[1] is other.Callback  # type: ignore[attr-defined]
    assert SpillwayCallback.__mro__[1] is Callback


def test_the_snippets_of_its_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "integrations" / "lightning.md"
    snippets = re.findall(r"^( *)```python\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 4
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "snippets"}
    for _, snippet in snippets:
        exec(textwrap.dedent(snippet), names)
    assert [each._options.options.get("budget") for each in names["callbacks"]] == ["40GiB", None]


WITH_THE_OTHER = """
import pytorch_lightning
from spillway.integrations.lightning import SpillwayCallback
assert issubclass(SpillwayCallback, pytorch_lightning.Callback)
import sys
assert "lightning" not in sys.modules
sys.modules["lightning"], sys.modules["lightning.pytorch"] = pytorch_lightning, pytorch_lightning
from integrations.fits import Recorded, fit
import spillway
ours = SpillwayCallback(policy=spillway.Recompute(offload="inputs"), min_bytes=0)
assert fit(Recorded, ours) == fit(Recorded)
assert ours.attached["net"].stats().recomputed_bytes > 0
"""


@pytest.mark.long
def test_a_fit_of_the_other_package_is_the_same() -> None:
    pytest.importorskip("pytorch_lightning")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", WITH_THE_OTHER], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
