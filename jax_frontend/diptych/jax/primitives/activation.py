"""The activations as JAX primitives, forward and backward."""

from __future__ import annotations

from typing import Any

import jax

from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import Aval, check_dy, check_gated, operand, own_shape
from diptych.jax.primitives.ffi import Batch
from diptych.jax.primitives.register import batch_shape, primitive, result

Array = jax.Array


def _activation_abstract(x: Aval, *, batch: Batch, which: str, gated: bool) -> Any:
    shape = check_gated("activation", operand("x", x, batch.axes[0]), gated)
    return [result((x,), (*batch_shape((x,), batch), *shape), x.dtype.name)]


def _activation_attributes(_: Any, batch: Batch, which: str, gated: bool) -> Any:
    return ffi.activation_attributes(batch, which, gated)


activation_p = primitive("activation", _activation_abstract, _activation_attributes)


def activation(x: Array, which: str, gated: bool) -> Array:
    """act(x) or act(a) * b in x's dtype: [..., F] for x [..., F] or, gated, [..., 2F]."""
    return activation_p.bind(x, batch=Batch.none(1), which=which, gated=gated)[0]


def _activation_grad_abstract(dy: Aval, x: Aval, *, batch: Batch, which: str, gated: bool) -> Any:
    op, shape = "activation_grad", own_shape(x, batch.axes[1])
    check_dy(op, dy, batch.axes[0], check_gated(op, operand("x", x, batch.axes[1]), gated))
    return [result((dy, x), (*batch_shape((dy, x), batch), *shape), x.dtype.name)]


activation_grad_p = primitive("activation_grad", _activation_grad_abstract, _activation_attributes)


def activation_grad(dy: Array, x: Array, which: str, gated: bool) -> Array:
    """dy * act'(x), or (dy * b * act'(a) | dy * act(a)), of x's shape and dtype."""
    return activation_grad_p.bind(dy, x, batch=Batch.none(2), which=which, gated=gated)[0]
