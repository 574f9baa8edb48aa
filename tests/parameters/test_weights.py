"""Weights that are read from files straight into the memory that they are streamed from: the bits, and no second copy.

The device is the adversary's: a copy is done as late as its events allow, and a use before it is an error.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import spillway
from adapted import Block, FeedForward
from runtime.scenarios import adversary_session
from spillway import policies
from spillway.errors import TierFullError, UnsupportedError, UsageError
from spillway.parameters import weights
from spillway.runtime.arena import pages
from support import assert_nothing_left
from weight_files import BLOCKS, WIDTH, Model, addresses, freeze, loss_of, on_meta, same, saved, train

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


@contextmanager
def loaded(model: nn.Module, files: Any) -> Iterator[spillway.Session]:
    """Inside, the model has its weights, under the adversary."""
    with adversary_session(window=1024) as (_, session):
        spillway.load_weights(model, files, device="cpu", session=session)
        # The caller may drop it.
        del model
        yield session


def whole_pages(model: nn.Module) -> int:
    return sum(pages(each.nbytes) for each in {*model.parameters(), *model.buffers()})


POLICIES: dict[str, Any] = {
    "recomputed": lambda: spillway.Recompute(),
    "offloaded": lambda: policies.Offload(),
    "kept": lambda: policies.Keep(),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_frozen_weights_are_streamed_from_the_memory_that_they_were_read_into(
    tmp_path: Path, shards: int, policy: str
) -> None:
    plain, model = Model(), freeze(on_meta())
    files = saved(plain, tmp_path, shards)
    wanted = train(plain)
    with loaded(model, files) as session:
        assert model.head.weight is model.inputs.weight
        assert type(model.layers[0].first.base.weight) is nn.Parameter  # type: ignore[union-attr]
        assert not model.layers[0].first.base.weight.requires_grad  # type: ignore[union-attr]
        assert model.inputs.weight.requires_grad
        gc.collect()
        before, used = addresses(model), session.used_bytes[0]
        assert used == whole_pages(model)
        with spillway.attach(
            model, policy=POLICIES[policy](), stream="layers.*", min_bytes=0, session=session, device="cpu"
        ) as attached:
            assert len(attached.streamed) == BLOCKS
            assert addresses(model) == before
            assert session.used_bytes[0] == used
            assert same(train(model), wanted)
        # Streamed parameters have memory of their own again.
        gone = sum(pages(each.nbytes) for name, each in model.named_parameters() if not each.requires_grad)
        assert session.used_bytes[0] == used - gone
        del model
        gc.collect()
        assert_nothing_left(session)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step_on", ["cpu", "gpu"])
def test_trained_weights_with_an_optimizer_that_is_made_after(tmp_path: Path, step_on: str, dtype: torch.dtype) -> None:
    def run(model: Model, session: spillway.Session, *, streams: bool) -> list[Tensor]:
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, step_on=step_on, session=session
        )
        before = addresses(model)
        if not streams:
            found = train(model, optimizer)
            optimizer.close()
            return found
        with spillway.attach(
            model, stream="layers.*", min_bytes=0, session=session, optimizer=optimizer, device="cpu"
        ) as attached:
            assert len(attached.streamed) == BLOCKS
            assert addresses(model) == before
            found = train(model, optimizer)
        optimizer.close()
        return found

    plain, model = Model(FeedForward, dtype), on_meta(FeedForward, dtype)
    files = saved(plain, tmp_path)
    with adversary_session(window=1 << 14) as (_, session):
        wanted = run(plain, session, streams=False)
    with loaded(model, files) as session:
        assert same(run(model, session, streams=True), wanted)


def test_a_model_that_is_not_streamed_is_an_ordinary_one(tmp_path: Path) -> None:
    plain, model = Model(), on_meta()
    with loaded(model, saved(plain, tmp_path)) as session:
        twin = copy.deepcopy(model)
        assert same(train(model), train(plain))
        del model
        gc.collect()
        assert_nothing_left(session)
        assert not weights._loaded
        assert same(train(twin), train(Model()))


def test_memory_outlives_the_session(tmp_path: Path) -> None:
    plain, model = Model(), on_meta()
    with loaded(model, saved(plain, tmp_path)):
        pass
    gc.collect()
    assert same(train(model), train(plain))


def test_another_session_copies(tmp_path: Path) -> None:
    plain, model = Model(), freeze(on_meta())
    files = saved(plain, tmp_path)
    wanted = train(plain)
    with loaded(model, files) as first, adversary_session(window=1024) as (_, second):
        used, before = first.used_bytes[0], addresses(model)
        with spillway.attach(model, policy="keep", stream="layers.*", min_bytes=0, session=second, device="cpu"):
            assert first.used_bytes[0] + second.used_bytes[0] == used
            assert addresses(model) != before
            assert same(train(model), wanted)


def test_values_are_converted_and_strides_and_marks_stay(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    model = copy.deepcopy(plain).to("meta").to(torch.bfloat16)
    model[0].to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model[0].weight.mark = "mine"  # type: ignore[attr-defined]
    safetensors.save_file(plain.state_dict(), tmp_path / "weights.safetensors")
    with loaded(model, tmp_path / "weights.safetensors"):
        for name, value in plain.to(torch.bfloat16).state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert model[0].weight.mark == "mine"  # type: ignore[attr-defined]
        assert set(dict(model.named_buffers())) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


def test_buffers_keep_their_kinds(tmp_path: Path) -> None:
    model = on_meta()
    with loaded(model, saved(Model(), tmp_path)):
        assert model.scale.persistent and model.scale._is_buffer  # type: ignore[attr-defined]
        assert not hasattr(model.seen, "_is_buffer")
        assert model.seen == 3 and model.unused is None
        assert set(model.state_dict()) == set(Model().state_dict())


def test_tensors_with_content_are_written_in_place_or_left(tmp_path: Path) -> None:
    plain = Model()
    files = saved(plain, tmp_path)
    model = on_meta()
    model.layers[0] = Block()
    model.register_buffer("angles", torch.ones(3), persistent=False)
    model.extra = nn.Linear(2, 2)
    # Two parts of one memory.
    flat = torch.zeros(4 * WIDTH * WIDTH + 4 * WIDTH)
    wide = model.layers[0].first.base  # type: ignore[union-attr]
    wide.weight = nn.Parameter(flat[: -4 * WIDTH].view(4 * WIDTH, WIDTH))  # type: ignore[union-attr]
    wide.bias = nn.Parameter(flat[-4 * WIDTH :])  # type: ignore[union-attr]
    own, extra = model.layers[0].first.base.weight, model.extra.weight.clone()  # type: ignore[union-attr]
    with loaded(model, files):
        assert model.layers[0].first.base.weight is own  # type: ignore[union-attr]
        assert torch.equal(own, plain.layers[0].first.base.weight)  # type: ignore[union-attr, arg-type]
        assert torch.equal(flat[-4 * WIDTH :], plain.layers[0].first.base.bias)  # type: ignore[union-attr, arg-type]
        assert torch.equal(model.extra.weight, extra)
        assert model.angles.sum() == 3  # type: ignore[operator]


def test_both_names_of_a_shared_tensor_and_a_shared_module(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "c": nn.Linear(2, 2, bias=False)})
        model["b"], model["c"].weight = model["a"], model["a"].weight
    state = {f"{name}.weight": torch.full((2, 2), float(number)) for number, name in enumerate("abc")}
    safetensors.save_file(state, tmp_path / "w.safetensors")
    plain = copy.deepcopy(model).to_empty(device="cpu")
    plain.load_state_dict(state)
    with loaded(model, [tmp_path / "w.safetensors"]):
        assert model["a"] is model["b"] and model["a"].weight is model["c"].weight
        assert torch.equal(model["a"].weight, plain["a"].weight)


def test_memory_that_copies_still_read_is_waited_for(tmp_path: Path) -> None:
    plain = Model()
    files = saved(plain, tmp_path)
    wanted = train(plain)
    with adversary_session(window=1024) as (_, session):
        for _ in range(3):
            model = freeze(on_meta())
            spillway.load_weights(model, files, device="cpu", session=session)
            spillway.attach(model, policy="keep", stream="layers.*", min_bytes=0, session=session, device="cpu")
            loss = loss_of(model, 0)
            assert torch.equal(loss.detach(), wanted[0])
            # Its memory is free with copies that are queued.
            del model, loss
            gc.collect()


def test_a_shared_tensor_is_read_once_and_modes_see_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen: list[Any] = []
    reads, read = [], weights._read
    monkeypatch.setattr(
        weights, "_read", lambda place, *rest, **more: reads.append(place.source) or read(place, *rest, **more)
    )
    model, files = on_meta(), saved(Model(), tmp_path)
    with adversary_session() as (_, session), Seen():
        spillway.load_weights(model, files, device="cpu", session=session)
    assert sorted(reads) == sorted(model.state_dict().keys() - {"head.weight"})
    assert not any(getattr(each, "__name__", "") in ("copy_", "frombuffer", "asarray") for each in seen)


def test_tied_parameters_that_share_only_their_memory(tmp_path: Path) -> None:
    plain, model = Model(), on_meta()
    model.head.weight = nn.Parameter(model.inputs.weight.detach())
    assert model.head.weight is not model.inputs.weight
    with loaded(model, saved(plain, tmp_path)) as session:
        assert model.head.weight is model.inputs.weight
        assert session.used_bytes[0] == whole_pages(model)
        assert same(train(model), train(plain))


def test_inside_of_the_context_that_built_it(tmp_path: Path) -> None:
    files = saved(Model(), tmp_path)
    with adversary_session() as (_, session), torch.device("meta"), torch.inference_mode():
        model = Model()
        spillway.load_weights(model, files, device="cpu", session=session)
    assert same(list(model.state_dict().values()), list(Model().state_dict().values()))
    assert not model.head.weight.is_inference()


def refused(model: nn.Module, files: Any, *names: str, kind: type[Exception] = UsageError) -> None:
    """Loading raises an error with these names, and changes nothing."""
    before = [(name, each, each.is_meta) for name, each in model.state_dict(keep_vars=True).items()]
    with adversary_session() as (_, session):
        with pytest.raises(kind) as caught:
            spillway.load_weights(model, files, device="cpu", session=session)
        for name in names:
            assert name in str(caught.value)
        after = [(name, each, each.is_meta) for name, each in model.state_dict(keep_vars=True).items()]
        assert all(
            one[0] == two[0] and one[1] is two[1] and one[2] == two[2] for one, two in zip(before, after, strict=True)
        )
        caught.value.__traceback__ = None
        gc.collect()
        assert session.used_bytes == (0, 0)


def test_names_shapes_and_kinds_that_differ(tmp_path: Path) -> None:
    state = {name: value for name, value in Model().state_dict().items() if name != "head.weight"}
    file = tmp_path / "w.safetensors"

    def file_of(change: dict[str, Tensor], *missing: str) -> Path:
        safetensors.save_file({name: each for name, each in {**state, **change}.items() if name not in missing}, file)
        return file

    refused(on_meta(), file_of({}, "layers.1.norm.weight"), "layers.1.norm.weight", "Add their files")
    refused(on_meta(), file_of({}, "inputs.weight"), "inputs.weight", "head.weight")
    refused(on_meta(), file_of({"lm.weight": torch.ones(2)}), "lm.weight", "does not have")
    refused(on_meta(), file_of({"seen": torch.ones(2, dtype=torch.int64)}), "seen: I64 (2,)", "int64 () in the model")
    refused(on_meta(), file_of({"seen": torch.tensor(1.0)}), "seen: F32")
    refused(on_meta(), file_of({"scale": torch.ones(WIDTH, dtype=torch.int8)}), "scale: I8")
    refused(on_meta(), file_of({"scale": torch.ones(WIDTH, dtype=torch.complex64)}), "scale: C64")
    # Also one that has content already.
    real = on_meta()
    real.seen = torch.tensor(1)
    refused(real, file_of({"seen": torch.ones(2, dtype=torch.int64)}), "seen: I64 (2,)")
    many = {f"other.{number}": torch.ones(1) for number in range(20)}
    refused(on_meta(), file_of(many), "other.0", "and 12 more")
    model = on_meta()
    model.register_buffer("angles", torch.ones(3, device="meta"), persistent=False)
    refused(model, file_of({}), "angles", "include_buffers=False")
    refused(model, file_of({"angles": torch.ones(3)}), "angles")


def test_tensors_that_are_no_plain_ones(tmp_path: Path) -> None:
    class Quantized(nn.Parameter):
        pass

    safetensors.save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "w.safetensors")
    model = nn.Linear(2, 2, device="meta")
    model.weight = Quantized(model.weight.data, requires_grad=False)
    refused(model, tmp_path, "weight", "Quantized", kind=UnsupportedError)
    whole = torch.empty(6, device="meta")
    model.weight, model.bias = nn.Parameter(whole[:4].view(2, 2)), nn.Parameter(whole[4:])
    refused(model, tmp_path, "weight", "shares its memory", kind=UnsupportedError)
    # The same memory in another form.
    state = {"0.weight": torch.ones(2, 2), "1.weight": torch.ones(2, 2)}
    safetensors.save_file(state, tmp_path / "w.safetensors")
    tied = nn.Sequential(*(nn.Linear(2, 2, bias=False, device="meta") for _ in range(2)))
    tied[1].weight = nn.Parameter(tied[0].weight.detach().t())
    refused(tied, tmp_path, "1.weight", "shares its memory", kind=UnsupportedError)


def test_files_that_are_none(tmp_path: Path) -> None:
    model, folder = on_meta(), saved(Model(), tmp_path, 2)
    refused(model, tmp_path / "nowhere.safetensors", "nowhere.safetensors", "No such file")
    refused(model, tmp_path / "nowhere", "nowhere")
    whole = (folder / "model-0.safetensors").read_bytes()
    (folder / "model-0.safetensors").write_bytes(whole[:-1])
    refused(model, folder, "model-0.safetensors", "expected a safetensors file")
    (folder / "model-0.safetensors").unlink()
    refused(model, folder, "model-0.safetensors")
    (folder / "model-0.safetensors").write_bytes(whole)
    copied = folder / "copy.safetensors"
    copied.write_bytes(whole)
    refused(model, [folder, copied], "inputs.weight", "copy.safetensors", "expected it in one file")
    for text in ("no json", "[]", "{}"):
        (folder / "model.safetensors.index.json").write_text(text)
        refused(model, folder, "index.json", "weight_map")
    (folder / "model.safetensors.index.json").unlink()
    refused(model, folder, "0 indices and 4 safetensors files")
    (tmp_path / "empty").mkdir()
    refused(model, tmp_path / "empty", "0 indices and 0 safetensors files")
    refused(model, [], "inputs.weight", "no tensors for these")


def test_arguments_that_are_none() -> None:
    with pytest.raises(UsageError, match=r"model: got 3, expected a torch.nn.Module"):
        spillway.load_weights(3, "x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="files: got 3, expected a folder"):
        spillway.load_weights(on_meta(), [3], device="cpu")  # type: ignore[list-item]
    with pytest.raises(UsageError, match="session: got 3"):
        spillway.load_weights(on_meta(), "x", session=3)  # type: ignore[arg-type]


def test_too_little_memory_changes_nothing(tmp_path: Path) -> None:
    model, files = on_meta(), saved(Model(), tmp_path)
    with spillway.Session(host_budget="64KiB") as session:
        with pytest.raises(TierFullError):
            spillway.load_weights(model, files, device="cpu", session=session)
        assert all(each.is_meta for each in model.parameters())
        gc.collect()
        assert session.used_bytes == (0, 0)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = saved(Model(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UnsupportedError, match="pip install safetensors"):
        spillway.load_weights(on_meta(), files, device="cpu")


def test_attach_and_the_optimizer_say_what_to_do_first() -> None:
    model = on_meta()
    with pytest.raises(UsageError, match="load_weights"):
        spillway.attach(model, stream="layers.*", device="cpu")
    with pytest.raises(UsageError, match="load_weights"):
        spillway.OffloadedOptimizer(model.parameters(), torch.optim.AdamW)
