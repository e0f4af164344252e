"""hash: the oracle's bits for any dtype, jit, vmap, export, shards, and no derivative."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import diptych.jax as dj
from diptych.common import ArgumentError, DTypeError, UnsupportedError
from diptych.jax.primitives import ffi
from diptych.jax.primitives.hash import hash_p
from jax_frontend import tools
from oracle.hash import hash_bits

pytestmark = pytest.mark.sampled

DTYPES = (
    "bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32", "complex64",
    *(f"float8_{name}" for name in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")),
    "float8_e8m0fnu",
)  # fmt: skip
WIDE = ("int64", "uint64", "float64", "complex128")


def drawn(shape, dtype):
    dtype = jnp.dtype(dtype)
    raw = np.random.default_rng(len(shape)).integers(0, 256, int(np.prod(shape)) * dtype.itemsize).astype(np.uint8)
    return (raw < 128 if dtype.kind == "b" else raw.view(dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(dtype):
    for shape in ((), (0,), (2, 0, 3), (5, 7), (2, 3, 130)):
        x = drawn(shape, dtype)
        for got in (dj.hash(x), jax.jit(dj.hash)(x)):
            assert got.dtype == jnp.int32
            tools.same(got, hash_bits(x))


@pytest.mark.parametrize("dtype", WIDE)
def test_wide_dtypes_need_64_bit_mode(dtype):
    x = drawn((5, 7), dtype)
    with pytest.raises(DTypeError, match=f"hash: x is {dtype}, which JAX would turn into"):
        dj.hash(x)
    with jax.enable_x64(True):
        tools.same(jax.jit(dj.hash)(x), hash_bits(x))


@tools.WRAP
def test_vmap_hashes_each_example(wrap):
    for dtype in ("float32", "bfloat16", "bool", "int16"):
        x = drawn((3, 4, 50), dtype)
        tools.same(wrap(jax.vmap(dj.hash))(x), np.stack([hash_bits(v) for v in x]))
        tools.same(wrap(jax.vmap(dj.hash, in_axes=1))(x), np.stack([hash_bits(x[:, i]) for i in range(4)]))
        tools.same(wrap(jax.vmap(jax.vmap(dj.hash)))(x), [[hash_bits(v) for v in row] for row in x])
    tools.same(wrap(jax.vmap(dj.hash))(drawn((5,), "int8")), [hash_bits(v) for v in drawn((5,), "int8")])


def test_in_loops_and_conditions():
    x = drawn((3, 40), "float32")
    tools.same(jax.jit(lambda x: jax.lax.map(dj.hash, x))(x), np.stack([hash_bits(v) for v in x]))
    chosen = jax.jit(lambda yes, x: jax.lax.cond(yes, dj.hash, lambda x: dj.hash(x + 1), x))
    tools.same(chosen(True, x), hash_bits(x))


def test_export_with_symbolic_sizes():
    (n,) = export.symbolic_shape("n")
    f = export.export(jax.jit(dj.hash), disabled_checks=dj.export_safety_checks(), platforms=["cpu"])
    exported = f(jax.ShapeDtypeStruct((n, 3), jnp.float32))
    for rows in (1, 700):
        tools.same(exported.call(drawn((rows, 3), "float32")), hash_bits(drawn((rows, 3), "float32")))


def test_sharded():
    """Under jit an array is hashed whole; inside of shard_map each shard is."""
    mesh = jax.make_mesh((len(jax.devices()),), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = drawn((8 * len(jax.devices()), 16), "float32")
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec("i")))
    tools.same(jax.jit(dj.hash)(placed), hash_bits(x))
    f = jax.shard_map(lambda x: dj.hash(x)[None], mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec("i"))
    tools.same(jax.jit(f)(placed), np.stack([hash_bits(v) for v in np.split(x, len(jax.devices()))]))


@pytest.mark.parametrize("transform", [jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))], ids=["grad", "jvp"])
def test_no_derivative(transform):
    f = lambda x: (dj.hash(x)[0] % 7).astype(jnp.float32) * x.sum()  # noqa: E731
    for g in (f, jax.jit(f)):
        with pytest.raises(UnsupportedError, match=r"diptych_hash has no derivative.*stop_gradient"):
            transform(g)(jnp.ones(3))
    stopped = jax.grad(lambda x: (x + 0 * dj.hash(jax.lax.stop_gradient(x))[0]).sum())(jnp.ones(3))
    tools.same(stopped, np.ones(3, np.float32))


def test_errors():
    for error, said, x in (
        (ArgumentError, "hash: x must be a JAX or NumPy array, got float", 1.0),
        (ArgumentError, "got QuantizedArray", dj.quantize(jnp.ones((4, 32)), tools.quantizer("mxfp8_e4m3"))),
        (DTypeError, "hash: x is big-endian", np.ones(3, ">f4")),
        (DTypeError, r"hash: x must hold .* got int4\[3\]", jnp.ones(3, jnp.int4)),
        (DTypeError, r"got float4_e2m1fn\[3\]", np.ones(3, ml_dtypes.float4_e2m1fn)),
        (DTypeError, r"got key<fry>\[\]", jax.random.key(0)),
        (DTypeError, r"got object\[1\]", np.array([None])),
    ):
        with pytest.raises(error, match=said):
            dj.hash(x)
    call = jax.ffi.ffi_call("diptych_hash", jax.ShapeDtypeStruct((4,), jnp.int32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*operand 0 has XLA element type"):
        call(jnp.ones(3, jnp.int4), attributes=ffi.hash_attributes(ffi.Batch.none(1)))
    assert hash_p.name == "diptych_hash"
