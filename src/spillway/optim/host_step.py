"""The optimizer's own step, on the host, piece by piece.

The host lane takes parameters in turn and waits for what each needs; *hands*, one thread a CPU, each of which computes
with a single thread, step their pieces. So a piece's cast, step and cast back stay in one core's caches, no team of
threads has to be woken for any of them, and a parameter that is waited for keeps nobody else from being stepped.
Parameters that are not cut (see NOTE [ Pieces ]) are stepped in the host lane, by all CPUs together.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from spillway.optim.gradient import Snapshot
from spillway.optim.held import CHUNK, Asked, Held, Piece, send_back
from spillway.optim.kinds import for_host, step_of, written_by_step
from spillway.optim.shared import Shared
from spillway.optim.states import follow_first
from spillway.runtime.backend import Event, HostLane, TaskEnd
from spillway.runtime.labels import label

Settings = dict[str, Any]

_WITHOUT_SCRATCH = 4
"""How many times as many elements share a call that reads gradients as they lie: calls keep Python busy."""

_READ_TOGETHER = 8
"""How many times as many elements are read from the device at once."""


class Turn(NamedTuple):
    """A parameter whose turn it is, and its gradient."""

    held: Held
    gradient: Snapshot


class Share(NamedTuple):
    """Parameters of one group, and the group's settings for the host."""

    turns: Sequence[Turn]
    settings: Settings


class _Part(NamedTuple):
    turn: Turn
    piece: Piece


class HostStep:
    """Steps pieces by an optimizer of the user's class.

    Args:
        optimizer_class: the class.
        given: what the user gave for it.
        hands: how many there are.
    """

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any], *, hands: int) -> None:
        self._class = optimizer_class
        self._given = for_host(given)
        self._step = step_of(optimizer_class)
        self._states: defaultdict[torch.Tensor, dict[Any, Any]] = defaultdict(dict)
        self._known: set[torch.Tensor] = set()
        """Pieces that a constructor of the class has seen: some make their state there."""
        self.written: dict[int, Settings] = {}
        """What a class put into its groups, by their index; to be read when the step is done."""
        self._mine = _Mine()
        self._hands = hands
        self._given_out: deque[TaskEnd] = deque()
        self._unfinished = 0
        """Of these."""
        self._seconds = 0.0
        self._lock = threading.Lock()

    def step(self, share: Share, after: Event) -> Event:
        """Step parameters, and queue their way back.

        Args:
            share: parameters whose step has begun, and their gradients.
            after: when the device may be read and written.

        Returns:
            The end of their ways back.
        """
        held = share.turns[0].held
        for turn in share.turns:
            turn.gradient.wait(held.shared.traffic)
            self._know(turn.held, share.settings)
            follow_first([self._states[piece.tensor] for piece in turn.held.pieces])
        ends = []
        for calls in _asked_together(share.turns):
            if held.cut:
                self._wait_for_hands()
            asked = Asked([(turn.held, piece) for parts in calls for turn, piece in parts], after)
            for parts in calls:
                step = partial(self._step_parts, parts, share.settings, asked, after)
                ends.append(self._hand(held.shared.hands, step) if held.cut else step())
        return held.shared.traffic.backend.all_of(ends)

    def _wait_for_hands(self) -> None:
        """Until few calls are before the next one: memory for what parameters are is bounded so."""
        while self._unfinished >= 2 * self._hands:
            self._given_out.popleft().finish()

    def _hand(self, hands: HostLane, step: Callable[[], Event]) -> Event:
        """Give the hands one more."""

        def work() -> Event:
            try:
                return step()
            finally:
                with self._lock:
                    self._unfinished -= 1

        end = hands.run(work)
        with self._lock:
            self._unfinished += 1
        while self._given_out and self._given_out[0].query():
            self._given_out.popleft()
        self._given_out.append(end)
        return end

    def step_together(self, shares: Sequence[Share], after: Mapping[Shared, Event]) -> Event:
        """The same in one call, for a class of which it is not known that it steps each parameter by itself.

        Args:
            shares: parameters of any device.
            after: when each device may be read and written.
        """
        groups = []
        for turn in (turn for share in shares for turn in share.turns):
            whole = [(turn.held, turn.held.pieces[0])]
            Asked(whole, after[turn.held.shared]).read(whole)
        for some, settings in shares:
            for held, gradient in some:
                self._know(held, settings)
                held.pieces[0].tensor.grad = held.whole(gradient)
            groups.append({**settings, "params": [turn.held.pieces[0].tensor for turn in some]})
        began = time.perf_counter()
        before = [dict(group) for group in groups]
        self._run(groups)
        self._count(time.perf_counter() - began, alone=True)
        for (some, _), group, settings in zip(shares, groups, before, strict=True):
            self.written.setdefault(some[0].held.group, {}).update(written_by_step(group, settings))
        back: defaultdict[Shared, list[tuple[Held, Piece]]] = defaultdict(list)
        for share in shares:
            for held, _ in share.turns:
                held.pieces[0].tensor.grad = None
                held.state = self._states[held.pieces[0].tensor]
                back[held.shared].append((held, held.pieces[0]))
        ends = [send_back(pieces, after[shared]) for shared, pieces in back.items()]
        return next(iter(back)).traffic.backend.all_of(ends)

    def put_state(self, held: Held, state: dict[Any, Any], settings: Settings) -> None:
        """A parameter's state is this, in tensors of its shape, which it takes over."""
        self._know(held, settings)
        for piece in held.pieces:
            parts = {name: _part(value, held, piece) for name, value in state.items()}
            self._states[piece.tensor] = parts
            piece.parts = dict(parts)
        first = self._states[held.pieces[0].tensor]
        held.state = {name: first[name] if _is_own(value) else value for name, value in state.items()}

    def begin_state(self, held: Held, settings: Settings) -> None:
        """A parameter that has not stepped gets the state that the class's constructor makes."""
        self._know(held, settings)

    def drop_state(self, held: Held) -> None:
        """It has none."""
        for piece in held.pieces:
            self._states.pop(piece.tensor, None)
            self._known.discard(piece.tensor)
            piece.parts = {}
        held.state = {}

    def close(self) -> None:
        """Let go of all states."""
        self._states.clear()
        self._known.clear()
        self._mine = _Mine()

    def _know(self, held: Held, settings: Settings) -> None:
        """Let the class's constructor make what it makes for a parameter."""
        missing = [piece.tensor for piece in held.pieces if piece.tensor not in self._known]
        if missing:
            made = self._class([{**settings, "params": missing}], **self._given)
            for tensor, state in made.state.items():
                self._states.setdefault(tensor, state)
            self._known.update(missing)
            for piece in held.pieces:
                self._gather(held, piece)

    def _step_parts(self, parts: Sequence[_Part], settings: Settings, asked: Asked, after: Event) -> Event:
        """Step some pieces, and queue their way back; in any thread."""
        asked.read([(turn.held, piece) for turn, piece in parts])
        began = time.perf_counter()
        used = 0
        for (held, values), piece in parts:
            scratch = self._mine.scratch(held.work_dtype)[used:] if used + piece.numel <= CHUNK else None
            gradient = held.part(values, piece.start, piece.numel, scratch)
            if piece.tensor.ndim != 1:
                gradient = gradient.as_strided(piece.tensor.shape, piece.tensor.stride())
            piece.tensor.grad = gradient
            used += 0 if values.stays(held.work_dtype) else piece.numel
        # Fused SGD takes those that have momentum already, or those that have none yet.
        has_state = [bool(self._states.get(piece.tensor)) for _, piece in parts]
        for which in (False, True):
            some = [part.piece.tensor for part, has in zip(parts, has_state, strict=True) if has is which]
            if some:
                self._run([{**settings, "params": some}])
        for (held, _), piece in parts:
            piece.tensor.grad = None
            self._gather(held, piece)
        end = send_back([(turn.held, piece) for turn, piece in parts], after)
        self._count(time.perf_counter() - began, alone=not held.cut)
        return end

    def _count(self, seconds: float, *, alone: bool) -> None:
        with self._lock:
            self._seconds += seconds if alone else seconds / self._hands

    def count_anew(self) -> float:
        """How long the host computed since this was asked for last: the mean of its hands."""
        with self._lock:
            seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _run(self, groups: list[dict[str, Any]]) -> None:
        inner = self._mine.inner
        if inner is None:
            # One for each thread, with the states of all.
            inner = self._mine.inner = self._class([torch.nn.Parameter(torch.zeros(1, 1))], **self._given)
            inner.state = self._states
        inner.param_groups = groups
        with label("host step"):
            self._step(inner)
        inner.param_groups = []

    def _gather(self, held: Held, piece: Piece) -> None:
        """Let ``held.state`` be what the plain optimizer would have: whole tensors, of which the pieces have parts."""
        state = self._states[piece.tensor]
        if len(held.pieces) == 1:
            held.state = state
            return
        for name, value in state.items():
            if value is piece.parts.get(name):
                continue
            if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == piece.numel:
                with self._lock:
                    if name not in held.state:
                        held.state[name] = held.new_host_tensor(value.dtype)
                state[name] = _slice(held.state[name], held, piece).copy_(value)
            else:
                held.state.setdefault(name, value)
            piece.parts[name] = state[name]


class _Mine(threading.local):
    """What each thread has for itself."""

    def __init__(self) -> None:
        self.inner: Optimizer | None = None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def scratch(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory for gradients of a call that are cast."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
        return self._scratch[dtype]


def _calls(turns: Sequence[Turn]) -> Iterator[list[_Part]]:
    """Pieces that share a call: as many as fit the scratch, and a few times more of those that need none."""
    together: list[_Part] = []
    share = 0.0
    for turn in turns:
        most = _WITHOUT_SCRATCH * CHUNK if turn.gradient.stays(turn.held.work_dtype) else CHUNK
        for piece in turn.held.pieces:
            if together and share + piece.numel / most > 1:
                yield together
                together, share = [], 0.0
            together.append(_Part(turn, piece))
            share += piece.numel / most
    if together:
        yield together


def _asked_together(turns: Sequence[Turn]) -> Iterator[list[list[_Part]]]:
    """Calls whose parameters are read at once: few copies, since hands keep the lane waiting for Python."""
    together: list[list[_Part]] = []
    numel = 0
    for parts in _calls(turns):
        together.append(parts)
        numel += sum(part.piece.numel for part in parts)
        if numel >= _READ_TOGETHER * CHUNK:
            yield together
            together, numel = [], 0
    if together:
        yield together


def _is_own(value: object) -> bool:
    """Whether every piece has one of its own: a count of steps, say."""
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _part(value: Any, held: Held, piece: Piece) -> Any:
    if not isinstance(value, torch.Tensor) or (len(held.pieces) == 1 and not _is_own(value)):
        return value
    return value.clone() if _is_own(value) or value.numel() != held.numel else _slice(value, held, piece)


def _slice(whole: torch.Tensor, held: Held, piece: Piece) -> torch.Tensor:
    return whole.as_strided((held.numel,), (1,))[piece.start : piece.start + piece.numel]
