"""`grouped_dense`: a linear layer for each group of rows, such as the experts of a layer.

    y[r]  = quantize(x)[r]  @ quantize(w[g]).T + bias[g]      fprop  rows of group g, [R, K] @ [G, N, K].T
    dx[r] = quantize(dy)[r] @ quantize(w[g])                  dgrad  [R, N] @ [G, N, K]
    dw[g] = quantize(dy)[of g].T @ quantize(x)[of g]          wgrad  over the rows of group g
    db[g] = the sum of dy's rows in group g

x and dy are quantized as one tensor each, as in a linear layer. w is quantized as G tensors, except that delayed
scaling has one scale, and one amax, for all of them. Rows in no group are zeros in y and dx, and are not summed.
`products.py` has forward and backward.

With a map of rows, x is in token order: its rows are quantized as they move to their experts, and dx is each token's
sum. The bits are those of permuting first.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from diptych.common.arguments import require_recipe
from diptych.common.errors import ArgumentError, DTypeError
from diptych.common.gemm_options import GemmOptions
from diptych.common.layer_options import Originals
from diptych.common.layers.checks import (
    require_align,
    require_fit,
    require_groups_once,
    require_offset_count,
    require_stackable,
    require_whole_rotations,
)
from diptych.common.layers.groups import HIGH_PRECISION
from diptych.common.layers.schedule import Call, Schedule
from diptych.common.ops import shapes
from diptych.common.ops.grouped import align_of, kernel_align
from diptych.common.recipes import Recipe
from diptych.jax.functional import grouped
from diptych.jax.functional import source as sources
from diptych.jax.functional.permute import RowMap, moe_permute, require_row_map
from diptych.jax.functional.source import FusedInput
from diptych.jax.layers import products
from diptych.jax.layers.calibrate import observed
from diptych.jax.layers.checks import STACK, check_rng, kernel_operand, refuse_calibration, refuse_without_recipe
from diptych.jax.layers.held import high_precision
from diptych.jax.layers.linear import prepare
from diptych.jax.layers.options import CallState, Options, States
from diptych.jax.layers.products import (
    DenseGradients,
    LayerArrays,
    Needs,
    Products,
    cotangents,
    fprop,
    primals,
    recorded,
)
from diptych.jax.primitives import permute as permute_ops
from diptych.jax.primitives.checks import same_axes, to_array
from diptych.jax.primitives.grouped_matmul import grouped_matmul
from diptych.jax.primitives.register import defvjp
from diptych.jax.state.carry import returned, viewed
from diptych.jax.state.scales import ScaleState, check_states, group_axes
from diptych.jax.tensors.copies import Copies, Operand, values
from diptych.jax.tensors.quantized import QuantizedStack

Array = jax.Array


def grouped_dense(
    x: Array,
    kernel: Array | QuantizedStack,
    bias: Array | None = None,
    offsets: Array | None = None,
    *,
    recipe: Recipe | None,
    row_map: RowMap | None = None,
    align: int = 1,
    module: str = "grouped_linear",
    name: str = "",
    state: Mapping[str, ScaleState] | None = None,
    return_state: bool = False,
    record: bool = True,
    rng: Array | None = None,
    copies: Copies | None = None,
    main_grad: Any = None,
    save_original_input: bool = False,
    calibrate: bool = False,
    row_axes: str | tuple[str, ...] = (),
) -> Any:
    """x[r] @ kernel[g].T + bias[g] for the rows r of each group g, forward and backward as `recipe` describes.

    Forward and backward compute, bit for bit, what `diptych.torch.GroupedLinear` does. Nothing waits for the offsets.
    Rows in no group enter no product, but count in amaxes of the whole tensor and in blocks of scales that they share
    with a group: keep zeros there, as `moe_permute` does.

    **Arguments:**
    - `x`: [..., K] with R rows. `kernel`: [G, N, K]. `bias`: [G, N]. All float32, bfloat16 or float16. A kernel may be
      a `QuantizedStack` with the copies that the recipe needs; its gradient then goes to `main_grad`.
    - `offsets`: int32 [G + 1], such as `RowMap.expert_offsets`; group g is rows offsets[g] <= r < offsets[g + 1]. Under
      a recipe the CPU refuses offsets that descend or leave 0..R, when it runs. CUDA, and products in high precision,
      clamp each to between the one before it and R.
    - `row_map`: of `moe_map`, instead of offsets, which are then its expert_offsets. x is in token order, [T, K] (or
      [..., K]), and the layer permutes its rows: results, gradients and states have the bits of `moe_permute` before
      this layer, but rows that are quantized are not stored in high precision. With `save_original_input`, or for
      products in high precision, forward saves x itself.
    - `recipe`: None gives products in high precision, in x's dtype, and the same bias gradient.
    - `align`: a Python int, a promise that every offset is a multiple of it: tensor cores need at least 32 in wgrad,
      128 where scales stand for 128 rows, and other groups take a slower kernel; a Hadamard transform needs a multiple
      of 16. `diptych.common.row_align` returns the alignment for a recipe.
    - `copies`: of the kernel, from `quantize_kernel(kernel, recipe, module="grouped_linear")`, to be used instead of
      quantizing it.
    - `main_grad`: float32 [G, N, K], an array or a reference, as in `dense`.
    - `row_axes`: mesh axes of a `jax.shard_map` over which the layer's rows are spread, as `expert_parallel` spreads
      them. Amaxes of x and dy are reduced over them (besides the recipe's `amax_group`), those of kernels are not:
      each device may have other experts.
    - `module`, `name`, `state`, `return_state`, `record`, `rng`, `save_original_input`, `calibrate`: as in `dense`;
      states are those of `init_state(recipe, module="grouped_linear")`.

    **Returns:** y, [..., N] of x's dtype, or with a `row_map` [rows, N] in expert order; rows in no group are +0. With
    `return_state`: (y, state).

    **Raises:** as `dense`; ValueError also for groups given twice or not at all, a map that does not fit, a
    Hadamard transform without its promise where the kernel is differentiated; NotImplementedError for kernels that are
    rounded stochastically or quantized by the user's own code. All but for values of `offsets` while tracing.
    """
    op = "grouped_dense"
    require_recipe(op, recipe)
    given = offsets
    x, kernel, bias, offsets, maps, rng = _operands(op, x, kernel, bias, offsets, row_map, rng)
    promise = _promise(op, align, given)
    if row_map is not None and (recipe is None or calibrate):
        x, maps = moe_permute(x, row_map)[0], None
    if recipe is None:
        refuse_without_recipe(op, state=state, copies=copies, main_grad=main_grad, calibrate=calibrate or None)
        y = _plain(x, kernel, bias, offsets)
        return (y, {}) if return_state else y
    axes = _axes(recipe, row_axes)
    options = Options(recipe, module, name, Originals(save_original_input), record, return_state, axes[0], op, axes[1])
    states = check_states(op, state, options.plan, recipe)
    if calibrate:
        refuse_calibration(op, record, copies=copies, main_grad=main_grad)
        kernel = high_precision(kernel, x.dtype)
        y = _plain(x, kernel, bias, offsets)
        y, news = observed(options, y, x, kernel, viewed(states, (x, kernel, bias)))
    else:
        operands = (x, bias, offsets, maps, *prepare(kernel, options, copies, main_grad))
        x, bias, offsets, maps, trained, copies, main_grad = same_axes(*operands)
        of_call = CallState(viewed(states, (x, trained, bias, main_grad)), rng)
        layer = LayerArrays(trained, bias, of_call, copies, main_grad)
        out: Any = _grouped_dense(options, promise, x, layer, offsets, maps)
        y, news = out
    news = returned(states, news)
    return (y, news) if return_state else y


def _plain(x: Array, kernel: Any, bias: Array | None, offsets: Array) -> Array:
    """The layer in high precision."""
    x, kernel, bias, offsets = same_axes(x, high_precision(kernel, x.dtype), bias, offsets)
    layer = LayerArrays(kernel, bias, CallState({}), None)
    out: Any = _grouped_dense(Options(HIGH_PRECISION), 1, x, layer, offsets, None)
    return out[0]


# --- arguments ---


class Maps(NamedTuple):
    """The arrays of a `RowMap` by which the layer permutes x, whose rows are tokens. `row_source`: None if unused."""

    row_id_map: Array
    row_source: Array | None


def _operands(
    op: str, x: Any, kernel: Any, bias: Any, offsets: Any, row_map: Any, rng: Any
) -> tuple[Array, Any, Array | None, Array, Maps | None, Array | None]:
    """Returns the operands as arrays, tokens as [T, K]; a quantized kernel is returned unchanged. **Raises** TypeError,
    ValueError, NotImplementedError."""
    x, kernel = to_array(op, "x", x), kernel_operand(STACK._replace(op=op), kernel, QuantizedStack)
    bias = None if bias is None else to_array(op, "bias", bias)
    require_groups_once(op, offsets, row_map)
    maps = None
    if row_map is not None:
        maps, offsets = Maps(*require_row_map(op, x, row_map, "x")), row_map.expert_offsets
        x = x.reshape(shapes.rows_cols(x.shape))
    if not isinstance(offsets, (jax.Array, np.ndarray)):
        raise ArgumentError(f"{op}: offsets must be a JAX or NumPy array, int32 [G + 1], got {type(offsets).__name__}")
    if offsets.dtype != jnp.int32:
        raise DTypeError(f"{op}: offsets must be int32, got {offsets.dtype}{list(offsets.shape)}")
    names = STACK._replace(op=op)
    require_fit(names, 3, x, kernel, bias)
    require_offset_count(names, offsets, kernel.shape[0])
    return x, kernel, bias, jnp.asarray(offsets), maps, check_rng(op, rng)


def _axes(recipe: Recipe, row_axes: str | tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the mesh axes over which amaxes of rows are reduced, and those of them that do not apply to kernels."""
    rows, group = (row_axes,) if isinstance(row_axes, str) else tuple(row_axes), group_axes(recipe)
    return (*group, *(axis for axis in rows if axis not in group)), rows


def _promise(op: str, align: Any, offsets: Any) -> int:
    """Returns the alignment to pass to kernels: `align`, or a larger one if NumPy offsets on the host show it."""
    require_align(op, align)
    promise = kernel_align(align)
    return max(promise, align_of(offsets.tolist())) if isinstance(offsets, np.ndarray) else promise


def _require_supported(options: Options, align: int, held: bool, need_dx: bool, need_dw: bool) -> None:
    """**Raises** NotImplementedError for quantizers that a stack of kernels does not support, ValueError if wgrad's
    operands are Hadamard-rotated and a rotation would cross groups."""
    names, s = STACK._replace(op=options.op), options.schedule(need_dx, need_dw)
    require_stackable(names, (*(() if held else s.w), s.results[2]))
    if need_dw:
        require_whole_rotations(names, options.recipe, s.plan, align, align)


# --- products ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=("offsets",), meta_fields=("align",))
@dataclasses.dataclass(frozen=True, eq=False)
class Groups(Products):
    """Computes the products of a stack of kernels, one for each group of rows. `align`: one of `ALIGNS`."""

    offsets: Array
    align: int

    def product(self, gemm: str, a: Operand, b: Operand, bias: Array | None, dtype: Any, options: GemmOptions) -> Array:
        depth, trans_b = gemm == "wgrad", gemm == "fprop"
        if not (isinstance(a, jax.Array) or isinstance(b, jax.Array)):
            return grouped.grouped_gemm(
                a, b, self.offsets, trans_a=depth, trans_b=trans_b, bias=bias, out_dtype=dtype, align=self.align,
                **options._asdict(),
            )  # fmt: skip
        inner = a.dtype if isinstance(a, jax.Array) else b.dtype
        right = b.astype(inner) if isinstance(b, jax.Array) else b.dequantize(inner)
        bias = None if bias is None else bias.astype(inner)
        right = values(right, inner) if depth else right
        out = grouped_matmul(values(a, inner), right, self.offsets, bias, depth=depth, trans_b=trans_b).astype(dtype)
        return out if depth else out.reshape(*a.shape[:-1], out.shape[-1])

    def bias_grad(self, dy: Array, dtype: str) -> Array:
        return grouped.grouped_bias_grad(dy, self.offsets, dtype)


# --- forward and backward ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=("layer", "maps"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class _Saved:
    """The residuals of the backward pass. If backward permutes x again, x is the array of tokens."""

    layer: products.Saved
    maps: Maps | None


def _rows(x: Array, maps: Maps | None, calls: tuple[Call, ...]) -> Array | FusedInput:
    """Returns x in the order of groups. Permuted rows are not stored if only `calls` read them and all are the core's;
    if there are no calls, they are stored."""
    if maps is None or maps.row_source is None:
        return x
    if calls and not any(call.quantizer.custom for call in calls):
        return sources.permuted(x, maps.row_id_map, maps.row_source)
    return permute_ops.permute((x,), maps.row_id_map, maps.row_source)[0][0]


def _read_forward(s: Schedule) -> tuple[Call, ...]:
    return () if s.plan.input.rowwise is None else s.x


def _grouped_forward(
    options: Options, align: int, needs: Needs, x: Array, layer: LayerArrays, offsets: Array, maps: Maps | None
) -> tuple[tuple[Array, States], _Saved]:
    _require_supported(options, align, layer.kernel is None, needs.dx, needs.dw)
    rows = _rows(x, maps, _read_forward(options.schedule(needs.dx, needs.dw)))
    made, saved = products.forward(options, needs, rows, layer, Groups(offsets, align))
    if maps is not None and isinstance(saved.x, (jax.Array, FusedInput)):
        saved = dataclasses.replace(saved, x=x)
    elif maps is not None:
        maps = maps._replace(row_source=None)
    return made, _Saved(saved, maps)


def _grouped_backward(saved: _Saved, dy: Any, later: States | None = None) -> DenseGradients:
    layer, maps = saved.layer, saved.maps
    if isinstance(layer.x, jax.Array) and not isinstance(dy, SymbolicZero):
        late = layer.options.schedule(layer.needs.dx, layer.needs.dw).x_late
        layer = dataclasses.replace(layer, x=_rows(layer.x, maps, late))
    made = products.backward(layer, dy, later)
    if maps is None or made.x is None:
        return made
    return made._replace(x=permute_ops.unpermute(made.x, maps.row_id_map)[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_dense(
    options: Options, align: int, x: Array, layer: LayerArrays, offsets: Array, maps: Maps | None
) -> tuple[Array, States]:
    _require_supported(options, align, layer.kernel is None, False, False)
    rows, groups = _rows(x, maps, _read_forward(options.schedule(False, False))), Groups(offsets, align)
    y, _, _, amaxes = fprop(options, False, False, rows, layer, groups)
    return y, recorded(layer.state.states, amaxes, options)


def _forward(options: Options, align: int, x: Any, layer: LayerArrays, *groups: Any) -> Any:
    return _grouped_forward(options, align, Needs.of(x, layer, options.op), *primals((x, layer, *groups)))


def _backward(options: Options, align: int, saved: _Saved, grads: tuple[Any, States]) -> tuple[Any, ...]:
    made = _grouped_backward(saved, *grads)
    return made.x, cotangents(saved.layer, made), None, None


defvjp(_grouped_dense, _forward, _backward)
