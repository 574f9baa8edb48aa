"""Hazards 21, 26 and 27: strides, memory formats and the stranger kinds of tensor, exact to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from spillway import EventKind
from support import Context, Trial, grads

DENSE: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(16, 16),
    "transposed": lambda: torch.randn(8, 32).t(),
    "channels-last": lambda: torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last),
    "channels-last-3d": lambda: torch.randn(2, 4, 4, 4, 4).to(memory_format=torch.channels_last_3d),
    "permuted": lambda: torch.randn(4, 8, 16).permute(2, 0, 1),
    "every second": lambda: torch.randn(32, 32)[::2, ::2],
    "offset": lambda: torch.randn(4096)[3:3000],
    "small offset of a large storage": lambda: torch.randn(65536)[40001:40101],
    "expanded": lambda: torch.randn(16, 1).expand(16, 64),
    "expanded slice of a large storage": lambda: torch.randn(65536)[40001:40101].expand(3, 100),
    "overlapping windows": lambda: torch.randn(256).unfold(0, 16, 4),
    "negative bit": lambda: torch.randn(64, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.randn(64, dtype=torch.complex64).conj(),
    "conjugate transpose": lambda: torch.randn(8, 8, dtype=torch.complex128).mH,
    "complex as real": lambda: torch.view_as_real(torch.randn(64, dtype=torch.complex64)),
    "imaginary part": lambda: torch.randn(64, dtype=torch.complex64).imag,
    "half complex": lambda: torch.randn(64).to(torch.complex32),
    "bool": lambda: torch.randn(256) > 0,
    "any stride along a dimension of one": lambda: torch.zeros(1, dtype=torch.uint8).as_strided((1,), (0,)),
    "any stride along a dimension of one of several": lambda: torch.randn(64).as_strided((1, 64), (7, 1)),
    "uint8": lambda: torch.randint(256, (256,), dtype=torch.uint8),
    "int64": lambda: torch.randint(2**62, (256,)),
    "uint16": lambda: torch.randint(2**15, (256,)).to(torch.uint16),
    "bfloat16": lambda: torch.randn(256, dtype=torch.bfloat16),
    "float8": lambda: torch.randn(256).to(torch.float8_e4m3fn),
    "float64": lambda: torch.randn(256, dtype=torch.float64),
    "bytes seen as floats": lambda: torch.randint(256, (1024,), dtype=torch.uint8).view(torch.float32),
    "scalar": lambda: torch.randn(()),
    "one of a kind": lambda: torch.randn(1, 1, 1)[:, :, 0],
    "nan and infinities": lambda: torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0]),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, as bytes: NaNs and zeros of either sign told apart."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("kind", DENSE)
def test_h21_h27_what_comes_back_is_what_was_saved(trial: Trial, kind: str) -> None:
    torch.manual_seed(0)
    wanted = DENSE[kind]()
    torch.manual_seed(0)
    back = trial.round_trip(DENSE[kind])
    assert back.dtype is wanted.dtype
    assert back.shape == wanted.shape
    assert back.stride() == wanted.stride()
    assert back.device == wanted.device
    assert back.layout is wanted.layout
    assert back.is_conj() == wanted.is_conj()
    assert back.is_neg() == wanted.is_neg()
    assert back.requires_grad == wanted.requires_grad
    assert back.data_ptr() % 64 == wanted.data_ptr() % 64
    assert torch.equal(bits(back), bits(wanted))
    assert trial.count(EventKind.TAKE) == 1, "it never left"


@pytest.mark.parametrize("kind", ["offset", "every second", "channels-last", "conjugate"])
def test_h27_storage_offset_is_that_of_the_storage_that_came_back(trial: Trial, kind: str) -> None:
    """All of the storage moved, so the offset into it is the same."""
    wanted = DENSE[kind]()
    back = trial.round_trip(DENSE[kind])
    assert back.storage_offset() == wanted.storage_offset()
    assert back.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "matmul of a transpose": lambda x: x.t().sin() @ x.sin(),
    "matmul of a strided slice": lambda x: x[::2, ::3].sin() @ x[::3, ::2].sin(),
    "layer norm of a transpose": lambda x: torch.nn.functional.layer_norm(x.t().sin(), (64,)),
    "softmax over rows of a transpose": lambda x: x.t().sin().softmax(0) * x,
    "convolution, channels last": lambda x: torch.nn.functional.conv2d(
        x.view(1, 4, 32, 32).to(memory_format=torch.channels_last).sin(), x.view(16, 4, 8, 8)
    ),
    "batch norm, channels last": lambda x: torch.nn.functional.batch_norm(
        x.view(4, 4, 16, 16).to(memory_format=torch.channels_last).sin(), None, None, training=True
    ),
    "sum of a transposed product": lambda x: (x.t() * x).sin().sum(1),
    "attention over permuted heads": lambda x: torch.nn.functional.scaled_dot_product_attention(
        *(x.view(1, 64, 4, 16).sin().transpose(1, 2),) * 3
    ),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x.sin(), x.cos()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_h21_strides_and_memory_format(trial: Trial, operator: str, dtype: torch.dtype) -> None:
    """A contiguous copy in place of a strided tensor changes the last bits."""

    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(64, 64).to(dtype).requires_grad_()
        with context():
            out = OPERATORS[operator](leaf * 1)
        out.backward(torch.randn_like(out))
        yield out.detach()
        yield from grads(leaf)

    trial(step)


STRANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse matrix times dense": lambda x: torch.sparse.mm((x.detach() > 1).float().to_sparse(), x.sin()),
    "compressed rows times dense": lambda x: (x.detach() > 1).float().to_sparse_csr() @ x.sin(),
    "gradient of a sparse tensor": lambda x: torch.sparse.sum(x.sin().to_sparse() * 2),
    "conjugate product": lambda x: (torch.complex(x, x.sin()).conj() * torch.complex(x.cos(), x).conj()).abs(),
    "negative view": lambda x: torch.complex(x, x.sin()).conj().imag.sin(),
    "fast fourier transform": lambda x: torch.fft.rfft(x.sin()).abs() ** 2,
    "boolean mask": lambda x: x.sin().masked_fill(x > 0, 0.5)[x < 1],
    "where": lambda x: torch.where(x > 0, x.sin(), x.exp()),
    "maximum by index": lambda x: x.sin().max(dim=1).values * x.cos().sort(dim=1).values[:, 0],
    "gather": lambda x: x.sin().gather(1, (x > 0).long()) * x[:, :1].cos(),
    "nothing at all": lambda x: torch.cat([x.sin() * 2, (x[:0].sin() * x[:0]).exp()]),
    "dropout": lambda x: torch.nn.functional.dropout(x.sin(), 0.3) * x.cos(),
    "pooling by index": lambda x: torch.nn.functional.max_pool2d(x[None, None].sin(), 2) ** 2,
}


@pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("strange", STRANGE)
def test_h26_strange_kinds(trial: Trial, strange: str) -> None:
    def step(context: Context) -> Iterator[torch.Tensor]:
        leaf = torch.randn(32, 32, requires_grad=True)
        with context():
            out = STRANGE[strange](leaf * 1)
            dense = (leaf * 2).sin().exp().sin().sum()
        (out.sum() + dense).backward()
        yield out.detach().to_dense() if out.layout is not torch.strided else out.detach()
        yield from grads(leaf)

    trial(step)


@pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.filterwarnings("ignore:.*quantiz")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(8, 8).relu().to_sparse(),
        lambda: torch.randn(8, 8).relu().to_sparse_csr(),
        lambda: torch.randn(8, 8).relu().to_sparse_bsr((2, 2)),
        lambda: torch.quantize_per_tensor(torch.randn(64), 0.1, 10, torch.qint8),
        lambda: torch.quantize_per_channel(torch.randn(4, 16), torch.rand(4), torch.zeros(4), 0, torch.qint8),
        lambda: torch.randn(0, 5),
        lambda: torch.randn(64)[64:],
        lambda: torch.empty(3, 3, device="meta"),
    ],
    ids=["coo", "csr", "bsr", "per-tensor", "per-channel", "zero-size", "empty-slice", "meta"],
)
def test_h26_what_cannot_be_rebuilt_stays(trial: Trial, make: Callable[[], torch.Tensor]) -> None:
    """The same object or an alias of it: exact, whatever it is."""
    made: list[torch.Tensor] = []

    def remember() -> torch.Tensor:
        made.append(make())
        return made[-1]

    back = trial.round_trip(remember)
    wanted = made.pop()
    assert back.layout is wanted.layout
    assert back.dtype is wanted.dtype
    assert back.shape == wanted.shape
    assert back.device == wanted.device
    if wanted.device.type != "meta":
        dense = [tensor.dequantize() if tensor.is_quantized else tensor.to_dense() for tensor in (back, wanted)]
        assert torch.equal(*dense)
    assert trial.count(EventKind.TAKE) == 0


@pytest.mark.parametrize("offset", [4, 16, 64])
def test_h26_memory_that_came_from_elsewhere(trial: Trial, offset: int) -> None:
    """Put at another alignment, kernels would choose other code for it, and other last bits."""
    alignments = []

    def foreign() -> torch.Tensor:
        tensor = torch.frombuffer(bytearray(range(256)) * 20, dtype=torch.float32, offset=offset)
        alignments.append(tensor.data_ptr() % 64)
        return tensor

    wanted = foreign()
    back = trial.round_trip(foreign)
    assert torch.equal(bits(back), bits(wanted))
    assert back.data_ptr() % 64 == alignments[-1]


class Shaped(torch.autograd.Function):
    """Says in backward what it was given, since autograd would take anything."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, notes: list[object]) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        ctx.notes = notes
        notes.append((tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset()))
        return tensor.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (tensor,) = ctx.saved_tensors
        ctx.notes.append((tensor.shape, tensor.dtype, tensor.stride(), tensor.storage_offset()))
        return gradient * tensor.cos(), None


def test_h27_shapes_and_dtypes_of_one_storage_seen_in_many_ways(trial: Trial) -> None:
    notes: list[object] = []
    leaf = torch.randn(12, 12, requires_grad=True)
    with trial.offload():
        base = leaf * 2
        views = [base, base.t(), base.view(-1), base[2:], base[:, 3], base.view(3, 4, 12), base.double().t()]
        loss = sum((Shaped.apply(view, notes).sum() for view in views), start=torch.zeros(()))
    del base, views
    trial.push_out()
    loss.backward()
    forward, backward = notes[:7], notes[7:]
    assert sorted(map(str, forward)) == sorted(map(str, backward))
    assert trial.count(EventKind.TAKE) == 2
