"""timm's models and its means of training: converted vision transformers, CheckpointSaver, resume_checkpoint,
ModelEmaV3, numbers of rows that are no multiple of 16."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import timm.optim
import torch
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, ModelEmaV3

import diptych.torch as dt
from diptych.common import RECIPES, NVFP4BlockScaling
from integrations.tiny import RECIPE_NAMES, differs, require_quantized, same, values

LAYERS = 9  # four in each of two blocks, and the head


def vision(name: str = "", seed: int = 5) -> Any:
    """Returns a vision transformer that makes 17 tokens of an image, in high precision if no recipe is named."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=16
    )
    if name:
        with warnings.catch_warnings():
            warnings.simplefilter("error", dt.ConvertWarning)  # the tables of positions are no layers
            dt.convert(model, RECIPES[name], verbose=False)
        dt.seed_rng(model, seed)
    return model


def images(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), torch.arange(len(x)) % 16)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(name: str, folder: Path, resume: bool = False, backend: str | None = None) -> tuple[Any, Any, Any]:
    """Returns the model, its optimizer and its averaged copy after four steps, or after the last two of them from
    CheckpointSaver's file. Sixteen images make a number of rows that every recipe takes."""
    model = vision(name, seed=6 if resume else 5)
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-2)
    ema = ModelEmaV3(model, decay=0.5)
    if resume:
        assert resume_checkpoint(model, str(folder / "last.pth.tar"), optimizer) == 2
        ema.module.load_state_dict(torch.load(folder / "last.pth.tar", weights_only=False)["state_dict_ema"])
    run = model if backend is None else torch.compile(model, backend=backend)
    for i in range(2 * resume, 4):
        step(run, optimizer, images(16, seed=i))
        ema.update(model)
        if i == 1 and not resume:
            args = argparse.Namespace(model="vit")
            saver = CheckpointSaver(model, optimizer, args, ema, checkpoint_dir=str(folder), recovery_dir=str(folder))
            saver.save_checkpoint(i)
    return model, optimizer, ema


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_resume(tmp_path, name):
    """The resumed run is given another seed, which the checkpoint's states replace."""
    whole, optimizer, ema = trained(name, tmp_path)
    require_quantized(whole, RECIPES[name], LAYERS)
    assert differs(values(whole), values(vision()))
    again, its_optimizer, its_ema = trained(name, tmp_path, resume=True)
    same(values(again, its_optimizer), values(whole, optimizer))
    same(values(its_ema.module), values(ema.module))


def test_compiled(tmp_path):
    whole, _, _ = trained("fp8-delayed", tmp_path)
    again, _, _ = trained("fp8-delayed", tmp_path, resume=True, backend="aot_eager")
    assert all(layer.compiled for layer in dt.report(again).quantized)
    same(values(again), values(whole))


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_rows_that_are_no_multiple_of_16(name):
    """Three images make 51 rows, which NVFP4 alone does not take in training: the error names the layer and says what
    to do. Each recipe takes them in inference."""
    model = vision(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if name != "nvfp4":
        step(model, optimizer, images(3))
    else:
        message = r"linear 'blocks.0.attn.qkv': .*rows of a \[3, 17, 32\] tensor must be a multiple of 16: pad"
        with pytest.raises(ValueError, match=message):
            step(model, optimizer, images(3))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model.eval()(images(3))
    require_quantized(model, RECIPES[name], LAYERS)


def test_float32_without_rotation():
    """The Hadamard transform takes bfloat16 alone; without it NVFP4 trains in float32."""
    model = dt.convert(vision(), NVFP4BlockScaling(disable_rht=True), verbose=False)
    model(images(16)).sum().backward()
    require_quantized(model, NVFP4BlockScaling(disable_rht=True), LAYERS)
