"""Stochastic rounding of a part of a tensor: the bytes that the part has in the whole tensor, in both copies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import cases
import oracle
from core import runner

SEED, OFFSET = 0x5EED_0123_4567_89AB, 2**32 - 1
# Variants, and the copies that each has alone.
OPTIONS = {(): ("rowwise", "columnwise"), ("rht", "rht_signs"): ("columnwise",), ("row_amax",): ("rowwise",)}


def cut(whole: oracle.Quantized, row: int, column: int, m: int, k: int) -> oracle.Quantized:
    """The part's copies, cut out of those of the whole tensor."""
    rows, columns = slice(row, row + m), slice(column, column + k)

    def blocks(s: slice, n: int) -> slice:
        return slice(s.start // n, s.stop // n)

    return oracle.Quantized(
        whole.fmt,
        np.ascontiguousarray(whole.rowwise_data[rows, blocks(columns, 2)]),
        np.ascontiguousarray(whole.rowwise_scale_inv[rows, blocks(columns, 16)]),
        np.ascontiguousarray(whole.columnwise_data[columns, blocks(rows, 2)]),
        np.ascontiguousarray(whole.columnwise_scale_inv[columns, blocks(rows, 16)]),
        whole.amax if len(whole.amax) == 1 else np.ascontiguousarray(whole.amax[rows]),
        whole.columnwise_amax,
    )


def quantize_part(be, x: np.ndarray, want: oracle.Quantized, place, variant, sides=("rowwise", "columnwise")):
    """Quantizes a part by the amaxes in `want`; only the copies of `sides`."""
    options = dict.fromkeys(variant, True) | {"rng": oracle.rng_words(SEED, OFFSET, *place)}
    fields = {f"{side}_{name}": getattr(want, f"{side}_{name}") for side in sides for name in ("data", "scale_inv")}
    amaxes = {"rowwise": "amax", "columnwise": "columnwise_amax"}
    fields |= {amaxes[side]: getattr(want, amaxes[side]) for side in sides}
    like = oracle.Quantized(want.fmt, **fields)
    return runner.quantize(be, x, like, "nvfp4", **options, **{amaxes[s]: fields[amaxes[s]] for s in sides})


def same(got: dict[str, np.ndarray], want: oracle.Quantized, label: str) -> None:
    for name, array in got.items():
        runner.same_bits(array, getattr(want, name), f"{label} {name}")


@pytest.mark.sanitize
@pytest.mark.parametrize("variant", OPTIONS)
def test_parts_have_the_bytes_of_the_whole_tensor(device, variant):
    """Parts of rows, of columns and of both, in several dtypes and sizes; each copy alone, too."""
    be, chance = runner.backend(device), cases.rng_for(f"parts-{variant}")
    for turn, (m, k) in enumerate(((64, 96), (528, 400), (1024, 1040))):
        dtype = "bfloat16" if "rht" in variant or turn != 1 else "float32"
        x = cases.draw(f"parts-{m}", "normal", (m, k), dtype)
        rng = oracle.rng_words(SEED, OFFSET)
        whole = oracle.quantize(x, "nvfp4", rng=rng, **dict.fromkeys(variant, True))
        for _ in range(6):
            row, column = (16 * int(chance.integers(n // 16)) for n in (m, k))
            rows, columns = (16 * int(chance.integers(1, (n - at) // 16 + 1)) for n, at in ((m, row), (k, column)))
            if chance.integers(3) == 0:
                column, columns = 0, k
            want = cut(whole, row, column, rows, columns)
            part = np.ascontiguousarray(x[row : row + rows, column : column + columns])
            label = f"[{rows}, {columns}] at {row}, {column} of {x.shape} {cases.report_header()}"
            same(quantize_part(be, part, want, (row, column, m, k), variant), want, label)
            for side in OPTIONS[variant]:
                same(quantize_part(be, part, want, (row, column, m, k), variant, (side,)), want, label)


def test_bits_depend_on_nothing_else():
    """Instruction sets and numbers of threads."""
    x = cases.draw("parts-bits", "normal", (544, 1040), "bfloat16")
    want = cut(oracle.quantize(x, "nvfp4", rng=oracle.rng_words(SEED, OFFSET)), 16, 32, 512, 1008)
    part = np.ascontiguousarray(x[16:528, 32:])
    for isa, threads in itertools.product(runner.isas(), (1, 3)):
        with runner.setting(isa, threads):
            for sides in (("rowwise", "columnwise"), ("rowwise",)):
                got = quantize_part(runner.Numpy(), part, want, (16, 32, 544, 1040), (), sides)
                same(got, want, f"isa={isa} threads={threads}")


def test_a_whole_tensor_at_its_own_place(device):
    """Eight words that name the whole tensor, and four: the same bytes."""
    x = cases.draw("parts-whole", "normal", (96, 256), "bfloat16")
    want = oracle.quantize(x, "nvfp4", rng=oracle.rng_words(SEED, OFFSET))
    same(quantize_part(runner.backend(device), x, want, (0, 0, 96, 256), ()), want, cases.report_header())


def test_numbers_of_blocks_need_64_bits(device):
    """Block numbers beyond 2^32 do not wrap: the bytes that Philox draws for them."""
    place, x = (2**31 - 32, 2**30, 2**31 - 16, 2**31 - 16), np.full((16, 16), 0.7, np.float32)
    x[np.arange(16), np.arange(16)] = 6
    amaxes = {"amax": 2688.0, "columnwise_amax": 2688.0}
    like = oracle.quantize(x, "nvfp4", **amaxes)
    rng = oracle.rng_words(SEED, OFFSET, *place)
    got = runner.quantize(runner.backend(device), x, like, "nvfp4", rng=rng, **amaxes)
    stride = place[3] // 16
    for name, turned, first, offset in (
        ("rowwise_data", x, place[0] * stride + place[1] // 16, OFFSET),
        ("columnwise_data", x.T, place[1] * stride + place[0] // 16, OFFSET + 1),
    ):
        block = [first + r * stride for r in range(16)]
        counters = [[b & 0xFFFFFFFF, b >> 32, offset & 0xFFFFFFFF, offset >> 32] for b in block]
        words = oracle.philox(np.array(counters, np.uint32), (SEED & 0xFFFFFFFF, SEED >> 32))
        want = oracle.encode_stochastic(turned, words.astype("<u4").view(np.uint8).reshape(16, 16))
        runner.same_bits(oracle.unpack(got[name]), want, name)


@pytest.mark.sanitize
def test_a_place_outside_of_the_whole_tensor_is_harmless(device):
    """The place only counts random bytes: any words are taken, and the outputs' guards stay whole."""
    x = cases.draw("parts-outside", "normal", (32, 64), "bfloat16")
    want = oracle.quantize(x, "nvfp4")
    for place in ((2**31 - 1,) * 4, (-1, -1, -1, -1), (0, 0, 0, 0), (7, 9, 5, 3), (-(2**31), 64, 16, 16)):
        place = tuple(p & 0xFFFFFFFF for p in place)
        got = quantize_part(runner.backend(device), x, want, place, ())
        runner.same_bits(got["rowwise_scale_inv"], want.rowwise_scale_inv, f"{place}")


@pytest.mark.parametrize("words", [3, 5, 7, 9, 16])
def test_other_numbers_of_words_are_refused(words):
    x = np.zeros((16, 16), np.float32)
    like = oracle.quantize(x, "nvfp4")
    with pytest.raises(ValueError, match="rng"):
        runner.quantize(runner.Numpy(), x, like, "nvfp4", rng=np.zeros(words, np.int32))
