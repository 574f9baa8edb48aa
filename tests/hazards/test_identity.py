"""Hazards 16 to 18 and 22: what is the same tensor, what only looks like it, and how many bytes it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from spillway import EventKind
from spillway.policies import Offload
from support import Context, Saves, Trial, grads

ROW = 1024
"""Floats in a row: enough that what moves is not rounded up to a page of its own."""


ALIKE: dict[str, Callable[[torch.Tensor], list[torch.Tensor]]] = {
    "a matrix and its transpose": lambda x: [x, x.t()],
    "equal shape, other start": lambda x: list(x.chunk(3, dim=-1)),
    "equal start, other shape": lambda x: [x[:6], x[:3], x[:, :6]],
    "equal start and shape, other strides": lambda x: [x[:6, :6], x.t()[:6, :6]],
    "equal start, other dtype": lambda x: [x, x.view(torch.int32)],
    "flipped and shifted": lambda x: [x[1:], x[:-1], x.flip(0)],
    "overlapping windows": lambda x: [x.view(-1).unfold(0, 8, 4), x.view(-1).unfold(0, 4, 8)],
    "a diagonal and a column": lambda x: [x.diagonal(), x[:, 0], x[0]],
}


@pytest.mark.parametrize("alike", ALIKE)
def test_h16_tensors_that_look_alike_are_not_confused(trial: Trial, alike: str) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(12, 12, requires_grad=True)
        source = torch.randn(12, 12)
        with context():
            views = ALIKE[alike](source)
            # Weighted by place, so that two of them exchanged would show.
            loss = Saves.apply(leaf, *views).sum()
            loss = loss + sum(Saves.apply(leaf, view).sum() for view in reversed(views))
        del views, source
        trial.push_out()
        loss.backward()
        yield from grads(leaf)

    trial(step)


def test_h16_attention_over_chunks_of_one_projection(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        hidden, projection = torch.randn(2, 16, 32, requires_grad=True), torch.nn.Linear(32, 96)
        with context():
            query, key, value = projection(hidden).chunk(3, dim=-1)
            weights = (query @ key.transpose(-1, -2)).softmax(-1)
            loss = ((weights @ value) * query.sigmoid() * key.tanh()).square().sum()
        del query, key, value, weights
        loss.backward()
        yield from grads(hidden, *projection.parameters())

    trial(step)


def bytes_out(trial: Trial, save: Callable[[torch.Tensor], list[torch.Tensor]], *shape: int) -> int:
    """How many bytes leave when the tensors that ``save`` makes of a fresh one are saved, each by its own node."""
    leaf = torch.randn(1, requires_grad=True)
    tensors = save(torch.randn(*shape))
    total = sum(float((1 + place) * tensor.sum()) for place, tensor in enumerate(tensors))
    trial.events.events.clear()
    with trial.offload(policy=Offload()):
        loss = torch.zeros(())
        for place in range(len(tensors)):
            loss = loss + Saves.apply(leaf, tensors[place]).sum() * (1 + place)
    nbytes = trial.nbytes(EventKind.LEAVE)
    tensors.clear()
    trial.push_out()
    (gradient,) = torch.autograd.grad(loss, [leaf])
    assert float(gradient) == pytest.approx(total, rel=1e-3, abs=1e-2)
    assert trial.count(EventKind.TAKE) > 0
    return nbytes


def test_h17_one_tensor_saved_many_times_leaves_once(trial: Trial) -> None:
    assert bytes_out(trial, lambda x: [x, x, x], 4, ROW) == 4 * ROW * 4


def test_h17_views_of_one_storage_leave_once(trial: Trial) -> None:
    assert bytes_out(trial, lambda x: [x, x.t(), x[:], x.view(2, -1), x[1:], x[0]], 4, ROW) == 4 * ROW * 4


def test_h17_chunks_leave_once(trial: Trial) -> None:
    # The chunks of a projection interleave in memory: each reaches nearly all of it.
    assert bytes_out(trial, lambda x: [*x.chunk(3, dim=-1), *x.chunk(3, dim=-1)], 8, 3 * ROW) == 8 * 3 * ROW * 4


@pytest.mark.parametrize("rounds", [1, 2])
def test_h17_slices_that_do_not_overlap_leave_once_each(trial: Trial, rounds: int) -> None:
    """Two rows of a large tensor, used in turn, each of them twice."""
    assert bytes_out(trial, lambda x: [x[0], x[5]] * rounds, 8, ROW) == 2 * ROW * 4


def test_h17_a_residual_stream_leaves_once_a_layer(trial: Trial) -> None:
    """Normalised once and used by three projections, as in a decoder: the bytes are those of distinct storages."""
    width, tokens = 64, 32
    projections = [torch.nn.Linear(width, width, bias=False) for _ in range(3)]
    leaf = torch.randn(tokens, width, requires_grad=True)
    distinct: dict[torch.UntypedStorage, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        if not isinstance(base, torch.nn.Parameter):
            distinct[tensor.untyped_storage()] = tensor.untyped_storage().nbytes()
        return tensor

    def forward() -> torch.Tensor:
        hidden = torch.nn.functional.layer_norm(leaf * 2, (width,))
        query, key, value = (projection(hidden) for projection in projections)
        return ((query @ key.t()).softmax(-1) @ value).square().sum()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    context = trial.offload()
    with context:
        loss = forward()
    assert context.stats().saved_bytes == sum(distinct.values())
    assert trial.nbytes(EventKind.LEAVE) == sum(distinct.values()) == context.stats().offloaded_bytes
    loss.backward()


def test_h17_saved_by_two_graphs_leaves_once(trial: Trial) -> None:
    shared = torch.randn(ROW)
    one, two = torch.randn(ROW, requires_grad=True), torch.randn(ROW, requires_grad=True)
    with trial.offload():
        first = (shared * one).sum()
    with trial.offload():
        second = (shared * two).sum()
    trial.push_out()
    assert trial.nbytes(EventKind.RELEASE) == ROW * 4
    content = shared.clone()
    del shared
    first.backward()
    second.backward()
    assert torch.equal(*grads(one), content)
    assert torch.equal(*grads(two), content)


def test_h18_an_address_is_used_again(trial: Trial) -> None:
    """Each content lives at an address that others had before it, while the others wait in the tier."""
    addresses: set[int] = set()
    collisions = 0
    leaf = torch.randn(1, requires_grad=True)
    losses: list[torch.Tensor] = []
    for number in range(40):
        with trial.offload():
            content = torch.full((ROW,), float(number))
            collisions += content.data_ptr() in addresses
            addresses.add(content.data_ptr())
            losses.append(Saves.apply(leaf, content).sum())
        del content
        trial.push_out()
    assert collisions > 0, "the allocator handed no address out again: the test proves nothing"
    for number in (*range(0, 40, 2), *range(39, 0, -2)):
        (gradient,) = torch.autograd.grad(losses[number], [leaf])
        assert float(gradient) == number * ROW


def test_h18_an_address_is_used_again_within_one_pass(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(ROW, requires_grad=True)
        hidden = leaf * 2
        with context():
            for number in range(20):
                hidden = (hidden + number).sin()
                hidden = hidden * hidden.detach().clone()  # freed at once, and of equal size
        hidden.sum().backward()
        yield from grads(leaf)

    trial(step)


def test_h22_a_broadcast_tensor_leaves_as_small_as_it_is(trial: Trial) -> None:
    assert bytes_out(trial, lambda x: [x.expand(1000, ROW)], 1, ROW) == ROW * 4
    assert bytes_out(trial, lambda x: [x.expand(ROW, 1000)], ROW, 1) == ROW * 4
    assert bytes_out(trial, lambda x: [x.view(4, 1, ROW // 4).expand(4, 50, ROW // 4)], ROW) == ROW * 4


def test_h22_a_slice_leaves_without_the_rest(trial: Trial) -> None:
    alignment = 512
    row = bytes_out(trial, lambda x: [x[70]], 100, ROW)
    assert row == ROW * 4
    odd = bytes_out(trial, lambda x: [x[1001 : 1001 + ROW]], 100 * ROW)
    assert ROW * 4 <= odd <= ROW * 4 + alignment
    repeated = bytes_out(trial, lambda x: [x[70].expand(500, ROW)], 100, ROW)
    assert repeated == ROW * 4


@pytest.mark.parametrize("start", [0, 1, 7, 127, 128, 129])
def test_h22_a_slice_comes_back_exact_and_as_aligned_as_it_was(trial: Trial, start: int) -> None:
    """Kernels choose their code by alignment, and their last bits with it."""
    source = torch.randn(100 * ROW)
    window = source[start + 500 : start + 500 + ROW]
    content, alignment = window.clone(), window.data_ptr() % 64
    del window
    taken = [source]
    del source
    back = trial.round_trip(lambda: taken.pop()[start + 500 : start + 500 + ROW])
    assert torch.equal(back, content)
    assert back.data_ptr() % 64 == alignment
    assert trial.count(EventKind.TAKE) == 1


def test_h22_a_row_of_a_data_set_that_lives_on(trial: Trial) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        data, weight = torch.randn(64, ROW), torch.randn(ROW, requires_grad=True)
        for row in (3, 40, 3):
            with context():
                loss = (data[row] * weight).sin().sum() + (data[row : row + 2] * weight).sum()
            loss.backward()
        yield from grads(weight)

    trial(step)
