"""The frameworks' operations of `diptych.lab.replay.table` in plain JAX. The source text of each function stands alone.

A function takes the row's operands by name and the row's options as keyword arguments, and returns the result `out`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Array = jax.Array


def linear(x: Array, weight: Array, bias: Array | None = None, *, dtype: str) -> Array:
    if x.dtype != weight.dtype or x.dtype.itemsize >= jnp.dtype(dtype).itemsize:
        x, weight = x.astype(dtype), weight.astype(dtype)
    out = jnp.einsum("...k,nk->...n", x, weight, preferred_element_type=jnp.dtype(dtype))
    return out if bias is None else out + bias.astype(dtype)


def matmul(a: Array, b: Array, *, equation: str, dtype: str) -> Array:
    if a.dtype != b.dtype or a.dtype.itemsize >= jnp.dtype(dtype).itemsize:
        a, b = a.astype(dtype), b.astype(dtype)
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.dtype(dtype))


def embedding(ids: Array, table: Array) -> Array:
    return jnp.take(table, ids, axis=0)


def conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    layout: str,
    strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
    input_dilation: tuple[int, ...],
    groups: int,
) -> Array:
    of_x, of_weight, of_out = layout.split(",")
    space = sorted(set(of_x) - set("NC"))
    axes = [
        tuple(letters.index(c) for c in (*first, *space))
        for letters, first in ((of_x, "NC"), (of_weight, "OI"), (of_out, "NC"))
    ]
    out = jax.lax.conv_general_dilated(
        x,
        weight,
        strides,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        dimension_numbers=jax.lax.ConvDimensionNumbers(*axes),
        feature_group_count=groups,
    )
    if bias is None:
        return out
    return out + bias.astype(out.dtype).reshape([-1 if c == "C" else 1 for c in of_out])


def softmax(x: Array, *, axis: int) -> Array:
    return jax.nn.softmax(x, axis)


def log_softmax(x: Array, *, axis: int) -> Array:
    return jax.nn.log_softmax(x, axis)


def layer_norm(x: Array, weight: Array | None = None, bias: Array | None = None, *, axes: int, eps: float) -> Array:
    over = tuple(range(-axes, 0))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    centered = wide - wide.mean(over, keepdims=True)
    factor = jax.lax.rsqrt(jnp.square(centered).mean(over, keepdims=True) + eps)
    out = centered * (factor if weight is None else factor * weight.astype(wide.dtype))
    return (out if bias is None else out + bias.astype(wide.dtype)).astype(x.dtype)


def rms_norm(x: Array, weight: Array | None = None, *, axes: int, eps: float) -> Array:
    over = tuple(range(-axes, 0))
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    factor = jax.lax.rsqrt(jnp.square(wide).mean(over, keepdims=True) + eps)
    return (wide * (factor if weight is None else factor * weight.astype(wide.dtype))).astype(x.dtype)


def gelu(x: Array, *, approximate: bool) -> Array:
    return jax.nn.gelu(x, approximate)


def silu(x: Array) -> Array:
    return jax.nn.silu(x)


def add(a: Array, b: Array) -> Array:
    return a + b


def mul(a: Array, b: Array) -> Array:
    return a * b


def rotary(x: Array, cos: Array, sin: Array, *, interleaved: bool) -> Array:
    if interleaved:
        rotated = jnp.stack([-x[..., 1::2], x[..., ::2]], -1).reshape(x.shape)
    else:
        half = x.shape[-1] // 2
        rotated = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * cos + rotated * sin


def cross_entropy(logits: Array, targets: Array, *, axis: int, reduction: str, ignore_index: int | None) -> Array:
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    kept = jnp.ones(targets.shape, bool) if ignore_index is None else targets != ignore_index
    chosen = jnp.expand_dims(jnp.where(kept, targets, 0), axis)
    log = jnp.take_along_axis(jax.nn.log_softmax(wide, axis), chosen, axis).squeeze(axis)
    each = jnp.where(kept, -log, 0)
    if reduction == "none":
        return each.astype(logits.dtype)
    total = each.sum()
    return (total / kept.sum() if reduction == "mean" else total).astype(logits.dtype)


FUNCTIONS: dict[str, Callable[..., Array]] = {
    f.__name__: f
    for f in (
        linear, matmul, embedding, conv, softmax, log_softmax, layer_norm, rms_norm, gelu, silu, add, mul, rotary,
        cross_entropy,
    )
}  # fmt: skip
"""The functions by the names of their rows."""
