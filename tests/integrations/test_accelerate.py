"""Loops of accelerate with prepare() of ours, against the same loops with accelerator.prepare."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import spillway
from integrations.llama import BUDGET, HARDWARE, WAYS, llama, pairs, same, sentences, weights
from spillway import Recompute, Session, UsageError
from support import assert_nothing_left

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers, whose model is trained here, is not installed")

from spillway.integrations.accelerate import attached_to, prepare  # noqa: E402

STEPS = 6


def accelerator_of(**options: Any) -> Any:
    from accelerate.state import AcceleratorState, GradientState

    # Both are one for the process, and keep what an earlier test said.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **options)


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
    return model, optimizer, DataLoader(sentences(2 * STEPS), batch_size=2), schedule  # type: ignore[arg-type]


def loop(accelerator: Any, model: nn.Module, optimizer: Any, loader: Any, schedule: Any) -> list[Tensor]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = model(**batch).loss
            accelerator.backward(loss)
            losses.append(loss.detach())
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).clone())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return losses


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "bf16": {"mixed_precision": "bf16"},
}


@pytest.mark.parametrize(("way", "setting"), pairs(WAYS, SETTINGS, usual=("saved_by", "plain")))
def test_a_loop_gives_what_it_gives_without(way: str, setting: str) -> None:
    accelerator = accelerator_of(**SETTINGS[setting])
    prepared = accelerator.prepare(*parts())
    plain = [*loop(accelerator, *prepared), *weights(accelerator.unwrap_model(prepared[0]))]

    accelerator = accelerator_of(**SETTINGS[setting])
    with Session(window=0) as session:
        prepared = prepare(accelerator, *parts(), session=session, min_bytes=0, **WAYS[way])
        assert len(prepared) == 4
        ours = [*loop(accelerator, *prepared), *weights(accelerator.unwrap_model(prepared[0]))]
        attached = attached_to(prepared[0])
        assert attached.passes == STEPS
        assert attached.stats().offloaded_bytes > 0
        attached.remove()
        with pytest.raises(UsageError, match="nothing is attached"):
            attached_to(prepared[0])
        gc.collect()
        assert_nothing_left(session)
    assert same(ours, plain)


def test_a_budget_is_planned_for() -> None:
    accelerator = accelerator_of()
    prepared = accelerator.prepare(*parts())
    plain = [*loop(accelerator, *prepared), *weights(prepared[0])]
    accelerator = accelerator_of()
    with Session() as session:
        prepared = prepare(accelerator, *parts(), budget=BUDGET, hardware=HARDWARE, session=session)
        ours = [*loop(accelerator, *prepared), *weights(prepared[0])]
        assert attached_to(prepared[0]).stage == "active"
    assert same(ours, plain)


def test_weights_that_are_streamed_within_a_budget() -> None:
    found = []
    for streams in (False, True):
        accelerator = accelerator_of()
        with Session() as session:
            model, _, loader, _ = parts()
            optimizer = spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, session=session)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS)
            more = (model, optimizer, loader, schedule)
            options = {"stream": "auto", "optimizer": optimizer, "budget": BUDGET, "hardware": HARDWARE}
            if streams:
                prepared = prepare(accelerator, *more, session=session, min_bytes=0, **options)
                assert len(attached_to(prepared[0]).streamed) == len(attached_to(prepared[0]).blocks) > 0
            else:
                prepared = accelerator.prepare(*more)
            found.append([*loop(accelerator, *prepared), *weights(accelerator.unwrap_model(prepared[0]))])
            if streams:
                assert attached_to(prepared[0]).plan is not None
                attached_to(prepared[0]).remove()
            optimizer.close()
    assert same(*found)


def test_state_is_saved_and_loaded_and_the_model_unwrapped(tmp_path: Path) -> None:
    def run(first: Any, second: Any) -> list[Tensor]:
        accelerator = accelerator_of(mixed_precision="bf16")
        prepared = first(accelerator, *parts())
        losses = loop(accelerator, *prepared)
        accelerator.save_state(str(tmp_path))
        accelerator = accelerator_of(mixed_precision="bf16")
        prepared = second(accelerator, *parts())
        accelerator.load_state(str(tmp_path))
        losses += loop(accelerator, *prepared)
        # Without the wrapper that makes float32 of what it gives: one forward more, which is bfloat16's.
        model = accelerator.unwrap_model(prepared[0], keep_fp32_wrapper=False)
        losses.append(model(**next(iter(prepared[2]))).logits.detach())
        return [*losses, *weights(model)]

    def theirs(accelerator: Any, *given: Any) -> Any:
        return accelerator.prepare(*given)

    with Session(window=0) as session:

        def ours(accelerator: Any, *given: Any) -> Any:
            return prepare(accelerator, *given, session=session, min_bytes=0, **WAYS["saved_by"])

        plain = run(theirs, theirs)
        assert same(run(ours, ours), plain)
        assert same(run(theirs, ours), plain)


def test_a_model_alone_is_given_alone() -> None:
    model = prepare(accelerator_of(), llama(), policy=Recompute())
    assert isinstance(model, nn.Module)
    assert attached_to(model).blocks == ("model.layers.0", "model.layers.1", "model.layers.2")


def test_what_an_accelerator_does_to_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match="dynamo_backend"):
        prepare(accelerator_of(dynamo_backend="EAGER"), llama())
    accelerator = accelerator_of()
    with pytest.raises(UsageError, match="perhaps 'budget' is meant"):
        prepare(accelerator, llama(), bugdet=1)
    with pytest.raises(UsageError, match="as the first of all that is prepared"):
        prepare(accelerator, [llama()])  # type: ignore[arg-type]
    accelerator.state.fsdp_plugin = type("Plugin", (), {"activation_checkpointing": True})()
    with pytest.raises(UsageError, match="activation_checkpointing=True"):
        prepare(accelerator, llama())
