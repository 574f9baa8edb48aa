"""Operators by name: which outputs of a recomputed region are kept or offloaded, and which are computed again.

A *selector* names operators. It is one of

* a family: ``"matmul"``, ``"attention"``, ``"norm"``, ``"convolution"``, ``"softmax"``, ``"embedding"``,
  ``"pointwise"``, ``"random"``;
* an operator: ``torch.ops.aten.mm.default``, all its overloads (``torch.ops.aten.mm``), or its name, with or without
  overload, as in a shell: ``"aten::mm"``, ``"aten::add.Tensor"``, ``"aten::*softmax*"``;
* the submodule that ran it, by its path below the region's module: ``"*.q_proj"``, ``"mlp.*"``;
* :class:`within`: both of these, operators that run inside of a submodule;
* :class:`saved_by`: what operators save for backward, whoever computed it;
* a predicate, called with an :class:`OperatorCall`;
* ``"inputs"``: the inputs of the region.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from spillway.errors import PolicyError, UsageError
from spillway.types import Decision

INPUTS = "inputs"

_NAMES = {
    "matmul": (
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::mv", "aten::addmv"),
        *("aten::dot", "aten::linear", "aten::matmul", "aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm"),
        *("aten::_scaled_grouped_mm", "aten::mkldnn_linear", "mkldnn::_linear_pointwise"),
    ),
    "attention": (
        *("aten::_scaled_dot_product_*", "aten::_flash_attention_forward", "aten::_efficient_attention_forward"),
        *("flex_attention", "flash_attn*::*forward*", "xformers*::*attention*"),
    ),
    "norm": (
        *("aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm", "aten::*rms_norm"),
        *("aten::_native_batch_norm_legit*", "aten::_batch_norm_with_update*", "aten::cudnn_batch_norm"),
        *("aten::miopen_batch_norm", "aten::*_layer_norm"),
    ),
    "convolution": ("aten::*convolution*", "aten::conv[123]d", "aten::_slow_conv*"),
    "softmax": ("aten::*softmax",),
    "embedding": ("aten::embedding", "aten::_embedding_bag*"),
}
_TAGS = {"pointwise": torch.Tag.pointwise, "random": torch.Tag.nondeterministic_seeded}
FAMILIES = (*_NAMES, *_TAGS)


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator that ran in a region: what a predicate decides from."""

    operator: Any
    """The overload: ``torch.ops.aten.mm.default``."""
    module: str | None
    """Path of the submodule that ran it, below the region's module, which is ``""``."""
    index: int
    """How many operators ran in the region before it."""
    nbytes: int
    """Bytes of its outputs."""

    @property
    def name(self) -> str:
        """``"aten::mm.default"``."""
        return full_name(self.operator)


Predicate = Callable[[OperatorCall], bool]


@dataclass(frozen=True)
class saved_by:  # noqa: N801  (read aloud: offload=[saved_by("attention")])
    """What operators save for backward and has been computed in the region: their inputs and outputs, as autograd asks.

    ``offload=[saved_by("attention")]`` sends away the very queries, keys and values that attention was given (after
    rotary embedding, that is), its output and its statistics, so that nothing before it has to run again for its sake.

    Args:
        selector: a family, or an operator.
    """

    selector: Any

    def __post_init__(self) -> None:
        _test_of(self.selector)

    def matches(self, operator: Any) -> bool:
        """Whether the operator is one of them."""
        return bool(_test_of(self.selector)(operator))


@dataclass(frozen=True)
class within:  # noqa: N801  (read aloud: save=within("mlp", "matmul"))
    """Operators that run inside of a submodule: those that both arguments name.

    ``save=[within("mlp", "matmul")]`` keeps what the matrix products of ``mlp`` give. Products elsewhere, and other
    operators of ``mlp``, are recomputed. A submodule's own submodules, at any depth, are inside of it.

    Args:
        module: the submodule's path below the region's module, or a pattern of paths as in a shell: ``"mlp"``,
            ``"*.experts"``.
        selector: a family, or an operator.

    Raises:
        UsageError: for a path that is none, or a selector that is neither.

    Example:
        >>> how = spillway.Recompute(save=spillway.within("mlp", "matmul"), offload="attention")  # doctest: +SKIP
    """

    module: str
    selector: Any
    _names: Callable[[Any], bool] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.module, str) or not self.module:
            raise UsageError(
                f"within: got {self.module!r}, expected the path of a submodule, or a pattern of paths, like 'mlp'"
            )
        object.__setattr__(self, "_names", _test_of(self.selector))

    def __call__(self, call: OperatorCall) -> bool:
        """Whether the operator is one of them."""
        return call.module is not None and self._names(call.operator) and self._has(call.module)

    def _has(self, path: str) -> bool:
        names = path.split(".")
        outer = (".".join(names[:count]) for count in range(1, len(names) + 1))
        return any(fnmatch.fnmatchcase(each, self.module) for each in outer)


@dataclass(frozen=True, eq=False)
class Planned:
    """Decisions about a region, operator by operator, as a plan makes them.

    An operator that is not the one that stands at its place in the plan is computed again.
    """

    decisions: Mapping[int, tuple[str, Decision]]
    """By how many operators ran before it: its name, as ``"aten::mm.default"``, and what is done with what it gives."""
    inputs: Decision = Decision.KEEP
    """What is done with the region's inputs."""
    recomputes: bool = True
    """Whether anything that is saved is computed again. An attached block of which nothing is, is no region: what is
    not named stays."""

    def decision(self, place: int, operator: Any) -> Decision:
        """What is done with what the operator gives, which is the one at a place."""
        planned = self.decisions.get(place)
        return _RECOMPUTE if planned is None or planned[0] != full_name(operator) else planned[1]


_RECOMPUTE = Decision.RECOMPUTE
Selector = str | torch._ops.OpOverload | torch._ops.OpOverloadPacket | Predicate | within | saved_by


@dataclass(slots=True, eq=False)
class _Rule:
    """One selector: what it is asked, and what follows if it says yes."""

    selector: Any
    test: Callable[[Any], bool]
    decision: Decision
    has_named: bool = False


def _first(rules: list[_Rule], asked: Any) -> Decision | None:
    """The decision of the first rule that says yes."""
    for rule in rules:
        if rule.test(asked):
            rule.has_named = True
            return rule.decision
    return None


class Choices:
    """Decides about the operators of a region.

    Args:
        save: selectors of what is kept.
        offload: selectors of what leaves. What both name is kept; :class:`saved_by` is asked last.
        policy: a :class:`Planned`, or a policy function of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``, asked instead. The ``MUST`` and ``PREFER``
            values differ in one thing: an output that must be saved or offloaded and is then written in place is an
            error, one that is preferred to be is computed again.

    Raises:
        UsageError: for a selector that cannot be meant.
    """

    def __init__(
        self,
        save: Selector | Sequence[Selector] = (),
        offload: Selector | Sequence[Selector] = (),
        policy: Planned | Callable[..., CheckpointPolicy | bool] | None = None,
    ) -> None:
        self._planned = policy if isinstance(policy, Planned) else None
        if policy is not None and self._planned is None and not callable(policy):
            raise UsageError(f"policy: got {policy!r}, expected a callable as torch's selective checkpointing takes it")
        self._policy: Any = policy
        self.said = tuple(
            (tuple(_listed(selectors)), name) for selectors, name in ((save, "save"), (offload, "offload"))
        )
        """The selectors. With these alone, and no predicate among them, the same is decided again."""
        self.inputs: Decision | None = None
        """What is done with the inputs of a region."""
        self.wants_modules = False
        self.patterns: list[str] = []
        """Patterns of submodules."""
        self.saved_by: list[_Rule] = []
        """Asked last: what no name decides about."""
        self._names: list[_Rule] = []
        self._predicates: list[_Rule] = []
        for selectors, decision in ((save, Decision.KEEP), (offload, Decision.OFFLOAD)):
            for selector in _listed(selectors):
                self._add(selector, decision)
        self._known: dict[Any, Decision | None] = {}
        self._known_saving: dict[Any, Decision | None] = {}
        if policy is not None and (self._names or self._predicates or self.saved_by or self.inputs):
            raise UsageError("got both a policy and selectors, expected one of them")
        self._met: set[int] = set()
        if self._planned is not None:
            self.inputs = self._planned.inputs

    @property
    def any(self) -> bool:
        """Whether anything is said of operators' outputs."""
        return bool(self._policy or self._names or self._predicates)

    @property
    def preserves(self) -> bool:
        """Whether what some operator gives may be kept or offloaded."""
        if self._planned is not None:
            return bool(self._planned.decisions)
        return self.any or bool(self.saved_by)

    @property
    def key(self) -> Hashable:
        """What tells these choices from others that may decide otherwise."""
        if self._planned is not None:
            return self._planned
        return _key_of(self._policy), *((name, *map(_key_of, selectors)) for selectors, name in self.said)

    def names(self, option: str) -> bool:
        """Whether ``save`` or ``offload`` names anything but the inputs."""
        return any(name == option and any(each != INPUTS for each in selectors) for selectors, name in self.said)

    def by_name(self, operator: Any) -> Decision | None:
        """The decision, if it follows from the operator alone."""
        try:
            return self._known[operator]
        except KeyError:
            decision = self._known[operator] = _first(self._names, operator)
            return decision

    @property
    def asks(self) -> bool:
        """Whether each call must be asked about."""
        return bool(self._predicates) or self._policy is not None

    @property
    def planned(self) -> Planned | None:
        """The plan, if the decisions follow from operators and their places."""
        return self._planned

    def by_place(self, place: int, operator: Any) -> Decision:
        """The plan's decision about the operator at a place."""
        assert self._planned is not None
        decision = self._planned.decision(place, operator)
        if decision is not _RECOMPUTE:
            self._met.add(place)
        return decision

    def by_call(self, call: OperatorCall, output: Any, args: Any, kwargs: Any) -> tuple[Decision, bool]:
        """The decision about one call, and whether it must be so."""
        if self._policy is not None:
            return self._by_policy(call.operator, output, args, kwargs)
        return _first(self._predicates, call) or Decision.RECOMPUTE, False

    def by_saving(self, operator: Any) -> Decision | None:
        """What is done with what the operator saves."""
        try:
            return self._known_saving[operator]
        except KeyError:
            decision = self._known_saving[operator] = _first(self.saved_by, operator)
            return decision

    def unused(self) -> list[Any]:
        """Selectors that have named nothing yet, and operators of a plan that did not come."""
        selectors = [rule.selector for rule in (*self._names, *self._predicates, *self.saved_by) if not rule.has_named]
        missed = () if self._planned is None else self._planned.decisions.keys() - self._met
        planned = {} if self._planned is None else self._planned.decisions
        return selectors + [f"{planned[place][0]} at {place}" for place in sorted(missed)]

    def _by_policy(self, operator: Any, output: Any, args: Any, kwargs: Any) -> tuple[Decision, bool]:
        answer = self._policy(_context(output), operator, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if not isinstance(answer, CheckpointPolicy):
            raise PolicyError(
                f"policy {self._policy!r}: got {answer!r} for {operator}, expected a "
                f"torch.utils.checkpoint.CheckpointPolicy or a bool"
            )
        return _MEANING[answer], answer.name.startswith("MUST")

    def _add(self, selector: Any, decision: Decision) -> None:
        if isinstance(selector, str) and selector == INPUTS:
            self.inputs = self.inputs or decision
        elif isinstance(selector, saved_by):
            self.saved_by.append(_Rule(selector, selector.matches, decision))
        elif _is_module_pattern(selector):
            self.patterns.append(selector)
            self.wants_modules = True
            self._predicates.append(_Rule(selector, _in_module(selector), decision))
        elif isinstance(selector, (str, torch._ops.OperatorBase, torch._ops.OpOverloadPacket)):
            self._names.append(_Rule(selector, _test_of(selector), decision))
        elif callable(selector):
            if isinstance(selector, within):
                self.patterns.append(selector.module)
            # It may look at the module.
            self.wants_modules = True
            self._predicates.append(_Rule(selector, selector, decision))
        else:
            raise UsageError(_unknown(selector))


_MEANING = {
    CheckpointPolicy.MUST_SAVE: Decision.KEEP,
    CheckpointPolicy.PREFER_SAVE: Decision.KEEP,
    CheckpointPolicy.MUST_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Decision.RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Decision.OFFLOAD,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Decision.OFFLOAD,
}


def full_name(operator: Any) -> str:
    """``"aten::mm.default"``; of an operator of higher order, its name."""
    if isinstance(operator, torch._ops.OpOverload):
        return f"{operator._schema.name}.{operator._overloadname}"
    return str(operator)


def _context(output: Any) -> SelectiveCheckpointContext:
    context = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output  # type: ignore[attr-defined, unused-ignore]  # younger than the oldest torch served
    return context


def _key_of(selector: Any) -> Hashable:
    """What tells a selector from others: functions by their code and what they close over."""
    code = getattr(selector, "__code__", None)
    if code is None:
        return selector if isinstance(selector, Hashable) else id(selector)
    cells = (cell.cell_contents for cell in selector.__closure__ or ())
    return code, *(each if isinstance(each, Hashable) else id(each) for each in cells)


def _listed(selectors: Any) -> Iterable[Any]:
    if isinstance(selectors, (list, tuple, set, frozenset)):
        return selectors
    return (selectors,)


def _is_module_pattern(selector: Any) -> bool:
    if not isinstance(selector, str) or "::" in selector or selector in FAMILIES:
        return False
    if selector == "" or not any(sign in selector for sign in ".*?["):
        raise UsageError(_unknown(selector))
    return True


def _in_module(pattern: str) -> Predicate:
    return lambda call: call.module is not None and fnmatch.fnmatchcase(call.module, pattern)


def _test_of(selector: Any) -> Callable[[Any], bool]:
    """Whether an operator is meant by a family, an operator or its name."""
    if isinstance(selector, torch._ops.OpOverloadPacket):
        return lambda operator: getattr(operator, "overloadpacket", None) is selector
    if isinstance(selector, torch._ops.OperatorBase):
        return lambda operator: operator is selector
    if isinstance(selector, str) and selector in _TAGS:
        tag = _TAGS[selector]
        return lambda operator: tag in getattr(operator, "tags", ())
    if isinstance(selector, str) and (selector in _NAMES or "::" in selector):
        patterns = _NAMES.get(selector, (selector,))
        return lambda operator: any(_named(operator, pattern) for pattern in patterns)
    raise UsageError(_unknown(selector))


def _named(operator: Any, pattern: str) -> bool:
    name = full_name(operator)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.rpartition(".")[0] or name, pattern)


def _unknown(selector: object) -> str:
    return (
        f"selector: got {selector!r}, expected one of {', '.join(map(repr, FAMILIES))} or {INPUTS!r}, an operator "
        f"(torch.ops.aten.mm, 'aten::mm'), a pattern of a submodule's path with a '.' or a '*' ('*.q_proj'), "
        f"spillway.within(...), spillway.saved_by(...), or a predicate of an OperatorCall"
    )
