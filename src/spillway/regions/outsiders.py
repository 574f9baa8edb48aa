"""What a function has autograd save and has not made, while it runs: it saves some of that several times."""

from __future__ import annotations

import torch

from spillway.capture.handles import Handle, KeptHandle
from spillway.capture.hooks import Pass
from spillway.regions.tensors import below_modes


class Outsiders:
    """Those of one call.

    Args:
        passage: the pass that the call belongs to.
        aliases: whether what comes from outside may have been sent away by the pass.
    """

    def __init__(self, passage: Pass, *, aliases: bool) -> None:
        self._passage = passage
        self._aliases = aliases
        self._known: dict[int, tuple[torch.Tensor, KeptHandle]] = {}

    def know(self, tensor: torch.Tensor, handle: Handle) -> None:
        """This is its handle. What is fetched is asked for by each name of its own: of that there is none."""
        if type(handle) is KeptHandle:
            self._known[id(tensor)] = tensor, handle

    def pack(self, tensor: torch.Tensor) -> Handle:
        """A handle of one."""
        known = self._known.get(id(tensor))
        if known is not None and known[0] is tensor and known[1].is_intact():
            return known[1]
        with below_modes(tensor):
            handle = self._passage.alias(tensor) if self._aliases else KeptHandle(tensor)
        self.know(tensor, handle)
        return handle

    def clear(self) -> None:
        """The function has ended: what it saves is held by autograd alone."""
        self._known.clear()
