"""Trains a Llama in low precision, on one process or many.

    python examples/torch_llama.py
    torchrun --nproc-per-node 2 examples/torch_llama.py --recipe mxfp8 --steps 100 --save runs/llama --out runs/model
    torchrun --nproc-per-node 8 examples/torch_llama.py --config Llama-3/config.json --weights Llama-3/ \\
        --tokenizer Llama-3/tokenizer.json --data my_texts/ --compile --checkpoint-activations

Weights are sharded by FSDP2, which gathers them in the recipe's format. Without --data it learns the source of
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
from diptych.common.errors import CheckpointError, ShapeError
from diptych.lab import data as texts
from llama import weights
from llama.model import Config, ConfigError, Llama
from llama.report import Report, peak_gib, peak_tflops


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


positive.__name__ = "positive integer"  # argparse's error says it


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, help="a Hugging Face config.json; default: a small model")
    add("--weights", type=Path, help="safetensors file or folder to begin with; default: random weights")
    add("--out", type=Path, help="folder for model.safetensors and config.json at the end")
    add("--data", type=Path, help="a text file or folder; default: the source of Python's standard library")
    add("--tokenizer", type=Path, help="a Hugging Face tokenizer.json; default: bytes")
    add("--recipe", choices=("bf16", *RECIPES), default="fp8-current")
    add("--tp", type=positive, default=1, help="ranks that share each layer")
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
    return parser.parse_args()


def refuse(text: str) -> NoReturn:
    raise SystemExit(f"torch_llama: {text}")


def check(args: argparse.Namespace, ranks: int) -> None:
    """Finds what is wrong on every rank alike, before any of them waits for another."""
    # Here a parallel plan would go: the group of a mesh's second dimension as `tp_group=` of the blocks' layers.
    if args.tp > 1:
        refuse(f"--tp {args.tp} is not supported: FSDP2 alone divides this model")
    if args.batch % (ranks * args.accumulate):
        refuse(f"--batch {args.batch} is no multiple of {ranks} ranks x --accumulate {args.accumulate}")
    if args.resume and args.save is None:
        refuse("--resume needs --save, the folder of the checkpoints")
    if args.device == "cuda" and not torch.cuda.is_available():
        refuse("--device cuda: torch finds no GPU")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if args.device == "cuda" and local > torch.cuda.device_count():
        refuse(f"{local} ranks here, and {torch.cuda.device_count()} GPUs")
    if args.lr <= 0 or args.clip <= 0 or args.warmup < 0 or args.weight_decay < 0 or not 0 <= args.seed < 2**32:
        refuse("--lr and --clip are positive, --warmup and --weight-decay are not negative, --seed is in 0..2^32-1")
    for name in ("config", "weights", "tokenizer", "data"):
        if (path := getattr(args, name)) is not None and not path.exists():
            refuse(f"--{name} {path}: no such file or folder")
    if args.out is not None:
        weights.safetensors()


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


def start(args: argparse.Namespace) -> torch.device:
    """Makes the process group: torchrun's, or one of this process alone, so that all that follows is the same."""
    backend = "nccl" if args.device == "cuda" else "gloo"
    device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def planned(args: argparse.Namespace, config: Config) -> tuple[Llama, Callable[[str], torch.Tensor]]:
    """Returns the model on meta, so that no rank ever holds all of it, and what gives each whole weight."""
    with torch.device("meta"):
        model = Llama(config, args.checkpoint_activations)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if args.weights is None:
        return model, weights.drawn(config, args.seed, shapes)
    return model, weights.Files(args.weights, config, shapes).whole


def shard(
    args: argparse.Namespace, model: Any, whole: Callable[[str], torch.Tensor], recipe: Any, device: torch.device
) -> None:
    """Gives this rank its part of the model."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Float32 weights are stepped, bfloat16 ones computed with; the angles of rotary embeddings stay in float32.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for i, block in enumerate(model.blocks):
        if args.compile:
            model.blocks[i] = torch.compile(block, fullgraph=True)  # before fully_shard, whose hooks do not trace
        fully_shard(model.blocks[i], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.frequencies.copy_(model.config.frequencies())
    weights.fill(model, whole)
    if recipe is not None:
        dt.parallel.prepare(model, mesh, recipe, recompute=args.checkpoint_activations)
    dt.seed_rng(model, (args.seed << 20) + dist.get_rank())  # of stochastic rounding, another on each rank


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def train_step(args: argparse.Namespace, model: Any, recipe: Any, optimizer: Any, batch: torch.Tensor) -> torch.Tensor:
    """Returns the loss of the whole batch, and of the gradients the norm. `batch`: this rank's windows."""
    loss = torch.zeros((), device=batch.device)
    for i, tokens in enumerate(batch.chunk(args.accumulate)):
        model.set_requires_gradient_sync(i == args.accumulate - 1)
        with dt.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(tokens[:, :-1])
        part = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) / args.accumulate
        part.backward()
        loss += part.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    return torch.stack((loss / dist.get_world_size(), norm.full_tensor()))


def resumed(args: argparse.Namespace, model: Llama, optimizer: Any, run: dict[str, Any]) -> int:
    """Returns the step to go on with. `run`: what a resumed run must have in common with the one before."""
    step, before = dt.parallel.load(args.save, model, optimizer)
    if changed := [f"{k} was {before[k]}, is {v}" for k, v in run.items() if before[k] != v]:
        refuse(f"--resume: {'; '.join(changed)}")
    return step


def train(args: argparse.Namespace, model: Llama, recipe: Any, tokens: texts.ByteData, device: torch.device) -> None:
    config = model.config
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay)
    run = {"seed": args.seed, "batch": args.batch, "seq": args.seq, "tokens": len(tokens.train)}
    run["checksum of the tokens"] = zlib.crc32(np.ascontiguousarray(tokens.train))
    first = resumed(args, model, optimizer, run) if args.resume else 0
    rank, ranks = dist.get_rank(), dist.get_world_size()
    report = Report(args.metrics, first) if rank == 0 else None
    if report is not None:
        count = sum(p.numel() for p in model.parameters())
        print(f"{count:,} parameters, {args.recipe}, {ranks} x {device.type}")
        print(f"{len(tokens.train):,} tokens of {tokens.source}")
    peak = args.peak_tflops or peak_tflops(device)
    for step in range(first, args.steps):
        begin = time.perf_counter()
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        windows = np.split(tokens.batch(args.seed, step, args.batch, args.seq), ranks)[rank]
        found = train_step(args, model, recipe, optimizer, torch.from_numpy(windows).long().to(device))
        loss, norm = found.tolist()  # waits for the device
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
        weights.write(args.out, model, config)


def main() -> None:
    args = arguments()
    try:
        check(args, int(os.environ.get("WORLD_SIZE", 1)))
        config = Config() if args.config is None else Config.read(args.config)
        tokens = tokens_of(args, config)
        model, whole = planned(args, config)
        recipe = RECIPES.get(args.recipe)
        device = start(args)
        try:
            shard(args, model, whole, recipe, device)
            train(args, model, recipe, tokens, device)
        finally:
            dist.destroy_process_group()
    except (ConfigError, weights.WeightsError, texts.DataError, CheckpointError, ShapeError) as e:
        refuse(str(e))


if __name__ == "__main__":
    main()
