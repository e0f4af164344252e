"""quantize of permuted rows: the bytes of permuting first, for every format, map, row width and alignment."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sweeps import one_in

import cases
import oracle
from core import fused_runner, runner
from core import permute_runner as ops
from core.fused_runner import SOURCES, put
from core.permute.test_permute import ALIGNS, as_mask, routings, top_k
from core.permute.test_permute_misuse import lie
from core.quantize.test_quantize import SCALES, calls_of, one_sided
from diptych import core
from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from oracle import fused
from oracle import permute as moe_oracle
from oracle.permute import Map

SIZES = ((1, 1, 1), (7, 3, 2), (64, 8, 2), (300, 60, 4), (129, 300, 5))  # tokens, experts, choices
WIDTHS = (1, 8, 33, 65, 128, 130, 136, 257, 384, 1032)
LONG = (4104, 9001, 7168)  # more than one piece of a row, whole and ragged blocks
PACKED_WIDTHS = (16, 64, 208, 128, 272)
VALUES = ("normal", "inf_nan_mix", "outlier", "random_bits", "zeros", "tiny", "huge")


def packed(fmt: str) -> bool:
    return fmt in cases.PACKED_FORMATS


def maps(fmt: str, sizes=SIZES) -> Iterator[tuple[str, Map]]:
    """Maps with rows to spare, as many as needed, and too few; of packed formats whole blocks of rows."""
    for turn, (tokens, experts, k) in enumerate(sizes):
        for name, routing in routings(tokens, experts, k):
            if name in ("int64 ids", "int64 ids that wrap") or ("mask" in name[1:] and routing.size > 20000):
                continue
            align = ALIGNS[1 + turn % 3 if packed(fmt) else (turn + len(name)) % len(ALIGNS)]
            need = moe_oracle.rows_needed(routing, experts, align)
            rows = (need, need + 9, need * 2 // 3)[(turn + len(name)) % 3]
            rows = rows // 16 * 16 if packed(fmt) else rows
            yield (
                f"{name} T={tokens} E={experts} align={align} {rows} of {need} rows",
                moe_oracle.row_map(routing, experts, rows, align),
            )


def source_of(be: Any, m: Map) -> tuple[Any, ...]:
    return SOURCES["permuted"], put(be, m.row_id_map), put(be, m.row_source)


def options_of(fmt: str, shape: tuple[int, ...], dtype: str, turn: int) -> dict[str, Any]:
    """Options in turns: those that the dtype and the rows allow, both copies or one of them."""
    case = list(cases.quantize_cases([fmt], [dtype], [shape], ["normal"], every_option=True, variants=True))
    options = case[turn % len(case)].options
    side = turn % 3
    square = options.get("square")
    return options if side == 2 or (square and packed(fmt)) else one_sided(options, side)


def check(be: Any, fmt: str, x: np.ndarray, m: Map, options: dict[str, Any], label: str, offset: int = 0) -> None:
    """On every instruction set and thread count, against the oracle of the permuted rows."""
    moved = moe_oracle.permute(x, m)
    want = oracle.quantize(moved, fmt, **options)
    for isa, threads in calls_of(be.name, moved.size):
        with runner.setting(isa, threads):
            got = runner.quantize(be, x, want, fmt, source=source_of(be, m), offset=offset, **options)
        where = f"{label} {x.dtype}{x.shape} {options} isa={isa} threads={threads} {cases.report_header()}"
        runner.same_quantized(got, want, where)


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_bits(fmt, dtype, device):
    be = runner.backend(device)
    widths = itertools.cycle(PACKED_WIDTHS if packed(fmt) else WIDTHS)
    for turn, (name, m) in enumerate(maps(fmt)):
        shape = (len(m.row_id_map), next(widths))
        if device == "cpu" and turn % 3 != list(cases.INPUT_DTYPES).index(dtype):
            continue  # its kernels take the rows of a map as those of a tensor: each map meets one dtype
        x = cases.draw(f"{name}-{fmt}-{dtype}", VALUES[turn % len(VALUES)], shape, dtype)
        options = options_of(fmt, (m.rows, shape[1]), dtype, turn)
        check(be, fmt, x, m, options, f"{fmt} {name}", offset=turn // 2 % 2 * (1 + turn % 3))


@pytest.mark.parametrize("fmt", one_in(4, cases.FORMATS))
def test_many_tiles_and_long_rows(fmt, device):
    """More than one tile, strip, piece of a row or task of any kernel, each copy alone and both together."""
    be = runner.backend(device)
    widths = (1040, 4112) if packed(fmt) else LONG
    for turn, width in enumerate(widths):
        ids = top_k(cases.rng_for(f"long-{width}"), 150, 5, 3)
        m = moe_oracle.row_map(ids, 5, 640, (16, 128, 32)[turn])
        for side, dtype in enumerate(("bfloat16", "float32", "bfloat16")):
            x = cases.draw(f"long-{fmt}-{width}", "inf_nan_mix" if side == 1 else "normal", (150, width), dtype)
            options = {} if side == 2 else one_sided({}, side)
            check(be, fmt, x, m, options, f"{fmt} {width}", offset=turn % 2)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_strips(fmt, device):
    """So many tokens that a GPU takes the columns in turns, of which the last are fewer; most of them go nowhere."""
    be, tokens, width = runner.backend(device), 16000, 592
    ids = np.full((tokens, 2), -1, np.int32)
    rng = cases.rng_for("strips")
    ids[rng.integers(0, tokens, 200)] = rng.integers(0, 3, (200, 2))
    m = moe_oracle.row_map(ids, 3, 416, 16)
    x = cases.draw(f"strips-{fmt}", "normal", (tokens, width), "bfloat16")
    check(be, fmt, x, m, {}, f"{fmt} strips")


BLOCK_FORMATS = [f for f in cases.FORMATS if not (packed(f) or f in cases.TENSOR_FORMATS)]


@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_many_scales(fmt, device):
    """So many tiles that a GPU moves their scales in vectors, some of them whole and without a NaN."""
    be = runner.backend(device)
    ids = top_k(cases.rng_for("scales"), 1500, 6, 2)
    m = moe_oracle.row_map(ids, 6, 4096, 16)
    for dtype in ("bfloat16", "float16"):
        x = cases.draw(f"scales-{fmt}-{dtype}", "normal", (1500, 512), dtype)
        x[1400:, ::77] = np.nan
        check(be, fmt, x, m, {}, f"{fmt} scales")


@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", BLOCK_FORMATS)
def test_scales_in_groups(fmt, device):
    """More tiles along rows, or down columns, than a GPU puts in order at once: in vectors, and where none fit."""
    be = runner.backend(device)
    for tokens, k, rows, width in ((150, 2, 416, 8704), (2000, 4, 8704, 128), (2000, 4, 8464, 384)):
        m = moe_oracle.row_map(top_k(cases.rng_for(f"groups-{rows}"), tokens, 5, k), 5, rows, 16)
        x = cases.draw(f"groups-{fmt}-{rows}", "normal", (tokens, width), "bfloat16")
        check(be, fmt, x, m, {}, f"{fmt} groups")


SQUARE_FORMATS = [f for f in BLOCK_FORMATS if runner.ROWS[f]["block_rows"] > 1]
MANY = {  # tokens, experts, choices, width, dtype, rows more than needed: each writes 256 MB
    "ragged strips": (9001, 64, 8, 3664, "bfloat16", 500),
    "too few rows": (6500, 20, 6, 7184, "float16", -700),
    "long strips": (84000, 9, 6, 528, "bfloat16", 0),
}


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", SQUARE_FORMATS)
@pytest.mark.parametrize("case", MANY)
def test_tokens_with_many_rows(case, fmt, cuda):
    """A GPU reads these twice, a strip of columns at a time; the CPU, which other tests hold to the oracle, once."""
    tokens, experts, k, width, dtype, more = MANY[case]
    ids = top_k(cases.rng_for(f"many-{case}"), tokens, experts, k)
    ids[::31] = -1
    m = moe_oracle.row_map(ids, experts, moe_oracle.rows_needed(ids, experts, 16) + more, 16)
    x = cases.draw(f"many-{case}-{fmt}", "normal", (tokens, width), dtype)
    x[::1000, ::77], x[500::1000, 3::50] = np.nan, np.inf
    blocks = tuple(-(-n // runner.ROWS[fmt]["block_rows"]) for n in (m.rows, width))
    like = oracle.Quantized(
        oracle.FORMATS[fmt], rowwise_data=np.empty((m.rows, width), np.uint8), rowwise_scale_inv=np.empty(blocks)
    )
    assert m.rows >= 5 * tokens and m.rows * width >= 256e6
    options = {"pow2": True, "eps": 2.0**-100} if SQUARE_FORMATS.index(fmt) % 2 else {}
    on_cpu, on_gpu = (
        runner.quantize(be, x, like, fmt, source=source_of(be, m), **options) for be in (runner.Numpy(), runner.Torch())
    )
    for name, want in on_cpu.items():
        runner.same_bits(on_gpu[name], want, f"{case} {fmt} {name} {options} {cases.report_header()}")


@pytest.mark.cuda
@pytest.mark.parametrize("fmt", SQUARE_FORMATS)
def test_many_rows_captured(fmt, cuda):
    """One graph, replayed with other tokens and another map."""
    import torch

    be, tokens, k, width = runner.Torch(), 9001, 8, 3600
    drawn = []
    for turn in range(2):
        ids = top_k(cases.rng_for(f"captured-{turn}"), tokens, 64, k)
        m = moe_oracle.row_map(ids, 64, tokens * k + 64 * 127, 128)
        drawn.append((be.put(cases.draw(f"captured-{turn}", "normal", (tokens, width), "bfloat16"), "bfloat16"), m))
    inputs = [torch.empty_like(drawn[0][0]), *(torch.empty_like(t) for t in source_of(be, drawn[0][1])[1:])]
    shape = drawn[0][1].rows, width
    blocks = [-(-n // runner.ROWS[fmt]["block_rows"]) for n in shape]
    out = torch.empty(shape, dtype=torch.uint8, device="cuda"), torch.empty(blocks, device="cuda")

    def run(x: Any, to: Any, row_source: Any) -> None:
        data = out[0].view(getattr(torch, runner.payload(fmt)))
        given = (SOURCES["permuted"], to, row_source)
        core._core.quantize(
            x, runner.IDS[fmt], 0, 0.0, runner.COMPUTE, *[None] * 4, data, out[1], None, None, source=given
        )

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(*inputs)
    for x, m in drawn:
        given = [x, *source_of(be, m)[1:]]
        for t in out:
            t.view(torch.uint8).fill_(runner.POISON)
        run(*given)
        want = [t.clone() for t in out]
        for t, g in zip(inputs, given, strict=True):
            t.copy_(g)
        for t in out:
            t.view(torch.uint8).fill_(runner.POISON)
        graph.replay()
        torch.cuda.synchronize()
        assert all(bool((t.view(torch.uint8) == w.view(torch.uint8)).all()) for t, w in zip(out, want, strict=True))


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_same_as_the_two_ops(fmt, device):
    """permute, then quantize, as callers write it."""
    be = runner.backend(device)
    ids = top_k(cases.rng_for(f"two-{fmt}"), 200, 12, 3)
    for routing, dtype in ((ids, "bfloat16"), (as_mask(ids, 12), "float32")):
        m = moe_oracle.row_map(routing, 12, 800, 16)
        x = cases.draw(f"two-{fmt}-{dtype}", "normal", (200, 272), dtype)
        (moved,), _ = ops.permute(be, [(x, 0)], m)
        like = oracle.quantize(moved, fmt)
        want = runner.quantize(be, moved, like, fmt)
        for name, array in runner.quantize(be, x, like, fmt, source=source_of(be, m)).items():
            runner.same_bits(array, want[name], f"{name} of {fmt} {dtype} {cases.report_header()}")


@pytest.mark.parametrize("fmt", cases.TENSOR_FORMATS)
def test_given_scale_and_amax(fmt, device):
    """Delayed scaling: the amax of the rows that are there joins. A scale that makes NaN of 0 does so in every row."""
    be = runner.backend(device)
    every = [m for name, m in maps(fmt, SIZES[1:4]) if "dense" in name or "ids" in name]
    for turn, (scale, more) in enumerate(itertools.product(SCALES, ({}, {"accumulate": 2.5}, {"accumulate": np.inf}))):
        m, dtype = every[turn % len(every)], list(cases.INPUT_DTYPES)[turn % 3]
        x = cases.draw(f"scale-{fmt}-{turn}", VALUES[turn % 4], (len(m.row_id_map), (96, 33, 1032)[turn % 3]), dtype)
        check(be, fmt, x, m, one_sided({"scale": scale, **more}, turn % 2), f"{fmt} scale {turn}")
        check(be, fmt, x, m, {"scale": scale, **more}, f"{fmt} scale {turn}", offset=turn % 2)
        given = {"amax": cases.GIVEN_AMAX[turn % len(cases.GIVEN_AMAX)], "pow2": turn % 2 == 1}
        check(be, fmt, x, m, one_sided(given, turn % 2), f"{fmt} amax {turn}")


def test_dropped_tokens_do_not_count(device):
    """Tokens without a row lie in neither the amax nor any block."""
    be = runner.backend(device)
    x = cases.draw("dropped", "normal", (64, 160), "bfloat16")
    x[40:] = np.float32(1e30)
    ids = np.where(np.arange(64)[:, None] < 40, top_k(cases.rng_for("dropped"), 64, 4, 2), -1).astype(np.int32)
    m = moe_oracle.row_map(ids, 4, 96, 16)
    for fmt in cases.FORMATS:
        for options in ({}, *(one_sided({}, side) for side in (0, 1))):
            check(be, fmt, x, m, options, fmt)
    for row_amax in (False, True):
        out = runner.Outputs(be)
        first = out.new("out", (m.rows if row_amax else 1,), "float32")
        second = out.new("turned", (1,), "float32")
        flags = runner.flags({"row_amax": row_amax, "rht": True, "rht_signs": True})
        core._core.amax(put(be, x), first, second, flags, source_of(be, m))
        read, moved = out.read(), moe_oracle.permute(x, m)
        runner.same_bits(read["out"], oracle.amax(moved, row_amax=row_amax).reshape(-1), "amax")
        want = oracle.columnwise_amax(moved, rht=True, rht_signs=True)
        runner.same_bits(read["turned"], np.asarray(want).reshape(-1), "rotated amax")


def test_column_sums(device):
    be = runner.backend(device)
    for turn, (name, m) in enumerate(maps("fp8_e4m3_tensor", SIZES[1:4])):
        dtype = list(cases.INPUT_DTYPES)[turn % 3]
        x = cases.draw(f"sums-{name}", "normal", (len(m.row_id_map), (40, 33)[turn % 2]), dtype)
        moved = moe_oracle.permute(x, m)
        want = runner.quantize(be, moved, oracle.quantize(moved, "fp8_e4m3_1x128"), "fp8_e4m3_1x128")
        got = fused_runner.quantize(be, x, source_of(be, m), want, "fp8_e4m3_1x128", sum_dtype="float32", rows=m.rows)
        total = fused.column_sum(moved.astype(np.float32), np.dtype(np.float32))
        runner.same_bits(got.pop("column_sum"), total, name, nan_free=True)
        for part, array in want.items():
            runner.same_bits(got[part], array, f"{name} {part}")


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_nothing_at_all(fmt, device):
    """No tokens, no rows, no width, no slots: scales and amaxes are still those of what there is."""
    be = runner.backend(device)
    for tokens, slots, rows, width in ((0, 2, 16, 32), (5, 2, 0, 32), (0, 0, 0, 16), (5, 0, 16, 32), (5, 2, 16, 0)):
        m = moe_oracle.row_map(np.zeros((tokens, slots), np.int32), 2, rows)
        x = cases.draw("nothing", "normal", (tokens, width), "bfloat16")
        for options in ({}, *(one_sided({}, side) for side in (0, 1))):
            check(be, fmt, x, m, options, f"{fmt} {tokens, slots, rows, width}")
            if fmt in cases.DIVIDE_FORMATS:
                check(be, fmt, x, m, {"eps": 0.5, "pow2": True, **options}, f"{fmt} {tokens, slots, rows, width} eps")
            if fmt in cases.TENSOR_FORMATS:
                check(be, fmt, x, m, {"scale": 3.0, **options}, f"{fmt} {tokens, slots, rows, width} scale")


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_maps_that_lie(fmt, device):
    """The runner's guards see any write out of bounds; inverted, such a map is one like any other."""
    be = runner.backend(device)
    for turn in range(8):
        slots, rows = (3, 3, 1, 40, 300, 2, 0, 5)[turn], 48
        m = lie(f"quantize-{turn}", slots=slots, rows=rows)
        width = (64, 1040)[turn % 2] if packed(fmt) else (24, 1500)[turn % 2]
        x = cases.draw(f"lie-{fmt}-{turn}", "normal", (len(m.row_id_map), width), "bfloat16")
        like = oracle.quantize(np.zeros((rows, width), x.dtype), fmt)
        for options in ({}, *(one_sided({}, side) for side in (0, 1))):
            like = oracle.quantize(np.zeros((rows, width), x.dtype), fmt, **options)
            runner.quantize(be, x, like, fmt, source=source_of(be, m), offset=turn % 2, **options)
            honest = core.invert_map(m.row_id_map, rows)
            truth = m._replace(row_id_map=honest.row_id_map, row_source=honest.row_source)
            check(be, fmt, x, truth, options, f"{fmt} {turn}")


def test_callers_float_mode_does_not_matter():
    be, ids = runner.Numpy(), top_k(cases.rng_for("flushed"), 64, 4, 2)
    m = moe_oracle.row_map(ids, 4, 160, 16)
    for fmt, values in itertools.product(cases.FORMATS, ("subnormal_input", "tiny")):
        x = cases.draw(f"flushed-{fmt}", values, (64, 144), "bfloat16")
        want = oracle.quantize(moe_oracle.permute(x, m), fmt)
        source = source_of(be, m)
        with runner.flushed():
            got = runner.quantize(be, x, want, fmt, source=source)
        runner.same_quantized(got, want, f"{fmt} {values} FTZ+DAZ")


def test_refusals(device):
    be = runner.backend(device)
    ids = top_k(cases.rng_for("refusals"), 40, 4, 2)
    m = moe_oracle.row_map(ids, 4, 96, 16)
    x = np.ones((40, 32), np.float32)
    kind, to, row_source = source_of(be, m)
    wrong = be.put(np.ones((40, 2), np.float32), "float32")

    def call(error: type[Exception], match: str, given: tuple[Any, ...], fmt: str = "fp8_e4m3_tensor", x=x, rows=96):
        like = oracle.quantize(np.zeros((rows, x.shape[-1]), np.float32), fmt)
        with pytest.raises(error, match=match):
            runner.quantize(be, x, like, fmt, source=given)

    call(TypeError, "row_id_map is missing", (kind, None, row_source))
    call(TypeError, "row_source is missing", (kind, to, None), rows=1)
    call(TypeError, "row_id_map must be int32", (kind, wrong, row_source))
    call(TypeError, "row_source must be int32", (kind, to, be.put(np.ones(96, np.float32), "float32")))
    call(ValueError, "two dimensions", (kind, row_source, row_source))
    call(ValueError, r"row_id_map must be \[41, 2\]", (kind, to, row_source), x=np.ones((41, 32), np.float32))
    call(ValueError, r"rowwise data .* must be \[96, 32\]", (kind, to, row_source), rows=80)
    call(NotImplementedError, "slots", (kind, be.put(np.zeros((40, 2049), np.int32), "int32"), row_source))
    call(TypeError, "of permuted rows", (kind, to, row_source, None))
    call(TypeError, "of permuted rows", (SOURCES["plain"], to, row_source), rows=40)
    call(TypeError, "of permuted rows", (kind, 0, False, None, None, None, None, None), rows=1)
    short = moe_oracle.row_map(ids, 4, 90)
    call(ValueError, "multiple", (kind, put(be, short.row_id_map), put(be, short.row_source)), fmt="nvfp4", rows=96)


def test_overlaps_are_refused():
    memory = np.full(1 << 14, runner.POISON, np.uint8)
    codes = runner.CODES
    x = (memory[:1280].view(np.float32).reshape(40, 8), codes["float32"])
    to = (memory[2048:2208].view(np.int32).reshape(40, 1), codes["int32"])
    row_source = (memory[3072:3232].view(np.int32), codes["int32"])
    scale = (memory[8192:8196].view(np.float32), codes["float32"])
    amax = (memory[9216:9220].view(np.float32), codes["float32"])
    for start in (1000, 2100, 3000):
        data = (memory[start : start + 320].reshape(40, 8), codes["float8_e4m3fn"])
        with pytest.raises(ValueError, match="overlaps"):
            core._core.quantize(
                *(x, runner.IDS["fp8_e4m3_tensor"], 0, 0.0, runner.COMPUTE, amax),
                *(None, None, None, data, scale, None, None),
                source=(SOURCES["permuted"], to, row_source),
            )
    assert (memory == runner.POISON).all()


QUANTIZERS: tuple[Quantizer, ...] = (
    Float8CurrentScalingQuantizer(),
    Float8Quantizer(),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2),
    MXFP8Quantizer(),
    MXFP8Quantizer(with_2d_quantization=True),
    NVFP4Quantizer(),
    NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True, stochastic_rounding=True),
)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=lambda q: f"{q.format.name}-{q.spec.flags}-{q.needs_scale}")
def test_numpy_face(quantizer):
    m = core.permute_map(top_k(cases.rng_for("face"), 50, 5, 2), experts=5, align=16)
    state = {"scale": np.array([3.0], np.float32)} if quantizer.needs_scale else {}
    state |= {"rng": np.arange(4, dtype=np.int32)} if quantizer.needs_rng else {}
    x = cases.draw("face", "normal", (5, 10, 96), "bfloat16")
    for usage in ((True, True), (True, False), (False, True)):
        wanted = quantizer.with_usage(rowwise=usage[0], columnwise=usage[1])
        got = core.permute_quantize(x, m, wanted, **state)
        want = core.quantize(core.permute(x, m), wanted, **state)
        assert got.shape == want.shape == (m.rows, 96) and got.quantizer == wanted
        for name, array in vars(want).items():
            if isinstance(array, np.ndarray):
                runner.same_bits(getattr(got, name), array, f"{name} of {wanted}")
            else:
                assert name in ("quantizer", "shape") or getattr(got, name) is None, name


def test_numpy_face_errors():
    m = core.permute_map(np.zeros((4, 2), np.int32), experts=3)
    x, quantizer = np.ones((4, 32), np.float32), Float8CurrentScalingQuantizer()
    with pytest.raises(ValueError, match=r"row_id_map must be \[3, 2\]"):
        core.permute_quantize(x[:3], m, quantizer)
    with pytest.raises(TypeError, match="permute_quantize: x must be"):
        core.permute_quantize(x.astype(np.float64), m, quantizer)
    with pytest.raises(TypeError, match=r"permute_quantize: .* pass scale="):
        core.permute_quantize(x, m, Float8Quantizer())
    with pytest.raises(ValueError, match="multiple of 16"):
        core.permute_quantize(x[:, :24], m, NVFP4Quantizer())


@pytest.mark.cuda
@pytest.mark.sanitize
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_every_cuda_kernel_on_small_shapes(fmt, cuda):
    be = runner.Torch()
    widths = (16, 272) if packed(fmt) else (7, 144, 264)
    for turn, (tokens, experts, k) in enumerate(((1, 1, 1), (70, 5, 2), (40, 260, 3))):
        ids = top_k(cases.rng_for(f"sanitize-{turn}"), tokens, experts, k)
        for routing, width in itertools.product((ids, as_mask(ids, experts)), widths):
            rows = moe_oracle.rows_needed(routing, experts, 16) * (3 - turn % 2) // 3 // 16 * 16
            m = moe_oracle.row_map(routing, experts, rows, 16)
            for dtype, values in (("bfloat16", "inf_nan_mix"), ("bfloat16", "normal"), ("float32", "normal")):
                x = cases.draw(f"sanitize-{fmt}-{width}-{turn}", values, (tokens, width), dtype)
                for variant in range(6):
                    options = options_of(fmt, (rows, width), dtype, variant)
                    check(be, fmt, x, m, options, f"{fmt} {turn}", offset=turn % 2)
                if fmt in cases.TENSOR_FORMATS:
                    check(be, fmt, x, m, one_sided({"scale": 3.0}, 0), f"{fmt} {turn} scale")
                    check(be, fmt, x, m, {"scale": 3.0, "accumulate": 2.0}, f"{fmt} {turn} scale")
