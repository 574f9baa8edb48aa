"""What stays of what a function has made, kept shortly, since a layer has many such.

NOTE [ What nobody has seen ]

Who saves a tensor is found by its bytes: a second one that saves them is to have the first one's handle, and what stays
for one need not be sent away for another. But what a function has made, nobody outside has seen while it runs, and it
keeps what it has decided to keep each time. So where it did the same in an earlier call, what is counted is known, and
bytes are told of only where the function gives them back.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from spillway.capture.handles import Handle, KeptHandle
from spillway.capture.hooks import Pass

_NUMBERS = frozenset((int, float, bool, str, type(None)))


class Keeping:
    """That of one call. See NOTE [ What nobody has seen ].

    Args:
        passage: the pass that the call belongs to.
    """

    def __init__(self, passage: Pass) -> None:
        self._passage = passage
        self._kept: list[weakref.ref[KeptHandle]] = []

    def keep(self, tensor: torch.Tensor, place: int, known: dict[int, int]) -> Handle:
        """A handle of a plain tensor that the function has made.

        Args:
            tensor: what is saved.
            place: where, among all that the function saves.
            known: what was counted of what was kept, by its place; takes more.
        """
        nbytes = known.get(place)
        if nbytes is not None:
            return self.again(tensor, nbytes)
        handle, nbytes = self.learn(tensor)
        if nbytes is not None:
            known[place] = nbytes
        return handle

    def learn(self, tensor: torch.Tensor) -> tuple[Handle, int | None]:
        """A handle of a plain tensor, and what :meth:`again` is to be told next time; ``None``: nothing is known."""
        passage = self._passage
        before = passage.ledger.kept_bytes
        handle = passage.keep(tensor)
        return handle, passage.ledger.kept_bytes - before if passage.groups.current is None else None

    def again(self, tensor: torch.Tensor, nbytes: int) -> Handle:
        """The same, in forward, of what the function has made."""
        handle = self._passage.keep_again(tensor, nbytes)
        if type(handle) is KeptHandle and handle.saved is None:
            self._kept.append(weakref.ref(handle))
        return handle

    def end(self, output: Any = None) -> None:
        """The function has given this, or has failed."""
        kept, self._kept = [handle for each in self._kept if (handle := each()) is not None], []
        if not kept:
            return
        for leaf in (output,) if type(output) is torch.Tensor else tree_leaves(output):
            if type(leaf) in _NUMBERS:
                continue
            for handle in kept:
                # In what is no tensor may be any of them.
                if type(leaf) is not torch.Tensor or torch._C._is_alias_of(leaf, handle.alias):  # type: ignore[attr-defined]
                    self._passage.stays(handle)
