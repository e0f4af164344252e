"""`dot_general` and `einsum`: run the products of unmodified flax models in low precision.

    nn.Dense(64, dot_general=dj.dot_general(recipe))                            # linen
    nnx.Linear(32, 64, dot_general=dj.dot_general(recipe), rngs=rngs)
    nnx.Einsum("btd,dhk->bthk", shape, einsum_op=dj.einsum(recipe), rngs=rngs)

They exist in JAX only: torch has no such arguments, and `convert` replaces modules instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from diptych.common.arguments import require_recipe
from diptych.common.errors import DTypeError, UnsupportedError
from diptych.common.layers.checks import Names
from diptych.common.layers.plan import linear_plan
from diptych.common.recipes import Recipe
from diptych.jax.layers.general import general
from diptych.jax.primitives.checks import held_by
from diptych.jax.tensors.quantized import QuantizedArray

Array = jax.Array


def dot_general(recipe: Recipe | None, *, module: str = "linear", name: str = "") -> Callable[..., Array]:
    """Returns a replacement of `jax.lax.dot_general` whose products run like those of `dense`.

    `lhs` is the input and `rhs` the kernel. Contracted axes may lie anywhere: they are moved last, which for flax's [K,
    N] kernels is one transposition; y, dx and dkernel have the bits of `dense(x, kernel.T)`. With batch dimensions each
    pair of elements is a product with its own scales; see `dense_general`.

    **Arguments:** `recipe`: a recipe without state; None gives `jax.lax.dot_general` itself. `module`, `name`: the
    roles by which it chooses quantizers.

    **Returns:** a `DotGeneral`, a function (lhs, rhs, dimension_numbers, precision=None, preferred_element_type=None,
    *, out_sharding=None). Those of equal recipes are equal, so that models which hold them share compiled code, and it
    can be pickled if its recipe can. `rhs` may be a `QuantizedArray` [..., K] whose last axis is contracted. With a
    `preferred_element_type` products accumulate and return that dtype or `lhs`'s, whichever is wider, and the result is
    cast to it; cotangents are quantized from the wider dtype.

    The function **raises** NotImplementedError for products that contract nothing, another contraction of a quantized
    `rhs`, or a result with a sharding; ValueError for a precision; TypeError for operands of two dtypes, or a result
    that is not of high precision.

    **Raises:** ValueError for a recipe with delayed scaling or stochastic rounding, whose state flax's layers do not
    carry from step to step: use the modules of `diptych.jax.nnx`, among them a `DotGeneral` with state, or `dense`.
    """
    return jax.lax.dot_general if recipe is None else DotGeneral(recipe, module, name)


def einsum(recipe: Recipe | None, *, module: str = "linear", name: str = "") -> Callable[..., Array]:
    """Returns a replacement of `jnp.einsum` for two operands, the input and the kernel; see `dot_general`.

    **Returns:** an `Einsum`, a function (equation, lhs, rhs, *, precision=None, preferred_element_type=None,
    out_sharding=None); None as recipe gives `jnp.einsum` itself. Its equations are those of `dense_general`.

    **Raises:** as `dot_general`.
    """
    return jnp.einsum if recipe is None else Einsum(recipe, module, name)


@dataclasses.dataclass(frozen=True)
class _Product:
    """The product of one recipe, as a value."""

    recipe: Recipe
    module: str = "linear"
    name: str = ""
    op: ClassVar[str]

    def __post_init__(self) -> None:
        require_recipe(self.op, self.recipe)
        plan = linear_plan(self.recipe, self.module, self.name)
        if plan.states or plan.needs_rng:
            what = "delayed scaling" if plan.states else "stochastic rounding"
            kind = type(self.recipe).__name__
            way = (
                "call dense_general, which takes it, or a module that holds it, DotGeneral of diptych.jax.nnx or linen"
            )
            raise ValueError(f"{self.op}: {kind} with {what} has state; {way}")

    def _run(self, contraction: Any, lhs: Any, rhs: Any, out_sharding: Any, **options: Any) -> Array:
        roles = {"recipe": self.recipe, "module": self.module, "name": self.name}
        return injected(self.op, contraction, lhs, rhs, out_sharding, state=None, **roles, **options)


class DotGeneral(_Product):
    """The product of one recipe, as a value; see `dot_general`, which makes it, for its arguments."""

    op = "dot_general"

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
        given = {"precision": precision, "preferred_element_type": preferred_element_type}
        return self._run(dimension_numbers, lhs, rhs, out_sharding, **given)


class Einsum(_Product):
    """The product of one recipe, as a value; see `einsum`, which makes it, for its arguments."""

    op = "einsum"

    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array | QuantizedArray,
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Array:
        given = {"precision": precision, "preferred_element_type": preferred_element_type}
        return self._run(equation, lhs, rhs, out_sharding, **given)


def injected(op: str, contraction: Any, lhs: Any, rhs: Any, out_sharding: Any, **options: Any) -> Any:
    """`dense_general` where a flax layer calls a function of JAX, whose operands have one dtype."""
    if out_sharding is not None:
        raise UnsupportedError(f"{op}: out_sharding is not supported; constrain the result instead")
    lhs, rhs = held_by(lhs), held_by(rhs)
    if not isinstance(rhs, QuantizedArray) and getattr(lhs, "dtype", None) != getattr(rhs, "dtype", None):
        raise DTypeError(f"{op}: operands must have one dtype, got {lhs.dtype} and {rhs.dtype}")
    return general(Names(op, "lhs", "rhs"), contraction, lhs, rhs, None, **options)
