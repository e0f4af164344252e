"""Partitioning rules of amax, quantize and dequantize, and how shards get the whole tensor's amaxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.formats import format_by_name
from diptych.common.ops import shapes
from diptych.common.quantizers import RHT, RHT_SIGNS, ROW_AMAX, SQUARE, Quantizer
from diptych.jax.functional.amax_group import largest_amaxes
from diptych.jax.primitives.ffi import Batch, Source
from diptych.jax.primitives.quantize import COMPUTE, GIVEN, amax_p, quantize_p
from diptych.jax.sharding.rule import Cuts, Factors, Rule, Run, block_of, copy_factors, join, row_factors

Array = jax.Array
Shapes = Sequence[tuple[int, ...]]

ROWS, COLUMNS, TOKENS = "rows", "columns", "tokens"
VECTOR: Factors = (None,)
_RHT_ROWS = 16  # rows that one Hadamard transform mixes
ROUTED = (
    "which expert has which rows follows from the routing, and no sharding knows it; run the experts by "
    "diptych.jax.expert_parallel, or replicate the operand"
)
"""Why rows and tokens that are moved to experts, and experts, are not cut."""


# --- what is quantized: x, or a source computed from it ---


def _sources(operands: Shapes, source: Source | None) -> tuple[list[Factors], tuple[int, ...]]:
    """Returns the factors of x and of the source's operands, which come last, and the shape that is quantized.

    A gated activation needs both halves of its columns.
    """
    shape = operands[0]
    if source is None:
        return [(*row_factors(shape[:-1], ROWS), COLUMNS)], shape
    if source.kind == "permuted":
        x = (*row_factors(shape[:-1], TOKENS), COLUMNS)
        return [x, (TOKENS, None), (ROWS,)], (operands[-1][0], shape[-1])
    gated = source.kind != "norm" and source.option
    x = (*row_factors(shape[:-1], ROWS), None if gated else COLUMNS)
    if source.kind == "norm":
        statistics = 1 + (source.which == "layernorm")
        return [x, *[(COLUMNS,)] * (1 + source.has_beta), *[(ROWS,)] * statistics], shape
    if source.kind == "activation":
        return [x], (*shape[:-1], shape[-1] // 2) if gated else shape
    return [x, x], shape


def _whole(source: Source | None) -> dict[str, str]:
    return {} if source is None or source.kind != "permuted" else {ROWS: ROUTED, TOKENS: ROUTED}


def amax(operands: Shapes, batch: Batch, flags: int, columnwise: bool, source: Source | None = None) -> Rule:
    """[..., K] -> amaxes [1], or of rows [M]; the second is that of the rotated tensor."""
    factors, shape = _sources(operands, source)
    m, k = shapes.rows_cols(shape)
    return Rule(
        tuple(factors),
        ((ROWS,) if flags & ROW_AMAX else VECTOR, VECTOR)[: 1 + columnwise],
        {ROWS: (m, _RHT_ROWS if flags & RHT else 1), COLUMNS: (k, 1)},
        ("max",) * (1 + columnwise),
        whole=_whole(source),
    )


def factors_of_copies(quantizer: Quantizer, shape: tuple[int, ...]) -> dict[str, Factors]:
    """Returns the factors of all copies and amaxes of a tensor [..., K], by the attribute that holds each."""
    made: dict[str, Factors] = {}
    for columnwise, side in ((False, "rowwise"), (True, "columnwise")):
        kept, reduced = (COLUMNS, ROWS) if columnwise else (ROWS, COLUMNS)
        fmt = quantizer.copy_format(columnwise)
        copy = copy_factors(fmt, columnwise, shapes.data_shape(fmt, columnwise, shape), kept, reduced)
        made |= dict(zip((f"{side}_data", f"{side}_scale_inv"), copy, strict=True))
    return made | {"amax": (ROWS,) if quantizer.spec.flags & ROW_AMAX else VECTOR, "columnwise_amax": VECTOR}


def blocks_of_copies(quantizer: Quantizer, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Returns the extents of rows and columns, and their blocks, which both copies must have whole."""
    fmt, (m, k) = quantizer.format, shapes.rows_cols(shape)
    if fmt.one_scale:
        return {ROWS: (m, 1), COLUMNS: (k, 1)}
    square = quantizer.spec.flags & SQUARE
    made = [c for c, wanted in ((False, quantizer.rowwise), (True, quantizer.columnwise)) if wanted or square]
    blocks = [quantizer.copy_format(c).block(c) for c in made]
    rows, columns = ([b or max(n, 1) for b in each] for each, n in zip(zip(*blocks, strict=True), (m, k), strict=True))
    return {ROWS: (m, math.lcm(*rows)), COLUMNS: (k, math.lcm(*columns))}


def placed(rng: Array, extents: tuple[int, int], cuts: Sequence[tuple[Any, ...]]) -> Array:
    """Returns the random states of a shard [..., 8]: those of the tensor, and the shard's place in it.

    `extents`: the tensor's rows and columns. `cuts`: the mesh axes that cut each. A tensor whose state has a place
    already is itself a part.
    """
    starts = [
        jax.lax.axis_index(axes) * (n // jax.lax.axis_size(axes)) if axes else 0
        for n, axes in zip(extents, cuts, strict=True)
    ]
    if rng.shape[-1] == 4:
        rng = jnp.concatenate([rng, jnp.broadcast_to(jnp.int32([0, 0, *extents]), rng.shape)], axis=-1)
    return rng.at[..., 4:6].add(jnp.stack([jnp.int32(n) for n in starts]))


def quantize(
    operands: Shapes,
    batch: Batch,
    quantizer: Quantizer,
    mode: int,
    has_scale: bool,
    has_rng: bool,
    source: Source | None,
    column_sum: str,
    **others: Any,
) -> Rule:
    """[..., K] -> copies, amaxes, and [K]. A cut tensor is quantized by the amaxes of all shards.

    Stochastic rounding counts random bits over the whole tensor: each shard's random state holds its place.
    """
    (x, *of_source), shape = _sources(operands, source)
    made = factors_of_copies(quantizer, shape)
    if x[-1] is None:
        made = {name: tuple(None if f == COLUMNS else f for f in factors) for name, factors in made.items()}
    names = [b.name for b in shapes.quantize_buffers(shape, quantizer)]
    amaxes = [name for name in names if name.endswith("amax")]
    results = [name for name in names if mode != GIVEN or name not in amaxes]
    made_copies = len(names) - len(amaxes)
    rng_at = 1 + (len(amaxes) if mode == GIVEN else 0)

    def local(run: Run, cuts: Cuts, shard: Sequence[Array]) -> list[Array]:
        rows, columns = cuts.get(ROWS, ()), cuts.get(COLUMNS, ())
        if not rows + columns:
            return run(*shard)
        if has_rng:
            shard = [*shard]
            shard[rng_at] = placed(shard[rng_at], shapes.rows_cols(shape), (rows, columns))
        if mode == GIVEN:
            copies = run(*shard)
            return [*copies[:made_copies], *(join(s, "sum", rows) for s in copies[made_copies:])]
        flags = quantizer.spec.flags & (ROW_AMAX | RHT | RHT_SIGNS)
        read = [i for i in range(len(shard)) if not (has_rng and i == rng_at)]
        own = amax_p.bind(
            *(shard[i] for i in read),
            batch=Batch(batch.rank, tuple(batch.axes[i] for i in read)),
            flags=flags,
            columnwise=True,
            source=source,
        )
        whole = largest_amaxes(quantizer, own[0], own[1], rows + columns, columns)
        every = (1 << batch.rank) - 1
        copies = quantize_p.bind(
            shard[0],
            *whole.values(),
            *shard[1:],
            batch=Batch(batch.rank, (batch.axes[0], *[every] * len(whole), *batch.axes[1:])),
            quantizer=quantizer,
            mode=GIVEN,
            has_scale=False,
            has_rng=has_rng,
            source=source,
            column_sum=column_sum,
            **others,
        )
        sums = (join(s, "sum", rows) for s in copies[made_copies:])
        return [*copies[:made_copies], *(whole[n] for n in amaxes), *sums]

    joined = has_rng or (bool(amaxes) and mode == COMPUTE and not has_scale)
    return Rule(
        (x, *(made[n] for n in amaxes if mode != COMPUTE), *[VECTOR] * (has_scale + has_rng), *of_source),
        (*(made[n] for n in results), *[(x[-1],)] * bool(column_sum)),
        blocks_of_copies(quantizer, shape),
        (*("max" if n in amaxes else "" for n in results), *["sum"] * bool(column_sum)),
        local if joined else None,
        whole=_whole(source),
    )


def dequantize(operands: Shapes, batch: Batch, format: str, columnwise: bool, dtype: str) -> Rule:
    """A copy -> [..., K], or [M, K] from a transposed copy."""
    fmt, data = format_by_name(format), operands[0]
    kept, reduced = (COLUMNS, ROWS) if columnwise else (ROWS, COLUMNS)
    m, k = shapes.copy_extents(fmt, columnwise, data)
    shape = shapes.tensor_shape(fmt, columnwise, data)
    row_block, column_block = block_of(fmt)
    extents = {kept: (k if columnwise else m, row_block), reduced: (m if columnwise else k, column_block)}
    of_amax = [amax_factors(amax, ROWS) for amax in operands[2:]]
    copy = copy_factors(fmt, columnwise, data, kept, reduced)
    return Rule((*copy, *of_amax), ((*row_factors(shape[:-1], ROWS), COLUMNS),), extents)


def amax_factors(shape: tuple[int, ...], rows: str) -> Factors:
    """Returns the factors of a copy's amax: of the tensor, or one per row."""
    return VECTOR if shape[-1] == 1 else (rows,)
