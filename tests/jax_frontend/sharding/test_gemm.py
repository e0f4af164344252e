"""gemm and bias_grad of cut operands: the bits of one device, or of parts that are added in order."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import linear_plan
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

RECIPES = {k: r for k, r in tools.PLAIN_RECIPES.items() if not linear_plan(r).needs_rng}
RECIPE = pytest.mark.parametrize("recipe", named(RECIPES, ("fp8-current", "fp8-block", "mxfp8", "nvfp4 to nearest")))
A, B = tools.normal("a", (512, 512)), tools.normal("b", (512, 512)) * 3
PRODUCTS = {"fprop": (False, True), "dgrad": (False, False), "wgrad": (True, False)}
# The cut of an operand's factors (kept, reduced), as a PartitionSpec of [rows, columns], if it is transposed or not.
PRODUCT = pytest.mark.parametrize("product", PRODUCTS)


def quantized(recipe, x, tensor):
    return dj.quantize(x, recipe.quantizer(dj.QuantizerRole(tensor=tensor)).with_usage(rowwise=True, columnwise=True))


def multiply(recipe, product, a, b, **options):
    trans_a, trans_b = PRODUCTS[product]
    tensors = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
    a, b = (quantized(recipe, x, tensor) for x, tensor in zip((a, b), tensors[product], strict=True))
    return dj.gemm(a, b, trans_a=trans_a, trans_b=trans_b, **options)


def specs(product, m, n, k):
    trans_a, trans_b = PRODUCTS[product]
    return (P(k, m) if trans_a else P(m, k)), (P(n, k) if trans_b else P(k, n))


@meshes.AXES
@PRODUCT
@RECIPE
def test_cut_rows_and_columns_have_the_bits_of_one_device(recipe, product, kind):
    f = functools.partial(multiply, recipe, product)
    bias = tools.normal("bias", (512,))
    got, collectives = meshes.run(
        lambda a, b, bias: f(a, b, bias=bias), kind, (*specs(product, "d", "t", None), P("t")), A, B, bias
    )
    meshes.same(got, f(A, B, bias=bias))
    assert set(collectives) <= {"all-reduce"}  # of amaxes
    assert got.sharding.spec == P("d", "t")


@meshes.AXES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@PRODUCT
@RECIPE
def test_parts_of_a_cut_sum_are_rounded_and_added_in_order(recipe, product, dtype, kind):
    bias, acc = tools.normal("bias", (512,)), tools.normal("acc", (512, 512)).astype(dtype)

    def f(a, b, bias, acc):
        trans_a, trans_b = PRODUCTS[product]
        return dj.gemm_into(acc, quantized(recipe, a, "input"), quantized(recipe, b, "input"), bias=bias, beta=0.5,
                            alpha=2.0, trans_a=trans_a, trans_b=trans_b)  # fmt: skip

    sliced = specs(product, None, None, "d")
    got, _ = meshes.run(f, kind, (*sliced, P(), P()), A, B, bias, acc)

    def part(a, b):  # of one device, by scales of the whole tensors
        trans_a, trans_b = PRODUCTS[product]
        quantizer = recipe.quantizer(dj.QuantizerRole(tensor="input")).with_usage(rowwise=True, columnwise=True)
        whole = quantizer.format.one_scale or quantizer.format.two_level
        a, b = (dj.quantize(x, quantizer, amax_group="d" if whole else None) for x in (a, b))
        return dj.gemm(a, b, trans_a=trans_a, trans_b=trans_b, alpha=2.0, out_dtype=dtype)[None]

    mesh = jax.sharding.Mesh(np.asarray(jax.devices("cpu")[:4]), ("d",))
    parts = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=sliced, out_specs=P("d")))(A, B)
    total = np.zeros((512, 512), np.float32)
    for p in np.asarray(parts).astype(np.float32):
        total = total + p
    total = total + np.asarray(bias) + np.float32(0.5) * np.asarray(acc).astype(np.float32)
    meshes.same(got, jnp.asarray(total).astype(dtype))


@meshes.AXES
@pytest.mark.parametrize("axes", ["t", ("t", "d")], ids=["2 devices", "8 devices"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("m", "n"), [(64, 40), (1, 48), (5, 6)])
def test_a_sum_has_the_same_bits_on_every_device(m, n, dtype, axes, kind):
    """Parts of two bytes are sent as such, half of what an all-reduce in float32 sends, if M or N can be shared."""
    recipe, count = dj.MXFP8BlockScaling(), 2 if axes == "t" else 8
    # The first and the last part cancel: what float32 rounds in between, in their order, is seen in two bytes.
    a, b = (x[:, :256].at[:, -32:].set(x[:, :32]) for x in (A[:m], B[:n]))
    b *= jnp.repeat(jnp.asarray([2.0**8, *[2.0**-12] * 6, -(2.0**8)]), 32)
    bias, acc = tools.normal("bias", (n,)) * 2.0**-12, (tools.normal("acc", (m, n)) * 2.0**-12).astype(dtype)

    def product(a, b, **options):
        a, b = (dj.quantize(x, recipe.quantizer(dj.QuantizerRole(tensor="input"))) for x in (a, b))
        return dj.gemm(a, b, out_dtype=dtype, **options)

    def f(a, b, bias, acc):
        a, b = (dj.quantize(x, recipe.quantizer(dj.QuantizerRole(tensor="input"))) for x in (a, b))
        return dj.gemm_into(acc, a, b, bias=bias, beta=0.5)

    with meshes.mesh_of(kind) as mesh:
        specs = (P(None, axes), P(None, axes), P(), P())
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((a, b, bias, acc), specs, strict=True)]
        compiled = jax.jit(f).lower(*placed).compile()
        got = compiled(*placed)
    total = np.zeros((m, n), np.float32)
    for part in (product(*halves) for halves in zip(*(jnp.split(x, count, 1) for x in (a, b)), strict=True)):
        total = total + np.asarray(part).astype(np.float32)
    want = jnp.asarray(total + np.asarray(bias) + np.float32(0.5) * np.asarray(acc).astype(np.float32)).astype(dtype)
    for shard in got.addressable_shards:
        tools.same(np.asarray(shard.data), np.asarray(want), shard.device)
    short = dtype != "float32" and (m % count == 0 or n % count == 0)
    assert meshes.counted(compiled.as_text()) == (meshes.WHOLE_SUM if short else {"all-reduce": 1})
    assert meshes.sent(compiled.as_text()) == 2 * m * n * (2 if short else 4) * (count - 1) / count


def test_an_axis_of_one_device_cuts_nothing():
    """The bias enters before the product is rounded, as on one device."""
    mesh = jax.make_mesh((1, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:2])
    layer = lambda *args: dj.dense(*args, recipe=dj.MXFP8BlockScaling())  # noqa: E731
    args = (A.astype("bfloat16"), B, tools.normal("bias", (512,)))
    specs = (P("t", "d"), P(None, "d"), P())
    got = jax.jit(layer)(*(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True)))
    meshes.same(got, jax.jit(layer)(*args))


@meshes.AXES
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d")], ids=["M", "N"])
def test_an_accumulator_that_is_cut_over_the_axes_of_the_sum_gets_its_part(spec, dtype, kind):
    """As the gradients of weights under FSDP: a reduce-scatter, the bits of the whole sum, and no gather."""
    acc, bias = tools.normal("acc", (512, 512)).astype(dtype), tools.normal("bias", (512,))

    def f(a, b, acc, bias):
        a, b = (quantized(dj.Float8BlockScaling(), x, tensor) for x, tensor in ((a, "grad_output"), (b, "input")))
        return dj.gemm_into(acc, a, b, trans_a=True, trans_b=False, beta=0.5, bias=bias)

    whole, collectives = meshes.run(f, kind, (P("d"), P("d"), P(), P()), A, B, acc, bias)
    assert collectives == ({"all-reduce": 1} if dtype == "float32" else meshes.WHOLE_SUM)
    got, collectives = meshes.run(f, kind, (P("d"), P("d"), spec, P()), A, B, acc, bias)
    meshes.same(got, whole)
    assert collectives == {"reduce-scatter" if dtype == "float32" else "all-to-all": 1}
    assert got.sharding.spec[: len(spec)] == tuple(spec)


@meshes.AXES
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axes", [("t", "d"), ("d", "t")], ids=["replicas first", "replicas last"])
@pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P(("d", "t"))], ids=["M", "N", "all"])
def test_a_result_that_is_cut_over_some_axes_of_the_sum_is_gathered_over_the_others(spec, axes, dtype, kind):
    """As the gradients of weights under FSDP with replicas ("t"): shares are added in the order of K's devices."""
    acc, bias = tools.normal("acc", (512, 256)).astype(dtype), tools.normal("bias", (256,))

    def f(a, b, acc, bias):
        a, b = (quantized(dj.MXFP8BlockScaling(), x, tensor) for x, tensor in ((a, "grad_output"), (b, "input")))
        return dj.gemm_into(acc, a, b, trans_a=True, trans_b=False, beta=0.5, bias=bias)

    whole, _ = meshes.run(f, kind, (P(axes), P(axes), P(), P()), A, B[:, :256], acc, bias)
    got, collectives = meshes.run(f, kind, (P(axes), P(axes), spec, P()), A, B[:, :256], acc, bias)
    meshes.same(got, whole)
    scattered = "reduce-scatter" if axes == ("d", "t") and dtype == "float32" else "all-to-all"
    assert collectives == {scattered: 1} | ({} if spec == P(("d", "t")) else {"all-gather": 1})
    assert got.sharding.spec[: len(spec)] == tuple(spec)


@meshes.AXES
def test_a_cut_result_without_equal_shares_is_reduced_whole(kind):
    """12 rows are cut over "d", and cannot be cut over all eight devices of the sum."""
    acc = tools.normal("acc", (12, 40), "bfloat16")

    def f(a, b, acc):
        return dj.gemm_into(acc, *(quantized(dj.Float8CurrentScaling(), x, "input") for x in (a, b)), beta=0.5)

    specs = (P(None, ("t", "d")), P(None, ("t", "d")))
    whole, _ = meshes.run(f, kind, (*specs, P()), A[:12], B[:40], acc)
    got, collectives = meshes.run(f, kind, (*specs, P("d")), A[:12], B[:40], acc)
    meshes.same(got, whole)
    assert set(collectives) == {"all-reduce"} and got.sharding.spec[0] == "d"


@pytest.mark.parametrize(("axes", "gathers"), [("d", {}), (("t", "d"), {"all-gather": 1})], ids=["all", "some"])
def test_a_result_that_is_asked_for_in_parts_is_scattered(axes, gathers):
    with meshes.mesh_of(AxisType.Auto) as mesh:
        tokens, rows = NamedSharding(mesh, P(axes)), NamedSharding(mesh, P("d"))
        f = functools.partial(multiply, dj.MXFP8BlockScaling(), "wgrad", out_dtype=jnp.bfloat16)
        compiled = jax.jit(f, in_shardings=tokens, out_shardings=rows).lower(A, B).compile()
        got = compiled(jax.device_put(A, tokens), jax.device_put(B, tokens))
    whole, _ = meshes.run(f, AxisType.Auto, (P(axes), P(axes)), A, B)
    meshes.same(got, whole)
    assert meshes.counted(compiled.as_text()) == {"all-to-all": 1} | gathers
    size, n = 2 * 512 * 512, 4 if axes == "d" else 8
    assert meshes.sent(compiled.as_text()) == size * (n - 1) / n + (size / 4 / 2 if gathers else 0)


@meshes.AXES
@RECIPE
def test_an_operand_whose_axis_is_taken_is_gathered_quantized(recipe, kind):
    """Both operands are cut over one axis, as data and weights are under FSDP."""
    f = functools.partial(multiply, recipe, "fprop")
    with meshes.mesh_of(kind) as mesh:
        placed = [jax.device_put(x, NamedSharding(mesh, P("d"))) for x in (A, B)]
        compiled = jax.jit(f).lower(*placed).compile()
    meshes.same(compiled(*placed), f(A, B))
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert gathers and all("f32[512,512]" not in line for line in gathers)
    assert compiled(*placed).sharding.spec[0] == "d"


@meshes.AXES
@RECIPE
def test_a_kernel_that_is_held_quantized(recipe, kind):
    """It was quantized by another program, whose results stay where they are."""
    with meshes.mesh_of(kind) as mesh:
        held = jax.jit(lambda b: quantized(recipe, b, "weight"))(jax.device_put(B, NamedSharding(mesh, P("t"))))
        assert held.rowwise_data.sharding.spec[0] == "t"
        f = jax.jit(lambda a, b: dj.gemm(quantized(recipe, a, "input"), b))
        a = jax.device_put(A, NamedSharding(mesh, P("d")))
        got, text = f(a, held), f.lower(a, held).compile().as_text()
    meshes.same(got, multiply(recipe, "fprop", A, B))
    assert "all-gather" not in text and got.sharding.spec == P("d", "t")


@meshes.AXES
def test_batches_with_a_cut_sum_and_a_bias_of_their_own(kind):
    """The bias and the rows have batch axes that the kernel lacks."""
    recipe = dj.MXFP8BlockScaling()
    x, bias = tools.normal("x", (2, 64, 128)), tools.normal("bias", (2, 3, 32))
    kernel = tools.normal("kernel", (32, 128))

    def f(x, kernel, bias):
        over_bias = jax.vmap(lambda x, b: dj.dense(x, kernel, b, recipe=recipe), (None, 0))
        return jax.vmap(over_bias)(x, bias)

    got, collectives = meshes.run(f, kind, (P(None, None, "t"), P(None, "t"), P()), x, kernel, bias)
    example = meshes.run(lambda x, k, b: dj.dense(x, k, b, recipe=recipe), kind, (P(None, "t"), P(None, "t"), P()),
                         x[1], kernel, bias[1, 2])[0]  # fmt: skip
    assert got.shape == (2, 3, 64, 32) and collectives == {"all-reduce": 1}
    meshes.same(jax.device_get(got)[1, 2], example)


@meshes.AXES
def test_examples_that_are_asked_for_over_the_axes_of_the_sum(kind):
    """Each device has parts of all examples, so their sums are whole, and then cut."""
    x, kernel = tools.normal("x", (4, 64, 128), "bfloat16"), tools.normal("kernel", (32, 128))

    def layer(x, kernel):
        return jax.vmap(lambda x: dj.dense(x, kernel, recipe=dj.MXFP8BlockScaling()))(x)

    with meshes.mesh_of(kind) as mesh:
        of_x, of_kernel, out = (NamedSharding(mesh, s) for s in (P(None, None, "d"), P(None, "d"), P("d")))
        placed = (jax.device_put(x, of_x), jax.device_put(kernel, of_kernel))
        got, whole = (jax.jit(layer, out_shardings=s)(*placed) for s in (out, NamedSharding(mesh, P())))
    meshes.same(got, whole)


@meshes.AXES
def test_bias_grad(kind):
    dy = tools.normal("dy", (512, 64), "bfloat16")
    got, collectives = meshes.run(lambda dy: dj.bias_grad(dy, jnp.float32), kind, (P("d", "t"),), dy)
    parts = [np.asarray(dj.bias_grad(part, jnp.float32)) for part in jnp.split(dy, 4)]
    meshes.same(got, jnp.asarray(parts[0] + parts[1] + parts[2] + parts[3]))
    assert collectives == {"all-reduce": 1}


@meshes.AXES
def test_blocks_of_a_kernel_that_do_not_divide(kind):
    with pytest.raises(meshes.REFUSED, match=r"cut 384 .*whole blocks of 128.*multiple of 512"):
        meshes.run(functools.partial(multiply, dj.Float8BlockScaling(), "fprop"), kind, (P(), P("d")), A, B[:384])
