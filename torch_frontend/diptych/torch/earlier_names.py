"""Module paths of earlier versions for the classes and functions that pickled weights and modules name."""

from typing import Any

import torch

from diptych.common.earlier_names import keep
from diptych.torch.layers import weight_gradients
from diptych.torch.modules import (
    grouped_linear,
    layernorm_linear,
    layernorm_mlp,
    linear,
    quantized_parameter,
)
from diptych.torch.primitives import constants
from diptych.torch.state import scales as scale_states
from diptych.torch.tensors import quantized

_PLACES = (  # (module before, module now, names)
    ("linear", linear, ("Linear",)),
    ("grouped_linear", grouped_linear, ("GroupedLinear",)),
    ("layernorm_linear", layernorm_linear, ("LayerNormLinear",)),
    ("layernorm_mlp", layernorm_mlp, ("LayerNormMLP",)),
    ("opaque", constants, ("Constants",)),
    ("quantized", quantized, ("QuantizedTensor", "QuantizedStack", "_rebuild")),
    ("state", scale_states, ("ScaleSlot", "ScaleStates")),
    ("weights", quantized_parameter, ("_parameter", "_TensorParameter", "_StackParameter")),
    ("weights", weight_gradients, ("WeightGradients",)),
)
# What a state dict can hold: `torch.load(weights_only=True)` takes these alone.
_OF_WEIGHTS = ("_parameter", "_TensorParameter", "_StackParameter", "QuantizedTensor", "QuantizedStack", "_rebuild")


def keep_earlier_names() -> None:
    """Lets `pickle` and `torch.load(weights_only=True)` find classes under the module paths of earlier versions."""
    names = {f"diptych.torch.{old}.{name}": getattr(now, name) for old, now, found in _PLACES for name in found}
    keep(names)
    safe: list[Any] = [(value, name) for name, value in names.items() if name.rpartition(".")[2] in _OF_WEIGHTS]
    torch.serialization.add_safe_globals(safe)
