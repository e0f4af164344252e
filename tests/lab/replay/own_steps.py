"""Training steps of diptych's layers in both frameworks as traces, and the operations in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import diptych.jax as dj
import diptych.torch as dt
from cases.values import draw
from diptych.common import linear_plan
from diptych.jax import lab as jax_lab
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.state.scales import init_state, overwrite_states
from diptych.jax.state.update import update_state
from diptych.lab.replay import recorded, table
from diptych.lab.replay.op import Op
from diptych.lab.traces import Trace
from diptych.torch import lab as torch_lab

SEED, STEPS, M, K, N, GROUPS = 2**40 + 3, 2, 64, 32, 48, (0, 16, 16, 48, 64)
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "linear": {"weight": (N, K), "bias": (N,)},
    "layernorm_linear": {"layer_norm_weight": (K,), "layer_norm_bias": (K,), "weight": (N, K), "bias": (N,)},
    "layernorm_mlp": {
        "layer_norm_weight": (K,), "layer_norm_bias": (K,),
        "fc1_weight": (2 * N, K), "fc1_bias": (2 * N,), "fc2_weight": (K, N), "fc2_bias": (K,),
    },
    "grouped_linear": {"weight": (len(GROUPS) - 1, N, K), "bias": (len(GROUPS) - 1, N)},
}  # fmt: skip
"""The parameters of each kind of layer, in the order of the arguments of JAX's functions."""
MODULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "linear": (dt.Linear, dj.dense),
    "layernorm_linear": (dt.LayerNormLinear, dj.layernorm_dense),
    "layernorm_mlp": (dt.LayerNormMLP, dj.layernorm_mlp),
    "grouped_linear": (dt.GroupedLinear, dj.grouped_dense),
}


def _arrays(kind: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """x [M, K], and the parameters, in bfloat16."""
    of = {n: draw(f"own-{kind}-{n}", "normal", shape, "bfloat16") for n, shape in SHAPES[kind].items()}
    return draw(f"own-{kind}", "normal", (M, K), "bfloat16"), of


OPTIONS: dict[str, dict[str, Any]] = {"layernorm_mlp": {"activation": "swiglu"}}


def _tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)


def torch_steps(folder: Path, kind: str, recipe: Any, device: str, **options: Any) -> Trace:
    """Records steps of one layer on a device. `options`: of its class."""
    options = OPTIONS.get(kind, {}) | options
    x, arrays = _arrays(kind)
    layer = MODULES[kind][0](*((len(GROUPS) - 1,) * (kind == "grouped_linear")), K, N, dtype=torch.bfloat16, **options)
    layer.seed_rng(SEED)
    if not _needs_rng(kind, recipe):
        del layer.rng_state
    with torch.no_grad():
        for name, value in arrays.items():
            getattr(layer, name).copy_(_tensor(value))
    layer.to(device)
    offsets = torch.tensor(GROUPS, dtype=torch.int32, device=device)
    groups = {"offsets": offsets, "align": 16} if kind == "grouped_linear" else {}
    with torch_lab.capture(layer, out=folder, values="full", statistics=False) as run:
        for _ in range(STEPS):
            given = _tensor(x).to(device).requires_grad_()
            with dt.autocast(recipe=recipe):
                y = layer(given, **groups)
            y.backward(torch.ones_like(y))
            run.step()
    return Trace.open(folder)


def _needs_rng(kind: str, recipe: Any) -> bool:
    return linear_plan(recipe, kind).needs_rng


def jax_steps(folder: Path, kind: str, recipe: Any, device: str, **options: Any) -> Trace:
    """Records steps of one layer on a device. `options`: of its function."""
    with jax.default_device(jax.devices(device)[0]):
        return _jax_steps(folder, kind, recipe, **options)


def _jax_steps(folder: Path, kind: str, recipe: Any, **options: Any) -> Trace:
    x, arrays = _arrays(kind)
    mlp, options = kind == "layernorm_mlp", OPTIONS.get(kind, {}) | options
    states = (dj.init_layernorm_mlp_state if mlp else init_state)(recipe, module=kind)
    options |= {"offsets": jnp.array(GROUPS, jnp.int32), "align": 16} if kind == "grouped_linear" else {}

    @jax.jit
    def step(states: Any, rng: Any, x: Any, parameters: Any) -> Any:
        states = update_state(states, recipe)

        def layer(x: Any, parameters: Any, states: Any) -> Any:
            given = {"state": states, "rng": rng if _needs_rng(kind, recipe) else None}
            return MODULES[kind][1](x, *parameters, recipe=recipe, **given, **options)

        y, back = jax.vjp(layer, x, parameters, states)
        dx, grads, news = back(jnp.ones_like(y))
        return overwrite_states(states, news), rng_at(rng, OFFSETS * (1 + mlp)), (y, dx, grads)

    rng, parameters = dj.rng_state(SEED), list(map(jnp.asarray, arrays.values()))
    with jax_lab.capture(step, out=folder, values="full", statistics=False, check=False) as run:
        for _ in range(STEPS):
            states, rng, _ = run(states, rng, jnp.asarray(x), parameters)
    return Trace.open(folder)


RECORD = {"torch": torch_steps, "jax": jax_steps}


def operations(trace: Trace, step: int) -> list[Op]:
    """Returns the operations of a step, in order."""
    return [found.op for found in recorded.operations(trace.ranks[0].step(step))]


def not_described(trace: Trace) -> set[str]:
    """Returns the results of operations of the table that do not say how they were computed."""
    sites = [o.site for o in trace.ranks[0].step(0) if o.site.kind == "result"]
    rows = {s.name: s.name.rpartition("/")[2].partition(".")[0] for s in sites}
    return {s.name for s in sites if rows[s.name] in table.TABLE and s.operation is None}
