"""diptych's operations in traces of both frameworks, computed again by both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from lab_tools import same_bits
from own_calls import CALLS
from own_steps import MODULES, RECORD, STEPS, not_described, operations
from sweeps import others_slow

import diptych.jax as dj
from diptych.common import (
    RECIPES,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    MXFP8Quantizer,
)
from diptych.jax import lab as jax_lab
from diptych.lab.frontend import require
from diptych.lab.jax import own_ops as jax_ops
from diptych.lab.replay import table
from diptych.lab.replay.op import ReplayError
from diptych.lab.torch import own_ops as torch_ops
from diptych.lab.traces import Trace
from diptych.torch import lab as torch_lab

PAIR = ("torch", "jax")


def assert_same(op, framework, device="cpu"):
    """Asserts that a framework computes the results of an operation again."""
    again = require(framework, device).replay(op, device)
    assert again.keys() == op.outputs.keys(), (op.kind, framework)
    for name, bits in op.outputs.items():
        assert same_bits(bits, again[name]), (op.kind, name, framework)


# --- steps of layers -------------------------------------------------------------------------------------------------


VARIANTS = {
    "dequantized": ("linear", MXFP8BlockScaling(backward_override="dequantized"), {}),
    "high precision": ("layernorm_mlp", Float8CurrentScaling(backward_override="high_precision"), {}),
    "centered": ("layernorm_linear", Float8BlockScaling(), {"zero_centered_gamma": True}),
    "squared": ("layernorm_mlp", DelayedScaling(amax_history_len=2, margin=1), {"activation": "sreglu"}),
}


def assert_every_operation_has_the_same_bits_again(trace, device="cpu"):
    assert not_described(trace) == set()
    for step in range(STEPS):
        for op in operations(trace, step):
            for framework in PAIR:
                assert_same(op, framework, device)


@pytest.mark.parametrize("recipe", others_slow(RECIPES, ("fp8-delayed", "nvfp4")))
@pytest.mark.parametrize("kind", others_slow(MODULES, ("layernorm_mlp", "grouped_linear")))
@pytest.mark.parametrize("framework", PAIR)
def test_every_operation_of_a_step_has_the_same_bits_again(tmp_path, framework, kind, recipe, device):
    trace = RECORD[framework](tmp_path / "t", kind, RECIPES[recipe], device)
    assert_every_operation_has_the_same_bits_again(trace, device)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("framework", PAIR)
def test_every_operation_of_other_steps_has_the_same_bits_again(tmp_path, framework, variant):
    kind, recipe, options = VARIANTS[variant]
    trace = RECORD[framework](tmp_path / "t", kind, recipe, "cpu", **options)
    assert_every_operation_has_the_same_bits_again(trace)


# --- each row --------------------------------------------------------------------------------------------------------


class Calls(torch.nn.Module):
    def __init__(self, ops):
        super().__init__()
        self.ops = ops

    def forward(self):
        for op in self.ops:
            torch_ops.replayed(op, {n: tensor(bits) for n, bits in op.inputs.items()})
        return torch.zeros(1)


def tensor(bits):
    return torch.tensor(bits.data).view(getattr(torch, bits.dtype))


def torch_calls(folder, ops, **options):
    model = Calls(ops)
    with torch_lab.capture(model, out=folder, values="full", statistics=False, **options) as run, torch.no_grad():
        model()
        run.step()
    return Trace.open(folder)


def jax_calls(folder, ops, **options):
    def every(operands):
        return [jax_ops.replayed(op, x) for op, x in zip(ops, operands, strict=True)]

    given = [{n: jnp.asarray(b.data.view(jnp.dtype(b.dtype))) for n, b in op.inputs.items()} for op in ops]
    with jax_lab.capture(every, out=folder, values="full", statistics=False, check=False, **options) as run:
        run(given)
    return Trace.open(folder)


RECORD_CALLS = {"torch": torch_calls, "jax": jax_calls}


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    return {name: operations(record(folder / name, CALLS), 0) for name, record in RECORD_CALLS.items()}


def test_calls_reach_every_row_and_operand():
    for name, row in table.TABLE.items():
        mine = [op for op in CALLS if op.kind == name]
        if row.own:
            assert {n for op in mine for n in op.inputs} == {*row.operands, *row.optional}, name


@pytest.mark.parametrize("framework", PAIR)
def test_calls_are_described_by_their_own_options_and_operands(calls, framework):
    got = calls[framework]
    assert len(got) == len(CALLS)
    for op, want in zip(got, CALLS, strict=True):
        assert (op.kind, op.options) == (want.kind, want.options)
        assert op.inputs.keys() == want.inputs.keys(), op.kind
        assert all(_same(want.inputs[n], bits) for n, bits in op.inputs.items()), op.kind
        given = {n for n in want.outputs if n in want.inputs and n != "history" and n != "scale"}
        assert op.outputs.keys() | given == want.outputs.keys(), op.kind


def _same(want, got):
    """JAX's activation_grad has a result of x's dtype: for a wider one its x is recorded in the wider dtype."""
    return np.array_equal(want.floats, got.floats) if want.dtype != got.dtype else same_bits(want, got)


def test_calls_have_the_same_bits_in_both_frameworks(calls):
    for one, other in zip(calls["torch"], calls["jax"], strict=True):
        for name in one.outputs.keys() & other.outputs.keys():
            assert same_bits(one.outputs[name], other.outputs[name]), (one.kind, one.options, name)


# --- what cannot be computed again -----------------------------------------------------------------------------------


@pytest.mark.parametrize("framework", PAIR)
def test_operands_and_results_that_are_missing_are_named(framework):
    op = next(op for op in CALLS if op.kind == "gemm" and "bias" in op.inputs)
    run = require(framework, "cpu").replay
    without = dataclasses.replace(op, inputs={n: x for n, x in op.inputs.items() if n != "b_scale_inv"})
    with pytest.raises(ReplayError, match="operand b_scale_inv is missing"):
        run(without, "cpu")
    with pytest.raises(ReplayError, match="gemm has no result 'e' in this framework, but d"):
        run(dataclasses.replace(op, outputs={"e": op.inputs["bias"]}), "cpu")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("gemm", "out_dtype", "load"),
        ("gemm", "a", ("fp4", False)),
        ("gemm", "fast_accum", 1),
        ("dequantize", "format", ""),
        ("dequantize", "dtype", "float8_e4m3fn"),
        ("quantize", "column_sum", "int32"),
        ("quantize", "source", ("norm", "gelu", False, False)),
        ("amax", "source", ("plain", "", False, False)),
        ("norm", "which", "batchnorm"),
        ("activation_grad", "which", "tanh"),
        ("permute_map", "kind", ""),
        ("permute", "fills", (True,)),
    ],
)
def test_options_that_no_operation_has_are_refused(name, option, value):
    options = next(op.options for op in CALLS if op.kind == name)
    assert table.decoded(name, table.encoded(name, options)) == options
    with pytest.raises(ValueError, match=f"{name}: option {option} cannot be"):
        table.encoded(name, options | {option: value})


@pytest.mark.parametrize("framework", PAIR)
def test_results_whose_operands_are_not_recorded_do_not_say_how(tmp_path, framework):
    op = next(op for op in CALLS if op.kind == "gemm")
    trace = RECORD_CALLS[framework](tmp_path / "t", [op], sites="**.gemm.d")
    (site,) = [o.site for o in trace.ranks[0].step(0) if o.site.kind == "result"]
    assert (site.name.rpartition("/")[2], site.operation) == ("gemm.d", None)


def test_calls_under_vmap_do_not_say_how(tmp_path):
    x = jnp.ones((3, 32, 32), jnp.bfloat16)
    with jax_lab.capture(jax.vmap(lambda x: dj.quantize(x, MXFP8Quantizer())), out=tmp_path / "t") as run:
        run(x)
    results = [o.site for o in Trace.open(tmp_path / "t").ranks[0].step(0) if o.site.kind == "result"]
    assert results and all(s.operation is None for s in results)


class Own(MXFP8Quantizer):
    """Compared by identity, so that no file can hold it."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "of", object())

    def _value_fields(self):
        return None


@pytest.mark.parametrize("framework", PAIR)
def test_quantizers_that_no_file_can_hold_do_not_say_how(tmp_path, framework):
    op = next(op for op in CALLS if op.kind == "quantize")
    op = dataclasses.replace(op, options=op.options | {"quantizer": Own()}, outputs={})
    trace = RECORD_CALLS[framework](tmp_path / "t", [op])
    results = [o.site for o in trace.ranks[0].step(0) if o.site.kind == "result" and "quantize" in o.site.name]
    assert results and all(s.operation is None for s in results)
