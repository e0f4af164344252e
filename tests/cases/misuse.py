"""Bad calls of verbs that several frontends have: each must raise the same error with the same message.

A call is written once, over a `Library`, the common interface of the core's NumPy verbs, torch and JAX. The expected
message is a regular expression that matches from its beginning; names in braces are keys of `NAMES`. Bad calls of
layers are in `layer_misuse.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from diptych.common.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)


class Library(Protocol):
    """A frontend's verbs, under their names, and a way to make operands."""

    verbs: Any

    def ones(self, *shape: int, dtype: str = "float32") -> Any:
        """An array of ones."""
        ...

    def dtype(self, name: str) -> Any:
        """A dtype by its name."""
        ...

    def offsets(self, *numbers: int) -> Any:
        """An int32 array of these numbers."""
        ...

    def linear(self, x: Any, weight: Any, bias: Any, recipe: Any) -> Any:
        """The panel's linear layer."""
        ...

    def grouped(self, x: Any, weight: Any, bias: Any, offsets: Any, recipe: Any, **options: Any) -> Any:
        """The panel's grouped linear layer."""
        ...


class Misuse(NamedTuple):
    """A call, the error that it must raise, and the beginning of its message."""

    name: str
    call: Callable[[Library], Any]
    error: type[Exception]
    words: str
    panels: bool = False  # a verb that torch and JAX have alone

    def pattern(self) -> re.Pattern[str]:
        words = self.words
        for name, panels in NAMES.items():
            words = words.replace(f"{{{name}}}", panels)
        return re.compile(words)


NAMES = {
    "x": r"\w+\[[\d, ]*\]",
    "linear": "(linear|dense)",
    "grouped": "grouped_(linear|dense)",
    "input": "(input|x)",
    "weight": "(weight|kernel)",
}
"""Patterns for the {placeholders} of messages: an operand's description, and the names of layers and their operands in
either panel."""

TENSOR, BLOCK = Float8CurrentScalingQuantizer(), Float8BlockQuantizer()
MX, NV, DELAYED = MXFP8Quantizer(), NVFP4Quantizer(), Float8Quantizer()
ROTATED, NOISY = NVFP4Quantizer(with_rht=True), NVFP4Quantizer(stochastic_rounding=True)
POW2 = Float8CurrentScalingQuantizer(force_pow_2_scales=True)
PER_ROW = NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False)
ROWWISE = Float8BlockQuantizer(columnwise=False)
WGRAD = {"trans_a": True, "trans_b": False}
OFFSETS = (0, 16, 32)


def _quantize(
    quantizer: Any, *shape: int, dtype: str = "float32", **given: tuple[Any, ...]
) -> Callable[[Library], Any]:
    """A call of quantize; `given`: (shape, dtype) of further operands."""

    def call(lib: Library) -> Any:
        operands = {name: lib.ones(*own, dtype=of) for name, (own, of) in given.items()}
        return lib.verbs.quantize(lib.ones(*(shape or (16, 48)), dtype=dtype), quantizer, **operands)

    return call


def _stack(quantizer: Any, *shape: int, **given: tuple[Any, ...]) -> Callable[[Library], Any]:
    def call(lib: Library) -> Any:
        operands = {name: lib.ones(*own, dtype=of) for name, (own, of) in given.items()}
        return lib.verbs.quantize_stack(lib.ones(*(shape or (2, 16, 48))), quantizer, **operands)

    return call


def _gemm(
    a: Any = BLOCK, b: Any = BLOCK, of_a: tuple[int, ...] = (6, 40), of_b: tuple[int, ...] = (5, 40), **options: Any
) -> Callable[[Library], Any]:
    """A product of two tensors; `bias`: (shape, dtype)."""

    def call(lib: Library) -> Any:
        if "bias" in options:
            shape, dtype = options["bias"]
            options_of = {**options, "bias": lib.ones(*shape, dtype=dtype)}
        else:
            options_of = options
        qa, qb = (lib.verbs.quantize(lib.ones(*s), q) for s, q in ((of_a, a), (of_b, b)))
        return lib.verbs.gemm(qa, qb, **options_of)

    return call


def _grouped(
    a: Any = MX, b: Any = MX, x: tuple[int, ...] = (32, 64), w: tuple[int, ...] = (2, 16, 64), offsets: Any = OFFSETS,
    bias: Any = None, **options: Any,
) -> Callable[[Library], Any]:  # fmt: skip
    def call(lib: Library) -> Any:
        wgrad = options.get("trans_a", False)
        dtype = "bfloat16" if wgrad else "float32"
        qa = lib.verbs.quantize(lib.ones(*x, dtype=dtype), a)
        qb = (lib.verbs.quantize if wgrad else lib.verbs.quantize_stack)(lib.ones(*w, dtype=dtype), b)
        ends = lib.offsets(*offsets) if isinstance(offsets, tuple) else lib.ones(3, dtype=offsets)
        given = {} if bias is None else {"bias": lib.ones(*bias[0], dtype=bias[1])}
        return lib.verbs.grouped_gemm(qa, qb, ends, **given, **options)

    return call


def _update(n: int = 2, length: int = 3, dtype: str = "float32", **options: Any) -> Callable[[Library], Any]:
    """A call of scale_update; operands in `options` are (shape, dtype)."""

    def call(lib: Library) -> Any:
        given = {k: lib.ones(*v[0], dtype=v[1]) if isinstance(v, tuple) else v for k, v in options.items()}
        scale = given.pop("scale", None)
        scale = lib.ones(n) if scale is None else scale
        return lib.verbs.scale_update(lib.ones(n, length, dtype=dtype), scale, **given)

    return call


F32, BF16, ONE = "float32", "bfloat16", ((1,), "float32")
T, E, H, ROWS = 6, 3, 8, 18


def _mask(lib: Library, *shape: int, dtype: str = "bool") -> Any:
    return lib.ones(*(shape or (T, E)), dtype=dtype)


def _map(*shape: int, dtype: str = "bool", **options: Any) -> Callable[[Library], Any]:
    return lambda lib: lib.verbs.moe_map(_mask(lib, *shape, dtype=dtype), **options)


def _permute(*shape: int, dtype: str = "float32", rows: Any = None, **options: Any) -> Callable[[Library], Any]:
    """A call of moe_permute by a mask or, if `rows` is "map", by the map that moe_map makes of a mask."""

    def call(lib: Library) -> Any:
        routing = lib.verbs.moe_map(_mask(lib)) if rows == "map" else _mask(lib)
        return lib.verbs.moe_permute(lib.ones(*(shape or (T, H)), dtype=dtype), routing, **options)

    return call


def _probs(shape: tuple[int, ...] = (T, E), dtype: str = "float32") -> Callable[[Library], Any]:
    return lambda lib: lib.verbs.moe_permute_with_probs(lib.ones(T, H), lib.ones(*shape, dtype=dtype), _mask(lib))


def _pad(counts: Any, **options: Any) -> Callable[[Library], Any]:
    """A call of moe_permute_and_pad_with_probs. `counts`: a list of numbers, or (shape, dtype)."""

    def call(lib: Library) -> Any:
        given = lib.ones(*counts[0], dtype=counts[1]) if isinstance(counts, tuple) else counts
        return lib.verbs.moe_permute_and_pad_with_probs(lib.ones(T, H), lib.ones(T, E), _mask(lib), given, **options)

    return call


def _unpermute(
    *shape: int, dtype: str = "float32", to: Any = ((T, E), "int32"), **options: Any
) -> Callable[[Library], Any]:
    """`to`: (shape, dtype) of row_id_map, or "map" for a real map; operands among `options` are (shape, dtype)."""

    def call(lib: Library) -> Any:
        ids = lib.verbs.moe_map(_mask(lib)) if to == "map" else lib.ones(*to[0], dtype=to[1])
        given = {k: lib.ones(*v[0], dtype=v[1]) if _described(v) else v for k, v in options.items()}
        return lib.verbs.moe_unpermute(lib.ones(*(shape or (ROWS, H)), dtype=dtype), ids, **given)

    return call


def _described(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], str)


def _chunks(sizes: Any, order: Any, probs: Any = None) -> Callable[[Library], Any]:
    """A call that sorts chunks. `sizes`, `order`: a list of numbers, or (shape, dtype)."""

    def call(lib: Library) -> Any:
        given = [lib.ones(*v[0], dtype=v[1]) if _described(v) else v for v in (sizes, order)]
        if probs is None:
            return lib.verbs.moe_sort_chunks_by_index(lib.ones(T, H), *given)
        operand = lib.ones(*probs[0], dtype=probs[1])
        return lib.verbs.moe_sort_chunks_by_index_with_probs(lib.ones(T, H), operand, *given)

    return call


COLUMNS = MXFP8Quantizer(rowwise=False)
MISUSES = [
    # quantize
    Misuse("x of integers", _quantize(MX, dtype="int32"), DTypeError,
           "quantize: x must be float32, bfloat16 or float16, got int32"),
    Misuse("x of bytes", _quantize(MX, dtype="bool"), DTypeError,
           "quantize: x must be float32, bfloat16 or float16, got bool"),
    Misuse("x complex, beside a scale", _quantize(DELAYED, dtype="complex64", scale=ONE), DTypeError,
           "quantize: x must be float32, bfloat16 or float16, got complex64"),
    Misuse("x of integers, and no scale", _quantize(DELAYED, dtype="int16"), DTypeError,
           "quantize: x must be float32, bfloat16 or float16, got int16"),
    Misuse("a scale of small integers", _quantize(DELAYED, scale=((1,), "int16")), DTypeError,
           r"quantize: scale \(fp8_e4m3_tensor\) must be float32, got int16\[1\]"),
    Misuse("a scale of small integers of blocks", _quantize(BLOCK, scale=((1,), "int16")), ValueError,
           r"quantize \(fp8_e4m3_1x128\): a scale is for per-tensor formats"),
    Misuse("x a list", lambda lib: lib.verbs.quantize([1.0], MX), ArgumentError, "quantize: x must be a .* got list"),
    Misuse("a scalar", lambda lib: lib.verbs.quantize(lib.ones(), MX), ShapeError, ".*at least one dimension"),
    Misuse("no quantizer", lambda lib: lib.verbs.quantize(lib.ones(4, 32), "mxfp8"), ArgumentError,
           "quantize: quantizer must be a .*Quantizer, got str"),
    Misuse("an amax of blocks", _quantize(BLOCK, amax=ONE), ValueError,
           "quantize: amax is for per-tensor and two-level formats; fp8_e4m3_1x128 takes one per block"),
    Misuse("an amax's shape", _quantize(TENSOR, amax=((2,), F32)), ShapeError,
           r"quantize: amax \(fp8_e4m3_tensor\) must be \[1\], got {x}"),
    Misuse("an amax's dtype", _quantize(TENSOR, amax=((1,), "float16")), DTypeError,
           r"quantize: amax \(fp8_e4m3_tensor\) must be float32, got float16\[1\]"),
    Misuse("an amax of one copy alone", _quantize(NV, amax=ONE), ValueError,
           r"quantize: columnwise_amax \(nvfp4\) is missing"),
    Misuse("an amax that is not read", _quantize(TENSOR, columnwise_amax=ONE), ValueError,
           r"quantize: columnwise_amax \(fp8_e4m3_tensor\) is not read: .* reads amax"),
    Misuse("an amax for rows", _quantize(PER_ROW, amax=ONE), ShapeError,
           r"quantize: amax \(nvfp4\) must be \[16\], got float32\[1\]"),
    Misuse("whole blocks in a row", _quantize(NV, 16, 40), ShapeError,
           r"quantize \(nvfp4\): the last extent of a \[16, 40\] tensor must be a multiple of 16"),
    Misuse("whole blocks in a column", _quantize(NV, 8, 48), ShapeError,
           r"quantize \(nvfp4\): the number of rows of a \[8, 48\] tensor must be a multiple of 16"),
    Misuse("no scale", _quantize(DELAYED), ArgumentError,
           "quantize: Float8Quantizer takes its scale from the caller; pass scale="),
    Misuse("a scale of blocks", _quantize(BLOCK, scale=ONE), ValueError,
           r"quantize \(fp8_e4m3_1x128\): a scale is for per-tensor formats"),
    Misuse("a scale beside options", _quantize(POW2, scale=ONE), ValueError,
           r"quantize \(fp8_e4m3_tensor\): scale was given; pow2 and eps do not apply"),
    Misuse("a scale and an amax", _quantize(DELAYED, scale=ONE, amax=ONE), ValueError,
           r"quantize \(fp8_e4m3_tensor\): scale and amax were both given; the scale alone decides"),
    Misuse("a scale's shape", _quantize(DELAYED, scale=((2,), F32)), ShapeError,
           r"quantize: scale \(fp8_e4m3_tensor\) must be \[1\], got {x}"),
    Misuse("a scale's dtype", _quantize(DELAYED, scale=((1,), "float16")), DTypeError,
           r"quantize: scale \(fp8_e4m3_tensor\) must be float32, got {x}"),
    Misuse("no rng", _quantize(NOISY), ArgumentError, "quantize: NVFP4Quantizer rounds stochastically; pass rng="),
    Misuse("an rng that is not read", _quantize(NV, rng=((4,), "int32")), ValueError,
           r"quantize \(nvfp4\): rng is for stochastic rounding, which was not asked for"),
    Misuse("an rng's shape", _quantize(NOISY, rng=((2,), "int32")), ShapeError,
           r"quantize: rng \(nvfp4\) must be \[4\], got int32\[2\]"),
    Misuse("the rng of two tensors", _quantize(NOISY, rng=((2, 4), "int32")), ShapeError,
           r"quantize: rng \(nvfp4\) must be \[4\], got int32\[2, ?4\]", panels=True),
    Misuse("an rng's dtype", _quantize(NOISY, rng=((4,), F32)), DTypeError,
           r"quantize: rng \(nvfp4\) must be int32, got float32\[4\]"),
    Misuse("a rotation of float32", _quantize(ROTATED), DTypeError,
           r"quantize \(nvfp4\): the Hadamard transform takes bfloat16 alone, got float32\[16, 48\]"),
    # amax, dequantize, sums
    Misuse("amax of integers", lambda lib: lib.verbs.amax(lib.ones(3, dtype="int32")), DTypeError,
           r"amax: x must be float32, bfloat16 or float16, got int32\[3\]"),
    Misuse("signs without a rotation",
           lambda lib: lib.verbs.amax(lib.ones(16, 48, dtype=BF16), random_signs=True), ValueError,
           "amax: random signs belong to the Hadamard transform, which was not asked for"),
    Misuse("amax of rotated float32", lambda lib: lib.verbs.amax(lib.ones(16, 48), rht=True), DTypeError,
           r"amax: the Hadamard transform takes bfloat16 alone, got float32\[16, 48\]"),
    Misuse("amax of rotated rows", lambda lib: lib.verbs.amax(lib.ones(8, 48, dtype=BF16), rht=True), ShapeError,
           r"amax: the Hadamard transform takes rows in multiples of 16, got \[8, 48\]"),
    Misuse("values of integers",
           lambda lib: lib.verbs.dequantize(lib.verbs.quantize(lib.ones(4, 32), MX), lib.dtype("int32")),
           DTypeError, "dequantize: the result can be float32, bfloat16 or float16, not int32"),
    Misuse("a sum of integers", lambda lib: lib.verbs.bias_grad(lib.ones(3, 4, dtype="int32")), DTypeError,
           r"bias_grad: dy must be float32, bfloat16 or float16, got int32\[3, 4\]"),
    Misuse("a sum in integers", lambda lib: lib.verbs.bias_grad(lib.ones(3, 4), lib.dtype("int32")), DTypeError,
           "bias_grad: the result can be float32, bfloat16 or float16, not int32"),
    # gemm
    Misuse("unequal depths", _gemm(of_b=(5, 41)), ShapeError,
           r"gemm: a \(fp8_e4m3_1x128\) reduces over 40 elements, b \(fp8_e4m3_1x128\) over 41"),
    Misuse("a copy that was not made", _gemm(a=ROWWISE, of_b=(6, 5), **WGRAD), ValueError, ".*columnwise copy"),
    Misuse("a bias's shape", _gemm(bias=((4,), F32)), ShapeError, r"gemm: bias must be \[5\], got float32\[4\]"),
    Misuse("a bias's dtype", _gemm(bias=((5,), "int32")), DTypeError,
           r"gemm: bias must be float32, bfloat16 or float16, got int32\[5\]"),
    Misuse("an infinite factor", _gemm(alpha=float("inf")), ValueError, "gemm: alpha must be finite"),
    Misuse("fast accumulation of blocks", _gemm(fast_accum=True), ValueError,
           "gemm: fast_accum exists for per-tensor FP8 only, got fp8_e4m3_1x128 x fp8_e4m3_1x128"),
    # scale_update
    Misuse("a history's dtype", _update(dtype=BF16), DTypeError,
           r"scale_update: history must be float32, got bfloat16"),
    Misuse("a history a list", lambda lib: lib.verbs.scale_update([1.0], lib.ones(1)), ArgumentError,
           "scale_update: history must be .* got list"),
    Misuse("a history without entries", _update(length=0), ShapeError,
           r"scale_update: history must be \[n, L\] with L >= 1, got float32\[2, 0\]"),
    Misuse("the number of scales", _update(scale=ONE), ShapeError,
           r"scale_update: scale must be \[2\], got float32\[1\]"),
    Misuse("the number of reduced amaxes", _update(reduced=ONE), ShapeError,
           r"scale_update: reduced must be \[2\], got float32\[1\]"),
    Misuse("an update's dtype", _update(amax=((2,), "float16")), DTypeError,
           r"scale_update: amax must be float32, got float16\[2\]"),
    Misuse("fp8_max of 0", _update(fp8_max=0.0), ValueError, "scale_update: fp8_max must be finite and > 0, got 0"),
    Misuse("a margin", _update(margin=127), ValueError, r"scale_update: margin must lie in -126\.\.126, got 127"),
    Misuse("two algorithms", _update(amax=((2,), F32), most_recent=True), ValueError,
           "scale_update: amax was given; most_recent does not apply"),
    # hash
    Misuse("a hash of a list", lambda lib: lib.verbs.hash([1.0]), ArgumentError, "hash: x must be a.* got list"),
    # stacks and groups
    Misuse("a stack of integers",
           lambda lib: lib.verbs.quantize_stack(lib.ones(2, 4, 32, dtype="int32"), MX), DTypeError,
           r"quantize_stack: x must be float32, bfloat16 or float16, got int32\["),
    Misuse("a stack of scalars", lambda lib: lib.verbs.quantize_stack(lib.ones(3), MX), ShapeError,
           "a stack of tensors has at least two dimensions"),
    Misuse("no scales", _stack(DELAYED), ArgumentError,
           "quantize_stack: Float8Quantizer takes its scale from the caller; pass scale="),
    Misuse("scales of blocks", _stack(MX, scale=((2,), F32)), ValueError,
           r"quantize_stack \(mxfp8_e4m3\): a scale is for per-tensor formats"),
    Misuse("scales and amaxes", _stack(DELAYED, scale=((2,), F32), amax=((2,), F32)), ValueError,
           r"quantize_stack \(fp8_e4m3_tensor\): scale and amax were both given"),
    Misuse("amaxes of blocks", _stack(MX, amax=((2,), F32)), ValueError,
           "quantize_stack: amax is for per-tensor and two-level formats; mxfp8_e4m3 takes one per block"),
    Misuse("amaxes of one copy alone", _stack(NV, amax=((2,), F32)), ValueError,
           r"quantize_stack: columnwise_amax \(nvfp4\) is missing"),
    Misuse("the number of groups", _grouped(offsets=(0, 8, 16, 32)), ShapeError,
           "grouped_gemm: b is a stack of 2 tensors, and offsets are those of 3 groups"),
    Misuse("offsets of a dtype", _grouped(offsets=F32), DTypeError,
           r"grouped_gemm: offsets must be .*int32, got float32"),
    Misuse("unequal depths of groups", _grouped(w=(2, 16, 32)), ShapeError,
           r"grouped_gemm: a \(mxfp8_e4m3\) reduces over 64 elements, b \(mxfp8_e4m3\) over 32"),
    Misuse("a bias of groups", _grouped(bias=((2, 15), F32)), ShapeError,
           r"grouped_gemm: bias must be \[2, 16\], got float32\[2, 15\]"),
    Misuse("a bias of weights' gradients", _grouped(x=(32, 64), w=(32, 64), bias=((2, 64), F32), **WGRAD), ValueError,
           "grouped_gemm: bias was given and is not read: weights' gradients have none"),
    Misuse("one rotated copy", _grouped(a=ROTATED, b=NV, x=(32, 64), w=(32, 64), align=16, **WGRAD), ValueError,
           "grouped_gemm: NVFP4Quantizer.* and NVFP4Quantizer.* do not rotate alike"),
    Misuse("rotated copies of any rows", _grouped(a=ROTATED, b=ROTATED, x=(32, 64), w=(32, 64), **WGRAD), ValueError,
           "grouped_gemm: Hadamard-rotated copies mix 16 rows, so that groups must begin at multiples of 16"),
    Misuse("fast accumulation of groups", _grouped(fast_accum=True), ValueError,
           "grouped_gemm: fast_accum exists for per-tensor FP8 only, got mxfp8_e4m3 x mxfp8_e4m3"),
    Misuse("one operand's rows", _grouped(x=(32, 64), w=(32, 64), trans_a=True, trans_b=True), ShapeError,
           "grouped_gemm: the rows of a are reduced and those of b are not; pass trans_b=False"),
    Misuse("a scalar's groups", lambda lib: lib.verbs.grouped_bias_grad(lib.ones(), lib.offsets(0, 1)), ShapeError,
           "grouped_bias_grad: dy must have at least one dimension, got a scalar"),
    Misuse("groups without an end", lambda lib: lib.verbs.grouped_bias_grad(lib.ones(4, 8), lib.offsets()), ShapeError,
           r"grouped_bias_grad: offsets must be \[groups \+ 1\], got int32\[0\]"),
]  # fmt: skip

# --- rows of tokens and of experts ---

MISUSES += [case._replace(panels=True) for case in (
    Misuse("a float mask", _map(dtype=F32), DTypeError,
           r"moe_map: routing_map \(a mask\) must be bool, int8, .* or uint64, got float32\[6, 3\]"),
    Misuse("a mask of a line", _map(3), ShapeError, r"moe_map: routing_map must be \[T, E\], got bool\[3\]"),
    Misuse("a kind of map", _map(map_type="ids"), ValueError, "moe_map: map_type must be 'mask' or 'index', got 'ids'"),
    Misuse("ids of bools", _map(num_experts=3, map_type="index"), DTypeError,
           r"moe_map: routing_map \(expert ids\) must be int32 or int64, got bool\[6, 3\]"),
    Misuse("ids without experts", _map(dtype="int32", map_type="index"), ValueError,
           "moe_map: expert ids need num_experts, how many there are"),
    Misuse("a mask's experts", _map(num_experts=4), ShapeError,
           r"moe_map: routing_map bool\[6, 3\].* has 3 experts, not 4"),
    Misuse("no experts", _map(6, 0), ShapeError, "moe_map: there must be at least one expert, got 0"),
    Misuse("ids of no experts", _map(dtype="int32", num_experts=0, map_type="index"), ValueError,
           "moe_map: num_experts must be at least 1, got 0"),
    Misuse("many slots", _map(2, 2049), UnsupportedError,
           "moe_map: 2049 slots of a token, and the kernels take at most 2048"),
    Misuse("many experts", _map(dtype="int32", num_experts=2049, map_type="index"), UnsupportedError,
           "moe_map: 2049 experts, and the kernels take at most 2048"),
    Misuse("an alignment of 0", _map(align_size=0), ValueError, "moe_map: align_size must be at least 1, got 0"),
    Misuse("a great alignment", _map(num_out_tokens=5, align_size=1 << 30), ShapeError,
           "moe_map: rows with the alignment's padding are .*, and a map numbers at most 2147483647"),
    Misuse("rows below -1", _map(num_out_tokens=-2), ValueError, "moe_map: num_out_tokens must be at least -1, got -2"),
    Misuse("rows that are true", _map(num_out_tokens=True), ArgumentError,
           "moe_map: num_out_tokens must be an int, got bool"),
    Misuse("rows beyond int32", _map(num_out_tokens=1 << 31), ShapeError,
           "moe_map: rows are 2147483648, and a map numbers at most 2147483647"),
    Misuse("complex rows", _permute(dtype="complex64"), DTypeError,
           r"moe_permute: inp must be bfloat16, .*, got complex64\[6, 8\]"),
    Misuse("tokens of a line", _permute(6), ShapeError, r"moe_permute: inp must be \[\.\.\., H\], got float32\[6\]"),
    Misuse("too few tokens", _permute(5, H), ShapeError,
           r"moe_permute: inp must have a row for each of routing_map's tokens, 6, got float32\[5, 8\]"),
    Misuse("rows beside a map", _permute(rows="map", num_out_tokens=4), ValueError,
           "moe_permute: num_out_tokens was given beside a RowMap, which says it already"),
    Misuse("a kind beside a map", _permute(rows="map", map_type="index"), ValueError,
           "moe_permute: map_type was given beside a RowMap, which says it already"),
    Misuse("no kind beside a map", _permute(rows="map", map_type=None), ValueError,
           "moe_permute: map_type was given beside a RowMap, which says it already"),
    Misuse("max_token_num below -1", _permute(max_token_num=-2), ValueError,
           "moe_permute: max_token_num must be at least -1, got -2"),
    Misuse("rows of blocks that span tokens", lambda lib: lib.verbs.moe_permute(
               lib.verbs.quantize(lib.ones(T, 32), MX), _mask(lib)), ValueError,
           r"moe_permute: blocks of inp's columnwise copy \(mxfp8_e4m3\) run along 32 tokens, which part when rows"),
    Misuse("rows without a rowwise copy", lambda lib: lib.verbs.moe_permute(
               lib.verbs.quantize(lib.ones(T, 32), COLUMNS), _mask(lib)), ValueError,
           "moe_permute: rows are what moves, and inp has no rowwise copy"),
    Misuse("probabilities of integers", _probs(dtype="int32"), DTypeError,
           r"moe_permute_with_probs: probs must be float32, bfloat16, float16 or float64, got int32\[6, 3\]"),
    Misuse("probabilities of other slots", _probs((T, 2)), ShapeError,
           r"moe_permute_with_probs: probs must be \[6, 3\], got float32\[6, 2\]"),
    Misuse("counts of other experts", _pad([1, 2]), ShapeError,
           r"moe_permute_and_pad_with_probs: tokens_per_expert must be \[3\], got int(32|64)\[2\]"),
    Misuse("counts of a dtype", _pad(((3,), F32)), DTypeError,
           r"moe_permute_and_pad_with_probs: tokens_per_expert must be int32 or int64, got float32\[3\]"),
    Misuse("counts below 0", _pad([1, -1, 2]), ValueError,
           "moe_permute_and_pad_with_probs: each of tokens_per_expert must be at least 0, got -1"),
    Misuse("sums of integers", _unpermute(dtype="int32"), DTypeError,
           r"moe_unpermute: inp must be float32, bfloat16, float16 or float64, got int32\[18, 8\]"),
    Misuse("sums of a line", _unpermute(ROWS), ShapeError,
           r"moe_unpermute: inp must be \[rows, H\], got float32\[18\]"),
    Misuse("a map's dtype", _unpermute(to=((T, E), "int16")), DTypeError,
           r"moe_unpermute: row_id_map must be int32, got int16\[6, 3\]"),
    Misuse("a map of a line", _unpermute(to=((E,), "int32")), ShapeError,
           r"moe_unpermute: row_id_map must be \[T, slots\], got int32\[3\]"),
    Misuse("a map of other rows", _unpermute(9, H, to="map"), ShapeError,
           "moe_unpermute: inp must have a row for each of the map's rows, 18, got "),
    Misuse("factors of other slots", _unpermute(merging_probs=((5, E), F32)), ShapeError,
           r"moe_unpermute: merging_probs must be \[6, 3\], got float32\[5, 3\]"),
    Misuse("both names of probs", _unpermute(merging_probs=((T, E), F32), probs=((T, E), F32)), ValueError,
           "moe_unpermute: merging_probs and probs, its deprecated name, were both given"),
    Misuse("a shape of fewer", _unpermute(restore_shape=(5, H)), ShapeError,
           r"moe_unpermute: restore_shape \[5, 8\] does not hold the \[6, 8\] of the map and inp"),
    Misuse("a shape of a line", _unpermute(restore_shape=(T * H,)), ShapeError,
           r"moe_unpermute: restore_shape must be \[\.\.\., H\], got \[48\]"),
    Misuse("offsets of an index map", _unpermute(map_type="index", pad_offsets=[0, 0, 0]), ValueError,
           "moe_unpermute: pad_offsets belong to experts, and an index map's row_id_map does not name them"),
    Misuse("offsets of other experts", _unpermute(pad_offsets=[0, 0]), ShapeError,
           r"moe_unpermute: pad_offsets must be \[3\], got int(32|64)\[2\]"),
    Misuse("sizes of a dtype", _chunks(((2,), F32), [1, 0]), DTypeError,
           r"moe_sort_chunks_by_index: split_sizes must be int32 or int64, got float32\[2\]"),
    Misuse("sizes in two dimensions", _chunks(((T, E), "int32"), [1, 0]), ShapeError,
           r"moe_sort_chunks_by_index: split_sizes must be \[C\], got int32\[6, 3\]"),
    Misuse("an order of other chunks", _chunks([2, 4], [0]), ShapeError,
           "moe_sort_chunks_by_index: split_sizes has 2 chunks, and sorted_index names 1"),
    Misuse("sizes of other rows", _chunks([2, 3], [1, 0]), ShapeError,
           "moe_sort_chunks_by_index: split_sizes add up to 5, and inp has 6 rows"),
    Misuse("a chunk twice", _chunks([2, 4], [1, 1]), ValueError,
           r"moe_sort_chunks_by_index: sorted_index must name each of 2 chunks once, got \[1, 1\]"),
    Misuse("sizes below 0", _chunks([-2, 8], [1, 0]), ValueError,
           "moe_sort_chunks_by_index: each of split_sizes must be at least 0, got -2"),
    Misuse("probabilities of other rows", _chunks([2, 4], [1, 0], ((T, 2), F32)), ShapeError,
           r"moe_sort_chunks_by_index_with_probs: probs must be \[T\] or \[T, 1\] with T = 6, got float32\[6, 2\]"),
    Misuse("rows' probabilities of integers", _chunks([2, 4], [1, 0], ((T,), "int32")), DTypeError,
           "moe_sort_chunks_by_index_with_probs: probs must be float32, bfloat16, float16 or float64, got int32"),
)]  # fmt: skip
