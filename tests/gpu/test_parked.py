"""Parked models on a GPU: bits, memory to the byte, and code that no guard sees."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from parking.conftest import all_are_large
from parking.test_parked import OPTIMIZERS, copied, nbytes_of, reinforce, same, tensors_of
from spillway.errors import ParkedError, UnsupportedError
from spillway.parking import found
from spillway.parking.guards import CAN_REFUSE
from spillway.parking.parked import Parking

pytestmark = pytest.mark.gpu
__all__ = ["all_are_large"]

DEVICE = torch.device("cuda", 0)
WIDTH, BLOCKS = 1024, 6
REFUSED = r"is parked|out of bounds for storage of size 0"
"""Torch checks the bounds of a view before it looks at bytes."""
refuses = pytest.mark.skipif(not CAN_REFUSE, reason="this torch cannot let a storage refuse access")


@pytest.fixture
def session() -> Iterator[spillway.Session]:
    with spillway.Session() as made:
        yield made
        for each in list(made.of(Parking).returning):
            each.synchronize()


def model_of(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS))
    return nn.Sequential(*blocks).to(DEVICE, torch.bfloat16)


def batch(width: int = WIDTH) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return torch.randn(64, width, device=DEVICE, dtype=torch.bfloat16, generator=generator)


def trained(width: int = WIDTH) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = model_of(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(2):
        model(batch(width)).float().square().mean().backward()
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def allocated() -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def rounded(tensors: list[Tensor]) -> int:
    """Bytes that the caching allocator gives to these: multiples of 512."""
    sizes = {each.untyped_storage(): each.untyped_storage().nbytes() for each in tensors if each.is_cuda}
    return sum(-(-nbytes // 512) * 512 for nbytes in sizes.values())


@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"tier": "disk"}, {"release": True}], ids=str)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_loop_of_reinforcement_learning(
    make: str, options: dict[str, Any], session: spillway.Session, deterministic: None
) -> None:
    wanted = reinforce(lambda *models, **_: nullcontext(), OPTIMIZERS[make], device=DEVICE)
    got = reinforce(
        lambda *models, **more: spillway.parked(*models, session=session, **options, **more),
        OPTIMIZERS[make],
        device=DEVICE,
    )
    assert same(got, wanted)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_memory_is_free_to_the_byte(tier: str, session: spillway.Session) -> None:
    model, optimizer = trained()
    tensors = tensors_of(model, optimizer)
    wanted, before = copied([each.cpu() for each in tensors]), allocated()
    expected, parked_bytes = rounded(tensors), nbytes_of([each for each in tensors if each.is_cuda])
    parking = spillway.park(model, optimizer=optimizer, tier=tier, session=session)
    assert parking.nbytes == parked_bytes
    assert before - allocated() == expected
    parking.unpark()
    parking.synchronize()
    assert allocated() == before
    assert same([each.cpu() for each in tensors], wanted)


def test_so_much_as_is_asked_for(session: spillway.Session) -> None:
    model, optimizer = trained()
    before = allocated()
    for asked in (1, 1 << 20, 5_000_000, 20_000_000):
        with spillway.parked(model, optimizer=optimizer, bytes=asked, session=session) as parking:
            # A storage is parked whole, and the allocator rounds each up to 512 bytes.
            assert asked <= parking.nbytes <= before - allocated() < asked + WIDTH * WIDTH * 2 + (1 << 15)
        parking.synchronize()
        assert allocated() == before


def test_memory_is_given_to_the_driver_if_asked(session: spillway.Session) -> None:
    model, optimizer = trained(width=4096)
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    with spillway.parked(model, optimizer=optimizer, release=True, session=session) as parking:
        assert torch.cuda.mem_get_info()[0] - free >= 0.9 * parking.nbytes
    parking.synchronize()


def test_a_hundred_cycles_leave_nothing(session: spillway.Session) -> None:
    model, optimizer = trained()
    wanted = copied(tensors_of(model, optimizer))
    levels = set()
    for number in range(100):
        with spillway.parked(model, optimizer=optimizer, reuse=number % 2 == 0, session=session):
            inside = allocated()
        with torch.no_grad():
            model(batch())
        if number >= 2:
            levels.add((inside, allocated(), torch.cuda.memory_reserved(), session.host_bytes))
    assert len(levels) == 1
    assert same(tensors_of(model, optimizer), wanted)


def test_the_second_time_nothing_is_copied_unless_it_was_written(session: spillway.Session) -> None:
    model, optimizer = trained()
    for number in range(3):
        with spillway.parked(model, reuse=True, session=session) as parking:
            assert parking.copied_bytes == (0 if number else parking.nbytes)
    # Fused steps change no version counter.
    optimizer.step()
    wanted = copied(list(model.parameters()))
    with spillway.parked(model, reuse=True, session=session) as parking:
        assert parking.copied_bytes == sum(each.nbytes for each in model.parameters())
    assert same(list(model.parameters()), wanted)


@pytest.fixture(params=["as this torch allows", "each use waits"])
def late(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[spillway.Session, torch.Stream]]:
    """A session, and its stream for copies back. Uses from Python may wait each for itself without the second guard."""
    if request.param == "each use waits":
        monkeypatch.setattr(found, "CAN_REFUSE", True)
    back = torch.Stream(device=DEVICE)
    with spillway.Session(streams={"back": back}) as made:
        yield made, back


def sleep_on(stream: torch.Stream) -> None:
    with stream:
        torch.cuda._sleep(200_000_000)


def test_uses_wait_for_copies_that_are_late(late: tuple[spillway.Session, torch.Stream]) -> None:
    session, back = late
    model, _ = trained()
    for use in (
        lambda: model(batch()),
        lambda: model[0][0].weight.float().sum(),
        lambda: model[-1][0].bias.grad.clone(),
        lambda: torch._foreach_norm(list(model.parameters()))[-1],
    ):
        wanted = use()
        parking = spillway.park(model, session=session)
        sleep_on(back)
        parking.unpark()
        assert torch.equal(use(), wanted)
        parking.synchronize()


def test_kernels_of_other_streams_are_done_before_memory_is_free(session: spillway.Session) -> None:
    model, _ = trained()
    weight = model[0][0].weight
    wanted = weight.float().sum()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        total = weight.detach().float().sum()
    with spillway.parked(model, session=session):
        # It takes the memory that was given back.
        others = [torch.zeros(WIDTH * WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(BLOCKS)]
    torch.cuda.synchronize()
    assert torch.equal(total, wanted)
    del others


def test_memory_of_a_gradient_that_is_dropped_on_its_way_is_not_overwritten(
    late: tuple[spillway.Session, torch.Stream],
) -> None:
    session, back = late
    model, _ = trained()
    parking = spillway.park(model, session=session)
    sleep_on(back)
    parking.unpark()
    model.zero_grad()
    others = [torch.zeros(WIDTH * WIDTH, dtype=torch.bfloat16, device=DEVICE) for _ in range(2 * BLOCKS)]
    parking.synchronize()
    torch.cuda.synchronize()
    assert not any(each.any() for each in others)


# Code that no guard sees.


@refuses
def test_a_backward_while_parked_is_an_error_and_its_graph_is_right_afterwards(session: spillway.Session) -> None:
    model, _ = trained()
    model.zero_grad()
    model(batch()).float().square().mean().backward()
    wanted = [each.grad.clone() for each in model.parameters() if each.grad is not None]
    model.zero_grad()
    loss = model(batch()).float().square().mean()
    with spillway.parked(model, session=session) as parking:
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward(retain_graph=True)
        # The process still works.
        torch.cuda.synchronize()
    model.zero_grad()
    # Its weights were waited for at once.
    loss.backward()
    parking.synchronize()
    assert same([each.grad for each in model.parameters() if each.grad is not None], wanted)


@refuses
def test_views_and_state_dicts_from_before_are_errors_while_parked(session: spillway.Session) -> None:
    model, _ = trained()
    view, state = model[0][0].weight.detach()[1:], model.state_dict()
    wanted = view.clone()
    with spillway.parked(model, session=session) as parking:
        for use in (
            lambda: view + 1,
            view.sum,
            view.cpu,
            view.data_ptr,
            lambda: view.zero_(),
            lambda: torch.mm(batch(), view.t()),
            lambda: torch.save(state, io.BytesIO()),
        ):
            with pytest.raises(RuntimeError, match=REFUSED):
                use()
            torch.cuda.synchronize()
    parking.synchronize()
    assert torch.equal(view, wanted)
    torch.save(state, io.BytesIO())


def test_uses_from_python_are_typed_errors(session: spillway.Session) -> None:
    model, optimizer = trained()
    with spillway.parked(model, optimizer=optimizer, session=session):
        for use in (
            lambda: model(batch()),
            optimizer.step,
            model.state_dict,
            lambda: model[0][0].weight.sum(),
            lambda: torch._foreach_norm([each.grad for each in model.parameters()]),
        ):
            with pytest.raises(ParkedError):
                use()


def test_without_memory_on_the_device_all_stays_parked(session: spillway.Session) -> None:
    model, optimizer = trained(width=4096)
    wanted = copied([each.cpu() for each in tensors_of(model, optimizer)])
    parking = spillway.park(model, optimizer=optimizer, release=True, session=session)
    free = torch.cuda.mem_get_info()[0]
    hoard = torch.empty(free - (64 << 20), dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ParkedError, match=r"unpark\(\) needs .* Free memory, and call unpark\(\) again"):
        parking.unpark()
    assert parking.is_parked
    with pytest.raises(ParkedError):
        model(batch(4096))
    del hoard
    torch.cuda.empty_cache()
    parking.unpark()
    assert same([each.cpu() for each in tensors_of(model, optimizer)], wanted)


@refuses
def test_a_capture_cannot_wait_for_copies(session: spillway.Session) -> None:
    model, _ = trained()
    with torch.no_grad():
        model(batch())
    x = batch()
    parking = spillway.park(model, session=session)
    parking.unpark()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(UnsupportedError, match="before the capture"), torch.no_grad(), torch.cuda.graph(graph):
        model(x)
    torch.cuda.synchronize()
    parking.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x)
    graph.replay()
    with torch.no_grad():
        assert torch.equal(y, model(x))


# Beside the rest.


def test_streamed_weights(session: spillway.Session) -> None:
    def run(*, parks: bool) -> list[Tensor]:
        model = model_of()
        model[:4].requires_grad_(False)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], fused=True)
        found = []
        with spillway.attach(model, policy=spillway.Recompute(), stream="*", device=DEVICE, session=session):
            for _ in range(4):
                loss = model(batch()).float().square().mean()
                loss.backward()
                if parks:
                    with spillway.parked(model, optimizer=optimizer, session=session) as parking:
                        assert parking.nbytes > 0
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.detach())
        return [*found, *copied(list(model.parameters()))]

    assert same(run(parks=True), run(parks=False))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_an_optimizer_with_states_on_both(fraction: float, session: spillway.Session) -> None:
    def run(*, parks: bool) -> list[Tensor]:
        model = model_of()
        optimizer = spillway.OffloadedOptimizer(
            model.parameters(), torch.optim.AdamW, fraction=fraction, lr=1e-3, session=session
        )
        for _ in range(3):
            model(batch()).float().square().mean().backward()
            if parks:
                with spillway.parked(model, optimizer=optimizer, session=session) as parking:
                    assert parking.nbytes > 0
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        found = copied(list(model.parameters()))
        optimizer.close()
        return found

    assert same(run(parks=True), run(parks=False))


@pytest.mark.parametrize("kind", ["bitsandbytes 4 bits", "bitsandbytes 8 bits", "torchao"])
def test_quantized_weights(kind: str, session: spillway.Session) -> None:
    layer = nn.Linear(256, 256, dtype=torch.bfloat16)
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        model: nn.Module = layer.to(DEVICE)
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    else:
        library = pytest.importorskip("bitsandbytes")
        made = (
            library.nn.Linear4bit(256, 256, compute_dtype=torch.bfloat16, quant_type="nf4")
            if kind == "bitsandbytes 4 bits"
            else library.nn.Linear8bitLt(256, 256, has_fp16_weights=False)
        )
        made.load_state_dict(layer.state_dict())
        model = made.to(DEVICE)
    model.requires_grad_(False)
    x = torch.randn(8, 256, device=DEVICE, dtype=torch.bfloat16)
    wanted = model(x)
    for _ in range(3):
        with spillway.parked(model, session=session) as parking:
            assert parking.nbytes >= 256 * 256 // 2
            with pytest.raises(ParkedError):
                model(x)
        assert torch.equal(model(x), wanted)
