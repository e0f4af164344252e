"""Calls `diptych.core._core` on the CPU (NumPy memory) or on a GPU (torch tensors) and hands NumPy arrays back.

Outputs are slices of a poisoned buffer with guard bytes on both sides: a write outside, or a byte that was not
written, shows. Shapes and dtypes come from the oracle's result, so that the shape rules are not trusted here.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import platform
import sys
from typing import Any

import numpy as np

import cases
import oracle
from diptych.core import _core

GUARD = 256  # bytes; a multiple of every alignment that a kernel may hope for
POISON = 0xA5
IDS = {row["name"]: i for i, row in enumerate(_core.format_table())}
ROWS = {row["name"]: row for row in _core.format_table()}
CODES, FLAGS = _core.dtype_table(), _core.flag_table()
COMPUTE, GIVEN, ACCUMULATE = range(3)  # amax_mode
NUMPY = {
    **cases.INPUT_DTYPES,
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "float8_e8m0fnu": np.dtype(np.uint8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "float64": np.dtype(np.float64),
}


def payload(fmt: str) -> str:
    """The dtype that a format's data has."""
    return "uint8" if ROWS[fmt]["element"] == "float4_e2m1fn" else ROWS[fmt]["element"]


def isas() -> list[str]:
    """The instruction sets that this machine can run, and leaves the best one chosen."""
    best, found = _core.build_info()["isa"], []
    for name in ("avx512", "avx2", "generic"):
        with contextlib.suppress(ValueError):  # "this machine has no ..."
            _core.set_isa(name)
            found.append(name)
    _core.set_isa(best)
    return found


@contextlib.contextmanager
def setting(isa: str | None = None, threads: int | None = None):
    """Sets the instruction set or thread count until the block ends."""
    before = _core.build_info()["isa"], _core.get_num_threads()
    try:
        if isa:
            _core.set_isa(isa)
        if threads:
            _core.set_num_threads(threads)
        yield
    finally:
        _core.set_isa(before[0])
        _core.set_num_threads(before[1])


@contextlib.contextmanager
def flushed():
    """FTZ and DAZ on in this thread, as XLA:CPU has them when it calls a handler. Nothing else may compute inside."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        raise NotImplementedError("sets FTZ through glibc's x86-64 fenv_t")
    libm = ctypes.CDLL("libm.so.6")
    saved, changed = (ctypes.create_string_buffer(32) for _ in range(2))
    assert libm.fegetenv(saved) == 0
    ctypes.memmove(changed, saved, 32)
    ctypes.c_uint32.from_buffer(changed, 28).value |= 0x8040
    try:
        libm.fesetenv(changed)
        yield
    finally:
        libm.fesetenv(saved)


class Numpy:
    """Operands as the binding takes NumPy memory."""

    name = "cpu"

    def put(self, array: np.ndarray, dtype: str, offset: int = 0) -> Any:
        """An operand with these values, `offset` elements off the allocation's alignment."""
        raw = np.full(array.nbytes + 64 + offset * array.itemsize, POISON, np.uint8)
        start = -raw.ctypes.data % 64 + offset * array.itemsize
        raw = raw[start : start + array.nbytes]
        raw[:] = np.frombuffer(array.tobytes(), np.uint8)
        return self._pair(raw, array.shape, dtype)

    @staticmethod
    def _pair(raw: np.ndarray, shape: tuple[int, ...], dtype: str) -> Any:
        own = ("float32", "float16", "int32")  # dtypes that NumPy has itself
        bits = np.dtype(dtype) if dtype in own else np.dtype(f"u{NUMPY[dtype].itemsize}")
        return (raw.view(bits).reshape(shape), CODES[dtype])

    def poisoned(self, nbytes: int, poison: int) -> Any:
        return np.full(nbytes, poison, np.uint8)

    def fill(self, raw: Any, array: np.ndarray) -> None:
        raw[:] = np.frombuffer(array.tobytes(), np.uint8)

    def part(self, raw: Any, start: int, nbytes: int, shape: tuple[int, ...], dtype: str) -> Any:
        return self._pair(raw[start : start + nbytes], shape, dtype)

    def fetch(self, raw: Any) -> np.ndarray:
        return raw


class Torch:
    """Operands as torch tensors on a device; the current stream is the binding's business."""

    name = "cuda"

    def __init__(self, device: str = "cuda"):
        import torch

        self.torch, self.device = torch, device

    def _tensor(self, raw: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return raw.view(getattr(self.torch, dtype)).reshape(shape)

    def put(self, array: np.ndarray, dtype: str, offset: int = 0) -> Any:
        start = GUARD + offset * array.itemsize
        raw = self.torch.full((array.nbytes + start,), POISON, dtype=self.torch.uint8, device=self.device)
        raw[start:] = self.torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()).to(self.device)
        return self._tensor(raw[start:], array.shape, dtype)

    def poisoned(self, nbytes: int, poison: int) -> Any:
        return self.torch.full((nbytes,), poison, dtype=self.torch.uint8, device=self.device)

    def fill(self, raw: Any, array: np.ndarray) -> None:
        raw.copy_(self.torch.from_numpy(np.frombuffer(array.tobytes(), np.uint8).copy()))

    def part(self, raw: Any, start: int, nbytes: int, shape: tuple[int, ...], dtype: str) -> Any:
        return self._tensor(raw[start : start + nbytes], shape, dtype)

    def fetch(self, raw: Any) -> np.ndarray:
        return raw.cpu().numpy()


def backend(device: str) -> Any:
    return Numpy() if device == "cpu" else Torch()


class Outputs:
    """Poisoned outputs of one call; `read` checks the guards and returns NumPy arrays by name."""

    def __init__(self, be: Any, poison: int = POISON, offset: int = 0):
        self.be, self.poison, self.offset = be, poison, offset
        self.held: dict[str, tuple[Any, int, int, tuple[int, ...], str]] = {}

    def new(self, name: str, shape: tuple[int, ...], dtype: str, filled: np.ndarray | None = None) -> Any:
        """An output with poison in it, or with what an op updates in place."""
        nbytes = math.prod(shape) * NUMPY[dtype].itemsize
        start = GUARD + self.offset * NUMPY[dtype].itemsize
        raw = self.be.poisoned(start + nbytes + GUARD, self.poison)
        if filled is not None:
            self.be.fill(raw[start : start + nbytes], filled)
        self.held[name] = (raw, start, nbytes, tuple(shape), dtype)
        return self.be.part(raw, start, nbytes, tuple(shape), dtype)

    def workspace(self, nbytes: int) -> Any:
        """Exactly as many bytes as asked for, with the guards that outputs have; None where none are needed.

        The CPU needs none and is handed a small one: filling and checking what cuBLASLt asks for, 32 MiB, takes longer
        than a test's product.
        """
        if not nbytes:
            return None
        if self.be.name == "cpu":
            nbytes = min(nbytes, 256)
        start = GUARD + 16 * self.offset  # a workspace is 16-byte aligned
        raw = self.be.poisoned(start + nbytes + GUARD, self.poison)
        self.held["workspace"] = (raw, start, nbytes, (nbytes,), "uint8")
        return self.be.part(raw, start, nbytes, (nbytes,), "uint8")

    def read(self) -> dict[str, np.ndarray]:
        out = {}
        for name, (raw, start, nbytes, shape, dtype) in self.held.items():
            host = self.be.fetch(raw)
            outside = np.concatenate([host[:start], host[start + nbytes :]])
            assert (outside == self.poison).all(), f"{name} {shape}: bytes beside the output were written"
            out[name] = host[start : start + nbytes].copy().view(NUMPY[dtype]).reshape(shape)
        return out

    def untouched(self) -> bool:
        return all((self.be.fetch(raw) == self.poison).all() for raw, *_ in self.held.values())


def flags(options: dict[str, Any]) -> int:
    """QuantFlag bits of the oracle's keyword arguments."""
    bits = sum(FLAGS[name] for name in FLAGS if options.get(name))
    return bits | (FLAGS["stochastic"] if options.get("rng") is not None else 0)


def quantize(
    be: Any, x: np.ndarray, like: oracle.Quantized, fmt: str, *, offset=0, poison=POISON, source=None, **options: Any
) -> dict[str, np.ndarray]:
    """`_core.quantize` of `x` into copies shaped as those of `like`; options are those of `oracle.quantize`."""
    row, out = ROWS[fmt], Outputs(be, poison, offset)
    buffers: dict[str, Any] = {}
    for side in ("rowwise", "columnwise"):
        for part, dtype in (("data", payload(fmt)), ("scale_inv", row["scale"])):
            array = getattr(like, f"{side}_{part}")
            name = f"{side}_{part}"
            buffers[name] = None if array is None else out.new(name, array.shape, dtype)
    given = options.get("amax") is not None or options.get("columnwise_amax") is not None
    joined = options.get("accumulate")
    for name in ("amax", "columnwise_amax"):
        array = getattr(like, name)
        if array is None:
            buffers[name] = None
        elif given:
            buffers[name] = be.put(np.asarray(options[name], np.float32).reshape(array.shape), "float32")
        else:
            filled = None if joined is None else np.array([joined], np.float32)
            buffers[name] = out.new(name, array.shape, "float32", filled)
    for name, dtype in (("scale", np.float32), ("rng", np.int32)):
        value = options.get(name)
        buffers[name] = None if value is None else be.put(np.asarray(value, dtype).reshape(-1), np.dtype(dtype).name)
    _core.quantize(
        be.put(x, x.dtype.name, offset),
        format=IDS[fmt],
        flags=flags(options),
        eps=options.get("eps", 0.0),
        amax_mode=GIVEN if given else COMPUTE if joined is None else ACCUMULATE,
        source=source,
        **buffers,
    )
    return out.read()


def copy_operands(be: Any, copy: oracle.Copy, fmt: str, offset: int = 0) -> tuple[Any, Any, Any, int, bool]:
    """(data, scale_inv, amax, format, columnwise) of one copy."""
    amax = None if copy.amax is None else be.put(copy.amax, "float32")
    data, scale = be.put(copy.data, payload(fmt), offset), be.put(copy.scale_inv, ROWS[fmt]["scale"])
    return data, scale, amax, IDS[fmt], copy.columnwise


def dequantize(be: Any, copy: oracle.Copy, fmt: str, dtype: str, *, offset=0, poison=POISON) -> np.ndarray:
    out = Outputs(be, poison, offset)
    _core.dequantize(*copy_operands(be, copy, fmt, offset), out.new("out", copy.shape, dtype))
    return out.read()["out"]


def gemm(
    be: Any, a: oracle.Copy, a_fmt: str, b: oracle.Copy, b_fmt: str, mnk: tuple[int, int, int], *,
    alpha=1.0, beta=0.0, bias=None, c=None, out_dtype="float32", fast_accum=False, offset=0, poison=POISON,
) -> np.ndarray:  # fmt: skip
    out, epilogue = Outputs(be, poison, offset), bias is not None or beta != 0
    _core.gemm(
        *copy_operands(be, a, a_fmt, offset),
        *copy_operands(be, b, b_fmt, offset),
        d=out.new("d", mnk[:2], out_dtype),
        c=None if c is None else be.put(c, c.dtype.name),
        bias=None if bias is None else be.put(bias, bias.dtype.name),
        workspace=out.workspace(_core.gemm_workspace_bytes(IDS[a_fmt], IDS[b_fmt], *mnk, epilogue)),
        alpha=alpha,
        beta=beta,
        fast_accum=fast_accum,
    )
    return out.read()["d"]


def amax(be: Any, x: np.ndarray, offset: int = 0, columnwise: bool = False, **options: bool) -> dict[str, np.ndarray]:
    """`_core.amax`: "out", and "columnwise_out" where asked for; options are `row_amax`, `rht` and `rht_signs`."""
    out, rows = Outputs(be), oracle.fold(x).shape[0] if options.get("row_amax") else 1
    buffers = [out.new("out", (rows,), "float32"), out.new("columnwise_out", (1,), "float32") if columnwise else None]
    _core.amax(be.put(x, x.dtype.name, offset), *buffers, flags(options))
    return out.read()


def transpose(be: Any, x: np.ndarray, dtype: str = "uint8", offsets: tuple[int, int] = (0, 0)) -> np.ndarray:
    """`_core.transpose` of bytes; `offsets`: of input and output from the allocation's alignment."""
    out = Outputs(be, offset=offsets[1])
    made = out.new("out", (*x.shape[:-2], x.shape[-1], x.shape[-2]), dtype)
    _core.transpose(be.put(x, dtype, offsets[0]), made)
    return out.read()["out"]


def hash(be: Any, x: np.ndarray, dtype: str = "uint8", offset: int = 0) -> np.ndarray:
    """`_core.hash` of memory `offset` elements off the allocation's alignment."""
    out = Outputs(be)
    _core.hash(be.put(x, dtype, offset), out.new("out", (4,), "int32"))
    return out.read()["out"]


def statistics(be: Any, x: np.ndarray, dtype: str, offset: int = 0, rounded: Any = None) -> np.ndarray:
    """`_core.statistics` of elements `offset` bytes off the allocation's alignment, float64 [7]; with `rounded`,
    (result, largest, beyond), of their errors, float64 [9]."""
    out, number = Outputs(be), _core.number_table()[dtype]
    made = out.new("out", (18 if rounded else 14,), "int32")
    scratch = out.workspace(_core.statistics_workspace_bytes())
    *to, beyond = rounded or (None, None, 1.0)
    to = [None if t is None else be.put(t, "float32", offset) for t in to]
    _core.statistics(be.put(x.reshape(-1).view(np.uint8), "uint8", offset), *to, made, scratch, number, beyond)
    return out.read()["out"].view(np.float64)


def scale_update(
    be: Any, history: np.ndarray, scale: np.ndarray, *, reduced=None, amax=None, fp8_max=448.0, margin=0,
    most_recent=False, in_place=False, offset=0, poison=POISON,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """`_core.scale_update`; `in_place` hands the inputs over as outputs too."""
    out = Outputs(be, poison, offset)
    new = [out.new(name, value.shape, "float32", value if in_place else None)
           for name, value in (("new_history", history), ("new_scale", scale))]  # fmt: skip
    old = new if in_place else [be.put(value, "float32", offset) for value in (history, scale)]
    more = [None if value is None else be.put(np.asarray(value, np.float32), "float32") for value in (reduced, amax)]
    _core.scale_update(*old, *more, *new, fp8_max, margin, most_recent)
    read = out.read()
    return read["new_history"], read["new_scale"]


def bias_grad(be: Any, dy: np.ndarray, dtype: str, offset: int = 0, poison: int = POISON) -> np.ndarray:
    out, rows = Outputs(be, poison, offset), oracle.fold(dy)
    need = _core.bias_grad_workspace_bytes(*rows.shape)
    _core.bias_grad(be.put(dy, dy.dtype.name, offset), out.new("out", rows.shape[1:], dtype), out.workspace(need))
    return out.read()["out"]


def same_bits(got: np.ndarray, want: np.ndarray, label: Any, nan_free: bool = False) -> None:
    """Asserts equal bits; where `nan_free`, any NaN equals any other (NUMERICS leaves their bits open)."""
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{label}: {got.dtype}{got.shape} {want.dtype}{want.shape}"
    )
    uint = np.dtype(f"u{want.dtype.itemsize}")
    g, w = np.ascontiguousarray(got).reshape(-1).view(uint), np.ascontiguousarray(want).reshape(-1).view(uint)
    wrong = g != w
    if nan_free and wrong.any():
        wrong &= ~(np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))).reshape(-1)
    if wrong.any():
        i = int(np.flatnonzero(wrong)[0])
        at = tuple(int(v) for v in np.unravel_index(i, want.shape)) if want.ndim else ()
        raise AssertionError(f"{label}: {wrong.sum()} of {w.size} differ, first at {at}: {g[i]:#x}, must be {w[i]:#x}")


def same_quantized(got: dict[str, np.ndarray], want: oracle.Quantized, label: Any) -> None:
    for name, array in got.items():
        floats = array.dtype == np.float32  # the scales of a NaN scale
        same_bits(array, np.ascontiguousarray(getattr(want, name)), f"{label} {name}", nan_free=floats)


def want_calls(kernel: str) -> int:
    """How often a registry row has run."""
    return sum(row["calls"] for row in _core.kernel_table() if row["kernel"] == kernel)
