"""What autograd calls when it saves a tensor.

NOTE [ When a tensor may leave ]

Not inside the call that saves it: an operator may pack a buffer before its kernel has written it (``rrelu`` packs its
noise so, and no version tells). Autograd numbers its nodes, per thread, as it makes them, and a node is made before
anything is packed for it: so all that an operator packs is packed under one number, and when a later pack finds a
higher one, that operator has run. What was packed under the lower number leaves then; the last leaves when the context
exits.

NOTE [ Inside a backward ]

Code that saves tensors while a backward runs is a re-run (a checkpoint's), whose tensors are used at once, or makes the
graph of a double backward. These are kept. Hooks are pushed all the same, since ``torch.utils.checkpoint`` counts packs
and would hand back another tensor if some were missing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import torch

from spillway.capture.deciding import Decider
from spillway.capture.gain import judge
from spillway.capture.groups import PassGroups
from spillway.capture.handles import AwayHandle, Handle, KeptHandle, ObjectHandle, PartsHandle
from spillway.capture.identity import (
    Identity,
    Known,
    Marks,
    Saved,
    Staying,
    ViewRecipe,
    flatten,
    is_parameter,
    is_wrapper,
    reach,
    why_unmovable,
)
from spillway.capture.location import Locator
from spillway.capture.order import Course, Memory
from spillway.capture.sharded import Gathered, is_local_part
from spillway.capture.succession import Succession
from spillway.capture.waiting import Waiting
from spillway.errors import UnsupportedError
from spillway.groups import Groups
from spillway.policies import Policy
from spillway.records import Decision
from spillway.runtime.device import Runtime
from spillway.runtime.ledger import Ledger
from spillway.runtime.tiers import HostTier, Tier

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether the calling thread is inside a backward. See NOTE [ Inside a backward ]."""
    return _graph_task() != -1


def refuse_transforms() -> None:
    """Raise :class:`~spillway.errors.UnsupportedError` where there are no hooks: in ``torch.func`` transforms, say."""
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            "got a call inside of a torch.func transform (grad, vjp, jvp, vmap), expected plain autograd; torch.func "
            "allows no saved-tensor hooks: call it around the transform's function only without Spillway"
        )
    if disabled is not None:
        raise UnsupportedError(
            f"got a call where saved-tensor hooks are disabled ({disabled}), expected one where they are not; leave "
            f"out torch.autograd.graph.disable_saved_tensors_hooks, or do without Spillway there"
        )


# A member of an enum costs a search of its class each time that it is named.
_KEEP, _OFFLOAD = Decision.KEEP, Decision.OFFLOAD
_TIERS = {Decision.OFFLOAD_HOST: "host", Decision.OFFLOAD_DISK: "disk"}


class Packer(Protocol):
    """Makes handles for what sees an output that a region can compute again."""

    def pack(self, tensor: torch.Tensor, nothing: torch.Tensor) -> Handle | None: ...


class Outputs(Protocol):
    """The outputs that regions can compute again."""

    @property
    def any(self) -> bool: ...

    def get(self, storage: torch.UntypedStorage) -> Packer | None: ...


class Owner(Protocol):
    """Whose runtimes move the bytes: a session."""

    identity: Identity
    marks: Marks
    enabled: bool

    @property
    def outputs(self) -> Outputs: ...

    def runtime(self, device: torch.device) -> Runtime: ...

    def succession(self, device: torch.device) -> Succession[Course]: ...


class Pass:
    """One time through an ``offload`` context: the pack hook, and what it has seen.

    Args:
        owner: whose runtimes move the bytes.
        policy: decides; ``None`` offloads everything.
        min_bytes: smaller tensors are kept, and the policy is not asked.
        memory: what is known of earlier passes of the same tag.
        tag: for the policy to read.
        tier: where :attr:`Decision.OFFLOAD` goes: ``"auto"``, ``"host"`` or ``"disk"``.
        window: bytes that may be LEAVING at once; a float is a share of the session's, and ``None`` is that.
        locator: knows module and operator, if the policy wants them.
        told_nothing: whether it may be found that there is nothing to be gained.
        on_backward: called when backward asks for the first of what was to leave, on each device.
        groups: rules about groups, outside of which nothing leaves then.
    """

    def __init__(
        self,
        owner: Owner,
        policy: Policy | None,
        memory: Memory,
        *,
        min_bytes: int,
        tag: str | None,
        tier: str,
        window: int | float | None,
        locator: Locator | None,
        told_nothing: bool = False,
        on_backward: Callable[[], object] | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._on_backward = on_backward
        self._told_nothing = told_nothing
        self.ledger = Ledger()
        self._owner = owner
        self._memory = memory
        self.tag = tag
        self._tier = tier
        # Not of this object, which would be a circle: it is to go when nobody holds it.
        self._window_on = functools.partial(_window_on, window)
        self._locator = locator
        self._signature: tuple[torch.Size, torch.dtype, torch.device] | None = None
        self._turn = 0
        """See :meth:`~spillway.capture.succession.Succession.turn`."""
        self._gathered: Gathered | None = None
        self._devices: dict[torch.device, _Device] = {}
        self.groups = PassGroups(groups, self.ledger, self._window_on)
        self.decider = Decider(policy, self.groups, owner.marks, min_bytes=min_bytes, tag=tag, locator=locator)
        self.waiting = Waiting(self._window_on)
        """What leaves when the operators that saved it have run, but for what its group will send."""
        self._waiting_node = 0
        self._nothing: dict[torch.device, torch.Tensor] = {}
        self.was_recomputed = False
        """Whether backward has come to a region of the pass."""

    @property
    def was_asked(self) -> bool:
        """Whether backward has begun to ask for what was saved."""
        return self.was_recomputed or any(device.course.was_asked for device in self._devices.values())

    @property
    def was_dropped(self) -> bool:
        """Whether nobody has asked for anything that was to leave, or ever will: its graph is gone."""
        for device in self._devices.values():
            # Handles that have died are known to be dead after that.
            device.runtime.mover.read_notes()
        courses = [device.course for device in self._devices.values() if not device.course.is_empty]
        return bool(courses) and all(course.was_dropped for course in courses)

    @property
    def is_elsewhere(self) -> bool:
        """Whether a capture has begun or ended since it began: what it queues, it would queue where it cannot."""
        return any(self._owner.runtime(device) is not each.runtime for device, each in self._devices.items())

    @property
    def keeps_the_rest(self) -> bool:
        """Whether all stays that nobody has decided about, and nobody is to see it."""
        return self.decider.keeps_all and not (self._owner.outputs.any or self._owner.marks.any)

    def known(self, tensor: torch.Tensor) -> Known | None:
        """What is known of a tensor's bytes, if they were saved, and somebody has a handle of them."""
        if why_unmovable(tensor) is not None:
            return None
        storage = tensor.untyped_storage()
        return self._owner.identity.find(storage, *reach(tensor, storage.nbytes()))

    def count_kept(self, nbytes: int) -> None:
        """So many bytes were saved, and stay."""
        group = self.groups.current
        ledger = self.ledger if group is None else group.ledger
        ledger.saved_bytes += nbytes
        ledger.kept_bytes += nbytes

    def nothing(self, device: torch.device) -> torch.Tensor:
        """An empty tensor there, for trackers."""
        nothing = self._nothing.get(device)
        if nothing is None:
            nothing = self._nothing[device] = torch.empty(0, device=device)
        return nothing

    def poisons(self, device: torch.device) -> bool:
        """Whether the device's backend wants unwritten memory to show."""
        return device.type != "meta" and self._owner.runtime(device).backend.poisons

    def is_captured(self, device: torch.device) -> bool:
        """Whether what the device is given now is captured into a graph."""
        if device.type == "meta":
            return False
        known = self._devices.get(device)
        runtime = self._owner.runtime(device) if known is None else known.runtime
        return runtime.backend.is_capturing()

    def pack(self, tensor: torch.Tensor) -> Handle:
        """The hook: what autograd holds for ``tensor``."""
        if _graph_task() != -1:
            return KeptHandle(tensor)
        if torch._C._len_torch_dispatch_stack() > 0 and type(tensor) is torch.Tensor:
            # What is done here is no operator of the user's, whose modes (a region's, a counter's) see the others.
            with torch._C._DisableTorchDispatch():
                return self._pack_in_order(tensor)
        return self._pack_in_order(tensor)

    def _pack_in_order(self, tensor: torch.Tensor) -> Handle:
        self.advance()
        return self._pack(tensor)

    def advance(self) -> None:
        """Autograd saves something: what waits leaves, if the operators that saved it have run."""
        node = _next_node()
        if node > self._waiting_node:
            self._waiting_node = node
            # All that waits has been written. Small tensors wait for company.
            if self.waiting.is_batch:
                self.waiting.send()

    def save(self, tensor: torch.Tensor, decision: Decision) -> Handle:
        """A handle of a tensor about which was decided already. See NOTE [ Inside a backward ]."""
        return KeptHandle(tensor) if in_backward() else self._pack(tensor, decision)

    def save_made(self, tensor: torch.Tensor, recipe: ViewRecipe, decision: Decision) -> Handle:
        """As :meth:`save`, of a plain tensor that an operator has made and of which the recipe is known, in forward."""
        if decision is _KEEP:
            return self.keep(tensor)
        if why_unmovable(tensor) is not None:
            return KeptHandle(tensor)
        return self._pack_storage(tensor, tensor.untyped_storage(), decision, recipe)

    def keep(self, tensor: torch.Tensor) -> Handle:
        """As :meth:`save`, of a plain tensor of which it was decided that it stays: shortly, since a layer has many."""
        owner = self._owner
        device = self._devices.get(tensor.device)
        if device is None or self._signature is None or owner.marks.any or owner.outputs.any or in_backward():
            return self.save(tensor, _KEEP)
        if why_unmovable(tensor) is not None:
            return KeptHandle(tensor)
        storage = tensor.untyped_storage()
        start, nbytes = reach(tensor, storage.nbytes())
        known = owner.identity.find(storage, start, nbytes)
        if known is not None:
            handle = self._pack_known(tensor, storage, known, device)
            if handle is not None:
                return handle
        self.decider.pass_over()
        return self._stays(tensor, storage, start, nbytes)

    def keep_again(self, tensor: torch.Tensor, nbytes: int) -> Handle:
        """As :meth:`keep`, in forward, of what its caller has made and nobody else has seen.

        Nobody knows its bytes then, nor is told of them, but where it is given back (:meth:`stays`).

        Args:
            tensor: a plain one.
            nbytes: what was counted when such a one was kept before.
        """
        owner = self._owner
        if self._signature is None or owner.marks.any or owner.outputs.any or self.groups.current is not None:
            return self.keep(tensor)
        if nbytes:
            self.decider.pass_over()
            self.ledger.saved_bytes += nbytes
            self.ledger.kept_bytes += nbytes
        return KeptHandle(tensor)

    def stays(self, handle: KeptHandle) -> None:
        """What was kept shortly is given to others, who may save it."""
        storage = handle.alias.untyped_storage()
        handle.saved = Staying(storage, *reach(handle.alias, storage.nbytes()))
        self._owner.identity.add(storage, handle.saved)

    def _stays(self, tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, nbytes: int) -> Handle:
        """A handle of bytes that nobody knew, and of which it was decided that they stay."""
        self.count_kept(nbytes)
        staying = Staying(storage, start, nbytes)
        self._owner.identity.add(storage, staying)
        return KeptHandle(tensor, staying)

    def pack_to_leave(self, tensor: torch.Tensor) -> Handle:
        """A hook: like :meth:`pack`, but whatever is saved leaves."""
        return self.save(tensor, _OFFLOAD)

    def alias(self, tensor: torch.Tensor) -> Handle:
        """A handle of bytes that are alive anyway, and leave only if they were sent away before."""
        if type(tensor) is torch.Tensor and why_unmovable(tensor) is None:
            storage = tensor.untyped_storage()
            dropped = self._pack_dropped(tensor, storage)
            if dropped is not None:
                return dropped
            known = self._owner.identity.find(storage, *reach(tensor, storage.nbytes()))
            if isinstance(known, Saved) and tensor.device in self._devices:
                handle = self._pack_known(tensor, storage, known, self._devices[tensor.device])
                if handle is not None:
                    return handle
        return KeptHandle(tensor)

    def another(self, handle: Handle, tensor: torch.Tensor, decision: Decision) -> Handle:
        """A second handle of bytes that have one, for a tensor that is known to see them as they were saved."""
        return self.twin(handle, tensor) or self.save(tensor, decision)

    def twin(self, handle: object, tensor: torch.Tensor) -> Handle | None:
        """As :meth:`another`, if these bytes may leave, and can have a second handle."""
        if isinstance(handle, AwayHandle) and handle.saved.reaches(*reach(tensor, tensor.untyped_storage().nbytes())):
            # Another pass of this session may have made the first one.
            runtime = self._owner.runtime(tensor.device)
            if runtime.mover.adopt(handle.saved, same_content=True):
                return AwayHandle(tensor, handle.saved, ViewRecipe.of(tensor), runtime)
        return None

    def flush(self) -> None:
        """What waits leaves now, but for what its group will send: every operator that saved some has returned."""
        self.waiting.send()

    def end(self, *, completed: bool) -> None:
        """The context exits: what still waits leaves, and if nothing was raised inside, the pass is remembered."""
        if not completed:
            self.waiting.clear()
            self.groups.abandon()
            return
        self.waiting.send()
        for each in self._devices.values():
            each.runtime.join()
        if self._signature is not None:
            # That of the first tensor: what is on other devices, if anything is, has no order.
            device = self._signature[2]
            course = self._devices[device].course
            course.total_bytes = self.ledger.total().saved_bytes
            course.groups = self.groups.past()
            if self._told_nothing:
                backends = [each.runtime.backend for each in self._devices.values()]
                course.verdict = judge(course.total_bytes, backends)
            self._memory.keep(self._signature, self._turn, course)
            if not course.was_asked:
                self._owner.succession(device).add(course)

    def _pack(self, tensor: torch.Tensor, decision: Decision | None = None) -> Handle:
        if is_parameter(tensor):
            return KeptHandle(tensor)
        if type(tensor) is not torch.Tensor and is_wrapper(tensor):
            return self._pack_parts(tensor, decision)
        if why_unmovable(tensor) is not None:
            return KeptHandle(tensor)
        storage = tensor.untyped_storage()
        if self._locator is not None and self._locator.is_parameter_storage(storage):
            return KeptHandle(tensor)
        return self._pack_storage(tensor, storage, decision)

    def _pack_storage(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        decision: Decision | None,
        recipe: ViewRecipe | None = None,
    ) -> Handle:
        dropped = self._pack_dropped(tensor, storage)
        if dropped is not None:
            return dropped
        device = self._devices.get(tensor.device)
        if device is None:
            device = self._meet(tensor)
        start, nbytes = 0, storage.nbytes()
        whole = tensor.nbytes == nbytes and tensor.is_contiguous()
        if not whole:
            start, nbytes = reach(tensor, nbytes)
        known = self._owner.identity.find(storage, start, nbytes)
        if known is not None:
            handle = self._pack_known(tensor, storage, known, device, recipe)
            if handle is not None:
                return handle
        return self._pack_new(tensor, storage, start, nbytes, device, decision, recipe, whole=whole)

    def _is_sharded(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether it is a parameter that is split over processes, by an alias that does not show it."""
        if self._gathered is None:
            self._gathered = Gathered()
        return self._gathered.holds(storage) or is_local_part(tensor)

    def _pack_dropped(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Handle | None:
        """A handle of an output that its region computes again."""
        outputs = self._owner.outputs
        output = outputs.get(storage) if outputs.any else None
        return None if output is None else output.pack(tensor, self.nothing(tensor.device))

    def _pack_parts(self, tensor: torch.Tensor, decision: Decision | None) -> Handle:
        names, context = flatten(tensor)
        parts: dict[str, Handle] = {}
        for name in names:
            part = getattr(tensor, name)
            # The shape of a jagged tensor is known by its offsets, the very object: only its values may move.
            if not isinstance(part, torch.Tensor) or (tensor.is_nested and name != "_values"):
                parts[name] = ObjectHandle(part)
                continue
            with self.decider.inside(type(tensor)):
                parts[name] = self._pack(part, decision)
        return PartsHandle(tensor, parts, context)

    def _pack_known(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        known: Known,
        device: _Device,
        recipe: ViewRecipe | None = None,
    ) -> Handle | None:
        """A handle of bytes that another saved tensor has brought in already, if they may be shared."""
        if isinstance(known, Staying):
            return None if self._owner.marks.get(storage) else KeptHandle(tensor, known)
        if not device.runtime.mover.adopt(known, same_content=known.is_content_of(tensor)):
            return None
        return AwayHandle(tensor, known, recipe or ViewRecipe.of(tensor), device.runtime)

    def _pack_new(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        start: int,
        nbytes: int,
        device: _Device,
        decision: Decision | None,
        recipe: ViewRecipe | None,
        *,
        whole: bool,
    ) -> Handle:
        if self._signature is None:
            self._begin(tensor, device)
        runtime = device.runtime
        group = self.groups.current
        decision = self.decider(tensor, storage, nbytes, decision, group) if self._owner.enabled else _KEEP
        tier = self._tier_for(decision, device)
        # Bytes at an address that the allocator would not give cannot be put back as they were.
        moves = tier is not None and storage.data_ptr() % runtime.backend.alignment == 0
        if moves and self._is_sharded(tensor, storage):
            return KeptHandle(tensor)
        if not moves or tier is None:
            return self._stays(tensor, storage, start, nbytes)
        ledger = self.ledger if group is None else group.ledger
        ledger.saved_bytes += nbytes
        saved = Saved(tensor, storage, start, nbytes, next(runtime.mover.numbers), ledger)
        self._owner.identity.add(storage, saved)
        recipe = recipe or ViewRecipe.of(tensor)
        if whole and not (recipe.conj or recipe.neg):
            saved.form = recipe
        self.decider.offloaded_bytes += nbytes
        runtime.mover.see(saved)
        handle = AwayHandle(tensor, saved, recipe, runtime)
        course = device.course
        saved.course = course
        saved.place = course.add(saved.reference, nbytes)
        waiting = self.waiting if group is None else group.waiting
        waiting.add(saved, runtime, tier, hold=course.in_tail(saved.place))
        return handle

    def _tier_for(self, decision: Decision, device: _Device) -> Tier | None:
        """Where the bytes go; ``None`` if they stay."""
        if decision is _KEEP:
            return None
        tier = device.tier if decision is _OFFLOAD else device.runtime.tier(_TIERS[decision])
        if device.runtime.backend.unified and isinstance(tier, HostTier):
            self.ledger.note("kept on the device, whose memory is the host's own: moving it there would free nothing")
            return None
        return tier

    def _meet(self, tensor: torch.Tensor) -> _Device:
        """The first tensor on a device."""
        runtime = self._owner.runtime(tensor.device)
        device = self._devices[tensor.device] = _Device(
            runtime,
            runtime.tier(self._tier),
            Course(window=runtime.window, on_backward=self._on_backward),
        )
        return device

    def _begin(self, tensor: torch.Tensor, device: _Device) -> None:
        """The first tensor of the pass tells which earlier pass this one is like."""
        self._signature = (tensor.shape, tensor.dtype, tensor.device)
        # Handles that have died are known to be dead after that.
        device.runtime.mover.read_notes()
        succession = self._owner.succession(tensor.device)
        self._turn = succession.turn()
        previous = self._memory.recall(self._signature)
        if previous is not None:
            self.decider.total_bytes = previous.total_bytes or None
            self.groups.learn(previous.groups)
        device.course = Course(
            previous,
            self._memory.recall_turn(self._signature, self._turn),
            self._window_on(device.runtime),
            self._on_backward,
            succession,
            self.tag,
        )


class _Device:
    """What a pass has on one device."""

    __slots__ = ("course", "runtime", "tier")

    def __init__(self, runtime: Runtime, tier: Tier, course: Course) -> None:
        self.runtime = runtime
        self.tier = tier
        """Where :attr:`Decision.OFFLOAD` goes."""
        self.course = course


def _window_on(window: int | float | None, runtime: Runtime) -> int:
    """Bytes that may be LEAVING at once, of what was given."""
    if window is None:
        return runtime.window
    return int(window * runtime.window) if isinstance(window, float) else window
