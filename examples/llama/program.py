"""The common parts of the trainers torch_llama.py and jax_llama.py, which read and check arguments, load tokens and
initial weights, and compute the learning rate."""

from __future__ import annotations

import argparse
import dataclasses
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from diptych.common import RECIPES
from diptych.common.errors import CheckpointError, ShapeError, UnsupportedError
from diptych.lab import data as texts
from llama import weights
from llama.config import Config, ConfigError


class Refused(ValueError):
    """Arguments that the program does not take, or a loss that is not finite."""


NAMED = (Refused, ConfigError, weights.WeightsError, texts.DataError, CheckpointError, ShapeError, UnsupportedError)


def refuse(text: str) -> NoReturn:
    raise Refused(text)


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


positive.__name__ = "positive integer"  # argparse's error says it


def parser(text: str | None) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that both trainers take."""
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("--config", type=Path, help="a Hugging Face config.json; default: a small model")
    add("--weights", type=Path, help="safetensors file or folder to begin with; default: random weights")
    add("--out", type=Path, help="folder for model.safetensors and config.json at the end")
    add("--data", type=Path, help="a text file or folder; default: the source of Python's standard library")
    add("--tokenizer", type=Path, help="a Hugging Face tokenizer.json; default: bytes")
    add("--recipe", choices=("bf16", *RECIPES), default="fp8-current")
    add("--checkpoint-activations", action="store_true", help="backward computes blocks again")
    add("--steps", type=positive, default=20)
    add("--batch", type=positive, default=8, help="windows a step, over all ranks or devices")
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
    return made


def check(args: argparse.Namespace, config: Config, places: int, word: str) -> None:
    """Finds what is wrong on every rank alike, before any of them waits for another.

    `places`: how many ranks or devices (`word`) there are.
    """
    if places % args.tp:
        refuse(f"--tp {args.tp} does not divide the {places} {word}")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (extent := getattr(config, name)) % args.tp:
            refuse(f"--tp {args.tp} does not divide the config's {name}={extent}")
    if args.batch % (places // args.tp * args.accumulate):
        refuse(f"--batch {args.batch} is no multiple of {places // args.tp} batches x --accumulate {args.accumulate}")
    if args.resume and args.save is None:
        refuse("--resume needs --save, the folder of the checkpoints")
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


def planned(args: argparse.Namespace, config: Config) -> tuple[Callable[[str], np.ndarray], int]:
    """Returns what gives each whole weight, and the number of parameters."""
    count = sum(math.prod(shape) for shape in weights.shapes(config).values())
    if args.weights is None:
        return weights.drawn(config, args.seed), count
    return weights.Files(args.weights, config).whole, count


def learning_rate(args: argparse.Namespace, step: int) -> float:
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * min(1.0, done)))


def identity(args: argparse.Namespace, tokens: texts.ByteData) -> dict[str, Any]:
    """Returns the options and the data's checksum that a resumed run must share with the run of its checkpoint."""
    run = {"seed": args.seed, "batch": args.batch, "seq": args.seq, "tokens": len(tokens.train)}
    return run | {"checksum of the tokens": zlib.crc32(np.ascontiguousarray(tokens.train))}


def check_resumed(args: argparse.Namespace, before: Any, run: dict[str, Any], step: int) -> None:
    """Refuses to go on with a checkpoint of another run (`before`), or of a step beyond --steps."""
    before = before if isinstance(before, dict) else {}  # another program's
    if changed := [f"{k} was {before.get(k)}, is {v}" for k, v in run.items() if before.get(k) != v]:
        refuse(f"--resume: {'; '.join(changed)}")
    if step > args.steps:
        refuse(f"--resume: the checkpoint is of step {step}, and --steps is {args.steps}")


def row_of(
    args: argparse.Namespace, config: Config, step: int, loss: float, norm: float, seconds: float, peak: float | None
) -> dict[str, float | None]:
    """A step's row of the report. `peak`: TFLOP/s of all devices, None if not known."""
    rate = args.batch * args.seq / seconds
    mfu = None if peak is None else rate * config.flops_per_token(args.seq) / (peak * 1e12)
    lr = learning_rate(args, step)
    return {"step": step, "loss": loss, "tokens_per_s": rate, "mfu": mfu, "grad_norm": norm, "lr": lr}
