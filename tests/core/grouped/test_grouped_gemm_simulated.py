"""The native kernel of grouped products without its hardware: its source, compiled for the CPU with stand-ins for what
lies in cuda/ptx (tests/simulated), as a cluster of threads that run in an order drawn at random.

What the instructions do is as the PTX ISA has it; that they do so on a chip, and how fast, only a chip can tell.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

import cases
from core import runner, simulation
from core.grouped_runner import KINDS, PRODUCTS, Case, arguments, grouped_cases
from core.simulation import Tensor

pytestmark = pytest.mark.simulated
SOURCE = "products.cpp"
PAIRS = [
    *[(a, b) for a in cases.TENSOR_FORMATS for b in cases.TENSOR_FORMATS],
    *[("fp8_e4m3_1x128", b) for b in ("fp8_e4m3_1x128", "fp8_e5m2_1x128", "fp8_e4m3_128x128", "fp8_e5m2_128x128")],
    ("fp8_e5m2_1x128", "fp8_e4m3_128x128"),
]
# Tiles of 128 rows one below the other, odd ones, such that half is empty, none; more tiles than blocks
GROUPS = ((300, (0, 0, 256, 290)), (160, (0, 32, 32, 96, 160)), (384, (128, 128, 384)), (512, (0, 128, 384, 512)))
EXTENTS = ((400, 272), (16, 1024), (592, 64), (208, 144))  # columns that tiles of 192 or 256 do not fill
SIMULATED_SMS = 4


TENSORS = (
    "a_data", "a_scale_inv", "a_amax", "b_data", "b_scale_inv", "b_amax", "offsets", "d", "c", "bias"
)  # fmt: skip
INTEGERS = (
    "a_format", "a_columnwise", "b_format", "b_columnwise", "kind", "align", "fast_accum", "tall", "sm_count", "seed",
    "most",
)  # fmt: skip
FLOATS = ("alpha", "beta")


class Call(ctypes.Structure):
    _fields_ = (
        *((name, Tensor) for name in TENSORS),
        *((name, ctypes.c_int32) for name in INTEGERS),
        *((name, ctypes.c_float) for name in FLOATS),
    )


@pytest.fixture(scope="module")
def library():
    return simulation.built(SOURCE)


def simulated(
    library: ctypes.CDLL,
    case: Case,
    seed: int,
    *,
    fast_accum: bool = False,
    tall: bool = False,
    dense: bool = False,
    most: int = 0,
) -> np.ndarray:
    """Returns D; `dense`: the kernel gets no offsets, which makes one group of all rows; `most`: see `cutting`."""
    be, problem = runner.Numpy(), case.make()
    out = runner.Outputs(be)
    given = arguments(be, problem, (case.a_format, case.b_format), out)
    given |= {
        "align": case.align,
        "fast_accum": fast_accum,
        "tall": tall,
        "sm_count": SIMULATED_SMS,
        "seed": seed,
        "most": most,
    }
    if dense:
        given |= {"offsets": None, "kind": KINDS["rows"]}
    call = Call(**{n: Tensor.of(given[n]) for n in TENSORS}, **{n: given[n] for n in (*INTEGERS, *FLOATS)})
    message = ctypes.create_string_buffer(256)
    result = library.simulate(ctypes.byref(call), message, len(message))
    assert result == 0, f"{case} seed {seed}: {message.value.decode() or 'the kernel does not take it'}"
    return out.read()["d"]


def check(
    library: ctypes.CDLL,
    case: Case,
    *,
    fast_accum: bool = False,
    tall: bool = False,
    dense: bool = False,
    turn: int = 0,
) -> None:
    """Each `turn` draws other moments at which the hardware acts."""
    problem, seed = case.make(), int(cases.rng_for(f"{case}-seed-{turn}").integers(1 << 30))
    options = {"fast_accum": fast_accum, "tall": tall, "dense": dense}
    got = simulated(library, case, seed, **options)
    error = np.abs(got.astype(np.float64) - problem.float64())
    allowed = problem.tolerance() if fast_accum else problem.tolerance(promote_every=128)
    assert (error <= allowed).all(), f"{case} seed {seed}: {(error / allowed).max():.2f} x the tolerance"
    nothing = ~problem.summed()
    runner.same_bits(got[nothing], problem.cpu()[nothing], f"{case}: nothing to sum")
    runner.same_bits(simulated(library, case, seed + 1, **options), got, f"{case}: another order")


def taken(pair: tuple[str, str]) -> list[Case]:
    """The cases that the kernel takes."""
    drawn = [case for product in PRODUCTS for case in grouped_cases([pair], GROUPS, EXTENTS, products=[product])]
    unit = 16 if pair in DECODED else 32 if pair[0] in cases.TENSOR_FORMATS else 128
    return [case for case in drawn if case.product != "wgrad" or case.align >= unit]


DECODED = [
    ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_e4m3"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "nvfp4"),
    ("fp8_e4m3_tensor", "mxfp8_e5m2"),
]  # fmt: skip


@pytest.mark.parametrize("pair", [*PAIRS, *DECODED], ids="-".join)
def test_products(pair, library):
    for case in taken(pair):
        check(library, case)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_tall_tiles(pair, library):
    for case in taken(pair):
        check(library, case, tall=True)


DENSE = [(211, 272), (130, 400), (264, 1040), (1, 16), (129, 272)]  # N, K


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_dense_products(pair, library):
    """A product without groups, of any N: rows of D that are not whole 16 bytes are stored by single elements."""
    groups = [(rows, (0, rows)) for rows in (300, 1, 193, 64, 300)]
    for case in grouped_cases([pair], groups, DENSE, products=["fprop"]):
        check(library, case, tall=True, dense=True)


@pytest.mark.parametrize("pair", PAIRS[:1], ids="-".join)
def test_dense_fast_accumulation(pair, library):
    for case in grouped_cases([pair], [(300, (0, 300))] * 2, [(211, 272), (130, 400)], products=["fprop"]):
        check(library, case, fast_accum=True, dense=True)


MOST, LEAST = 3 << 29, 8192  # bytes; rows and columns: the bounds of decoded.cpp


def pitch(k: int) -> int:
    """Returns the elements from one decoded row to the next."""
    return -(-k // 8) * 8


@pytest.fixture(scope="module")
def cutting():
    """The library in which decoded operands are bounded by `most` bytes, and pieces may be small."""
    old = f"constexpr int64_t kMost = int64_t{{3}} << {(MOST // 3).bit_length() - 1}, kCut = 2048, kLeast = {LEAST};"
    new = "const int64_t &kMost = g_most, kCut = 256, kLeast = 512;"
    return simulation.built(SOURCE, patch=("cuda/products/decoded.cpp", old, new))


def same_in_pieces(library: ctypes.CDLL, cutting: ctypes.CDLL, case: Case, *, dense: bool = False) -> None:
    """A bound drawn at random cuts groups of rows after any number of them, M and N after multiples of 256."""
    rng, line = cases.rng_for(f"{case}-pieces-{dense}"), 2 * pitch(case.rows if case.product == "wgrad" else case.inner)
    by_groups = case.product != "wgrad" and not dense
    seed, most = int(rng.integers(1 << 30)), int(rng.integers(1, 1500))
    if by_groups:
        most = int(rng.integers(1, max(2, len(case.offsets) - 1))) * case.n
    cut = simulated(cutting, case, seed, dense=dense, most=most * line)
    runner.same_bits(cut, simulated(library, case, seed, dense=dense), f"{case}, {most} lines")


# Groups that begin and end inside of panels of 128 rows, empty ones, rows in none, more groups than lanes
RAGGED = ((700, (3, 131, 131, 140, 500, 500, 690)), (256, (0, 0, 255, 256)), (150, tuple(range(5, 140, 3))))
DESCENDING = (300, (280, 40, 90, 130, 200, 260, 290))  # 280 counts for what follows it, in later pieces too


@pytest.mark.parametrize("pair", DECODED, ids="-".join)
def test_pieces_have_the_bits_of_the_whole(pair, library, cutting):
    rows = [(unit, at) for unit, at in (*RAGGED, DESCENDING) for _ in PRODUCTS]
    drawn = [*taken(pair), *(c for c in grouped_cases([pair], rows, EXTENTS[:1]) if c.product != "wgrad")]
    for case in drawn:
        same_in_pieces(library, cutting, case)
    groups = [(rows, (0, rows)) for rows in (300, 1, 520, 272, 700, 144)]
    for case in grouped_cases([pair], groups, [(400, 272), (593, 144), (264, 1040), (700, 300)]):
        same_in_pieces(library, cutting, case, dense=True)


def test_the_workspace_is_bounded(library):
    """Decoded operands take 2 * (M + groups * N) * K bytes. Beyond 1.5 GiB, or 8192 rows of K if these take more,
    dense products and wgrads are cut; groups of rows keep all of A beside 1.5 GiB of weights."""
    size, rng = library.workspace_bytes, cases.rng_for("workspace")
    size.restype, size.argtypes = ctypes.c_int64, (ctypes.c_int,) * 2 + (ctypes.c_int64,) * 4 + (ctypes.c_int,)
    ids = runner.IDS["mxfp8_e4m3"], runner.IDS["nvfp4"]
    beyond = 0
    for _ in range(3000):
        m, n, k = (int(2 ** rng.uniform(0, 22)) for _ in range(3))
        groups, by_groups = int(rng.integers(1, 300)), bool(rng.integers(2))
        line, units_k = 2 * pitch(k), -(-k // 128)
        a, b = m * line, (groups if by_groups else 1) * n * line
        got = size(*ids, m, n, k, groups, by_groups)
        bound = a + max(MOST, n * line) if by_groups else max(MOST, LEAST * line)
        whole = a + b <= bound
        decoded = min(a + b, bound)
        panels = decoded // line // 128 + 1 + (groups if by_groups else 1)
        assert got <= decoded + 4 * panels * units_k + 1024 + 4 * 256, (m, n, k, groups, by_groups)
        if whole:
            assert got >= a + b, (m, n, k, groups, by_groups)
            assert got <= size(*ids, m + 7, n, k, groups, by_groups) or a + b + 7 * line > bound
        elif not by_groups:
            assert got > decoded - LEAST // 2 * line, (m, n, k)
        beyond += not whole
    assert 500 < beyond < 2500
    assert size(runner.IDS["fp8_e4m3_1x128"], ids[0], 128, 128, 128, 1, False) == 0


def test_fast_accumulation(library):
    for product in PRODUCTS:
        (case,) = grouped_cases([PAIRS[0]], GROUPS[3:], EXTENTS[:1], products=[product])
        check(library, case, fast_accum=True)


PRODUCTS_OF, FEED = "cuda/products/sm90.cuh", "cuda/products/sm90_feed.cuh"
DECODE, STORE = "cuda/products/sm90_decode.cuh", "cuda/products/sm90_store.cuh"
BROKEN = {
    "operands released before they are read": (
        PRODUCTS_OF,
        """    ptx::products_wait<0>();
    ptx::products_touch(part);
    w.release(slot);
""",
        """    w.release(slot);
    ptx::products_wait<0>();
    ptx::products_touch(part);
""",
    ),
    "an arrival is missing": (
        PRODUCTS_OF,
        "if (lane < kNativeCluster)",
        "if (lane < kNativeCluster && threadIdx.x != 32)",
    ),
    "scales of the round before": (
        PRODUCTS_OF,
        "after.load(s.scales[w.scales.slot], next,",
        "after.load(s.scales[w.scales.slot ^ 1], next,",
    ),
    "the wrong half of B": (FEED, "t.col + rank * kHalfN, stack", "t.col + (1 - rank) * kHalfN, stack"),
    "units that are published before all threads have stored them": (
        DECODE,
        """    decode_unit(p.decoded[u.of_b], u, team);
    team.sync();
""",
        """    decode_unit(p.decoded[u.of_b], u, team);
""",
    ),
    "shared memory that is overwritten before the copy engine has stored it": (
        STORE,
        """      if (leads) ptx::bulk_wait_read();
""",
        "",
    ),
    "rounds that are cut short": (FEED, "(t.blocks() + kRound - 1) / kRound * kRound", "t.blocks()"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_faults_are_found(name):
    broken = simulation.built(SOURCE, patch=BROKEN[name])
    fmt = "mxfp8_e4m3" if BROKEN[name][0] == DECODE else "fp8_e4m3_1x128"
    groups, extents = (((1536, (0, 1536)),), (208, 144)) if BROKEN[name][0] == STORE else (GROUPS[3:], (208, 1040))
    (case,) = grouped_cases([(fmt, fmt)], groups, [extents], products=["fprop"])
    case = replace(case, out_dtype="bfloat16") if BROKEN[name][0] == STORE else case
    with pytest.raises(AssertionError, match=r"tolerance|deadlock|another order"):
        for turn in range(5):
            check(broken, case, turn=turn)
