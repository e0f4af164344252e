"""examples/torch_llama.py: its model against transformers', its weights' way there and back, and runs by torchrun."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_logs import TINY, near, rows
from torch_frontend.llama_runs import LLAMA3, call, here, killed, program, tensors, trained
from torch_frontend.ranks import needs_gloo

from llama import weights  # isort: skip  # llama_runs makes it found
from llama.config import Config, ConfigError  # isort: skip
from llama.program import tokens_of  # isort: skip
from llama.torch_model import Llama, fill  # isort: skip

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("given", [{}, {"rope_scaling": LLAMA3}, {"tie_word_embeddings": True}])
def test_the_model_is_transformers_llama(given, tmp_path):
    """Their weights, read from a file, give their logits; and written back they are theirs."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY, **given)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="200KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config = Config.read(tmp_path / "config.json")
    model = Llama(config)
    assert weights.shapes(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}
    fill(model, weights.Files(tmp_path, config).whole, {})
    tokens = torch.randint(256, (2, 200))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_configs_of_other_models_are_refused():
    assert Config.of(TINY).qkv_rows == (128, 64, 64)
    for wrong, said in (
        ({"model_type": "qwen2"}, "qwen2"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"vocab_size": 0}, "vocab_size"),
    ):
        with pytest.raises(ConfigError, match=said):
            Config.of(TINY | wrong)
    with pytest.raises(ConfigError, match="hidden_size"):
        Config.of({})


def test_flops_are_six_for_each_multiplied_weight():
    config = Config.of(TINY)
    matrices = sum(p.numel() for n, p in Llama(config).named_parameters() if p.dim() == 2 and n != "embed.weight")
    assert config.flops_per_token(128) == 6 * matrices + 12 * 2 * 128 * 128


@needs_gloo
def test_two_ranks_learn_and_resume_bit_for_bit(tmp_path):
    """A run that is killed after its checkpoint of step 4, and resumed, ends where one that was not killed ends."""
    common = ("--recipe", "fp8-delayed", "--steps", 8, "--save-every", 4)
    trained(*common, "--save", tmp_path / "a", "--metrics", tmp_path / "a.jsonl", "--out", tmp_path / "whole", ranks=2)
    whole = rows(tmp_path / "a.jsonl")
    assert [row["step"] for row in whole] == [*range(8)] and whole[-1]["loss"] < whole[0]["loss"] - 0.5
    assert all(row["mfu"] is None and row["tokens_per_s"] > 0 and row["memory_gib"] > 0 for row in whole)
    killed(tmp_path / "b.jsonl", 6, *common, "--save", tmp_path / "b")
    assert (tmp_path / "b/latest").read_text().strip() == "step-000004"
    resume = (*common, "--save", tmp_path / "b", "--resume")
    trained(*resume, "--metrics", tmp_path / "b.jsonl", "--out", tmp_path / "again", ranks=2)
    again = rows(tmp_path / "b.jsonl")
    assert [(r["step"], r["loss"]) for r in again] == [(r["step"], r["loss"]) for r in whole]
    one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "again")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    # One rank goes on with the same global batches: the losses are near, though sums differ.
    (tmp_path / "a/latest").write_text("step-000004")
    trained(*common, "--save", tmp_path / "a", "--resume", "--metrics", tmp_path / "one.jsonl")
    for row, want in zip(rows(tmp_path / "one.jsonl"), whole[4:], strict=True):
        assert row["step"] == want["step"] and abs(row["loss"] - want["loss"]) < 0.02
    wrong = call(*common, "--save", tmp_path / "a", "--resume", "--seq", 64)
    assert wrong.returncode == 1 and "seq was 128, is 64" in wrong.stderr


def test_what_is_written_can_be_read(tmp_path):
    hf = pytest.importorskip("transformers")
    trained("--recipe", "bf16", "--steps", 1, "--out", tmp_path / "a", "--accumulate", 2, "--checkpoint-activations")
    trained("--recipe", "bf16", "--steps", 1, "--lr", 1e-30, "--weights", tmp_path / "a",
            "--config", tmp_path / "a/config.json", "--out", tmp_path / "b")  # fmt: skip
    one, two = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    theirs = hf.LlamaForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(theirs.lm_head.weight, one["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("tp", (1, 2))
@pytest.mark.parametrize("recipe", ("bf16", "fp8-current", "fp8-block", "mxfp8", "mxfp8-2d", "nvfp4"))
def test_every_recipe_compiled_and_recomputed(recipe, tp, tmp_path):
    """Losses and norms of one process that compiles and recomputes nothing."""
    args = ("--recipe", recipe, "--accumulate", 2, "--steps", 6)
    assert not here(*args, "--metrics", tmp_path / "one")
    log = tmp_path / "two"
    trained(*args, "--tp", tp, "--compile", "--checkpoint-activations", "--metrics", log, ranks=2)
    near(log, tmp_path / "one", 0.03)
    assert rows(log)[-1]["loss"] < rows(log)[0]["loss"] - 0.5


def tokenizer_of(text: str, path: Path) -> Any:
    """Makes a tokenizer with more tokens than bytes."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([text], trainer)
    made.save(str(path))
    return made


def test_a_tokenizer_and_checkpoints_that_are_kept(tmp_path):
    text = Path(__file__).read_text()
    (tmp_path / "text").write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"vocab_size": 300}))
    tokenizer = tokenizer_of(text, tmp_path / "tokenizer.json")
    args = ("--config", tmp_path / "config.json", "--data", tmp_path / "text", "--tokenizer",
            tmp_path / "tokenizer.json", "--seq", 32, "--save", tmp_path / "saved", "--save-every", 1)  # fmt: skip
    found = tokens_of(program.arguments([*map(str, args)]), Config.read(tmp_path / "config.json"))
    assert len(found.train) < 0.8 * len(text) and found.train.max() > 255
    assert tokenizer.decode(found.train) + tokenizer.decode(found.valid) == text
    assert not here(*args, "--steps", 4, "--keep", 2, "--metrics", tmp_path / "log")
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {"latest", "step-000003", "step-000004"}
    assert not here(*args, "--steps", 5, "--keep", 1, "--metrics", tmp_path / "log", "--resume")
    assert {p.name for p in (tmp_path / "saved").iterdir()} == {"latest", "step-000005"}
    assert [row["step"] for row in rows(tmp_path / "log")] == [*range(5)]
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert "outside of the config's vocab_size=256" in here(*args, "--steps", 5)


# What is said, with the ranks and the arguments.
WRONG: dict[str, tuple[int, tuple[Any, ...]]] = {
    "--batch 7 is no multiple of 1 batches": (1, ("--batch", 7, "--accumulate", 2)),
    "--batch 2 is no multiple of 4 batches": (8, ("--batch", 2, "--tp", 2)),
    "--tp 2 does not divide the 1 ranks": (1, ("--tp", 2)),
    "--tp 3 does not divide the 2 ranks": (2, ("--tp", 3)),
    "--tp 4 does not divide the config's num_key_value_heads=2": (4, ("--tp", 4)),
    "--tp 2 does not divide the config's num_attention_heads=3": (2, ("--tp", 2, "--config", "{three}")),
    "--tp 2 does not divide --seq 127": (2, ("--tp", 2, "--seq", 127)),
    "--resume needs --save": (1, ("--resume",)),
    "/nowhere: no such file": (1, ("--data", "/nowhere")),
    "--weights /nowhere: no such file": (1, ("--weights", "/nowhere")),
    "--tokenizer /nowhere: no such file": (1, ("--tokenizer", "/nowhere")),
    "/nowhere: cannot be read": (1, ("--config", "/nowhere")),
    "num_attention_heads missing": (1, ("--config", "{empty}")),
    "rope_scaling='x' is no JSON object": (1, ("--config", "{rope}")),
    "model.safetensors: no such file": (1, ("--weights", "{folder}")),
    "empty: cannot be read": (1, ("--weights", "{empty}")),
    "--tokenizer {empty}: cannot be read": (1, ("--tokenizer", "{empty}")),
    "no complete checkpoint": (1, ("--save", "{folder}", "--resume")),
    "--save {empty}: is no folder": (1, ("--save", "{empty}")),
    "--out {empty}: is no folder": (1, ("--out", "{empty}")),
    "Is a directory: '{folder}'": (1, ("--metrics", "{folder}")),
    "File exists: '{empty}'": (1, ("--metrics", "{empty}/log")),
    "positive integer": (1, ("--steps", 0)),
    "--lr nan is not positive": (1, ("--lr", "nan")),
    "--clip 0.0 is not positive": (1, ("--clip", 0)),
    "--peak-tflops -1.0 is not positive": (1, ("--peak-tflops", -1)),
    "--warmup and": (1, ("--weight-decay", -1)),
    "invalid choice: 'fp9'": (1, ("--recipe", "fp9")),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_arguments_are_named(said, tmp_path, capsys):
    (tmp_path / "empty").write_text("{}")
    (tmp_path / "three").write_text(json.dumps(TINY | {"num_attention_heads": 3, "num_key_value_heads": 1}))
    (tmp_path / "rope").write_text(json.dumps(TINY | {"rope_scaling": "x"}))
    paths = {"folder": tmp_path} | {name: tmp_path / name for name in ("empty", "three", "rope")}
    ranks, args = WRONG[said]
    refused = here(*(str(a).format(**paths) for a in args), "--steps", 1, ranks=ranks)
    text = f"{refused} {capsys.readouterr().err}"
    assert refused and said.format(**paths) in text and "Traceback" not in text
    assert refused.count("\n") == 0
    assert not torch.distributed.is_initialized()
