"""Weights that the callback of Lightning streams: the bits of the same fit without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import spillway
from budgets import hardware
from integrations.fits import Course, Gan, Recorded, assert_untouched, fit, loader, trainer_of
from spillway.integrations.lightning import SpillwayCallback
from spillway.saved_tensors.identity import is_streamed
from steps import assert_nothing_left

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.timeout(240),
]

NAMED: dict[str, Any] = {"stream": "blocks.*"}
AUTO: dict[str, Any] = {"stream": "auto", "budget": "1TiB", "hardware": hardware()}

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "mixed": {"precision": "bf16-mixed", "val_check_interval": 2},
}


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session(window=4096) as session:
        yield session
        assert_nothing_left(session)


class Adapted(Recorded):
    """The large weights of its blocks are frozen."""

    def make(self) -> None:
        super().make()
        for block in self.net.blocks:
            block.up.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.AdamW(trained, lr=0.01)


class Offloaded(Recorded):
    """All weights are stepped by an optimizer that is made in the fit."""

    session: spillway.Session
    options: dict[str, Any] = {}

    def configure_optimizers(self) -> Any:
        self.made = spillway.OffloadedOptimizer(
            self.parameters(), torch.optim.AdamW, lr=0.01, session=self.session, **self.options
        )
        return [self.made], [torch.optim.lr_scheduler.StepLR(self.made, 1, 0.5)]


class Counts(Callback):
    """Notes how many weights are streamed after each batch."""

    def __init__(self) -> None:
        self.trained: list[int] = []
        self.evaluated: list[int] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        self.trained.append(sum(map(is_streamed, pl_module.parameters())))

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        self.evaluated.append(sum(map(is_streamed, pl_module.parameters())))


@pytest.fixture(params=[Adapted, Offloaded])
def kind(request: pytest.FixtureRequest, session: spillway.Session, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Offloaded, "session", session, raising=False)
    return request.param


def fitted(kind: type[Recorded], session: spillway.Session, way: dict[str, Any] | None, **options: Any) -> Course:
    """A fit whose optimizer is closed in the end."""
    more = options.pop("callbacks", [])
    ours = [] if way is None else [SpillwayCallback(session=session, min_bytes=0, **way)]
    course = fit(kind, *ours, *more, **options)
    assert_untouched(course.module)
    assert not any(map(is_streamed, course.module.parameters()))
    if isinstance(course.module, Offloaded):
        course.module.made.close()
    return course


@pytest.mark.parametrize("way", [NAMED, AUTO], ids=["named", "auto"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.covered
def test_a_fit_has_the_bits_of_one_without(
    kind: type[Recorded], way: dict[str, Any], setting: str, session: spillway.Session
) -> None:
    counts, options = Counts(), SETTINGS[setting]
    # An evaluation after each epoch, and one before.
    ours = fitted(kind, session, way, callbacks=[counts], max_epochs=4, **options)
    assert ours == fitted(kind, session, None, max_epochs=4, **options)
    of_blocks = sum(each.requires_grad is (kind is Offloaded) for each in ours.module.net.blocks.parameters())
    assert counts.trained[0] == of_blocks > 0 == counts.evaluated[0]
    if way is NAMED:
        assert set(counts.trained) == set(counts.evaluated[1:]) == {of_blocks}


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:Checkpoint directory .* exists")
def test_checkpoints_hold_nothing_of_it_and_a_fit_goes_on_from_one(
    kind: type[Recorded], session: spillway.Session, tmp_path: Path
) -> None:
    found: list[Any] = []
    for name, way in (("plain", None), ("ours", NAMED)):
        keeps = ModelCheckpoint(dirpath=tmp_path / name, filename="first", save_top_k=-1)
        options: dict[str, Any] = {"enable_checkpointing": True, "max_epochs": 1}
        fitted(kind, session, way, callbacks=[keeps], **options)
        assert b"spillway" not in (tmp_path / name / "first.ckpt").read_bytes().lower()
        found.append(torch.load(tmp_path / name / "first.ckpt", weights_only=False))
    plain, ours = found
    assert_same(ours["state_dict"], plain["state_dict"])
    assert_same(ours["optimizer_states"], plain["optimizer_states"])
    courses = []
    for name, way in (("plain", None), ("ours", NAMED), ("plain", NAMED), ("ours", None)):
        options = {"enable_checkpointing": True, "max_epochs": 3, "ckpt_path": str(tmp_path / name / "first.ckpt")}
        courses.append(fitted(kind, session, way, callbacks=[ModelCheckpoint(tmp_path / "again")], **options))
    assert all(each == courses[0] for each in courses[1:])
    assert courses[0].trainer.global_step == 3 * len(loader())


def assert_same(one: Any, other: Any) -> None:
    """Compare state dictionaries, bit for bit."""
    torch.testing.assert_close(one, other, rtol=0, atol=0)


class TwoOffloaded(Gan):
    """Each of two models has an optimizer of its own."""

    session: spillway.Session

    def configure_optimizers(self) -> Any:
        self.made = [
            spillway.OffloadedOptimizer(each.parameters(), torch.optim.SGD, lr=0.01, session=self.session)
            for each in (self.generator, self.critic)
        ]
        return self.made


def test_each_model_has_the_optimizer_of_its_own_weights(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TwoOffloaded, "session", session, raising=False)
    courses, counts = [], Counts()
    for callbacks in ([SpillwayCallback(session=session, min_bytes=0, **NAMED), counts], []):
        courses.append(fit(TwoOffloaded, *callbacks))
        for each in courses[-1].module.made:
            each.close()
    assert courses[0] == courses[1]
    module = courses[0].module
    assert counts.trained[-1] == sum(1 for each in (module.generator, module.critic) for _ in each.blocks.parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_fit_that_fails_leaves_nothing_behind(
    kind: type[Recorded], error: type[BaseException], session: spillway.Session
) -> None:
    made: list[Any] = []

    def failing() -> Recorded:
        made.append(kind())
        made[0].fails_at, made[0].error = 2, error
        return made[0]

    ours = SpillwayCallback(session=session, min_bytes=0, **NAMED)
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        fit(failing, ours)
    assert list(ours.attached) == ["net"]
    assert_untouched(made[0])
    assert not any(map(is_streamed, made[0].parameters()))
    if kind is Offloaded:
        made[0].made.close()


def test_an_optimizer_that_cannot_step_streamed_weights_is_refused(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offloaded, "session", session, raising=False)
    monkeypatch.setattr(Offloaded, "options", {"fraction": 0.5})
    module = Offloaded()
    with pytest.raises(spillway.UsageError, match="got an optimizer with a fraction or a device_budget"):
        trainer_of(SpillwayCallback(session=session, min_bytes=0, **NAMED)).fit(module, loader())
    assert_untouched(module)
    module.made.close()


def test_without_frozen_weights_and_with_a_plain_optimizer_there_is_nothing_to_stream(
    session: spillway.Session,
) -> None:
    module = Recorded()
    with pytest.raises(spillway.UsageError, match="3 blocks without a parameter that can be streamed"):
        trainer_of(SpillwayCallback(session=session, min_bytes=0, **AUTO)).fit(module, loader())
    assert_untouched(module)


def test_without_streamed_weights_the_optimizer_is_left_as_it_is(
    session: spillway.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Offloaded, "session", session, raising=False)
    ours = SpillwayCallback(session=session, min_bytes=0, budget="1TiB", hardware=hardware())
    course = fit(Offloaded, ours)
    assert ours.attached["net"].plan is not None and ours.attached["net"].plan.optimizer_fraction is None
    course.module.made.close()
