"""The CUDA kernels that quantize plain tensors, stacks and many tensors, without hardware: against the oracle and each
other.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import cases
import oracle
from core import runner, simulation
from core.quantize import test_quantize_many as many
from diptych.core import _core

pytestmark = pytest.mark.simulated

KERNELS = tuple(f"cuda/quantize/{name}.cu" for name in ("tiles", "stream", "amax", "quantize", "mxfp8"))
OPERANDS = ("x", "row", "row_scale", "col", "col_scale", "amax", "scale")
UNPACKED = [name for name in cases.FORMATS if name not in cases.PACKED_FORMATS]
VALUES = ("inf_places", "inf_nan_mix", "huge", "subnormal_input", "random_bits")


class Call(ctypes.Structure):
    """The arguments of one call, field for field the struct `Call` of tests/simulated/quantize_stack.cpp."""

    _fields_ = (
        *((name, simulation.Tensor) for name in OPERANDS),
        ("format", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("amax_mode", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


@pytest.fixture(scope="module")
def library():
    return simulation.built("quantize_stack.cpp", KERNELS)


def test_each_tensor_has_the_bytes_that_it_has_alone(library):
    message = ctypes.create_string_buffer(256)
    seed = int(cases.rng_for("simulated-stacks").integers(1 << 30))
    assert library.compare_stacks(seed, 60, message, len(message)) == 0, f"seed {seed}: {message.value.decode()}"


@pytest.mark.parametrize("fmt", UNPACKED)
def test_plain_tensors_have_the_oracles_bytes(library, fmt):
    """Infinities, NaN, and products that overflow under a given scale."""
    be, message = runner.Numpy(), ctypes.create_string_buffer(256)
    drawn = cases.quantize_cases([fmt], shapes=((33, 65), (130, 144)), values=VALUES, variants=True)
    plain = [c for c in drawn if not c.eps and (not c.pow2 or "from_rows" in c.variant)]
    for turn, case in enumerate(plain):
        x, options, out = case.make(), case.options, runner.Outputs(be)
        if fmt in cases.TENSOR_FORMATS and turn % 2:
            options = {"scale": np.float32([3e38, 2.0**-140, 1.5][turn % 3])}
        want = oracle.quantize(x, fmt, **options)
        tensors = {"x": be.put(x, case.dtype)}
        for side, name in (("rowwise", "row"), ("columnwise", "col")):
            data, scale = getattr(want, f"{side}_data"), getattr(want, f"{side}_scale_inv")
            tensors[name] = out.new(f"{side}_data", data.shape, runner.payload(fmt))
            tensors[f"{name}_scale"] = out.new(f"{side}_scale_inv", scale.shape, runner.ROWS[fmt]["scale"])
        if want.amax is not None:
            tensors["amax"] = out.new("amax", want.amax.shape, "float32")
        if "scale" in options:
            tensors["scale"] = be.put(np.array([options["scale"]]), "float32")
        call = Call(format=runner.IDS[fmt], flags=runner.flags(options))
        for name in OPERANDS:
            setattr(call, name, simulation.Tensor.of(tensors.get(name)))
        assert library.quantize(ctypes.byref(call), 0, message, len(message)) > 0, message.value.decode()
        for name, got in out.read().items():
            runner.same_bits(got, getattr(want, name), f"{case} {options} {name}")


def test_amaxes_of_rows_and_of_the_transform(library):
    """A rotated value that overflows when it is rounded does not count, and those beside it do."""
    be = runner.Numpy()
    for values in VALUES:
        x = cases.draw(f"simulated-amax-{values}", values, (48, 72), "bfloat16")
        out = runner.Outputs(be)
        tensors = (be.put(x, "bfloat16"), out.new("rows", (48,), "float32"), out.new("rotated", (1,), "float32"))
        assert library.amax(*(ctypes.byref(simulation.Tensor.of(t)) for t in tensors)) == 0
        got, label = out.read(), f"{values} {cases.report_header()}"
        runner.same_bits(got["rows"], oracle.amax(x, row_amax=True), label)
        runner.same_bits(got["rotated"], oracle.columnwise_amax(x, rht=True, rht_signs=True), label)


@pytest.fixture
def quantize_many(library, monkeypatch):
    """Puts the CUDA kernels in the place of `_core.quantize_many`; returns the numbers of launches of its calls."""
    launches = []

    def simulated(tuples, fmt, flags, eps, mode):
        calls = (Call * len(tuples))(*(Call(format=fmt, flags=flags, amax_mode=mode, eps=eps) for _ in tuples))
        for call, (x, amax, _, scale, _, *copies) in zip(calls, tuples, strict=True):
            for name, operand in zip(OPERANDS, (x, *copies, amax, scale), strict=True):
                setattr(call, name, simulation.Tensor.of(operand))
        message = ctypes.create_string_buffer(256)
        launches.append(library.quantize(calls, len(calls), message, len(message)))
        assert launches[-1] > 0, message.value.decode()

    monkeypatch.setattr(_core, "quantize_many", simulated)
    return launches


@pytest.mark.parametrize("fmt", UNPACKED)
def test_many_tensors(quantize_many, fmt):
    """`quantize_many` of tensors of any shapes and alignments, with every option, has the bits of single calls."""
    many.test_bits("cpu", fmt)
    many.test_options("cpu", fmt)
    if fmt in cases.TENSOR_FORMATS:
        many.test_scales_and_amaxes_of_each("cpu", fmt)
    assert max(quantize_many) <= 3, "the tensors did not run together"


@pytest.mark.parametrize("fmt", UNPACKED)
def test_more_tensors_than_a_table_holds(quantize_many, fmt):
    many.test_more_tensors_than_a_table_holds_and_empty_ones("cpu", fmt)
    together, one_by_one = quantize_many
    assert together <= 6 and one_by_one > 50
