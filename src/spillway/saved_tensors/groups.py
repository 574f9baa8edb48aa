"""Groups of saved tensors that are offloaded together: the rules, and the groups of one pass.

A *group* is everything saved inside one ``with spillway.group(name)``. A name may have any number of groups in a pass,
one for each layer, say.

NOTE [ Offloading a group ]

Tensors saved inside a group wait until its end, where every operator that saved one has returned, and are offloaded
then. A delayed group waits until it is flushed, which may be long after the pass. Reloading needs no groups: backward
asks for the members one after the other, so the learned order prefetches them one after the other.

NOTE [ Memory that is released ]

The program may hold a tensor that only backward still needs. When its group is offloaded, the tensor's memory is freed:
the tensor gets one element instead (``docs/groups.md``). The base of a view is treated the same way, since autograd
holds it as long as the view. Code that uses the tensor all the same touches no freed memory.
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from spillway._torch import base_of, disable_dispatch, holders_of
from spillway.errors import UsageError
from spillway.runtime.backend import label
from spillway.runtime.bytes import Bytes
from spillway.runtime.entry import ByteCounters
from spillway.saved_tensors.identity import SavedStorage
from spillway.saved_tensors.order import PastGroup
from spillway.units import is_number, parse_bytes

if TYPE_CHECKING:
    from spillway.runtime.mover import Mover
    from spillway.runtime.tiers import Tier


@dataclass(frozen=True)
class Groups:
    """Rules about groups: only tensors saved inside groups are offloaded, and only in groups that the rules name.

    The first pass under a tag, and one whose groups differ from the last pass's, offloads every group. After that the
    rules apply. Each keeps groups from the end, which backward asks for first.

    Args:
        patterns: for :func:`~spillway.attach`: names of groups, each with one or several shell patterns of dotted
            module names. The tensors that a matching module saves are a group. The outermost of nested matches counts.
            Without patterns, the code names groups: ``with spillway.group(name)``.
        margin: how many of the last groups of each name are kept.
        fewer_bytes: bytes to keep in addition, in whole groups, the last first: for pipeline ranks that need to save
            less than the first one. Bytes, or a size like ``"2GiB"``.
        fraction: the share of the remaining groups of a pass that is offloaded, whatever their names: the first ones,
            rounded up. From 0 to 1.
        in_flight: how many groups of a name may be in flight at once, for each name or for all; compute waits for the
            oldest. ``None``: as many as the in-flight limit holds.

    Raises:
        UsageError: for arguments that cannot be meant.
        SizeError: for a size that is none.

    Example:
        >>> groups = spillway.Groups({"attention": "*.self_attn", "mlp": "*.mlp"}, margin=1)  # doctest: +SKIP
        >>> attached = spillway.attach(model, groups=groups)  # doctest: +SKIP
    """

    patterns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    margin: int = 0
    fraction: float = 1.0
    fewer_bytes: int | str = 0
    in_flight: int | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.patterns, Mapping):
            raise UsageError(f"patterns: got {self.patterns!r}, expected a mapping from names of groups to patterns")
        for name, pattern in self.patterns.items():
            check_name(name)
            patterns = (pattern,) if isinstance(pattern, str) else pattern
            if not isinstance(patterns, Sequence) or not all(isinstance(each, str) for each in patterns):
                raise UsageError(f"group {name!r}: got {pattern!r}, expected a pattern of module names, or several")
        if type(self.margin) is not int or self.margin < 0:
            raise UsageError(f"margin: got {self.margin!r}, expected an integer, 0 or more")
        if not (is_number(self.fraction) and 0 <= self.fraction <= 1):
            raise UsageError(f"fraction: got {self.fraction!r}, expected a number from 0 to 1")
        object.__setattr__(self, "fewer_bytes", parse_bytes(self.fewer_bytes, what="fewer_bytes"))
        limits = self.in_flight.values() if isinstance(self.in_flight, Mapping) else (self.in_flight,)
        if any(limit is not None and (type(limit) is not int or limit < 1) for limit in limits):
            raise UsageError(
                f"in_flight: got {self.in_flight!r}, expected an integer of at least 1, a mapping from names to such, "
                f"or None"
            )

    def staying(self, past: Sequence[PastGroup]) -> frozenset[int]:
        """The groups to keep in a pass like one that had these: their places among all."""
        stay: set[int] = set()
        by_name: dict[str, list[int]] = {}
        for place, group in enumerate(past):
            by_name.setdefault(group.name, []).append(place)
        for places in by_name.values():
            stay.update(places[max(len(places) - self.margin, 0) :])
        # An empty group may have tensors the next time: an expert that got no tokens, say.
        eligible = [place for place, group in enumerate(past) if place not in stay and group.nbytes]
        fewer = self.fewer_bytes
        assert isinstance(fewer, int)
        while eligible and past[eligible[-1]].nbytes <= fewer:
            fewer -= past[eligible[-1]].nbytes
            stay.add(eligible.pop())
        if self.fraction < 1:
            # Rounding first: 0.07 * 100 is a little more than 7.
            leaving = eligible[: math.ceil(round(self.fraction * len(eligible), 9))]
            stay.update(range(leaving[-1] + 1 if leaving else 0, len(past)))
        return frozenset(stay)

    def over(self, passes: Sequence[Sequence[PastGroup]]) -> list[Groups]:
        """The rules of each of several passes that are alive together.

        ``margin`` and ``fewer_bytes`` apply to the passes that backward comes to first, ``fraction`` to each.

        Args:
            passes: their groups, in the order in which backward comes to the passes.
        """
        rules: list[Groups] = []
        rest = self
        for past in passes:
            whole = replace(rest, fraction=1.0)
            kept = whole.staying(past) - replace(whole, fewer_bytes=0).staying(past)
            rules.append(rest)
            fewer = rest.fewer_bytes
            assert isinstance(fewer, int)
            rest = replace(rest, margin=0, fewer_bytes=fewer - sum(past[place].nbytes for place in kept))
        return rules

    def most_in_flight(self, name: str) -> int | None:
        """How many groups of the name may be in flight at once."""
        return self.in_flight.get(name) if isinstance(self.in_flight, Mapping) else self.in_flight


def check_name(name: object) -> str:
    """The name of a group; raises :class:`~spillway.errors.UsageError` if it is none."""
    if not isinstance(name, str) or not name:
        raise UsageError(f"group: got {name!r}, expected a name, which is a string that is not empty")
    return name


class Waiting:
    """Entries that will be offloaded together, within the in-flight limit ``window``."""

    def __init__(self, window: float | None) -> None:
        self._window = window
        # Plain tuples: one is made for every saved tensor.
        self._queued: list[tuple[SavedStorage, Tier, bool]] = []
        self.nbytes = 0
        """Bytes of all of them."""

    def add(self, saved: SavedStorage, tier: Tier, *, defer: bool) -> None:
        """Add one; ``defer``: it is copied only if later ones would exceed the limit."""
        self._queued.append((saved, tier, defer))
        self.nbytes += saved.nbytes

    @property
    def is_batch(self) -> bool:
        return bool(self._queued) and self.nbytes >= self._queued[-1][0].mover.batch

    def send(self) -> None:
        """Offload them now. The caller knows that they have been written."""
        queued, self._queued, self.nbytes = self._queued, [], 0
        if not queued:
            return
        # Copies are no operators of the user's: an active dispatch mode must not see them.
        with disable_dispatch():
            for (tier, defer), together in itertools.groupby(queued, key=operator.itemgetter(1, 2)):
                entries = [each[0] for each in together]
                entries[0].mover.put(entries, tier, window=self._window, defer=defer)

    def clear(self) -> None:
        self._queued.clear()
        self.nbytes = 0

    def members(self) -> list[SavedStorage]:
        return [saved for saved, _, _ in self._queued]


class Group:
    """One group of a pass, and its place among all of them."""

    def __init__(self, name: str, place: int, ledger: ByteCounters, window: float | None) -> None:
        self.name = name
        self.place = place
        self.ledger = ledger
        self.waiting = Waiting(window)
        self.nbytes = 0
        """Bytes that were saved in it and could be offloaded."""
        self.count = 0
        """Number of their storages."""
        self._sent: list[weakref.ref[SavedStorage]] = []

    def send(self) -> None:
        """Offload it now. See NOTE [ Offloading a group ]."""
        self._sent += [saved.reference for saved in self.waiting.members()]
        with label(f"leave {self.name}"):
            self.waiting.send()

    def has_nothing_to_send(self) -> bool:
        """Whether it was offloaded, or its graph is gone."""
        return all(saved.handles == 0 for saved in self.waiting.members())

    def settle(self) -> None:
        """Compute waits for its copies under way, and its bytes are released."""
        for mover, entries in self._by_mover():
            mover.release(entries)

    def fetch(self) -> None:
        for mover, entries in self._by_mover():
            mover.fetch(entries)

    def _by_mover(self) -> Iterable[tuple[Mover, list[SavedStorage]]]:
        movers: dict[Mover, list[SavedStorage]] = {}
        for saved in filter(None, (reference() for reference in self._sent)):
            movers.setdefault(saved.mover, []).append(saved)
        return movers.items()

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Free the memory of tensors that leave with the group. See NOTE [ Memory that is released ]."""
        leaving = {id(saved.storage) for saved in self.waiting.members()}
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor) or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
                raise UsageError(f"release: got {tensor!r:.200}, expected a plain tensor")
            if tensor.layout is torch.strided and id(tensor.untyped_storage()) in leaving:
                _release(tensor)


class PassGroups:
    """The groups of one pass. Without rules, the policy decides alone."""

    def __init__(self, rules: Groups | None, ledger: ByteCounters, window: float | None) -> None:
        self.rules = rules
        self._ledger = ledger
        self._window = window
        self.open: list[Group] = []
        """Groups that have not ended, the innermost last."""
        self.all: list[Group] = []
        """Groups that have begun."""
        self._in_flight: dict[str, deque[Group]] = {}
        # Another thread may flush a delayed group.
        self._lock = threading.Lock()
        self._past: Sequence[PastGroup] = ()
        self._staying: frozenset[int] = frozenset()

    @property
    def current(self) -> Group | None:
        """The innermost that has not ended."""
        return self.open[-1] if self.open else None

    def learn(self, past: Sequence[PastGroup]) -> None:
        self._past = past
        self._staying = self.rules.staying(past) if self.rules is not None else frozenset()

    def start(self, name: str) -> Group:
        group = Group(name, len(self.all), self._ledger.of_group(name), self._window)
        self.all.append(group)
        self.open.append(group)
        return group

    def stays(self, group: Group | None) -> bool:
        """Whether the rules keep the tensors of the group; ``None``: those outside of any."""
        if self.rules is None:
            return False
        if group is None:
            return True
        place = group.place
        # If the pass differs from the last one, its end is unknown.
        is_known = place < len(self._past) and self._past[place].name == group.name
        return is_known and place in self._staying

    def end(self, group: Group, *, release: Iterable[torch.Tensor] = (), later: bool = False) -> None:
        """A group ends, and is offloaded unless ``later``."""
        # A group that outlives its pass (a generator's) is not among them after an exception.
        if group in self.open:
            self.open.remove(group)
        group.release(release)
        if not later:
            self.send(group)

    def send(self, group: Group) -> None:
        """Offload it, after the oldest groups of its name above the limit."""
        limit = None if self.rules is None else self.rules.most_in_flight(group.name)
        if limit is not None:
            with self._lock:
                in_flight = self._in_flight.setdefault(group.name, deque())
                while len(in_flight) >= limit:
                    in_flight.popleft().settle()
                in_flight.append(group)
        group.send()

    def give_up(self, group: Group) -> None:
        """A group ends, and its waiting tensors are kept."""
        self.open.remove(group)
        group.waiting.clear()

    def abandon(self) -> list[Group]:
        """The pass is over: give up the groups that have not ended, and return them."""
        abandoned = list(self.open)
        for group in abandoned:
            self.give_up(group)
        return abandoned

    def past(self) -> list[PastGroup]:
        return [PastGroup(group.name, group.nbytes) for group in self.all]


def _release(tensor: torch.Tensor) -> None:
    base = base_of(tensor)
    family = [tensor] if base is None else [tensor, base]
    del base
    # Without their own, and those of Python's names for the storage and the tensor: where autograd saves without hooks,
    # it holds the very tensor, and it holds a leaf that a gradient is wanted of.
    of_storage, of_tensor = holders_of(tensor)
    others = of_storage - len(family) - 1 + of_tensor - 1
    if others > 0:
        raise UsageError(
            f"release: {others} other tensor(s) or views still see the memory of the tensor of shape "
            f"{list(tensor.shape)}, so it would not be freed. Release it after the last of them is gone, or leave it "
            f"out."
        )
    with torch.no_grad(), disable_dispatch():
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
