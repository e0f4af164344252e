"""diptych for PyTorch: quantize, multiply and train in low precision, with the same bits as `diptych.jax`.

Recipes, quantizers and roles are those of `diptych.common`.
"""

from diptych.torch.autocast import autocast, get_autocast_recipe, is_autocast_enabled
from diptych.torch.functional import amax, bias_grad, dequantize, gemm, gemm_into, quantize
from diptych.torch.linear import Linear
from diptych.torch.quantized import QuantizedTensor

__all__ = [
    "Linear",
    "QuantizedTensor",
    "amax",
    "autocast",
    "bias_grad",
    "dequantize",
    "gemm",
    "gemm_into",
    "get_autocast_recipe",
    "is_autocast_enabled",
    "quantize",
]
