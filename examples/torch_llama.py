"""Trains a Llama in low precision, on one process or many.

    python examples/torch_llama.py
    torchrun --nproc-per-node 2 examples/torch_llama.py --recipe mxfp8 --steps 100 --save runs/llama --out runs/model
    torchrun --nproc-per-node 8 examples/torch_llama.py --config Llama-3/config.json --weights Llama-3/ --tp 2 \\
        --tokenizer Llama-3/tokenizer.json --data my_texts/ --compile --checkpoint-activations

Weights are sharded by FSDP2, which gathers them in the recipe's format. With --tp so many neighbouring ranks share each
layer and read the same tokens, and FSDP2 shards over the others. Without --data it learns the source of
Python's standard library, and without --tokenizer bytes: nothing is downloaded. The window of each step depends on the
seed and the step alone, and ranks divide it: a resumed run sees what an uninterrupted one sees, on any number of ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import diptych.torch as dt
from diptych.common import RECIPES
from diptych.lab import data as texts
from llama import program, torch_parallel
from llama.config import Config
from llama.program import positive, refuse
from llama.report import Report, host_gib, peak_tflops
from llama.torch_model import Llama, fill, write


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = program.parser(__doc__)
    add = parser.add_argument
    add("--tp", type=positive, default=1, help="neighbouring ranks that share each layer")
    add("--no-sequence-parallel", action="store_true", help="ranks that share layers do not share the sequence")
    add("--compile", action="store_true")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(given)


def check(args: argparse.Namespace, config: Config, ranks: int) -> None:
    program.check(args, config, ranks, "ranks")
    if args.seq % args.tp and not args.no_sequence_parallel:
        refuse(f"--tp {args.tp} does not divide --seq {args.seq}; --no-sequence-parallel needs no multiple")
    if args.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch finds no GPU")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and local > torch.cuda.device_count():
        refuse(f"{local} ranks here, and {torch.cuda.device_count()} GPUs")


def start(args: argparse.Namespace) -> None:
    """Makes the process group: torchrun's, or one of this process alone, so that all that follows is the same."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def sharded(
    args: argparse.Namespace, config: Config, whole: Callable[[str], np.ndarray], recipe: Any, mesh: Any
) -> tuple[Any, dict[str, torch_parallel.Cut]]:
    """Returns the model with this rank's part of each weight, and which of them the tp dimension of `mesh` cuts. It is
    made on meta, so that no rank ever holds all of it."""
    group = mesh.get_group("tp") if args.tp > 1 else None
    with torch.device("meta"):
        model: Any = Llama(config, args.checkpoint_activations, group, not args.no_sequence_parallel)
    cut = torch_parallel.cuts(model)
    # Float32 weights are stepped, bfloat16 ones computed with; the angles of rotary embeddings stay in float32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if args.compile:  # the inner part: hooks of fully_shard and checkpoints stay outside of graphs
            block.run = torch.compile(block.run, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    model.frequencies.copy_(torch.from_numpy(config.frequencies()))
    fill(model, whole, cut)
    if recipe is not None:
        dt.parallel.prepare(model, mesh["dp"], recipe, recompute=args.checkpoint_activations)
    # Of stochastic rounding: ranks that share a layer have one seed, and data-parallel ones their own.
    dt.seed_rng(model, (args.seed << 20) + mesh["dp"].get_local_rank())
    return model, cut


def loss_of(args: argparse.Namespace, model: Any, recipe: Any, batch: torch.Tensor) -> torch.Tensor:
    """Returns the loss of this rank's windows, and leaves the gradients, of all windows, in the model."""
    loss = torch.zeros((), device=batch.device)
    for i, tokens in enumerate(batch.chunk(args.accumulate)):
        model.set_requires_gradient_sync(i == args.accumulate - 1)
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(tokens[:, :-1])
        part = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
        part.backward()
        loss += part.detach()
    return loss


def memory(device: torch.device) -> float:
    """The most memory so far in GiB: what torch allocated on the GPU, or the process's on the CPU."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else host_gib()


def train(
    args: argparse.Namespace, config: Config, tokens: texts.ByteData, whole: Callable[[str], np.ndarray], count: int
) -> None:
    """Makes and trains the model, on every rank of the process group."""
    ranks, recipe = dist.get_world_size(), RECIPES.get(args.recipe)
    mesh = init_device_mesh(args.device, (ranks // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    model, cut = sharded(args, config, whole, recipe, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    run, first = program.identity(args, tokens), 0
    if args.resume:
        first, before = dt.parallel.load(args.save, model, optimizer)
        program.check_resumed(args, before, run, first)
    report = Report(args.metrics, first) if dist.get_rank() == 0 else None
    if report is not None:
        print(f"{count:,} parameters, {args.recipe}, {ranks} x {device.type}, --tp {args.tp}")
        print(f"{len(tokens.train):,} tokens of {tokens.source}")
    peak = args.peak_tflops or peak_tflops(torch.cuda.get_device_name(device) if args.device == "cuda" else "CPU")
    for step in range(first, args.steps):
        begin = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = program.learning_rate(args, step)
        windows = np.split(tokens.batch(args.seed, step, args.batch, args.seq), mesh["dp"].size())
        own = torch.from_numpy(windows[mesh.get_local_rank("dp")]).long().to(device)
        part = loss_of(args, model, recipe, own) / mesh["dp"].size()
        norm = torch_parallel.clip(model, cut, mesh, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(part, group=mesh.get_group("dp"))
        loss, norm = torch.stack((part, norm)).tolist()  # waits for the device
        if report is not None:
            seconds = time.perf_counter() - begin
            row = program.row_of(args, config, step, loss, norm, seconds, peak and ranks * peak)
            report.step(row | {"memory_gib": memory(device)})
        if not math.isfinite(loss):
            refuse(f"the loss of step {step} is {loss}")
        if args.save is not None and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            dt.parallel.save(args.save, model, optimizer, step=step + 1, extra=run, keep=args.keep)
    if report is not None:
        report.close()
    if args.out is not None:
        write(args.out, model, cut)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    try:
        config = Config() if args.config is None else Config.read(args.config)
        check(args, config, int(os.environ.get("WORLD_SIZE", 1)))
        tokens = program.tokens_of(args, config)
        whole, count = program.planned(args, config)
        start(args)
        try:
            train(args, config, tokens, whole, count)
        finally:
            dist.destroy_process_group()
    except (*program.NAMED, OSError) as e:
        raise SystemExit(f"torch_llama: {e}") from e


if __name__ == "__main__":
    main()
