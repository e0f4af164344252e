"""Registers JAX with the lab: trains the demo model, records its ops, replays other frameworks' ops."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diptych.jax.functional import quantize as quantize_verbs
from diptych.jax.graph.ops import stored_dtype
from diptych.jax.lab import gpt, own_ops, table_ops
from diptych.jax.lab.feed import Feeder
from diptych.jax.layers.products import OFFSETS
from diptych.jax.layers.quantize import rng_at
from diptych.jax.primitives import ffi
from diptych.jax.primitives.checks import dtype_of
from diptych.jax.state.scales import init_state, load_state_dict, overwrite_states, state_dict
from diptych.jax.state.update import update_state
from diptych.jax.tensors.quantized import QuantizedArray
from diptych.lab.frontend import State
from diptych.lab.job import CLIP_EPS, Job, Weights
from diptych.lab.replay.op import Bits, Op
from diptych.lab.trace import StepTrace

Array = jax.Array


def _device(name: str) -> Any:
    return jax.devices(name)[0]


# --- training ---


class JaxTrainer:
    """The demo model under jit with optax's AdamW. The quantizers' states are overwritten with their gradients."""

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
        self._names = frozenset(_activation_names(job))
        # A command buffer replays kernels without calling their handlers, and the registry would not count them.
        options = {"xla_gpu_graph_min_graph_size": 1 << 30} if job.device == "cuda" else None
        self._step = jax.jit(self._update, donate_argnums=(0, 1, 2), compiler_options=options)
        self._evaluate = jax.jit(self._held_out, compiler_options=options)
        self._traced: Callable[..., Any] | None = None

    def _gradients(self, params: gpt.Params, kept: Any, batch: Array) -> Any:
        """Returns loss, gradients, and the quantizers' states for the next step."""
        scales, rngs = update_state(kept[0], self._job.recipe), kept[1]

        def loss_fn(params: gpt.Params, scales: gpt.States) -> Array:
            return self._loss(params, batch, gpt.Kept(scales, rngs))

        loss, (grads, news) = jax.value_and_grad(loss_fn, (0, 1))(params, scales)
        rngs = {name: rng_at(rng, OFFSETS) for name, rng in rngs.items()}
        return loss, grads, (overwrite_states(scales, news), rngs)

    def _update(self, params: gpt.Params, opt_state: Any, kept: Any, batch: Array) -> Any:
        loss, grads, kept = self._gradients(params, kept, batch)
        updates, opt_state = self._optimizer.update(self._clipped(grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, kept, loss

    def _clipped(self, grads: gpt.Params) -> gpt.Params:
        """Returns gradients whose global norm is at most `OptimConfig.clip`, which see."""
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

    def traced_step(self, batch: np.ndarray) -> StepTrace:
        if self._traced is None:
            self._traced = jax.jit(recorded(self._gradients, self._names))
        (loss, grads, self._kept), log = self._traced(self._params, self._kept, self._put(batch))
        updates, self._opt_state = self._optimizer.update(self._clipped(grads), self._opt_state, self._params)
        self._params = optax.apply_updates(self._params, updates)
        activations = {k: np.asarray(v) for k, v in log.activations.items()}
        gradients = {k: np.asarray(v) for k, v in grads.items()}
        return StepTrace(float(loss), activations, [_op(*entry) for entry in log.entries()], gradients)

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


def _activation_names(job: Job) -> list[str]:
    from diptych.lab.trace import activation_order

    return [name for name, _ in activation_order(job.model)]


def _recipe(job: Job, linear: str) -> Any:
    """Returns the recipe of one linear layer: the job's, or for the self-test's faulty layer a wrong one."""
    if job.corruption is not None and job.recipe is not None and linear == job.corruption.layer:
        return job.corruption.recipe(job.recipe, _spoil)
    return job.recipe


def _linear(job: Job) -> gpt.Linear:
    linears = {name: gpt.quantized_linear(_recipe(job, name), job.linear_dtype) for name in job.model.linears}
    return lambda name, *args: linears[name](name, *args)


def _spoil(q: QuantizedArray, factor: float) -> QuantizedArray:
    """The self-test's fault; see `Corruption`."""
    if q.format.two_level:  # the factor is too large for an E4M3 scale
        assert q.amax is not None
        return dataclasses.replace(q, amax=q.amax * factor)
    scale: Any = q.rowwise_scale_inv
    if scale.dtype == jnp.uint8:  # as bytes: E8M0 holds exponents
        return dataclasses.replace(q, rowwise_scale_inv=scale + np.uint8(math.log2(factor)))
    scale = (scale.astype(jnp.float32) * factor).astype(scale.dtype)
    return dataclasses.replace(q, rowwise_scale_inv=scale)


# --- recording ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=("activations", "values"), meta_fields=("calls",))
@dataclasses.dataclass
class Log:
    """The record of an evaluation: arrays are leaves, the ops' names and parameters are metadata."""

    activations: dict[str, Array] = dataclasses.field(default_factory=dict)
    values: list[tuple[list[Array], list[Array]]] = dataclasses.field(default_factory=list)
    calls: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def entries(self) -> list[tuple[str, dict[str, Any], list[Array], list[Array]]]:
        pairs = zip(self.calls, self.values, strict=True)
        return [(op, dict(params), ins, outs) for (op, params), (ins, outs) in pairs]


def recorded(fun: Callable[..., Any], names: frozenset[str]) -> Callable[..., Any]:
    """Returns `fun` with the result (its own result, Log of all diptych primitives and of the activations in `names`).

    It evaluates fun's jaxpr equation by equation, so the model needs no changes; jit the result.
    """

    def evaluate(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        log = Log()
        outs = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), names, log)
        return jax.tree.unflatten(jax.tree.structure(shape), outs), log

    return evaluate


def _evaluate(jaxpr: Any, consts: Any, args: Any, names: frozenset[str], log: Log) -> list[Any]:
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    for eqn in jaxpr.eqns:
        ins = [env[v] if not hasattr(v, "val") else v.val for v in eqn.invars]
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None and _records(inner, names):
            body, body_consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
            if len(body.invars) != len(ins):
                raise NotImplementedError(f"recording inside {eqn.primitive} is not supported")
            outs = _evaluate(body, body_consts, ins, names, log)
        else:
            bound = eqn.primitive.get_bind_params(eqn.params)
            subfuns, params = bound if isinstance(bound, tuple) else ((), bound)  # the form differs between versions
            outs = eqn.primitive.bind(*subfuns, *ins, **params)
            outs = list(outs) if eqn.primitive.multiple_results else [outs]
        if eqn.primitive.name == "name" and eqn.params["name"] in names:
            log.activations.setdefault(eqn.params["name"], outs[0])
        if eqn.primitive.name.startswith("diptych_"):
            log.values.append((ins, outs))
            log.calls += ((eqn.primitive.name.removeprefix("diptych_"), tuple(sorted(eqn.params.items()))),)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [env[v] if not hasattr(v, "val") else v.val for v in jaxpr.outvars]


def _records(jaxpr: Any, names: frozenset[str]) -> bool:
    """Returns whether a jaxpr contains an equation to record."""
    body = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in body.eqns:
        if eqn.primitive.name.startswith("diptych_") or eqn.params.get("name") in names:
            return True
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if inner is not None and _records(inner, names):
            return True
    return False


def _bits(x: Array, dtype: str | None = None) -> Bits:
    return Bits.of(np.asarray(x), dtype or x.dtype.name)


def _op(kind: str, params: dict[str, Any], ins: list[Array], outs: list[Array]) -> Op:
    """Returns a recorded primitive as the lab's `Op`, with the format's dtypes where payloads are passed as uint8."""
    call = own_ops.described(kind, params, ins, outs)
    if call.options is None:
        raise NotImplementedError(f"recording diptych_{kind} is not supported")
    bits = lambda named: {n: _bits(x, stored_dtype(params, n)) for n, x in named.items()}  # noqa: E731
    return Op(call.row, bits(call.operands), call.options, bits(call.results))


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
