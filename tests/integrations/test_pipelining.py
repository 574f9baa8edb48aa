"""Schedules of ``torch.distributed.pipelining`` on several processes: each trains bit for bit as without Spillway.

A world is started once and runs all of its schedules: what costs time is to start it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional

import spillway
from integrations.ranks import World
from recompute.regions import HiddenAttribute
from spillway.integrations.pipelining import OffloadedStages, offload_stages
from support import assert_nothing_left

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="a torch without torch.distributed"),
    pytest.mark.timeout(240),
]

WIDTH, ROWS = 16, 3
CPU = torch.device("cpu")


class Block(nn.Module):
    """Dropout, so that random numbers must be the same in a re-run; counts its runs."""

    # Spillway would put back what it sees.
    runs = HiddenAttribute(0)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return x + functional.dropout(self.down(functional.gelu(self.up(self.norm(x)))), 0.25)


class Part(nn.Module):
    """What one stage runs."""

    # Spillway would put back what it sees.
    calls = HiddenAttribute(0)

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fails_at: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        if self.calls == self.fails_at:
            raise ArithmeticError("on purpose")
        return x


@dataclass(frozen=True)
class Plan:
    """A schedule, and how stages lie on ranks: one each, in a loop, or in a V."""

    name: str
    placement: str
    micro_batches: int = 4
    fused: bool = False
    """Whether a zero-bubble schedule is told to compute a weight's gradient together with the input's."""

    def indices(self, rank: int, ranks: int) -> list[int]:
        return {"one": [rank], "loop": [rank, rank + ranks], "v": [rank, 2 * ranks - 1 - rank]}[self.placement]

    def make(self, *, micro_batches: int | None = None) -> tuple[list[Any], Callable[[int], Any]]:
        """The stages of this rank, and what makes a schedule of so many micro-batches over them."""
        from torch.distributed import pipelining

        rank, ranks = dist.get_rank(), dist.get_world_size()
        count = ranks * (1 if self.placement == "one" else 2)
        more = {"dw_builder": lambda: lambda: None} if self.fused else {}
        stages = [
            pipelining.PipelineStage(Part(index), index, count, CPU, **more) for index in self.indices(rank, ranks)
        ]
        kind: Any = getattr(pipelining.schedules, f"Schedule{self.name}")
        return stages, lambda number: kind(
            stages[0] if self.placement == "one" else stages, number, loss_fn=functional.mse_loss
        )


PLANS = [
    Plan("GPipe", "one"),
    Plan("1F1B", "one"),
    Plan("Interleaved1F1B", "loop"),
    Plan("LoopedBFS", "loop"),
    Plan("InterleavedZeroBubble", "loop"),
    Plan("ZBVZeroBubble", "v"),
    Plan("ZBVZeroBubble", "v", fused=True),
    Plan("DualPipeV", "v"),
]

REGIONS: dict[str, Any] = {"recompute": spillway.Recompute(save="matmul"), "blocks": "blocks.*"}
MIXED: dict[str, Any] = {"recompute": spillway.Recompute(offload=["inputs", "matmul"]), "blocks": "blocks.*"}
WAYS: dict[str, dict[str, Any]] = {
    "offload": {"tier": "host", "window": 1024},
    "offload-disk": {"tier": "disk", "window": 0},
    "offload-some": {"tier": "host", "nbytes": ("4KiB", 1000), "window": 0},
    "regions": {**REGIONS},
    "regions-away": {**MIXED, "tier": "host", "window": 0},
    "both": {**MIXED, "ratio": 1, "tier": "host", "window": 1024},
}
MORE_WAYS = ["offload-disk", "offload-some", "regions-away"]


def train(plan: Plan, numbers: tuple[int, ...], stages: list[Any], schedule: Callable[[int], Any]) -> Iterator[Tensor]:
    """One step with each number of micro-batches: losses, gradients, and weights after an optimizer's step."""
    stage_modules = [stage.submod for stage in stages]
    parameters = [parameter for module in stage_modules for parameter in module.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    last, made = 0, None
    for step, number in enumerate(numbers):
        if number != last:
            last, made = number, schedule(number)
        torch.manual_seed(100 + step)
        batch, target = torch.randn(number * ROWS, WIDTH), torch.randn(number * ROWS, WIDTH)
        losses: list[Tensor] = []
        first = any(stage.is_first for stage in stages)
        ends = any(stage.is_last for stage in stages)
        made.step(*((batch,) if first else ()), **({"target": target, "losses": losses} if ends else {}))
        yield from (loss.detach().clone() for loss in losses)
        for parameter in parameters:
            assert parameter.grad is not None
            yield parameter.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    yield from (parameter.detach() for parameter in parameters)


@contextmanager
def session_at(path: Path) -> Iterator[spillway.Session]:
    with spillway.Session(window=1024, spill_directory=path, allow_memory_filesystem=True) as session:
        yield session


def check(plan: Plan, way: str, plain: list[Tensor], numbers: tuple[int, ...], path: Path) -> list[int]:
    """The schedule under Spillway against the same without; how often each block ran."""
    with session_at(path) as session:
        stages, schedule = plan.make()
        before = [dict(stage.__dict__) for stage in stages]
        with offload_stages(stages, min_bytes=0, session=session, **WAYS[way]) as offloaded:
            got = list(train(plan, numbers, stages, schedule))
            stats = offloaded.stats()
        label = f"{plan} {way} rank {dist.get_rank()}"
        assert len(got) == len(plain), label
        assert all(map(torch.equal, got, plain)), label
        moves, recomputes = way != "regions", "recompute" in WAYS[way]
        # A stage that goes back at once finds its tensors still there.
        back = stats.reloaded_bytes + stats.reused_bytes
        assert (back > 0) is moves, (label, stats)
        # Of a recomputed stage that goes back at once, only the input would wait. It is a leaf, which its graph holds.
        assert (stats.offloaded_bytes > 0) is moves or (recomputes and stats.reused_bytes), (label, stats)
        assert (stats.recomputed_bytes > 0) is recomputes, (label, stats)
        if way in ("offload", "offload-disk"):
            assert stats.offloaded_bytes + stats.reused_bytes >= stats.saved_bytes > 0 == stats.kept_bytes, label
        for stage, own in zip(stages, before, strict=True):
            assert stage.__dict__.keys() == own.keys(), label
        assert_nothing_left(session)
        return [block.runs for stage in stages for block in stage.submod.blocks]


def all_schedules(plans: list[Plan], ways: list[str], path: Path) -> None:
    for plan in plans:
        # Nothing is learned yet; what was learned; another number of micro-batches, and the first one again.
        few, more = plan.micro_batches, plan.micro_batches + 2
        numbers = (few, few, more, few)
        plain = list(train(plan, numbers, *plan.make()))
        for way in ways:
            check(plan, way, plain, numbers, path)


def runs_of_regions(path: Path) -> None:
    """Of one step that has been tried before, in which each block runs forward once for each micro-batch."""
    again = {}
    for plan in (Plan("1F1B", "one"), Plan("ZBVZeroBubble", "v"), Plan("ZBVZeroBubble", "v", fused=True)):
        steps = []
        for numbers in ((4,), (4, 4)):
            plain = list(train(plan, numbers, *plan.make()))
            steps.append(check(plan, "regions", plain, numbers, path))
        once, twice = steps
        again[plan] = [(more - fewer) / 4 - 1 for fewer, more in zip(once, twice, strict=True)]
    plain_schedule, split, fused = again.values()
    assert set(plain_schedule) == set(fused) == {1}, again
    # The first stage has its whole backward in one piece.
    firsts = 2 if dist.get_rank() == 0 else 0
    assert split == [1] * firsts + [2] * (4 - firsts), again


ONCE = ["offload-disk", "both", "regions-away", "both", "offload-some", "both", "offload", "both"]
"""A way for each of the schedules. Steps in the way that is not among them are in :func:`runs_of_regions`."""


def two_ranks(path: Path) -> None:
    """Every schedule once, and every way."""
    for plan, way in zip(PLANS, ONCE, strict=True):
        all_schedules([plan], [way], path)
    runs_of_regions(path)


def two_ranks_thoroughly(path: Path) -> None:
    all_schedules(PLANS, ["offload", "regions", "both"], path)
    all_schedules([plan for plan in PLANS if plan.name in ("1F1B", "ZBVZeroBubble")], MORE_WAYS, path)


def four_ranks_thoroughly(path: Path) -> None:
    all_schedules([Plan("ZBVZeroBubble", "v", 8)], ["both"], path)
    all_schedules([Plan("1F1B", "one", 6), Plan("Interleaved1F1B", "loop")], ["both"], path)
    # From the first rank to the last, evenly.
    stages, _ = Plan("1F1B", "one").make()
    from spillway.integrations.pipelining import _share_of

    assert _share_of(stages[0], ("3KiB", 0)) == (3 - dist.get_rank()) * 1024


def rank(number: int, ranks: int, folder: str, work: Callable[[Path], None]) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", LOCAL_WORLD_SIZE=str(ranks))
    path = Path(folder) / str(number)
    path.mkdir()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=ranks)
    try:
        work(path)
        # A rank that leaves while another still talks to it ends that one, too.
        dist.barrier()
    finally:
        dist.destroy_process_group()


def in_folder(folder: str, work: Callable[[Path], None]) -> None:
    """A case of ranks that are there already."""
    path = Path(folder) / str(dist.get_rank())
    path.mkdir()
    work(path)


def test_every_schedule_on_two_ranks_trains_as_without(world: World, tmp_path: Path) -> None:
    world.run(in_folder, str(tmp_path), two_ranks)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "work"), [(2, two_ranks_thoroughly), (4, four_ranks_thoroughly)])
def test_more_schedules_in_more_ways_train_as_without(ranks: int, work: Callable[[Path], None], tmp_path: Path) -> None:
    mp.spawn(rank, args=(ranks, str(tmp_path), work), nprocs=ranks)


@pytest.mark.long
def test_the_example_runs_under_torchrun(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*torchrun, str(root / "examples" / "pipelining.py"), "--micro-batches", "4"],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert len(lines) == 2 and all(line.endswith("losses and weights are equal") for line in lines), lines
    first, last = (list(map(int, re.findall(r"(\d+) MiB", line))) for line in lines)
    assert first[0] == last[0] > first[1] > last[1] > 0


@pytest.mark.parametrize("way", ["offload", "regions", "both"])
def test_an_error_in_a_forward_leaves_no_hook_and_the_next_step_is_as_ever(
    one_rank: None, tmp_path: Path, way: str
) -> None:
    plan = Plan("GPipe", "one")
    plain = list(train(plan, (4, 4), *plan.make()))
    with session_at(tmp_path) as session:
        stages, schedule = plan.make()
        with offload_stages(stages, min_bytes=0, session=session, **WAYS[way]) as offloaded:
            part, failing = stages[0].submod, schedule(4)
            part.fails_at = 3  # chunks, with the one by which torch learns the shapes
            with pytest.raises(RuntimeError, match="failed to run forward") as caught:
                failing.step(torch.randn(4 * ROWS, WIDTH), target=torch.randn(4 * ROWS, WIDTH))
            assert isinstance(caught.value.__cause__, ArithmeticError)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            part.fails_at = None
            del caught, failing
            got = list(train(plan, (4, 4), stages, schedule))
            assert all(map(torch.equal, got, plain))
            assert (offloaded.stats().reloaded_bytes > 0) is (way != "regions")
        assert_nothing_left(session)


# What needs no world.


class OneStage:
    """A stage as far as it is used."""

    def __init__(self, index: int = 0, rank: int = 0, ranks: int = 2) -> None:
        self.submod: nn.Module = Part(index)
        self.stage_index, self.group_rank, self.group_size = index, rank, ranks
        self.chunks: int | None = 2

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    def forward_one_chunk(self, fwd_chunk_id: int, args: tuple[Tensor, ...], kwargs: Any = None) -> Tensor:
        return self.submod(*args)  # type: ignore[no-any-return]

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        from torch.utils.checkpoint import GraphExecGroup

        self.group = GraphExecGroup._get_current_group()


@pytest.mark.parametrize(
    ("stages", "options", "what"),
    [
        ([], {}, "got none"),
        (nn.Linear(2, 2), {}, "neither their modules nor the schedule"),
        (OneStage(), {"ratio": 0.5, "nbytes": 3}, "ratio and nbytes"),
        (OneStage(), {"nbytes": (1, 2, 3)}, "pair of sizes"),
        (OneStage(), {"nbytes": "much"}, "nbytes"),
        (OneStage(), {"ratio": 2}, "ratio"),
        (OneStage(), {"recompute": "all"}, "recompute"),
        (OneStage(), {"blocks": "blocks.*"}, "without recompute"),
        ([OneStage(), OneStage()], {"recompute": spillway.Recompute(), "blocks": "layers.*"}, "layers"),
    ],
)
def test_what_cannot_be_meant_is_said_at_once(stages: Any, options: dict[str, Any], what: str) -> None:
    with pytest.raises(spillway.UsageError, match=what):
        offload_stages(stages, **options)
    for stage in stages if isinstance(stages, list) else [stages]:
        assert "forward_one_chunk" not in stage.__dict__


def test_a_stage_is_offloaded_once() -> None:
    stage = OneStage()
    with offload_stages(stage), pytest.raises(spillway.UsageError, match="offloaded already"):
        offload_stages(stage)
    with pytest.raises(spillway.UsageError, match="offloaded already"):
        offload_stages([stage, stage])
    assert "forward_one_chunk" not in stage.__dict__
    offload_stages(stage).remove()


def test_whoever_stands_before_us_stays_and_finds_the_stage(tmp_path: Path) -> None:
    stage = OneStage()
    with session_at(tmp_path) as session:
        offloaded = offload_stages(stage, session=session, min_bytes=0, window=0, tier="host")
        ours = stage.forward_one_chunk
        stage.forward_one_chunk = lambda *args: ours(*args)  # type: ignore[method-assign, assignment]
        theirs = stage.forward_one_chunk
        offloaded.remove()
        offloaded.remove()
        assert stage.forward_one_chunk is theirs
        stage.forward_one_chunk(0, (torch.randn(2, WIDTH),)).sum().backward()
        assert offloaded.stats() == spillway.StepStats()
        assert_nothing_left(session)


def test_statistics_are_of_the_last_step(tmp_path: Path) -> None:
    stage = OneStage()
    with session_at(tmp_path) as session:
        offloaded: OffloadedStages
        with offload_stages(stage, session=session, min_bytes=0, window=0, tier="host") as offloaded:
            for chunks in (3, 1, 2):
                stage.chunks = chunks
                outputs = [stage.forward_one_chunk(number, (torch.randn(2, WIDTH),)) for number in range(chunks)]
                saved = offloaded.stats().saved_bytes
                for output in outputs:
                    output.sum().backward()
                if chunks == 3:
                    each = saved / 3
                assert saved == chunks * each
                stats = offloaded.stats()
                assert stats.offloaded_bytes > 0 and stats.reloaded_bytes > 0
                with torch.no_grad():
                    stage.forward_one_chunk(0, (torch.randn(2, WIDTH),))
                assert offloaded.stats().saved_bytes == stats.saved_bytes
        del output, outputs
        assert_nothing_left(session)


def test_groups_of_one_name_are_counted_together_over_all_chunks(tmp_path: Path) -> None:
    stage = OneStage()
    module = stage.submod
    forward = module.forward
    module.forward = lambda x: spillway.group("all")(forward)(x)
    with session_at(tmp_path) as session:
        with offload_stages(stage, session=session, min_bytes=0, window=0, tier="host") as offloaded:
            outputs = [stage.forward_one_chunk(number, (torch.randn(2, WIDTH),)) for number in range(2)]
            for output in outputs:
                output.sum().backward()
        stats = offloaded.stats()
        (group,) = stats.groups
        assert group.name == "all" and group.offloaded_bytes == stats.offloaded_bytes > 0
        del output, outputs
        assert_nothing_left(session)


def test_a_rank_has_its_share() -> None:
    moved = []
    for rank in range(4):
        stage = OneStage(rank, rank, 4)
        with offload_stages(stage, nbytes=("6KiB", 0), min_bytes=0, window=0, tier="host") as offloaded:
            stage.forward_one_chunk(0, (torch.randn(8, WIDTH),)).sum().backward()
        moved.append(offloaded.stats().offloaded_bytes)
        assert moved[-1] <= (3 - rank) * 2048
    assert moved == sorted(moved, reverse=True) and moved[0] > moved[1] > moved[2] > moved[3] == 0


def test_weights_alone_are_one_group_but_in_the_first_stage() -> None:
    for index in (0, 1):
        stage = OneStage(index)
        with offload_stages(stage):
            stage.backward_weight_one_chunk(0)
            assert (stage.group is None) is (index == 0)
        stage.backward_weight_one_chunk(0)
        assert stage.group is None
