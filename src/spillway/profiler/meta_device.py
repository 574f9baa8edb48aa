"""A simulated device: operators run on ``meta`` tensors, and their bytes and seconds are counted.

NOTE [ Meta device ]

``meta`` tensors have shapes, storages and lifetimes, and no memory. The model's code, autograd's engine and the handles
of saved tensors are real, so lifetimes are real. A dispatch mode sees each operator. A new storage counts until it
dies. Each operator moves the clock by its roofline time on the target. Workspaces are known for a few operators
(:mod:`spillway.profiler.target_kernels`).

An argument that no operator made existed before the step. CPU tensors that meet ``meta`` tensors (labels that a loss
has by closure) count as tensors on the device.

torch's ``FakeTensorMode`` cannot replace this. In a build of torch without CUDA, autograd on a fake CUDA tensor ends
the process (torch 2.13), and fake tensors have no values for masks.

NOTE [ Known values ]

Models branch on the values of masks and positions. These are integers and booleans that come from the program
(``arange``) or from a batch that is there. So each ``meta`` storage with known values has a storage on the CPU with
them. An operator whose arguments are all known runs on the CPU, too. Results of floating point, of random numbers and
of uninitialized memory are unknown. Values belong to storages, so views and in-place writes need no care.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.parameter import is_lazy

from spillway._torch import Overload, disable_dispatch, storage_key, tree_map
from spillway.checkpointing.schema import OperatorFacts, argument, facts_of, facts_of_call
from spillway.checkpointing.tensors import PLAIN, OperatorMode, is_strided, tensors_in
from spillway.errors import UnsupportedError
from spillway.planner.hardware import Hardware, seconds_of
from spillway.profiler.meter import GRAIN, Meter, Reading
from spillway.profiler.target_kernels import effort_of, workspace_of
from spillway.runtime.bytes import over

META, _CPU = torch.device("meta"), torch.device("cpu")

OptimizerOf = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
"""Makes an optimizer of parameters: a class, or a ``functools.partial`` of one."""

_MOST_KNOWN_BYTES = 64 << 20
_VALUE_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_UNINITIALIZED = ("aten::empty", "aten::new_empty", "aten::resize")


@dataclass(slots=True)
class _Storage:
    """A storage that is alive."""

    number: int
    """Below 0: it existed before the step."""
    reference: weakref.ref[torch.UntypedStorage]
    counted: int = 0
    """Its bytes in the level."""


class MetaDevice(OperatorMode):
    """Counts what operators would allocate and take on a target, of type ``cuda`` or ``cpu``.

    See NOTE [ Meta device ].
    """

    def __init__(self, device: torch.device, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seconds = 0.0
        """Time of its operators so far."""
        self.levels = [0]
        """Bytes allocated in the step, after each change."""
        self.before = 0
        """Bytes that existed before the step."""
        self.count = 0
        """The number of the last storage."""
        self.tensors = MetaTensors()
        self._hardware = hardware
        self._grain = 1 if device.type == "cpu" else GRAIN
        self._known: dict[int, _Storage] = {}

    def rounded(self, nbytes: int) -> int:
        """Bytes that an allocation of ``nbytes`` takes."""
        return -(-nbytes // self._grain) * self._grain

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage, in order of allocation; below 0: it existed before the step."""
        return self._find(tensor.untyped_storage(), is_new=False).number

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A new storage."""
        with disable_dispatch():
            storage = torch.empty(nbytes, dtype=torch.uint8, device=META).untyped_storage()
        self._find(storage, is_new=True)
        return storage

    def offload(self, storage: torch.UntypedStorage) -> None:
        """A storage does not count from now on, although it is held."""
        found = self._find(storage, is_new=False)
        self._change(-found.counted)
        found.counted = 0

    def reload(self, storage: torch.UntypedStorage) -> None:
        """An offloaded storage counts again."""
        found = self._find(storage, is_new=False)
        if found.number > 0:
            self._count(found, storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_in((*args, *kwargs.values()))
        target = kwargs.get("device")
        makes_meta = target is not None and torch.device(target) == META
        if not makes_meta and not any(tensor.device == META for tensor in tensors):
            return func(*args, **kwargs)
        if torch.is_autocast_enabled(self.device.type) or torch.is_autocast_enabled("cpu"):
            raise UnsupportedError(
                "profile without the hardware: torch.autocast does nothing to meta tensors; cast the model itself "
                "(model.to(torch.bfloat16)), or profile it on the device"
            )
        if len(tensors) > 1 and not all(tensor.device == META for tensor in tensors):
            args, kwargs = tree_map(self._on_meta, (args, kwargs))
            tensors = tensors_in((*args, *kwargs.values()))
        for tensor in tensors:
            if tensor.device == META:
                self._find(tensor.untyped_storage(), is_new=False)
        facts = facts_of(func)
        if depends := _depends_on_values(func, args):
            output = self.tensors.result(func, args, kwargs)
        else:
            try:
                output = func(*args, **kwargs)
            except NotImplementedError as error:
                raise UnsupportedError(
                    f"profile without the hardware: torch cannot tell the output shapes of {func} on meta tensors; "
                    f"profile the model on the device itself"
                ) from error
        self._account(func, facts, args, kwargs, output)
        if not depends:
            self.tensors.follow(func, facts, args, kwargs, output)
        return output

    def _account(
        self, func: Any, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        for tensor in tensors_in((output,)):
            if tensor.device == META:
                self._find(tensor.untyped_storage(), is_new=True)
        if not isinstance(func, Overload):
            return
        effort = effort_of(func, facts, args, kwargs, output)
        if effort is not None:
            self.seconds += seconds_of(effort, self._hardware)
        workspace = sum(map(self.rounded, workspace_of(self.device, func, args, kwargs, output)))
        if workspace:
            self._change(workspace)
            self._change(-workspace)

    def _find(self, storage: torch.UntypedStorage, *, is_new: bool) -> _Storage:
        key = storage_key(storage)
        known = self._known.get(key)
        # A freed address is used again.
        if known is not None and known.reference() is storage:
            return known
        self.count += 1
        if is_new:
            found = _Storage(self.count, weakref.ref(storage, self._freed(key)))
            self._count(found, storage)
        else:
            found = _Storage(-self.count, weakref.ref(storage))
            self.before += self.rounded(storage.nbytes())
        self._known[key] = found
        return found

    def _count(self, found: _Storage, storage: torch.UntypedStorage) -> None:
        nbytes = self.rounded(storage.nbytes())
        self._change(nbytes - found.counted)
        found.counted = nbytes

    def _change(self, nbytes: int) -> None:
        self.levels.append(self.levels[-1] + nbytes)

    def _freed(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        here = weakref.ref(self)

        def freed(reference: weakref.ref[torch.UntypedStorage]) -> None:
            device = here()
            found = None if device is None else device._known.get(key)
            if device is not None and found is not None and found.reference is reference:
                del device._known[key]
                device._change(-found.counted)

        return freed

    def _on_meta(self, leaf: Any) -> Any:
        """The ``meta`` tensor for a CPU tensor. Scalars stay."""
        stays = isinstance(leaf, torch.Tensor) and (leaf.device == META or not leaf.dim())
        return leaf if stays else self.tensors.of(leaf)


class MetaMeter(Meter):
    """Reads the clock and the memory of a meta device."""

    def __init__(self, device: MetaDevice) -> None:
        self._device = device
        self._marks: list[tuple[float, int]] = []

    def mark(self) -> None:
        device = self._device
        self._marks.append((device.seconds, len(device.levels) - 1))

    def finish(self) -> list[Reading]:
        levels, base, marks = self._device.levels, self._device.before, self._marks
        return [
            Reading(seconds - marks[0][0], base + levels[until], base + max(levels[since : until + 1]))
            for (_, since), (seconds, until) in pairwise([*marks[:1], *marks])
        ]


class MetaTensors:
    """For each tensor of a model or a batch, one on ``meta``. Tensors that share a storage share one there, too.

    It also has the known values of ``meta`` tensors: see NOTE [ Known values ].
    """

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._values = weakref.WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage]()

    def of(self, leaf: Any) -> Any:
        """The ``meta`` tensor for a tensor, which has its present values: always the same. Anything else stays."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        known = self._tensors.get(id(leaf))
        if known is None:
            known = self._tensors[id(leaf)] = leaf, self._make(leaf)
        return known[1]

    def state(self, module: Module) -> dict[str, torch.Tensor]:
        """Those for the parameters and buffers of a module, under each of their names."""
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        return {name: self.of(tensor) for name, tensor in named}

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of an operator whose output depends on values, which must be known."""
        if not self._are_known(args, kwargs):
            raise UnsupportedError(
                f"profile without the hardware: {func} depends on the values of tensors, and meta tensors have none; "
                f"give masks and positions as tensors that are not on meta, give each expert (or each choice) a fixed "
                f"number of rows, or profile the model on the device itself"
            )
        return tree_map(self._meta_of, self._run(func, args, kwargs))

    def follow(
        self, func: Any, facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """An operator ran on ``meta`` tensors: learn the values that it gave or wrote, or forget them."""
        given = tensors_in((output,))
        written = [argument(args, kwargs, key) for key in facts.writes]
        if not written and (facts.is_view or not all(map(_is_exact, given))):
            return
        name: str = func.name() if isinstance(func, Overload) else ""  # type: ignore[no-untyped-call]
        is_unknown = not name or facts.is_random or facts.reshapes or name.startswith(_UNINITIALIZED)
        if is_unknown or not self._are_known(args, kwargs):
            for tensor in tensors_in(written):
                if tensor.device == META:
                    self._values.pop(tensor.untyped_storage(), None)
            return
        found = self._run(func, args, kwargs)
        if not written:
            for meta, tensor in zip(given, tensors_in((found,)), strict=True):
                self._take(meta, tensor)

    def _are_known(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return all(
            _is_exact(tensor)
            and (tensor.device == _CPU or (tensor.device == META and tensor.untyped_storage() in self._values))
            for tensor in tensors_in((*args, *kwargs.values()))
        )

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(self._on_cpu, (args, kwargs))
        return func(*args, **kwargs)

    def _on_cpu(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return _CPU
        if not isinstance(leaf, torch.Tensor) or leaf.device != META:
            return leaf
        return _like(leaf, self._values[leaf.untyped_storage()])

    def _meta_of(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        meta = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)
        self._take(meta, leaf)
        return meta

    def _take(self, meta: torch.Tensor, tensor: torch.Tensor) -> None:
        storage = meta.untyped_storage()
        if storage.nbytes() <= _MOST_KNOWN_BYTES:
            values = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
            _like(meta, values).copy_(tensor)
            self._values[storage] = values

    def _make(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            raise UnsupportedError(
                "profile without the hardware: a lazy parameter has no shape yet; call the model once, then profile it"
            )
        if not is_strided(tensor) or hasattr(tensor, "__tensor_flatten__"):
            raise UnsupportedError(
                f"profile without the hardware: a {type(tensor).__name__} of layout {tensor.layout} has no meta tensor "
                f"for it, only plain dense tensors have; profile a plain model (one rank's part of it), or on the "
                f"device itself"
            )
        source = tensor.untyped_storage()
        key = storage_key(source)
        if key not in self._storages:
            self._storages[key] = torch.empty(source.nbytes(), dtype=torch.uint8, device=META).untyped_storage()
        made = _like(tensor, self._storages[key])
        has_values = type(tensor) in PLAIN and tensor.device != META
        if has_values and _is_exact(tensor) and source.nbytes() <= _MOST_KNOWN_BYTES:
            self._values[made.untyped_storage()] = source.cpu().clone()  # type: ignore[no-untyped-call]
        if isinstance(tensor, Parameter):
            return Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


@contextmanager
def without_values(what: str, advice: str) -> Iterator[None]:
    """A context whose code must not ask for the values of tensors."""
    try:
        yield
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise UnsupportedError(
            f"{what} depends on the values of tensors ({error}), which are unknown without the hardware; {advice}"
        ) from error


def state_sizes(parameters: list[torch.Tensor], optimizer: OptimizerOf | float | None) -> list[int]:
    """Bytes of each tensor of an optimizer's state on the device, or so many bytes for each element of a parameter.

    The optimizer steps once, on ``meta`` tensors.
    """
    if not callable(optimizer):
        return [math.ceil((optimizer or 0) * each.numel()) for each in parameters]
    copies: list[torch.Tensor] = [Parameter(torch.empty_like(each), requires_grad=True) for each in parameters]
    for each in copies:
        each.grad = torch.empty_like(each)
    made = optimizer(copies)
    advice = "give bytes for each element of a parameter instead: optimizer=4"
    with without_values(f"optimizer: the step of {type(made).__name__}", advice):
        made.step()
    found = {
        storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes()
        for state in made.state.values()
        for tensor in state.values()
        if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta"
    }
    return list(found.values())


def _depends_on_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape or the value of the output does. An index of integers gives as many rows as it has."""
    tagged = isinstance(func, Overload) and any(tag in func.tags for tag in _VALUE_DEPENDENT)
    return tagged and (func is not torch.ops.aten.index.Tensor or facts_of_call(func, args).is_data_dependent)


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _like(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of the same type, shape and strides, over another storage."""
    return over(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
