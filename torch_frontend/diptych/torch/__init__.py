"""diptych for PyTorch: quantize, multiply and train in low precision, with the same bits as `diptych.jax`.

Recipes, quantizers and roles are those of `diptych.common`.
"""

from diptych.torch.autocast import autocast, dry_run, get_autocast_recipe, is_autocast_enabled, recognize_pipelines
from diptych.torch.check_states import StateRow, StatesReport, check_states
from diptych.torch.checkpoint import checkpoint, checkpoint_contexts
from diptych.torch.convert import ConversionReport, ConvertWarning, convert
from diptych.torch.custom_op import CustomOp, Group, Size, Written
from diptych.torch.eager_only import EagerWarning
from diptych.torch.earlier_names import keep_earlier_names
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
from diptych.torch.held import QuantizedParameter
from diptych.torch.held_state import plain_state_dict
from diptych.torch.layernorm_linear import LayerNormLinear
from diptych.torch.layernorm_mlp import LayerNormMLP
from diptych.torch.linear import Linear, linear
from diptych.torch.model_init import quantized_model_init
from diptych.torch.module import QuantizedModule
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
from diptych.torch.prepare import prepare, seed_rng
from diptych.torch.proto import TensorProto, to_tensor_proto
from diptych.torch.quantized import QuantizedTensor
from diptych.torch.state import ScaleStates
from diptych.torch.te import (
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_bf16_available,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    te_state_dict,
)

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
    "StateRow",
    "StatesReport",
    "TensorProto",
    "Written",
    "amax",
    "autocast",
    "bias_grad",
    "check_states",
    "checkpoint",
    "checkpoint_contexts",
    "convert",
    "dequantize",
    "dry_run",
    "fp8_autocast",
    "fp8_model_init",
    "gemm",
    "gemm_into",
    "get_autocast_recipe",
    "get_default_recipe",
    "grouped_bias_grad",
    "grouped_gemm",
    "grouped_linear",
    "is_autocast_enabled",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
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
    "plain_state_dict",
    "prepare",
    "quantize",
    "quantize_stack",
    "quantized_model_init",
    "rng_state",
    "scale_update",
    "seed_rng",
    "te_state_dict",
    "to_tensor_proto",
]

recognize_pipelines()
keep_earlier_names()
