"""Names of TransformerEngine that `diptych.te` does not have: each answers with the name to use instead.

An attribute that is absent raises AttributeError, so that `hasattr` is False. `from diptych.te import NAME` and
`import diptych.te.NAME` raise ImportError with the same words: Python looks for a submodule of that name, and `_Finder`
answers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

PACKAGE = __name__.rpartition(".")[0]

_ATTENTION = "attention comes later; use torch.nn.functional.scaled_dot_product_attention in high precision"
_BLOCK = "transformer layers come later; compose LayerNormLinear, torch's scaled_dot_product_attention and LayerNormMLP"
_OPS = "operations are not fused by a Sequential; use LayerNormLinear, LayerNormMLP and GroupedLinear"
_OPTIMIZERS = "use torch.optim with fused=True; masters in high precision: quantized_model_init(preserve_...=True)"
_OVERLAP = "communication does not overlap with products"
_OFFLOAD = "use torch.autograd.graph.save_on_cpu"
_TENSOR = "QuantizedTensor is the one class, and its quantizer says the format"
_SAVE = "a QuantizedTensor goes through save_for_backward as it is"
_RNG = "use torch's generators; checkpoint takes a tracker of yours as get_rng_state_tracker"
_EXPORT = "use torch.export, which takes all modules"
_LOSS = "use torch.nn.functional.cross_entropy, or torch.distributed.tensor.parallel.loss_parallel"
_NEWTON = "use torch.optim.Muon"
_ROUTER = "compute the routing by torch, and give its mask to moe_permute"
_EXPERTS = "experts are exchanged by torch.distributed; moe_permute and moe_unpermute order their rows"
_GLU = "write it by torch's slicing: gated activations of LayerNormMLP take the first half of fc1's output as the gate"
_STATE = "a region's recipe is diptych.torch.get_autocast_recipe(); scales are buffers of modules, `scale_states`"
_ROPE = "use torch's operators"
_DEBUG = "diptych.lab records traces and compares them"
_CPP = "diptych.torch.quantize, gemm and grouped_gemm are the functions behind the modules"
_WEIGHTS = "shard by torch's fully_shard; diptych.torch.parallel.prepare gathers quantized weights"

ABSENT: dict[str, str] = {
    "DotProductAttention": _ATTENTION,
    "MultiheadAttention": _ATTENTION,
    "InferenceParams": _ATTENTION,
    "attention": _ATTENTION,
    "RotaryPositionEmbedding": _ROPE,
    "FusedMLAQUpProjRopeQuant": _ATTENTION,
    "TransformerLayer": _BLOCK,
    "transformer": _BLOCK,
    "initialize_ub": _OVERLAP,
    "destroy_ub": _OVERLAP,
    "UserBufferQuantizationMode": _OVERLAP,
    "ops": _OPS,
    "optimizers": _OPTIMIZERS,
    "get_cpu_offload_context": _OFFLOAD,
    "mark_not_offload": _OFFLOAD,
    "ManualOffloadSynchronizer": _OFFLOAD,
    "cpu_offload": _OFFLOAD,
    "CudaRNGStatesTracker": _RNG,
    "onnx_export": _EXPORT,
    "export": _EXPORT,
    "onnx_extensions": _EXPORT,
    "parallel_cross_entropy": _LOSS,
    "cross_entropy": _LOSS,
    "newton_schulz": _NEWTON,
    "CusolverMpCtx": _NEWTON,
    "router": _ROUTER,
    "ep": _EXPERTS,
    "deinterleave_glu_tensor": _GLU,
    "interleave_glu_tensor": _GLU,
    "get_cudnn_version": "use torch.backends.cudnn.version()",
    "get_device_compute_capability": "use torch.cuda.get_device_capability()",
    "prepare_for_saving": _SAVE,
    "restore_from_saved": _SAVE,
    "restore_from_func_ctx": _SAVE,
    "FP8GlobalStateManager": _STATE,
    "RecipeState": _STATE,
    "cpp_extensions": _CPP,
    "debug": _DEBUG,
    "numerics_debug": _DEBUG,
    "distributed_weight": _WEIGHTS,
    "jit": "compile by torch.compile, which takes all modules",
    "triton": _CPP,
    "setup": "diptych's build has no hooks for other packages",
    "quantizer_factory_zoo": "write the factory: a function of a QuantizerRole that returns quantizers of diptych.te",
    "reference_nvfp4": "docs/numerics.md specifies the numbers, and tests/oracle computes them",
    "reference_current_scaling": "docs/numerics.md specifies the numbers, and tests/oracle computes them",
}
ABSENT |= dict.fromkeys(
    (f"{kind}{suffix}"
     for kind in ("Float8Tensor", "MXFP8Tensor", "Float8BlockwiseQTensor", "NVFP4Tensor", "HybridQuantizedTensor",
                  "IdentityTensor", "QuantizedTensor", "GroupedTensor")
     for suffix in ("", "Storage") if (kind, suffix) != ("QuantizedTensor", "")),
    _TENSOR,
)  # fmt: skip
"""By a name, the words that say what to use instead."""


def message(module: str, name: str) -> str:
    """Returns the error's words for a name that is absent from a module."""
    return f"{module} has no {name}, which TransformerEngine has: {ABSENT[name]}"


def attributes_of(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module of this package. Python looks for submodules only where `__path__` is set,
    so that `_Finder` is asked about `from diptych.te.quantization import NAME` too."""
    vars(sys.modules[module]).setdefault("__path__", [])

    def __getattr__(name: str) -> Any:
        if name in ABSENT:
            raise AttributeError(message(module, name), name=name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)

    return __getattr__


class _Finder(MetaPathFinder):
    """Answers imports of absent names of this package, and leaves all other imports to the finders after it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        module, _, name = fullname.rpartition(".")
        if name in ABSENT and (module == PACKAGE or module.startswith(f"{PACKAGE}.")):
            raise ImportError(message(module, name), name=fullname)


sys.meta_path.append(_Finder())
