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
import dataclasses
import math
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

import diptych.torch as dt
from diptych.common import RECIPES
from diptych.common.errors import CheckpointError, ShapeError, UnsupportedError
from diptych.lab import data as texts
from llama import parallel, weights
from llama.model import Config, ConfigError, Llama
from llama.report import Report, peak_gib, peak_tflops

NAMED = (ConfigError, weights.WeightsError, texts.DataError, CheckpointError, ShapeError, UnsupportedError)


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


positive.__name__ = "positive integer"  # argparse's error says it


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, help="a Hugging Face config.json; default: a small model")
    add("--weights", type=Path, help="safetensors file or folder to begin with; default: random weights")
    add("--out", type=Path, help="folder for model.safetensors and config.json at the end")
    add("--data", type=Path, help="a text file or folder; default: the source of Python's standard library")
    add("--tokenizer", type=Path, help="a Hugging Face tokenizer.json; default: bytes")
    add("--recipe", choices=("bf16", *RECIPES), default="fp8-current")
    add("--tp", type=positive, default=1, help="neighbouring ranks that share each layer")
    add("--no-sequence-parallel", action="store_true", help="ranks that share layers do not share the sequence")
    add("--compile", action="store_true")
    add("--checkpoint-activations", action="store_true", help="backward computes blocks again")
    add("--steps", type=positive, default=20)
    add("--batch", type=positive, default=8, help="windows a step, over all ranks")
    add("--accumulate", type=positive, default=1, help="microbatches a step")
    add("--seq", type=positive, default=128, help="tokens of a window")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=int, default=5, help="steps; then a cosine to a tenth")
    add("--weight-decay", type=float, default=0.1)
    add("--clip", type=float, default=1.0, help="largest norm of the gradients")
    add("--seed", type=int, default=0)
    add("--save", type=Path, help="folder for checkpoints")
    add("--save-every", type=positive, default=100, help="steps; there is one at the end, too")
    add("--keep", type=positive, help="so many checkpoints; default: all")
    add("--resume", action="store_true", help="continue from the latest checkpoint in --save")
    add("--metrics", type=Path, help="file for a JSON line a step")  # torchrun takes --log for its own
    add("--peak-tflops", type=float, help="of the device, for MFU; default: by its name, in bfloat16")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(given)


def refuse(text: str) -> NoReturn:
    raise SystemExit(f"torch_llama: {text}")


def check(args: argparse.Namespace, config: Config, ranks: int) -> None:
    """Finds what is wrong on every rank alike, before any of them waits for another."""
    if ranks % args.tp:
        refuse(f"--tp {args.tp} does not divide the {ranks} ranks")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (extent := getattr(config, name)) % args.tp:
            refuse(f"--tp {args.tp} does not divide the config's {name}={extent}")
    if args.seq % args.tp and not args.no_sequence_parallel:
        refuse(f"--tp {args.tp} does not divide --seq {args.seq}; --no-sequence-parallel needs no multiple")
    if args.batch % (ranks // args.tp * args.accumulate):
        refuse(f"--batch {args.batch} is no multiple of {ranks // args.tp} batches x --accumulate {args.accumulate}")
    if args.resume and args.save is None:
        refuse("--resume needs --save, the folder of the checkpoints")
    if args.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch finds no GPU")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and local > torch.cuda.device_count():
        refuse(f"{local} ranks here, and {torch.cuda.device_count()} GPUs")
    for name in ("lr", "clip", "peak_tflops"):
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf:
            refuse(f"--{name.replace('_', '-')} {value} is not positive and finite")
    if args.warmup < 0 or not 0 <= args.weight_decay < math.inf or not 0 <= args.seed < 2**32:
        refuse("--warmup and --weight-decay are not negative, --seed is in 0..2^32-1")
    for name in ("weights", "tokenizer", "data"):
        if (path := getattr(args, name)) is not None and not path.exists():
            refuse(f"--{name} {path}: no such file or folder")
    for name in ("save", "out"):
        if (path := getattr(args, name)) is not None and path.exists() and not path.is_dir():
            refuse(f"--{name} {path}: is no folder")
    if args.out is not None:
        weights.safetensors()
    if args.metrics is not None:  # the first rank writes it, and none shall wait for one that cannot
        args.metrics.parent.mkdir(parents=True, exist_ok=True)
        args.metrics.open("a").close()


def tokens_of(args: argparse.Namespace, config: Config) -> texts.ByteData:
    """Training tokens; its `batch` draws a step's windows."""
    found = texts.load(args.data, cap=1 << 30)
    if args.tokenizer is not None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            refuse("--tokenizer needs the package tokenizers: pip install tokenizers")
        try:
            tokenizer = Tokenizer.from_file(str(args.tokenizer))
        except Exception as e:  # tokenizers raises Exception itself
            refuse(f"--tokenizer {args.tokenizer}: cannot be read: {e}")
        split = [t.tobytes().decode(errors="replace") for t in (found.train, found.valid)]
        train, valid = (np.array(tokenizer.encode(t, add_special_tokens=False).ids, np.int32) for t in split)
        found = dataclasses.replace(found, train=train, valid=valid)
    if len(found.train) < args.seq + 2:
        refuse(f"{found.source}: {len(found.train)} tokens, and --seq {args.seq} needs {args.seq + 2}")
    if (largest := int(found.train.max())) >= config.vocab_size:
        refuse(f"token {largest} of the data is outside of the config's vocab_size={config.vocab_size}")
    return found


def start(args: argparse.Namespace) -> None:
    """Makes the process group: torchrun's, or one of this process alone, so that all that follows is the same."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def planned(args: argparse.Namespace, config: Config) -> tuple[Callable[[str], torch.Tensor], int]:
    """Returns what gives each whole weight, and the number of parameters."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Llama(config).named_parameters()}
    count = sum(shape.numel() for shape in shapes.values())
    if args.weights is None:
        return weights.drawn(config, args.seed, shapes), count
    return weights.Files(args.weights, config, shapes).whole, count


def sharded(
    args: argparse.Namespace, config: Config, whole: Callable[[str], torch.Tensor], recipe: Any, mesh: Any
) -> tuple[Any, dict[str, parallel.Cut]]:
    """Returns the model with this rank's part of each weight, and which of them the tp dimension of `mesh` cuts. It is
    made on meta, so that no rank ever holds all of it."""
    group = mesh.get_group("tp") if args.tp > 1 else None
    with torch.device("meta"):
        model: Any = Llama(config, args.checkpoint_activations, group, not args.no_sequence_parallel)
    cut = parallel.cuts(model)
    # Float32 weights are stepped, bfloat16 ones computed with; the angles of rotary embeddings stay in float32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        if args.compile:  # the inner part: hooks of fully_shard and checkpoints stay outside of graphs
            block.run = torch.compile(block.run, fullgraph=True)
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device=mesh.device_type)
    model.frequencies.copy_(config.frequencies())
    weights.fill(model, whole, cut)
    if recipe is not None:
        dt.parallel.prepare(model, mesh["dp"], recipe, recompute=args.checkpoint_activations)
    # Of stochastic rounding: ranks that share a layer have one seed, and data-parallel ones their own.
    dt.seed_rng(model, (args.seed << 20) + mesh["dp"].get_local_rank())
    return model, cut


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


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


def resumed(args: argparse.Namespace, model: Llama, optimizer: Any, run: dict[str, Any]) -> int:
    """Returns the step to go on with. `run`: what a resumed run must have in common with the one before."""
    step, extra = dt.parallel.load(args.save, model, optimizer)
    before = extra if isinstance(extra, dict) else {}  # another program's
    if changed := [f"{k} was {before.get(k)}, is {v}" for k, v in run.items() if before.get(k) != v]:
        refuse(f"--resume: {'; '.join(changed)}")
    if step > args.steps:
        refuse(f"--resume: the checkpoint is of step {step}, and --steps is {args.steps}")
    return step


def train(
    args: argparse.Namespace, config: Config, tokens: texts.ByteData, whole: Callable[[str], torch.Tensor], count: int
) -> None:
    """Makes and trains the model, on every rank of the process group."""
    ranks, recipe = dist.get_world_size(), RECIPES.get(args.recipe)
    mesh = init_device_mesh(args.device, (ranks // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    device = torch.device(args.device, torch.cuda.current_device() if args.device == "cuda" else None)
    model, cut = sharded(args, config, whole, recipe, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    run = {"seed": args.seed, "batch": args.batch, "seq": args.seq, "tokens": len(tokens.train)}
    run["checksum of the tokens"] = zlib.crc32(np.ascontiguousarray(tokens.train))
    first = resumed(args, model, optimizer, run) if args.resume else 0
    report = Report(args.metrics, first) if dist.get_rank() == 0 else None
    if report is not None:
        print(f"{count:,} parameters, {args.recipe}, {ranks} x {device.type}, --tp {args.tp}")
        print(f"{len(tokens.train):,} tokens of {tokens.source}")
    peak = args.peak_tflops or peak_tflops(device)
    for step in range(first, args.steps):
        begin = time.perf_counter()
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        windows = np.split(tokens.batch(args.seed, step, args.batch, args.seq), mesh["dp"].size())
        own = torch.from_numpy(windows[mesh.get_local_rank("dp")]).long().to(device)
        part = loss_of(args, model, recipe, own) / mesh["dp"].size()
        norm = parallel.clip(model, cut, mesh, args.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(part, group=mesh.get_group("dp"))
        loss, norm = torch.stack((part, norm)).tolist()  # waits for the device
        if report is not None:
            rate = args.batch * args.seq / (time.perf_counter() - begin)
            mfu = None if peak is None else rate * config.flops_per_token(args.seq) / (ranks * peak * 1e12)
            row = {"step": step, "loss": loss, "tokens_per_s": rate, "mfu": mfu, "memory_gib": peak_gib(device)}
            report.step(row | {"grad_norm": norm, "lr": lr})
        if not math.isfinite(loss):
            refuse(f"the loss of step {step} is {loss}")
        if args.save is not None and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
            dt.parallel.save(args.save, model, optimizer, step=step + 1, extra=run, keep=args.keep)
    if report is not None:
        report.close()
    if args.out is not None:
        weights.write(args.out, model, cut)


def main(given: list[str] | None = None) -> None:
    args = arguments(given)
    try:
        config = Config() if args.config is None else Config.read(args.config)
        check(args, config, int(os.environ.get("WORLD_SIZE", 1)))
        tokens = tokens_of(args, config)
        whole, count = planned(args, config)
        start(args)
        try:
            train(args, config, tokens, whole, count)
        finally:
            dist.destroy_process_group()
    except (*NAMED, OSError) as e:
        refuse(str(e))


if __name__ == "__main__":
    main()
