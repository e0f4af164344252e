"""diffusers' models in a training loop: converted UNet with cross-attention, EMAModel, gradient checkpointing,
save_pretrained and from_pretrained with and without states, a pipeline of the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file

import diptych.torch as dt
from diptych.common import RECIPES
from integrations.tiny import differs, require_quantized, same, values

NAMES = ("fp8-delayed", "mxfp8", "nvfp4")
LAYERS = 35
NOISE = DDPMScheduler(num_train_timesteps=100)


def plain() -> Any:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=4, in_channels=4, out_channels=4, block_out_channels=(32,), layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",), up_block_types=("CrossAttnUpBlock2D",), cross_attention_dim=32,
        attention_head_dim=8, norm_num_groups=8, mid_block_type=None,
    )  # fmt: skip


def converted(name: str, seed: int = 5) -> Any:
    model = dt.convert(plain(), RECIPES[name], verbose=False)
    dt.seed_rng(model, seed)
    return model


def predict(model: Any, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the noise that a model predicts for batch i, and the true one. 16 images, whose rows every recipe takes,
    in the layers of the time steps too."""
    g = torch.Generator().manual_seed(i)
    clean, noise = (torch.randn(16, 4, 4, 4, generator=g) for _ in range(2))
    context, times = torch.randn(16, 4, 32, generator=g), torch.randint(0, 100, (16,), generator=g)
    noisy: Any = NOISE.add_noise(clean, noise, times)  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        return model(noisy, times, encoder_hidden_states=context).sample, noise


def trained(name: str, folder: Path, resume: bool = False, checkpointing: bool = False, backend: str | None = None):
    """Returns the model, its optimizer and its averaged weights after four steps, or after the last two of them from a
    checkpoint."""
    model = converted(name, seed=6 if resume else 5)
    if checkpointing:
        model.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ema = EMAModel(model.parameters(), decay=0.5)
    if resume:
        for part, t in torch.load(folder / "two.pt").items():
            {"model": model, "optimizer": optimizer, "ema": ema}[part].load_state_dict(t)
    if backend is not None:
        model.down_blocks[0].attentions[0].transformer_blocks[0].compile(backend=backend)
    for i in range(2 * resume, 4):
        got, noise = predict(model, i)
        torch.nn.functional.mse_loss(got.float(), noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
        if i == 1 and not resume:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ema": ema.state_dict()}
            torch.save(state, folder / "two.pt")
    return model, optimizer, ema


@pytest.mark.parametrize("name", NAMES)
def test_resume(tmp_path, name):
    whole, optimizer, ema = trained(name, tmp_path)
    require_quantized(whole, RECIPES[name], LAYERS)
    assert differs(values(whole), values(plain()))
    again, its_optimizer, its_ema = trained(name, tmp_path, resume=True)
    same(values(again, its_optimizer), values(whole, optimizer))
    same(its_ema.state_dict(), ema.state_dict())


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4"])
def test_checkpointing_changes_no_bit(tmp_path, name):
    whole, _, _ = trained(name, tmp_path)
    got, _, _ = trained(name, tmp_path, resume=True, checkpointing=True)
    same(values(got), values(whole))


def test_compiled(tmp_path):
    """One block of attention, compiled in its place, has the bits of eager code."""
    whole, _, _ = trained("fp8-delayed", tmp_path)
    again, _, _ = trained("fp8-delayed", tmp_path, resume=True, backend="aot_eager")
    assert sum(layer.compiled for layer in dt.report(again).quantized) == 10
    same(values(again), values(whole))


def test_saved_models(tmp_path):
    """A model saved without states loads as any other; one saved with them loads into a converted model."""
    model, _, _ = trained("fp8-delayed", tmp_path)
    model.save_pretrained(tmp_path / "whole")
    again = converted("fp8-delayed")
    again.load_state_dict(load_file(tmp_path / "whole/diffusion_pytorch_model.safetensors"))
    same(values(again), values(model))

    weights = plain()
    weights.load_state_dict(dt.plain_state_dict(model, "weights"))
    weights.save_pretrained(tmp_path / "weights")
    loaded, info = UNet2DConditionModel.from_pretrained(tmp_path / "weights", output_loading_info=True)
    assert not any(info.values()), info
    same(values(loaded), values(weights))
    got, _ = predict(dt.convert(loaded, RECIPES["fp8-current"], verbose=False).eval(), 0)
    assert got.isfinite().all()
