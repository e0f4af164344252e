"""Names of the operands and results of diptych's ops in a trace, which PyTorch's ops have too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.common.ops.norm import NormOptions
from diptych.jax.primitives import activation, grouped, norm, permute, quantize
from diptych.jax.primitives.ffi import Source, target
from diptych.lab.jax import own_ops as ops

X, GAMMA, ONE = jnp.ones((32, 32), jnp.bfloat16), jnp.ones(32), jnp.ones(1)
MAP, ROWS = jnp.zeros((32, 1), jnp.int32), jnp.zeros(32, jnp.int32)
LAYERNORM, RMSNORM = (NormOptions(which, 1e-5, False) for which in ("layernorm", "rmsnorm"))
STATS = (jnp.ones(32), jnp.ones(32))
DELAYED, CURRENT = dj.Float8Quantizer(columnwise=False), dj.Float8CurrentScalingQuantizer(columnwise=False)
COPY = "rowwise_data rowwise_scale_inv"


def names(fn: Any) -> tuple[str, str, str]:
    """The name of the only op in a function, and those of its operands and results."""
    (eqn,) = (e for e in jax.make_jaxpr(fn)().eqns if e.primitive.name.startswith(target("")))
    op = eqn.primitive.name.removeprefix(target(""))
    ins, outs = ops.names(op, eqn.params, len(eqn.invars), len(eqn.outvars))
    assert (len(ins), len(outs)) == (len(eqn.invars), len(eqn.outvars)) and len({*ins}) == len(ins)
    return op, " ".join(ins), " ".join(outs)


@pytest.mark.parametrize(
    ("fn", "want"),
    [
        (lambda: norm.norm(X, GAMMA, GAMMA, LAYERNORM), ("norm", "x gamma beta", "out[1] out[0] out[2]")),
        (lambda: norm.norm(X, GAMMA, None, RMSNORM), ("norm", "x gamma", "out[0] out[1]")),
        (lambda: norm.statistics(X, RMSNORM), ("norm", "x", "out")),
        (lambda: norm.statistics(X, LAYERNORM), ("norm", "x", "out[1] out[0]")),
        (lambda: norm.norm_grad(X, X, GAMMA, STATS, LAYERNORM, True),
         ("norm_grad", "dy x gamma mu rsigma", "out[0] out[1] out[2]")),
        (lambda: norm.norm_grad(X, X, GAMMA, STATS[:1], RMSNORM, False),
         ("norm_grad", "dy x gamma rsigma", "out[0] out[1]")),
        (lambda: activation.activation(X, "gelu", False), ("activation", "x", "out")),
        (lambda: activation.activation_grad(X, X, "gelu", False), ("activation_grad", "dy x", "out")),
        (lambda: permute.invert_map(MAP, 32), ("invert_map", "row_id_map", "out[1] out[0]")),
        (lambda: permute.chunk_map(ROWS, ROWS, 32), ("chunk_map", "split_sizes sorted_index", "out[0] out[1]")),
        (lambda: permute.permute((X, GAMMA), MAP, ROWS, STATS[0][:, None]),
         ("permute", "row_id_map row_source planes[0] planes[1] probs", "out[0] out[1] out[2]")),
        (lambda: permute.unpermute(X, MAP, None, GAMMA),
         ("unpermute", "x row_id_map permuted_dprobs", "out[0] out[1]")),
        (lambda: permute.unpermute_grad(X, MAP, ROWS, GAMMA[:, None]),
         ("unpermute_grad", "dy row_id_map row_source probs", "out")),
        (lambda: grouped.grouped_bias_grad(X, jnp.zeros(3, jnp.int32), "float32"),
         ("grouped_bias_grad", "dy offsets", "out")),
        (lambda: quantize.amax(X), ("amax", "x", "out")),
        (lambda: quantize.amax(X, source=Source("activation_grad", "gelu"), operands=(X,), columnwise=True),
         ("amax", "x dy", "out[0] out[1]")),
        (lambda: quantize.quantize(X, CURRENT), ("quantize", "x", f"{COPY} amax")),
        (lambda: quantize.quantize(X, CURRENT, amax=ONE), ("quantize", "x amax", COPY)),
        (lambda: quantize.quantize(X, CURRENT, amax=ONE, column_sum="float32"),
         ("quantize", "x amax", f"{COPY} column_sum")),
        (lambda: quantize.quantize(X, CURRENT, source=Source("norm", "layernorm", False, True),
                                   operands=(GAMMA, GAMMA, *STATS)),
         ("quantize", "x gamma beta mu rsigma", f"{COPY} amax")),
        (lambda: quantize.quantize(X, CURRENT, source=Source("permuted"), operands=(MAP, ROWS)),
         ("quantize", "x row_id_map row_source", f"{COPY} amax")),
        (lambda: quantize.quantize_delayed(X, DELAYED, ONE, jnp.ones(4))[0],
         ("quantize", "x pending scale", f"{COPY} amax")),
        (lambda: grouped.quantize_stack(X[None], DELAYED, scale=ONE), ("quantize_stack", "x scale", f"{COPY} amax")),
    ],
)  # fmt: skip
def test_names(fn, want):
    assert names(fn) == want
