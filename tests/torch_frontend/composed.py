"""The fused modules as compositions of unfused ones, with the same parameters, roles and states; and their steps."""

from __future__ import annotations

from typing import Any

import torch

import diptych.torch as dt
from diptych.common import NVFP4BlockScaling, Recipe
from diptych.torch.functional import activation as activation_verbs
from diptych.torch.functional import norm as norm_verbs
from torch_frontend.layer_cases import NAMED, SEED, dtype_of, packed, same_step
from torch_frontend.tools import normal, same, values

LINEAR = ({}, {"normalization": "RMSNorm", "zero_centered_gamma": True, "bias": False})
MLP = (
    {},
    {"activation": "swiglu", "normalization": "RMSNorm", "bias": False},
    {"activation": "qgeglu", "zero_centered_gamma": True},
)


def unrounded(name: str) -> Recipe:
    """A recipe under which float32 inputs stay float32: the Hadamard transform is for bfloat16 alone."""
    recipe = NAMED[name]
    return recipe.replace(disable_rht=True) if isinstance(recipe, NVFP4BlockScaling) else recipe


class _Composed(dt.QuantizedModule):
    def __init__(self, of: Any) -> None:
        super().__init__()
        self.of = (of,)  # a tuple: no submodule
        self.module_kind, self.name = of.module_kind, of.name
        for name, p in of.named_parameters():
            self.register_parameter(name, torch.nn.Parameter(p.detach().clone(), p.requires_grad))

    def part(self, name: str) -> Any:
        return self._parameters.get(name)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return norm_verbs.layernorm(x, self.part("layer_norm_weight"), self.part("layer_norm_bias"), self.of[0].norm)


class ComposedLinear(_Composed):
    def forward(self, x: torch.Tensor) -> Any:
        z = self.norm(x)
        y = self.quantized_linear(z, self.weight, self.part("bias"))
        return (y, z) if self.of[0].return_layernorm_output else y


class ComposedMLP(_Composed):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.quantized_linear(self.norm(x), self.fc1_weight, self.part("fc1_bias"), "fc1")
        a = activation_verbs.activate(values(h), self.of[0].activation_options)
        return self.quantized_linear(a, self.fc2_weight, self.part("fc2_bias"), "fc2")


def composed(module: Any) -> _Composed:
    return (ComposedMLP if isinstance(module, dt.LayerNormMLP) else ComposedLinear)(module)


def _fixed(module: Any) -> Any:
    """Parameters by their names; gammas of both signs."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(normal(f"fused-{name}", tuple(p.shape), device=str(p.device)) * (0.3 if "fc" in name else 1))
    return module


def linear(k: int = 96, n: int = 64, **options: Any) -> dt.LayerNormLinear:
    return _fixed(dt.LayerNormLinear(k, n, **options))


def mlp(k: int = 64, f: int = 96, **options: Any) -> dt.LayerNormMLP:
    return _fixed(dt.LayerNormMLP(k, f, **options))


def input_for(recipe: Recipe, shape: tuple[int, ...] = (2, 16, 96), device: str = "cpu") -> torch.Tensor:
    """Returns values of the dtype that a recipe takes."""
    return normal("fused-x", shape, dtype_of(recipe), device)


def steps(
    model: Any, recipe: Recipe | None, x: torch.Tensor, count: int = 3, fn: Any = None
) -> dict[str, torch.Tensor]:
    """Results, gradients and states of some training steps from a fresh random state, by name."""
    model.zero_grad(set_to_none=True)
    if recipe is not None and packed(recipe):
        dt.seed_rng(model, SEED)
    out: dict[str, torch.Tensor] = {}
    for i in range(count):
        v = (x.detach() * (i + 1)).requires_grad_()
        with dt.autocast(recipe=recipe, enabled=recipe is not None):
            y = model(v) if fn is None else fn(v)
        ys = tuple([values(t) for t in (y if isinstance(y, tuple) else (y,))])
        torch.autograd.backward([t.square().sum() for t in ys])
        out |= {f"{i} y{j}": t.detach() for j, t in enumerate(ys)} | {f"{i} dx": v.grad}
    out |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return out | {k: t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k}


def require_same(module: Any, x: torch.Tensor, recipe: Recipe) -> None:
    """Steps of a module and of its composition, and what they give without a backward, have the same bits and types."""
    apart = composed(module)
    same_step(steps(module, recipe, x), steps(apart, recipe, x))
    with dt.autocast(recipe=recipe):
        y, other = module(x), apart(x)  # both begin a step: what follows does not record
        with torch.no_grad():
            got, want = module(x), apart(x)
    assert type(y) is type(other) is type(got) is type(want) and y.requires_grad
    same(values(got), values(want))
