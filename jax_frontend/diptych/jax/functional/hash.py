"""The verb `hash`: a hash of an array's bits."""

from __future__ import annotations

import jax
import numpy as np

from diptych.common.errors import ArgumentError
from diptych.common.ops import hash as rules
from diptych.jax.primitives import hash as hash_ops
from diptych.jax.primitives.checks import check_native, held_by, operand, unconverted

Array = jax.Array


def hash(x: Array) -> Array:
    """Returns the hash of the bits of `x`, int32 [4] (NUMERICS 10).

    Under `vmap` each example has a hash of its own, inside of `shard_map` each shard; a sharded array under `jit` has
    that of the whole array, for which each device gathers it.

    **Arguments:** `x`: any shape; integers, floats, complex numbers or bools of whole bytes. Its elements count in
    row-major order; shape and dtype do not count.

    **Raises:** TypeError for another dtype, an array that JAX would convert (float64 without 64-bit mode), or anything
    but an array; NotImplementedError where it is differentiated.
    """
    x = held_by(x)
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentError(f"hash: x must be a JAX or NumPy array, got {type(x).__name__}")
    check_native("hash", "x", x)
    rules.hash(operand("x", x))
    return hash_ops.hash(unconverted("hash", "x", x))
