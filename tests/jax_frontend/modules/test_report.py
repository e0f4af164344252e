"""report: the products of a traced call, against the core's own counts of kernels."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest

import diptych.jax as dj
from diptych.common import RECIPES, Float8CurrentScaling, MXFP8BlockScaling
from diptych.core import _kernels, kernel_table, reset_calls

MX, CURRENT = MXFP8BlockScaling(), Float8CurrentScaling()
X, KERNEL = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16)


def gradients(recipe):
    state = dj.init_state(recipe)
    rng = dj.rng_state(1)

    def loss(x, kernel):
        y = dj.dense(x, kernel, recipe=recipe, state=state, rng=rng, record=False)
        return jnp.square(y.astype(jnp.float32)).sum()

    return jax.grad(loss, argnums=(0, 1))


def counted(report, f, *args):
    """Holds a report's kernels against the calls that the core counts when the function runs."""
    compiled = jax.jit(f).lower(*args).compile()
    reset_calls()
    jax.block_until_ready(compiled(*args))
    ran = {r["kernel"]: r["calls"] for r in kernel_table() if r["op"] in ("gemm", "grouped_gemm") and r["calls"]}
    told: dict[str, int] = {}
    for row in report.rows:
        if row.kernel:
            told[row.kernel] = told.get(row.kernel, 0) + row.runs
    assert told == ran


@pytest.mark.parametrize("name", RECIPES)
def test_reports_the_products_that_the_core_counts(name):
    f = gradients(RECIPES[name])
    report = dj.report(f, X, KERNEL)
    assert report.levels == {"native": 3} and report.backend == "cpu"
    assert [row.product for row in report.rows] == ["fprop", "dgrad", "wgrad"]
    assert [row.mnk for row in report.rows] == [(32, 64, 64), (32, 64, 64), (64, 64, 32)]
    counted(report, f, X, KERNEL)
    assert json.loads(json.dumps(report.json()))["levels"] == report.levels


def test_loops_batches_and_products_in_high_precision():
    def f(x, kernel, plain):
        step = lambda c, _: (dj.dense(c, kernel, recipe=MX), None)  # noqa: E731
        looped = jax.lax.scan(step, x, length=4)[0]
        batched = jax.vmap(lambda each: dj.dense(each, kernel, recipe=CURRENT))(jnp.stack([x] * 3))
        return looped @ plain, batched

    report = dj.report(jax.jit(f), X, KERNEL, KERNEL)
    assert report.levels == {"native": 7, "high precision": 1}
    counted(report, f, X, KERNEL, KERNEL)
    assert [row.op for row in report.rows if row.level == "high precision"] == ["dot_general"]
    assert "4 x gemm (fprop) mxfp8_e4m3 x mxfp8_e4m3 32x64x64; cpu.gemm" in str(report)

    def endless(x, kernel):
        return jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: dj.dense(c, kernel, recipe=MX), x)

    report = dj.report(endless, X, KERNEL)
    assert [row.runs for row in report.rows] == [None] and "any number of x gemm" in str(report)


def test_grouped_products_and_scopes():
    def f(x, kernel, offsets):
        with jax.named_scope("experts"):
            return dj.grouped_dense(x, kernel, None, offsets, recipe=MX)

    args = X, jnp.stack([KERNEL] * 2), jnp.array([0, 16, 32], jnp.int32)
    report = dj.report(f, *args)
    (row,) = report.rows
    assert (row.op, row.where, row.kernel, row.mnk) == ("grouped_gemm", "experts", "cpu.grouped_gemm", ())
    counted(report, f, *args)


def test_abstract_arguments_and_bad_input(monkeypatch):
    shape = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    assert dj.report(lambda x: x @ x.T, shape).levels == {"high precision": 1}
    assert str(dj.report(lambda x: x + 1, shape)).endswith("on cpu: none")
    with pytest.raises(TypeError, match="f must be a function"):
        dj.report(X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend must be"):
        dj.report(lambda x: x, shape, backend="tpu")
    monkeypatch.setattr(_kernels._core, "cuda_info", lambda: {"archs": []})
    with pytest.raises(ValueError, match="the core finds no GPU"):
        dj.report(lambda x: x, shape, backend="gpu")
