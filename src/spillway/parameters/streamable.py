"""The parameters of blocks that can be streamed, and the optimizers that can step them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.nn import Module, Parameter

from spillway._torch import is_wrapper, storage_key
from spillway.checkpointing.tensors import is_dense
from spillway.errors import UsageError
from spillway.saved_tensors.identity import is_streamed
from spillway.units import format_bytes

if TYPE_CHECKING:
    from spillway.parameters.homes import StreamedParameter


@runtime_checkable
class Trainer(Protocol):
    """An optimizer that steps streamed parameters: :class:`~spillway.OffloadedOptimizer`."""

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether it can step a parameter that is streamed."""
        ...

    def check_streaming(self) -> None:
        """Raise if its parameters cannot be streamed from now on."""
        ...

    def moving(self) -> AbstractContextManager[dict[torch.Tensor, StreamedParameter | None]]:
        """Inside, parameters may move. Gives those that are streamed, to be changed; ``None``: not at present."""
        ...


def trainer_of(model: Module, optimizers: Iterable[object]) -> Trainer | None:
    """The optimizer that may step streamed parameters, and holds most of a model's elements; ``None``: no such."""
    found: Trainer | None = None
    most = 0
    for each in optimizers:
        if isinstance(each, Trainer):
            held = sum(one.numel() for one in model.parameters() if each.holds(one))
            if held > most:
                found, most = each, held
    return found


def parameters_of(
    blocks: Sequence[tuple[str, Module]],
    model: Module,
    device: torch.device,
    min_bytes: int,
    optimizer: Trainer | None,
) -> dict[str, list[tuple[str, Parameter]]]:
    """The parameters of each block that are streamed, with their paths."""
    for path, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_meta:
                raise UsageError(
                    f"stream: got a parameter or buffer of {path or 'the model'} on meta, expected content. Load the "
                    f"weights first: spillway.load_weights(model, files)"
                )
            if tensor.device != device and (is_wrapper(tensor) or _is_of_bitsandbytes(tensor)):
                raise UsageError(
                    f"stream: got a {type(tensor).__name__} of {path or 'the model'} on {tensor.device}, expected it "
                    f"on {device}, since only its own library can move all of its parts. Move its module first"
                )
    found = streamable(blocks, model, min_bytes, (lambda _: False) if optimizer is None else optimizer.holds)
    if not found:
        raise UsageError(
            f"stream: got {len(blocks)} blocks without a parameter that can be streamed, expected frozen parameters "
            f"(requires_grad=False) of at least {format_bytes(min_bytes)}, which no other block or model shares and "
            f"which are neither quantized nor sharded. Freeze them first, give a smaller min_bytes, or give their "
            f"spillway.OffloadedOptimizer as optimizer="
        )
    return found


def streamable(
    blocks: Sequence[tuple[str, Module]], model: Module, min_bytes: int, holds: Callable[[torch.Tensor], object]
) -> dict[str, list[tuple[str, Parameter]]]:
    """The parameters of each block that can be streamed, with their paths.

    They are plain parameters with memory of their own, which no module outside of the block has. They are frozen, or
    the optimizer ``holds`` them.
    """
    owners: dict[int, set[str]] = {}
    sharers: dict[int, set[int]] = {}
    for path, module in model.named_modules():
        block = next((name for name, _ in blocks if path == name or path.startswith(f"{name}.")), "")
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            owners.setdefault(id(tensor), set()).add(block)
            if type(tensor) in (Parameter, torch.Tensor) and tensor.layout is torch.strided:
                sharers.setdefault(storage_key(tensor.untyped_storage()), set()).add(id(tensor))
    found: dict[str, list[tuple[str, Parameter]]] = {}
    for name, module in blocks:
        for path, parameter in module.named_parameters(prefix=name):
            if (
                type(parameter) is Parameter
                and (not parameter.requires_grad or holds(parameter))
                and not is_streamed(parameter)
                and parameter.layout is torch.strided
                and parameter.nbytes >= max(min_bytes, 1)
                and owners[id(parameter)] == {name}
                and is_dense(parameter)
                and parameter.nbytes == parameter.untyped_storage().nbytes()
                and len(sharers[storage_key(parameter.untyped_storage())]) == 1
            ):
                found.setdefault(name, []).append((path, parameter))
    return found


def _is_of_bitsandbytes(tensor: torch.Tensor) -> bool:
    """Whether it is one of the parameters that have scales or a second copy of their bytes beside them."""
    return type(tensor).__module__.partition(".")[0] == "bitsandbytes"
