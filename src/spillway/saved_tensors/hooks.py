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
from typing import TYPE_CHECKING, Any

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
from spillway.errors import PolicyError
from spillway.policies import Keep, Policy
from spillway.runtime.entry import ByteCounters
from spillway.saved_tensors.devices import PassDevice, PassDevices
from spillway.saved_tensors.groups import Group, Groups, PassGroups, Waiting
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
from spillway.saved_tensors.order import LearnedOrders, NextPassPredictor
from spillway.session import Session
from spillway.types import Decision, SavedTensor

if TYPE_CHECKING:
    from spillway.runtime.tiers import Tier
    from spillway.saved_tensors.locator import Locator

# A member of an enum costs a search of its class each time that it is named.
_KEEP, _OFFLOAD = Decision.KEEP, Decision.OFFLOAD
_TIERS = {Decision.OFFLOAD_HOST: "host", Decision.OFFLOAD_DISK: "disk"}


@dataclass(eq=False)
class Decider:
    """Decides by, in this order: the user's marks, the size, a given decision or the policy, the rules about groups."""

    policy: Policy | None
    groups: PassGroups
    marks: StorageMarks[bool]
    min_bytes: int
    tag: str | None
    locator: Locator | None
    offloaded_bytes: int = 0
    """Bytes offloaded so far, for the policy to read. An adapter may reset it."""
    total_bytes: int | None = None
    """Bytes that the last similar pass saved, for the policy to read."""
    count: int = 0
    """Storages that were saved so far, also those that are decided about elsewhere."""
    part_of: type[torch.Tensor] | None = None
    """The wrapper subclass whose parts are decided about."""

    def __call__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        decided: Decision | None,
        group: Group | None,
    ) -> Decision:
        """The decision about ``nbytes`` of a storage, for the first tensor over them that was saved."""
        position = self.count
        self.count += 1
        marked = self.marks.get(storage)
        if marked is not None:
            return _OFFLOAD if marked else _KEEP
        if nbytes < self.min_bytes:
            return _KEEP
        if decided is not None:
            return decided if group is None else self._in_group(group, nbytes, decided)
        if self.policy is None:
            return self._in_group(group, nbytes, _OFFLOAD)
        module, function = self.locator.here() if self.locator is not None else (None, None)
        saved = SavedTensor(
            nbytes,
            tensor.shape,
            tensor.dtype,
            tensor.device,
            position,
            self.tag,
            self.offloaded_bytes,
            self.total_bytes,
            module,
            function,
            self.part_of,
            None if group is None else group.name,
        )
        decision = self.policy(saved)
        if not isinstance(decision, Decision) or decision is Decision.RECOMPUTE:
            raise PolicyError(
                f"policy {self.policy!r}: got {decision!r} for {saved}, expected a spillway.Decision; return one of "
                f"{', '.join(str(member) for member in Decision if member is not Decision.RECOMPUTE)}. To recompute, "
                f"use spillway.recompute."
            )
        return self._in_group(group, nbytes, decision)

    def _in_group(self, group: Group | None, nbytes: int, decision: Decision) -> Decision:
        """Apply the rules about groups to a decision to offload."""
        if decision is _KEEP:
            return decision
        if group is not None:
            group.nbytes += nbytes
            group.count += 1
        return _KEEP if self.groups.stays(group) else decision


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
        state = session.of(SavedState)
        self.identity, self.outputs, self._marks = state.identity, state.outputs, state.marks
        self._locator = locator
        self._may_be_disabled = may_be_disabled
        self._gathered: Gathered | None = None
        self.devices = PassDevices(
            session, learned, state.predictor, tier=tier, window=window, on_backward=on_backward, tag=tag
        )
        self._has_begun = False
        """Whether a tensor was saved that is decided about."""
        self.groups = PassGroups(groups, self.ledger, window)
        self.decider = Decider(policy, self.groups, self._marks, min_bytes=min_bytes, tag=tag, locator=locator)
        self.waiting = Waiting(window)
        """Tensors outside of groups that are offloaded when their operators have run."""
        self._waiting_node = 0
        self.was_recomputed = False
        """Whether backward has come to a checkpointed block of the pass."""

    @property
    def keeps_the_rest(self) -> bool:
        """Whether every tensor without an explicit decision is kept, and no registry needs to see it."""
        keeps_all = isinstance(self.decider.policy, Keep) and self.groups.rules is None
        return keeps_all and not (self.outputs.any or self._marks.any)

    @property
    def registers_all(self) -> bool:
        """Whether tensors that are kept must be registered, also those that only their maker has seen."""
        return not self._has_begun or self._marks.any or self.outputs.any or self.groups.current is not None

    def count_kept(self, nbytes: int) -> None:
        group = self.groups.current
        ledger = self.ledger if group is None else group.ledger
        ledger.saved_bytes += nbytes
        ledger.kept_bytes += nbytes

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

    def keep_parameter(self, tensor: torch.Tensor, *, is_replayed: bool = False) -> Handle:
        """A handle of a parameter, of a view of one, or of another tensor that stays in memory anyway.

        A streamed parameter does not stay: its copy on the device is made again for backward. That of a block that is
        replayed before (``is_replayed``) is fetched for the replay, and so is not prefetched in the learned order.
        """
        entry = streamed_entry(tensor)
        if entry is None:
            return KeptHandle(tensor)
        device = self.devices[tensor.device]
        handle = self._share(tensor, tensor.untyped_storage(), entry, device)
        if handle is None:
            return KeptHandle(tensor)
        # Before the first other tensor it is not known which order this pass follows.
        if entry.order is None and self._has_begun and not is_replayed:
            entry.order = device.order
            entry.place = device.order.add(entry.reference, entry.nbytes)
        return handle

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
        outer, self.decider.part_of = self.decider.part_of, type(tensor)
        try:
            for name in names:
                part = getattr(tensor, name)
                # A jagged tensor is identified by its offsets, the very object: only its values may be offloaded.
                if isinstance(part, torch.Tensor) and not (tensor.is_nested and name != "_values"):
                    parts[name] = self._pack(part, decision)
                else:
                    objects[name] = part
        finally:
            self.decider.part_of = outer
        return PartsHandle(tensor, parts, objects, context)

    def _pack_storage(self, tensor: torch.Tensor, storage: torch.UntypedStorage, decision: Decision | None) -> Handle:
        """A handle of a plain tensor: of a dropped output, of bytes that are registered, or of new ones."""
        pack_output = self.outputs.get(storage)
        dropped = None if pack_output is None else pack_output(tensor, torch.empty(0, device=tensor.device))
        if dropped is not None:
            return dropped
        device = self.devices[tensor.device]
        start, nbytes = reach(tensor, storage.nbytes())
        known = self.identity.find(storage, start, nbytes)
        handle = None if known is None else self._share(tensor, storage, known, device)
        if handle is not None:
            return handle
        if not self._has_begun:
            self._begin(tensor)
        group = self.groups.current
        decision = self.decider(tensor, storage, nbytes, decision, group) if self.session.enabled else _KEEP
        tier = None if decision is _KEEP else self._tier_of(decision, device)
        # Bytes at an address that the allocator would not give cannot be restored exactly.
        if tier is None or storage.data_ptr() % device.runtime.backend.alignment:
            self.count_kept(nbytes)
            kept = KeptStorage(storage, start, nbytes)
            self.identity.add(storage, kept)
            return KeptHandle(tensor, kept)
        if self._gathered is None:
            self._gathered = Gathered()
        if self._gathered.holds(storage) or is_local_part(tensor):
            # An alias of a sharded parameter.
            return KeptHandle(tensor)
        ledger, waiting = (self.ledger, self.waiting) if group is None else (group.ledger, group.waiting)
        mover, order = device.runtime.mover, device.order
        ledger.saved_bytes += nbytes
        saved = SavedStorage(tensor, storage, start, nbytes, next(mover.numbers), ledger)
        # Before another thread can find it.
        mover.see(saved)
        self.identity.add(storage, saved)
        self.decider.offloaded_bytes += nbytes
        handle = OffloadedHandle(tensor, saved, device.runtime.nothing)
        saved.order, saved.place = order, order.add(saved.reference, nbytes)
        waiting.add(saved, tier, defer=saved.place in order.tail)
        return handle

    def _share(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, known: Known, device: PassDevice
    ) -> Handle | None:
        """A handle of bytes that another saved tensor has registered, if they may be shared."""
        if isinstance(known, KeptStorage):
            return None if self._marks.get(storage) else KeptHandle(tensor, known)
        if not device.runtime.mover.adopt(known, same_content=known.is_content_of(tensor)):
            return None
        return OffloadedHandle(tensor, known, device.runtime.nothing)

    def _begin(self, first: torch.Tensor) -> None:
        """The first tensor tells which earlier pass this one is like."""
        self._has_begun = True
        previous = self.devices.begin(first)
        if previous is not None:
            self.decider.total_bytes = previous.total_bytes or None
            self.groups.learn(previous.groups)

    def _tier_of(self, decision: Decision, device: PassDevice) -> Tier | None:
        """The tier of a decision to offload; ``None`` if that would free nothing."""
        tier = device.tier if decision is _OFFLOAD else device.runtime.tier(_TIERS[decision])
        if device.runtime.backend.unified and tier is device.runtime.tier("host"):
            self.ledger.note("kept on the device: it shares its memory with the CPU, so offloading would free nothing")
            return None
        return tier

    def end(self, *, completed: bool) -> None:
        """The context exits. If nothing was raised inside, waiting tensors are offloaded, and the pass remembered."""
        if not completed:
            self.waiting.clear()
            self.groups.abandon()
            return
        self.waiting.send()
        total, groups = self.ledger.total().saved_bytes, self.groups.past()
        self.devices.end(total, groups, may_be_disabled=self._may_be_disabled)


class SavedState:
    """A session's state of saved tensors: ``session.of(SavedState)``."""

    def __init__(self) -> None:
        self.identity = Identity()
        self.marks: StorageMarks[bool] = StorageMarks()
        """Storages that the user marked: True to offload, False to keep."""
        self.outputs: StorageMarks[Callable[[torch.Tensor, torch.Tensor], Handle | None]] = StorageMarks()
        """Storages of outputs that can be recomputed, each with what makes a handle; ``None``: it was written since."""
        self._learned: dict[str | None, LearnedOrders] = {}
        self._predictors: dict[torch.device, NextPassPredictor] = {}
        self._lock = threading.Lock()

    def learned(self, tag: str | None) -> LearnedOrders:
        with self._lock:
            return self._learned.setdefault(tag, LearnedOrders())

    def predictor(self, device: torch.device) -> NextPassPredictor:
        with self._lock:
            return self._predictors.setdefault(device, NextPassPredictor())
