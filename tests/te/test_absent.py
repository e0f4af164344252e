"""Each public name of TransformerEngine is here or says what to use instead, however it is asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import diptych.te as te
from diptych.te.absent import ABSENT

# The public names of transformer_engine.pytorch, 2.20.
NAMES = [
    "DType",
    "LayerNormLinear",
    "Linear",
    "LayerNormMLP",
    "LayerNorm",
    "RMSNorm",
    "GroupedLinear",
    "Fp8Padding",
    "Fp8Unpadding",
    "initialize_ub",
    "destroy_ub",
    "UserBufferQuantizationMode",
    "DotProductAttention",
    "FusedMLAQUpProjRopeQuant",
    "MultiheadAttention",
    "InferenceParams",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "moe_permute",
    "moe_permute_with_probs",
    "moe_permute_and_pad_with_probs",
    "moe_unpermute",
    "moe_sort_chunks_by_index",
    "moe_sort_chunks_by_index_with_probs",
    "fp8_autocast",
    "fp8_model_init",
    "autocast",
    "quantized_model_init",
    "is_fp8_available",
    "is_mxfp8_available",
    "is_fp8_block_scaling_available",
    "is_nvfp4_available",
    "get_default_recipe",
    "QuantizerRole",
    "QuantizerRequest",
    "DelayedScalingRequest",
    "get_cudnn_version",
    "get_device_compute_capability",
    "is_bf16_available",
    "deinterleave_glu_tensor",
    "interleave_glu_tensor",
    "make_graphed_callables",
    "checkpoint",
    "CudaRNGStatesTracker",
    "get_cpu_offload_context",
    "mark_not_offload",
    "ManualOffloadSynchronizer",
    "ops",
    "optimizers",
    "onnx_export",
    "parallel_cross_entropy",
    "CusolverMpCtx",
    "newton_schulz",
    "QuantizedTensorStorage",
    "QuantizedTensor",
    "Quantizer",
    "prepare_for_saving",
    "restore_from_saved",
    "restore_from_func_ctx",
    "Float8Quantizer",
    "Float8CurrentScalingQuantizer",
    "MXFP8Quantizer",
    "Float8BlockQuantizer",
    "NVFP4Quantizer",
    "Float8TensorStorage",
    "MXFP8TensorStorage",
    "Float8BlockwiseQTensorStorage",
    "NVFP4TensorStorage",
    "Float8Tensor",
    "MXFP8Tensor",
    "Float8BlockwiseQTensor",
    "NVFP4Tensor",
    "HybridQuantizer",
    "HybridQuantizedTensorStorage",
    "IdentityQuantizer",
    "IdentityTensorStorage",
    "HybridQuantizedTensor",
    "IdentityTensor",
]
RECIPES = [
    "Format",
    "MMParams",
    "QParams",
    "Recipe",
    "DelayedScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "Float8BlockScaling",
    "NVFP4BlockScaling",
    "CustomRecipe",
]
PATHS = [
    "module",
    "quantization",
    "fp8",
    "distributed",
    "graph",
    "permutation",
    "tensor",
    "quantized_tensor",
    "constants",
    "utils",
]


def test_every_public_name_is_here_or_says_what_to_use_instead():
    assert set(NAMES) == {n for n in NAMES if hasattr(te, n)} | (ABSENT.keys() & set(NAMES))
    assert not [n for n in NAMES if hasattr(te, n) and n in ABSENT]
    assert set(te.__all__) <= {*NAMES, "common"}
    assert all(hasattr(te.common.recipe, n) for n in RECIPES)


@pytest.mark.parametrize("path", ["", *(f".{p}" for p in PATHS), ".custom_recipes"])
def test_absent_names_however_they_are_asked_for(path):
    module = importlib.import_module(f"diptych.te{path}")
    for name in ("DotProductAttention", "ops", "FP8GlobalStateManager"):
        words = rf"diptych\.te\S* has no {name}, which TransformerEngine has: \w+"
        assert not hasattr(module, name)
        with pytest.raises(AttributeError, match=words):
            getattr(module, name)
        with pytest.raises(ImportError, match=words):
            exec(f"from diptych.te{path} import {name}")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec(f"from diptych.te{path} import nonsense")
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        module.nonsense  # noqa: B018


def test_absent_modules():
    for name in ("attention", "ops", "cpu_offload"):
        with pytest.raises(ImportError, match=f"has no {name}, which TransformerEngine has"):
            importlib.import_module(f"diptych.te.{name}.anything")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'diptych\.te\.nonsense'"):
        importlib.import_module("diptych.te.nonsense")
    with pytest.raises(ModuleNotFoundError, match="No module named 'ops'"):
        importlib.import_module("ops")


def test_the_import_alone_takes_nothing_but_diptych_torch():
    code = "import sys, diptych.te; print([m for m in sys.modules if m.split('.')[0] in ('jax', 'transformer_engine')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
