"""The models of a script: which modules they are, what was attached to them, and which were rejected.

NOTE [ How calls are observed ]

``Module.__call__`` reads ``_compiled_call_impl`` before it does anything else. An attached module has that attribute on
the instance (``attaching/call.py``); on the class it is ``None``, and that is where :class:`ModelRegistry` puts a
function. It sees a call before every hook and with its keyword arguments, and can make the call again once the module
is attached. So the first forward in training is already managed.

``register_module_forward_pre_hook`` cannot replace this. A global pre-hook runs inside the call, when attaching is too
late for it: the first forward would run out of memory under the very budgets that need a plan. When calls are not
observed, the class has ``None`` again, and a call costs nothing more.

NOTE [ Models among modules ]

``docs/command-line.md`` says which modules are models. A module is judged before its first forward in training with
gradients. Some calls are not judged: in a backward (a checkpoint recomputes its function), inside of something compiled
or traced, and those that an attached model makes itself. For ``DDP``, the model is the module inside, since a plan has
its names.

NOTE [ Rejected models ]

A module that cannot be attached is rejected: it trains on unchanged, the reason is kept, and its submodules are not
judged. If an attached model refuses a later call, Spillway is removed from it, and the model is attached once more: a
changed model (``block.compile()``) may be fine to attach to. The second time it is rejected, and so is a model that the
script attaches itself. Only a budget that no plan fits is an error for the script.

NOTE [ Unobserved calls ]

Calls of modules are observed until all parameters of all optimizers belong to a managed or a rejected model. From then
on an optimizer's step costs a comparison, and a call nothing. If parameters with a gradient are in no observed call for
two steps, their module is rejected (it is compiled, say), or they themselves are, if they are in no module.
"""

from __future__ import annotations

import enum
import gc
import itertools
import os
import statistics
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from spillway._torch import call_code, in_backward, own_call
from spillway.attaching import Attached
from spillway.attaching.call import PLACE, ModuleCall, is_attached, is_compiled_around, is_traced
from spillway.attaching.model import ModelCall
from spillway.checkpointing.blocks import built_in, find_blocks, is_compiled
from spillway.errors import BudgetError, SpillwayError, UsageError

Attach = Callable[[Module], tuple[Attached, str, list[str]]]
"""Attaches to a model, and names the way, with notes; or raises."""
NO_BLOCKS = (
    "repeats no block, so there is nothing to plan. spillway.offload() around its call offloads what it saves; "
    "spillway.attach(model, blocks=...) takes the blocks that you name"
)
BY_HAND = "is run by model.forward(...), which bypasses everything that is attached; call model(...)"
UNSEEN = "was not called as model(...) in training with gradients on, in this process"
COMPILED = "is compiled as a whole, which bypasses everything that is attached; compile its blocks: block.compile()"
BY_SCRIPT = "is attached by the script itself, whose own options are in force"
REPLACED = (
    "was attached by the script itself, after Spillway had attached it. Spillway removed its own attachment, and the "
    "script's options are in force"
)
IN_NO_MODULE = "in no module"

_PATIENCE = 8
"""Steps of an optimizer for which calls are observed because of parameters without a gradient."""
_TRIES = 2
"""Steps after which parameters with a gradient that are in no observed call are given up."""
_MOST_TIMES = 32

_ATTACHED_CALL = ModuleCall.__call__.__code__


class Role(enum.Enum):
    """The part of a called module in the script."""

    PASSED = "passed"
    """Not a model, but a module that it calls may be one."""
    OWNED = "owned"
    """Known, and so are all modules that it calls."""
    ATTACHED = "attached"
    """A model that was attached just now: its call has to be made again."""


@dataclass(frozen=True, eq=False)
class ManagedModel:
    """A model that something is attached to."""

    kind: str
    module: weakref.ref[Module]
    blocks: int
    """How many it repeats."""
    attached: Attached
    way: str
    """As ``"budget"``, ``"plan"``, or a policy."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A module that nothing could be attached to, or a parameter in no module."""

    kind: str
    module: weakref.ref[Module | Tensor]
    reason: str


class ModelRegistry:
    """The models of a script. Between :meth:`start` and :meth:`stop` it observes the calls of modules.

    ``changed`` is called when an attached model was given up, and may be attached once more.
    """

    def __init__(self, attach: Attach, changed: Callable[[], object]) -> None:
        self._attach = attach
        self._changed = changed
        self._thread = threading.local()
        self._lock = threading.RLock()
        self._roles: weakref.WeakKeyDictionary[Module, Role] = weakref.WeakKeyDictionary()
        self._refusals: weakref.WeakKeyDictionary[Module, str] = weakref.WeakKeyDictionary()
        """Models that refused a call after they were attached, and why."""
        self.is_observing = False
        self.managed: list[ManagedModel] = []
        self.rejected: list[Rejected] = []
        self.tell: Callable[[str], object] = lambda line: None
        """Called with a line for the user: a module is rejected, or its own checkpointing is replaced."""
        self.fatal: BudgetError | None = None
        """Raised because no plan fits the budget."""

    def start(self) -> None:
        """Observe calls from now on. See NOTE [ How calls are observed ]."""
        if not self.is_observing:
            self.is_observing = True
            # A plain function, which a class binds to the called module.
            setattr(Module, PLACE, lambda module, /, *args, **kwargs: self._observed_call(module, args, kwargs))

    def stop(self) -> None:
        if self.is_observing:
            self.is_observing = False
            setattr(Module, PLACE, None)

    def parameters(self) -> set[int]:
        """Ids of the parameters of all managed and all rejected models."""
        known: list[Any] = [*self.managed, *self.rejected]
        owners = [owner for each in known if (owner := each.module()) is not None]
        owned = (each.parameters() if isinstance(each, Module) else (each,) for each in owners)
        return set(map(id, itertools.chain.from_iterable(owned)))

    def judge_again(self) -> None:
        """Forget which modules were passed: they may be trained by now."""
        with self._lock:
            owned = {module: role for module, role in self._roles.items() if role is Role.OWNED}
            self._roles = weakref.WeakKeyDictionary(owned)

    def reject(self, module: Module, reason: str) -> Role:
        """Leave a module alone, and remember why."""
        self.rejected.append(Rejected(type(module).__name__, weakref.ref(module), reason))
        self.tell(f"{type(module).__name__} is not attached: {reason}")
        return self._know(module, Role.OWNED)

    def reject_unseen(self, parameters: Iterable[Tensor]) -> None:
        """Reject the modules of parameters that were never seen in a call, and the parameters in no module."""
        left = {id(each): each for each in parameters}
        holding = [
            (module, ids)
            for module in alive(Module)
            if (ids := left.keys() & {id(parameter) for parameter in module.parameters()})
        ]
        inner = {id(child) for module, _ in holding for child in module.modules() if child is not module}
        for module, ids in holding:
            if id(module) not in inner:
                parts = list(module.modules())
                compiled = any(is_compiled(each) or each.__dict__.get(PLACE) is not None for each in parts)
                self.reject(module, BY_SCRIPT if any(map(is_attached, parts)) else COMPILED if compiled else UNSEEN)
            for key in ids:
                left.pop(key, None)
        self.rejected += [Rejected("Parameter", weakref.ref(each), IN_NO_MODULE) for each in left.values()]

    def check(self) -> None:
        """Reject models that were compiled as a whole after attaching: that takes the place of what was attached."""
        for managed in list(self.managed):
            module = managed.module()
            if module is not None and not is_attached(module):
                self._take_off(managed)
                self.reject(module, COMPILED)

    def close(self) -> None:
        """Observe no more calls, and take off what was attached."""
        self.stop()
        for managed in self.managed:
            # A model that was compiled since has nothing of Spillway's left.
            with suppress(UsageError):
                managed.attached.remove()

    def _observed_call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = own_call(module)
        if getattr(self._thread, "in_owned", False) or not (module.training and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        role = self._judge(module)
        if role is Role.PASSED:
            return call(*args, **kwargs)
        if role is Role.ATTACHED:
            return Module.__call__(module, *args, **kwargs)
        self._thread.in_owned = True
        try:
            return call(*args, **kwargs)
        finally:
            self._thread.in_owned = False

    def _judge(self, module: Module) -> Role:
        known = self._roles.get(module)
        if known is not None:
            return known
        if is_compiled_around() or is_traced() or in_backward():
            return Role.PASSED
        with self._lock:
            if is_attached(module):
                # By another thread, while this one waited for the lock.
                return Role.ATTACHED
            return self._judge_new(module)

    def _judge_new(self, module: Module) -> Role:
        if not any(each.requires_grad for each in module.parameters()):
            return self._know(module, Role.PASSED)
        # Without its own frame: the list would be a cycle that keeps tensors alive.
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
        if any(frame.f_code is _ATTACHED_CALL for frame in frames):
            return self._know(module, Role.PASSED)
        by_hand = _run_by_hand(frames, module)
        if by_hand is not None:
            if not any(each.module() is by_hand for each in self.rejected):
                self.reject(by_hand, BY_HAND)
            return self._know(module, Role.OWNED)
        if any(map(is_attached, module.modules())):
            return self._know(module, Role.PASSED)
        model: Module = module.module if isinstance(module, DistributedDataParallel) else module
        if not self._is_attached_now(model):
            return self._know(module, Role.OWNED)
        # The call of a wrapper goes on, and calls the attached model.
        return Role.ATTACHED if model is module else self._know(module, Role.PASSED)

    def _is_attached_now(self, model: Module) -> bool:
        """Attach to a model, or reject it."""
        blocks = 0
        with suppress(UsageError):
            blocks = len(find_blocks(model, None))
        if not blocks:
            self.reject(model, f"{NO_BLOCKS}{built_in(model.modules())}")
            return False
        try:
            attached, way, notes = self._attach(model)
        except BudgetError as error:
            self.fatal = error
            raise
        except SpillwayError as error:
            self.reject(model, str(error))
            return False
        again = [f"attached again: {self._refusals[model]}"] if model in self._refusals else []
        managed = ManagedModel(type(model).__name__, weakref.ref(model), blocks, attached, way, [*again, *notes])
        ModelCall.of(model).belong_to(lambda error: self._refused(managed, error), lambda: self._give_way(managed))
        self.managed.append(managed)
        for note in (*notes, *attached.notes):
            self.tell(f"{managed.kind}: {note}")
        self._know(model, Role.PASSED)
        return True

    def _refused(self, managed: ManagedModel, error: SpillwayError) -> None:
        """An attached model refuses a call. It is rejected the second time."""
        if isinstance(error, BudgetError):
            self.fatal = error
            raise error
        model = managed.module()
        with self._lock:
            if not self._take_off(managed) or model is None:
                return
            self._roles.pop(model, None)
            if model in self._refusals:
                self.reject(model, str(error))
            self._refusals[model] = str(error)
        self.judge_again()
        self._changed()

    def _give_way(self, managed: ManagedModel) -> None:
        """The script attaches a managed model itself: from now on it is the script's own."""
        with self._lock:
            model = managed.module()
            if self._take_off(managed) and model is not None:
                self.reject(model, REPLACED)

    def _take_off(self, managed: ManagedModel) -> bool:
        with suppress(UsageError):
            managed.attached.remove()
        is_there = managed in self.managed
        if is_there:
            self.managed.remove(managed)
        return is_there

    def _know(self, module: Module, role: Role) -> Role:
        self._roles[module] = role
        return role


class StepClock:
    """Counts and times the steps of the optimizer that stepped first: of two that alternate, one defines a step.

    ``told`` is called after each step, with their number.
    """

    def __init__(self, told: Callable[[int], object]) -> None:
        self._told = told
        self._first: weakref.ref[Optimizer] | None = None
        self._times: deque[float] = deque(maxlen=_MOST_TIMES)
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self.count = 0

    @property
    def seconds(self) -> float | None:
        """Median of the time between the last steps; ``None`` before the second step."""
        times = list(self._times)
        return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else None

    def end(self) -> None:
        self._hook.remove()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = None if self._first is None else self._first()
        if first is None:
            self._first = weakref.ref(optimizer)
        if first is None or first is optimizer:
            self.count += 1
            self._times.append(time.perf_counter())
            self._told(self.count)


class ScriptObserver(StepClock):
    """Observes from now on, in this process and not in forked children. See NOTE [ Unobserved calls ]."""

    def __init__(self, attach: Attach, told: Callable[[int], object] = lambda count: None) -> None:
        super().__init__(told)
        self._lock = threading.RLock()
        self._looks: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Steps of each optimizer for which calls were observed."""
        self._settled: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers for which no calls need be observed, each with its number of parameters."""
        self.models = ModelRegistry(attach, self._observe)
        os.register_at_fork(after_in_child=self._stop)
        self._observe()

    def end(self) -> None:
        """Observe no more. Attached models stay attached, and modules that were not seen are rejected."""
        self._give_up(self._unowned(each for each in self._looks if each not in self._settled))
        self._stop()

    def _observe(self) -> None:
        """Observe calls, whatever was known of the optimizers."""
        with self._lock:
            self._looks.clear()
            self._settled.clear()
            self.models.start()

    def _stop(self) -> None:
        super().end()
        self.models.stop()

    def _stepped(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._stepped(optimizer, args, kwargs)
        self.models.check()
        if self._settled.get(optimizer) != sum(len(group["params"]) for group in optimizer.param_groups):
            with self._lock:
                self._look(optimizer)

    def _look(self, optimizer: Optimizer) -> None:
        """Decide whether calls have to be observed because of this optimizer's parameters."""
        looks = self._looks[optimizer] = self._looks.get(optimizer, 0) + 1
        self._settled.pop(optimizer, None)
        self.models.start()
        if looks >= _TRIES:
            self._give_up(each for each in self._unowned([optimizer]) if each.grad is not None)
        # An optimizer that has not stepped yet may belong to a model that was not called yet.
        if looks < _PATIENCE and self._unowned(alive(Optimizer)):
            self.models.judge_again()
            return
        self._settled[optimizer] = len(_parameters(optimizer))
        self.models.stop()

    def _give_up(self, parameters: Iterable[Tensor]) -> None:
        if unseen := list(parameters):
            self.models.reject_unseen(unseen)

    def _unowned(self, optimizers: Iterable[Optimizer]) -> list[Tensor]:
        """Parameters that belong to no known model."""
        owned = self.models.parameters()
        return [each for optimizer in optimizers for each in _parameters(optimizer) if id(each) not in owned]


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def alive(kind: type[Any]) -> list[Any]:
    """All objects of a class. Neither modules nor optimizers that were not called yet are known to torch otherwise."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _run_by_hand(frames: list[FrameType], module: Module) -> Module | None:
    """The outermost module around another whose forward is running without a call of the module."""
    called = {id(frame.f_locals.get("self")) for frame in frames if frame.f_code is call_code}
    for frame in reversed(frames):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if not isinstance(owner, Module) or owner is module or id(owner) in called:
            continue
        if any(each is module for each in owner.modules()):
            return owner
    return None
