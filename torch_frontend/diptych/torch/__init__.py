"""diptych for PyTorch: quantize, multiply and train in low precision, with the same bits as `diptych.jax`.

Recipes, quantizers and roles are those of `diptych.common`.
"""

from diptych.torch.autocast import autocast, get_autocast_recipe, is_autocast_enabled
from diptych.torch.checkpoint import checkpoint, checkpoint_contexts
from diptych.torch.convert import ConversionReport, ConvertWarning, convert
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
from diptych.torch.grouped import QuantizedStack, grouped_bias_grad, grouped_gemm, quantize_stack
from diptych.torch.grouped_linear import GroupedLinear, grouped_linear
from diptych.torch.layernorm_linear import LayerNormLinear
from diptych.torch.layernorm_mlp import LayerNormMLP
from diptych.torch.linear import Linear, linear
from diptych.torch.module import QuantizedModule, seed_rng
from diptych.torch.permutation import (
    RowMap,
    moe_map,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from diptych.torch.permutation_quantize import moe_permute_and_quantize
from diptych.torch.proto import TensorProto, to_tensor_proto
from diptych.torch.quantized import QuantizedTensor
from diptych.torch.state import ScaleStates
from diptych.torch.weights import QuantizedParameter, quantized_model_init

__all__ = [
    "ConversionReport",
    "ConvertWarning",
    "CustomOp",
    "EagerWarning",
    "Group",
    "GroupedLinear",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "QuantizedModule",
    "QuantizedParameter",
    "QuantizedStack",
    "QuantizedTensor",
    "RowMap",
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
    "grouped_bias_grad",
    "grouped_gemm",
    "grouped_linear",
    "is_autocast_enabled",
    "linear",
    "make_graphed_callables",
    "moe_map",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_and_quantize",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "quantize",
    "quantize_stack",
    "quantized_model_init",
    "rng_state",
    "scale_update",
    "seed_rng",
    "to_tensor_proto",
]
