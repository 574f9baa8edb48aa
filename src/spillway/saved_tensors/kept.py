"""Two shorter ways for tensors that are kept: of one function, and of a whole block.

NOTE [ Tensors that only their maker has seen ]

Saved tensors are registered by their bytes, so that a second one over the same bytes shares the first one's handle.
While a function runs, no other code has seen the tensors that it made. If it kept the same ones in an earlier call,
their byte counts are known. So they are registered only if the function returns them.

NOTE [ Blocks without hooks ]

A block whose saved tensors are all kept needs no hooks: autograd holds the tensors itself. With hooks, the CPU time of
a small transformer block's forward is a quarter higher, also if the hook does nothing but make a handle. So the pass's
hooks are taken off torch's stack while the block runs. They stay on

* in its first call, which counts its bytes and shows whether it saves its output: the next block may save that too, and
  must see that it is kept;
* where an argument was saved by the block before, which may offload it: both then share one copy;
* where the user's hooks are below the pass's, since they would see more tensors than before, and where tensors are
  marked or outputs dropped;
* once code inside needs the pass to see its tensors (a checkpointed function, a mark, a group). The hooks are then put
  back, below those on the stack, and stay for the block's later calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from spillway._torch import is_alias_of, pop_hooks, push_hooks, top_hooks, tree_leaves
from spillway.saved_tensors.handles import Handle, KeptHandle
from spillway.saved_tensors.identity import KeptStorage, SavedStorage, reach
from spillway.saved_tensors.scopes import HiddenHooks, scope_of_hooks
from spillway.types import Decision

if TYPE_CHECKING:
    from spillway.saved_tensors.hooks import ForwardScope

_NUMBERS = frozenset((int, float, bool, str, type(None)))


class Keeping:
    """The kept tensors of one call. See NOTE [ Tensors that only their maker has seen ]."""

    def __init__(self, scope: ForwardScope) -> None:
        self._scope = scope
        self._kept: list[weakref.ref[KeptHandle]] = []

    def keep(self, tensor: torch.Tensor, place: int, known: dict[int, int]) -> Handle:
        """A handle of a plain tensor that the function has made. ``known`` has byte counts by place, and grows."""
        scope = self._scope
        nbytes = known.get(place)
        if nbytes is None:
            before = scope.ledger.kept_bytes
            handle = scope.save(tensor, Decision.KEEP)
            if scope.groups.current is None:
                known[place] = scope.ledger.kept_bytes - before
            return handle
        if scope.registers_all:
            handle = scope.save(tensor, Decision.KEEP)
        else:
            handle = KeptHandle(tensor)
            if nbytes:
                scope.decider.count += 1
                scope.count_kept(nbytes)
        if type(handle) is KeptHandle and handle.saved is None:
            self._kept.append(weakref.ref(handle))
        return handle

    def end(self, output: Any = None) -> None:
        """The function has returned this, or has failed."""
        kept, self._kept = [handle for each in self._kept if (handle := each()) is not None], []
        if not kept:
            return
        for leaf in (output,) if type(output) is torch.Tensor else tree_leaves(output):
            if type(leaf) in _NUMBERS:
                continue
            for handle in kept:
                # An object that is no tensor may hold any of them.
                if type(leaf) is not torch.Tensor or is_alias_of(leaf, handle.alias):
                    storage = handle.alias.untyped_storage()
                    handle.saved = KeptStorage(storage, *reach(handle.alias, storage.nbytes()))
                    self._scope.identity.add(storage, handle.saved)


class PassthroughBlock:
    """The calls of one block that may run without hooks. See NOTE [ Blocks without hooks ]."""

    def __init__(self) -> None:
        self._nbytes: int | None = None
        """Bytes that it saves, known after its first call."""
        self._is_seen = False
        """Whether the hooks stay on."""

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks, scope = top_hooks(True), scope_of_hooks()
        if hooks is None or scope is None or self._is_seen or not scope.keeps_the_rest:
            return function(*args, **kwargs)
        if self._nbytes is None:
            before = scope.ledger.total().kept_bytes
            output = function(*args, **kwargs)
            self._nbytes = scope.ledger.total().kept_bytes - before
            returned = (each for each in tree_leaves(output) if isinstance(each, torch.Tensor))
            self._is_seen = any(scope.identity.known(each) is not None for each in returned)
            return output
        given = (each for each in (*args, *kwargs.values()) if type(each) is torch.Tensor and each.requires_grad)
        if any(isinstance(scope.identity.known(each), SavedStorage) for each in given):
            return function(*args, **kwargs)
        pop_hooks()
        if top_hooks(True) is not None:
            push_hooks(*hooks)
            return function(*args, **kwargs)
        hidden = HiddenHooks(hooks)
        try:
            output = function(*args, **kwargs)
        finally:
            hidden.end()
        if hidden.was_wanted:
            self._is_seen = True
        else:
            scope.count_kept(self._nbytes)
        return output
