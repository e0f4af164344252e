"""Functions that select the quantized copies for products and name them for remat policies."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from diptych.common.layers.schedule import OFFSETS as OFFSETS
from diptych.common.ops import shapes
from diptych.jax.tensors.quantized import BUFFERS, QuantizedArray, QuantizedCopies

Array = jax.Array


Q = TypeVar("Q", bound=QuantizedCopies)
Operand = Any  # QuantizedArray, a stack or Array
Copies = tuple[QuantizedArray | None, QuantizedArray | None]  # rowwise, columnwise

CHECKPOINT_NAME = "diptych_q"
"""Name of the quantized copies: `jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("diptych_q"))`
keeps those that the backward pass needs; other policies quantize a second time, to the same bits."""


def only(q: Q, columnwise: bool, op: str = "dense") -> Q:
    """Returns a quantized tensor or stack with only one of its copies. **Raises** ValueError if it lacks that copy."""
    copy = q.copy_of(columnwise, op)
    side = "columnwise" if columnwise else "rowwise"
    fields: dict[str, Any] = dict.fromkeys(BUFFERS) | {f"{side}_data": copy.data, f"{side}_scale_inv": copy.scale_inv}
    fields["columnwise_amax" if columnwise else "amax"] = copy.amax
    quantizer = q.quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise)
    return dataclasses.replace(q, quantizer=quantizer, **fields)


def named(copies: Copies) -> Copies:
    """Returns copies marked with the name `diptych_q` for remat policies."""
    return tuple(None if q is None else checkpoint_name(q, CHECKPOINT_NAME) for q in copies)  # type: ignore[return-value]


def pick(kept: str, copies: Copies, original: Operand) -> Operand:
    """Returns the copy of a tensor that backward reads, or its original."""
    if kept in ("", "original"):
        return original if kept else None
    return copies[kept == "columnwise"]


def values(operand: Operand, dtype: Any) -> Array:
    """Returns an operand in high precision, as a matrix."""
    x = operand.astype(dtype) if isinstance(operand, jax.Array) else operand.dequantize(dtype)
    return x.reshape(shapes.rows_cols(x.shape))


def matmul(a: Array, b: Array) -> Array:
    """Returns a [..., K] @ b [K, N], computed by XLA in their dtype.

    On Explicit mesh axes the result is cut as a's rows and, over axes that those do not take, as b's columns; where K
    is cut, parts are summed. JAX refuses such products if it is not told how the result is cut.
    """
    of_a, of_b = jax.typeof(a).sharding, jax.typeof(b).sharding
    if not any((*of_a.spec, *of_b.spec)):
        return a @ b
    *rows, _ = of_a.spec
    taken = {axis for entry in rows for axis in (entry if isinstance(entry, tuple) else (entry,))}
    last = of_b.spec[-1]
    columns = None if taken & set(last if isinstance(last, tuple) else (last,)) - {None} else last
    like = of_a if any(of_a.spec) else of_b
    return jnp.matmul(a, b, out_sharding=like.update(spec=jax.sharding.PartitionSpec(*rows, columns)))


def add_bias(y: Array, bias: Array) -> Array:
    """Returns y [..., N] + bias [N] in y's dtype. On Explicit mesh axes the bias is cut as y's columns are."""
    sharding = jax.typeof(bias).sharding
    if any(sharding.spec):
        columns = jax.sharding.PartitionSpec(jax.typeof(y).sharding.spec[-1])
        bias = jax.sharding.reshard(bias, sharding.update(spec=columns))
    return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)  # explicitly: rank promotion may be off


def as_bytes(q: Q) -> Q:
    """Returns payloads and one-byte scales as uint8; see the verb `quantize`."""

    def convert(x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 and x.dtype != jnp.uint8 else x

    return jax.tree.map(convert, q)
