"""What a replay saves, by its number, and how that compares with what forward saved.

NOTE [ When a replay ends ]

Most operators save a tensor that is there already: the replay ends before their kernels run. Some save a tensor that
their kernel writes afterwards (the noise of ``rrelu``), and no version counter tells. So where the last tensor that is
wanted needs no gradient, and was not there before the replay, the replay ends when the next operator begins to save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spillway.capture.handles import carry_attributes
from spillway.checkpointing.checks import differed, print_of, prints_of
from spillway.checkpointing.reached import refuse_written
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided, tensors_in
from spillway.errors import RecomputeError

_next_node = torch._C._autograd._get_sequence_nr
_modes = torch._C._len_torch_dispatch_stack
_STRIDED = torch.strided

Meta = tuple[Any, torch.dtype, torch.device, tuple[int, ...]]
"""Shape, dtype, device and strides of a saved tensor."""


class Enough(BaseException):
    """A second run has made all that is wanted. No error of anybody's: what catches those in a function lets it go."""


class Collector:
    """Takes what a replay saves, by its number."""

    def __init__(
        self,
        label: str,
        wanted: set[int],
        outputs: dict[int, int],
        until: int | None,
        metas: Sequence[Meta],
        prints: dict[int, torch.Tensor] | None,
        output_prints: Sequence[torch.Tensor | None] | None,
        written: set[int],
        changed: dict[int, tuple[torch.Tensor, int]],
        *,
        checks: bool,
        waits: bool,
        saves: Callable[[int, torch.Tensor], None] | None = None,
        asked: Callable[[], Exception] | None = None,
        holds: bool = True,
    ) -> None:
        self._label = label
        self._wanted = wanted
        self._outputs = outputs
        """Numbers of outputs that are wanted, too, with their places among the tensors of the output."""
        self._until = until
        self._metas = metas
        self._prints = prints
        self._output_prints = output_prints
        self._written = written
        """Memory that forward wrote: it gets its content of now, and its version, when the replay is over."""
        self._changed = changed
        """Memory that was written since forward, with what was there."""
        self._checks = checks
        self._waits = waits
        """Whether it must be known now whether values are the same; else the device tells later."""
        self._asked = asked
        """In a partial replay, gives the error where the function asks for what it saved, which may have no content."""
        self._holds = holds
        """Whether the graph of the replay has what it saves."""
        self._saves = saves
        """Is told of each tensor that the replay saves, and its number."""
        self._count = 0
        self._there: Sequence[torch.Tensor] = ()
        self._held: list[torch.Tensor | None] = []
        """What the graph of the replay has, by numbers: a graph that somebody keeps would hold all of it."""
        self._late: dict[int, torch.Tensor] = {}
        """What it has of what was saved after the end."""
        self._values: dict[int, tuple[torch.Tensor, int]] = {}
        self._pending: list[tuple[int, torch.Tensor, int]] = []
        self._pairs: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._node = self._last = -1
        """The node that saves, and the one with which the replay ends."""
        self._saving: list[torch.Tensor] = []
        """What that node has saved that is wanted."""
        self._other = ""
        """How what was saved differs from what forward saved."""
        self.has_ended = False
        self._is_simple = saves is None and prints is None and not (written or changed)
        """Whether what is saved has only to be held."""

    def know(self, tensors: Sequence[torch.Tensor]) -> None:
        """These are there without the replay."""
        self._there = tensors

    def numbers(self) -> Set[int]:
        """Which wanted tensors the replay has saved."""
        return set(self._values)

    def made_bytes(self) -> int:
        """Bytes of the storages of wanted tensors that the replay made."""
        known = storages_of(self._there)
        made = storages_of([tensor for tensor, _ in self._values.values()])
        return sum(nbytes for storage, nbytes in made.items() if storage not in known)

    def pack(self, tensor: torch.Tensor) -> int:
        """The hook. See NOTE [ When a replay ends ].

        What is simple is inlined: there are some forty saved tensors in a decoder layer, and the GPU may wait for it.
        """
        node = _next_node()
        if node != self._node:
            if self._last >= 0:
                self.has_ended = True
                raise Enough
            self._node = node
            self._saving.clear()
        number = self._count
        self._count = number + 1
        if (
            self._is_simple
            and not self.has_ended
            and type(tensor) in PLAIN
            and tensor.layout is _STRIDED
            and not tensor.is_nested
            and not _modes()
        ):
            meta = self._metas[number] if number < len(self._metas) else None
            if meta is None or (self._checks and (tensor.shape, tensor.dtype, tensor.device, tensor.stride()) != meta):
                self._compare_meta(number, tensor)
            if tensor.is_leaf:
                alias = tensor
            else:
                alias = tensor.detach()
                if tensor.__dict__:
                    carry_attributes(tensor, alias)
            self._held.append(alias)
            if number in self._wanted:
                self._values[number] = alias, -1 if alias.is_inference() else alias._version
                self._saving.append(tensor)
        else:
            self._pack(tensor, number, node)
        until = self._until
        if until is not None and number >= until and not self.has_ended:
            if all(map(self._is_written, self._saving)):
                self.has_ended = True
                raise Enough
            self._last = node
        return number

    def _pack(self, tensor: torch.Tensor, number: int, node: int) -> None:
        """As :meth:`pack`, of any tensor in any replay."""
        if self.has_ended:
            self._late[number] = tensor.detach()
            return
        if self._saves is not None:
            self._saves(number, tensor)
            if not self._holds:
                self._held.append(None)
                return
        self._compare_meta(number, tensor)
        with below_modes(tensor):
            alias = alias_of(tensor)
            self._held.append(alias if self._asked is None or number in self._wanted else None)
            if self._prints is not None:
                self._compare_pending(node)
                if number in self._prints:
                    self._pending.append((number, alias, node))
            if number in self._wanted:
                if self._changed and is_strided(alias) and (known := self._changed.get(alias.untyped_storage()._cdata)):
                    refuse_written(*known)
                self._values[number] = alias, self._version_of(alias)
                self._saving.append(tensor)

    def _compare_meta(self, number: int, tensor: torch.Tensor) -> None:
        if self._other:
            return
        if number >= len(self._metas):
            self._other = f"more tensors than the {len(self._metas)} of the forward pass"
        elif self._checks and (meta := meta_of(tensor)) != self._metas[number]:
            self._other = f"tensor {number} is {name_of(meta)}, and was {name_of(self._metas[number])}"

    def _is_written(self, tensor: torch.Tensor) -> bool:
        """Whether it has its content already: it comes from outside, or an earlier operator made it."""
        if tensor.grad_fn is not None or tensor.requires_grad:
            return True
        return is_strided(tensor) and tensor.untyped_storage()._cdata in storages_of(self._there)

    def _version_of(self, alias: torch.Tensor) -> int:
        if self._written and is_strided(alias) and alias.untyped_storage()._cdata in self._written:
            return -1
        return -1 if alias.is_inference() else alias._version

    def unpack(self, number: int) -> torch.Tensor:
        """The hook."""
        if self._last >= 0:
            # The function takes a gradient inside, and so it has come as far as forward had.
            self.has_ended = True
            raise Enough
        held = self._late.get(number) if number >= len(self._held) else self._held[number]
        if held is not None:
            return held
        if self._asked is not None and not self.has_ended:
            raise self._asked()
        raise RecomputeError(
            f"backward reached a graph that {self._label} left behind when it was recomputed. Backward may go through "
            f"the graph of the forward pass only. Return what the function keeps in a module or a list as an output."
        )

    def _compare_pending(self, node: int | None) -> None:
        prints = self._prints
        assert prints is not None
        while self._pending and (node is None or self._pending[0][2] < node):
            number, tensor, _ = self._pending.pop(0)
            found = print_of(tensor)
            if found is not None:
                self._pairs.append((number, prints[number], found))

    def gave(self, output: Any) -> None:
        """The function has come to its end."""
        if self._outputs:
            tensors = tensors_in(tree_leaves(output))
            if len(tensors) <= max(self._outputs.values()):
                self._other = self._other or f"it gave {len(tensors)} tensors"
                return
            for number, index in self._outputs.items():
                # Without the graph, which would hold this.
                self._values[number] = alias_of(tensors[index]), self._version_of(tensors[index])
        if self._prints is None or self._output_prints is None:
            return
        found = prints_of(output)
        if len(found) != len(self._output_prints):
            self._other = self._other or f"it gave {len(found)} tensors, not {len(self._output_prints)}"
            return
        self._pairs += [
            (-1, ours, theirs)
            for ours, theirs in zip(found, self._output_prints, strict=True)
            if ours is not None and theirs is not None
        ]

    def compare_pending(self) -> None:
        """Take fingerprints of what is still to be compared."""
        if self._prints is not None:
            with below_modes():
                self._compare_pending(None)

    def end(self) -> None:
        """The replay is over, whichever way."""
        if not self._other and not self.has_ended and self._count <= max(self._wanted, default=-1):
            self._other = f"{self._count} tensors, not the {len(self._metas)} of the forward pass"
        self.has_ended = True
        self._held.clear()
        self._saving.clear()

    def take(self) -> dict[int, tuple[torch.Tensor, int]]:
        """What is wanted, by numbers. It is not held here any more."""
        values, self._values = self._values, {}
        self._there = ()
        # A constant may have joined the graph since.
        return {
            number: (tensor if tensor.is_leaf else alias_of(tensor), version)
            for number, (tensor, version) in values.items()
        }

    @property
    def is_other(self) -> bool:
        """Whether shapes, dtypes, devices or the number of tensors were not those of forward."""
        return bool(self._other)

    def is_same(self) -> bool:
        """Whether all that was compared is equal, where that must be known now; else the device tells later."""
        if self._other:
            return False
        return not self._waits or all(torch.equal(a, b) for _, a, b in self._pairs)

    def differences(self) -> list[torch.Tensor]:
        """Whether values differ, a bool on each device, where nobody waits for it."""
        if self._waits or not self._pairs:
            return []
        with below_modes():
            found: dict[torch.device, list[torch.Tensor]] = {}
            for _, a, b in self._pairs:
                found.setdefault(a.device, []).append(a != b)
            return [torch.stack(each).any() for each in found.values()]

    def raise_if_other(self) -> None:
        """Raise, if shapes, dtypes, devices or the number of tensors were not those of forward."""
        if self._other and (self._checks or not self._values.keys() >= (self._wanted | self._outputs.keys())):
            raise self.error()

    def error(self) -> RecomputeError:
        """What to say of a replay that was another one."""
        if not self._other:
            return differed([self._label])
        return RecomputeError(
            f"{self._label} saved other tensors when it was recomputed than in its forward pass: {self._other}. It "
            f"reads something besides its arguments, parameters and Python state that changed in between. Pass that "
            f"as an argument, or leave it outside of the checkpointed function."
        )


def storages_of(tensors: Sequence[torch.Tensor]) -> dict[int, int]:
    """Storages of the tensors, and of the parts of wrappers, with their bytes."""
    found = {}
    for tensor in tensors if all(type(each) in PLAIN for each in tensors) else tensors_in(tensors):
        if is_strided(tensor):
            storage = tensor.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return found


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """What can be held of a saved tensor: itself, or an alias without the graph, which would hold itself."""
    if tensor.is_leaf:
        return tensor
    alias = tensor.detach()
    carry_attributes(tensor, alias)
    return alias


def meta_of(tensor: torch.Tensor) -> Meta:
    """What tells a saved tensor from others, without a look at its content."""
    try:
        shape = tensor.shape
        return shape, tensor.dtype, tensor.device, tensor.stride() if tensor.layout is torch.strided else ()
    except RuntimeError:
        # A strided nested tensor has no one shape.
        return tensor.numel(), tensor.dtype, tensor.device, ()


def name_of(meta: Meta | None) -> str:
    """How an error names it; ``None``: no tensor."""
    if meta is None:
        return "no tensor"
    shape = tuple(meta[0]) if isinstance(meta[0], torch.Size) else meta[0]
    return f"{shape} {meta[1]} on {meta[2]}{f' with strides {meta[3]}' if meta[3] else ''}"
