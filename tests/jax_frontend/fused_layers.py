"""Norm, linear and MLP under any recipe, composed from ops that store every tensor: what the fused modules must equal.

Where a module quantizes values that were never rounded, the composition holds them in float32; the Hadamard transform
alone reads them in bfloat16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diptych.jax as dj
import oracle
from diptych.common import RECIPES, CustomRecipe, Float8BlockQuantizer, NVFP4BlockScaling, linear_plan
from diptych.common.ops.activation import ACTIVATIONS
from diptych.common.ops.norm import norm_options as make_norm
from diptych.common.quantizers import RHT
from diptych.jax.layers.products import OFFSETS
from diptych.jax.primitives import activation as activation_ops
from diptych.jax.primitives import norm as norm_ops
from diptych.jax.state.scales import init_state, is_state, map_states
from jax_frontend import tools
from jax_frontend.layer_cases import E4M3, E5M2, FP4, MX, Layer, rng_words
from oracle.fused import column_sum

NORMS = {
    "layernorm": {},
    "rmsnorm": {"normalization": "RMSNorm", "eps": 1e-3},
    "zero-centered": {"zero_centered_gamma": True},
}
LINEAR = ("y", "dx", "dgamma", "dbeta", "dkernel", "dbias")
MLP = ("y", "dx", "dgamma", "dbeta", "dkernel1", "dbias1", "dkernel2", "dbias2")


def _mixed(role):
    """Other quantizers for each product, and unquantized operands."""
    if role.tensor == "input" and role.gemm == "wgrad":
        return E5M2
    if role.tensor == "grad_output" and role.gemm == "dgrad" and role.name.endswith("fc1"):
        return None
    return {"input": E4M3, "weight": Float8BlockQuantizer(block_scaling_dim=2), "grad_output": MX}[role.tensor]


def _stochastic(role):
    return FP4


EVERY = {
    **RECIPES,
    "nvfp4 to nearest": NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
    "current, high precision backward": dj.Float8CurrentScaling(backward_override="high_precision"),
    "mxfp8, dequantized backward": dj.MXFP8BlockScaling(backward_override="dequantized"),
    "mixed": CustomRecipe(_mixed),
    "stochastic": CustomRecipe(_stochastic),
}
# Those whose layers differ most, for what is asked of each of several kinds of layer
NOW = ("fp8-delayed", "fp8-block", "mxfp8", "nvfp4", "current, high precision backward", "mixed", "stochastic")


class Wide(Layer):
    """A layer whose input may be float32 where the module's is not stored."""

    def copy(self, tensor: str, gemm: str, x: np.ndarray, columnwise: bool) -> Any:
        quantizer = self.quantizer(tensor, gemm)
        if columnwise and quantizer is not None and quantizer.with_usage(columnwise=True).spec.flags & RHT:
            x = np.asarray(x).astype(oracle.BF16)
        return super().copy(tensor, gemm, x, columnwise)


def fuses(tensor: Any) -> bool:
    return tensor.rowwise is not None and tensor.columnwise is not None


def norm(x: Any, gamma: Any, beta: Any, options: Any, dtype: Any) -> tuple[Any, Any]:
    """Statistics and the norm in `dtype`: computed in float32, cast once."""
    stats, z = norm_ops.norm(x.astype(jnp.float32), gamma, beta, options)
    return stats, z.astype(dtype)


def norm_options(**kind: Any) -> Any:
    eps, which = kind.get("eps", 1e-5), kind.get("normalization", "LayerNorm")
    return make_norm("test", which, eps, kind.get("zero_centered_gamma", False))


def _grads(dz: np.ndarray, x: Any, gamma: Any, beta: Any, stats: Any, options: Any) -> dict[str, Any]:
    dz = jnp.asarray(dz.astype(x.dtype))
    dx, dgamma, dbeta = norm_ops.norm_grad(dz, x, gamma, stats, options, beta is not None)
    return {"dx": dx, "dgamma": dgamma} | ({} if beta is None else {"dbeta": dbeta})


def _width(plan: Any, x: Any) -> Any:
    return jnp.float32 if plan.input.rowwise is not None else x.dtype  # a wgrad in high precision rounds it to dy's


def linear(recipe, x, gamma, beta, kernel, bias, dy, *, scales=None, rng=None, **kind):
    """Returns the expected results of `layernorm_dense`, and the layer, which knows the amaxes."""
    options, plan = norm_options(**kind), linear_plan(recipe, "layernorm_linear", "")
    stats, z = norm(x, gamma, beta, options, _width(plan, x))
    layer = Wide(recipe, scales, rng, module="layernorm_linear")
    out = layer.run(z, kernel, bias, np.asarray(dy))
    got = {"y": out["y"].astype(x.dtype), **_grads(out["dx"], x, gamma, beta, stats, options)}
    return got | {"dkernel": out["dkernel"]} | ({} if bias is None else {"dbias": out["dbias"]}), layer


def mlp(recipe, x, gamma, beta, k1, b1, k2, b2, dy, *, activation="gelu", scales=None, rng=None, **kind):
    """Returns the expected results of `layernorm_mlp`, and both layers."""
    options, (which, gated) = norm_options(**kind), ACTIVATIONS[activation]
    names = ("fc1", "fc2")
    p1, p2 = (linear_plan(recipe, "layernorm_mlp", n) for n in names)
    of = [(scales or {}).get(n) for n in names]
    rngs = (None, None) if rng is None else (rng, rng_words(rng, OFFSETS))
    layers = [Wide(recipe, s, r, module="layernorm_mlp", name=n) for s, r, n in zip(of, rngs, names, strict=True)]
    stats, z = norm(x, gamma, beta, options, _width(p1, x))
    unused = np.zeros((*x.shape[:-1], k1.shape[0]), x.dtype)
    first = Wide(recipe, of[0], rngs[0], module="layernorm_mlp", name="fc1").run(z, k1, b1, unused)
    h = jnp.asarray(first["y"].astype(x.dtype))
    a = activation_ops.activation(h.astype(jnp.float32), which, gated).astype(_width(p2, x))
    second = layers[1].run(a, k2, b2, np.asarray(dy))
    da = jnp.asarray(second["dx"])
    unrounded = fuses(p1.grad_output)
    wide = jnp.float32 if unrounded else x.dtype
    dh = activation_ops.activation_grad(da.astype(jnp.float32), h.astype(jnp.float32), which, gated).astype(wide)
    out = layers[0].run(z, k1, b1, np.asarray(dh))
    got = {"y": second["y"].astype(x.dtype), **_grads(out["dx"], x, gamma, beta, stats, options)}
    got |= {"dkernel1": out["dkernel"], "dkernel2": second["dkernel"]}
    if b1 is not None:
        dbias1 = column_sum(oracle.fold(np.asarray(dh)), b1.dtype) if unrounded else out["dbias"]
        got |= {"dbias1": dbias1, "dbias2": second["dbias"]}
    return got, layers


# --- running ---


def given(recipe, module, name=""):
    """State with scales that fit normal values, and rng, as the recipe needs them: keyword arguments."""
    plans = [linear_plan(recipe, module, n) for n in ((name,) if module == "layernorm_linear" else ("fc1", "fc2"))]
    out: dict[str, Any] = {}
    if any(p.states for p in plans):
        init = init_state if module == "layernorm_linear" else dj.init_layernorm_mlp_state
        states = init(recipe, module=module, name=name)
        numbers = iter(range(3, 100))
        out["state"] = map_states(lambda s: _scaled(s, float(next(numbers))), states)
    if any(p.needs_rng for p in plans):
        out["rng"] = dj.rng_state(2**40 + 7, 2**32 - 20)
    return out


def _scaled(state, scale):
    return type(state)(state.quantizer, jnp.full(1, scale, jnp.float32), state.amax_history, state.count)


def scales_of(options):
    """Scales by slot, of several layers by layer and slot."""
    return jax.tree.map(lambda s: np.asarray(s.scale), options.get("state", {}), is_leaf=is_state)


def run(f, names, args, dy, recipe, **options):
    """y and the gradients by name, and the new state."""
    state = options.pop("state", None)
    there = [i for i, a in enumerate(args) if a is not None]

    def call(some, state):
        full = list(args)
        for i, v in zip(there, some, strict=True):
            full[i] = v
        return f(*full, recipe=recipe, state=state, **options)

    y, pull = jax.vjp(call, [args[i] for i in there], state)
    grads, news = pull(dy)
    return {"y": y} | {names[i + 1]: g for i, g in zip(there, grads, strict=True)}, news


def linear_operands(shape=(2, 16, 64), n=48, dtype="float32"):
    """x, gamma, beta, kernel, bias and dy; rows of x have means and spreads of their own."""
    x = tools.normal("x", shape, dtype) * 3 + tools.normal("mean", (*shape[:-1], 1), dtype)
    gamma = 1 + tools.normal("gamma", shape[-1:], dtype) / 4
    beta, kernel = tools.normal("beta", shape[-1:], dtype) / 4, tools.normal("kernel", (n, shape[-1]), dtype)
    return [x, gamma, beta, kernel, tools.normal("bias", (n,), dtype)], tools.normal("dy", (*shape[:-1], n), dtype)


def mlp_operands(shape=(2, 16, 64), width=80, n=48, dtype="float32", gated=False):
    """x, gamma, beta, kernel1, bias1, kernel2, bias2 and dy."""
    (x, gamma, beta, *_), dy = linear_operands(shape, n, dtype)
    rows = width * 2 if gated else width
    k1, k2 = tools.normal("k1", (rows, shape[-1]), dtype) / 8, tools.normal("k2", (n, width), dtype) / 8
    return [x, gamma, beta, k1, tools.normal("b1", (rows,), dtype), k2, tools.normal("b2", (n,), dtype)], dy
