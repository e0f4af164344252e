"""Registers JAX with the lab: trains the demo model, records its ops, replays other frameworks' ops."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from diptych.common import shapes
from diptych.common.formats import format_by_name
from diptych.common.quantizers import QuantizerRole
from diptych.common.recipes import Recipe
from diptych.jax import ffi, functional, gpt, primitives
from diptych.jax.linear import dense
from diptych.jax.quantized import QuantizedArray
from diptych.lab.frontend import State
from diptych.lab.job import Corruption, Job, Weights
from diptych.lab.trace import Bits, Op, StepTrace

Array = jax.Array


def _device(name: str) -> Any:
    return jax.devices(name)[0]


# --- training ---


class JaxTrainer:
    """The demo model under jit with optax's AdamW."""

    def __init__(self, job: Job, weights: Weights) -> None:
        self._device = _device(job.device)
        linear = _corrupted_linear(job.recipe, job.corruption) if job.corruption else gpt.quantized_linear(job.recipe)
        self._loss = functools.partial(gpt.loss_fn, layers=job.model.layers, heads=job.model.heads, linear=linear)
        rates, o = job.optim.learning_rates(), job.optim
        self._optimizer = optax.adamw(
            lambda count: jnp.asarray(rates)[count], o.beta1, o.beta2, o.eps, weight_decay=o.weight_decay
        )
        self._params: Any = jax.device_put({k: jnp.asarray(v) for k, v in weights.items()}, self._device)
        self._opt_state: Any = jax.device_put(self._optimizer.init(self._params), self._device)
        self._names = frozenset(_activation_names(job))
        # A command buffer replays kernels without calling their handlers, and the registry would not count them.
        options = {"xla_gpu_graph_min_graph_size": 1 << 30} if job.device == "cuda" else None
        self._step = jax.jit(self._update, donate_argnums=(0, 1), compiler_options=options)
        self._evaluate = jax.jit(self._loss, compiler_options=options)
        self._traced: Callable[..., Any] | None = None

    def _update(self, params: gpt.Params, opt_state: Any, batch: Array) -> Any:
        loss, grads = jax.value_and_grad(self._loss)(params, batch)
        updates, opt_state = self._optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def _put(self, tree: Any) -> Any:
        return jax.device_put(tree, self._device)

    def step(self, batch: np.ndarray) -> float:
        self._params, self._opt_state, loss = self._step(self._params, self._opt_state, self._put(batch))
        return float(loss)

    def evaluate(self, batch: np.ndarray) -> float:
        return float(self._evaluate(self._params, self._put(batch)))

    def traced_step(self, batch: np.ndarray) -> StepTrace:
        if self._traced is None:
            self._traced = jax.jit(recorded(self._gradients, self._names))
        (loss, grads), log = self._traced(self._params, self._put(batch))
        updates, self._opt_state = self._optimizer.update(grads, self._opt_state, self._params)
        self._params = optax.apply_updates(self._params, updates)
        activations = {k: np.asarray(v) for k, v in log.activations.items()}
        gradients = {k: np.asarray(v) for k, v in grads.items()}
        return StepTrace(float(loss), activations, [_op(*entry) for entry in log.entries()], gradients)

    def _gradients(self, params: gpt.Params, batch: Array) -> Any:
        return jax.value_and_grad(self._loss)(params, batch)

    def state(self) -> State:
        adam = self._opt_state[0]
        copies = [{k: np.array(v) for k, v in tree.items()} for tree in (self._params, adam.mu, adam.nu)]
        return State(int(adam.count), *copies)

    def restore(self, state: State) -> None:
        self._params = self._put(state.weights)
        values = {"mu": state.first, "nu": state.second, "count": np.int32(state.step)}
        self._opt_state = self._put(optax.tree_utils.tree_set(self._opt_state, **values))


def _activation_names(job: Job) -> list[str]:
    from diptych.lab.trace import activation_order

    return [name for name, _ in activation_order(job.model)]


# --- the self-test's fault ---


def _corrupted_linear(recipe: Recipe | None, corruption: Corruption) -> gpt.Linear:
    """`dense`, but the weight scale of one layer is multiplied by a factor before every forward product.

    The backward products use the right scales, so that the fault stays where it was put.
    """
    assert recipe is not None

    def quantized(tensor: str, x: Array) -> QuantizedArray:
        return functional.quantize(x, recipe.quantizer(QuantizerRole(module="linear", tensor=tensor)))

    def forward(x: Array, weight: Array, bias: Array) -> Any:
        qx, qw = quantized("input", x), quantized("weight", weight)
        scale: Any = qw.rowwise_scale_inv
        scale = (scale.astype(jnp.float32) * corruption.factor).astype(scale.dtype)
        qw = dataclasses.replace(qw, rowwise_scale_inv=scale)
        return functional.gemm(qx, qw, bias=bias, fast_accum=recipe.fast_accum("fprop")), (qx, qw)

    def backward(saved: Any, dy: Array) -> Any:  # dgrad reads the columnwise copy, which was not touched
        qdy = quantized("grad_output", dy)
        dx = functional.gemm(qdy, saved[1], trans_b=False)
        return dx, functional.gemm(qdy, saved[0], trans_a=True, trans_b=False), functional.bias_grad(dy)

    corrupted = jax.custom_vjp(lambda x, weight, bias: forward(x, weight, bias)[0])
    corrupted.defvjp(forward, backward)

    def linear(name: str, x: Array, weight: Array, bias: Array) -> Array:
        if name == corruption.layer:
            return corrupted(x, weight, bias)
        return dense(x, weight, bias, recipe=recipe)

    return linear


# --- recording ---


@functools.partial(jax.tree_util.register_dataclass, data_fields=("activations", "values"), meta_fields=("calls",))
@dataclasses.dataclass
class Log:
    """What an evaluation recorded: arrays are leaves, the ops' names and parameters are metadata."""

    activations: dict[str, Array] = dataclasses.field(default_factory=dict)
    values: list[tuple[list[Array], list[Array]]] = dataclasses.field(default_factory=list)
    calls: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()

    def entries(self) -> list[tuple[str, dict[str, Any], list[Array], list[Array]]]:
        pairs = zip(self.calls, self.values, strict=True)
        return [(op, dict(params), ins, outs) for (op, params), (ins, outs) in pairs]


def recorded(fun: Callable[..., Any], names: frozenset[str]) -> Callable[..., Any]:
    """`fun` returning (its result, Log) of every diptych primitive and every activation called one of `names`.

    It evaluates fun's jaxpr equation by equation, so that the model needs no taps; jit the result.
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
    """Whether something inside is to be recorded."""
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
    """A recorded primitive in the lab's terms. Dtypes are the format's: here, payloads may travel as uint8."""
    if kind == "quantize":
        quantizer = params["quantizer"]
        buffers = shapes.quantize_buffers(ins[0].shape, quantizer)
        outputs = {b.name: _bits(x, b.dtype) for b, x in zip(buffers, outs, strict=False)}
        return Op(kind, _named(("x", "amax"), ins), {"quantizer": quantizer}, outputs)
    if kind == "gemm":
        inputs = _copy("a_", params["a"][0], ins[:2]) | _copy("b_", params["b"][0], ins[2:4])
        extra = [n for n, there in (("bias", params["has_bias"]), ("c", params["has_c"])) if there]
        options = {k: params[k] for k in ("a", "b", "out_dtype", "fast_accum")}
        options |= {k: float.fromhex(params[k]) for k in ("alpha", "beta")}
        return Op(kind, inputs | _named(extra, ins[4:]), options, {"d": _bits(outs[0])})
    if kind == "dequantize":
        options = {k: params[k] for k in ("format", "columnwise", "dtype")}
        return Op(kind, _copy("", params["format"], ins), options, {"out": _bits(outs[0])})
    name = {"bias_grad": "dy", "amax": "x"}[kind]
    options = {"dtype": params["dtype"]} if kind == "bias_grad" else {}
    return Op(kind, {name: _bits(ins[0])}, options, {"out": _bits(outs[0])})


def _copy(prefix: str, format: str, arrays: list[Array]) -> dict[str, Bits]:
    row = format_by_name(format)
    return {f"{prefix}data": _bits(arrays[0], row.element), f"{prefix}scale_inv": _bits(arrays[1], row.scale)}


def _named(names: Any, arrays: list[Array]) -> dict[str, Bits]:
    return {name: _bits(x) for name, x in zip(names, arrays, strict=False)}


# --- replay ---


class JaxFrontend:
    """JAX's adapter; see `diptych.lab.frontend.Frontend`."""

    name = "jax"

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
        put = functools.partial(jax.device_put, device=_device(device))
        x = {k: put(v.data.view(primitives.dtype_of(v.dtype))) for k, v in op.inputs.items()}
        o = op.options
        if op.kind == "quantize":
            out = primitives.quantize(x["x"], x.get("amax"), o["quantizer"])
        elif op.kind == "gemm":
            a, b = (x["a_data"], x["a_scale_inv"]), (x["b_data"], x["b_scale_inv"])
            options = {k: o[k] for k in ("alpha", "beta", "out_dtype", "fast_accum")}
            out = {"d": primitives.gemm(a, b, x.get("bias"), x.get("c"), a_copy=o["a"], b_copy=o["b"], **options)}
        elif op.kind == "bias_grad":
            out = {"out": primitives.bias_grad(x["dy"], o["dtype"])}
        elif op.kind == "dequantize":
            out = {"out": primitives.dequantize(x["data"], x["scale_inv"], o["format"], o["columnwise"], o["dtype"])}
        else:
            out = {"out": primitives.amax(x["x"])}
        return {k: _bits(out[k]) for k in op.outputs}

    def apply(self, kind: str, inputs: list[np.ndarray], heads: int) -> np.ndarray:
        ops: dict[str, Callable[..., Array]] = {
            "embedding": gpt.embedding,
            "layer norm": gpt.layer_norm,
            "attention scores": functools.partial(gpt.attention_scores, heads=heads),
            "softmax": functools.partial(jax.nn.softmax, axis=-1),
            "attention values": functools.partial(gpt.attention_values, heads=heads),
            "residual add": jnp.add,
            "gelu": gpt.gelu,
            "head matmul": lambda x, weight: x @ weight.T,
            "cross entropy": gpt.cross_entropy,
        }
        return np.asarray(jax.jit(ops[kind])(*(jax.device_put(x, _device("cpu")) for x in inputs)))


frontend = JaxFrontend()
