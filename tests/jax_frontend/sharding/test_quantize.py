"""amax, quantize and dequantize of cut tensors: the bits of one device, without gathers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common import NVFP4Quantizer
from diptych.common.quantizers import RHT, ROW_AMAX
from diptych.jax.functional.source import activated, activated_grad, normalized
from diptych.jax.primitives import norm as norm_ops
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

STOCHASTIC = NVFP4Quantizer(stochastic_rounding=True, with_rht=True)
RNG = dj.rng_state(2**63 + 5, 2**32 - 1)
KIND = pytest.mark.parametrize("case", named(tools.KINDS, tools.NOW))
SPEC = pytest.mark.parametrize("spec", [P("d"), P(None, "d"), P("t", "d")], ids=["rows", "columns", "both"])


def draw(shape=(512, 512), dtype="float32"):
    """Normal values whose amax is in the last rows and columns."""
    x = tools.normal("sharded", shape, dtype)
    return x.at[-1, -1].set(jnp.asarray(97, x.dtype))


@meshes.AXES
@SPEC
@KIND
def test_copies_amaxes_and_values(case, spec, kind):
    x, state = draw(dtype=case.dtype), case.state()

    def f(x):
        q = dj.quantize(x, case.quantizer, **state)
        return {name: getattr(q, name) for name in tools.COPIES if getattr(q, name) is not None}, dj.dequantize(q)

    got, collectives = meshes.run(f, kind, (spec,), x)
    meshes.same(got, f(x), case)
    fmt, spec = case.quantizer.format, case.quantizer.spec
    amaxes = 1 + bool(spec.flags & (RHT | ROW_AMAX)) if fmt.one_scale or fmt.two_level else 0
    assert set(collectives) <= {"all-reduce"} and collectives.get("all-reduce", 0) <= amaxes, collectives


@meshes.AXES
@SPEC
def test_amax(spec, kind):
    x = draw()
    got, collectives = meshes.run(lambda x: (dj.amax(x), dj.amax(x, per_row=True)), kind, (spec,), x)
    meshes.same(got, (dj.amax(x), dj.amax(x, per_row=True)))
    assert set(collectives) == {"all-reduce"}


@meshes.AXES
@pytest.mark.parametrize("quantizer", [*map(tools.quantizer, ("fp8_e4m3_tensor", "mxfp8_e4m3")), STOCHASTIC], ids=str)
def test_sources_and_sums_of_columns(quantizer, kind):
    """A norm's source cut by rows, an activation's by both, its gradient's with the sum over rows."""
    x, dy = draw(dtype="bfloat16"), tools.normal("dy", (512, 512), "bfloat16")
    state = {"rng": RNG} if quantizer.needs_rng else {}
    gamma = tools.normal("gamma", (512,))
    options = norm_ops.NormOptions("rmsnorm", 1e-5, False)
    sources = {
        "norm": (lambda x, dy: normalized(x, gamma, None, norm_ops.statistics(x, options), options), P("d")),
        "activation": (lambda x, dy: activated(x, "gelu", False), P("d", "t")),
        "gated": (lambda x, dy: activated(x, "silu", True), P("d")),
        "gradient": (lambda x, dy: activated_grad(dy, x, "gelu", False), P("d", "t")),
    }
    for name, (source, spec) in sources.items():

        def f(x, dy, source=source):
            q, total = source(x, dy).quantize(quantizer, column_sum="float32", **state)
            return q.rowwise_data, q.rowwise_scale_inv, q.columnwise_data, q.columnwise_scale_inv, total

        (*got, total), collectives = meshes.run(f, kind, (spec, spec), x, dy)
        *want, whole = f(x, dy)
        meshes.same(got, want, name)
        assert jnp.allclose(total, whole, rtol=1e-4, atol=1e-3), name  # added in another order
        assert set(collectives) == {"all-reduce"}, name


@meshes.AXES
def test_stacked_rows_of_leading_dimensions(kind):
    x, quantizer = draw((8, 64, 128)), tools.quantizer("mxfp8_e4m3")
    got, collectives = meshes.run(lambda x: dj.quantize(x, quantizer), kind, (P("d", None, "t"),), x)
    meshes.same(got, dj.quantize(x, quantizer))
    assert not collectives


def test_a_second_leading_dimension_is_gathered_or_refused():
    x, quantizer = draw((2, 256, 128)), tools.quantizer("mxfp8_e4m3")
    got, _ = meshes.run(lambda x: dj.quantize(x, quantizer), AxisType.Auto, (P(None, "d"),), x)
    meshes.same(got, dj.quantize(x, quantizer))
    with pytest.raises(meshes.REFUSED, match=r"dimension 1 of operand 0 is cut.*move the cut dimension to the front"):
        meshes.run(lambda x: dj.quantize(x, quantizer), AxisType.Explicit, (P(None, "d"),), x)


@meshes.AXES
@pytest.mark.parametrize(("shape", "spec"), [((64, 64), P("d")), ((64, 64), P(None, "d")), ((512, 64), P(None, "d"))])
def test_blocks_that_do_not_divide(shape, spec, kind):
    quantizer = tools.quantizer("mxfp8_e4m3")
    with pytest.raises(meshes.REFUSED, match=r"whole blocks of 32.*multiple of 128.*shard_map"):
        meshes.run(lambda x: dj.quantize(x, quantizer), kind, (spec,), tools.normal("x", shape))


@meshes.AXES
@pytest.mark.parametrize("mapped", [0, None], ids=["own rng", "one rng"])
@pytest.mark.parametrize("spec", [P("d", "t"), P(None, "d", "t"), P("t", None, "d")], ids=["batch", "both", "columns"])
def test_stochastic_rounding_of_examples_of_a_vmap(spec, mapped, kind):
    """Axes of a vmap are cut or not, and each example's random bits are those that it has on one device."""
    x = draw((8, 128, 128), "bfloat16")
    rng = jnp.stack([dj.rng_state(i, 7 * i) for i in range(8)]) if mapped == 0 else RNG
    f = jax.vmap(lambda x, rng: dj.quantize(x, STOCHASTIC, rng=rng), in_axes=(0, mapped))
    rng_spec = P(spec[0]) if mapped == 0 else P()
    got, collectives = meshes.run(f, kind, (spec, rng_spec), x, rng)
    meshes.same(got, jax.jit(f)(x, rng))
    assert set(collectives) <= {"all-reduce"}, collectives


@meshes.AXES
def test_stochastic_rounding_over_two_axes_and_with_given_amaxes(kind):
    """Stochastic rounding has one device's bits for a tensor whose rows both mesh axes cut: with amaxes computed or
    given, and for a tensor that is itself a part of a larger one (an rng of eight words)."""
    x, whole = draw(dtype="bfloat16"), jnp.float32([97])
    part = jnp.concatenate([RNG, jnp.int32([512, 1024, 2048, 4096])])
    for rng in (RNG, part):
        for given in ({}, {"amax": whole, "columnwise_amax": whole * 3}):

            def f(x, rng, given=given):
                return dj.quantize(x, STOCHASTIC, rng=rng, **given)

            got, collectives = meshes.run(f, kind, (P(("t", "d")), P()), x, rng)
            meshes.same(got, jax.jit(f)(x, rng), f"{rng.shape} {given}")
            assert set(collectives) <= ({"all-reduce"} if not given else set()), collectives
