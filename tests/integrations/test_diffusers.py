"""A fine-tune of diffusers: a frozen text encoder and VAE, an average of weights, and a UNet or a DiT that trains."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import spillway
from integrations.llama import BUDGET, HARDWARE, same, weights
from spillway import Recompute, Session
from spillway.cli.running.models import ScriptObserver
from spillway.cli.running.options import RunOptions
from support import assert_nothing_left

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from diffusers.training_utils import EMAModel  # noqa: E402

STEPS, WORDS, WIDTH = 7, 99, 32

WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"policy": Recompute(offload="inputs"), "min_bytes": 0},
    "offload": {"policy": spillway.policies.Ratio(1), "min_bytes": 0},
    "budget": {"budget": BUDGET, "hardware": HARDWARE},
}


def unet() -> nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        norm_num_groups=8,
        attention_head_dim=4,
        dropout=0.1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def dit() -> nn.Module:
    """Of Stable Diffusion 3: each block has two streams, of the image and of the words."""
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=8,
        joint_attention_dim=WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
    )


@functools.cache
def frozen() -> tuple[nn.Module, nn.Module]:
    """A VAE, and a text encoder."""
    torch.manual_seed(1)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = diffusers.AutoencoderKL(block_out_channels=(8, 16), norm_num_groups=4, latent_channels=4, **kinds)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": WORDS, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    text = transformers.CLIPTextModel(transformers.CLIPTextConfig(**sizes))
    return vae.requires_grad_(False), text.requires_grad_(False)


def fine_tune(
    make: Callable[[], nn.Module], attach: Callable[[nn.Module], spillway.Attached] | None = None
) -> tuple[list[Tensor], spillway.Attached | None, nn.Module]:
    """The losses of each step, and at last the weights and their average."""
    vae, text = frozen()
    torch.manual_seed(0)
    model = make().train()
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    average = EMAModel(model.parameters(), decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    attached = None if attach is None else attach(model)
    seen = []
    for _ in range(STEPS):
        with torch.no_grad():
            latents = vae.encode(torch.rand(2, 3, 16, 16)).latent_dist.sample()  # type: ignore[operator]
            words = text(torch.randint(2, WORDS, (2, 8)))
        noise, times = torch.randn_like(latents), torch.randint(1000, (2,))
        noisy = latents.lerp(noise, (times / 1000).view(-1, 1, 1, 1))
        pooled = {"pooled_projections": words.pooler_output} if make is dit else {}
        found = model(noisy, timestep=times, encoder_hidden_states=words.last_hidden_state, **pooled).sample
        loss = nn.functional.mse_loss(found, noise - latents)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        seen.append(loss.detach())
    return [*seen, *weights(model), *(each.clone() for each in average.shadow_params)], attached, model


@functools.cache
def plain(make: Callable[[], nn.Module]) -> list[Tensor]:
    return fine_tune(make)[0]


both = pytest.mark.parametrize("make", [unet, dit], ids=["UNet", "DiT"])


@pytest.mark.parametrize("way", WAYS)
@both
@pytest.mark.covered
def test_a_fine_tune_gives_the_same_bits(make: Callable[[], nn.Module], way: str) -> None:
    with Session(window=1) as session:
        found, attached, model = fine_tune(make, lambda model: spillway.attach(model, session=session, **WAYS[way]))
        assert attached is not None and attached.passes == STEPS
        if way == "budget":
            assert attached.stage == "active"
        else:
            assert attached.stats().offloaded_bytes > 0
        attached.remove()
        del attached, model
        assert_nothing_left(session)
    assert same(found, plain(make))


@both
def test_an_unmodified_fine_tune_within_a_budget_gives_the_same_bits(make: Callable[[], nn.Module]) -> None:
    expected = plain(make)
    observer = ScriptObserver(RunOptions(budget=BUDGET, hardware="h200").attach)
    try:
        found, _, model = fine_tune(make)
        [managed] = observer.models.managed
        assert managed.module() is model
        assert managed.attached.stage == "active"
    finally:
        observer.end()
        observer.models.close()
    assert same(found, expected)


@pytest.mark.long
def test_the_benchmark_of_libraries_compares_bits(tmp_path: Path) -> None:
    file, script = tmp_path / "rows.json", Path(__file__).parents[2] / "benchmarks" / "libraries.py"
    options = ["--tiny", "--device=cpu", "--steps=2", f"--json={file}", "--libraries", "diffusers, DiT"]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    rows = json.loads(file.read_text())["rows"]
    assert [row["stage"] for row in rows] == [None, None, "active", "active"]
    assert all(row["identical"] for row in rows)
