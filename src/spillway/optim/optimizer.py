"""The public optimizer whose state is on the host."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from spillway.blocks import Blocks
from spillway.errors import UnsupportedError, UsageError
from spillway.optim.away import AwayGradient
from spillway.optim.balance import Balance
from spillway.optim.choices import Choices, Fraction, MasterDtype
from spillway.optim.device_part import DevicePart
from spillway.optim.early import EarlySteps
from spillway.optim.forecast import Forecast
from spillway.optim.forward import ForwardOverlap
from spillway.optim.held import Held
from spillway.optim.host_step import Turn
from spillway.optim.kinds import Arguments, Kind, check_parameters, for_host, on_host
from spillway.optim.layout import State
from spillway.optim.placement import counted, held_beyond, held_of
from spillway.optim.sharding import is_distributed, like, local_of, many_processes, put_local
from spillway.optim.shared import Shared
from spillway.optim.shelf import Loading
from spillway.optim.shelves import make_shelf
from spillway.optim.states import Hook, Saved, Shown, check_shapes
from spillway.optim.threads import begin_with, hands_of
from spillway.optim.traffic import Traffic
from spillway.records import OptimizerStats
from spillway.runtime.backend import Event, HostLane
from spillway.runtime.device import DeviceRuntime
from spillway.runtime.labels import label
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.planning.profile import OptimizerProfile


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

    Parameters may be written to before :meth:`step` by whatever means: ``load_state_dict``, ``p.data.clamp_()``, NumPy.
    Each step reads the parameter itself. ``optimizer.state`` has the plain optimizer's entries between steps; edits of
    it count, too.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optimizer_class: a class of ``torch.optim``, or one of your own, which then steps all parameters in one call.
            Where it has a fused kernel for the host that is used (``Adam``, ``AdamW``, ``Adagrad``, and ``SGD`` in
            ``float32`` and ``float64``), unless ``fused=False`` is among the defaults; else its implementation with a
            loop, never ``foreach``.
        fraction: of all elements, how many are stepped on the host. The rest keeps state and step on the device; both
            step at the same time. ``"auto"``: all at first, then as many as slow a step down by no more than
            ``slowdown``, by the figures of the first steps; :attr:`fraction` says what came of it. Two runs may find
            different ones, and the host's and the device's arithmetic differ in the last bits.
            Parameters on the CPU, beside others on a device, are stepped on the host anyway, and are not counted.
        slowdown: what ``"auto"`` allows, of a step: 0.05 for 5 %.
        device_budget: most bytes of state, masters included, that stay on the device, instead of a fraction:
            ``"2GiB"``. The first parameters that it has room for are stepped there.
        master_dtype: the type of the masters that parameters of a narrower type are stepped in. ``"auto"``: ``float32``
            for ``bfloat16`` and ``float16``. ``None``: no masters, each is stepped in its own type.
        offload_gradients: whether gradients leave the device during backward. If not, they stay until they are
            cleared, and are copied in ``step()``.
        tier: where masters and state lie: in host memory (``"host"``), or in the session's spill file (``"disk"``),
            from which they come to host memory, some at a time, to be stepped.
        step_on: what steps them: ``"host"``, or ``"device"``: then they lie in pinned host memory and come to the
            device for the step, some at a time, within the session's window. The class is used as you configured it,
            with its own ``fused`` and ``foreach``; of ``Adam``, ``AdamW``, ``SGD`` and ``Adagrad`` large parameters
            come in pieces, of others whole.
        threads: for the step. ``None``: one a CPU that the process may use, shared by the ranks of the machine.
        session: whose pinned memory is used. ``None``: the default one.
        hold: which parameters the fraction takes: ``"last"``, from the last one on, whose gradients come first in
            backward; or ``"first"``.
        device_class: the class that steps what stays on the device. ``None``: the same.
        step_in_backward: step each held parameter as soon as its gradient has come, so that the host's work is hidden
            behind backward: for loops in which nothing is done to gradients, parameters and settings between one
            backward and :meth:`step`. Accumulating, clipping, scaling and whatever else is done to them are errors when
            they are met; who reads parameters there finds some that were stepped. A backward that fails has stepped
            some parameters. No ``.data`` of a parameter, nor a detached one in code that is recomputed, may be read in
            backward after its gradient has come.
        defaults: for the class: ``lr=3e-4``. With two classes each gets those that it takes.

    Raises:
        UsageError: an argument that cannot be meant.
        UnsupportedError: ``SparseAdam``, ``LBFGS``; a parameter whose elements overlap; with ``tier="disk"`` or
            ``step_on="device"`` a class that is not torch's, since it steps all parameters in one call; both together.
        SpillPathError: no spill file can be made.

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
        fraction: Fraction = None,
        slowdown: float = 0.05,
        device_budget: int | str | None = None,
        master_dtype: MasterDtype = "auto",
        offload_gradients: bool = True,
        tier: str = "host",
        step_on: str = "host",
        threads: int | None = None,
        session: Session | None = None,
        hold: str = "last",
        device_class: type[Optimizer] | None = None,
        step_in_backward: bool = False,
        **defaults: Any,
    ) -> None:
        self._kind = Kind.of(optimizer_class)
        if device_class is None:
            device_class = optimizer_class
        Kind.of(device_class, what="device_class")
        self._class = optimizer_class
        self._ready = False
        self._closed = False
        self._state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        self._shown: dict[torch.Tensor, Shown] = {}
        """What is in there of states that there are."""
        self._unseen = False
        """Whether a step has failed: what states are now is still to be shown."""
        arguments = Arguments.of(optimizer_class, device_class, defaults)
        self._given = arguments.host
        self._choices = Choices(
            fraction=fraction,
            slowdown=slowdown,
            device_budget=device_budget,
            master_dtype=master_dtype,
            offload_gradients=offload_gradients,
            tier=tier,
            step_on=step_on,
            threads=threads,
            hold=hold,
            step_in_backward=step_in_backward,
        )
        if self._choices.finds_fraction and device_class is not optimizer_class:
            raise UsageError(
                "device_class: got another one than optimizer_class with fraction='auto', expected the same: what "
                "moves to the device takes its state along"
            )
        if step_in_backward and not self._kind.alone:
            raise UnsupportedError(
                f"got step_in_backward=True with {optimizer_class.__name__}, expected a class of torch.optim: another "
                f"may step all parameters in one call"
            )
        if session is not None and not isinstance(session, Session):
            raise UsageError(f"session: got {session!r}, expected a spillway.Session, or None for the default one")
        self._session = session if session is not None else Session.default()
        self._shared: dict[torch.device, Shared] = {}
        self._lanes: tuple[HostLane, HostLane] | None = None
        self._held: dict[torch.Tensor, Held] = {}
        self._coming: set[Held] = set()
        self._budget = self._choices.budget
        self._balance = Balance(slowdown) if self._choices.finds_fraction else None
        self._early = EarlySteps(self._step_early) if step_in_backward else None
        self._overlapping: list[ForwardOverlap] = []
        self._shelf = make_shelf(
            optimizer_class,
            arguments.host,
            tier=tier,
            step_on=step_on,
            hands=hands_of(self._choices.threads_of_step)[0],
            for_the_host=self._settings,
            for_the_device=self._settings_there,
        )
        self._forecast = Forecast(device_class, for_host(arguments.device))
        self._device = DevicePart(device_class, arguments.device, arguments.own)
        self._older = self._last = self._now = self._shelf.tally()
        self._stop = contextlib.ExitStack()
        super().__init__(params, arguments.defaults)
        self._place(list(self._parameters()))
        self._ready = True

    # What an optimizer does.

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        The host computes; what is called after this finds the new values, on the streams that wait for them. The call
        itself returns when all is queued.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._early is None or not self._early.begun:
            self.synchronize()
            self._take_edits()
        if self._balance is not None:
            self._choose(self._balance)
        with torch.no_grad(), label("optimizer step"), contextlib.ExitStack() as unless_stepped:
            unless_stepped.callback(self._show_later)
            self._queue_step()
            self._device.step(self.param_groups)
            for parameter in self._device:
                self._show(parameter)
            here = [one for one in self._coming if not self._is_overlapped(one.parameter)]
            with contextlib.ExitStack() as stack:
                if len(here) == len(self._coming):
                    stack.callback(self._finish)
                self._arrive(here)
            unless_stepped.pop_all()
        return loss

    def synchronize(self) -> None:
        """Let compute wait for all parameters that are on their way back.

        Only needed where :meth:`overlap_forward` is used and a parameter is read otherwise than by calling a module.

        Raises:
            Whatever went wrong in the step.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(self._finish)
            self._arrive(list(self._coming))

    def _finish(self) -> None:
        """All that was stepped is in its place."""
        with contextlib.ExitStack() as stack:
            for tally in {self._now, self._last}:
                stack.callback(tally.finish)

    @property
    def fraction(self) -> float:
        """Of all elements, how many are stepped on the host."""
        sizes = {parameter: local_of(parameter).numel() for _, parameter in self._parameters()}
        return sum(sizes[parameter] for parameter in self._held) / max(1, sum(sizes.values()))

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
        return self._last.stats()

    def close(self) -> None:
        """Bring gradients back, take hooks off the parameters, give memory back. The state is gone.

        Where the session was closed before, the gradients are gone, too.
        """
        # The last of these first, and all of them whatever goes wrong in one.
        with contextlib.ExitStack() as stack:
            stack.callback(self._device.close)
            stack.callback(self._shown.clear)
            stack.callback(self._state.clear)
            stack.callback(self._held.clear)
            stack.callback(self._shelf.close)
            for shared in self._shared.values():
                stack.callback(shared.close, lost=self._session.closed)
            for held in self._held.values():
                stack.callback(held.give_up)
            stack.callback(self._stop.close)
            for held in self._held.values():
                stack.callback(held.unhook)
            if not self._session.closed:
                for held in self._held.values():
                    stack.callback(self._bring_back, held)
                stack.callback(self.synchronize)
            self._closed = True

    def _check_open(self) -> None:
        self._session.check_open()
        if self._closed:
            raise UsageError(
                "got an OffloadedOptimizer that is closed, expected an open one: its state is gone; make a new one, "
                "and close() after the last state_dict()"
            )

    def _check_usable(self) -> None:
        self._check_open()
        if any(shared.traffic.backend.is_capturing() for shared in self._shared.values()):
            raise UnsupportedError("got a step in a CUDA graph's capture, expected it outside: the host computes")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "got an OffloadedOptimizer to be copied or pickled, expected its state_dict() to be; another optimizer, "
            "made over the other parameters, loads that"
        )

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's state and step are on the host."""
        return parameter in self._held

    def divide(self, fraction: float) -> None:
        """From the next step on, so many of all elements are stepped on the host: state moves there, or back.

        ``spillway.attach(model, budget=..., optimizer=...)`` calls it with what the plan says. In a process group, all
        ranks have to call it with the same number, between two steps.

        Args:
            fraction: from 0 to 1, as for the constructor.

        Raises:
            UsageError: for another number; with ``fraction="auto"``, a ``device_budget`` or ``step_in_backward=True``,
                which say it, too.

        Example:
            >>> optimizer.divide(0.5)  # doctest: +SKIP
        """
        self._check_usable()
        if self._balance is not None or self._budget is not None or self._early is not None:
            raise UsageError(
                "divide: got an optimizer with fraction='auto', a device_budget or step_in_backward=True, expected one "
                "with a number, or no fraction at all; leave that out"
            )
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise UsageError(f"fraction: got {fraction!r}, expected a number from 0 (none on the host) to 1 (all)")
        self.synchronize()
        self._take_edits()
        for shared in self._shared.values():
            # What was queued of masters is done.
            shared.lane.run(_nothing).finish()
        self._divide(float(fraction))
        # What was seen of steps was seen of others.
        self._older = self._last = self._now = self._shelf.tally()

    def profile(self) -> OptimizerProfile | None:
        """What it costs to step all of the elements on the host, and to have them on the device; for planning.

        ``None`` until the last of two steps was one in which all were stepped on the host. Waits for the device.
        """
        # What is for planning takes a while to import.
        from spillway.planning.profile import OptimizerProfile

        self.synchronize()
        stats = self._last.stats()
        if self._older is self._last or self._held.keys() < set(self._counted()) or not self._older.on_host:
            return None
        parts = {parameter: local_of(parameter) for parameter in self._counted()}
        of_group = {parameter: index for index, parameter in self._parameters()}
        return OptimizerProfile(
            state_bytes=sum(self._state_bytes(of_group[parameter], parameter) for parameter in parts),
            gradient_bytes=sum(part.nbytes for part in parts.values()),
            step_bytes=sum(
                part.numel() * self._choices.work_dtype(parameter).itemsize
                for parameter, part in parts.items()
                if self._choices.work_dtype(parameter) != part.dtype
            ),
            host_seconds=stats.host_seconds,
            stall_seconds=stats.stall_seconds,
        )

    # State.

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """Of each parameter, as the plain optimizer has it; with its master. Waits for the last step.

        What lies on disk comes to host memory when a value of it is asked for, and is there until the next step.
        """
        if self._ready and not self._closed:
            self.synchronize()
            self._show_unseen()
            if self._kind.begins_with_state:
                self._begin_states()
        return self._state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        self._state = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({name: value for name, value in state.items() if name != "state"})
        self._state = state["state"]

    def _take_edits(self) -> None:
        """States that somebody put in the place of others are what the next step begins with."""
        self._show_unseen()
        for _group, parameter in self._parameters():
            now, shown = self._state.get(parameter), self._shown.get(parameter)
            if shown is not None and shown.is_as_shown() and now is shown:
                continue
            if shown is None and not now:
                continue
            self.synchronize()
            state = dict(now or {})
            check_shapes(state, parameter, fused=bool(self._kind.fused))
            held = self._held.get(parameter)
            if held is None:
                self._device.put_state(parameter, state, self._settings_on_device(parameter))
            else:
                self._shelf.put([Loading(held, state)])
            self._show(parameter)

    def refresh_masters(self) -> None:
        """The next step takes all masters from their parameters, whatever they say.

        Each step reads its parameters anyway. This drops the bits that masters have beyond them, too.
        """
        if self._early is not None:
            self._early.check_none("refresh_masters()")
        self.synchronize()
        for held in self._held.values():
            self._shelf.refresh(held)
        self._device.refresh_masters()

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's, which loads it; masters are an entry ``"master"`` of a parameter's state.

        The tensors are on the host, and those that are stepped: copy what is to be kept while training goes on. With
        ``tier="disk"`` all of them are read, into memory of their own.
        """
        self._check_open()
        if self._early is not None:
            self._early.check_none("state_dict()")
        self.synchronize()
        self._take_edits()
        if self._kind.begins_with_state:
            self._begin_states()
        held = list(self._held.values())
        whole = {one.parameter: state for one, state in zip(held, self._shelf.whole(held), strict=True) if state}
        shown, parameters = self._state, [parameter for _, parameter in self._parameters()]
        self._state = defaultdict(dict, {key: value for key, value in shown.items() if key not in self._shown})
        for parameter in parameters:
            state = whole.get(parameter, {}) if parameter in self._held else self._device.state_of(parameter)
            if state:
                self._state[parameter] = _as_seen(parameter, state)
        try:
            return super().state_dict()
        finally:
            self._state = shown

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, of this class or of the plain one; nothing goes by way of the device.

        Masters come from the state if it has them and they say, in the parameter's own type, what the parameter says at
        the next step; else they are taken from the parameter.
        """
        self._check_usable()
        if self._early is not None:
            self._early.check_dropped(self._coming)
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
        if self._early is not None:
            self._early.begin_anew()

    def _put_states(self, saved: Saved) -> Callable[[Optimizer], None]:
        def put(_: Optimizer) -> None:
            loading = []
            for (_group, parameter), state in zip(self._parameters(), saved.in_order(), strict=True):
                held = self._held.get(parameter)
                if held is None:
                    self._device.put_state(parameter, state, self._settings_on_device(parameter))
                else:
                    held.check()
                    loading.append(Loading(held, state))
            self._shelf.put(loading)
            for _group, parameter in self._parameters():
                self._show(parameter)

        return put

    def _begin_states(self) -> None:
        new = [parameter for _, parameter in self._parameters() if parameter not in self._shown]
        self._shelf.begin([self._held[parameter] for parameter in new if parameter in self._held])
        for parameter in new:
            if parameter not in self._held:
                self._device.begin_state(parameter, self._settings_on_device(parameter))
            self._show(parameter)

    def _settings_on_device(self, parameter: torch.Tensor) -> dict[str, Any]:
        group = next(group for group in self.param_groups if any(one is parameter for one in group["params"]))
        return {name: value for name, value in group.items() if name != "params"}

    def _show_later(self) -> None:
        self._unseen = True

    def _show_unseen(self) -> None:
        if self._unseen:
            self._unseen = False
            for _, parameter in self._parameters():
                self._show(parameter)

    def _show(self, parameter: torch.Tensor) -> None:
        """Let it be seen what a parameter's state is now."""
        held = self._held.get(parameter)
        state = self._device.state_of(parameter) if held is None else self._shelf.shown(held)
        if not state:
            self._shown.pop(parameter, None)
            self._state.pop(parameter, None)
            return
        me = weakref.ref(self)

        def fetch() -> State:
            optimizer = me()
            if optimizer is None or held is None or optimizer._held.get(parameter) is not held:
                raise UsageError(
                    "got a state of an OffloadedOptimizer that is closed, or of a parameter whose state has moved, "
                    "expected one that is there; ask for optimizer.state[parameter] again, and close() last"
                )
            optimizer.synchronize()
            return _as_seen(parameter, optimizer._shelf.opened(held))

        shown = self._shown.setdefault(parameter, Shown())
        shown.show(_as_seen(parameter, state), fetch)
        self._state[parameter] = shown

    # Where parameters are.

    def _parameters(self) -> Iterator[tuple[int, torch.Tensor]]:
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                yield index, parameter

    def _place(self, parameters: Sequence[tuple[int, torch.Tensor]]) -> None:
        if self._kind.alone:
            check_parameters(self._class, [parameter for _, parameter in parameters], self._given)
        left = self._budget
        if left is None:
            on_the_host = self._on_the_host([parameter for _, parameter in parameters], self._choices.first_fraction)
        else:
            on_the_host, left = self._beyond_budget(parameters, left)
        # All of them are made before the first is taken: one may be refused.
        held = [self._made(group, one) for (group, one), here in zip(parameters, on_the_host, strict=True) if here]
        for one in held:
            self._hold(one)
        for group, parameter in parameters:
            if parameter not in self._held:
                self._device.add(parameter, group, self._choices.work_dtype(parameter))
        self._budget = left

    def _beyond_budget(self, parameters: Sequence[tuple[int, torch.Tensor]], budget: int) -> tuple[list[bool], int]:
        """Which are held, and what is left of the budget."""
        may_stay = counted([local_of(parameter).device for _, parameter in parameters])
        sizes = [
            self._state_bytes(group, parameter) if counts else 0
            for (group, parameter), counts in zip(parameters, may_stay, strict=True)
        ]
        held = [beyond or not counts for beyond, counts in zip(held_beyond(sizes, budget), may_stay, strict=True)]
        return held, budget - sum(size for size, is_held in zip(sizes, held, strict=True) if not is_held)

    def _on_the_host(self, parameters: Sequence[torch.Tensor], fraction: float) -> list[bool]:
        parts = [local_of(parameter) for parameter in parameters]
        may_stay = counted([part.device for part in parts])
        sizes = [part.numel() if counts else 0 for part, counts in zip(parts, may_stay, strict=True)]
        taken = held_of(sizes, fraction, last_first=self._choices.hold == "last")
        return [is_taken or not counts for is_taken, counts in zip(taken, may_stay, strict=True)]

    def _state_bytes(self, group: int, parameter: torch.Tensor) -> int:
        local, work = local_of(parameter), self._choices.work_dtype(parameter)
        master = 0 if work == local.dtype else local.numel() * work.itemsize
        return master + self._forecast.nbytes(local.shape, work, self.param_groups[group])

    def _made(self, group: int, parameter: torch.Tensor) -> Held:
        work = self._choices.work_dtype(parameter)
        device = local_of(parameter).device
        cut = self._is_cut(self.param_groups[group], work, device)
        return Held(parameter, group, self._shared_of(device), work, cut=cut)

    def _hold(self, held: Held) -> None:
        parameter = held.parameter
        self._held[parameter] = held
        self._shelf.add(held)
        if self._choices.offload_gradients and (parameter.is_floating_point() or parameter.is_complex()):
            me, mine = weakref.ref(self), weakref.ref(held)

            def came(_: torch.Tensor) -> None:
                optimizer, of = me(), mine()
                if optimizer is not None and of is not None:
                    optimizer._came(of)

            # One that is frozen may be unfrozen later, and takes a hook only if it is not.
            frozen = not parameter.requires_grad
            held.hook = parameter.requires_grad_(True).register_post_accumulate_grad_hook(came)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(not frozen)
            held.finalizer = weakref.finalize(self, held.hook.remove)

    def _choose(self, balance: Balance) -> None:
        """Let another fraction be on the host, if what was seen says so."""
        if many_processes():
            raise UnsupportedError(
                "fraction: got 'auto' in a process group, expected a number, the same on every rank; find it in a run "
                "of one process (optimizer.fraction says it)"
            )
        # The device has not come to the last step's waits yet.
        chosen = balance.note(self._older.seen(), self.fraction)
        if chosen is None:
            return
        self._divide(chosen)

    def _counted(self) -> list[torch.Tensor]:
        """Those of which a fraction may stay on the device, in the order of the groups."""
        parameters = [parameter for _, parameter in self._parameters()]
        may_stay = counted([local_of(parameter).device for parameter in parameters])
        return [parameter for parameter, may in zip(parameters, may_stay, strict=True) if may]

    def _divide(self, fraction: float) -> None:
        parameters = list(self._parameters())
        on_the_host = self._on_the_host([parameter for _, parameter in parameters], fraction)
        for (group, parameter), here in zip(parameters, on_the_host, strict=True):
            held = self._held.get(parameter)
            if here and held is None:
                self._move_to_host(group, parameter)
            elif not here and held is not None:
                self._move_to_device(held)

    def _move_to_host(self, group: int, parameter: torch.Tensor) -> None:
        held = self._made(group, parameter)
        with contextlib.ExitStack() as undo:
            undo.callback(self._let_go, held)
            self._hold(held)
            self._shelf.put([Loading(held, self._device.state_of(parameter))])
            undo.pop_all()
        self._device.discard(parameter)
        self._show(parameter)

    def _move_to_device(self, held: Held) -> None:
        (state,), parameter = self._shelf.whole([held]), held.parameter
        with contextlib.ExitStack() as undo:
            undo.callback(self._device.discard, parameter)
            self._device.add(parameter, held.group, held.work_dtype)
            self._device.put_state(parameter, state, self.param_groups[held.group])
            undo.pop_all()
        self._bring_back(held)
        self._let_go(held)
        self._show(parameter)

    def _let_go(self, held: Held) -> None:
        """It is not stepped on the host any more."""
        self._held.pop(held.parameter, None)
        self._shelf.discard(held)
        held.give_up()

    def _is_cut(self, group: dict[str, Any], work: torch.dtype, device: torch.device) -> bool:
        if not self._shelf.steps_on_device:
            return self._is_fused(group, work)
        # What has a fused kernel computes each element by itself: on an accelerator to the same bits in any company.
        return work in self._kind.fused and (device.type != "cpu" or bool(group.get("fused")))

    def _is_fused(self, group: dict[str, Any], work: torch.dtype) -> bool:
        return work in self._kind.fused and group.get("fused") is not False

    def _shared_of(self, device: torch.device) -> Shared:
        shared = self._shared.get(device)
        if shared is None:
            runtime = self._session.runtime(device)
            if not isinstance(runtime, DeviceRuntime):
                raise UnsupportedError("got a step in a CUDA graph's capture, expected it outside: the host computes")
            shared = self._shared[device] = Shared(
                Traffic(runtime),
                *self._threads_of(runtime),
                self._session.check_open,
                pins_sums=self._shelf.steps_on_device,
            )
        return shared

    def _threads_of(self, runtime: DeviceRuntime) -> tuple[HostLane, HostLane]:
        """The host lane and its hands, the same for all devices: they share the CPUs, and who steps there."""
        if self._lanes is None:
            hands, each = hands_of(self._choices.threads_of_step)
            lane = runtime.backend.host_lane("optimizer", begin=begin_with(self._choices.threads_of_step))
            some = runtime.backend.host_lane("optimizer-hand", threads=hands, begin=begin_with(each))
            self._lanes = lane, some
        return self._lanes

    def _settings(self, held: Held) -> dict[str, Any]:
        group = self.param_groups[held.group]
        return on_host(group, fused=self._is_fused(group, held.work_dtype))

    def _settings_there(self, held: Held) -> dict[str, Any]:
        group = self.param_groups[held.group]
        return {name: value for name, value in group.items() if name not in ("params", "param_names")}

    # A step.

    def _came(self, held: Held) -> None:
        """A gradient was accumulated."""
        gradient = held.parameter.grad
        if gradient is None or gradient.requires_grad or isinstance(local_of(gradient), AwayGradient):
            return
        if is_distributed(held.parameter) or not many_processes():
            if self._early is not None:
                if not self._early.begun:
                    self._take_edits()
                self._early.check(held)
            self._take_gradient(held, gradient)
            if self._early is not None:
                self._early.came(held, self.param_groups)

    def _step_early(self, held: Sequence[Held], stepped: set[Held]) -> None:
        """Step parameters in backward."""
        self._check_usable()
        with torch.no_grad(), label("optimizer step"):
            # What the forward has not waited for is of the step before.
            self._arrive(self._coming - stepped)
            before = {one: one.coming for one in held}
            self._shelf.prepare(held)
            try:
                self._shelf.step([Turn(one, one.gradient.snapshot()) for one in held], self._now, overlapped=False)
            finally:
                queued = [one for one in held if one.coming is not before[one]]
                stepped.update(queued)
                self._coming.update(queued)

    def _take_gradient(self, held: Held, gradient: torch.Tensor) -> None:
        local = local_of(gradient)
        home = held.another_gradient()
        home.begin(local)
        self._put_gradient(held, home.stand_in(local))

    def _bring_back(self, held: Held) -> None:
        if self._early is not None and held in self._early.stepped:
            # Whoever goes on with another optimizer would step by it again.
            self._put_gradient(held, None)
            return
        gradient = held.parameter.grad
        away = None if gradient is None else local_of(gradient)
        if isinstance(away, AwayGradient) and away.stands_for(held.gradient):
            # Nobody can have the gradient of a parameter that is of another shape now.
            self._put_gradient(held, held.gradient.restore() if held.is_as_it_was() else None)

    def _put_gradient(self, held: Held, local: torch.Tensor | None) -> None:
        gradient = held.parameter.grad
        if local is not None and gradient is not None and is_distributed(gradient):
            put_local(gradient, local)
        else:
            held.parameter.grad = local

    def _queue_step(self) -> None:
        stepped = set() if self._early is None else self._early.end(self.param_groups)
        left = [held for held in self._held.values() if held not in stepped]
        self._shelf.prepare(held for held in left if held.parameter.grad is not None)
        turns = list(self._turns(left))
        for shared in self._shared.values():
            shared.expected = max((turn.held.gradient.count for turn in turns), default=0)
        self._shelf.step(turns, self._now, overlapped=bool(self._overlapping))
        self._coming = stepped.union(turn.held for turn in turns)
        if not self._shelf.steps_on_device and any(turn.held.gradient.away() is None for turn in turns):
            # What stays may be written to as soon as this returns.
            for shared in self._shared.values():
                shared.traffic.settle()

    def _turns(self, some: Iterable[Held]) -> Iterator[Turn]:
        for held in some:
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
            elif self._shelf.steps_on_device:
                held.another_gradient()
            elif self._choices.offload_gradients and not gradient.requires_grad:
                self._take_gradient(held, gradient)
            else:
                held.another_gradient().begin(local)
            if self._shelf.steps_on_device:
                yield Turn(held, held.gradient.for_device(local))
            else:
                yield Turn(held, held.gradient.snapshot())

    def _end_failed_step(self, error: type[BaseException] | None, *_: object) -> None:
        """Where one has failed, the others of its step end, too: it is told once."""
        if error is not None:
            self._show_later()
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
            self._show(one.parameter)
        if arriving and not self._coming:
            for index, written in self._shelf.written().items():
                self.param_groups[index].update(written)
            self._now.end(self._shared.values())
            self._older, self._last, self._now = self._last, self._now, self._shelf.tally()


def _as_seen(parameter: torch.Tensor, state: State) -> State:
    """A state whose tensors are distributed as the parameter is."""
    shape = local_of(parameter).shape
    return {
        key: like(value, parameter)
        if isinstance(value, torch.Tensor) and value.shape == shape and value.ndim > 0
        else value
        for key, value in state.items()
    }


def _nothing() -> None:
    """A task to wait for, behind all others."""
