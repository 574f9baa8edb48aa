"""Selectors: which operators' outputs of a checkpointed function are kept, offloaded or recomputed.

A *selector* names operators. It is one of

* a family: ``"matmul"``, ``"attention"``, ``"norm"``, ``"convolution"``, ``"softmax"``, ``"embedding"``,
  ``"pointwise"``, ``"random"``;
* an operator: ``torch.ops.aten.mm.default``, all its overloads (``torch.ops.aten.mm``), or its name, with or without
  overload, as in a shell: ``"aten::mm"``, ``"aten::add.Tensor"``, ``"aten::*softmax*"``;
* the submodule that ran it, by its path below the function's module: ``"*.q_proj"``, ``"mlp.*"``;
* :class:`within`: both of these, operators that run inside of a submodule;
* :class:`saved_by`: the tensors that operators save for backward;
* a predicate, called with an :class:`OperatorCall`;
* ``"inputs"``: the inputs of the function.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from spillway._torch import AnyOperator, Overload, Overloads, overload_of, schema_of
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
    """One operator that a checkpointed function ran, for predicates."""

    operator: Any
    """The overload: ``torch.ops.aten.mm.default``."""
    module: str | None
    """Path of the submodule that ran it, below the function's module, which is ``""``."""
    index: int
    """Number of operators that the function ran before it."""
    nbytes: int
    """Bytes of its outputs."""

    @property
    def name(self) -> str:
        """``"aten::mm.default"``."""
        return full_name(self.operator)


Predicate = Callable[[OperatorCall], bool]


@dataclass(frozen=True)
class saved_by:  # noqa: N801  (read aloud: offload=[saved_by("attention")])
    """Tensors that operators save for backward, and that the function has computed: their inputs and outputs.

    ``offload=[saved_by("attention")]`` offloads the queries, keys and values that attention reads (after rotary
    embedding), its output and its statistics. No operator before attention is recomputed for their sake.

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

    ``save=[within("mlp", "matmul")]`` keeps the outputs of the matrix products of ``mlp``. Products elsewhere, and
    other operators of ``mlp``, are recomputed. A submodule's own submodules, at any depth, are inside of it.

    Args:
        module: the submodule's path below the function's module, or a pattern of paths as in a shell: ``"mlp"``,
            ``"*.experts"``.
        selector: a family, or an operator.

    Raises:
        UsageError: for an invalid path or selector.

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
        if call.module is None or not self._names(call.operator):
            return False
        names = call.module.split(".")
        outer = (".".join(names[:count]) for count in range(1, len(names) + 1))
        return any(fnmatch.fnmatchcase(each, self.module) for each in outer)


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan's decisions about a block, operator by operator.

    If another operator stands at a place than in the plan, its outputs are recomputed.
    """

    decisions: Mapping[int, tuple[str, Decision]]
    """For an operator, by the number of operators before it: its name (``"aten::mm.default"``), and the decision."""
    inputs: Decision = Decision.KEEP
    """The decision about the inputs."""
    recomputes: bool = True
    """Whether any saved tensor is recomputed. Otherwise tensors without a decision are kept."""

    def decision(self, place: int, operator: Any) -> Decision:
        planned = self.decisions.get(place)
        return Decision.RECOMPUTE if planned is None or planned[0] != full_name(operator) else planned[1]


Selector = str | Overload | Overloads | Predicate | within | saved_by


@dataclass(slots=True, eq=False)
class _Rule:
    """One selector: its test, and the decision if the test is true."""

    selector: Any
    test: Callable[[Any], bool]
    decision: Decision
    has_named: bool = False


def _first(rules: list[_Rule], asked: Any) -> Decision | None:
    """The decision of the first rule whose test is true."""
    for rule in rules:
        if rule.test(asked):
            rule.has_named = True
            return rule.decision
    return None


class Choices:
    """Decides about the operators of a checkpointed function.

    Args:
        save: selectors of tensors to keep. They win over ``offload``. :class:`saved_by` comes last.
        offload: selectors of tensors to offload.
        policy: instead, a :class:`Planned`, or a policy function of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts``. If an output is written in place, the
            ``MUST`` values raise an error, and for the ``PREFER`` values it is recomputed.

    Raises:
        UsageError: for an invalid selector.
    """

    def __init__(
        self,
        save: Selector | Sequence[Selector] = (),
        offload: Selector | Sequence[Selector] = (),
        policy: Planned | Callable[..., CheckpointPolicy | bool] | None = None,
    ) -> None:
        self.planned = policy if isinstance(policy, Planned) else None
        if policy is not None and self.planned is None and not callable(policy):
            raise UsageError(f"policy: got {policy!r}, expected a callable as torch's selective checkpointing takes it")
        self._policy: Any = policy
        self.inputs: Decision | None = None if self.planned is None else self.planned.inputs
        """The decision about the inputs."""
        self.patterns: list[str] = []
        """Patterns of submodules."""
        self._saved_by: list[_Rule] = []
        self._names: list[_Rule] = []
        self._predicates: list[_Rule] = []
        self._selectors = [
            (selector, decision)
            for selectors, decision in ((save, Decision.KEEP), (offload, Decision.OFFLOAD))
            for selector in (selectors if isinstance(selectors, (list, tuple, set, frozenset)) else (selectors,))
        ]
        for selector, decision in self._selectors:
            self._add(selector, decision)
        if policy is not None and self._selectors:
            raise UsageError("A policy and selectors (save, offload) exclude each other. Give one of them.")
        self.key: Hashable = self.planned or (
            _key_of(policy),
            # By name: the hash of an enum is a Python function.
            *((decision.name, _key_of(selector)) for selector, decision in self._selectors),
        )
        """Tells these choices from others."""
        self._met: set[int] = set()
        """Places of the plan's operators that came."""

    @property
    def any(self) -> bool:
        """Whether outputs of operators may be kept or offloaded, apart from :class:`saved_by`."""
        return bool(self._policy or self._names or self._predicates)

    @property
    def preserves(self) -> bool:
        """Whether a tensor may be kept or offloaded, apart from the inputs."""
        return bool(self.planned.decisions) if self.planned is not None else self.any or bool(self._saved_by)

    def has(self, decision: Decision) -> bool:
        """Whether a selector other than the inputs has this decision."""
        return any(each is decision and selector != INPUTS for selector, each in self._selectors)

    @property
    def wants_modules(self) -> bool:
        """Whether a predicate may look at the module that runs an operator."""
        return bool(self._predicates)

    @property
    def asks(self) -> bool:
        """Whether decisions depend on more than the operator."""
        return bool(self._predicates) or self._policy is not None

    def by_name(self, operator: Any) -> Decision | None:
        """The decision, if it follows from the operator alone."""
        return _first(self._names, operator)

    def by_saving(self, operator: Any) -> Decision | None:
        return _first(self._saved_by, operator)

    def by_place(self, place: int, operator: Any) -> Decision:
        assert self.planned is not None
        decision = self.planned.decision(place, operator)
        if decision is not Decision.RECOMPUTE:
            self._met.add(place)
        return decision

    def by_call(self, call: OperatorCall, output: Any, args: Any, kwargs: Any) -> tuple[Decision, bool]:
        """The decision about one call, and whether it is a command."""
        if self._policy is None:
            return _first(self._predicates, call) or Decision.RECOMPUTE, False
        context = SelectiveCheckpointContext(is_recompute=False)
        context.op_output = output  # type: ignore[attr-defined, unused-ignore]  # younger than the oldest torch served
        answer = self._policy(context, call.operator, *args, **kwargs)
        if isinstance(answer, bool):
            answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
        if not isinstance(answer, CheckpointPolicy):
            raise PolicyError(
                f"policy {self._policy!r}: got {answer!r} for {call.operator}, expected a "
                f"torch.utils.checkpoint.CheckpointPolicy or a bool"
            )
        return _MEANING[answer.name.partition("_")[2]], answer.name.startswith("MUST")

    def unused(self) -> list[Any]:
        """Selectors that have named no operator yet, and operators of a plan that did not come."""
        selectors = [rule.selector for rule in (*self._names, *self._predicates, *self._saved_by) if not rule.has_named]
        planned = {} if self.planned is None else self.planned.decisions
        return selectors + [f"{planned[place][0]} at {place}" for place in sorted(planned.keys() - self._met)]

    def _add(self, selector: Any, decision: Decision) -> None:
        if isinstance(selector, str) and selector == INPUTS:
            self.inputs = self.inputs or decision
        elif isinstance(selector, saved_by):
            self._saved_by.append(_Rule(selector, selector.matches, decision))
        elif isinstance(selector, str) and "::" not in selector and selector not in FAMILIES:
            if not any(sign in selector for sign in ".*?["):
                raise UsageError(_unknown(selector))
            self.patterns.append(selector)
            self._predicates.append(_Rule(selector, _in_module(selector), decision))
        elif isinstance(selector, (str, AnyOperator, Overloads)):
            self._names.append(_Rule(selector, _test_of(selector), decision))
        elif callable(selector):
            if isinstance(selector, within):
                self.patterns.append(selector.module)
            self._predicates.append(_Rule(selector, selector, decision))
        else:
            raise UsageError(_unknown(selector))


_MEANING = {"SAVE": Decision.KEEP, "RECOMPUTE": Decision.RECOMPUTE, "CPU_OFFLOAD": Decision.OFFLOAD}
"""Decisions by names of ``CheckpointPolicy``, after ``MUST_`` or ``PREFER_``."""


def full_name(operator: Any) -> str:
    """``"aten::mm.default"``; for an operator of higher order, its name."""
    if isinstance(operator, Overload):
        return f"{schema_of(operator).name}.{overload_of(operator)}"
    return str(operator)


def _key_of(selector: Any) -> Hashable:
    """Tells a selector from others: functions by their code and their closures."""
    code = getattr(selector, "__code__", None)
    if code is None:
        return selector if isinstance(selector, Hashable) else id(selector)
    cells = (cell.cell_contents for cell in selector.__closure__ or ())
    return code, *(each if isinstance(each, Hashable) else id(each) for each in cells)


def _in_module(pattern: str) -> Predicate:
    return lambda call: call.module is not None and fnmatch.fnmatchcase(call.module, pattern)


def _test_of(selector: Any) -> Callable[[Any], bool]:
    """The test of a family, an operator or its name."""
    if isinstance(selector, Overloads):
        return lambda operator: getattr(operator, "overloadpacket", None) is selector
    if isinstance(selector, AnyOperator):
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
