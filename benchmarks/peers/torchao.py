"""torchao's float8 training: a model whose linear layers are converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.peers import Absent


def load(_: Any) -> Callable[[nn.Module, str], nn.Module]:
    """Returns a function that converts a model by a recipe's name, tensorwise or rowwise."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise Absent(str(error)) from error
    return lambda model, name: convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(name))
