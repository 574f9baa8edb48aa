"""What ``spillway.attach`` means: which blocks, which regions, whose pass, and the same gradients, bit for bit."""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from spillway import Recompute, Session, UsageError
from spillway.attaching import attached_to
from spillway.attaching.attached import NAMED
from spillway.checkpointing.blocks import find_blocks, signature
from spillway.cli.running.options import POLICIES
from spillway.integrations import AttachOptions
from spillway.policies import Keep, Offload
from steps import Block, KiB, MiB, Residual, Result, assert_no_hook, assert_nothing_left, failing, small_batch, step

ROWS, WIDTH = 2048, 128
"""Of a batch: 1 MiB, the least that leaves."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(window=0, spill_directory=tmp_path) as session:
        yield session
        assert_nothing_left(session)


class Model(nn.Module):
    """An embedding of what comes in, blocks, and a head."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


class Count(TorchDispatchMode):
    """How often an operator runs inside."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self._operator = operator
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func is self._operator
        return func(*args, **(kwargs or {}))


def run_again(model: nn.Module, x: Tensor, operator: Any = torch.ops.aten.gelu.default) -> int:
    """How often backward runs an operator of the forward again; in each block there is one GELU."""
    # The first re-runs of a kind run more often, to be seen to be right; then a tape is written.
    for _ in range(2):
        step(model, x)
    loss = model(x).square().mean()
    with Count(operator) as count:
        loss.backward()
    return count.times


def names(model: nn.Module, blocks: Any = None) -> list[str]:
    return [each.name for each in find_blocks(model, blocks)]


# Which modules are blocks


@pytest.mark.parametrize(
    ("blocks", "found"),
    [
        (Block, ["layers.0", "layers.1"]),
        (nn.Linear, ["stem", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]),
        ((Block, nn.LayerNorm), ["layers.0", "layers.0.norm", "layers.1", "layers.1.norm"]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("layers.1", ["layers.1"]),
        ("*.up", ["layers.0.up", "layers.1.up"]),
        ("*", ["stem", "layers.0", "layers.1", "head"]),
        (["layers.0", "*.up"], ["layers.0", "layers.0.up", "layers.1.up"]),
        (lambda name, module: name.endswith("1") and isinstance(module, Block), ["layers.1"]),
        (lambda name, module: name in ("layers.1", "layers.1.up"), ["layers.1", "layers.1.up"]),
        (["stem", Block], ["stem", "layers.0", "layers.1"]),
        (None, ["layers.0", "layers.1"]),
    ],
)  # fmt: skip
def test_a_selector_means_the_outermost_that_it_matches(blocks: Any, found: list[str]) -> None:
    assert names(Model(layers=2), blocks) == found


def test_a_module_with_two_names_is_found_by_either_and_once() -> None:
    model = Model(layers=3)
    model.layers[2] = model.layers[0]
    assert names(model) == ["layers.0", "layers.1"]
    assert names(model, "layers.2") == ["layers.0"]
    assert names(model, "layers.*") == ["layers.0", "layers.1"]


def test_a_module_that_holds_its_own_parent_is_walked_once() -> None:
    model = Model(layers=2)
    model.layers[0].add_module("parent", model)
    assert names(model, Block) == ["layers.0", "layers.1"]


def test_repeated_blocks_are_the_outer_ones_of_the_class_that_owns_most() -> None:
    class Expert(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.experts = nn.ModuleList(Block(width) for _ in range(3))
            self.norm = nn.LayerNorm(width)

    model = nn.Module()
    model.table = nn.Embedding(10000, 16)
    model.small = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3))
    model.layers = nn.ModuleList(Expert(16) for _ in range(2))
    for layer in model.layers:
        layer.forward = lambda x: x
    assert names(model) == ["layers.0", "layers.1"]


def test_repeated_blocks_are_all_of_their_class_though_some_have_more_parameters() -> None:
    model = nn.Sequential(Block(8), Block(8), nn.Sequential(Block(12)), Block(16))
    assert names(model) == ["0", "1", "2.0", "3"]
    assert signature(model[0]) == signature(model[1]) != signature(model[3])


def test_an_encoder_and_a_decoder_are_both_repeated() -> None:
    model = nn.Transformer(16, 2, 2, 3, 32, batch_first=True)
    assert names(model) == [*(f"encoder.layers.{i}" for i in range(2)), *(f"decoder.layers.{i}" for i in range(3))]


def test_residual_blocks_of_a_convolutional_model_are_repeated() -> None:
    stages = [nn.Sequential(Residual(width), Residual(width)) for width in (4, 8)]
    assert names(nn.Sequential(nn.Conv2d(3, 4, 1), *stages)) == ["1.0", "1.1", "2.0", "2.1"]


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        ("layer.*", "got 'layer.*', which is none of the .* there are 'layers.0' \\(Block\\), 'layers.1' \\(Block\\)"),
        (["layers.*", "typo"], "got 'typo'"),
        (nn.Conv2d, "Conv2d'>, which is none of"),
        (lambda name, module: False, "which is none of"),
        (lambda name, module: 1, "got 1 from .* for 'stem', expected True or False"),
        ("layers", "got 'layers', which is none of"),
        ("", "got '', which is none of"),
        ([], "got \\[\\], expected at least one"),
        (int, "expected a subclass of torch.nn.Module"),
        (3, "got 3, expected a class, a pattern"),
        ({"layers.*": Recompute()}, "got {'layers.*': .*}, expected a class, a pattern"),
        (iter(["layers.*"]), "got <list_iterator .*, expected a class, a pattern"),
        (nn.Linear(1, 1), "got Linear.*, expected a class, a pattern"),
    ],
)
def test_blocks_that_cannot_be_meant_are_an_error_that_names_candidates(blocks: Any, says: str) -> None:
    failing(UsageError, lambda: spillway.attach(Model(layers=2), blocks=blocks), match=f"(?s){says}")


@pytest.mark.parametrize(
    ("blocks", "meant"),
    [
        ("layer.*", "perhaps 'layers.*'"),
        (["layers.0", "layers.7"], "perhaps 'layers.*'"),
        ("layers", "perhaps 'layers.*'"),
        ("*.upp", "perhaps '*.up'"),
        ("model.layers.*.down", "perhaps 'layers.*.down'"),
        ("haed", "perhaps 'head'"),
        (nn.Bilinear, "perhaps the class torch.nn.modules.linear.Linear is meant"),
        (type("Block", (nn.Module,), {}), "perhaps the class steps.Block is meant"),
        ("nothing.like.it", None),
        (nn.Conv2d, None),
        (lambda name, module: False, None),
    ],
)
@pytest.mark.parametrize("options", [{}, {"policy": Offload(), "keep_last": 1}], ids=["regions", "offload"])
def test_what_is_nearest_to_blocks_that_are_not_there_is_named(
    blocks: Any, meant: str | None, options: dict[str, Any]
) -> None:
    message = failing(UsageError, lambda: spillway.attach(Model(layers=2), blocks=blocks, **options))
    assert "which is none of the 10 modules with a forward below the model (Model)" in message
    assert (meant or "match; there are 'layers.0' (Block)") in message
    assert ("perhaps" in message) == (meant is not None)


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("*.upp", "got '\\*.upp', which no path .* below 'layers.0' \\(Block\\), or another block"),
        ("*.down", "perhaps '\\*down' is meant; there are '\\*norm', '\\*up', '\\*down'$"),
        ("layers.*.up", "expected a pattern of such paths"),
    ],
)
@pytest.mark.parametrize("way", ["save", "offload"])
def test_a_selector_of_submodules_that_no_block_has_is_an_error(way: str, pattern: str, says: str) -> None:
    model = Model()
    how = Recompute(save=pattern) if way == "save" else Recompute(offload=["inputs", pattern])
    failing(UsageError, lambda: spillway.attach(model, policy=how), match=says)
    assert "_compiled_call_impl" not in model.__dict__


@pytest.mark.parametrize("pattern", ["up*", "*", "[du]*", "*.inner", "GEL?"])
def test_a_selector_of_submodules_that_one_block_has_will_do(session: Session, pattern: str) -> None:
    model, x = Model(), small_batch()
    model.layers[3].up = nn.Sequential()
    model.layers[3].up.inner = nn.Linear(32, 64)
    # A block may call what is not below it.
    model.activation = nn.GELU()
    plain = step(model, x)
    with spillway.attach(model, policy=Recompute(save=pattern), session=session):
        assert step(model, x) == plain


def test_a_model_that_repeats_nothing_says_so() -> None:
    message = failing(UsageError, lambda: spillway.attach(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    assert "repeats no block" in message and "'0' (Linear)" in message
    assert "spillway.recompute(model" in failing(UsageError, lambda: spillway.attach(nn.Linear(2, 2)))


# Regions around them


@pytest.mark.parametrize(
    "blocks", [None, Block, "layers.*", "*.up", lambda name, module: name == "layers.2", [Block, "*.up"]]
)
@pytest.mark.parametrize("policy", [None, Recompute(save="matmul"), Recompute(use_reentrant=True)])
def test_a_step_is_bit_for_bit_the_plain_one(session: Session, blocks: Any, policy: Recompute | None) -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    with spillway.attach(model, blocks=blocks, policy=policy, session=session):
        for _ in range(3):
            assert step(model, x) == plain
            assert_nothing_left(session)
    assert step(model, x) == plain


@pytest.mark.parametrize(
    ("options", "recomputed"),
    [
        ({}, [0, 1, 2, 3, 4, 5, 6]),
        ({"every": 2}, [0, 2, 4, 6]),
        ({"every": 3}, [0, 3, 6]),
        ({"first": 3}, [0, 1, 2]),
        ({"first": 0}, []),
        ({"first": 99}, [0, 1, 2, 3, 4, 5, 6]),
        ({"keep_last": 2}, [0, 1, 2, 3, 4]),
        ({"keep_last": 99}, []),
        ({"every": 2, "keep_last": 1, "first": 4}, [0, 2]),
    ],
)
def test_every_first_and_keep_last_say_how_many_regions_there_are(
    session: Session, options: dict[str, int], recomputed: list[int]
) -> None:
    model, x = Model(layers=7), small_batch()
    plain = step(model, x)
    with spillway.attach(model, session=session, **options) as attached:
        assert attached.blocks == tuple(f"layers.{index}" for index in recomputed)
        assert run_again(model, x) == len(recomputed)
        assert step(model, x) == plain


def test_what_a_region_saves_is_not_computed_again(session: Session) -> None:
    model, x = Model(), small_batch()
    with spillway.attach(model, session=session):
        assert run_again(model, x, torch.ops.aten.addmm.default) > 0
    with spillway.attach(model, policy=Recompute(save="matmul"), session=session):
        assert run_again(model, x, torch.ops.aten.addmm.default) == 0


@pytest.mark.parametrize("hooked", [False, True])
def test_selectors_of_submodules_go_by_paths_below_the_block(session: Session, hooked: bool) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x).sin()  # type: ignore[no-any-return]

    asked: set[str | None] = set()

    def ask(call: spillway.OperatorCall) -> bool:
        asked.add(call.module)
        return call.module == "mlp.0"

    model = nn.Sequential(Deep(), Deep())
    if hooked:
        model[0].register_forward_hook(lambda *_: None)
    x = small_batch()
    plain = step(model, x)
    with spillway.attach(model, policy=Recompute(save=ask), session=session):
        assert step(model, x) == plain
        assert asked == {"", "mlp.0", "mlp.1", "mlp.2"}


@pytest.mark.parametrize("how", ["save", "offload"])
def test_a_selector_of_operators_within_a_submodule(session: Session, how: str) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Sequential(nn.Linear(WIDTH, WIDTH)))

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(self.proj(x)).sin()  # type: ignore[no-any-return]

    model, x = nn.Sequential(Deep(), Deep()), small_batch(WIDTH, ROWS)
    plain = step(model, x)
    # Each gives 1 MiB: two products of mlp, at any depth, and none of proj; in two blocks.
    for module, selector, outputs in (
        ("mlp", "matmul", 2),
        ("mlp.0", "aten::*mm", 1),
        ("ml?", torch.ops.aten.gelu, 1),
        ("*", "matmul", 3),
    ):
        policy = Recompute(**{how: spillway.within(module, selector)})
        with spillway.attach(model, policy=policy, session=session) as attached:
            for _ in range(3):
                assert step(model, x) == plain
                stats = attached.stats()
            kept, sent = stats.kept_bytes, stats.saved_bytes - stats.kept_bytes
            wanted = outputs * 2 * MiB
            if how == "offload":
                assert sent == wanted
                assert stats.reloaded_bytes + stats.reused_bytes == wanted
            else:
                # Beside these, the second block's input stays. The first one's needs no gradient, and is not counted.
                assert (kept - x.nbytes, sent) == (wanted, 0)
            assert not any("decided nothing" in note for note in stats.notes)


def test_within_is_a_function_of_a_call_too() -> None:
    inside = spillway.within("mlp", "matmul")

    def call(module: str | None, operator: Any = torch.ops.aten.mm.default) -> spillway.OperatorCall:
        return spillway.OperatorCall(operator, module, 0, 8)

    assert inside(call("mlp"))
    assert inside(call("mlp.up"))
    assert inside(call("mlp.experts.3.up", torch.ops.aten.addmm.default))
    assert not inside(call("mlp.up", torch.ops.aten.gelu.default))
    assert not inside(call("mlp2"))
    assert not inside(call("attn.mlp"))
    assert not inside(call(""))
    assert not inside(call(None))
    assert spillway.within("*.mlp", "matmul")(call("attn.mlp.up"))
    assert inside == spillway.within("mlp", "matmul") != spillway.within("mlp", "norm")
    assert len({inside, spillway.within("mlp", "matmul")}) == 1


@pytest.mark.parametrize(
    ("module", "selector", "says"),
    [
        ("", "matmul", "within: got ''"),
        (3, "matmul", "within: got 3"),
        ("mlp", "matmull", "selector: got 'matmull'"),
        ("mlp", "*.up", r"selector: got '\*.up'"),
        ("mlp", "inputs", "selector: got 'inputs'"),
        ("mlp", spillway.saved_by("matmul"), "selector: got saved_by"),
    ],
)
def test_a_within_that_cannot_be_meant_is_refused(module: Any, selector: Any, says: str) -> None:
    with pytest.raises(spillway.UsageError, match=says):
        spillway.within(module, selector)


def test_a_within_of_a_submodule_that_no_block_has_is_refused(session: Session) -> None:
    policy = Recompute(save=spillway.within("upp", "matmul"))
    with pytest.raises(spillway.UsageError, match=r"got 'upp', which no path of a module below 'layers\.0'"):
        spillway.attach(Model(), policy=policy, session=session)


def test_what_regions_offload_leaves_and_comes_back_in_one_pass(session: Session) -> None:
    model, x = Model(width=WIDTH), small_batch(WIDTH, ROWS)
    plain = step(model, x)
    policy = Recompute(offload=["inputs", torch.ops.aten.gelu])
    with spillway.attach(model, policy=policy, session=session) as attached:
        for number in range(3):
            assert step(model, x) == plain
            stats = attached.stats()
            if number == 0:
                # Which tensors GELU gives is known from the first replay on.
                assert stats.saved_bytes - stats.kept_bytes == 4 * MiB
                continue
            # Of each block its input, of 1 MiB, and the output of its GELU, of 2 MiB.
            assert stats.saved_bytes - stats.kept_bytes == 4 * 3 * MiB
            assert stats.reloaded_bytes + stats.reused_bytes == 4 * 3 * MiB
            assert_nothing_left(session)


@pytest.mark.parametrize(("min_bytes", "leaves"), [(None, False), (0, True), ("8KiB", True), (8 * KiB + 1, False)])
def test_min_bytes_says_what_is_worth_a_journey(session: Session, min_bytes: Any, leaves: bool) -> None:
    model, x = Model(), small_batch()
    plain = step(model, x)
    how = Recompute(offload="inputs")
    with spillway.attach(model, policy=how, min_bytes=min_bytes, session=session) as attached:
        for _ in range(3):
            assert step(model, x) == plain
            stats = attached.stats()
            # The inputs of four blocks, of 8 KiB each.
            assert stats.saved_bytes - stats.kept_bytes == (4 * 8 * KiB if leaves else 0)
            assert_nothing_left(session)
    with spillway.attach(model, policy=Offload(), min_bytes=min_bytes, session=session) as attached:
        assert step(model, x) == plain
        # Outputs of GELUs have 16 KiB.
        assert (attached.stats().saved_bytes == attached.stats().kept_bytes) == (min_bytes is None)


def test_a_pass_around_the_call_says_what_is_worth_a_journey_of_regions(session: Session) -> None:
    model, x = Model(), small_batch()
    around = spillway.offload(session=session, policy=Keep(), min_bytes=0)
    with spillway.attach(model, policy=Recompute(offload="inputs"), min_bytes="1GiB", session=session):
        step(model, x, around)
    assert around.stats().saved_bytes - around.stats().kept_bytes == 4 * 8 * KiB


def test_the_stats_are_those_of_the_last_pass(session: Session) -> None:
    model, x = Model(), small_batch()
    attached = spillway.attach(model, session=session)
    assert attached.stats() == spillway.StepStats()
    step(model, x)
    assert attached.stats().recomputed_bytes > 0
    with torch.no_grad():
        model(x)
    assert attached.stats().recomputed_bytes > 0
    loss = model(x).sum()
    assert attached.stats().recomputed_bytes == 0
    loss.backward()
    assert attached.stats().recomputed_bytes > 0


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference"])
def test_without_training_nothing_happens(session: Session, way: str) -> None:
    model, x = Model(), small_batch()
    model.train(way != "eval")
    plain = model(x)
    attached = spillway.attach(model, session=session)
    grad_mode = {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[way]
    with grad_mode():
        assert torch.equal(model(x), plain)
    assert attached.stats() == spillway.StepStats()


def test_a_block_called_by_itself_is_a_region_too(session: Session) -> None:
    model, x = Model(), small_batch()
    block = model.layers[1]
    plain = step(block, x)
    spillway.attach(model, session=session)
    assert step(block, x) == plain
    assert run_again(block, x) == 1


def test_a_pass_around_the_call_is_the_one_that_regions_belong_to(session: Session) -> None:
    model, x = Model(width=WIDTH), small_batch(WIDTH, ROWS)
    plain = step(model, x)
    around = spillway.offload(session=session, policy=Offload())
    with spillway.attach(model, first=2, session=session) as attached:
        for _ in range(2):
            assert step(model, x, around) == plain
        # The input of the stem and of each region, and all that the other two blocks save: with what each of the GELUs
        # and normalisations saves, that is more than 2 MiB a block.
        assert around.stats().offloaded_bytes > (3 + 2 * 2) * MiB
        assert around.stats().recomputed_bytes > 0
        assert attached.stats() == spillway.StepStats()


# An offload policy


def test_an_offload_policy_goes_around_the_whole_call(session: Session) -> None:
    model, x = Model(width=WIDTH), small_batch(WIDTH, ROWS)
    plain = step(model, x)
    with spillway.attach(model, policy=Offload(), session=session) as attached:
        assert attached.blocks == ()
        for _ in range(2):
            assert step(model, x) == plain
        everything = attached.stats().offloaded_bytes
        assert attached.stats().recomputed_bytes == 0
    with spillway.attach(model, policy=Offload(), keep_last=3, session=session) as attached:
        for _ in range(2):
            assert step(model, x) == plain
        # Three of four blocks stay.
        assert 0 < attached.stats().offloaded_bytes < everything / 2
    with spillway.attach(model, policy=Keep(), session=session) as attached:
        assert step(model, x) == plain
        assert attached.stats().offloaded_bytes == 0 < attached.stats().kept_bytes


@pytest.mark.parametrize("options", [{"every": 2}, {"first": 2}, {"blocks": Block}])
def test_an_offload_policy_has_no_regions_to_count(options: dict[str, Any]) -> None:
    failing(UsageError, lambda: spillway.attach(Model(), policy=Offload(), **options), match="recomputes nothing")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "full"}, "policy: got 'full', expected one of offload, recompute, keep, a spillway.Recompute"),
        ({"policy": Recompute}, "policy: got <class .*, expected a spillway.Recompute"),
        ({"every": 0}, "every: got 0, expected an integer of at least 1"),
        ({"every": True}, "every: got True"),
        ({"every": None}, "every: got None"),
        ({"first": -1}, "first: got -1"),
        ({"first": 1.5}, "first: got 1.5"),
        ({"keep_last": -1}, "keep_last: got -1"),
        ({"session": "default"}, "session: got 'default'"),
        ({"min_bytes": -1}, "min_bytes: got -1, expected at least 0 bytes"),
        ({"min_bytes": "much", "policy": Offload()}, "min_bytes: got 'much', expected bytes"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_an_error(options: dict[str, Any], says: str) -> None:
    model = Model()
    failing(UsageError, lambda: spillway.attach(model, **options), match=says)
    assert "_compiled_call_impl" not in model.__dict__


def test_what_is_no_module_is_an_error() -> None:
    failing(UsageError, lambda: spillway.attach(lambda x: x), match="expected a torch.nn.Module")  # type: ignore[arg-type]


# What blocks take and give


@dataclass
class Output:
    hidden: Tensor
    extra: dict[str, Tensor]


class Takes(nn.Module):
    """Takes tensors by keyword and in containers, and gives what it is told to give."""

    def __init__(self, give: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.block = Block(32)
        self.give = give

    def forward(self, x: Tensor, *, scale: Tensor, tables: tuple[Tensor, ...], save: str, policy: str) -> Any:
        assert (save, policy) == ("save", "policy")
        return self.give(self.block(x * scale), tables[0] * x.sum())


GIVES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, y: (x, y), lambda out: (out[0], out[1])),
    "dictionary": (lambda x, y: {"x": x, "y": [y]}, lambda out: (out["x"], out["y"][0])),
    "dataclass": (lambda x, y: Output(x, {"y": y}), lambda out: (out.hidden, out.extra["y"])),
}


@pytest.mark.parametrize("kind", GIVES)
def test_blocks_take_keywords_and_give_containers(session: Session, kind: str) -> None:
    give, take = GIVES[kind]

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Takes(give) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            scale = x.mean(0, keepdim=True)
            for layer in self.layers:
                # Options of spillway.recompute by name belong to the block all the same.
                x, y = take(layer(x, scale=scale, tables=(scale, scale), save="save", policy="policy"))
                x = x + y
            return x

    model, x = Whole(), small_batch()
    plain = step(model, x)
    with spillway.attach(model, blocks=Takes, session=session):
        for _ in range(3):
            assert step(model, x) == plain
        assert run_again(model, x) == 2


def test_a_shared_block_is_one_region_at_each_of_its_calls(session: Session) -> None:
    model, x = Model(layers=4), small_batch()
    model.layers[2] = model.layers[0]
    plain = step(model, x)
    with spillway.attach(model, blocks="layers.*", session=session) as attached:
        assert attached.blocks == ("layers.0", "layers.1", "layers.3")
        for _ in range(3):
            assert step(model, x) == plain
        assert run_again(model, x) == 4


def test_dropout_and_batch_norm_are_what_they_are_without(session: Session) -> None:
    def run(attach: bool) -> tuple[list[Result], list[Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(Residual(4), nn.Dropout(0.3)) for _ in range(3)))
        x = torch.randn(4, 4, 8, 8)
        if attach:
            spillway.attach(model, session=session)
        return [step(model, x) for _ in range(3)], list(model.buffers())

    (plain, buffers), (ours, own) = run(False), run(True)
    assert ours == plain
    assert all(torch.equal(a, b) for a, b in zip(buffers, own, strict=True))


# A model within its own call, and in threads


def test_a_model_that_calls_itself_has_one_pass(session: Session) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model(layers=2)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            x = x + self.inner(x).mean()
            return self(x, again=False) if again else x  # type: ignore[no-any-return]

    model, x = Twice(), small_batch()
    plain = step(model, x)
    with spillway.attach(model, session=session):
        for _ in range(2):
            assert step(model, x) == plain
        assert run_again(model, x) == 4


@pytest.mark.parametrize("hooked", [False, True])
def test_threads_that_share_a_model_do_not_meet(session: Session, hooked: bool) -> None:
    model = Model()
    if hooked:
        for layer in model.layers:
            layer.register_forward_hook(lambda *_: None)
    batches = [small_batch(rows=32 + 16 * index) for index in range(4)]

    def grads(x: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        return torch.autograd.grad(model(x).square().mean(), [x, *model.parameters()])

    plain = [grads(x) for x in batches]
    wrong: list[object] = []

    def work(index: int) -> None:
        for turn in range(6):
            with torch.set_grad_enabled(turn != 3):
                if turn == 3:
                    model(batches[index])
                    continue
                got = grads(batches[index])
            if not all(map(torch.equal, got, plain[index])):
                wrong.append((index, turn))

    with spillway.attach(model, session=session):
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(batches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all("forward" not in layer.__dict__ for layer in model.layers)
    assert not wrong


# Models of transformers


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=32, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


TRANSFORMERS = pytest.mark.parametrize("make", [llama, gpt2])


def language_step(model: nn.Module, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (2, 16))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    model.zero_grad()
    output = model(input_ids=ids, attention_mask=mask, labels=ids, **options)
    loss = output.loss
    for hidden in output.get("hidden_states") or ():
        loss = loss + hidden.square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@TRANSFORMERS
@pytest.mark.parametrize(
    "policy", [None, Recompute(save="attention"), Recompute(save="*attn*"), Recompute(use_reentrant=True), Offload()]
)
def test_a_language_model_of_transformers(session: Session, make: Callable[[], nn.Module], policy: Any) -> None:
    torch.manual_seed(0)
    model = make()
    for options in ({}, {"output_hidden_states": True}):
        plain = language_step(model, **options)
        with spillway.attach(model, policy=policy, session=session) as attached:
            assert len(attached.blocks) == (0 if policy == Offload() else 3)
            for _ in range(3):
                assert all(map(torch.equal, language_step(model, **options), plain))


@TRANSFORMERS
def test_a_cache_of_keys_and_values_is_refused_where_it_would_be_written_twice(
    session: Session, make: Callable[[], nn.Module]
) -> None:
    model = make()
    ids = torch.ones(1, 4, dtype=torch.long)
    with spillway.attach(model, session=session):
        failing(UsageError, lambda: model(input_ids=ids, use_cache=True), match="DynamicCache .* use_cache=False")
        assert_no_hook()
        with torch.no_grad():
            assert model(input_ids=ids, use_cache=True).past_key_values is not None


@TRANSFORMERS
def test_a_cache_that_the_configuration_asks_for_is_switched_off_in_training(
    session: Session, make: Callable[[], nn.Module]
) -> None:
    model: Any = make()
    plain = language_step(copy.deepcopy(model))
    model.config.use_cache = True
    ids = torch.ones(1, 4, dtype=torch.long)
    with spillway.attach(model, session=session):
        for _ in range(2):
            assert all(map(torch.equal, language_step(model), plain))
        assert model(input_ids=ids).past_key_values is None
        assert model.config.use_cache is True
        model.eval()
        assert model(input_ids=ids).past_key_values is not None
        model.train()
        with pytest.raises(IndexError):
            model(input_ids=ids + 1000)
        assert model.config.use_cache is True


@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}], ids=["all", "every second"])
@pytest.mark.parametrize("given", [{}, {"budget": "8GiB"}], ids=["recompute", "budget"])
def test_checkpointing_of_transformers_is_replaced(options: dict[str, int], given: dict[str, Any]) -> None:
    def flags() -> list[bool]:
        return [
            module.gradient_checkpointing for module in model.modules() if hasattr(module, "gradient_checkpointing")
        ]

    model = llama()
    plain = language_step(model)
    if options and "every_n_layers" not in inspect.signature(model.activation_checkpointing_enable).parameters:
        pytest.skip("this transformers checkpoints all layers")
    model.activation_checkpointing_enable(**options)  # type: ignore[operator]
    assert all(map(torch.equal, language_step(model), plain))
    before = flags()
    attached = spillway.attach(model, **given)
    assert any(before) and not any(flags())
    assert attached.notes[0].startswith("gradient_checkpointing of the model is switched off")
    for _ in range(6):
        assert all(map(torch.equal, language_step(model), plain))
    model.activation_checkpointing_enable(**options)  # type: ignore[operator]
    assert all(map(torch.equal, language_step(model), plain))
    assert not any(flags())
    assert "switched off" in attached.explain()
    # Its backward replays as the forward was, without checkpoints inside.
    loss = model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum()
    attached.remove()
    loss.backward()
    assert flags() == before
    assert all(map(torch.equal, language_step(model), plain))


def test_a_model_says_what_is_attached_to_it_and_how_often_it_was_called(session: Session) -> None:
    model = nn.Sequential(Block(8), Block(8))
    assert attached_to(model) is None
    # Nobody has to keep what attach gave back.
    spillway.attach(model, session=session)
    attached = attached_to(model)
    assert attached is not None and attached.passes == 0
    assert attached_to(model[0]) is None
    # Of these, one has the same dictionary's content.
    assert attached_to(copy.deepcopy(model)) is None
    shared = copy.copy(model)
    shared.__dict__.update(model.__dict__)
    assert attached_to(shared) is None
    for number in range(2):
        model(torch.randn(2, 8)).sum().backward()
        assert attached.passes == number + 1
    with torch.no_grad():
        model(torch.randn(2, 8))
    model.eval()(torch.randn(2, 8))
    assert attached.passes == 2
    attached.remove()
    assert attached_to(model) is None
    gone = weakref.ref(attached)
    del attached
    assert gone() is None


# The same words as on the command line


@pytest.mark.parametrize(("word", "policy"), [("recompute", Recompute()), ("offload", Offload()), ("keep", Keep())])
def test_a_policy_may_be_named(word: str, policy: Any, session: Session) -> None:
    batch = torch.randn(ROWS, WIDTH)
    found = []
    for each in (word, policy):
        model = Model(width=WIDTH)
        with spillway.attach(model, policy=each, session=session) as attached:
            results = [step(model, batch) for _ in range(2)]
            stats = attached.stats()
        found.append((results, stats.saved_bytes, stats.kept_bytes, stats.offloaded_bytes, stats.recomputed_bytes))
    assert found[0] == found[1]
    options = AttachOptions({"policy": word})
    assert options.recomputes == (word == "recompute")
    assert set(POLICIES) == set(NAMED)


def test_a_policy_that_there_is_not_is_refused_at_once() -> None:
    for call in (lambda: spillway.attach(Model(), policy="offloads"), lambda: AttachOptions({"policy": "offloads"})):
        failing(UsageError, call, match="policy: got 'offloads', expected one of offload, recompute, keep")


def test_without_a_budget_there_is_no_plan_and_explain_says_so() -> None:
    with spillway.attach(Model()) as attached:
        assert attached.explain() == "no plan: attach() was given neither a budget nor a plan"
        assert (attached.budget, attached.missing) == (None, None)
        failing(UsageError, lambda: attached.explain("layers.0"), match="there is no plan yet .no plan: attach")


# Torch's own layers


class Recurrent(nn.Module):
    """Recurrent layers one after the other, or one of them."""

    def __init__(self, make: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.head = nn.ModuleList(make() for _ in range(count)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(x)  # type: ignore[no-any-return]


LAYERS = [
    pytest.param(lambda: nn.GRU(8, 8, batch_first=True), "GRU", id="GRU"),
    pytest.param(lambda: nn.LSTM(8, 8, 2, dropout=0.1), "LSTM", id="LSTM"),
    pytest.param(lambda: nn.RNN(8, 8), "RNN", id="RNN"),
    pytest.param(lambda: nn.TransformerEncoderLayer(8, 2, 16), "TransformerEncoderLayer", id="encoder"),
]


@pytest.mark.parametrize(("make", "name"), LAYERS)
@pytest.mark.parametrize("options", [{}, {"policy": "offload"}, {"policy": Recompute(save="matmul")}], ids=str)
def test_stacks_of_torchs_own_layers_are_blocks(make: Any, name: str, options: Any, session: Session) -> None:
    def results(model: nn.Module) -> list[Result]:
        torch.manual_seed(1)
        return [step(model, torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(2))) for _ in range(3)]

    model = Recurrent(make, 3)
    assert [block.name for block in find_blocks(model)] == ["layers.0", "layers.1", "layers.2"]
    expected = results(Recurrent(make, 3))
    with spillway.attach(model, min_bytes=0, session=session, **options):
        assert results(model) == expected


@pytest.mark.parametrize(("make", "name"), [*LAYERS, pytest.param(lambda: nn.GRUCell(8, 8), "GRUCell", id="cell")])
def test_one_of_torchs_own_layers_is_named_as_users_would_name_it(make: Any, name: str) -> None:
    model = Recurrent(make, 1)
    failing(UsageError, lambda: spillway.attach(model), match=f"blocks=nn.{name} takes each {name}")
    assert [block.name for block in find_blocks(model, getattr(nn, name))] == ["layers.0"]
