"""The public call that recomputes: a function whose saved tensors are dropped, and computed again in backward."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils.checkpoint import CheckpointPolicy

from spillway.capture.hooks import Pass, SavedState, current_pass
from spillway.capture.kept import see_again
from spillway.capture.torch_internals import in_backward, keep_out, refuse_transforms, untraced
from spillway.checkpointing.call import CheckpointedCall, shapes_of
from spillway.checkpointing.checks import Verdicts
from spillway.checkpointing.function import Arguments, ReplayedFunction, in_rerun
from spillway.checkpointing.learned import Learned, Proofs, ProofStore
from spillway.checkpointing.partition import Partition
from spillway.checkpointing.preserved import PreservingCall
from spillway.checkpointing.program import Selection
from spillway.checkpointing.python_state import PythonState
from spillway.checkpointing.recorder import Observer
from spillway.checkpointing.reentrant import ReentrantCall
from spillway.checkpointing.slots import DroppedOutput
from spillway.errors import UsageError
from spillway.operators import Choices, Planned, Selector
from spillway.records import Decision
from spillway.session import Session

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Function = TypeVar("Function", bound=Callable[..., Any])

_CHECKS = ("default", "none")
_VERIFIES = ("sampled", "always")
_MOST_KINDS = 16
"""Kinds of calls of one function that are told apart by numbers among the arguments."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """How a region is recomputed: the options of :func:`recompute` as a value, for :func:`spillway.attach`.

    Args:
        save: what is kept: one selector or several (:mod:`spillway.operators`).
        offload: what leaves, and is back in time.
        policy: decides instead: a policy function of torch's selective checkpointing.
        use_reentrant: which of the two modes of ``torch.utils.checkpoint``.
        early_stop: end a re-run with the last tensor that backward wants.
        preserve_rng_state: draw the same random numbers in the re-run.
        determinism_check: ``"default"``: shape, dtype and device of what is computed again must be the same;
            ``"none"``.
        drop_output: let the output go, too, after its consumer has run.
        partition_inputs: the group of ranks over which inputs are the same, and are split until the re-run.
        check_partition: compare inputs over that group at each call, and not at the first of each function alone.
        verify: ``"always"``: compare the values of each replay; ``"sampled"``: see :func:`recompute`.

    Raises:
        UsageError: for options that cannot be meant, or not together; a group that this process is not in.

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
    choices_key: Hashable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.determinism_check not in _CHECKS:
            raise UsageError(
                f"determinism_check: got {self.determinism_check!r}, expected one of {', '.join(map(repr, _CHECKS))}"
            )
        if self.verify not in _VERIFIES:
            raise UsageError(f"verify: got {self.verify!r}, expected one of {', '.join(map(repr, _VERIFIES))}")
        choices = Choices(self.save, self.offload, self.policy)
        if self.use_reentrant:
            kept, plain = "saves nothing that could be kept", "runs without autograd"
            for name, given, why in (
                ("save", choices.names("save"), kept),
                ("offload of more than 'inputs'", choices.names("offload"), kept),
                ("policy", self.policy is not None, kept),
                ("drop_output", self.drop_output, plain),
                ("determinism_check='none'", self.determinism_check == "none", plain),
            ):
                if given:
                    raise UsageError(
                        f"got {name} with use_reentrant=True, whose forward {why}, expected use_reentrant=False"
                    )
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "choices_key", choices.key)
        if self.check_partition and self.partition_inputs is None:
            raise UsageError("check_partition: got it without partition_inputs, expected the group to compare over")
        partition = None
        if self.partition_inputs is not None:
            partition = Partition(self.partition_inputs, always_checks=self.check_partition)
        object.__setattr__(self, "partition", partition)

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function so: what it returns."""
        return call_region(self, function, args, kwargs, None)


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
    """Call a function, drop what autograd saved of it, and compute that again in backward.

    What the operators named by ``save`` gave is kept, what those named by ``offload`` gave leaves and is fetched ahead;
    of the rest, backward runs again only the operators that something still hangs on. Gradients are bit for bit those
    of a plain call: random numbers, autocast, batch-norm statistics and routing are the same in the re-run.

    In the first call of a kind everything is recomputed; its replay in backward records which operators the function
    runs. From the next call on, saved tensors are preserved. In the spirit of Chen et al. 2016 (checkpointing) and of
    selective recompute (Korthikanti et al. 2022), with a third choice beside keeping and recomputing.

    Args:
        function: a function or module. Without arguments for it, what is given back is a function that calls it so
            (also as a decorator, with options or without).
        *args: its arguments. Tensors in lists, tuples and dictionaries are found, and saved by whatever hooks are in
            force outside: an ``offload`` context around sends them away, and so does ``offload=["inputs"]``.
        save: selectors of what is kept: see :mod:`spillway.operators`. What both name is kept; :class:`saved_by` is
            asked last.
        offload: selectors of what leaves, to host memory (of CPU tensors: disk).
        policy: a policy function of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, asked instead.
            All six ``CheckpointPolicy`` values mean what they say.
        use_reentrant: which of the two modes of ``torch.utils.checkpoint``. The reentrant one runs the function without
            autograd first, so that nothing but inputs can be kept or offloaded.
        early_stop: end the re-run with the last tensor that backward wants.
        preserve_rng_state: draw the same random numbers in the re-run.
        determinism_check: ``"default"``: shape, dtype and device of what is computed again must be the same;
            ``"none"``.
        drop_output: let the output go, too, after its consumer has run, and compute it again for the consumer's
            backward. Within an :class:`~spillway.offload` context, which sees the consumer save it.
        partition_inputs: a process group, or a mesh of one dimension, whose ranks all call the function with the same
            inputs (tensor parallel). Each rank keeps or offloads an equal part of the elements of each input that
            requires grad, and the ranks gather them before the re-run.
        check_partition: compare the inputs over that group at each call, which reads them once more and waits for the
            device. Without, that is done at the first call of each function alone.
        verify: whether the values of each replay are compared with those of forward (``"always"``), or those of the
            first call of each function and of one call in 64 (``"sampled"``).
        session: ``None``: the default one.
        **kwargs: keyword arguments for the function, saved like the others.

    Returns:
        What the function returns.

    Raises:
        UsageError: for options that cannot be meant, or not together; where the ranks of ``partition_inputs`` are seen
            to have other inputs, on all of them.
        RecomputeError: in backward, where a replay would not give the same, and where an output that a policy says must
            be saved is written in place.

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
            given = ", ".join([*map(repr, args), *kwargs])
            raise UsageError(
                f"recompute: got {given:.200} without a function, expected options alone; give the function first, or "
                f"give these to the function that recompute(**options) returns for it"
            )
        return functools.partial(_wrapped, how=how, session=session)
    if not callable(function):
        raise UsageError(f"recompute: got {function!r}, expected a function or a module")
    if not args and not kwargs:
        return _wrapped(function, how=how, session=session)
    return call_region(how, function, args, kwargs, session)


def _wrapped(function: Callable[..., Any], *, how: Recompute, session: Session | None) -> Callable[..., Any]:
    # A module has no name of its own to take over.
    keep_name = functools.wraps(function) if hasattr(function, "__name__") else lambda call: call

    def call(*args: Any, **kwargs: Any) -> Any:
        return call_region(how, function, args, kwargs, session)

    return keep_name(call)


def _call_region(
    how: Recompute,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    session: Session | None,
    observer: Observer | None = None,
) -> Any:
    """Call a checkpointed function: :func:`recompute` without options among its arguments, and with a profiler."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    refuse_transforms()
    keep_out()
    arguments = Arguments(args, kwargs)
    tensors = arguments.take()
    if how.use_reentrant and not any(tensor.requires_grad for tensor in tensors) and not _has_gradients(function):
        return function(*args, **kwargs)

    def first() -> Any:
        return function(*args, **kwargs)

    if in_rerun():
        # A part of a region that runs again: the outer one sees to it all, and counts what is saved as before.
        owner = session if session is not None else Session.default()
        state = PythonState(function, arguments.objects())
        if state.has_iterators or state.is_lazy or state.writes_parameters:
            return first()
        again = ReplayedFunction(function, arguments, state, reentrant=how.use_reentrant)
        inputs = Decision.KEEP if how.choices.inputs is not None else None
        passage = current_pass(owner)
        return _replayable(
            how, again, state, Learned.believed(), passage, inputs, owner.of(Verdicts), label=_label(function)
        ).run(first, tensors)
    session = session if session is not None else Session.default()
    session.check_open()
    see_again()
    choices = how.choices
    passage = current_pass(session)
    is_foreign, is_scoped = hooks_around()
    if how.drop_output and not is_scoped:
        raise UsageError(
            "drop_output: got it outside of any spillway.offload context, expected one around the function and its "
            "consumer, since nothing else sees the consumer save the output; write `with "
            "spillway.offload(policy=spillway.policies.Keep()):` around both"
        )
    label = _label(function)
    proofs = session.of(ProofStore).of(_identity_of(function, arguments.callables()))
    partition = _partition(how, passage, is_foreign=is_foreign)
    if partition is not None:
        partition.check(tensors, proofs)
    learned = _learned(how, proofs, function, tensors, arguments)
    planned = choices.planned
    if planned is not None and not (planned.recomputes or is_foreign) and observer is None:
        order = learned.order(shapes_of(tensors), planned)
        if order is not None:
            output, is_whole = PreservingCall(order, passage).run(first)
            if not is_whole:
                learned.differed(order.program, is_final=False)
            return output
    state = PythonState(function, arguments.objects())
    kept = _why_kept(state, learned)
    if kept is not None:
        passage.ledger.note(f"{label} {kept}. What autograd saves in it is kept, not recomputed.")
        return first()
    if learned.varies:
        passage.ledger.note(
            f"{label} saves other tensors in each call. Nothing that it saves is kept or offloaded: it is recomputed "
            f"whole."
        )
    is_captured = any(map(passage.is_captured, {tensor.device for tensor in tensors}))
    if is_captured:
        learned.check_capture(draws=how.preserve_rng_state)
    records = choices.preserves or observer is not None or (planned is not None and not planned.recomputes)
    more: dict[str, Any] = {}
    if not how.use_reentrant:
        more["selection"] = Selection(choices, how.choices_key, _module_of(function)) if records else None
        more["observer"] = observer
    replayable = _replayable(
        how,
        ReplayedFunction(function, arguments, state, reentrant=how.use_reentrant),
        state,
        learned,
        passage,
        choices.inputs,
        session.of(Verdicts),
        label=label,
        checks=how.determinism_check != "none",
        drops_output=how.drop_output,
        compares=how.verify == "always",
        is_captured=is_captured,
        partition=partition,
        unused=() if choices.preserves else choices.unused(),
        **more,
    )
    output = replayable.run(first, tensors)
    if isinstance(replayable, CheckpointedCall):
        for tensor, slot in replayable.outputs:
            session.of(SavedState).outputs.set(tensor, DroppedOutput(tensor, slot))
        replayable.outputs.clear()
    return output


# Who traces the caller is to leave it out; where it is known that nobody does, there is a shorter way in.
call_region: Callable[..., Any] = torch._disable_dynamo(_call_region)  # type: ignore[attr-defined, unused-ignore]
call_untraced_region = untraced(_call_region)


def hooks_around() -> tuple[bool, bool]:
    """Whether there are saved-tensor hooks around that are not ours, and whether there are some of ours."""
    hooks: tuple[object, object] | None = _top_saved_tensors_default_hooks(True)
    is_ours = hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Pass)
    return hooks is not None and not is_ours, is_ours


def _why_kept(state: PythonState, learned: Learned) -> str | None:
    """Why the function cannot run a second time, if it cannot."""
    if state.has_iterators:
        return "has an iterator, or a file, whose state cannot be copied for a second run"
    if state.is_lazy:
        return "has a lazy layer, which makes its parameters in this call"
    if state.writes_parameters:
        return "has an embedding with max_norm, whose forward writes its weight"
    return "takes a gradient of what it computes" if learned.takes_gradients else None


def _learned(
    how: Recompute, proofs: Proofs, function: Callable[..., Any], tensors: Sequence[torch.Tensor], arguments: Arguments
) -> Learned:
    """What calls of such a kind taught: types of tensors, flags, numbers, the mode, and whether the module trains."""
    types = tuple([(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors])
    kind: Hashable = (types, arguments.numbers(), getattr(_module_of(function), "training", None), how.use_reentrant)
    learned: Learned | None = proofs.learned.get(kind)
    if learned is None:
        # A number may count calls.
        kind = (types, how.use_reentrant) if len(proofs.learned) >= _MOST_KINDS else kind
        learned = proofs.learned.setdefault(kind, Learned())
    return learned


def _replayable(
    how: Recompute,
    again: ReplayedFunction,
    state: PythonState,
    learned: Learned,
    passage: Pass,
    inputs: Decision | None,
    verdicts: Verdicts,
    *,
    checks: bool = False,
    drops_output: bool = False,
    is_captured: bool = False,
    **others: Any,
) -> CheckpointedCall | ReentrantCall:
    """The call, in the mode that was asked for."""
    draws = how.preserve_rng_state and not is_captured
    if how.use_reentrant:
        return ReentrantCall(
            again, state, learned, passage, inputs, verdicts, draws=draws, is_captured=is_captured, **others
        )
    return CheckpointedCall(
        again,
        state,
        learned,
        passage,
        inputs,
        verdicts,
        stops_early=how.early_stop,
        draws=draws,
        checks=checks,
        drops_output=drops_output,
        is_captured=is_captured,
        **others,
    )


def _partition(how: Recompute, passage: Pass, *, is_foreign: bool) -> Partition | None:
    """How the inputs are split over ranks, if they are here."""
    if how.partition is None or how.partition.ranks == 1 or in_backward():
        return None
    if how.choices.inputs is None and is_foreign:
        # They may be another region's, which finds the whole inputs when it runs again.
        passage.ledger.note("inputs were not split over ranks: other hooks are around; say 'inputs' in save or offload")
        return None
    return how.partition


def _module_of(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that the function is, or is a method of."""
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def _label(function: Callable[..., Any]) -> str:
    """How an error names it."""
    module = _module_of(function)
    return type(module).__name__ if module is not None else getattr(function, "__qualname__", repr(function))


def _identity_of(function: Any, more: Sequence[Any] = (), depth: int = 3) -> Hashable:
    """What tells a function from others that might compute something else: a module, or code and what it uses."""
    if more:
        return (_identity_of(function), *(_identity_of(each, depth=depth - 1) for each in more))
    module = _module_of(function)
    if module is not None:
        is_other = isinstance(function, types.MethodType) and function.__name__ != "forward"
        return (weakref.ref(module), function.__func__) if is_other else weakref.ref(module)
    inner = function.func if isinstance(function, functools.partial) else function
    inner = getattr(inner, "_torchdynamo_orig_callable", inner)
    code = getattr(inner, "__code__", None)
    if code is None or depth == 0:
        return inner if inner is function and isinstance(inner, type) else type(inner) if code is None else code
    used = [cell.cell_contents for cell in inner.__closure__ or () if _is_filled(cell)]
    used += [*(inner.__defaults__ or ()), *(getattr(function, "args", ()) or ())]
    return (code, *(_identity_of(each, depth=depth - 1) for each in used if callable(each)))


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  (raises where there is nothing)
    except ValueError:
        return False
    return True


def _has_gradients(function: Callable[..., Any]) -> bool:
    """Whether a module, of which no input requires grad, has parameters that do."""
    module = _module_of(function)
    if module is None:
        raise UsageError(
            f"use_reentrant=True: got no input that requires grad for {function!r}, expected one, or a module whose "
            f"parameters do; use use_reentrant=False"
        )
    return any(parameter.requires_grad for parameter in module.parameters())
