"""Plans and profiles in files: read as they were written, or refused."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import spillway
from planner.blocks import MLP, profile_of
from planner.test_block_tasks import BY_HAND
from spillway import UsageError
from spillway.attaching.call import is_attached
from spillway.planner.plan import BlockPlan, OperatorPlan, Plan, program_of
from spillway.planner.profile import Profile
from spillway.types import Decision

SETTINGS = settings(derandomize=True, deadline=None, max_examples=300, database=None)

PROFILE = profile_of(BY_HAND, 2)
PLAN = Plan(
    model="Model",
    device="cuda:0",
    budget=1 << 30,
    window=1 << 20,
    predicted_peak=1 << 29,
    predicted_seconds=0.5,
    stall_seconds=0.1,
    peak_task="head and loss",
    host_bytes=80,
    disk_bytes=0,
    blocks=tuple(
        BlockPlan(
            name=call.name,
            plain=False,
            inputs=Decision.KEEP,
            operators=(OperatorPlan(1, "mm", Decision.OFFLOAD_HOST, 80, "leaves"),),
            kept_bytes=-40,
            sent_bytes=80,
            recompute_seconds=3.0,
        )
        for call in PROFILE.calls
    ),
)
RECORDS = [pytest.param(PROFILE, id="profile"), pytest.param(PLAN, id="plan")]

ODD: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 10**30, -0.5, 0.5, 1e308, math.nan, math.inf, -math.inf),
    *("", "keep", "gone", "offload", "free", "1", [], [1], ["x"], [[]], {}, {"nbytes": 1}, "\ud800"),
]


def places(found: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Ways to all that is in a file."""
    below = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [path, *(place for key, value in below for place in places(value, (*path, key)))]


def changed(data: st.DataObject, found: Any) -> Any:
    """The same with one thing changed, dropped or added anywhere."""
    path = data.draw(st.sampled_from(places(found)[1:]))
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    how = data.draw(st.sampled_from(("replace", "replace", "drop", "add", "rename", "double")))
    if how == "drop":
        del holder[path[-1]]
    elif how == "add" and isinstance(holder, dict):
        holder[data.draw(st.sampled_from(("more", "schema_version", "")))] = copy.deepcopy(
            data.draw(st.sampled_from(ODD))
        )
    elif how == "rename" and isinstance(holder, dict):
        holder[f"{path[-1]}_"] = holder.pop(path[-1])
    elif how == "double" and isinstance(holder, list):
        holder.append(copy.deepcopy(holder[path[-1]]))
    else:
        holder[path[-1]] = copy.deepcopy(data.draw(st.sampled_from(ODD)))
    return found


@pytest.mark.parametrize("record", RECORDS)
@SETTINGS
@given(data=st.data())
def test_a_changed_file_is_read_as_it_stands_or_refused(record: Profile | Plan, data: st.DataObject) -> None:
    found = json.loads(record.to_json())
    for _ in range(data.draw(st.integers(1, 2))):
        found = changed(data, found)
        if not found:
            break
    try:
        read = type(record).from_json(json.dumps(found))
    except UsageError as error:
        said = str(error)
        assert said.startswith("The text ") and said.endswith("Make it again, or give another file.")
        return
    if isinstance(read, Profile):
        # Files of an earlier time do not have it.
        found.setdefault("static", None)
    # Numbers are the same with and without a point, however large.
    assert json.loads(read.to_json(), parse_int=float) == json.loads(json.dumps(found), parse_int=float)
    if isinstance(read, Profile):
        # Whoever reads it finds what its numbers stand for.
        assert read.saved_bytes >= 0 and str(read)
    else:
        assert str(read)
        try:
            program_of(PROFILE, read)
        except UsageError as error:
            assert str(error).endswith("Make a plan from this profile.")


@pytest.mark.parametrize("record", RECORDS)
@SETTINGS
@given(data=st.data())
def test_text_that_is_cut_or_spoilt_is_refused(record: Profile | Plan, data: st.DataObject) -> None:
    text = record.to_json()
    place = data.draw(st.integers(0, len(text) - 1))
    spoilt = text[:place] + data.draw(st.sampled_from(("", "\0", "]", "}", '"', "\ud800")))
    # White space says nothing.
    assume("".join(spoilt.split()) != "".join(text.split()))
    with pytest.raises(UsageError, match=r"is not a \w+ of version .*Make it again"):
        type(record).from_json(spoilt)


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("text", ["", "null", "[]", "1", '"x"', "{}", "[" * 10_000, "\ud800"], ids=range(8))
def test_what_is_no_record_is_refused(record: Profile | Plan, text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a \w+ of version .*Make it again"):
        type(record).from_json(text)


@pytest.mark.parametrize("record", RECORDS)
def test_a_file_of_another_version_is_told_by_it_whatever_else_is_in_it(record: Profile | Plan) -> None:
    for other in {spillway.Plan, spillway.Profile, spillway.Hardware} - {type(record)}:
        with pytest.raises(
            UsageError, match=f"has a {type(record).__name__}, expected a {other.__name__}. Give another"
        ):
            other.from_json(record.to_json())
    with pytest.raises(UsageError, match=f"of version 99, and this .* reads version {record.schema}. Make it again"):
        type(record).from_json('{"schema": 99, "much": "else"}')


@pytest.mark.parametrize("record", RECORDS)
def test_files_are_read_as_they_were_written_and_missed_where_there_is_none(
    record: Profile | Plan, tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    record.save(path)
    assert type(record).load(path) == record
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="Make it again"):
        type(record).load(path)
    with pytest.raises(UsageError, match=r"gone.* cannot be read .*Give a file that"):
        type(record).load(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"path: .* cannot be written .*Give the name of a file in a folder"):
        record.save(tmp_path / "gone" / "record.json")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("kinds", 0, "operators", 0, "reads"), [6]),
        (("kinds", 0, "operators", 0, "makes"), [3]),
        (("kinds", 0, "operators", 0, "makes"), []),
        (("kinds", 0, "values", 2, "maker"), 4),
        (("kinds", 0, "values", 2, "maker"), 1),
        (("kinds", 0, "values", 2, "saved_at"), 5),
        (("calls", 1, "kind"), 1),
        (("kinds", 0, "values", 2, "nbytes"), -1),
        (("kinds", 0, "forward_seconds"), math.nan),
        (("static_bytes",), -1),
        (("static_bytes",), 1.5),
        (("min_bytes",), "4096"),
    ],
    ids=str,
)
def test_numbers_that_stand_for_nothing_are_refused(path: tuple[Any, ...], value: Any) -> None:
    found = json.loads(PROFILE.to_json())
    holder = found
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    with pytest.raises(UsageError, match=r"is not a Profile of version"):
        Profile.from_json(json.dumps(found))


def stack(names: tuple[str, ...] = ("layers.0", "layers.1")) -> tuple[torch.nn.Module, Plan]:
    """A model of blocks, and a plan for blocks of these names."""
    model = torch.nn.Sequential()
    model.layers = torch.nn.Sequential(MLP(), MLP())
    model.forward = model.layers.forward  # type: ignore[method-assign]
    blocks = tuple(BlockPlan(name, False, Decision.KEEP, (), 0, 0, 0.0) for name in names)
    return model, Plan("Sequential", "cpu", 1 << 30, 1 << 20, 0, 0.0, 0.0, "", 0, 0, blocks)


@pytest.mark.parametrize("names", [(), ("layers.0",), ("layers.0", "other.1"), ("layers.0", "layers.1", "layers.2")])
def test_a_plan_for_blocks_of_other_names_is_refused_before_anything_is_taken_over(names: tuple[str, ...]) -> None:
    model, plan = stack(names)
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(UsageError, match=r"plan: got one for Sequential with .*expected the 2 of this model"):
        spillway.attach(model, plan=plan, blocks="layers.*")
    assert not any(is_attached(module) for module in model.modules())
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before
    # Nor is it in the way of the right one.
    _, right = stack()
    with spillway.attach(model, plan=right, blocks="layers.*") as attached:
        assert attached.plan == right


def test_a_plan_that_names_other_operators_is_refused_where_a_profile_shows_them() -> None:
    operator = OperatorPlan(0, "mm", Decision.KEEP, 40, "")
    blocks = tuple(BlockPlan(call.name, False, Decision.KEEP, (operator,), 0, 0, 0.0) for call in PROFILE.calls)
    plan = Plan("Model", "cpu", 1 << 30, 1 << 20, 0, 0.0, 0.0, "", 0, 0, blocks)
    with pytest.raises(UsageError, match=r"The plan names mm as operator 0 of 'layers.0'.*Make a plan from"):
        program_of(PROFILE, plan)
