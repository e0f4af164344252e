"""Checks of recipes, states and operands that layers make before they run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.jax.primitives import checks
from diptych.jax.tensors.quantized import QuantizedArray, QuantizedCopies

Array = jax.Array


def refuse_without_recipe(op: str, **given: Any) -> None:
    """**Raises** ValueError for arguments that only a recipe reads."""
    if wrong := [k for k, v in given.items() if v is not None and v != {}]:
        raise ValueError(f"{op}: {', '.join(wrong)} given without a recipe")


def check_rng(op: str, rng: Any) -> Array | None:
    """The state of the random generator as an array. **Raises** TypeError for what is none."""
    rng = checks.small_operand(op, "rng", rng)
    if rng is not None and (rng.dtype != jnp.int32 or rng.shape != (4,)):
        raise DTypeError(f"{op}: rng must be int32 [4], as rng_state makes it, got {rng.dtype}{list(rng.shape)}")
    return rng


def check_operands(x: Any, kernel: Any, bias: Any, rng: Any) -> tuple[Array, Any, Array | None, Array | None]:
    """The operands as arrays; kernel as it is where it is quantized. **Raises** TypeError, ValueError."""
    x, kernel = checks.to_array("dense", "x", x), kernel_operand("dense", "kernel", kernel, QuantizedArray)
    bias = None if bias is None else checks.to_array("dense", "bias", bias)
    rng = check_rng("dense", rng)
    if kernel.ndim != 2:
        raise ShapeError(f"dense: kernel must be [N, K], got {list(kernel.shape)}")
    if x.ndim == 0 or x.shape[-1] != kernel.shape[1]:
        raise ShapeError(f"dense: x {list(x.shape)} and kernel {list(kernel.shape)} must share their last dimension")
    if bias is not None and bias.shape != kernel.shape[:1]:
        raise ShapeError(
            f"dense: bias must be [{kernel.shape[0]}] for kernel {list(kernel.shape)}, got {list(bias.shape)}"
        )
    return x, kernel, bias, rng


def kernel_operand(op: str, arg: str, kernel: Any, held: type[QuantizedCopies]) -> Any:
    """A kernel as an array; as it is where it is `held`. **Raises** TypeError."""
    if isinstance(kernel, held):
        return kernel
    if isinstance(kernel, QuantizedCopies):
        raise ArgumentError(f"{op}: {arg} must be an array or a {held.__name__}, got a {type(kernel).__name__}")
    return checks.to_array(op, arg, kernel)


def refuse_calibration(op: str, record: bool, **given: Any) -> None:
    """**Raises** ValueError for arguments that a calibration does not read."""
    if not record or any(v is not None for v in given.values()):
        names = ", ".join(given)
        raise ValueError(f"{op}: calibrate runs in high precision; {names} and record=False do not apply")
