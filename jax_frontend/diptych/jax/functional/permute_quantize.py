"""`moe_permute_and_quantize`: permutes rows and quantizes them in one op.

One kernel reads each token once and writes both copies of its rows, also those whose blocks span permuted rows.
"""

from __future__ import annotations

from typing import Any, overload

import jax

from diptych.common.errors import ArgumentError
from diptych.common.ops.quantize import require_quantizer
from diptych.common.quantizers import Quantizer
from diptych.jax.functional import quantize as quantize_verbs
from diptych.jax.functional import source as sources
from diptych.jax.functional.permute import RowMap, require_row_map, slot_probs
from diptych.jax.functional.permute_op import permute, permute_probs
from diptych.jax.primitives import checks
from diptych.jax.primitives import quantize as quantize_ops
from diptych.jax.tensors.quantized import QuantizedArray, from_buffers

Array = jax.Array


@overload
def moe_permute_and_quantize(
    inp: Array, row_map: RowMap, quantizer: Quantizer, *, amax: Any = None, columnwise_amax: Any = None,
    scale: Any = None, rng: Array | None = None,
) -> QuantizedArray: ...  # fmt: skip
@overload
def moe_permute_and_quantize(
    inp: Array, row_map: RowMap, quantizer: Quantizer, *, probs: Array, amax: Any = None, columnwise_amax: Any = None,
    scale: Any = None, rng: Array | None = None,
) -> tuple[QuantizedArray, Array]: ...  # fmt: skip


def moe_permute_and_quantize(
    inp: Array,
    row_map: RowMap,
    quantizer: Quantizer,
    *,
    probs: Array | None = None,
    amax: Any = None,
    columnwise_amax: Any = None,
    scale: Any = None,
    rng: Array | None = None,
) -> Any:
    """`quantize(moe_permute(inp, row_map)[0], quantizer)` in one pass, without storing permuted rows in high precision.

    **Arguments:** `inp`: [T, H] (or [..., H]) float32, bfloat16 or float16. `row_map`: a `RowMap` whose row_id_map and
    row_source agree, as those of `moe_map` do. `quantizer`, `amax`, `columnwise_amax`, `scale`, `rng`: as `quantize`
    for the permuted rows. `probs`: as `moe_permute_with_probs`.

    **Returns:** a `QuantizedArray` [rows, H], where blocks of a columnwise copy span permuted rows and absent rows are
    quantized zeros; with `probs` a pair, whose second is permuted_probs [rows]. It is differentiable once in probs, and
    not in inp, like `quantize`; use `grouped_dense(row_map=)` to train.

    **Raises:** as `quantize`; TypeError also if `row_map` is no RowMap, ValueError for unequal numbers of tokens,
    NotImplementedError for a derivative with respect to inp.
    """
    op = "moe_permute_and_quantize"
    require_quantizer(op, quantizer)
    if isinstance(inp, QuantizedArray):
        raise ArgumentError(f"{op}: inp is quantized; moe_permute moves it as it is")
    x = checks.to_array(op, "inp", inp)
    maps = require_row_map(op, x, row_map)
    if probs is not None:
        probs = slot_probs(op, "probs", probs, maps[0].shape)
    given: dict[str, Any] = {"amax": amax, "columnwise_amax": columnwise_amax, "scale": scale, "rng": rng}
    if quantizer.custom:
        rows, moved = permute(x.reshape(maps[0].shape[0], x.shape[-1]), *maps, probs)
        q = quantize_verbs.quantize(rows, quantizer, **given)
    else:
        f = sources.permuted(x, *maps)
        given = {name: checks.small_operand(op, name, value) for name, value in given.items()}
        buffers = quantize_ops.quantize(x, quantizer, **given, source=f.source, operands=f.operands)
        q = from_buffers(buffers, quantizer, f.shape, x.dtype)
        moved = None if probs is None else permute_probs(probs, *maps)
    return q if probs is None else (q, moved)
