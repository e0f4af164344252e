"""Arguments as TransformerEngine's modules and functions name them: what they say as values, or why they are refused.

`module_arguments` takes those that all constructors have, and returns a `ModuleArguments`. An argument that diptych
does not have is accepted with TransformerEngine's default value only. Arguments without effect warn once per process.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from diptych.common.arguments import require_recipe
from diptych.common.errors import IgnoredArgumentWarning, UnsupportedError
from diptych.common.layer_options import Originals, TensorParallel, WeightGradientOptions
from diptych.common.recipes import Recipe
from diptych.common.te_signatures import SIGNATURES

# Why an argument that diptych does not have is accepted with TransformerEngine's default value only.
_PARALLEL = "this module is not cut over a tensor-parallel group"
_DRAWN = "parameters are drawn from torch's own generator; use init_method"
_OVERLAP = "communication does not overlap with products here"
_FOUR_OVER_SIX = "NVFP4 has no 4-over-6 scaling here"
_CAPTURED = "torch.cuda.make_graphed_callables captures each callable once, and replays the graph as it is"
_GROUPS = "name the ranks by autocast(amax_groups=...) around the call, and in a recipe's amax_group"
_WHY = {
    "sequence_parallel": _PARALLEL,
    "tp_group": _PARALLEL,
    "tp_size": _PARALLEL,
    "parallel_mode": _PARALLEL,
    "set_parallel_mode": _PARALLEL,
    "symmetric_ar_type": _PARALLEL,
    "get_rng_state_tracker": _DRAWN,
    "rng_tracker_name": _DRAWN,
    "parameters_split": "a weight is one parameter; slice `module.weight` instead",
    "return_layernorm_output_gathered": _PARALLEL,
    "return_layernorm_output": "this module does not store its norm's output; LayerNormLinear returns it",
    "fp8_grad": "the gradient of a fused norm's input is never quantized; Linear quantizes its own",
    "out": "results are new tensors",
    "dgrad_out": "results are new tensors",
    "activation_params": "no activation here has parameters",
    "distribute_saved_activations": "saved tensors stay on the rank that made them",
    "use_grouped_tensor": "the weights of all groups are one parameter, which the kernels read as it is",
    "sm_margin": "kernels take the whole device",
    "hidden_size": "it is the earlier name of normalized_shape",
    "sample_kwargs": "torch.cuda.make_graphed_callables takes positional tensors; pass them in sample_args",
    "_order": _CAPTURED,
    "_num_layers_per_chunk": _CAPTURED,
    "retain_graph_in_backward": _CAPTURED,
    "_reuse_graph_input_output_buffers": _CAPTURED,
    "pre_warmup_hook": _CAPTURED,
    "post_warmup_hook": _CAPTURED,
    "capture_time_hooks": _CAPTURED,
    "clone_param_grads_on_return": "gradients of parameters are those that torch's function returns",
    "_graph": "capture a module by make_graphed_callables",
    "use_existing_amax": "a quantizer computes the amax of the tensor that it quantizes",
    "with_amax_reduction": _GROUPS,
    "amax_reduction_group": _GROUPS,
    "with_post_rht_amax": "the amax is that of the tensor which is quantized; NVFP4 takes it after the transform",
    "fp4_dtype": "NVFP4's elements are E2M1",
    "nvfp4_use_4over6": _FOUR_OVER_SIX,
    "nvfp4_e4m3_max": _FOUR_OVER_SIX,
    "nvfp4_4over6_err_mode": _FOUR_OVER_SIX,
}
_WHY |= dict.fromkeys(
    (f"ub_{name}" for name in (
        "overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad",
    )),
    _OVERLAP,
)  # fmt: skip
_WITHOUT_EFFECT = {
    "ub_name": "it names buffers of overlapped communication",
    "seq_length": "nothing is compiled for a length ahead",
    "micro_batch_size": "nothing is compiled for a batch size ahead",
    "single_grouped_weight": "the weights of all groups are one parameter in any case",
    "single_grouped_bias": "the biases of all groups are one parameter in any case",
}

_said: set[str] = set()


def absorb(op: str, given: Mapping[str, Any], stacklevel: int = 3, of: str = "") -> None:
    """Checks arguments of TransformerEngine that a module or function of diptych does not have. `stacklevel`: of
    warnings, as `warnings.warn` takes it; 3 is the caller of the function that calls this. `of`: the entry of
    `SIGNATURES` that has them, if it is not `op`'s.

    **Raises** NotImplementedError for a value that is not TransformerEngine's default, TypeError for an argument that
    neither has.
    """
    signature = SIGNATURES.get(of or op, {})
    for name, value in given.items():
        if name not in signature:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        default = signature[name]
        if value is default or (type(value) is type(default) and value == default):
            continue
        if name not in _WITHOUT_EFFECT:
            raise UnsupportedError(f"{op}: {name} must be {default!r}, got {value!r}: {_WHY[name]}")
        if name not in _said:
            _said.add(name)
            warnings.warn(
                f"{op}: {name}={value!r} has no effect: {_WITHOUT_EFFECT[name]}",
                IgnoredArgumentWarning,
                stacklevel=stacklevel,
            )


def placed(op: str, device: Any, dtype: Any, params_dtype: Any) -> dict[str, Any]:
    """Returns `device` and `dtype` of a module's parameters, as functions that make tensors take them. `params_dtype`:
    another name of `dtype`. **Raises** ValueError if both are given and differ."""
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(f"{op}: dtype={dtype} and params_dtype={params_dtype} name the same thing; give one of them")
    return {"device": device, "dtype": params_dtype if dtype is None else dtype}


def either(op: str, name: str, value: Any, earlier: str, given: Any) -> Any:
    """Returns an argument that has two names. **Raises** ValueError if both are given and differ."""
    if value is not None and given is not None and value != given:
        raise ValueError(f"{op}: {name}={value!r} and {earlier}={given!r} name the same thing; give one of them")
    return given if value is None else value


_WHOLE = TensorParallel()


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleArguments:
    """The arguments that the constructors of all modules of linear layers have, as values. `placed`: `device` and
    `dtype` of the parameters. `init_method`: fills a weight, or None. `return_bias`: the call returns the bias instead
    of adding it."""

    recipe: Recipe | None
    name: str
    placed: dict[str, Any]
    originals: Originals
    weight_gradients: WeightGradientOptions
    parallel: TensorParallel
    init_method: Callable[[Any], Any] | None
    return_bias: bool


def module_arguments(
    op: str,
    others: Mapping[str, Any],
    recipe: Any,
    name: str | None,
    placed: dict[str, Any],
    *,
    originals: Originals,
    weight_gradients: WeightGradientOptions,
    parallel: TensorParallel = _WHOLE,
    init_method: Callable[[Any], Any] | None,
    return_bias: bool,
) -> ModuleArguments:
    """Returns the arguments of a module's constructor, checked. `others`: those that diptych does not have.

    **Raises** as `absorb`; ArgumentError for no recipe and for arguments about parallelism of other kinds, ValueError
    for an unknown parallel mode.
    """
    absorb(op, others, stacklevel=4)
    require_recipe(op, recipe)
    parallel.require(op)
    return ModuleArguments(recipe, name or "", placed, originals, weight_gradients, parallel, init_method, return_bias)


def one_input(op: str, input: Any, inp: Any) -> Any:
    """Returns a module's input, given under torch's name or TransformerEngine's.

    **Raises** TypeError unless exactly one is given.
    """
    if (input is None) == (inp is None):
        raise TypeError(f"{op}: give the input once, as the first argument, as `input` or as `inp`")
    return inp if input is None else input
