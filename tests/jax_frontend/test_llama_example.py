"""examples/jax_llama.py: its model against transformers', its losses against torch_llama.py's, and resumed runs."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

pytest.importorskip("flax.nnx")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("safetensors")
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_frontend import meshes
from jax_frontend.llama_runs import begun, here, killed, losses, program, tensors
from llama_logs import TINY, near, rows

from llama import weights  # isort: skip  # llama_runs makes it found
from llama.config import Config  # isort: skip
from llama.jax_model import Llama, placed  # isort: skip

pytestmark = pytest.mark.sampled
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path) -> tuple[Any, ...]:
    """Arguments of a small run."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return ("--config", tmp_path / "config.json", "--batch", 8, "--seq", 32, "--save-every", 2)


def ended(*args: Any) -> str:
    """Runs the program in a process of its own. Returns what it printed if it failed, or ""."""
    with begun(*args) as job:
        said = job.communicate(timeout=300)[0]
    return said if job.returncode else ""


def mesh(*args: Any) -> jax.sharding.Mesh:
    return program.mesh_of(program.arguments([*map(str, args)]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's, of a file that is damaged
def test_a_killed_run_resumes_bit_for_bit(tiny, tmp_path):
    """A run that stops after its checkpoint of step 2 and is resumed has the losses of one that did not stop."""
    common = (*tiny, "--cpu", 1, "--recipe", "fp8-delayed")
    args = (*common, "--steps", 4, "--save", tmp_path / "a")
    assert not here(*args, "--metrics", tmp_path / "log", "--out", tmp_path / "whole")
    shutil.rmtree(tmp_path / "a/4")
    assert "holds a checkpoint of step 2, which --resume continues" in here(*args)
    assert not here(*args, "--resume", "--metrics", tmp_path / "again", "--out", tmp_path / "out")
    assert losses(tmp_path / "again") == losses(tmp_path / "log")[2:]
    one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)
    for changed, said in (
        (("--recipe", "bf16"), "recipe was fp8-delayed, is bf16"),
        (("--seq", 16), "seq was 32, is 16"),
        (("--steps", 3), "the checkpoint is of step 4, and --steps is 3"),
    ):
        assert said in here(*args, *changed, "--resume")
    for file in (tmp_path / "a/4/run").rglob("*"):
        if file.is_file() and "ocdbt" not in file.name and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:10])
    assert "the run of step 4 cannot be read" in here(*args, "--resume")
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"rms_norm_eps": 1e-6}))
    assert "the config's rms_norm_eps was 1e-05, is 1e-06" in here(*args, "--resume")


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_time_resumes(tiny, tmp_path):
    """By SIGKILL, in a process of its own."""
    common = (*tiny, "--cpu", 2, "--fsdp", "--recipe", "mxfp8", "--steps", 40)
    assert not ended(*common, "--metrics", tmp_path / "log")
    killed(tmp_path / "b.jsonl", 5, *common, "--save", tmp_path / "b")
    assert not ended(*common, "--save", tmp_path / "b", "--resume", "--metrics", tmp_path / "b.jsonl")
    assert losses(tmp_path / "b.jsonl") == losses(tmp_path / "log")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("fp8-delayed", "mxfp8"))
def test_other_meshes_continue_a_run(recipe, tiny, tmp_path):
    """One device, then four, then two: near what one device does, whose sums differ."""
    common = (*tiny, "--recipe", recipe)
    with mock.patch("llama.program.learning_rate", lambda args, step: 1e-3):  # which --steps would change
        assert not here(*common, "--cpu", 1, "--steps", 6, "--metrics", tmp_path / "one")
        saved = ("--save", tmp_path / "a", "--metrics", tmp_path / "log")
        assert not here(*common, *saved, "--cpu", 1, "--steps", 2)
        assert not here(*common, *saved, "--cpu", 4, "--fsdp", "--tp", 2, "--steps", 4, "--resume")
        assert not here(*common, *saved, "--cpu", 2, "--tp", 2, "--steps", 6, "--resume")
    near(tmp_path / "log", tmp_path / "one", 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("bf16", "fp8-delayed", "fp8-current", "mxfp8", "fp8-block"))
@pytest.mark.parametrize("where", ("--cpu 2 --fsdp", "--cpu 4 --tp 2", "--cpu 4 --fsdp --tp 2"))
def test_several_devices_are_near_one(recipe, where, tmp_path):
    """With microbatches, and blocks that backward computes again."""
    args = ("--recipe", recipe, "--steps", 3, "--accumulate", 2)
    assert not here(*args, "--cpu", 1, "--metrics", tmp_path / "one")
    assert not here(*args, *where.split(), "--checkpoint-activations", "--metrics", tmp_path / "more")
    near(tmp_path / "more", tmp_path / "one", 0.01)


# The programs draw other random bits for NVFP4, and torch's gathers scale weights by their current amax.
TORCH = {"bf16": 0.002, "fp8-current": 0.002, "fp8-delayed": 0.01, "mxfp8": 0.01, "fp8-block": 0.01, "nvfp4": 0.02}


@pytest.mark.parametrize("recipe", TORCH)
def test_losses_are_those_of_torch(recipe, tiny, tmp_path):
    """With the same weights, drawn from the seed, and the same windows."""
    from torch_frontend import llama_runs

    (tmp_path / "config.json").write_text(json.dumps(TINY | {"hidden_size": 128}))  # whole blocks of 128
    common = (*tiny, "--recipe", recipe, "--steps", 4)
    assert not here(*common, "--cpu", 1, "--metrics", tmp_path / "jax")
    assert not llama_runs.here(*common, "--metrics", tmp_path / "torch")
    near(tmp_path / "jax", tmp_path / "torch", TORCH[recipe])
    assert rows(tmp_path / "jax")[-1]["loss"] < rows(tmp_path / "jax")[0]["loss"] - 0.1
    assert all(row.keys() == {*rows(tmp_path / "torch")[0]} for row in rows(tmp_path / "jax"))


@pytest.mark.parametrize("given", [{}, {"rope_scaling": LLAMA3}, {"tie_word_embeddings": True}], ids=str)
def test_the_model_is_transformers_llama(given, tmp_path):
    """Their weights, read from a file, give their logits."""
    hf, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    theirs = hf.LlamaForCausalLM(hf.LlamaConfig(**TINY, **given)).eval()
    theirs.save_pretrained(tmp_path)
    config = Config.read(tmp_path / "config.json")
    whole = weights.Files(tmp_path, config).whole
    model = Llama(config, None, placed(config, whole, mesh("--cpu", 1), False))
    tokens = torch.randint(256, (2, 200))
    with torch.no_grad():
        want = theirs(tokens).logits.numpy()
    np.testing.assert_allclose(np.asarray(model(tokens.numpy())), want, rtol=1e-4, atol=1e-4)


def test_what_is_written_can_be_read(tmp_path):
    """Weights come back from a mesh that cuts all of them, and transformers reads them."""
    args, config = program.arguments(["--cpu", "4", "--fsdp", "--tp", "2", "--recipe", "bf16"]), Config.of(TINY)
    drawn, mesh = weights.drawn(config, 3), program.mesh_of(args)
    program.write(tmp_path, program.made(args, config, drawn, mesh)[1]["params"], config, mesh)
    whole = weights.Files(tmp_path, Config.read(tmp_path / "config.json")).whole
    for name in weights.shapes(config):
        assert np.array_equal(whole(name), drawn(name)), name
    hf = pytest.importorskip("transformers")
    theirs = hf.LlamaForCausalLM.from_pretrained(tmp_path)
    assert np.array_equal(theirs.lm_head.weight.detach().numpy(), drawn("head.weight"))
    theirs.bfloat16().save_pretrained(tmp_path)  # as most published weights are
    short = weights.Files(tmp_path, Config.read(tmp_path / "config.json")).whole("head.weight")
    assert short.dtype == "bfloat16" and np.array_equal(short, drawn("head.weight").astype(short.dtype))


def test_no_device_holds_more_than_its_part(tmp_path):
    args = program.arguments(["--cpu", "8", "--fsdp", "--tp", "2"])
    config = Config.of(TINY)
    _, run = program.made(args, config, weights.drawn(config, 0), program.mesh_of(args))
    for held in (run["params"], run["adam"].mu, run["adam"].nu):
        for x in (x for x in jax.tree.leaves(held) if x.ndim > 2):
            assert x.addressable_shards[0].data.size * 8 == x.size


def test_fsdp_gathers_weights_as_bytes():
    """A step gathers the blocks' weights as payloads and scales alone, and exchanges their gradients in bfloat16."""
    args = program.arguments(["--cpu", "4", "--fsdp", "--recipe", "mxfp8"])
    config, mesh = Config(vocab_size=320), program.mesh_of(args)
    graph, run = program.made(args, config, weights.drawn(config, 0), mesh)
    tokens = jax.device_put(np.zeros((1, 4, 33), np.int32), NamedSharding(mesh, P(None, "data")))
    given = {"graph": graph, "decay": 0.1, "clip": 1.0}
    text = program.train_step.lower(run, tokens, np.float32(1), **given).compile().as_text()
    gathered = set(re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", text))
    shapes = {
        ",".join(map(str, s)) for n, s in weights.shapes(config).items() if n.startswith("blocks") and len(s) == 2
    }
    assert len(shapes) == 4 and {size for dtype, size in gathered if dtype == "u8"} >= shapes
    assert not {size for dtype, size in gathered if dtype != "u8"} & shapes
    cut = [re.findall(r"u16\[1,(\d+),(\d+)\]", results) for results in re.findall(r"= \((.*?)\) all-to-all\(", text)]
    exchanged = sorted(math.prod(map(int, parts[0])) * len(parts) for parts in cut if parts)
    assert exchanged == sorted(math.prod(map(int, shape.split(","))) for shape in shapes)
    assert "reduce-scatter" not in meshes.counted(text)


# What is said, with the arguments.
WRONG: dict[str, tuple[Any, ...]] = {
    "--tp 3 does not divide the 4 devices": ("--cpu", 4, "--tp", 3),
    "--tp 4 does not divide the config's num_key_value_heads=2": ("--cpu", 4, "--tp", 4),
    "--batch 6 is no multiple of 4 batches": ("--cpu", 4, "--batch", 6),
    "--resume needs --save": ("--cpu", 1, "--resume"),
    "no complete checkpoint": ("--cpu", 1, "--save", "{folder}", "--resume"),
    "tokens of a microbatch: 256 over 4 devices are no whole blocks of 128": ("--cpu", 4, "--recipe", "fp8-block"),
    "hidden_size with --fsdp: 64 over 4 devices are no whole blocks of 32": ("--cpu", 4, "--fsdp", "--recipe", "mxfp8"),
    "invalid choice: 'fp9'": ("--recipe", "fp9"),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_arguments_are_named(said, tiny, tmp_path, capsys):
    refused = here(*tiny, "--steps", 1, *(str(a).format(folder=tmp_path / "none") for a in WRONG[said]))
    text = f"{refused} {capsys.readouterr().err}"
    assert refused and said in text and "Traceback" not in text


def two_processes(*args: Any) -> None:
    """Runs the program in two processes, by jax.distributed, with two devices each."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
    args = (*args, "--cpu", 2, "--distributed")
    jobs = [begun(*args, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES="2", JAX_PROCESS_ID=str(i)) for i in (0, 1)]
    for job in jobs:
        said = job.communicate(timeout=300)[0]
        assert job.returncode == 0, said


@pytest.mark.slow
def test_two_processes_are_one_mesh(tiny, tmp_path):
    """The bits of one process with four devices, also when they go on after the checkpoint of step 2."""
    common = (*tiny, "--recipe", "fp8-current", "--fsdp", "--steps", 4)
    assert not ended(*common, "--cpu", 4, "--metrics", tmp_path / "one", "--out", tmp_path / "a")
    args = (*common, "--metrics", tmp_path / "two", "--save", tmp_path / "saved")
    two_processes(*args)
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    shutil.rmtree(tmp_path / "saved/4")
    two_processes(*args, "--resume", "--out", tmp_path / "b")
    assert losses(tmp_path / "two") == losses(tmp_path / "one")
    one, two = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert one.keys() == two.keys() and all(np.array_equal(one[n], two[n]) for n in one)
