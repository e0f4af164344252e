"""The binary module: memory layouts, tables, call counts, buffers, threads, and its stub."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.core import _core

ROOT = Path(__file__).resolve().parents[2]
F32 = runner.CODES["float32"]

# Ours on the left, the names of the header that torch ships on the right.
LAYOUT = r"""
#include <cstddef>
#include <cstdio>
#include <ATen/dlpack.h>
#include "bindings/dlpack_abi.h"
using namespace diptych;
#define SAME(ours, theirs) \
  do { if ((ours) != (theirs)) { std::printf("%s is %zu, %s is %zu\n", #ours, size_t(ours), #theirs, size_t(theirs)); bad = 1; } } while (0)
#define FIELD(S, f, T, g) \
  SAME(offsetof(dl::S, f), offsetof(T, g)); SAME(sizeof(dl::S::f), sizeof(T::g))
int main() {
  int bad = 0;
  SAME(sizeof(dl::Version), sizeof(DLPackVersion));
  FIELD(Version, major, DLPackVersion, major);
  FIELD(Version, minor, DLPackVersion, minor);
  SAME(sizeof(dl::Device), sizeof(DLDevice));
  FIELD(Device, type, DLDevice, device_type);
  FIELD(Device, id, DLDevice, device_id);
  SAME(sizeof(dl::DataType), sizeof(DLDataType));
  FIELD(DataType, code, DLDataType, code);
  FIELD(DataType, bits, DLDataType, bits);
  FIELD(DataType, lanes, DLDataType, lanes);
  SAME(sizeof(dl::Tensor), sizeof(DLTensor));
  FIELD(Tensor, data, DLTensor, data);
  FIELD(Tensor, device, DLTensor, device);
  FIELD(Tensor, ndim, DLTensor, ndim);
  FIELD(Tensor, dtype, DLTensor, dtype);
  FIELD(Tensor, shape, DLTensor, shape);
  FIELD(Tensor, strides, DLTensor, strides);
  FIELD(Tensor, byte_offset, DLTensor, byte_offset);
  SAME(sizeof(dl::ExchangeApi), sizeof(DLPackExchangeAPI));
  FIELD(ExchangeApi, version, DLPackExchangeAPI, header.version);
  SAME(offsetof(dl::ExchangeApi, previous), offsetof(DLPackExchangeAPI, header.prev_api));
  SAME(offsetof(dl::ExchangeApi, allocate), offsetof(DLPackExchangeAPI, managed_tensor_allocator));
  SAME(offsetof(dl::ExchangeApi, managed_from_object), offsetof(DLPackExchangeAPI, managed_tensor_from_py_object_no_sync));
  SAME(offsetof(dl::ExchangeApi, managed_to_object), offsetof(DLPackExchangeAPI, managed_tensor_to_py_object_no_sync));
  SAME(offsetof(dl::ExchangeApi, tensor_from_object), offsetof(DLPackExchangeAPI, dltensor_from_py_object_no_sync));
  SAME(offsetof(dl::ExchangeApi, current_work_stream), offsetof(DLPackExchangeAPI, current_work_stream));
  SAME(dl::kMajor, size_t(DLPACK_MAJOR_VERSION));
  SAME(1, int(kDLCPU));
  SAME(2, int(kDLCUDA));
  struct { int ours, theirs; } codes[] = {{0, kDLInt}, {1, kDLUInt}, {2, kDLFloat}, {4, kDLBfloat},
      {10, kDLFloat8_e4m3fn}, {12, kDLFloat8_e5m2}, {14, kDLFloat8_e8m0fnu},
      {17, kDLFloat4_e2m1fn}};
  for (auto c : codes) SAME(c.ours, c.theirs);
  std::printf("sizeof_tensor=%zu sizeof_api=%zu tensor_from_object=%zu current_work_stream=%zu\n", sizeof(DLTensor),
              sizeof(DLPackExchangeAPI), offsetof(DLPackExchangeAPI, dltensor_from_py_object_no_sync),
              offsetof(DLPackExchangeAPI, current_work_stream));
  return bad;
}
"""  # noqa: E501


def test_dlpack_layout_is_torchs(tmp_path):
    torch = pytest.importorskip("torch", reason="torch is not installed: its header is the reference")
    include = Path(torch.__file__).parent / "include"
    if not (include / "ATen/dlpack.h").is_file():
        pytest.skip("this torch ships no ATen/dlpack.h")
    if not (compiler := shutil.which("c++") or shutil.which("g++")):
        pytest.skip("no C++ compiler")
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text(LAYOUT)
    folders = [f"-I{include}", f"-I{ROOT / 'core_cuda'}", f"-I{ROOT / 'core_cuda/include'}"]
    built = subprocess.run(
        [compiler, "-std=c++20", "-Wno-invalid-offsetof", *folders, str(source), "-o", str(program)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert _core.dlpack_layout() == {k: int(v) for k, v in (p.split("=") for p in ran.stdout.split())}


def test_torch_tensors_arrive_whole():
    """Dtypes, offsets and shapes of torch tensors, through the exchange table."""
    torch = pytest.importorskip("torch", reason="torch is not installed: it offers the exchange table")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip(f"torch {torch.__version__} has no __dlpack_c_exchange_api__")
    be = runner.Torch("cpu")
    for fmt in cases.FORMATS:
        for dtype in cases.INPUT_DTYPES:
            x = cases.draw(f"torch-{fmt}-{dtype}", "inf_nan_mix", (2, 24, 96), dtype)
            options = {"rng": oracle.rng_words(1, 2)} if fmt in cases.PACKED_FORMATS else {}
            want = oracle.quantize(x, fmt, **options)
            got = runner.quantize(be, x, want, fmt, offset=3, **options)
            runner.same_quantized(got, want, f"torch {fmt} {dtype}")
            back = runner.dequantize(be, want.copy(True), fmt, dtype, offset=3)
            runner.same_bits(back, np.ascontiguousarray(oracle.dequantize(want.copy(True), back.dtype)), fmt, True)
            y = runner.dequantize(be, want.copy(True), fmt, dtype)
            runner.same_bits(y, np.ascontiguousarray(oracle.dequantize(want.copy(True), y.dtype)), fmt, nan_free=True)


def test_kernel_table():
    rows = core.kernel_table()
    keys = {"op": str, "backend": str, "formats": list, "level": str, "kernel": str, "note": str}
    keys |= {"min_arch": int, "max_arch": int, "conditional": bool}
    names = [row["name"] for row in core.format_table()]
    for row in rows:
        assert set(row) == {*keys, "calls"} and all(isinstance(row[k], t) for k, t in keys.items()), row
        assert row["backend"] in ("cpu", "cuda") and row["level"] in ("native", "emulated"), row
        assert row["kernel"].startswith(row["backend"]) and set(row["formats"]) <= set(names), row
        assert isinstance(row["calls"], int) and row["min_arch"] <= row["max_arch"]
    assert len({row["kernel"] for row in rows}) == len(rows)
    on_cpu: dict[str, list[str]] = {}
    for row in rows:
        if row["backend"] == "cpu":
            on_cpu.setdefault(row["op"], []).extend(row["formats"])
    assert {"amax", "quantize", "dequantize", "gemm", "bias_grad", "scale_update"} <= set(on_cpu)
    for op, formats in on_cpu.items():
        assert sorted(formats) == sorted(names), f"the CPU runs {op} of every format, each in one row"
    assert any(row["backend"] == "cuda" for row in rows) == core.build_info()["cuda"]


def test_calls_are_counted():
    x = cases.draw("counts", "normal", (4, 32), "float32")
    q = oracle.quantize(x, "mxfp8_e4m3")
    be, fmt = runner.Numpy(), "mxfp8_e4m3"
    core.reset_calls()
    assert all(row["calls"] == 0 for row in core.kernel_table())
    runner.quantize(be, x, q, fmt)
    for _ in range(2):
        runner.dequantize(be, q.copy(), fmt, "float32")
    for _ in range(3):
        runner.gemm(be, q.copy(), fmt, q.copy(), fmt, (4, 4, 32))
    with pytest.raises(ValueError):
        runner.gemm(be, q.copy(), fmt, q.copy(True), fmt, (4, 32, 4))
    calls = {row["kernel"]: row["calls"] for row in core.kernel_table() if row["calls"]}
    assert calls == {"cpu.quantize": 1, "cpu.dequantize": 2, "cpu.gemm": 3}, "a refused call is not counted"
    core.reset_calls()
    assert not any(row["calls"] for row in core.kernel_table())


def test_kernels_can_be_switched_off():
    index = (runner.IDS["mxfp8_e4m3"], False, runner.IDS["mxfp8_e4m3"], False, 16, 16, 32, "float32", "cpu", 0)
    assert core.kernel_table()[_core.gemm_row(*index)]["kernel"] == "cpu.gemm"
    _core.switch_kernel("cpu.gemm", False)
    try:
        assert _core.gemm_row(*index) == -1
    finally:
        _core.switch_kernel("cpu.gemm", True)
    assert core.kernel_table()[_core.gemm_row(*index)]["kernel"] == "cpu.gemm"
    with pytest.raises(ValueError, match=r"switch_kernel: no kernel is named cpu\.gem$"):
        _core.switch_kernel("cpu.gem", False)


def test_gemm_row_names_the_row_that_runs():
    rows = core.kernel_table()
    for a, b in cases.GEMM_PAIRS:
        index = _core.gemm_row(runner.IDS[a], False, runner.IDS[b], True, 16, 16, 32, "float32", "cpu", 0)
        assert rows[index]["kernel"] == "cpu.gemm"
    for bad in ((99, False, 0, False, 1, 1, 1, "float32", "cpu", 0), (0, False, 0, False, 1, 1, 1, "int7", "cpu", 0),
                (0, False, 0, False, 1, 1, 1, "float32", "tpu", 0)):  # fmt: skip
        with pytest.raises(ValueError):
            _core.gemm_row(*bad)


def test_buffers_that_do_not_fit_are_refused():
    x, out = np.ones((4, 8), np.float32), np.full(1, 7, np.float32)
    frozen = out.copy()
    frozen.flags.writeable = False
    x.flags.writeable = False
    _core.amax((x, F32), (out.copy(), F32), None, 0)  # inputs may be read-only
    refused = [
        ("read-only output", (x, F32), (frozen, F32), (ValueError, BufferError)),
        ("strided input", (x[:, ::2], F32), (out, F32), ValueError),
        ("transposed input", (x.T, F32), (out, F32), ValueError),
        ("reversed input", (x[::-1], F32), (out, F32), ValueError),
        ("broadcast input", (np.broadcast_to(x[:1], (4, 8)), F32), (out, F32), ValueError),
        ("wrong element size", (x, runner.CODES["bfloat16"]), (out, F32), TypeError),
        ("unknown dtype code", (x, 99), (out, F32), TypeError),
        ("negative dtype code", (x, -1), (out, F32), TypeError),
        ("code that is no number", (x, "float32"), (out, F32), TypeError),
        ("no pair", (x,), (out, F32), TypeError),
        ("three", (x, F32, F32), (out, F32), TypeError),
        ("bare array", x, (out, F32), TypeError),
        ("list", [1.0, 2.0], (out, F32), TypeError),
        ("no buffer", ([1.0], F32), (out, F32), TypeError),
        ("nine dimensions", (np.ones((1,) * 9, np.float32), F32), (out, F32), ValueError),
        ("nothing", None, (out, F32), TypeError),
        ("no output", (x, F32), None, TypeError),
    ]
    for name, a, b, error in refused:
        with pytest.raises(error):
            _core.amax(a, b, None, 0)
            pytest.fail(f"{name} was accepted")
    assert out[0] == 7 and frozen[0] == 7
    sliced = np.ones((4, 8), np.float32)[1:3]  # dense, though part of another
    _core.amax((sliced, F32), (out, F32), None, 0)
    assert out[0] == 1


def test_buffers_are_let_go():
    """After a call, good or refused, nobody holds the arrays."""
    x, out = np.ones((4, 8), np.float32), np.empty(1, np.float32)
    before = sys.getrefcount(x), sys.getrefcount(out)
    for _ in range(10):
        _core.amax((x, F32), (out, F32), None, 0)
        with pytest.raises(TypeError):
            _core.amax((x, F32), (x.view(np.int32), runner.CODES["int32"]), None, 0)
    assert (sys.getrefcount(x), sys.getrefcount(out)) == before
    growing = bytearray(64)
    with pytest.raises(TypeError):
        _core.amax((growing, F32), (out, F32), None, 0)
    growing.extend(b"x")  # raises BufferError while a view is exported


def test_the_gil_is_released():
    a = np.zeros((640, 1024), np.uint8)
    scale = np.ones(1, np.float32)
    d = np.empty((640, 640), np.float32)
    code, stop, ticks = runner.CODES["float8_e4m3fn"], threading.Event(), 0

    def tick():
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    operand = ((a, code), (scale, F32), None, 0, False)

    def product():
        _core.gemm(*operand, *operand, (d, F32), None, None, None, 1, 0, False)

    thread = threading.Thread(target=tick)
    with runner.setting("generic", 1):
        thread.start()
        try:
            longest = 0
            for _ in range(8):
                before, start = ticks, time.perf_counter()
                product()
                longest = max(longest, ticks - before)
                seconds = time.perf_counter() - start
        finally:
            stop.set()
            thread.join()
    # Holding the GIL, the call would let the other thread tick once at most, before it starts.
    assert longest >= 4, f"{longest} ticks of 0.5 ms in calls of {seconds:.3f} s"


def test_thread_count_and_isa_errors():
    before = _core.get_num_threads(), core.build_info()["isa"]
    for n in (0, -1, -(2**31)):
        with pytest.raises(ValueError, match=r"set_num_threads.*at least 1"):
            core.set_num_threads(n)
    for n in (1025, 10**5, 2**31 - 1):
        with pytest.raises(ValueError, match=f"set_num_threads: n must be at least 1 and at most 1024, got {n}"):
            core.set_num_threads(n)
    for n in (2**40, "2", None, 1.5):
        with pytest.raises(TypeError):
            core.set_num_threads(n)
    for name in ("sse9", "", "AVX2"):
        with pytest.raises(ValueError, match=r"set_isa.*avx512, avx2 or generic"):
            _core.set_isa(name)
    assert (_core.get_num_threads(), core.build_info()["isa"]) == before
    with runner.setting(threads=3):
        assert core.get_num_threads() == 3


def test_build_info():
    info = core.build_info()
    assert set(info) == {"cuda", "compiler", "isa", "cuda_toolkit", "cuda_archs"}
    assert info["isa"] in ("avx512", "avx2", "generic") and info["compiler"]
    assert bool(info["cuda_toolkit"]) == bool(info["cuda_archs"]) == info["cuda"]
    probe = core.cuda_info()
    assert set(probe) == {"archs", "cublaslt"} and (info["cuda"] or probe == {"archs": [], "cublaslt": ""})
    if not info["cuda"]:
        with pytest.raises(ValueError, match="no CUDA"):
            _core.set_cublaslt_path("libcublasLt.so.13")


def test_import_loads_no_cuda_library():
    code = "import diptych.core; print(open('/proc/self/maps').read())"
    if not Path("/proc/self/maps").exists():
        pytest.skip("reads /proc/self/maps")
    maps = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "libdiptych" in maps and not re.findall(r"\S*(?:libcuda|libcublas|libnvrtc|libcudart)\S*", maps)


def test_stub_is_of_this_module():
    """`make stub` writes it."""
    made = subprocess.run(
        [sys.executable, ROOT / "core_cuda/bindings/stub.py"], capture_output=True, text=True, check=True
    ).stdout
    committed = (ROOT / "core_cuda/diptych/core/_core.pyi").read_text()
    assert ast.unparse(ast.parse(made)) == ast.unparse(ast.parse(committed))
