"""Watches the passes of a model, one at a time, for whoever profiles it or looks for a plan.

NOTE [ What a watcher is told ]

Each block says when it is called, has returned, runs again, and has run. What of it is looked at is for whoever watches
to say: the operators of each kind of block once, bytes within each backward, or times alone. Passes of another thread
than the one that is watched are not looked at; neither are re-runs of an earlier pass, whose blocks have smaller
numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from torch.utils._pytree import tree_leaves

from spillway.attaching.steering import Steered
from spillway.blocks import signature
from spillway.profiling.probe import Probe, WatchedCall
from spillway.profiling.watch import Watch, Watched
from spillway.runtime.mover import Mover
from spillway.session import Session

if TYPE_CHECKING:
    from spillway.attaching.block import RegionCall

_MOST_PROBES = 256


class Watcher:
    """See NOTE [ What a watcher is told ].

    Args:
        device: where the model computes.
        session: ``None``: the default one.
    """

    def __init__(self, device: torch.device, session: Session | None) -> None:
        self._device = device
        self._session = session
        self._blocks: Sequence[RegionCall] = ()
        self._probes: dict[Hashable, Probe] = {}
        self._watch: Watch | None = None
        self._first = 0
        """Number of the first call of a block in this pass: re-runs of an earlier pass have smaller ones."""
        self._has_traced = False
        """Whether a block of the pass is watched operator by operator."""
        self._idle = 0
        """Passes one after the other that had no backward."""

    def drop(self) -> None:
        """Nothing is measured any more."""
        watch = self._take_watch()
        if watch is not None:
            watch.close()
        self._probes.clear()

    def block_begins(self, call: Steered, module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """A block is called; gives the number of its call in the pass, or -1 if nobody is watching."""
        call.observer = None
        if self._watch is None or self._is_strange(self._watch):
            return -1
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        # Casts of leaves are not counted among a region's operators.
        forms = tuple((tensor.shape, tensor.dtype, tensor.requires_grad, tensor.is_leaf) for tensor in tensors)
        kind = (signature(module), forms)
        known = self._probes.get(kind)
        # A call that failed was not seen to its end.
        probe = None
        if self._traces and (known is None or not known.is_complete):
            self._has_traced = True
            if len(self._probes) >= _MOST_PROBES:
                self._probes.clear()
            probe = self._probes[kind] = self._new_probe(known)
        number = self._watch.block_begins(call.name, kind, (args, kwargs))
        if self._weighs:
            call.observer = WatchedCall(probe, partial(self._watch.asked, number), self._watch.casts)
        elif self._traces:
            # What it does is recorded in any case.
            call.observer = WatchedCall(probe, _ignore, _ignore)
        return self._first + number

    def block_ended(self, number: int, output: Any) -> None:
        """It has returned."""
        if self._watch is not None and number >= self._first:
            self._watch.block_ended(number - self._first, output)

    def block_ran(self, number: int, seconds: float) -> None:
        """Its own code has run in forward, which took the host so long."""
        if self._watch is not None and number >= self._first:
            self._watch.block_ran(number - self._first, seconds)

    def rerun_begins(self, number: int) -> None:
        """A block runs again."""
        if self._watch is not None and number >= self._first:
            self._watch.rerun_begins(number - self._first)

    def rerun_ended(self, number: int) -> None:
        """That is over."""
        if self._watch is not None and number >= self._first:
            self._watch.rerun_ended(number - self._first)

    # What is looked at, as whoever watches says.

    @property
    def _traces(self) -> bool:
        """Whether a kind of block that comes for the first time is watched operator by operator."""
        return False

    @property
    def _weighs(self) -> bool:
        """Whether a block's backward is watched within."""
        return False

    @property
    def _lead(self) -> float:
        """Seconds by which the host is to be ahead of the device where the pass begins."""
        return 0.0

    def _new_probe(self, before: Probe | None) -> Probe:
        return Probe(self._device, before)

    def _new_watch(self) -> Watch:
        watch = Watch(self._device, self._carried, lead=self._lead)
        if self._weighs:
            self._mover().listen(watch.moves)
        return watch

    def _finish(self) -> Watched | None:
        watch = self._take_watch()
        if watch is None:
            return None
        self._first += watch.count
        self._idle = 0 if watch.has_backward else self._idle + 1
        if not watch.has_backward:
            watch.close()
            return None
        if self._is_strange(watch):
            # Its thread has ended, and with it what it wrote down.
            return None
        return watch.finish()

    @staticmethod
    def _is_strange(watch: Watch) -> bool:
        return watch.thread is not threading.current_thread()

    def _take_watch(self) -> Watch | None:
        watch, self._watch = self._watch, None
        if watch is not None:
            self._forsake(watch)
        return watch

    def _forsake(self, watch: Watch) -> None:
        """It need not be told of moves any more."""
        if not self._used_session.closed:
            self._mover().forsake(watch.moves)

    @property
    def _used_session(self) -> Session:
        return self._session if self._session is not None else Session.default()

    def _mover(self) -> Mover:
        return self._used_session.runtime(self._device).mover

    def _carried(self) -> int:
        counts = self._mover().counts()
        return counts["leaving bytes"] + counts["held bytes"] + counts["returning bytes"]


def _ignore(*args: object) -> None:
    """Nobody wants to know."""
