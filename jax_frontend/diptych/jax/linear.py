"""`dense`: a linear layer whose three products run on quantized operands."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from diptych.common.errors import DTypeError, ShapeError
from diptych.common.quantizers import QuantizerRole
from diptych.common.recipes import Recipe
from diptych.jax import functional
from diptych.jax.quantized import QuantizedArray

Array = jax.Array

CHECKPOINT_NAME = "diptych_q"
"""Name of the quantized copies: `jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("diptych_q"))`
keeps those that the backward pass needs; other policies quantize a second time."""


def dense(x: Array, kernel: Array, bias: Array | None = None, *, recipe: Recipe | None) -> Array:
    """x @ kernel.T + bias, forward and backward in the low precision that `recipe` describes.

    Forward and backward compute, bit for bit, what `diptych.torch.Linear` does: y from the rowwise copies of x and
    kernel, dx from dy and the kernel's columnwise copy, dkernel from the columnwise copies of dy and x, dbias from dy
    itself. A product that nobody differentiates is not computed, and its copies are not made.

    The recipe is an argument, not a context: `jax.jit` caches by argument, so a function that was traced under one
    global recipe would go on running it, silently, after a switch. Recipes are frozen and hashable; close over one or
    name it in `static_argnames`.

    **Arguments:** `x`: [..., K]. `kernel`: [N, K], as in torch. `bias`: [N]. All float32, bfloat16 or float16; dtypes
    may differ, and the kernel is quantized from its own. `recipe`: None gives the plain product in x's dtype,
    `x @ kernel.T + bias`, by XLA and at `jax_default_matmul_precision`.

    **Returns:** [..., N] of x's dtype. Gradients have the dtypes of what they belong to. Inside shard_map they are
    summed over the mesh axes that an argument does not vary over, as JAX does for its own operations; scales are each
    shard's own.

    **Raises:** TypeError for other dtypes or a recipe that is none, ValueError for shapes that do not fit, both while
    tracing.
    """
    x, kernel = functional._array("dense", "x", x), functional._array("dense", "kernel", kernel)
    bias = None if bias is None else functional._array("dense", "bias", bias)
    if recipe is not None and not isinstance(recipe, Recipe):
        raise DTypeError(f"dense: recipe must be a diptych Recipe or None, got {type(recipe).__name__}")
    if kernel.ndim != 2:
        raise ShapeError(f"dense: kernel must be [N, K], got {list(kernel.shape)}")
    if x.ndim == 0 or x.shape[-1] != kernel.shape[1]:
        raise ShapeError(f"dense: x {list(x.shape)} and kernel {list(kernel.shape)} must share their last dimension")
    if bias is not None and bias.shape != kernel.shape[:1]:
        raise ShapeError(
            f"dense: bias must be [{kernel.shape[0]}] for kernel {list(kernel.shape)}, got {list(bias.shape)}"
        )
    if recipe is None:
        y = x @ kernel.astype(x.dtype).T
        return y if bias is None else y + bias.astype(x.dtype)
    return _dense(recipe, *_same_axes(x, kernel, bias))


def _same_axes(*arrays: Array | None) -> list[Array | None]:
    """Lets all operands vary over the same mesh axes; the transpose sums the gradient of those that did not."""
    axes = [frozenset() if x is None else jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*axes)
    missing = [tuple(sorted(union - own, key=str)) for own in axes]
    return [
        x if x is None or not m else jax.lax.pcast(x, m, to="varying") for x, m in zip(arrays, missing, strict=True)
    ]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("x", "kernel"), meta_fields=("kernel_dtype", "bias_dtype")
)
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What the backward pass needs: quantized copies (None: not needed) and the dtypes of the gradients."""

    x: QuantizedArray | None
    kernel: QuantizedArray | None
    kernel_dtype: str
    bias_dtype: str | None  # None: no gradient wanted


def _quantize(recipe: Recipe, tensor: str, x: Array, rowwise: bool, columnwise: bool) -> QuantizedArray:
    quantizer = recipe.quantizer(QuantizerRole(module="linear", tensor=tensor))
    # As bytes, so that no remat policy rounds them; see functional.quantize.
    return functional.quantize(x, quantizer.with_usage(rowwise=rowwise, columnwise=columnwise), as_bytes=True)


def _columnwise_only(q: QuantizedArray) -> QuantizedArray:
    """The copy that the backward pass reads."""
    quantizer = q.quantizer.with_usage(rowwise=False, columnwise=True)
    return dataclasses.replace(q, quantizer=quantizer, rowwise_data=None, rowwise_scale_inv=None, amax=None)


def _product(recipe: Recipe, qx: QuantizedArray, qkernel: QuantizedArray, bias: Array | None, dtype: Any) -> Array:
    return functional.gemm(qx, qkernel, bias=bias, out_dtype=dtype, fast_accum=recipe.fast_accum("fprop"))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(recipe: Recipe, x: Array, kernel: Array, bias: Array | None) -> Array:
    qx = _quantize(recipe, "input", x, True, False)
    return _product(recipe, qx, _quantize(recipe, "weight", kernel, True, False), bias, x.dtype)


def _forward(recipe: Recipe, x: Any, kernel: Any, bias: Any) -> tuple[Array, _Saved]:
    # Each argument comes with `.perturbed`: whether its gradient is wanted. The name covers both copies, because a
    # remat policy that drops y computes it again from the rowwise ones.
    qx = checkpoint_name(_quantize(recipe, "input", x.value, True, kernel.perturbed), CHECKPOINT_NAME)
    qkernel = checkpoint_name(_quantize(recipe, "weight", kernel.value, True, x.perturbed), CHECKPOINT_NAME)
    y = _product(recipe, qx, qkernel, None if bias is None else bias.value, x.value.dtype)
    return y, _Saved(
        x=_columnwise_only(qx) if kernel.perturbed else None,
        kernel=_columnwise_only(qkernel) if x.perturbed else None,
        kernel_dtype=kernel.value.dtype.name,
        bias_dtype=bias.value.dtype.name if bias is not None and bias.perturbed else None,
    )


def _backward(recipe: Recipe, saved: _Saved, dy: Any) -> tuple[Array | None, Array | None, Array | None]:
    if isinstance(dy, SymbolicZero):
        return None, None, None
    dx = dkernel = dbias = None
    if saved.kernel is not None or saved.x is not None:
        qdy = _quantize(recipe, "grad_output", dy, saved.kernel is not None, saved.x is not None)
        if saved.kernel is not None:
            fast = recipe.fast_accum("dgrad")
            dx = functional.gemm(qdy, saved.kernel, trans_b=False, out_dtype=dy.dtype, fast_accum=fast)
        if saved.x is not None:
            fast = recipe.fast_accum("wgrad")
            dkernel = functional.gemm(
                qdy, saved.x, trans_a=True, trans_b=False, out_dtype=saved.kernel_dtype, fast_accum=fast
            )
    if saved.bias_dtype is not None:
        dbias = functional.bias_grad(dy, saved.bias_dtype)
    return dx, dkernel, dbias


_dense.defvjp(_forward, _backward, symbolic_zeros=True)
