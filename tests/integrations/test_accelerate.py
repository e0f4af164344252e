"""Accelerate's loop on converted models: prepare, save_state and load_state, accumulation, dynamo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import diptych.torch as dt
from diptych.common import RECIPES
from integrations.tiny import RECIPE_NAMES, converted, differs, llama, require_quantized, same, tokens, values

BATCHES = tokens(8).chunk(4)


@pytest.fixture(autouse=True)
def _fresh():
    """Accelerators share the process's state, which the first of them sets."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def trained(name: str, folder: Path, resume: bool = False, blocks: int = 2, **options: Any) -> tuple[Any, Any]:
    """Returns the model and the optimizer after four batches; `resume` begins with the third, at what `folder` holds.
    The resumed model is seeded otherwise."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", **options)
    made = converted(name, seed=6 if resume else 5, num_hidden_layers=blocks)
    model, optimizer = accelerator.prepare(made, torch.optim.AdamW(made.parameters(), lr=1e-2))
    if resume:
        accelerator.load_state(str(folder))
    for i, x in list(enumerate(BATCHES))[2 * resume :]:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=x, labels=x).loss)
            optimizer.step()
            optimizer.zero_grad()
        if i == 1 and not resume:
            accelerator.save_state(str(folder))
    return accelerator.unwrap_model(model, keep_torch_compile=False), optimizer


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "accumulation": {"gradient_accumulation_steps": 2}}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_resume(tmp_path, name, option):
    whole, optimizer = trained(name, tmp_path, **OPTIONS[option])
    require_quantized(whole, RECIPES[name], 15)
    assert differs(values(whole), values(llama()))
    again, its_optimizer = trained(name, tmp_path, resume=True, **OPTIONS[option])
    same(values(again, its_optimizer), values(whole, optimizer))


def test_steps_are_those_of_a_plain_loop(tmp_path):
    got, _ = trained("fp8-delayed", tmp_path)
    want = converted("fp8-delayed")
    optimizer = torch.optim.AdamW(want.parameters(), lr=1e-2)
    for x in BATCHES:
        with torch.autocast("cpu", torch.bfloat16):
            loss = want(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    same(values(got), values(want))


def test_compiled(tmp_path):
    """`dynamo_backend` compiles what `prepare` is given; the bits are those of eager code, also where it resumes."""
    whole, _ = trained("fp8-delayed", tmp_path, blocks=1)
    AcceleratorState._reset_state(True)
    again, _ = trained("fp8-delayed", tmp_path, resume=True, blocks=1, dynamo_backend="aot_eager")
    assert all(layer.compiled for layer in dt.report(again).quantized)
    same(values(again), values(whole))
