"""Parameters of blocks: in pinned CPU memory, and on the device while their block runs.

NOTE [ Streamed parameters ]

At rest, ``parameter.data`` is pinned CPU memory, the parameter's *home*, as a tensor of the device: CUDA devices read
and write registered CPU memory at its own address. So a parameter never changes its device. Code that reads or writes
it between calls (``state_dict``, an optimizer, a weight penalty, ``load_state_dict``) finds its content there, in the
order of streams, at the speed of the link. Autograd keeps its one node for the parameter, so gradients, hooks and
``torch.autograd.grad`` are those of any parameter. During the call of its block, ``parameter.data`` is a copy in the
device's own memory. The object, its names, its shape and its version counter stay::

    at rest --fetch--> being copied --enter--> in use --exit--> at rest

Each use has an entry of the mover of its own (:class:`StreamedEntry`), with the home for a slot. So a write at rest
counts for the next use. Nothing is copied out, unless the block wrote the parameter.

* **Autograd** saves a parameter or a view of it (``weight.t()``). The parameter itself must not be held for backward,
  which would read the home. So the pack hook gives autograd a handle of the entry in use. After forward nothing holds
  the copy on the device. When backward asks, the home is copied again, prefetched in the learned order like every
  offloaded tensor. If other hooks are in force, or none, they get an alias of the copy, which then stays.
* **A replay** of a checkpointed block enters the block again.
* **An optimizer** steps the home: NOTE [ Steps of streamed parameters ] in ``optim/host_parameter.py``.

NOTE [ Fetched ahead ]

When a block is entered, the block that followed it the last time is fetched: at most two blocks are on the device.
Forward and replays have sequences of their own. Such a prediction is optional and belongs to one pass: it is dropped
when the call of the model or the backward ends, since parameters may be written in between. A version shows most writes
to a block that is fetched already, and it is fetched again. A write through ``.data`` to a block that is about to run
shows in no version.

NOTE [ Writes at rest ]

When the call of the model or the backward ends, copies of homes may still be queued, and the caller may write a home
then. So compute waits for the last copy, and a write comes after it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Module, Parameter

from spillway._torch import in_backward, refuse_transforms, top_hooks, unseen
from spillway.errors import TierError, UnsupportedError, UsageError
from spillway.parameters.homes import FileHome, FileTier, Home, HomeTier, StreamedEntry, StreamedParameter, Use, move
from spillway.parameters.streamable import Trainer, parameters_of
from spillway.parameters.weights import home_of
from spillway.runtime.arena import Pinned
from spillway.runtime.backend import Stream, on_error
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.entry import ByteCounters
from spillway.saved_tensors.handles import KeptHandle, in_replay, unpack
from spillway.saved_tensors.hooks import SavedState
from spillway.saved_tensors.identity import is_streamed, set_streamed
from spillway.saved_tensors.scopes import current_scope, scope_of_hooks
from spillway.session import Session


class CopyListener(Protocol):
    """A profiler that listens to the copies of a block."""

    def waits(self, *, begins: bool) -> None:
        """Compute is about to wait for copies, or has done so."""
        ...

    def rests(self, *, begins: bool) -> None:
        """Copies are about to be freed, or have been."""
        ...

    def holds(self, copies: Sequence[torch.UntypedStorage]) -> None:
        """A replay is over: autograd has these copies now."""
        ...


class Owned(NamedTuple):
    """A parameter of a block."""

    path: str
    reference: weakref.ref[Parameter]
    device: torch.device
    """The device that it was on."""


class StreamedBlock:
    """A block whose parameters are streamed."""

    def __init__(self, name: str, model: StreamedModel, own: Sequence[Owned]) -> None:
        self.name = name
        self.parameters: list[StreamedParameter] = []
        """Empty while they stay on the device."""
        self.own = own
        """All of them, streamed or not."""
        self.files: dict[str, FileHome] = {}
        """The homes in files, by path, also while they stay on the device."""
        self._model = model
        self.users = 0
        """Calls that are under way."""
        self._stream: Stream | None = None
        """The compute stream that the parameters are on the device for."""
        self._here: list[Use] = []
        self.ledger = ByteCounters()
        """Counts the bytes of its last forward, and of the replays of that."""
        self.here_bytes = 0
        """Bytes of its copies on the device, without those that are fetched ahead, and those that a graph has."""
        self.listener: CopyListener | None = None

    @property
    def sizes(self) -> list[int]:
        return [each.home.nbytes for each in self.parameters if each.is_alive]

    @property
    def read_seconds(self) -> float:
        """Time to read its parameters that are in files, as in the last pass."""
        nbytes = sum(home.nbytes for home in self.files.values())
        return nbytes * self._model.read_seconds_per_byte

    def in_replay(self) -> AbstractContextManager[None]:
        """:meth:`in_use` around a replay of the block's checkpointed forward."""
        return self.in_use(is_replay=True)

    @contextmanager
    def in_use(self, *, is_replay: bool = False) -> Iterator[None]:
        """Inside, the block's parameters are on the device.

        Raises:
            UsageError: if a parameter was moved or cast.
            UnsupportedError: while a graph is captured; inside of a ``torch.func``
                transform; if a call on another stream is under way.
        """
        model = self._model
        try:
            with model.lock, unseen():
                # A block inside of one that is replayed is called as in forward.
                self._enter(is_replay=is_replay or in_replay())
            with nullcontext() if is_replay else _aliases_for_others():
                yield
        finally:
            with model.lock, unseen():
                self._exit(is_replay=is_replay or in_replay())

    def _enter(self, *, is_replay: bool) -> None:
        self.users += 1
        if not self.parameters:
            # They are on the device, or the model was removed.
            return
        model, compute = self._model, self._model.runtime.backend.compute()
        if self.users > 1:
            if compute != self._stream:
                raise UnsupportedError(
                    f"{self.name} is streamed, and was called on a stream while a call on another stream was under "
                    f"way, expected one stream. Join the streams between the calls"
                )
            return
        refuse_transforms()
        self._stream = compute
        # An interrupt may have left something.
        self._rest()
        self.here_bytes = 0
        listener = self.listener
        if listener is not None:
            listener.waits(begins=True)
        self._here = model.uses(self, is_replay=is_replay)
        for use in self._here:
            parameter, entry = use.parameter, use.entry
            storage, use.round = model.mover.take(entry, -1)
            self.here_bytes += entry.nbytes
            entry.origin = weakref.ref(storage)
            parameter.use(storage)
            set_streamed(parameter.own(), entry)
            model.identity.add(storage, entry)
        if listener is not None:
            listener.waits(begins=False)
        model.fetch_next(self, is_replay=is_replay)

    def _exit(self, *, is_replay: bool) -> None:
        # An interrupt may have come before the call was counted.
        self.users = max(self.users - 1, 0)
        if not self.users:
            listener = self.listener
            if listener is not None:
                listener.rests(begins=True)
                if is_replay:
                    copied = (use.parameter.own() for use in self._here if use.parameter.is_alive and use.round >= 0)
                    listener.holds([each.untyped_storage() for each in copied])
            self._rest()
            self.here_bytes = 0
            if listener is not None:
                listener.rests(begins=False)
            if not (self._model.passes or in_backward()):
                self._model.settle()

    def _rest(self) -> None:
        while self._here:
            use = self._here[-1]
            if use.parameter.is_alive and use.round >= 0:
                set_streamed(use.parameter.own(), None)
                use.parameter.rest(use.entry)
            self._here.pop()


class StreamedModel:
    """The streamed blocks of a model.

    Args:
        blocks: names and modules. Their parameters of at least ``min_bytes`` are streamed, if they are frozen, or if
            the optimizer steps them.
        model: the model that they are in. Its other parameters and its buffers are moved to the device.
        device: where the model computes.
        session: its runtime copies.
        optimizer: steps parameters, also streamed ones. ``None``: frozen parameters only.

    Raises:
        UsageError: if no parameter can be streamed, a parameter is on ``meta``, or a quantized or sharded one is on
            another device.
        TierFullError: if the session has too little CPU memory.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[str, Module]],
        model: Module,
        device: torch.device,
        session: Session,
        min_bytes: int,
        optimizer: Trainer | None = None,
    ) -> None:
        if optimizer is not None:
            optimizer.check_streaming()
        found = parameters_of(blocks, model, device, min_bytes, optimizer)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None
        self._session, self._device = session, device
        runtime = session.runtime(device)
        if not isinstance(runtime, DeviceRuntime):
            raise UnsupportedError("stream: got a capture that is under way, expected none. Attach before the capture")
        self.runtime, self.mover = runtime, runtime.mover
        self.identity = session.of(SavedState).identity
        self.lock = threading.RLock()
        out, back = self.mover.streams
        self._memory = HomeTier(runtime.backend, runtime.arena, out=out, back=back)
        self._files = FileTier(runtime.backend, runtime.arena, out=out, back=back)
        # Weak: entries of dropped models hold the tiers until they are forgotten.
        me = weakref.ref(self)
        for tier in (self._memory, self._files):
            tier.at_end = lambda: _settle(me)
        self.passes = 0
        """Calls of the model that are under way."""
        self._ahead = _Ahead()
        self._moved: list[tuple[weakref.ref[Any], torch.device]] = []
        self.blocks: list[StreamedBlock] = []
        # Homes of dropped models are freed.
        self.mover.read_notes()
        with ExitStack() as undo:
            undo.callback(self._leave)
            with self._moving() as streamed:
                undo.callback(self._forget, streamed)
                # The optimizer then sees parameters where they were.
                with on_error(self._leave), on_error(self._forget, streamed):
                    for name, parameters in found.items():
                        own = [Owned(path, weakref.ref(each), each.device) for path, each in parameters]
                        self.blocks.append(StreamedBlock(name, self, own))
                        self._stream(self.blocks[-1], streamed)
                    for tensor in (*model.parameters(), *model.buffers()):
                        if tensor.device != device and not is_streamed(tensor):
                            self._moved.append((weakref.ref(tensor), tensor.device))
                            move(tensor, tensor.detach().to(device))
            undo.pop_all()

    @contextmanager
    def one_pass(self) -> Iterator[None]:
        """A call of the model. See NOTE [ Fetched ahead ] and NOTE [ Writes at rest ]."""
        with self.lock:
            self._ahead.drop()
            self._files.measure()
            self.passes += 1
        try:
            yield
        finally:
            with self.lock:
                self.passes -= 1
                self.settle()

    def settle(self) -> None:
        """Nothing is fetched ahead, and what compute does next comes after all copies of homes."""
        with self.lock:
            self._ahead.drop()
            for tier in (self._memory, self._files):
                tier.settle()

    @property
    def read_seconds_per_byte(self) -> float:
        """Time to read a byte of the files, as measured in the latest pass; 0: none was read."""
        return self._files.seconds_per_byte

    @property
    def resident_bytes(self) -> int:
        """Bytes of the parameters of blocks that stay on the device."""
        return self._resident_bytes(lambda block, owned: True)

    @property
    def missing_host_bytes(self) -> int:
        """Bytes of CPU memory that these need once they are streamed again."""
        return self._resident_bytes(lambda block, owned: owned.path not in block.files)

    def _resident_bytes(self, counts: Callable[[StreamedBlock, Owned], bool]) -> int:
        resident = (block for block in self.blocks if not block.parameters)
        found = (owned.reference() for block in resident for owned in block.own if counts(block, owned))
        return sum(parameter.nbytes for parameter in found if parameter is not None)

    def place(self, resident: Collection[str]) -> None:
        """Let the parameters of blocks of these names stay on the device, and stream those of all others.

        Raises:
            UsageError: between a backward that has stepped parameters and its ``step()``.
            TierFullError: if the session has too little CPU memory.
        """
        with self.lock:
            leaving = [block for block in self.blocks if block.parameters and block.name in resident]
            coming = [block for block in self.blocks if not block.parameters and block.name not in resident]
            if not (leaving or coming):
                return
            if any(block.users for block in self.blocks):
                raise UnsupportedError(
                    "stream: got a call of a streamed block in another thread while weights move between CPU memory "
                    "and the device, expected none. Call the model in one thread at a time"
                )
            with self._moving() as streamed:
                # First: all together may not fit the device.
                with on_error(self._settle_on_device, coming, streamed):
                    for block in coming:
                        self._stream(block, streamed)
                for block in leaving:
                    # Those of its parameters that have left.
                    with on_error(self._stream, block, streamed):
                        self._settle_on_device([block], streamed)

    def remove(self) -> None:
        """Every parameter and buffer is again where it was."""
        with self.lock, self._moving() as streamed:
            self._forget(streamed)
            self._leave()

    def _settle_on_device(
        self, blocks: Sequence[StreamedBlock], streamed: dict[torch.Tensor, StreamedParameter | None]
    ) -> None:
        """Let the parameters of blocks stay on the device. The optimizer knows that they may be streamed again."""
        self._let_go(blocks, self._device)
        for block in blocks:
            for owned in block.own:
                parameter = owned.reference()
                if parameter in streamed:
                    streamed[parameter] = None

    def _stream(self, block: StreamedBlock, streamed: dict[torch.Tensor, StreamedParameter | None]) -> None:
        """Move the parameters of a block to pinned memory, unless they are there or in a file."""
        optimizer, arena = self._optimizer(), self.runtime.arena
        for owned in block.own:
            parameter = owned.reference()
            if parameter is None or is_streamed(parameter):
                continue
            home: Home | None = block.files.get(owned.path) or home_of(parameter, arena)
            # It may have been cast while it was on the device.
            if home is None or home.nbytes != parameter.nbytes:
                home = Pinned(arena, parameter.nbytes)
                home.synchronize()
            if isinstance(home, FileHome):
                block.files[owned.path] = home
            self._take(block, owned, parameter, home)
            if optimizer is not None and optimizer.holds(parameter) and isinstance(home, Pinned):
                streamed[parameter] = block.parameters[-1]

    def _take(self, block: StreamedBlock, owned: Owned, parameter: Parameter, home: Home) -> None:
        backend = self.runtime.backend
        block.parameters.append(StreamedParameter(owned.path, parameter, home, backend, owned.device))
        set_streamed(parameter, None)

    @contextmanager
    def _moving(self) -> Iterator[dict[torch.Tensor, StreamedParameter | None]]:
        """Inside, parameters may move. Gives the optimizer's record of those that are streamed."""
        optimizer = self._optimizer()
        with (
            torch.inference_mode(mode=False),
            nullcontext({}) if optimizer is None else optimizer.moving() as streamed,
        ):
            yield streamed

    def _forget(self, streamed: dict[torch.Tensor, StreamedParameter | None]) -> None:
        """The optimizer may have parameters of other models."""
        for owned in (owned for block in self.blocks for owned in block.own):
            parameter = owned.reference()
            if parameter is not None:
                streamed.pop(parameter, None)

    def _let_go(self, blocks: Sequence[StreamedBlock], device: torch.device | None = None) -> None:
        """Give parameters memory of their own on a device; ``None``: where they were."""
        self.settle()
        backend = self.runtime.backend
        # Homes are read by the CPU now, and freed.
        backend.record(backend.compute()).synchronize()
        for block in blocks:
            # A replay after this finds them there.
            while block.parameters:
                block.parameters[0].leave(device)
                block.parameters.pop(0)

    def _leave(self) -> None:
        for block in self.blocks:
            for owned in block.own:
                parameter = owned.reference()
                if parameter is None or is_streamed(parameter):
                    continue
                home = block.files.get(owned.path)
                if home is not None and home.nbytes == parameter.nbytes:
                    self._take(block, owned, parameter, home)
                else:
                    self._moved.append(owned[1:])
        self._let_go(self.blocks)
        self.blocks = []
        for reference, device in self._moved:
            tensor = reference()
            if tensor is not None and tensor.device != device:
                move(tensor, tensor.detach().to(device))
        self._moved = []

    # For blocks, with the lock held.

    def uses(self, block: StreamedBlock, *, is_replay: bool) -> list[Use]:
        """The uses of a block that is entered, being copied."""
        ahead = self._ahead.take(block, is_replay=is_replay)
        if ahead and all(use.entry.is_content_of(use.parameter.own()) for use in ahead):
            for use in ahead:
                use.parameter.check()
            return ahead
        return self.fetched(block, is_replay=is_replay)

    def fetch_next(self, block: StreamedBlock, *, is_replay: bool) -> None:
        """Fetch the block that followed this one the last time."""
        following = self._ahead.expected(block, is_replay=is_replay)
        if following is None or not (self.passes or is_replay):
            return
        if is_replay and any(each.is_alive and each.is_written() for each in following.parameters):
            # Its backward is over, and a step is writing it.
            return
        if not is_replay:
            for each in following.parameters:
                # An error of a step is not of a copy that is optional.
                each.before_fetch()
        try:
            self._ahead.put(following, self.fetched(following, is_replay=is_replay), is_replay=is_replay)
        except (TierError, torch.OutOfMemoryError, UsageError, UnsupportedError):
            # It may be in use just now, and is not needed yet. When it is, its call fetches it and gets the error.
            return

    def fetched(self, block: StreamedBlock, *, is_replay: bool) -> list[Use]:
        """Uses of a block whose copies are queued."""
        if self._session.runtime(self._device) is not self.runtime:
            raise UnsupportedError(
                f"{block.name} is streamed, and was called while a graph is captured: got a capture, expected none. A "
                f"captured graph reads the same memory in each replay"
            )
        alive = [each for each in block.parameters if each.is_alive]
        for each in alive:
            each.check()
            if not is_replay:
                # A replay of a block that was stepped since is refused.
                each.before_fetch()
        if not is_replay:
            # Evaluation belongs to no pass.
            block.ledger = current_scope(self._session).ledger if torch.is_grad_enabled() else ByteCounters()
        uses = [
            Use(each, (self._shared(each) if is_replay else None) or self._made(each, block.ledger)) for each in alive
        ]
        self.mover.fetch([use.entry for use in uses])
        return uses

    def _shared(self, parameter: StreamedParameter) -> StreamedEntry | None:
        """In a replay: the entry that the graph has already, so that the parameter is copied once for both."""
        entry = None if parameter.latest is None else parameter.latest()
        if entry is None or not self.mover.adopt(entry, same_content=entry.is_content_of(parameter.own())):
            return None
        assert isinstance(entry, StreamedEntry)
        return entry

    def _made(self, parameter: StreamedParameter, ledger: ByteCounters) -> StreamedEntry:
        tier = self._files if isinstance(parameter.home, FileHome) else self._memory
        entry = StreamedEntry(parameter, self.runtime, tier, ledger)
        parameter.latest = entry.reference
        return entry


class _Ahead:
    """The block that is fetched ahead. See NOTE [ Fetched ahead ]."""

    def __init__(self) -> None:
        self._next: dict[tuple[bool, StreamedBlock], StreamedBlock] = {}
        """The block that followed another one, in a replay or not."""
        self._last: dict[bool, StreamedBlock] = {}
        self._fetched: tuple[bool, StreamedBlock, list[Use]] | None = None
        """Whether it is for a replay, the block, and its uses."""

    def expected(self, block: StreamedBlock, *, is_replay: bool) -> StreamedBlock | None:
        """The block that is expected after one that is entered now."""
        before, self._last[is_replay] = self._last.get(is_replay), block
        if before is not None and before is not block:
            self._next[is_replay, before] = block
        following = self._next.get((is_replay, block))
        return None if following is block else following

    def put(self, block: StreamedBlock, uses: list[Use], *, is_replay: bool) -> None:
        """The block that is expected next has been fetched."""
        self._fetched = is_replay, block, uses

    def take(self, block: StreamedBlock, *, is_replay: bool) -> list[Use]:
        """The uses of a block that is entered, if it was fetched. Those of another one are dropped."""
        fetched, self._fetched = self._fetched, None
        return fetched[2] if fetched is not None and fetched[:2] == (is_replay, block) else []

    def drop(self) -> None:
        """A pass begins or ends. No block follows the last one: with another plan, one did."""
        self._fetched = None
        for is_replay, block in self._last.items():
            self._next.pop((is_replay, block), None)
        self._last.clear()


def _settle(model: weakref.ref[StreamedModel]) -> None:
    found = model()
    if found is not None:
        found.settle()


@contextmanager
def _aliases_for_others() -> Iterator[None]:
    """Inside, saved-tensor hooks that are not Spillway's get aliases of streamed parameters, not the parameters."""
    if not torch.is_grad_enabled() or scope_of_hooks() is not None:
        yield
        return
    hooks = top_hooks(True)
    pack: Callable[[torch.Tensor], Any] = KeptHandle if hooks is None else hooks[0]
    back: Callable[[Any], Any] = unpack if hooks is None else hooks[1]
    with saved_tensors_hooks(lambda tensor: pack(tensor.detach() if is_streamed(tensor) else tensor), back):
        yield
