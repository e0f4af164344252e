"""Bad calls raise the right error, with op, format and shapes in its message, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.errors import ArgumentError, DTypeError, ShapeError
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.core import _core

M, K, N = 6, 40, 5
X = cases.draw("bad-x", "normal", (M, K), "float32")
TENSOR, BLOCK, MX, NV = "fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4"
PACKED_X = cases.draw("bad-packed-x", "normal", (16, 48), "float32")


class Good:
    """A correct call whose single arguments a test replaces, with poisoned outputs."""

    def __init__(self, be: Any, fmt: str = BLOCK):
        self.be, self.fmt, self.out = be, fmt, runner.Outputs(be)
        self.row = runner.ROWS[fmt]
        self.x = PACKED_X if fmt in cases.PACKED_FORMATS else X

    def buffer(self, shape, dtype):
        return self.out.new(str(len(self.out.held)), shape, dtype)

    def tensor(self, shape, dtype="float32", offset=0):
        return self.be.put(np.ones(shape, runner.NUMPY[dtype]), dtype, offset)

    def quantize(self, **changes):
        q = oracle.quantize(self.x, self.fmt)
        args = {"x": self.be.put(self.x, "float32"), "format": runner.IDS[self.fmt], "flags": 0, "eps": 0.0}
        args |= {"amax_mode": runner.COMPUTE, "scale": None, "rng": None}
        for name in ("amax", "columnwise_amax"):
            args[name] = None if getattr(q, name) is None else self.buffer((1,), "float32")
        for side in ("rowwise", "columnwise"):
            for part, dtype in (("data", runner.payload(self.fmt)), ("scale_inv", self.row["scale"])):
                args[f"{side}_{part}"] = self.buffer(getattr(q, f"{side}_{part}").shape, dtype)
        _core.quantize(**{**args, **changes})

    def operand(self, copy: oracle.Copy) -> dict[str, Any]:
        names = ("data", "scale_inv", "amax", "format", "columnwise")
        return dict(zip(names, runner.copy_operands(self.be, copy, self.fmt), strict=True))

    def dequantize(self, **changes):
        args = self.operand(oracle.quantize(self.x, self.fmt).copy())
        _core.dequantize(**{**args, "out": self.buffer(self.x.shape, "float32"), **changes})

    def gemm(self, **changes):
        (m, k), n = self.x.shape, N
        qs = [oracle.quantize(v, self.fmt, columnwise=False).copy() for v in (self.x, self.x[:n])]
        args: dict[str, Any] = {"d": self.buffer((m, n), "float32"), "c": None, "bias": None}
        for name, q in zip("ab", qs, strict=True):
            args |= {f"{name}_{part}": value for part, value in self.operand(q).items()}
        need = _core.gemm_workspace_bytes(runner.IDS[self.fmt], runner.IDS[self.fmt], m, n, k, True)
        args |= {"workspace": self.out.workspace(need), "alpha": 1.0, "beta": 0.0}
        _core.gemm(**{**args, "fast_accum": False, **changes})

    def amax(self, **changes):
        args = {"x": self.be.put(X, "float32"), "out": self.buffer((1,), "float32"), "columnwise_out": None, "flags": 0}
        _core.amax(**{**args, **changes})

    def bias_grad(self, **changes):
        args = {"dy": self.be.put(X, "float32"), "out": self.buffer((K,), "float32")}
        args["workspace"] = self.out.workspace(_core.bias_grad_workspace_bytes(M, K))
        _core.bias_grad(**{**args, **changes})

    def scale_update(self, **changes):
        args = {"history": self.tensor((M, K)), "scale": self.tensor((M,)), "reduced": None, "amax": None}
        args |= {"new_history": self.buffer((M, K), "float32"), "new_scale": self.buffer((M,), "float32")}
        _core.scale_update(**{**args, "fp8_max": 448.0, "margin": 0, "most_recent": False, **changes})


FP8, E5M2 = "float8_e4m3fn", "fp8_e5m2_1x128"
POW2, SQUARE, ROW_AMAX, RHT, SIGNS, STOCHASTIC = (
    runner.FLAGS[name] for name in ("pow2", "square", "row_amax", "rht", "rht_signs", "stochastic")
)


def bf16(g: Good) -> Any:
    return g.tensor(g.x.shape, "bfloat16")


def rng(g: Good, dtype: str = "int32", n: int = 4) -> Any:
    return g.tensor((n,), dtype)


NO_ROWWISE = {"rowwise_data": None, "rowwise_scale_inv": None}
NO_COLUMNWISE = {"columnwise_data": None, "columnwise_scale_inv": None}

# op, format, change (of a Good call), error, words that the message must hold
BAD = [
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K), "uint8")}, TypeError, ["bfloat16 or float16", "uint8[6, 40]"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K), FP8)}, TypeError, ["float8_e4m3fn[6, 40]"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor(())}, ValueError, ["at least one dimension"]),
    ("quantize", BLOCK, lambda g: {"x": None}, TypeError, ["x", "missing"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K + 1))}, ValueError, [BLOCK, "[6, 41]", "[6, 40]"]),
    ("quantize", BLOCK, lambda g: {"format": len(runner.IDS)}, ValueError, ["unknown format id", str(len(runner.IDS))]),
    ("quantize", BLOCK, lambda g: {"format": -1}, ValueError, ["unknown format id"]),
    ("quantize", BLOCK, lambda g: {"format": runner.IDS[MX]}, TypeError, [MX, "float8_e8m0fnu"]),
    ("quantize", BLOCK, lambda g: {"format": runner.IDS[E5M2]}, TypeError, [E5M2, "float8_e5m2"]),
    ("quantize", BLOCK, lambda g: {"eps": -1.0}, ValueError, ["eps"]),
    ("quantize", BLOCK, lambda g: {"eps": float("nan")}, ValueError, ["eps"]),
    ("quantize", BLOCK, lambda g: {"eps": float("inf")}, ValueError, ["eps"]),
    ("quantize", MX, lambda g: {"eps": 1.0}, ValueError, [MX, "eps"]),
    ("quantize", MX, lambda g: {"flags": POW2}, ValueError, [MX, "pow2"]),
    ("quantize", BLOCK, lambda g: {"amax": g.buffer((1,), "float32")}, ValueError, ["amax", BLOCK]),
    ("quantize", BLOCK, lambda g: {"amax_mode": runner.GIVEN}, ValueError, ["amax", BLOCK]),
    ("quantize", TENSOR, lambda g: {"amax": None}, TypeError, ["amax"]),
    ("quantize", TENSOR, lambda g: {"amax": g.buffer((2,), "float32")}, ValueError, ["amax", "[2]"]),
    ("quantize", TENSOR, lambda g: {"amax": g.buffer((1,), "bfloat16")}, TypeError, ["amax", "float32", "bfloat16[1]"]),
    ("quantize", BLOCK, lambda g: {"rowwise_data": None, "columnwise_data": None,
                                   "rowwise_scale_inv": None, "columnwise_scale_inv": None}, ValueError, ["copy"]),
    ("quantize", BLOCK, lambda g: {"rowwise_scale_inv": None}, TypeError, ["rowwise scale_inv", BLOCK]),
    ("quantize", BLOCK, lambda g: {"rowwise_data": None}, (TypeError, ValueError), ["rowwise"]),
    ("quantize", BLOCK, lambda g: {"columnwise_data": None}, (TypeError, ValueError), ["columnwise"]),
    ("quantize", BLOCK, lambda g: {"rowwise_data": g.buffer((K, M), FP8)}, ValueError, [BLOCK, "[6, 40]", "[40, 6]"]),
    ("quantize", BLOCK, lambda g: {"columnwise_data": g.buffer((M, K), FP8)}, ValueError, [BLOCK, "[40, 6]"]),
    ("quantize", BLOCK, lambda g: {"rowwise_scale_inv": g.buffer((M, 2), "float32")},
     ValueError, [BLOCK, "[6, 1]", "[6, 2]"]),
    ("quantize", MX, lambda g: {"columnwise_scale_inv": g.buffer((M, 2), "float8_e8m0fnu")},
     ValueError, [MX, "[1, 40]"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K), offset=0) if g.be.name == "cuda" else misaligned(g)},
     ValueError, ["aligned"]),
    ("dequantize", BLOCK, lambda g: {"format": 77}, ValueError, ["unknown format id 77"]),
    ("dequantize", BLOCK, lambda g: {"data": g.tensor((M, K), "float8_e5m2")}, TypeError, [BLOCK, "float8_e4m3fn"]),
    ("dequantize", BLOCK, lambda g: {"scale_inv": g.tensor((M, 2))}, ValueError, [BLOCK, "[6, 1]", "[6, 2]"]),
    ("dequantize", BLOCK, lambda g: {"columnwise": True}, ValueError, [BLOCK]),
    ("dequantize", BLOCK, lambda g: {"out": g.buffer((K, M), "float32")}, ValueError, ["out", "[6, 40]", "[40, 6]"]),
    ("dequantize", BLOCK, lambda g: {"out": g.buffer((M, K), "uint8")}, TypeError, ["out", "uint8[6, 40]"]),
    ("dequantize", BLOCK, lambda g: {"out": None}, TypeError, ["out", "missing"]),
    ("dequantize", BLOCK, lambda g: {"scale_inv": None}, TypeError, ["scale_inv", BLOCK]),
    ("gemm", BLOCK, lambda g: {"a_format": 99}, ValueError, ["unknown format id 99"]),
    ("gemm", BLOCK, lambda g: {"b_format": -2}, ValueError, ["unknown format id -2"]),
    ("gemm", BLOCK, lambda g: {"b_data": None}, TypeError, ["b data", BLOCK, "missing"]),
    ("gemm", BLOCK, lambda g: {"fast_accum": True}, ValueError, ["fast_accum", "per-tensor", BLOCK]),
    ("gemm", MX, lambda g: {"fast_accum": True}, ValueError, ["fast_accum", MX]),
    ("gemm", BLOCK, lambda g: {"b_data": g.tensor((N, 41), FP8)}, ValueError, [BLOCK, "40", "41", "[5, 41]"]),
    ("gemm", BLOCK, lambda g: {"d": g.buffer((N, M), "float32")}, ValueError, ["d", "[6, 5]", "[5, 6]"]),
    ("gemm", BLOCK, lambda g: {"d": g.buffer((M, N), "uint8")}, TypeError, ["d", "uint8[6, 5]"]),
    ("gemm", BLOCK, lambda g: {"beta": 1.0}, ValueError, ["beta", "c"]),
    ("gemm", BLOCK, lambda g: {"c": g.tensor((M, N), "bfloat16"), "beta": 1.0},
     TypeError, ["c", "float32", "bfloat16[6, 5]"]),
    ("gemm", BLOCK, lambda g: {"c": g.tensor((M, N + 1)), "beta": 1.0}, ValueError, ["c", "[6, 5]", "[6, 6]"]),
    ("gemm", BLOCK, lambda g: {"bias": g.tensor((M,))}, ValueError, ["bias", "5", "[6]"]),
    ("gemm", BLOCK, lambda g: {"bias": g.tensor((N,), "uint8")}, TypeError, ["bias", "uint8[5]"]),
    ("gemm", BLOCK, lambda g: {"alpha": float("nan")}, ValueError, ["alpha"]),
    ("gemm", BLOCK, lambda g: {"beta": float("inf"), "c": g.tensor((M, N))}, ValueError, ["beta"]),
    ("amax", TENSOR, lambda g: {"out": g.buffer((2,), "float32")}, ValueError, ["out", "[2]"]),
    ("amax", TENSOR, lambda g: {"out": g.buffer((1,), "float16")}, TypeError, ["out", "float32", "float16[1]"]),
    ("amax", TENSOR, lambda g: {"x": g.tensor((3,), "uint8")}, TypeError, ["x", "uint8[3]"]),
    ("bias_grad", TENSOR, lambda g: {"out": g.buffer((M,), "float32")}, ValueError, ["out", "40", "[6]"]),
    ("bias_grad", TENSOR, lambda g: {"out": g.buffer((K,), "uint8")}, TypeError, ["out", "uint8[40]"]),
    ("bias_grad", TENSOR, lambda g: {"dy": g.tensor(())}, ValueError, ["dy", "dimension"]),
]  # fmt: skip


# What the new options may not be asked for; as BAD.
BAD_OPTIONS = [
    ("quantize", NV, lambda g: {"flags": POW2}, ValueError, [NV, "pow2"]),
    ("quantize", NV, lambda g: {"eps": 1.0}, ValueError, [NV, "eps"]),
    ("quantize", NV, lambda g: {"flags": 128}, ValueError, [NV, "flags 128"]),
    ("quantize", BLOCK, lambda g: {"flags": -1}, ValueError, [BLOCK, "flags -1"]),
    ("quantize", NV, lambda g: {"flags": SQUARE | ROW_AMAX}, ValueError, [NV, "square", "amax per row"]),
    ("quantize", NV, lambda g: {"flags": SQUARE | RHT, "x": bf16(g)}, ValueError, [NV, "square", "Hadamard"]),
    ("quantize", NV, lambda g: {"flags": SQUARE | STOCHASTIC, "rng": rng(g)}, ValueError, [NV, "square", "stochastic"]),
    ("quantize", NV, lambda g: {"flags": ROW_AMAX, **NO_ROWWISE}, ValueError, [NV, "amax per row", "rowwise copy"]),
    ("quantize", BLOCK, lambda g: {"flags": SQUARE}, ValueError, [BLOCK, "square"]),
    ("quantize", TENSOR, lambda g: {"flags": SQUARE}, ValueError, [TENSOR, "square"]),
    ("quantize", MX, lambda g: {"flags": ROW_AMAX}, ValueError, [MX, "amax per row"]),
    ("quantize", MX, lambda g: {"flags": RHT, "x": bf16(g)}, ValueError, [MX, "Hadamard"]),
    ("quantize", TENSOR, lambda g: {"flags": STOCHASTIC, "rng": rng(g)}, ValueError, [TENSOR, "stochastic"]),
    ("quantize", NV, lambda g: {"flags": RHT}, TypeError, ["Hadamard", "bfloat16", "float32[16, 48]"]),
    ("quantize", NV, lambda g: {"flags": RHT, "x": g.tensor((16, 48), "float16")}, TypeError, ["float16[16, 48]"]),
    ("quantize", NV, lambda g: {"flags": SIGNS}, ValueError, ["signs", "Hadamard"]),
    ("quantize", NV, lambda g: {"flags": RHT, "x": bf16(g), "columnwise_amax": None, **NO_COLUMNWISE},
     ValueError, ["Hadamard", "columnwise"]),
    ("quantize", NV, lambda g: {"flags": STOCHASTIC}, TypeError, ["rng", "missing"]),
    ("quantize", NV, lambda g: {"flags": STOCHASTIC, "rng": rng(g, "float32")}, TypeError, ["rng", "int32"]),
    ("quantize", NV, lambda g: {"flags": STOCHASTIC, "rng": rng(g, n=2)}, ValueError, ["rng", "[2]"]),
    ("quantize", NV, lambda g: {"rng": rng(g)}, ValueError, ["rng", "stochastic"]),
    ("quantize", MX, lambda g: {"rng": rng(g)}, ValueError, ["rng", "stochastic"]),
    ("quantize", BLOCK, lambda g: {"scale": g.tensor((1,))}, ValueError, [BLOCK, "scale"]),
    ("quantize", MX, lambda g: {"scale": g.tensor((1,))}, ValueError, [MX, "scale"]),
    ("quantize", NV, lambda g: {"scale": g.tensor((1,))}, ValueError, [NV, "scale"]),
    ("quantize", TENSOR, lambda g: {"scale": g.tensor((1,)), "amax_mode": runner.GIVEN}, ValueError, ["scale", "amax"]),
    ("quantize", TENSOR, lambda g: {"scale": g.tensor((1,)), "flags": POW2}, ValueError, ["scale", "pow2"]),
    ("quantize", TENSOR, lambda g: {"scale": g.tensor((1,)), "eps": 1.0}, ValueError, ["scale", "eps"]),
    ("quantize", TENSOR, lambda g: {"scale": g.tensor((2,))}, ValueError, ["scale", TENSOR, "[2]"]),
    ("quantize", TENSOR, lambda g: {"scale": g.tensor((1,), "float16")}, TypeError, ["scale", TENSOR, "float16[1]"]),
    ("quantize", TENSOR, lambda g: {"amax_mode": runner.ACCUMULATE}, ValueError, ["amax", "scale"]),
    ("quantize", NV, lambda g: {"amax_mode": runner.ACCUMULATE}, ValueError, ["amax", "scale"]),
    ("quantize", TENSOR, lambda g: {"amax_mode": 3}, ValueError, ["amax_mode", "3"]),
    ("quantize", TENSOR, lambda g: {"amax_mode": -1}, ValueError, ["amax_mode", "-1"]),
    ("quantize", TENSOR, lambda g: {"columnwise_amax": g.buffer((1,), "float32")},
     ValueError, [TENSOR, "columnwise_amax"]),
    ("quantize", MX, lambda g: {"columnwise_amax": g.buffer((1,), "float32")}, ValueError, [MX, "columnwise_amax"]),
    ("quantize", NV, lambda g: {"amax": None}, TypeError, [NV, "amax", "missing"]),
    ("quantize", NV, lambda g: {"columnwise_amax": None}, TypeError, [NV, "columnwise_amax", "missing"]),
    ("quantize", NV, lambda g: {"amax": g.buffer((2,), "float32")}, ValueError, [NV, "amax", "[2]"]),
    ("quantize", NV, lambda g: {"flags": ROW_AMAX}, ValueError, [NV, "amax", "16", "[1]"]),
    ("quantize", NV, lambda g: {"amax": g.buffer((16,), "float32")}, ValueError, [NV, "amax", "[16]"]),
    ("quantize", NV, lambda g: {"columnwise_amax": g.buffer((1,), "bfloat16")}, TypeError, [NV, "bfloat16[1]"]),
    ("quantize", NV, lambda g: NO_ROWWISE, ValueError, [NV, "amax"]),
    ("quantize", NV, lambda g: NO_COLUMNWISE, ValueError, [NV, "columnwise_amax"]),
    ("quantize", NV, lambda g: {"x": g.tensor((16, 40))}, ValueError, [NV, "multiple of 16", "[16, 40]"]),
    ("quantize", NV, lambda g: {"x": g.tensor((8, 48))}, ValueError, [NV, "multiple of 16", "columnwise", "[8, 48]"]),
    ("quantize", NV, lambda g: {"x": g.tensor((8, 48)), "flags": SQUARE, "columnwise_amax": None, **NO_COLUMNWISE},
     ValueError, [NV, "square", "[8, 48]"]),
    ("quantize", NV, lambda g: {"rowwise_data": g.buffer((16, 24), FP8)}, TypeError, [NV, "uint8", FP8]),
    ("quantize", NV, lambda g: {"rowwise_data": g.buffer((16, 48), "uint8")}, ValueError, [NV, "[16, 24]", "[16, 48]"]),
    ("quantize", NV, lambda g: {"columnwise_data": g.buffer((16, 24), "uint8")}, ValueError, [NV, "[48, 8]"]),
    ("quantize", NV, lambda g: {"columnwise_scale_inv": g.buffer((16, 3), FP8)}, ValueError, [NV, "[48, 1]"]),
    ("quantize", NV, lambda g: {"rowwise_scale_inv": g.buffer((16, 3), "float32")}, TypeError, [NV, FP8]),
    ("dequantize", NV, lambda g: {"amax": None}, TypeError, [NV, "amax", "missing"]),
    ("dequantize", NV, lambda g: {"amax": g.tensor((3,))}, ValueError, [NV, "amax", "[3]"]),
    ("dequantize", NV, lambda g: {"amax": g.tensor((1,), "float16")}, TypeError, [NV, "amax", "float16[1]"]),
    ("dequantize", NV, lambda g: {"amax": g.tensor((48,)), "columnwise": True, "scale_inv": g.tensor((16, 3), FP8),
                                  "out": g.buffer((48, 16), "float32")}, ValueError, [NV, "amax", "[48]"]),
    ("dequantize", BLOCK, lambda g: {"amax": g.tensor((1,))}, ValueError, [BLOCK, "amax"]),
    ("dequantize", NV, lambda g: {"out": g.buffer((16, 24), "float32")}, ValueError, [NV, "[16, 48]", "[16, 24]"]),
    ("dequantize", NV, lambda g: {"data": g.tensor((16, 20), "uint8")}, ValueError, [NV, "multiple of 16", "[16, 40]"]),
    ("gemm", NV, lambda g: {"a_amax": None}, TypeError, ["a amax", NV, "missing"]),
    ("gemm", NV, lambda g: {"b_amax": g.tensor((16,))}, ValueError, ["b amax", NV, "[16]"]),
    ("gemm", BLOCK, lambda g: {"b_amax": g.tensor((1,))}, ValueError, ["b amax", BLOCK]),
    ("gemm", NV, lambda g: {"fast_accum": True}, ValueError, ["fast_accum", NV]),
    ("gemm", NV, lambda g: {"b_data": g.tensor((N, 16), "uint8"), "b_scale_inv": g.tensor((N, 2), FP8)},
     ValueError, [NV, "48", "32"]),
    ("amax", TENSOR, lambda g: {"flags": POW2}, ValueError, ["flags 1"]),
    ("amax", TENSOR, lambda g: {"flags": SIGNS}, ValueError, ["signs", "Hadamard"]),
    ("amax", TENSOR, lambda g: {"flags": ROW_AMAX}, ValueError, ["out", "6", "[1]"]),
    ("amax", TENSOR, lambda g: {"flags": ROW_AMAX, "x": g.tensor(())}, ValueError, ["dimension"]),
    ("amax", TENSOR, lambda g: {"flags": RHT, "columnwise_out": g.buffer((1,), "float32")},
     TypeError, ["Hadamard", "bfloat16", "float32[6, 40]"]),
    ("amax", TENSOR, lambda g: {"flags": RHT, "x": g.tensor((6, 40), "bfloat16"),
                                "columnwise_out": g.buffer((1,), "float32")}, ValueError, ["16", "[6, 40]"]),
    ("amax", TENSOR, lambda g: {"flags": RHT, "x": g.tensor((16, 40), "bfloat16")}, TypeError, ["columnwise_out"]),
    ("amax", TENSOR, lambda g: {"columnwise_out": g.buffer((2,), "float32")}, ValueError, ["columnwise_out", "[2]"]),
    ("amax", TENSOR, lambda g: {"columnwise_out": g.buffer((1,), "float16")}, TypeError, ["columnwise_out", "float32"]),
    ("scale_update", TENSOR, lambda g: {"history": None}, TypeError, ["history", "missing"]),
    ("scale_update", TENSOR, lambda g: {"history": g.tensor((M, K), "bfloat16")}, TypeError, ["history", "bfloat16"]),
    ("scale_update", TENSOR, lambda g: {"history": g.tensor(())}, ValueError, ["history", "dimension"]),
    ("scale_update", TENSOR, lambda g: {"history": g.tensor((M, 0))}, ValueError, ["history", "[6, 0]"]),
    ("scale_update", TENSOR, lambda g: {"scale": g.tensor((5,))}, ValueError, ["scale", "6", "[5]"]),
    ("scale_update", TENSOR, lambda g: {"pending": g.buffer((M,), "float32")}, ValueError, ["pending", "in place"]),
    ("scale_update", TENSOR, lambda g: {"taken": g.buffer((M,), "float32")}, ValueError, ["log and taken", "together"]),
    ("scale_update", TENSOR, lambda g: {"scale_out": g.buffer((2,), "float32")}, ValueError, ["scale_out", "[2]"]),
    ("scale_update", TENSOR, lambda g: {"reduced": g.tensor((K,))}, ValueError, ["reduced", "6", "[40]"]),
    ("scale_update", TENSOR, lambda g: {"amax": g.tensor((1,))}, ValueError, ["amax", "6", "[1]"]),
    ("scale_update", TENSOR, lambda g: {"amax": g.tensor((6,), "float16")}, TypeError, ["amax", "float16[6]"]),
    ("scale_update", TENSOR, lambda g: {"amax": g.tensor((M,)), "most_recent": True},
     ValueError, ["amax", "most_recent"]),
    ("scale_update", TENSOR, lambda g: {"new_history": g.buffer((K, M), "float32")},
     ValueError, ["new_history", "[6, 40]", "[40, 6]"]),
    ("scale_update", TENSOR, lambda g: {"new_scale": g.buffer((1,), "float32")}, ValueError, ["new_scale", "[1]"]),
    ("scale_update", TENSOR, lambda g: {"new_scale": None}, TypeError, ["new_scale", "missing"]),
    *(("scale_update", TENSOR, lambda g, v=v: {"fp8_max": v}, ValueError, ["fp8_max"])
      for v in (0.0, -1.0, float("nan"), float("inf"))),
    *(("scale_update", TENSOR, lambda g, v=v: {"margin": v}, ValueError, ["margin", str(v)]) for v in (127, -127)),
]  # fmt: skip


def misaligned(g: Good) -> Any:
    """Float32 memory that begins one byte off."""
    raw = np.ones(M * K * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 4 + 1
    return (raw[start : start + M * K * 4].view(np.float32).reshape(M, K), runner.CODES["float32"])


EVERY = [pytest.param(*b, id=f"{b[0]}-{b[1]}-{i}") for i, b in enumerate(BAD + BAD_OPTIONS)]


@pytest.mark.parametrize("op, fmt, change, error, words", EVERY)
def test_error_names_the_matter_and_writes_nothing(device, op, fmt, change, error, words):
    good = Good(runner.backend(device), fmt)
    changed = change(good)
    if device == "cuda" and "aligned" in words:
        pytest.skip("torch makes no tensor that is off its element's alignment")
    with pytest.raises(error) as caught:
        getattr(good, op)(**changed)
    message = str(caught.value)
    for word in [op, *words]:
        assert word in message, f"{word!r} is not in: {message}"
    assert good.out.untouched(), f"{op} wrote before it refused: {message}"


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_the_same_calls_unchanged_are_good(device, fmt):
    good = Good(runner.backend(device), fmt)
    for op in ("quantize", "dequantize", "gemm", "amax", "bias_grad", "scale_update"):
        getattr(good, op)()


@pytest.mark.cuda
def test_mixed_devices_are_refused(cuda):
    good, host = Good(runner.Torch()), runner.Torch("cpu")
    mixed = [
        ("quantize", {"x": host.put(X, "float32")}),
        ("quantize", {"rowwise_scale_inv": host.put(np.ones((M, 1), np.float32), "float32")}),
        ("dequantize", {"out": host.put(np.ones((M, K), np.float32), "float32")}),
        ("gemm", {"bias": host.put(np.ones(N, np.float32), "float32")}),
        ("gemm", {"workspace": host.poisoned(1 << 20, 0)}),
        ("bias_grad", {"out": runner.Numpy().put(np.ones(K, np.float32), "float32")}),
        ("amax", {"x": runner.Numpy().put(X, "float32")}),
        ("amax", {"columnwise_out": host.put(np.ones(1, np.float32), "float32")}),
        ("scale_update", {"scale": host.put(np.ones(M, np.float32), "float32")}),
        ("scale_update", {"reduced": host.put(np.ones(M, np.float32), "float32")}),
    ]
    packed, one = Good(runner.Torch(), NV), host.put(np.ones(1, np.float32), "float32")
    for op, changes in (
        ("quantize", {"columnwise_amax": one}),
        ("quantize", {"flags": STOCHASTIC, "rng": host.put(np.ones(4, np.int32), "int32")}),
        ("dequantize", {"amax": one}),
        ("gemm", {"b_amax": one}),
    ):
        with pytest.raises(ValueError, match=f"{op}: .* is on cpu"):
            getattr(packed, op)(**changes)
    assert packed.out.untouched()
    for op, changes in mixed:
        with pytest.raises(ValueError, match=f"{op}: .* is on (cpu|cuda)"):
            getattr(good, op)(**changes)
    for op in ("gemm", "bias_grad"):
        plain = op == "bias_grad"
        ident = runner.IDS[good.fmt]
        sized = _core.bias_grad_workspace_bytes, _core.gemm_workspace_bytes
        need = sized[0](M, K) if plain else sized[1](ident, ident, M, N, K, False)
        if need:
            with pytest.raises((ValueError, TypeError), match=f"{op}: workspace"):
                getattr(good, op)(workspace=good.be.poisoned(need - 1, 0))
            with pytest.raises((ValueError, TypeError), match=f"{op}: workspace"):
                getattr(good, op)(workspace=None)
    assert good.out.untouched()


def test_numpy_face_errors():
    qx, mx = core.quantize(X, Float8BlockQuantizer()), MXFP8Quantizer()
    rowwise = core.quantize(X, Float8BlockQuantizer(columnwise=False))
    tensor = core.quantize(X, Float8CurrentScalingQuantizer())
    wide = core.quantize(np.ones((N, K + 1), np.float32), Float8BlockQuantizer())
    nv, one = NVFP4Quantizer(), np.ones(1, np.float32)
    rotated, noisy = NVFP4Quantizer(with_rht=True), NVFP4Quantizer(stochastic_rounding=True)
    bad = [
        (DTypeError, "quantize.*float32, bfloat16.*float64", lambda: core.quantize(X.astype(np.float64), mx)),
        (ArgumentError, "quantize.*NumPy array.*list", lambda: core.quantize([1.0], mx)),
        (ShapeError, "scalar", lambda: core.quantize(np.array(1.0, np.float32), mx)),
        (ValueError, f"amax.*{MX}", lambda: core.quantize(X, mx, amax=one)),
        (ShapeError, rf"{NV}.*rows.*\[6, 48\].*16", lambda: core.quantize(PACKED_X[:6], nv)),
        (ShapeError, rf"{NV}.*\[16, 40\].*16", lambda: core.quantize(np.ones((16, 40), np.float32), nv)),
        (ValueError, "columnwise_amax", lambda: core.quantize(PACKED_X, nv, amax=one)),
        (ShapeError, r"amax \(nvfp4\) must be \[1\], got float32\[16\]", lambda: core.quantize(
            PACKED_X, nv, amax=np.ones(16, np.float32), columnwise_amax=one)),
        (ArgumentError, "amax must be a NumPy array", lambda: core.quantize(PACKED_X, nv, amax=[1.0], rng=one)),
        (ValueError, f"{NV}.*scale", lambda: core.quantize(PACKED_X, nv, scale=one)),
        (TypeError, "Hadamard.*bfloat16.*float32", lambda: core.quantize(PACKED_X, rotated)),
        (TypeError, "rng", lambda: core.quantize(PACKED_X, noisy)),
        (DTypeError, "rng.*int32", lambda: core.quantize(PACKED_X, noisy, rng=np.zeros(4, np.int64))),
        (ValueError, r"rng.*\[3\]", lambda: core.quantize(PACKED_X, noisy, rng=np.zeros(3, np.int32))),
        (ValueError, "rng", lambda: core.quantize(PACKED_X, nv, rng=np.zeros(4, np.int32))),
        (TypeError, "scale", lambda: core.quantize(X, Float8Quantizer())),
        (ValueError, "scale", lambda: core.quantize(X, Float8BlockQuantizer(), scale=one)),
        (ValueError, "scale.*amax", lambda: core.quantize(X, Float8Quantizer(), scale=one, amax=one)),
        (ArgumentError, "scale", lambda: core.quantize(X, Float8Quantizer(), scale=1.0)),
        (ArgumentError, "scale_update.*history", lambda: core.scale_update([[1.0]], one)),
        (ValueError, "scale_update.*scale", lambda: core.scale_update(X, one)),
        (ValueError, "scale_update.*most_recent", lambda: core.scale_update(X[:1], one, amax=one, most_recent=True)),
        (TypeError, "amax.*bfloat16", lambda: core.amax(PACKED_X, rht=True)),
        (ValueError, "amax.*signs", lambda: core.amax(PACKED_X, random_signs=True)),
        (DTypeError, "dequantize.*int32", lambda: core.dequantize(qx, np.int32)),
        (ValueError, "columnwise copy", lambda: core.gemm(qx, rowwise, trans_b=False)),
        (ValueError, "columnwise copy", lambda: core.gemm(rowwise, qx, trans_a=True)),
        (ShapeError, f"gemm.*{BLOCK}.*40.*41", lambda: core.gemm(qx, wide)),
        (ValueError, "fast_accum", lambda: core.gemm(qx, qx, fast_accum=True)),
        (ShapeError, r"gemm: c must be float32\[6, 6\]", lambda: core.gemm(qx, qx, c=X[:, :5], beta=1.0)),
        (ValueError, "beta", lambda: core.gemm(qx, qx, beta=1.0)),
        (ValueError, "gemm: bias", lambda: core.gemm(qx, qx, bias=np.ones(5, np.float32))),
        (DTypeError, "gemm.*float64", lambda: core.gemm(tensor, tensor, out_dtype=np.float64)),
        (DTypeError, "amax", lambda: core.amax(np.ones(3, np.int8))),
        (DTypeError, "bias_grad", lambda: core.bias_grad(np.ones((3, 4), np.complex64))),
        (ValueError, "bias_grad", lambda: core.bias_grad(np.array(1.0, np.float32))),
    ]  # fmt: skip
    for error, match, call in bad:
        with pytest.raises(error, match=match):
            call()


def test_formats_of_different_families():
    """Two families in one product: either computed right, or refused by name; never something else."""
    for a in (TENSOR, BLOCK, MX, NV):
        for b in (TENSOR, BLOCK, MX, NV):
            qa, qb = (oracle.quantize(v, f, columnwise=False).copy() for v, f in ((PACKED_X, a), (PACKED_X[:N], b)))
            try:
                got = runner.gemm(runner.Numpy(), qa, a, qb, b, (16, N, 48))
            except NotImplementedError as e:
                assert a in str(e) and b in str(e)
            else:
                runner.same_bits(got, oracle.gemm_cpu(qa, qb), f"{a} {b}")
