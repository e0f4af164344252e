"""Functions that select the quantized copies for products and name them for remat policies."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from diptych.common.layers.schedule import OFFSETS as OFFSETS
from diptych.common.ops import shapes
from diptych.jax.primitives.checks import axes_of, held_by
from diptych.jax.tensors.quantized import BUFFERS, QuantizedArray, QuantizedCopies

Array = jax.Array


Q = TypeVar("Q", bound=QuantizedCopies)
F = TypeVar("F", bound=Callable[..., Any])
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


def matmul(a: Array, b: Array, trans_a: bool = False, trans_b: bool = False) -> Array:
    """Returns a [..., K] @ b [K, N], computed by XLA in their dtype. `trans_a`: a is [K, M]; `trans_b`: b is [N, K].

    On Explicit mesh axes the result is cut as a's rows and, over axes that those do not take, as b's columns; where K
    is cut, parts are summed. JAX refuses such products if it is not told how the result is cut.
    """
    # Operands are not transposed: the gradient of a transposed operand is a transposed product, and XLA:CPU (jax 0.12)
    # may fold that transpose into the product and then sum bfloat16 values in bfloat16.
    inner_a, inner_b = 0 if trans_a else a.ndim - 1, 1 if trans_b else 0
    of_a, of_b = jax.typeof(a).sharding, jax.typeof(b).sharding
    out = None
    if any((*of_a.spec, *of_b.spec)):
        rows = [entry for i, entry in enumerate(of_a.spec) if i != inner_a]
        taken, last = {axis for entry in rows for axis in axes_of(entry)}, of_b.spec[1 - inner_b]
        columns = None if taken & set(axes_of(last)) else last
        like = of_a if any(of_a.spec) else of_b
        out = like.update(spec=jax.sharding.PartitionSpec(*rows, columns))
    return jax.lax.dot_general(a, b, (((inner_a,), (inner_b,)), ((), ())), out_sharding=out)


def add_bias(y: Array, bias: Array) -> Array:
    """Returns y [..., N] + bias [N] in y's dtype. On Explicit mesh axes the bias is cut as y's columns are."""
    sharding = jax.typeof(bias).sharding
    if any(sharding.spec):
        columns = jax.sharding.PartitionSpec(jax.typeof(y).sharding.spec[-1])
        bias = jax.sharding.reshard(bias, sharding.update(spec=columns))
    return y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)  # explicitly: rank promotion may be off


def folds_cut_rows(layer: F) -> F:
    """Decorates a layer, whose first argument is x [..., K], for Explicit mesh axes that cut several leading dimensions
    of x, or another one than the first that is longer than 1, such as the sequence of [batch, sequence, K].

    Leading dimensions fold into rows, and the parts of such a cut lie apart there. So each device folds its own part:
    the layer gets [devices, rows of one, K], cut along the first dimension. Results, but for states, are unfolded.
    """

    @functools.wraps(layer)
    def folded(x: Any, *args: Any, **options: Any) -> Any:
        x = held_by(x)
        sharding = jax.typeof(x).sharding if isinstance(x, jax.Array) and x.ndim > 2 else None
        if sharding is None or not _lies_apart(x.shape, sharding.spec):
            return layer(x, *args, **options)
        *leading, last = sharding.spec
        axes = tuple(axis for entry in leading for axis in axes_of(entry))

        def local(shape: tuple[int, ...], y: Array, before: Any, after: Any) -> Array:
            every = {*axes, *axes_of(before[-1])}
            of_y, spec = jax.sharding.PartitionSpec(*before), jax.sharding.PartitionSpec(*after)
            fold = lambda v: v.reshape(*shape, v.shape[-1])  # noqa: E731
            mapped = jax.shard_map(fold, mesh=sharding.mesh, in_specs=of_y, out_specs=spec, axis_names=every)
            return jax.jit(mapped)(y)

        part = sharding.shard_shape(x.shape)[:-1]
        out = layer(local((1, math.prod(part)), x, (*leading, last), (axes, None, last)), *args, **options)

        def unfolded(y: Any) -> Any:
            if not isinstance(y, jax.Array):
                return y  # states
            columns = jax.typeof(y).sharding.spec[-1]
            return local(part, y, (axes, None, columns), (*leading, columns))

        return tuple(map(unfolded, out)) if isinstance(out, tuple) else unfolded(out)

    return folded  # type: ignore[return-value]


def _lies_apart(shape: tuple[int, ...], spec: Any) -> bool:
    """Returns whether a leading dimension is cut that is not the first longer than 1."""
    first = next((i for i, n in enumerate(shape[:-1]) if n != 1), 0)
    return any(entry is not None and i != first for i, entry in enumerate(spec[:-1]))


def as_bytes(q: Q) -> Q:
    """Returns payloads and one-byte scales as uint8; see the verb `quantize`."""

    def convert(x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x, jnp.uint8) if x.dtype.itemsize == 1 and x.dtype != jnp.uint8 else x

    return jax.tree.map(convert, q)
