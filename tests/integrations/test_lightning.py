"""Lightning's Trainer and Fabric on converted models: checkpoints, resuming, accumulation, compiled.

A LightningModule converts itself in `configure_model`: the Trainer restores a checkpoint after that, and before a
precision plugin may convert anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import diptych.torch as dt
from diptych.common import RECIPES
from integrations.tiny import (
    RECIPE_NAMES,
    Rows,
    converted,
    differs,
    llama,
    require_quantized,
    same,
    tokens,
    values,
)


class Net(lightning.LightningModule):
    def __init__(self, name: str, seed: int, backend: str | None, blocks: int) -> None:
        super().__init__()
        self.net = llama(num_hidden_layers=blocks)
        self.name, self.seed, self.backend = name, seed, backend

    def configure_model(self) -> None:
        dt.convert(self, RECIPES[self.name], verbose=False)
        dt.seed_rng(self, self.seed)
        if self.backend is not None:
            self.net.compile(backend=self.backend)

    def training_step(self, batch: Any, index: int) -> Any:
        return self.net(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(
    name: str, folder: Path, resume: Path | None = None, seed: int = 5, backend: str | None = None, blocks: int = 2,
    **options: Any,
) -> tuple[Net, Any]:  # fmt: skip
    """Returns the module and its optimizer after two epochs of two batches, each of which ends with a checkpoint."""
    net = Net(name, seed, backend, blocks)
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_epochs=1)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", precision="bf16-mixed", logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saving], default_root_dir=folder, **options,
    )  # fmt: skip
    batches = torch.utils.data.DataLoader(Rows(4), batch_size=2)
    trainer.fit(net, batches, ckpt_path=None if resume is None else str(resume))
    return net, trainer.optimizers[0]


@pytest.mark.parametrize("name,options", [
    *((name, {}) for name in RECIPE_NAMES), ("fp8-delayed", {"accumulate_grad_batches": 2}),
])  # fmt: skip
def test_resume(tmp_path, name, options):
    """The resumed run is given another seed, which the checkpoint's states replace."""
    whole, optimizer = trained(name, tmp_path / "whole", **options)
    require_quantized(whole.net, RECIPES[name], 15)
    assert differs(values(whole.net), values(llama()))
    again, its_optimizer = trained(name, tmp_path / "again", tmp_path / "whole/epoch=0.ckpt", seed=6, **options)
    same(values(again, its_optimizer), values(whole, optimizer))


def test_compiled(tmp_path):
    whole, _ = trained("fp8-delayed", tmp_path / "whole", blocks=1)
    resume = tmp_path / "whole/epoch=0.ckpt"
    again, _ = trained("fp8-delayed", tmp_path / "again", resume, backend="aot_eager", blocks=1)
    assert all(layer.compiled for layer in dt.report(again).quantized)
    same(values(again), values(whole))


def test_steps_are_those_of_a_plain_loop(tmp_path):
    got, _ = trained("fp8-delayed", tmp_path)
    same(values(got.net), values(plain("fp8-delayed")))


# --- Fabric ----------------------------------------------------------------------------------------------------------

BATCHES = tokens(4).chunk(2) * 2


def plain(name: str) -> Any:
    """Returns the model after the steps of a loop that uses neither."""
    net = converted(name)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for x in BATCHES:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = net(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
    return net


def by_fabric(name: str, folder: Path, resume: bool = False, backend: str | None = None, blocks: int = 2):
    """Returns the model and the optimizer after four batches, or after the last two of them from a checkpoint."""
    fabric = lightning.Fabric(accelerator="cpu", precision="bf16-mixed")
    made = converted(name, seed=6 if resume else 5, num_hidden_layers=blocks)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(made if backend is None else torch.compile(made, backend=backend), optimizer)
    state = {"model": model, "optimizer": optimizer}
    if resume:
        fabric.load(folder / "two", state)
    for i, x in list(enumerate(BATCHES))[2 * resume :]:
        optimizer.zero_grad()
        fabric.backward(model(input_ids=x, labels=x).loss)
        optimizer.step()
        if i == 1 and not resume:
            fabric.save(folder / "two", state)
    return made, optimizer


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_fabric_resumes(tmp_path, name):
    whole, optimizer = by_fabric(name, tmp_path)
    require_quantized(whole, RECIPES[name], 15)
    again, its_optimizer = by_fabric(name, tmp_path, resume=True)
    same(values(again, its_optimizer), values(whole, optimizer))
    same(values(whole), values(plain(name)))


def test_fabric_compiled(tmp_path):
    whole, _ = by_fabric("fp8-delayed", tmp_path, blocks=1)
    again, _ = by_fabric("fp8-delayed", tmp_path, resume=True, backend="aot_eager", blocks=1)
    assert all(layer.compiled for layer in dt.report(again).quantized)
    same(values(again), values(whole))
