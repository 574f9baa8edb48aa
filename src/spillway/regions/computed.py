"""What autograd holds in place of a tensor that is computed again when it is asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import GraphExecGroup

from spillway.capture.handles import Handle, check_version
from spillway.capture.identity import version_owner
from spillway.regions.calls import Form
from spillway.regions.tensors import is_strided

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


class ComputedHandle:
    """Stands for a tensor that is computed again when it is asked for.

    Args:
        tensor: what autograd saved.
        hooks: those of ``torch.utils.checkpoint``.
        nothing: an empty tensor on its device.
    """

    __slots__ = ("_asked", "_form", "_holder", "_hook", "_owner", "_tracker", "_version", "given")

    def __init__(self, tensor: torch.Tensor, hooks: Hooks, nothing: torch.Tensor) -> None:
        pack, hook = hooks
        self._hook: Callable[[Any], torch.Tensor] = hook
        self._holder = pack(tensor)
        self._tracker: torch.Tensor | None = None
        self._owner: Callable[[], torch.Tensor | None] | None = None
        self._asked: GraphExecGroup | int = -1
        self.given: Handle | None = None
        """What stands for it instead, if it was kept or offloaded after all."""
        self._version = tensor._version
        if type(tensor) is torch.Tensor and is_strided(tensor):
            self._tracker = tensor.detach()
            self._tracker.data = nothing
        else:
            # As for the parts of a wrapper: see PartsHandle.
            self._owner = weakref.ref(version_owner(tensor))
        self._form = Form.of(tensor)

    def unpack(self) -> torch.Tensor:
        owner = self._tracker if self._owner is None else self._owner()
        if owner is not None:
            check_version(owner, self._version, owner if self._owner is not None else self._form)
        if self.given is not None:
            given: torch.Tensor = self.given.unpack()
            return given
        group = GraphExecGroup._get_current_group()
        run: GraphExecGroup | int = _graph_task() if group is None else group
        if run != -1 and run == self._asked:
            return self.compute_anew()
        self._asked = run
        return self._compute()

    def compute_anew(self) -> torch.Tensor:
        """Torch gives what it computed once in a backward, or in a group. In another group it computes it again."""
        group = GraphExecGroup._get_current_group()
        torch._C._set_graph_exec_group(None)
        try:
            with GraphExecGroup():
                return self._compute()
        finally:
            torch._C._set_graph_exec_group(group)

    def _compute(self) -> torch.Tensor:
        tensor: torch.Tensor = self._hook(self._holder)
        return tensor

    def forgo(self, given: Handle) -> None:
        """Torch need not compute it."""
        self.given = given
        self._holder = None


class WatchedHandle(ComputedHandle):
    """One that says when backward has been given its tensor: with that, and with itself."""

    __slots__ = ("__weakref__", "tell")

    tell: Callable[[torch.Tensor, object], None]

    def unpack(self) -> torch.Tensor:
        tensor = super().unpack()
        self.tell(tensor, self)
        return tensor
