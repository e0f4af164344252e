"""Low-precision training in JAX: pure functions over XLA FFI, with the bits of `diptych.torch` and `diptych.core`.

All functions work under jit, grad, vmap, scan, remat, donation and inside shard_map. Recipes and quantizers are frozen,
hashable values: close over them or pass them as static arguments.
"""

from diptych.common import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockQuantizer,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    NVFP4Quantizer,
    Quantizer,
    QuantizerRole,
    Recipe,
)
from diptych.common.conversion import ConversionReport, ConvertWarning
from diptych.jax.functional.gemm import bias_grad, gemm, gemm_into
from diptych.jax.functional.grouped import grouped_bias_grad, grouped_gemm, quantize_stack
from diptych.jax.functional.hash import hash
from diptych.jax.functional.permute import (
    RowMap,
    moe_map,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from diptych.jax.functional.permute_quantize import moe_permute_and_quantize
from diptych.jax.functional.quantize import amax, dequantize, quantize, rng_state
from diptych.jax.functional.scale_update import scale_update
from diptych.jax.layers.general import dense_general, init_dense_general_state
from diptych.jax.layers.grouped_linear import grouped_dense
from diptych.jax.layers.held import kernel_quantizer, quantize_kernel, quantize_params
from diptych.jax.layers.inject import dot_general, einsum
from diptych.jax.layers.layernorm_linear import layernorm_dense
from diptych.jax.layers.layernorm_mlp import MLP_OFFSETS, init_layernorm_mlp_state, layernorm_mlp
from diptych.jax.layers.linear import CHECKPOINT_NAME, dense
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.modules import checkpoint_policies
from diptych.jax.modules.convert import convert
from diptych.jax.modules.report import ProgramReport, report
from diptych.jax.modules.serialize import check_quantizers, quantizers_of, register_all
from diptych.jax.modules.torch_checkpoint import load_torch, read_safetensors, to_torch
from diptych.jax.primitives.ffi import export_safety_checks, header_version
from diptych.jax.sharding.expert_parallel import expert_parallel
from diptych.jax.sharding.leaves import device_put, leaf_shardings
from diptych.jax.sharding.table import partition_primitives
from diptych.jax.state.carry import (
    combine_states,
    lend_states,
    partition_states,
    read_states,
    share_states,
    state_refs,
    value_and_grad_with_state,
)
from diptych.jax.state.scales import (
    ScaleState,
    init_state,
    load_state_dict,
    merge_states,
    overwrite_states,
    state_dict,
    switch_state,
)
from diptych.jax.state.update import update_state
from diptych.jax.tensors.quantized import QuantizedArray, QuantizedStack

__all__ = [
    "CHECKPOINT_NAME",
    "MLP_OFFSETS",
    "OFFSETS",
    "ConversionReport",
    "ConvertWarning",
    "CustomRecipe",
    "DelayedScaling",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "NVFP4BlockScaling",
    "NVFP4Quantizer",
    "ProgramReport",
    "QuantizedArray",
    "QuantizedStack",
    "Quantizer",
    "QuantizerRole",
    "Recipe",
    "RowMap",
    "ScaleState",
    "amax",
    "bias_grad",
    "check_quantizers",
    "checkpoint_policies",
    "combine_states",
    "convert",
    "dense",
    "dense_general",
    "dequantize",
    "device_put",
    "dot_general",
    "einsum",
    "expert_parallel",
    "export_safety_checks",
    "gemm",
    "gemm_into",
    "grouped_bias_grad",
    "grouped_dense",
    "grouped_gemm",
    "hash",
    "header_version",
    "init_dense_general_state",
    "init_layernorm_mlp_state",
    "init_state",
    "kernel_quantizer",
    "layernorm_dense",
    "layernorm_mlp",
    "leaf_shardings",
    "lend_states",
    "load_state_dict",
    "load_torch",
    "merge_states",
    "moe_map",
    "moe_permute",
    "moe_permute_and_pad_with_probs",
    "moe_permute_and_quantize",
    "moe_permute_with_probs",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "moe_unpermute",
    "overwrite_states",
    "partition_states",
    "quantize",
    "quantize_kernel",
    "quantize_params",
    "quantize_stack",
    "quantizers_of",
    "read_safetensors",
    "read_states",
    "report",
    "rng_at",
    "rng_state",
    "scale_update",
    "share_states",
    "state_dict",
    "state_refs",
    "switch_state",
    "to_torch",
    "update_state",
    "value_and_grad_with_state",
]

partition_primitives()
register_all()
