"""Models whose blocks can be run in any way, the ways, and the steps that are compared.

Each model takes ``call(block, *args, **kwargs)``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy

import spillway

Call = Callable[..., Any]


class MLP(nn.Module):
    """Linear layers with an activation in place and dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(32, 16))
            for _ in range(3)
        )

    def forward(self, call: Call) -> Tensor:
        x = torch.randn(5, 16, requires_grad=True)
        for block in self.blocks:
            x = call(block, x)
        return x


class DecoderLayer(nn.Module):
    """Norm, attention with rotary embedding, norm, SwiGLU."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(16), nn.LayerNorm(16)
        self.qkv, self.o = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = dropout

    def forward(self, x: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + functional.dropout(self.o(attended.transpose(1, 2).flatten(2)), self.dropout, self.training)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Decoder layers, which take their tables by keyword."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecoderLayer(dropout) for _ in range(2))
        angles = torch.outer(torch.arange(6.0), torch.arange(1.0, 5.0)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, call: Call) -> Tensor:
        x = torch.randn(2, 6, 16)
        for block in self.blocks:
            x = call(block, x, cos=self.cos, sin=self.sin)
        return x


class ViT(nn.Module):
    """Patches, then torch's own encoder layers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 32, dropout, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )

    def forward(self, call: Call) -> Tensor:
        x = self.patches(torch.randn(2, 3, 8, 8)).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = call(block, x)
        return x


class ResidualBlock(nn.Module):
    """Convolutions with batch norm, and an addition in place."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None)
        self.relu = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.relu(self.norm1(self.conv1(x))))
        y = self.norm2(self.conv2(y))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    """Residual blocks; what counts beside gradients are the statistics of their norms."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(dropout) for _ in range(2))

    def forward(self, call: Call) -> Tensor:
        x = torch.randn(2, 4, 6, 6, requires_grad=True)
        for block in self.blocks:
            x = call(block, x)
        return x


class Experts(nn.Module):
    """A router that sends each token to two of four experts: as many tokens as come."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(dropout), nn.Linear(24, 16)) for _ in range(4)
        )
        self.register_buffer("tokens_seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        self.tokens_seen += torch.bincount(chosen.flatten(), minlength=4)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out.index_add_(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return x + out


class MoE(nn.Module):
    """Layers of experts."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts(dropout) for _ in range(2))

    def forward(self, call: Call) -> Tensor:
        x = torch.randn(7, 16)
        for block in self.blocks:
            x = call(block, x)
        return x


class EncoderDecoder(nn.Module):
    """The decoder takes the encoder's output, and a dictionary of masks, by keyword; gives a tuple."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(16, 2, 32, dropout, batch_first=True) for _ in range(2))

    def forward(self, call: Call) -> Tensor:
        memory = call(self.encoder, torch.randn(2, 5, 16, requires_grad=True))
        x = torch.randn(2, 4, 16)
        masks = {"tgt": nn.Transformer.generate_square_subsequent_mask(4)}
        for block in self.decoder:

            def layer(x: Tensor, *, memory: Tensor, masks: dict[str, Tensor], block: nn.Module = block) -> Any:
                y = block(x, memory, tgt_mask=masks["tgt"])
                return {"hidden": y, "sums": (y.sum(-1), None)}

            out = call(layer, x, memory=memory, masks=masks)
            x = out["hidden"] + out["sums"][0].unsqueeze(-1)
        return x


MODELS: dict[str, type[nn.Module]] = {
    "mlp": MLP,
    "llama": Llama,
    "vit": ViT,
    "resnet": ResNet,
    "moe": MoE,
    "encoder-decoder": EncoderDecoder,
}

POLICIES = [CheckpointPolicy.PREFER_SAVE, CheckpointPolicy.PREFER_CPU_OFFLOAD, CheckpointPolicy.MUST_RECOMPUTE]

HOWS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "some-kept-some-offloaded": {"save": ["attention", "convolution"], "offload": ["inputs", "norm"]},
    "save-matmul": {"save": ["matmul"]},
    "save-attention-norm": {"save": ["attention", "norm", "convolution"]},
    "offload-matmul": {"offload": ["matmul", "convolution"]},
    "offload-inputs-pointwise": {"offload": ["inputs", "pointwise"]},
    "save-and-offload": {"save": ["norm", "random"], "offload": ["inputs", "matmul", "softmax"]},
    "offload-every-second": {"offload": [lambda call: call.index % 2 == 0]},
    "save-every-third": {"save": [lambda call: call.index % 3 == 0], "offload": ["inputs"]},
    "saved-by": {"offload": [spillway.saved_by("attention"), spillway.saved_by("norm"), spillway.saved_by("matmul")]},
    "policy": {"policy": lambda *asked, **kwargs: POLICIES[len(asked[1].name()) % 3]},
}


def plainly(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block, called."""
    return block(*args, **kwargs)


def recomputed(**how: Any) -> Call:
    """Blocks as regions. The reentrant mode wants an input that needs grad of functions: they have no parameters."""

    def call(block: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        needs_grad = any(torch.is_tensor(each) and each.requires_grad for each in (*args, *kwargs.values()))
        if how.get("use_reentrant") and not isinstance(block, nn.Module) and not needs_grad:
            return block(*args, **kwargs)
        return spillway.recompute(block, *args, **how, **kwargs)

    return call


def steps(
    name: str, call: Call, context: Callable[[], Any], *, dropout: float, autocast: bool, device: str = "cpu"
) -> list[Tensor]:
    """Two steps of SGD: losses, gradients, weights and buffers of each."""
    with torch.device(device):
        return _steps(name, call, context, dropout=dropout, autocast=autocast, device=device)


def _steps(
    name: str, call: Call, context: Callable[[], Any], *, dropout: float, autocast: bool, device: str
) -> list[Tensor]:
    torch.manual_seed(0)
    model = MODELS[name](dropout)
    seen: list[Tensor] = []
    for _ in range(2):
        model.zero_grad()
        mixed = torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext()
        with context(), mixed:
            loss = model(call).float().square().mean()
        loss.backward()
        seen += [loss.detach(), torch.rand(2)]
        for parameter in model.parameters():
            if parameter.grad is not None:
                seen.append(parameter.grad.clone())
                with torch.no_grad():
                    parameter -= 0.1 * parameter.grad
        seen += [buffer.clone() for buffer in model.buffers()]
    return seen
