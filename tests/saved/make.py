"""Writes files of the kinds that users keep on disk, with the installed diptych: `python tests/saved/make.py FOLDER`.

The folder 3281d53 beside this file was written by the code of that commit (its Python and a built core on PYTHONPATH),
and test_saved.py reads it with the code as it is now. These kinds of files stay readable: state dicts as safetensors
and by `torch.save`, quantized tensors, checkpoints of `dt.parallel.save` and its exports, JAX's trees by orbax and by
flax, programs of `jax.export`, traces of the lab and checkpoints of `diptych train`. Whole modules that were pickled
are not promised: a pickle names private modules, classes and attributes, which may change in any version.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import torch

import diptych.jax as dj
import diptych.jax.lab
import diptych.torch as dt
import diptych.torch.lab
from diptych.common import RECIPES, DelayedScaling, MXFP8Quantizer, Quantizer, Recipe
from diptych.lab import checkpoint, train
from diptych.lab.data import ByteData
from diptych.lab.frontend import Frontend, require
from diptych.lab.job import Job, ModelConfig, OptimConfig

ROWS, N = 16, 32
DELAYED = DelayedScaling(amax_history_len=4)
TRAINED: dict[str, Recipe] = {"fp8-delayed": DELAYED, "nvfp4": RECIPES["nvfp4"]}  # they keep states between steps
HELD = {name: RECIPES[name] for name in ("fp8-current", "fp8-block", "mxfp8", "nvfp4")}
BY_ORBAX = ("fp8-block", "stack", "states", "random")  # which writes several files
STEPS = 2  # of the lab's training, before the checkpoint


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32)).bfloat16()


# --- torch ---


class Model(torch.nn.Module):
    """Modules that trained by recipes with states, and modules whose weights are held quantized."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.trained, self.held = torch.nn.ModuleDict(), torch.nn.ModuleDict()
        for name in TRAINED:
            self.trained[name] = torch.nn.Sequential(dt.Linear(N, N, dtype=torch.bfloat16))
        self.trained["fp8-delayed"].append(dt.LayerNormMLP(N, N, dtype=torch.bfloat16))  # type: ignore[operator]
        for name, recipe in HELD.items():
            with dt.quantized_model_init(recipe=recipe):
                self.held[name] = dt.Linear(N, N, dtype=torch.bfloat16)
        with dt.quantized_model_init(recipe=HELD["mxfp8"]):
            self.stack = dt.GroupedLinear(2, N, N, dtype=torch.bfloat16)

    def outputs(self) -> dict[str, list[torch.Tensor]]:
        """Each part's output of one step and the gradient of its input. Delayed scales and random bits go on."""
        found = {f"trained {name}": one_step(net, TRAINED[name]) for name, net in self.trained.items()}
        found |= {f"held {name}": one_step(layer, HELD[name]) for name, layer in self.held.items()}
        return found | {"stack": one_step(self.stack, HELD["mxfp8"], [ROWS // 2, ROWS // 2])}

    def run(self) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Returns a part of the model and its optimizer, for checkpoints of a whole run."""
        layer = self.trained["fp8-delayed"][0]  # type: ignore[index]
        return torch.nn.ModuleList([layer, self.held["mxfp8"]]), torch.optim.SGD(layer.parameters(), 0.01, 0.5)


def one_step(layer: torch.nn.Module, recipe: Recipe, *args: Any) -> list[torch.Tensor]:
    x = normal(ROWS, N).requires_grad_()
    with dt.autocast(recipe=recipe):
        y = layer(x, *args)
    y.backward(normal(ROWS, N, seed=1))
    assert x.grad is not None
    return [y.detach(), x.grad]


def save_torch(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    model = Model(seed=0)
    part, optimizer = model.run()
    model.outputs()
    optimizer.step()
    model.zero_grad()
    save_file(dt.plain_state_dict(model), folder / "plain.safetensors")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "states.pt")
    torch.save(dt.quantize(normal(N, N), MXFP8Quantizer()), folder / "quantized.pt")
    dt.parallel.save(folder / "dcp", part, optimizer, step=3, extra={"tokens": 96})
    dt.parallel.export(folder / "exported.safetensors", part)
    torch.save(model.outputs(), folder / "outputs.pt")


# --- JAX ---


def matrix() -> jax.Array:
    return jnp.asarray(normal(N, N).float().numpy())


def quantizer_of(recipe: Recipe) -> Quantizer:
    quantizer = dj.kernel_quantizer(recipe)
    assert quantizer is not None
    return quantizer


def tree_of(x: jax.Array) -> dict[str, Any]:
    """Kernels in the formats of HELD, a stack, states of delayed scaling after one step, random bits."""
    tree: dict[str, Any] = {name: dj.quantize(x, quantizer_of(recipe)) for name, recipe in HELD.items()}
    states = dj.init_state(DELAYED)
    new = jax.jit(jax.grad(lambda s: dj.dense(x, x, recipe=DELAYED, state=s).sum()))(states)
    states = dj.update_state(dj.overwrite_states(states, new), DELAYED)
    stack = dj.quantize_stack(jnp.stack((x, -x)), quantizer_of(HELD["mxfp8"]))
    return tree | {"stack": stack, "states": states, "random": dj.rng_state(3)}


def bits_of(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the bytes of the arrays below each name, one array after the other."""
    bits = lambda below: [np.asarray(a).reshape(-1).view(np.uint8) for a in jax.tree.leaves(below)]  # noqa: E731
    return {name: np.concatenate(bits(below)) for name, below in tree.items()}


def program(tree: dict[str, Any], x: jax.Array) -> jax.Array:
    y = dj.dense(x, tree["mxfp8"], recipe=HELD["mxfp8"])
    return dj.dense(y, x, recipe=DELAYED, state=tree["states"])


def save_jax(folder: Path) -> None:
    import flax.serialization
    import orbax.checkpoint as ocp

    import diptych.jax.linen  # noqa: F401  # registers the classes with flax

    folder.mkdir()
    x = matrix()
    tree = tree_of(x)
    (folder / "tree.msgpack").write_bytes(flax.serialization.to_bytes(tree))
    with ocp.CheckpointManager((folder / "orbax").resolve()) as manager:
        some = {name: tree[name] for name in BY_ORBAX}
        about = ocp.args.JsonSave(dj.quantizers_of(some))
        manager.save(1, args=ocp.args.Composite(tree=ocp.args.StandardSave(some), quantizers=about))
    exported = jax.export.export(jax.jit(program), disabled_checks=dj.export_safety_checks())(tree, x)
    (folder / "program.bin").write_bytes(exported.serialize())
    np.savez(folder / "bits.npz", **bits_of(tree))  # type: ignore[arg-type]
    np.save(folder / "output.npy", np.asarray(jax.jit(program)(tree, x)))


# --- the lab ---


def save_traces(folder: Path) -> None:
    """Steps of one layer, captured in both frameworks."""
    x, recipe = normal(16, 16).float(), RECIPES["fp8-current"]
    net = torch.nn.Sequential(dt.Linear(16, 16, bias=False))
    net.load_state_dict({"0.weight": x})
    with diptych.torch.lab.capture(net, out=folder / "torch", values="full") as run, dt.autocast(recipe=recipe):
        net(x).sum().backward()
        run.step()

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return dj.dense(x, params["weight"], recipe=recipe).sum()

    x = jnp.asarray(x.numpy())
    with diptych.jax.lab.capture(jax.jit(jax.grad(loss)), out=folder / "jax", values="full") as step:
        step({"weight": x}, x)


def training() -> tuple[Frontend, Job, ByteData, train.Settings]:
    """A run of `diptych train`, with data of its own."""
    model = ModelConfig(width=4, layers=1, heads=1, seq=8)
    optim = OptimConfig(steps=STEPS + 1, warmup=1)
    job = Job(model=model, optim=optim, recipe=DELAYED, compile=False, threads=1)
    text = np.random.default_rng(0).integers(0, 256, 256).astype(np.uint8)
    data = ByteData(text, text[:64], "random bytes", 1)
    return require("torch", "cpu"), job, data, train.Settings(batch=2, eval_batches=1)


def save_training(folder: Path) -> None:
    run = training()
    file = folder / checkpoint.FILE_NAME
    train.run(*run, train.Stretch(checkpoint=file, stop_after=STEPS))
    rest = train.run(*run, train.Stretch(resume=file))
    np.save(folder / "losses.npy", rest.losses)


def save(folder: Path) -> None:
    folder.mkdir(parents=True)
    save_torch(folder / "torch")
    save_jax(folder / "jax")
    save_traces(folder / "traces")
    (folder / "training").mkdir()
    save_training(folder / "training")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/")
    save(Path(sys.argv[1]))
