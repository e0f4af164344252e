"""Low-precision training in JAX: pure functions over XLA FFI, with the bits of `diptych.torch` and `diptych.core`.

Works under jit, grad, vmap, scan, remat, donation and inside shard_map. Recipes and quantizers are frozen, hashable
values: close over them or pass them as static arguments.
"""

from diptych.common import (
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    Quantizer,
    QuantizerRole,
    Recipe,
)
from diptych.jax.ffi import export_safety_checks, header_version
from diptych.jax.functional import amax, bias_grad, dequantize, gemm, gemm_into, quantize
from diptych.jax.linear import CHECKPOINT_NAME, dense
from diptych.jax.quantized import QuantizedArray

__all__ = [
    "CHECKPOINT_NAME",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "QuantizedArray",
    "Quantizer",
    "QuantizerRole",
    "Recipe",
    "amax",
    "bias_grad",
    "dense",
    "dequantize",
    "export_safety_checks",
    "gemm",
    "gemm_into",
    "header_version",
    "quantize",
]
