"""A device that is not there: it runs operators on ``meta`` tensors, and counts what they would hold and take.

NOTE [ A fake device ]

``meta`` tensors have shapes, storages and lifetimes, and no memory. So everything that decides about lifetimes is real:
the model's own code, autograd's engine, the handles of what is saved. A mode sees each operator; each new storage is
memory that is taken until it dies, which a weak reference tells, and each operator moves the clock by what the
target's roofline says. What an operator takes and gives back while it runs cannot be seen, and is known for a few:
see :mod:`spillway.profiling.workspaces`.

What comes into sight as an argument, and nothing made, was there before. Tensors of the host's with a shape that meet
``meta`` ones (labels that a loss has by closure) are taken to be on the device. What the host asks of the content of a
tensor has no answer, and is refused, but where it is known: see :mod:`spillway.profiling.contents`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from spillway.checkpointing.recorder import Recorder
from spillway.errors import UnsupportedError
from spillway.planning.hardware import Hardware
from spillway.planning.roofline import seconds_of
from spillway.profiling.contents import Contents
from spillway.profiling.costs import effort_of
from spillway.profiling.meter import Meter, Reading
from spillway.profiling.probe import Probe
from spillway.profiling.workspaces import workspace_of
from spillway.regions.schema import Facts, facts_of, facts_of_call
from spillway.regions.tensors import split, tensors_in

META = torch.device("meta")
_GRAIN = 512
"""What torch's allocator for accelerators rounds up to."""
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(slots=True)
class _Storage:
    """One that is alive."""

    number: int
    """Of those that were there before: below 0."""
    reference: weakref.ref[torch.UntypedStorage]
    counted: int = 0
    """Bytes that the level has of it."""


class FakeDevice(TorchDispatchMode):
    """See NOTE [ A fake device ].

    Args:
        device: the target.
        hardware: what it can do.
    """

    supports_higher_order_operators = True

    def __init__(self, device: torch.device, hardware: Hardware) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.seconds = 0.0
        """That its operators have taken."""
        self.workspace = 0
        """Bytes that the last operator had for itself."""
        self.count = 0
        """How many storages there have been: the last one's number."""
        self._hardware = hardware
        self.made = 0
        """Bytes that were ever given out."""
        self._grain = 1 if device.type == "cpu" else _GRAIN
        self._known: dict[int, _Storage] = {}
        self._level = 0
        self._peak = 0
        self._before = 0
        self._on_device: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.contents = Contents()
        """Of what stands for whole numbers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def level(self) -> int:
        """Bytes that are allocated and were not there before."""
        return self._level

    @property
    def before(self) -> int:
        """Bytes that were there before."""
        return self._before

    def take_peak(self) -> int:
        """The most that was allocated, and was not there before, since this was last asked."""
        peak, self._peak = self._peak, self._level
        return peak

    def rounded(self, nbytes: int) -> int:
        """What is allocated for so many bytes."""
        return -(-nbytes // self._grain) * self._grain

    def hold(self, nbytes: int) -> None:
        """So much is there before anything is run."""
        self._before += nbytes

    def number_of(self, tensor: torch.Tensor) -> int:
        """The number of its storage: by when it was made, or below 0 if it was there before."""
        return self._find(tensor.untyped_storage(), is_new=False).number

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A new storage, which is counted from now on."""
        with torch._C._DisableTorchDispatch():
            storage = torch.empty(nbytes, dtype=torch.uint8, device=META).untyped_storage()
        self._find(storage, is_new=True)
        return storage

    def send_away(self, storage: torch.UntypedStorage) -> None:
        """It is not counted from now on, though somebody may hold it: lanes carry it."""
        found = self._find(storage, is_new=False)
        self._level -= found.counted
        found.counted = 0

    def fetch(self, storage: torch.UntypedStorage) -> None:
        """It is counted again."""
        found = self._find(storage, is_new=False)
        if found.number > 0:
            self._count(found, storage)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors, _ = split(args, kwargs)
        if not any(tensor.device == META for tensor in tensors) and not _makes(kwargs):
            # The host's own.
            return func(*args, **kwargs)
        facts = facts_of(func)
        self._refuse_autocast()
        if len(tensors) > 1 and not all(tensor.device == META for tensor in tensors):
            args, kwargs = tree_map(self._moved, (args, kwargs))
            tensors, _ = split(args, kwargs)
        for tensor in tensors:
            if tensor.device == META:
                self._find(tensor.untyped_storage(), is_new=False)
        if _hangs_on_contents(func, args):
            if not self.contents.knows(args, kwargs):
                raise UnsupportedError(
                    f"profile: got {func}, whose outcome hangs on the content of tensors, without the hardware, "
                    f"expected operators that hang on shapes alone, or on whole numbers that are known; give masks and "
                    f"positions as tensors that are there and not on meta, give each expert (or each choice) a fixed "
                    f"number of rows, or profile the model on the device itself"
                )
            output = self.contents.stood_for(self.contents.run(func, args, kwargs))
            self._run(func, facts, args, kwargs, output)
            return output
        try:
            output = func(*args, **kwargs)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"profile: got {func}, which torch has no formula of shapes for, without the hardware, expected "
                f"operators that hang on shapes alone; profile the model on the device itself"
            ) from error
        self._run(func, facts, args, kwargs, output)
        self.contents.follow(func, facts, args, kwargs, output)
        return output

    def _run(self, func: Any, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for tensor in tensors_in(output if isinstance(output, (list, tuple)) else (output,)):
            if tensor.device == META:
                self._find(tensor.untyped_storage(), is_new=True)
        self.workspace = 0
        if not isinstance(func, torch._ops.OpOverload):
            return
        effort = effort_of(func, facts, args, kwargs, output)
        if effort is not None:
            self.seconds += seconds_of(effort, self._hardware)
        self.workspace = sum(map(self.rounded, workspace_of(self.device, func, args, kwargs, output)))
        self._peak = max(self._peak, self._level + self.workspace)

    def _find(self, storage: torch.UntypedStorage, *, is_new: bool) -> _Storage:
        key = storage._cdata
        known = self._known.get(key)
        # An address is handed out again when it is free.
        if known is not None and known.reference() is storage:
            return known
        self.count += 1
        if is_new:
            found = _Storage(self.count, weakref.ref(storage, self._gone(key)))
            self._count(found, storage)
        else:
            found = _Storage(-self.count, weakref.ref(storage))
            self._before += self.rounded(storage.nbytes())
        self._known[key] = found
        return found

    def _count(self, found: _Storage, storage: torch.UntypedStorage) -> None:
        nbytes = self.rounded(storage.nbytes())
        self._level += nbytes - found.counted
        self.made += max(nbytes - found.counted, 0)
        self._peak = max(self._peak, self._level)
        found.counted = nbytes

    def _gone(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        known, here = self._known, weakref.ref(self)

        def gone(reference: weakref.ref[torch.UntypedStorage]) -> None:
            found, device = known.get(key), here()
            if found is not None and found.reference is reference:
                del known[key]
                if device is not None:
                    device._level -= found.counted

        return gone

    def _moved(self, leaf: Any) -> Any:
        """What there is on the device of a tensor of the host's. Numbers stay."""
        if not isinstance(leaf, torch.Tensor) or leaf.device == META or not leaf.dim():
            return leaf
        known = self._on_device.get(id(leaf))
        if known is None:
            moved = torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=META)
            known = self._on_device[id(leaf)] = leaf, moved
            self.contents.know(moved, leaf)
        return known[1]

    def _refuse_autocast(self) -> None:
        if torch.is_autocast_enabled(self.device.type) or torch.is_autocast_enabled("cpu"):
            raise UnsupportedError(
                "profile: got torch.autocast without the hardware, which does nothing to tensors that stand for the "
                "model's, expected none; cast the model itself (model.to(torch.bfloat16)), or profile it on the device"
            )


def _makes(kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and torch.device(device) == META


def _hangs_on_contents(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host, or a shape, does. What is indexed with places, and not with a mask, has as many."""
    tagged = isinstance(func, torch._ops.OpOverload) and any(tag in func.tags for tag in _TAGS)
    return tagged and (func is not torch.ops.aten.index.Tensor or facts_of_call(func, args).is_settled)


class FakeMeter(Meter):
    """Reads the clock and the memory of a fake device.

    Args:
        device: which.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._instants: list[Reading] = []
        self._made = device.made

    def mark(self) -> None:
        device = self._device
        self._instants.append(Reading(device.seconds, device.level, device.take_peak(), device.made - self._made))
        self._made = device.made

    def finish(self) -> list[Reading]:
        if not self._instants:
            return []
        first, there = self._instants[0].seconds, self._device.before
        return [
            each._replace(seconds=each.seconds - first, level=each.level + there, peak=each.peak + there)
            for each in self._instants
        ]


class FakeProbe(Probe):
    """Watches a call of a block on a fake device.

    Args:
        device: which.
    """

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(META)
        self._fake = device

    @contextmanager
    def watching(self, recorder: Recorder) -> Iterator[None]:
        with self._watch(recorder):
            yield

    def instant(self) -> float:
        return self._fake.seconds

    def allocated(self) -> tuple[int, int]:
        # A CPU tells nobody of it.
        return 0, 0 if self._fake.device.type == "cpu" else self._fake.workspace

    def _wait(self) -> None:
        """There is nothing to wait for."""

    def _between(self, start: Any, end: Any) -> float:
        return float(end - start)
