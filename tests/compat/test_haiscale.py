"""haiscale's ``CPUOffload`` over our engine: what it says it does, fact by fact, and what it does not say.

Every test runs on the CPU's own backend and under the adversary, in a session in whose window nothing is left.
"""

from __future__ import annotations

import gc
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from spillway import EventKind, EventList, Session, UsageError
from spillway.compat import haiscale
from spillway.compat.haiscale import CPUOffload, TagInfo
from spillway.runtime.cpu import CpuBackend
from spillway.testing import AdversaryBackend
from steps import KiB, failing, small_batch, small_model, step
from support import assert_nothing_left

PAGE = Path(__file__).parents[2] / "docs" / "compat" / "haiscale.md"
LOGGER = "spillway.compat.haiscale"


class Waits(AdversaryBackend):
    """The adversary, and who has waited."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def wait(self, lane: Any, event: Any) -> None:
        self.waits.append(lane.name)
        super().wait(lane, event)


@pytest.fixture
def events() -> EventList:
    return EventList()


@pytest.fixture(params=["cpu", "adversary"])
def session(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, events: EventList, tmp_path: Path
) -> Iterator[Session]:
    """The default session, of which nothing may be left when the test ends. No tag is known in it."""
    adversary = Waits()
    backend = adversary.serve if request.param == "adversary" else CpuBackend
    monkeypatch.setattr(CPUOffload, "_tag_infos", {})
    with Session(window=0, spill_directory=tmp_path, backend=backend, recorder=events) as session:
        monkeypatch.setattr(Session, "_default", session)
        yield session
        gc.collect()
        assert session.disk_bytes == 0, "host memory is what was asked for"
        assert_nothing_left(session)
    adversary.check()


def exponentials(sizes: list[int]) -> Tensor:
    """A loss for which autograd saves a tensor of each size in KiB, in this order."""
    total = torch.zeros(())
    for size in sizes:
        total = total + torch.ones(size * KiB // 4, requires_grad=True).exp().sum()
    return total


def leaving(ratio: float, sizes: list[int], tag: str = "tag") -> list[int]:
    """Which of the sizes, distinct powers of two, leave in one pass over them."""
    context = CPUOffload(ratio, tag)
    with context:
        loss = exponentials(sizes)
    loss.backward()
    stats = context.hook.stats()
    assert stats.saved_bytes == sum(sizes) * KiB
    return [size for size in sizes if size & (stats.saved_bytes - stats.kept_bytes) // KiB]


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


# H1: the call


class Parts(nn.Module):
    """A model whose own forward says what leaves: its body, and in its body's middle another part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model(layers=4)
        self.ratio: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.ratio is None:
            return self.body(x)
        with CPUOffload(self.ratio, "begin"):
            x = self.body[0](x)
            with CPUOffload(offload_ratio=1 - self.ratio, tag="middle"):
                x = self.body[1](x)
            x = self.body[2](x)
        return self.body[3:](x)


def test_h1_entering_gives_none_and_the_object_has_its_ratio_its_tag_and_its_hook(session: Session) -> None:
    context = CPUOffload(0.25, "tag")
    with context as entered:
        assert entered is None
    assert (context.offload_ratio, context.tag) == (0.25, "tag")
    assert isinstance(context.hook, spillway.offload)


@pytest.mark.parametrize("arguments", [(), (0.5,)])
def test_h1_neither_argument_has_a_default(arguments: tuple[float, ...]) -> None:
    failing(TypeError, lambda: CPUOffload(*arguments))  # type: ignore[call-arg]


def test_h1_a_new_object_in_every_forward_and_gradients_are_bit_for_bit_the_plain_ones(session: Session) -> None:
    model, x = Parts(), small_batch()
    plain = step(model, x)
    for ratio in (0.5, 0.75, 0, 1, 0.25):
        model.ratio = ratio
        assert step(model, x) == plain


def test_h1_the_ratio_belongs_to_the_object_and_may_change_between_steps(session: Session) -> None:
    sizes = [8, 4, 2, 1]
    went = [leaving(ratio, sizes) for ratio in (0.5, 0.5, 1, 0, 0.2, 1.0)]
    assert went == [sizes, [4, 2, 1], sizes, [], [2, 1], sizes]
    with pytest.raises(FrozenInstanceError):
        CPUOffload(0.5, "tag").offload_ratio = 1  # type: ignore[misc]


def test_h1_a_tag_is_logged_once_with_its_ratio(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        for ratio, tag in ((0.25, "body"), (0.75, "body"), (0.5, "head")):
            CPUOffload(ratio, tag)
    said = messages(caplog)
    assert len(said) == 2
    assert "'body'" in said[0] and "0.25" in said[0]
    assert "'head'" in said[1] and "0.5" in said[1]


# H2: what is known of a tag


def test_h2_what_is_known_of_a_tag_outlives_the_object(session: Session) -> None:
    leaving(0.5, [4, 2, 1])
    gc.collect()
    info = CPUOffload._tag_infos["tag"]
    assert isinstance(info, TagInfo) and info == TagInfo("tag")
    assert (info.tag, info.is_first_iter, info.total_activations_memory) == ("tag", False, 7 * KiB)
    assert info.current_offload_memory == 0
    assert TagInfo("never used").is_first_iter
    assert TagInfo("never used").total_activations_memory == TagInfo("never used").current_offload_memory == 0


def test_h2_a_tag_can_be_watched_while_its_pass_runs(session: Session) -> None:
    info, seen = TagInfo("tag"), []
    for _ in range(2):
        with CPUOffload(0.5, "tag"):
            loss = torch.zeros(())
            for size in (4, 2, 1):
                loss = loss + exponentials([size])
                seen.append((info.is_first_iter, info.total_activations_memory, info.current_offload_memory))
        loss.backward()
        del loss
    # The first pass adds up; of the second, whose total is 7, neither 4 nor, together, 2 and 1 and 4 are half.
    first = [(True, total * KiB, total * KiB) for total in (4, 6, 7)]
    assert seen == [*first, *((False, 7 * KiB, left * KiB) for left in (0, 2, 3))]


@pytest.mark.parametrize("name", ["tag", "is_first_iter", "total_activations_memory", "current_offload_memory"])
def test_h2_what_is_known_of_a_tag_can_only_be_read(session: Session, name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(TagInfo("tag"), name, 1)


def test_h2_a_reset_inside_of_a_pass_lets_the_ratio_begin_anew(session: Session) -> None:
    for reset, left in ((False, 4), (False, 2), (True, 4)):
        context = CPUOffload(0.5, "tag")
        with context:
            loss = exponentials([1, 1])
            if reset:
                TagInfo("tag").reset_current_offload_memory()
            loss = loss + exponentials([1, 1])
        loss.backward()
        stats = context.hook.stats()
        assert stats.saved_bytes - stats.kept_bytes == left * KiB
    TagInfo("tag").reset_current_offload_memory()
    assert TagInfo("tag").current_offload_memory == 0


# H3: the first iteration


@pytest.mark.parametrize("ratio", [0, 0.5, 1])
def test_h3_the_first_iteration_offloads_everything_whatever_the_ratio_and_the_size(
    session: Session, events: EventList, ratio: float
) -> None:
    with CPUOffload(ratio, "tag"):
        loss = torch.ones(3, requires_grad=True).exp().sum() + exponentials([64, 1])
    assert [event.nbytes for event in events.events if event.kind is EventKind.LEAVE] == [12, 64 * KiB, KiB]
    loss.backward()


def test_h3_the_total_is_logged_when_the_first_pass_exits(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        with CPUOffload(0.5, "tag"):
            loss = exponentials([4, 2, 1])
            assert len(messages(caplog)) == 1  # that it is registered
        loss.backward()
        leaving(0.5, [4, 2, 1])
    said = messages(caplog)
    assert len(said) == 2
    assert "'tag'" in said[1] and str(7 * KiB) in said[1] and "7.0 KiB" in said[1]


# H4: afterwards


@pytest.mark.parametrize(
    ("ratio", "sizes", "went"),
    [
        (0.5, [8, 4, 2, 1], [4, 2, 1]),  # 8 of 15 is more than half, and what comes after it is not
        (0.6, [8, 4, 2, 1], [8, 1]),  # 9 of 15 is 0.6 exactly
        (0.5, [1, 2, 8, 4], [1, 2, 4]),
        (0.26, [1, 2, 8, 4], [1, 2]),
        (0, [1, 2, 8, 4], []),
        (1, [1, 2, 8, 4], [1, 2, 8, 4]),
    ],
)
def test_h4_each_tensor_leaves_while_it_fits_and_a_smaller_later_one_may_still_go(
    session: Session, events: EventList, ratio: float, sizes: list[int], went: list[int]
) -> None:
    leaving(0, sizes)
    events.events.clear()
    assert leaving(ratio, sizes) == went
    left = [event.nbytes // KiB for event in events.events if event.kind is EventKind.LEAVE]
    assert left == went[: len(left)]  # the last of them is held back, since backward asks for it first
    assert len(left) >= len(went) - 1


# H5: passes and tags


def test_h5_a_tag_around_several_blocks_applies_the_ratio_to_each(session: Session) -> None:
    went = []
    for _ in range(2):
        losses = []
        for _ in range(3):  # blocks of one forward: the very first counts
            context = CPUOffload(0.5, "block")
            with context:
                losses.append(exponentials([1] * 8))
            stats = context.hook.stats()
            went.append((stats.saved_bytes - stats.kept_bytes) // KiB)
            assert TagInfo("block").current_offload_memory == 0
            assert TagInfo("block").total_activations_memory == 8 * KiB
        sum(losses).backward()
        del losses
    assert went == [8, 4, 4, 4, 4, 4]


class Blocks(nn.Module):
    """A tag around each block of a model."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        for block in self.model:
            with CPUOffload(0.5, "block"):
                x = block(x)
        return x


def test_h5_a_model_with_a_tag_around_several_blocks_is_bit_for_bit_the_plain_one(session: Session) -> None:
    model, x = small_model(layers=4), small_batch()
    plain = step(model, x)
    for _ in range(3):
        assert step(Blocks(model), x) == plain


def test_h5_tags_beside_each_other_have_ratios_of_their_own(session: Session) -> None:
    sizes = {"encoder": [8, 4, 2, 1], "decoder": [1, 2, 4]}
    ratios = {"encoder": 0.2, "decoder": 0.5}
    went = [[leaving(ratios[tag], sizes[tag], tag) for tag in sizes] for _ in range(2)]
    assert went == [[[8, 4, 2, 1], [1, 2, 4]], [[2, 1], [1, 2]]]
    totals = [CPUOffload._tag_infos[tag].total_activations_memory for tag in sizes]
    assert totals == [15 * KiB, 7 * KiB]


def test_h5_a_tag_inside_of_another_takes_what_is_saved_in_it(session: Session) -> None:
    for _ in range(2):
        outer, inner = CPUOffload(1, "outer"), CPUOffload(1, "inner")
        with outer:
            loss = exponentials([1])
            with inner:
                loss = loss + exponentials([2])
                counts = [TagInfo(tag).current_offload_memory for tag in ("outer", "inner", "other")]
                assert counts == [KiB, 2 * KiB, 0]
            loss = loss + exponentials([4])
        loss.backward()
        del loss
        assert [context.hook.stats().saved_bytes // KiB for context in (outer, inner)] == [5, 2]


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 1)], ids=str)
def test_h5_every_tag_shows_the_lane_on_which_copies_leave_the_current_device(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    found = None if device.type == "cpu" else torch.device(device.type)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: device.index)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with Session(backend=AdversaryBackend().serve) as session:
        monkeypatch.setattr(Session, "_default", session)
        out, back = session.runtime(device).mover.streams
        assert TagInfo("encoder").stream is TagInfo("decoder").stream is out is not back


# H6: copies beside the computation


def test_h6_no_copy_of_a_forward_is_waited_for_while_the_window_has_room(
    monkeypatch: pytest.MonkeyPatch, events: EventList
) -> None:
    adversary = Waits()
    with Session(backend=adversary.serve, window="1MiB", recorder=events) as session:
        monkeypatch.setattr(Session, "_default", session)
        with CPUOffload(1, "tag"):
            loss = exponentials([128] * 4)
        # Under the adversary a copy is done when somebody waits for it.
        assert [event.kind for event in events.events] == [EventKind.LEAVE] * 4
        assert "compute" not in adversary.waits
        loss.backward()
    adversary.check()


def test_h6_what_the_window_holds_at_the_end_stays_and_is_soon_not_copied(
    monkeypatch: pytest.MonkeyPatch, events: EventList
) -> None:
    copied = []
    with Session(backend=AdversaryBackend().serve, window=8 * KiB, recorder=events) as session:
        monkeypatch.setattr(Session, "_default", session)
        for _ in range(4):
            events.events.clear()
            with CPUOffload(0.5, "tag"):
                loss = exponentials([4] * 8)
            loss.backward()
            counts = [sum(event.kind is kind for event in events.events) for kind in (EventKind.LEAVE, EventKind.TAKE)]
            copied.append(tuple(counts))
    # All eight, then four of them. Of these two come back, and two are in the window when backward begins.
    assert copied == [(8, 6), (4, 2), (2, 2), (2, 2)]


def test_h6_backward_waits_for_the_tensor_that_it_needs_and_the_next_are_on_their_way(
    monkeypatch: pytest.MonkeyPatch, events: EventList
) -> None:
    adversary = Waits()
    with Session(backend=adversary.serve, window=8 * KiB, recorder=events) as session:
        monkeypatch.setattr(Session, "_default", session)
        with CPUOffload(1, "tag"):
            loss = exponentials([4] * 6)
        # Two of 4 KiB are on their way out at once: the first is waited for when the third wants to go.
        out = [(event.kind.value, event.entry) for event in events.events]
        assert out[:5] == [("leave", 0), ("leave", 1), ("release", 0), ("leave", 2), ("release", 1)]
        events.events.clear()
        loss.backward()
        back = [(event.kind.value, event.entry) for event in events.events]
        assert [one for one in back if one[0] in ("return", "take")] == [
            *(("return", 3), ("return", 2), ("take", 3)),
            *(("return", 1), ("take", 2)),
            *(("return", 0), ("take", 1)),
            ("take", 0),
        ]
    adversary.check()


# H7: what it stands on


def test_h7_a_torch_that_was_not_tested_is_refused_by_the_packages_metadata() -> None:
    try:
        requirements = importlib.metadata.requires("spillway") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("spillway is not installed here")
    assert "torch<2.15,>=2.11" in requirements


# H8: a ResNet


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut, with activations in place."""

    def __init__(self, entering: int, width: int, stride: int) -> None:
        super().__init__()
        leaving = 4 * width
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(
            *(nn.Conv2d(entering, width, 1, bias=False), nn.BatchNorm2d(width), self.relu),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), self.relu),
            *(nn.Conv2d(width, leaving, 1, bias=False), nn.BatchNorm2d(leaving)),
        )
        self.shortcut = nn.Sequential()
        if entering != leaving:
            self.shortcut = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        y += self.shortcut(x)
        return self.relu(y)


def small_resnet() -> nn.Module:
    """ResNet-50's shape, with two bottlenecks a stage and a sixteenth of the channels."""
    torch.manual_seed(0)
    stem = (nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    stages, entering = [], 4
    for stage, width in enumerate((4, 8, 16, 32)):
        stages += [Bottleneck(entering, width, min(stage + 1, 2)), Bottleneck(4 * width, width, 1)]
        entering = 4 * width
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(entering, 10))


def resnet50() -> nn.Module:
    """The whole of it: of transformers, since torchvision has no build for torch's own on a CPU."""
    transformers = pytest.importorskip("transformers")

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.ResNetForImageClassification(transformers.ResNetConfig())

        def forward(self, images: Tensor) -> Tensor:
            return self.inner(images).logits  # type: ignore[no-any-return]

    torch.manual_seed(0)
    return Classifier()


@pytest.mark.parametrize("make", [small_resnet, pytest.param(resnet50, marks=pytest.mark.long)])
def test_h8_a_resnet_is_bit_for_bit_the_plain_one(session: Session, make: Any) -> None:
    plain, ours = make(), make()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for ratio in (0.5, 0.5, 0.9):
        context = CPUOffload(ratio, "resnet")
        assert step(ours, images, context) == step(plain, images)
        assert all(map(torch.equal, ours.buffers(), plain.buffers()))
    stats = context.hook.stats()
    assert 0.8 < (stats.saved_bytes - stats.kept_bytes) / stats.saved_bytes <= 0.9
    assert stats.reloaded_bytes > 0.5 * stats.saved_bytes


# H9: first passes that say nothing


def without_grad() -> None:
    with torch.no_grad(), CPUOffload(0.5, "tag"):
        exponentials([4, 2, 1])


def empty() -> None:
    with CPUOffload(0.5, "tag"):
        pass


def raised() -> None:
    with pytest.raises(ZeroDivisionError), CPUOffload(0.5, "tag"):  # noqa: PT012
        exponentials([4])
        raise ZeroDivisionError


@pytest.mark.parametrize("before", [without_grad, empty, raised])
def test_h9_a_first_pass_that_saved_nothing_or_raised_stays_first(
    session: Session, before: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        before()
    assert len(messages(caplog)) == 1, "no total was logged"
    info = TagInfo("tag")
    assert (info.is_first_iter, info.total_activations_memory, info.current_offload_memory) == (True, 0, 0)
    assert leaving(0.5, [4, 2, 1]) == [4, 2, 1]
    before()
    assert leaving(0.5, [4, 2, 1]) == [2, 1]


# H10: the size of a tensor


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.ones(3, 5), 60),
        (torch.ones(3, 5, dtype=torch.bfloat16), 30),
        (torch.ones(1).expand(7), 28),
        (torch.ones(0), 0),
        (torch.ones((), dtype=torch.complex128), 16),
    ],
    ids=str,
)
def test_h10_the_memory_of_a_tensor_is_element_size_times_elements(tensor: Tensor, nbytes: int) -> None:
    assert CPUOffload.get_tensor_memory(tensor) == CPUOffload(0.5, "tag").get_tensor_memory(tensor) == nbytes


# Beyond it


def test_a_ratio_is_learned_anew_when_shapes_change(session: Session) -> None:
    assert [leaving(0.5, sizes) for sizes in ([4, 2, 1], [4, 2, 1], [16, 8, 4], [16, 8, 4], [4, 2, 1])] == [
        *([4, 2, 1], [2, 1]),
        *([16, 8, 4], [8, 4]),
        [2, 1],
    ]


def test_the_total_is_that_of_the_last_pass_that_began_alike(session: Session) -> None:
    for sizes, total, went in (([4, 2, 1], 7, 7), ([4, 2, 1, 8], 15, 3), ([4, 2, 1], 7, 7), ([4, 2, 1], 7, 3)):
        assert sum(leaving(0.5, sizes)) == went
        assert TagInfo("tag").total_activations_memory == total * KiB


def test_bytes_that_several_tensors_save_are_counted_once(session: Session) -> None:
    with CPUOffload(0.5, "tag"):
        once = torch.ones(KiB // 4, requires_grad=True).exp()  # saves its result
        loss = (once.sin() + once.view(2, -1).cos().view(-1) + once * 2).sum()  # each but the last saves it again
    assert TagInfo("tag").total_activations_memory == KiB
    loss.backward()


def test_parameters_are_never_counted(session: Session) -> None:
    weight = nn.Parameter(torch.ones(KiB // 4))
    with CPUOffload(0.5, "tag"):
        loss = (weight * weight.view(-1)).sum() + exponentials([2])
    assert TagInfo("tag").total_activations_memory == 2 * KiB
    loss.backward()


# What cannot be meant


@pytest.mark.parametrize(
    ("arguments", "got", "expected"),
    [
        ((1.5, "tag"), "ratio: got 1.5", "a number from 0 (keep all) to 1 (offload all)"),
        ((-0.1, "tag"), "ratio: got -0.1", "a number from 0"),
        ((float("nan"), "tag"), "ratio: got nan", "a number from 0"),
        (("0.5", "tag"), "ratio: got '0.5'", "a number from 0"),
        ((None, "tag"), "ratio: got None", "a number from 0"),
        (("tag", 0.5), "tag: got 0.5", "a string"),
        ((0.5, None), "tag: got None", "a string; give each part of the model a name of its own"),
        ((0.5, ["tag"]), "tag: got ['tag']", "a string"),
    ],
)
def test_a_ratio_or_a_tag_that_cannot_be_meant_is_refused_and_registers_nothing(
    session: Session, arguments: tuple[Any, Any], got: str, expected: str
) -> None:
    message = failing(UsageError, lambda: CPUOffload(*arguments))
    assert got in message and f"expected {expected}" in message
    assert CPUOffload._tag_infos == {}


# The page


def public_names() -> set[str]:
    """What the adapter offers: its classes and all that they have, and the one private name that was always used."""
    names = set(haiscale.__all__) | {"_tag_infos"}
    for kind in (CPUOffload, TagInfo):
        members = set(vars(kind)) | set(inspect.get_annotations(kind))
        names |= {name for name in members if not name.startswith("_")}
    return names


def test_the_page_says_of_every_name_what_it_is_here() -> None:
    rows = [line.split(" | ")[0] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    said = {name for row in rows for name in re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", row)))}
    assert public_names() <= said, public_names() - said
    assert {"offload_ratio", "get_tensor_memory", "reset_current_offload_memory"} <= public_names()


def test_the_page_is_in_the_table_of_contents() -> None:
    assert " compat/haiscale.md\n" in (PAGE.parents[2] / "mkdocs.yml").read_text(encoding="utf-8")
