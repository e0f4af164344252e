"""diptych for PyTorch: quantize, multiply and train in low precision, with the same bits as `diptych.jax`.

Recipes, quantizers and roles are those of `diptych.common`.
"""

from diptych.torch.autocast import autocast, get_autocast_recipe, is_autocast_enabled
from diptych.torch.checkpoint import checkpoint, checkpoint_contexts
from diptych.torch.convert import ConvertWarning, convert
from diptych.torch.custom_op import CustomOp, Group, Size, Written
from diptych.torch.eager_only import EagerWarning
from diptych.torch.functional import (
    amax,
    bias_grad,
    dequantize,
    gemm,
    gemm_into,
    quantize,
    rng_state,
    scale_update,
)
from diptych.torch.graphs import make_graphed_callables
from diptych.torch.layernorm_linear import LayerNormLinear
from diptych.torch.layernorm_mlp import LayerNormMLP
from diptych.torch.linear import Linear, linear
from diptych.torch.module import QuantizedModule, seed_rng
from diptych.torch.proto import TensorProto, to_tensor_proto
from diptych.torch.quantized import QuantizedTensor
from diptych.torch.state import ScaleStates
from diptych.torch.weights import QuantizedParameter, quantized_model_init

__all__ = [
    "ConvertWarning",
    "CustomOp",
    "EagerWarning",
    "Group",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QuantizedModule",
    "QuantizedParameter",
    "QuantizedTensor",
    "ScaleStates",
    "Size",
    "TensorProto",
    "Written",
    "amax",
    "autocast",
    "bias_grad",
    "checkpoint",
    "checkpoint_contexts",
    "convert",
    "dequantize",
    "gemm",
    "gemm_into",
    "get_autocast_recipe",
    "is_autocast_enabled",
    "linear",
    "make_graphed_callables",
    "quantize",
    "quantized_model_init",
    "rng_state",
    "scale_update",
    "seed_rng",
    "to_tensor_proto",
]
