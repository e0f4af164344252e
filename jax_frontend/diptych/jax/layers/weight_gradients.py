"""Where a kernel's gradient goes: to the kernel, or in float32 to `main_grad`, an array or a reference."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.errors import ArgumentError, ShapeError
from diptych.jax.state.carry import refuse_differentiated

Array = jax.Array


def receiver(op: str, main_grad: Any, kernel: Array | None, shape: tuple[int, ...]) -> Array | None:
    """Returns the array whose gradient is the kernel's, or None if that is the kernel itself.

    **Arguments:** `main_grad`: None, a float32 array of the kernel's `shape`, or a reference to one, to which the
    result's gradient is then added. `kernel`: None if it is quantized.

    **Raises:** TypeError, ValueError for another main_grad, or a reference for a quantized kernel.
    """
    if main_grad is None:
        return None
    reference = isinstance(main_grad, jax.Ref)
    if not reference and not isinstance(main_grad, jax.Array):
        raise ArgumentError(f"{op}: main_grad must be a JAX array or reference, got {type(main_grad).__name__}")
    if main_grad.dtype != jnp.float32 or main_grad.shape != shape:
        raise ShapeError(f"{op}: main_grad must be float32 {list(shape)}, got {main_grad.dtype}{list(main_grad.shape)}")
    if not reference:
        return main_grad
    if kernel is None:
        raise ValueError(
            f"{op}: a reference as main_grad asks for a kernel that is differentiated, and a quantized one is not; "
            "pass main_grad as an array and differentiate with respect to it"
        )
    return _sink(main_grad, kernel)


@jax.custom_vjp
def _sink(main_grad: Any, kernel: Array) -> Array:
    return jnp.zeros(main_grad.shape, main_grad.dtype)


def _sink_backward(main_grad: Any, grad: Array) -> tuple[None, None]:
    main_grad[...] = main_grad[...] + grad
    return None, None


def _sink_forward(main_grad: Any, kernel: Array) -> tuple[Array, Any]:
    refuse_differentiated("a reference as main_grad", "pass main_grad as an array and differentiate with respect to it")
    return _sink(main_grad, kernel), main_grad


_sink.defvjp(_sink_forward, _sink_backward)
