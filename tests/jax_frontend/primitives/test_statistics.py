"""statistics: the oracle's bits for any dtype, jit, vmap, export, shards, and no derivative."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core.statistics.test_statistics import rounding
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import diptych.jax as dj
from diptych.common import DTypeError, ShapeError, UnsupportedError
from diptych.common.ops import statistics as rules
from diptych.jax.primitives.statistics import errors, statistics, statistics_p
from jax_frontend import tools
from jax_frontend.primitives.test_hash import drawn
from oracle import statistics as oracle

pytestmark = pytest.mark.sampled

WIDE = ("int64", "uint64", "float64")


def words(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return oracle.statistics(x.view(f"u{x.itemsize}"), x.dtype.name).view(np.int32)


@pytest.mark.parametrize("dtype", [name for name in rules.NUMBERS if name not in WIDE])
def test_any_dtype(dtype):
    for shape in ((), (0,), (2, 0, 3), (5, 7), (2, 3, 1300)):
        x = drawn(shape, dtype)
        for got in (statistics(jnp.asarray(x)), jax.jit(statistics)(x)):
            assert got.dtype == jnp.int32
            tools.same(got, words(x))


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_dtypes_in_64_bit_mode(dtype):
    x = drawn((5, 7), dtype)
    with jax.enable_x64(True):
        tools.same(jax.jit(statistics)(x), words(x))


@tools.WRAP
def test_vmap_measures_each_example(wrap):
    for dtype in ("float32", "bfloat16", "bool", "int16"):
        x = jnp.asarray(drawn((3, 4, 50), dtype))
        host = np.asarray(x)
        tools.same(wrap(jax.vmap(statistics))(x), np.stack([words(v) for v in host]))
        tools.same(wrap(jax.vmap(statistics, in_axes=1))(x), np.stack([words(host[:, i]) for i in range(4)]))
        tools.same(wrap(jax.vmap(jax.vmap(statistics)))(x), [[words(v) for v in row] for row in host])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_errors_of_rounding(dtype):
    for n in (0, 1, 9000):
        x, result, largest, beyond = rounding(n, dtype)
        want = oracle.errors(x, dtype, result, largest, beyond).view(np.int32)
        given = jnp.asarray(x.view(jnp.dtype(dtype)))
        tools.same(jax.jit(errors, static_argnums=3)(given, result, largest, beyond), want)
        both = jax.vmap(partial(errors, beyond=beyond), in_axes=(0, 0, None))
        tools.same(both(jnp.stack([given, given]), jnp.stack([result, result]), largest), np.stack([want, want]))


def test_in_loops_and_conditions():
    x = drawn((3, 40), "float32")
    tools.same(jax.jit(lambda x: jax.lax.map(statistics, x))(x), np.stack([words(v) for v in x]))
    chosen = jax.jit(lambda yes, x: jax.lax.cond(yes, statistics, lambda x: statistics(x + 1), x))
    tools.same(chosen(True, x), words(x))


def test_export_with_symbolic_sizes():
    (n,) = export.symbolic_shape("n")
    f = export.export(jax.jit(statistics), disabled_checks=dj.export_safety_checks(), platforms=["cpu"])
    exported = f(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    for rows in (1, 7000):
        tools.same(exported.call(drawn((rows, 3), "float32")), words(drawn((rows, 3), "float32")))


def test_sharded():
    """Under jit an array is measured whole; inside of shard_map each shard is."""
    for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
        sharded(jax.make_mesh((len(jax.devices()),), ("i",), axis_types=(kind,)))


def sharded(mesh):
    x = drawn((8 * len(jax.devices()), 16), "float32")
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("i")))
    tools.same(jax.jit(statistics)(placed), words(x))
    specs = {"in_specs": PartitionSpec("i"), "out_specs": PartitionSpec("i")}
    f = jax.shard_map(lambda x: statistics(x)[None], mesh=mesh, **specs)
    tools.same(jax.jit(f)(placed), np.stack([words(v) for v in np.split(x, len(jax.devices()))]))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_no_derivative(transform):
    f = lambda x: (statistics(x)[0] % 7).astype(jnp.float32) * x.sum()  # noqa: E731
    with pytest.raises(UnsupportedError, match=r"diptych_statistics has no derivative.*stop_gradient"):
        transform(jax.jit(f))(jnp.ones(3))


def test_errors():
    for x in (jnp.ones(3, jnp.int4), jnp.ones(2, jnp.complex64)):
        with pytest.raises(DTypeError, match="statistics: x must be one of float64"):
            statistics(x)
    with pytest.raises(DTypeError, match="statistics: result must be float32"):
        errors(jnp.ones(2), jnp.ones(2, jnp.bfloat16), jnp.ones(2), 1.0)
    with pytest.raises(ShapeError, match=r"statistics: result must be \[2\], got float32\[3\]"):
        errors(jnp.ones(2), jnp.ones(3), jnp.ones(2), 1.0)
    assert statistics_p.name == "diptych_statistics"
