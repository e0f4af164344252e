"""The hash of an array's bits as a JAX primitive."""

from __future__ import annotations

from typing import Any

import jax

from diptych.common.ops import hash as rules
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import Aval, operand
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, primitive, result

Array = jax.Array


def _hash_abstract(x: Aval, *, batch: Batch) -> Any:
    shape = rules.hash(operand("x", x, batch.axes[0]))
    return [result((x,), (*batch_shape((x,), batch), *shape), "int32")]


hash_p = primitive(
    "hash",
    _hash_abstract,
    lambda _, batch: ffi.hash_attributes(batch),
    no_derivative="a hash has none. Wrap its input in jax.lax.stop_gradient",
)


def hash(x: Array) -> Array:
    """The hash of the bits of x, int32 [4]."""
    return hash_p.bind(x, batch=Batch.none(1))[0]
