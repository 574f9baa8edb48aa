"""The public call that recomputes: a function whose saved tensors are dropped, and computed again in backward."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from spillway.capture.alone import see_again
from spillway.capture.dynamo import has_compiled, keep_out, untraced
from spillway.capture.handles import pack_kept, unpack
from spillway.capture.hooks import Pass, in_backward, refuse_transforms
from spillway.checkpointing.call import CheckpointedCall
from spillway.checkpointing.learned import Learned
from spillway.errors import UsageError
from spillway.operators import Choices, Planned, Selector
from spillway.records import Decision
from spillway.regions.arguments import Arguments
from spillway.regions.followed import Followed, may_follow
from spillway.regions.inputs import InputHooks
from spillway.regions.observer import Observer
from spillway.regions.partition import Partition
from spillway.regions.proofs import Proofs
from spillway.regions.python_state import PythonState
from spillway.regions.region import Region, Surroundings, keeps_note, surroundings
from spillway.regions.regraph import Regraph
from spillway.regions.replayed_function import ReplayedFunction
from spillway.regions.rerun import in_rerun
from spillway.regions.script import Script, TapeKey
from spillway.regions.skimmed import Skimmed
from spillway.regions.tape import Tape
from spillway.regions.unwatched import Unwatched
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
        watch: compare each call with an earlier one. ``False``: see :func:`recompute`.
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
    watch: bool = True
    verify: str = "sampled"
    choices: Choices = field(init=False, repr=False, compare=False)
    partition: Partition | None = field(init=False, repr=False, compare=False)
    tape_key: Hashable = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.determinism_check not in _CHECKS:
            raise UsageError(
                f"determinism_check: got {self.determinism_check!r}, expected one of {', '.join(map(repr, _CHECKS))}"
            )
        if self.verify not in _VERIFIES:
            raise UsageError(f"verify: got {self.verify!r}, expected one of {', '.join(map(repr, _VERIFIES))}")
        choices = Choices(self.save, self.offload, self.policy)
        if self.use_reentrant:
            for name, given in (
                ("determinism_check='none'", self.determinism_check == "none"),
                ("drop_output", self.drop_output),
                ("saved_by", bool(choices.saved_by)),
            ):
                if given:
                    raise UsageError(
                        f"{name}: got it with use_reentrant=True, whose first run is without autograd, expected "
                        f"use_reentrant=False"
                    )
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "tape_key", self._tape_key())
        if self.check_partition and self.partition_inputs is None:
            raise UsageError("check_partition: got it without partition_inputs, expected the group to compare over")
        partition = None
        if self.partition_inputs is not None:
            partition = Partition(self.partition_inputs, always_checks=self.check_partition)
        object.__setattr__(self, "partition", partition)

    def _tape_key(self) -> Hashable:
        """What tells options apart under which other things are done; ``None``: regions run their function again."""
        if not (self.early_stop and self.preserve_rng_state) or self.use_reentrant or self.drop_output:
            return None
        if isinstance(self.policy, Planned):
            return self.policy
        choices = self.choices
        return None if choices.asks else choices.said

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
    watch: bool = True,
    verify: str = "sampled",
    session: Session | None = None,
    **kwargs: Any,
) -> Any:
    """Call a function, drop what autograd saved of it, and compute that again in backward.

    What the operators named by ``save`` gave is kept, what those named by ``offload`` gave leaves and is fetched ahead;
    of the rest, backward runs again only the operators that something still hangs on. Gradients are bit for bit those
    of a plain call: random numbers, autocast, batch-norm statistics and routing are the same in the re-run.

    Built on ``torch.utils.checkpoint``. In the spirit of Chen et al. 2016 (checkpointing) and of selective recompute
    (Korthikanti et al. 2022), with a third choice beside keeping and recomputing.

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
        use_reentrant: which of the two modes of ``torch.utils.checkpoint``. The reentrant one runs every operator again
            that is neither kept nor offloaded.
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
        watch: compare each call with an earlier one, by the operators or by the functions of torch's that it calls,
            which takes the host several times as long as to queue it. ``False``: once the function was seen to do the
            same twice, and where nothing of it is kept or sent away, it runs as under ``torch.utils.checkpoint``; the
            device compares what both runs have made, and is not waited for. A difference is an error in a later call,
            or when the session is closed.
        verify: whether the values of each replay are compared with those of forward (``"always"``), or those of the
            first call of each function and of one call in 64 (``"sampled"``).
        session: ``None``: the default one.
        **kwargs: keyword arguments for the function, saved like the others.

    Returns:
        What the function returns.

    Raises:
        UsageError: for options that cannot be meant, or not together; where the ranks of ``partition_inputs`` are seen
            to have other inputs, on all of them.
        RecomputeError: in backward, where running again would not give the same; in forward, where an output that a
            policy says must be saved is written in place.

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
        watch=watch,
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
    """Call a function as a region: :func:`recompute` without options among its arguments, and somebody may watch."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    refuse_transforms()
    keep_out()
    arguments = Arguments(args, kwargs)
    tensors = arguments.take()
    if how.use_reentrant and not any(tensor.requires_grad for tensor in tensors):
        return _without_input_grads(how, function, args, kwargs, session)

    def first() -> Any:
        return function(*args, **kwargs)

    if in_rerun():
        # A part of a region that runs again: the outer one sees to it all, and counts what is saved as before.
        owner = session if session is not None else Session.default()
        state = PythonState(function, arguments.objects())
        if state.has_iterators or state.is_lazy or state.writes_parameters:
            return first()
        if not how.use_reentrant:
            return CheckpointedCall(
                ReplayedFunction(function, arguments, state),
                state,
                Learned.believed(),
                owner.current_pass(),
                Decision.KEEP if how.choices.inputs is not None else None,
                owner.verdicts,
                label=_label(function),
                stops_early=how.early_stop,
                draws=how.preserve_rng_state,
                checks=False,
            ).run(first, tensors)
        if owner.proofs(_identity_of(function, arguments.callables())).takes_gradients:
            return first()
        with nullcontext() if how.choices.inputs is None else saved_tensors_hooks(pack_kept, unpack):
            return _checked(how, ReplayedFunction(function, arguments, state, is_first=True), tensors)
    session = session if session is not None else Session.default()
    session.check_open()
    see_again()
    choices = how.choices
    passage, around = session.current_pass(), surroundings()
    if how.drop_output and around is not Surroundings.PASS:
        raise UsageError(
            "drop_output: got it outside of any spillway.offload context, expected one around the region and its "
            "consumer, since nothing else sees the consumer save the output; write `with "
            "spillway.offload(policy=spillway.policies.Keep()):` around both"
        )
    outer = _tell_outer() if around is Surroundings.TORCH else None
    proofs = session.proofs(_identity_of(function, arguments.callables()))
    partition = _partition(how, passage, around)
    if partition is not None:
        partition.check(tensors, proofs)
        # What the region saves of its inputs would hold all of them.
        around = Surroundings.TORCH
    elif choices.inputs is not None and around is not Surroundings.TORCH:
        around = Surroundings.KEEP if choices.inputs is Decision.KEEP else Surroundings.PASS
    state = PythonState(function, arguments.objects())
    if state.has_iterators:
        passage.ledger.note(
            f"{_label(function)} has an iterator, or a file, whose state cannot be copied for a second run. Its saved "
            f"tensors are kept, not recomputed."
        )
        return first()
    if state.is_lazy:
        passage.ledger.note(
            f"{_label(function)} has a lazy layer, which makes its parameters in this call. What autograd saves is "
            f"kept, not recomputed."
        )
        return first()
    if state.writes_parameters:
        passage.ledger.note(
            f"{_label(function)} has an embedding with max_norm, whose forward writes its weight. What autograd saves "
            f"is kept, not recomputed."
        )
        return first()
    again = ReplayedFunction(function, arguments, state, reentrant=how.use_reentrant)
    is_steered = getattr(function, "is_steered", False)
    if _is_plain(how, partition, observer) and not is_steered:
        learned = _learned(proofs, function, tensors, arguments)
        if learned.takes_gradients:
            passage.ledger.note(keeps_note(_label(function)))
            return first()
        is_captured = any(map(passage.is_captured, {tensor.device for tensor in tensors}))
        if is_captured:
            learned.check_capture(draws=how.preserve_rng_state)
        checkpointed = CheckpointedCall(
            again,
            state,
            learned,
            passage,
            choices.inputs if around is not Surroundings.TORCH or choices.inputs is not None else None,
            session.verdicts,
            label=_label(function),
            stops_early=how.early_stop,
            draws=how.preserve_rng_state and not is_captured,
            checks=how.determinism_check != "none",
            compares=how.verify == "always",
            is_captured=is_captured,
            tell_outer=None if outer is None else outer.has_gradient_inside,
        )
        return checkpointed.run(first, tensors)
    if proofs.takes_gradients:
        passage.ledger.note(keeps_note(_label(function)))
        return first()
    key = None
    if partition is None and around is not Surroundings.TORCH and how.tape_key is not None:
        kind = arguments.kind(tensors)
        if kind is not None:
            proofs.script.called(kind)
            key = (how.tape_key, around), kind
    if key is not None and observer is None:
        call = _by_tape(how, function, again, key, tensors, passage, session, proofs.script, around)
        if call is not None:
            output, is_whole = call.run(first, tensors)
            if not is_whole:
                proofs.script.lose(key)
            return output
    region = Region(
        again,
        first,
        choices,
        passage,
        proofs,
        state,
        root=_module_of(function),
        label=_label(function),
        surroundings=around,
        reentrant=how.use_reentrant,
        stops_early=how.early_stop and not how.drop_output,
        draws=how.preserve_rng_state,
        drops_output=how.drop_output,
        observer=observer,
        key=key,
        writes_at_once=getattr(function, "writes_tape", None),
    )
    if outer is not None:
        region.outer = weakref.ref(outer)
    output = _run_in(how, tensors, passage, partition, region)
    for tensor, handle in region.outputs:
        session.outputs.add(tensor, handle)
    region.outputs.clear()
    return output


# Who traces the caller is to leave it out; where it is known that nobody does, there is a shorter way in.
call_region: Callable[..., Any] = torch._disable_dynamo(_call_region)  # type: ignore[attr-defined, unused-ignore]
call_untraced_region = untraced(_call_region)


def _is_plain(how: Recompute, partition: Partition | None, observer: Observer | None) -> bool:
    """Whether everything is recomputed: then the function needs no modes."""
    hooks: tuple[object, object] | None = _top_saved_tensors_default_hooks(True)
    if hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Regraph):
        # A reentrant region around runs again, under a mode that redirects what is written.
        return False
    special = how.use_reentrant or how.drop_output or partition is not None or observer is not None
    # What a plan foresees of memory are the parts of tapes.
    return not (special or how.choices.preserves or how.choices.is_planned)


def _learned(
    proofs: Proofs, function: Callable[..., Any], tensors: Sequence[torch.Tensor], arguments: Arguments
) -> Learned:
    """What calls of this kind taught: by types of tensors, flags and numbers, and whether the module trains."""
    types = tuple([(tensor.dtype, tensor.dim(), tensor.requires_grad) for tensor in tensors])
    kind: Hashable = (types, arguments.numbers(), getattr(_module_of(function), "training", None))
    learned: Learned | None = proofs.learned.get(kind)
    if learned is None:
        # A number may count calls.
        kind = types if len(proofs.learned) >= _MOST_KINDS else kind
        learned = proofs.learned.setdefault(kind, Learned())
    return learned


def _run_in(
    how: Recompute, tensors: list[torch.Tensor], passage: Pass, partition: Partition | None, region: Region
) -> Any:
    """What a region gives that runs inside of torch's checkpoint."""
    with InputHooks(region, tensors, passage, how.choices.inputs, partition).pushed():
        output = _checked(how, region.run, tensors)
    if region.error is not None:
        error, region.error = region.error, None
        try:
            raise error
        finally:
            # An error that its own frame holds would hold all that its frames do.
            del error
    return output


def _by_tape(
    how: Recompute,
    function: Callable[..., Any],
    again: Callable[..., Any],
    key: TapeKey,
    tensors: Sequence[torch.Tensor],
    passage: Pass,
    session: Session,
    script: Script,
    around: Surroundings,
) -> Followed | Unwatched | None:
    """The call by a tape, if there is one that it may go by."""
    tape = None if in_backward() else _tape(how.choices, key, script)
    if tape is None or any(map(passage.is_captured, tape.devices)):
        return None
    inputs, aliases = how.choices.inputs, around is Surroundings.PASS
    said = getattr(function, "watches", None)
    if tape.is_closed and tape.showing.is_all and not (how.watch if said is None else said):
        lose = functools.partial(script.lose, key)
        label = _label(function)
        return Unwatched(
            again,
            tape,
            passage,
            inputs,
            session.verdicts,
            label=label,
            aliases=aliases,
            lose=lose,
            buffers=script.buffers(_module_of(function)),
            compares_all=script.is_compared(),
        )
    if not may_follow(tape, tensors):
        return None
    rerunning = getattr(function, "rerunning", nullcontext)
    # By a mode around, functions may do anything.
    if tape.skims and not (torch._C._len_torch_function_stack() or has_compiled()):
        return Skimmed(
            tape,
            passage,
            inputs,
            aliases=aliases,
            rerunning=rerunning,
            verdicts=session.verdicts,
            label=_label(function),
            compares=script.is_compared(),
        )
    return Followed(tape, passage, inputs, aliases=aliases, rerunning=rerunning)


def _tape(choices: Choices, key: TapeKey, script: Script) -> Tape | None:
    """The tape of such calls, if there is one."""
    tape = script.tape(key)
    if tape is not None or not choices.is_planned:
        return tape
    for other in script.like(key):
        decided = other.decided(choices.by_place)
        # What the function does hangs on no decision: a new plan needs no new tape, if all that it has run again was
        # seen to be right.
        if decided.again[0] <= other.again[0]:
            tape = replace(decided, unused=tuple(choices.unused())).prepared()
            script.write(key, tape)
            return tape
    return None


def _tell_outer() -> Region | None:
    """The region around, if it is one, has another in it; gives that region."""
    hooks: tuple[object, object] | None = _top_saved_tensors_default_hooks(True)
    outer = None if hooks is None else getattr(hooks[0], "__self__", None)
    if isinstance(outer, (Region, Regraph)):
        outer.has_inner = True
    return outer if isinstance(outer, Region) else None


def _partition(how: Recompute, passage: Pass, around: Surroundings) -> Partition | None:
    """How the inputs are split over ranks, if they are here."""
    if how.partition is None or how.partition.ranks == 1 or in_backward():
        return None
    if how.choices.inputs is None and around is Surroundings.TORCH:
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


def _checked(how: Recompute, run: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
    """What a function gives inside of torch's checkpoint."""
    if not how.use_reentrant:
        return checkpoint(
            run,
            *tensors,
            use_reentrant=False,
            preserve_rng_state=how.preserve_rng_state,
            early_stop=how.early_stop,
            determinism_check=how.determinism_check,
        )
    # The reentrant mode gives gradients to a flat tuple only.
    specs: list[Any] = []

    def run_flat(*tensors: torch.Tensor) -> tuple[Any, ...]:
        leaves, spec = tree_flatten(run(*tensors))
        specs[:] = [spec]
        return tuple(_with_a_gradient(leaves) if torch.is_grad_enabled() else leaves)

    leaves = checkpoint(run_flat, *tensors, use_reentrant=True, preserve_rng_state=how.preserve_rng_state)
    return tree_unflatten(list(leaves), specs[0])


def _with_a_gradient(leaves: list[Any]) -> list[Any]:
    """Outputs of a reentrant re-run: where none needs a gradient, one gets an end of its own. Torch refuses none."""
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if any(leaves[place].requires_grad for place in tensors):
        return leaves
    for place in tensors:
        if leaves[place].is_floating_point() or leaves[place].is_complex():
            leaves[place] = leaves[place].detach().requires_grad_()
    return leaves


def _without_input_grads(
    how: Recompute, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], session: Session | None
) -> Any:
    """The reentrant mode sees a gradient only through an input: parameters alone get one by an input of ours."""
    module = _module_of(function)
    if module is None:
        raise UsageError(
            f"use_reentrant=True: got no input that requires grad for {function!r}, expected one, or a module whose "
            f"parameters do; use use_reentrant=False"
        )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return function(*args, **kwargs)
    ticket = torch.empty(0, requires_grad=True)

    def with_ticket(ticket: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    # By this the module is known, and its Python state.
    with_ticket.__self__ = module  # type: ignore[attr-defined]
    return call_region(how, with_ticket, (ticket, args, kwargs), {}, session)
