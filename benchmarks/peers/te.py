"""TransformerEngine's Linear, eager, with its recipes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import Absent

RECIPES = {"fp8-current": "Float8CurrentScaling", "fp8-delayed": "DelayedScaling", "fp8-block": "Float8BlockScaling"}


def load(_: Any) -> Callable[[int, int, str], tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    """Returns a function of inputs, outputs and a recipe's name that makes a layer and its forward pass."""
    try:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as recipes
    except (ImportError, OSError) as error:
        raise Absent(str(error)) from error

    def made(k: int, n: int, name: str) -> tuple[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
        layer = te.Linear(k, n, params_dtype=torch.bfloat16, device="cuda")
        recipe = getattr(recipes, RECIPES[name])()

        def forward(x: torch.Tensor) -> torch.Tensor:
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                return layer(x)

        return layer, forward

    return made
