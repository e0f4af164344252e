"""Where earlier versions kept the classes and functions that pickled weights and modules name."""

import torch

from diptych.common.earlier_names import keep
from diptych.torch import held


def keep_earlier_names() -> None:
    """For `pickle`, and for `torch.load(weights_only=True)`."""
    weights = ("_parameter", "_TensorParameter", "_StackParameter")
    names = {f"diptych.torch.weights.{name}": getattr(held, name) for name in weights}
    keep(names)
    torch.serialization.add_safe_globals([(value, name) for name, value in names.items()])
