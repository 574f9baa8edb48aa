"""The profile of a step without its hardware: one step on ``meta`` tensors, traced like a measured one.

NOTE [ Meta profile ]

A measured profile is of a step whose blocks are recomputed and whose inputs are offloaded. Here nothing is recomputed:
the tensors that a block saves are released at once. They are reloaded, as new storages of the same sizes, when the
gradient of the block's output arrives. So the meta device holds at each instant what a GPU would, and the same tracer
and the same probes make the same profile.

As in a checkpointed block, saved parameters stay, and so do tensors that other code holds. Inputs are offloaded when
the block is called, although other code may hold them, unless they are small.

The weights of streamed blocks are there in this step, and are taken off the static bytes afterwards: profiles count
their copies nowhere else. Gradients that are offloaded are held until their copies would have ended.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import Module

from spillway._torch import disable_dispatch, tree_map
from spillway.attaching import attach
from spillway.attaching.blocks import kind_of, tensors_of
from spillway.attaching.collector import device_of
from spillway.attaching.model import Caches
from spillway.attaching.validation import cache_error, refuse_nested
from spillway.checkpointing.blocks import Named, find_blocks
from spillway.checkpointing.losses import own_losses
from spillway.checkpointing.recorder import Recorder
from spillway.checkpointing.selectors import Choices
from spillway.checkpointing.tensors import is_plain
from spillway.errors import UsageError
from spillway.parameters.streamable import streamable
from spillway.planner.hardware import Hardware
from spillway.planner.profile import Profile, Static
from spillway.profiler.compile import compile_profile
from spillway.profiler.meta_device import META, MetaDevice, MetaMeter, state_sizes, without_values
from spillway.profiler.meter import ClockMeter, static_within
from spillway.profiler.probe import Probe, ProfilerListener
from spillway.profiler.step_trace import StepTracer
from spillway.profiler.target_kernels import first_attention, kernels_of, standing_workspace
from spillway.runtime.bytes import over
from spillway.saved_tensors.identity import is_parameter
from spillway.session import MIN_BYTES
from spillway.units import is_number

_DEVICES = ("cuda", "cpu")
_WINDOW = 512 << 20
_RECOMPUTE_FACTOR = 1.07
"""Time of a replay over that of its operators before, as measured of Llama-8B's block on an H200."""


def profile_on_meta(
    model: Module,
    batch: Any,
    loss_of: Callable[[Module, Any], torch.Tensor],
    *,
    blocks: Any,
    hardware: Hardware,
    target: str | None,
    attention: str | None,
    optimizer: Any,
    stream: Any,
    is_offloaded: bool,
) -> Profile | None:
    """The profile of a step on a target; ``None`` if no backward came through the blocks.

    Arguments and errors are those of :func:`spillway.profile`; ``target`` is the type of device. ``is_offloaded`` is
    whether the optimizer has its state, and all gradients, in CPU memory. Neither the model nor the batch is changed.
    """
    if target is not None and target not in _DEVICES:
        raise UsageError(f"device: got {target!r}, expected one of {', '.join(map(repr, _DEVICES))}, or None")
    _check_optimizer(optimizer)
    kernel = first_attention(attention, hardware)
    device_of(model)
    step = _Step(model, loss_of)
    device = MetaDevice(torch.device(_DEVICES[0] if target is None else target), hardware)
    state, moved = device.tensors.state(step), tree_map(device.tensors.of, batch)
    # No operator is seen to read the optimizer's state and the workspace of matrix products.
    trained = {id(each): each for each in state.values() if each.is_leaf and each.requires_grad}
    leaving, of_optimizer = _LeavingGradients(device, hardware), 0
    if is_offloaded:
        for each in trained.values():
            each.register_post_accumulate_grad_hook(leaving.add)  # type: ignore[no-untyped-call]
    else:
        of_optimizer = sum(map(device.rounded, state_sizes(list(trained.values()), optimizer)))
    device.before += of_optimizer
    device.before += standing_workspace(device.device, hardware)
    for tensor in tensors_of(*state.values(), moved):
        device.number_of(tensor)
    # A model that cannot be attached has no profile either.
    with attach(model, blocks=blocks) as attached:
        found = [Named(name, model.get_submodule(name)) for name in attached.blocks]
    refuse_nested(found)
    away = [] if stream is None else found if stream == "auto" else find_blocks(model, stream, what="stream")
    parameters = streamable([(each.name, each.module) for each in away], model, MIN_BYTES, lambda _: is_offloaded)
    streamed = {name: tuple(each.nbytes for _, each in some) for name, some in parameters.items()}
    profiler = MetaProfiler(device, streamed)
    with ExitStack() as around:
        around.enter_context(torch.compiler.set_stance("force_eager"))
        around.enter_context(Caches(model).off())
        for loss in own_losses(model):
            around.enter_context(loss.in_rows(0))
        around.enter_context(kernels_of(device.device, kernel))
        around.enter_context(profiler.around(found))
        around.enter_context(device)
        around.enter_context(
            without_values("profile without the hardware: the step", "profile the model on the device itself")
        )
        functional_call(step, state, (moved,)).backward()
        leaving.clear()
    weights = [state[f"model.{name}"] for name, _ in model.named_parameters()]
    of_weights = sum(device.rounded(each.nbytes) for each in weights if is_plain(each))
    known = Static(weights=of_weights - profiler.streamed_bytes, gradients=0, optimizer=of_optimizer, other=0)
    return profiler.profile(type(model).__name__, known)


def is_on_meta(model: Module, batch: Any) -> bool:
    """Whether there is nothing to measure: tensors without memory."""
    return any(each.device == META for each in (*model.parameters(), *model.buffers(), *tensors_of(batch)))


class _Step(Module):
    """A model and its loss, so that both see the ``meta`` tensors of the model's state."""

    def __init__(self, model: Module, loss_of: Callable[[Module, Any], torch.Tensor]) -> None:
        super().__init__()
        self.model = model
        self._loss_of = loss_of

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss_of(self.model, batch)


class _LeavingGradients:
    """Gradients that are offloaded as they arrive, one after the other: each is held until its copy has ended."""

    def __init__(self, device: MetaDevice, hardware: Hardware) -> None:
        self._device = device
        self._bandwidth = hardware.rates(_WINDOW).out
        self._leaving: deque[tuple[float, torch.Tensor]] = deque()
        """When a copy ends, and its gradient."""
        self._end = 0.0

    def add(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        now = self._device.seconds
        self._end = max(self._end, now) + gradient.nbytes / self._bandwidth
        self._leaving.append((self._end, gradient))
        while self._leaving and self._leaving[0][0] <= now:
            self._leaving.popleft()

    def clear(self) -> None:
        self._leaving.clear()


def _check_optimizer(optimizer: Any) -> None:
    given = optimizer is None or (is_number(optimizer) and 0 <= optimizer < math.inf)
    if isinstance(optimizer, torch.optim.Optimizer) or not (given or callable(optimizer)):
        raise UsageError(
            f"optimizer: got {optimizer!r:.200}, expected a class such as torch.optim.AdamW, a function from a list of "
            f'parameters to an optimizer, bytes for each element of a parameter, "offloaded", or None'
        )


class MetaProfiler:
    """Traces one step on a meta device, whose mode is in force meanwhile. See NOTE [ Meta profile ]."""

    def __init__(self, device: MetaDevice, streamed: Mapping[str, tuple[int, ...]]) -> None:
        self._device = device
        self._streamed = streamed
        """Bytes of the streamed parameters of each block."""
        self.streamed_bytes = sum(device.rounded(nbytes) for sizes in streamed.values() for nbytes in sizes)
        self._tracer = StepTracer(META, lambda: 0, MetaMeter(device))
        self._probes: dict[Hashable, Probe] = {}
        self._calls: dict[int, _BlockCall] = {}
        """Calls of blocks whose saved tensors are released."""

    @contextmanager
    def around(self, blocks: Sequence[Named]) -> Iterator[None]:
        """A context in which the calls of these modules are blocks."""
        own = [each.module.__dict__.get("forward") for each in blocks]
        for each in blocks:
            # Around the forward, so that hooks of the user's run outside of the block.
            each.module.__dict__["forward"] = partial(self._run, each, each.module.forward)
        try:
            yield
        finally:
            for each, forward in zip(blocks, own, strict=True):
                del each.module.__dict__["forward"]
                if forward is not None:
                    each.module.__dict__["forward"] = forward

    def profile(self, model: str, known: Static) -> Profile | None:
        if not self._tracer.has_backward:
            self._tracer.close()
            return None
        trace = self._tracer.finish()
        profile = compile_profile(
            trace, trace, self._probes, model=model, device=self._device.device, min_bytes=MIN_BYTES
        )
        # The reloads took no time.
        kinds = tuple(replace(kind, recompute_factor=_RECOMPUTE_FACTOR) for kind in profile.kinds)
        # They were on the device meanwhile.
        static_bytes = profile.static_bytes - self.streamed_bytes
        return replace(profile, kinds=kinds, static_bytes=static_bytes, static=static_within(known, static_bytes))

    def _run(self, block: Named, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not (block.module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        error = cache_error(block.name, block.module, args, kwargs)
        if error is not None:
            raise error
        tensors = tensors_of(args, kwargs)
        kind = kind_of(block.module, tensors)
        streamed = self._streamed.get(block.name, ())
        number = self._tracer.block_begins(block.name, kind, (args, kwargs), streamed)
        probe = None
        if kind not in self._probes:
            # On a CPU, workspaces are not measured.
            on_cpu = self._device.device.type == "cpu"
            meter = ClockMeter(clock=lambda: self._device.seconds) if on_cpu else MetaMeter(self._device)
            probe = self._probes[kind] = Probe(META, meter=meter, block=block.module)
        call = _BlockCall(self._device, tensors)
        listener = ProfilerListener(probe, partial(self._tracer.asked, number), self._tracer.casts)
        output = call.run(forward, args, kwargs, listener)
        self._tracer.block_ended(number, output)
        trained = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        if trained:
            self._calls[number] = call
            # After the tracer's own hook, which has marked that the block's backward begins.
            trained[0].register_hook(lambda _: self._reload(number))  # type: ignore[no-untyped-call]
        return output

    def _reload(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            self._tracer.replay_begins(number)
            call.reload()
            self._tracer.replay_ended(number)


class _BlockCall:
    """One call of a block with these tensors. Its saved tensors are released. See NOTE [ Meta profile ]."""

    def __init__(self, device: MetaDevice, tensors: list[torch.Tensor]) -> None:
        self._device = device
        self.inputs = {device.number_of(tensor) for tensor in tensors}
        self._first = device.count
        # A tensor that existed before the step, as a table in a buffer, stays.
        storages = [tensor.untyped_storage() for tensor in tensors if device.number_of(tensor) > 0]
        self._small = [storage for storage in storages if storage.nbytes() < MIN_BYTES]
        """Inputs that are held for as long as anything that the block saves."""
        for storage in storages:
            if storage.nbytes() >= MIN_BYTES:
                device.offload(storage)
        self._released: weakref.WeakSet[_Released] = weakref.WeakSet()
        self._recorder: Recorder | None = None
        self._listener: ProfilerListener | None = None

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], listener: ProfilerListener
    ) -> Any:
        with saved_tensors_hooks(self._pack, _unpack):
            if listener.probe is None:
                return forward(*args, **kwargs)
            self._recorder, self._listener = recorder, _ = Recorder(Choices()), listener
            recorder.begin(tensors_of(args, kwargs))
            with recorder, listener.probe.around(recorder):
                output = forward(*args, **kwargs)
        with disable_dispatch():
            recorder.gave(output)
        listener.probe.ended(recorder)
        self._recorder = self._listener = None
        return output

    def reload(self) -> None:
        """Reload the saved tensors, each storage once."""
        storages: dict[int, torch.UntypedStorage] = {}
        for each in self._released:
            each.reload(storages, self._device)
        self._released.clear()

    def _pack(self, tensor: torch.Tensor) -> Any:
        with disable_dispatch():
            if self._recorder is not None:
                self._recorder.saves(0, tensor)
            number = self._device.number_of(tensor) if tensor.device == META else -1
            if is_parameter(tensor) or not (number > self._first or number in self.inputs):
                # An output must not hold its own node.
                return tensor if tensor.is_leaf and tensor.requires_grad else tensor.detach()
            tell = None
            if self._recorder is not None and self._listener is not None and number not in self.inputs:
                tell = partial(self._listener.asked, len(self._recorder.operators), None)
            found = _Released(self, tensor, number, tell)
        self._released.add(found)
        return found


class _Released:
    """The handle of a saved tensor whose storage is not held from the forward to the block's backward."""

    __slots__ = ("__weakref__", "_call", "_form", "_nbytes", "_number", "_original", "_storage", "_tell")

    def __init__(self, call: _BlockCall, tensor: torch.Tensor, number: int, tell: Callable[[], None] | None) -> None:
        storage = tensor.untyped_storage()
        self._call = call
        self._tell = tell
        self._number = number
        self._nbytes = storage.nbytes()
        self._form = tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride()
        self._original = weakref.ref(storage) if number in call.inputs else None
        self._storage: torch.UntypedStorage | None = None

    def reload(self, storages: dict[int, torch.UntypedStorage], device: MetaDevice) -> None:
        """Take a storage again: that of the input if it is still held, or one for all that shared it."""
        if self._number not in storages:
            original = None if self._original is None else self._original()
            if original is None:
                storages[self._number] = device.allocate(self._nbytes)
            else:
                device.reload(original)
                storages[self._number] = original
        self._storage = storages[self._number]

    def unpack(self) -> torch.Tensor:
        if self._storage is None:
            # Backward has come by another of the block's outputs.
            self._call.reload()
        assert self._storage is not None
        if self._tell is not None:
            self._tell()
        return over(self._storage, *self._form)


def _unpack(packed: torch.Tensor | _Released) -> torch.Tensor:
    return packed.unpack() if isinstance(packed, _Released) else packed
