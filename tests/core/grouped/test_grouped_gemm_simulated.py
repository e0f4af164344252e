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
from core.grouped_runner import PRODUCTS, Case, arguments, grouped_cases
from core.simulation import Tensor

pytestmark = pytest.mark.simulated
SOURCE = "grouped_native.cpp"
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
    library: ctypes.CDLL, case: Case, seed: int, *, fast_accum: bool = False, tall: bool = False, dense: bool = False
) -> np.ndarray:
    """Returns D; `dense`: calls the kernel without offsets, which makes one group of all rows."""
    be, problem = runner.Numpy(), case.make()
    out = runner.Outputs(be)
    given = arguments(be, problem, (case.a_format, case.b_format), out)
    given |= {"align": case.align, "fast_accum": fast_accum, "tall": tall, "sm_count": SIMULATED_SMS, "seed": seed}
    if dense:
        given["offsets"] = None
    call = Call(**{n: Tensor.of(given[n]) for n in TENSORS}, **{n: given[n] for n in (*INTEGERS, *FLOATS)})
    message = ctypes.create_string_buffer(256)
    result = library.simulate(ctypes.byref(call), message, len(message))
    assert result == 0, f"{case} seed {seed}: {message.value.decode() or 'the kernel does not take it'}"
    return out.read()["d"]


def check(
    library: ctypes.CDLL, case: Case, *, fast_accum: bool = False, tall: bool = False, dense: bool = False
) -> None:
    problem, seed = case.make(), int(cases.rng_for(f"{case}-seed").integers(1 << 30))
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


@pytest.fixture(scope="module")
def cutting():
    """The library with so small a bound of the workspace that products are cut into pieces of 256 rows and columns, or
    of one group."""
    return simulation.built(SOURCE, patch=("cuda/grouped/decoded.cpp", "int64_t{1} << 30", "300000"))


@pytest.mark.parametrize("pair", DECODED, ids="-".join)
def test_pieces_have_the_bits_of_the_whole(pair, library, cutting):
    for case in taken(pair):
        seed = int(cases.rng_for(f"{case}-pieces").integers(1 << 30))
        runner.same_bits(simulated(cutting, case, seed), simulated(library, case, seed), f"{case}")
    groups = [(rows, (0, rows)) for rows in (300, 1, 520, 64)]
    for case in grouped_cases([pair], groups, [(400, 272), (593, 144), (264, 1040), (600, 272)]):
        if case.product != "wgrad":
            seed = int(cases.rng_for(f"{case}-dense pieces").integers(1 << 30))
            cut = simulated(cutting, case, seed, dense=True)
            runner.same_bits(cut, simulated(library, case, seed, dense=True), f"{case}, dense")


def test_fast_accumulation(library):
    for product in PRODUCTS:
        (case,) = grouped_cases([PAIRS[0]], GROUPS[3:], EXTENTS[:1], products=[product])
        check(library, case, fast_accum=True)


PRODUCTS_OF, FEED = "cuda/grouped/native.cuh", "cuda/grouped/native_feed.cuh"
DECODE, STORE = "cuda/grouped/native_decode.cuh", "cuda/grouped/native_store.cuh"
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
        for _ in range(5):
            check(broken, case)
