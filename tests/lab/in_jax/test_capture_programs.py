"""A capture keeps traces, programs and copies of arguments between calls; and names that need care."""

from __future__ import annotations

import collections
import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from diptych.common.errors import ArgumentError, UnsupportedError
from diptych.jax import lab
from diptych.lab.jax.observe import Where
from in_jax.captures import recorded

pytestmark = pytest.mark.sampled

X = jax.random.normal(jax.random.key(1), (2, 4))


def test_programs_keep_what_they_are_found_by(tmp_path):
    """Programs are found by the identity of a traced function, which must not become that of another one."""
    with lab.capture(jax.jit(lambda x: x * 2), out=tmp_path / "trace", check=False) as run:
        run(X)
        jax.clear_caches()
        gc.collect()
        (number,) = run._programs
        assert type(run._programs[number]._closed) in {type(x) for x in gc.get_objects() if id(x) == number}


def test_zeros_of_both_signs_are_different_arguments(tmp_path):
    got = recorded(tmp_path, lambda x, by: x / by, (jnp.ones(1), 0.0), (jnp.ones(1), -0.0), (jnp.ones(1), 0.0))
    assert [float(y[0]) for y in got.results] == [float("inf"), -float("inf"), float("inf")] and got.retraces == 2


def test_results_that_are_no_sites_are_compared(tmp_path):
    got = recorded(tmp_path, lambda x: (x.astype(jnp.int4), x + 1j), (X,))
    assert got.meta.plain_bits is True


def test_numpy_results_are_compared(tmp_path):
    got = recorded(tmp_path, lambda x, y: (jnp.tanh(x), y, y * 2, 3), (X, np.ones(3, np.float32)))
    assert got.meta.plain_bits is True and got.results[0][3] == 3


def test_states_of_nnx_are_arguments(tmp_path):
    """nnx.State and a variable alone are objects of nnx too, without modules."""
    definition, state = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    step = jax.jit(jax.value_and_grad(lambda state, x: (nnx.merge(definition, state)(x) ** 2).mean()))
    got = recorded(tmp_path / "a", step, (state, X))
    assert got.meta.plain_bits is True and got.names("parameter_grad") == ["bias", "kernel"]
    got = recorded(tmp_path / "b", lambda v, x: x * v.get_value(), (nnx.Param(jnp.float32(2)), X))
    assert got.meta.plain_bits is True and jnp.array_equal(got.results[0], 2 * X)


def test_calls_that_cannot_be_recorded(tmp_path):
    run = lab.capture(lambda x, given=None: (x * 2).sum(), out=tmp_path / "trace")
    for transform in (jax.grad, jax.jit, jax.vmap):
        with pytest.raises(UnsupportedError, match="called inside of a transformation of JAX"):
            transform(run)(X)
    with pytest.raises(ArgumentError, match="for each value of it; got set"):
        run(X, {1})
    run.close()


def test_constants_that_are_complex(tmp_path):
    got = recorded(tmp_path, jax.jit(lambda x: (x @ X.T) * 1j), (X,), ops="all")
    assert got.meta.plain_bits is True and got.names("result") == ["matmul.out"]


def test_modules_that_share_parts_are_copied_together(tmp_path):
    """A step changes what two arguments share; the plain run must see both changes."""
    shared = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    class Tied(nnx.Module):
        def __init__(self):
            self.fc = shared

    def step(a, b, x):
        a.fc.kernel[...] += 1
        return b.fc(x)

    got = recorded(tmp_path, step, (Tied(), Tied(), X), sites="none")
    assert got.meta.plain_bits is True


def test_module_made_by_the_root(tmp_path):
    class Model(nnx.Module):
        def __call__(self, x):
            return nnx.LayerNorm(4, rngs=nnx.Rngs(0))(x)

    assert recorded(tmp_path, lambda m, x: m(x), (Model(), X)).names("activation") == ["LayerNorm", "(model)"]


def test_traces_that_jax_uses_again_have_modules(tmp_path):
    """A product is a site only in functions without modules, also where the trace of the model is an earlier one."""
    model = linen.Dense(3)
    variables = model.init(jax.random.key(0), X)
    step = jax.jit(lambda v, x, n: (model.apply(v, x) @ jnp.ones((3, 2))).sum() * n)
    first, second = recorded(tmp_path, step, (variables, X, 1), (variables, X, 2)).steps
    assert list(first) == list(second) and "result:dot_general.out" not in first


def test_places_in_structures_are_spelled_as_in_torch(tmp_path):
    Pair = collections.namedtuple("Pair", "a b")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            return Pair(x, {1: x, 2: {"c": [x]}})

    names = recorded(tmp_path, lambda x: Model().apply({}, x), (X,)).names("activation")
    assert names == ['(model)["a"]', '(model)["b"][1]', '(model)["b"][2]["c"][0]']


def test_scopes_of_unknown_types():
    scopes = types.SimpleNamespace(stack=(types.SimpleNamespace(name="diptych:up"),))
    eqn = types.SimpleNamespace(source_info=types.SimpleNamespace(name_stack=scopes))
    with pytest.raises(UnsupportedError, match="does not know, SimpleNamespace"):
        Where().at(eqn)
