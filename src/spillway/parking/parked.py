"""The public calls: park models and their optimizers, and bring them back.

NOTE [ A parking ]

:func:`park` finds the tensors of what is named, and their storages. It chooses storages, the least needed first. These
are copied out, and emptied (NOTE [ One parked storage ]). ``docs/howto-parking.md`` says which are left alone; so are
those that another parking has. On a device whose memory is the CPU's own, nothing is copied or emptied, but all else is
the same: the errors of a loop show up without a GPU.

Hooks of modules raise an error while something of theirs is parked, and wait for it afterwards. One hook of all
optimizers does so before a step, so that no step stops half-way. A module's hook goes when all of it is back; that of
steps goes with ``synchronize()``, or with the next parking.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spillway._torch import PLACE, unseen, without_dynamo
from spillway.checkpointing.blocks import is_a, is_compiled
from spillway.errors import ParkedError, UnsupportedError, UsageError
from spillway.parking.found import Found, Need, modules_of, states_of
from spillway.parking.guards import storages_of
from spillway.parking.storages import Copy, ParkedStorage, State, fingerprints
from spillway.runtime.backend import on_error
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.system import many_processes
from spillway.session import Session
from spillway.units import format_bytes, parse_bytes


class Parking:
    """A session's parkings."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.returning: list[Parked] = []
        """Those whose copies back may be under way, or whose hooks are still there."""
        self.whole: WeakSet[Parked] = WeakSet()
        """Those of all that was named."""
        self.copies: WeakKeyDictionary[torch.UntypedStorage, Copy] = WeakKeyDictionary()
        """Copies that stay: see NOTE [ Copies that stay ]."""


class Parked:
    """A parking, made by :func:`park`. It holds the parked bytes: keep it until :meth:`unpark`.

    It is a context manager, whose end calls :meth:`unpark`.
    """

    def __init__(self, session: Session, *, reuse: bool, is_whole: bool, at_once: bool) -> None:
        self.nbytes = 0
        """Bytes that the device got back."""
        self.copied_bytes = 0
        """Bytes that were copied out. The others were known to have a copy."""
        self.is_parked = True
        """Whether :meth:`unpark` has yet to be called."""
        self._session, self._parking = session, session.of(Parking)
        self._reuse = reuse
        self._is_whole = is_whole
        self._at_once = at_once
        """Whether compute waits for all of it in :meth:`unpark`: some uses are not seen, or a task copies later."""
        self._watched: WeakSet[Module | Optimizer] = WeakSet()
        self._storages: list[ParkedStorage] = []
        self._hooks: list[Any] = []

    def unpark(self) -> None:
        """Bring everything back.

        The call returns when the copies are queued. The forward of a module waits for its own tensors, the step of an
        optimizer for its state, and so does every other use from Python. Compute waits in this call for gradients,
        for compiled and sharded models, for tensors that a graph or a view holds, for bytes on disk, and if this is one
        of several processes. A second call does nothing.

        Raises:
            ParkedError: if the device has too little memory. All stays parked: free some, and call it again.
            TransferError: if the disk cannot be read. The rest stays parked: call it again.
            UnsupportedError: while a graph is captured.
            SessionError: if the session is closed. The bytes are lost.
        """
        with self._parking.lock, unseen(), torch.no_grad():
            if not self.is_parked:
                return
            self._session.check_open()
            parked = [each for each in self._storages if each.state is State.PARKED]
            if any(runtime.backend.is_capturing() for runtime, _ in _by_runtime(parked)):
                raise UnsupportedError("unpark() was called while a graph is captured. Call it before the capture")
            with ExitStack() as undo:
                for each in parked:
                    undo.callback(each.empty)
                    self._fill(each)
                undo.pop_all()
            for runtime, storages in _by_runtime(parked):
                backend, (_, back), compute = runtime.backend, runtime.mover.streams, runtime.backend.compute()
                with runtime.mover.exclusive():
                    # Their memory may have been compute's until now.
                    backend.wait(back, backend.record(compute))
                    for each in storages:
                        each.reload(compute, back)
            # An interrupted call may have queued others. All are refused first, since a wait may fail.
            returning = [each for each in self._storages if each.state is State.RETURNING]
            for each in returning:
                each.refuse()
            with ExitStack() as undo:
                for each in returning:
                    undo.callback(each.stay)
                for each in returning:
                    if self._at_once or each.is_gradient or each.is_shared():
                        each.arrive()
                undo.pop_all()
            if self not in self._parking.returning:
                self._parking.returning.append(self)
            for each in self._storages:
                storage = each.storage()
                if self._reuse and each.copy is not None and storage is not None:
                    self._parking.copies[storage] = each.copy
                # It is freed after the copy back, unless it stays.
                each.copy = None
            if self._at_once:
                self._remove_hooks()
            self.is_parked = False

    def synchronize(self) -> None:
        """Block until all copies back are done. Nothing of the parking is left then."""
        with self._parking.lock, unseen(), torch.no_grad():
            if self.is_parked:
                return
            for each in self._storages:
                each.synchronize()
            self._remove_hooks()
            self._storages = []
            if self in self._parking.returning:
                self._parking.returning.remove(self)

    def __enter__(self) -> Parked:
        return self

    def __exit__(self, *error: object) -> None:
        self.unpark()

    def _send(self, storages: Sequence[ParkedStorage], tier: str) -> None:
        """Copy storages out, and empty them when all are copied. An error before that changes nothing."""
        for runtime, some in _by_runtime(storages):
            prints = fingerprints(some) if self._reuse else {}
            backend, (out, _) = runtime.backend, runtime.mover.streams
            with runtime.mover.exclusive():
                place = runtime.tier(tier)
                backend.wait(out, backend.record(backend.compute()))
                try:
                    for each in some:
                        known = self._parking.copies.get(each.whole().storage)
                        if known is None or known.tier is not place or known.nbytes != each.nbytes:
                            known = Copy(runtime, place, each.whole())
                        each.copy = known
                        fingerprint = prints.get(each)
                        versions = None if fingerprint is None else each.versions()
                        if not known.is_content(versions, fingerprint):
                            known.write(each.whole(), versions, fingerprint)
                            self.copied_bytes += each.nbytes
                    place.synchronize()
                finally:
                    # Also after a failure: the copies before it are under way.
                    backend.record(out).synchronize()
        for each in storages:
            self._parking.copies.pop(each.whole().storage, None)
            # First, so that an interrupt brings it back.
            self._storages.append(each)
            each.empty()
            self.nbytes += each.nbytes

    def _fill(self, storage: ParkedStorage) -> None:
        try:
            storage.fill()
        except torch.OutOfMemoryError as error:
            raise ParkedError(
                f"unpark() needs {format_bytes(self.nbytes)} of memory on {storage.runtime.backend.device}, which does "
                f"not have them: {error} All is still parked. Free memory, and call unpark() again"
            ) from error

    def _watch(self, found: Found, modules: Iterable[tuple[str, Module]], optimizers: Sequence[Optimizer]) -> None:
        """Hook modules, and the steps of all optimizers."""
        gates = {module: _Gate(name, self) for name, module in modules}
        for storage in self._storages:
            for each in found.users[storage]:
                if each.module is not None:
                    gate = gates[each.module]
                    (gate.gradients if each.need is Need.GRADIENT else gate.storages).append(storage)
        for module, gate in gates.items():
            if self._is_whole or gate.storages or gate.gradients:
                gate.hook = module.register_forward_pre_hook(gate, prepend=True)
                self._hooks.append(gate.hook)
        self._watched.update([*gates, *optimizers])
        if self._is_whole:
            self._parking.whole.add(self)
        me = weakref.ref(self)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            parking = me()
            if parking is not None:
                parking._before_step(optimizer)

        hook = register_optimizer_step_pre_hook(before_step)
        self._hooks.append(hook)
        weakref.finalize(self, hook.remove).atexit = False

    def _before_step(self, optimizer: Optimizer) -> None:
        if not (self.is_parked or self._storages):
            return
        what = f"the step of {type(optimizer).__name__}"
        if self.is_parked and self._is_whole and optimizer in self._watched:
            raise ParkedError(f"{what} needs tensors that are parked. Call unpark() first")
        # A fused step counts before it computes, so it must not stop half-way.
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        states = (state for _, _, state in states_of(optimizer))
        for tensor in (*parameters, *(each.grad for each in parameters), *states):
            for storage in () if tensor is None else storages_of(tensor):
                storage.use(what)
        if not self.is_parked and all(each.is_back() for each in self._storages):
            # The hook stays until the next parking: torch goes through the hooks of steps just now.
            self._storages = []

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()


class _Gate:
    """The hook of a module whose tensors are parked. A copy of the module has a hook that does nothing."""

    def __init__(self, name: str, parking: Parked) -> None:
        self._name = name
        self._parking = parking
        self.hook: Any = None
        self.storages: list[ParkedStorage] = []
        self.gradients: list[ParkedStorage] = []
        """Backward adds to them."""

    def __call__(self, module: Module, args: Any) -> None:
        what = f"the forward of {self._name}"
        if self._parking.is_parked and self._parking._is_whole:
            raise ParkedError(f"{what} needs tensors that are parked. Call unpark() first")
        for each in self.storages:
            each.use(what)
        if torch.is_grad_enabled():
            for each in self.gradients:
                each.use(f"the backward after {what}")
        if not self._parking.is_parked and all(each.is_back() for each in (*self.storages, *self.gradients)):
            self.hook.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def park(
    *models: Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    bytes: int | str | None = None,  # noqa: A002
    tier: str = "host",
    reuse: bool = False,
    release: bool = False,
    session: Session | None = None,
) -> Parked:
    """Move models and optimizer state to CPU memory, and give their memory on the GPU back.

    For programs whose phases share a GPU: generate, reward, train. Parameters, buffers, gradients and the state of
    optimizers are parked. The objects stay: parameters, tied weights, views, shards of FSDP2, quantized weights. Only
    ``data_ptr()`` is another one afterwards. The call returns when the memory is free.

    A module that is called while parked raises :class:`~spillway.ParkedError`, and so does every other use from Python:
    an operator, ``state_dict()``, a step of an optimizer.

    Args:
        models: modules.
        optimizer: an optimizer, or several, whose state is parked. Its parameters are parked if a model has them.
        bytes: how much is parked at least: ``"20GiB"``. The least needed first: optimizer state, gradients, frozen
            parameters, then the others; in each of them, the last modules first. ``None``: all of it.
        tier: ``"host"``, pinned CPU memory, or ``"disk"``, the session's spill file.
        reuse: keep the copies in CPU memory afterwards. The next ``park(reuse=True)`` copies only what has changed
            since, as version counters and a fingerprint of the bytes tell, and what is smaller than 1 MiB. The
            fingerprint is no proof.
        release: give free memory of torch's allocator back to the driver, for other processes.
        session: its pinned memory is used. ``None``: the default one.

    Raises:
        UsageError: an argument of the wrong type; more bytes than there are; everything is parked already.
        UnsupportedError: while a graph is captured; for a ``ScriptModule``.
        TierFullError: the session has too little CPU memory or disk. Nothing is parked then.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> parking = park(model, optimizer=optimizer)
        >>> parking.unpark()
        >>> model(torch.randn(8, 64)).shape
        torch.Size([8, 64])
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer or []
    _check(models, optimizers, tier, session)
    wanted = None if bytes is None else parse_bytes(bytes, what="bytes")
    session = Session.default() if session is None else session
    known = session.of(Parking)
    with known.lock, unseen(), torch.no_grad():
        # Their copies back are over, and all tensors have their own classes.
        for each in list(known.returning):
            each.synchronize()
        # Steps that are queued write parameters.
        session.finish_users()
        for module in itertools.chain.from_iterable(model.modules() for model in models):
            if is_a(module, "torch.distributed.fsdp", "FSDPModule"):
                module.reshard()  # type: ignore[operator]
        found = Found(session, models, optimizers)
        chosen = found.least_needed(wanted)
        named = (*(module for model in models for module in model.modules()), *optimizers)
        # On the CPU, no tensor tells.
        taken = {each for other in known.whole if other.is_parked for each in other._watched}
        if not chosen and taken.issuperset(named):
            raise UsageError("park: all of this is parked already. Call unpark() of that parking first")
        for device in {each.runtime.backend.device for each in chosen}:
            if device.type != "cpu":
                # Kernels on any stream may use them.
                torch.accelerator.synchronize(device)
        parking = Parked(
            session,
            reuse=reuse and tier == "host",
            is_whole=wanted is None,
            # Collectives of torch see neither hooks nor guards. Without copies there is nothing to wait for.
            at_once=not chosen
            or tier == "disk"
            or found.goes_at_once
            or many_processes()
            or any(map(_sees_hooks, models)),
        )
        with on_error(parking.synchronize), on_error(parking.unpark):
            parking._send(chosen, tier)
            parking._watch(found, modules_of(models), optimizers)
            if release and any(each.runtime.backend.device.type != "cpu" for each in chosen):
                torch.accelerator.empty_cache()
        return parking


parked = park
""":func:`park`, as a context: ``with spillway.parked(model):``. Its end calls ``unpark()``, also after an exception."""


def _sees_hooks(model: Module) -> bool:
    """Whether hooks of modules change how it computes: compiled code, or attention that has a faster way."""
    fast = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer, torch.nn.TransformerEncoder)
    calls = ((module, module.__dict__.get(PLACE)) for module in model.modules())
    return any(
        isinstance(module, fast) or is_compiled(module) or without_dynamo(call) is not call for module, call in calls
    )


def _by_runtime(storages: Sequence[ParkedStorage]) -> list[tuple[DeviceRuntime, list[ParkedStorage]]]:
    found: dict[DeviceRuntime, list[ParkedStorage]] = {}
    for each in storages:
        found.setdefault(each.runtime, []).append(each)
    return list(found.items())


def _check(models: Sequence[Any], optimizers: Any, tier: Any, session: Any) -> None:
    for model in models:
        if not isinstance(model, Module):
            raise UsageError(f"models: got {model!r:.200}, expected torch.nn.Modules")
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise UnsupportedError(f"models: got a ScriptModule in {type(model).__name__}, which takes no hooks")
    if not isinstance(optimizers, Sequence) or not all(isinstance(each, Optimizer) for each in optimizers):
        raise UsageError(f"optimizer: got {optimizers!r:.200}, expected a torch.optim.Optimizer, or several")
    if not models and not optimizers:
        raise UsageError("park: got nothing, expected models or an optimizer")
    if tier not in ("host", "disk"):
        raise UsageError(f'tier: got {tier!r}, expected "host" or "disk"')
    if session is not None and not isinstance(session, Session):
        raise UsageError(f"session: got {session!r}, expected a spillway.Session, or None for the default one")
