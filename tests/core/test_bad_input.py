"""Bad calls: the right error with op, format and shapes in it, before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.errors import DTypeError, ShapeError
from diptych.common.quantizers import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer
from diptych.core import _core

M, K, N = 6, 40, 5
X = cases.draw("bad-x", "normal", (M, K), "float32")
TENSOR, BLOCK, MX = "fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e4m3"


class Good:
    """A correct call whose single arguments a test replaces, with poisoned outputs."""

    def __init__(self, be: Any, fmt: str = BLOCK):
        self.be, self.fmt, self.out = be, fmt, runner.Outputs(be)
        self.row = runner.ROWS[fmt]

    def buffer(self, shape, dtype):
        return self.out.new(str(len(self.out.held)), shape, dtype)

    def tensor(self, shape, dtype="float32", offset=0):
        return self.be.put(np.ones(shape, runner.NUMPY[dtype]), dtype, offset)

    def quantize(self, **changes):
        q = oracle.quantize(X, self.fmt)
        args = {"x": self.be.put(X, "float32"), "format": runner.IDS[self.fmt], "pow2": False, "eps": 0.0}
        args |= {
            "amax": self.buffer((1,), "float32") if self.fmt in cases.TENSOR_FORMATS else None,
            "amax_ready": False,
        }
        for side in ("rowwise", "columnwise"):
            for part, dtype in (("data", self.row["element"]), ("scale_inv", self.row["scale"])):
                args[f"{side}_{part}"] = self.buffer(getattr(q, f"{side}_{part}").shape, dtype)
        _core.quantize(**{**args, **changes})

    def dequantize(self, **changes):
        q = oracle.quantize(X, self.fmt).copy()
        args = {
            "data": self.be.put(q.data, self.row["element"]),
            "scale_inv": self.be.put(q.scale_inv, self.row["scale"]),
            "format": runner.IDS[self.fmt],
            "columnwise": False,
            "out": self.buffer((M, K), "float32"),
        }
        _core.dequantize(**{**args, **changes})

    def gemm(self, **changes):
        qa, qb = oracle.quantize(X, self.fmt).copy(), oracle.quantize(X[:N], self.fmt).copy()
        args: dict[str, Any] = {"d": self.buffer((M, N), "float32"), "c": None, "bias": None}
        for name, q in (("a", qa), ("b", qb)):
            args[f"{name}_data"] = self.be.put(q.data, self.row["element"])
            args[f"{name}_scale_inv"] = self.be.put(q.scale_inv, self.row["scale"])
            args[f"{name}_format"] = runner.IDS[self.fmt]
            args[f"{name}_columnwise"] = False
        need = _core.gemm_workspace_bytes(M, N, K, True)
        args |= {"workspace": self.out.workspace(need), "alpha": 1.0, "beta": 0.0}
        _core.gemm(**{**args, "fast_accum": False, **changes})

    def amax(self, **changes):
        _core.amax(**{"x": self.be.put(X, "float32"), "out": self.buffer((1,), "float32"), **changes})

    def bias_grad(self, **changes):
        args = {"dy": self.be.put(X, "float32"), "out": self.buffer((K,), "float32")}
        args["workspace"] = self.out.workspace(_core.bias_grad_workspace_bytes(M, K))
        _core.bias_grad(**{**args, **changes})


FP8, E5M2 = "float8_e4m3fn", "fp8_e5m2_1x128"

# op, format, change (of a Good call), error, words that the message must hold
BAD = [
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K), "uint8")}, TypeError, ["bfloat16 or float16", "uint8[6, 40]"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K), FP8)}, TypeError, ["float8_e4m3fn[6, 40]"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor(())}, ValueError, ["at least one dimension"]),
    ("quantize", BLOCK, lambda g: {"x": None}, TypeError, ["x", "missing"]),
    ("quantize", BLOCK, lambda g: {"x": g.tensor((M, K + 1))}, ValueError, [BLOCK, "[6, 41]", "[6, 40]"]),
    ("quantize", BLOCK, lambda g: {"format": len(runner.IDS)}, ValueError, ["unknown format id", "8"]),
    ("quantize", BLOCK, lambda g: {"format": -1}, ValueError, ["unknown format id"]),
    ("quantize", BLOCK, lambda g: {"format": runner.IDS[MX]}, TypeError, [MX, "float8_e8m0fnu"]),
    ("quantize", BLOCK, lambda g: {"format": runner.IDS[E5M2]}, TypeError, [E5M2, "float8_e5m2"]),
    ("quantize", BLOCK, lambda g: {"eps": -1.0}, ValueError, ["eps"]),
    ("quantize", BLOCK, lambda g: {"eps": float("nan")}, ValueError, ["eps"]),
    ("quantize", BLOCK, lambda g: {"eps": float("inf")}, ValueError, ["eps"]),
    ("quantize", MX, lambda g: {"eps": 1.0}, ValueError, [MX, "eps"]),
    ("quantize", MX, lambda g: {"pow2": True}, ValueError, [MX, "pow2"]),
    ("quantize", BLOCK, lambda g: {"amax": g.buffer((1,), "float32")}, ValueError, ["amax", BLOCK]),
    ("quantize", BLOCK, lambda g: {"amax_ready": True}, (TypeError, ValueError), ["amax"]),
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


def misaligned(g: Good) -> Any:
    """Float32 memory that begins one byte off."""
    raw = np.ones(M * K * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 4 + 1
    return (raw[start : start + M * K * 4].view(np.float32).reshape(M, K), runner.CODES["float32"])


@pytest.mark.parametrize("op, fmt, change, error, words", BAD, ids=[f"{b[0]}-{b[1]}-{i}" for i, b in enumerate(BAD)])
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
    for op in ("quantize", "dequantize", "gemm", "amax", "bias_grad"):
        getattr(good, op)()


def test_overlaps_are_refused():
    """Any output that shares memory with an input or another output."""
    memory = np.full(4 * M * K + 4096, runner.POISON, np.uint8)
    e4m3, f32 = runner.CODES["float8_e4m3fn"], runner.CODES["float32"]

    def at(byte: int, shape: tuple[int, ...], dtype: str) -> Any:
        size = int(np.prod(shape)) * runner.NUMPY[dtype].itemsize
        return runner.Numpy._pair(memory[byte : byte + size], shape, dtype)

    apart = np.ones((M, 1), np.float32)
    x = at(0, (M, K), "float32")
    end = 4 * M * K
    overlapping = [
        ("data over x", x, (at(end - 1, (M, K), "float8_e4m3fn"), (apart, f32), None, None)),
        ("scale over x", x, ((np.ones((M, K), np.uint8), e4m3), at(end - 4, (M, 1), "float32"), None, None)),
        ("scale in data", x, (at(end, (M, K), "float8_e4m3fn"), at(end + 200, (M, 1), "float32"), None, None)),
        ("both copies", x, (at(end, (M, K), "float8_e4m3fn"), (apart, f32), at(end, (K, M), "float8_e4m3fn"),
                            (np.ones((K, 1), np.float32), f32))),
    ]  # fmt: skip
    before = memory.copy()
    for name, source, buffers in overlapping:
        with pytest.raises(ValueError, match=r"quantize: .*overlaps"):
            _core.quantize(source, runner.IDS[BLOCK], False, 0.0, None, False, *buffers)
            pytest.fail(name)
    with pytest.raises(ValueError, match="amax: out overlaps x"):
        _core.amax(at(0, (9,), "float32"), at(32, (1,), "float32"))
    with pytest.raises(ValueError, match="dequantize: out overlaps data"):
        _core.dequantize(
            at(0, (M, K), "float8_e4m3fn"), (apart, f32), runner.IDS[BLOCK], False, at(0, (M, K), "float32")
        )
    q = at(0, (M, K), "float8_e4m3fn")
    args = [q, (apart, f32), runner.IDS[BLOCK], False, q, (apart, f32), runner.IDS[BLOCK], False]
    with pytest.raises(ValueError, match="gemm: d overlaps"):
        _core.gemm(*args, at(0, (M, M), "float32"), None, None, None, 1.0, 0.0, False)
    with pytest.raises(ValueError, match="gemm: d overlaps c"):
        _core.gemm(*args, at(end, (M, M), "float32"), at(end + 4, (M, M), "float32"), None, None, 1.0, 1.0, False)
    with pytest.raises(ValueError, match="bias_grad: out overlaps dy"):
        _core.bias_grad(at(0, (4, 8), "float32"), at(16, (8,), "float32"), None)
    assert (memory == before).all()


def test_neighbours_do_not_overlap():
    """Outputs that touch their inputs end to end are fine."""
    memory = np.zeros(4 * 64 + 64 + 4, np.uint8)
    x = runner.Numpy._pair(memory[:256], (1, 64), "float32")
    data = runner.Numpy._pair(memory[256:320], (1, 64), "float8_e4m3fn")
    scale = runner.Numpy._pair(memory[320:], (1, 1), "float32")
    _core.quantize(x, runner.IDS[BLOCK], False, 0.0, None, False, data, scale, None, None)
    assert scale[0].tolist() == [[1.0]]


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
    ]
    for op, changes in mixed:
        with pytest.raises(ValueError, match=f"{op}: .* is on (cpu|cuda)"):
            getattr(good, op)(**changes)
    for op in ("gemm", "bias_grad"):
        plain = op == "bias_grad"
        need = _core.bias_grad_workspace_bytes(M, K) if plain else _core.gemm_workspace_bytes(M, N, K, False)
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
    bad = [
        (DTypeError, "quantize.*float32, bfloat16.*float64", lambda: core.quantize(X.astype(np.float64), mx)),
        (DTypeError, "quantize.*NumPy array.*list", lambda: core.quantize([1.0], mx)),
        (ShapeError, "scalar", lambda: core.quantize(np.array(1.0, np.float32), mx)),
        (ValueError, f"amax.*per-tensor.*{MX}", lambda: core.quantize(X, mx, amax=np.ones(1, np.float32))),
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
    for a in (TENSOR, BLOCK, MX):
        for b in (TENSOR, BLOCK, MX):
            qa, qb = oracle.quantize(X, a).copy(), oracle.quantize(X[:N], b).copy()
            try:
                got = runner.gemm(runner.Numpy(), qa, a, qb, b, (M, N, K))
            except NotImplementedError as e:
                assert a in str(e) and b in str(e)
            else:
                runner.same_bits(got, oracle.gemm_cpu(qa, qb), f"{a} {b}")
