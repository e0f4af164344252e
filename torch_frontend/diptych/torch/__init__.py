"""diptych for PyTorch: quantize, multiply and train in low precision, with the same bits as `diptych.jax`.

Recipes, quantizers and roles are those of `diptych.common`.
"""

from diptych.common.errors import EagerWarning
from diptych.torch import parallel
from diptych.torch.functional.gemm import bias_grad, gemm, gemm_into
from diptych.torch.functional.grouped import QuantizedStack, grouped_bias_grad, grouped_gemm, quantize_stack
from diptych.torch.functional.hash import hash
from diptych.torch.functional.permute import (
    RowMap,
    moe_map,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from diptych.torch.functional.permute_quantize import moe_permute_and_quantize
from diptych.torch.functional.quantize import amax, dequantize, quantize, rng_state
from diptych.torch.functional.scale_update import scale_update
from diptych.torch.graph.custom_op import CustomOp, Group, Size, Written
from diptych.torch.graph.proto import TensorProto, to_tensor_proto
from diptych.torch.modules import filters
from diptych.torch.modules.base import QuantizedModule
from diptych.torch.modules.check_states import StateRow, StatesReport, check_states
from diptych.torch.modules.convert import ConversionReport, ConvertWarning, convert
from diptych.torch.modules.graphs import make_graphed_callables
from diptych.torch.modules.grouped_linear import GroupedLinear, grouped_linear
from diptych.torch.modules.held_state import plain_state_dict
from diptych.torch.modules.held_weights import unhold
from diptych.torch.modules.hold import hold
from diptych.torch.modules.layernorm_linear import LayerNormLinear
from diptych.torch.modules.layernorm_mlp import LayerNormMLP
from diptych.torch.modules.linear import Linear, linear
from diptych.torch.modules.model_init import quantized_model_init
from diptych.torch.modules.norms import LayerNorm, RMSNorm
from diptych.torch.modules.prepare import prepare, seed_rng
from diptych.torch.modules.prepared_weights import PreparedWeights, prepare_weights
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.modules.report import RunReport, report
from diptych.torch.modules.te import (
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
from diptych.torch.state.autocast import (
    autocast,
    dry_run,
    get_autocast_recipe,
    is_autocast_enabled,
    recognize_pipelines,
)
from diptych.torch.state.checkpoint import adopt, checkpoint, checkpoint_contexts
from diptych.torch.state.scales import ScaleStates
from diptych.torch.tensors.quantized import QuantizedTensor

__all__ = [
    "ConversionReport",
    "ConvertWarning",
    "CustomOp",
    "EagerWarning",
    "Group",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "PreparedWeights",
    "QuantizedModule",
    "QuantizedParameter",
    "QuantizedStack",
    "QuantizedTensor",
    "RMSNorm",
    "RowMap",
    "RunReport",
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
    "filters",
    "fp8_autocast",
    "fp8_model_init",
    "gemm",
    "gemm_into",
    "get_autocast_recipe",
    "get_default_recipe",
    "grouped_bias_grad",
    "grouped_gemm",
    "grouped_linear",
    "hash",
    "hold",
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
    "parallel",
    "plain_state_dict",
    "prepare",
    "prepare_weights",
    "quantize",
    "quantize_stack",
    "quantized_model_init",
    "report",
    "rng_state",
    "scale_update",
    "seed_rng",
    "te_state_dict",
    "to_tensor_proto",
    "unhold",
]

adopt()
recognize_pipelines()
