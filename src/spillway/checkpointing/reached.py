"""Tensors that a checkpointed function reaches besides its arguments: parameters, buffers, others in its Python state.

NOTE [ What a function writes ]

A replay must read what forward read, and leave no trace. Forward notes the version of each reached tensor before and
after. It also copies the small ones that need no gradient, and those that earlier calls were seen to write: some
functions write a buffer now and then only, and kernels of batch norm write without a version.

If forward has written any, the copies are held, and the replay starts from them. In any case the contents, and the
versions, after the replay are those from before it. Of buffers that nothing refers to but their modules, the modules
get copies for as long as the replay runs. Other tensors are written twice: before the replay, and after it.

What forward has written without a copy of it (a large tensor, for the first time) cannot be put back. In a call that is
compared in full the comparison decides whether that matters. In another call the replay is refused if it reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from spillway.checkpointing.contents import copies_of, has_content_of, may_be_written, write_back
from spillway.checkpointing.learned import Learned
from spillway.regions.tensors import PLAIN, below_modes, is_strided

_MOST_OBSERVED, _MOST_COPIED = 64 << 20, 1 << 20
"""Bytes of a tensor that is copied in case that the function writes it, in observed calls and in others."""


class ReachedTensors:
    """See NOTE [ What a function writes ].

    Args:
        named: the tensors, each with the name that it was found under.
        learned: which names earlier calls were seen to write.
        is_observed: whether this call is compared in full.
        is_compared: whether its values are compared.
        odd: a tensor of a subclass among what the function reads, if there is one.
    """

    __slots__ = (
        *("_before", "_copied", "_is_compared", "_is_observed", "_learned", "_lost", "_named", "_odd", "_unwritten"),
        "_versions",
    )

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        learned: Learned,
        odd: torch.Tensor | None,
        *,
        is_observed: bool,
        is_compared: bool,
    ) -> None:
        self._named = named
        self._learned = learned
        self._is_observed, self._is_compared = is_observed, is_compared
        self._odd = odd
        self._versions = [tensor._version for _, tensor in named]
        written, most = learned.written, _MOST_OBSERVED if is_observed else _MOST_COPIED
        self._copied = [
            tensor for name, tensor in named if may_be_written(tensor, most) or (written and name in written)
        ]
        """What is copied in forward and protected in the replay."""
        self._before = list(zip(self._copied, copies_of(self._copied), strict=True)) if self._copied else []
        self._unwritten: Sequence[tuple[torch.Tensor, int]] = ()
        """What forward was not seen to write, with its versions when forward had ended."""
        self._lost: list[torch.Tensor] = []
        """What forward wrote, of which there is no copy."""

    def forward_ended(self) -> None:
        """Settle what forward has written."""
        named, versions, learned = self._named, self._versions, self._learned
        after = [tensor._version for _, tensor in named]
        if after == versions and not self._before:
            self._unwritten = [(tensor, version) for (_, tensor), version in zip(named, after, strict=True)]
            self._named, self._versions = (), []
            return
        wrote = set() if after == versions else {i for i, version in enumerate(after) if version != versions[i]}
        if self._is_observed and self._before:
            differ = {id(tensor) for tensor, before in self._before if not has_content_of(tensor, before)}
            wrote |= {place for place, (_, tensor) in enumerate(named) if id(tensor) in differ}
        if wrote:
            learned.written |= {named[place][0] for place in wrote}
        elif not (self._is_compared or (learned.written and any(name in learned.written for name, _ in named))):
            # A comparison would see what a kernel has written without a version.
            self._before.clear()
        copied = {id(tensor) for tensor, _ in self._before}
        self._lost = [named[place][1] for place in wrote if id(named[place][1]) not in copied]
        self._unwritten = [
            (tensor, version)
            for place, ((_, tensor), version) in enumerate(zip(named, after, strict=True))
            if place not in wrote
        ]
        self._named, self._versions = (), []

    @property
    def may_be_written(self) -> bool:
        """Whether there is anything that the function may write."""
        return bool(self._copied or self._lost)

    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        found = {id(tensor): tensor for tensor, _ in (*self._unwritten, *self._before)}
        return [*found.values(), *self._lost]

    def constants(self) -> list[torch.Tensor]:
        """In forward, those that need no gradient."""
        return [tensor for _, tensor in self._named if not tensor.requires_grad]

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """What is not what forward read, with the versions as they were, and cannot be put back."""
        changed = [(tensor, version) for tensor, version in self._unwritten if tensor._version != version]
        return changed if self._is_observed else [*changed, *((tensor, -1) for tensor in self._lost)]

    def protected(self) -> list[torch.Tensor]:
        """What gets its content of now back when a replay is over, or has a copy in its place meanwhile."""
        return [*self._copied, *self._lost]

    def storages(self) -> set[int]:
        """Their memory."""
        return {each.untyped_storage()._cdata for each in self.protected() if is_strided(each)}

    @contextmanager
    def as_before(self, sole: Set[int], inputs: Sequence[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
        """A context in which tensors have the contents from before forward, and after which they have those of now.

        Gives what modules are to have in the place of their buffers, by the buffers' ids.

        Args:
            sole: ids of buffers that nothing refers to but their modules.
            inputs: the function's inputs.
        """
        protected = self.protected()
        if not protected:
            yield {}
            return
        with below_modes(self._odd):
            # What somebody else has written since is refused, not put back: autograd would raise an error.
            changed = {id(tensor) for tensor, _ in self.changed()}
            before = {id(tensor): copy for tensor, copy in self._before if id(tensor) not in changed}
            alone = self._alone(sole - changed, inputs)
            others = [tensor for tensor in protected if id(tensor) not in alone]
            contents = [before.get(id(tensor), tensor) for tensor in alone.values()]
            swapped = dict(zip(alone, copies_of(contents), strict=True)) if alone else {}
            now = list(zip(others, copies_of(others), strict=True)) if others else []
            write_back([(tensor, before[id(tensor)]) for tensor in others if id(tensor) in before])
        try:
            with _unsafe_preserve_version_counter(tuple(others)) if others else nullcontext():
                yield swapped
        finally:
            with below_modes(self._odd):
                write_back(now)

    def _alone(self, sole: Set[int], inputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """What is copied that shares no memory with anything else that the function reaches, by ids."""
        plain = (each for each in (*self.tensors(), *inputs) if type(each) in PLAIN and is_strided(each))
        storages = Counter(each.untyped_storage()._cdata for each in plain)
        return {
            id(each): each
            for each in self._copied
            if id(each) in sole and type(each) is torch.Tensor and storages[each.untyped_storage()._cdata] == 1
        }
