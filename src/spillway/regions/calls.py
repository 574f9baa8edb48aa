"""One operator that ran in a region, and what its outputs looked like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from spillway.records import Decision
from spillway.regions.schema import Facts, Key
from spillway.regions.tensors import are_numbers, is_strided
from spillway.runtime.bytes import Bytes

# A member of an enum costs a search of its class each time that it is named.
_RECOMPUTE = Decision.RECOMPUTE


class Call:
    """One operator that ran."""

    __slots__ = (
        "after",
        "aliases",
        "before",
        "constants",
        "decision",
        "depends",
        "facts",
        "forms",
        "func",
        "given",
        "held",
        "is_shared",
        "like",
        "makes",
        "must",
        "plain",
        "reads",
        "single",
        "writes",
    )

    def __init__(self, func: Any, facts: Facts, reads: tuple[int, ...], constants: tuple[Any, ...]) -> None:
        self.func = func
        self.constants = constants
        """The arguments that are no tensors."""
        self.facts = facts
        self.reads = reads
        self.writes: tuple[int, ...] = ()
        self.makes: tuple[int, ...] = ()
        """New values, in the order of the new tensors among the outputs."""
        self.depends = False
        """Whether it computes with what depends on inputs, or on what needs grad."""
        self.plain = False
        """Whether all outputs are plain new tensors, arguments, numbers or nothing: so that it need not run again."""
        self.aliases = facts.is_view
        """Whether an output shares memory with an argument that is not written, by its schema or as it turned out."""
        self.single = True
        """Whether it gave one thing, and not a sequence."""
        self.forms: tuple[Any, ...] = ()
        """If plain, for each output: a :class:`Form`, an :class:`Argument`, or the thing itself."""
        self.decision = _RECOMPUTE
        self.must = False
        """Whether the decision was a command."""
        self.held: list[torch.Tensor | None] | None = None
        """Its new tensors, until the region ends; ``None`` for one that was let go of."""
        self.given: list[Any] | None = None
        """Handles of them, for the re-run."""
        self.before: Any = None
        """State of its generator before it ran."""
        self.after: Any = None
        """And after."""
        self.is_shared = False
        """Whether other regions have this very object: then it never changes."""
        self.like: Call | None = None
        """Of a region's own call, the shared one that says the same of the operator."""

    @property
    def is_given(self) -> bool:
        """Whether its outputs are kept or offloaded."""
        return self.decision is not _RECOMPUTE

    @property
    def is_settled(self) -> bool:
        """Whether its outputs are kept because the host, or the shape of things, hangs on them."""
        return self.facts.is_settled and self.plain and self.is_given

    @property
    def is_only_a_view(self) -> bool:
        """Whether it computes nothing."""
        return self.aliases and not self.writes and not self.makes

    @property
    def is_own(self) -> bool:
        """Whether it has something that is its own region's."""
        return self.is_given or self.before is not None or self.given is not None

    @property
    def common(self) -> Call | None:
        """The shared one that says the same of the operator, once the region has ended; ``None``: there is none."""
        return self if self.is_shared else self.like

    def own(self) -> Call:
        """One that says the same of the operator, for a region to have alone."""
        own = Call(self.func, self.facts, self.reads, self.constants)
        own.writes, own.makes, own.forms = self.writes, self.makes, self.forms
        own.depends, own.plain, own.aliases, own.single = self.depends, self.plain, self.aliases, self.single
        own.like = self.common
        return own

    def share(self) -> Call:
        """Find :attr:`common`; gives what the region is to have from now on: that, if nothing is the region's own."""
        if not self.is_own:
            self.held = None
        if self.like is None and are_numbers(self.constants):
            self.like = (self.own() if self.is_own else self).shared()
        if self.like is None or self.is_own:
            return self
        like, self.like = self.like, None
        return like

    def shared(self) -> Call:
        """One that says the same, for all regions to have, if nothing in this one is its own region's."""
        if self.is_own or not are_numbers(self.constants):
            return self
        # By its words, since 0.0 equals -0.0, and 1 equals True: of outputs, too, where some are no new tensors. The
        # operator is held by what is shared.
        forms = self.forms if len(self.forms) == len(self.makes) else repr(self.forms)
        key = (
            *(id(self.func), repr(self.constants), self.reads, self.writes, self.makes, forms),
            *(self.depends, self.plain, self.aliases, self.single),
        )
        if len(_shared) >= _MOST_SHARED:
            _shared.clear()
        shared = _shared.setdefault(key, self)
        shared.is_shared = True
        return shared


_shared: dict[tuple[Any, ...], Call] = {}
_MOST_SHARED = 1 << 14


class Form(NamedTuple):
    """What a new tensor looked like."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        """The tensor's; like tensors have the same one, since every region holds those of all its operators."""
        if is_strided(tensor):
            size, stride = tensor.shape, tensor.stride()
        else:
            # A jagged tensor's shape is no numbers.
            size, stride = torch.Size() if tensor.is_nested else tensor.shape, ()
        # By the tuple's own constructor: a named tuple's is a Python function.
        form = tuple.__new__(cls, (size, stride, tensor.dtype, tensor.device))
        if len(_forms) >= _MOST_FORMS:
            _forms.clear()
        return _forms.setdefault(form, form)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it is that of a tensor with strides."""
        return (
            tensor.shape == self.size
            and tensor.stride() == self.stride
            and tensor.dtype is self.dtype
            and tensor.device == self.device
        )

    def __str__(self) -> str:
        return f"{self.dtype} of {list(self.size)}"

    def unwritten(self, *, poisoned: bool) -> torch.Tensor:
        """A tensor like it, with anything in it; full of NaN if poisoned."""
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if poisoned:
            Bytes(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes()).tensor().fill_(0xFF)
        return tensor


_forms: dict[Form, Form] = {}
_MOST_FORMS = 4096


@dataclass(frozen=True, slots=True)
class Argument:
    """An output that is one of the arguments."""

    key: Key
