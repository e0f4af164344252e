"""Calls that must succeed, each of random shape, format, dtype and options, and compared with the oracle.

Each takes the choices and where the operands lie (as the runners of tests/core do), and raises AssertionError naming
the call where bits, or bounds where NUMERICS has bounds, are not met.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from core import fused_runner, grouped_runner, permute_runner, runner
from core.grouped.test_grouped_bias_grad import run as grouped_bias_grad
from core.norm.test_norm import near
from core.permute.test_permute import as_mask, top_k
from core.quantize.test_quantize import one_sided
from core.quantize.test_quantize_stack import same_stack
from core.statistics.test_statistics import rounding

import cases
import oracle
from diptych import core
from diptych.core import _core
from diptych.lab.traces import DTYPES
from fuzz.draw import Draw
from oracle import fused
from oracle import permute as moe_oracle
from oracle.hash import hash_bits
from oracle.statistics import errors, statistics
from quantizers import quantizer

ISAS = runner.isas()
PAIRS = cases.GEMM_PAIRS + cases.MIXED_PAIRS


def quantize_options(d: Draw, fmt: str, dtype: str, rows: int) -> dict[str, Any]:
    """Keyword arguments of `oracle.quantize` that a format takes, its usage included."""
    usage = d.choice(({}, {"columnwise": False}, {"rowwise": False}))
    more: dict[str, Any] = {}
    rule = cases.rule_of(fmt)
    if rule == "divide":
        more["pow2"], more["eps"] = d.choice(cases.OPTIONS)
    if fmt in cases.TENSOR_FORMATS:
        match d.randrange(3):
            case 1:
                more["amax"] = amax(d)
            case 2:
                more = {"scale": amax(d)}
                more |= {"accumulate": amax(d)} if d.maybe(0.5) else {}
    elif rule == "e8m0_ceil" and d.maybe(0.5):
        more["square"] = True
    if rule != "two_level":
        return {**more, **usage}
    if d.maybe(0.25):
        more["square"] = True
    else:
        more |= {"row_amax": True} if d.maybe(0.5) else {}
        more |= {"rng": oracle.rng_words(d.getrandbits(64), d.getrandbits(64))} if d.maybe(0.5) else {}
        more |= {"rht": True, "rht_signs": d.maybe(0.5)} if dtype == "bfloat16" and d.maybe(0.5) else {}
    if d.maybe(0.25):
        count = rows if more.get("row_amax") else 1
        more["amax"] = np.array([amax(d) for _ in range(count)], np.float32)
        more["columnwise_amax"] = more["amax"][:1] if more.get("square") else amax(d)
        if not count:
            more.pop("amax"), more.pop("columnwise_amax")
    for side, name in enumerate(("columnwise", "rowwise")):
        if name in usage:
            return one_sided(more, side)
    return more


def amax(d: Draw) -> np.float32:
    return np.float32(d.choice((0.0, 1.0, 448.0, np.inf, np.nan, 2.0**-140, 3e38, abs(d.gauss(0, 9)))))


def extents(d: Draw, fmt: str) -> tuple[int, int]:
    step = cases.PACKED_BLOCK if fmt in cases.PACKED_FORMATS else 1
    return d.extent(step), d.extent(step)


def quantize(d: Draw, be: Any) -> None:
    fmt, dtype = d.choice(cases.FORMATS), d.dtype()
    m, k = extents(d, fmt)
    options = quantize_options(d, fmt, dtype, m)
    x = d.tensor((m, k), dtype)
    want = oracle.quantize(x, fmt, **options)
    got = runner.quantize(be, x, want, fmt, **options, offset=d.randrange(4))
    runner.same_quantized(got, want, f"quantize {fmt} {dtype}[{m}, {k}] {options}")


def dequantize(d: Draw, be: Any) -> None:
    fmt, dtype, columnwise = d.choice(cases.FORMATS), d.dtype(), d.maybe(0.5)
    x = d.tensor(extents(d, fmt), dtype)
    copy = oracle.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise).copy(columnwise)
    out = d.dtype()
    got = runner.dequantize(be, copy, fmt, out, offset=d.randrange(4))
    want = oracle.dequantize(copy, cases.INPUT_DTYPES[out])
    runner.same_bits(got, want, f"dequantize {fmt} {x.shape} columnwise={columnwise} {out}", nan_free=True)


def gemm(d: Draw, be: Any) -> None:
    pair, epilogue = d.choice(PAIRS), d.choice(cases.GEMM_EPILOGUES)
    sides = d.maybe(0.5), d.maybe(0.5)
    m, n, k = (d.extent(most=130) for _ in range(3))
    if {*pair} & {*cases.PACKED_FORMATS}:  # the kept extent of a rowwise operand alone may be ragged
        k = k // 16 * 16
        m = m // 16 * 16 if sides[0] else m
        n = n // 16 * 16 if sides[1] else n
    alpha, beta, bias_dtype, out_dtype = epilogue
    copies = []
    for fmt, columnwise, outer in zip(pair, sides, (m, n), strict=True):
        x = d.values(
            d.choice(("normal", "outlier", "inf_nan_mix")), (k, outer) if columnwise else (outer, k), "float32"
        )
        rows = {"row_amax": True} if fmt in cases.PACKED_FORMATS and not columnwise and d.maybe(0.5) else {}
        copies.append(oracle.quantize(x, fmt, rowwise=not columnwise, columnwise=columnwise, **rows).copy(columnwise))
    more: dict[str, Any] = {"alpha": alpha, "beta": beta}
    more["bias"] = d.plain((n,), bias_dtype) if bias_dtype else None
    more["c"] = d.plain((m, n), out_dtype) if beta else None
    want = oracle.gemm_cpu(*copies, out_dtype=cases.INPUT_DTYPES[out_dtype], **more)
    given = copies[0], pair[0], copies[1], pair[1], (m, n, k)
    got = runner.gemm(be, *given, out_dtype=out_dtype, offset=d.randrange(4), **more)
    runner.same_bits(got, want, f"gemm {pair} {(m, n, k)} columnwise={sides} {epilogue}", nan_free=True)


def amax_of(d: Draw, be: Any) -> None:
    x = d.tensor((d.extent(), d.extent(16)))
    rows = d.maybe(0.5)
    signs = {"rht": True, "rht_signs": d.maybe(0.5)} if x.dtype.name == "bfloat16" and d.maybe(0.5) else {}
    m16 = len(x) // 16 * 16
    x = x[:m16] if signs else x
    got = runner.amax(be, x, d.randrange(4), columnwise=bool(signs), row_amax=rows, **signs)
    label = f"amax {x.dtype.name}{x.shape} row_amax={rows} {signs}"
    runner.same_bits(got["out"], oracle.amax(x, row_amax=rows).reshape(-1), label)
    if signs:
        runner.same_bits(got["columnwise_out"], np.reshape(oracle.columnwise_amax(x, **signs), -1), label)


def bias_grad(d: Draw, be: Any) -> None:
    dy, dtype = d.tensor((d.extent() * d.choice((1, 1, 5)), d.extent())), d.dtype()
    got = runner.bias_grad(be, dy, dtype, d.randrange(4))
    want = oracle.bias_grad(dy, cases.INPUT_DTYPES[dtype])
    runner.same_bits(got, want, f"bias_grad {dy.dtype.name}{dy.shape} {dtype}", nan_free=True)


def scale_update(d: Draw, be: Any) -> None:
    def some(*shape: int) -> np.ndarray:
        return np.array([amax(d) for _ in range(int(np.prod(shape)))], np.float32).reshape(shape)

    n, length, recent = d.randrange(6), d.randint(1, 9), d.maybe(0.5)
    history, scale = some(n, length), np.exp2(d.numpy.uniform(-20, 20, n)).astype(np.float32)
    known: dict[str, Any] = {"most_recent": recent, "margin": d.randint(-64, 64)}
    known |= {"reduced": some(n)} if d.maybe(0.5) else {}
    known |= {"amax": some(n)} if not recent and d.maybe(0.5) else {}
    want = oracle.scale_update(history, scale, **known)
    got = runner.scale_update(be, history, scale, in_place=d.maybe(0.5), offset=d.randrange(4), **known)
    for g, w in zip(got, want, strict=True):
        runner.same_bits(g, w, f"scale_update {history.tolist()} {scale.tolist()} {known}", nan_free=True)


def norm(d: Draw, be: Any) -> None:
    kind, k = d.choice(("layernorm", "rmsnorm")), max(1, d.extent())
    x, gamma, zero = d.plain((d.extent(), k)), d.plain((k,)), d.maybe(0.5)
    centered, dtype = kind == "layernorm", d.dtype()
    beta = d.plain((k,), gamma.dtype.name) if centered and d.maybe(0.7) else None
    label = f"{kind} {x.dtype.name}{x.shape} gamma={gamma.dtype.name} zero={zero} beta={beta is not None} {dtype}"
    got = fused_runner.norm(be, x, gamma, beta, kind=kind, zero_centered=zero, dtype=dtype, offset=d.randrange(4))
    if not x.size:
        return
    want = fused.norm(x, gamma, beta, 1e-5, centered=centered, zero_centered=zero, dtype=cases.INPUT_DTYPES[dtype])
    for name, array in got.items():
        near(array, want[name], f"{label} {name}")
    dy, mu, rsigma = d.plain(x.shape), got.get("mu"), got["rsigma"]
    grads = fused_runner.norm_grad(be, dy, x, gamma, mu, rsigma, zero_centered=zero, offset=d.randrange(4))
    bounds = fused.norm_grad(dy, x, gamma, mu, rsigma, zero_centered=zero)
    for name, array in grads.items():
        near(array, bounds[name], f"{label} {name}")


def activation(d: Draw, be: Any) -> None:
    kind, gated = d.choice(fused.ACTIVATIONS), d.maybe(0.5)
    x = d.plain((max(1, d.extent()), 2 * max(1, d.extent())))
    dy, out = d.plain((len(x), x.shape[1] // (1 + gated))), d.dtype()
    label, dtype = f"{kind} gated={gated} {x.dtype.name}{x.shape} {out}", cases.INPUT_DTYPES[out]
    got = fused_runner.activation(be, x, kind, gated, out, d.randrange(4))
    near(got, fused.activation(kind, x, gated, dtype), label)
    got = fused_runner.activation_grad(be, dy, x, kind, gated, out, d.randrange(4))
    near(got, fused.activation_grad(kind, dy, x, gated, dtype), f"{label} grad")


def routing(d: Draw) -> tuple[np.ndarray, int]:
    """A routing map as routers make it or as nobody should, and how many experts there are."""
    tokens, experts = d.extent(most=130), max(1, d.extent(most=70))
    k = d.randint(0, min(8, experts))
    match d.randrange(4):
        case 0:
            return as_mask(top_k(d.numpy, tokens, experts, k), experts), experts
        case 1:
            return top_k(d.numpy, tokens, experts, k).astype(d.choice((np.int32, np.int64))), experts
        case 2:
            return (d.numpy.random((tokens, experts)) < 0.6).astype(np.uint8) * np.uint8(d.randint(1, 255)), experts
    wild = np.array([-1, -2, experts, 2**31 - 1, -(2**31), 0, experts - 1], np.int64)
    return d.numpy.choice(wild, (tokens, k)).astype(np.int32), experts


def row_map(d: Draw, be: Any) -> moe_oracle.Map:
    routes, experts = routing(d)
    align = d.choice((1, 16, 32, 128, 5))
    need = moe_oracle.rows_needed(routes, experts, align)
    rows = d.choice((need, need + 9, need * 2 // 3, 0))
    want = moe_oracle.row_map(routes, experts, rows, align)
    got = permute_runner.row_map(be, routes, experts, rows, align, offset=d.randrange(4))
    for name, g, w in zip(want._fields, got, want, strict=True):
        runner.same_bits(g, w, f"permute_map {routes.dtype}{routes.shape} E={experts} rows={rows} align={align} {name}")
    return want


def permute(d: Draw, be: Any) -> None:
    m = row_map(d, be)
    dtype = d.choice(("float32", "bfloat16", "float16", "float64", "uint8"))
    width = d.extent()
    shape = (len(m.row_id_map), width)
    x = d.plain(shape, "float32").astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    label = f"permute {dtype}{shape} to {m.rows} rows of {m.row_id_map.shape}"
    probs = d.plain(m.row_id_map.shape) if d.maybe(0.5) else None
    (got,), moved = permute_runner.permute(be, [(x, 0)], m, probs, offset=d.randrange(4))
    runner.same_bits(got, moe_oracle.permute(x, m), label)
    if moved is not None and probs is not None:
        runner.same_bits(moved, moe_oracle.permute_probs(probs, m), f"{label} probabilities")
    if dtype == "uint8":
        columns = np.ascontiguousarray(x.T)
        runner.same_bits(permute_runner.permute_columns(be, columns, m), moe_oracle.permute_columns(columns, m), label)
        return
    rows = d.plain((m.rows, width), "float32").astype(x.dtype)
    back, _ = permute_runner.unpermute(be, rows, m, probs, offset=d.randrange(4))
    runner.same_bits(back, moe_oracle.unpermute(rows, m, probs), f"un{label}", nan_free=True)
    if probs is not None:
        dx, _ = permute_runner.unpermute_grad(be, x, m, probs, None, offset=d.randrange(4))
        runner.same_bits(dx, moe_oracle.unpermute_dx(x, m, probs), f"un{label} gradient", nan_free=True)


def chunk_map(d: Draw, be: Any) -> None:
    chunks, tokens = d.randrange(9), d.extent()
    sizes = d.numpy.integers(-2, 40, chunks).astype(np.int32)
    order = d.numpy.integers(-1, chunks + 1, chunks).astype(np.int32)
    got, want = permute_runner.chunk_map(be, sizes, order, tokens), moe_oracle.chunk_map(sizes, order, tokens)
    for g, w in zip(got, want, strict=True):
        runner.same_bits(g, w, f"chunk_map {sizes.tolist()} {order.tolist()} {tokens}")


def groups(d: Draw, step: int = 1) -> tuple[int, tuple[int, ...]]:
    """Rows and ascending offsets, some groups empty, some rows in no group."""
    rows = d.extent(step)
    at = sorted(d.randint(0, rows) // step * step for _ in range(d.randint(1, 6)))
    return rows, tuple(at)


def grouped_gemm(d: Draw, be: Any) -> None:
    pair = d.choice(PAIRS)
    packed = bool({*pair} & {*cases.PACKED_FORMATS})
    rows, offsets = groups(d, 16 if packed else 1)
    n, inner = (d.extent(16 if packed else 1, 96) for _ in range(2))
    product = d.choice(grouped_runner.PRODUCTS)
    case = grouped_runner.Case(*pair, product, rows, offsets, n, inner, *d.choice(cases.GEMM_EPILOGUES))
    p = case.make()
    got = grouped_runner.grouped_gemm(be, p, pair, offset=d.randrange(4))
    runner.same_bits(got, p.cpu(), f"grouped_gemm {case}", nan_free=True)


def grouped_sum(d: Draw, be: Any) -> None:
    rows, offsets = groups(d)
    dy, dtype = d.tensor((rows, d.extent())), d.dtype()
    sums = [oracle.bias_grad(dy[a:b], cases.INPUT_DTYPES[dtype]) for a, b in itertools.pairwise(offsets)]
    want = np.stack(sums) if sums else np.zeros((0, dy.shape[1]), cases.INPUT_DTYPES[dtype])
    got = grouped_bias_grad(be, dy, offsets, dtype, d.randrange(4))
    runner.same_bits(got, want, f"grouped_bias_grad {dy.dtype.name}{dy.shape} {offsets} {dtype}", nan_free=True)


def stack(d: Draw, be: Any) -> None:
    fmt, dtype = d.choice(cases.FORMATS), d.dtype()
    shape = extents(d, fmt)
    x = d.tensor((d.randint(1, 4), *shape), dtype)
    options = quantize_options(d, fmt, dtype, shape[0])
    for name in ("amax", "columnwise_amax", "scale", "accumulate", "rng"):
        options.pop(name, None)
    each = [oracle.quantize(t, fmt, **options) for t in x]
    got = grouped_runner.quantize_stack(be, x, each[0], fmt, offset=d.randrange(4), **options)
    same_stack(got, each, f"quantize {fmt} stack {dtype}{x.shape} {options}")


def public(d: Draw, be: Any) -> None:
    """quantize, dequantize, gemm and permute_quantize as `diptych.core` has them; `be` is not asked."""
    fmt, other = d.choice(PAIRS)
    k = d.extent(16 if {fmt, other} & {*cases.PACKED_FORMATS} else 1, 130)
    m, n = d.extent(16), d.extent(16)
    x, w = d.tensor((m, k), "float32"), d.plain((n, k), "float32")
    q, v = core.quantize(x, quantizer(fmt)), core.quantize(w, quantizer(other))
    want, weight = oracle.quantize(x, fmt), oracle.quantize(w, other)
    label = f"core {fmt} {x.shape} by {other} {w.shape}"
    names = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv", "amax", "columnwise_amax")
    made = {name: array for name in names if (array := getattr(q, name)) is not None}
    runner.same_quantized(made, want, f"{label} quantize")
    runner.same_bits(core.dequantize(q), oracle.dequantize(want.copy()), f"{label} dequantize", nan_free=True)
    runner.same_bits(core.gemm(q, v), oracle.gemm_cpu(want.copy(), weight.copy()), f"{label} gemm", nan_free=True)
    routes, experts = routing(d)
    if routes.shape[0] == 0 or fmt in cases.PACKED_FORMATS:
        return
    rows = moe_oracle.rows_needed(routes, experts)
    m2 = moe_oracle.row_map(routes, experts, rows)
    tokens = d.tensor((len(routes), k), "bfloat16")
    moved = core.permute_quantize(tokens, core.RowMap(m2.row_id_map, m2.row_source), quantizer(fmt))
    want = oracle.quantize(moe_oracle.permute(tokens, m2), fmt)
    made = {name: array for name in names if (array := getattr(moved, name)) is not None}
    runner.same_quantized(made, want, f"{label} permute_quantize {tokens.shape} to {rows}")


def transpose(d: Draw, be: Any) -> None:
    shape = (*((d.randrange(4),) if d.maybe(0.3) else ()), d.extent(), d.extent())
    x = d.numpy.integers(0, 256, shape).astype(np.uint8)
    got = runner.transpose(be, x, offsets=(d.randrange(4), d.randrange(4)))
    runner.same_bits(got, np.ascontiguousarray(x.swapaxes(-1, -2)), f"transpose {shape}")


def hashed(d: Draw, be: Any) -> None:
    x = d.numpy.integers(0, 256, d.randrange(3000)).astype(np.uint8)
    runner.same_bits(runner.hash(be, x, offset=d.randrange(4)), hash_bits(x), f"hash of {x.size} bytes")


def measured(d: Draw, be: Any) -> None:
    dtype = d.choice(tuple(_core.number_table()))
    width, n = DTYPES[dtype].nbytes, d.randrange(3000)
    x = d.numpy.integers(0, 256, n * width).astype(np.uint8).view(DTYPES[dtype].bits)
    got = runner.statistics(be, x, dtype, offset=width * d.randrange(3))
    runner.same_bits(got, statistics(x, dtype), f"statistics of {n} {dtype}")
    x, *rounded = rounding(d.randrange(9000), dtype := d.choice(list(cases.INPUT_DTYPES)))
    got = runner.statistics(be, x, dtype, rounded=rounded)
    runner.same_bits(got, errors(x, dtype, *rounded), f"statistics of {x.size} errors of {dtype}")


CALLS: dict[str, Callable[[Draw, Any], None]] = {
    "quantize": quantize,
    "dequantize": dequantize,
    "gemm": gemm,
    "amax": amax_of,
    "bias_grad": bias_grad,
    "scale_update": scale_update,
    "norm": norm,
    "activation": activation,
    "permute": permute,
    "chunk_map": chunk_map,
    "grouped_gemm": grouped_gemm,
    "grouped_bias_grad": grouped_sum,
    "stack": stack,
    "transpose": transpose,
    "hash": hashed,
    "statistics": measured,
}


def settings(d: Draw) -> Any:
    """An instruction set and a thread count."""
    return runner.setting(d.choice(ISAS), d.choice((1, 1, 2, 3, 5)))
