"""Hugging Face's Trainer on converted models: it steps like a plain loop, resumes bit by bit, checkpoints activations,
compiles; saved models keep the states of delayed scaling, or leave them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

import diptych.torch as dt
from diptych.common import RECIPES
from integrations.tiny import (
    RECIPE_NAMES,
    Recorder,
    Rows,
    converted,
    differs,
    llama,
    require_quantized,
    same,
    tokens,
    values,
)

LAYERS = 15  # seven in each block, and the head


def trained(
    name: str, folder: Path, resume: Path | None = None, seed: int = 5, context: Any = None, blocks: int = 2,
    **options: Any,
) -> Trainer:  # fmt: skip
    """Returns the Trainer after four steps, or after the last two of them from a checkpoint."""
    model = converted(name, seed, num_hidden_layers=blocks)
    if context is not None:
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    given = TrainingArguments(
        str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2, learning_rate=1e-2, use_cpu=True,
        bf16=True, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = Trainer(model, given, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "reentrant": {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}},
    "accumulation": {"gradient_accumulation_steps": 2},
}
STATES = ("fp8-delayed", "nvfp4")


@pytest.mark.parametrize(
    "name,option",
    [(name, o) for name in STATES for o in OPTIONS] + [(n, "plain") for n in RECIPE_NAMES if n not in STATES],
)
def test_resume(tmp_path, name, option):
    """The resumed run is given another seed, which the checkpoint's states replace."""
    whole = trained(name, tmp_path / "whole", **OPTIONS[option])
    require_quantized(whole.model, RECIPES[name], LAYERS)
    assert differs(values(whole.model), values(llama()))
    again = trained(name, tmp_path / "again", tmp_path / "whole/checkpoint-2", seed=6, **OPTIONS[option])
    same(values(again.model, again.optimizer), values(whole.model, whole.optimizer))


@pytest.mark.parametrize("name", STATES)
def test_checkpointing_changes_no_bit(tmp_path, name):
    whole = values(trained(name, tmp_path / "plain").model)
    for option in ("checkpointing", "reentrant"):
        same(values(trained(name, tmp_path / option, **OPTIONS[option]).model), whole, option)


def test_steps_are_those_of_a_plain_loop(tmp_path):
    """A loop of AdamW over the batches that the Trainer drew."""
    model = converted("fp8-delayed")
    recorder = Recorder(model)
    given = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, max_steps=3, learning_rate=1e-2, use_cpu=True, report_to=[],
        lr_scheduler_type="constant", max_grad_norm=0.0, disable_tqdm=True, optim="adamw_torch",
    )  # fmt: skip
    Trainer(model, given, train_dataset=Rows()).train()

    plain = converted("fp8-delayed")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0)
    for call in recorder.calls:
        plain(input_ids=call["input_ids"], labels=call["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(recorder.calls) == 3
    same(values(model), values(plain))


@pytest.mark.parametrize("name,context", [("fp8-delayed", None), ("nvfp4", dt.checkpoint_contexts)])
def test_compiled(tmp_path, name, context):
    """Compiled code, with and without checkpoints, has the bits of eager code, also where it resumes. Checkpoints of
    compiled code need diptych's contexts, which the model is given."""
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "context": context}
    whole = values(trained(name, tmp_path / "eager", blocks=1).model)
    again = trained(name, tmp_path / "again", tmp_path / "eager/checkpoint-2", seed=6, blocks=1, **options)
    assert all(layer.compiled for layer in dt.report(again.model).quantized)
    same(values(again.model), whole)


def test_arguments_are_json(tmp_path):
    """Loggers write the Trainer's arguments as JSON, which a function among them prevents."""
    model = llama()
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": dt.checkpoint_contexts})
    given = TrainingArguments(str(tmp_path), activation_checkpointing=True)
    Trainer(model, given)
    given.to_json_string()
    model.save_pretrained(tmp_path)
    given.activation_checkpointing_kwargs = {"use_reentrant": False, "context_fn": dt.checkpoint_contexts}
    with pytest.raises(TypeError, match="not JSON serializable"):
        given.to_json_string()


# --- save_pretrained and from_pretrained -----------------------------------------------------------------------------


def stepped() -> Any:
    model = converted("fp8-delayed", tie_word_embeddings=True)
    for seed in range(3):
        x = tokens(2, seed=seed)
        model(input_ids=x, labels=x).loss.backward()
    return model


def test_saved_models_keep_states(tmp_path):
    """A converted model of the same config reads all that was saved, and continues with the same bits."""
    model = stepped()
    model.save_pretrained(tmp_path)
    again = dt.convert(
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)), RECIPES["fp8-delayed"], verbose=False
    )
    load_model(again, tmp_path / "model.safetensors")
    same(values(again), values(model))
    x = tokens(2, seed=7)
    same(again(input_ids=x, labels=x).loss, model(input_ids=x, labels=x).loss)


def test_saved_models_leave_states_out(tmp_path):
    """The file then has the entries of the model before it was converted."""
    model = stepped()
    model.save_pretrained(tmp_path, state_dict=dt.plain_state_dict(model, "weights"))
    assert not [key for key in load_file(tmp_path / "model.safetensors") if "scale_states" in key]
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    same(values(again)["model"], dict(dt.plain_state_dict(model, "weights")))
