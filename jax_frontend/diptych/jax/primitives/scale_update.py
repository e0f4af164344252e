"""The update of delayed scales as a JAX primitive."""

from __future__ import annotations

from typing import Any

import jax

from diptych.common.ops import scale_update as rules
from diptych.common.ops import shapes
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import (
    Aval,
    enforce,
    operand,
    own_shape,
)
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, in_place, primitive, result

Array = jax.Array


def _scale_update_abstract(
    history: Aval,
    scale: Aval,
    *chosen: Aval,
    batch: Batch,
    has_reduced: bool,
    has_amax: bool,
    fp8_max: str,
    margin: int,
    most_recent: bool,
) -> Any:
    names = ["history", "scale", *["reduced"] * has_reduced, *["amax"] * has_amax]
    given = {n: operand(n, a, m) for n, a, m in zip(names, (history, scale, *chosen), batch.axes, strict=True)}
    factors = float.fromhex(fp8_max), margin, most_recent
    pair = given.get("reduced"), given.get("amax")
    enforce(rules.scale_update(given["history"], given["scale"], *pair, *factors))
    n, _ = shapes.rows_cols(given["history"].shape)
    operands = (history, scale, *chosen)
    front = batch_shape(operands, batch)
    updated = (history, *chosen[:1]) if has_reduced else (history,)
    return [
        result(updated, (*front, *own_shape(history, batch.axes[0])), "float32"),
        result(operands, (*front, n), "float32"),
    ]


def _scale_update_attributes(_: Any, batch: Batch, fp8_max: str, **params: Any) -> Any:
    return ffi.scale_update_attributes(batch, fp8_max=float.fromhex(fp8_max), **params)


scale_update_p = primitive(
    "scale_update",
    _scale_update_abstract,
    _scale_update_attributes,
    lambda ctx, platform, batch, **_: (in_place(batch, {0: 0, 1: 1}), None),
)


def scale_update(
    history: Array,
    scale: Array,
    reduced: Array | None,
    amax: Array | None,
    fp8_max: float,
    margin: int,
    most_recent: bool,
) -> tuple[Array, Array]:
    """Returns the new history [n, L] or [L] and scale [n], in the memory of the old ones if XLA may reuse it."""
    args = [history, scale, *(x for x in (reduced, amax) if x is not None)]
    outs = scale_update_p.bind(
        *args,
        batch=Batch.none(len(args)),
        has_reduced=reduced is not None,
        has_amax=amax is not None,
        fp8_max=float(fp8_max).hex(),
        margin=margin,
        most_recent=most_recent,
    )
    return outs[0], outs[1]
