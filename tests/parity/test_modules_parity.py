"""LayerNormLinear and LayerNormMLP against layernorm_dense and layernorm_mlp over several steps: results, gradients and
states with the same bits, for every recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sweeps import others_slow

import cases
from diptych.common import (
    RECIPES,
    DelayedScaling,
    Float8CurrentScaling,
    LinearPlan,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    linear_plan,
)
from diptych.common.ops.activation import ACTIVATIONS
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state.scales import init_state, overwrite_states, state_dict
from diptych.jax.state.update import update_state
from parity.layers import MIXTURES, SEED, packed, rotates
from parity.panels import backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch, torch, values

pytestmark = pytest.mark.sampled

EVERY = {
    **RECIPES,
    "square": RECIPES["fp8-block"].replace(wgrad_input_square=True),
    "delayed, short, newest": DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    "nvfp4 by row": NVFP4BlockScaling(row_scaled_activation=True, rht_random_signs=False),
    "nvfp4 plain": NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True),
    "mxfp8, dequantized backward": MXFP8BlockScaling(backward_override="dequantized"),
    "current, high precision backward": Float8CurrentScaling(backward_override="high_precision"),
    **MIXTURES,
}
STEPS = 3
DTYPES = tuple(cases.INPUT_DTYPES)
# (x's shape, F): ragged, leading dimensions, one element, several blocks
SHAPES = (((7, 33), 5), ((2, 3, 96), 20), ((1, 1), 1), ((130, 65), 129))
PACKED_SHAPES = (((16, 32), 16), ((2, 24, 96), 32))


@dataclasses.dataclass(frozen=True)
class Module:
    """One module in both panels. `torch_names`: of its parameters, in the order of the JAX function's arguments."""

    kind: str
    parts: tuple[str, ...]
    torch_names: tuple[str, ...]
    torch_class: Callable[..., Any]
    jax_function: Callable[..., Any]
    init_state: Callable[..., Any]
    options: dict[str, Any]

    def plans(self, recipe: Any) -> list[LinearPlan]:
        return [linear_plan(recipe, self.kind, name) for name in self.parts]

    def names(self) -> tuple[str, ...]:
        beta = self.options.get("normalization") != "RMSNorm"
        return tuple(n for n in self.torch_names if beta or n != "layer_norm_bias")

    def arrays(self, label: str, shape: tuple[int, ...], width: int, dtype: str) -> list[np.ndarray]:
        """x, the parameters and the gradient of the result."""
        k, gated = shape[-1], ACTIVATIONS[self.options.get("activation", "gelu")].gated
        rows = width * (1 + gated)
        shapes = {
            "layer_norm_weight": (k,), "layer_norm_bias": (k,), "weight": (width, k), "bias": (width,),
            "fc1_weight": (rows, k), "fc1_bias": (rows,), "fc2_weight": (k, width), "fc2_bias": (k,),
        }  # fmt: skip
        out = (*shape[:-1], width if self.kind == "layernorm_linear" else k)
        wanted = [shape, *(shapes[n] for n in self.names()), out]
        return [cases.draw(f"{label}-{i}", "normal", s, dtype) for i, s in enumerate(wanted)]

    def results(self) -> tuple[str, ...]:
        return ("y", "x", *self.names())


LINEAR = Module(
    "layernorm_linear", ("",), ("layer_norm_weight", "layer_norm_bias", "weight", "bias"), dt.LayerNormLinear,
    dj.layernorm_dense, init_state, {},
)  # fmt: skip
MLP = Module(
    "layernorm_mlp", ("fc1", "fc2"),
    ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"), dt.LayerNormMLP,
    dj.layernorm_mlp, dj.init_layernorm_mlp_state, {},
)  # fmt: skip
RMS = {"normalization": "RMSNorm", "eps": 1e-3}
CENTERED = {"zero_centered_gamma": True}
MODULES = {
    "linear": LINEAR,
    "linear, rms": dataclasses.replace(LINEAR, options=RMS),
    "mlp, gelu": dataclasses.replace(MLP, options={"activation": "gelu"} | CENTERED),
    "mlp, swiglu, rms": dataclasses.replace(MLP, options={"activation": "swiglu"} | RMS),
}

Step = tuple[dict[str, Any], dict[str, Any]]  # results, states


def of_torch(module: Module, recipe: Any, steps: list[list[np.ndarray]], device: str = "cpu") -> list[Step]:
    weight = steps[0][-3].shape  # weight [N, K], or fc2_weight [K, F]
    sizes = weight[::-1] if module.kind == "layernorm_linear" else weight
    layer = module.torch_class(*sizes, device=device, **module.options)
    layer.seed_rng(SEED)
    if not any(p.needs_rng for p in module.plans(recipe)):
        del layer.rng_state
    out = []
    for arrays in steps:
        x, *parameters, dy = (to_torch(a, device) for a in arrays)
        for name, value in zip(module.names(), parameters, strict=True):
            setattr(layer, name, torch.nn.Parameter(value))
        x.requires_grad_()
        with dt.autocast(enabled=True, recipe=recipe):
            y = values(layer(x))
        y.backward(dy)
        grads = [x.grad, *(getattr(layer, n).grad for n in module.names())]
        states = {n: v.clone() for n, v in layer.state_dict().items() if n not in module.names()}
        out.append((dict(zip(module.results(), (y, *grads), strict=True)), states))
    return out


def of_jax(module: Module, recipe: Any, steps: list[list[np.ndarray]], device: str = "cpu") -> list[Step]:
    needs_rng = any(p.needs_rng for p in module.plans(recipe))

    def step(states, rng, x, parameters, dy):
        states = update_state(states, recipe)

        def layer(x, parameters, states):
            by_name = dict(zip(module.names(), parameters, strict=True))
            args = [by_name.get(n) for n in module.torch_names]
            given = {"recipe": recipe, "state": states, "rng": rng if needs_rng else None}
            return module.jax_function(x, *args, **given, **module.options)

        y, back = jax.vjp(layer, x, parameters, states)
        dx, grads, news = back(dy)
        return [y, dx, *grads], overwrite_states(states, news), rng_at(rng, OFFSETS * len(module.parts))

    run, out = jax.jit(step), []
    states, rng = module.init_state(recipe, module=module.kind), dj.rng_state(SEED)
    for arrays in steps:
        x, *parameters, dy = (to_jax(a, device) for a in arrays)
        results, states, rng = run(states, rng, x, parameters, dy)
        kept = state_dict(states, rng=rng if needs_rng else None)
        out.append((dict(zip(module.results(), results, strict=True)), kept))
    return out


def drawn(module: Module, label: str, shape: Any, width: int, dtype: str) -> list[list[np.ndarray]]:
    """The arrays of several steps; values grow, so that delayed scales follow."""
    every = [module.arrays(f"{label}-{i}", shape, width, dtype) for i in range(STEPS)]
    return [[(a * 2**i).astype(a.dtype) for a in arrays] for i, arrays in enumerate(every)]


def configurations(recipe: Any) -> Iterator[tuple[tuple[int, ...], int, str]]:
    """(shape, F, dtype) that a recipe takes."""
    for turn, (shape, width) in enumerate(PACKED_SHAPES if packed(recipe) else SHAPES):
        yield shape, width, "bfloat16" if rotates(recipe) else DTYPES[turn % 3]


def compare(label: str, mine: list[Step], theirs: list[Step], exact: bool) -> None:
    for i, (torch_step, jax_step) in enumerate(zip(mine, theirs, strict=True)):
        assert torch_step[1].keys() == jax_step[1].keys(), label
        for kind in (0, 1):
            for name, want in torch_step[kind].items():
                got = jax_step[kind][name]
                if exact:
                    same(got, want, f"step {i} {name}: {label}")
                    continue
                # A product by the frameworks themselves may sum in another order, and a rounded value follow it.
                a, b = (np.float64(v.detach().float() if isinstance(v, torch.Tensor) else v) for v in (want, got))
                assert np.linalg.norm(a - b) <= 2e-2 * np.linalg.norm(a), f"step {i} {name}: {label}"


@pytest.mark.parametrize("name", others_slow(EVERY, ("fp8-delayed", "square", "nvfp4", "partly")))
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_same_bits(module, name):
    recipe = EVERY[name]
    exact = all(all(p.quantized) for p in module.plans(recipe))
    for shape, width, dtype in configurations(recipe):
        label = f"{module.kind} {name} {dtype} {shape} {width} {cases.report_header()}"
        arrays = drawn(module, label, shape, width, dtype)
        compare(label, of_torch(module, recipe, arrays), of_jax(module, recipe, arrays), exact)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    module = dataclasses.replace(MLP, options={"activation": activation})
    arrays = drawn(module, activation, (33, 40), 24, "bfloat16")
    recipe = MXFP8BlockScaling()
    compare(activation, of_torch(module, recipe, arrays), of_jax(module, recipe, arrays), True)


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)
def test_same_bits_on_cuda(module, name, cuda):
    """One GPU, one cuBLASLt: torch and JAX agree in bits, whichever kernels the registry chose."""
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    recipe = EVERY[name]
    if not all(all(p.quantized) for p in module.plans(recipe)):
        pytest.skip("some products are the frameworks' own")
    for shape, width, dtype in (*configurations(recipe), ((4, 64, 256), 512, "bfloat16")):
        label = f"cuda {module.kind} {name} {dtype} {shape} {width} {cases.report_header()}"
        arrays = drawn(module, label, shape, width, dtype)
        compare(label, of_torch(module, recipe, arrays, "cuda"), of_jax(module, recipe, arrays, "cuda"), True)
