"""JAX: XLA's own FP8 product beside the project's, and the same stack of Llama-shaped blocks as in torch.

Times are of the wall: calls follow each other without waiting, and each keeps the GPU busy for longer than the host
needs to launch it. "XLA FP8" is current scaling written in jnp, whose products are left to XLA.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diptych.jax as dj
from benchmarks import room
from benchmarks.cases import Case
from benchmarks.results import Row, failed
from benchmarks.room import wall_seconds
from diptych.common import RECIPES

BLOCKS, HEADS, KV_HEADS, FFN = 4, 32, 8, 3.5  # FFN: of the width
BOUND = {"fprop": 0.08, "stack": 0.25}
Array = jax.Array
Params = dict[str, Array]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def apart(got: Array, want: Array) -> float:
    return relative(*(np.asarray(t[:256], np.float64) for t in (got, want)))


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def scaled(x: Array, dtype: Any) -> tuple[Array, Array]:
    """Returns x in FP8, and the scale that takes it back."""
    scale = jnp.maximum(jnp.abs(x).max().astype(jnp.float32), 1e-12) / float(jnp.finfo(dtype).max)
    return (x / scale).astype(dtype), scale


def product(a: tuple[Array, Array], b: tuple[Array, Array], axes: tuple[int, int]) -> Array:
    """Returns a dot of two FP8 arrays in bfloat16. XLA would remove FP8 that is converted back before the dot."""
    (x, sx), (y, sy) = a, b
    d = jax.lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.bfloat16)
    return (d.astype(jnp.float32) * (sx * sy)).astype(jnp.bfloat16)


@jax.custom_vjp
def xla_linear(x: Array, w: Array) -> Array:
    return product(scaled(x, E4M3), scaled(w, E4M3), (1, 1))


def _xla_forward(x: Array, w: Array) -> Any:
    qx, qw = scaled(x, E4M3), scaled(w, E4M3)
    return product(qx, qw, (1, 1)), (qx, qw)


def _xla_backward(saved: Any, dy: Array) -> tuple[Array, Array]:
    (qx, qw), qdy = saved, scaled(dy, E5M2)
    return product(qdy, qw, (1, 0)), product(qdy, qx, (0, 0))


xla_linear.defvjp(_xla_forward, _xla_backward)


def plain_linear(x: Array, w: Array) -> Array:
    return x @ w.T


def rms_norm(x: Array, gamma: Array) -> Array:
    high = x.astype(jnp.float32)
    return (high * jax.lax.rsqrt(jnp.square(high).mean(-1, keepdims=True) + 1e-5) * gamma).astype(x.dtype)


def rotated(x: Array) -> Array:
    """Rotary embeddings of [batch, length, heads, head]."""
    head = x.shape[-1]
    angles = jnp.outer(jnp.arange(x.shape[1]), 500000.0 ** (-jnp.arange(0, head, 2) / head))[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), -1).astype(x.dtype)


def attention(qkv: Array, batch: int) -> Array:
    width = qkv.shape[-1] * HEADS // (HEADS + 2 * KV_HEADS)
    head = width // HEADS
    split = jnp.split(qkv.reshape(batch, -1, qkv.shape[-1]), (width, width + KV_HEADS * head), -1)
    q, k, v = (t.reshape(*t.shape[:2], -1, head) for t in split)
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    y = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True, implementation=implementation)
    return y.reshape(-1, width)


def composed(linear: Callable[[Array, Array], Array], p: Params, x: Array, batch: int) -> Array:
    """One block whose linear layers are `linear`."""
    x = x + linear(attention(linear(rms_norm(x, p["norm1"]), p["qkv"]), batch), p["proj"])
    a, b = jnp.split(linear(rms_norm(x, p["norm2"]), p["up"]), 2, -1)
    return x + linear(jax.nn.silu(a) * b, p["down"])


def fused(recipe: Any, p: Params, x: Array, batch: int) -> Array:
    """Returns the output of one transformer block made of the project's fused layers."""
    norm: dict[str, Any] = {"recipe": recipe, "normalization": "RMSNorm"}
    qkv = dj.layernorm_dense(x, p["norm1"], None, p["qkv"], **norm)
    x = x + dj.dense(attention(qkv, batch), p["proj"], recipe=recipe)
    return x + dj.layernorm_mlp(x, p["norm2"], None, p["up"], None, p["down"], None, activation="swiglu", **norm)


def parameters(width: int, blocks: int = BLOCKS) -> list[Params]:
    ffn, qkv = int(FFN * width), width * (HEADS + 2 * KV_HEADS) // HEADS
    shapes = {"qkv": (qkv, width), "proj": (width, width), "up": (2 * ffn, width), "down": (width, ffn)}
    keys = iter(jax.random.split(jax.random.key(0), blocks * len(shapes)))
    return [
        {name: jax.random.normal(next(keys), s, jnp.bfloat16) * s[1] ** -0.5 for name, s in shapes.items()}
        | {name: jnp.ones(width, jnp.bfloat16) for name in ("norm1", "norm2")}
        for _ in range(blocks)
    ]


def blocks_of(names: Iterable[str]) -> dict[str, Callable[..., Array]]:
    """Returns the block of each name: "bf16", "XLA FP8" or a recipe."""
    plain = {"bf16": plain_linear, "XLA FP8": xla_linear}
    return {
        name: functools.partial(composed, plain[name]) if name in plain else functools.partial(fused, RECIPES[name])
        for name in names
    }


def stepping(block: Callable[..., Array], batch: int, **options: Any) -> Callable[[list[Params], Array, Array], Any]:
    """Returns a step, forward and backward, from (parameters, x, dy) to (what the blocks add, gradients).

    `options`: of `jax.jit`.
    """

    def forward(params: list[Params], x: Array) -> Array:
        y = x
        for p in params:
            y = block(p, y, batch)
        return y

    def step(params: list[Params], x: Array, dy: Array) -> Any:
        y, pull = jax.vjp(forward, params, x)
        return y - x, pull(dy)

    return jax.jit(step, **options)


def inputs(batch: int, length: int, width: int) -> tuple[Array, Array]:
    """Returns x and dy, [batch * length, width]."""
    x, dy = (jax.random.normal(k, (batch * length, width), jnp.bfloat16) for k in jax.random.split(jax.random.key(1)))
    return x, dy


def stack_calls(case: Case) -> dict[str, Callable[[], Any]]:
    """Returns steps, forward and backward, each of which returns what the blocks add, and the gradients."""
    given = (parameters(case.shape[2]), *inputs(*case.shape))
    return {
        name: functools.partial(stepping(block, case.shape[0]), *given)
        for name, block in blocks_of(("bf16", *case.names, "XLA FP8")).items()
    }


def fprop_calls(case: Case, peers: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    m, n, k = case.shape
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, (rows, k), jnp.bfloat16) for key, rows in zip(keys, (m, n), strict=True))
    plain = jax.jit(plain_linear)
    calls: dict[str, Callable[[], Any]] = {"bf16": lambda: (plain(a, b),)}
    for name in case.names:
        qa, qb = (
            dj.quantize(t, q.with_usage(columnwise=False))
            for t, q in zip((a, b), RECIPES[name].operands("fprop"), strict=True)
            if q is not None
        )
        gemm = jax.jit(functools.partial(dj.gemm, out_dtype=jnp.bfloat16))
        calls[name] = lambda gemm=gemm, qa=qa, qb=qb: (gemm(qa, qb),)
    if "xla" in peers:
        (fa, sa), (fb, sb) = scaled(a, E4M3), scaled(b, E4M3)
        calls["XLA FP8"] = lambda: (peers["xla"](fa, fb, sa, sb),)
    return calls


def rows(case: Case, peers: dict[str, Any]) -> Iterator[Row]:
    calls = fprop_calls(case, peers) if case.what == "fprop" else stack_calls(case)
    found: dict[str, Row] = {}
    want = None
    for name, call in list(calls.items()):
        try:
            room.require_time()
            start = time.perf_counter()
            made = jax.block_until_ready(call())[0]
            row: Row = {"case": str(case), "name": name, "compile s": time.perf_counter() - start}
            want = made if want is None else want
            row["difference"] = apart(made, want)
            if not row["difference"] <= BOUND[case.what]:
                raise ValueError(f"differs by {row['difference']:.3g} from bfloat16, at most {BOUND[case.what]}")
            found[name] = row
        except Exception as error:
            found[name] = failed(case, name, error)
            del calls[name]
    times = wall_seconds(calls, 5, 20 if case.what == "fprop" else 2, jax.block_until_ready)
    for name, row in found.items():
        if name in times:
            row["us"] = times[name] * 1e6
            if case.what == "fprop":
                row |= {"rate": 2 * float(np.prod(case.shape)) / times[name] / 1e12, "unit": "TFLOP/s"}
            else:
                row |= {"rate": case.shape[0] * case.shape[1] / times[name], "unit": "tokens/s"}
        yield row
