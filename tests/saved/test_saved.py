"""Files of an earlier version load and give the bits that they gave; `make` says which kinds of files these are."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import diptych.jax as dj
import diptych.torch as dt
from diptych.common import CheckpointWarning, MXFP8Quantizer
from diptych.lab import checkpoint, train
from diptych.lab.cli import main
from diptych.lab.replay.recorded import operations
from diptych.lab.replay.table import TABLE
from diptych.lab.traces import Trace
from oracle.hash import hash_bits
from saved.make import (
    BY_ORBAX,
    DELAYED,
    HELD,
    ROWS,
    STEPS,
    Model,
    N,
    bits_of,
    matrix,
    normal,
    one_step,
    program,
    quantizer_of,
    training,
    tree_of,
)

FOLDER = Path(__file__).parent / "3281d53"
TORCH, JAX, TRACES, TRAINING = (FOLDER / name for name in ("torch", "jax", "traces", "training"))


def load(name: str) -> Any:
    return torch.load(TORCH / name, weights_only=True)


def same(found: Any, want: Any) -> None:
    """Whether two trees of torch's tensors have the same keys and bits."""
    torch.testing.assert_close(found, want, rtol=0, atol=0)


def model_of(tensors: dict[str, torch.Tensor]) -> Model:
    model = Model(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        model.load_state_dict(tensors)
    return model


def held_weight(model: Model, name: str) -> dt.QuantizedParameter:
    weight = model.held[name].weight
    assert isinstance(weight, dt.QuantizedParameter)
    return weight


def read_safetensors(name: str) -> dict[str, torch.Tensor]:
    return pytest.importorskip("safetensors.torch").load_file(TORCH / name)


# --- torch ---


@pytest.mark.parametrize("read", (lambda: read_safetensors("plain.safetensors"), lambda: load("states.pt")["model"]),
                         ids=("safetensors", "torch.save"))  # fmt: skip
def test_weights_and_states(read):
    """Outputs and gradients depend on weights, delayed scales and random bits, on held weights in both directions."""
    same(model_of(read()).outputs(), load("outputs.pt"))


def test_quantized_tensors():
    """A tensor of its own, which is no parameter."""
    found, again = load("quantized.pt"), dt.quantize(normal(N, N), MXFP8Quantizer())
    assert type(found) is dt.QuantizedTensor and found.quantizer == again.quantizer
    for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv"):
        assert torch.equal(getattr(found, name).view(torch.uint8), getattr(again, name).view(torch.uint8))


def test_checkpoints_of_whole_runs():
    saved = load("states.pt")
    want, _ = model_of(saved["model"]).run()
    part, optimizer = Model(seed=1).run()
    assert dt.parallel.load(TORCH / "dcp", part, optimizer) == (3, {"tokens": 96})
    assert optimizer.state_dict()["state"]
    same(optimizer.state_dict(), saved["optimizer"])
    same(dt.plain_state_dict(part), dt.plain_state_dict(want))
    exported = read_safetensors("exported.safetensors")
    same(exported.pop("1.weight"), want[1].weight.dequantize())  # type: ignore[operator]
    same(exported, {name: want.state_dict()[name].detach() for name in ("0.weight", "0.bias", "1.bias")})


# --- JAX ---


def target(*names: str) -> dict[str, Any]:
    """Shapes, dtypes and quantizers of a tree."""
    tree = jax.eval_shape(tree_of, matrix())
    return {name: tree[name] for name in names or tree}


def assert_bits(tree: dict[str, Any], like: dict[str, Any]) -> None:
    assert jax.tree.structure(tree) == jax.tree.structure(like)
    want = np.load(JAX / "bits.npz")
    for name, bits in bits_of(tree).items():
        np.testing.assert_array_equal(bits, want[name])


def test_trees_by_flax_and_programs():
    serialization, like = pytest.importorskip("flax.serialization"), target()
    pytest.importorskip("diptych.jax.linen")  # registers the classes with flax
    tree = serialization.from_bytes(like, (JAX / "tree.msgpack").read_bytes())
    assert_bits(tree, like)
    exported = jax.export.deserialize(bytearray((JAX / "program.bin").read_bytes()))
    for f in (exported.call, jax.jit(program)):
        np.testing.assert_array_equal(np.asarray(f(tree, matrix())), np.load(JAX / "output.npy"))


def test_trees_by_orbax():
    ocp, like = pytest.importorskip("orbax.checkpoint"), target(*BY_ORBAX)
    with ocp.CheckpointManager(JAX / "orbax") as manager:
        about = manager.restore(1, args=ocp.args.Composite(quantizers=ocp.args.JsonRestore())).quantizers
        dj.check_quantizers(like, about)
        tree = manager.restore(1, args=ocp.args.Composite(tree=ocp.args.StandardRestore(like))).tree
    assert_bits(tree, like)


def test_torch_weights_in_jax():
    """A layer with its delayed scales, and held weights, from torch's safetensors."""
    model = model_of(load("states.pt")["model"])
    zeros = jnp.zeros((N, N), jnp.bfloat16)
    layer = {"weight": zeros, "bias": zeros[0], "states": dj.init_state(DELAYED)}
    held = {name: {"weight": dj.quantize(zeros, quantizer_of(recipe))} for name, recipe in HELD.items()}
    like = {"trained": {"fp8-delayed": {"0": layer}}, "held": held}
    tree = dj.load_torch(like, dj.read_safetensors(TORCH / "plain.safetensors"))
    layer = tree["trained"]["fp8-delayed"]["0"]
    x = jnp.asarray(normal(ROWS, N).float().numpy(), jnp.bfloat16)
    states = dj.update_state(layer["states"], DELAYED)  # torch's layer does this when its next step begins
    y = jax.jit(lambda p, s, x: dj.dense(x, p["weight"], p["bias"], recipe=DELAYED, state=s))(layer, states, x)
    pairs = [(y, one_step(model.trained["fp8-delayed"][0], DELAYED)[0])]  # type: ignore[index]
    pairs += [(dj.dequantize(tree["held"][name]["weight"]), held_weight(model, name).dequantize()) for name in HELD]
    for a, b in pairs:
        np.testing.assert_array_equal(np.asarray(a, np.float32), b.detach().float().numpy())


# --- the lab ---


@pytest.mark.parametrize("framework", ("torch", "jax"))
def test_traces(framework):
    """Values are those that were hashed, and operations have the same bits in the other framework."""
    folder = TRACES / framework
    step = Trace.open(folder).ranks[0].step(0)
    for o in step:
        assert o.values is not None and o.values.whole and o.record.hash is not None
        assert bytes.fromhex(o.record.hash) == hash_bits(o.values.tensor.bits).tobytes(), o.site.key
    own = [f for f in operations(step) if TABLE[f.op.kind].own]
    assert [f.op.kind for f in own].count("gemm") == 2
    for f in own:
        assert main(["replay", str(folder), next(iter(f.results.values())).site.key]) == 0


def test_recorded_steps_are_compared(tmp_path):
    assert main(["diff", str(TRACES / "torch"), str(TRACES / "jax"), "--json", str(tmp_path / "found")]) == 0
    rows = json.loads((tmp_path / "found").read_text())["rows"]
    assert len(rows) == 26 and {cell["verdict"] for row in rows for cell in row["cells"]} == {"same"}


def test_checkpoints_of_the_lab():
    frontend, job, data, settings = training()
    path, losses = TRAINING / checkpoint.FILE_NAME, np.load(TRAINING / "losses.npy")
    saved = checkpoint.load(path)
    trainer = frontend.trainer(job, saved.state.weights)
    trainer.restore(saved.state)
    again = trainer.state()
    assert again.step == STEPS
    for section in ("weights", "first", "second", "quantizing"):
        found, want = getattr(again, section), getattr(saved.state, section)
        assert found.keys() == want.keys() and found
        for name in want:
            np.testing.assert_array_equal(found[name], want[name])
    run = train.run(frontend, job, data, settings, train.Stretch(resume=path))
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)  # torch's own operations may round otherwise elsewhere
    np.testing.assert_array_equal(run.losses[:STEPS], losses[:STEPS])
