"""A format that consists only of its table rows works; the tests detect cores with a small fault."""

from __future__ import annotations

import os
import platform

import pytest
from sweeps import others_slow

from architecture import variant_format, variants
from architecture.variant_format import BLOCKS, WHOLE_ROWS
from architecture.variants import Patch

pytestmark = [
    pytest.mark.variants,
    pytest.mark.skipif(bool(variants.missing()), reason=variants.missing() or "-"),
]


ROWS = (
    ("invented_4x16", "e5m2", "f32", 4, 16, "divide", "transposed", "0.125"),
    ("invented_mx_8x16", "e4m3", "e8m0", 8, 16, "e8m0_ceil", "row_major", "0.125"),
    ("invented_mx_3x5", "e5m2", "e8m0", 3, 5, "e8m0_ceil", "transposed", "0.125"),
    ("invented_5xall", "e5m2", "f32", 5, 0, "divide", "transposed", "0.125"),
    ("invented_mx_column", "e4m3", "e8m0", 0, 1, "e8m0_ceil", "row_major", "0.125"),
)


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    """A builder whose variants all have all invented formats, so that one build serves all tests."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return variants.Builder(shared / "variants", *variant_format.rows(*ROWS), *BLOCKS.patches(), *WHOLE_ROWS.patches())


def test_invented_formats_need_only_their_rows(builder):
    """Every instruction set quantizes and dequantizes them correctly; gemm refuses them and names the nearest rows."""
    result = variants.run(builder.base(), "invented")
    report = result.pop("report")
    assert len(result) == 4 * len(ROWS), result
    wrong = {part: row for part, row in result.items() if row["differ"] or not row["cases"]}
    assert not wrong, f"{report}: {wrong}"


@pytest.mark.parametrize("invented", [BLOCKS, WHOLE_ROWS], ids=lambda invented: invented.name)
def test_a_format_trains(builder, invented):
    """With rows, a quantizer and a recipe in five files, a format has the oracle's bits and torch layers train."""
    files, lines = invented.size()
    assert len(files) <= 5 and lines <= 100, (files, lines)
    result = variants.run(builder.base(), "trained", invented.name, invented.recipe)
    report = result.pop("report")
    assert {part: row["differ"] for part, row in result.items()} == dict.fromkeys(result, 0), f"{report}: {result}"
    assert set(result) == {"quantize", "dequantize", "gemm", "eager", "compiled", "grouped"}


SIMD, CODEC, GENERIC = "core_cuda/cpu/isa/simd_quantize.h", "core_cuda/cpu/quantize/codec.h", "cpu/isa/generic.cpp"
LEVELS = "cpu/quantize/two_level.cpp"
TIE = (
    "x = bits_as<F>(bits_as<I>(x) | "
    "(((bits_as<I>(x) & ((1 << (23 - E::kMantissa)) - 1)) == (1 << (22 - E::kMantissa))) & 1));"
)
ENCODE = "DIPTYCH_INLINE I encode(F x) {\n"
# name: the parts that must fail, the source to recompile, the patch
MUTANTS = {
    "flush_to_zero": (
        "quantize dequantize", "cpu/base/pool.cpp",
        Patch(
            "core_cuda/cpu/base/pool.cpp", "constexpr uint64_t kIeee = 0x1F80;", "constexpr uint64_t kIeee = 0x9FC0;"
        ),
    ),
    "scale_by_reciprocal": (
        "quantize", GENERIC, Patch(SIMD, "VF scale = p.max / amax;", "VF scale = p.max * (1.0f / amax);"),
    ),
    "payload_by_reciprocal": (
        "quantize", GENERIC,
        Patch(SIMD, "put(multiplier + i, scale, lanes);", "put(multiplier + i, 1.0f / (1.0f / scale), lanes);"),
    ),
    "scale_inv_from_amax": (
        "quantize", GENERIC,
        Patch(SIMD, "put(inv + i, 1.0f / scale, lanes);",
              "put(inv + i, load<DType::f32>(amax, i, lanes) / p.max, lanes);"),
    ),
    "ties_away_from_zero": ("quantize", GENERIC, Patch(CODEC, ENCODE, f"{ENCODE}  {TIE}\n")),
    "pow2_rounded_up": (
        "quantize", GENERIC,
        Patch(SIMD, "bits_as<VI>(scale) & static_cast<int32_t>(0xFF800000)",
              "(bits_as<VI>(scale) + 0x7FFFFF) & static_cast<int32_t>(0xFF800000)"),
    ),
    "another_nan_byte": (
        "quantize", GENERIC,
        Patch(CODEC, "return magnitude > largest ? kLow :", "return magnitude > largest ? 2 * kLow + 1 :"),
    ),
    "e8m0_rounded_to_nearest": (
        "quantize", GENERIC, Patch(CODEC, "const I up = (m > 0) &", "const I up = (m > 0x400000) &"),
    ),
    "nan_in_amax": (
        "quantize", GENERIC,
        Patch(
            "core_cuda/cpu/isa/simd.h", "{ return x > acc ? x : acc; }", "{ return (x > acc) | (x != x) ? x : acc; }"
        ),
    ),
    "scales_one_by_one": (
        "gemm", GENERIC,
        Patch("core_cuda/cpu/isa/simd_gemm.h", "p[i][j] * (splat(sa[i]) * s[j])", "p[i][j] * splat(sa[i]) * s[j]"),
    ),
    "noise_shared_by_the_copies": (
        "quantize", LEVELS, Patch(f"core_cuda/{LEVELS}", "<< 32) + q.columnwise, 0, 1}", "<< 32), 0, 1}"),
    ),
    "noise_from_zero_on": (
        "quantize", GENERIC,
        Patch(
            "core_cuda/cpu/quantize/philox.h", "to_float<VF>(byte) * pow2f(-8) + pow2f(-9)",
            "to_float<VF>(byte) * pow2f(-8)",
        ),
    ),
    "amax_after_its_constant": (
        "gemm", "cpu/gemm/product.cpp",
        Patch(
            "core_cuda/cpu/gemm/product.cpp", "p.b.times_amax(e.alpha, j) * e.unit",
            "p.b.times_amax(e.alpha * e.unit, j)",
        ),
    ),
    "bias_before_alpha": (
        "gemm", GENERIC,
        Patch("core_cuda/cpu/isa/simd_gemm.h", ": e.alpha * r;", ": e.bias ? r : e.alpha * r;"),
    ),
}  # fmt: skip


def test_the_base_of_all_mutants_passes(builder):
    result = variants.run(builder.base(), "oracle")
    report = result.pop("report")
    assert set(result) == {"quantize", "dequantize", "gemm"}
    assert not any(row["differ"] for row in result.values()), f"{report}: {result}"


NOW = ("nan_in_amax", "scale_by_reciprocal", "pow2_rounded_up", "ties_away_from_zero", "another_nan_byte",
       "flush_to_zero", "amax_after_its_constant")  # fmt: skip


@pytest.mark.parametrize("name", others_slow(MUTANTS, NOW))
def test_mutants_are_caught(builder, name):
    parts, source, patch = MUTANTS[name]
    if name.startswith("flush") and platform.machine() != "x86_64":
        pytest.skip("the mutant sets MXCSR, which only x86-64 has")
    result = variants.run(builder.mutant(name, source, patch), "oracle", *parts.split())
    for part in parts.split():
        row = result[part]
        assert row["differ"] > 0, f"{result['report']}: {name} passed all of {row['cases']} {part} cases"
