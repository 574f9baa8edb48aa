"""What is said of a target: its kernels, its optimizer, what it cannot run, and that nothing is touched."""

from __future__ import annotations

import dataclasses
import functools
import resource
import threading
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import spillway
from budgets import NAMED, stack
from spillway import BudgetError, Hardware, Profile, UnsupportedError, UsageError
from spillway.planner.hardware import Effort, Precision, Work, seconds_of
from spillway.profiler.meta_device import MetaDevice, MetaMeter, MetaTensors
from spillway.profiler.target_kernels import kernels_of
from steps import Block, failing

MACHINE = dataclasses.replace(Hardware.named("h200"), name="Machine", flops=1e12, memory_bandwidth=1e12)
META, CUDA = torch.device("meta"), torch.device("cuda")
B, H, L, D = 2, 4, 128, 32
WIDTH = H * D
SUMS = B * H * L * 4
"""Of attention: one number for each row."""
SEEDS = 2 * 512
"""Two, each in an allocation of its own."""


class Of(nn.Module):
    """A block that runs a function of its input, after a layer that has weights."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=META, dtype=dtype))
        self.parts = nn.ModuleList(parts)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight, *self.parts)


def saved(
    function: Callable[..., Tensor],
    parts: Callable[[], list[nn.Module]] = list,
    shape: tuple[int, ...] = (B, L, WIDTH),
    dtype: torch.dtype = torch.bfloat16,
    **target: Any,
) -> dict[str, list[int]]:
    """Of each operator, in order, the bytes of what it made that autograd saves."""
    with META:
        model = stack(
            lambda: Of(function, *parts(), dtype=dtype).to(dtype), 3, nn.Linear(shape[-1], WIDTH, dtype=dtype)
        )
        batch = torch.empty(shape, dtype=dtype)
    profile = spillway.profile(model, batch, **{"hardware": "a100", **target})
    block = profile.kinds[0]
    return {
        operator.name: [block.values[value].nbytes for value in operator.makes if block.values[value].saved_at]
        for operator in block.operators
        if operator.makes
    }


def attend(x: Tensor, *, heads: int = H, **options: Any) -> Tensor:
    q = x.view(B, L, H, D).transpose(1, 2)
    k = v = q[:, :heads]
    y = functional.scaled_dot_product_attention(q, k, v, enable_gqa=heads != H, **options)
    return y.transpose(1, 2).reshape(B, L, WIDTH)


OUT = B * L * WIDTH * 2
FLASH, CUDNN, EFFICIENT = (
    f"aten::_scaled_dot_product_{name}_attention.default" for name in ("flash", "cudnn", "efficient")
)


@pytest.mark.parametrize(
    ("options", "target", "expected"),
    [
        ({}, {}, (FLASH, [OUT, SUMS, 512, 512])),
        ({}, {"attention": "cudnn"}, (CUDNN, [OUT, SUMS, 512, 512])),
        ({}, {"hardware": "h100"}, (CUDNN, [OUT, SUMS, 512, 512])),
        ({}, {"hardware": "h100", "attention": "flash"}, (FLASH, [OUT, SUMS, 512, 512])),
        ({}, {"attention": "efficient"}, (EFFICIENT, [OUT, SUMS, 512, 512])),
        ({"heads": 2}, {}, (FLASH, [OUT, SUMS, 512, 512])),
        ({"heads": 2}, {"attention": "efficient"}, (FLASH, [OUT, SUMS, 512, 512])),
        ({"attn_mask": torch.ones(L, L, dtype=torch.bool, device=META)}, {}, (EFFICIENT, [OUT, SUMS, 512, 512])),
        ({}, {"dtype": torch.float32}, (EFFICIENT, [2 * OUT, SUMS, 512, 512])),
        ({}, {"attention": "math"}, ("aten::_safe_softmax.default", [B * H * L * L * 4])),
        ({}, {"device": "cpu"}, ("aten::_scaled_dot_product_flash_attention_for_cpu.default", [OUT, SUMS])),
    ],
)  # fmt: skip
def test_attention_saves_what_the_kernel_does_that_a_target_takes(
    options: dict[str, Any], target: dict[str, Any], expected: tuple[str, list[int]]
) -> None:
    found = saved(functools.partial(attend, is_causal="attn_mask" not in options, **options), **target)
    assert [each for each in found.items() if "dot_product" in each[0] or "softmax" in each[0]] == [expected]


@pytest.mark.parametrize(
    ("function", "parts", "dtype", "expected"),
    [
        (lambda x: functional.dropout(x, 0.1), list, torch.bfloat16, {"aten::native_dropout.default": [OUT // 2]}),
        (
            lambda x, norm: norm(x) * 2,
            lambda: [nn.RMSNorm(WIDTH)],
            torch.bfloat16,
            {"aten::_fused_rms_norm.default": [B * L * 4]},
        ),
        (
            lambda x, norm: norm(x.transpose(1, 2)).transpose(1, 2) * 2,
            lambda: [nn.BatchNorm1d(WIDTH)],
            torch.float32,
            {"aten::cudnn_batch_norm.default": [512, 512, 0]},
        ),
        (
            lambda x, norm: norm(x.transpose(1, 2)).transpose(1, 2) * 2,
            lambda: [nn.BatchNorm1d(WIDTH)],
            torch.bfloat16,
            {"aten::native_batch_norm.default": [512, 512]},
        ),
    ],
)
def test_other_operators_save_what_kernels_of_cuda_do(
    function: Any, parts: Any, dtype: torch.dtype, expected: dict[str, list[int]]
) -> None:
    found = saved(function, parts, dtype=dtype)
    assert {name: sizes for name, sizes in found.items() if name in expected} == expected
    # A fused norm and a mask are all: nothing of the composite ones is there.
    assert not {"aten::bernoulli_.float", "aten::rsqrt.default"} & set(found)


def test_a_batch_norm_that_only_evaluates_and_a_dropout_of_nothing_are_torchs_own() -> None:
    mean, variance = torch.zeros(WIDTH, device=META), torch.ones(WIDTH, device=META)

    def evaluated(x: Tensor) -> Tensor:
        return functional.dropout(functional.batch_norm(x.transpose(1, 2), mean, variance).transpose(1, 2), 0.0)

    found = saved(evaluated, dtype=torch.float32)
    assert "aten::native_batch_norm.default" in found
    assert "aten::native_dropout.default" not in found


def test_kernels_of_a_target_are_taken_by_its_thread_alone_and_given_back() -> None:
    x = torch.empty(4, 8, device=META, requires_grad=True)

    def node() -> str:
        return str(functional.dropout(x, 0.1).grad_fn)

    others: list[str] = []
    plain = node()
    assert "NativeDropout" not in plain
    with kernels_of(CUDA, "flash"):
        assert "NativeDropout" in node()
        thread = threading.Thread(target=lambda: others.append(node()))
        thread.start()
        thread.join()
    assert "NativeDropout" not in others[0]
    assert "NativeDropout" not in node()


class Net(nn.Module):
    """Blocks with a tied head, batch statistics and a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 64)
        self.blocks = nn.ModuleList(nn.Sequential(Block(64), nn.Dropout(0.1)) for _ in range(3))
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 512, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_a_model_on_meta_and_one_with_memory_have_one_profile_and_neither_is_touched() -> None:
    torch.manual_seed(0)
    model, tokens, labels = Net(), torch.randint(512, (4, 32)), torch.randint(512, (128,))
    before = [tensor.clone() for tensor in (*model.state_dict().values(), torch.get_rng_state())]

    def profiled(model: nn.Module, tokens: Tensor) -> Profile:
        # The labels are the host's, and the head's weight is the model's own.
        return spillway.profile(
            model, tokens, hardware="h100",
            loss=lambda y: functional.cross_entropy(y.flatten(0, 1), labels) + model.head.weight.sum(),
        )  # fmt: skip

    found = profiled(model, tokens)
    assert all(map(torch.equal, [*model.state_dict().values(), torch.get_rng_state()], before))
    assert all(parameter.grad is None for parameter in model.parameters())
    with META:
        other = Net()
    assert profiled(other, tokens.to(META)) == found
    assert all(parameter.grad is None and parameter.device == META for parameter in other.parameters())
    # The head's weight is the embedding's, and counts once.
    sizes = {id(each): -(-each.nbytes // 512) * 512 for each in (*model.parameters(), *model.buffers(), tokens, labels)}
    assert found.static_bytes == sum(sizes.values()) + (32 << 20)
    assert Profile.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        (None, 0),
        (torch.optim.AdamW, 8),
        (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 4),
        (torch.optim.SGD, 0),
        (12, 12),
        (0.5, 0.5),
    ],
)
def test_an_optimizers_state_is_there_from_the_beginning(optimizer: Any, nbytes: float) -> None:
    with META:
        model = nn.Sequential(nn.Linear(64, 64), *(Block(64) for _ in range(2)))
        model[0].weight.requires_grad_(False)
    of, without = (
        spillway.profile(model, torch.empty(4, 64, device=META), hardware="a100", optimizer=each)
        for each in (optimizer, None)
    )
    # Each tensor of the state is an allocation, of as many elements as its parameter.
    copies = 2 if nbytes == 8 else 1
    trained = [each.numel() for each in model.parameters() if each.requires_grad]
    sizes = [copies * (-(-int(count * nbytes / copies) // 512) * 512) for count in trained]
    assert of.static_bytes - without.static_bytes == sum(sizes)
    assert of.kinds == without.kinds


def test_70_billion_parameters_take_seconds_and_no_memory() -> None:
    with META:
        block = functools.partial(nn.TransformerEncoderLayer, 8192, 64, 32768, batch_first=True, norm_first=True)
        model = nn.Sequential(nn.Embedding(32000, 8192), *(block() for _ in range(88)), nn.Linear(8192, 32000))
    model.to(torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count > 70e9
    before, state = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, torch.get_rng_state()
    profile = spillway.profile(model, torch.empty(1, 4096, dtype=torch.int64, device=META), hardware="h200")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in KiB
    assert torch.equal(torch.get_rng_state(), state)
    assert profile.static_bytes > 2 * count
    assert profile.saved_bytes > 80 * 4096 * 8192 * 2
    plan = spillway.plan(profile, budget="400GiB", hardware="h200")
    assert plan.predicted_peak <= 400 << 30
    assert spillway.simulate(profile, plan, hardware="h200").seconds == plan.predicted_seconds


def test_the_longest_sequence_is_found_where_nothing_runs() -> None:
    with META:
        model = stack(NAMED["attention"].build().__getitem__(1).__class__, 3, nn.Linear(64, 64))

    def step(length: int) -> tuple[nn.Module, Tensor]:
        return model, torch.empty(4, length, 64, device=META)

    options: dict[str, Any] = {"hardware": "h100", "attention": "efficient", "optimizer": torch.optim.AdamW}
    state = torch.get_rng_state()
    found = spillway.longest(step, budget="96MiB", multiple_of=256, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert found > 256
    spillway.plan(spillway.profile(*step(found), **options), budget="96MiB", hardware="h100")
    with pytest.raises(BudgetError):
        spillway.plan(spillway.profile(*step(found + 256), **options), budget="96MiB", hardware="h100")


def test_a_model_of_fake_tensors_has_the_profile_of_one_on_meta() -> None:
    with FakeTensorMode():
        model, batch = nn.Sequential(*(Block(64) for _ in range(3))), torch.empty(4, 64)
    with META:
        other, there = nn.Sequential(*(Block(64) for _ in range(3))), torch.empty(4, 64)
    assert spillway.profile(model, batch, hardware="a100") == spillway.profile(other, there, hardware="a100")


def test_autocast_is_refused_since_it_would_do_nothing() -> None:
    with META:
        model, batch = nn.Sequential(*(Block(64) for _ in range(3))), torch.empty(4, 64)
    with torch.autocast("cpu", torch.bfloat16):
        failing(UnsupportedError, lambda: spillway.profile(model, batch, hardware="a100"), match=r"torch\.autocast")


class Chosen(nn.Module):
    def __init__(self, choose: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.choose = nn.Linear(8, 8), choose

    def forward(self, x: Tensor) -> Tensor:
        self.choose(x)
        return self.linear(x)


def chosen(choose: Callable[[Tensor], Any]) -> tuple[nn.Module, Tensor]:
    with META:
        return nn.Sequential(*(Chosen(choose) for _ in range(3))), torch.empty(4, 8)


@pytest.mark.parametrize(
    "choose",
    [lambda x: x[x.mean(-1).argsort()], lambda x: x[[0, 2]], lambda x: x[:, torch.arange(3, device=x.device)]],
)
def test_places_of_unknown_numbers_give_as_many(choose: Callable[[Tensor], Any]) -> None:
    model, batch = chosen(choose)
    assert spillway.profile(model, batch, hardware="h100").kinds


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: (NAMED["experts"].model(), NAMED["experts"].batch()), "aten.bincount"),
        (lambda: chosen(lambda x: (x > 0).nonzero()), "aten.nonzero"),
        (lambda: chosen(lambda x: x[x > 0]), "aten.nonzero|aten.index"),
        (lambda: chosen(lambda x: x.sum().item()), "item|_local_scalar_dense"),
        (lambda: chosen(lambda x: bool(x.sum() > 0)), "values of tensors|_local_scalar_dense|is_nonzero"),
        (lambda: (nn.Sequential(Recurrent(), Recurrent()), torch.empty(3, 2, 8)), "aten::lstm"),
        (lambda: (nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), torch.eye(8).to_sparse()), "layout"),
    ],
)
def test_what_hangs_on_the_content_of_tensors_is_refused_by_name(build: Any, says: str) -> None:
    model, batch = build()
    blocks = "*" if isinstance(model[0], nn.Linear | Recurrent) and len(model) == 2 else None
    failing(UnsupportedError, lambda: spillway.profile(model, batch, blocks=blocks, hardware="h100"), match=says)
    # Nothing is left of it.
    assert all(module.__dict__.get("_compiled_call_impl") is None for module in model.modules())
    x = torch.empty(4, device=META, requires_grad=True)
    assert "NativeDropout" not in str(functional.dropout(x, 0.1).grad_fn)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "meta device"),
        ({"attention": "flash"}, "is for hardware that need not be present"),
        ({"device": "cuda"}, "is for hardware that need not be present"),
        ({"hardware": "abacus"}, "'abacus'"),
        ({"hardware": 3}, "hardware: got 3"),
        ({"hardware": "h100", "attention": "quick"}, "attention: got 'quick'"),
        ({"hardware": "h100", "device": "tpu"}, "device: got 'tpu'"),
        ({"hardware": "h100", "optimizer": -1}, "optimizer: got -1"),
        ({"hardware": "h100", "optimizer": True}, "optimizer: got True"),
        ({"hardware": "h100", "optimizer": "adam"}, "optimizer: got 'adam'"),
        (
            {"hardware": "h100", "optimizer": torch.optim.SGD([torch.ones(1, requires_grad=True)])},
            "optimizer: got SGD",
        ),
        ({"hardware": "h100", "blocks": ["0", "0.up"]}, "others inside"),
    ],
)
def test_what_cannot_be_meant_of_a_target_is_an_error_that_says_so(options: dict[str, Any], says: str) -> None:
    with META:
        model, batch = nn.Sequential(*(Block(8) for _ in range(2))), torch.empty(4, 8)
    failing(UsageError, lambda: spillway.profile(model, batch, **options), match=says)


def test_a_loss_that_hangs_on_no_block_is_refused() -> None:
    with META:
        model, batch = nn.Sequential(*(Block(8) for _ in range(2))), torch.empty(4, 8)
    failing(
        UnsupportedError,
        lambda: spillway.profile(
            model, batch, hardware="h100", loss=lambda y: torch.ones((), device=META, requires_grad=True) * 1
        ),
        match="No backward came through the blocks",
    )


# The fake device.


@pytest.mark.parametrize("heads", [H, 1])
def test_what_attention_takes_for_its_backward_counts_for_the_peak(heads: int) -> None:
    fake = MetaDevice(CUDA, Hardware.named("a100"))
    q, k, v = (torch.empty(B, n, 100, D, dtype=torch.bfloat16, device=META) for n in (H, heads, heads))
    out = torch.empty_like(q)
    sums, seeds = torch.empty(B, H, 100, device=META), torch.empty(2, dtype=torch.uint64, device=META)
    for tensor in (q, k, v, out, sums, seeds):
        fake.number_of(tensor)
    meter = MetaMeter(fake)
    meter.mark()
    with fake:
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            out, q, k, v, out, sums, None, None, 100, 100, 0.0, True, seeds, seeds
        )
    made = sum(tensor.nbytes for tensor in found)
    # Sums of the gradients of queries and a number for each row, in float32, of lengths rounded up to 128; and, where
    # heads share keys and values, their gradients for each head.
    rows = B * H * 128
    shared = 2 * (B * H * 100 * D * 2) if heads != H else 0
    for _ in range(2):
        meter.mark()
    _, during, after = meter.finish()
    assert during.level - fake.before == made
    assert during.peak - fake.before == made + 4 * rows * D + 4 * rows + shared
    assert after.peak - fake.before == made


def test_a_storage_counts_until_it_dies_whoever_holds_it_meanwhile() -> None:
    fake = MetaDevice(CUDA, Hardware.named("a100"))
    with fake:
        x = torch.empty(1000, device=META)
        view = x[:10]
        assert fake.levels[-1] == 4096
        fake.offload(x.untyped_storage())
        assert fake.levels[-1] == 0
        fake.reload(x.untyped_storage())
        fake.reload(view.untyped_storage())
        assert fake.levels[-1] == 4096
        del x
        assert fake.levels[-1] == 4096
        del view
        assert fake.levels[-1] == 0
    assert max(fake.levels) == 4096
    assert fake.before == 0


def test_a_table_that_is_looked_up_in_is_not_read_as_a_whole() -> None:
    fake = MetaDevice(CUDA, MACHINE)
    table, numbers = torch.empty(1 << 20, 1024, device=META), torch.empty(1000, dtype=torch.int64, device=META)
    with fake:
        functional.embedding(numbers, table)
    assert fake.seconds == pytest.approx((2 * 1000 * 1024 * 4 + 8 * 1000) / 1e12)


def test_parameters_that_lie_in_one_storage_stand_in_one_storage() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            flat = torch.empty(2048)
            self.parts = nn.ParameterList(flat[start : start + 1024] for start in (0, 1024))

    state = list(MetaTensors().state(Flat()).values())
    assert state[0].untyped_storage() is state[1].untyped_storage()
    assert [each.storage_offset() for each in state] == [0, 1024]
    assert all(isinstance(each, nn.Parameter) and each.device == META for each in state)


# The roofline.


def test_an_operator_takes_as_long_as_its_arithmetic_or_its_bytes_and_no_less_than_a_launch() -> None:
    product = Effort(Work.PRODUCT, 1e12, 10)
    assert seconds_of(product, MACHINE) == pytest.approx(1 / 0.86)
    assert seconds_of(Effort(Work.PRODUCT, 1.0, 10**13), MACHINE) == pytest.approx(10)
    assert seconds_of(Effort(Work.MEMORY, 0.0, 1), MACHINE) == 2e-6


def test_wider_arithmetic_is_slower_by_the_device() -> None:
    took = {each: seconds_of(Effort(Work.PRODUCT, 1e12, 1, each), MACHINE) for each in Precision}
    half = took[Precision.HALF]
    assert [took[each] / half for each in Precision] == pytest.approx([1, 2, 15, 30])
    card = Hardware.named("rtx4090")
    ratio = seconds_of(Effort(Work.PRODUCT, 1e15, 1, Precision.SINGLE), card)
    assert ratio == pytest.approx(2 * seconds_of(Effort(Work.PRODUCT, 1e15, 1), card))


def test_what_a_data_sheet_promises_is_cut_down_to_what_is_reached() -> None:
    assert Hardware.named("h100").is_promised
    assert not Hardware.named("h200").is_promised
    effort = Effort(Work.MEMORY, 0.0, 10**12)
    # 3.35e12 promised, of which 4.1 of 4.8 parts are reached.
    assert seconds_of(effort, Hardware.named("h100")) == pytest.approx(1 / 3.35 * 4.8 / 4.1)


def test_a_profile_of_a_device_that_is_not_here_wants_to_know_what_it_is_for() -> None:
    with META:
        model, batch = nn.Sequential(*(Block(64) for _ in range(3))), torch.empty(4, 64)
    profile = spillway.profile(model, batch, hardware="H100")
    failing(UsageError, lambda: spillway.plan(profile, budget="1GiB"), match="the profile is for cuda")
    assert spillway.plan(profile, budget="1GiB", hardware="H100") == spillway.plan(
        profile, budget="1GiB", hardware="h100"
    )


def test_a_batch_may_be_any_mapping() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block(64) for _ in range(3)))

        def forward(self, *, rows: Tensor) -> Tensor:
            return self.blocks(rows)

    with META:
        model, batch = Named(), torch.empty(4, 64)
    found = spillway.profile(model, UserDict(rows=batch), hardware="h100")
    assert found == spillway.profile(model, {"rows": batch}, hardware="h100")


def test_an_optimizer_that_asks_for_the_content_of_tensors_is_refused() -> None:
    with META:
        model, batch = nn.Sequential(*(Block(64) for _ in range(3))), torch.empty(4, 64)
    options: dict[str, Any] = {"hardware": "h100", "optimizer": torch.optim.Adafactor}
    failing(UnsupportedError, lambda: spillway.profile(model, batch, **options), match="Adafactor.*optimizer=4")
    assert spillway.profile(model, batch, hardware="h100", optimizer=4).kinds
