"""The public call that checkpoints a function: its saved tensors are dropped, and recomputed in backward."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.utils.checkpoint import CheckpointPolicy

from spillway._torch import (
    disable_dynamo,
    in_backward,
    keep_out,
    refuse_dual_numbers,
    refuse_transforms,
    top_hooks,
    untraced,
    without_dynamo,
)
from spillway.checkpointing.call import CheckpointedCall
from spillway.checkpointing.collector import shapes_of
from spillway.checkpointing.learned import LearnedCalls, LearnedFunction, LearnedFunctions
from spillway.checkpointing.preserved import PreservingCall
from spillway.checkpointing.python_walk import value_of_cell
from spillway.checkpointing.replayable import Arguments, ReplayedFunction, module_of
from spillway.checkpointing.selectors import Choices, Planned, Selector
from spillway.errors import UsageError
from spillway.saved_tensors.handles import in_replay
from spillway.saved_tensors.scopes import current_scope, restore_hooks, scope_of_hooks
from spillway.session import Session
from spillway.types import Decision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from spillway.checkpointing.partition import Partition
    from spillway.checkpointing.python_state import LatestState
    from spillway.saved_tensors.hooks import ForwardScope

Function = TypeVar("Function", bound=Callable[..., Any])

_CHECKS = ("default", "none")
_VERIFIES = ("sampled", "always")
_MOST_KINDS = 16
"""Most kinds of calls of one function that differ in numbers among the arguments."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The options of :func:`recompute` as a value, for :func:`spillway.attach`. See there for each of them.

    Raises:
        UsageError: for options that are invalid or exclude each other, or a group that this process is not in.

    Example:
        >>> how = spillway.Recompute(offload=[spillway.saved_by("attention")])  # doctest: +SKIP
        >>> y = how(block, x, mask)  # doctest: +SKIP
    """

    save: Selector | Sequence[Selector] = ()
    offload: Selector | Sequence[Selector] = ()
    policy: Planned | Callable[..., CheckpointPolicy | bool] | None = None
    use_reentrant: bool = False
    early_stop: bool = True
    preserve_rng_state: bool = True
    determinism_check: str = "default"
    drop_output: bool = False
    partition_inputs: ProcessGroup | DeviceMesh | None = field(default=None, repr=False)
    check_partition: bool = field(default=False, repr=False)
    verify: str = "sampled"
    choices: Choices = field(init=False, repr=False, compare=False)
    partition: Partition | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for option, allowed in (("determinism_check", _CHECKS), ("verify", _VERIFIES)):
            if getattr(self, option) not in allowed:
                raise UsageError(
                    f"{option}: got {getattr(self, option)!r}, expected one of {', '.join(map(repr, allowed))}"
                )
        choices = Choices(self.save, self.offload, self.policy)
        if self.use_reentrant:
            for name, given in (
                ("save", choices.has(Decision.KEEP)),
                ("offload of more than 'inputs'", choices.has(Decision.OFFLOAD)),
                ("policy", self.policy is not None),
                ("drop_output", self.drop_output),
                ("determinism_check='none'", self.determinism_check == "none"),
            ):
                if given:
                    raise UsageError(
                        f"{name} with use_reentrant=True: that mode recomputes everything but inputs, and checks it. "
                        f"Use use_reentrant=False."
                    )
        if self.check_partition and self.partition_inputs is None:
            raise UsageError("check_partition has no effect without partition_inputs, its group. Set both, or none.")
        partition = None
        if self.partition_inputs is not None:
            # Only for ranks that share inputs.
            from spillway.checkpointing.partition import Partition

            partition = Partition(self.partition_inputs, always_checks=self.check_partition)
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "partition", partition)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with these options. Returns its output."""
        return call_checkpointed(self, function, args, kwargs, None)


@overload
def recompute(function: None = None, /, **options: Any) -> Callable[[Function], Function]: ...
@overload
def recompute(function: Callable[..., Any], /, *args: Any, **options: Any) -> Any: ...


def recompute(
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    save: Selector | Sequence[Selector] = (),
    offload: Selector | Sequence[Selector] = (),
    policy: Callable[..., CheckpointPolicy | bool] | None = None,
    use_reentrant: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    drop_output: bool = False,
    partition_inputs: ProcessGroup | DeviceMesh | None = None,
    check_partition: bool = False,
    verify: str = "sampled",
    session: Session | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function, drop its saved tensors, and recompute them in backward.

    Outputs of operators that ``save`` names are kept. Outputs of operators that ``offload`` names are offloaded and
    prefetched. Backward replays only the operators that the other saved tensors need. Gradients are bit for bit those
    of a plain call: random numbers, autocast, batch-norm statistics and routing are the same in the replay.

    The first call of a kind recomputes everything. Its replay records the operators of the function. From the next call
    on, the selected tensors are preserved. After Chen et al. 2016 (checkpointing) and Korthikanti et al. 2022
    (selective recomputation), with offloading as a third choice.

    Args:
        function: a function or module. Without arguments for it, a wrapped function is returned (also as a decorator,
            with options or without).
        *args: its arguments. Tensors in lists, tuples and dictionaries are found. Hooks around the call save them: an
            ``offload`` context offloads them, and so does ``offload=["inputs"]``. A leaf that requires grad stays: its
            graph holds it.
        save: selectors of tensors to keep: see :mod:`spillway.checkpointing.selectors`. A tensor that both name is
            kept. :class:`saved_by` comes last.
        offload: selectors of tensors to offload to CPU memory. CPU tensors are offloaded to disk.
        policy: a policy function of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, instead of
            ``save`` and ``offload``. All six ``CheckpointPolicy`` values are supported.
        use_reentrant: for scripts of the reentrant mode of ``torch.utils.checkpoint``. The mechanism is the same, and
            only inputs can be kept or offloaded.
        early_stop: end the replay with the last tensor that backward wants.
        preserve_rng_state: draw the same random numbers in the replay.
        determinism_check: ``"default"``: recomputed tensors must have the same shape, dtype and device; ``"none"``.
        drop_output: drop the output, too, after its consumer has run, and recompute it for the consumer's backward.
            Needs an :class:`~spillway.offload` context, which sees the consumer save it.
        partition_inputs: a process group, or a mesh of one dimension, whose ranks all call the function with the same
            inputs (tensor parallel). Each rank keeps or offloads an equal part of each input that requires grad, and
            the ranks gather them before the replay.
        check_partition: compare the inputs over that group at each call, which reads them once more and waits for the
            GPU. Otherwise they are compared at the first call of each function.
        verify: ``"always"``: compare the values of each replay with those of forward. ``"sampled"``: compare the first
            call of each function, and one call in 64.
        session: ``None``: the default session.
        **kwargs: keyword arguments for the function, saved like the others.

    Returns:
        The output of the function.

    Raises:
        UsageError: for options that are invalid or exclude each other; on all ranks, if the ranks of
            ``partition_inputs`` are seen to have other inputs.
        RecomputeError: in backward, if a replay differs from forward, or if an output that a policy says must be saved
            is written in place.

    Example:
        >>> y = spillway.recompute(block, x, mask, offload=["inputs", "attention"])  # doctest: +SKIP
    """
    how = Recompute(
        save=save,
        offload=offload,
        policy=policy,
        use_reentrant=use_reentrant,
        early_stop=early_stop,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        drop_output=drop_output,
        partition_inputs=partition_inputs,
        check_partition=check_partition,
        verify=verify,
    )
    if function is None:
        if args or kwargs:
            given = ", ".join([*(f"{each!r:.60}" for each in args), *kwargs])
            raise UsageError(
                f"recompute: got {given:.200} without a function, expected options alone; give the function first, or "
                f"give these to the function that recompute(**options) returns for it"
            )
        return functools.partial(_wrapped, how=how, session=session)
    if not callable(function):
        raise UsageError(f"recompute: got {function!r:.200}, expected a function or a module")
    if not args and not kwargs:
        return _wrapped(function, how=how, session=session)
    return call_checkpointed(how, function, args, kwargs, session)


def _wrapped(function: Callable[..., Any], *, how: Recompute, session: Session | None) -> Callable[..., Any]:
    # A module has no name of its own to take over.
    keep_name = functools.wraps(function) if hasattr(function, "__name__") else lambda call: call

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_checkpointed(how, function, args, kwargs, session)

    return keep_name(call)


def _call_checkpointed(
    how: Recompute,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    session: Session | None,
    profiled: Callable[..., CheckpointedCall] | None = None,
    around: Callable[[], AbstractContextManager[None]] | None = None,
    latest: LatestState | None = None,
) -> Any:
    """:func:`recompute` with its options as a value, and with a context ``around`` each replay.

    ``latest`` is the state of the function's latest call. ``profiled`` makes a call that a profiler listens to.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    refuse_transforms()
    refuse_dual_numbers()
    keep_out()
    arguments = Arguments(args, kwargs)
    tensors = arguments.pop_tensors()

    def forward() -> Any:
        return function(*args, **kwargs)

    session = session if session is not None else Session.default()
    if in_replay():
        # The checks of the outer function cover it.
        replayed = ReplayedFunction(function, arguments, around, latest)
        if replayed.state.why_kept() is not None:
            return forward()
        scope, inputs = current_scope(session), None if how.choices.inputs is None else Decision.KEEP
        call = CheckpointedCall(
            replayed, LearnedCalls.trusted(), scope, inputs, draws=how.preserve_rng_state, stops_early=how.early_stop
        )
        return call.run(forward, tensors)
    session.check_open()
    restore_hooks()
    planned, scope = how.choices.planned, current_scope(session)
    is_scoped = scope_of_hooks() is not None
    is_foreign = not is_scoped and top_hooks(True) is not None
    if how.drop_output and not is_scoped:
        raise UsageError(
            "drop_output has no effect outside of a spillway.offload context, which sees the consumer save the output. "
            "Write `with spillway.offload(policy=spillway.policies.Keep()):` around the function and its consumer."
        )
    known = session.of(LearnedFunctions).of(_identity_of(function, arguments.callables()))
    partition = _partition(how, scope, is_foreign=is_foreign)
    if partition is not None:
        partition.check(tensors, known)
    learned = _learned(known, function, tensors, arguments)
    if planned is not None and not (planned.recomputes or is_foreign) and profiled is None:
        order = learned.order(shapes_of(tensors), planned)
        if order is not None:
            if latest is not None:
                latest.forget()
            return PreservingCall(order, scope, learned).run(forward)
    replayed = ReplayedFunction(function, arguments, around, latest)
    why_kept = replayed.state.why_kept() or learned.why_kept
    if why_kept is not None:
        scope.ledger.note(f"{replayed.label} {why_kept}. Its saved tensors are kept, not recomputed.")
        return forward()
    return _checkpointed_call(how, replayed, learned, scope, tensors, partition, profiled).run(forward, tensors)


# Dynamo must leave it out, also if it traces the caller. The second entry takes less time, for callers that Dynamo does
# not trace.
call_checkpointed = disable_dynamo(_call_checkpointed)
call_checkpointed_untraced = untraced(_call_checkpointed)


def _checkpointed_call(
    how: Recompute,
    replayed: ReplayedFunction,
    learned: LearnedCalls,
    scope: ForwardScope,
    tensors: Sequence[torch.Tensor],
    partition: Partition | None,
    profiled: Callable[..., CheckpointedCall] | None,
) -> CheckpointedCall:
    """The call with these options."""
    if learned.varies:
        scope.ledger.note(
            f"{replayed.label} saves other tensors in each call. Nothing that it saves is kept or offloaded: it is "
            f"recomputed whole."
        )
    is_captured = any(map(scope.devices.is_captured, {tensor.device for tensor in tensors}))
    if is_captured:
        learned.check_capture(draws=how.preserve_rng_state)
    choices, planned = how.choices, how.choices.planned
    records = choices.preserves or profiled is not None or (planned is not None and not planned.recomputes)
    return (CheckpointedCall if profiled is None else profiled)(
        replayed,
        learned,
        scope,
        choices.inputs,
        draws=how.preserve_rng_state and not is_captured,
        compares=how.verify == "always",
        is_captured=is_captured,
        partition=partition,
        stops_early=how.early_stop,
        checks=how.determinism_check != "none",
        drops_output=how.drop_output,
        choices=choices if records else None,
    )


def _learned(
    known: LearnedFunction, function: Callable[..., Any], tensors: Sequence[torch.Tensor], arguments: Arguments
) -> LearnedCalls:
    """Knowledge from earlier calls of this kind. Types of tensors, numbers and the module's mode make a kind."""
    types = tuple([(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors])
    kind: Hashable = (types, arguments.numbers(), getattr(module_of(function), "training", None))
    learned: LearnedCalls | None = known.calls.get(kind)
    if learned is None:
        # A number may count calls.
        kind = types if len(known.calls) >= _MOST_KINDS else kind
        body = function.forward if isinstance(function, torch.nn.Module) else function
        is_late = inspect.isgeneratorfunction(body) or inspect.iscoroutinefunction(body)
        why_kept = "is a generator or a coroutine, which runs after its call" if is_late else None
        learned = known.calls.setdefault(kind, LearnedCalls(why_kept=why_kept))
    return learned


def _partition(how: Recompute, scope: ForwardScope, *, is_foreign: bool) -> Partition | None:
    """The split of the inputs over ranks, if this call splits them."""
    if how.partition is None or how.partition.ranks == 1 or in_backward():
        return None
    if how.choices.inputs is None and is_foreign:
        # They may belong to an outer checkpointed function, which saves the whole inputs.
        scope.ledger.note("inputs were not split over ranks: other hooks are around; say 'inputs' in save or offload")
        return None
    return how.partition


def _identity_of(function: Any, more: Sequence[Any] = (), depth: int = 3) -> Hashable:
    """A key for the knowledge about a function: its module, or its code and the functions that it uses."""
    if more:
        return (_identity_of(function), *(_identity_of(each, depth=depth - 1) for each in more))
    module = module_of(function)
    if module is not None:
        is_other = isinstance(function, types.MethodType) and function.__name__ != "forward"
        return (weakref.ref(module), function.__func__) if is_other else weakref.ref(module)
    inner = function.func if isinstance(function, functools.partial) else function
    inner = without_dynamo(inner)
    code = getattr(inner, "__code__", None)
    if code is None or depth == 0:
        return inner if inner is function and isinstance(inner, type) else type(inner) if code is None else code
    cells = map(value_of_cell, inner.__closure__ or ())
    used = (*cells, *(inner.__defaults__ or ()), *(getattr(function, "args", ()) or ()))
    return (code, *(_identity_of(each, depth=depth - 1) for each in used if callable(each)))
