"""A training job as a value (model, optimizer, recipe, device), and its initial weights, made in NumPy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from diptych.common import CustomRecipe, Quantizer, QuantizerRole, Recipe, Value, linear_plan
from diptych.common.quantizers import RHT
from diptych.common.value import field_names

Weights = dict[str, np.ndarray]
LINEARS = ("qkv", "proj", "up", "down")
"""The linear layers of a block in forward order. Embedding and head stay in high precision."""


@dataclasses.dataclass(frozen=True)
class ModelConfig(Value):
    """A byte-level GPT: pre-norm blocks of causal attention and a GELU MLP, learned positions, untied head.

    `high_blocks`: the number of blocks, counted from the last, that a recipe leaves in high precision.
    """

    width: int = 128
    layers: int = 5
    heads: int = 4
    seq: int = 128
    vocab: int = 256
    high_blocks: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name == "high_blocks" else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"model: {field.name} must be at least {least}, got {getattr(self, field.name)}")
        if self.high_blocks >= self.layers:
            raise ValueError(f"model: high_blocks must be less than layers, {self.layers}, got {self.high_blocks}")
        if self.width % self.heads:
            raise ValueError(f"model: width {self.width} is not a multiple of heads {self.heads}")

    @property
    def linears(self) -> list[str]:
        """The names of the quantized linear layers in forward order."""
        return [f"blocks.{i}.{name}" for i in range(self.layers - self.high_blocks) for name in LINEARS]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name, in forward order. Weights of linear layers are [out, in]."""
        d = self.width
        linear = {"qkv": (3 * d, d), "proj": (d, d), "up": (4 * d, d), "down": (d, 4 * d)}
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (self.vocab, d), "position.weight": (self.seq, d)}
        for i in range(self.layers):
            for name in ("norm1", "qkv", "proj", "norm2", "up", "down"):
                shape = linear.get(name, (d,))
                shapes[f"blocks.{i}.{name}.weight"] = shape
                shapes[f"blocks.{i}.{name}.bias"] = shape[:1]
        shapes |= {"norm.weight": (d,), "norm.bias": (d,), "head.weight": (self.vocab, d)}
        return shapes

    @property
    def parameters(self) -> int:
        return sum(math.prod(s) for s in self.shapes().values())


CLIP_EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class OptimConfig(Value):
    """AdamW with linear warmup and cosine decay to a tenth.

    `warmup`: the number of steps until the largest learning rate; a run with fewer steps warms up to its end. `clip`:
    the largest global norm of the gradients, or None. Both frameworks multiply gradients with a norm n by min(1, clip /
    (n + `CLIP_EPS`)), as `torch.nn.utils.clip_grad_norm_` does.
    """

    lr: float = 1e-3
    steps: int = 300
    warmup: int = 20
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"optimizer: steps must be at least 1, got {self.steps}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise ValueError(f"optimizer: lr must be positive and finite, got {self.lr}")
        if self.warmup < 0:
            raise ValueError(f"optimizer: warmup must be at least 0, got {self.warmup}")
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise ValueError(f"optimizer: clip must be positive and finite, got {self.clip}")

    def learning_rates(self) -> np.ndarray:
        """Returns the learning rate of every step, float32 [steps], which both frameworks use."""
        step = np.arange(self.steps)
        warmup = min(self.warmup, self.steps)
        warm = (step + 1) / max(1, warmup)
        progress = np.clip((step - warmup) / max(1, self.steps - warmup), 0, 1)
        return (self.lr * np.minimum(warm, 0.55 + 0.45 * np.cos(np.pi * progress))).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Corruption(Value):
    """The fault of the self-test: the scales of one layer's weight are multiplied by `factor` in every forward product.

    `factor` is a power of two, so that E8M0 scales can hold it. The layer is in the first attention, whose softmax the
    fault saturates; most other layers would train around a wrong factor, because norms undo it.
    """

    layer: str
    factor: float = 65536.0

    def recipe(self, recipe: Recipe, spoil: Spoil) -> CustomRecipe:
        """Returns the recipe of the faulty layer; `spoil` multiplies the scales of a copy in the panel's own arrays."""
        options = {f"fp8_gemm_{g}": getattr(recipe, f"fp8_gemm_{g}") for g in ("fprop", "dgrad", "wgrad")}
        return CustomRecipe(_AtFault(recipe, self.factor, spoil), **options)


Spoil = Callable[[Any, float], Any]
"""A function of (quantized tensor, factor). It returns the tensor with its rowwise copy's scales times the factor."""


@dataclasses.dataclass(frozen=True, eq=False)
class _AtFault(Value):
    base: Recipe
    factor: float
    spoil: Spoil

    def __call__(self, role: QuantizerRole) -> Quantizer | None:
        quantizer = self.base.quantizer(role)
        if quantizer is None or role.tensor != "weight":
            return quantizer
        fields = {name: getattr(quantizer, name) for name in field_names(type(quantizer))}
        return _spoiled(type(quantizer), self.factor, self.spoil)(**fields)


@functools.cache
def _spoiled(kind: type[Quantizer], factor: float, spoil: Spoil) -> type[Quantizer]:
    """Returns a subclass of the quantizer class `kind` whose rowwise copies have wrong scales."""

    class Spoiled(kind):  # type: ignore[misc,valid-type]
        def quantize_impl(self, x: Any, quantize: Callable[..., Any]) -> Any:
            fields = {name: getattr(self, name) for name in field_names(kind)}
            q = quantize(x, kind(**fields))
            return spoil(q, factor) if self.rowwise else q

    return Spoiled


@dataclasses.dataclass(frozen=True)
class Job(Value):
    """One training run.

    `recipe`: None means high precision. `compile`: False runs torch eagerly; JAX is always jitted. `seed`: the seed of
    stochastic rounding, in which each linear layer has its own random stream (`streams`).
    """

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = OptimConfig()
    recipe: Recipe | None = None
    device: str = "cpu"
    compile: bool = True
    threads: int = 2
    seed: int = 0
    corruption: Corruption | None = None

    def __post_init__(self) -> None:
        if self.corruption is not None and self.recipe is None:
            raise ValueError("corruption: a high-precision run has no scale to corrupt; give it a recipe")
        if self.corruption is not None and self.corruption.layer not in self.model.linears:
            said = f"the model has no linear {self.corruption.layer!r}; there are {', '.join(self.model.linears)}"
            raise ValueError(f"corruption: {said}")

    @property
    def linear_dtype(self) -> str:
        """The dtype in which the blocks' linear layers compute; all other ops compute in float32."""
        return linear_dtype(self.recipe)

    def streams(self) -> dict[str, int]:
        """Returns the first random offset of each linear layer by name, empty if nothing is rounded stochastically."""
        if self.recipe is None or not linear_plan(self.recipe).needs_rng:
            return {}
        return {name: i << 32 for i, name in enumerate(self.model.linears)}


LOSS_TOLERANCE = {1: 0.02, 2: 0.04}
"""The allowed relative distance of the final loss from that in high precision, by payload elements per byte."""


def _quantizers(recipe: Recipe) -> list[Quantizer]:
    plan = linear_plan(recipe)
    found = [q for t in (plan.input, plan.weight, plan.grad_output) for q in (t.rowwise, t.columnwise)]
    return [q for q in found if q is not None]


def linear_dtype(recipe: Recipe | None) -> str:
    """Returns the input dtype that a recipe requires: bfloat16 for a Hadamard transform, else float32."""
    rotates = recipe is not None and any(q.spec.flags & RHT for q in _quantizers(recipe))
    return "bfloat16" if rotates else "float32"


def loss_tolerance(recipe: Recipe) -> float:
    """Returns the allowed relative distance of a recipe's final loss from that in high precision."""
    return LOSS_TOLERANCE[elements_per_byte(recipe)]


def elements_per_byte(recipe: Recipe) -> int:
    """Returns the largest number of payload elements in a byte over the recipe's formats: 1 for 8 bits, 2 for 4."""
    return max((q.format.pack for q in _quantizers(recipe)), default=1)


def initial_weights(model: ModelConfig, seed: int) -> Weights:
    """Returns initial weights, float32 by name: normal(0, 0.02), residual projections over sqrt(2 layers), norms 1,
    biases 0."""
    rng = np.random.default_rng([seed, 0x696E6974])
    weights: Weights = {}
    for name, shape in model.shapes().items():
        if name.endswith("bias"):
            weights[name] = np.zeros(shape, np.float32)
        elif "norm" in name:
            weights[name] = np.ones(shape, np.float32)
        else:
            std = 0.02 / math.sqrt(2 * model.layers) if ("proj" in name or "down" in name) else 0.02
            weights[name] = (std * rng.standard_normal(shape)).astype(np.float32)
    return weights
