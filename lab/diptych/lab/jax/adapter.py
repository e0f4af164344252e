"""Registers JAX with the lab: trains the demo model, replays recorded operations, and feeds models in a bisection."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diptych.jax.functional import quantize as quantize_verbs
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import dtype_of
from diptych.jax.state.scales import init_state, load_state_dict, overwrite_states, state_dict
from diptych.jax.state.update import update_state
from diptych.jax.tensors.quantized import QuantizedArray
from diptych.lab.capture import EVERYTHING
from diptych.lab.frontend import State
from diptych.lab.jax import gpt, own_ops, table_ops
from diptych.lab.jax.capture import capture
from diptych.lab.jax.feed import Feeder
from diptych.lab.job import CLIP_EPS, Job, Weights
from diptych.lab.replay.op import Bits, Op

Array = jax.Array


def _device(name: str) -> Any:
    return jax.devices(name)[0]


# --- training ---


class JaxTrainer:
    """A trainer of the demo model, under jit with optax's AdamW. The gradients of quantizers' states are the new
    states."""

    def __init__(self, job: Job, weights: Weights) -> None:
        self._job, self._device = job, _device(job.device)
        linear = _linear(job)
        self._loss = functools.partial(gpt.loss_fn, layers=job.model.layers, heads=job.model.heads, linear=linear)
        rates, o = job.optim.learning_rates(), job.optim
        self._optimizer = optax.adamw(
            lambda count: jnp.asarray(rates)[count], o.beta1, o.beta2, o.eps, weight_decay=o.weight_decay
        )
        self._params: Any = jax.device_put({k: jnp.asarray(v) for k, v in weights.items()}, self._device)
        self._opt_state: Any = jax.device_put(self._optimizer.init(self._params), self._device)
        scales = {} if job.recipe is None else {name: init_state(_recipe(job, name)) for name in job.model.linears}
        rngs = {name: quantize_verbs.rng_state(job.seed, offset) for name, offset in job.streams().items()}
        self._kept: Any = self._put((scales, rngs))
        # A command buffer replays kernels without calling their handlers, and the registry would not count them.
        options = {"xla_gpu_graph_min_graph_size": 1 << 30} if job.device == "cuda" else None
        self._step = jax.jit(self._update, donate_argnums=(0, 1, 2), compiler_options=options)
        self._evaluate = jax.jit(self._held_out, compiler_options=options)

    def _gradients(self, params: gpt.Params, kept: Any, batch: Array) -> Any:
        """Returns the loss, the gradients, and the quantizers' states for the next step."""
        scales, rngs = update_state(kept[0], self._job.recipe), kept[1]

        def loss_fn(params: gpt.Params, scales: gpt.States) -> Array:
            return self._loss(params, batch, gpt.Kept(scales, rngs))

        loss, (grads, news) = jax.value_and_grad(loss_fn, (0, 1))(params, scales)
        rngs = {name: rng_at(rng, OFFSETS) for name, rng in rngs.items()}
        return loss, grads, (overwrite_states(scales, news), rngs)

    def _update(self, params: gpt.Params, opt_state: Any, kept: Any, batch: Array) -> Any:
        loss, grads, kept = self._gradients(params, kept, batch)
        return *self._applied(grads, params, opt_state), kept, loss

    def _applied(self, grads: gpt.Params, params: gpt.Params, opt_state: Any) -> tuple[Any, Any]:
        """Returns the parameters and the optimizer's state after an update with these gradients."""
        updates, opt_state = self._optimizer.update(self._clipped(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def _clipped(self, grads: gpt.Params) -> gpt.Params:
        """Returns the gradients, scaled so that their global norm is at most `OptimConfig.clip`. The formula is that of
        torch, with an epsilon that optax does not have."""
        clip = self._job.optim.clip
        if clip is None:
            return grads
        norm = jnp.linalg.norm(jnp.stack([jnp.linalg.norm(g.ravel()) for g in grads.values()]))
        factor = jnp.minimum(1, clip / (norm + CLIP_EPS))
        return {name: g * factor for name, g in grads.items()}

    def _held_out(self, params: gpt.Params, kept: Any, batch: Array) -> Array:
        return self._loss(params, batch, gpt.Kept(*kept, record=False))

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._device)

    def step(self, batch: np.ndarray) -> float:
        *now, loss = self._step(self._params, self._opt_state, self._kept, self._put(batch))
        self._params, self._opt_state, self._kept = now
        return float(loss)

    def evaluate(self, batch: np.ndarray) -> float:
        return float(self._evaluate(self._params, self._kept, self._put(batch)))

    @contextlib.contextmanager
    def captured(self, out: pathlib.Path) -> Iterator[Callable[[np.ndarray], float]]:
        with jax.default_device(self._device), capture(self._gradients, out, check=False, **EVERYTHING) as run:

            def step(batch: np.ndarray) -> float:
                loss, grads, self._kept = run(self._params, self._kept, self._put(batch))
                self._params, self._opt_state = self._applied(grads, self._params, self._opt_state)
                return float(loss)

            yield step

    def state(self) -> State:
        adam = self._opt_state[0]
        quantizing: dict[str, Array] = {}
        for name, states in self._kept[0].items():
            quantizing |= state_dict(states, f"{name}.", self._kept[1].get(name))
        weights, first, second, kept = (
            {k: np.array(v) for k, v in tree.items()} for tree in (self._params, adam.mu, adam.nu, quantizing)
        )
        return State(int(adam.count), weights, first, second, kept)

    def scales(self) -> dict[str, float]:
        found = {f"{name}.{slot}": s.scale for name, states in self._kept[0].items() for slot, s in states.items()}
        return {name: float(value[0]) for name, value in jax.device_get(found).items()}

    def restore(self, state: State) -> None:
        self._params = self._put(state.weights)
        values = {"mu": state.first, "nu": state.second, "count": np.int32(state.step)}
        self._opt_state = self._put(optax.tree_utils.tree_set(self._opt_state, **values))
        scales, rngs = self._kept
        loaded = {name: load_state_dict(state.quantizing, own, f"{name}.") for name, own in scales.items()}
        self._kept = self._put(({n: own for n, (own, _) in loaded.items()}, {n: loaded[n][1] for n in rngs}))


def _recipe(job: Job, linear: str) -> Any:
    """Returns the recipe of one linear layer: the job's, or a wrong one for the faulty layer of the self-test."""
    if job.corruption is not None and job.recipe is not None and linear == job.corruption.layer:
        return job.corruption.recipe(job.recipe, _spoil)
    return job.recipe


def _linear(job: Job) -> gpt.Linear:
    high = gpt.quantized_linear(None)
    linears = {name: gpt.quantized_linear(_recipe(job, name), job.linear_dtype) for name in job.model.linears}
    return lambda name, *args: linears.get(name, high)(name, *args)


def _spoil(q: QuantizedArray, factor: float) -> QuantizedArray:
    """Returns `q` with the self-test's fault; see `Corruption`."""
    if q.format.two_level:  # an E4M3 scale cannot hold the factor
        assert q.amax is not None
        return dataclasses.replace(q, amax=q.amax * factor)
    scale: Any = q.rowwise_scale_inv
    if scale.dtype == jnp.uint8:  # these are E8M0 scales as bytes, which are exponents
        return dataclasses.replace(q, rowwise_scale_inv=scale + np.uint8(math.log2(factor)))
    scale = (scale.astype(jnp.float32) * factor).astype(scale.dtype)
    return dataclasses.replace(q, rowwise_scale_inv=scale)


def _bits(x: Array) -> Bits:
    return Bits.of(np.asarray(x), x.dtype.name)


class JaxFrontend:
    """JAX's adapter; see `diptych.lab.frontend.Frontend`."""

    name = "jax"
    updates_together = False

    def versions(self) -> dict[str, str]:
        found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")}
        return found | {"jaxlib headers": ffi.header_version()}

    def device_problem(self, device: str) -> str | None:
        try:
            _device(device)
        except RuntimeError as e:
            return str(e).splitlines()[0]
        return None

    def trainer(self, job: Job, weights: Weights) -> JaxTrainer:
        return JaxTrainer(job, weights)

    def replay(self, op: Op, device: str) -> dict[str, Bits]:
        if op.kind in table_ops.FUNCTIONS:
            return self._replay_function(op, device)
        put = functools.partial(jax.device_put, device=_device(device))
        x = {k: put(v.data.view(dtype_of(v.dtype))) for k, v in op.inputs.items()}
        return {k: _bits(v) for k, v in own_ops.replayed(op, x).items() if k in op.outputs}

    def _replay_function(self, op: Op, device: str) -> dict[str, Bits]:
        wide = any(v.data.itemsize == 8 for v in op.inputs.values())
        with jax.enable_x64(wide or jax.config.jax_enable_x64):  # type: ignore[attr-defined]
            dtypes = {k: dtype_of(v.dtype) for k, v in op.inputs.items()}
            x = {k: jax.device_put(v.data.view(dtypes[k]), _device(device)) for k, v in op.inputs.items()}
            return {"out": _bits(jax.jit(functools.partial(table_ops.FUNCTIONS[op.kind], **op.options))(**x))}

    def feeder(self, model: Any, device: str) -> Feeder:
        return Feeder(model, _device(device))


frontend = JaxFrontend()
