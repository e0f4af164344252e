"""examples/torch_llama.py: its model against transformers', its weights' way there and back, and runs by torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_frontend.ranks import needs_gloo

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = str(EXAMPLES / "torch_llama.py")
sys.path.append(str(EXAMPLES))
from llama import weights  # noqa: E402
from llama.model import Config, ConfigError, Llama  # noqa: E402

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_theta": 1000.0,
    "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
ENVIRONMENT["OMP_NUM_THREADS"] = "1"


def command(*args: Any, ranks: int = 0) -> list[str]:
    """The program's command; `ranks`: 0 is without torchrun."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*(run if ranks else [sys.executable]), PROGRAM, *map(str, args), "--device", "cpu"]


def call(*args: Any, ranks: int = 0) -> subprocess.CompletedProcess:
    return subprocess.run(command(*args, ranks=ranks), env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def killed(log: Path, lines: int, *args: Any) -> None:
    """Runs two ranks, and kills all processes when `log` has so many lines."""
    with subprocess.Popen(
        command(*args, "--metrics", log, ranks=2), env=ENVIRONMENT, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as job:  # fmt: skip
        until = time.monotonic() + 300
        while not (log.exists() and log.read_text().count("\n") >= lines):
            assert job.poll() is None and time.monotonic() < until, "the run ended before it was killed"
            time.sleep(0.01)
        ranks = [int(p) for p in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
        for process in (job.pid, *ranks):  # torchrun's workers have sessions of their own
            os.kill(process, signal.SIGKILL)


def trained(*args: Any, ranks: int = 0) -> subprocess.CompletedProcess:
    done = call(*args, ranks=ranks)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def rows(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return weights.safetensors().torch.load_file(folder / "model.safetensors")


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
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weights.fill(model, weights.Files(tmp_path, config, shapes).whole)
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
@pytest.mark.parametrize("recipe", ("bf16", "fp8-current", "fp8-block", "mxfp8", "mxfp8-2d", "nvfp4"))
def test_every_recipe_compiled_and_recomputed(recipe, tmp_path):
    log = tmp_path / "log.jsonl"
    trained("--recipe", recipe, "--compile", "--checkpoint-activations", "--accumulate", 2, "--metrics", log, ranks=2)
    assert rows(log)[-1]["loss"] < rows(log)[0]["loss"] - 0.5


WRONG = {
    "--batch 7 is no multiple of 1 ranks": ("--batch", 7, "--accumulate", 2),
    "--tp 2 is not supported": ("--tp", 2),
    "--resume needs --save": ("--resume",),
    "/nowhere: no such file": ("--data", "/nowhere"),
    "num_attention_heads missing": ("--config", "{empty}"),
    "model.safetensors: no such file": ("--weights", "{folder}"),
    "cannot be read": ("--weights", "{empty}"),
    "no complete checkpoint": ("--save", "{folder}", "--resume"),
    "positive integer": ("--steps", 0),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_arguments_are_named(said, tmp_path, monkeypatch, capsys):
    import runpy

    (tmp_path / "empty").write_text("{}")
    args = [str(a).format(empty=tmp_path / "empty", folder=tmp_path) for a in WRONG[said]]
    monkeypatch.setattr(sys, "argv", [PROGRAM, *args, "--device", "cpu"])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(PROGRAM, run_name="__main__")
    text = f"{stopped.value} {capsys.readouterr().err}"
    assert said in text and "Traceback" not in text
    assert not torch.distributed.is_initialized()
