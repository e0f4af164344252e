"""quantize of stacks: each tensor gets the bits that it gets alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.grouped_runner import quantize_stack
from diptych import core
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.core import _core

SHAPES = ((3, 33, 65), (2, 130, 144), (1, 16, 16), (4, 1, 200), (2, 0, 16), (3, 32, 0), (2, 48), (2, 3, 16, 32))


def same_stack(got: dict[str, np.ndarray], each: list[oracle.Quantized], label: Any) -> None:
    for name, array in got.items():
        for g, want in enumerate(each):
            one = np.ascontiguousarray(getattr(want, name))
            runner.same_bits(array[g].reshape(one.shape), one, f"{label} {name} of tensor {g}", nan_free=True)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(device, fmt):
    be = runner.backend(device)
    for turn, shape in enumerate(SHAPES):
        dtype = list(cases.INPUT_DTYPES)[turn % 3]
        for case in cases.quantize_cases([fmt], [dtype], [shape[1:]], ["normal"], every_option=True, variants=True):
            x = cases.draw(f"stack-{case}", "outlier", (shape[0], *case.shape), dtype)
            place = (16, 32, math.prod(case.shape[:-1]) + 64, case.shape[-1] + 32) if turn % 2 else ()
            rngs = [oracle.rng_words(7 + g, 40 * g, *place) for g in range(len(x))]
            noisy = "rng" in case.options
            options = [case.options | ({"rng": words} if noisy else {}) for words in rngs]
            each = [oracle.quantize(t, fmt, **o) for t, o in zip(x, options, strict=True)]
            more = case.options | ({"rng": np.stack(rngs)} if noisy else {})
            got = quantize_stack(be, x, each[0], fmt, offset=turn % 3, **more)
            same_stack(got, each, case)


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", [f for f in cases.FORMATS if oracle.FORMATS[f].rule == "divide"])
def test_one_kernel_takes_a_stack(fmt, cuda):
    """Formats with float32 scales need one kernel for a stack, whichever copies are wanted."""
    x = cases.draw(f"stack-one-kernel-{fmt}", "normal", (5, 200, 272), "bfloat16")
    for usage in ({}, {"columnwise": False}, {"rowwise": False}):
        each = [oracle.quantize(t, fmt, **usage) for t in x]
        kernels = [r["kernel"] for r in core.kernel_table() if r["kernel"].startswith("cuda.quantize")]
        before = {k: runner.want_calls(k) for k in kernels}
        same_stack(quantize_stack(runner.Torch(), x, each[0], fmt, **usage), each, f"{fmt} {usage}")
        after = {k: runner.want_calls(k) for k in kernels}
        assert after == before | {"cuda.quantize_stack": before["cuda.quantize_stack"] + 1}


@pytest.mark.slow
@pytest.mark.cuda
def test_stacks_larger_than_the_cache(cuda):
    """Amaxes are taken of as many tensors as stay in L2, which are encoded before the next ones are read."""
    fmt, x = cases.TENSOR_FORMATS[0], cases.draw("stack-large", "normal", (5, 2048, 3072), "bfloat16")
    each = [oracle.quantize(t, fmt) for t in x]
    same_stack(quantize_stack(runner.Torch(), x, each[0], fmt), each, "large")


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_scales_and_amaxes_of_each(device, fmt):
    """Delayed scaling's: each tensor has a scale of its own and an amax that grows; or an amax that was reduced."""
    be = runner.backend(device)
    x = cases.draw(f"stack-given-{fmt}", "outlier", (4, 33, 65), "bfloat16")
    scale, before = (np.array(v, np.float32) for v in ([1.0, 0.25, 300.0, 7.5], [0.0, 1e9, 0.5, 3.0]))
    for accumulate in (None, before):
        each = [
            oracle.quantize(t, fmt, scale=scale[g], accumulate=None if accumulate is None else accumulate[g])
            for g, t in enumerate(x)
        ]
        same_stack(quantize_stack(be, x, each[0], fmt, scale=scale, accumulate=accumulate), each, f"{fmt} scale")
    each = [oracle.quantize(t, fmt, amax=before[g]) for g, t in enumerate(x)]
    got = quantize_stack(be, x, each[0], fmt, amax=before)
    same_stack(got, each, f"{fmt} amax")


def test_given_amaxes_of_two_levels(device):
    be = runner.backend(device)
    x = cases.draw("stack-levels", "normal", (3, 16, 48), "float32")
    amax, other = np.array([1.0, 9.0, 0.0], np.float32), np.array([2.0, 8.0, 5.0], np.float32)
    each = [oracle.quantize(t, "nvfp4", amax=a, columnwise_amax=c) for t, a, c in zip(x, amax, other, strict=True)]
    same_stack(quantize_stack(be, x, each[0], "nvfp4", amax=amax, columnwise_amax=other), each, "given")


QUANTIZERS = (
    Float8CurrentScalingQuantizer(force_pow_2_scales=True, amax_epsilon=1e-3),
    Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2", columnwise=False),
    Float8BlockQuantizer(block_scaling_dim=2),
    Float8BlockQuantizer(rowwise=False),
    MXFP8Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True),
)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.format.name}-{q.spec.flags}")
def test_numpy_face(quantizer):
    x = cases.draw("stack-face", "normal", (3, 2, 16, 48), "bfloat16")
    stack = core.quantize_stack(x, quantizer)
    assert stack.shape == x.shape and len(stack) == 3 and stack.quantizer is quantizer
    for g in (0, 2, -1):
        want = core.quantize(x[g], quantizer)
        assert stack[g].shape == want.shape
        for name in ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax",
                     "columnwise_amax"):  # fmt: skip
            got, expected = getattr(stack[g], name), getattr(want, name)
            assert (got is None) == (expected is None), name
            if got is not None:
                runner.same_bits(got, expected, f"{name} of tensor {g}")
    with pytest.raises(IndexError, match="stack of 3"):
        stack[3]
    assert core.quantize_stack(x[:0], quantizer).shape == (0, 2, 16, 48)


def test_numpy_face_of_delayed_scaling():
    x = cases.draw("stack-delayed", "normal", (3, 16, 48), "float32")
    scale = np.array([1.0, 2.0, 0.5], np.float32)
    stack = core.quantize_stack(x, Float8Quantizer(), scale=scale)
    for g in range(3):
        want = core.quantize(x[g], Float8Quantizer(), scale=scale[g : g + 1])
        runner.same_bits(stack[g].rowwise_data, want.rowwise_data, f"data {g}")
        runner.same_bits(stack[g].amax, want.amax, f"amax {g}")


def test_numpy_face_refuses():
    x, q = np.ones((2, 16, 32), np.float32), Float8CurrentScalingQuantizer()
    for call, error, words in (
        (lambda: core.quantize_stack(x[0, 0], q), ValueError, "at least two dimensions"),
        (lambda: core.quantize_stack(x.astype(np.int32), q), TypeError, "quantize_stack: x"),
        (lambda: core.quantize_stack(x, Float8Quantizer()), TypeError, "scale="),
        (lambda: core.quantize_stack(x, Float8Quantizer(), scale=np.ones(1, np.float32)), ValueError, "scale .*first"),
        (lambda: core.quantize_stack(x, q, amax=np.ones(1, np.float32)), ValueError, r"amax must be \[2\]"),
        (lambda: core.quantize_stack(x, NVFP4Quantizer(stochastic_rounding=True), rng=np.ones(4, np.int32)),
         ValueError, r"rng .*must be \[4\]"),
        (lambda: core.quantize_stack(x[:, :, :31], NVFP4Quantizer()), ValueError, "multiple of 16"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            call()

    class Own(Float8CurrentScalingQuantizer):
        def quantize_impl(self, x, quantize):
            return quantize(x)

    with pytest.raises(TypeError, match="Own"):
        core.quantize_stack(x, Own())


def arguments(be: Any, fmt: str = "fp8_e4m3_1x128") -> tuple[runner.Outputs, dict[str, Any]]:
    out = runner.Outputs(be)
    x = np.ones((2, 16, 32), np.float32)
    like = oracle.quantize(x[0], fmt)
    args = {"x": be.put(x, "float32"), "format": runner.IDS[fmt], "flags": 0, "eps": 0.0, "amax_mode": 0, "scale": None}
    for name in ("amax", "columnwise_amax"):
        args[name] = None if getattr(like, name) is None else out.new(name, (2,), "float32")
    for side in ("rowwise", "columnwise"):
        for part, dtype in (("data", runner.payload(fmt)), ("scale_inv", runner.ROWS[fmt]["scale"])):
            array, whole = getattr(like, f"{side}_{part}"), part == "scale_inv" and like.fmt.one_scale
            args[f"{side}_{part}"] = out.new(f"{side}_{part}", (2, *(() if whole else array.shape)), dtype)
    return out, {**args, "rng": None, "stack": True}


BAD = [
    ("fp8_e4m3_1x128", {"x": ((32,), "float32")}, ValueError, ["stack of tensors", "[32]"]),
    ("fp8_e4m3_1x128", {"x": None}, TypeError, ["x", "missing"]),
    ("fp8_e4m3_1x128", {"x": ((3, 16, 32), "float32")}, ValueError, ["rowwise data", "3", "[2, 16, 32]"]),
    ("fp8_e4m3_1x128", {"x": ((2, 16, 33), "float32")}, ValueError, ["for each tensor", "[16, 33]"]),
    ("fp8_e4m3_1x128", {"x": ((2, 16, 32), "uint8")}, TypeError, ["for each tensor", "uint8[2, 16, 32]"]),
    ("fp8_e4m3_1x128", {"rowwise_scale_inv": ((1, 16, 1), "float32")}, ValueError, ["rowwise scale_inv", "2"]),
    ("fp8_e4m3_1x128", {"rowwise_scale_inv": ((2, 16, 2), "float32")}, ValueError, ["[16, 1]", "[16, 2]"]),
    ("fp8_e4m3_tensor", {"amax": ((1,), "float32")}, ValueError, ["amax", "2", "[1]"]),
    ("fp8_e4m3_tensor", {"amax": None}, TypeError, ["amax", "missing"]),
    ("fp8_e4m3_tensor", {"scale": ((1,), "float32")}, ValueError, ["scale", "2", "[1]"]),
    ("fp8_e4m3_1x128", {"column_sum": ((32,), "float32")}, ValueError, ["column_sum"]),
    ("fp8_e4m3_1x128", {"source": (1, 1, False, None, None, None, None, None)}, ValueError, ["source"]),
]


@pytest.mark.parametrize("fmt, changes, error, words", BAD)
def test_error_names_the_matter_and_writes_nothing(device, fmt, changes, error, words):
    be = runner.backend(device)
    out, args = arguments(be, fmt)
    made = {
        name: be.put(np.ones(v[0], runner.NUMPY[v[1]]), v[1]) if name != "source" and v is not None else v
        for name, v in changes.items()
    }
    with pytest.raises(error) as caught:
        _core.quantize(**args | made)
    for word in ["quantize_stack", *words]:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    assert out.untouched()
    _core.quantize(**args)


def test_overlaps_between_tensors_are_refused():
    """Also those that no single tensor of the stack would meet."""
    memory = np.full(1 << 14, runner.POISON, np.uint8)
    _, args = arguments(runner.Numpy())
    args["x"] = (memory[:4096].view(np.float32).reshape(2, 16, 32), args["x"][1])
    args["rowwise_data"] = (memory[3072:4096].reshape(2, 16, 32), args["rowwise_data"][1])  # tensor 0's, over x's last
    with pytest.raises(ValueError, match=r"quantize_stack: .*overlaps"):
        _core.quantize(**args)
    assert (memory == runner.POISON).all()
