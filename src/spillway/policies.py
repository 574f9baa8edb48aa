"""Policies: pure functions from the facts about a saved tensor to a decision.

A policy is any callable from :class:`~spillway.types.SavedTensor` to :class:`~spillway.types.Decision`. The policies
here are frozen values. The record that they read says what the forward pass has offloaded so far.

A policy that depends on the module has an attribute ``wants_modules = True``, one that depends on the operator
``wants_operators = True``. Looking either up costs time, so Spillway does so only for such policies. Policies are never
asked about parameters.

Example:
    Offload the tensors that the MLPs save, and half of the other bytes::

        policy = Modules("*.mlp*", Offload(), Ratio(0.5))
        with spillway.offload(policy=policy):
            loss = model(batch)
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from spillway.errors import UsageError
from spillway.types import Decision, SavedTensor
from spillway.units import parse_bytes

Policy = Callable[[SavedTensor], Decision]


def wants_modules(policy: Policy | None) -> bool:
    """Whether the policy reads :attr:`SavedTensor.module`."""
    return bool(getattr(policy, "wants_modules", False))


def wants_operators(policy: Policy | None) -> bool:
    """Whether the policy reads :attr:`SavedTensor.operator`."""
    return bool(getattr(policy, "wants_operators", False))


_TO_TIER = {"auto": Decision.OFFLOAD, "host": Decision.OFFLOAD_HOST, "disk": Decision.OFFLOAD_DISK}


def check_tier(tier: str) -> str:
    """The name of a tier, or :class:`~spillway.errors.UsageError`."""
    if not isinstance(tier, str) or tier not in _TO_TIER:
        raise UsageError(f"tier: got {tier!r}, expected one of {', '.join(map(repr, _TO_TIER))}")
    return tier


@dataclass(frozen=True)
class Keep:
    """Keep everything."""

    def __call__(self, saved: SavedTensor) -> Decision:
        return Decision.KEEP


@dataclass(frozen=True)
class Offload:
    """Offload everything, to the tier of the context, or to the one named.

    Args:
        tier: ``"auto"``, ``"host"`` or ``"disk"``.
    """

    tier: str = "auto"

    def __post_init__(self) -> None:
        check_tier(self.tier)

    def __call__(self, saved: SavedTensor) -> Decision:
        return _TO_TIER[self.tier]


@dataclass(frozen=True)
class Ratio:
    """Offload the first tensors of a forward pass, up to a ratio of all the bytes that such a pass saves.

    The first pass that has a backward offloads everything, and counts the bytes. After that a tensor is offloaded if
    the bytes offloaded before it and its own are together at most ``ratio`` of the count. A tensor that does not fit is
    kept, and a smaller one after it may still be offloaded. (The method of haiscale's ``CPUOffload``.)

    Args:
        ratio: from 0 to 1.
    """

    ratio: float

    def __post_init__(self) -> None:
        if not (isinstance(self.ratio, (int, float)) and 0 <= self.ratio <= 1):
            raise UsageError(f"ratio: got {self.ratio!r}, expected a number from 0 (keep all) to 1 (offload all)")

    def __call__(self, saved: SavedTensor) -> Decision:
        # A pass may save more than the one that was counted: all of it is still all of it.
        if self.ratio == 1 or not saved.total_bytes:
            return Decision.OFFLOAD
        # Divided, and not multiplied: 0.29 * 100 is less than 29.
        fits = (saved.offloaded_bytes + saved.nbytes) / saved.total_bytes <= self.ratio
        return Decision.OFFLOAD if fits else Decision.KEEP


@dataclass(frozen=True)
class _Bytes:
    nbytes: int | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", parse_bytes(self.nbytes, what="nbytes"))

    @property
    def _limit(self) -> int:
        assert isinstance(self.nbytes, int)
        return self.nbytes


class FirstBytes(_Bytes):
    """Offload the first tensors of a forward pass, up to so many bytes. Unlike :class:`Ratio`, it counts no pass first.

    Args:
        nbytes: bytes, or a size like ``"256MiB"``.
    """

    def __call__(self, saved: SavedTensor) -> Decision:
        return Decision.OFFLOAD if saved.offloaded_bytes + saved.nbytes <= self._limit else Decision.KEEP


class MinBytes(_Bytes):
    """Offload tensors of at least so many bytes.

    Args:
        nbytes: bytes, or a size like ``"1MiB"``.
    """

    def __call__(self, saved: SavedTensor) -> Decision:
        return Decision.OFFLOAD if saved.nbytes >= self._limit else Decision.KEEP


class _Composed:
    """A policy of others. It wants to know what one of them does."""

    def _inner(self) -> tuple[Policy, ...]:
        raise NotImplementedError

    @property
    def wants_modules(self) -> bool:
        return any(map(wants_modules, self._inner()))

    @property
    def wants_operators(self) -> bool:
        return any(map(wants_operators, self._inner()))


@dataclass(frozen=True)
class _Matching(_Composed):
    """One policy for tensors whose name matches a pattern, another for the rest."""

    pattern: str
    then: Policy = Offload()
    otherwise: Policy = Keep()

    _fact: ClassVar[str]
    """The fact of a saved tensor that is matched."""

    def _inner(self) -> tuple[Policy, ...]:
        return self.then, self.otherwise

    def __call__(self, saved: SavedTensor) -> Decision:
        matches = fnmatch.fnmatchcase(str(getattr(saved, self._fact) or ""), self.pattern)
        return self.then(saved) if matches else self.otherwise(saved)


class Modules(_Matching):
    """One policy for tensors saved in modules whose dotted path matches a pattern, another for the rest.

    Args:
        pattern: as in a shell: ``"*.self_attn*"``. A path begins below the first module called inside the context.
        then: for those that match.
        otherwise: for the others.
    """

    wants_modules = True
    _fact = "module"


class Operators(_Matching):
    """One policy for tensors saved by torch functions whose name matches a pattern, another for the rest.

    Args:
        pattern: as in a shell: ``"*.scaled_dot_product_attention"``.
        then: for those that match.
        otherwise: for the others.
    """

    wants_operators = True
    _fact = "operator"


class Devices(_Matching):
    """One policy for tensors on devices whose name matches a pattern, another for the rest.

    ``Devices("cpu", Keep(), Offload())`` keeps the CPU's tensors where a model is on an accelerator.

    Args:
        pattern: as in a shell, for names like ``"cpu"`` and ``"cuda:0"``: ``"cuda*"``.
        then: for those that match.
        otherwise: for the others.
    """

    _fact = "device"


class _Combined(_Composed):
    """Several policies asked one after the other, until one keeps, or until one offloads."""

    _ends_at_keep: bool

    def __init__(self, *policies: Policy) -> None:
        if not policies:
            raise UsageError(f"{type(self).__name__}: got no policy, expected at least one")
        self.policies = policies

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.policies))})"

    def _inner(self) -> tuple[Policy, ...]:
        return self.policies

    def __call__(self, saved: SavedTensor) -> Decision:
        decision = Decision.KEEP
        for policy in self.policies:
            decision = policy(saved)
            if (decision is Decision.KEEP) == self._ends_at_keep:
                break
        return decision


class AllOf(_Combined):
    """Offload a tensor that all policies offload, to the tier of the last one. Keep the rest."""

    _ends_at_keep = True


class AnyOf(_Combined):
    """Offload a tensor that one of the policies offloads, to the tier of the first of these. Keep the rest."""

    _ends_at_keep = False
