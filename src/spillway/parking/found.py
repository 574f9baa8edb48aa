"""Tensors of models and optimizers, their storages, and which of these are needed least."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from spillway._torch import is_wrapper, storage_key, storage_parts, tree_leaves
from spillway.errors import UnsupportedError, UsageError
from spillway.parameters.streamable import Trainer
from spillway.parking.guards import CAN_REFUSE, storages_of
from spillway.parking.storages import ParkedStorage
from spillway.runtime.device import DeviceRuntime
from spillway.session import Session
from spillway.units import format_bytes


class Need(enum.IntEnum):
    """How soon a tensor is needed: the least first."""

    STATE = enum.auto()
    GRADIENT = enum.auto()
    FROZEN = enum.auto()
    TRAINED = enum.auto()
    """Also buffers."""


class Named(NamedTuple):
    """A tensor of a module or an optimizer."""

    name: str
    tensor: Tensor
    need: Need
    module: Module | None


class Found:
    """Storages of named tensors that can be parked, in the order in which they are reloaded."""

    def __init__(self, session: Session, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> None:
        self._session = session
        self.goes_at_once = False
        """Whether code may use them on their way back that neither hooks nor guards see: FSDP2's, for one."""
        self._needs: dict[ParkedStorage, Need] = {}
        self.users: dict[ParkedStorage, list[Named]] = {}
        """The tensors of each."""
        self._taken = ""
        self._is_cpu = False
        """Whether the device's memory is the CPU's, of which nothing can be freed."""
        by_key: dict[int, ParkedStorage | None] = {}
        # They live until here: keys and numbers of objects may be reused.
        held: list[object] = []
        seen: set[tuple[int, int]] = set()
        named = list(_named(models, optimizers))
        is_cpu = all(each.tensor.device.type in ("cpu", "meta") for each in named)
        for each in named:
            if storages_of(each.tensor):
                self._taken = each.name
                continue
            for part in storage_parts(each.tensor):
                storage = _storage_of(part)
                if storage is None or (storage.device.type == "cpu" and not is_cpu):
                    continue
                held += (storage, part)
                key = storage_key(storage)
                if key not in by_key:
                    by_key[key] = self._made(each.name, storage)
                found = by_key[key]
                if found is not None:
                    self.goes_at_once |= is_wrapper(each.tensor) or not (CAN_REFUSE or is_cpu)
                    for tensor, holders in ((part, 1 + (each.need is Need.GRADIENT)), (each.tensor, 0)):
                        # A wrapper's parts may share a storage, and modules a tensor.
                        if (key, id(tensor)) not in seen:
                            seen.add((key, id(tensor)))
                            found.add(tensor, holders)
                    found.is_gradient |= each.need is Need.GRADIENT
                    self._needs[found] = max(each.need, self._needs.get(found, each.need))
                    self.users.setdefault(found, []).append(each)

    def least_needed(self, wanted: int | None) -> list[ParkedStorage]:
        """At least so many bytes of them; ``None``: all."""
        total = sum(each.nbytes for each in self._needs)
        if not total and self._taken:
            raise UsageError(
                f"{self._taken} is parked already, and so is all else. Call unpark() of that parking first"
            )
        if wanted is None:
            return list(self._needs)
        if wanted > total and not self._is_cpu:
            raise UsageError(
                f"bytes: got {format_bytes(wanted)}, expected at most {format_bytes(total)}, which is all that can be "
                f"parked of these models and optimizers. Leave it out to park all"
            )
        order = sorted(enumerate(self._needs), key=lambda each: (self._needs[each[1]], -each[0]))
        before = itertools.accumulate((each.nbytes for _, each in order), initial=0)
        chosen = {each for (_, each), nbytes in zip(order, before, strict=False) if nbytes < wanted}
        self.users = {each: users for each, users in self.users.items() if each in chosen}
        return [each for each in self._needs if each in chosen]

    def _made(self, name: str, storage: torch.UntypedStorage) -> ParkedStorage | None:
        runtime = self._session.runtime(storage.device)
        if not isinstance(runtime, DeviceRuntime):
            raise UnsupportedError(f"park: got a capture that is under way on {storage.device}, expected none")
        self._is_cpu = runtime.backend.direct_disk or runtime.backend.unified
        return None if self._is_cpu else ParkedStorage(name, storage, runtime)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor, if it can be emptied."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    try:
        storage = tensor.untyped_storage()
        has_memory = storage.data_ptr() != 0
    except (NotImplementedError, RuntimeError):
        # Parked already, or a tensor that only its own library understands.
        return None
    return storage if has_memory and storage.resizable() else None


def _named(models: Sequence[Module], optimizers: Sequence[Optimizer]) -> Iterator[Named]:
    """All tensors of what is named: those of modules in their order, then states."""
    names: dict[int, str] = {}
    for prefix, module in modules_of(models):
        for key, parameter in module.named_parameters(recurse=False):
            name = names[id(parameter)] = f"{prefix}.{key}"
            yield Named(name, parameter, Need.TRAINED if parameter.requires_grad else Need.FROZEN, module)
            if parameter.grad is not None:
                yield Named(f"{name}.grad", parameter.grad, Need.GRADIENT, module)
        for key, buffer in module.named_buffers(recurse=False):
            yield Named(f"{prefix}.{key}", buffer, Need.TRAINED, module)
    for optimizer in optimizers:
        for parameter, key, state in states_of(optimizer):
            yield Named(f"{key} of {names.get(id(parameter), 'a parameter')}", state, Need.STATE, None)


def modules_of(models: Sequence[Module]) -> Iterator[tuple[str, Module]]:
    """Every module once, with a name: ``Policy.layers.0``."""
    seen: set[int] = set()
    for number, model in enumerate(models):
        root = type(model).__name__ + (f"[{number}]" if len(models) > 1 else "")
        for path, module in model.named_modules():
            if id(module) not in seen:
                seen.add(id(module))
                yield (f"{root}.{path}" if path else root), module


def states_of(optimizer: Optimizer) -> Iterator[tuple[Any, str, Tensor]]:
    """The tensors of an optimizer's state, but for those that Spillway has in CPU memory."""
    for parameter, state in list(optimizer.state.items()):
        if isinstance(optimizer, Trainer) and optimizer.holds(parameter):
            continue
        # A class may have values of its own beside those of parameters.
        for key, value in state.items() if isinstance(state, Mapping) else [("state", state)]:
            for tensor in tree_leaves(value):
                if isinstance(tensor, Tensor):
                    yield parameter, str(key), tensor
