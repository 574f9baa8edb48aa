"""A tape's outline: the calls of torch's functions that its operators come from.

NOTE [ Outlines ]

To compare each operator of a call with those on a tape, a mode must see each, and that takes the host several times as
long as to queue it. But a function calls torch's functions, which are fewer, and of which each says by what it is given
which operators it runs: a product of matrices with a bias is one call, and four operators. So beside a tape it is
written down which of torch's functions were called, with what, and which of the tape's values each made
(``outlining.py``). Calls after that are compared by these (``skimming.py``), and nobody looks at their operators.
Backward has the tape run again, as ever.

What a function of torch's does hangs on what it is given: numbers, and of tensors their type, layout and whether they
need gradients; and on settings of the process. All of that is compared. An outline is of what is seen by this alone:
where operators ran outside of such calls (an extension's own), where anything is written, drawn twice in one call, or
transformed by ``torch.func``, where autocast or somebody's function mode is on, or a class of tensors of its own has
its say, there is none, and operators are compared.

A tensor that is written unseen, as by an extension, shows that by its version, when it is next read, or handed in. What
a view is of is seen by how the view lies, when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from spillway.regions.globals import Globals, Numerics
from spillway.regions.steps import Spot

_GETTERS = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_cuda", "is_cpu", "is_meta"),
    *("is_sparse", "is_quantized", "is_nested", "is_xpu", "is_mps", "grad_fn", "itemsize", "nbytes", "_version"),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "storage_offset", "is_contiguous", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "get_device", "__len__"),
    # What follows gives other names for the same memory, or copies where there can be none.
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "contiguous", "transpose", "swapaxes", "t"),
    *("permute", "movedim", "unsqueeze", "squeeze", "expand", "expand_as", "broadcast_to", "narrow", "select"),
    *("chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unfold", "diagonal", "__getitem__"),
)
_FUNCTIONS = (
    *("is_floating_point", "is_complex", "numel", "reshape", "flatten", "unflatten", "transpose", "swapaxes", "t"),
    *("permute", "movedim", "unsqueeze", "squeeze", "broadcast_to", "narrow", "select", "chunk", "split"),
    *("tensor_split", "unbind", "diagonal"),
)
_profiler = torch.ops.profiler
_LABELS = (
    *(_profiler._record_function_enter, _profiler._record_function_enter_new, _profiler._record_function_exit),
    *(_profiler._record_function_exit._RecordFunction, _profiler._record_function_enter_new.default),
)
PASSES: Set[Any] = frozenset(
    (
        *_LABELS,
        *(getattr(torch.Tensor, name).__get__ for name in _GETTERS if hasattr(torch.Tensor, name)),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _FUNCTIONS),
    )
)
"""Functions that say what a tensor is like, or give a view of it. They need no line where that is all they do: what
they give is seen by how it lies, when it is next read."""
_einsum: Any = torch.backends.opt_einsum
_BY_PATHS = frozenset((torch.functional.einsum, torch.einsum))
_SETTINGS: Sequence[Callable[[], Any]] = (*Globals.getters, *Numerics.getters)
_CPU = torch.device("cpu")


class Role:
    """A tensor that lines read or give: one object in the call that the outline was written from.

    Args:
        number: among all of them.
        spot: how it lies in a value.
        requires_grad: whether it needs gradients.
        version: its own when it was first seen: what a function has made has the same in each call, and what it has not
            made is as many versions further on as its value is.
    """

    __slots__ = ("number", "requires_grad", "spot", "version")

    def __init__(self, number: int, spot: Spot, *, requires_grad: bool, version: int) -> None:
        self.number = number
        self.spot = spot
        self.requires_grad = requires_grad
        self.version = version


def settings_now(func: Any) -> tuple[Any, ...]:
    """What else operators of a function may hang on than what it is given."""
    found = [get() for get in _SETTINGS]
    if func in _BY_PATHS:
        found += _einsum.enabled, _einsum.strategy
    return tuple(found)


class Line:
    """One call of a function of torch's.

    Args:
        func: the function.
        args: what it is given, with a :class:`Role` in place of each tensor.
        kwargs: the same by keyword.
    """

    __slots__ = (
        *("args", "constants", "count", "device", "draws", "func", "gives", "grad", "kwargs", "lists", "makes"),
        *("reads", "renames", "roles", "settings", "single"),
    )

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.count = len(args)
        self.roles = tuple(
            (place, arg.number, arg.requires_grad, arg) for place, arg in enumerate(args) if type(arg) is Role
        )
        """Arguments that are tensors: their places, and what is asked of their roles."""
        self.lists = tuple(
            (place, arg) for place, arg in enumerate(args) if type(arg) in (list, tuple) and any(roles_in(arg))
        )
        """Arguments with tensors in them."""
        others = (*(place for place, *_ in self.roles), *dict(self.lists))
        self.constants = tuple((place, arg) for place, arg in enumerate(args) if place not in others)
        self.single = True
        """Whether it gives one tensor."""
        self.gives: tuple[tuple[int, Role], ...] = ()
        """Tensors, by their places among the outputs."""
        self.makes: frozenset[int] = frozenset()
        """Values that its operators make."""
        self.reads: frozenset[int] = frozenset()
        """Values that the tensors which it is given lie in."""
        self.draws = -1
        """The operator that draws, by its place on the tape; -1: none."""
        self.device = _CPU
        """Where it draws."""
        self.renames: frozenset[int] = frozenset()
        """Values that it has not made, and may give another name of that is no view by its schema."""
        self.grad = True
        """Whether gradients were recorded."""
        self.settings: tuple[Any, ...] | None = None
        """Those under which it ran, if it hangs on them."""


@dataclass(frozen=True)
class Outline:
    """See NOTE [ Outlines ]."""

    lines: Sequence[Line]
    inputs: Sequence[Role]
    """The function's tensors."""
    roles: Sequence[Role]
    """By their numbers."""

    @cached_property
    def of_values(self) -> Mapping[int, Sequence[Role]]:
        """Those that lie in each value."""
        found: dict[int, list[Role]] = {}
        for role in self.roles:
            found.setdefault(role.spot.value, []).append(role)
        return found

    def shown(self, made: Mapping[int, Spot]) -> Set[int]:
        """Those of some values of which a line that makes them gives a tensor over all that was made.

        Args:
            made: how an operator gave each of them.
        """
        return {
            role.spot.value
            for line in self.lines
            for _, role in line.gives
            if role.spot.value in line.makes and (spot := made.get(role.spot.value)) is not None
            if role.spot.start <= spot.start and role.spot.end >= spot.end
        }


def roles_in(values: Any) -> Iterator[Role]:
    """Those among arguments, in lists too."""
    for value in values:
        if type(value) is Role:
            yield value
        elif type(value) in (list, tuple):
            yield from roles_in(value)
