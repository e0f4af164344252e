"""Arguments as TransformerEngine's modules and functions name them: what they say as values, or why they are refused.

`module_arguments` takes those that all constructors have, and returns a `ModuleArguments`. An argument that diptych
does not have is accepted with the value that turns its feature off. Arguments without effect warn once per process.
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

# Each argument with the one accepted value, which turns its feature off, and why other values are refused.
_PARALLEL = "this module is not cut over a tensor-parallel group"
_REFUSED: dict[str, tuple[Any, str]] = {
    "sequence_parallel": (False, _PARALLEL),
    "tp_group": (None, _PARALLEL),
    "tp_size": (1, _PARALLEL),
    "parallel_mode": (None, _PARALLEL),
    "set_parallel_mode": (False, _PARALLEL),
    "symmetric_ar_type": (None, _PARALLEL),
    "get_rng_state_tracker": (None, "parameters are drawn from torch's own generator; use init_method"),
    "rng_tracker_name": (None, "parameters are drawn from torch's own generator; use init_method"),
    "parameters_split": (None, "a weight is one parameter; slice `module.weight` instead"),
    "return_layernorm_output_gathered": (False, _PARALLEL),
    "return_layernorm_output": (False, "this module does not store its norm's output; LayerNormLinear returns it"),
    "out": (None, "results are new tensors"),
    "dgrad_out": (None, "results are new tensors"),
    "activation_params": (None, "no activation here has parameters"),
    "distribute_saved_activations": (False, "saved tensors stay on the rank that made them"),
}
_REFUSED |= dict.fromkeys(
    (f"ub_{name}" for name in (
        "overlap_ag", "overlap_rs", "overlap_rs_dgrad", "bulk_dgrad", "bulk_wgrad", "overlap_ag_fprop",
        "overlap_rs_fprop", "overlap_ag_dgrad",
    )),
    (False, "communication does not overlap with products here"),
)  # fmt: skip
_WITHOUT_EFFECT = {
    "ub_name": "it names buffers of overlapped communication",
    "seq_length": "nothing is compiled for a length ahead",
    "micro_batch_size": "nothing is compiled for a batch size ahead",
    "single_grouped_weight": "the weights of all groups are one parameter in any case",
    "single_grouped_bias": "the biases of all groups are one parameter in any case",
}

_said: set[str] = set()


def absorb(op: str, given: Mapping[str, Any], stacklevel: int = 3) -> None:
    """Checks arguments of TransformerEngine that a module or function of diptych does not have. `stacklevel`: of
    warnings, as `warnings.warn` takes it; 3 is the caller of the function that calls this.

    **Raises** NotImplementedError for a value whose feature diptych lacks, TypeError for an argument that neither has.
    """
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            if value is not None and name not in _said:
                _said.add(name)
                warnings.warn(
                    f"{op}: {name}={value!r} has no effect: {_WITHOUT_EFFECT[name]}",
                    IgnoredArgumentWarning,
                    stacklevel=stacklevel,
                )
        elif name not in _REFUSED:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        else:
            nothing, why = _REFUSED[name]
            if value is not nothing and (type(value) is not type(nothing) or value != nothing):
                raise UnsupportedError(f"{op}: {name} must be {nothing!r}, got {value!r}: {why}")


def placed(op: str, device: Any, dtype: Any, params_dtype: Any) -> dict[str, Any]:
    """Returns `device` and `dtype` of a module's parameters, as functions that make tensors take them. `params_dtype`:
    another name of `dtype`. **Raises** ValueError if both are given and differ."""
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(f"{op}: dtype={dtype} and params_dtype={params_dtype} name the same thing; give one of them")
    return {"device": device, "dtype": params_dtype if dtype is None else dtype}


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
