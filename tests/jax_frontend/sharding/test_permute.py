"""Moving rows whose columns are cut: one device's bits, no gathers; cut tokens and rows are errors."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import diptych.jax as dj
from jax_frontend import meshes, tools

pytestmark = pytest.mark.sampled

T, H, E = 64, 512, 4
X = tools.normal("tokens", (T, H), "bfloat16")
IDS = jax.random.randint(jax.random.key(3), (T, 2), 0, E)
PROBS = jax.random.uniform(jax.random.key(4), (T, 2))


@meshes.AXES
def test_rows_and_gradients(kind):
    dy = tools.normal("dy", (T, H), "bfloat16")

    def f(x, probs, dy):
        def moved(x, probs):
            rows = dj.moe_map(IDS, E, map_type="index", align_size=16)
            permuted, row_probs, _ = dj.moe_permute_with_probs(x, probs, rows)
            return dj.moe_unpermute(permuted * 2, rows, probs), row_probs

        (y, row_probs), vjp = jax.vjp(moved, x, probs)
        return y, row_probs, *vjp((dy, row_probs))

    (*got, dprobs), collectives = meshes.run(f, kind, (P(None, "d"), P(), P(None, "d")), X, PROBS, dy)
    *want, of_probs = jax.jit(f)(X, PROBS, dy)
    meshes.same(got, want)
    assert got[0].sharding.spec == P(None, "d") and collectives == {"all-reduce": 1}
    assert np.allclose(dprobs, of_probs, rtol=1e-5, atol=1e-5)  # a sum over columns


@meshes.AXES
@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4"])
def test_quantized_rows(fmt, kind):
    """A quantized tensor moves with the scales of its columns, and rows are quantized as they move."""
    quantizer = tools.quantizer(fmt)
    rowwise = quantizer.with_usage(rowwise=True, columnwise=quantizer.format.one_scale)

    def f(x):
        rows = dj.moe_map(IDS, E, map_type="index", align_size=128)
        return dj.moe_permute(dj.quantize(x, rowwise), rows)[0], dj.moe_permute_and_quantize(x, rows, quantizer)

    got, collectives = meshes.run(f, kind, (P(None, "d"),), X)
    meshes.same(got, f(X))
    assert set(collectives) <= {"all-reduce"} and got[1].rowwise_data.sharding.spec == P(None, "d")


LAYERS = {
    "routing": (lambda x, ids: dj.moe_map(ids, E, map_type="index"), (P(), P("d"))),
    "tokens": (lambda x, ids: dj.moe_permute(x, dj.moe_map(ids, E, map_type="index"))[0], (P("d"), P())),
    "fused": (
        lambda x, ids: dj.moe_permute_and_quantize(
            x, dj.moe_map(ids, E, map_type="index"), tools.quantizer("mxfp8_e4m3")
        ),
        (P("d"), P()),
    ),
    "rows": (lambda x, ids: dj.moe_unpermute(x, ids), (P("d"), P())),
}


@meshes.AXES
@pytest.mark.parametrize("case", LAYERS)
def test_cut_tokens_and_rows_are_refused(case, kind):
    f, specs = LAYERS[case]
    with pytest.raises(meshes.REFUSED, match=r"mesh axes \('d',\) cut the (tokens|rows), .*jax\.expert_parallel"):
        meshes.run(f, kind, specs, X, IDS)


def test_replicated_tokens_are_moved_on_every_device():
    """A constraint keeps what follows, which is cut, from cutting them."""
    with meshes.mesh_of(AxisType.Auto) as mesh:
        whole, cut = (NamedSharding(mesh, spec) for spec in (P(), P("d")))

        def f(x, ids):
            rows = dj.moe_map(jax.lax.with_sharding_constraint(ids, whole), E, map_type="index")
            y = dj.moe_unpermute(dj.moe_permute(jax.lax.with_sharding_constraint(x, whole), rows)[0], rows)
            return x + jax.lax.with_sharding_constraint(y, whole)

        got = jax.jit(f, in_shardings=cut, out_shardings=cut)(X, IDS)
        meshes.same(got, jax.jit(lambda x, ids: x + x + x)(X, IDS))
