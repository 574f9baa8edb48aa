"""Ranges of bytes, and the tensors that are made of them."""

from __future__ import annotations

import torch

from spillway.runtime.bytes import Bytes


def test_a_range_has_one_tensor() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    some = Bytes(memory.untyped_storage(), 8, 16)
    assert torch.equal(some.tensor(), memory[8:24])
    assert some.tensor() is some.tensor()
    assert some.tensor().data_ptr() == memory.data_ptr() + 8


def test_what_was_made_in_inference_mode_is_written_outside_of_it() -> None:
    some = Bytes.of(torch.zeros(16))
    with torch.inference_mode():
        assert some.tensor().is_inference()
    some.tensor().fill_(1)
    assert not some.tensor().is_inference()
