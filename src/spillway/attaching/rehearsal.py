"""Finds the profile of a step without its hardware: one pass on ``meta`` tensors, watched like a measured one.

NOTE [ A rehearsal ]

A measured profile is of a step whose blocks are recomputed and whose inputs are away. Here nothing is recomputed: what
a block saves is let go of when it is saved, and is there again, as new storages of the same sizes, when the gradient
of the block's output is. So the fake device holds at each instant what a device would, and the same watch and the same
probes write the same profile.

As for a real region, what is saved of parameters, and of what other code holds, stays. Inputs are away as soon as the
block is called, whoever still holds them (then they are on their way, and lanes carry them), unless they are small.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from spillway.attaching.block import RegionCall
from spillway.attaching.pilot import Pilot, Stage
from spillway.attaching.treating import LEAST
from spillway.capture.handles import KeptHandle, unpack
from spillway.capture.identity import is_parameter
from spillway.checkpointing.decisions import Selection
from spillway.checkpointing.observer import Observer
from spillway.checkpointing.recorder import Recorder
from spillway.operators import Choices
from spillway.planning.profile import Profile
from spillway.profiling.compile import compile_profile
from spillway.profiling.fakes import META, FakeDevice, FakeMeter, FakeProbe
from spillway.profiling.probe import Probe
from spillway.profiling.watch import Watch, Watched
from spillway.recomputing import Recompute
from spillway.runtime.bytes import over
from spillway.session import Session

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr

_RERUN_FACTOR = 1.07
"""What a re-run takes of what its operators took before: as it was measured of Llama-8B's block on an H200."""


class Rehearsal(Pilot):
    """See NOTE [ A rehearsal ].

    Args:
        model: class of the model.
        device: the fake one, whose mode is in force.
        min_bytes: what is smaller does not leave.
    """

    def __init__(self, model: str, device: FakeDevice, *, min_bytes: int) -> None:
        super().__init__(model, META, None, min_bytes=min_bytes, budget=None, planner=None)
        self._model, self._min_bytes = model, min_bytes
        self.stage = Stage.MEASURING
        self._fake = device
        self._regions: dict[int, FakeRegion] = {}

    @property
    def is_plain(self) -> bool:
        """Always: no session is asked for anything."""
        return True

    def take(self, blocks: Sequence[RegionCall]) -> None:
        self._check_blocks(blocks)
        self._blocks = blocks
        for block in blocks:
            block.pilot = self
            block.how = LEAST
            block.runner = self._run

    def block_ended(self, number: int, output: Any) -> None:
        super().block_ended(number, output)
        tensor = next((each for each in tree_leaves(output) if _needs_grad(each)), None)
        if tensor is None:
            self._regions.pop(number, None)
        else:
            # After the watch's own hook, which has marked that the block's backward begins.
            tensor.register_hook(lambda _: self._again(number))

    def _again(self, number: int) -> None:
        region = self._regions.pop(number, None)
        if region is not None:
            self.rerun_begins(number)
            region.come_back()
            self.rerun_ended(number)

    def _run(
        self,
        how: Recompute,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        session: Session | None,
        observer: Observer | None,
    ) -> Any:
        assert self._watch is not None
        region = self._regions[self._watch.count - 1] = FakeRegion(self._fake, self._min_bytes)
        return region.run(function, args, kwargs, observer)

    @property
    def _traces(self) -> bool:
        # There is one pass.
        return True

    def _new_probe(self, before: Probe | None) -> Probe:
        return FakeProbe(self._fake)

    def _new_watch(self) -> Watch:
        return Watch(META, lambda: 0, FakeMeter(self._fake))

    @property
    def _weighs(self) -> bool:
        return True

    def _forsake(self, watch: Watch) -> None:
        """Nobody moves anything."""

    def _give_window_back(self) -> None:
        """There is none."""

    def _advance(self, watched: Watched | None) -> None:
        if watched is not None:
            self.profile = self._compiled(watched)

    def _compiled(self, watched: Watched) -> Profile:
        profile = compile_profile(
            watched, watched, self._probes, model=self._model, device=self._fake.device, min_bytes=self._min_bytes
        )
        # What was there again took no time, and the host that queued it is not the target's.
        return replace(
            profile,
            kinds=tuple(replace(kind, rerun_factor=_RERUN_FACTOR, host=None) for kind in profile.kinds),
            before=replace(profile.before, host_seconds=0.0),
            middle=replace(profile.middle, host_seconds=0.0),
        )


class FakeRegion:
    """One call of a block. See NOTE [ A rehearsal ].

    Args:
        device: the fake one.
        min_bytes: inputs that are smaller stay.
    """

    def __init__(self, device: FakeDevice, min_bytes: int) -> None:
        self._device = device
        self._min_bytes = min_bytes
        self._small: list[torch.UntypedStorage] = []
        """Inputs that stay for as long as anything is saved of the block: a region would hold them."""
        self._first = device.count
        self._inputs: set[int] = set()
        self._handles: weakref.WeakSet[AwayHandle] = weakref.WeakSet()
        self._recorder: Recorder | None = None
        self._observer: Observer | None = None

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], observer: Observer | None
    ) -> Any:
        """The block's forward."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._inputs = {self._device.number_of(tensor) for tensor in tensors}
        self._first = self._device.count
        # What was there before the step, as a table in a buffer, does not move.
        storages = [tensor.untyped_storage() for tensor in tensors if self._device.number_of(tensor) > 0]
        self._small = [storage for storage in storages if storage.nbytes() < self._min_bytes]
        for storage in storages:
            if storage.nbytes() >= self._min_bytes:
                self._device.send_away(storage)
        del tensors, storages
        with ExitStack() as around:
            around.enter_context(saved_tensors_hooks(self._pack, unpack))
            if observer is None or not observer.wants_operators:
                return function(*args, **kwargs)
            self._recorder = recorder = Recorder(Selection(Choices(), None, None))
            self._observer = observer
            recorder.begin([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)])
            with recorder, observer.watching(recorder):
                output = function(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            recorder.gave(output)
        observer.ended(recorder)
        self._recorder = self._observer = None
        return output

    def come_back(self) -> None:
        """What was saved is there again, each storage once."""
        storages: dict[int, torch.UntypedStorage] = {}
        for handle in self._handles:
            handle.come_back(storages, self._device)
        self._handles.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        with torch._C._DisableTorchDispatch():
            if self._recorder is not None:
                self._recorder.saves(0, tensor)
            number = self._device.number_of(tensor) if tensor.device == META else -1
            if is_parameter(tensor) or not (number > self._first or number in self._inputs):
                return KeptHandle(tensor)
            is_input = number in self._inputs
            tell = None
            if self._recorder is not None and self._observer is not None and not is_input:
                tell = partial(self._observer.asked, len(self._recorder.operators))
            handle = AwayHandle(self, tensor, number, is_input=is_input, tell=tell)
        self._handles.add(handle)
        return handle


class AwayHandle:
    """Stands for a saved tensor, whose storage is not held from the forward to the block's backward."""

    __slots__ = ("__weakref__", "_form", "_nbytes", "_number", "_original", "_region", "_storage", "_tell")

    def __init__(
        self,
        region: FakeRegion,
        tensor: torch.Tensor,
        number: int,
        *,
        is_input: bool,
        tell: Callable[[torch.Tensor, object], None] | None,
    ) -> None:
        storage = tensor.untyped_storage()
        self._region = region
        self._tell = tell
        self._number = number
        self._nbytes = storage.nbytes()
        self._form = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        self._original = weakref.ref(storage) if is_input else None
        self._storage: torch.UntypedStorage | None = None

    def come_back(self, storages: dict[int, torch.UntypedStorage], device: FakeDevice) -> None:
        """There is a storage again: that of the input if somebody holds it, or one for all handles of the same."""
        if self._number not in storages:
            original = None if self._original is None else self._original()
            if original is None:
                storages[self._number] = device.allocate(self._nbytes)
            else:
                device.fetch(original)
                storages[self._number] = original
        self._storage = storages[self._number]

    def unpack(self) -> torch.Tensor:
        """The tensor."""
        if self._storage is None:
            # Backward has come by another of the block's outputs.
            self._region.come_back()
        assert self._storage is not None
        tensor = over(self._storage, *self._form)
        if self._tell is not None:
            self._tell(tensor, self)
        return tensor

    def is_intact(self) -> bool:
        """Of content there is none."""
        return True


def _needs_grad(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
