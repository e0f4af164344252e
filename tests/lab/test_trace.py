import collections
import dataclasses
import functools

import numpy as np
import pytest
from lab_tools import TINY, job
from sweeps import others_slow

from diptych.common import RECIPES
from diptych.lab import trace
from diptych.lab.compare import calls_per_linear
from diptych.lab.frontend import require
from diptych.lab.job import initial_weights
from diptych.lab.replay.op import Bits, Op
from diptych.lab.trace import difference

RECIPE = pytest.mark.parametrize("recipe", others_slow(RECIPES, ("fp8-delayed", "fp8-block", "mxfp8")))


class Steps(dict):
    """The first step of both frameworks by each recipe, made when it is asked for."""

    def __init__(self, batch):
        self.batch, self.weights = batch, initial_weights(TINY, 0)
        self.pair = [require(name, "cpu") for name in ("torch", "jax")]

    def __missing__(self, recipe):
        self[recipe] = [f.trainer(job(recipe), self.weights).traced_step(self.batch) for f in self.pair]
        return self[recipe]


@pytest.fixture(scope="module")
def steps(small_batch, compiled_once):
    return Steps(small_batch)


@pytest.fixture(scope="module")
def small_batch():
    return np.random.default_rng(3).integers(0, 256, (4, 17)).astype(np.int32)


@RECIPE
def test_every_linear_has_all_its_ops_in_both_frameworks(steps, recipe):
    for step in steps[recipe]:
        labelled = trace.label(step.ops, TINY)
        kinds = collections.Counter(op.kind for op in step.ops)
        assert kinds == {k: len(TINY.linears) * n for k, n in calls_per_linear(RECIPES[recipe])[0].items() if n}
        assert len(labelled) == len(step.ops) - kinds["scale_update"] == 7 * len(TINY.linears)
        assert {(i.linear, i.role) for i in labelled} == {(n, r) for n in TINY.linears for r in trace.ROLES}
        assert trace.missing_products(labelled, TINY) == []


@RECIPE
def test_both_record_the_same_activations_and_gradients(steps, recipe):
    a, b = steps[recipe]
    names = [name for name, _ in trace.activation_order(TINY)]
    for step in (a, b):
        assert set(names) <= set(step.activations)
        assert set(step.gradients) == set(TINY.shapes())
    for name in names:
        assert a.activations[name].shape == b.activations[name].shape
        np.testing.assert_allclose(a.activations[name], b.activations[name], rtol=0.05, atol=0.02)


@RECIPE
def test_every_op_replays_to_the_same_bits_both_ways(steps, recipe):
    for step, other in zip(steps[recipe], ("jax", "torch"), strict=True):
        frontend = require(other, "cpu")
        for op in step.ops:
            again = frontend.replay(op, "cpu")
            assert set(again) == set(op.outputs)
            for name, bits in op.outputs.items():
                assert difference(bits, again[name]).equal, (op.kind, name)


def test_a_changed_scale_is_seen_by_the_replay(steps):
    op = next(op for op in steps["mxfp8"][0].ops if op.kind == "gemm")
    wrong = dict(op.inputs)
    wrong["b_scale_inv"] = Bits("float8_e8m0fnu", op.inputs["b_scale_inv"].data + np.uint8(1))
    again = require("jax", "cpu").replay(dataclasses.replace(op, inputs=wrong), "cpu")
    assert difference(op.outputs["d"], again["d"]).differing > 0


def test_framework_ops_alone_are_close(steps, small_batch):
    a, _ = steps["fp8-block"]
    known = {**initial_weights(TINY, 0), **a.activations, "tokens": small_batch[:, :-1], "targets": small_batch[:, 1:]}
    for op in trace.framework_ops(TINY):
        for name in ("torch", "jax"):
            replay = functools.partial(require(name, "cpu").replay, device="cpu")
            out = trace.computed(op, [np.ascontiguousarray(known[n]) for n in op.inputs], TINY.heads, replay)
            np.testing.assert_allclose(out, known[op.output], rtol=1e-4, atol=1e-5, err_msg=f"{name} {op.output}")


def test_equal_payloads_are_told_apart_by_order():
    """Gradients that underflow to zeros have the same bytes in every linear, and so may two inputs."""
    zeros, ops = np.zeros((4, 4), np.uint8), []
    same = [0, 0, *range(2, len(TINY.linears))]  # the first two linears have one input

    def bits(value, dtype="float8_e4m3fn"):
        return Bits(dtype, np.full((4, 4), value, np.uint8) if np.isscalar(value) else value)

    def quantize(source, rowwise, columnwise):
        made = {"rowwise_data": bits(rowwise), "columnwise_data": bits(columnwise)}
        ops.append(Op("quantize", {"x": bits(source, "float32x")}, {}, made))

    def gemm(a, b, sides):
        ops.append(Op("gemm", {"a_data": bits(a), "b_data": bits(b)}, {"a": ("", sides[0]), "b": ("", sides[1])}, {}))

    for i in range(len(TINY.linears)):
        quantize(100 + same[i], 10 + same[i], 20 + same[i])
        quantize(150 + i, 30 + i, 40 + i)
        gemm(10 + same[i], 30 + i, (False, False))
    for i in reversed(range(len(TINY.linears))):
        quantize(200 + i, zeros, zeros)
        gemm(zeros, 40 + i, (False, True))
        gemm(zeros, 20 + same[i], (True, True))
    labelled = trace.label(ops, TINY)
    assert [i.linear for i in labelled if i.role == "wgrad"] == TINY.linears[::-1]
    assert len(labelled) == len(ops)
    gradients = {item.linear: item.op.inputs["x"].data[0, 0] for item in labelled if item.role == "grad_output"}
    assert gradients == {name: 200 + i for i, name in enumerate(TINY.linears)}


def test_distance_counts_representable_values():
    x = np.array([1.0, -1.0, 0.0, np.nan], np.float32)
    y = np.array([np.nextafter(np.float32(1), 2, dtype=np.float32), -1.0, -0.0, np.nan], np.float32)
    found = difference(Bits.of(x), Bits.of(y))
    assert (found.elements, found.differing, found.max_ulp, found.first) == (4, 2, 1, 0)
    tiny = np.float32(1e-45)
    assert difference(Bits.of(np.array([tiny])), Bits.of(np.array([-tiny]))).max_ulp == 2
    e8m0 = [Bits("float8_e8m0fnu", np.array([v], np.uint8)) for v in (127, 130)]
    assert difference(*e8m0).max_ulp == 3
    fp8 = [Bits("float8_e4m3fn", np.array([v], np.uint8)) for v in (0x01, 0x81)]
    assert difference(*fp8).max_ulp == 2
    with pytest.raises(ValueError, match="cannot compare"):
        difference(Bits.of(x), Bits.of(x[:2]))
