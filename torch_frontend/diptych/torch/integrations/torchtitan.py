"""torchtitan: `LinearConverter` replaces linear layers in a model's config, as torchtitan's own converters do.

torchtitan builds models from trees of configs, on the meta device, and asks every module to follow its protocol, so
that `diptych.torch.convert`, which changes modules that exist, comes too late there.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from diptych.common.arguments import require_recipe
from diptych.common.conversion import ConvertWarning
from diptych.common.errors import UnsupportedError
from diptych.common.recipes import Recipe
from diptych.torch.modules.filters import FEATURES
from diptych.torch.modules.linear import Linear

try:
    from torchtitan.components.quantization import QuantizationConverter  # pyright: ignore[reportMissingImports]
    from torchtitan.models.common.linear import Linear as TitanLinear  # pyright: ignore[reportMissingImports]
    from torchtitan.protocols.module import Module  # pyright: ignore[reportMissingImports]
except ImportError as missing:
    raise ImportError(
        f"diptych.torch.integrations.torchtitan needs torchtitan 0.3 or newer ({missing}): pip install torchtitan"
    ) from missing

__all__ = ["LinearConverter", "QuantizedLinear"]


class QuantizedLinear(Linear, Module):
    """A `diptych.torch.Linear` in torchtitan's protocol. Its states are made with torchtitan's other buffers."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """torchtitan's config of a linear layer, with a recipe, and the layer's name for its roles."""

        recipe: Recipe
        name: str = ""

        def to_dict(self) -> dict[str, Any]:
            """Returns values that JSON takes; the recipe as its text."""
            own = {f.name: getattr(self, f.name) for f in dataclasses.fields(TitanLinear.Config)}
            return {**TitanLinear.Config(**own).to_dict(), "recipe": repr(self.recipe), "name": self.name}

    def __init__(self, config: Config) -> None:
        super().__init__(config.in_features, config.out_features, bias=config.bias, name=config.name)
        self.recipe = config.recipe

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.prepare_states()

    def parallelize(self, parallel_dims: Any) -> None:
        """Raises UnsupportedError where torchtitan cuts the layer over ranks; otherwise as any module of torchtitan."""
        if parallel_dims.tp_enabled:
            raise UnsupportedError(
                f"Linear {self.name!r}: torchtitan's tensor parallelism, whose sharded weights are DTensors: set "
                "parallelism.tensor_parallel_degree=1, or leave the layer out by filter_fqns"
            )
        super().parallelize(parallel_dims)


class LinearConverter(QuantizationConverter):
    """Converts the linear layers of a model's config to a recipe. It goes before LoRAConverter, whose adapters then
    stay in high precision.

    Layers with fewer than 16 features on a side are left. A layer of another kind than torchtitan's `Linear`, such as
    one that another converter made, is left with a `ConvertWarning` that names it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """`recipe`: of the converted layers. `filter_fqns`: layers whose qualified names contain one of these are
        left, such as "lm_head"."""

        recipe: Recipe
        filter_fqns: list[str] = field(default_factory=list)

    def __init__(self, config: Config) -> None:
        require_recipe("LinearConverter", config.recipe)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Returns the config with the layers replaced; the tree is changed in place, unless it is itself a layer.

        **Raises:** ValueError if an entry of `filter_fqns` is in no layer's name.
        """
        layers = list(model_config.traverse(TitanLinear.Config))
        unused = [part for part in self.config.filter_fqns if not any([part in fqn for fqn, *_ in layers])]
        if unused:
            names = ", ".join([fqn for fqn, *_ in layers])
            raise ValueError(f"LinearConverter: filter_fqns has {unused[0]!r}, which is in no layer's name: {names}")
        for fqn, layer, parent, place in layers:
            small = min(layer.in_features, layer.out_features) < FEATURES
            if small or any([part in fqn for part in self.config.filter_fqns]):
                continue
            if type(layer) is not TitanLinear.Config:
                kind = type(layer).__qualname__
                warnings.warn(f"LinearConverter: {fqn} ({kind}) is left as it is", ConvertWarning, stacklevel=2)
                continue
            given = {f.name: getattr(layer, f.name) for f in dataclasses.fields(layer)}
            made = QuantizedLinear.Config(**given, recipe=self.config.recipe, name=fqn)
            if parent is None:
                return made
            if isinstance(parent, list):
                parent[place] = made
            else:
                setattr(parent, place, made)
        return model_config
