"""The operators of a region by themselves: they are run again without the function that ran them.

NOTE [ Tapes ]

To run a function again means to run all of its Python code, under a mode that looks at each operator and leaves most of
them out. On small blocks the host takes longer for that than the device for what is computed. So of a function that did
the same in two runs, a *tape* is written: its operators with all that they were given. Backward then calls those that
are needed, one after the other, and nothing else: no module, no hook, no graph.

A tape is right for a call if the call did what stands on it. That is not believed but seen: each operator of the call
is compared with the tape's (``followed.py``): that it is the same one, with the same numbers, on tensors that lie in
the same way in the same values. What is drawn at random is drawn from the state that the generator had in that call.
From the first operator on that is another one, nothing is left to the tape: what is saved from there on is kept.

What is not seen cannot be compared: a kernel that no operator launches. So there is none of a function that asks where
bytes are, and a tape is tried before it is used: what it gives must be what the function gives, bit by bit
(``trial.py``).

There is a tape of what can be told by values alone. A function that writes what it did not make, or asks for memory
that somebody is to write unseen, whose shapes hang on data, that calls other regions, collectives, or operators that
are not PyTorch's own and may know more than they are given, or that has tensors of another class or layout, is run
again itself.

What a function has made it may write in place, if that is computed again and was saved as it is after the last write. A
step that writes is needed where what it writes is needed after it, and reads that too; steps come in their order, so
what is read before it is as it was. Nobody keeps what was written, or hands it in: the memory of what is handed in is
never written. Where a function runs again and some of it is left out, so is a step whose write nobody needs, since what
it reads may have been left out as well.

NOTE [ Parts ]

What is computed again falls into parts that hang on nothing of each other but on what is there: of a decoder layer
whose middle sum is kept, attention is one and the MLP is another. Each is computed when backward first asks for
something of it, so that they are not there at once, and a copy back that only one of them needs has more time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from spillway.capture.identity import ViewRecipe
from spillway.errors import RecomputeError
from spillway.records import Decision
from spillway.regions.generators import GeneratorState, drawn_from, generators_of
from spillway.regions.globals import Numerics
from spillway.regions.outline import Outline, Role
from spillway.regions.showing import Showing
from spillway.regions.steps import Foreseen, Saved, Spot, Step, spots_in

_RECOMPUTE = Decision.RECOMPUTE
_MOST_OTHERS = 16


class Untold(RecomputeError):  # noqa: N818  (when a tape is tried, it is no error of anybody's: there is none)
    """What a function does cannot be told by a tape."""


class Base(NamedTuple):
    """Memory of a value."""

    storage: torch.UntypedStorage
    low: int = 0
    """Its first bytes that are not there."""

    @classmethod
    def under(cls, tensor: torch.Tensor, view: ViewRecipe) -> Base:
        """That of a tensor which once lay like this."""
        return cls(tensor.untyped_storage(), (view.offset - int(tensor.storage_offset())) * view.dtype.itemsize)


class Use(NamedTuple):
    """A value that is handed in to a part."""

    value: int
    part: int
    """The first place of the part in :attr:`Tape.saved`."""


class Held(NamedTuple):
    """A value that is handed in, as it was made."""

    decision: Decision
    """What becomes of it."""
    start: int
    end: int
    """Its bytes."""


class _Run(NamedTuple):
    """A step that runs again, or a value that is handed in."""

    step: Step | None
    place: int
    """Of the step."""
    values: tuple[int, ...]
    """What there is after it."""
    gives: tuple[int, ...]
    """Which of what was saved is there after it."""
    ends: tuple[int, ...] = ()
    """Values that nobody reads after it."""

    @property
    def changes(self) -> tuple[int, ...]:
        """What it makes or writes, or what is handed in."""
        return self.values if self.step is None or self.step.writes < 0 else (self.step.writes,)


@dataclass(frozen=True)
class Tape:
    """See NOTE [ Tapes ]."""

    steps: Sequence[Step]
    saved: Sequence[Saved]
    """What autograd saves, in order."""
    inputs: tuple[int, ...]
    """Values of the function's tensors."""
    count: int
    """How many values there are."""
    saved_after: Sequence[int]
    """For each of :attr:`saved`, how many steps had run."""
    unused: Sequence[object] = ()
    """Selectors that decided nothing."""
    outline: Outline | None = None
    """By which calls may be compared with it."""
    is_closed: bool = False
    """Whether it reads nothing from outside but its tensors, parameters, and what its Python state holds. Other tensors
    may be replaced between a first run and a replay, and are seen only where the call is compared with the tape."""

    @cached_property
    def _others(self) -> dict[tuple[tuple[int, ...], frozenset[int]], Sequence[_Run]]:
        """What was found out for some of it."""
        return {}

    def decided(self, decide: Callable[[int, Any], Decision]) -> Tape:
        """What the function does where something else is decided about what it makes.

        Args:
            decide: says it of each operator, by its place.
        """
        written = self.last_written.keys()
        steps = [
            # What is written later cannot be kept as it was made.
            step.decided(decide(place, step.func)) if step.makes and written.isdisjoint(step.made) else step
            for place, step in enumerate(self.steps)
        ]
        decisions = {spot.value: step.decision for step in steps for _, spot in step.makes}
        saved = [
            each
            if each.spot is None or each.spot.value not in decisions
            else each._replace(decision=decisions[each.spot.value])
            for each in self.saved
        ]
        return Tape(
            steps, saved, self.inputs, self.count, self.saved_after, outline=self.outline, is_closed=self.is_closed
        )

    def prepared(self) -> Tape:
        """This tape, of which all that calls ask is worked out: the first of them is not to take longer."""
        _ = (
            self.foreseen,
            self.outside,
            self.extents,
            self.devices,
            self.handed_to,
            self.users,
            self.used_by,
            self.unseen,
            self.showing.is_all,
            self.showing.last,
            self.skims,
            self.roles_again,
        )
        for part in {id(part): part for part in self._parts.values()}.values():
            self.runs(part, ())
        return self

    @cached_property
    def foreseen(self) -> Sequence[Foreseen]:
        """What autograd saves, shortly."""
        shown = self.showing.shown
        return [Foreseen.of(place, saved, shown) for place, saved in enumerate(self.saved)]

    @cached_property
    def generators(self) -> Sequence[torch.Generator]:
        """Those that it may draw from: the host's, and its devices' own."""
        return generators_of(self.devices)

    @cached_property
    def kept_bytes(self) -> dict[int, int]:
        """What was counted of what was kept, by its place in :attr:`saved`, where that was seen."""
        return {}

    @cached_property
    def last_written(self) -> Mapping[int, int]:
        """Of values that are written after they were made, the place of the last step that does so."""
        return {step.writes: place for place, step in enumerate(self.steps) if step.writes >= 0}

    @cached_property
    def made(self) -> frozenset[int]:
        """Values that the function makes."""
        return frozenset[int]().union(*(step.made for step in self.steps))

    @cached_property
    def outside(self) -> frozenset[int]:
        """Values that the function did not make, and that are none of its tensors."""
        return frozenset(range(self.count)) - self.made - set(self.inputs)

    @cached_property
    def _preserved(self) -> frozenset[int]:
        steps = (step for step in self.steps if step.decision is not _RECOMPUTE)
        return frozenset(spot.value for step in steps for _, spot in step.makes)

    @cached_property
    def extents(self) -> Mapping[int, tuple[int, int]]:
        """For each of the function's tensors that is needed, the bytes of its memory that are read of it."""
        extents: dict[int, tuple[int, int]] = {}
        given = self.needed.intersection(self.inputs)
        for step in self.steps:
            for spot in spots_in(step.args):
                if spot.value in given:
                    start, end = extents.get(spot.value, (spot.start, spot.end))
                    extents[spot.value] = min(start, spot.start), max(end, spot.end)
        return extents

    @cached_property
    def needed(self) -> frozenset[int]:
        """Values that the function did not make, and that it takes to compute all of it, if nothing is preserved."""
        saved = [each.spot for each in self.saved if each.decision is _RECOMPUTE]
        want = {spot.value for spot in saved if spot is not None}
        for step in reversed(self.steps):
            if step.is_wanted(want):
                want.difference_update(step.made)
                want.update(step.reads)
        return frozenset(want)

    @cached_property
    def handed(self) -> frozenset[int]:
        """Values that are preserved, and handed in to what runs again: nobody holds the others for it."""
        given = {value for run in self._whole if run.step is None for value in run.values}
        return frozenset(given) - self.outside - set(self.inputs)

    @cached_property
    def again(self) -> tuple[frozenset[int], frozenset[int]]:
        """Places of the steps that run again, and the preserved values that are handed in to them."""
        return frozenset(run.place for run in self._whole if run.step is not None), self.handed

    @cached_property
    def uses(self) -> Mapping[Use, Sequence[int]]:
        """Of each value that is handed in to a part, the places of that in :attr:`saved` which hang on it."""
        given = self.handed.union(self.inputs)
        values: dict[int, frozenset[int]] = {}
        uses: dict[Use, list[int]] = {}
        for run in self._whole:
            if run.step is None:
                values.update((value, given.intersection(run.values)) for value in run.values)
            else:
                hangs_on = frozenset[int]().union(*(values[value] for value in run.step.reads))
                values.update(dict.fromkeys(run.changes, hangs_on))
            for place in run.gives:
                spot = self.saved[place].spot
                for value in () if spot is None else values[spot.value]:
                    uses.setdefault(Use(value, self.part(place)[0]), []).append(place)
        return uses

    @cached_property
    def parts_of(self) -> Mapping[int, Sequence[int]]:
        """Of each value that is handed in, the parts that ask for it, by their first places in :attr:`saved`."""
        parts: dict[int, list[int]] = {}
        for value, part in self.uses:
            parts.setdefault(value, []).append(part)
        return parts

    @cached_property
    def handed_to(self) -> Mapping[int, frozenset[int]]:
        """The reverse, but for the function's tensors."""
        found: dict[int, set[int]] = {}
        for value, parts in self.parts_of.items():
            for part in parts if value in self.handed else ():
                found.setdefault(part, set()).add(value)
        return {part: frozenset(values) for part, values in found.items()}

    @cached_property
    def users(self) -> Mapping[int, frozenset[int]]:
        """The same, of whatever part."""
        users: dict[int, frozenset[int]] = {}
        for (value, _), places in self.uses.items():
            users[value] = users.get(value, frozenset()).union(places)
        return users

    @cached_property
    def used_by(self) -> Mapping[int, Sequence[Use]]:
        """The reverse of :attr:`uses`, but for the function's tensors: what takes the place of others needs these."""
        found: dict[int, list[Use]] = {}
        for use, places in self.uses.items():
            if use.value in self.handed:
                for place in places:
                    found.setdefault(place, []).append(use)
        return found

    @cached_property
    def is_whole(self) -> bool:
        """Whether to run the function again is to compute what is on the tape, and nothing else that takes its time."""
        again, given = self.again
        last = max(again, default=-1)
        left_out = (step for place, step in enumerate(self.steps[:last]) if place not in again)
        return not given and all(step.numerics is None for step in left_out)

    @cached_property
    def _left(self) -> Sequence[int]:
        """The places of the steps that are left out before one that runs again."""
        again, _ = self.again
        steps = enumerate(self.steps[: max(again, default=0)])
        return [place for place, step in steps if place not in again and step.makes]

    @property
    def left_until(self) -> int:
        """The last of them; -1: there is none."""
        return self._left[-1] if self._left else -1

    @cached_property
    def look_from(self) -> tuple[int, int]:
        """Where to begin to look at operators: the place in :attr:`saved`, and how many steps have run at least.

        The last one before anything is left out at which it shows by the next operator how many have run: one may be
        in the middle of a step, which is not seen then. If it is mistaken for another one, the next one shows that.
        (-1, 0): from the beginning.
        """
        functions, first = [step.func for step in self.steps], self._left[0] if self._left else 0
        for place in reversed(range(len(self.saved))):
            after = self.saved_after[place]
            if after + 1 < first and functions[after] is not functions[after + 1] is not functions[after + 2]:
                return place, after
        return -1, 0

    def look_early(self) -> None:
        """A call was not recognized by what it did from there on."""
        self.__dict__.update(look_from=(-1, 0), unseen=frozenset[int]())

    @cached_property
    def unseen(self) -> frozenset[int]:
        """Values that may be made before anybody looks."""
        place, after = self.look_from
        return frozenset[int]().union(*(step.made for step in self.steps[: after + 1 if place >= 0 else 0]))

    @cached_property
    def held_as_made(self) -> Mapping[int, Held]:
        """Values that are handed in, and that autograd does not save as a whole."""
        return {
            spot.value: Held(step.decision, spot.start, spot.end)
            for step in self.steps
            for _, spot in step.makes
            if spot.value in self.handed and spot.value not in self.showing.shown
        }

    @cached_property
    def roles_again(self) -> Sequence[Role]:
        """Of its outline, those of what autograd saves and is computed again."""
        values = {spot.value for spot, decision, _ in self.saved if spot is not None and decision is _RECOMPUTE}
        return [role for role in self.outline.roles if role.spot.value in values] if self.outline is not None else ()

    @cached_property
    def skims(self) -> bool:
        """Whether its outline shows all that is to be held for what runs again."""
        if self.outline is None:
            return False
        made = {spot.value: spot for step in self.steps for _, spot in step.makes}
        return self.held_as_made.keys() <= self.outline.shown(made)

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """Where it makes something."""
        return frozenset(spot.view.device for step in self.steps for _, spot in step.makes)

    @cached_property
    def showing(self) -> Showing:
        """What is saved of it shows this of what is computed again."""
        return Showing(self.steps, self.saved, *self.again, is_whole=self.is_whole)

    @cached_property
    def _whole(self) -> Sequence[_Run]:
        return self._runs(range(len(self.saved)), ())

    def part(self, place: int) -> Sequence[int]:
        """The places of what is computed again together with what was saved at one. See NOTE [ Parts ]."""
        return self._parts[place]

    @cached_property
    def _parts(self) -> Mapping[int, Sequence[int]]:
        joined: dict[int, set[int]] = {}
        """Of values that are computed again, those of the same part."""
        for run in self._whole:
            if run.step is None:
                continue
            near = {id(joined[value]): joined[value] for value in run.step.reads if value in joined}
            part = max(near.values(), key=len, default=set[int]())
            for other in near.values():
                if other is not part:
                    part |= other
                    joined.update(dict.fromkeys(other, part))
            part.update(run.values)
            joined.update(dict.fromkeys(run.values, part))
        places: dict[int, list[int]] = {}
        parts = {}
        for place, (spot, decision, _) in enumerate(self.saved):
            if spot is not None and decision is _RECOMPUTE:
                # What is no step's is a part by itself.
                part = joined.setdefault(spot.value, {spot.value})
                parts[place] = places.setdefault(id(part), [])
                parts[place].append(place)
        return parts

    def runs(self, wanted: Sequence[int], lost: Collection[int]) -> Sequence[_Run]:
        """What to do for what was saved.

        Args:
            wanted: of what is computed again, by its place in :attr:`saved`.
            lost: values that cannot be handed in, since they were written.
        """
        key = tuple(wanted), frozenset(lost)
        runs = self._others.get(key)
        if runs is None:
            if len(self._others) >= _MOST_OTHERS + len(self._parts):
                self._others.clear()
            if lost:
                # What takes their place may hang on what nobody holds.
                lost = {*lost, *(self._preserved - self.handed)}
            # Where a branch of the function is of no use to anybody, it is the same in each call.
            runs = self._others[key] = self._runs(wanted, lost)
        return runs

    @property
    def all_runs(self) -> Sequence[_Run]:
        """What to do for all of it."""
        return self._whole

    def _runs(self, wanted: Sequence[int], lost: Collection[int]) -> Sequence[_Run]:
        gives: dict[int, list[int]] = {}
        for number in wanted:
            spot = self.saved[number].spot
            if spot is not None and self.saved[number].decision is _RECOMPUTE:
                gives.setdefault(spot.value, []).append(number)
        want = set(gives)
        found: list[tuple[Step | None, int, tuple[int, ...]]] = []
        """From the last on: a step, its place and what it makes, or a value that is handed in."""
        for place in range(len(self.steps) - 1, -1, -1):
            step = self.steps[place]
            if step.writes in want:
                found.append((step, place, ()))
                want.update(step.reads)
                continue
            made = tuple(spot.value for _, spot in step.makes)
            needed = want.intersection(made)
            if step.decision is not _RECOMPUTE and needed.isdisjoint(lost):
                found += ((None, place, (value,)) for value in sorted(needed))
            elif needed:
                found.append((step, place, made))
                want.update(step.reads)
            want.difference_update(made)
        runs: list[_Run] = []
        # What is wanted of no step comes from outside, and is fetched as late as that may be.
        for again, place, values in reversed(found):
            for value in () if again is None else again.reads:
                if value in want:
                    want.remove(value)
                    runs.append(_Run(None, -1, (value,), tuple(gives.get(value, ()))))
            run = _Run(again, place, values, ())
            ready = [value for value in run.changes if self.last_written.get(value, place) == place]
            runs.append(run._replace(gives=tuple([number for value in ready for number in gives.get(value, ())])))
        runs += (_Run(None, -1, (value,), tuple(gives[value])) for value in sorted(want))
        last = {
            value: place
            for place, run in enumerate(runs)
            for value in (*run.values, *(() if run.step is None else run.step.reads))
        }
        ends: dict[int, list[int]] = {}
        for value, place in last.items():
            ends.setdefault(place, []).append(value)
        return [run._replace(ends=tuple(ends.get(place, ()))) for place, run in enumerate(runs)]

    def play(
        self,
        runs: Sequence[_Run],
        base_of: Callable[[int], Base],
        states: Mapping[int, GeneratorState],
        give: Callable[[int, torch.Tensor], object],
    ) -> None:
        """Run what is needed.

        Args:
            runs: of :meth:`runs`.
            base_of: fetches what the tape does not make.
            states: of generators before steps that draw, by their places.
            give: takes what was saved, by its place in :attr:`saved`, as soon as it is there.
        """
        bases: dict[int, Base] = {}
        tensors: dict[int, dict[Spot, torch.Tensor]] = {}

        def at(spot: Spot) -> torch.Tensor:
            known = tensors.setdefault(spot.value, {})
            tensor = known.get(spot)
            if tensor is None:
                storage, low = bases[spot.value]
                if spot.start < low or spot.end - low > storage.nbytes():
                    # A tensor over it would grow it, and have anything in it.
                    raise RecomputeError(
                        f"got {storage.nbytes()} bytes of memory in which a tensor of shape {list(spot.size)} was, "
                        f"expected {spot.end - low}; leave memory that a region reads as it is until backward"
                    )
                tensor = known[spot] = spot.view.rebuild(storage, low)
            return tensor

        # What stands on a tape ran below autocast, and below autograd.
        with torch.no_grad(), torch._C._DisableAutocast():
            for run in runs:
                step = run.step
                if step is None:
                    (value,) = run.values
                    bases[value] = base_of(value)
                else:
                    args = list(step.args)
                    for place, spot in step.spots:
                        args[place] = at(spot)
                    for place, parts in step.lists:
                        args[place] = [at(each) if type(each) is Spot else each for each in parts]
                    output = _output_of(step, args, states[run.place] if step.is_random else None)
                    tensor = None
                    for index, spot in step.makes:
                        tensor = output if step.single else output[index]
                        if tensor is None:
                            raise Untold(
                                f"got nothing from {step.func}, expected a tensor, as where gradients are needed; "
                                f"leave it outside of the region"
                            )
                        bases[spot.value] = Base(tensor.untyped_storage())
                        tensors[spot.value] = {spot: tensor}
                    del args, output, tensor
                for number in run.gives:
                    saved = self.saved[number].spot
                    assert saved is not None
                    give(number, at(saved).detach())
                for value in run.ends:
                    del bases[value]
                    tensors.pop(value, None)


def _output_of(step: Step, args: Sequence[Any], moment: GeneratorState | None) -> Any:
    """What a step gives, with the generator that it draws from where it was."""
    if moment is not None:
        with drawn_from(moment):
            return _output_of(step, args, None)
    if step.numerics is None or step.numerics == Numerics.now():
        return step.func(*args, **step.kwargs)
    with step.numerics.in_force():
        return step.func(*args, **step.kwargs)
