"""Facts from an operator's schema: which arguments it writes, what it returns, whether it draws random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

from spillway._torch import Overload, schema_of

Key = int | str
"""Position or keyword of an argument."""


class OperatorFacts(NamedTuple):
    """Facts about an operator that hold for all its calls. Without arguments: of an unknown operator."""

    ignored: bool = False
    """Whether programs leave it out, as ``torch.utils.checkpoint`` does: replays call it more or less often."""
    is_label: bool = False
    casts: bool = False
    """Whether autocast casts weights with it. Its cache makes these casts come and go."""
    writes: tuple[Key, ...] = ()
    """Arguments that it writes."""
    numbers: frozenset[Key] = frozenset()
    """Arguments that it computes with, and that may be numbers."""
    returned: tuple[Key | None, ...] | None = None
    """For each output, the argument that is returned, or ``None`` for another one. ``None`` as a whole: unknown, or it
    returns numbers that may depend on values."""
    is_view: bool = False
    """Whether an output shares memory with an argument that is not written."""
    reshapes: bool = False
    """Whether it may change the shape of an argument."""
    is_random: bool = False
    communicates: bool = False
    """Whether it is a collective, or waits for one: NOTE [ Collectives ] in ``recorder.py``."""
    is_data_dependent: bool = False
    """Whether shapes or Python code may depend on its output: a replay must run it."""


_DATA_DEPENDENT_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# A second run may break ties differently, and would route tokens to other experts.
_DATA_DEPENDENT = {"aten::topk", "aten::multinomial"}

# An index of these types selects by value.
_MASKS = {torch.bool, torch.uint8}

_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "symm_mem"}

# Operators that write running statistics, which their schema does not say.
_SILENT_WRITERS: dict[str, tuple[Key, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}

# Queries about a tensor, as prim.layout. An error in one of them would end the process.
_QUERIES = {"aten::_nested_tensor_size", "aten::_nested_tensor_storage_offsets", "aten::_nested_tensor_strides"}

# It refuses dropout.
_NEVER_DRAWS = "aten::_scaled_dot_product_flash_attention_for_cpu"

_KNOWN_TYPES = {"Tensor", "List[Tensor]", "Optional[Tensor]"}

_OPERANDS = {"Tensor", "Optional[Tensor]", "number", "Optional[number]"}

_POOL = torch.ops.aten.max_pool2d_with_indices.default
_FACTORS = frozenset(
    (torch.ops.aten._linalg_eigh.default, torch.ops.aten._linalg_svd.default, torch.ops.aten.linalg_eig.default)
)

_known: dict[int, tuple[Any, OperatorFacts]] = {}
"""Facts by the identity of the operator. The operator is held, so that its address is not used again."""


def facts_of(operator: Any) -> OperatorFacts:
    """The facts of an overload. Nothing is known of operators of higher order."""
    # By identity: the hash of an overload is a Python function.
    known = _known.get(id(operator))
    if known is None:
        known = _known[id(operator)] = operator, _read(operator)
    return known[1]


def facts_of_call(operator: Any, args: tuple[Any, ...]) -> OperatorFacts:
    """The facts of a call. The shape that indexing gives depends on values only for masks."""
    facts = facts_of(operator)
    if operator is not torch.ops.aten.index.Tensor:
        return facts
    masked = any(each is not None and each.dtype in _MASKS for each in args[1])
    return facts._replace(is_data_dependent=masked)


def _read(operator: Any) -> OperatorFacts:
    if not isinstance(operator, Overload):
        return OperatorFacts()
    schema = schema_of(operator)
    names: dict[frozenset[str], Key] = {}
    writes: list[Key] = []
    for position, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        if alias is None:
            continue
        key: Key = argument.name if argument.kwarg_only else position
        names[frozenset(alias.before_set)] = key
        if alias.is_write:
            writes.append(key)
    writes.extend(_SILENT_WRITERS.get(schema.name, ()))
    if operator.namespace == "c10d" and schema.name.endswith("_"):
        # Their schemas do not say that they write the first argument.
        writes = [0]
    returned: list[Key | None] = []
    is_view = False
    for value in schema.returns:
        alias = value.alias_info
        if alias is None:
            returned.append(None)
        elif alias.is_write:
            returned.append(names.get(frozenset(alias.before_set)))
        else:
            is_view = True
            returned.append(None)
    tags = set(operator.tags)
    # Integers of torch's own operators are shapes, as in fused attention.
    known = _KNOWN_TYPES | {"int"} if operator.namespace == "aten" else _KNOWN_TYPES
    return OperatorFacts(
        ignored=operator in SAC_IGNORED_OPS or schema.name.startswith("prim::") or schema.name in _QUERIES,
        is_label=schema.name.startswith("profiler::"),
        casts=operator is torch.ops.aten._to_copy.default,
        writes=tuple(writes),
        numbers=frozenset(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(schema.arguments)
            if str(argument.type) in _OPERANDS
        ),
        returned=tuple(returned) if all(str(value.type) in known for value in schema.returns) else None,
        is_view=is_view,
        reshapes=torch.Tag.inplace_view in tags
        or "resize" in schema.name
        or any(isinstance(key, str) for key in writes),
        is_random=torch.Tag.nondeterministic_seeded in tags and schema.name != _NEVER_DRAWS,
        communicates=operator.namespace in _COLLECTIVES,
        is_data_dependent=bool(tags & _DATA_DEPENDENT_TAGS) or schema.name in _DATA_DEPENDENT,
    )


def is_chosen_under_a_mode(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether torch may have chosen this operator only because a mode is active: NOTE [ Recording ] in ``recorder.py``.

    Without gradients and modes, functions of eigenvalues and singular values (also norms and condition numbers) compute
    no vectors, and ``max_pool1d`` has a kernel of its own. Found by running torch's database of operators both ways.
    """
    if func not in _FACTORS and not (func is _POOL and args[1][0] == 1):
        return False
    return not args[0].requires_grad


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> Any:
    """The argument at this place, or ``None``."""
    if isinstance(key, str):
        return kwargs.get(key)
    return args[key] if key < len(args) else None
