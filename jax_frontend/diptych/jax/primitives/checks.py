"""The checks of primitives' operands. Invariants of all primitives:

- A vmapped axis never copies an operand: the handlers loop over it, and reuse operands that lack it.
- A result varies over the mesh axes that its operands vary over, so that shard_map detects a forgotten `pmax`.
- A payload or scale of one byte may also be a uint8 array of its bytes, which JAX does not round or promote.
- A primitive is **not** differentiable; `diptych.jax.dense` defines what a derivative means here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diptych.common.byte_order import check_byte_order
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.formats import FormatRow, format_by_name
from diptych.common.ops import activation, norm, permute, quantize, shapes
from diptych.common.ops import operand as operands
from diptych.common.ops.operand import Operand
from diptych.common.ops.quantize import CopyOperands
from diptych.common.quantizers import Quantizer
from diptych.jax.primitives import ffi
from diptych.jax.primitives.ffi import Source

Array = jax.Array
Aval = Any  # jax.core.ShapedArray

ffi.load()


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype object for a name of the format table."""
    return jax.numpy.dtype(name)


class Copy(NamedTuple):
    """One copy of a quantized tensor; `amax` is for two-level formats, `format` the name of the row."""

    data: Array
    scale_inv: Array
    amax: Array | None
    format: str
    columnwise: bool

    def operands(self, op: str) -> tuple[Array, ...]:
        """The arrays that the op reads. **Raises** ValueError if `amax` is missing, or given and not read."""
        if (self.amax is not None) != format_by_name(self.format).two_level:
            what = "needs" if self.amax is None else "does not read"
            raise ValueError(f"{op}: a copy in {self.format} {what} an amax")
        return (self.data, self.scale_inv) if self.amax is None else (self.data, self.scale_inv, self.amax)


# --- checks ---


def check_native(op: str, arg: str, x: Any) -> None:
    """**Raises** DTypeError for a NumPy array of the other byte order, before JAX raises its own error."""
    if isinstance(x, (np.ndarray, np.generic)):
        check_byte_order(op, arg, x.dtype)


def operand(name: str, aval: Aval, mask: int = 0) -> Operand:
    """Returns an operand, without its batch axes, as an `Operand` of the rules in `diptych.common.ops`."""
    return Operand(name, aval.dtype.name, own_shape(aval, mask), raw=True)


def check_high_precision(op: str, arg: str, dtype: Any, shape: Any) -> None:
    """**Raises** DTypeError unless `dtype` is float32, bfloat16 or float16."""
    operands.require_high_precision(op, Operand(arg, np.dtype(dtype).name, tuple(shape)))


def check_result(op: str, dtype: str) -> None:
    """**Raises** DTypeError if the dtype of a result is not of high precision."""
    operands.require_result_dtype(op, dtype)


def check_dtype(op: str, arg: str, aval: Aval, name: str) -> None:
    operands.require_dtype(op, operand(arg, aval), name)


def check_shape(op: str, arg: str, aval: Aval, mask: int, want: shapes.Shape) -> None:
    enforce(operands.of_shape(op, operand(arg, aval, mask), *want))


def check_buffer(op: str, arg: str, aval: Aval, mask: int, dtype: str, want: shapes.Shape) -> None:
    """Demands that an operand, without its batch axes, has this dtype and shape."""
    operands.require_dtype(op, operand(arg, aval, mask), dtype)
    check_shape(op, arg, aval, mask, want)


def enforce(constraints: Iterable[shapes.Constraint]) -> None:
    """`shapes.check` for sizes that may be symbolic: those must hold for every value. **Raises** each one's error."""
    for c in constraints:
        if isinstance(c.lhs, int) and isinstance(c.rhs, int):
            shapes.check((c,))
        elif c.relation == "==" and c.lhs != c.rhs:  # JAX says so of symbolic sizes that it cannot prove equal
            raise ShapeError(
                f"{c.words()}; {c.lhs} == {c.rhs} does not hold for every symbolic size: say in symbolic_shape what "
                "does, such as '16*k' for a multiple"
            )


def given_amaxes(op: str, quantizer: Quantizer, **amaxes: Array | None) -> dict[str, Array]:
    """Returns the amaxes that the caller passed, which must be all that `quantizer` reads, or none."""
    given = {name: a for name, a in amaxes.items() if a is not None}
    quantize.require_amaxes(op, quantizer, *given)
    return given


def copy_length(format: str) -> int:
    """Returns the number of operands of one copy."""
    return 3 if format_by_name(format).two_level else 2


def copy_operands(avals: tuple[Aval, ...], masks: tuple[int, ...], format: str, columnwise: bool) -> CopyOperands:
    """Returns one copy's data, scales and amax, if it has one, as the operands of rules."""
    parts = [operand(n, a, m) for n, a, m in zip(("data", "scale_inv", "amax"), avals, masks, strict=False)]
    return CopyOperands(format_by_name(format), columnwise, parts[0], parts[1], parts[2] if len(parts) > 2 else None)


def check_copy(
    op: str, arg: str, avals: tuple[Aval, ...], masks: tuple[int, ...], format: str, columnwise: bool
) -> FormatRow:
    """Demands that one copy's data, scales and amax fit the row of its format."""
    copy = copy_operands(avals, masks, format, columnwise)
    enforce(quantize.copy(op, arg, copy))
    return copy.format


# --- maps of rows ---


def check_row_map(op: str, aval: Aval, mask: int) -> shapes.Shape:
    """Demands a row_id_map and returns its shape, (T, slots)."""
    x = operand("row_id_map", aval, mask)
    enforce(permute.row_map(op, x))
    return x.shape


def check_rows(op: str, aval: Aval, mask: int) -> Any:
    """Demands a row_source and returns its number of rows."""
    x = operand("row_source", aval, mask)
    enforce(permute.row_source(op, x))
    return x.shape[0]


# --- sources: computed inputs of amax and quantize ---


def check_gated(op: str, x: Operand, gated: bool) -> shapes.Shape:
    """Shape of an activation of x. **Raises** ShapeError for a scalar, or if gated and x cannot be halved."""
    shape, constraints = activation.activation(op, x, gated)
    enforce(constraints)
    return shape


def check_norm(
    op: str, which: str, x: Operand, names: Iterable[str], avals: Iterable[Aval], masks: Iterable[int]
) -> None:
    """Checks a norm's operands, given by name, against x: gamma, beta [K] and mu, rsigma [M]."""
    given = {name: operand(name, aval, mask) for name, aval, mask in zip(names, avals, masks, strict=True)}
    enforce(norm.norm(op, which, x, **given))
    for t in given.values():  # sums of gradients have their parameter's shape
        if len(t.shape) != 1:
            raise ShapeError(f"{op}: {t.name} must have one dimension, got {t}")


def encoded(
    op: str, source: Source | None, x: Operand, avals: tuple[Aval, ...], masks: tuple[int, ...]
) -> shapes.Shape:
    """Checks the source's operands and returns the shape of the tensor that is quantized."""
    if source is None:
        return x.shape
    if source.kind == "norm":
        statistics = ["mu"] * (source.which == "layernorm") + ["rsigma"]
        check_norm(op, source.which, x, ["gamma", *["beta"] * source.has_beta, *statistics], avals, masks)
        return x.shape
    if source.kind == "permuted":
        tokens, _ = check_row_map(op, avals[0], masks[0])
        enforce(permute.tokens_of(op, x, tokens, "the map's tokens"))
        return check_rows(op, avals[1], masks[1]), x.shape[-1]
    narrow = check_gated(op, x, source.option)
    if source.kind == "activation":
        return narrow
    check_dy(op, avals[0], masks[0], narrow)
    return x.shape


def check_dy(op: str, aval: Aval, mask: int, shape: shapes.Shape) -> None:
    operands.require_high_precision(op, operand("dy", aval, mask))
    check_shape(op, "dy", aval, mask, shape)


def source_length(source: Source | None) -> int:
    """Returns the number of operands of a source."""
    if source is None or source.kind == "activation":
        return 0
    if source.kind == "permuted":
        return 2
    return 1 if source.kind == "activation_grad" else 2 + source.has_beta + (source.which == "layernorm")


# --- conversion of arguments ---


def own_shape(aval: Aval, mask: int) -> shapes.Shape:
    return tuple(aval.shape[mask.bit_count() :])


def axes_of(entry: Any) -> tuple[Any, ...]:
    """Returns the mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def held_by(x: Any) -> Any:
    """Returns the array that x stands for by `__jax_array__`, as flax's `nnx.Param` does; other objects unchanged."""
    if isinstance(x, (jax.Array, np.ndarray)) or not hasattr(type(x), "__jax_array__"):
        return x
    return x.__jax_array__()


def to_array(op: str, arg: str, x: Any) -> Array:
    """Returns x as a JAX array of a high-precision dtype. NumPy's float64 is refused: JAX would round it."""
    x = held_by(x)
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentError(f"{op}: {arg} must be a JAX or NumPy array, got {type(x).__name__}")
    check_high_precision(op, arg, x.dtype, x.shape)
    check_native(op, arg, x)
    return jnp.asarray(x)


def dtype_name(op: str, dtype: Any, default: str) -> str:
    """Name of a result's dtype. **Raises** DTypeError for one that is not of high precision."""
    if dtype is None:
        return default
    try:
        name = np.dtype(jnp.dtype(dtype)).name
    except TypeError:
        raise DTypeError(f"{op}: {dtype!r} is no dtype; choose float32, bfloat16 or float16") from None
    check_result(op, name)
    return name


def factor(op: str, arg: str, value: Any) -> float:
    """A Python number rounded to float32. Arrays are refused: factors are attributes of the compiled call."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ArgumentError(
            f"{op}: {arg} must be a Python number, got {type(value).__name__}; scale the result instead"
        )
    with np.errstate(over="ignore"):
        value = float(np.float32(value))
    if not math.isfinite(value):
        raise ValueError(f"{op}: {arg} must be finite in float32, got {value}")
    return value


def unconverted(op: str, arg: str, value: Any) -> Array:
    """An array as a JAX array. **Raises** DTypeError where JAX would turn it into another dtype."""
    out = jnp.asarray(value)
    if out.dtype != value.dtype:
        raise DTypeError(f"{op}: {arg} is {value.dtype}, which JAX would turn into {out.dtype}; cast it first")
    return out


def small_operand(op: str, arg: str, value: Any) -> Array | None:
    """Returns a small operand as an array: numbers become float32 [1]; arrays are checked later, while tracing."""
    value = held_by(value)
    if value is None or isinstance(value, jax.Array):
        out = value
    elif isinstance(value, (int, float)):
        out = jnp.full(1, value, jnp.float32)
    elif isinstance(value, (np.ndarray, np.generic)):
        check_native(op, arg, value)
        out = unconverted(op, arg, value)
    else:
        raise ArgumentError(f"{op}: {arg} must be a JAX or NumPy array or a number, got {type(value).__name__}")
    return out.reshape(1) if out is not None and out.ndim == 0 else out


def same_axes(*operands: Any) -> list[Any]:
    """Makes all operands, pytrees, vary over the same mesh axes; the transpose sums gradients over the added axes."""
    arrays, tree = jax.tree.flatten(operands)
    axes = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*axes)
    missing = [tuple(sorted(union - own, key=str)) for own in axes]
    arrays = [jax.lax.pcast(x, m, to="varying") if m else x for x, m in zip(arrays, missing, strict=True)]
    return list(tree.unflatten(arrays))
