"""A mixture of experts between its layers, for the modules of nnx and linen: the router and the rows of each expert."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from diptych.common.layers.groups import row_align
from diptych.common.ops.activation import ACTIVATIONS
from diptych.common.recipes import Recipe
from diptych.jax.functional.activation import activate
from diptych.jax.functional.permute import moe_map, moe_unpermute

Array = jax.Array


def _route(logits: Array, top_k: int) -> tuple[Array, Array, Array]:
    """Returns each token's experts [T, k], their probabilities [T, k], which add up to 1, and the load-balancing loss:
    1 where all experts are used alike, more where few are. `logits`: float32 [T, E]."""
    probs = jax.nn.softmax(logits)
    top, experts = jax.lax.top_k(probs, top_k)
    used = (experts[..., None] == jnp.arange(logits.shape[-1])).mean((0, 1))
    balance = logits.shape[-1] * (used * probs.mean(0)).sum()
    return experts, top / top.sum(-1, keepdims=True), balance


def alignment(recipe: Recipe | None, align: int | None) -> int:
    """Returns the multiple of rows at which each expert's rows begin: `align`, or that of the recipe for None."""
    if align is not None:
        return align
    return 1 if recipe is None else row_align(recipe)


def mixture(
    inputs: Array, router: Any, wi: Any, wo: Any, *, num_experts: int, top_k: int, activation: str, align: int
) -> tuple[Array, Array]:
    """Returns the sum of the `top_k` experts' results for each token, weighted by the router, and the loss of `_route`.

    **Arguments:** `inputs`: [..., in]. `router`: gives the logits of tokens [T, in], float32 [T, experts]. `wi`, `wo`:
    both layers of the experts, called as `grouped_dense`. `activation`: its name in `layernorm_mlp`. `align`: each
    expert's rows begin at a multiple of it.
    """
    x = inputs.reshape(-1, inputs.shape[-1])
    experts, probs, balance = _route(router(x), top_k)
    rows = moe_map(experts, num_experts, map_type="index", align_size=align)
    hidden = activate(*ACTIVATIONS[activation], wi(x, row_map=rows, align=align))
    y = wo(hidden, rows.expert_offsets, align=align)
    return moe_unpermute(y, rows, merging_probs=probs).reshape(inputs.shape), balance
