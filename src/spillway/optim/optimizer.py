"""The public optimizer whose state is on the host."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from spillway.blocks import Blocks
from spillway.errors import UnsupportedError, UsageError
from spillway.optim.away import AwayGradient
from spillway.optim.device_part import DevicePart
from spillway.optim.forward import ForwardOverlap
from spillway.optim.held import Held
from spillway.optim.host_step import HostStep, Turn
from spillway.optim.kinds import Kind, check_parameters, defaults_of, on_host
from spillway.optim.placement import held_of
from spillway.optim.rounds import Round, by_groups, shares
from spillway.optim.sharding import is_distributed, like, local_of, many_processes, put_local
from spillway.optim.shared import Shared
from spillway.optim.states import MASTER, Hook, Saved, check_shapes, host_copy
from spillway.optim.threads import begin_with, thread_count
from spillway.optim.traffic import Traffic
from spillway.records import OptimizerStats
from spillway.runtime.backend import Event, HostLane
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.labels import label
from spillway.session import Session

_NARROW = (torch.bfloat16, torch.float16)


class OffloadedOptimizer(Optimizer):
    """An optimizer of a class of your choice, with its state and its step on the host.

    It is a ``torch.optim.Optimizer`` in all respects: param groups, ``add_param_group``, learning rate schedulers, step
    hooks, closures, ``zero_grad``, ``state_dict``. The device has the parameters and, for as long as they take to
    leave, gradients. See the text of ``spillway.optim`` for how a step goes.

    Gradients leave while backward runs, as soon as each is accumulated. ``p.grad`` is then a tensor whose bytes are on
    the host: later micro-batches are added there (in the master's type), ``torch.nn.utils.clip_grad_norm_`` and
    ``torch.amp.GradScaler`` work on it as they are, without bringing it back. In a process group, where parameters
    are plain tensors, they leave in ``step()``: what a ``DistributedDataParallel`` has yet to reduce may not. With
    FSDP2 and tensor parallel (``DTensor``) they leave during backward.

    Between steps parameters may be written to: what is loaded, initialised or edited under ``torch.no_grad()`` is where
    the next step starts. What is written through ``p.data`` (``p.data.clamp_()``) leaves no trace, and is lost.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optimizer_class: a class of ``torch.optim``, or one of your own, which then steps all parameters in one call.
            Where it has a fused kernel for the host that is used (``Adam``, ``AdamW``, ``Adagrad``, and ``SGD`` in
            ``float32`` and ``float64``), unless ``fused=False`` is among the defaults; else its implementation with a
            loop, never ``foreach``.
        fraction: of all elements, how many are stepped on the host. The rest keeps state and step on the device; both
            step at the same time.
        device_budget: most bytes of state that the device may have, instead of a fraction: ``"2GiB"``.
        master_dtype: the type of the masters that parameters of a narrower type are stepped in. ``"auto"``: ``float32``
            for ``bfloat16`` and ``float16``. ``None``: no masters, each is stepped in its own type.
        offload_gradients: whether gradients leave the device during backward. If not, they stay until they are
            cleared, and are copied in ``step()``.
        tier: ``"host"``.
        threads: for the step. ``None``: one a CPU that the process may use, shared by the ranks of the machine.
        session: whose pinned memory is used. ``None``: the default one.
        defaults: for the class: ``lr=3e-4``.

    Raises:
        UsageError: an argument that cannot be meant.
        UnsupportedError: ``SparseAdam``, ``LBFGS``; a parameter whose elements overlap.

    Example:
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)
        >>> model(torch.randn(8, 64)).sum().backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        fraction: float | None = None,
        device_budget: int | str | None = None,
        master_dtype: torch.dtype | str | None = "auto",
        offload_gradients: bool = True,
        tier: str = "host",
        threads: int | None = None,
        session: Session | None = None,
        **defaults: Any,
    ) -> None:
        self._kind = Kind.of(optimizer_class)
        self._class = optimizer_class
        self._ready = False
        self._closed = False
        self._defaults_given = defaults
        complete = defaults_of(optimizer_class, defaults)
        self._fraction = _checked_fraction(fraction)
        self._master_dtype = _checked_master_dtype(master_dtype)
        if not isinstance(offload_gradients, bool):
            raise UsageError(f"offload_gradients: got {offload_gradients!r}, expected True or False")
        self._offload_gradients = offload_gradients
        if tier != "host":
            raise UsageError(f"tier: got {tier!r}, expected 'host'")
        self._threads = thread_count(threads)
        if session is not None and not isinstance(session, Session):
            raise UsageError(f"session: got {session!r}, expected a spillway.Session, or None for the default one")
        self._session = session if session is not None else Session.default()
        self._shared: dict[torch.device, Shared] = {}
        self._lane: HostLane | None = None
        self._held: dict[torch.Tensor, Held] = {}
        self._coming: set[Held] = set()
        self._overlapping: list[ForwardOverlap] = []
        self._host = HostStep(optimizer_class, defaults)
        self._device = DevicePart(optimizer_class, defaults)
        self._stop = contextlib.ExitStack()
        self._stats = OptimizerStats()
        super().__init__(params, complete)
        self._place(list(self._parameters()))
        self._ready = True

    # What an optimizer does.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        The host computes; what is called after this finds the new values, on the streams that wait for them. The call
        itself returns when all is queued.
        """
        self._check_open()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.synchronize()
        with torch.no_grad(), label("optimizer step"):
            self._queue_step()
            self._device.step(self.param_groups)
            for parameter in self._device:
                self._show(parameter, self._device.state_of(parameter))
            self._arrive([one for one in self._coming if not self._is_overlapped(one.parameter)])
        return loss

    def synchronize(self) -> None:
        """Let compute wait for all parameters that are on their way back.

        Only needed where :meth:`overlap_forward` is used and a parameter is read otherwise than by calling a module.

        Raises:
            Whatever went wrong in the step.
        """
        self._arrive(list(self._coming))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any optimizer."""
        self._check_open()
        super().add_param_group(param_group)
        if self._ready:
            group = self.param_groups[-1]
            with contextlib.ExitStack() as refused:
                refused.callback(self.param_groups.pop)
                self._place([(len(self.param_groups) - 1, parameter) for parameter in group["params"]])
                refused.pop_all()

    def overlap_forward(self, model: torch.nn.Module, *, blocks: Blocks | None = None) -> None:
        """From now on :meth:`step` returns early, and each block waits for its parameters when it is called.

        What is read of a parameter by other means than a call of the module that has it must come after
        :meth:`synchronize`: a copy of the model, an average of its weights. ``state_dict`` and ``load_state_dict`` of
        the model and of the optimizer see to that themselves. Parameters that are not in the model come back in
        :meth:`step`. A copy of the model has nothing of this.

        Args:
            model: whose parameters these are; as it is called, wrapped and all.
            blocks: which of its modules are blocks, as for :func:`spillway.attach`. ``None``: those that repeat.

        Raises:
            UsageError: if none are.
        """
        self._check_open()
        overlap = ForwardOverlap(model, self._wait_for, blocks=blocks)
        self._overlapping.append(overlap)
        self._stop.callback(overlap.remove)

    def _is_overlapped(self, parameter: torch.Tensor) -> bool:
        return any(overlap.covers(parameter) for overlap in self._overlapping)

    def _wait_for(self, parameters: Iterable[torch.Tensor]) -> None:
        if self._coming:
            self._arrive([self._held[one] for one in parameters if one in self._held])

    def stats(self) -> OptimizerStats:
        """Bytes and seconds of the last step."""
        self.synchronize()
        return self._stats

    def close(self) -> None:
        """Bring gradients back, take hooks off the parameters, give memory back. The state is gone.

        Where the session was closed before, the gradients are gone, too.
        """
        # The last of these first, and all of them whatever goes wrong in one.
        with contextlib.ExitStack() as stack:
            stack.callback(self._device.close)
            stack.callback(self._host.close)
            stack.callback(self.state.clear)
            stack.callback(self._held.clear)
            for shared in self._shared.values():
                stack.callback(shared.close, lost=self._session.closed)
            for held in self._held.values():
                stack.callback(held.give_up)
            stack.callback(self._stop.close)
            if not self._session.closed:
                stack.callback(self._bring_gradients_back)
                stack.callback(self.synchronize)
            self._closed = True

    def _check_open(self) -> None:
        self._session.check_open()
        if self._closed:
            raise UsageError(
                "got an OffloadedOptimizer that is closed, expected an open one: its state is gone; make a new one, "
                "and close() after the last state_dict()"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "got a copy of an OffloadedOptimizer, expected none: it has threads and pinned memory; make another one, "
            "and give it the state_dict() of this"
        )

    def _bring_gradients_back(self) -> None:
        for held in self._held.values():
            gradient = held.parameter.grad
            if gradient is not None and isinstance(away := local_of(gradient), AwayGradient):
                # Nobody can have the gradient of a parameter that is of another shape now.
                self._put_gradient(held, away.home.restore() if held.is_as_it_was() else None)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's, which loads it; masters are an entry ``"master"`` of a parameter's state.

        The tensors are on the host, and those that are stepped: copy what is to be kept while training goes on.
        """
        self._check_open()
        self.synchronize()
        if self._kind.begins_with_state:
            self._begin_states()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this class or of the plain one; nothing goes by way of the device.

        Masters come from the state if it has them and they say, in the parameter's own type, what the parameter says at
        the next step; else they are taken from the parameter.
        """
        self._check_open()
        self.synchronize()
        saved = Saved()

        def take(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            without = saved.take(state_dict)
            for (__, parameter), state in zip(self._parameters(), saved.in_order(), strict=False):
                check_shapes(state, parameter, fused=bool(self._kind.fused))
            return without

        with (
            contextlib.closing(Hook(self.register_load_state_dict_pre_hook(take))),
            contextlib.closing(Hook(self.register_load_state_dict_post_hook(self._put_states(saved), prepend=True))),
        ):
            super().load_state_dict(state_dict)

    def _put_states(self, saved: Saved) -> Callable[[Optimizer], None]:
        def put(_: Optimizer) -> None:
            parameters = [parameter for _, parameter in self._parameters()]
            for parameter, state in zip(parameters, saved.in_order(), strict=True):
                self._put_state(parameter, state)

        return put

    def _put_state(self, parameter: torch.Tensor, state: dict[Any, Any]) -> None:
        held = self._held.get(parameter)
        if held is None:
            self._device.put_state(parameter, state, self._settings_on_device(parameter))
            self._show(parameter, self._device.state_of(parameter))
            return
        held.check()
        fresh = {key: host_copy(key, value, held) for key, value in state.items()}
        master = fresh.pop(MASTER, None)
        if held.master is None and (fresh or master is not None):
            held.make_master()
        if held.has_master and master is not None:
            held.put_master(master)
        elif held.has_master:
            held.forget_master()
        if fresh:
            self._host.put_state(held, fresh, self._settings(held))
        else:
            self._host.drop_state(held)
        self._show(parameter, self._state_of(held))

    def _begin_states(self) -> None:
        for _, parameter in self._parameters():
            held = self._held.get(parameter)
            if parameter not in self.state:
                if held is None:
                    self._device.begin_state(parameter, self._settings_on_device(parameter))
                    self._show(parameter, self._device.state_of(parameter))
                else:
                    if held.master is None:
                        held.make_master()
                    self._host.begin_state(held, self._settings(held))
                    self._show(parameter, self._state_of(held))

    def _settings_on_device(self, parameter: torch.Tensor) -> dict[str, Any]:
        group = next(group for group in self.param_groups if any(one is parameter for one in group["params"]))
        return {name: value for name, value in group.items() if name != "params"}

    def _state_of(self, held: Held) -> dict[Any, Any]:
        state = dict(held.state)
        if held.has_master and held.known:
            state[MASTER] = held.master
        return state

    def _show(self, parameter: torch.Tensor, state: dict[Any, Any]) -> None:
        if state:
            shape = local_of(parameter).shape
            self.state[parameter] = {
                key: like(value, parameter)
                if isinstance(value, torch.Tensor) and value.shape == shape and value.ndim > 0
                else value
                for key, value in state.items()
            }

    # Where parameters are.

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                yield index, parameter

    def _place(self, parameters: Sequence[tuple[int, torch.Tensor]]) -> None:
        if self._kind.alone:
            check_parameters(self._class, [parameter for _, parameter in parameters], self._defaults_given)
        sizes = [local_of(parameter).numel() for _, parameter in parameters]
        on_the_host = held_of(sizes, self._fraction)
        # All of them are made before the first is taken: one may be refused.
        held = [self._made(group, one) for (group, one), here in zip(parameters, on_the_host, strict=True) if here]
        for one in held:
            self._hold(one)
        for group, parameter in parameters:
            if parameter not in self._held:
                self._device.add(parameter, group, self._work_dtype(parameter))

    def _made(self, group: int, parameter: torch.Tensor) -> Held:
        work = self._work_dtype(parameter)
        cut = self._is_fused(self.param_groups[group], work)
        return Held(parameter, group, self._shared_of(local_of(parameter).device), work, cut=cut)

    def _hold(self, held: Held) -> None:
        parameter = held.parameter
        self._held[parameter] = held
        if self._offload_gradients and (parameter.is_floating_point() or parameter.is_complex()):
            me, mine = weakref.ref(self), weakref.ref(held)

            def came(_: torch.Tensor) -> None:
                optimizer, held = me(), mine()
                if optimizer is not None and held is not None:
                    optimizer._came(held)

            # One that is frozen may be unfrozen later, and takes a hook only if it is not.
            frozen = not parameter.requires_grad
            handle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(not frozen)
            self._stop.callback(handle.remove)
            weakref.finalize(self, handle.remove)

    def _is_fused(self, group: dict[str, Any], work: torch.dtype) -> bool:
        return work in self._kind.fused and group.get("fused") is not False

    def _work_dtype(self, parameter: torch.Tensor) -> torch.dtype:
        wanted = self._master_dtype
        if wanted is None or not parameter.is_floating_point():
            return parameter.dtype
        if wanted == "auto":
            return torch.float32 if parameter.dtype in _NARROW else parameter.dtype
        assert isinstance(wanted, torch.dtype)
        return wanted if wanted.itemsize > parameter.dtype.itemsize else parameter.dtype

    def _shared_of(self, device: torch.device) -> Shared:
        shared = self._shared.get(device)
        if shared is None:
            runtime = self._session.runtime(device)
            if not isinstance(runtime, DeviceRuntime):
                raise UnsupportedError("got a step in a CUDA graph's capture, expected it outside: the host computes")
            if self._lane is None:
                # One for all devices: they share the CPUs, and the optimizer that steps there.
                self._lane = runtime.backend.host_lane("optimizer", begin_with(self._threads))
            shared = self._shared[device] = Shared(Traffic(runtime), self._lane, self._session.check_open)
        return shared

    def _settings(self, held: Held) -> dict[str, Any]:
        group = self.param_groups[held.group]
        return on_host(group, fused=self._is_fused(group, held.work_dtype))

    # A step.

    def _came(self, held: Held) -> None:
        """A gradient was accumulated."""
        gradient = held.parameter.grad
        if gradient is None or gradient.requires_grad or isinstance(local_of(gradient), AwayGradient):
            return
        if is_distributed(held.parameter) or not many_processes():
            self._take_gradient(held, gradient)

    def _take_gradient(self, held: Held, gradient: torch.Tensor) -> None:
        local = local_of(gradient)
        home = held.another_gradient()
        home.begin(local)
        self._put_gradient(held, home.stand_in(local))

    def _put_gradient(self, held: Held, local: torch.Tensor | None) -> None:
        gradient = held.parameter.grad
        if local is not None and gradient is not None and is_distributed(gradient):
            put_local(gradient, local)
        else:
            held.parameter.grad = local

    def _queue_step(self) -> None:
        turns = list(self._turns())
        if not any(turn.gradient.factors for turn in turns):
            # Whose gradient came first is there first; else all of them have to be, and the first are wanted first.
            turns.sort(key=lambda turn: turn.held.gradient.came)
        self._round = Round(self._shared.values(), self._host)
        if self._kind.alone:
            for share in shares(turns, self._settings):
                self._round.queue([share], together=False)
        elif turns:
            self._round.queue(by_groups(turns, self._settings), together=True)
        self._round.close()
        self._coming = {turn.held for turn in turns}
        if any(turn.held.gradient.away() is None for turn in turns):
            # What stays may be written to as soon as this returns.
            for shared in self._shared.values():
                shared.traffic.settle()

    def _turns(self) -> Iterator[Turn]:
        for held in self._held.values():
            gradient = held.parameter.grad
            if gradient is None:
                held.another_gradient().clear()
                continue
            held.check()
            local = local_of(gradient)
            if isinstance(local, AwayGradient):
                stands = held.adopt(local)
                if stands is not local:
                    self._put_gradient(held, stands)
            elif self._offload_gradients and not gradient.requires_grad:
                self._take_gradient(held, gradient)
            else:
                held.another_gradient().begin(local)
            yield Turn(held, held.gradient.snapshot())

    def _end_failed_step(self, error: type[BaseException] | None, *_: object) -> None:
        """Where one has failed, the others of its step end, too: it is told once."""
        if error is not None:
            self._arrive(list(self._coming))

    def _arrive(self, held: Iterable[Held]) -> None:
        """Compute waits for these."""
        waits: dict[tuple[Event, Shared], None] = {}
        arriving = [one for one in held if one in self._coming]
        for one in arriving:
            self._coming.discard(one)
            if one.coming is not None:
                waits[one.coming, one.shared] = None
        with contextlib.ExitStack() as stack:
            stack.push(self._end_failed_step)
            # All of them, also those behind one that failed.
            for event, shared in reversed(waits):
                stack.callback(shared.traffic.wait, event)
        for one in arriving:
            self._show(one.parameter, self._state_of(one))
        if arriving and not self._coming:
            for shared in self._shared.values():
                shared.traffic.settle()
            self._stats = self._round.stats()


def _checked_fraction(fraction: float | None) -> float:
    if fraction is None:
        return 1.0
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
        raise UsageError(
            f"fraction: got {fraction!r}, expected a number from 0 (all on the device) to 1 (all on the host)"
        )
    return float(fraction)


def _checked_master_dtype(dtype: torch.dtype | str | None) -> torch.dtype | str | None:
    known = dtype is None or dtype == "auto" or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    if not known:
        raise UsageError(f"master_dtype: got {dtype!r}, expected 'auto', None or a floating point type of torch's")
    return dtype
