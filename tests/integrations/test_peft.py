"""LoRA by PEFT on converted models: adapters stay in high precision in either order, states are saved beside adapters,
merged models continue quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import diptych.torch as dt
from diptych.common import RECIPES
from integrations.tiny import RECIPE_NAMES, Rows, converted, llama, require_quantized, same, tokens, values

LORA = LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0)


def adapted(name: str, seed: int = 5, adapters_first: bool = False) -> Any:
    """Returns the Llama with adapters, converted before or after they were added. The adapters' weights are drawn
    alike, those of B too, so that each adapter has an effect."""
    model = get_peft_model(llama() if adapters_first else converted(name), LORA)
    torch.manual_seed(1)
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "lora_" in key:
                p.normal_(std=0.1)
    dt.convert(model, RECIPES[name], verbose=False)
    dt.seed_rng(model, seed)
    return model


class KeepStates(TrainerCallback):
    """Writes the states of a model beside the adapters of each checkpoint, as the page shows it."""

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **others: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(dt.plain_state_dict(model, "states"), folder / "diptych.pt")


def trained(model: Any, folder: Path, resume: Path | None = None) -> Any:
    if resume is not None:
        model.load_state_dict(torch.load(resume / "diptych.pt"), strict=False)
    given = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2, learning_rate=1e-2, use_cpu=True,
        bf16=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, given, train_dataset=Rows(), callbacks=[KeepStates()])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_resume(tmp_path, name):
    """Checkpoints hold adapters alone, and the states beside them. The frozen weights do not change."""
    whole = trained(adapted(name), tmp_path / "whole")
    require_quantized(whole.model, RECIPES[name], 15)
    again = trained(adapted(name, seed=6), tmp_path / "again", tmp_path / "whole/checkpoint-2")
    same(values(again.model, again.optimizer), values(whole.model, whole.optimizer))
    base = {key.replace("base_layer.", ""): t for key, t in whole.model.base_model.model.state_dict().items()}
    for key, t in llama().state_dict().items():
        same(base[key], t, key)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_order_changes_nothing(name):
    """A model converted before or after adapters are added has the same quantized layers and first step."""
    x, steps = tokens(2), []
    for adapters_first in (False, True):
        model = adapted(name, adapters_first=adapters_first)
        assert not [key for key, m in model.named_modules() if "lora_" in key and isinstance(m, dt.Linear)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=x, labels=x).loss
        loss.backward()
        steps.append({"loss": loss.detach()} | {k: p.grad for k, p in model.named_parameters() if p.requires_grad})
        assert not [key for key, p in model.named_parameters() if "lora_" not in key and p.grad is not None]
    same(*steps)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_merging(tmp_path, name):
    """Merged weights are the frozen ones and the adapters' product, and run quantized, as in a model that is converted
    after merging. Adapters are saved and reloaded by PEFT's own means."""
    model = adapted(name)
    model.save_pretrained(tmp_path)
    reloaded = PeftModel.from_pretrained(converted(name), tmp_path)
    for key, t in dt.plain_state_dict(reloaded, "weights").items():
        same(t, model.state_dict()[key], key)

    merged = model.merge_and_unload()
    plain = dt.convert(PeftModel.from_pretrained(llama(), tmp_path).merge_and_unload(), RECIPES[name], verbose=False)
    dt.seed_rng(plain, 5)
    dt.seed_rng(merged, 5)
    x = tokens(2)
    for one in (plain, merged):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            one.logits = one(input_ids=x).logits
        require_quantized(one, RECIPES[name], 15)
    same(merged.logits, plain.logits)
