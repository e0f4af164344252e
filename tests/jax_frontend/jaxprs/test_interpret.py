"""An interpreter whose subclass evaluates one primitive otherwise, and observes its operand, wherever that stands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from diptych.common.errors import UnsupportedError
from diptych.jax.jaxprs.bodies import Leaf
from diptych.jax.jaxprs.interpret import Interpreter

X = jnp.linspace(-1, 2, 6, dtype=jnp.float32).reshape(2, 3)


class Doubles(Interpreter):
    """Doubles each sine. Its operand is an extra result."""

    def is_own(self, eqn, place):
        return eqn.primitive.name == "sin"

    def equation(self, eqn, known, place, made):
        if not self.is_own(eqn, place):
            return super().equation(eqn, known, place, made)
        (v,) = eqn.invars
        leaf = Leaf(known.refs(v), self.leaves)
        self.leaves += 1
        made.add(leaf, [known.value(v)])
        return [2 * jnp.sin(known.value(v))], [frozenset([leaf])]


def under_jit(sin, x):
    return jax.jit(lambda x: sin(x) + 1)(x) * 3


def in_a_scan(sin, x):
    return lax.scan(lambda c, row: (sin(c) + row, sin(c * row)), x[0], x)


def in_a_reversed_scan(sin, x):
    return lax.scan(lambda c, row: (sin(c) + row, c), x[0], x, reverse=True)


def in_branches(sin, x):
    return lax.cond(x.sum() > 0, lambda x: x * sin(x + 1), lambda x: sin(x), x)


def in_a_loop(sin, x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, sin(s[1])), (0, x))[1]


def recomputed(sin, x):
    return jax.checkpoint(lambda x: sin(sin(x)))(x)


def with_a_rule_of_its_own(sin, x):
    fn = jax.custom_jvp(lambda x: sin(x) - x)
    fn.defjvp(lambda primals, tangents: (fn(*primals), tangents[0]))
    return fn(x)


def nested(sin, x):
    return lax.scan(lambda c, row: (in_branches(sin, c) + in_a_loop(sin, row), row), x[0], x)


def evaluated(fn, *args):
    """Returns the results under `Doubles`, and what it observed."""
    interpreter = Doubles()

    def run(*args):
        outs, extras, body = interpreter.program(jax.make_jaxpr(lambda *a: fn(jnp.sin, *a))(*args), args)
        bodies.append(body)
        return outs, extras

    bodies: list = []
    outs, extras = jax.jit(run)(*args)
    leaves = list(bodies[-1].positions())
    assert [leaf.number for leaf, _ in leaves] == list(range(len(leaves)))
    return outs, [np.asarray(extras[at]) for _, at in leaves]


FUNCTIONS = [
    under_jit,
    in_a_scan,
    in_a_reversed_scan,
    in_branches,
    in_a_loop,
    recomputed,
    with_a_rule_of_its_own,
    nested,
]


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_own_equations_are_found_in_all_that_calls_functions(fn):
    outs, _ = evaluated(fn, X)
    want = jax.jit(lambda x: fn(lambda x: 2 * jnp.sin(x), x))(X)
    for got, ours in zip(outs, jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, ours)


def operands(fn, x):
    """The operands of the sines in order, from a run in which Python evaluates loops and branches."""
    seen = []

    def sin(x):
        seen.append(np.asarray(x))
        return 2 * jnp.sin(x)

    with jax.disable_jit():
        fn(sin, x)
    return seen


def test_extra_results_have_an_axis_for_a_scan_and_are_those_of_a_loop_s_last_iteration():
    first, second = evaluated(in_a_scan, X)[1]
    np.testing.assert_allclose(np.stack([first, second], 1).reshape(-1, 3), np.stack(operands(in_a_scan, X)), 1e-6)
    (stacked,) = evaluated(in_a_reversed_scan, X)[1]
    np.testing.assert_allclose(stacked[::-1], np.stack(operands(in_a_reversed_scan, X)), 1e-6)
    (last,) = evaluated(in_a_loop, X)[1]
    np.testing.assert_allclose(last, operands(in_a_loop, X)[-1], 1e-6)


@pytest.mark.parametrize("x", [X, -X], ids=["one branch", "the other"])
def test_of_the_branch_that_did_not_run_extra_results_are_zeros(x):
    found = evaluated(in_branches, x)[1]
    ran = int(x.sum() > 0)
    np.testing.assert_array_equal(found[ran], operands(in_branches, x)[0])
    np.testing.assert_array_equal(found[1 - ran], np.zeros_like(x))


def test_extra_results_have_an_axis_for_shards(mesh):
    def fn(sin, x):
        return jax.shard_map(lambda x: lax.psum(sin(x + 1), "i"), mesh=mesh, in_specs=P("i"), out_specs=P())(x)

    outs, (found,) = evaluated(fn, X)
    np.testing.assert_allclose(outs[0], (2 * np.sin(np.asarray(X) + 1)).sum(0, keepdims=True), 1e-6)
    np.testing.assert_array_equal(found, np.asarray(X + 1)[:, None])


def test_what_cannot_be_evaluated_is_refused():
    with pytest.raises(UnsupportedError, match="Doubles: its equations inside of the condition of a while loop"):
        evaluated(lambda sin, x: lax.while_loop(lambda x: sin(x).sum() > 9, lambda x: sin(x), x), X)
    with pytest.raises(UnsupportedError, match="Doubles: its equations inside of JAX's primitive custom_linear_solve"):
        evaluated(lambda sin, x: lax.custom_linear_solve(sin, x, lambda _, b: b, symmetric=True), X)
