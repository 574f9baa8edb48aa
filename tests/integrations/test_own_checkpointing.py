"""Models whose own checkpointing is on, of timm, diffusers and Unsloth: attach replaces it, and puts it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import spillway
from steps import Block

Case = tuple[nn.Module, Callable[[], Tensor], Callable[[], object]]


def of_timm(name: str) -> Case:
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=4)
    images = torch.randn(1, 3, 224, 224)
    return model, lambda: model(images), model.set_grad_checkpointing


def of_diffusers(name: str) -> Case:
    diffusers = pytest.importorskip("diffusers")
    if name == "UNet2DModel":
        kinds = {
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        }
        model = diffusers.UNet2DModel(sample_size=16, block_out_channels=(32, 64), norm_num_groups=8, **kinds)
        images = torch.randn(2, 3, 16, 16)
        return model, lambda: model(images, 3).sample, model.enable_gradient_checkpointing
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=8, norm_num_groups=1
    )
    latents, steps, labels = torch.randn(2, 4, 8, 8), torch.tensor([3, 3]), torch.tensor([1, 2])
    return (
        model,
        lambda: model(latents, timestep=steps, class_labels=labels).sample,
        model.enable_gradient_checkpointing,
    )


CASES = [
    (of_timm, "vit_tiny_patch16_224"),
    (of_timm, "convnext_atto"),
    (of_diffusers, "UNet2DModel"),
    (of_diffusers, "DiTTransformer2DModel"),
]


@pytest.mark.parametrize("given", [{}, {"budget": "64GiB"}], ids=["recompute", "budget"])
@pytest.mark.parametrize(("make", "name"), CASES, ids=[name for _, name in CASES])
def test_its_checkpointing_is_replaced(make: Callable[[str], Case], name: str, given: dict[str, Any]) -> None:
    def flags() -> list[bool]:
        names = ("gradient_checkpointing", "grad_checkpointing")
        return [vars(module)[each] for module in model.modules() for each in names if each in vars(module)]

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        loss = call().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return [loss.detach(), *(each.grad.clone() for each in model.parameters() if each.grad is not None)]

    torch.manual_seed(0)
    model, call, enable = make(name)
    model.train()
    plain = step()
    enable()
    before = flags()
    assert any(before)
    with spillway.attach(model, **given) as attached:
        assert not any(flags())
        assert "switched off" in attached.notes[0]
        for _ in range(6):
            assert all(map(torch.equal, step(), plain))
    assert flags() == before
    assert all(map(torch.equal, step(), plain))


def test_a_flag_that_names_a_way_is_replaced_too() -> None:
    """As Unsloth's ``use_gradient_checkpointing="unsloth"`` sets it."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(3))
            self.gradient_checkpointing: bool | str = "unsloth"

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True) if self.gradient_checkpointing else block(x)
            return x

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(4, 16, requires_grad=True)

    def step() -> list[Tensor]:
        model.zero_grad()
        model(x).square().sum().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = step()
    with spillway.attach(model) as attached:
        assert model.gradient_checkpointing is False
        assert "switched off" in attached.notes[0]
        # A trainer may switch it on again between steps.
        model.gradient_checkpointing = "unsloth"
        assert all(map(torch.equal, step(), plain))
        assert model.gradient_checkpointing is False
    assert model.gradient_checkpointing == "unsloth"
