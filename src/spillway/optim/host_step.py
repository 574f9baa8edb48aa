"""The optimizer's own step, on the host, piece by piece. All of it runs in the host lane."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from spillway.optim.gradient import CHUNK, Snapshot
from spillway.optim.held import Held, Piece
from spillway.optim.kinds import step_of
from spillway.optim.shared import Shared
from spillway.runtime.backend import Event
from spillway.runtime.labels import label

Settings = dict[str, Any]


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
    """

    def __init__(self, optimizer_class: type[Optimizer], given: dict[str, Any]) -> None:
        self._class = optimizer_class
        self._given = {name: value for name, value in given.items() if name not in ("fused", "foreach", "capturable")}
        self._step = step_of(optimizer_class)
        self._inner: Optimizer | None = None
        self._known: set[torch.Tensor] = set()
        """Pieces that a constructor of the class has seen: some make their state there."""
        self._scratch: dict[torch.dtype, torch.Tensor] = {}

    def step(self, share: Share, after: Event) -> list[Event]:
        """Step parameters, and queue their way back.

        Args:
            share: parameters that have a master, and their gradients.
            after: when the device may be written.

        Returns:
            The ends of their ways back.
        """
        back: dict[Held, Event] = {}
        for parts in _calls(share.turns):
            self._prepare(parts)
            self._call([piece for _, piece in parts], share.settings)
            for (held, _), piece in parts:
                back[held] = held.send_back(piece, after)
        for held, _ in share.turns:
            self._gather(held)
        return list(back.values())

    def step_together(self, shares: Sequence[Share], after: Mapping[Shared, Event]) -> list[Event]:
        """The same in one call, for a class of which it is not known that it steps each parameter by itself.

        Args:
            shares: parameters of any device.
            after: when each device may be written.
        """
        taking = []
        for turns, settings in shares:
            for held, gradient in turns:
                (piece,) = held.pieces
                piece.tensor.grad = held.whole(gradient)
            pieces = [held.pieces[0] for held, _ in turns]
            inner = self._inner_with(pieces, settings)
            taking.append({**settings, "params": [piece.tensor for piece in pieces]})
        self._run(inner, taking)
        back = []
        for turns, _ in shares:
            for held, _ in turns:
                held.pieces[0].tensor.grad = None
                back.append(held.send_back(held.pieces[0], after[held.shared]))
                self._gather(held)
        return back

    def put_state(self, held: Held, state: dict[Any, Any], settings: Settings) -> None:
        """A parameter's state is this, in tensors of its shape, which it takes over."""
        inner = self._inner_with(held.pieces, settings)
        for piece in held.pieces:
            inner.state[piece.tensor] = {name: _part(value, held, piece) for name, value in state.items()}
        first = inner.state[held.pieces[0].tensor]
        held.state = {name: first[name] if _is_own(value) else value for name, value in state.items()}

    def begin_state(self, held: Held, settings: Settings) -> None:
        """A parameter that has not stepped gets the state that the class's constructor makes."""
        self._inner_with(held.pieces, settings)
        self._gather(held)

    def drop_state(self, held: Held) -> None:
        """It has none."""
        for piece in held.pieces:
            if self._inner is not None:
                self._inner.state.pop(piece.tensor, None)
            self._known.discard(piece.tensor)
        held.state = {}

    def close(self) -> None:
        """Let go of all states."""
        self._inner = None
        self._known.clear()
        self._scratch.clear()

    def _call(self, pieces: Sequence[Piece], settings: Settings) -> None:
        inner = self._inner_with(pieces, settings)
        fresh = [piece.tensor for piece in pieces if not inner.state.get(piece.tensor)]
        known = [piece.tensor for piece in pieces if inner.state.get(piece.tensor)]
        # Fused SGD takes those that have momentum already, or those that have none yet.
        for some in (fresh, known):
            if some:
                self._run(inner, [{**settings, "params": some}])
        for piece in pieces:
            piece.tensor.grad = None

    def _run(self, inner: Optimizer, groups: list[dict[str, Any]]) -> None:
        inner.param_groups = groups
        with label("host step"):
            self._step(inner)
        inner.param_groups = []

    def _prepare(self, parts: Sequence[_Part]) -> None:
        """Let each piece have its gradient, side by side in scratch where they have to be cast."""
        used = 0
        for (held, values), piece in parts:
            scratch = self._scratch_of(held.work_dtype)[used:] if used + piece.numel <= CHUNK else None
            gradient = held.part(values, piece.start, piece.numel, scratch)
            used += piece.numel
            piece.tensor.grad = gradient.as_strided(piece.tensor.shape, piece.tensor.stride())

    def _scratch_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.empty(CHUNK, dtype=dtype, device="cpu")
        return self._scratch[dtype]

    def _inner_with(self, pieces: Sequence[Piece], settings: Settings) -> Optimizer:
        """The inner optimizer, with what its constructor makes for these pieces."""
        missing = [piece.tensor for piece in pieces if piece.tensor not in self._known]
        if self._inner is None or missing:
            new = self._class([{**settings, "params": missing}], **self._given)
            if self._inner is None:
                self._inner = new
            self._known.update(missing)
            for parameter, state in new.state.items():
                self._inner.state.setdefault(parameter, state)
        return self._inner

    def _gather(self, held: Held) -> None:
        """Let ``held.state`` be what the plain optimizer would have: whole tensors, of which the pieces have parts."""
        assert self._inner is not None
        states = [self._inner.state.get(piece.tensor, {}) for piece in held.pieces]
        if len(states) == 1:
            held.state = states[0]
            return
        for name in states[0].keys() - held.state.keys():
            first = states[0][name]
            if isinstance(first, torch.Tensor) and first.numel() == held.pieces[0].numel:
                whole = held.new_host_tensor(first.dtype)
                for piece, state in zip(held.pieces, states, strict=True):
                    state[name] = _slice(whole, held, piece).copy_(state[name])
                held.state[name] = whole
            else:
                held.state[name] = first


def _calls(turns: Sequence[Turn]) -> Iterator[list[_Part]]:
    """Pieces that share a call: as many small ones as fit the scratch."""
    together: list[_Part] = []
    numel = 0
    for turn in turns:
        for piece in turn.held.pieces:
            if together and numel + piece.numel > CHUNK:
                yield together
                together, numel = [], 0
            together.append(_Part(turn, piece))
            numel += piece.numel
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
