"""The sums of a tensor's bytes, of which its fingerprint is made."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spillway.checkpointing.checks import _FEW, _SMALL, Fingerprints, _rows, fingerprint_of, sums

_TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64)


def made(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    numbers = torch.randint(0, 256, (count * dtype.itemsize,), generator=torch.Generator().manual_seed(seed))
    return (numbers % 2).bool()[:count] if dtype is torch.bool else numbers.to(torch.uint8).view(dtype)[:count]


def found(tensor: torch.Tensor) -> torch.Tensor:
    told = sums(tensor)
    assert told is not None
    return told


@given(st.integers(1, 200_000), st.sampled_from(_TYPES), st.data())
@settings(max_examples=150, deadline=None)
def test_each_changed_bit_is_seen(count: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = made(count, dtype)
    before = found(tensor)
    assert before.dtype is torch.int64 and before.numel() <= min(_FEW, max(_SMALL, count * dtype.itemsize // 8 // 48))
    assert torch.equal(before, found(tensor.clone()))
    place = data.draw(st.integers(0, count - 1))
    if dtype is torch.bool:
        tensor[place] = ~tensor[place]
    else:
        tensor.view(torch.uint8)[place * dtype.itemsize + data.draw(st.integers(0, dtype.itemsize - 1))] ^= 1
    assert not torch.equal(before, found(tensor))


@pytest.mark.parametrize(
    "shape", [(64, 512), (8, 256, 96), (1024, 1000), (4, 30, 64, 64), (251, 241 * 4), (3, 61 * 512)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_has_changed_places_is_seen(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Tokens, heads, halves: parts along any dimension, one by another or all by some; and dimensions themselves."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = found(tensor)
    others = []
    for dim, size in enumerate(shape):
        others += [tensor.roll(by, dim) for by in (1, 2, size // 2, size - 1)]
        for distance in sorted({1, 2, 16, size // 4, size // 2, size - 1} & set(range(1, size))):
            order = torch.arange(size)
            order[0], order[distance] = distance, 0
            others.append(tensor.index_select(dim, order))
        others.append(tensor.flip(dim))
    others += [tensor.transpose(a, b).contiguous() for a in range(len(shape)) for b in range(a)]
    for other in others:
        assert other.shape != tensor.shape or not torch.equal(other, tensor)
        assert not torch.equal(before, found(other))


@pytest.mark.parametrize("of", ["whole", "channels last", "gaps", "odd", "complex", "scalar"])
def test_any_element_tells_however_it_lies(of: str) -> None:
    picture = torch.randn(2, 64, 56, 56)
    tensor = {
        "whole": picture.to(torch.bfloat16),
        "channels last": picture.to(memory_format=torch.channels_last),
        "gaps": picture[..., ::2],
        "odd": picture.to(torch.bfloat16)[..., :-1].flatten()[1:],
        "complex": torch.randn(64, 64, dtype=torch.complex64),
        "scalar": torch.tensor(2.0),
    }[of]
    before = found(tensor)
    assert torch.equal(before, found(tensor)) and before.numel() <= _FEW
    for place in (0, tensor.numel() // 3, tensor.numel() - 1):
        other = tensor.clone(memory_format=torch.preserve_format)
        other[tuple(torch.unravel_index(torch.tensor(place), tensor.shape))] += 1
        assert not torch.equal(before, found(other))
    for dim in range(tensor.dim() if tensor.dim() == 4 else 0):
        # Two that change places.
        swapped = tensor.clone(memory_format=torch.preserve_format)
        swapped.select(dim, 0).copy_(tensor.select(dim, 1))
        swapped.select(dim, 1).copy_(tensor.select(dim, 0))
        assert not torch.equal(before, found(swapped))


def test_sums_are_those_of_rows_and_of_rows_of_these() -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (1 << 18,), generator=torch.Generator().manual_seed(0))
    while words.numel() > _FEW or words.numel() == 1 << 18:
        (rows, size), (apart, _) = _rows(words.numel())
        words = torch.stack([words[row * apart : row * apart + size] for row in range(rows)]).sum(0)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(words, found(torch.randint(-(1 << 62), 1 << 62, (1 << 18,), generator=generator)))


def test_what_lies_otherwise_and_is_the_same_in_memory_is_the_same() -> None:
    tensor = made(64 * 1024, torch.bfloat16).view(64, 1024)
    assert torch.equal(found(tensor), found(tensor.t()))
    assert not torch.equal(found(tensor), found(tensor.t().contiguous()))
    assert torch.equal(found(tensor[:, ::2]), found(tensor[:, ::2].contiguous()))


def test_nan_and_zeros_are_told_apart_by_their_bits() -> None:
    nan = torch.full((100_000,), float("nan"))
    assert torch.equal(found(nan), found(nan.clone()))
    assert not torch.equal(found(torch.zeros(100_000)), found(-torch.zeros(100_000)))


def test_what_is_told_is_not_the_tensor_itself() -> None:
    tensor = torch.arange(64)
    told = found(tensor)
    tensor += 1
    assert torch.equal(told, torch.arange(64))


@pytest.mark.parametrize("width", [96, 256, 500, 2048])
@pytest.mark.parametrize("tokens", [61, 62, 64, 122, 183, 244, 251, 502, 610])
def test_two_tokens_that_change_places_are_seen_at_any_distance(tokens: int, width: int) -> None:
    tensor = torch.randn(tokens, width, generator=torch.Generator().manual_seed(0))
    before = found(tensor)
    for distance in range(1, tokens):
        tensor[[0, distance]] = tensor[[distance, 0]]
        assert not torch.equal(before, found(tensor)), distance
        tensor[[0, distance]] = tensor[[distance, 0]]


@given(st.integers(_SMALL + 1, 1 << 34))
@settings(max_examples=300, deadline=None)
def test_rows_cover_all_words_and_need_no_counter(count: int) -> None:
    """Torch takes one for 256 rows; for 64, if rows begin at even distances, since it reads several columns at once."""
    (rows, last), (apart, _) = _rows(count)
    assert (rows - 1) * apart + last == count
    assert 61 <= rows <= 251
    assert 0 < apart <= last < apart + rows * 100
    assert apart % 2
    assert math.gcd(apart, count) == 1
    # What is held meanwhile: of 1 MiB and more, about a fiftieth at most.
    assert last <= count * 0.13
    assert last <= count * 0.0206 or count < 1 << 17


def test_fingerprints_of_several_tensors_are_those_of_each() -> None:
    tensors = [torch.arange(count, dtype=torch.float64) for count in (3, 5000, 7, 40000, 1)]
    several = Fingerprints()
    for number, tensor in enumerate(tensors):
        several.add(number, tensor, number)
    several.compute()
    for number, tensor in enumerate(tensors):
        alone = fingerprint_of(tensor)
        assert alone is not None and torch.equal(several.found[number], alone)
