"""Which modules of a script are its models, and what was attached to them.

NOTE [ What a root is ]

The outermost module in training that is called as a module is called, owns parameters that are trained, and repeats
blocks. It is judged when it is called first, in training with gradients, before it runs. Not judged are calls in a
backward (a checkpoint runs its function again), inside of something compiled or traced, and those that an attached
model makes itself. A wrapper that came later is none: what is attached inside of it goes on. Of ``DDP``, the module
inside is the root, whose names a plan knows.

NOTE [ What is refused ]

A module that cannot be attached is *given up*: it trains on as ever, the reason is kept, and nothing that it calls is
judged. What is refused later, in a call of an attached model, takes everything off the model, and this call goes on
without. It is attached anew once, since what came upon it (``block.compile()``) may be fine to attach to; the second
time it is given up. Only a budget that nothing fits is an error for the script.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DistributedDataParallel

from spillway.attaching import Attached
from spillway.attaching.call import PLACE, ModuleCall, is_attached, is_compiled_around, is_traced
from spillway.blocks import built_in, find_blocks, is_compiled
from spillway.capture.hooks import in_backward
from spillway.errors import BudgetError, SpillwayError, UsageError
from spillway.running.asked import Treated
from spillway.running.calls import Calls, Seen

NO_BLOCKS = (
    "repeats no block: there is nothing to plan for; spillway.offload() around its call moves what it saves, "
    "spillway.attach(model, blocks=...) takes the blocks that it is told"
)
BY_HAND = "is run by model.forward(...), past which nothing can be attached; call model(...)"
UNSEEN = "was not seen to be called as model(...) in training with gradients on, in this process"
COMPILED = "is compiled as a whole, past which nothing can be attached; compile its blocks: block.compile()"
_MOST_TRIES = 2

_CALL = ModuleCall.__call__.__code__
_TORCHS = Module._call_impl.__code__


@dataclass(frozen=True, eq=False)
class Root:
    """A model that something was attached to."""

    kind: str
    """Its class."""
    module: weakref.ref[Module]
    blocks: int
    """How many it repeats."""
    treated: Treated
    notes: list[str] = field(default_factory=list)

    @property
    def attached(self) -> Attached:
        """What was attached."""
        return self.treated.attached


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A module to which nothing could be attached."""

    kind: str
    module: weakref.ref[Module]
    reason: str


@dataclass(slots=True)
class _Known:
    module: weakref.ref[Module]
    seen: Seen
    tries: int = 0
    why: str = ""


class Roots:
    """The models of a script. See the notes at the top of this file.

    Args:
        attach: attaches to one, or raises.
    """

    def __init__(self, attach: Callable[[Module], Treated]) -> None:
        self._attach = attach
        self._known: dict[int, _Known] = {}
        self._lock = threading.RLock()
        self.calls = Calls(self._judge)
        self.attached: list[Root] = []
        self.given_up: list[GivenUp] = []
        self.tell: Callable[[GivenUp], None] | None = None
        """Called when a module is given up."""
        self.fatal: BudgetError | None = None
        """A budget that nothing fits."""

    def parameters(self) -> set[int]:
        """Ids of the parameters that belong to a root, or to a module that was given up."""
        references = [*(each.module for each in self.attached), *(each.module for each in self.given_up)]
        modules = [reference() for reference in references]
        return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}

    def look_again(self) -> None:
        """Judge what was passed anew: it may be trained by now."""
        with self._lock:
            self._known = {key: known for key, known in self._known.items() if known.seen is Seen.OWNED or known.tries}

    def give_up(self, module: Module, reason: str) -> None:
        """Leave a module alone, and remember why."""
        self.given_up.append(GivenUp(type(module).__name__, weakref.ref(module), reason))
        if self.tell is not None:
            self.tell(self.given_up[-1])
        self._know(module, Seen.OWNED)

    def give_up_unseen(self, parameters: list[Tensor]) -> list[Tensor]:
        """Give up the modules of parameters that were not seen to be called; gives the parameters that are in none."""
        left = {id(each): each for each in parameters}
        modules: list[Module] = [each for each in gc.get_objects() if issubclass(type(each), Module)]
        holding = [
            (module, found)
            for module in modules
            if (found := left.keys() & {id(parameter) for parameter in module.parameters()})
        ]
        inner = {id(child) for module, _ in holding for child in module.modules() if child is not module}
        for module, found in holding:
            if id(module) not in inner:
                compiled = any(is_compiled(each) or each.__dict__.get(PLACE) is not None for each in module.modules())
                self.give_up(module, COMPILED if compiled else UNSEEN)
            for key in found:
                left.pop(key, None)
        return list(left.values())

    def check(self) -> None:
        """See whether what was attached is still there: whoever compiles a model as a whole takes its place."""
        for root in list(self.attached):
            module = root.module()
            if module is not None and not is_attached(module):
                self._take_off(root)
                self.give_up(module, COMPILED)

    def close(self) -> None:
        """See no calls any more, and take off what was attached."""
        self.calls.stop()
        for root in self.attached:
            # Of what was compiled over it, nothing of ours is left either.
            with suppress(UsageError):
                root.attached.remove()

    def _judge(self, module: Module) -> Seen:
        known = self._known.get(id(module))
        if known is not None and known.module() is module and not known.tries:
            return known.seen
        if is_compiled_around() or is_traced() or in_backward():
            return Seen.PASSED
        with self._lock:
            return self._judge_anew(module)

    def _judge_anew(self, module: Module) -> Seen:
        if is_attached(module):
            # By another thread, while this one waited.
            return Seen.ATTACHED
        if isinstance(module, _Loss) or not any(each.requires_grad for each in module.parameters()):
            return self._know(module, Seen.PASSED)
        frames = list(_frames())
        if any(frame.f_code is _CALL for frame in frames):
            return self._know(module, Seen.PASSED)
        by_hand = _run_by_hand(frames, module)
        if by_hand is not None:
            if not self._is_given_up(by_hand):
                self.give_up(by_hand, BY_HAND)
            return self._know(module, Seen.OWNED)
        if any(map(is_attached, module.modules())):
            return self._know(module, Seen.PASSED)
        return self._try(module)

    def _try(self, module: Module) -> Seen:
        model: Module = module.module if isinstance(module, DistributedDataParallel) else module
        known = self._known.get(id(model))
        tries, why = (0, "") if known is None or known.module() is not model else (known.tries, known.why)
        blocks = _count_blocks(model)
        if not blocks:
            self.give_up(model, f"{NO_BLOCKS}{built_in(model.modules())}")
            return self._know(module, Seen.OWNED)
        try:
            treated = self._attach(model)
        except BudgetError as error:
            self.fatal = error
            raise
        except SpillwayError as error:
            self.give_up(model, str(error))
            return self._know(module, Seen.OWNED)
        notes = [f"attached anew: {why}"] if why else []
        root = Root(type(model).__name__, weakref.ref(model), blocks, treated, notes)
        treated.attached.tell(lambda error: self._refused(root, error))
        self.attached.append(root)
        self._know(model, Seen.PASSED, tries, why)
        if model is not module:
            # Its call of the model is one of what is attached.
            return self._know(module, Seen.PASSED)
        return Seen.ATTACHED

    def _refused(self, root: Root, error: SpillwayError) -> None:
        """An attached model cannot be called as such."""
        if isinstance(error, BudgetError):
            self.fatal = error
            raise error
        model = root.module()
        with self._lock:
            if not self._take_off(root) or model is None:
                return
            known = self._known.get(id(model))
            tries = 1 + (known.tries if known is not None else 0)
            self._know(model, Seen.PASSED, tries, str(error))
            if tries >= _MOST_TRIES:
                self.give_up(model, str(error))
        self.look_again()
        self.calls.start()

    def _take_off(self, root: Root) -> bool:
        with suppress(UsageError):
            root.attached.remove()
        is_there = root in self.attached
        if is_there:
            self.attached.remove(root)
        return is_there

    def _know(self, module: Module, seen: Seen, tries: int = 0, why: str = "") -> Seen:
        self._known[id(module)] = _Known(weakref.ref(module), seen, tries, why)
        return seen

    def _is_given_up(self, module: Module) -> bool:
        return any(each.module() is module for each in self.given_up)


def _count_blocks(model: Module) -> int:
    try:
        return len(find_blocks(model, None))
    except UsageError:
        return 0


def _frames() -> Iterator[FrameType]:
    """Those around the caller's. With its own among them it would hold itself, and what all of them have made."""
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _run_by_hand(frames: list[FrameType], module: Module) -> Module | None:
    """The outermost module around another whose forward is running, though nobody called the module."""
    called = {id(frame.f_locals.get("self")) for frame in frames if frame.f_code is _TORCHS}
    for frame in reversed(frames):
        code = frame.f_code
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_name == "forward" and code.co_argcount else None
        if not isinstance(owner, Module) or owner is module or id(owner) in called:
            continue
        if any(each is module for each in owner.modules()):
            return owner
    return None
