"""Trains a Llama in low precision with JAX, on one device or many; the twin of torch_llama.py.

    python examples/jax_llama.py
    python examples/jax_llama.py --cpu 4 --fsdp
    python examples/jax_llama.py --config Llama-3/config.json --weights Llama-3/ --fsdp --tp 2 \\
        --tokenizer Llama-3/tokenizer.json --data my_texts/ --checkpoint-activations

The devices form a mesh: --tp neighbours share each layer, the others share the batch (the axis "data"), and with --fsdp
that axis cuts weights and the optimizer's state too. The program is one jitted step; XLA partitions it. Weights, tokens
and windows are those of torch_llama.py, and so are what it reads and writes, except for checkpoints, which are orbax's
and can be resumed on any number of devices. With --distributed each process calls `jax.distributed.initialize`, which
finds Slurm's and Open MPI's variables, or JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
import diptych.jax.nnx as dnnx
from diptych.common import RECIPES, QuantizerRole
from diptych.common.errors import CheckpointError
from diptych.lab import data as texts
from llama import program
from llama.config import Config
from llama.jax_model import Llama, placed, write
from llama.program import positive, refuse
from llama.report import Report, host_gib, peak_tflops

ADAM = optax.scale_by_adam(b1=0.9, b2=0.95)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("--tp", type=positive, default=1, help="neighbouring devices that share each layer")
    add("--fsdp", action="store_true", help="the devices that share the batch share the weights, too")
    add("--cpu", type=positive, help="run on so many CPU devices; default: all devices that JAX finds")
    add("--distributed", action="store_true", help="one of several processes")
    return parser.parse_args(given)


def start(args: argparse.Namespace) -> None:
    """Chooses JAX's devices, before JAX looks for any."""
    if args.cpu is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu)
    if args.distributed:
        numbers = (os.environ.get(f"JAX_{name}") for name in ("NUM_PROCESSES", "PROCESS_ID"))
        processes, process = (None if n is None else int(n) for n in numbers)
        jax.distributed.initialize(num_processes=processes, process_id=process)


def mesh_of(args: argparse.Namespace) -> jax.sharding.Mesh:
    devices = jax.devices() if args.cpu is None else jax.devices("cpu")[: args.cpu * jax.process_count()]
    if len(devices) % args.tp:
        refuse(f"--tp {args.tp} does not divide the {len(devices)} devices")
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((len(devices) // args.tp, args.tp), ("data", "tp"), axis_types=auto, devices=devices)


def check(args: argparse.Namespace, config: Config, mesh: jax.sharding.Mesh) -> None:
    program.check(args, config, mesh.size, "devices")
    if (recipe := RECIPES.get(args.recipe)) is None or mesh.size == 1:
        return
    roles = (QuantizerRole(module="linear", tensor=t) for t in ("input", "weight", "grad_output"))
    block = max(16, *(q.format.block_cols for q in map(recipe.quantizer, roles) if q is not None))
    data, tp = mesh.shape["data"], mesh.shape["tp"]
    extents = {
        "tokens of a microbatch": (args.batch * args.seq // args.accumulate, data),
        "features of queries": (config.qkv_rows[0], tp),
        "features of queries, keys and values": (sum(config.qkv_rows), tp),
        "intermediate_size": (config.intermediate_size, tp),
        "hidden_size with --fsdp": (config.hidden_size, data if args.fsdp else 1),
    }
    for name, (extent, parts) in extents.items():
        if parts > 1 and extent % (parts * block):
            refuse(f"{name}: {extent} over {parts} devices are no whole blocks of {block}, which {args.recipe} needs")


def loss_of(diff: Any, graph: Any, rest: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the loss of windows, and the random bits of the next call. Float32 weights are stepped, bfloat16 ones
    computed with."""
    params, states = diff
    model = nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), states, rest, copy=True)
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    return loss, nnx.state(model, dnnx.RandomState)


def merged(one: Any, other: Any) -> Any:
    """The states of two microbatches, stacked over layers."""

    def merge(a: dj.ScaleState, b: dj.ScaleState) -> dj.ScaleState:
        return jax.vmap(dj.merge_states)(a, b)

    return jax.tree.map(merge, one, other, is_leaf=lambda x: isinstance(x, dj.ScaleState))


@functools.partial(jax.jit, static_argnames=("graph", "decay", "clip"), donate_argnames="run")
def train_step(run: dict[str, Any], tokens: jax.Array, lr: jax.Array, *, graph: Any, decay: float, clip: float) -> Any:
    """Returns the next `run`, the loss and the norm of the gradients. `tokens`: [microbatches, windows, T + 1]."""
    diff = run["params"], run["states"]
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, random), grads = gradient(diff, graph, run["random"], tokens[0])
    if (count := tokens.shape[0]) > 1:

        def more(carry: Any, part: jax.Array) -> tuple[Any, None]:
            loss, random, (params, states) = carry
            (other, random), (params2, states2) = gradient(diff, graph, random, part)
            return (loss + other, random, (jax.tree.map(jnp.add, params, params2), merged(states, states2))), None

        (loss, random, grads), _ = jax.lax.scan(more, (loss, random, grads), tokens[1:])
    params, states = grads
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(params))) / count
    scale = jnp.minimum(1, clip / (norm + 1e-6)) / count
    updates, adam = ADAM.update(jax.tree.map(lambda g: g * scale, params), run["adam"])
    new = jax.tree.map(lambda p, u: p - lr * (u + decay * p), run["params"], updates)
    model = nnx.merge(graph, new, run["states"], random, copy=True)
    dnnx.update_states(model, states)
    return (
        {"params": new, "states": nnx.state(model, dnnx.ScaleStates), "random": random, "adam": adam},
        loss / count,
        norm,
    )


class Checkpoints:
    """The folder --save, by orbax: a step's folder is written aside and renamed, so that it is complete if it exists.
    `identity`: what a resumed run must have in common with the one before."""

    def __init__(self, args: argparse.Namespace, identity: dict[str, Any]) -> None:
        self.args, self.identity = args, identity
        options = ocp.CheckpointManagerOptions(max_to_keep=args.keep, enable_async_checkpointing=False)
        self.manager = ocp.CheckpointManager(args.save.absolute(), options=options)
        self.latest = self.manager.latest_step()
        if self.latest is not None and not args.resume:
            refuse(f"--save {args.save}: holds a checkpoint of step {self.latest}, which --resume continues")

    def load(self, run: Any) -> tuple[int, Any]:
        """Returns the step to go on with, and the run as it was, placed as `run` is."""
        if (step := self.latest) is None:
            raise CheckpointError(f"{self.args.save}: holds no complete checkpoint")
        before = self._restored(step, "identity", ocp.args.JsonRestore())
        quantizers = before.pop("quantizers", None)
        program.check_resumed(self.args, before, self.identity, step)
        dj.check_quantizers(run, quantizers)  # orbax keeps arrays, and not what they stand for
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), run)
        return step, self._restored(step, "run", ocp.args.StandardRestore(target))

    def _restored(self, step: int, item: str, how: Any) -> Any:
        try:
            return self.manager.restore(step, args=ocp.args.Composite(**{item: how}))[item]
        except (KeyError, ValueError, OSError) as e:
            raise CheckpointError(f"{self.args.save}: the {item} of step {step} cannot be read: {e}") from e

    def save(self, step: int, run: Any) -> None:
        identity = ocp.args.JsonSave(self.identity | {"quantizers": dj.quantizers_of(run)})
        self.manager.save(step, args=ocp.args.Composite(run=ocp.args.StandardSave(run), identity=identity), force=True)


def memory(mesh: jax.sharding.Mesh) -> float:
    """The most memory so far in GiB: of a GPU, or the process's on the CPU."""
    found = mesh.local_devices[0].memory_stats() or {}
    return found["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in found else host_gib()


def made(
    args: argparse.Namespace, config: Config, whole: Callable[[str], np.ndarray], mesh: jax.sharding.Mesh
) -> tuple[Any, dict[str, Any]]:
    """Returns the model's graph, and what a step changes: parameters, states, random bits and Adam's moments."""
    everywhere, rows = (NamedSharding(mesh, P(*spec)) for spec in ((), ("data",)))
    model = Llama(
        config, RECIPES.get(args.recipe), placed(config, whole, mesh, args.fsdp), tp=args.tp, seed=args.seed,
        recompute=args.checkpoint_activations, place=rows if mesh.size > 1 else None,
    )  # fmt: skip
    graph, params, states, random = nnx.split(model, nnx.Param, dnnx.ScaleStates, ...)
    adam = ADAM.init(params)
    states, random, count = jax.device_put((states, random, adam.count), everywhere)
    return graph, {"params": params, "states": states, "random": random, "adam": adam._replace(count=count)}


def train(
    args: argparse.Namespace, config: Config, tokens: texts.ByteData, whole: Callable[[str], np.ndarray], count: int,
    mesh: jax.sharding.Mesh,
) -> None:  # fmt: skip
    """Makes and trains the model, on every process."""
    graph, run = made(args, config, whole, mesh)
    identity, first = program.identity(args, tokens) | {"recipe": args.recipe}, 0
    identity |= {f"the config's {k}": v for k, v in dataclasses.asdict(config).items()}
    checkpoints = None if args.save is None else Checkpoints(args, identity)
    if args.resume:
        assert checkpoints is not None  # `check` has seen it
        first, run = checkpoints.load(run)
    report = Report(args.metrics, first) if jax.process_index() == 0 else None
    kind, devices = mesh.devices.flat[0].device_kind, mesh.size
    if report is not None:
        print(f"{count:,} parameters, {args.recipe}, {devices} x {kind}, --tp {args.tp}{' --fsdp' * args.fsdp}")
        print(f"{len(tokens.train):,} tokens of {tokens.source}")
    peak = args.peak_tflops or peak_tflops(kind)
    windows = NamedSharding(mesh, P(None, "data"))
    for step in range(first, args.steps):
        begin = time.perf_counter()
        drawn = tokens.batch(args.seed, step, args.batch, args.seq).reshape(args.accumulate, -1, args.seq + 1)
        batch = jax.make_array_from_callback(drawn.shape, windows, lambda at, drawn=drawn: drawn[at])
        lr = np.float32(program.learning_rate(args, step))
        run, loss, norm = train_step(run, batch, lr, graph=graph, decay=args.weight_decay, clip=args.clip)
        loss, norm = float(loss), float(norm)  # waits for the devices
        if report is not None:
            seconds = time.perf_counter() - begin
            row = program.row_of(args, config, step, loss, norm, seconds, peak and devices * peak)
            report.step(row | {"memory_gib": memory(mesh)})
        if not math.isfinite(loss):
            refuse(f"the loss of step {step} is {loss}")
        if checkpoints is not None and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            checkpoints.save(step + 1, run)
    if report is not None:
        report.close()
    if checkpoints is not None:
        checkpoints.manager.close()
    if args.out is not None:
        write(args.out, run["params"], config, mesh)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    try:
        config = Config() if args.config is None else Config.read(args.config)
        start(args)
        mesh = mesh_of(args)
        check(args, config, mesh)
        tokens = program.tokens_of(args, config)
        whole, count = program.planned(args, config)
        train(args, config, tokens, whole, count, mesh)
    except (*program.NAMED, OSError) as e:
        raise SystemExit(f"jax_llama: {e}") from e


if __name__ == "__main__":
    main()
