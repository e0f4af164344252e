"""Checks of recipes, states and operands that layers make before they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.errors import DTypeError
from diptych.common.layers.checks import Names, other_kind, require_fit
from diptych.jax.primitives import checks
from diptych.jax.tensors.quantized import QuantizedArray, QuantizedCopies

Array = jax.Array

DENSE, STACK = Names("dense", "x", "kernel"), Names("grouped_dense", "x", "kernel")


def refuse_without_recipe(op: str, **given: Any) -> None:
    """**Raises** ValueError for arguments that only a recipe reads."""
    if wrong := [k for k, v in given.items() if v is not None and v != {}]:
        raise ValueError(f"{op}: {', '.join(wrong)} given without a recipe")


def check_rng(op: str, rng: Any) -> Array | None:
    """Returns the state of the random generator as an array. **Raises** TypeError for any other argument."""
    rng = checks.small_operand(op, "rng", rng)
    if rng is not None and (rng.dtype != jnp.int32 or rng.shape != (4,)):
        raise DTypeError(f"{op}: rng must be int32 [4], as rng_state makes it, got {rng.dtype}{list(rng.shape)}")
    return rng


def check_operands(x: Any, kernel: Any, bias: Any, rng: Any) -> tuple[Array, Any, Array | None, Array | None]:
    """Returns the operands as arrays; a quantized kernel is returned unchanged. **Raises** TypeError, ValueError."""
    x, kernel = checks.to_array("dense", "x", x), kernel_operand(DENSE, kernel, QuantizedArray)
    bias = None if bias is None else checks.to_array("dense", "bias", bias)
    rng = check_rng("dense", rng)
    require_fit(DENSE, 2, x, kernel, bias)
    return x, kernel, bias, rng


def kernel_operand(names: Names, kernel: Any, held: type[QuantizedCopies]) -> Any:
    """Returns a kernel as an array; one of class `held` is returned unchanged. **Raises** TypeError."""
    kernel = checks.held_by(kernel)
    if isinstance(kernel, held):
        return kernel
    if isinstance(kernel, QuantizedCopies):
        raise other_kind(names, kernel, held)
    return checks.to_array(names.op, names.weight, kernel)


def refuse_calibration(op: str, record: bool, **given: Any) -> None:
    """**Raises** ValueError for arguments that a calibration does not read."""
    if not record or any(v is not None for v in given.values()):
        names = ", ".join(given)
        raise ValueError(f"{op}: calibrate runs in high precision; {names} and record=False do not apply")
