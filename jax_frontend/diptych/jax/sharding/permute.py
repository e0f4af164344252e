"""Partitioning rules of the ops that move rows between tokens and experts: a mesh may cut columns alone."""

from __future__ import annotations

from typing import Any

from diptych.jax.primitives.ffi import Batch
from diptych.jax.sharding.quantize import COLUMNS, ROUTED, ROWS, TOKENS, VECTOR, Shapes
from diptych.jax.sharding.rule import Factors, Rule, row_factors

_WHOLE = {ROWS: ROUTED, TOKENS: ROUTED}
_MAP: Factors = (TOKENS, None)
_SOURCE: Factors = (ROWS,)


def permute_map(operands: Shapes, batch: Batch, **_: Any) -> Rule:
    """Routing [T, slots] -> row_id_map, counts [E], offsets [E + 1], row_source [rows]."""
    return Rule((_MAP,), (_MAP, VECTOR, VECTOR, _SOURCE), {}, whole=_WHOLE)


def invert_map(operands: Shapes, batch: Batch, **_: Any) -> Rule:
    """row_id_map [T, slots] -> row_source [rows], row_id_map."""
    return Rule((_MAP,), (_SOURCE, _MAP), {}, whole=_WHOLE)


def permute(operands: Shapes, batch: Batch, fills: tuple[int, ...], has_probs: bool, **_: Any) -> Rule:
    """row_id_map, row_source, planes [..., K] or [T], probs [T, slots] -> planes [rows, K] or [rows], probs [rows]."""
    planes = operands[2 : 2 + len(fills)]
    given = [(*row_factors(s[:-1], TOKENS), COLUMNS) if len(s) > 1 else (TOKENS,) for s in planes]
    made = [(ROWS, COLUMNS) if len(s) > 1 else _SOURCE for s in planes]
    extents = {COLUMNS: (planes[0][-1], 1)} if len(planes[0]) > 1 else {}
    return Rule((_MAP, _SOURCE, *given, *[_MAP] * has_probs), (*made, *[_SOURCE] * has_probs), extents, whole=_WHOLE)


def permute_columns(operands: Shapes, batch: Batch, **_: Any) -> Rule:
    """[H, T] and row_source [rows] -> [H, rows]; H are the columns of the tensor."""
    return Rule(((COLUMNS, TOKENS), _SOURCE), ((COLUMNS, ROWS),), {COLUMNS: (operands[0][0], 1)}, whole=_WHOLE)


def unpermute(operands: Shapes, batch: Batch, has_probs: bool, has_permuted_dprobs: bool) -> Rule:
    """[rows, H], row_id_map, probs [T, slots], dprobs [rows] -> [T, H], dprobs [T, slots]."""
    return Rule(
        ((ROWS, COLUMNS), _MAP, *[_MAP] * has_probs, *[_SOURCE] * has_permuted_dprobs),
        ((TOKENS, COLUMNS), *[_MAP] * has_permuted_dprobs),
        {COLUMNS: (operands[0][1], 1)},
        whole=_WHOLE,
    )


def unpermute_grad(operands: Shapes, batch: Batch, has_dprobs: bool) -> Rule:
    """dy [T, H], row_id_map, row_source, probs, x [rows, H] -> dx [rows, H], dprobs [T, slots], a sum over columns."""
    x = (ROWS, COLUMNS)
    return Rule(
        ((TOKENS, COLUMNS), _MAP, _SOURCE, _MAP, *[x] * has_dprobs),
        (x, *[_MAP] * has_dprobs),
        {COLUMNS: (operands[0][1], 1)},
        ("", *["sum"] * has_dprobs),
        whole=_WHOLE,
    )
