"""Operations of diptych: each row of the table, with each of its operands, from arrays of NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cases.values import draw
from diptych import core
from diptych.common import RECIPES
from diptych.common.quantizers import (
    RHT,
    RHT_SIGNS,
    ROW_AMAX,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    QuantizerRole,
)
from diptych.lab.replay.op import Bits, Op

M, K, N, G = 64, 32, 48, 4
CURRENT, DELAYED, BLOCKS = Float8CurrentScalingQuantizer(), Float8Quantizer(), MXFP8Quantizer()
ROUNDED = NVFP4Quantizer(stochastic_rounding=True)
BY_ROW = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)
ONE, AMAX = np.array([2.5], np.float32), np.array([3.0], np.float32)
OFFSETS = np.array([0, 16, 16, 48, 64], np.int32)
RNG = np.array([1, 2, 3, 4], np.int32)
NORM = {"gamma": (K,), "beta": (K,), "mu": (M,), "rsigma": (M,)}
SOURCES: dict[tuple[str, str, bool, bool], dict[str, Any]] = {
    ("norm", "layernorm", True, True): NORM,
    ("norm", "layernorm", False, False): {n: NORM[n] for n in ("gamma", "mu", "rsigma")},
    ("norm", "rmsnorm", False, False): {n: NORM[n] for n in ("gamma", "rsigma")},
    ("activation", "silu", True, False): {},
    ("activation", "gelu", False, False): {},
    ("activation_grad", "relu", True, False): {"dy": (M, K // 2)},
    ("activation_grad", "qgelu", False, False): {"dy": (M, K)},
    ("permuted", "", False, False): {"row_id_map": None, "row_source": None},
}


def drawn(name: str, *shape: int, dtype: str = "bfloat16") -> np.ndarray:
    return draw(f"own-calls-{name}-{shape}", "normal", shape, dtype)


def _operands(source: Any) -> dict[str, np.ndarray]:
    order = np.arange(M, dtype=np.int32)[::-1].copy()
    maps = {"row_id_map": order.reshape(M, 1), "row_source": order}
    floats = {n: drawn(n, *s, dtype="float32") for n, s in SOURCES[source].items() if s is not None}
    return floats if source[0] != "permuted" else maps


def _copy(prefix: str, quantizer: Any, columnwise: bool, *shape: int) -> dict[str, Any]:
    """One copy of a tensor, or of a stack of them if `shape` has three extents."""
    each = drawn(f"copy{prefix}", *shape).reshape(-1, *shape[-2:])
    rng = {"rng": RNG} if quantizer.needs_rng else {}
    made = [core.quantize(x, quantizer, **({"scale": ONE} if quantizer.needs_scale else {}), **rng) for x in each]
    side, of = "columnwise" if columnwise else "rowwise", quantizer.format
    found = {}
    for part, dtype in (("data", of.data), ("scale_inv", of.scale)):
        parts = [getattr(q, f"{side}_{part}") for q in made]
        whole = np.stack(parts) if len(shape) == 3 else parts[0]
        whole = whole.reshape(-1) if of.one_scale and part == "scale_inv" else whole
        found[f"{prefix}{part}"] = Bits.of(whole, dtype)
    if of.two_level:
        found[f"{prefix}amax"] = np.concatenate([q.columnwise_amax if columnwise else q.amax for q in made])
    return found


def _op(kind: str, options: dict[str, Any], results: str, operands: dict[str, Any]) -> Op:
    inputs = {n: x if isinstance(x, Bits) else Bits.of(x) for n, x in operands.items() if x is not None}
    return Op(kind, inputs, options, dict.fromkeys(results.split(), Bits.of(np.zeros(0, np.uint8))))


def _quantize(quantizer: Any, source: Any = None, column_sum: str = "", **given: Any) -> Op:
    options = {"quantizer": quantizer, "source": source, "column_sum": column_sum}
    given |= {"x": drawn("x", M, K), **({} if source is None else _operands(source))}
    results = [*quantizer.buffer_names(), *["column_sum"] * bool(column_sum)]
    return _op("quantize", options, " ".join(results), given)


def _amax(flags: int, columnwise: bool, source: Any = None) -> Op:
    options = {"flags": flags, "columnwise": columnwise, "source": source}
    given = {"x": drawn("x", M, K), **({} if source is None else _operands(source))}
    return _op("amax", options, "out[0] out[1]" if columnwise else "out", given)


def _product(a: Any, b: Any, sides: tuple[bool, bool], dtype: str, alpha: float, fast: bool, **more: Any) -> Op:
    """The product of [M, K] and [N, K], of [M, K] and [K, N], or of [K, M] and [K, N], by the `sides` of copies."""
    grouped, operands = "align" in more, {n: more.pop(n) for n in ("bias", "acc", "offsets") if n in more}
    shapes = {(False, False): ((M, K), (N, K)), (False, True): ((M, K), (K, N)), (True, True): ((M, K), (M, N))}[sides]
    stack = (G,) if grouped and not sides[0] else ()
    operands |= _copy("a_", a, sides[0], *shapes[0]) | _copy("b_", b, sides[1], *stack, *shapes[1])
    options = {"a": (a.format.name, sides[0]), "b": (b.format.name, sides[1]), "alpha": alpha, "out_dtype": dtype}
    options |= {"fast_accum": fast, **more}
    return _op("grouped_gemm" if grouped else "gemm", options, "d", operands)


def _quantizations() -> Iterator[Op]:
    for recipe in RECIPES.values():
        quantizer = recipe.quantizer(QuantizerRole("linear", "input"))
        if not quantizer.needs_scale:
            yield _quantize(quantizer, **({"rng": RNG} if quantizer.needs_rng else {}))
    yield _quantize(DELAYED, scale=ONE)
    for one_sided in ({"columnwise": False}, {"rowwise": False}):
        yield _quantize(Float8Quantizer(**one_sided), scale=ONE, pending=AMAX)
        yield _quantize(
            NVFP4Quantizer(**one_sided), **{"amax" if "columnwise" in one_sided else "columnwise_amax": AMAX}
        )
    yield _quantize(CURRENT, amax=AMAX)
    yield _quantize(ROUNDED, amax=AMAX, columnwise_amax=AMAX * 2, rng=np.arange(8, dtype=np.int32))
    yield _quantize(BY_ROW, amax=np.abs(drawn("rows", M, dtype="float32")))
    for source in SOURCES:
        yield _quantize(CURRENT, source, "" if source[0] == "permuted" else "bfloat16")
        yield _quantize(DELAYED, source, scale=ONE, pending=AMAX)
        yield _quantize(BLOCKS, source)
        yield _amax(0, source[0] != "norm", source)
    yield _quantize(DELAYED, ("activation_grad", "relu", True, False), "float32", scale=ONE, pending=AMAX)
    for flags in (0, ROW_AMAX, RHT, RHT | RHT_SIGNS):
        yield _amax(flags, bool(flags))
    x = drawn("stack", G, M, K)
    for quantizer, given in (
        (BLOCKS, {}),
        (DELAYED, {"scale": np.full(G, 2.0, np.float32)}),
        (CURRENT, {"amax": np.full(G, 3.0, np.float32)}),
        (ROUNDED, {"amax": np.full(G, 3.0, np.float32), "columnwise_amax": np.full(G, 4.0, np.float32),
                   "rng": np.arange(4 * G, dtype=np.int32).reshape(G, 4)}),
    ):  # fmt: skip
        yield _op("quantize_stack", {"quantizer": quantizer}, " ".join(quantizer.buffer_names()), {"x": x, **given})
    for quantizer in (CURRENT, BLOCKS, NVFP4Quantizer()):
        for columnwise in (False, True):
            options = {"format": quantizer.format.name, "columnwise": columnwise, "dtype": "bfloat16"}
            yield _op("dequantize", options, "out", _copy("", quantizer, columnwise, M, K))


def _others() -> Iterator[Op]:
    bias, acc = drawn("bias", N), drawn("acc", M, N, dtype="float32")
    for q in (CURRENT, BLOCKS, NVFP4Quantizer()):
        for sides in ((False, False), (False, True), (True, True)):
            yield _product(q, q, sides, "bfloat16", 1.0, False, beta=0.0)
    yield _product(CURRENT, CURRENT, (False, False), "bfloat16", 0.5, True, beta=0.0, bias=bias)
    yield _product(CURRENT, CURRENT, (False, False), "float32", -1.5, False, beta=0.25, acc=acc)
    each = {"offsets": OFFSETS, "align": 16, "rotated": False}
    for q in (CURRENT, BLOCKS):
        yield _product(q, q, (False, False), "bfloat16", 1.0, False, bias=drawn("bias", G, N), **each)
        yield _product(q, q, (False, True), "float32", 2.0, False, **each)
        yield _product(q, q, (True, True), "float32", 1.0, False, acc=drawn("acc", G, K, N, dtype="float32"), **each)
    rotated = NVFP4Quantizer(with_rht=True)
    yield _product(rotated, rotated, (True, True), "bfloat16", 1.0, False, **(each | {"rotated": True}))
    dy = drawn("dy", 2, M // 2, N)
    yield _op("bias_grad", {"dtype": "float32"}, "out", {"dy": dy})
    yield _op("grouped_bias_grad", {"dtype": "bfloat16"}, "out", {"dy": drawn("dy", M, N), "offsets": OFFSETS})
    history, scale = np.abs(drawn("history", 3, 4, dtype="float32")), np.full(3, 2.0, np.float32)
    seen = np.abs(drawn("seen", 3, dtype="float32"))
    for most_recent, more in (
        (True, {}),
        (False, {}),
        (False, {"reduced": seen}),
        (False, {"amax": seen, "reduced": seen}),
    ):
        options = {"fp8_max": 448.0, "margin": 1, "most_recent": most_recent}
        yield _op("scale_update", options, "history scale", {"history": history, "scale": scale, **more})
    x, of = drawn("x", 2, M // 2, K), {n: np.abs(drawn(n, *s, dtype="float32")) for n, s in NORM.items()}
    for which, centered, parameters in (
        ("layernorm", True, ("gamma", "beta")), ("layernorm", False, ("gamma",)), ("layernorm", False, ()),
        ("rmsnorm", True, ("gamma",)), ("rmsnorm", False, ()),
    ):  # fmt: skip
        options = {"which": which, "eps": 2.0**-10, "zero_centered_gamma": centered}
        count = 1 + (which == "layernorm") + bool(parameters)
        outs = "out" if count == 1 else " ".join(f"out[{i}]" for i in range(count))
        yield _op("norm", options, outs, {"x": x, **{n: of[n] for n in parameters}})
        if parameters:
            has_beta = "beta" in parameters
            options = {"which": which, "zero_centered_gamma": centered, "has_beta": has_beta}
            given = {"dy": drawn("dy", *x.shape), "x": x, "gamma": of["gamma"], "rsigma": of["rsigma"]}
            given |= {"mu": of["mu"]} if which == "layernorm" else {}
            yield _op("norm_grad", options, "out[0] out[1] out[2]" if has_beta else "out[0] out[1]", given)
    for which, gated, dtype in (("silu", True, "float32"), ("gelu", False, "bfloat16")):
        yield _op("activation", {"which": which, "gated": gated}, "out", {"x": x})
        options = {"which": which, "gated": gated, "dtype": dtype}
        yield _op("activation_grad", options, "out", {"dy": drawn("dy", 2, M // 2, K // (1 + gated)), "x": x})


def _permutations() -> Iterator[Op]:
    experts, slots, rows = 4, 2, 96
    mask = np.zeros((M, experts), bool)
    ids = np.stack([np.arange(M) % experts, (np.arange(M) // 3 + 1) % experts], 1).astype(np.int32)
    np.put_along_axis(mask, ids, True, 1)
    sized = {"experts": experts, "rows": 192, "align": 16}
    outs = "out[0] out[1] out[2] out[3]"
    yield _op("permute_map", {"kind": "mask", **sized}, outs, {"routing": mask})
    yield _op("permute_map", {"kind": "index", **sized}, outs, {"routing": ids})
    sizes, order = np.array([16, 0, 48], np.int32), np.array([2, 0, 1], np.int32)
    yield _op("chunk_map", {"tokens": M}, "out[0] out[1]", {"split_sizes": sizes, "sorted_index": order})
    where = np.full(M * slots, -1, np.int32)
    source = np.full(rows, -1, np.int32)
    taken = np.random.default_rng(3).permutation(M * slots)[: rows - 8].astype(np.int32)
    where[taken], source[: len(taken)] = np.arange(len(taken)), taken
    maps = {"row_id_map": where.reshape(M, slots), "row_source": source}
    yield _op("invert_map", {"rows": rows}, "out[0] out[1]", {"row_id_map": maps["row_id_map"]})
    probs = np.abs(drawn("probs", M, slots, dtype="float32"))
    payload = Bits("float8_e4m3fn", core.quantize(drawn("x", M, K), BLOCKS).rowwise_data)
    planes = {"planes[0]": payload, "planes[1]": drawn("x", M, K), "planes[2]": drawn("scale", M, dtype="float32")}
    options = {"fills": (0, 0x7F7F7F7F, 3, 1), "zero_prob_is_padding": True}
    yield _op("permute", options, outs + " out[4]", {**planes, "planes[3]": ids[:, :1].copy(), **maps, "probs": probs})
    options = {"fills": (0,), "zero_prob_is_padding": False}
    yield _op("permute", options, "out", {"planes[0]": planes["planes[1]"], **maps})
    columns = {"x": Bits.of(payload.data.T.copy(), payload.dtype), "row_source": source}
    yield _op("permute_columns", {"slots": slots}, "out", columns)
    x, dy = drawn("rows", rows, K), drawn("dy", M, K)
    where = {"x": x, "row_id_map": maps["row_id_map"]}
    yield _op("unpermute", {}, "out", where)
    dprobs = drawn("dprobs", rows, dtype="float32")
    yield _op("unpermute", {}, "out[0] out[1]", {**where, "probs": probs, "permuted_dprobs": dprobs})
    yield _op("unpermute_grad", {}, "out", {"dy": dy, **maps, "probs": probs})
    yield _op("unpermute_grad", {}, "out[0] out[1]", {"dy": dy, **maps, "probs": probs, "x": x})


CALLS = [*_quantizations(), *_others(), *_permutations()]
