"""The statistics of an array's elements, or of the errors with which they were rounded, as a JAX primitive."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from diptych.common.ops import statistics as rules
from diptych.core import _core
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import Aval, enforce, operand
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, primitive, result

Array = jax.Array

_NAMES = ("x", "result", "largest")


def _rule(avals: Any, batch: Batch) -> tuple[Any, int]:
    operands = [operand(name, aval, axes) for name, aval, axes in zip(_NAMES, avals, batch.axes, strict=False)]
    if len(operands) == 1:
        return rules.statistics(*operands)
    shape, number, sizes = rules.errors(*operands)
    enforce(sizes)
    return shape, number


def _abstract(*avals: Aval, batch: Batch, beyond: float) -> Any:
    (n,), _ = _rule(avals, batch)
    return [result(avals, (*batch_shape(avals, batch), 2 * n), "int32")]


def _attributes(avals: Any, batch: Batch, beyond: float) -> dict[str, np.generic]:
    fields = {"number": np.int32(_rule(avals, batch)[1]), "rounded": np.int32(len(avals) > 1)}
    return ffi.hash_attributes(batch) | fields | {"beyond": np.float32(beyond)}


def _finish(_: Any, platform: str, batch: Batch, beyond: float) -> Any:
    return {}, _core.statistics_workspace_bytes() if platform == "cuda" else None


statistics_p = primitive(
    "statistics",
    _abstract,
    _attributes,
    _finish,
    no_derivative="statistics have none. Wrap their input in jax.lax.stop_gradient",
)


def statistics(x: Array) -> Array:
    """The statistics of the elements of x (NUMERICS 11): int32 [14], the words of float64 [7]."""
    return statistics_p.bind(x, batch=Batch.none(1), beyond=1.0)[0]


def errors(x: Array, result: Array, largest: Array, beyond: float) -> Array:
    """The statistics of the errors of x (NUMERICS 11): int32 [18], the words of float64 [9].

    **Arguments:** arrays of one shape. `x`: float32, bfloat16 or float16. `result`: float32, what x was rounded to.
    `largest`: float32, the largest magnitude that each element can be rounded to. `beyond`: an element counts as
    clipped if its magnitude is above `beyond` times `largest`.
    """
    return statistics_p.bind(x, result, largest, batch=Batch.none(3), beyond=beyond)[0]
