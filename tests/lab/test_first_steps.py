import collections
import dataclasses
import types

import numpy as np
import pytest
from lab_tools import TINY, job, same_bits
from sweeps import others_slow

from diptych.common import RECIPES
from diptych.lab import first_steps
from diptych.lab.compare import calls_per_linear
from diptych.lab.frontend import require
from diptych.lab.job import initial_weights
from diptych.lab.replay.op import Bits, Op
from diptych.lab.replay.recorded import Recorded, operations
from diptych.lab.replay.table import TABLE
from diptych.lab.traces import Trace, TraceError

RECIPE = pytest.mark.parametrize("recipe", others_slow(RECIPES, ("fp8-delayed",)))
PAIR = [require(name, "cpu") for name in ("torch", "jax")]


def batches(count):
    gen = np.random.default_rng(3)
    return [gen.integers(0, 256, (4, 17)).astype(np.int32) for _ in range(count)]


def trainers(recipe):
    return tuple(f.trainer(job(recipe), initial_weights(TINY, 0)) for f in PAIR)


class Steps(dict):
    """The first step of both frameworks by each recipe, made when it is asked for."""

    def __init__(self, folder):
        self.folder = folder

    def __missing__(self, recipe):
        self[recipe] = []
        for trainer, frontend in zip(trainers(recipe), PAIR, strict=True):
            where = self.folder / recipe / frontend.name
            with trainer.captured(where) as step:
                step(batches(1)[0])
            self[recipe].append(Trace.open(where).ranks[0].step(0))
        return self[recipe]


@pytest.fixture(scope="module")
def steps(tmp_path_factory, compiled_once):
    return Steps(tmp_path_factory.mktemp("steps"))


def own_operations(observations):
    return [found for found in operations(observations) if TABLE[found.op.kind].own]


@RECIPE
def test_every_linear_has_all_its_operations_in_both_frameworks(steps, recipe):
    for step in steps[recipe]:
        own = own_operations(step)
        labelled = first_steps.labelled(own, TINY)
        kinds = collections.Counter(found.op.kind for found in own)
        assert kinds == {k: len(TINY.linears) * n for k, n in calls_per_linear(RECIPES[recipe])[0].items() if n}
        assert len(labelled) == len(own) - kinds["scale_update"] == 7 * len(TINY.linears)
        assert {(i.linear, i.role) for i in labelled} == {(n, r) for n in TINY.linears for r in first_steps.ROLES}
        assert first_steps.missing_products(labelled, TINY) == []


@RECIPE
def test_a_tensor_has_the_role_of_what_was_quantized(steps, recipe):
    """Inputs are the activations, and weights the parameters, by value."""
    for step in steps[recipe]:
        by_key = {o.site.key: o for o in step}
        for item in first_steps.labelled(own_operations(step), TINY):
            of = {"weight": f"parameter:{item.linear}.weight"}.get(item.role)
            if item.role == "input" and item.linear.endswith("qkv"):
                of = f"activation:{item.linear.replace('qkv', 'norm1')}"
            if of is not None:
                given, want = item.recorded.op.inputs["x"], by_key[of].values.tensor
                x = given.data.astype(np.uint32) << 16 if given.dtype == "bfloat16" else given.data
                want = want.bits.reshape(-1).view(np.float32)
                np.testing.assert_allclose(x.reshape(-1).view(np.float32), want, rtol=2**-8, atol=1e-30)


@RECIPE
def test_both_record_the_same_activations_and_gradients(steps, recipe):
    a, b = ({o.site.key: o for o in step} for step in steps[recipe])
    names = [name for name, _ in first_steps.activation_order(TINY)]
    for name in names:
        x, y = (o[f"activation:{name}"].values.tensor.bits.view(np.float32) for o in (a, b))
        np.testing.assert_allclose(x, y, rtol=0.05, atol=0.02)
    for step in (a, b):
        assert {o.site.name for o in step.values() if o.site.kind == "parameter_grad"} >= set(TINY.shapes())


@RECIPE
def test_every_operation_of_diptych_replays_to_the_same_bits_both_ways(steps, recipe):
    for step, other in zip(steps[recipe], PAIR[::-1], strict=True):
        for op in (found.op for found in own_operations(step)):
            again = other.replay(op, "cpu")
            assert set(again) == set(op.outputs)
            for name, bits in op.outputs.items():
                assert same_bits(bits, again[name]), (op.kind, name)


def test_a_changed_scale_is_seen_by_the_replay(steps):
    op = next(found.op for found in operations(steps["fp8-delayed"][0]) if found.op.kind == "gemm")
    wrong = dict(op.inputs)
    wrong["b_scale_inv"] = Bits("float32", op.inputs["b_scale_inv"].data + np.uint32(1 << 23))  # twice the scale
    again = PAIR[1].replay(dataclasses.replace(op, inputs=wrong), "cpu")
    assert not same_bits(op.outputs["d"], again["d"])


def test_operations_of_the_framework_alone_are_close(steps):
    kinds = collections.Counter()
    for op in (found.op for found in operations(steps["fp8-delayed"][0])):
        if not TABLE[op.kind].own:
            kinds[op.kind] += 1
            for frontend in PAIR:
                again = frontend.replay(op, "cpu")["out"].floats
                np.testing.assert_allclose(again, op.outputs["out"].floats, rtol=1e-4, atol=1e-5, err_msg=op.kind)
    per_block = {"layer_norm": 2, "matmul": 2, "softmax": 1, "gelu": 1, "add": 2}
    want = collections.Counter({kind: TINY.layers * n for kind, n in per_block.items()})
    assert kinds == want + collections.Counter(["embedding", "add", "layer_norm", "linear", "cross_entropy"])


def recorded(linear, op):
    """An operation whose payloads' hashes are their bytes."""

    def observed(named):
        return {
            name: types.SimpleNamespace(
                site=types.SimpleNamespace(name=f"{linear}/{op.kind}.{name}"),
                record=types.SimpleNamespace(hash=bits.data.tobytes().hex()),
            )
            for name, bits in named.items()
        }

    return Recorded(op, observed(op.inputs), observed(op.outputs))


def test_equal_payloads_are_told_apart_by_order():
    """An input, a weight and a gradient that are all zeros have the same bytes."""
    zeros = Bits("float8_e4m3fn", np.zeros((4, 4), np.uint8))

    def quantize(source):
        x = Bits("float32", np.full((4, 4), source, np.uint32))
        return Op("quantize", {"x": x}, {}, {"rowwise_data": zeros, "columnwise_data": zeros})

    def gemm(*sides):
        options = {name: ("", side) for name, side in zip("ab", sides, strict=True)}
        return Op("gemm", {"a_data": zeros, "b_data": zeros}, options, {"d": zeros})

    order = [quantize(1), quantize(2), gemm(False, False), quantize(3), gemm(False, True), gemm(True, True)]
    labelled = first_steps.labelled([recorded(name, op) for name in TINY.linears for op in order], TINY)
    roles = ["input", "weight", "fprop", "grad_output", "dgrad", "wgrad"]
    assert [(i.linear, i.role) for i in labelled] == [(name, role) for name in TINY.linears for role in roles]
    sources = {
        (i.linear, i.role): i.recorded.op.inputs["x"].data[0, 0] for i in labelled if "x" in i.recorded.op.inputs
    }
    assert all(sources[name, role] == n for name in TINY.linears for n, role in ((1, "input"), (3, "grad_output")))


def test_a_layer_without_a_product_is_missing(steps):
    """An operation of no linear layer, and one that nothing multiplies, have no role."""
    ops = [found for found in operations(steps["fp8-delayed"][1]) if found.op.kind != "gemm"]
    labelled = first_steps.labelled(ops, TINY)
    assert {i.role for i in labelled} == {"bias_grad"}
    missing = first_steps.missing_products(labelled, TINY)
    assert missing == [f"{name} {what}" for name in TINY.linears for what in ("fprop", "dgrad", "wgrad")]


@pytest.mark.parametrize("keep", [pytest.param(True, marks=pytest.mark.slow), False])
def test_values_stay_on_disk_only_where_they_are_to_be_kept(tmp_path, compiled_once, keep):
    def run():
        return first_steps.first_steps(tuple(PAIR), trainers("mxfp8"), batches(2), TINY, "cpu", tmp_path, keep)

    found = run()
    assert [row["step"] for row in found.data["trace"]] == [0, 1] and found.missing == []
    assert found.replayed and not any(d.differing for d in found.replayed)
    for name in ("torch", "jax"):
        files = sorted(path.name for path in (tmp_path / name / "rank0").iterdir())
        values = ["step-00000.safetensors", "step-00001.safetensors"]
        assert files == [*values * keep, "steps.jsonl"]
        assert Trace.open(tmp_path / name).steps == [0, 1]
    with pytest.raises(TraceError, match="a trace needs a new folder"):
        run()


def test_a_loss_and_its_neighbour_are_one_ulp_apart():
    x = np.float32(2.75)
    assert first_steps.loss_distance(x, x).differing == 0
    assert first_steps.loss_distance(x, np.nextafter(x, np.float32(3))).max_ulp == 1
    assert first_steps.loss_distance(x, float("nan")).differing == 1
