"""Frozen parameters of blocks: in pinned CPU memory, and on the device while their block runs.

NOTE [ Streamed parameters ]

At rest, ``parameter.data`` is pinned CPU memory, the parameter's *home*. Code that reads or writes the parameter
between calls (``state_dict``, ``copy.deepcopy``, ``load_state_dict``, a hook) finds its content there. During the call
of its block, ``parameter.data`` is a copy on the device. The object, its names, its shape and its version counter
stay::

    at rest --fetch--> being copied --enter--> in use --exit--> at rest

Each use has an entry of the mover of its own (:class:`StreamedEntry`), with the home for a slot. So a write at rest
counts for the next use. Nothing is copied out: the home has the content.

* **Ahead.** When a block is entered, the block that followed it the last time is fetched. Forward and replays have
  sequences of their own. At most two blocks are on the device.
* **Autograd** saves a parameter or a view of it (``weight.t()``). The pack hook gives it a handle of the entry in use.
  After forward nothing holds the copy on the device. When backward asks, the home is copied again, prefetched in the
  learned order like every offloaded tensor. Without Spillway's hooks autograd holds the copy: right, and not free.
* **A replay** of a checkpointed block enters the block again.

NOTE [ Lifetimes of a home ]

The home is freed with its last owner, after its last copy. Owners are the parameter at rest, and the entries that a
graph holds. So :meth:`StreamedModel.remove` takes no memory from a graph that waits for its backward. Destinations on
the device are allocated on the compute stream that uses them, and freed by reference: a view that the program keeps
stays valid.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.nn import Module, Parameter

from spillway._torch import disable_dispatch, disable_function, storage_key
from spillway.checkpointing.tensors import is_dense
from spillway.errors import UnsupportedError, UsageError
from spillway.runtime.arena import Pinned
from spillway.runtime.backend import Event
from spillway.runtime.bytes import Bytes, over
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.entry import ByteCounters, State
from spillway.runtime.tiers import Tier
from spillway.saved_tensors.handles import in_replay
from spillway.saved_tensors.hooks import SavedState
from spillway.saved_tensors.identity import SavedStorage, is_streamed, set_streamed, unset_streamed
from spillway.saved_tensors.scopes import current_scope
from spillway.session import Session
from spillway.units import format_bytes


class HomeTier(Tier):
    """The homes of parameters. A slot is a :class:`~spillway.runtime.arena.Pinned`, which the mover never frees."""

    def reserve(self, source: Bytes) -> Pinned:
        raise AssertionError("homes are written at rest, not by copies out")

    def store(self, slots: Sequence[Pinned], sources: Sequence[Bytes]) -> Sequence[Event]:
        raise AssertionError("homes are written at rest, not by copies out")

    def load(self, slots: Sequence[Pinned], destinations: Sequence[Bytes]) -> Sequence[Event]:
        for home, destination in zip(slots, destinations, strict=True):
            self._backend.copy(self._back, destination, home.range(0, destination.nbytes))
        copied = self._backend.record(self._back)
        for home in slots:
            # Copies in are ordered by their stream: the last one says when all are done.
            home.after("load", copied)
        return [copied] * len(slots)

    def free(self, slot: Pinned) -> None:
        """The slot's owners free it. See NOTE [ Lifetimes of a home ]."""


class StreamedEntry(SavedStorage):
    """A parameter's content for one use of its block, and for the graph of that use."""

    __slots__ = ()

    def __init__(self, parameter: StreamedParameter, runtime: DeviceRuntime, tier: Tier, ledger: ByteCounters) -> None:
        own, home = parameter.own(), parameter.home
        storage = home.block.storage
        super().__init__(own, storage, 0, home.nbytes, next(runtime.mover.numbers), ledger)
        self.release()
        self.state, self.tier, self.slot, self.alive = State.AWAY, tier, home, _nowhere
        runtime.mover.see(self)


class Use:
    """One use of a parameter by a call of its block, or one that is expected."""

    __slots__ = ("entry", "parameter", "round")

    def __init__(self, parameter: StreamedParameter, entry: StreamedEntry) -> None:
        self.parameter = parameter
        self.entry = entry
        self.round = -1
        """That of the entry when it was taken."""


class StreamedParameter:
    """A parameter with its home."""

    def __init__(self, name: str, parameter: Parameter, home: Pinned) -> None:
        self.name = name
        self._parameter = weakref.ref(parameter)
        self.home = home
        self._form = parameter.dtype, parameter.shape, parameter.stride()
        self.device = parameter.device
        """The device that it was on."""
        self.latest: weakref.ref[SavedStorage] | None = None
        """The entry that was made last, which a graph may hold."""
        at_rest = self._over(home.alias().untyped_storage())
        at_rest.copy_(parameter.detach())
        parameter.data = at_rest

    @property
    def is_alive(self) -> bool:
        return self._parameter() is not None

    def own(self) -> Parameter:
        parameter = self._parameter()
        assert parameter is not None
        return parameter

    def check(self) -> None:
        """Raise an error for a parameter that was moved, cast or unfrozen."""
        own = self.own()
        is_home = own.device.type == "cpu" and own.untyped_storage().data_ptr() == self.home.block.address
        if not is_home or (own.dtype, own.shape, own.stride()) != self._form:
            raise UsageError(
                f"{self.name} is streamed, and was moved or cast: got {own.dtype} {tuple(own.shape)} on {own.device} "
                f"in other memory, expected {self._form[0]} {tuple(self._form[1])} in its own CPU memory. Call "
                f"attached.remove(), then model.to(), and attach again"
            )
        if own.requires_grad:
            raise UnsupportedError(
                f"{self.name} is streamed, and got requires_grad=True, expected a frozen parameter. Call "
                f"attached.remove(), set requires_grad, and attach again"
            )

    def use(self, storage: torch.UntypedStorage) -> None:
        """The parameter's data is this storage."""
        self.own().data = self._over(storage)

    def rest(self) -> None:
        """The parameter's data is its home."""
        self.use(self.home.alias().untyped_storage())

    def leave(self) -> None:
        """The parameter gets memory of its own, where it was."""
        if self.is_alive:
            own = self.own()
            own.data = own.detach().to(self.device, copy=True)

    def _over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        dtype, size, stride = self._form
        return over(storage, dtype, 0, size, stride)


class StreamedBlock:
    """A block whose parameters are streamed."""

    def __init__(self, name: str, model: StreamedModel) -> None:
        self.name = name
        self.parameters: list[StreamedParameter] = []
        self._model = model
        self._lock = threading.RLock()
        self._users = 0
        self._here: list[Use] = []

    @property
    def nbytes(self) -> int:
        return sum(each.home.nbytes for each in self.parameters)

    def in_replay(self) -> AbstractContextManager[None]:
        """:meth:`in_use` around a replay of the block's checkpointed forward."""
        return self.in_use(is_replay=True)

    @contextmanager
    def in_use(self, *, is_replay: bool = False) -> Iterator[None]:
        """Inside, the block's parameters are on the device.

        Raises:
            UsageError: if a parameter was moved or cast.
            UnsupportedError: if a parameter requires grad, or a graph is being captured.
        """
        with self._lock, _unseen():
            if not self._users:
                # A block inside of one that is replayed is called as in forward.
                self._enter(is_replay=is_replay or in_replay())
            self._users += 1
        try:
            yield
        finally:
            with self._lock, _unseen():
                self._users -= 1
                if not self._users:
                    self._exit()

    def _enter(self, *, is_replay: bool) -> None:
        with ExitStack() as undo:
            self._here = self._model.uses(self, is_replay=is_replay)
            undo.callback(self._exit)
            for use in self._here:
                parameter, entry = use.parameter, use.entry
                storage, use.round = self._model.mover.take(entry, -1)
                entry.origin = weakref.ref(storage)
                parameter.use(storage)
                set_streamed(parameter.own(), entry)
                self._model.identity.add(storage, entry)
            self._model.fetch_next(self, is_replay=is_replay)
            undo.pop_all()

    def _exit(self) -> None:
        here, self._here = self._here, []
        for parameter in [use.parameter for use in here]:
            if parameter.is_alive:
                set_streamed(parameter.own(), None)
                parameter.rest()
        self._model.forget(here)


class StreamedModel:
    """The streamed blocks of a model, in the order in which they run.

    Args:
        blocks: names and modules. Their frozen parameters of at least ``min_bytes`` are streamed.
        model: the model that they are in. Its other parameters and its buffers are moved to the device.
        device: where the model computes.
        session: its runtime copies.

    Raises:
        UsageError: if no parameter can be streamed.
        TierFullError: if the session has too little CPU memory.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, Module]],
        model: Module,
        device: torch.device,
        session: Session,
        min_bytes: int,
    ) -> None:
        found = _parameters_of(blocks, model, min_bytes)
        self._session, self._device = session, device
        runtime = session.runtime(device)
        if not isinstance(runtime, DeviceRuntime):
            raise UnsupportedError("stream: got a capture that is under way, expected none. Attach before the capture")
        self._runtime, self.mover = runtime, runtime.mover
        state = session.of(SavedState)
        self.identity = state.identity
        out, back = self.mover.streams
        self._tier = HomeTier(runtime.backend, runtime.arena, out=out, back=back)
        self._next: dict[tuple[bool, StreamedBlock], StreamedBlock] = {}
        """The block that followed another one, in a replay or not."""
        self._last: dict[bool, StreamedBlock] = {}
        self._ahead: tuple[StreamedBlock, list[Use]] | None = None
        """The block that is fetched ahead."""
        self._ledger = ByteCounters()
        self._moved: list[tuple[weakref.ref[torch.Tensor], torch.device]] = []
        self.blocks: list[StreamedBlock] = []
        with ExitStack() as undo:
            undo.callback(self.remove)
            for name, parameters in found.items():
                block = StreamedBlock(name, self)
                self.blocks.append(block)
                for path, parameter in parameters:
                    home = Pinned(runtime.arena, parameter.nbytes)
                    home.synchronize()
                    block.parameters.append(StreamedParameter(path, parameter, home))
                    set_streamed(parameter, None)
            self._move_others(model)
            undo.pop_all()

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A call of the model. Nothing is fetched ahead of it or after it: parameters may be written in between."""
        self._drop_ahead()
        try:
            yield
        finally:
            self._drop_ahead()

    def remove(self) -> None:
        """Every parameter and buffer is again where it was."""
        self._drop_ahead()
        for block in self.blocks:
            for parameter in block.parameters:
                parameter.leave()
                if parameter.is_alive:
                    unset_streamed(parameter.own())
            # A replay after this finds them where they were.
            block.parameters = []
        self.blocks = []
        for reference, device in self._moved:
            tensor = reference()
            if tensor is not None and tensor.device != device:
                tensor.data = tensor.detach().to(device)
        self._moved = []

    # For blocks.

    def uses(self, block: StreamedBlock, *, is_replay: bool) -> list[Use]:
        """The uses of a block that is entered, being copied."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] is block and all(u.entry.is_content_of(u.parameter.own()) for u in ahead[1]):
            return ahead[1]
        if ahead is not None:
            self.forget(ahead[1])
        return self.fetched(block, is_replay=is_replay)

    def fetch_next(self, block: StreamedBlock, *, is_replay: bool) -> None:
        """Fetch the block that followed this one the last time."""
        before, self._last[is_replay] = self._last.get(is_replay), block
        if before is not None and before is not block:
            self._next[is_replay, before] = block
        following = self._next.get((is_replay, block))
        if following is not None and following is not block:
            self._ahead = following, self.fetched(following, is_replay=is_replay)

    def forget(self, uses: Sequence[Use]) -> None:
        """They are over. A graph may have handles of the entries."""
        for use in uses:
            self.mover.forget(use.entry, use.round)

    def fetched(self, block: StreamedBlock, *, is_replay: bool) -> list[Use]:
        """Uses of a block whose copies are queued."""
        if self._session.runtime(self._device) is not self._runtime:
            raise UnsupportedError(
                f"{block.name} is streamed, and was called while a graph is captured: got a capture, expected none. A "
                f"captured graph reads the same memory in each replay"
            )
        alive = [each for each in block.parameters if each.is_alive]
        for each in alive:
            each.check()
        ledger = current_scope(self._session).ledger if torch.is_grad_enabled() and not is_replay else self._ledger
        uses = [Use(each, (self._shared(each) if is_replay else None) or self._made(each, ledger)) for each in alive]
        with ExitStack() as undo:
            undo.callback(self.forget, uses)
            self.mover.fetch([use.entry for use in uses])
            undo.pop_all()
        return uses

    def _shared(self, parameter: StreamedParameter) -> StreamedEntry | None:
        """In a replay: the entry that the graph has already, so that the parameter is copied once for both."""
        entry = None if parameter.latest is None else parameter.latest()
        if entry is None or not self.mover.adopt(entry, same_content=entry.is_content_of(parameter.own())):
            return None
        assert isinstance(entry, StreamedEntry)
        return entry

    def _made(self, parameter: StreamedParameter, ledger: ByteCounters) -> StreamedEntry:
        entry = StreamedEntry(parameter, self._runtime, self._tier, ledger)
        parameter.latest = entry.reference
        return entry

    def _drop_ahead(self) -> None:
        self._last.clear()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.forget(ahead[1])

    def _move_others(self, model: Module) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device != self._device and not is_streamed(tensor):
                self._moved.append((weakref.ref(tensor), tensor.device))
                tensor.data = tensor.detach().to(self._device)


def _parameters_of(
    blocks: Sequence[tuple[str, Module]], model: Module, min_bytes: int
) -> dict[str, list[tuple[str, Parameter]]]:
    """The parameters of each block that can be streamed, with their paths.

    They are frozen plain parameters with memory of their own, which no module outside of the block has.
    """
    owners: dict[int, set[str]] = {}
    sharers: dict[int, set[int]] = {}
    for path, module in model.named_modules():
        block = next((name for name, _ in blocks if path == name or path.startswith(f"{name}.")), "")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(block)
            if type(parameter) is Parameter and parameter.layout is torch.strided and not parameter.is_meta:
                sharers.setdefault(storage_key(parameter.untyped_storage()), set()).add(id(parameter))
    found: dict[str, list[tuple[str, Parameter]]] = {}
    for name, module in blocks:
        for path, parameter in module.named_parameters(prefix=name):
            if (
                type(parameter) is Parameter
                and not parameter.requires_grad
                and not parameter.is_meta
                and parameter.layout is torch.strided
                and parameter.nbytes >= max(min_bytes, 1)
                and owners[id(parameter)] == {name}
                and is_dense(parameter)
                and parameter.nbytes == parameter.untyped_storage().nbytes()
                and len(sharers[storage_key(parameter.untyped_storage())]) == 1
            ):
                found.setdefault(name, []).append((path, parameter))
    if not found:
        raise UsageError(
            f"stream: got {len(blocks)} blocks without a parameter that can be streamed, expected frozen parameters "
            f"(requires_grad=False) of at least {format_bytes(min_bytes)}, which no other block shares and which are "
            f"neither quantized nor sharded. Freeze them first, or give a smaller min_bytes"
        )
    return found


@contextmanager
def _unseen() -> Iterator[None]:
    """Inside, modes of the caller's do not see what is done: it is no part of the model."""
    with disable_dispatch(), disable_function():
        yield


def _nowhere() -> None:
    return None
