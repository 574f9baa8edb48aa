"""The models of a script: which modules they are, what was attached to them, and which were rejected.

NOTE [ How calls are observed ]

``Module.__call__`` reads ``_compiled_call_impl`` before it does anything else. An attached module has that attribute on
the instance (``attaching/call.py``); on the class it is ``None``, and that is where :class:`ModuleCalls` puts a
function. It sees a call before every hook and with its keyword arguments, and can make the call again once the module
is attached. So the first forward in training is already managed.

``register_module_forward_pre_hook`` cannot replace this. A global pre-hook runs inside the call, when attaching is too
late for it. The first forward would keep everything that autograd saves, and run out of memory under the very budgets
that need a plan. Global hooks also get no keyword arguments, and send every module through the slow path of
``Module._call_impl``. When calls are not observed, the class has ``None`` again, and a call costs what it always did.

NOTE [ Models among modules ]

A model is the outermost module in training that is called as a module, has trainable parameters, and repeats blocks. It
is judged before its first forward in training with gradients. Not judged are calls in a backward (a checkpoint runs its
function again), calls inside of something compiled or traced, and calls that an attached model makes itself. A wrapper
that is made later is not a model: what is attached inside of it goes on. For ``DDP``, the model is the module inside,
whose names a plan knows.

NOTE [ Rejected models ]

A module that cannot be attached is rejected: it trains on unchanged, the reason is kept, and its submodules are not
judged. If an attached model refuses a later call, everything is taken off the model, and this call goes on without. The
model is attached once more, since what changed (``block.compile()``) may be fine to attach to. The second time it is
rejected. Only a budget that no plan fits is an error for the script.
"""

from __future__ import annotations

import enum
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DistributedDataParallel

from spillway._torch import in_backward
from spillway.attaching import Attached
from spillway.attaching.call import PLACE, ModuleCall, is_attached, is_compiled_around, is_traced
from spillway.blocks import built_in, find_blocks, is_compiled
from spillway.errors import BudgetError, SpillwayError, UsageError

NO_BLOCKS = (
    "repeats no block, so there is nothing to plan. spillway.offload() around its call offloads what it saves; "
    "spillway.attach(model, blocks=...) takes the blocks that you name"
)
BY_HAND = "is run by model.forward(...), which bypasses everything that is attached; call model(...)"
UNSEEN = "was not called as model(...) in training with gradients on, in this process"
COMPILED = "is compiled as a whole, which bypasses everything that is attached; compile its blocks: block.compile()"
_MOST_TRIES = 2

_ATTACHED_CALL = ModuleCall.__call__.__code__
_TORCH_CALL = Module._call_impl.__code__


class Verdict(enum.Enum):
    """What a called module is."""

    PASSED = "passed"
    """Not a model, but a module that it calls may be one."""
    OWNED = "owned"
    """Known, and so are all modules that it calls."""
    ATTACHED = "attached"
    """A model that was attached just now: its call has to be made again."""


class ModuleCalls:
    """Observes calls of modules in training. See NOTE [ How calls are observed ].

    Args:
        judge: says what a module is.
    """

    def __init__(self, judge: Callable[[Module], Verdict]) -> None:
        self._judge = judge
        self._thread = _Thread()
        self._lock = threading.Lock()
        self.on = False
        """Whether calls are observed."""
        self.starts = 0
        """How often observing began."""

    def start(self) -> None:
        """Observe calls from now on."""
        with self._lock:
            self.starts += 1
            if not self.on:
                setattr(Module, PLACE, self._function())
                self.on = True

    def stop(self) -> None:
        """Observe no more calls."""
        with self._lock:
            if self.on:
                setattr(Module, PLACE, None)
                self.on = False

    def _function(self) -> Callable[..., Any]:
        thread, judge = self._thread, self._judge

        def observed_call(module: Module, /, *args: Any, **kwargs: Any) -> Any:
            call: Callable[..., Any] = module._call_impl
            if thread.in_owned or not (module.training and torch.is_grad_enabled()):
                return call(*args, **kwargs)
            verdict = judge(module)
            if verdict is Verdict.PASSED:
                return call(*args, **kwargs)
            if verdict is Verdict.ATTACHED:
                return Module.__call__(module, *args, **kwargs)
            thread.in_owned = True
            try:
                return call(*args, **kwargs)
            finally:
                thread.in_owned = False

        return observed_call


class _Thread(threading.local):
    in_owned = False


@dataclass(frozen=True, eq=False)
class ManagedModel:
    """A model that something is attached to."""

    kind: str
    """Its class."""
    module: weakref.ref[Module]
    blocks: int
    """How many it repeats."""
    attached: Attached
    way: str
    """As ``"budget"``, ``"plan"``, or a policy."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A module that nothing could be attached to."""

    kind: str
    module: weakref.ref[Module]
    reason: str


@dataclass(slots=True)
class _Known:
    module: weakref.ref[Module]
    verdict: Verdict
    tries: int = 0
    why: str = ""


class ModelRegistry:
    """The models of a script. See the notes at the top of this file.

    Args:
        attach: attaches to a model and names the way, or raises.
    """

    def __init__(self, attach: Callable[[Module], tuple[Attached, str]]) -> None:
        self._attach = attach
        self._known: dict[int, _Known] = {}
        self._lock = threading.RLock()
        self.calls = ModuleCalls(self._judge)
        self.managed: list[ManagedModel] = []
        self.rejected: list[Rejected] = []
        self.tell: Callable[[Rejected], None] | None = None
        """Called when a module is rejected."""
        self.fatal: BudgetError | None = None
        """Raised because no plan fits the budget."""

    def parameters(self) -> set[int]:
        """Ids of the parameters of all managed and all rejected models."""
        references = [*(each.module for each in self.managed), *(each.module for each in self.rejected)]
        modules = [reference() for reference in references]
        return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}

    def judge_again(self) -> None:
        """Forget which modules were passed: they may be trained by now."""
        with self._lock:
            self._known = {
                key: known for key, known in self._known.items() if known.verdict is Verdict.OWNED or known.tries
            }

    def reject(self, module: Module, reason: str) -> None:
        """Leave a module alone, and remember why."""
        self.rejected.append(Rejected(type(module).__name__, weakref.ref(module), reason))
        if self.tell is not None:
            self.tell(self.rejected[-1])
        self._know(module, Verdict.OWNED)

    def reject_unseen(self, parameters: list[Tensor]) -> list[Tensor]:
        """Reject the modules of parameters that were never seen in a call; gives the parameters in no module."""
        left = {id(each): each for each in parameters}
        holding = [
            (module, ids)
            for module in alive(Module)
            if (ids := left.keys() & {id(parameter) for parameter in module.parameters()})
        ]
        inner = {id(child) for module, _ in holding for child in module.modules() if child is not module}
        for module, ids in holding:
            if id(module) not in inner:
                compiled = any(is_compiled(each) or each.__dict__.get(PLACE) is not None for each in module.modules())
                self.reject(module, COMPILED if compiled else UNSEEN)
            for key in ids:
                left.pop(key, None)
        return list(left.values())

    def check(self) -> None:
        """Reject models that were compiled as a whole after attaching: that takes the place of what was attached."""
        for managed in list(self.managed):
            module = managed.module()
            if module is not None and not is_attached(module):
                self._take_off(managed)
                self.reject(module, COMPILED)

    def close(self) -> None:
        """Observe no more calls, and take off what was attached."""
        self.calls.stop()
        for managed in self.managed:
            # A model that was compiled since has nothing of Spillway's left.
            with suppress(UsageError):
                managed.attached.remove()

    def _judge(self, module: Module) -> Verdict:
        known = self._known.get(id(module))
        if known is not None and known.module() is module and not known.tries:
            return known.verdict
        if is_compiled_around() or is_traced() or in_backward():
            return Verdict.PASSED
        with self._lock:
            return self._judge_new(module)

    def _judge_new(self, module: Module) -> Verdict:
        if is_attached(module):
            # By another thread, while this one waited for the lock.
            return Verdict.ATTACHED
        if isinstance(module, _Loss) or not any(each.requires_grad for each in module.parameters()):
            return self._know(module, Verdict.PASSED)
        frames = list(_frames())
        if any(frame.f_code is _ATTACHED_CALL for frame in frames):
            return self._know(module, Verdict.PASSED)
        by_hand = _run_by_hand(frames, module)
        if by_hand is not None:
            if not any(each.module() is by_hand for each in self.rejected):
                self.reject(by_hand, BY_HAND)
            return self._know(module, Verdict.OWNED)
        if any(map(is_attached, module.modules())):
            return self._know(module, Verdict.PASSED)
        return self._try(module)

    def _try(self, module: Module) -> Verdict:
        model: Module = module.module if isinstance(module, DistributedDataParallel) else module
        known = self._known.get(id(model))
        tries, why = (0, "") if known is None or known.module() is not model else (known.tries, known.why)
        blocks = _count_blocks(model)
        if not blocks:
            self.reject(model, f"{NO_BLOCKS}{built_in(model.modules())}")
            return self._know(module, Verdict.OWNED)
        try:
            attached, way = self._attach(model)
        except BudgetError as error:
            self.fatal = error
            raise
        except SpillwayError as error:
            self.reject(model, str(error))
            return self._know(module, Verdict.OWNED)
        notes = [f"attached again: {why}"] if why else []
        managed = ManagedModel(type(model).__name__, weakref.ref(model), blocks, attached, way, notes)
        attached.tell(lambda error: self._refused(managed, error))
        self.managed.append(managed)
        self._know(model, Verdict.PASSED, tries, why)
        if model is not module:
            # The wrapper's own call goes on, and calls the attached model.
            return self._know(module, Verdict.PASSED)
        return Verdict.ATTACHED

    def _refused(self, managed: ManagedModel, error: SpillwayError) -> None:
        """An attached model refuses a call."""
        if isinstance(error, BudgetError):
            self.fatal = error
            raise error
        model = managed.module()
        with self._lock:
            if not self._take_off(managed) or model is None:
                return
            known = self._known.get(id(model))
            tries = 1 + (known.tries if known is not None else 0)
            self._know(model, Verdict.PASSED, tries, str(error))
            if tries >= _MOST_TRIES:
                self.reject(model, str(error))
        self.judge_again()
        self.calls.start()

    def _take_off(self, managed: ManagedModel) -> bool:
        with suppress(UsageError):
            managed.attached.remove()
        is_there = managed in self.managed
        if is_there:
            self.managed.remove(managed)
        return is_there

    def _know(self, module: Module, verdict: Verdict, tries: int = 0, why: str = "") -> Verdict:
        self._known[id(module)] = _Known(weakref.ref(module), verdict, tries, why)
        return verdict


def alive(kind: type[Any]) -> list[Any]:
    """All objects of a class. Neither modules nor optimizers that were not called yet are known to torch otherwise."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _count_blocks(model: Module) -> int:
    try:
        return len(find_blocks(model, None))
    except UsageError:
        return 0


def _frames() -> Iterator[FrameType]:
    """The frames around the caller's. With its own among them, the list would be a cycle that keeps tensors alive."""
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _run_by_hand(frames: list[FrameType], module: Module) -> Module | None:
    """The outermost module around another whose forward is running without a call of the module."""
    called = {id(frame.f_locals.get("self")) for frame in frames if frame.f_code is _TORCH_CALL}
    for frame in reversed(frames):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if not isinstance(owner, Module) or owner is module or id(owner) in called:
            continue
        if any(each is module for each in owner.modules()):
            return owner
    return None
