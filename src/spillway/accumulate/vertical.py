"""Vertical order: the backward of a block runs for all micro-batches, then that of the block before it.

NOTE [ Vertical order ]

Plain accumulation runs forward and backward of one micro-batch after the other. Vertical order runs all forwards first,
in the same order. Then it runs the backward of the last block for micro-batches 0, 1, 2 and so on, then that of the
block before it. So the gradients of a block are complete after its turn, early in backward, and an optimizer that steps
in backward steps each parameter once, under the backward of the blocks before it.

Forwards are not interleaved. A forward can then do as it likes: draw random numbers, count calls, update batch norm's
statistics. It finds what it finds in plain accumulation. Interleaved forwards would read a block's parameters once for
all micro-batches, which gains nothing while parameters are on the GPU.

Gradients have the bits of plain accumulation, for two reasons:

* Each micro-batch has one ``backward()`` of torch's engine, which is only paused between blocks. So all sums inside of
  a micro-batch are the engine's own, also those of tied weights, and of tensors that several blocks read.
* The engine adds a micro-batch's gradient to a parameter when the parameter's oldest reader has run. The turn of that
  reader must not come earlier for a later micro-batch. This is checked before the first backward, and a hook of each
  parameter checks it again when the gradient arrives, since reentrant checkpoints hide parameters from the graph.

A backward must leave random generators as they were, since a plain forward would begin after it. This is checked.
A recomputation by other code than Spillway's reads modules as the last forward left them. So an error is raised if
forwards have changed modules and such a recomputation runs. Spillway's own recomputation reads them as its own forward
found them.

NOTE [ A thread for each micro-batch ]

A hook before the newest node of each piece pauses the backward. The engine cannot return from the middle of a backward,
so each backward has a thread, which waits in that hook. At most one of the threads runs, and the calling thread waits
meanwhile. The engine is set to run nodes of a GPU in that thread, too: its own threads are shared by all backwards, and
one that waits would stop the others.

Threads are kept for later steps. Torch has a cache of cuDNN's plans for attention in each thread, and never frees it. A
new thread would make all plans again.

Each thread gets what the caller's thread had when the loss was passed: context variables, autocast, grad and inference
mode, the default device. It gets the current streams of the call that runs the backwards. Function and dispatch modes
are refused. Saved-tensor hooks are left out: graphs that a backward makes would use them, and they change no bits.
After an error the hook raises in all paused backwards, and the threads end before the error is raised.
"""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from spillway._torch import (
    dispatch_modes,
    function_modes,
    has_function_modes,
    post_accumulate_hooks,
    version_of,
)
from spillway.accumulate.turns import Graph, Turns, own_parameters
from spillway.checkpointing.ambient import AmbientState, generators_of, states_of
from spillway.checkpointing.blocks import Blocks
from spillway.checkpointing.python_state import PythonState
from spillway.errors import UnsupportedError, UsageError
from spillway.saved_tensors.handles import in_replay

_RANDOM = "the state of a Python or NumPy random generator"


class VerticalBackward:
    """Collects the losses of an accumulation step, and runs their backwards block by block.

    Args:
        model: the model that the blocks are in.
        blocks: as for :func:`spillway.attach`.
    """

    def __init__(self, model: Module, blocks: Blocks | None) -> None:
        self._model = model
        self._blocks = own_parameters(model, blocks)
        self._lanes: list[_Lane] = []
        self._threads: list[ThreadPoolExecutor] = []
        """Those that have nothing to do, one in each pool. They end with their pool."""
        self._states = _ModuleStates(model)

    def __len__(self) -> int:
        return len(self._lanes)

    def add(self, loss: Tensor) -> None:
        """Add a micro-batch's loss, in place of ``loss.backward()``."""
        self._lanes.append(_Lane(len(self._lanes), loss))
        self._states.note()

    def clear(self) -> None:
        """Drop the losses and their graphs."""
        self._lanes.clear()
        self._states.clear()

    def close(self) -> None:
        """End the threads."""
        self.clear()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.shutdown()

    def run(self, parameters: Sequence[Parameter], complete: Callable[[Parameter], object] | None = None) -> None:
        """Run the backwards.

        Args:
            parameters: those of the optimizer.
            complete: called when the last gradient of a parameter was added. Then the parameter's other hooks run only
                once, after it.

        Raises:
            UsageError: if vertical order would not have the bits of plain order.
        """
        with ExitStack() as stack:
            stack.callback(self.clear)
            lanes = list(self._lanes)
            graphs: list[Graph] = []
            for lane in lanes:
                graphs.append(Graph(lane.loss, begin=max((graph.end for graph in graphs), default=-1)))
            turns = Turns(self._blocks, graphs)
            last = {leaf: place for place, graph in enumerate(graphs) for leaf in graph.spans}
            leaves = {id(leaf): leaf for leaf in (*parameters, *(leaf for graph in graphs for leaf in graph.leaves))}
            devices = {leaf.device for leaf in leaves.values()}
            current = _Current()
            for lane, graph in zip(lanes, graphs, strict=True):
                lane.prepare(stack, turns.pauses(graph), current, devices, self._threads)
            del graphs
            steps = {id(parameter) for parameter in parameters}
            for leaf in leaves.values():
                if leaf.requires_grad:
                    then = complete if id(leaf) in steps else None
                    stack.enter_context(_in_order(leaf, last.get(id(leaf)), current, then))
            stack.enter_context(self._states.checked())
            if len(lanes) > 1:
                stack.enter_context(_draws_nothing(devices))
            _run(lanes, turns.count)


class _Current:
    """The micro-batch whose backward runs."""

    lane: _Lane | None = None


class _Abandoned(BaseException):
    """Ends a paused backward after an error elsewhere."""


class _Lane:
    """The backward of one micro-batch, in a thread. See NOTE [ A thread for each micro-batch ]."""

    def __init__(self, place: int, loss: Tensor) -> None:
        if dispatch_modes() > 0 or has_function_modes():
            raise UsageError(
                "order='vertical': backward() was called under a dispatch or function mode, which cannot follow into "
                "other threads; leave the mode out, or use order='horizontal'"
            )
        self.place = place
        self.loss: Any = loss
        self.turn: float = 0
        """The turn that it pauses for; infinite when it has ended."""
        self.error: BaseException | None = None
        self._context = contextvars.copy_context()
        self._ambient = AmbientState.now()._replace(modes=())
        self._device = torch.get_default_device() if function_modes() > 0 else None
        self._grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._streams: list[torch.Stream] = []
        self._cpu_threads = torch.get_num_threads()
        self._thread: ThreadPoolExecutor | None = None
        self._ident = 0
        self._idle: list[ThreadPoolExecutor] = []
        self._task = partial(self._context.run, self._run)
        # Locks are faster than semaphores. Each is released once for each time that it is acquired.
        self._go, self._paused = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._paused.acquire()
        self.is_abandoned = False
        self._ended = threading.Event()

    def prepare(
        self,
        stack: ExitStack,
        pauses: Iterable[tuple[Any, int]],
        current: _Current,
        devices: Iterable[torch.device],
        idle: list[ThreadPoolExecutor],
    ) -> None:
        """Hook the nodes that it pauses before, until ``stack`` is closed. It takes one of the idle threads, if any."""
        self._current, self._idle = current, idle
        for node, turn in pauses:
            stack.callback(node.register_prehook(self._hook(turn)).remove)
        now = torch.accelerator.current_accelerator()
        if now is not None and (indices := {each.index for each in devices if each.type == now.type}):
            # The one that is set last is of the current device.
            here = torch.accelerator.current_device_index()
            self._streams = [torch.accelerator.current_stream(index) for index in (*(indices - {here}), here)]

    def resume(self) -> None:
        """Run up to the next pause."""
        if self._thread is None:
            self._thread = self._idle.pop() if self._idle else ThreadPoolExecutor(1, "spillway-backward")
            # It waits for its turn first.
            self._thread.submit(self._task)
        self._current.lane = self
        # These settings are the process's, and each micro-batch has its own.
        with AmbientState.now()._replace(settings=self._ambient.settings).in_force():
            self._go.release()
            self._wait()

    def abandon(self) -> None:
        """End it, wherever it is, also if the caller is interrupted once more."""
        self.is_abandoned = True
        interrupt: KeyboardInterrupt | None = None
        while self._thread is not None:
            try:
                if not self._ended.is_set():
                    with suppress(RuntimeError):
                        # It is not locked if the backward runs: an interrupted caller left it.
                        self._go.release()
                    # An interrupt may have come before the thread got it. If it has ended, it ends at once.
                    self._thread.submit(self._task)
                    self._ended.wait()
                self._idle.append(self._thread)
                self._thread = None
            except KeyboardInterrupt as error:
                interrupt = error
        # It holds this frame.
        self.error = None
        if interrupt is not None:
            raise interrupt

    def _wait(self) -> None:
        self._paused.acquire()

    def _hook(self, turn: int) -> Callable[[Any], None]:
        def pause(_: Any) -> None:
            # Graphs may share a node. Numbers of other threads may lead here late: then there is nothing to wait for.
            if self._current.lane is self and turn > self.turn:
                if threading.get_ident() != self._ident:
                    raise UnsupportedError(
                        "order='vertical': torch runs this backward in a thread of its own, which cannot wait for "
                        "other micro-batches; use order='horizontal'"
                    )
                if not self.is_abandoned:
                    self.turn = turn
                    self._paused.release()
                    self._go.acquire()
                if self.is_abandoned:
                    raise _Abandoned

        return pause

    def _run(self) -> None:
        if self._ended.is_set():
            return
        self._ident = threading.get_ident()
        self._go.acquire()
        loss, self.loss = self.loss, None
        try:
            if self.is_abandoned:
                raise _Abandoned
            # Each thread has a number of its own, and takes over torch's when it first asks.
            if torch.get_num_threads() != self._cpu_threads:
                torch.set_num_threads(self._cpu_threads)
            with ExitStack() as stack:
                for stream in self._streams:
                    torch.accelerator.set_stream(stream)
                grad, inference = self._grad
                stack.enter_context(torch.inference_mode(inference))
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(self._ambient.in_force())
                if self._device is not None:
                    stack.enter_context(self._device)
                # At the end: inference_mode(False) switches it on.
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                loss.backward()
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised by the calling thread
            self.error = error
        finally:
            self.turn = math.inf
            with suppress(RuntimeError):
                # It is not locked if an interrupted caller waits no more.
                self._paused.release()
            self._ended.set()


def _run(lanes: Sequence[_Lane], turns: int) -> None:
    """Run the backwards, one turn after the other."""
    try:
        for turn in range(turns):
            for lane in lanes:
                if lane.turn == turn:
                    lane.resume()
                if lane.error is not None:
                    raise lane.error
    finally:
        # All are ended, also if an interrupt comes meanwhile.
        with ExitStack() as stack:
            for lane in lanes:
                lane.is_abandoned = True
                stack.callback(lane.abandon)


@contextmanager
def _in_order(
    leaf: Tensor, last: int | None, current: _Current, complete: Callable[[Any], object] | None
) -> Iterator[None]:
    """Check that gradients arrive in the order of micro-batches, the ``last`` of them at the end.

    With ``complete``, other hooks of the tensor run after the last gradient only.
    """
    arrived = -1

    def check(leaf: Tensor) -> None:
        nonlocal arrived
        assert current.lane is not None
        place = current.lane.place
        if place < arrived or (last is None and complete is not None):
            raise UsageError(
                f"order='vertical': a gradient of a parameter of shape {tuple(leaf.shape)} arrived that is not in the "
                f"graph of its micro-batch, as with use_reentrant=True. Sums would have other bits than in plain "
                f"order; use use_reentrant=False or order='horizontal'"
            )
        arrived = place
        if complete is not None and place == last:
            complete(leaf)
            for key, hook in kept.items():
                if key in hooks:
                    hook(leaf)

    hooks = {} if complete is None else post_accumulate_hooks(leaf)
    # A hook may be removed meanwhile.
    kept = dict(hooks)
    hooks.update(dict.fromkeys(kept, _do_nothing))
    handle: RemovableHandle = leaf.register_post_accumulate_grad_hook(check)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        handle.remove()
        hooks.update({key: hook for key, hook in kept.items() if key in hooks})


def _do_nothing(_: Tensor) -> None:
    """Stand in for a hook."""


@contextmanager
def _draws_nothing(devices: Iterable[torch.device]) -> Iterator[None]:
    """Raise if random generators have changed meanwhile. See NOTE [ Vertical order ]."""
    generators = generators_of(devices)
    before = states_of(generators)
    yield
    for (generator, was), (_, now) in zip(before, states_of(generators), strict=True):
        if not torch.equal(was, now):
            raise UsageError(
                f"order='vertical': a backward has drawn random numbers of {generator.device}, so later micro-batches "
                f"would have drawn others in plain order; use order='horizontal'"
            )


class _ModuleStates:
    """Whether forwards have changed modules. See NOTE [ Vertical order ]."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self._changed: list[str] = []
        self._last: tuple[PythonState, list[tuple[str, Tensor, int]]] | None = None

    def note(self) -> None:
        """A forward has ended."""
        if self._last is not None:
            state, buffers = self._last
            self._changed += [each for each in state.changed() if each != _RANDOM]
            self._changed += [name for name, buffer, version in buffers if version_of(buffer) != version]
        buffers = [(name, each, version_of(each)) for name, each in self._model.named_buffers()]
        self._last = PythonState(self._model), buffers

    def clear(self) -> None:
        self._changed, self._last = [], None

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Raise if the model's modules run in here, other than in Spillway's replays."""
        modules = set(self._model.modules()) if self._changed else set()

        def check(module: Module, _: Any) -> None:
            if module in modules and not in_replay():
                names = ", ".join(sorted(set(self._changed))[:8])
                raise UnsupportedError(
                    f"order='vertical': {type(module).__name__} is recomputed in backward by other code than "
                    f"Spillway's, and would read what later micro-batches have changed: {names}. Use "
                    f"spillway.attach(model, policy=spillway.Recompute()) or spillway.recompute, or order='horizontal'"
                )

        handle = register_module_forward_pre_hook(check) if modules else None
        try:
            yield
        finally:
            if handle is not None:
                handle.remove()
