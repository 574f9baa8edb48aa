"""What an operator's schema says of it: what it writes, what it gives back, whether it draws random numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import SAC_IGNORED_OPS

Key = int | str
"""Where an argument stands: its position, or its keyword."""


class Facts(NamedTuple):
    """What is known of an operator before it is called."""

    ignored: bool
    """Whether it is not counted: ``torch.utils.checkpoint`` calls it itself, more or less often in a re-run."""
    is_label: bool
    """Whether it is a mark for the profiler."""
    casts: bool
    """Whether autocast uses it to cast weights, which its cache makes come and go."""
    writes: tuple[Key, ...]
    """Arguments that it writes."""
    returned: tuple[Key | None, ...] | None
    """For each output, the argument that it is, or ``None`` for a new tensor. ``None`` as a whole: not known."""
    is_view: bool
    """Whether an output shares memory with an argument that is not written."""
    reshapes: bool
    """Whether it may change the shape of what it writes, which views then see."""
    is_random: bool
    """Whether it may draw from a generator."""
    is_settled: bool
    """Whether the host, or the shape of things, hangs on what it gave: it must give the same in a re-run."""


_SETTLED_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# Ties may be broken differently in a second run, and what is routed by it would go elsewhere.
_SETTLED = {"aten::topk", "aten::multinomial"}

# Of these, the places that are set are taken.
_MASKS = {torch.bool, torch.uint8}

# These write their running statistics, and their schema does not say so.
_SILENT_WRITERS: dict[str, tuple[Key, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}

# An error in a question about a tensor, which these and prim.layout are, would end the process.
_ASKED = {"aten::_nested_tensor_size", "aten::_nested_tensor_storage_offsets", "aten::_nested_tensor_strides"}

_KNOWN_TYPES = {"Tensor", "List[Tensor]", "Optional[Tensor]", "number", "bool", "int", "float"}

_UNKNOWN = Facts(
    ignored=False,
    is_label=False,
    casts=False,
    writes=(),
    returned=None,
    is_view=False,
    reshapes=False,
    is_random=False,
    is_settled=False,
)


def facts_of(operator: Any) -> Facts:
    """The facts of an overload. Of an operator of higher order nothing is known."""
    # By identity: an overload's hash is a function of Python's.
    known = _known.get(id(operator))
    if known is None:
        known = _known[id(operator)] = operator, _read(operator)
    return known[1]


def facts_of_call(operator: Any, args: tuple[Any, ...]) -> Facts:
    """The facts of a call: to index with places, and not with a mask, gives a shape that hangs on shapes alone."""
    facts = facts_of(operator)
    if operator is not torch.ops.aten.index.Tensor:
        return facts
    masked = any(each is not None and each.dtype in _MASKS for each in args[1])
    return facts._replace(is_settled=masked)


_known: dict[int, tuple[Any, Facts]] = {}
"""What was read already, with the operator, so that no other one takes its place in memory."""


def _read(operator: Any) -> Facts:
    if not isinstance(operator, torch._ops.OpOverload):
        return _UNKNOWN
    schema = operator._schema
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
    return Facts(
        ignored=operator in SAC_IGNORED_OPS or schema.name.startswith("prim::") or schema.name in _ASKED,
        is_label=schema.name.startswith("profiler::"),
        casts=operator is torch.ops.aten._to_copy.default,
        writes=tuple(writes),
        returned=tuple(returned) if all(str(value.type) in _KNOWN_TYPES for value in schema.returns) else None,
        is_view=is_view,
        reshapes=torch.Tag.inplace_view in tags
        or "resize" in schema.name
        or any(isinstance(key, str) for key in writes),
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_settled=bool(tags & _SETTLED_TAGS) or schema.name in _SETTLED,
    )


def argument(args: tuple[Any, ...], kwargs: dict[str, Any], key: Key) -> Any:
    """The argument that stands there, or ``None``."""
    if isinstance(key, str):
        return kwargs.get(key)
    return args[key] if key < len(args) else None
