"""amax, quantize and dequantize of cut tensors: the bits of one device, without gathers."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sweeps import named

import diptych.jax as dj
from diptych.common.quantizers import RHT, ROW_AMAX
from diptych.jax.functional.source import activated, activated_grad, normalized
from diptych.jax.primitives import norm as norm_ops
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

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

    if case.quantizer.needs_rng:
        with pytest.raises(meshes.REFUSED, match="stochastic rounding counts the elements of the whole tensor"):
            meshes.run(f, kind, (spec,), x)
        return
    got, collectives = meshes.run(f, kind, (spec,), x)
    meshes.same(got, f(x), case)
    fmt, spec = case.quantizer.format, case.quantizer.spec
    amaxes = 1 + bool(spec.flags & (RHT | ROW_AMAX)) if fmt.per_tensor or fmt.two_level else 0
    assert set(collectives) <= {"all-reduce"} and collectives.get("all-reduce", 0) <= amaxes, collectives


@meshes.AXES
@SPEC
def test_amax(spec, kind):
    x = draw()
    got, collectives = meshes.run(lambda x: (dj.amax(x), dj.amax(x, per_row=True)), kind, (spec,), x)
    meshes.same(got, (dj.amax(x), dj.amax(x, per_row=True)))
    assert set(collectives) == {"all-reduce"}


@meshes.AXES
@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "mxfp8_e4m3"])
def test_sources_and_sums_of_columns(fmt, kind):
    """A norm's source cut by rows, an activation's by both, its gradient's with the sum over rows."""
    x, dy, quantizer = draw(dtype="bfloat16"), tools.normal("dy", (512, 512), "bfloat16"), tools.quantizer(fmt)
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
            q, total = source(x, dy).quantize(quantizer, column_sum="float32")
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
