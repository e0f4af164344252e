"""The verb `scale_update`: delayed scales from histories of amaxes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.errors import ArgumentError
from diptych.jax.primitives import scale_update as scale_update_ops
from diptych.jax.primitives.checks import check_dtype, check_native, factor

Array = jax.Array


def scale_update(
    history: Array,
    scale: Array,
    *,
    reduced: Array | None = None,
    amax: Array | None = None,
    fp8_max: float = 448.0,
    margin: int = 0,
    most_recent: bool = False,
) -> tuple[Array, Array]:
    """Delayed scaling's update (NUMERICS 2) of n tensors that share an element.

    **Arguments:** `history`: float32 [n, L], or [L] where n is 1; L >= 1. Entry 0 holds the amax since the last update.
    `scale`: float32 [n]. `reduced`: [n] amaxes after a reduction over a group, each used instead of entry 0 if not 0.
    `amax`: [n] amaxes from the caller's own algorithm, each used if an amax was recorded. `fp8_max`: the element's
    largest value. `margin`: the scale is divided by 2^margin. `most_recent`: use the latest amax, not the largest of
    the history.

    **Returns:** (history, scale), new arrays, in the memory of the old ones if these are donated. A history of one
    entry holds 0 after each update.

    **Raises:** TypeError for other dtypes, ValueError for other shapes, an `fp8_max` or `margin` out of range, or
    `most_recent` with `amax`.
    """
    arrays = {"history": history, "scale": scale, "reduced": reduced, "amax": amax}
    for name, x in arrays.items():
        optional = name in ("reduced", "amax")
        if not isinstance(x, (jax.Array, np.ndarray)) and not (optional and x is None):
            raise ArgumentError(f"scale_update: {name} must be a JAX or NumPy array, got {type(x).__name__}")
        check_native("scale_update", name, x)
        if x is not None:  # before JAX would round float64
            check_dtype("scale_update", name, x, "float32")
    if isinstance(margin, bool) or not isinstance(margin, (int, np.integer)):
        raise ArgumentError(f"scale_update: margin must be a Python integer, got {type(margin).__name__}")
    fp8_max = factor("scale_update", "fp8_max", fp8_max)
    operands: Any = {name: None if x is None else jnp.asarray(x) for name, x in arrays.items()}
    return scale_update_ops.scale_update(**operands, fp8_max=fp8_max, margin=int(margin), most_recent=bool(most_recent))
