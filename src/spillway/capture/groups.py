"""The groups of one pass: what is saved inside of one leaves when it ends.

NOTE [ When a group leaves ]

What is saved inside of a group waits until its end, where every operator that saved some of it has returned, and leaves
then; a delayed one waits until somebody flushes it, which may be long after the pass. What comes back needs no groups:
backward asks for the members of one after the other, so the learned order fetches them one after the other, too.

NOTE [ Memory that is released ]

Somebody may hold on to a tensor that nobody needs any more but the backward that has it in Spillway. When its group
leaves, the tensor's memory is taken from under it: it is given one element instead, not a number, seen at every place.
If the tensor is a view, its base goes the same way, since autograd holds that for as long as the view.
Whoever uses it all the same computes nonsense that shows, and touches no memory that is not there. If anything else
still sees the memory (a view, another tensor over it), nothing would be gained, and that is an error.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from spillway.capture.identity import Saved
from spillway.capture.waiting import Waiting
from spillway.errors import UsageError
from spillway.groups import Groups, PastGroup
from spillway.runtime.bytes import Bytes
from spillway.runtime.device import Runtime
from spillway.runtime.labels import label
from spillway.runtime.ledger import Ledger


class Group:
    """One group of a pass.

    Args:
        name: of the group.
        place: its place among all groups of the pass.
        ledger: counts what becomes of what is saved in it.
        window: bytes that may be LEAVING at once on a device.
    """

    def __init__(self, name: str, place: int, ledger: Ledger, window: Callable[[Runtime], int]) -> None:
        self.name = name
        self.place = place
        self.ledger = ledger
        self.waiting = Waiting(window)
        self.nbytes = 0
        """Bytes that were saved in it, and could leave."""
        self.count = 0
        """Of how many storages."""
        self._sent: list[tuple[weakref.ref[Saved], Runtime]] = []

    def send(self) -> None:
        """It leaves now. See NOTE [ When a group leaves ]."""
        self._sent += [(saved.reference, runtime) for saved, runtime in self.waiting.members()]
        with label(f"leave {self.name}"):
            self.waiting.send()

    def settle(self) -> None:
        """Compute waits for what of it is still on its way out, and lets go of that."""
        for runtime, entries in _by_runtime(self._sent):
            runtime.mover.settle(entries)

    def fetch(self) -> None:
        """Bring back what of it is away."""
        for runtime, entries in _by_runtime(self._sent):
            runtime.mover.fetch(entries)

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the memory from under tensors that leave with the group. See NOTE [ Memory that is released ]."""
        leaving = {id(saved.storage) for saved, _ in self.waiting.members()}
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise UsageError(f"release: got {tensor!r:.200}, expected a plain tensor")
            if tensor.layout is torch.strided and id(tensor.untyped_storage()) in leaving:
                _release(tensor)


class PassGroups:
    """Those of one pass.

    Args:
        rules: which of them stay, and that nothing else leaves; ``None``: the policy decides, as elsewhere.
        ledger: of the pass.
        window: bytes that may be LEAVING at once on a device.
    """

    def __init__(self, rules: Groups | None, ledger: Ledger, window: Callable[[Runtime], int]) -> None:
        self.rules = rules
        self._ledger = ledger
        self._window = window
        self._open: list[Group] = []
        self._all: list[Group] = []
        self._in_flight: dict[str, deque[Group]] = {}
        # What was delayed may be flushed by another thread.
        self._lock = threading.Lock()
        self._past: Sequence[PastGroup] = ()
        self._staying: frozenset[int] = frozenset()

    @property
    def current(self) -> Group | None:
        """The innermost that has not ended."""
        return self._open[-1] if self._open else None

    def learn(self, past: Sequence[PastGroup]) -> None:
        """What groups the pass before had."""
        self._past = past
        self._staying = self.rules.staying(past) if self.rules is not None else frozenset()

    def start(self, name: str) -> Group:
        """A group begins."""
        group = Group(name, len(self._all), self._ledger.of_group(name), self._window)
        self._all.append(group)
        self._open.append(group)
        return group

    def stays(self, group: Group | None) -> bool:
        """Whether what is saved in the group stays, by the rules; ``None``: outside of any."""
        if self.rules is None:
            return False
        if group is None:
            return True
        place = group.place
        # Where the pass goes other ways than the last one did, nothing is known of its end.
        is_known = place < len(self._past) and self._past[place].name == group.name
        return is_known and place in self._staying

    def end(self, group: Group, *, release: Iterable[torch.Tensor] = (), later: bool = False) -> None:
        """A group ends, and leaves, unless ``later``."""
        # One that outlives its pass (a generator's) is not among them, if something was raised there.
        if group in self._open:
            self._open.remove(group)
        group.release(release)
        if not later:
            self.send(group)

    def send(self, group: Group) -> None:
        """It leaves, after older groups of its name have made way."""
        limit = None if self.rules is None else self.rules.most_in_flight(group.name)
        if limit is not None:
            with self._lock:
                in_flight = self._in_flight.setdefault(group.name, deque())
                while len(in_flight) >= limit:
                    in_flight.popleft().settle()
                in_flight.append(group)
        group.send()

    @property
    def open(self) -> Sequence[Group]:
        """Those that have not ended, the innermost last."""
        return self._open

    @property
    def all(self) -> Sequence[Group]:
        """Those that have begun."""
        return self._all

    def give_up(self, group: Group) -> None:
        """A group ends, and what has not left stays."""
        self._open.remove(group)
        group.waiting.clear()

    def abandon(self) -> list[Group]:
        """The pass is over: what has not left of groups that have not ended stays. Those are given."""
        abandoned = list(self._open)
        for group in abandoned:
            self.give_up(group)
        return abandoned

    def find_open(self, name: str) -> Group | None:
        """The first of the name that has not ended."""
        return next((group for group in self._open if group.name == name), None)

    def past(self) -> list[PastGroup]:
        """For the next pass."""
        return [PastGroup(group.name, group.nbytes) for group in self._all]


def _by_runtime(
    members: Iterable[tuple[weakref.ref[Saved], Runtime]],
) -> Iterable[tuple[Runtime, list[Saved]]]:
    runtimes: dict[int, tuple[Runtime, list[Saved]]] = {}
    for reference, runtime in members:
        saved = reference()
        if saved is not None:
            runtimes.setdefault(id(runtime), (runtime, []))[1].append(saved)
    return runtimes.values()


def _release(tensor: torch.Tensor) -> None:
    storage = tensor.untyped_storage()
    family = [tensor] if tensor._base is None else [tensor, tensor._base]
    # But for theirs, and that of Python's name for the storage, and for Python's name for the tensor: where autograd
    # saves without hooks, it holds the very tensor, and it holds a leaf that a gradient is wanted of.
    others = torch._C._storage_Use_Count(storage._cdata) - len(family) - 1
    others += tensor._use_count() - 1  # type: ignore[attr-defined]
    if others > 0:
        raise UsageError(
            f"release: got a tensor of shape {list(tensor.shape)} whose memory {others} other tensor(s) or views still "
            f"see, expected that nothing else does, since none of it would be free; release it where the last of them "
            f"is gone, or leave it out"
        )
    with torch.no_grad(), torch._C._DisableTorchDispatch():
        for each in family:
            each.data = _nonsense(each).expand(each.shape)


def _nonsense(tensor: torch.Tensor) -> torch.Tensor:
    """One element that spoils whatever is computed of it: no number, or no index."""
    if tensor.is_floating_point() or tensor.is_complex():
        nan = complex(torch.nan, torch.nan) if tensor.is_complex() else torch.nan
        return torch.full((), nan, dtype=tensor.dtype, device=tensor.device)
    one = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
    Bytes.of(one).tensor().fill_(0x80)
    return one.reshape(())
