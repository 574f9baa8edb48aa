"""The call of an attached model, which is one pass.

NOTE [ Caches in training ]

A block writes its keys and values into a cache, and would write them a second time when it is recomputed. Training does
not need one: models of transformers make it since ``config.use_cache`` is set for generation. So it is switched off
while an attached model is called in training, as transformers' own trainer and checkpointing do. A call that asks for a
cache itself (``model(..., use_cache=True)``) is refused.

NOTE [ Checkpointing by flags ]

Models of transformers, diffusers and timm checkpoint their own layers while an attribute of a module is true. A block
would be recomputed twice. So the attributes of blocks, and of modules inside and around of them, are false while the
model is attached, and ``Attached.remove`` makes them true again. Layers that are no blocks keep theirs: nothing else
would recompute them. A replay sees the attributes of its forward, as all Python state. An attribute that becomes true
later is found when the model is called. An offload policy changes none: it offloads what these checkpoints keep.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from spillway._torch import PLACE, children_of
from spillway.attaching.block import BlockCall
from spillway.attaching.call import REFUSALS, ModuleCall
from spillway.attaching.validation import refuse_checkpointing
from spillway.checkpointing.blocks import Named
from spillway.errors import SpillwayError, UsageError
from spillway.offloading import offload
from spillway.parameters.streamed import StreamedModel
from spillway.saved_tensors.order import LearnedOrders
from spillway.saved_tensors.scopes import scope_of_hooks
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.attaching.attached import Attached
    from spillway.attaching.collector import ProfileCollector
    from spillway.attaching.controller import PlanController

_CACHE_FLAG = "use_cache"
_CACHES_OFF = "config.use_cache is switched off in training: gradients are those without a cache"


class ModelCall(ModuleCall):
    """The call of a model, which is one pass: ``context``, with the policy for tensors outside of checkpointed blocks.

    Its blocks are in the modules ``around`` them.
    """

    def __init__(
        self,
        model: Module,
        blocks: Sequence[ModuleCall],
        around: Sequence[Named],
        context: ModelPass,
        *,
        recomputes: bool,
    ) -> None:
        super().__init__(Named("", model))
        self.blocks = blocks
        self.context = context
        self._recomputes = recomputes
        self._caches = Caches(model)
        self.flags = CheckpointFlags()
        taken = {call.name for call in (self, *blocks)}
        self._around = [(each.name, weakref.ref(each.module)) for each in around if each.name not in taken]
        places = [call.name.rpartition(".") for call in blocks]
        self._slots = [
            (call, weakref.ref(model.get_submodule(parent)), key)
            for call, (parent, _, key) in zip(blocks, places, strict=True)
        ]
        """The parent and the key of each block, as long as it is not wrapped."""
        self._here = _Here()
        self.controller: PlanController | ProfileCollector | None = None
        """Finds a plan, or profiles."""
        self.streams: StreamedModel | None = None
        """Blocks whose parameters are on the device only during their calls."""
        self.attached: Attached | None = None
        """The user's handle, while the model is attached."""
        self.passes = 0
        """Calls in training so far."""
        self._applied = 0
        """Plans that were applied when the last of them began."""

    @staticmethod
    def of(model: Module) -> ModelCall:
        call = model.__dict__[PLACE]
        assert isinstance(call, ModelCall)
        return call

    def hand_to(self, controller: PlanController | ProfileCollector) -> None:
        """From the next call on, a controller profiles the model, or finds a plan for it."""
        self.controller = controller
        controller.manage([call for call in self.blocks if isinstance(call, BlockCall)])

    def belong_to(self, on_error: Callable[[SpillwayError], None], give_way: Callable[[], object]) -> None:
        """Call functions for later errors, and if the user attaches the model or a part of it. See their attributes."""
        for call in (self, *self.blocks):
            call.on_error, call.give_way = on_error, give_way

    def _call(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.streams is None or self._here.inside:
            return super()._call(module, args, kwargs)
        with self.streams.one_pass():
            return super()._call(module, args, kwargs)

    def run(self, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._here.inside:
            return self.plain(module, args, kwargs)
        with ExitStack() as stack:
            try:
                self._begin(stack, module, args, kwargs)
            except REFUSALS as error:
                self.refuse(error)
            return self.plain(module, args, kwargs)

    def evaluates(self) -> None:
        if self.controller is not None and not self._here.inside:
            self.controller.evaluates()

    def _begin(self, stack: ExitStack, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Everything that may raise before the model runs."""
        self._check()
        if self._recomputes:
            self.flags.switch_off(module)
        controller = self.controller
        if controller is not None:
            controller.begin(module, args, kwargs)
            if controller.applied.count != self._applied:
                self._applied = controller.applied.count
                self.context.forget()
        self.passes += 1
        # If the user has opened a pass around this call, blocks belong to that.
        if not (self._recomputes and scope_of_hooks() is not None) and not (
            # Its hooks give autograd handles of streamed parameters.
            controller is not None and controller.is_plain and self.streams is None
        ):
            stack.enter_context(self.context)
        has_caches = self._recomputes and stack.enter_context(self._caches.off())
        if controller is not None:
            if has_caches:
                controller.notes.once(_CACHES_OFF)
            for loss in controller.losses:
                stack.enter_context(loss.in_rows(controller.spare_bytes))
        self._here.inside = True
        stack.callback(setattr, self._here, "inside", False)

    def _check(self) -> None:
        """Refuse changes to the model that would detach it without notice."""
        for call in self.blocks:
            module = call.module()
            # Another thread may be removing the calls just now, after this.
            if module is not None and module.__dict__.get(PLACE) is not call and not self.removed:
                raise call.collision()
            if module is not None and isinstance(call, BlockCall):
                self.flags.switch_off(module)
        for name, reference in self._around:
            module = reference()
            if module is not None and module.__dict__.get(PLACE) is not None:
                raise UsageError(
                    f"{name!r} was compiled after attaching, and its trace bypasses the attached blocks in it. Call "
                    f"attached.remove(), compile the blocks instead, and attach again"
                )
            if module is not None and self._recomputes:
                self.flags.switch_off(module)
        # A block may have been wrapped in a checkpointing module.
        for call, reference, key in self._slots if self._recomputes else ():
            parent = reference()
            found = None if parent is None else children_of(parent).get(key)
            if found is not None and found is not call.module():
                refuse_checkpointing([Named(call.name, found)])


class ModelPass(offload):
    """A pass around a model's call. Its learned order belongs to the model: another one of its class may be attached.

    NOTE [ Another plan ]

    Another plan offloads other tensors, and backward asks for them in another order. If both plans offload as many
    tensors, the order of the first would be taken for the second, and each step would stall (on an H200, 21 ms of
    1178). So the order is learned again with each plan, in one step.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._memory = LearnedOrders()

    def forget(self) -> None:
        """Forget the learned order. See NOTE [ Another plan ]."""
        self._memory = LearnedOrders()

    def _orders_in(self, session: Session) -> LearnedOrders:
        return self._memory


class _Here(threading.local):
    inside = False


class CheckpointFlags:
    """The attributes by which modules checkpoint themselves. See NOTE [ Checkpointing by flags ]."""

    _NAMES = ("gradient_checkpointing", "grad_checkpointing")
    """In transformers and diffusers, and in timm."""

    def __init__(self) -> None:
        self._off: list[tuple[weakref.ref[Module], str, bool | str, bool]] = []
        """Modules, names, values, and whether the attribute was the module's own or its class's."""

    def switch_off(self, module: Module) -> None:
        """Let a module not checkpoint itself. Fast enough for each call of the model."""
        own = module.__dict__
        for name in self._NAMES:
            value = own.get(name, getattr(type(module), name, None))
            # Unsloth's is the name of a way.
            if value is True or (isinstance(value, str) and value):
                self._off.append((weakref.ref(module), name, value, name in own))
                own[name] = False

    def put_back(self) -> None:
        """Switch on again what was switched off."""
        while self._off:
            reference, name, value, is_own = self._off.pop()
            module = reference()
            if module is not None and is_own:
                module.__dict__[name] = value
            elif module is not None:
                module.__dict__.pop(name, None)

    @property
    def note(self) -> str | None:
        """The line for the user; ``None``: nothing was switched off."""
        if not self._off:
            return None
        names = " and ".join(dict.fromkeys(name for _, name, *_ in self._off))
        return f"{names} of the model is switched off while it is attached: Spillway decides what is recomputed"


class Caches:
    """The cache settings in the configurations of a model and its parts."""

    def __init__(self, model: Module) -> None:
        found = (getattr(module, "config", None) for module in model.modules())
        self._configs: list[Any] = list({id(each): each for each in found if hasattr(each, _CACHE_FLAG)}.values())

    @contextmanager
    def off(self) -> Iterator[bool]:
        """Switch caches off; gives whether any was on. See NOTE [ Caches in training ]."""
        on = [config for config in self._configs if getattr(config, _CACHE_FLAG) is True]
        for config in on:
            setattr(config, _CACHE_FLAG, False)
        try:
            yield bool(on)
        finally:
            for config in on:
                setattr(config, _CACHE_FLAG, True)
