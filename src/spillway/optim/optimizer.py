"""The public optimizer whose state is on the CPU."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from spillway.checkpointing.blocks import Blocks
from spillway.errors import UnsupportedError, UsageError
from spillway.optim.moves import Moves
from spillway.optim.optimizer_class import ClassArguments, ClassTraits, State
from spillway.optim.options import Fraction, MasterDtype, Options, check_fraction
from spillway.optim.placement import IN_CAPTURE, Placement
from spillway.optim.states import StateViews, check_shapes, loaded_copies, of_this_torch
from spillway.optim.stepping import StepQueue
from spillway.optim.tensors import local_of
from spillway.runtime.backend import on_error
from spillway.session import Session
from spillway.types import OptimizerStats

if TYPE_CHECKING:
    from spillway.parameters.homes import StreamedParameter
    from spillway.planner.profile import OptimizerProfile

_READ = "a read of optimizer.state"


class OffloadedOptimizer(Optimizer):
    """An optimizer of a class of your choice, with its state and its step on the CPU.

    It is a ``torch.optim.Optimizer``, with param groups, ``add_param_group``, learning rate schedulers, step hooks,
    closures, ``zero_grad`` and ``state_dict``. The GPU keeps the parameters, and gradients until they are offloaded.
    The notes of ``spillway.optim`` describe a step.

    Gradients are offloaded during backward, as soon as each is accumulated. ``p.grad`` is then a tensor whose bytes are
    on the CPU. Later micro-batches are added there, in the type of the fp32 master weight.
    ``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` work on it without reloading it. Gradients of FSDP2
    and tensor parallel (``DTensor``) are offloaded in the same way. Plain parameters in a process group are offloaded
    in ``step()``, since ``DistributedDataParallel`` may still reduce them.

    You may write to parameters before :meth:`step` by any means: ``load_state_dict``, ``p.data.clamp_()``, NumPy. Each
    step reads the parameter itself. ``optimizer.state`` has the plain optimizer's entries between steps, and your edits
    of it count, too.

    Args:
        params: parameters, or groups of them, as for any optimizer.
        optimizer_class: a class of ``torch.optim``, or your own, which then steps all parameters in one call. A class
            with a fused CPU kernel uses it (``Adam``, ``AdamW``, ``Adagrad``, and ``SGD`` in ``float32`` and
            ``float64``), unless you give ``fused=False``. Others use their implementation with a loop, never
            ``foreach``.
        fraction: the share of all elements that the CPU steps. The rest keeps state and step on the GPU; both step at
            the same time. ``"auto"`` begins with all of them, and chooses as many as slow a step down by no more than
            ``slowdown``, from the times of the first steps. :attr:`fraction` is the result. Two runs may choose
            different ones, and the CPU's and the GPU's arithmetic differ in the last bits.
            Parameters on the CPU, beside others on a GPU, are always stepped on the CPU, and are not counted.
        slowdown: how much ``"auto"`` may slow a step down: 0.05 for 5 %.
        device_budget: most bytes of state and master weights that stay on the GPU, instead of a fraction: ``"2GiB"``.
            The first parameters that fit are stepped there.
        master_dtype: the type of the master weights of narrower parameters. ``"auto"``: ``float32`` for ``bfloat16``
            and ``float16``. ``None``: no master weights, each parameter is stepped in its own type.
        offload_gradients: whether gradients are offloaded during backward. If not, they stay on the GPU until they are
            cleared. A step on the CPU copies them, and one on the GPU reads them there.
        tier: the place of master weights and state: ``"host"``, CPU memory, or ``"disk"``, the session's spill file,
            from which they are streamed to CPU memory to be stepped.
        step_on: the place of the step: ``"cpu"``, ``"gpu"`` or ``"auto"``. On the GPU, master weights and state are in
            pinned CPU memory, and are streamed to the GPU for the step, beside other work of the GPU. The session's
            in-flight limit (512 MiB by default) bounds those that are there at once. The class runs with your own
            ``fused`` and ``foreach``. Large parameters of ``Adam``, ``AdamW``, ``SGD`` and ``Adagrad`` are streamed in
            pieces, those of other classes whole. ``"auto"`` divides the parameters between the two, which step at the
            same time.
        cpu_share: the share of elements that the CPU steps with ``step_on="auto"``, from 0 to 1. The GPU steps the
            others. ``None``: the GPU begins alone. From the ninth step on, the CPU steps a quarter, and then half, as
            long as training steps get faster. :attr:`cpu_share` is the result. Without a GPU it is 1. Two runs may
            choose different shares. Pass the number to both, and they have the same bits.
        threads: for the step. ``None``: one for each CPU of the process, shared by the ranks of the machine.
        session: its pinned memory is used. ``None``: the default one.
        hold: the parameters that the fraction takes first: the ``"last"``, whose gradients come first in backward, or
            the ``"first"``.
        device_class: the class that steps the parameters on the GPU. ``None``: the same.
        step_in_backward: step each parameter as soon as its gradient has arrived, so that the CPU's work, or the copies
            of a step on the GPU, are hidden behind backward. It is for loops that change no gradient, parameter or
            setting between backward and :meth:`step`. Clipping, scaling and other changes are errors. Several backwards
            before a step need :meth:`accumulate`, or :class:`~spillway.Accumulator`, which calls it. Code that reads
            parameters during backward may see updated values, and so may a ``.data`` or detached parameter in
            recomputed code. A backward that fails has stepped some parameters.
        defaults: for the class: ``lr=3e-4``. With two classes each gets those that it takes.

    Raises:
        UsageError: an argument of the wrong type or range.
        UnsupportedError: ``SparseAdam``, ``LBFGS``; a parameter whose elements overlap; ``tier="disk"`` together with
            ``step_on="gpu"`` or ``"auto"``, or one of these with a class that is not torch's.
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
        step_on: str = "cpu",
        cpu_share: float | None = None,
        threads: int | None = None,
        session: Session | None = None,
        hold: str = "last",
        device_class: type[Optimizer] | None = None,
        step_in_backward: bool = False,
        **defaults: Any,
    ) -> None:
        device_class = optimizer_class if device_class is None else device_class
        ClassTraits.of(optimizer_class)
        ClassTraits.of(device_class, what="device_class")
        arguments = ClassArguments.of(optimizer_class, device_class, defaults)
        options = Options(
            fraction=fraction,
            slowdown=slowdown,
            device_budget=device_budget,
            master_dtype=master_dtype,
            offload_gradients=offload_gradients,
            tier=tier,
            step_on=step_on,
            cpu_share=cpu_share,
            threads=threads,
            hold=hold,
            step_in_backward=step_in_backward,
        )
        if fraction == "auto" and device_class is not optimizer_class:
            raise UsageError(
                "device_class differs from optimizer_class with fraction='auto', but a parameter takes its state along "
                "to the GPU. Leave device_class out, or give a number."
            )
        if session is not None and not isinstance(session, Session):
            raise UsageError(f"session: got {session!r}, expected a spillway.Session, or None for the default one")
        self._ready = False
        self._closed = False
        self._session = session if session is not None else Session.default()
        groups = lambda: self.param_groups  # noqa: E731
        self._placement = Placement(optimizer_class, device_class, arguments, options, self._session, groups)
        self._views = StateViews(self._placement.state_of, self._open_state, notes_writes=step_in_backward)
        self._steps = StepQueue(self._placement, self._views, self._check_usable)
        super().__init__(params, arguments.defaults)
        self._steps.follow_groups()
        self._moves = Moves(self._placement, self._steps, self._views)
        self._session.finish_at_close(self)
        self._ready = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient.

        The CPU computes, and the call returns when all is queued. Streams wait for the new values before later code.
        """
        self._check_usable()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._moves.check_alone()
        self._steps.begin()
        self._steps.run()
        self._moves.step_is_queued()
        return loss

    def synchronize(self) -> None:
        """Let compute wait for all parameters that the last step is still copying to the GPU.

        You need it only after :meth:`overlap_forward`, to read a parameter otherwise than by calling a module. Errors
        of the step are raised here.
        """
        self._steps.synchronize()

    @property
    def fraction(self) -> float:
        """The share of all elements that the CPU steps."""
        return self._placement.fraction()

    @property
    def cpu_share(self) -> float:
        """The share of elements that the CPU steps, of those whose state is not kept on the GPU.

        With ``step_on="auto"`` it is the number that was given or, after the first steps, the one that was chosen.
        ``cpu_share=`` that number divides the parameters of another run in the same way.
        """
        return self._placement.cpu_share

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's state and step are on the CPU."""
        return parameter in self._placement.held

    def stats(self) -> OptimizerStats:
        """Bytes and seconds of the last step."""
        self.synchronize()
        return self._steps.last.stats()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as for any optimizer."""
        self._check_open()
        if not self._ready:
            super().add_param_group(param_group)
            return
        self._steps.follow_groups()
        super().add_param_group(param_group)
        with on_error(self.param_groups.pop):
            self._steps.follow_groups()

    def overlap_forward(self, model: torch.nn.Module, *, blocks: Blocks | None = None) -> None:
        """From now on :meth:`step` returns early, and each block waits for its parameters when it is called.

        Call :meth:`synchronize` before you read a parameter otherwise than by calling its module, for example to copy
        the model or to average its weights. ``state_dict`` and ``load_state_dict`` of the model and of the optimizer do
        so themselves. :meth:`step` waits for parameters that are not in the model. A copy of the model has no such
        hooks.

        Args:
            model: whose parameters these are; as it is called, with all wrappers.
            blocks: which of its modules are blocks, as for :func:`spillway.attach`. ``None``: those that repeat.

        Raises:
            UsageError: if there are no blocks.
        """
        self._check_open()
        self._steps.overlap(model, blocks)

    @property
    def steps_in_backward(self) -> bool:
        """Whether parameters step in backward: ``step_in_backward=True``."""
        return self._placement.options.step_in_backward

    def accumulate(self) -> AbstractContextManager[None]:
        """A context for all backwards but the last one before :meth:`step`, with ``step_in_backward=True``.

        Inside, gradients are added up in ``p.grad``, on the GPU and in the parameter's type, and no parameter is
        stepped. The last backward is outside of it, and steps. :class:`~spillway.Accumulator` does this itself.
        Without ``step_in_backward=True`` it does nothing.

        Example:
            >>> model = torch.nn.Linear(64, 64)
            >>> optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4, step_in_backward=True)
            >>> with optimizer.accumulate():
            ...     model(torch.randn(8, 64)).sum().backward()
            >>> model(torch.randn(8, 64)).sum().backward()
            >>> optimizer.step()
            >>> optimizer.zero_grad()
        """
        return self._steps.early.within(is_paused=True)

    def last_backward(self, complete: Callable[[torch.nn.Parameter], object]) -> AbstractContextManager[None]:
        """A context for the last backward, for :class:`~spillway.Accumulator`.

        Parameters that step in this backward are passed to ``complete`` before, which may set another gradient. The
        caller handles all others. ``complete`` must not write to a gradient in place: autograd may have taken over
        memory that the rest of backward reads.
        """
        return self._steps.early.within(complete=complete)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as for any optimizer."""
        super().zero_grad(set_to_none)
        early = self._steps.early
        if not early.stepped:
            # A backward that failed, or was discarded, before it stepped a parameter.
            early.reset()

    def divide(self, fraction: float) -> None:
        """From the next step on, the CPU steps this share of all elements, from 0 to 1. State moves accordingly.

        ``spillway.attach(model, budget=..., optimizer=...)`` calls it with the plan's number. In a process group, all
        ranks have to call it with the same number, between two steps.

        Raises:
            UsageError: for another number; with ``fraction="auto"``, a ``device_budget`` or ``step_in_backward=True``,
                which decide it themselves.
        """
        self._check_usable()
        options = self._placement.options
        if self._placement.streamed:
            raise UsageError(
                "divide() of an optimizer whose parameters are streamed, which steps all of them with state in CPU "
                "memory. Call attached.remove() first."
            )
        if options.fraction == "auto" or options.budget is not None or options.step_in_backward:
            raise UsageError(
                "divide() of an optimizer with fraction='auto', a device_budget or step_in_backward=True, which decide "
                "the fraction themselves. Leave these out, or give a number."
            )
        check_fraction(fraction)
        self._steps.finish()
        self._steps.take_edits()
        self._moves.divide(float(fraction))
        self._steps.forget_costs()

    def profile(self) -> OptimizerProfile | None:
        """The cost of stepping all elements on the CPU, and their bytes on the GPU; for planning.

        ``None`` until the CPU has stepped all of them in the last two steps. Waits for the GPU.
        """
        # It takes a while to import.
        from spillway.planner.profile import OptimizerProfile

        self.synchronize()
        steps, counted = self._steps, self._placement.counted()
        on_cpu = self._placement.held.keys()
        is_whole = on_cpu >= {one for _, one in counted} and self._placement.cpu_share == 1
        if steps.older is steps.last or not is_whole or not steps.older.on_host:
            return None
        stats = steps.last.stats()
        parts = [(local_of(parameter), self._placement.options.work_dtype(parameter)) for _, parameter in counted]
        return OptimizerProfile(
            state_bytes=sum(self._placement.state_bytes(group, parameter) for group, parameter in counted),
            gradient_bytes=sum(part.nbytes for part, _ in parts),
            step_bytes=sum(part.numel() * work.itemsize for part, work in parts if work != part.dtype),
            host_seconds=stats.host_seconds,
            stall_seconds=stats.stall_seconds,
        )

    def check_streaming(self) -> None:
        """Raise if parameters cannot be streamed from now on: for ``spillway.attach``.

        Raises:
            UsageError: with a ``fraction`` or a ``device_budget``, whose state stays on the GPU; if a parameter has a
                gradient.
            UnsupportedError: in a process group.
        """
        self._check_usable()
        self._steps.follow_groups()
        self._moves.check_streaming()

    @contextlib.contextmanager
    def moving(self) -> Iterator[dict[torch.Tensor, StreamedParameter | None]]:
        """Inside, parameters may move to another device, or between it and pinned CPU memory.

        ``spillway.attach(model, stream=..., optimizer=...)`` does this. Gives the parameters that are streamed, to be
        changed inside. State and gradients follow a parameter to another device. Gradients that were added up are then
        rounded to the parameter's type.

        Raises:
            UsageError: between a backward that has stepped parameters and its ``step()``.
            TierFullError: there is no memory for the states. The optimizer is as it was, if parameters go back.
        """
        if self._closed or self._session.closed:
            yield self._placement.streamed
            return
        self._check_usable()
        with self._moves.following() as streamed:
            yield streamed

    def refresh_master_weights(self) -> None:
        """The next step takes all fp32 master weights from their parameters, and drops their further bits.

        Without this call a step keeps a master weight whose rounded value is the parameter's.
        """
        self._steps.early.check_none("refresh_master_weights()")
        self.synchronize()
        for held in self._placement.held.values():
            held.store.forget_master(held)
        self._placement.device.refresh_master_weights()

    def close(self) -> None:
        """Reload gradients, remove hooks from parameters, and free all memory. The state is gone.

        If the session was closed before, the gradients are gone, too.
        """
        held = list(self._placement.held.values())
        # In reverse order, and all of them whatever goes wrong in one.
        with contextlib.ExitStack() as stack:
            stack.callback(self._placement.close)
            stack.callback(self._views.clear)
            for context in self._placement.contexts.values():
                stack.callback(context.close, lost=self._session.closed)
            for one in held:
                stack.callback(one.release)
            stack.callback(self._steps.close)
            for one in held:
                stack.callback(one.unhook)
            if not self._session.closed:
                for one in held:
                    stack.callback(self._steps.bring_back, one)
                stack.callback(self.synchronize)
            self._closed = True

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """Each parameter's state as the plain optimizer has it, with its master weight. Waits for the last step.

        With ``tier="disk"`` a state is read when you ask for one of its values, and stays in CPU memory until the next
        step.
        """
        if self._ready and not self._closed:
            self._steps.early.check_dropped(_READ)
            self.synchronize()
            self._steps.follow_groups()
            self._views.show_all(parameter for _, parameter in self._placement.parameters())
            self._begin_states()
        return self._views.state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if self._ready and not self._closed:
            # The last step shows its states when it ends.
            self._steps.early.check_dropped("a new optimizer.state", self._steps.pending)
            self.synchronize()
        self._views.state = state

    def state_dict(self) -> dict[str, Any]:
        """The plain optimizer's state dict, which loads it. A master weight is an entry ``"master"`` of a state.

        The tensors are on the CPU, and later steps change them: copy what you keep. With ``tier="disk"`` all of them
        are read, into memory of their own.
        """
        self._check_open()
        self._steps.early.check_none("state_dict()")
        self.synchronize()
        self._steps.take_edits()
        self._begin_states()
        seen = self._views.state
        self._views.state = self._views.with_states(self._placement.all_states())
        try:
            return super().state_dict()
        finally:
            self._views.state = seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the plain one. It is not copied to the GPU on its way to the CPU.

        A master weight of the state counts if its rounded value is the parameter's at the next step. Otherwise the
        step makes it from the parameter.
        """
        self._check_usable()
        self._steps.early.check_dropped("load_state_dict()", self._steps.pending)
        self.synchronize()
        self._steps.follow_groups()
        parameters = [parameter for _, parameter in self._placement.parameters()]
        settings = [group.keys() & self.defaults.keys() for group in self.param_groups]
        loaded: list[State] = []

        # The plain class's method would move every state to the GPU, in the parameter's type.
        def take(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            states = state_dict["state"]
            loaded.extend(states.get(one, {}) for group in state_dict["param_groups"] for one in group["params"])
            if self._placement.traits.steps_alone:
                loaded[:] = map(of_this_torch, loaded)
            else:
                types = map(self._placement.options.work_dtype, parameters)
                loaded[:] = loaded_copies(zip(parameters, types, loaded, strict=False))
            for parameter, state in zip(parameters, loaded, strict=False):
                check_shapes(state, parameter, fused=bool(self._placement.traits.fused))
            return {**state_dict, "state": {}}

        def put(_: Optimizer) -> None:
            for group, names in zip(self.param_groups, settings, strict=True):
                # A state of an earlier torch has fewer settings.
                for name in names:
                    group.setdefault(name, self.defaults[name])
            self._placement.put_states(list(zip(parameters, loaded, strict=True)))
            for parameter in parameters:
                self._views.show(parameter)

        with contextlib.ExitStack() as stack:
            stack.callback(self.register_load_state_dict_pre_hook(take).remove)
            stack.callback(self.register_load_state_dict_post_hook(put, prepend=True).remove)
            super().load_state_dict(state_dict)
        self._steps.early.reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = state["state"]
        super().__setstate__({name: value for name, value in state.items() if name != "state"})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "An OffloadedOptimizer cannot be copied or pickled: its memory is its own. Make another one over the other "
            "parameters, and load this one's state_dict()."
        )

    def _open_state(self, parameter: torch.Tensor) -> dict[Any, Any]:
        self._steps.early.check_dropped(_READ)
        self.synchronize()
        held = self._placement.held[parameter]
        return held.store.open(held)

    def _begin_states(self) -> None:
        """Show the states of new parameters that the class's constructor makes."""
        if self._placement.traits.begins_with_state:
            new = [parameter for _, parameter in self._placement.parameters() if parameter not in self._views]
            self._placement.begin_states(new)
            for parameter in new:
                self._views.show(parameter)

    def _check_open(self) -> None:
        self._session.check_open()
        if self._closed:
            raise UsageError(
                "got a closed OffloadedOptimizer, whose state is gone. Make a new one, and close() after the last "
                "state_dict()."
            )

    def _check_usable(self) -> None:
        self._check_open()
        if any(context.transfers.backend.is_capturing() for context in self._placement.contexts.values()):
            raise UnsupportedError(IN_CAPTURE)
