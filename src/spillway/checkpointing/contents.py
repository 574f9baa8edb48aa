"""What is compared and copied of tensors' contents: fingerprints, and copies of what a function writes in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

from spillway.regions.proofs import fingerprint, sums
from spillway.regions.tensors import PLAIN, below_modes, has_bits, is_strided, may_be_seed, tensors_in
from spillway.runtime.bytes import over


def print_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A fingerprint, if the bits of such a tensor say something: kernels leave workspaces and seeds unwritten."""
    if tensor.dtype is torch.uint8 or may_be_seed(tensor):
        return None
    if is_strided(tensor) and has_bits(tensor) and not tensor.untyped_storage().nbytes():
        # FSDP has taken the memory of a gathered parameter back.
        return None
    found = sums(tensor)
    return None if found is None else fingerprint(found)


def prints_of(output: Any) -> list[torch.Tensor | None]:
    """Fingerprints of all tensors that a function gives."""
    parts = tensors_in(tree_leaves(output))
    with below_modes(next((part for part in parts if type(part) not in PLAIN), None)):
        return [print_of(part) for part in parts]


def may_be_written(tensor: torch.Tensor, most: int) -> bool:
    """Whether a function that reaches this tensor may write it in place, and a copy takes no more bytes than that."""
    # Frozen parameters may be many. Whoever writes one in place is noticed by its version.
    is_parameter = type(tensor) is torch.nn.Parameter or (tensor.requires_grad and tensor.is_leaf)
    if is_parameter or not is_strided(tensor) or not has_bits(tensor):
        return False
    # Several elements in one place of memory cannot be written: torch refuses that.
    return tensor.untyped_storage().nbytes() <= most and (tensor.is_contiguous() or 0 not in tensor.stride())


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, without history."""
    with torch.no_grad():
        if type(tensor) not in PLAIN or not is_strided(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone()
        storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call, unused-ignore]
        return over(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def has_content_of(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor still has the content of an earlier copy."""
    a, b = print_of(tensor), print_of(copy)
    return a is None or b is None or torch.equal(a, b)


def overlap(tensors: Sequence[torch.Tensor], places: Iterable[int]) -> bool:
    """Whether one at these places shares some of its memory with another one."""
    spans = [_span_of(tensor) if is_strided(tensor) and has_bits(tensor) else None for tensor in tensors]
    for place in places:
        span = spans[place] if place < len(spans) else None
        if span is None:
            continue
        for other_place, other in enumerate(spans):
            if other_place != place and other is not None and span[0] < other[1] and other[0] < span[1]:
                return True
    return False


def _span_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where its memory begins and ends."""
    if type(tensor) not in PLAIN or not tensor.numel():
        return None
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As :func:`copy_of` each, with one kernel for many small tensors: batch norms have three each."""
    copies: list[torch.Tensor | None] = [None] * len(tensors)
    several: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if _is_simple(tensor):
            several.setdefault((tensor.dtype, tensor.device), []).append(place)
        else:
            copies[place] = copy_of(tensor)
    with torch.no_grad():
        for places in several.values():
            sources = [tensors[place].detach() for place in places]
            made = [torch.empty_like(source) for source in sources]
            torch._foreach_copy_(made, sources)
            for place, copy in zip(places, made, strict=True):
                copies[place] = copy
    return copies  # type: ignore[return-value]


def write_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give tensors their earlier content, which no version counter tells."""
    if not pairs:
        return
    several: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(tensor for tensor, _ in pairs)):
        for tensor, content in pairs:
            if _is_simple(tensor):
                targets, contents = several.setdefault((tensor.dtype, tensor.device), ([], []))
                targets.append(tensor.detach())
                contents.append(content)
            else:
                tensor.detach().copy_(content)
        for targets, contents in several.values():
            torch._foreach_copy_(targets, contents)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether it is nothing but its bytes in order."""
    if type(tensor) not in PLAIN or not is_strided(tensor) or not tensor.is_contiguous():
        return False
    return not (tensor.is_neg() or tensor.is_conj())
