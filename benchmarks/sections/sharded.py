"""JAX on two GPUs of one host: the stack of the section `jax` under `jit` with cut arrays, forward and backward.

- "data parallel": both GPUs with the tokens of the case each. Each has all weights, and their gradients are summed.
- "FSDP": the same, with weights and gradients cut along dimension 0.
- "one GPU": a GPU alone with as many tokens.

Results of two GPUs are compared with those of one that has all tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import room
from benchmarks.cases import ALONE, DATA_PARALLEL, RANKS, SHARDED, Case
from benchmarks.results import Row, failed
from benchmarks.room import wall_seconds
from benchmarks.sections import jax as one_gpu

LAYOUTS = {DATA_PARALLEL: P(), SHARDED: P("data")}  # of matrices
# Attention's backward may add in another order: an amax that differs in its last bit moves a scale, and with it all
# roundings to E5M2. Gradients that were not summed would differ by about 1.
BOUNDS = {"difference": 0.02, "gradients": 0.25}


class Alone(NamedTuple):
    """`step`: of one GPU with the tokens of a case. `want`: what one GPU makes of all GPUs' tokens."""

    step: Callable[[], Any]
    want: tuple[np.ndarray, np.ndarray]


def rows(case: Case, _: Any) -> Iterator[Row]:
    for name in case.names:
        try:
            room.require_time()
            yield from of_recipe(case, name)
        except Exception as error:
            yield failed(case, name, error)


@functools.cache
def alone(shape: tuple[int, ...], name: str) -> Alone:
    batch, length, width = shape
    block, params = one_gpu.blocks_of((name,))[name], one_gpu.parameters(width)
    want = one_gpu.stepping(block, RANKS * batch)(params, *one_gpu.inputs(RANKS * batch, length, width))
    step = functools.partial(one_gpu.stepping(block, batch), params, *one_gpu.inputs(*shape))
    jax.block_until_ready(step())
    return Alone(step, compact(want))


def of_recipe(case: Case, name: str) -> Iterator[Row]:
    """Measures one recipe. **Raises** ValueError for results that are not those of one GPU."""
    batch, length, _ = case.shape
    one = alone(case.shape, name)
    found, step = spread(case, name, one.want)
    calls = {f"{name} {ALONE}": one.step, name: step}
    for label, seconds in wall_seconds(calls, 5, 2, jax.block_until_ready).items():
        row: Row = {"case": str(case), "name": label, "us": seconds * 1e6, "rate": batch * length / seconds}
        yield row | {"unit": "tokens/s"} | (found if label == name else {})


def spread(case: Case, name: str, want: tuple[np.ndarray, np.ndarray]) -> tuple[Row, Callable[[], Any]]:
    """Returns what was found out about a step over all GPUs, and the step."""
    batch, length, width = case.shape
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:RANKS])
    params, of_tokens = one_gpu.parameters(width), NamedSharding(mesh, P("data"))
    of_params = jax.tree.map(lambda p: NamedSharding(mesh, LAYOUTS[case.what] if p.ndim == 2 else P()), params)
    whole = one_gpu.inputs(RANKS * batch, length, width)
    placed = jax.device_put((params, *whole), (of_params, of_tokens, of_tokens))
    start = time.perf_counter()
    block = one_gpu.blocks_of((name,))[name]
    step = one_gpu.stepping(block, RANKS * batch, out_shardings=(of_tokens, (of_params, of_tokens)))
    compiled = step.lower(*placed).compile()
    row: Row = {"compile s": time.perf_counter() - start}
    row["GiB"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
    call = functools.partial(compiled, *placed)
    got = compact(call())
    row |= {key: far for key, far in zip(BOUNDS, map(one_gpu.relative, got, want), strict=True)}
    if over := {key: row[key] for key, bound in BOUNDS.items() if not row[key] <= bound}:
        raise ValueError(f"two GPUs differ from one: {over}, at most {BOUNDS}")
    return row, call


def compact(results: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of what the blocks add from both GPUs' tokens, and of a gradient of the first block's weights."""
    added, (grads, _) = results
    return np.asarray(added[:: max(1, len(added) // 256)], np.float64), np.asarray(grads[0]["up"][::64], np.float64)
