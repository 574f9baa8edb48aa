"""Chunks of states and fp32 master weights, and the pipeline that streams them to their step and back.

See NOTE [ The state store ] in ``state_store.py``.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch

from spillway.checkpointing.tensors import is_dense
from spillway.errors import TierError, TierFullError
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.optimizer_class import MASTER, Settings, State
from spillway.optim.transfers import SentTensor, aligned
from spillway.runtime.arena import Pinned
from spillway.runtime.backend import Event, TaskEnd, on_error, raise_again
from spillway.runtime.bytes import Bytes, Cells, over

if TYPE_CHECKING:
    from spillway.optim.state_store import StepCost

_Made = TypeVar("_Made")


class Slot(NamedTuple):
    """The place of a state tensor in a range of bytes."""

    part: int
    """The parameter, as a number among those that share the bytes."""
    name: Hashable
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    """Its first byte."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Bytes | None) -> torch.Tensor:
        """The tensor, in memory of this layout."""
        assert memory is not None
        return Cells(memory.part(self.start, self.nbytes), self.dtype).tensor((self.shape, self.strides))


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of a range of bytes."""

    slots: tuple[Slot, ...] = ()
    nbytes: int = 0

    @classmethod
    def of(cls, states: Sequence[Mapping[Hashable, Any]]) -> Layout:
        """A slot for every tensor of these states that moves, in their order. Each begins at a cache line."""
        slots: list[Slot] = []
        end = 0
        for part, state in enumerate(states):
            for name, value in state.items():
                if moves(value):
                    strides = value.stride() if is_dense(value) else value.new_empty(value.shape).stride()
                    slots.append(Slot(part, name, value.dtype, tuple(value.shape), tuple(strides), aligned(end)))
                    end = slots[-1].start + slots[-1].nbytes
        return cls(tuple(slots), end)


def moves(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value of a state moves to where it is stepped. Numbers and empty tensors stay."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() > 0


class ChunkPart(NamedTuple):
    """Elements of a parameter, in memory order."""

    held: HostParameter
    start: int
    numel: int

    @property
    def is_cut(self) -> bool:
        """Whether it is a piece of a parameter."""
        return self.numel < self.held.numel

    @property
    def form(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides of its tensors: the parameter's own, or those of a flat piece."""
        return ((self.numel,), (1,)) if self.is_cut else self.held.form

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter's own elements."""
        return self.numel * self.held.local().itemsize

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor in the parameter's memory layout."""
        return whole.as_strided(*self.form, int(whole.storage_offset()) + self.start)

    def cells(self, whole: Bytes, dtype: torch.dtype) -> Cells:
        """These elements in memory that has all of the parameter's, in a type."""
        return Cells(whole.part(self.start * dtype.itemsize, self.numel * dtype.itemsize), dtype)

    def home(self) -> Cells:
        """The pinned memory of these elements, of a parameter that is streamed."""
        assert self.held.streamed is not None
        return self.cells(self.held.streamed.home.block, self.held.local().dtype)

    def home_until(self, end: Event) -> None:
        """A step's copies read and write the home until this event."""
        assert self.held.streamed is not None
        home = self.held.streamed.home
        # Weights in files are frozen.
        assert isinstance(home, Pinned)
        home.after(("step", self.start), end)

    def values(self) -> torch.Tensor:
        """These elements of the parameter. Not an alias: writes would count up its version from another thread."""
        local = self.held.local()
        return over(local.untyped_storage(), local.dtype, int(local.storage_offset()) + self.start, *self.form)


class StateChunk:
    """States and master weights that are streamed together: of a piece of a parameter, or of several parameters.

    A stored tensor is a :class:`~spillway.optim.states.Slot` in its state. A tensor that could not be stored is in the
    state itself, where it was stepped.
    """

    def __init__(self, parts: Sequence[ChunkPart]) -> None:
        self.parts = parts
        self.states: list[State] = [{} for _ in parts]
        """The state of each part, with its master weight."""
        self.begun = [False] * len(parts)
        """Which parts have a state of the class's."""
        self.layout = Layout()
        """The layout of the stored tensors."""
        self.place: Any = None
        """The place where it is stored; for the store alone."""
        self.target: tuple[Layout, Any] | None = None
        """The layout after the next step, and a place for it, if it differs."""
        self.stepped: Event | None = None
        """The task of the last step that was queued for it."""

    @property
    def context(self) -> DeviceContext:
        return self.parts[0].held.context

    @property
    def is_cut(self) -> bool:
        return self.parts[0].is_cut

    @property
    def is_stored(self) -> bool:
        """Whether there is something to load."""
        return any(isinstance(value, Slot) for state in self.states for value in state.values())

    def is_whole(self, indices: Iterable[int]) -> bool:
        """Whether these parts have all that their next step needs, and all tensors of all parts are stored."""
        has_all = all(
            self.begun[index] and (MASTER in self.states[index] or not self.parts[index].held.has_master)
            for index in indices
        )
        return has_all and not any(map(moves, chain.from_iterable(state.values() for state in self.states)))

    def opened(self, memory: Bytes | None) -> list[State]:
        """The states with all their tensors. Those that were stored are in memory now."""
        return [
            {name: value.view(memory) if isinstance(value, Slot) else value for name, value in state.items()}
            for state in self.states
        ]

    def set_stored(self, states: Sequence[State], layout: Layout, place: Any) -> None:
        """These are the states now, and their tensors are stored."""
        slots = {(slot.part, slot.name): slot for slot in layout.slots}
        self.layout, self.place, self.target = layout, place, None
        self.states = [
            {name: slots.get((index, name), value) for name, value in state.items()}
            for index, state in enumerate(states)
        ]


@dataclass(eq=False, slots=True)
class ChunkTransfer:
    """The transfer of a chunk to its step, and back."""

    chunk: StateChunk
    steps: Mapping[int, Snapshot]
    """The gradients of the parts that are stepped, by the numbers of the parts."""
    settings: Settings
    """As they were when the step was queued."""
    cost: StepCost
    ready: Event
    """The event after which the parameters may be read and written."""
    memory: Bytes | None = None
    """The chunk's bytes while it is loaded."""
    arrived: Event | None = None
    left: Event | None = None
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that were loaded with it, by the numbers of the parts."""
    homes: dict[int, torch.Tensor] = field(default_factory=dict)
    """Copies on the GPU of streamed parameters, by the numbers of the parts."""
    values: dict[int, SentTensor] = field(default_factory=dict)
    """Parameters that were read for it, by the numbers of the parts."""
    states: list[State] = field(default_factory=list)
    """The states, until they are safely stored."""
    nbytes: int = 0
    """Its bytes within the in-flight limit."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of the chunk that are loaded."""
        return self.chunk.layout.nbytes if self.chunk.is_stored else 0

    @property
    def made_bytes(self) -> int:
        """Bytes that the step needs for another layout, as far as it is known."""
        chunk = self.chunk
        if chunk.target is not None:
            return chunk.target[0].nbytes
        return 0 if chunk.is_stored else chunk.layout.nbytes


class ChunkTier(ABC):
    """Stores chunks, and copies them to the place of their step and back."""

    streams: bool = True
    """Whether chunks are stepped elsewhere than where they are stored."""

    def add(self, held: HostParameter) -> None:  # noqa: B027
        """A parameter's chunks will be stored here."""

    def discard(self, held: HostParameter) -> None:  # noqa: B027
        """They no longer are."""

    def master(self, part: ChunkPart) -> torch.Tensor | None:
        """Memory of a part's master weight, which may be written now; ``None`` if it has no place of its own."""
        return None

    @abstractmethod
    def nbytes(self, transfer: ChunkTransfer) -> int:
        """Bytes that a transfer takes of the in-flight limit."""

    @abstractmethod
    def load(self, transfer: ChunkTransfer) -> None:
        """Queue the copy of a chunk to the place of its step."""

    @abstractmethod
    def drop(self, transfer: ChunkTransfer) -> None:
        """Free all memory of a transfer whose chunk has arrived, or never will."""

    @abstractmethod
    def host_states(self, chunk: StateChunk) -> list[State]:
        """All states of a chunk in CPU memory, while no transfer is under way."""

    def set_opened(self, chunk: StateChunk, index: int, state: State) -> None:  # noqa: B027
        """The user may write to a part's state, which :meth:`host_states` gave."""

    @abstractmethod
    def write(self, chunk: StateChunk, states: list[State], layout: Layout, place: Any) -> None:
        """Store states of CPU memory, while no transfer is under way."""

    # For a tier that streams.

    def reserve(self, chunk: StateChunk, layout: Layout) -> Any:  # noqa: B027
        """A place to store a chunk in this layout, freed with its last reference. Raises ``TierFullError``."""

    def wait(self, transfer: ChunkTransfer) -> None:  # noqa: B027
        """Let the step wait for the chunk."""

    def memory(self, context: DeviceContext, nbytes: int) -> Bytes:
        """Memory that the step may write now."""
        raise NotImplementedError

    def release(self, context: DeviceContext, memory: Bytes) -> None:  # noqa: B027
        """Free memory that no copy uses."""

    def keep(self, transfer: ChunkTransfer) -> None:  # noqa: B027
        """The chunk cannot be stored. Keep its states where they are for the next step."""

    def store(self, transfer: ChunkTransfer, place: Any, layout: Layout) -> None:  # noqa: B027
        """Queue the copy of a chunk to its place."""

    def finish(self, transfer: ChunkTransfer) -> None:
        """Wait until the chunk is stored, and free the transfer's memory. After a ``TierError`` its states are kept."""
        self.drop(transfer)


class TransferPipeline:
    """Loads chunks in order, ahead of their steps, and stores them again.

    Half of the in-flight limit is for prefetched chunks. A chunk larger than the limit is transferred alone.
    ``given_out`` has the unfinished steps of workers, which other pipelines may share.
    """

    def __init__(
        self,
        tier: ChunkTier,
        window: int,
        transfers: Iterable[ChunkTransfer],
        given_out: deque[TaskEnd] | None = None,
    ) -> None:
        self._tier = tier
        self._window = window
        self._expected = deque(transfers)
        self._arriving: deque[ChunkTransfer] = deque()
        self._leaving: deque[ChunkTransfer] = deque()
        self._given_out = deque[TaskEnd]() if given_out is None else given_out
        self._nbytes = 0
        self._error: TierError | None = None

    def expect(self, transfers: Iterable[ChunkTransfer]) -> None:
        """More chunks are to be stepped, after the others."""
        self._expected.extend(transfers)

    def take(self, transfer: ChunkTransfer) -> None:
        """Wait for the next chunk, and prefetch those behind it meanwhile.

        Raises:
            TierError: if the chunk cannot be loaded, or one could not be stored. Nothing is loaded from then on:
                unstored chunks need memory of an unknown size.
        """
        if self._error is not None:
            self._expected.clear()
            self._raise_error()
        if not self._arriving:
            with on_error(self._expected.popleft):
                self.freeing_memory(self._load)
        taken = self._arriving.popleft()
        assert taken is transfer
        with on_error(self._cancel, transfer):
            self._load_ahead(transfer.nbytes)
        with on_error(self.drop, transfer):
            self._tier.wait(transfer)

    def wait_for_workers(self, most: int) -> None:
        """Wait until at most so many steps of the workers are unfinished."""
        while len(self._given_out) > most:
            self._given_out.popleft().finish()

    def freeing_memory(self, make: Callable[[], _Made]) -> _Made:
        """Do something that needs memory. If there is none, free that of other chunks, prefetched ones too."""
        while True:
            try:
                return make()
            except TierFullError:
                if self._leaving:
                    self._finish_oldest()
                elif self._arriving:
                    transfer = self._arriving.pop()
                    self._cancel(transfer)
                    self._expected.appendleft(transfer)
                elif self._given_out:
                    # Unfinished steps hold the memory of parameters that were read.
                    self.wait_for_workers(0)
                else:
                    raise
                self._raise_error()

    def put(self, transfer: ChunkTransfer, place: Any, layout: Layout) -> None:
        self._tier.store(transfer, place, layout)
        self._leaving.append(transfer)

    def drop(self, transfer: ChunkTransfer) -> None:
        """Free the memory of a chunk that was not stepped."""
        self._nbytes -= transfer.nbytes
        self._tier.drop(transfer)

    def settle(self) -> None:
        """Wait for all chunks that are being stored, and for prefetched ones that were not taken."""
        self._expected.clear()
        with contextlib.ExitStack() as stack:
            for _ in self._leaving:
                stack.callback(self._finish_oldest)
            while self._arriving:
                stack.callback(self._cancel, self._arriving.pop())
        self._raise_error()

    def _load_ahead(self, taken: int) -> None:
        arriving = taken + sum(transfer.nbytes for transfer in self._arriving)
        while self._expected and arriving + self._tier.nbytes(self._expected[0]) <= self._window // 2:
            try:
                arriving += self._load()
            except TierFullError:
                # There may be memory when it is taken.
                return

    def _load(self) -> int:
        transfer = self._expected[0]
        transfer.nbytes = self._tier.nbytes(transfer)
        while self._leaving and self._nbytes + transfer.nbytes > self._window:
            self._finish_oldest()
            self._raise_error()
        self._tier.load(transfer)
        self._arriving.append(self._expected.popleft())
        self._nbytes += transfer.nbytes
        return transfer.nbytes

    def _finish_oldest(self) -> None:
        transfer = self._leaving.popleft()
        self._nbytes -= transfer.nbytes
        try:
            self._tier.finish(transfer)
        except TierError as error:
            self._error = self._error or error

    def _cancel(self, transfer: ChunkTransfer) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self.drop, transfer)
            self._tier.wait(transfer)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise_again(self._error)
