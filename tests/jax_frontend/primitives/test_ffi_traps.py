"""One test for each way in which a kernel under XLA can go wrong, mostly without an error."""

from __future__ import annotations

import ctypes
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import cases
import diptych.jax as dj
import oracle
from diptych.common import DTypeError, QuantSpec, ShapeError
from diptych.common.gemm_options import DEFAULTS
from diptych.jax.primitives import ffi
from diptych.jax.primitives import quantize as quantize_ops
from jax_frontend import tools

pytestmark = pytest.mark.sampled

TENSOR, FP4 = tools.quantizer("fp8_e4m3_tensor"), tools.quantizer("nvfp4", columnwise=False)
RECIPES = tools.PLAIN_RECIPES


def test_2_buffers_of_each_element_type_hold_what_they_should_and_not_a_byte_more():
    """Shapes and element types decide how far a kernel writes. The neighbours of each output keep their bytes."""
    for name, kind in tools.KINDS.items():
        x, state, row = kind.draw("buffers"), kind.state(), kind.quantizer.format
        q = jax.jit(functools.partial(dj.quantize, quantizer=kind.quantizer))(x, **state)
        tools.same_quantized(q, kind.oracle(x, state), name)
        assert q.rowwise_data.dtype.name == q.columnwise_data.dtype.name == row.data
        assert q.rowwise_scale_inv.dtype.name == row.scale
        assert q.rowwise_data.nbytes * row.pack == x.size
    # A four-bit element, whose byte count XLA reports wrongly, reaches no kernel.
    packed = jax.ShapeDtypeStruct((4, 4), ml_dtypes.float4_e2m1fn)
    with pytest.raises(DTypeError, match="float4_e2m1fn"):
        jax.eval_shape(dj.amax, packed)
    call = jax.ffi.ffi_call("diptych_amax", jax.ShapeDtypeStruct((1,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no op takes"):
        call(jnp.zeros((4, 4), ml_dtypes.float4_e2m1fn), attributes=ffi.amax_attributes(ffi.Batch.none(1), 0, False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_3_subnormals_survive_inside_a_handler(dtype):
    """XLA:CPU calls handlers with FTZ and DAZ on; XLA's own sum shows that it does, ours that it does not matter."""
    x = cases.draw("ftz", "subnormal_input", (64, 256), dtype)
    assert (np.abs(x.astype(np.float32)).max() > 0) and not float(jnp.abs(jax.jit(lambda v: v * 1.0)(x)).max()) > 1e-37
    tools.same(jax.jit(dj.amax)(x), oracle.amax(x))
    for name, kind in tools.KINDS.items():
        if kind.dtype not in ("float32", dtype):
            continue
        state = kind.state()
        want = kind.oracle(x, state)
        quantized = jax.jit(functools.partial(dj.quantize, quantizer=kind.quantizer))(x, **state)
        tools.same_quantized(quantized, want, name)
        tools.same(jax.jit(dj.dequantize)(quantized), oracle.dequantize(want.copy(), x.dtype), name)
    history, scale = np.float32([[1e-41, 3e-40, 1e-42]]), np.ones(1, np.float32)
    for options in ({}, {"reduced": np.float32([2e-42])}, {"margin": 100}):
        tools.same_tree(
            jax.jit(functools.partial(dj.scale_update, **options))(history, scale),
            oracle.scale_update(history, scale, **options),
        )
    tools.same(jax.jit(dj.bias_grad)(x), tools.oracle_bias_grad(x, x.dtype))


def test_4_scales_are_ieee_quotients():
    """XLA turns `a / broadcast(s)` into a product with the reciprocal; scale arithmetic is not left to it."""
    amax = np.abs(cases.draw("quotients", "normal", (4096,), "float32")) + np.float32(0.01)
    x = jnp.asarray(amax)[:, None]
    quantize = jax.jit(jax.vmap(functools.partial(dj.quantize, quantizer=TENSOR)))
    scale = np.float32(448) / amax
    want = np.float32(1) / scale
    tools.same(quantize(x).rowwise_scale_inv[:, 0], want)
    assert (np.float32(1) / np.float32(448) * amax != want).mean() > 0.1  # the shortcut would show
    text = jax.jit(functools.partial(dj.quantize, quantizer=TENSOR)).lower(x).compile().as_text()
    assert "divide" not in text and "multiply" not in text


@pytest.fixture
def mesh():
    return jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:2]), ("i",))


def test_5_a_forgotten_pmax_is_an_error(mesh):
    x = tools.normal("x", (8, 32)) * jnp.arange(1, 9)[:, None]
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"))

    def forgotten(x):
        return dj.amax(x)

    def quantized(x):
        return dj.quantize(x, TENSOR).rowwise_scale_inv

    def two_level(x):
        return dj.quantize(x, FP4).amax

    for f in (forgotten, quantized, two_level):
        with pytest.raises(ValueError, match="out_specs"):
            jax.jit(shard(f, out_specs=P()))(x)

    def reduced(x):
        q = dj.quantize(x, TENSOR, amax=jax.lax.pmax(dj.amax(x), "i"))
        return q.rowwise_data, q.rowwise_scale_inv, q.amax

    data, scale, amax = jax.jit(shard(reduced, out_specs=(P("i"), P(), P())))(x)
    want = dj.quantize(x, TENSOR)
    tools.same_tree([data, scale, amax], [want.rowwise_data, want.rowwise_scale_inv, want.amax])
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(shard(reduced, out_specs=(P(), P(), P())))(x)


def test_6_attributes_are_typed_in_64_bit_mode_too():
    x, kernel = tools.normal("x", (16, 64)), tools.normal("kernel", (32, 64))
    f = {name: jax.jit(functools.partial(dj.dense, recipe=recipe)) for name, recipe in RECIPES.items()}
    want = {name: g(x, kernel) for name, g in f.items()}
    with jax.enable_x64(True):
        for name, recipe in RECIPES.items():
            tools.same(jax.jit(functools.partial(dj.dense, recipe=recipe))(x, kernel), want[name])
        q = dj.quantize(x, TENSOR, amax=2.5)  # a Python float: float32 all the same
        assert q.amax.dtype == jnp.float32
        got = dj.gemm(q, q, alpha=0.1)
        scaled = dj.quantize(x, dj.Float8Quantizer(), scale=0.3)
        updated = dj.scale_update(jnp.ones((2, 3), jnp.float32), jnp.ones(2, jnp.float32), fp8_max=57344, margin=1)
        assert scaled.amax.dtype == updated[0].dtype == updated[1].dtype == jnp.float32
        assert dj.rng_state(1, 2).dtype == jnp.int32
        with pytest.raises(DTypeError, match="float64"):
            dj.quantize(jnp.ones((2, 2)), TENSOR)
        # Equal keys of a compilation cache that are not equal types: one must not spoil the other.
        for alpha in (0.1, np.float64(0.1), np.float32(0.1), 1, 1.0, np.int64(1)):
            tools.same(dj.gemm(q, q, alpha=alpha), jax.jit(lambda q, a=alpha: dj.gemm(q, q, alpha=float(a)))(q))
        grads = jax.grad(lambda x: dj.dense(x, kernel, recipe=RECIPES["mxfp8"]).sum())(x)
    tools.same(got, dj.gemm(q, q, alpha=0.1))
    tools.same_tree(scaled, dj.quantize(x, dj.Float8Quantizer(), scale=0.3))
    tools.same_tree(updated, dj.scale_update(jnp.ones((2, 3)), jnp.ones(2), fp8_max=57344.0, margin=1))
    tools.same(grads, jax.grad(lambda x: dj.dense(x, kernel, recipe=RECIPES["mxfp8"]).sum())(x))
    batch = ffi.Batch.none(4)
    for attributes in (
        ffi.amax_attributes(batch, 0, True),
        ffi.quantize_attributes(batch, QuantSpec(0, 1, 0.5), 0, rowwise=True, columnwise=True, has_scale=False),
        ffi.scale_update_attributes(batch, False, True, 448, 0, False),
        ffi.dequantize_attributes(batch, 0, False, True),
        ffi.gemm_attributes(batch, (0, False, False), (0, True, True), False, False, 1.0, 0.0, DEFAULTS),
        ffi.bias_grad_attributes(batch),
    ):
        assert {type(v) for v in attributes.values()} <= {np.int32, np.int64, np.float32}


def test_6_one_attribute_too_many_or_of_another_type_is_refused():
    good = ffi.amax_attributes(ffi.Batch.none(1), 0, False)
    errors = {
        "expected S64 but got S32": good | {"axes": np.int32(1)},  # 0 would be an equal key of JAX's caches
        f"expected {len(good)} attributes but got {len(good) + 1}": good | {"more": np.int32(1)},
        f"expected {len(good)} attributes but got 1": {"version": good["version"]},
    }
    call = jax.ffi.ffi_call("diptych_amax", jax.ShapeDtypeStruct((1, 1), jnp.float32))
    for message, bad in errors.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(jnp.ones((3, 1, 7)), attributes=bad)
    tools.same(call(jnp.ones((3, 1, 7)), attributes=good), np.ones((1, 1), np.float32))


def test_7_vmap_takes_each_examples_own_amax_and_copies_no_weight():
    x = jnp.asarray([1.0, 1000.0, 1e-3])[:, None, None] * tools.normal("x", (3, 5, 64))
    q = jax.jit(jax.vmap(functools.partial(dj.quantize, quantizer=TENSOR)))(x)
    tools.same(q.amax[:, 0], jnp.abs(x).max((1, 2)))
    kernel = tools.normal("kernel", (48, 64))
    recipe = dj.Float8CurrentScaling()
    f = jax.vmap(lambda x: dj.dense(x, kernel, recipe=recipe))
    tools.same(jax.jit(f)(x), jnp.stack([dj.dense(v, kernel, recipe=recipe) for v in x]))
    gemm = next(line for line in tools.hlo(f, x).splitlines() if "@diptych_gemm" in line)
    assert "tensor<48x64xui8>" in gemm and "tensor<3x48x64" not in tools.hlo(f, x)


def test_9_errors_are_python_errors_while_tracing():
    """A handler's own error arrives as JaxRuntimeError, at run time; ours come before, as ValueError and TypeError."""
    before = tools.calls("quantize")
    for bad, error in ((jnp.ones((2, 2), jnp.int32), DTypeError), (jnp.float32(1), ShapeError)):
        with pytest.raises(error) as caught:
            jax.jit(lambda x: dj.quantize(x, TENSOR)).lower(bad)
        assert isinstance(caught.value, (TypeError, ValueError))
    with pytest.raises(ShapeError):
        jax.jit(jax.vmap(lambda x: dj.quantize(x, TENSOR))).lower(jnp.ones(3))
    assert tools.calls("quantize") == before
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT: .*version 99"):
        call = jax.ffi.ffi_call("diptych_amax", jax.ShapeDtypeStruct((1,), jnp.float32))
        call(jnp.ones(3), attributes=ffi.amax_attributes(ffi.Batch.none(1), 0, False) | {"version": np.int32(99)})


def train(recipe, x, kernel, bias):
    return jax.grad(lambda *a: (dj.dense(*a, recipe=recipe) ** 2).sum(), (0, 1, 2))(x, kernel, bias)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_11_no_host_callback_and_no_hidden_memory(recipe, monkeypatch):
    args = tools.normal("x", (16, 32)), tools.normal("kernel", (48, 32)), tools.normal("bias", (48,))
    f = jax.jit(functools.partial(train, recipe))
    text = f.lower(*args).compile().as_text()
    assert sorted(tools.custom_calls(text)) == ["diptych_bias_grad", *["diptych_gemm"] * 3, *["diptych_quantize"] * 3]
    assert set(re.findall(r'custom_call_target="([^"]*)"', text)) == set(tools.custom_calls(text))
    assert not re.search(r"\b(infeed|outfeed|send|recv)\(", text)
    # CUDA alone takes a workspace, as one more result, sized by the shape.
    monkeypatch.setattr(quantize_ops._core, "gemm_workspace_bytes", lambda a, b, m, n, k, more: m * n * k + more)
    monkeypatch.setattr(quantize_ops._core, "bias_grad_workspace_bytes", lambda m, n: m + n)
    lowered = {
        platform: jax.jit(functools.partial(train, recipe)).trace(*args).lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    extra = [f"tensor<{size}xui8>" for size in (16 * 48 * 32 + 1, 16 * 48 * 32, 16 + 48)]
    assert all(e in lowered["cuda"] for e in extra) and not any(e in lowered["cpu"] for e in extra)
    assert tools.custom_calls(lowered["cuda"]) == tools.custom_calls(lowered["cpu"])


def test_11_cuda_handlers_are_recordable_into_command_buffers():
    """Asks each handler for its metadata, as XLA does when it registers one."""

    word, pointer = ctypes.c_size_t, ctypes.c_void_p

    class Metadata(ctypes.Structure):  # XLA_FFI_Metadata, the version's struct written out
        _fields_ = [
            ("size", word), ("version_size", word), ("version_next", pointer), ("major", ctypes.c_int),
            ("minor", ctypes.c_int), ("traits", ctypes.c_uint32), ("state", ctypes.c_int64), ("room", word * 8),
        ]  # fmt: skip

    class Extension(ctypes.Structure):  # XLA_FFI_Metadata_Extension; its type is 1
        _fields_ = [("size", word), ("type", ctypes.c_int), ("next", pointer), ("metadata", ctypes.POINTER(Metadata))]

    class Frame(ctypes.Structure):  # XLA_FFI_CallFrame, whose size does not count the last field
        _fields_ = [
            ("size", word), ("extension", ctypes.POINTER(Extension)), ("api", pointer), ("context", pointer),
            ("stage", ctypes.c_int), ("args", word * 5), ("rets", word * 5), ("attributes", word * 6),
            ("future", pointer),
        ]  # fmt: skip

    library = ctypes.CDLL(ffi.load().library)
    for op in ffi.load().ops:
        for platform, traits in (("cpu", 0), ("cuda", 1)):  # 1: XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
            metadata = Metadata(size=ctypes.sizeof(Metadata))
            extension = Extension(ctypes.sizeof(Extension), 1, None, ctypes.pointer(metadata))
            frame = Frame(size=Frame.future.offset, extension=ctypes.pointer(extension))
            handler = getattr(library, f"{ffi.target(op)}_{platform}")
            handler.restype = pointer
            assert handler(ctypes.byref(frame)) is None
            assert (metadata.major, metadata.minor) == ffi.load().ffi
            assert metadata.traits == traits, (op, platform)


@pytest.mark.cuda
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_11_runs_inside_command_buffers(recipe):
    with jax.default_device(tools.gpu()):
        args = tools.normal("x", (64, 128)), tools.normal("kernel", (48, 128)), tools.normal("bias", (48,))
        want = train(recipe, *args)
        f = jax.jit(functools.partial(train, recipe), compiler_options={"xla_gpu_graph_min_graph_size": 1})
        for _ in range(3):
            tools.same_tree(f(*args), want)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_12_remat_that_saves_the_quantized_copies_does_not_quantize_again(recipe):
    args = tools.normal("x", (16, 32)), tools.normal("kernel", (48, 32)), tools.normal("bias", (48,))

    def count(policy):  # before XLA merges what it finds twice
        f = jax.checkpoint(lambda *a: jnp.tanh(dj.dense(*a, recipe=recipe)).sum(), policy=policy)
        jaxpr = jax.make_jaxpr(jax.value_and_grad(f, (0, 1, 2)))(*args).jaxpr
        return len(tools.eqns(jaxpr, "diptych_quantize")), len(tools.eqns(jaxpr, "diptych_gemm"))

    policies = jax.checkpoint_policies
    assert count(policies.save_only_these_names(dj.CHECKPOINT_NAME)) == (3, 4)
    assert count(policies.dots_saveable) == count(None) == (5, 4)
    assert count(policies.everything_saveable) == (3, 3)


def save_quantized(prim, *_, **__):
    return prim is quantize_ops.quantize_p


POLICIES = {
    "none": None,
    "names": jax.checkpoint_policies.save_only_these_names(dj.CHECKPOINT_NAME),
    "other names": jax.checkpoint_policies.save_anything_except_these_names(dj.CHECKPOINT_NAME),
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "quantized": save_quantized,
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_12_what_remat_saves_is_not_rounded(recipe, policy):
    """JAX sends saved floats through `reduce_precision`, which spoils FP8 and E8M0; bytes it leaves alone."""
    args = tools.normal("x", (16, 32)), tools.normal("kernel", (48, 32)), tools.normal("bias", (48,))

    def f(*a):
        return (dj.dense(*a, recipe=recipe) ** 2).sum()

    want = jax.jit(jax.grad(f, (0, 1, 2)))(*args)
    for wrap in (lambda g: g, jax.jit):
        tools.same_tree(wrap(jax.grad(jax.checkpoint(f, policy=POLICIES[policy]), (0, 1, 2)))(*args), want)
    rounded = jax.jit(lambda v: jax.lax.reduce_precision(v, 4, 3))(jnp.asarray([300.0], jnp.float8_e4m3fn))
    assert policy != "names" or jnp.isnan(rounded).all()  # where this ends, as_bytes may go
