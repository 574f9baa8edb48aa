"""The hook that autograd calls when it saves a tensor.

NOTE [ Offloadable tensors ]

A tensor is not offloaded inside the call that saves it. An operator may pack a buffer before its kernel writes it
(``rrelu`` packs its noise first, and no version shows it). Autograd numbers its nodes, per thread, and makes a node
before it packs anything for it. So all packs of an operator have one number, and a pack with a higher number shows that
the operator has run. The tensors packed under the lower number may be offloaded then. Small ones wait until they
fill a batch, and the last ones until the context exits.

NOTE [ Inside a backward ]

Code that saves tensors during a backward is a replay (a checkpoint's), which uses them at once, or builds the graph of
a double backward. These tensors are kept. Hooks are pushed all the same: ``torch.utils.checkpoint`` counts packs, and
would return the wrong tensor if some were missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from spillway._torch import (
    Gathered,
    disable_dispatch,
    dispatch_modes,
    flatten,
    in_backward,
    is_local_part,
    is_wrapper,
    next_node,
)
from spillway.policies import Policy
from spillway.runtime.entry import ByteCounters
from spillway.saved_tensors.decide import Decider, Locator
from spillway.saved_tensors.groups import Groups, PassGroups, Waiting
from spillway.saved_tensors.handles import Handle, KeptHandle, OffloadedHandle, PartsHandle
from spillway.saved_tensors.identity import (
    Identity,
    KeptStorage,
    Known,
    SavedStorage,
    StorageMarks,
    is_parameter,
    reach,
    streamed_entry,
    why_unmovable,
)
from spillway.saved_tensors.order import AccessOrder, LearnedOrders, NextPassPredictor, offload_benefit
from spillway.session import MIN_BYTES, Session
from spillway.types import Decision

if TYPE_CHECKING:
    from spillway.runtime.device import Runtime
    from spillway.runtime.tiers import Tier

# A member of an enum costs a search of its class each time that it is named.
_KEEP, _OFFLOAD = Decision.KEEP, Decision.OFFLOAD
_TIERS = {Decision.OFFLOAD_HOST: "host", Decision.OFFLOAD_DISK: "disk"}


class ForwardScope:
    """One forward pass through an ``offload`` context, whose options it has: the pack hook and its state.

    Args:
        session: its runtimes move the bytes.
        policy: decides; ``None`` offloads everything.
        learned: the learned state of the tag.
        window: as :meth:`Mover.limit() <spillway.runtime.mover.Mover.limit>` takes it.
        locator: knows module and operator, if the policy asks for them.
        may_be_disabled: whether later passes may be disabled, if offloading gains nothing.
    """

    def __init__(
        self,
        session: Session,
        policy: Policy | None,
        learned: LearnedOrders,
        *,
        min_bytes: int,
        tag: str | None,
        tier: str,
        window: int | float | None = None,
        locator: Locator | None = None,
        may_be_disabled: bool = False,
        on_backward: Callable[[], object] | None = None,
        groups: Groups | None = None,
    ) -> None:
        self.tag = tag
        self.ledger = ByteCounters()
        self.session = session
        self._state = state = session.of(SavedState)
        self._identity, self._marks, self._outputs = state.identity, state.marks, state.outputs
        self._learned = learned
        self._tier = tier
        self._locator = locator
        self._may_be_disabled = may_be_disabled
        self._on_backward = on_backward
        self._window = window
        self._signature: tuple[torch.Size, torch.dtype, torch.device] | None = None
        self._turn = 0
        """See :meth:`~spillway.saved_tensors.order.NextPassPredictor.turn`."""
        self._gathered: Gathered | None = None
        self._devices: dict[torch.device, _Device] = {}
        self.groups = PassGroups(groups, self.ledger, window)
        self.decider = Decider(policy, self.groups, self._marks, min_bytes=min_bytes, tag=tag, locator=locator)
        self.waiting = Waiting(window)
        """Tensors outside of groups that are offloaded when their operators have run."""
        self._waiting_node = 0
        self.was_recomputed = False
        """Whether backward has come to a checkpointed block of the pass."""

    @property
    def was_asked(self) -> bool:
        """Whether backward has asked for a saved tensor."""
        return self.was_recomputed or any(device.order.was_asked for device in self._devices.values())

    @property
    def was_dropped(self) -> bool:
        """Whether the graph is gone before backward asked for any offloaded tensor."""
        for device in self._devices.values():
            # After this, dead handles are known to be dead.
            device.runtime.mover.read_notes()
        orders = [device.order for device in self._devices.values() if not device.order.is_empty]
        return bool(orders) and all(order.was_dropped for order in orders)

    @property
    def is_elsewhere(self) -> bool:
        """Whether a capture has begun or ended since the pass began."""
        return any(self.session.runtime(device) is not each.runtime for device, each in self._devices.items())

    @property
    def keeps_the_rest(self) -> bool:
        """Whether every tensor without an explicit decision is kept, and no registry needs to see it."""
        return self.decider.keeps_all and not (self._outputs.any or self._marks.any)

    def known(self, tensor: torch.Tensor) -> Known | None:
        """The record of a tensor's bytes, if they were saved and a handle of them is alive."""
        if why_unmovable(tensor) is not None:
            return None
        storage = tensor.untyped_storage()
        return self._identity.find(storage, *reach(tensor, storage.nbytes()))

    def can_recompute(self, tensor: torch.Tensor, output: Output) -> None:
        """The tensor, an output of a checkpointed block, need not be saved: ``output`` packs it instead."""
        self._outputs.set(tensor, output)

    def count_kept(self, nbytes: int) -> None:
        group = self.groups.current
        ledger = self.ledger if group is None else group.ledger
        ledger.saved_bytes += nbytes
        ledger.kept_bytes += nbytes

    def poisons(self, device: torch.device) -> bool:
        """Whether the device's backend checks reads of unwritten memory."""
        return device.type != "meta" and self.session.runtime(device).backend.poisons

    def is_captured(self, device: torch.device) -> bool:
        """Whether the device's work is being captured into a graph."""
        if device.type == "meta":
            return False
        known = self._devices.get(device)
        runtime = self.session.runtime(device) if known is None else known.runtime
        return runtime.backend.is_capturing()

    def pack(self, tensor: torch.Tensor) -> Handle:
        if in_backward():
            return KeptHandle(tensor)
        if dispatch_modes() > 0 and type(tensor) is torch.Tensor:
            # Packing is no operator of the user's: dispatch modes (a recorder, a counter) must not see it.
            with disable_dispatch():
                self.advance()
                return self._pack(tensor)
        self.advance()
        return self._pack(tensor)

    def advance(self) -> None:
        """Autograd saves a tensor: offload the waiting ones, if their operators have run."""
        node = next_node()
        if node > self._waiting_node:
            self._waiting_node = node
            # All waiting tensors have been written. Small ones wait until they fill a batch.
            if self.waiting.is_batch:
                self.waiting.send()

    def save(self, tensor: torch.Tensor, decision: Decision) -> Handle:
        """A handle of a tensor whose decision was made elsewhere. See NOTE [ Inside a backward ]."""
        return KeptHandle(tensor) if in_backward() else self._pack(tensor, decision)

    def keep_known(self, tensor: torch.Tensor, nbytes: int) -> Handle:
        """Keep, in forward, a plain tensor that only its maker has seen, and that was counted as ``nbytes`` before.

        Its bytes are not registered, unless the maker returns it (:meth:`register_returned`).
        """
        if self._signature is None or self._marks.any or self._outputs.any or self.groups.current is not None:
            return self.save(tensor, _KEEP)
        if nbytes:
            self.decider.pass_over()
            self.count_kept(nbytes)
        return KeptHandle(tensor)

    def register_returned(self, handle: KeptHandle) -> None:
        """Register a tensor of :meth:`keep_known` that is returned to other code, which may save it."""
        storage = handle.alias.untyped_storage()
        handle.saved = KeptStorage(storage, *reach(handle.alias, storage.nbytes()))
        self._identity.add(storage, handle.saved)

    def keep_parameter(self, tensor: torch.Tensor) -> Handle:
        """A handle of a parameter, of a view of one, or of another tensor that stays in memory anyway.

        A streamed parameter does not stay: its copy on the device is made again for backward.
        """
        entry = streamed_entry(tensor)
        if entry is None:
            return KeptHandle(tensor)
        device = self._devices.get(tensor.device)
        if device is None:
            device = self._meet(tensor)
        handle = self._share(tensor, tensor.untyped_storage(), entry, device)
        if handle is None:
            return KeptHandle(tensor)
        # Before the first other tensor it is not known which order this pass follows.
        if entry.order is None and self._signature is not None:
            entry.order = device.order
            entry.place = device.order.add(entry.reference, entry.nbytes)
        return handle

    def twin(self, handle: object, tensor: torch.Tensor) -> Handle | None:
        """A second handle of the bytes that ``handle`` has, for a tensor that is known to see them as they were saved.

        ``None`` if the two cannot share an entry.
        """
        if isinstance(handle, OffloadedHandle) and handle.saved.reaches(
            *reach(tensor, tensor.untyped_storage().nbytes())
        ):
            # Another pass of this session may have made the first one. One of another session is not shared.
            runtime = self.session.runtime(tensor.device)
            if handle.saved.mover is runtime.mover and runtime.mover.adopt(handle.saved, same_content=True):
                return OffloadedHandle(tensor, handle.saved, runtime.nothing)
        return None

    def _pack(self, tensor: torch.Tensor, decision: Decision | None = None) -> Handle:
        if is_parameter(tensor):
            return self.keep_parameter(tensor)
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            return self._pack_parts(tensor, decision)
        if why_unmovable(tensor) is not None:
            return KeptHandle(tensor)
        storage = tensor.untyped_storage()
        if self._locator is not None and self._locator.is_parameter_storage(storage):
            return KeptHandle(tensor)
        return self._pack_storage(tensor, storage, decision)

    def _pack_parts(self, tensor: torch.Tensor, decision: Decision | None) -> Handle:
        names, context = flatten(tensor)
        parts: dict[str, Handle] = {}
        objects: dict[str, Any] = {}
        with self.decider.inside(type(tensor)):
            for name in names:
                part = getattr(tensor, name)
                # A jagged tensor is identified by its offsets, the very object: only its values may be offloaded.
                if isinstance(part, torch.Tensor) and not (tensor.is_nested and name != "_values"):
                    parts[name] = self._pack(part, decision)
                else:
                    objects[name] = part
        return PartsHandle(tensor, parts, objects, context)

    def _pack_storage(self, tensor: torch.Tensor, storage: torch.UntypedStorage, decision: Decision | None) -> Handle:
        """A handle of a plain tensor: of a dropped output, of bytes that are registered, or of new ones."""
        output = self._outputs.get(storage) if self._outputs.any else None
        dropped = None if output is None else output.pack(tensor, torch.empty(0, device=tensor.device))
        if dropped is not None:
            return dropped
        device = self._devices.get(tensor.device)
        if device is None:
            device = self._meet(tensor)
        start, nbytes = reach(tensor, storage.nbytes())
        known = self._identity.find(storage, start, nbytes)
        handle = None if known is None else self._share(tensor, storage, known, device)
        if handle is not None:
            return handle
        if self._signature is None:
            self._begin(tensor, device)
        runtime, group = device.runtime, self.groups.current
        decision = self.decider(tensor, storage, nbytes, decision, group) if self.session.enabled else _KEEP
        tier = self._tier_for(decision, device)
        # Bytes at an address that the allocator would not give cannot be restored exactly.
        if tier is None or storage.data_ptr() % runtime.backend.alignment:
            return self._keep(tensor, storage, start, nbytes)
        if self._is_sharded(tensor, storage):
            return KeptHandle(tensor)
        ledger = self.ledger if group is None else group.ledger
        ledger.saved_bytes += nbytes
        saved = SavedStorage(tensor, storage, start, nbytes, next(runtime.mover.numbers), ledger)
        # Before another thread can find it.
        runtime.mover.see(saved)
        self._identity.add(storage, saved)
        self.decider.offloaded_bytes += nbytes
        handle = OffloadedHandle(tensor, saved, runtime.nothing)
        order = saved.order = device.order
        saved.place = order.add(saved.reference, nbytes)
        waiting = self.waiting if group is None else group.waiting
        waiting.add(saved, tier, defer=order.in_tail(saved.place))
        return handle

    def _share(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, known: Known, device: _Device
    ) -> Handle | None:
        """A handle of bytes that another saved tensor has registered, if they may be shared."""
        if isinstance(known, KeptStorage):
            return None if self._marks.get(storage) else KeptHandle(tensor, known)
        if not device.runtime.mover.adopt(known, same_content=known.is_content_of(tensor)):
            return None
        return OffloadedHandle(tensor, known, device.runtime.nothing)

    def _keep(self, tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, nbytes: int) -> Handle:
        """Keep bytes that were not saved before, and register them."""
        self.count_kept(nbytes)
        staying = KeptStorage(storage, start, nbytes)
        self._identity.add(storage, staying)
        return KeptHandle(tensor, staying)

    def _is_sharded(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it is an alias of a sharded parameter."""
        if self._gathered is None:
            self._gathered = Gathered()
        return self._gathered.holds(storage) or is_local_part(tensor)

    def _tier_for(self, decision: Decision, device: _Device) -> Tier | None:
        """The tier to offload to; ``None`` to keep."""
        if decision is _KEEP:
            return None
        tier = device.tier if decision is _OFFLOAD else device.runtime.tier(_TIERS[decision])
        if device.runtime.backend.unified and tier is device.runtime.tier("host"):
            self.ledger.note("kept on the device: it shares its memory with the CPU, so offloading would free nothing")
            return None
        return tier

    def _meet(self, tensor: torch.Tensor) -> _Device:
        """Set up a device for the first tensor on it."""
        runtime = self.session.runtime(tensor.device)
        order = AccessOrder(window=runtime.mover.window, on_backward=self._on_backward)
        device = self._devices[tensor.device] = _Device(runtime, runtime.tier(self._tier), order)
        return device

    def _begin(self, tensor: torch.Tensor, device: _Device) -> None:
        """Take over the learned order of an earlier pass, which the first tensor of this one tells."""
        self._signature = (tensor.shape, tensor.dtype, tensor.device)
        # After this, dead handles are known to be dead.
        device.runtime.mover.read_notes()
        predictor = self._state.predictor(tensor.device)
        self._turn = predictor.turn()
        previous, alike = self._learned.recall(self._signature, self._turn)
        if previous is not None:
            self.decider.total_bytes = previous.total_bytes or None
            self.groups.learn(previous.groups)
        device.order = AccessOrder(
            previous, alike, device.runtime.mover.limit(self._window), self._on_backward, predictor, self.tag
        )

    def flush(self) -> None:
        """Offload the waiting tensors outside of groups: every operator that saved one has returned."""
        self.waiting.send()

    def end(self, *, completed: bool) -> None:
        """The context exits.

        If nothing was raised inside, the waiting tensors are offloaded, and the pass remembered.
        """
        if not completed:
            self.waiting.clear()
            self.groups.abandon()
            return
        self.waiting.send()
        for each in self._devices.values():
            each.runtime.join()
        if self._signature is not None:
            # Tensors on other devices than the first one's have no learned order.
            device = self._signature[2]
            order = self._devices[device].order
            order.total_bytes = self.ledger.total().saved_bytes
            order.groups = self.groups.past()
            if self._may_be_disabled:
                backends = [each.runtime.backend for each in self._devices.values()]
                order.benefit = offload_benefit(order.total_bytes, backends)
            self._learned.keep(self._signature, self._turn, order)
            if not order.was_asked:
                self._state.predictor(device).add(order)


@dataclass(slots=True, eq=False)
class _Device:
    """The state of a pass on one device."""

    runtime: Runtime
    tier: Tier
    """The tier of :attr:`Decision.OFFLOAD`."""
    order: AccessOrder


class Output(Protocol):
    """An output of a checkpointed block that can be recomputed."""

    def pack(self, tensor: torch.Tensor, nothing: torch.Tensor) -> Handle | None:
        """A handle of a tensor over it; ``None`` if it was written since."""
        ...


class SavedState:
    """A session's state of saved tensors: ``session.of(SavedState)``."""

    def __init__(self) -> None:
        self.identity = Identity()
        self.marks: StorageMarks[bool] = StorageMarks()
        """Storages that the user marked: True to offload, False to keep."""
        self.outputs: StorageMarks[Output] = StorageMarks()
        """Storages of outputs that can be recomputed."""
        self._learned: dict[str | None, LearnedOrders] = {}
        self._predictors: dict[torch.device, NextPassPredictor] = {}
        self._lock = threading.Lock()

    def learned(self, tag: str | None) -> LearnedOrders:
        with self._lock:
            return self._learned.setdefault(tag, LearnedOrders())

    def predictor(self, device: torch.device) -> NextPassPredictor:
        with self._lock:
            return self._predictors.setdefault(device, NextPassPredictor())


def unscoped_scope(session: Session) -> ForwardScope:
    """A pass of tensors that checkpointed functions save outside of any ``offload`` context."""
    learned = session.of(SavedState).learned(None)
    return ForwardScope(session, None, learned, min_bytes=MIN_BYTES, tag=None, tier="auto")
