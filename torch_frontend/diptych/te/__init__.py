"""diptych under the names of `transformer_engine.pytorch`: change the import, and keep the code.

    import transformer_engine.pytorch as te            ->  import diptych.te as te
    from transformer_engine.common import recipe       ->  from diptych.te.common import recipe

Each public name there has the same meaning here, or answers with the name to use instead (`absent.py`). The package
computes nothing itself: modules, regions and functions are diptych.torch's, with TransformerEngine's order of
arguments, devices and initial values.
"""

from diptych.te import absent, common
from diptych.te.constants import DType
from diptych.te.distributed import checkpoint
from diptych.te.graph import make_graphed_callables
from diptych.te.module import GroupedLinear, LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm
from diptych.te.padding import Fp8Padding, Fp8Unpadding
from diptych.te.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from diptych.te.quantization import (
    DelayedScalingRequest,
    QuantizerRequest,
    QuantizerRole,
    autocast,
    fp8_autocast,
    fp8_model_init,
    get_default_recipe,
    is_fp8_available,
    is_fp8_block_scaling_available,
    is_mxfp8_available,
    is_nvfp4_available,
    quantized_model_init,
)
from diptych.te.tensor import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizedTensor,
    Quantizer,
)
from diptych.te.utils import is_bf16_available

__all__ = [
    "DType",
    "DelayedScalingRequest",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "HybridQuantizer",
    "IdentityQuantizer",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "QuantizedTensor",
    "Quantizer",
    "QuantizerRequest",
    "QuantizerRole",
    "RMSNorm",
    "autocast",
    "checkpoint",
    "common",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_recipe",
    "is_bf16_available",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "is_nvfp4_available",
    "make_graphed_callables",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "quantized_model_init",
]

__getattr__ = absent.attributes_of(__name__)
