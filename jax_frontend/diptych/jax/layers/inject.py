"""`dot_general`: runs the products of unmodified flax models in low precision.

    nn.Dense(64, dot_general=dj.dot_general(recipe))          # linen
    nnx.Linear(32, 64, dot_general=dj.dot_general(recipe), rngs=rngs)

This exists in JAX only: torch has no such argument, and `convert` replaces modules instead.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.arguments import require_recipe
from diptych.common.errors import DTypeError, UnsupportedError
from diptych.common.layers.checks import Names
from diptych.common.layers.plan import linear_plan
from diptych.common.recipes import Recipe
from diptych.jax.layers.checks import kernel_operand
from diptych.jax.layers.linear import dense
from diptych.jax.primitives.checks import dtype_name, to_array
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array
_NAMES = Names("dot_general", "lhs", "rhs")


def dot_general(recipe: Recipe | None, *, module: str = "linear", name: str = "") -> Callable[..., Array]:
    """Returns a replacement of `jax.lax.dot_general` whose products run like those of `dense`.

    `lhs` is the input and `rhs` the kernel. Contracted axes may lie anywhere: they are moved last, which for flax's [K,
    N] kernels is one transposition; y, dx and dkernel have the bits of `dense(x, kernel.T)`.

    **Arguments:** `recipe`: a recipe without state; None gives `jax.lax.dot_general` itself. `module`, `name`: the
    roles by which it chooses quantizers.

    **Returns:** a `DotGeneral`, a function (lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None,
    *, out_sharding=None). Those of equal recipes are equal, so that models which hold them share compiled code, and it
    can be pickled if its recipe can. `rhs` may be a `QuantizedArray` [N, K] whose last axis is contracted. With a
    `preferred_element_type` products accumulate and return that dtype or `lhs`'s, whichever is wider, and the result is
    cast to it; cotangents are quantized from the wider dtype.

    The function **raises** NotImplementedError for batch dimensions (as in products of two activations), another
    contraction of a quantized `rhs`, or a result with a sharding; ValueError for a precision; TypeError for operands of
    two dtypes, or a result that is not of high precision.

    **Raises:** ValueError for a recipe with delayed scaling or stochastic rounding, whose state flax's layers do not
    carry from step to step: call `dense`.
    """
    return jax.lax.dot_general if recipe is None else DotGeneral(recipe, module, name)


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """The product of one recipe, as a value; see `dot_general`, which makes it, for its arguments."""

    recipe: Recipe
    module: str = "linear"
    name: str = ""

    def __post_init__(self) -> None:
        require_recipe("dot_general", self.recipe)
        plan = linear_plan(self.recipe, self.module, self.name)
        if plan.states or plan.needs_rng:
            what = "delayed scaling" if plan.states else "stochastic rounding"
            kind = type(self.recipe).__name__
            way = "call dense, which takes it, or use the modules of diptych.jax.nnx"
            raise ValueError(f"dot_general: {kind} with {what} has state; {way}")

    def __call__(
        self,
        lhs: Array,
        rhs: Array | QuantizedArray,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> Array:
        (left, right), (batch, _) = (tuple(tuple(int(a) for a in side) for side in pair) for pair in dimension_numbers)
        if batch:
            raise UnsupportedError(
                f"dot_general: a kernel has no batch dimensions, and {dimension_numbers} names some for "
                f"{list(lhs.shape)} and {list(rhs.shape)}; use jax.lax.dot_general there, or jax.vmap"
            )
        if not left:
            raise UnsupportedError(f"dot_general: {dimension_numbers} contracts nothing")
        if precision not in (None, jax.lax.Precision.DEFAULT):
            raise ValueError(f"dot_general: the recipe decides on precision, and precision={precision} was given")
        if out_sharding is not None:
            raise UnsupportedError("dot_general: out_sharding is not supported; constrain the result instead")
        lhs, rhs = to_array("dot_general", "lhs", lhs), kernel_operand(_NAMES, rhs, QuantizedArray)
        k = math.prod(rhs.shape[a] for a in right)
        kernel, kept = rhs, rhs.shape[:-1]
        if not isinstance(rhs, QuantizedArray):
            if lhs.dtype != rhs.dtype:
                raise DTypeError(f"dot_general: operands must have one dtype, got {lhs.dtype} and {rhs.dtype}")
            kernel = _last(rhs, right)
            kept = kernel.shape[: rhs.ndim - len(right)]
            kernel = kernel.reshape(math.prod(kept), k)
        elif right not in ((-1,), (1,)) or rhs.ndim != 2:
            raise UnsupportedError(
                f"dot_general: a quantized rhs must be a kernel [N, K] whose last axis is contracted, got "
                f"{list(rhs.shape)} and {dimension_numbers}; quantize the transposed kernel and contract its last axis"
            )
        dtype = jnp.dtype(dtype_name("dot_general", preferred_element_type, lhs.dtype.name))
        x = _last(lhs.astype(jnp.promote_types(lhs.dtype, dtype)), left)
        x = x.reshape(*x.shape[: lhs.ndim - len(left)], k)
        y = dense(x, kernel, recipe=self.recipe, module=self.module, name=self.name)
        return y.reshape(*y.shape[:-1], *kept).astype(dtype)


def _last(x: Array, axes: tuple[int, ...]) -> Array:
    """Returns x with its contracted axes moved last, in the order in which they are contracted."""
    axes = tuple(a % x.ndim for a in axes)
    return x.transpose(*(a for a in range(x.ndim) if a not in axes), *axes)
