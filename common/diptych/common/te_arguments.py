"""Arguments that modules and functions have in TransformerEngine but not in diptych.

An argument is accepted with the value that turns its feature off. Arguments that diptych has too (`params_dtype`,
`init_method`, `return_bias`; of dense layers `tp_group` and the like) are parameters of the modules themselves.
Arguments without effect warn once per process.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from diptych.common.errors import IgnoredArgumentWarning, UnsupportedError

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


def absorb(op: str, given: Mapping[str, Any]) -> None:
    """Checks arguments of TransformerEngine that a module or function of diptych does not have.

    **Raises** NotImplementedError for a value whose feature diptych lacks, TypeError for an argument that neither has.
    """
    for name, value in given.items():
        if name in _WITHOUT_EFFECT:
            if value is not None and name not in _said:
                _said.add(name)
                warnings.warn(
                    f"{op}: {name}={value!r} has no effect: {_WITHOUT_EFFECT[name]}",
                    IgnoredArgumentWarning,
                    stacklevel=4,
                )
        elif name not in _REFUSED:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        else:
            nothing, why = _REFUSED[name]
            if value is not nothing and (type(value) is not type(nothing) or value != nothing):
                raise UnsupportedError(f"{op}: {name} must be {nothing!r}, got {value!r}: {why}")


def dtype_of(op: str, dtype: Any, params_dtype: Any) -> Any:
    """Returns the dtype of a module's parameters, given under either name, or None. **Raises** ValueError if both are
    given and differ."""
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(f"{op}: dtype={dtype} and params_dtype={params_dtype} name the same thing; give one of them")
    return params_dtype if dtype is None else dtype


def one_input(op: str, input: Any, inp: Any) -> Any:
    """Returns a module's input, given under torch's name or TransformerEngine's.

    **Raises** TypeError unless exactly one is given.
    """
    if (input is None) == (inp is None):
        raise TypeError(f"{op}: give the input once, as the first argument, as `input` or as `inp`")
    return inp if input is None else input
