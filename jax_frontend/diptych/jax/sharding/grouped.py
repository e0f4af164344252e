"""Partitioning rules of stacks and of products of groups: a mesh may cut N and K, and neither experts nor their rows.

A stack alone is cut along its tensors too, as it is quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.formats import FormatRow, format_by_name
from diptych.common.ops import grouped, shapes
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, Quantizer
from diptych.jax.functional.amax_group import largest_amaxes
from diptych.jax.primitives.checks import copy_length
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.grouped import grouped_gemm_p, quantize_stack_p
from diptych.jax.primitives.quantize import COMPUTE, GIVEN, amax_p
from diptych.jax.sharding.gemm import aligned, product, summed
from diptych.jax.sharding.quantize import (
    COLUMNS,
    ROUTED,
    ROWS,
    Shapes,
    amax_factors,
    blocks_of_copies,
    factors_of_copies,
    placed,
)
from diptych.jax.sharding.rule import Cuts, Factors, Rule, Run, block_of, copy_factors, row_factors

Array = jax.Array

EXPERTS = "experts"


def quantize_stack(
    operands: Shapes, batch: Batch, quantizer: Quantizer, mode: int, has_scale: bool, has_rng: bool, as_bytes: bool
) -> Rule:
    """[G, ..., K] -> copies and amaxes with a leading G. Each tensor that is cut has the amaxes of all its shards.

    Random bits of stochastic rounding are those of the whole tensors, as in `quantize`.
    """
    shape = operands[0]
    factors = factors_of_copies(quantizer, shape[1:])
    made = {b.name: (EXPERTS, *factors[b.name])[: len(b.shape)] for b in grouped.stack_buffers(shape, quantizer)}
    amaxes = [name for name in made if name.endswith("amax")]
    results = [name for name in made if mode != GIVEN or name not in amaxes]

    def local(run: Run, cuts: Cuts, shard: Sequence[Array]) -> list[Array]:
        rows, columns = cuts.get(ROWS, ()), cuts.get(COLUMNS, ())
        if not rows + columns:
            return run(*shard)
        x, *others = shard
        if has_rng:
            others[-1] = placed(others[-1], shapes.rows_cols(shape[1:]), (rows, columns))
        if mode == GIVEN:
            return run(x, *others)
        flags, mask = quantizer.spec.flags & (ROW_AMAX | RHT | RHT_SIGNS), batch.axes[0]
        each = Batch(batch.rank + 1, (mask << 1 | 1,))  # the tensors are one more batch axis
        own = amax_p.bind(x, batch=each, flags=flags, columnwise=True, source=None)
        largest = largest_amaxes(quantizer, own[0], own[1], rows + columns, columns)
        whole = [x[..., 0] if len(made[name]) == 1 else x for name, x in largest.items()]
        copies = quantize_stack_p.bind(
            x, *whole, *others,
            batch=Batch(batch.rank, (mask, *[(1 << batch.rank) - 1] * len(whole), *batch.axes[1:])),
            quantizer=quantizer, mode=GIVEN, has_scale=False, has_rng=has_rng, as_bytes=as_bytes,
        )  # fmt: skip
        return [*copies, *whole]

    joined = has_rng or (bool(amaxes) and mode == COMPUTE and not has_scale)
    return Rule(
        (
            (EXPERTS, *row_factors(shape[1:-1], ROWS), COLUMNS),
            *(made[n] for n in amaxes if mode != COMPUTE),
            *[(EXPERTS,)] * has_scale,
            *[(EXPERTS, None)] * has_rng,
        ),
        tuple(made[n] for n in results),
        blocks_of_copies(quantizer, shape[1:]),
        tuple("max" if n in amaxes else "" for n in results),
        local if joined else None,
    )


def _copy(fmt: FormatRow, columnwise: bool, parts: Shapes, kept: str, reduced: str, stack: bool) -> list[Factors]:
    """Returns the factors of one copy's operands. Scales and amaxes of whole tensors in a stack are [G]."""
    data, scale = copy_factors(fmt, columnwise, parts[0][stack:], kept, reduced)
    if not stack:
        return [data, scale, *(amax_factors(own, kept) for own in parts[2:])]
    of_scale = (EXPERTS,) if fmt.one_scale else (EXPERTS, *scale)
    return [(EXPERTS, *data), of_scale, *((EXPERTS, kept)[: len(own)] for own in parts[2:])]


def grouped_gemm(
    operands: Shapes,
    batch: Batch,
    a: tuple[str, bool],
    b: tuple[str, bool],
    has_bias: bool,
    has_c: bool,
    out_dtype: str,
    **options: Any,
) -> Rule:
    """Copies [R, K] and [G, N, K], or [R, M] and [R, N], offsets [G + 1], bias [G, N], c -> [R, N], or [G, M, N].

    Parts of a sum over a cut K are added as those of `gemm`.
    """
    at = copy_length(a[0])
    end = at + copy_length(b[0])
    (a_fmt, b_fmt), depth = (format_by_name(name) for name, _ in (a, b)), a[1]
    kept, reduced = ("M", ROWS) if depth else (ROWS, "K")
    factors = _copy(a_fmt, a[1], operands[:at], kept, reduced, False)
    factors += _copy(b_fmt, b[1], operands[at:end], "N", reduced, not depth)
    groups = operands[end][0] - 1
    size = grouped.grouped_shape(groups, a_fmt, a[1], operands[0], b_fmt, b[1], operands[at])
    a_block, b_block = block_of(a_fmt), block_of(b_fmt)
    extents = {"N": (size.n, b_block[0])}
    extents |= {"M": (size.out[-2], a_block[0])} if depth else {"K": (size.k, math.lcm(a_block[1], b_block[1]))}
    out: Factors = (EXPERTS, "M", "N") if depth else (ROWS, "N")

    def local(run: Run, cuts: Cuts, shard: Sequence[Array]) -> list[Array]:
        if jax.lax.axis_size(cuts.get("K", ())) == 1:
            return run(*shard)
        given = dict(a=a, b=b, out_dtype=out_dtype, **options)

        def finish(total: Array, mine: Callable[[Array], Array]) -> Array:
            if has_bias and groups:
                bias = aligned(shard[end + 1].astype("float32"), batch.axes[end + 1], batch.rank, 2)
                offsets = aligned(shard[end], batch.axes[end], batch.rank, 1)
                total = total + mine(_of_rows(bias, offsets, shard[0].shape[-2]))
            if has_c:
                total = total + mine(aligned(shard[-1], batch.axes[-1], batch.rank, 2)).astype("float32")
            return total.astype(out_dtype)

        return [summed(product(grouped_gemm_p, shard[: end + 1], batch, given), cuts, finish)]

    return Rule(
        (*factors, (None,), *[(EXPERTS, "N")] * has_bias, *[out] * has_c),
        (out,),
        extents,
        ("",),
        local,
        dict.fromkeys((ROWS, EXPERTS), ROUTED),
        summed="" if depth else "K",
        shares=("N",),
        before=end + 1,
    )


def _of_rows(bias: Array, offsets: Array, rows: int) -> Array:
    """Returns each row's bias of [..., G, N], 0 for a row in no group: [..., R, N]."""
    at = jax.lax.cummax(jnp.clip(offsets, 0, rows), axis=offsets.ndim - 1)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = (at[..., 1:, None] <= row).sum(-2)
    there = (row >= at[..., :1]) & (group < bias.shape[-2])
    picked = jnp.take_along_axis(bias, jnp.minimum(group, bias.shape[-2] - 1)[..., None], axis=-2)
    return jnp.where(there[..., None], picked, 0)


def grouped_bias_grad(operands: Shapes, batch: Batch, dtype: str) -> Rule:
    """[..., N] and offsets [G + 1] -> [G, N]."""
    dy = (*row_factors(operands[0][:-1], ROWS), COLUMNS)
    extents = {COLUMNS: (shapes.rows_cols(operands[0])[1], 1)}
    return Rule((dy, (None,)), ((EXPERTS, COLUMNS),), extents, whole=dict.fromkeys((ROWS, EXPERTS), ROUTED))
