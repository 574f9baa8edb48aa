"""Policies are pure functions from a record to a decision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spillway.errors import SizeError, UsageError
from spillway.policies import (
    AllOf,
    AnyOf,
    Devices,
    Keep,
    MinBytes,
    Modules,
    Offload,
    Operators,
    Ratio,
    wants_modules,
    wants_operators,
)
from spillway.types import Decision, SavedTensor

CPU = torch.device("cpu")


def saved(
    nbytes: int = 100,
    *,
    offloaded: int = 0,
    total: int | None = 1000,
    module: str | None = None,
    operator: str | None = None,
) -> SavedTensor:
    return SavedTensor(
        nbytes, torch.Size([nbytes]), torch.uint8, CPU, 0, None, offloaded, total, module=module, operator=operator
    )


def decide(ratio: float, sizes: list[int], *, total: int | None) -> list[bool]:
    """Which tensors of a pass leave."""
    offloaded, leaves = 0, []
    for nbytes in sizes:
        leaves.append(Ratio(ratio)(saved(nbytes, offloaded=offloaded, total=total)) is Decision.OFFLOAD)
        offloaded += nbytes * leaves[-1]
    return leaves


def test_keep_and_offload() -> None:
    assert Keep()(saved()) is Decision.KEEP
    assert Offload()(saved()) is Decision.OFFLOAD
    assert Offload("host")(saved()) is Decision.OFFLOAD_HOST
    assert Offload("disk")(saved()) is Decision.OFFLOAD_DISK


@pytest.mark.parametrize("ratio", [0, 0.0, 0.5, 1])
def test_a_ratio_offloads_all_of_a_first_pass(ratio: float) -> None:
    assert decide(ratio, [5, 3, 2], total=None) == [True, True, True]


def test_a_ratio_is_greedy_in_packing_order_and_a_smaller_later_one_still_goes() -> None:
    assert decide(0.5, [4, 3, 2, 1], total=10) == [True, False, False, True]
    assert decide(0.5, [6, 5], total=11) == [False, True]
    assert decide(0, [4, 0, 1], total=5) == [False, True, False]
    assert decide(1, [4, 3, 2, 1], total=10) == [True, True, True, True]


@given(st.integers(1, 200), st.integers(1, 200))
def test_a_ratio_of_k_in_n_sends_k_of_n_equal_tensors(n: int, k: int) -> None:
    k = min(k, n)
    nbytes = 2**20
    assert sum(decide(k / n, [nbytes] * n, total=n * nbytes)) == k


@pytest.mark.parametrize("ratio", [0.29, 0.57, 0.58])
def test_a_ratio_in_percent_sends_as_many_of_a_hundred(ratio: float) -> None:
    assert sum(decide(ratio, [2**20] * 100, total=100 * 2**20)) == round(ratio * 100)


@given(st.floats(0, 1), st.lists(st.integers(1, 10**9), max_size=30))
def test_a_ratio_is_never_passed(ratio: float, sizes: list[int]) -> None:
    total = sum(sizes)
    left = sum(size for size, leaves in zip(sizes, decide(ratio, sizes, total=total), strict=True) if leaves)
    assert total == 0 or left / total <= ratio


@pytest.mark.parametrize("ratio", [-0.1, 1.1, float("nan"), float("inf"), "half", None, 0.5j])
def test_a_ratio_outside_of_zero_to_one_is_refused(ratio: object) -> None:
    with pytest.raises(UsageError, match=r"^ratio: got .*expected a number from 0"):
        Ratio(ratio)  # type: ignore[arg-type]


def test_min_bytes() -> None:
    policy = MinBytes("1KiB")
    assert policy(saved(1023)) is Decision.KEEP
    assert policy(saved(1024)) is Decision.OFFLOAD
    assert policy == MinBytes(1024)
    with pytest.raises(SizeError, match="nbytes"):
        MinBytes("12 parsecs")


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("*.mlp*", "layers.0.mlp", True),
        ("*.mlp*", "layers.0.mlp.up", True),
        ("*.mlp*", "layers.0.attention", False),
        ("layers.[01].*", "layers.2.norm", False),
        ("*", "", True),
        ("*", None, True),
        ("head", "Head", False),
    ],
)
def test_modules_by_pattern(pattern: str, module: str | None, matches: bool) -> None:
    policy = Modules(pattern, Offload("disk"), Offload("host"))
    expected = Decision.OFFLOAD_DISK if matches else Decision.OFFLOAD_HOST
    assert policy(saved(module=module)) is expected
    assert Modules(pattern)(saved(module=module)) is (Decision.OFFLOAD if matches else Decision.KEEP)


def test_operators_by_pattern() -> None:
    policy = Operators("*.linear", Offload("disk"), Keep())
    assert policy(saved(operator="torch.nn.functional.linear")) is Decision.OFFLOAD_DISK
    assert policy(saved(operator="torch.nn.functional.gelu")) is Decision.KEEP
    assert policy(saved(operator=None)) is Decision.KEEP


def counting(answers: list[Decision], calls: list[int]) -> list[Callable[[SavedTensor], Decision]]:
    def one(index: int) -> Callable[[SavedTensor], Decision]:
        def policy(_: SavedTensor) -> Decision:
            calls.append(index)
            return answers[index]

        return policy

    return [one(index) for index in range(len(answers))]


K, O, H, D = Decision.KEEP, Decision.OFFLOAD, Decision.OFFLOAD_HOST, Decision.OFFLOAD_DISK  # noqa: E741


@pytest.mark.parametrize(
    ("answers", "all_of", "asked", "any_of", "asked_any"),
    [
        ([H, D], D, [0, 1], H, [0]),
        ([K, D], K, [0], D, [0, 1]),
        ([O, K, D], K, [0, 1], O, [0]),
        ([K, K], K, [0], K, [0, 1]),
    ],
)
def test_combinators_ask_no_further_than_they_must(
    answers: list[Decision], all_of: Decision, asked: list[int], any_of: Decision, asked_any: list[int]
) -> None:
    calls: list[int] = []
    assert AllOf(*counting(answers, calls))(saved()) is all_of
    assert calls == asked
    calls.clear()
    assert AnyOf(*counting(answers, calls))(saved()) is any_of
    assert calls == asked_any


def test_a_combination_of_nothing_is_refused() -> None:
    for combined in (AllOf, AnyOf):
        with pytest.raises(UsageError, match=f"{combined.__name__}: got no policy"):
            combined()


def test_a_policy_wants_what_one_of_its_parts_wants() -> None:
    modules, operators = Modules("*"), Operators("*")
    assert not any(wants(policy) for wants in (wants_modules, wants_operators) for policy in (Keep(), Ratio(1), len))
    for policy in (
        modules,
        AllOf(Keep(), modules),
        AnyOf(modules),
        Operators("*", modules),
        Operators("*", Keep(), modules),
    ):
        assert wants_modules(policy)
    for policy in (
        operators,
        AllOf(Keep(), operators),
        AnyOf(operators),
        Modules("*", operators),
        Modules("*", Keep(), operators),
    ):
        assert wants_operators(policy)
    assert not wants_operators(modules)
    assert not wants_modules(operators)


def test_policies_are_values() -> None:
    assert Ratio(0.5) == Ratio(0.5) != Ratio(0.4)
    assert hash(Modules("a")) == hash(Modules("a"))
    assert repr(AllOf(Keep(), Ratio(1))) == "AllOf(Keep(), Ratio(ratio=1))"


@pytest.mark.parametrize(
    ("pattern", "device", "matches"),
    [("cpu", "cpu", True), ("cpu", "cuda:0", False), ("cuda*", "cuda:1", True), ("cuda:0", "cuda:1", False)],
)
def test_devices_by_pattern(pattern: str, device: str, matches: bool) -> None:
    policy = Devices(pattern, Offload("disk"), Offload("host"))
    expected = Decision.OFFLOAD_DISK if matches else Decision.OFFLOAD_HOST
    assert policy(saved()._replace(device=torch.device(device))) is expected


def test_devices_want_what_their_parts_want() -> None:
    assert not wants_modules(Devices("cpu"))
    assert not wants_operators(Devices("cpu"))
    assert wants_modules(Devices("cpu", Keep(), Modules("*")))
    assert wants_operators(Devices("cpu", Operators("*")))
