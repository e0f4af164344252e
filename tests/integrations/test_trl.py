"""TRL's trainers on converted models: SFT, DPO and GRPO take steps, save and resume bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import diptych.torch as dt
from diptych.common import RECIPES
from integrations.tiny import converted, differs, llama, require_quantized, same, text, tokenizer, values

COMMON: dict[str, Any] = dict(
    per_device_train_batch_size=2, max_steps=4, save_steps=2, learning_rate=1e-2, use_cpu=True, bf16=True,
    report_to=[], disable_tqdm=True,
)  # fmt: skip


def sft(name: str, folder: Path, seed: int, **options: Any) -> Any:
    """Lines of several lengths, padded to multiples of 16, which NVFP4 needs."""
    rows = Dataset.from_dict({"text": [line[: 20 + 9 * i] for i, line in enumerate(text(8))]})
    given = SFTConfig(str(folder), max_length=32, pad_to_multiple_of=16, **COMMON)
    return SFTTrainer(converted(name, seed), given, train_dataset=rows, processing_class=tokenizer(), **options)


def dpo(name: str, folder: Path, seed: int) -> Any:
    """The reference model stays in high precision."""
    rows = Dataset.from_dict({"prompt": text(8), "chosen": text(8, seed=1), "rejected": text(8, seed=2)})
    given = DPOConfig(str(folder), max_length=32, pad_to_multiple_of=16, **COMMON)
    return DPOTrainer(converted(name, seed), llama(), given, train_dataset=rows, processing_class=tokenizer())


def reward(completions: list[str], **others: Any) -> list[float]:
    return [float(len(set(line.split()))) for line in completions]


def grpo(name: str, folder: Path, seed: int) -> Any:
    """Two completions of 8 words for each prompt of 8. The model generates by the same quantized layers."""
    given = GRPOConfig(str(folder), num_generations=2, max_completion_length=8, pad_to_multiple_of=16, **COMMON)
    rows = Dataset.from_dict({"prompt": text(8)})
    return GRPOTrainer(converted(name, seed), reward, given, train_dataset=rows, processing_class=tokenizer())


# SFT and DPO multiply by the head's weight themselves, in pieces, so that the head stays in high precision.
TRAINERS: dict[str, tuple[Callable[..., Any], int]] = {"sft": (sft, 14), "dpo": (dpo, 14), "grpo": (grpo, 15)}


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_resume(tmp_path, trainer, name):
    """The resumed run is given another seed, which the checkpoint's states replace."""
    make, layers = TRAINERS[trainer]
    whole = make(name, tmp_path / "whole", 5)
    whole.train()
    require_quantized(whole.model, RECIPES[name], layers)
    assert differs(values(whole.model), values(llama()))
    again = make(name, tmp_path / "again", 6)
    again.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-2"))
    same(values(again.model, again.optimizer), values(whole.model, whole.optimizer))


def test_sft_with_adapters(tmp_path):
    """The trainer adds the adapters after the model was converted; they are left in high precision."""
    trainer = sft("fp8-delayed", tmp_path, 5, peft_config=LoraConfig(r=8, target_modules="all-linear"))
    trainer.train()
    assert len(dt.report(trainer.model).quantized) == 14
    assert not [key for key, m in trainer.model.named_modules() if "lora_" in key and isinstance(m, dt.Linear)]
