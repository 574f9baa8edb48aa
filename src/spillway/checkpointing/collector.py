"""Collects the tensors that a replay saves, and compares them with those of forward.

NOTE [ The end of a replay ]

Most operators save a tensor that already has its content, and the replay ends before their kernels run. Some save a
tensor that their kernel writes afterwards (the noise of ``rrelu``), without a new version. So if the last wanted tensor
needs no gradient and was made in the replay, the replay ends when the next operator begins to save.

A replay that is compared runs to the end of the function, with two exceptions. An optimizer that steps in backward may
have written weights since forward that only the rest of the function reads. And ranks repeat the same collectives: NOTE
[ Collectives ] in ``recorder.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from spillway._torch import dispatch_modes, next_node, storage_key, tree_leaves, version_of
from spillway.checkpointing.checks import Fingerprints, difference_error, fingerprints_of
from spillway.checkpointing.reached import why_refused
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided, tensors_in
from spillway.errors import RecomputeError
from spillway.saved_tensors.handles import carry_attributes
from spillway.saved_tensors.identity import is_streamed

Meta = tuple[Any, torch.dtype, torch.device, tuple[int, ...]]
"""Shape, dtype, device and strides of a saved tensor."""


class ReplayEnded(BaseException):
    """Ends a replay that has made all wanted tensors. Not an ``Exception``: functions do not catch it."""


@dataclass(eq=False)
class Collector:
    """Takes the tensors that a replay saves, by their numbers."""

    label: str
    wanted: set[int]
    outputs: dict[int, int]
    """Numbers of wanted outputs, with their places among the tensors of the output."""
    until: int | None
    """The number with which the replay may end."""
    metas: Sequence[Meta]
    fingerprints: dict[int, torch.Tensor] | None
    output_fingerprints: Sequence[torch.Tensor | None] | None
    written: set[int]
    """Memory that forward wrote. After the replay its current content and version are restored."""
    changed: dict[int, tuple[torch.Tensor, int]]
    """Memory that was written since forward, with the tensor and its version in forward."""
    _: KW_ONLY
    checks: bool
    saves: Callable[[int, torch.Tensor], None] | None = None
    """Called for each tensor that the replay saves, with its number."""
    refuse_unpack: Callable[[], Exception] | None = None
    """Makes the error of a partial replay in which the function takes a gradient: a tensor may have no content."""
    shared: bool = False
    """Whether ranks must end it at the same place: NOTE [ Collectives ] in ``recorder.py``."""
    may_end: Callable[[], None] | None = None
    """Called when the replay may end, which then goes on: a mode ends it."""
    holds: bool = True
    """Whether the graph of the replay holds its saved tensors."""

    def __post_init__(self) -> None:
        self._count = 0
        self._there: Sequence[torch.Tensor] = ()
        self._held: list[torch.Tensor | None] = []
        """Saved tensors of the replay's graph, by numbers. The graph has only the numbers, and may be kept."""
        self._late: dict[int, torch.Tensor] = {}
        self._values: dict[int, tuple[torch.Tensor, int]] = {}
        self._replayed = Fingerprints()
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Fingerprints of outputs, and those of forward."""
        self._node = self._last = -1
        """The node that saves now, and the node with which the replay ends."""
        self._saving: list[torch.Tensor] = []
        """Wanted tensors that this node has saved."""
        self.other = ""
        """How the saved tensors differ from those of forward, apart from values."""
        self.refused = ""
        """Why a saved tensor is refused. The function may make another error of it."""
        self.has_ended = False
        self._is_simple = self.saves is None and self.fingerprints is None and not (self.written or self.changed)
        """Whether saved tensors are only held."""

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors that exist without the replay."""
        self._there = tensors

    def numbers(self) -> Set[int]:
        return set(self._values)

    def made_bytes(self) -> int:
        """Bytes of the storages of wanted tensors that the replay made."""
        known = storages_of(self._there)
        made = storages_of([tensor for tensor, _ in self._values.values()])
        return sum(nbytes for storage, nbytes in made.items() if storage not in known)

    def pack(self, tensor: torch.Tensor) -> int:
        """The hook. See NOTE [ The end of a replay ]. The simple case is inlined: a layer saves some forty tensors."""
        node = next_node()
        if node != self._node:
            if self._last >= 0:
                self._end_replay()
            self._node = node
            self._saving.clear()
        number = self._count
        self._count = number + 1
        if self._is_simple and not self.has_ended and type(tensor) in PLAIN and not dispatch_modes():
            meta = self.metas[number] if number < len(self.metas) else None
            if meta is None or (self.checks and meta_of(tensor) != meta):
                self._compare_meta(number, tensor)
            if tensor.is_leaf:
                alias = tensor
            else:
                alias = tensor.detach()
                if tensor.__dict__:
                    carry_attributes(tensor, alias)
            self._held.append(alias)
            if number in self.wanted:
                self._values[number] = alias, -1 if alias.is_inference() else version_of(alias)
            if self.shared or number in self.wanted:
                self._saving.append(tensor)
        else:
            self._pack(tensor, number, node)
        until = self.until
        if until is not None and number >= until and not self.has_ended:
            if all(map(self._is_written, self._saving)):
                self._end_replay()
            self._last = node
        return number

    def _end_replay(self) -> None:
        if self.may_end is None:
            self.has_ended = True
            raise ReplayEnded
        self.may_end()

    def _pack(self, tensor: torch.Tensor, number: int, node: int) -> None:
        """As :meth:`pack`, for any tensor in any replay."""
        if self.has_ended:
            self._late[number] = tensor.detach()
            return
        if self.saves is not None:
            self.saves(number, tensor)
            if not self.holds:
                self._held.append(None)
                return
        self._compare_meta(number, tensor)
        with below_modes(tensor):
            alias = alias_of(tensor)
            self._held.append(alias if self.refuse_unpack is None or number in self.wanted else None)
            if self.fingerprints is not None:
                self._replayed.compute(node)
                if number in self.fingerprints:
                    self._replayed.add(number, alias, node)
            if number in self.wanted:
                if (
                    self.changed
                    and is_strided(alias)
                    and (known := self.changed.get(storage_key(alias.untyped_storage())))
                ):
                    self.refused = why_refused(*known)
                    raise RecomputeError(self.refused)
                self._values[number] = alias, self._version_of(alias)
            if self.shared or number in self.wanted:
                self._saving.append(tensor)

    def _compare_meta(self, number: int, tensor: torch.Tensor) -> None:
        if self.other:
            return
        if number >= len(self.metas):
            self.other = f"more tensors than the {len(self.metas)} of the forward pass"
        elif self.checks and (meta := meta_of(tensor)) != self.metas[number]:
            self.other = f"tensor {number} is {name_of(meta)}, and was {name_of(self.metas[number])}"

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether it already has its content: it comes from outside, or an earlier operator made it."""
        if tensor.grad_fn is not None or tensor.requires_grad:
            return True
        return is_strided(tensor) and storage_key(tensor.untyped_storage()) in storages_of(self._there)

    def _version_of(self, alias: torch.Tensor) -> int:
        is_written = self.written and is_strided(alias) and storage_key(alias.untyped_storage()) in self.written
        return -1 if is_written or alias.is_inference() else version_of(alias)

    def unpack(self, number: int) -> torch.Tensor:
        if self._last >= 0:
            # The function takes a gradient inside: it has come as far as forward had.
            self.has_ended = True
            raise ReplayEnded
        held = self._late.get(number) if number >= len(self._held) else self._held[number]
        if held is not None:
            return held
        if self.refuse_unpack is not None and not self.has_ended:
            raise self.refuse_unpack()
        raise RecomputeError(
            f"backward reached a graph that {self.label} left behind when it was recomputed. Backward may go through "
            f"the graph of the forward pass only. Return what the function keeps in a module or a list as an output."
        )

    def gave(self, output: Any) -> None:
        if self.outputs:
            tensors = tensors_in(tree_leaves(output))
            if len(tensors) <= max(self.outputs.values()):
                self.other = self.other or f"it gave {len(tensors)} tensors"
                return
            for number, index in self.outputs.items():
                # Without the graph, which would hold this object.
                self._values[number] = alias_of(tensors[index]), self._version_of(tensors[index])
        if self.fingerprints is None or self.output_fingerprints is None:
            return
        found = fingerprints_of(output)
        if len(found) != len(self.output_fingerprints):
            self.other = self.other or f"it gave {len(found)} tensors, not {len(self.output_fingerprints)}"
            return
        pairs = zip(found, self.output_fingerprints, strict=True)
        self._pairs = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]

    def function_ended(self) -> None:
        """Take the fingerprints that are still to be compared."""
        if self.fingerprints is not None:
            with below_modes():
                self._replayed.compute()

    def end(self) -> None:
        """The replay has ended, or has failed."""
        if not self.other and not self.has_ended and self._count <= max(self.wanted, default=-1):
            self.other = f"{self._count} tensors, not the {len(self.metas)} of the forward pass"
        self.has_ended = True
        self._held.clear()
        self._saving.clear()

    def pop_values(self) -> dict[int, tuple[torch.Tensor, int]]:
        """The wanted tensors, by numbers. They are not held here any more."""
        values, self._values, self._there = self._values, {}, ()
        # A constant may have joined the graph since, and a streamed parameter is about to get other data.
        return {number: (alias_of(tensor), version) for number, (tensor, version) in values.items()}

    def is_same(self) -> bool:
        """Whether metadata, and values that are compared, are equal."""
        if self.other:
            return False
        before = self.fingerprints or {}
        pairs = [*((before[number], found) for number, found in self._replayed.found.items()), *self._pairs]
        with below_modes():
            # Reading a number from a GPU waits for it: once for each GPU.
            differ: dict[torch.device, list[torch.Tensor]] = {}
            for a, b in pairs:
                differ.setdefault(a.device, []).append(a != b)
            return not any(torch.stack(each).any() for each in differ.values())

    def raise_if_other(self) -> None:
        """Raise an error if shapes, dtypes, devices or the number of tensors differ from forward."""
        if self.other and (self.checks or not self._values.keys() >= (self.wanted | self.outputs.keys())):
            raise self.error()

    def error(self) -> RecomputeError:
        if not self.other:
            return difference_error(self.label)
        how = f"saved other tensors when it was recomputed than in its forward pass: {self.other}"
        return difference_error(self.label, how)


def storages_of(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Storages of tensors, and of the parts of wrappers, with their bytes."""
    found = {}
    for tensor in tensors if all(type(each) in PLAIN for each in tensors) else tensors_in(tensors):
        if is_strided(tensor):
            storage = tensor.untyped_storage()
            found[storage_key(storage)] = storage.nbytes()
    return found


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """A saved tensor that can be held: itself, or an alias without the graph, which would hold itself."""
    if tensor.is_leaf and not is_streamed(tensor):
        return tensor
    alias = tensor.detach()
    carry_attributes(tensor, alias)
    return alias


def meta_of(tensor: torch.Tensor) -> Meta:
    """Shape, dtype, device and strides of a tensor."""
    try:
        # A plain tensor without strides raises an error. That is tried first, since to ask for its layout takes longer.
        has_strides = type(tensor) in PLAIN or tensor.layout is torch.strided
        return tensor.shape, tensor.dtype, tensor.device, tensor.stride() if has_strides else ()
    except RuntimeError:
        # A strided nested tensor has no one shape.
        shape = tensor.numel() if tensor.is_nested else tensor.shape
        return shape, tensor.dtype, tensor.device, ()


def name_of(meta: Meta) -> str:
    """Name of a tensor in an error."""
    shape = tuple(meta[0]) if isinstance(meta[0], torch.Size) else meta[0]
    return f"{shape} {meta[1]} on {meta[2]}{f' with strides {meta[3]}' if meta[3] else ''}"


def shapes_of(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """Shapes of tensors. Calls with other shapes have programs of their own."""
    return tuple([meta_of(tensor)[0] for tensor in tensors])
