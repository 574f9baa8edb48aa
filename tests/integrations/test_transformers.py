"""transformers' own Trainer with a callback of ours, against the same trainer without it."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from integrations.llama import BUDGET, HARDWARE, WAYS, llama, pairs, same, sentences, weights
from spillway import Recompute, Session, UsageError
from spillway.attaching import attached_to
from spillway.saved_tensors.identity import is_streamed
from support import assert_nothing_left

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate, without which transformers has no Trainer, is not installed")

from spillway.integrations.transformers import SpillwayCallback  # noqa: E402

STEPS = 3


@dataclass
class Outcome:
    """What a training gave."""

    trainer: Any
    losses: list[float]
    norms: list[float]
    weights: list[Tensor]
    stats: list[spillway.StepStats] = field(default_factory=list)


class Watcher(transformers.TrainerCallback):
    """Takes down what the callback before it says of each step, and does more if asked."""

    def __init__(self, callback: SpillwayCallback | None) -> None:
        self.callback = callback
        self.stats: list[spillway.StepStats] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.callback is not None:
            self.stats.append(self.callback.attached.stats())


def arguments(folder: Path, **options: Any) -> Any:
    given = {"max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2}
    given |= {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    given |= {"dataloader_pin_memory": False}
    return transformers.TrainingArguments(str(folder), **given | options)


def train(
    folder: Path,
    callback: SpillwayCallback | None = None,
    *,
    make: Callable[[], nn.Module] = llama,
    optimizers: Callable[[nn.Module], Any] = lambda model: (None, None),
    resume: str | None = None,
    kind: type[Any] = transformers.Trainer,
    more: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    model = make()
    watcher = Watcher(callback)
    trainer = kind(
        model=model,
        args=arguments(folder, **options),
        train_dataset=sentences(uneven=True),
        eval_dataset=sentences(4),
        callbacks=[watcher] if callback is None else [callback, watcher],
        optimizers=optimizers(model),
        **more or {},
    )
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    losses = [entry["loss"] for entry in history if "loss" in entry]
    losses += [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    norms = [entry["grad_norm"] for entry in history if "grad_norm" in entry]
    return Outcome(trainer, losses, norms, weights(model), watcher.stats)


def compare(
    folder: Path,
    way: dict[str, Any],
    *,
    optimizers: Callable[[nn.Module], Any] = lambda model: (None, None),
    moves: bool = True,
    **options: Any,
) -> Outcome:
    """The same training twice, of which one has the callback, and nothing that is left of it."""
    plain = train(folder, optimizers=optimizers, **options)
    # Window 0: all that can leave has left before the forward ends. A plan wants some.
    with Session(window=0 if moves else None) as session:
        callback = SpillwayCallback(session=session, min_bytes=0, **way)
        ours = train(folder, callback, optimizers=optimizers, **options)
        assert attached_to(ours.trainer.model) is None
        gc.collect()
        assert_nothing_left(session)
    assert ours.losses == plain.losses
    assert ours.losses and all(map(math.isfinite, ours.losses))
    # Of a step that a scaler skips, it is none.
    assert same([torch.tensor(ours.norms).nan_to_num()], [torch.tensor(plain.norms).nan_to_num()])
    assert same(ours.weights, plain.weights)
    assert not moves or all(each.offloaded_bytes for each in ours.stats), "nothing moved: this proves nothing"
    return ours


def callback_of(trainer: Any) -> SpillwayCallback:
    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, SpillwayCallback))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "bf16": {"bf16": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 2},
    "smoothed": {"label_smoothing_factor": 0.1, "max_grad_norm": 0.0},
}


@pytest.mark.parametrize(("way", "setting"), pairs(WAYS, SETTINGS, usual=("saved_by", "plain")))
def test_losses_and_weights_are_those_of_the_trainer_without(tmp_path: Path, way: str, setting: str) -> None:
    ours = compare(tmp_path, WAYS[way], **SETTINGS[setting])
    recomputes = way in ("recompute", "saved_by")
    assert len(ours.stats) == STEPS
    assert all((each.recomputed_bytes > 0) == recomputes for each in ours.stats)


# An epoch has eight batches, of which the last update takes two.
@pytest.mark.parametrize(("setting", "passes"), [("plain", 6), ("accumulation", 16)])
def test_a_budget_is_planned_for_in_the_trainers_own_steps(tmp_path: Path, setting: str, passes: int) -> None:
    way = {"budget": BUDGET, "hardware": HARDWARE}
    ours = compare(tmp_path, way, moves=False, **{"max_steps": 6} | SETTINGS[setting])
    attached = callback_of(ours.trainer).attached
    assert attached.stage == "active"
    assert 99 << 30 < attached.plan.budget <= 100 << 30
    assert attached.passes == passes

    again = compare(tmp_path, {"plan": attached.plan}, moves=False)
    assert callback_of(again.trainer).attached.plan == attached.plan


class Scaling(transformers.Trainer):
    """A trainer that has on the CPU what accelerate gives it on a GPU with fp16: autocast and a scaler of losses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.accelerator.native_amp = True
        # The second step finds that it was too much, and is skipped.
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1)


def test_fp16_with_a_scaler(tmp_path: Path) -> None:
    ours = compare(tmp_path, WAYS["saved_by"], kind=Scaling, fp16=True, max_steps=4)
    assert isinstance(ours.trainer.accelerator.scaler, torch.amp.GradScaler)
    assert ours.trainer.optimizer.scaler is ours.trainer.accelerator.scaler
    assert ours.trainer.accelerator.scaler.get_scale() != 2.0**16


def test_an_optimizer_on_the_host(tmp_path: Path) -> None:
    made: list[spillway.OffloadedOptimizer] = []

    def optimizers(model: nn.Module) -> tuple[Any, None]:
        if attaches:
            made.append(spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2))
            return made[-1], None
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), None

    attaches = False
    plain = train(tmp_path, optimizers=optimizers, gradient_accumulation_steps=2)
    attaches = True
    with Session(window=0) as session:
        callback = SpillwayCallback(session=session, min_bytes=0, **WAYS["recompute"])
        ours = train(tmp_path, callback, optimizers=optimizers, gradient_accumulation_steps=2)
    assert made[0].stats().stepped_on_host == sum(p.numel() for p in ours.trainer.model.parameters())
    made[0].close()
    assert ours.losses == plain.losses
    assert ours.norms == plain.norms
    assert same(ours.weights, plain.weights)


@pytest.mark.parametrize(
    "way", [{"stream": "model.layers.*"}, {"stream": "auto", "budget": BUDGET}], ids=["named", "auto"]
)
def test_weights_that_are_streamed(tmp_path: Path, way: dict[str, Any]) -> None:
    """The trainer has its own optimizer, which the callback is told of."""
    found = []
    for more in (None, way):
        with Session() as session:
            model = llama()
            optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, session=session)
            callback = None
            if more is not None:
                options = {"hardware": HARDWARE, **more} if "budget" in more else more
                callback = SpillwayCallback(optimizer=optimizer, session=session, min_bytes=0, **options)
            given = {"make": lambda: model, "optimizers": lambda _: (optimizer, None), "max_steps": 10}  # noqa: B023
            found.append(train(tmp_path, callback, gradient_accumulation_steps=2, **given))
            if callback is not None:
                assert callback.attached is not None and (callback.attached.plan is not None) == ("budget" in way)
                assert not any(map(is_streamed, model.parameters()))
            optimizer.close()
    plain, ours = found
    assert (ours.losses, ours.norms) == (plain.losses, plain.norms) and same(ours.weights, plain.weights)


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path / "plain", **options)
    with Session(window=0) as session:
        way = {"session": session, "min_bytes": 0, **WAYS["recompute"]}
        first = train(tmp_path / "ours", SpillwayCallback(**way), **options)
        assert same(first.weights, whole.weights)
        resumed = train(
            tmp_path / "ours", SpillwayCallback(**way), resume=str(tmp_path / "ours" / "checkpoint-2"), **options
        )
        assert len(resumed.stats) == 2
    assert same(resumed.weights, whole.weights)
    assert resumed.losses == whole.losses
    names = sorted(path.name for path in (tmp_path / "plain" / "checkpoint-4").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours" / "checkpoint-4").iterdir()) == names
    saved = [(tmp_path / each / "checkpoint-4" / "model.safetensors").read_bytes() for each in ("plain", "ours")]
    assert saved[0] == saved[1]


class Interrupts(transformers.TrainerCallback):
    """Raises at the end of a step, once."""

    def __init__(self, where: str) -> None:
        self.where: str | None = where

    def raise_once(self, where: str, state: Any) -> None:
        if self.where == where and state.global_step == 1:
            self.where = None
            raise KeyboardInterrupt(where)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.raise_once("begin", state)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.raise_once("before the optimizer", state)


@pytest.mark.parametrize("where", ["begin", "before the optimizer"])
def test_a_step_that_raises_passes_and_the_next_training_is_as_without(tmp_path: Path, where: str) -> None:
    def interrupted(callback: SpillwayCallback | None) -> Any:
        callbacks = [Interrupts(where), *([] if callback is None else [callback])]
        trainer = transformers.Trainer(llama(), arguments(tmp_path), train_dataset=sentences(), callbacks=callbacks)
        with pytest.raises(KeyboardInterrupt, match=where):
            trainer.train()
        return trainer

    plain = interrupted(None)
    plain.train()
    with Session(window=0) as session:
        way = {"session": session, "min_bytes": 0, **WAYS["recompute"]}
        callback = SpillwayCallback(**way)
        ours = interrupted(callback)
        assert attached_to(ours.model) is callback.attached
        ours.train()
        assert same(weights(ours.model), weights(plain.model))
        assert attached_to(ours.model) is None

        # Another trainer of the same model, as after an interrupt in a notebook.
        left = SpillwayCallback(**way)
        again = interrupted(left)
        other = SpillwayCallback(**way)
        transformers.Trainer(again.model, arguments(tmp_path), train_dataset=sentences(), callbacks=[other]).train()
        assert attached_to(again.model) is None
        assert other.attached is not left.attached

        # Without another training: by its handle.
        within = SpillwayCallback(**way)
        model = interrupted(within).model
        assert attached_to(model) is within.attached is not None
        within.attached.remove()
        assert attached_to(model) is None
        del model
        gc.collect()
        assert_nothing_left(session)


def test_what_the_user_attached_is_not_taken_off(tmp_path: Path) -> None:
    model = llama()
    attached = spillway.attach(model)
    trainer = transformers.Trainer(
        model, arguments(tmp_path), train_dataset=sentences(), callbacks=[SpillwayCallback(policy=Recompute())]
    )
    with pytest.raises(UsageError, match="attached already"):
        trainer.train()
    assert attached_to(model) is attached


def test_a_class_is_a_callback_too_and_evaluation_is_as_ever(tmp_path: Path) -> None:
    trainer = transformers.Trainer(
        llama(),
        arguments(tmp_path),
        train_dataset=sentences(),
        eval_dataset=sentences(4),
        callbacks=[SpillwayCallback],
    )
    trainer.train()
    callback = callback_of(trainer)
    assert callback.attached.blocks == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert callback.attached.stats().recomputed_bytes > 0
    assert callback.attached.passes == STEPS
    trainer.evaluate()
    assert callback.attached.passes == STEPS


# Refusals.


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"torch_compile": True}, "torch_compile"),
    ],
)
def test_what_the_trainer_does_itself_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    options = arguments(tmp_path, **{} if "torch_compile" in given else given)
    # Said afterwards, since it would be read from the environment by whoever comes next.
    options.torch_compile = given.get("torch_compile", False)
    model = llama()
    trainer = transformers.Trainer(
        model, options, train_dataset=sentences(), callbacks=[SpillwayCallback(policy=Recompute())]
    )
    with pytest.raises(UsageError, match=words):
        trainer.train()
    assert attached_to(model) is None


@pytest.mark.parametrize("options", [{}, {"budget": "8GiB"}], ids=["recompute", "budget"])
def test_the_checkpointing_of_the_trainer_is_replaced(tmp_path: Path, options: dict[str, str]) -> None:
    given = "activation_checkpointing"
    if given not in transformers.TrainingArguments.__dataclass_fields__:
        given = "gradient_checkpointing"
    trained = []
    for callbacks in ([], [SpillwayCallback(**options)]):
        model = llama()
        trainer = transformers.Trainer(
            model, arguments(tmp_path, **{given: True}), train_dataset=sentences(), callbacks=callbacks
        )
        trainer.train()
        # The trainer leaves it on, and so does the callback.
        assert any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
        trained.append([each.detach().clone() for each in model.parameters()])
    assert callbacks[0].attached.passes == STEPS
    assert same(*trained)


@pytest.mark.skipif(
    "every_n_layers" not in vars(transformers.PreTrainedModel)["_set_gradient_checkpointing"].__code__.co_varnames,
    reason="this transformers checkpoints all layers",
)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_every_so_many_layers_are_those_of_transformers(every: int, offload: bool) -> None:
    model, (batch, *_) = llama(num_hidden_layers=5), sentences(1)
    tokens = batch["input_ids"].unsqueeze(0)

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    plain = step()
    # Their offload pins memory, which takes an accelerator.
    model.activation_checkpointing_enable(every_n_layers=every)
    theirs = [layer.gradient_checkpointing for layer in model.model.layers]
    assert same(step(), plain)
    model.activation_checkpointing_disable()
    # The callback hands its options on to attach.
    policy = Recompute(offload="inputs") if offload else None
    with (
        Session(window=0) as session,
        spillway.attach(model, every=every, policy=policy, min_bytes=0, session=session) as attached,
    ):
        recomputed = {name.split(".")[2] for name in attached.blocks}
        assert [str(place) in recomputed for place in range(5)] == theirs
        assert same(step(), plain)
        assert (attached.stats().offloaded_bytes > 0) == offload
        gc.collect()
        assert_nothing_left(session)


def test_the_checkpointing_of_fsdp_is_refused_and_so_is_the_offloading_of_trl(tmp_path: Path) -> None:
    options = arguments(tmp_path)
    callback = SpillwayCallback()
    for name, value in (("fsdp_config", {"activation_checkpointing": True}), ("activation_offloading", True)):
        changed = copy.copy(options)
        setattr(changed, name, value)
        with pytest.raises(UsageError, match="activation_"):
            callback.on_train_begin(changed, transformers.TrainerState(), transformers.TrainerControl(), model=llama())
    assert callback.attached is None


@pytest.mark.parametrize("name", ["offload", "groups"])
def test_what_recomputes_nothing_goes_with_the_trainers_checkpointing(tmp_path: Path, name: str) -> None:
    compare(tmp_path, WAYS[name], activation_checkpointing=True, moves=name == "offload")


class Remembering(nn.Module):
    """A block that finds its keys and values where nobody looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: tuple[Any, ...]) -> Tensor:
        keys, values = memory[0].update(self.keys(x), self.values(x), 0)
        return nn.functional.scaled_dot_product_attention(x, keys, values)


def test_a_cache_within_an_argument_is_as_it_was_for_the_second_run() -> None:
    """It has grown by then."""
    model = nn.ModuleDict({"block": Remembering()})
    model.forward = lambda x: model["block"](x, (transformers.DynamicCache(),)).sum()  # type: ignore[method-assign]
    x = torch.randn(1, 2, 4, 8, requires_grad=True)
    model(x).backward()
    expected, x.grad = x.grad, None
    with Session() as session, spillway.attach(model, blocks="block", session=session):
        model(x).backward()
    assert x.grad is not None and expected is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("name", ["offload", "recompute"])
def test_a_cache_that_a_configuration_asks_for_is_none_of_regions(tmp_path: Path, name: str) -> None:
    compare(tmp_path, WAYS[name], use_cache=True)


def test_a_decoder_may_have_a_configuration_of_its_own() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=61, d_model=32, d_ff=64, d_kv=8, num_layers=3, num_heads=4, decoder_start_token_id=0
        )
        return transformers.T5ForConditionalGeneration(config).train()

    def step(model: nn.Module, **options: Any) -> list[Tensor]:
        torch.manual_seed(1)
        words = torch.randint(1, 61, (2, 12))
        output = model(input_ids=words, labels=words, **options)
        output.loss.backward()
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        return [output.loss.detach(), *grads]

    # With a cache, keys lie otherwise in memory, and the last bits of plain gradients are others.
    expected = step(made(), use_cache=False)
    model = made()
    before = model.decoder.config.use_cache
    with Session() as session, spillway.attach(model, policy=Recompute(), session=session) as attached:
        assert {name.split(".")[0] for name in attached.blocks} == {"encoder", "decoder"}
        for _ in range(3):
            assert same(step(model), expected)
        assert model.decoder.config.use_cache is before is True


class PastTheCall(transformers.Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        return model.forward(**inputs).loss


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_trainer_that_goes_past_the_models_call_is_refused(tmp_path: Path, accumulation: int) -> None:
    with pytest.raises(UsageError, match="never called the model"):
        train(
            tmp_path,
            SpillwayCallback(**WAYS["offload"]),
            kind=PastTheCall,
            gradient_accumulation_steps=accumulation,
        )


def test_options_are_those_of_attach() -> None:
    with pytest.raises(UsageError, match=r"perhaps 'budget' is meant"):
        SpillwayCallback(bugdet="40GiB")
    with pytest.raises(UsageError, match="beside a budget or a plan"):
        SpillwayCallback(budget="40GiB", policy="keep")
    with pytest.raises(UsageError, match="got host_budget without a budget"):
        SpillwayCallback(host_budget="40GiB")
    assert SpillwayCallback(budget="40GiB").attached is None


# Logs.


class Reporter(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))


@pytest.mark.parametrize("log", [True, False])
def test_reporters_that_the_trainer_puts_first_are_refused_for_logs(tmp_path: Path, log: bool) -> None:
    with Session() as session:
        options, model = arguments(tmp_path), llama()
        callback = SpillwayCallback(log=log, session=session)
        trainer = transformers.Trainer(model, options, train_dataset=sentences(), callbacks=[callback])
        options.report_to = ["tensorboard"]
        if log:
            with pytest.raises(UsageError, match=r"report_to=\['tensorboard'\] before .* report_to='none'"):
                trainer.train()
        else:
            trainer.train()
        assert attached_to(model) is None


@pytest.mark.parametrize("log", [True, False])
def test_what_is_logged_has_the_steps_numbers_also_for_reporters_after_it(tmp_path: Path, log: bool) -> None:
    with Session(window=0) as session:
        callback = SpillwayCallback(log=log, session=session, min_bytes=0, **WAYS["recompute"])
        reporter = Reporter()
        trainer = transformers.Trainer(
            llama(),
            arguments(tmp_path, eval_strategy="steps", eval_steps=2),
            train_dataset=sentences(),
            eval_dataset=sentences(4),
            callbacks=[callback, reporter],
        )
        trainer.train()
    assert len(trainer.callback_handler.callbacks) == len(set(map(type, trainer.callback_handler.callbacks)))
    for logs in (reporter.logs, trainer.state.log_history):
        steps = [entry for entry in logs if "loss" in entry]
        assert len(steps) == STEPS
        for entry in steps:
            assert ("spillway/peak_bytes" in entry) == log
            assert not log or entry["spillway/offloaded_bytes"] > 0
        others = [entry for entry in logs if "loss" not in entry]
        assert others and not any(name.startswith("spillway/") for entry in others for name in entry)
