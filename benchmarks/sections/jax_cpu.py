"""JAX on the CPU: the time of an eager `dense` beside the plain product, and the time to trace and compile a training
step of many Llama-shaped blocks beside the same step in plain jnp. Small arrays: compile time does not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import diptych.jax as dj
from benchmarks.cases import Case
from benchmarks.results import Row, failed
from benchmarks.room import wall_seconds
from benchmarks.sections.jax import Array, apart, composed, parameters, plain_linear
from diptych.common import RECIPES

BATCH, LENGTH, WIDTH = 2, 64, 256
BOUND = {"eager dense": 0.08, "trace and compile": 0.4}
ROUNDS = {"eager dense": 21, "trace and compile": 3}
LINEARS = ("qkv", "proj", "up", "down")
Call = Callable[[], Any]


def eager_calls(case: Case) -> dict[str, Call]:
    m, k, n = case.shape
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(((m, k), (n, k))))
    calls: dict[str, Call] = {"plain": lambda: plain_linear(x, w)}
    for name in case.names:
        recipe, state = RECIPES[name], dj.init_state(RECIPES[name])
        calls[name] = functools.partial(dj.dense, x, w, recipe=recipe, state=state, record=False)
    return calls


def step(recipe: Any, params: Any, states: Any, x: Array) -> Any:
    """Returns what the blocks add to x, the gradients, and the states of the next step, if the recipe has any."""

    def linear(x: Array, weight: Any) -> Array:
        kernel, state = weight
        return plain_linear(x, kernel) if recipe is None else dj.dense(x, kernel, recipe=recipe, state=state)

    def loss(params: Any, states: Any) -> tuple[Array, Array]:
        y = x
        for block, held in zip(params, states, strict=True):
            y = composed(linear, block | {name: (block[name], held[name]) for name in LINEARS}, y, BATCH)
        return jnp.square(y.astype(jnp.float32)).mean(), y - x

    (_, added), (grads, news) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, states)
    return added, grads, dj.update_state(dj.overwrite_states(states, news))


def compile_calls(case: Case) -> dict[str, Call]:
    """Returns calls that trace and compile the step anew, and return the compiled step with its arguments."""
    (blocks,) = case.shape
    params = parameters(WIDTH, blocks)
    x = jax.random.normal(jax.random.key(1), (BATCH * LENGTH, WIDTH), jnp.bfloat16)

    def compiling(recipe: Any) -> Call:
        states = [{n: {} if recipe is None else dj.init_state(recipe) for n in LINEARS} for _ in range(blocks)]

        def call() -> Call:
            jax.clear_caches()
            traced = jax.jit(functools.partial(step, recipe)).trace(params, states, x)
            return functools.partial(traced.lower().compile(), params, states, x)

        return call

    return {name: compiling(RECIPES.get(name)) for name in ("plain", *case.names)}


def rows(case: Case, _: Any) -> Iterator[Row]:
    eager = case.what == "eager dense"
    calls = eager_calls(case) if eager else compile_calls(case)
    made: dict[str, Array] = {name: call() if eager else call()()[0] for name, call in calls.items()}
    found: dict[str, Row] = {}
    for name, result in made.items():
        difference = apart(result, made["plain"])
        found[name] = {"case": str(case), "name": name, "difference": difference}
        if not difference <= BOUND[case.what]:
            found[name] = failed(case, name, f"differs by {difference:.3g} from plain, at most {BOUND[case.what]}")
            del calls[name]
    times = wall_seconds(calls, ROUNDS[case.what], wait=jax.block_until_ready)
    for name, row in found.items():
        yield row | ({"us": times[name] * 1e6} if name in times else {})
