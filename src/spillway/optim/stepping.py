"""The queue of steps: they begin in ``step`` or during backward, and compute waits for them there or in a forward."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from spillway._torch import at_end_of_backward, graph_task, version_of
from spillway.checkpointing.blocks import Blocks
from spillway.errors import UsageError
from spillway.optim.forward_waits import wait_in_forward
from spillway.optim.gradient import DeviceContext, Snapshot
from spillway.optim.host_parameter import HostParameter
from spillway.optim.offloaded_gradient import LentGradients, OffloadedGradient, put_gradient
from spillway.optim.optimizer_class import stamp_of
from spillway.optim.placement import Placement
from spillway.optim.state_store import StepCost
from spillway.optim.states import StateViews, check_shapes
from spillway.optim.tensors import is_distributed, local_of, with_strides_of
from spillway.runtime.backend import Event, label, on_error
from spillway.runtime.system import many_processes

if TYPE_CHECKING:
    from spillway.parameters.homes import StreamedParameter


class StepQueue:
    """Queues steps as gradients arrive, and lets compute wait for the stepped parameters."""

    def __init__(self, placement: Placement, views: StateViews, check_usable: Callable[[], None]) -> None:
        self.pending: set[HostParameter] = set()
        """Parameters that were stepped, and that compute has not waited for."""
        self.early = BackwardSteps(self._step_early, placement.complete)
        self.older = self.last = self.now = StepCost()
        """Costs of the last two steps, and of the one that is under way."""
        self._placement = placement
        self._views = views
        self._groups = placement.groups
        self._check_usable = check_usable
        self._stepped_groups: list[dict[str, Any]] = []
        """The param groups of the last step."""
        self._forward_hooks: list[RemovableHandle] = []
        self._covered: set[Tensor] = set()
        """The parameters that a hook waits for."""
        self.lent = LentGradients()
        self._backwards = RunningBackwards()
        self._versions: list[tuple[Tensor, int]] = []
        """The tensors of states that users may have, with their versions before the first step in backward."""

    def watch(self, held: HostParameter) -> None:
        """Offload a parameter's gradients as they are accumulated."""
        parameter = held.parameter
        if not self._placement.options.offload_gradients or not (
            parameter.is_floating_point() or parameter.is_complex()
        ):
            return
        # Weak: autograd holds the hook, in a way that the collector does not see.
        me, mine = weakref.ref(self), weakref.ref(held)

        def arrived(_: Tensor) -> None:
            queue, of = me(), mine()
            if queue is not None and of is not None:
                queue._gradient_arrived(of)

        def arrives(_: object) -> None:
            queue, of = me(), mine()
            if queue is not None and of is not None:
                queue._backwards.enter(of)

        # A frozen parameter may be unfrozen later, and takes a hook only if it is not frozen.
        frozen = not parameter.requires_grad
        hook = parameter.requires_grad_(True).register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        held.node = torch.autograd.graph.get_gradient_edge(parameter).node
        earlier = held.node.register_prehook(arrives)
        parameter.requires_grad_(not frozen)
        # At the latest when the optimizer is gone.
        held.unhook = weakref.finalize(self, lambda: (hook.remove(), earlier.remove()))

    def overlap(self, model: Module, blocks: Blocks | None) -> None:
        """Let each block of a model wait for its own parameters, from now on."""
        self._forward_hooks += wait_in_forward(model, self._wait_for, blocks)
        self._covered.update(model.parameters())

    def follow_groups(self) -> None:
        """Step the parameters that are in ``param_groups`` now, each with the settings of its group.

        The state of a parameter that left its group is kept for the user, as in any optimizer. It is used if the
        parameter is added to a group again.
        """
        placement, views = self._placement, self._views
        if not placement.is_regrouped():
            return
        groups = {parameter: index for index, parameter in placement.parameters()}
        placed = placement.groups_of_placed()
        moved = [parameter for parameter, index in placed.items() if groups.get(parameter) != index]
        if moved:
            self.early.check_none("parameters that left their group")
            self.finish()
            views.show_all(placed)
        new = [(index, parameter) for parameter, index in groups.items() if parameter not in placed]
        # First, since one may be refused.
        for held in placement.add(new) if new else ():
            self.watch(held)
            self.follow_home(held, placement.streamed.get(held.parameter))
        for parameter in moved:
            if parameter not in groups:
                self._drop(parameter)
        edited = {parameter for parameter in placed if views.edited(parameter) is not None}
        for parameter, state in placement.regroup(groups):
            if state and parameter not in edited:
                # Taken like one of the user's, before the next step.
                views.state[parameter] = state

    def begin(self) -> None:
        """Before a step: wait for the last one, and take the user's edits of groups and states."""
        if self.early.stepped:
            self.follow_groups()
            self._check_states()
        else:
            self.synchronize()
            self.take_edits()

    def run(self) -> None:
        """Step all parameters that have a gradient, and let compute wait for those that no block waits for."""
        self._stepped_groups = list(self._groups())
        with torch.no_grad(), label("optimizer step"), on_error(self._end_failed_step):
            steps = self._queue()
            self._placement.device.step()
            for parameter in self._placement.device:
                self._views.show(parameter)
            # The user may write plain gradients as soon as this returns.
            plain = {step.held for step in steps if step.on_device is not None and not self._lend(step)}
            here = [one for one in self.pending if one.parameter not in self._covered or one in plain]
            with contextlib.ExitStack() as stack:
                if len(here) == len(self.pending):
                    stack.callback(self._finish)
                self._arrive(here)

    def synchronize(self) -> None:
        """Let compute wait for all parameters, and wait until all state is in its place."""
        self._placement.settle(self.now)
        self._end()

    def finish(self) -> None:
        """Wait until all that was queued is done."""
        self.synchronize()
        for context in self._placement.contexts.values():
            # Tasks that write master weights end.
            context.last_task().finish()

    def take_edits(self) -> None:
        """The next step has the user's groups, and begins with states that were put in the place of others."""
        self.follow_groups()
        self._placement.check_memory()
        self._views.show_all(parameter for _, parameter in self._placement.parameters())
        for _, parameter in self._placement.parameters():
            state = self._views.edited(parameter)
            if state is not None:
                self.synchronize()
                check_shapes(state, parameter, fused=bool(self._placement.traits.fused))
                self._placement.put_states([(parameter, state)])
                self._views.show(parameter)
                if parameter in self._placement.held:
                    self._show_stored_with([self._placement.held[parameter]])

    def _check_states(self) -> None:
        """Raise if the user has edited states since parameters were stepped in backward."""
        parameters = [parameter for _, parameter in self._placement.parameters()]
        was_written = any(version_of(one) != version for one, version in self._versions)
        if was_written or any(self._views.edited(one) is not None for one in parameters):
            raise UsageError(
                "optimizer.state was edited between backward and step(), but step_in_backward=True has stepped "
                "parameters with the states before. Edit it after step()."
            )
        self._versions = []

    def forget_costs(self) -> None:
        """Parameters have moved: earlier steps say nothing about later ones."""
        self.older = self.last = self.now = StepCost()

    def bring_back(self, held: HostParameter) -> None:
        """Reload a parameter's gradient to the GPU, where it is a plain tensor."""
        if held in self.early.stepped:
            # Another optimizer would step by it again.
            put_gradient(held, None)
        elif held.gradient.is_current():
            # A parameter that was resized cannot have the gradient.
            put_gradient(held, held.gradient.restore() if held.is_unchanged() else None)

    def give(self, held: HostParameter, gradient: Tensor | None) -> None:
        """Set a gradient that was reloaded, on the parameter's device."""
        if gradient is not None:
            held.parameter.grad = gradient.to(held.parameter.device)
            if not self._placement.options.step_in_backward:
                self._gradient_arrived(held)

    def follow_home(self, held: HostParameter, streamed: StreamedParameter | None) -> None:
        """A parameter is streamed from now on, or no more. A streamed one is fetched after its step."""
        if held.streamed is not streamed:
            held.streamed = streamed
            if streamed is not None:
                streamed.before_fetch = partial(_wait_in, weakref.ref(self), weakref.ref(held))

    def close(self) -> None:
        for hook in self._forward_hooks:
            hook.remove()

    def _drop(self, parameter: Tensor) -> None:
        """A parameter is in no group."""
        placement, views = self._placement, self._views
        # All of it is read, also from the disk.
        state = views.state[parameter].copy() if parameter in views.state else None
        held = placement.held.pop(parameter, None)
        if held is None:
            placement.device.discard(parameter)
        else:
            self.bring_back(held)
            placement.drop(held)
        views.show(parameter)
        if state is not None:
            views.state[parameter] = state

    def _gradient_arrived(self, held: HostParameter) -> None:
        gradient = held.parameter.grad
        if gradient is None or gradient.requires_grad or isinstance(local_of(gradient), OffloadedGradient):
            return
        if not is_distributed(held.parameter) and many_processes():
            # DistributedDataParallel has yet to reduce it.
            return
        if not self._placement.options.step_in_backward:
            _offload_gradient(held, gradient)
            return
        if self.early.is_paused:
            return
        if self.early.complete is not None:
            self.early.complete(held.parameter)
            gradient = held.parameter.grad
            assert gradient is not None
        if not self.early.stepped:
            self.take_edits()
            if self._placement.held.get(held.parameter) is not held:
                # It is in no group now.
                return
        self.early.check(held)
        _offload_gradient(held, gradient)
        if held.store.steps_on_device:
            self.lent.lend(held, with_strides_of(local_of(gradient), held.local()))
        self.early.arrived(held, self._groups())
        self._wait_for_oldest(held.context)

    def _step_early(self, held: Sequence[HostParameter]) -> None:
        """Step parameters during backward, and note those that were queued, also on an error."""
        self._check_usable()
        stepped = self.early.stepped
        if not stepped:
            self._versions = self._views.versions()
        with torch.no_grad(), label("optimizer step"):
            # Parameters of the last step that the forward has not waited for.
            self._arrive(self.pending - stepped)
            self._placement.prepare(held)
            try:
                self._step([one.gradient.snapshot(self.lent.get(one)) for one in held], overlapped=False)
            finally:
                stepped.update(self.pending.intersection(held))

    def _step(self, steps: Sequence[Snapshot], *, overlapped: bool) -> None:
        """Let the stores step, and note the parameters that were queued, also on an error."""
        by_parameter = {step.held: step for step in steps}
        before = {held: held.updated for held in by_parameter}
        try:
            for store, some in self._placement.of_stores(by_parameter):
                store.step([by_parameter[held] for held in some], self.now, overlapped=overlapped)
        finally:
            self.pending.update(held for held, event in before.items() if held.updated is not event)

    def _lend(self, step: Snapshot) -> bool:
        """Lend a step a plain gradient, so that its users wait. If it cannot be lent, compute has to wait now."""
        held, gradient, read = step.held, step.held.parameter.grad, step.on_device
        if held.parameter not in self._covered or gradient is None or gradient.requires_grad or read is None:
            return False
        self.lent.lend_in_place(held, read)
        return True

    def _wait_for_oldest(self, context: DeviceContext) -> None:
        """Let compute wait for the oldest steps during backward, if their gradients exceed the in-flight limit."""
        for one in self.lent:
            if self.lent.nbytes[context] <= context.transfers.window:
                return
            if one.context is context and one in self.early.stepped and one.updated is not None:
                with on_error(self._end_failed_step):
                    context.transfers.wait(one.updated)
                self.lent.take_back(one)

    def _queue(self) -> list[Snapshot]:
        placement, contexts = self._placement, self._placement.contexts.values()
        stepped = self.early.end(self._groups())
        for held in self.lent:
            if held not in stepped:
                self.lent.take_back(held)
        placement.settle(self.now)
        left = [held for held in placement.held.values() if held not in stepped]
        placement.prepare(held for held in left if held.parameter.grad is not None)
        given = {held for held in left if not held.gradient.is_current()}
        steps = list(self._param_steps(left))
        for context in contexts:
            context.expected = max((step.held.gradient.count for step in steps), default=0)
        self.pending = set(stepped)
        try:
            self._step(steps, overlapped=bool(self._forward_hooks))
        finally:
            placement.settle(self.now)
        if any(step.on_device is None and step.held in given for step in steps):
            # Plain gradients that the user has may be written as soon as this returns.
            for context in contexts:
                context.transfers.settle()
        return steps

    def _param_steps(self, some: Iterable[HostParameter]) -> Iterator[Snapshot]:
        offloads = self._placement.options.offload_gradients
        for held in some:
            gradient = held.parameter.grad
            if gradient is None:
                held.fresh_gradient().clear()
                continue
            local = local_of(gradient)
            if isinstance(local, OffloadedGradient):
                stands = held.adopt(local)
                if stands is not local:
                    put_gradient(held, stands)
            elif held.store.steps_on_device:
                held.fresh_gradient().clear()
                yield Snapshot(held, on_device=with_strides_of(local, held.local()))
                continue
            elif offloads and not gradient.requires_grad:
                _offload_gradient(held, gradient)
            else:
                held.fresh_gradient().begin(local)
            yield held.gradient.snapshot()

    def _arrive(self, held: Iterable[HostParameter]) -> None:
        """Let compute wait for some parameters. The last of them end the step."""
        arriving = [one for one in held if one in self.pending]
        waits: dict[tuple[Event, DeviceContext], list[HostParameter]] = {}
        for one in arriving:
            assert one.updated is not None
            waits.setdefault((one.updated, one.context), []).append(one)
        with on_error(self._end_failed_step), contextlib.ExitStack() as stack:
            # All of them, also those behind one that failed.
            for one in arriving:
                stack.callback(self.lent.take_back, one)
            for (event, context), of_event in reversed(waits.items()):
                stack.callback(self._wait_once, event, context, of_event)
        # An edit of a step that is under way is for the next one.
        shown = [one for one in arriving if one not in self.early.stepped and self._views.edited(one.parameter) is None]
        for one in shown:
            self._views.show(one.parameter)
        self._show_stored_with(shown)
        if arriving and not self.pending:
            for index, written in self.now.written.items():
                # The user may have replaced the groups since.
                written.apply_to(self._stepped_groups[index])
            self.now.end(self._placement.contexts.values())
            self.older, self.last, self.now = self.last, self.now, StepCost()

    def _show_stored_with(self, held: Sequence[HostParameter]) -> None:
        """States that were stored again with others: tensors that the user has read are no longer theirs."""
        for other in self._placement.stored_with(held):
            if self._views.edited(other.parameter) is None:
                self._views.show(other.parameter)

    def _wait_once(self, event: Event, context: DeviceContext, held: Sequence[HostParameter]) -> None:
        """Let compute wait. An error of the step is raised once; after an interrupt, it is still to be waited for."""
        try:
            context.transfers.wait(event)
        except Exception:
            self.pending.difference_update(held)
            raise
        self.pending.difference_update(held)

    def _end_failed_step(self) -> None:
        """If a part of a step has failed, the rest of it ends, too: its errors are raised now, and not again."""
        self._views.is_stale = True
        self._end()

    def _end(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._finish)
            self._arrive(self.pending)

    def _finish(self) -> None:
        with contextlib.ExitStack() as stack:
            for cost in {self.now, self.last}:
                stack.callback(cost.finish)

    def _wait_for(self, parameters: Iterable[Tensor]) -> None:
        if self.pending:
            held = self._placement.held
            self._arrive([held[one] for one in parameters if one in held])


def _wait_in(queue: weakref.ref[StepQueue], held: weakref.ref[HostParameter]) -> None:
    """A block's parameter is about to be copied."""
    found, mine = queue(), held()
    if found is not None and mine is not None:
        found._wait_for([mine.parameter])


def _offload_gradient(held: HostParameter, gradient: Tensor) -> None:
    local = local_of(gradient)
    home = held.fresh_gradient()
    home.begin(local)
    put_gradient(held, home.stand_in(local))


class _Running:
    """A backward that is running: autograd holds this until it ends."""

    def __call__(self) -> None:
        pass


class RunningBackwards:
    """Refuses a backward that would add to a gradient while one of another thread may be offloading it.

    Autograd locks a parameter while it adds, and not while a hook replaces ``p.grad``. The backwards of a GPU run in
    one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: weakref.WeakValueDictionary[int, _Running] = weakref.WeakValueDictionary()

    def enter(self, held: HostParameter) -> None:
        """A gradient of the parameter is about to be added."""
        task, thread = graph_task(), threading.get_ident()
        with self._lock:
            mine = self._running.get(task)
            if mine is None:
                mine = self._running[task] = _Running()
                at_end_of_backward(mine)
            of, its_thread = held.backward
            if of is not None and of() not in (None, mine) and its_thread != thread:
                # The user may keep the error, and this frame with it.
                del mine
                raise UsageError(
                    "got backwards of two threads at once that add to the gradient of one parameter, which an "
                    "OffloadedOptimizer offloads. Run them one after the other, or make the optimizer with "
                    "offload_gradients=False."
                )
            held.backward = weakref.ref(mine), thread


class BackwardSteps:
    """Steps parameters during backward, as their gradients arrive.

    The user promises that each parameter gets one gradient before each step, and that gradients, parameters and
    settings are not changed until then. A step cannot be undone, so a broken promise is an error.

    A parameter may be written as soon as its gradient is accumulated: the compute stream has all kernels of backward
    that read it. The parameter's version tells autograd of later readers. Others find the stepped value: ``.data``, or
    a detached parameter in code that is recomputed.

    Args:
        step: steps some parameters. It adds those that it has queued to ``stepped``, also if it fails.
        may_step: gives those that may be stepped, of some whose gradients have arrived.
    """

    def __init__(
        self,
        step: Callable[[Sequence[HostParameter]], None],
        may_step: Callable[[Sequence[HostParameter]], Sequence[HostParameter]],
    ) -> None:
        self.is_paused = False
        """Whether gradients are added up, and more of them will come before ``step()``."""
        self.complete: Callable[[Any], object] | None = None
        """Called with a parameter whose gradient is complete, before the parameter is stepped."""
        self._step = step
        self._may_step = may_step
        self._arrived: set[HostParameter] = set()
        self._waiting: list[HostParameter] = []
        self.stepped: set[HostParameter] = set()
        """The parameters that were stepped since the last ``step()``."""
        self._settings: dict[int, tuple[dict[str, object], dict[str, object]]] = {}
        # Backward runs in a thread for each device.
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def within(self, *, is_paused: bool = False, complete: Callable[[Any], object] | None = None) -> Iterator[None]:
        before = self.is_paused, self.complete
        self.is_paused, self.complete = is_paused, complete
        try:
            yield
        finally:
            self.is_paused, self.complete = before

    def check(self, held: HostParameter) -> None:
        """Raise if a parameter's gradient has arrived before."""
        if held in self._arrived:
            raise UsageError(
                "got a second gradient of a parameter before step(), but step_in_backward=True has stepped the "
                "parameter by the first. Call step() after each backward. To accumulate, leave the option out, or use "
                "spillway.Accumulator, or run the earlier ones inside of optimizer.accumulate(). If a backward failed "
                "or was discarded, some parameters have stepped: load the last checkpoint, the optimizer's state first."
            )

    def check_none(self, what: str) -> None:
        if self.stepped:
            raise UsageError(
                f"got {what} between a backward and its step(): step_in_backward=True has stepped some parameters and "
                f"not the others. Do this after step()."
            )

    def arrived(self, held: HostParameter, groups: Sequence[dict[str, Any]]) -> None:
        """A parameter's gradient is on its way to the CPU."""
        with self._lock:
            self._arrived.add(held)
            self._waiting.append(held)
            held.gradient.sealed = True
            complete = self._may_step(self._waiting)
            if not complete:
                return
            for index in {one.group for one in complete}:
                self._check_settings(index, groups[index])
            try:
                self._step(complete)
            finally:
                self._waiting = [one for one in self._waiting if one not in self.stepped]

    def end(self, groups: Sequence[dict[str, Any]]) -> set[HostParameter]:
        """``step()`` was called. Gives the parameters that were stepped, if nothing was changed."""
        for held in self.stepped:
            if not held.gradient.is_current():
                raise UsageError(
                    "A gradient was dropped or replaced before step(), but step_in_backward=True has stepped its "
                    "parameter. Call step() after each backward, and zero_grad() after step(). To undo the step of a "
                    "batch, load a state that was saved before: load_state_dict()."
                )
            if not held.is_as_written():
                raise UsageError(
                    "A parameter was written between backward and step(), but step_in_backward=True has stepped it. "
                    "Write to parameters after step()."
                )
        for index in self._settings:
            self._check_settings(index, groups[index])
        stepped = self.stepped
        self.reset()
        return stepped

    def check_dropped(self, what: str, pending: Collection[HostParameter] = ()) -> None:
        """Raise if a step is still to come, or if parameters were written while stepped values were on their way."""
        if any(held.parameter.grad is not None for held in self.stepped):
            self.check_none(what)
        if any(held in pending and not held.is_as_written() for held in self.stepped):
            raise UsageError(
                "Parameters were written while step_in_backward=True was copying stepped values to them. Call "
                "synchronize(), and load the model and the optimizer again."
            )

    def reset(self) -> None:
        for held in self._arrived:
            held.gradient.sealed = False
        self._arrived, self._waiting, self.stepped, self._settings = set(), [], set(), {}

    def _check_settings(self, index: int, group: dict[str, Any]) -> None:
        # A scheduler adds "initial_lr" when it is made.
        settings = {name: value for name, value in group.items() if name not in ("params", "param_names", "initial_lr")}
        now = {name: stamp_of(value) for name, value in settings.items()}
        # With the tensors, so that no other one gets the number of one that is gone.
        before, _ = self._settings.setdefault(index, (now, settings))
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if changed:
            raise UsageError(
                f"Settings of group {index} were changed between backward and step(): {', '.join(changed)}. "
                f"step_in_backward=True has stepped parameters with the old ones. Change them after step()."
            )
