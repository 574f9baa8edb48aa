"""A storage on disk, through host memory: cut into pieces, and more of it than there is host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import spillway
from spillway.runtime import tiers
from spillway.runtime.cpu import CpuBackend
from spillway.testing import AdversaryBackend

PIECE = 8192


class Staged(CpuBackend):
    """Goes through host memory, as an accelerator does."""

    direct_disk = False


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "PIECE_BYTES", PIECE)


def gradient(session: spillway.Session | None, elements: int) -> torch.Tensor:
    torch.manual_seed(0)
    leaf = torch.randn(elements, requires_grad=True)
    if session is None:
        (leaf * 1).sin().exp().cos().sum().backward()
    else:
        with spillway.offload(session=session, tier="disk", min_bytes=0):
            loss = (leaf * 1).sin().exp().cos().sum()
        loss.backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("elements", [1, PIECE // 4, PIECE // 4 + 1, 5 * PIECE // 4, 5 * PIECE // 4 - 3])
@pytest.mark.parametrize("window", [0, 3 * PIECE])
def test_pieces_of_all_lengths(tmp_path: Path, elements: int, window: int) -> None:
    options = {"spill_directory": tmp_path, "allow_memory_filesystem": True, "window": window}
    with spillway.Session(backend=Staged, **options) as session:  # type: ignore[arg-type]
        for _ in range(2):
            assert torch.equal(gradient(session, elements), gradient(None, elements))
        session.synchronize()
        assert session.used_bytes == (0, 0)


def test_pieces_under_the_adversary(tmp_path: Path) -> None:
    adversary = AdversaryBackend()
    options = {"spill_directory": tmp_path, "allow_memory_filesystem": True, "window": 2 * PIECE}
    with spillway.Session(backend=adversary.serve, **options) as session:  # type: ignore[arg-type]
        for _ in range(3):
            assert torch.equal(gradient(session, 3 * PIECE), gradient(None, 3 * PIECE))
        session.synchronize()
        assert session.used_bytes == (0, 0)
    adversary.check()


def test_a_storage_larger_than_the_host_budget_goes_piece_by_piece(tmp_path: Path) -> None:
    options = {"spill_directory": tmp_path, "allow_memory_filesystem": True, "window": 0}
    with spillway.Session(backend=Staged, host_budget=2 * PIECE, **options) as session:  # type: ignore[arg-type]
        context = spillway.offload(session=session, tier="disk", min_bytes=0)
        leaf = torch.randn(8 * PIECE, requires_grad=True)
        with context:
            loss = (leaf * 1).sin().cos().sum()
        loss.backward()
        assert context.stats().kept_bytes == 0
        assert context.stats().reloaded_bytes == 4 * 8 * PIECE
        assert session.host_bytes <= 3 * PIECE


def test_pieces_of_a_storage_that_does_not_fit_are_given_back(tmp_path: Path) -> None:
    options = {"spill_directory": tmp_path, "allow_memory_filesystem": True, "disk_budget": 2 * PIECE}
    with spillway.Session(backend=Staged, **options) as session:  # type: ignore[arg-type]
        context = spillway.offload(session=session, tier="disk", min_bytes=0)
        with context:
            loss = torch.randn(3 * PIECE // 4, requires_grad=True).exp().sum()
        assert context.stats().kept_bytes == 3 * PIECE
        assert session.used_bytes == (0, 0)
        loss.backward()
