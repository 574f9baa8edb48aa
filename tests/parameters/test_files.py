"""Weights that stay in their files: the bits, no memory, and files that change.

The device is the adversary's: a task runs as late as its event allows, and a use before it is an error.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from runtime.scenarios import adversary_session
from spillway import policies
from spillway.errors import UsageError
from spillway.parameters import homes, weights
from spillway.planner.planner import with_weights
from spillway.planner.profile import enlarged
from spillway.runtime import tiers
from support import assert_nothing_left
from weight_files import BLOCKS, WIDTH, Model, addresses, freeze, loss_of, on_meta, same, saved, train

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

POLICIES: dict[str, Any] = {
    "recomputed": spillway.Recompute(),
    "offloaded": policies.Offload(),
    "kept": policies.Keep(),
}


def mapped(model: nn.Module, folder: Path) -> list[str]:
    """The names of tensors whose memory is a mapping of a file in the folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [tuple(int(each, 16) for each in line[0].split("-")) for line in lines]
    places = {name: each.data_ptr() for name, each in model.state_dict().items()}
    return [name for name, place in places.items() if any(low <= place < high for low, high in ranges)]


@contextmanager
def on_disk(model: nn.Module, files: Any, **options: Any) -> Iterator[spillway.Session]:
    with adversary_session(window=1024, **options) as (_, session):
        spillway.load_weights(model, files, device="cpu", session=session, on_disk=True)
        # The caller may drop it.
        del model
        yield session


def streamed(model: nn.Module, session: spillway.Session, policy: Any = "keep", **options: Any) -> spillway.Attached:
    return spillway.attach(
        model, policy=policy, stream="layers.*", min_bytes=0, session=session, device="cpu", **options
    )


def frozen(model: nn.Module) -> set[str]:
    return {name for name, each in model.named_parameters() if not each.requires_grad}


@pytest.mark.parametrize("direct_disk", [False, True], ids=["staged", "direct"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_frozen_weights_are_streamed_from_their_files(
    tmp_path: Path, shards: int, policy: str, direct_disk: bool
) -> None:
    plain, model = Model(), freeze(on_meta())
    files = saved(plain, tmp_path, shards)
    content = {file: file.read_bytes() for file in tmp_path.iterdir()}
    wanted = train(plain)
    with on_disk(model, files, direct_disk=direct_disk) as session:
        assert model.head.weight is model.inputs.weight
        assert set(mapped(model, tmp_path)) == set(model.state_dict())
        before = addresses(model)
        with streamed(model, session, POLICIES[policy]) as attached:
            assert len(attached.streamed) == BLOCKS
            assert addresses(model) == before
            assert session.used_bytes == (0, 0)
            assert same(train(model), wanted)
            assert addresses(model) == before
        assert addresses(model) == before and set(mapped(model, tmp_path)) == set(model.state_dict())
        del model
        gc.collect()
        assert_nothing_left(session)
        assert not weights._loaded and str(tmp_path) not in Path("/proc/self/maps").read_text()
    # The optimizer stepped the others in private pages.
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == content


def test_large_weights_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "PIECE_BYTES", 1000)
    plain, model = Model(), freeze(on_meta())
    wanted = train(plain)
    copied, copy = [], homes._copy
    monkeypatch.setattr(homes, "_copy", lambda source, into: (copied.append(source.nbytes), copy(source, into)))
    with on_disk(model, saved(Model(), tmp_path)) as session, streamed(model, session):
        assert same(train(model), wanted)
    # A weight of 16 * 64 floats.
    assert max(copied) == 1000 and copied.count(96) >= 2 * BLOCKS


def test_a_write_at_rest_counts_and_leaves_the_file(tmp_path: Path) -> None:
    plain, model = freeze(Model()), freeze(on_meta())
    files = saved(plain, tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    with on_disk(model, files) as session, streamed(model, session):
        for step in range(3):
            for each in (plain, model):
                with torch.no_grad():
                    for layer in each.layers:
                        layer.first.base.weight.mul_(1.5)  # type: ignore[union-attr, operator]
                        layer.norm.bias.data = layer.norm.bias.data  # type: ignore[union-attr]
                        layer.second.base.bias.data.add_(1)  # type: ignore[union-attr]
            assert torch.equal(loss_of(model, step), loss_of(plain, step))
        model.load_state_dict(Model().state_dict())
        assert torch.equal(loss_of(model, 0), loss_of(Model(), 0))
    assert (tmp_path / "model.safetensors").read_bytes() == content


@pytest.mark.parametrize("direct_disk", [False, True], ids=["staged", "direct"])
def test_a_write_after_a_call_comes_after_reads_ahead(tmp_path: Path, direct_disk: bool) -> None:
    """A call that ends early leaves a block that was fetched ahead."""

    class Ends(Exception):
        pass

    plain, model = freeze(Model()), freeze(on_meta())
    with on_disk(model, saved(plain, tmp_path), direct_disk=direct_disk) as session, streamed(model, session):
        for _ in range(2):
            loss_of(model, 0).backward()

        def ends(*_: object) -> None:
            raise Ends

        hook = model.layers[1].register_forward_hook(ends)
        with pytest.raises(Ends):
            loss_of(model, 0)
        hook.remove()
        with torch.no_grad():
            for each in (plain, model):
                each.layers[2].first.base.weight.data.fill_(0.5)  # type: ignore[union-attr]
        session.synchronize()
        assert torch.equal(loss_of(model, 1), loss_of(plain, 1))


def test_a_block_that_writes_its_frozen_weights(tmp_path: Path) -> None:
    class Writes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return x + super().forward(x)

    def made() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Writes(WIDTH, WIDTH).requires_grad_(False) for _ in range(3)))

    plain = made()
    safetensors.save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = made()
    x = torch.randn(4, WIDTH)
    with (
        on_disk(model, tmp_path) as session,
        spillway.attach(model, policy="keep", stream=Writes, min_bytes=0, session=session, device="cpu"),
        torch.no_grad(),
    ):
        for _ in range(3):
            assert torch.equal(model(x), plain(x))
        assert same([*model.parameters()], [*plain.parameters()])


@pytest.mark.parametrize("step_on", ["cpu", "gpu"])
def test_trained_weights_are_in_memory(tmp_path: Path, step_on: str) -> None:
    def run(model: nn.Module, session: spillway.Session, *, streams: bool) -> list[Tensor]:
        steps = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, lr=1e-2, step_on=step_on, session=session
        )
        with contextlib.ExitStack() as stack:
            if streams:
                stack.enter_context(streamed(model, session, optimizer=steps))
                named = dict(model.layers.named_parameters(prefix="layers"))
                assert set(mapped(model, tmp_path)) & named.keys() == frozen(model)
            found = train(model, steps)
            # The user may give a frozen one a gradient.
            bias = model.layers[1].norm.bias
            bias.grad = torch.ones_like(bias)
            steps.step()
            steps.synchronize()
            found += [bias.clone(), loss_of(model, 5).detach()]
        steps.close()
        return found

    plain, model = freeze(Model()), freeze(on_meta())
    files = saved(plain, tmp_path)
    with adversary_session(window=1 << 14) as (_, session):
        wanted = run(plain, session, streams=False)
    with on_disk(model, files) as session:
        assert same(run(model, session, streams=True), wanted)


def test_a_frozen_weight_that_is_unfrozen_later(tmp_path: Path) -> None:
    model = freeze(on_meta())
    with on_disk(model, saved(Model(), tmp_path)) as session, streamed(model, session):
        loss_of(model, 0)
        weight = model.layers[1].first.base.weight  # type: ignore[union-attr]
        weight.requires_grad_()  # type: ignore[union-attr, operator]
        with pytest.raises(UsageError, match=r"layers.1.first.base.weight is streamed from a file, and requires"):
            loss_of(model, 0)
        weight.requires_grad_(False)  # type: ignore[union-attr, operator]
        assert torch.equal(loss_of(model, 1), loss_of(Model(), 1))


@pytest.mark.parametrize("how", ["written", "cut", "touched"])
def test_a_file_that_is_changed_in_place(tmp_path: Path, how: str) -> None:
    model, file = freeze(on_meta()), tmp_path / "model.safetensors"
    with on_disk(model, saved(Model(), tmp_path)) as session, streamed(model, session):
        loss_of(model, 0).backward()
        if how == "written":
            with file.open("r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(b"abcd")
        elif how == "cut":
            os.truncate(file, file.stat().st_size - 1)
        else:
            os.utime(file, ns=(1, 1))
        with pytest.raises(UsageError, match=f"is streamed from {file}, and the file was changed"):
            loss_of(model, 0)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_file_that_is_replaced_or_deleted(tmp_path: Path, how: str) -> None:
    model, file = freeze(on_meta()), tmp_path / "model.safetensors"
    wanted = train(Model())
    with on_disk(model, saved(Model(), tmp_path)) as session, streamed(model, session):
        if how == "deleted":
            file.unlink()
        else:
            safetensors.save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
            (tmp_path / "other.safetensors").replace(file)
        assert same(train(model), wanted)


def test_weights_that_move_to_the_device_and_back(tmp_path: Path) -> None:
    model = freeze(on_meta())
    plain = freeze(Model())
    with on_disk(model, saved(plain, tmp_path)) as session, streamed(model, session) as attached:
        before, streams = addresses(model), attached._root.streams
        assert streams is not None
        assert torch.equal(loss_of(model, 0), loss_of(plain, 0))
        streams.place(("layers.1", "layers.2"))
        assert streams.missing_host_bytes == 0
        moved = {name.split(".")[1] for name, each in addresses(model).items() if before[name] != each}
        assert moved == {"1", "2"}
        assert torch.equal(loss_of(model, 1), loss_of(plain, 1))
        for each in (model, plain):
            # No version shows it.
            each.layers[2].first.base.weight.data.neg_()  # type: ignore[union-attr]
        streams.place(())
        assert addresses(model) == before and session.used_bytes == (0, 0)
        assert torch.equal(loss_of(model, 2), loss_of(plain, 2))
        # Pages of the first block were not written.
        layer = model.layers[1].first.base.weight  # type: ignore[union-attr]
        assert not _is_private(layer.data_ptr()) and _is_private(model.layers[2].first.base.weight.data_ptr())  # type: ignore[union-attr, operator]
        # Those that are on the device in the end.
        streams.place(("layers.0", "layers.1"))
        for each in (model, plain):
            each.layers[0].first.base.weight.data.neg_()  # type: ignore[union-attr]
    assert addresses(model) == before
    assert torch.equal(loss_of(model, 3), loss_of(plain, 3))


def test_weights_that_are_cast_while_they_are_on_the_device(tmp_path: Path) -> None:
    plain, model = freeze(Model()), freeze(on_meta())
    with on_disk(model, saved(plain, tmp_path)) as session, streamed(model, session) as attached:
        streams = attached._root.streams
        assert streams is not None
        streams.place([f"layers.{number}" for number in range(BLOCKS)])
        for each in (model, plain):
            each.double()
        streams.place(())
        assert len(attached.streamed) == BLOCKS
        assert torch.equal(loss_of(model, 1), loss_of(plain, 1))


def _is_private(address: int) -> bool:
    """Whether a page is a private one of this process, and none of a file."""
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(address // 4096 * 8)
        entry = int.from_bytes(pages.read(8), "little")
    return bool(entry >> 63 & 1) and not entry >> 61 & 1


def test_other_types_and_odd_places_are_read_into_memory(tmp_path: Path) -> None:
    values = {"c": torch.randn(4).bfloat16(), "d": torch.randn(2, 3, 4, 4)}
    values |= {"pad": torch.ones(1, dtype=torch.uint8), "a": torch.randn(3), "b": torch.randn(2, 2)}
    header, data = {}, b""
    for name, each in values.items():
        raw = each.view(torch.uint8).numpy().tobytes()
        kind = {torch.bfloat16: "BF16", torch.uint8: "U8", torch.float32: "F32"}[each.dtype]
        header[name] = {"dtype": kind, "shape": [*each.shape], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "w.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    model = nn.Module()
    for name in "abc":
        setattr(model, name, nn.Parameter(values[name].to("meta", torch.float32)))
    model.pad = nn.Buffer(values["pad"].to("meta"))
    model.d = nn.Parameter(values["d"].to("meta", memory_format=torch.channels_last))
    with on_disk(model, tmp_path / "w.safetensors"):
        # The others have another type, other strides, or an odd address.
        assert mapped(model, tmp_path) == ["pad"]
        assert model.d.is_contiguous(memory_format=torch.channels_last)
        assert all(
            torch.equal(getattr(model, name), each.to(getattr(model, name).dtype)) for name, each in values.items()
        )


def test_a_plan_knows_how_long_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pause, copy = 0.01, homes._copy
    monkeypatch.setattr(homes, "_copy", lambda source, into: (time.sleep(pause), copy(source, into)))
    files, model = saved(freeze(Model()), tmp_path), freeze(on_meta())
    with (
        on_disk(model, files) as session,
        spillway.attach(
            model,
            budget="64GiB",
            stream="layers.*",
            blocks="layers.*",
            hardware=spillway.Hardware.named("h200"),
            min_bytes=0,
            session=session,
            device="cpu",
        ) as attached,
    ):
        while attached.stage != "active":
            loss_of(model, 0).backward()
        assert attached.profile is not None and attached.plan is not None
        calls = attached.profile.calls
        # Reads run one after the other here.
        least = [pause * len(call.streamed) for call in calls]
        assert all(few <= call.read_seconds < 3 * few for few, call in zip(least, calls, strict=True))
        assert attached.plan.predicted_seconds >= sum(least)
        assert attached.plan.stall_seconds > 0.5 * sum(least)
        # Weights in memory have no such time.
        resident = with_weights(attached.profile, [call.name for call in calls])
        assert not any(call.read_seconds for call in resident.calls)
        # It does not grow with the inputs.
        larger = enlarged(attached.profile, 2.0).calls
        assert [each.read_seconds for each in larger] == [each.read_seconds for each in calls]


@pytest.mark.parametrize("stream", ["auto", "layers.*"])
def test_a_budget(tmp_path: Path, stream: str) -> None:
    plain, model = freeze(Model()), freeze(on_meta())
    files = saved(plain, tmp_path)
    hardware = spillway.Hardware.named("h200")
    steps = [loss_of(plain, number).detach() for number in range(10)]
    with on_disk(model, files) as session:
        options: dict[str, Any] = {
            "blocks": "layers.*",
            "hardware": hardware,
            "min_bytes": 0,
            "session": session,
            "device": "cpu",
        }
        with spillway.attach(model, budget="64GiB", stream=stream, **options) as attached:
            for number, wanted in enumerate(steps):
                loss = loss_of(model, number)
                loss.backward()
                model.zero_grad()
                assert torch.equal(loss.detach(), wanted)
            assert attached.stage == "active"
            assert stream == "auto" or len(attached.streamed) == BLOCKS
        assert set(mapped(model, tmp_path)) >= frozen(model)
