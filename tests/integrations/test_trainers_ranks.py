"""Trainers over two processes with gloo: transformers' own, and loops of accelerate, by DDP and by FSDP2."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from integrations.llama import BUDGET, HARDWARE, WAYS, llama, same, sentences
from integrations.ranks import World
from integrations.training import local
from spillway import Session
from spillway.attaching import attached_to
from support import assert_nothing_left

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

# Each rank imports transformers for itself.
pytestmark = pytest.mark.long

PLANNED = {"budget": {"budget": BUDGET, "hardware": HARDWARE}}


def trainer_over_ddp(folder: str, callback: Any, **options: Any) -> list[Tensor]:
    import transformers

    given = {"max_steps": 6, "per_device_train_batch_size": 1, "report_to": "none", "save_strategy": "no"}
    given |= {"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "logging_steps": 1}
    trainer = transformers.Trainer(
        llama(),
        transformers.TrainingArguments(folder, learning_rate=1e-2, **given | options),
        train_dataset=sentences(24, uneven=True),
        callbacks=[] if callback is None else [callback],
    )
    trainer.train()
    assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 6
    return [torch.tensor(losses), *(parameter.detach().clone() for parameter in trainer.model.parameters())]


def case_of_the_trainer(folder: str, way: str, options: dict[str, Any]) -> None:
    from spillway.integrations.transformers import SpillwayCallback

    warnings.simplefilter("ignore")
    plain = trainer_over_ddp(folder, None, **options)
    planned = way in PLANNED
    with Session(window=None if planned else 0) as session:
        callback = SpillwayCallback(session=session, min_bytes=0, **(WAYS | PLANNED)[way])
        ours = trainer_over_ddp(folder, callback, **options)
        assert planned or callback.attached.stats().offloaded_bytes > 0, "nothing moved: this proves nothing"
        assert not planned or callback.attached.stage == "active"
        gc.collect()
        assert_nothing_left(session)
    assert same(ours, plain)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 2}, {"ddp_find_unused_parameters": False}, {"bf16": True}]
)
@pytest.mark.parametrize("way", [*WAYS, *PLANNED])
def test_a_trainer_over_ddp(world: World, tmp_path: Path, way: str, options: dict[str, Any]) -> None:
    world.run(case_of_the_trainer, str(tmp_path), way, options)


def call_them_gpus() -> None:
    """So that accelerate shards over CPUs, too: it has FSDP2 for accelerators only, by the same code."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    forget_accelerators()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def forget_accelerators() -> None:
    """accelerate's states are one for the process, and what it writes into the environment is another."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[name]


def sharding(**options: Any) -> Any:
    import accelerate

    call_them_gpus()
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    return accelerate.Accelerator(fsdp_plugin=plugin, **options)


def loop_over_fsdp(prepare: Any, **options: Any) -> tuple[nn.Module, list[Tensor]]:
    accelerator = sharding(**options)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.utils.data.DataLoader(sentences(24, uneven=True), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, batches = prepare(accelerator, model, optimizer, batches)
    found = []
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            found.append(loss.detach())
            if accelerator.sync_gradients:
                found.append(local(accelerator.clip_grad_norm_(model.parameters(), 0.5)).clone())
            optimizer.step()
            optimizer.zero_grad()
    return model, found + [local(parameter).detach().clone() for parameter in model.parameters()]


def case_of_fsdp(way: str, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import FSDPModule

    from spillway.integrations.accelerate import attached_to as of_prepared
    from spillway.integrations.accelerate import prepare

    warnings.simplefilter("ignore")
    try:
        model, plain = loop_over_fsdp(lambda accelerator, *given: accelerator.prepare(*given), **options)
        assert isinstance(model, FSDPModule)
        with Session(window=0) as session:
            model, ours = loop_over_fsdp(
                lambda *given: prepare(*given, session=session, min_bytes=0, **WAYS[way]), **options
            )
            assert isinstance(model, FSDPModule)
            attached = of_prepared(model)
            assert attached is attached_to(model)
            assert attached.stats().offloaded_bytes > 0, "nothing moved: this proves nothing"
            attached.remove()
            gc.collect()
            assert_nothing_left(session)
    finally:
        forget_accelerators()
    assert same(ours, plain)


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("way", WAYS)
def test_a_loop_over_fsdp2(world: World, way: str, options: dict[str, Any]) -> None:
    world.run(case_of_fsdp, way, options)


def trainer_over_fsdp(folder: str, callback: Any) -> list[Tensor]:
    import transformers
    from torch.distributed.fsdp import FSDPModule

    class Told(transformers.Trainer):
        def create_accelerator_and_postprocess(self) -> None:
            call_them_gpus()
            super().create_accelerator_and_postprocess()

    wrap = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1,
        gradient_accumulation_steps=2,
        fsdp=True,
        fsdp_config=wrap,
    )
    trainer = Told(llama(), arguments, train_dataset=sentences(24), callbacks=[] if callback is None else [callback])
    trainer.train()
    assert isinstance(trainer.model, FSDPModule)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert attached_to(trainer.model) is None
    return [torch.tensor(losses), *(local(each).detach().clone() for each in trainer.model.parameters())]


def case_of_the_trainer_over_fsdp(folder: str, way: str) -> None:
    from spillway.integrations.transformers import SpillwayCallback

    warnings.simplefilter("ignore")
    try:
        plain = trainer_over_fsdp(folder, None)
        with Session(window=0) as session:
            callback = SpillwayCallback(session=session, min_bytes=0, **WAYS[way])
            ours = trainer_over_fsdp(folder, callback)
            assert callback.attached is not None
            assert callback.attached.stats().offloaded_bytes > 0, "nothing moved: this proves nothing"
            gc.collect()
            assert_nothing_left(session)
    finally:
        forget_accelerators()
    assert same(ours, plain)


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_over_fsdp2(world: World, tmp_path: Path, way: str) -> None:
    world.run(case_of_the_trainer_over_fsdp, str(tmp_path), way)
