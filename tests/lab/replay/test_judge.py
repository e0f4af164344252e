import dataclasses

import numpy as np
import pytest
from op_tools import op
from trace_tools import rng

from diptych.lab.replay.judge import ROUNDED, judged
from diptych.lab.replay.op import Bits, Op
from diptych.lab.replay.table import TABLE

X = rng("judge").standard_normal((64, 256)).astype(np.float32)
W = rng("judge w").standard_normal((32, 256)).astype(np.float32)
Y = X @ W.T


def linear(out):
    return op("linear", {"x": X, "weight": W}, out, dtype="float32")


def again(x):
    return {"out": Bits.of(np.ascontiguousarray(x))}


def outcome(made, x, same_device=True):
    (found,) = judged(made, again(x), same_device)
    return found


def test_the_same_bits_agree():
    found = outcome(linear(Y), Y)
    assert (found.agrees, found.differing, found.max_ulp, found.why) == (True, 0, 0, "the same bits")
    assert 0 < found.recorded_error == found.replayed_error <= 1


def test_rounding_agrees_and_says_how_far():
    found = outcome(linear(Y), np.nextafter(Y, np.float32(np.inf)))
    assert found.agrees and found.differing == Y.size and found.max_ulp == 1 and 0 < found.relative < 1e-7
    assert "within rounding" in found.why


@pytest.mark.parametrize(("recorded", "replayed", "who"), [(1.01, 1, "the recorded"), (1, 1.01, "the replayed")])
def test_who_is_wrong_is_named(recorded, replayed, who):
    found = outcome(linear(Y * np.float32(recorded)), Y * np.float32(replayed))
    assert not found.agrees and found.why.startswith(f"{who} result is further from the exact one")
    assert (found.recorded_error > 1) == (recorded != 1) and (found.replayed_error > 1) == (replayed != 1)
    assert "TF32" not in found.why


def test_equal_wrong_results_differ_too():
    found = outcome(linear(Y + 1), Y + 1)
    assert not found.agrees and found.differing == 0
    assert found.why.startswith("the recorded and the replayed result is further")


def test_tf32_is_named():
    def tf32(x):
        bits = x.view(np.uint32).astype(np.uint64)
        return ((bits + 0xFFF + (bits >> 13 & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32)

    found = outcome(linear(Y), tf32(X) @ tf32(W).T)
    assert not found.agrees and found.why.endswith("; operands that are rounded to TF32 explain it")


def own(kind, **options):
    bits = Bits.of(Y)
    return Op(kind, {}, options, {"out": bits})


@pytest.mark.parametrize("kind", [name for name, row in TABLE.items() if row.own])
def test_own_operations(kind):
    """One ULP of one element counts on one device, and for most of them on two."""
    off = Y.copy()
    off[3, 4] = np.nextafter(off[3, 4], np.float32(np.inf))
    assert outcome(own(kind), Y).agrees and outcome(own(kind), Y, False).agrees
    assert not outcome(own(kind), off).agrees
    found = outcome(own(kind), off, False)
    assert found.agrees == (kind in ROUNDED) and found.recorded_error is None
    assert not outcome(own(kind), Y * np.float32(1.001), False).agrees


@pytest.mark.parametrize("x", [Y[:1], Y.astype(np.float64)])
def test_another_shape_or_dtype_differs(x):
    found = outcome(linear(Y), x)
    assert not found.agrees and "float32[64, 32] became" in found.why


def test_nan_is_no_agreement():
    bad = Y.copy()
    bad[0, 0] = np.nan
    found = outcome(linear(Y), bad)
    assert not found.agrees and found.replayed_error == np.inf
    assert dataclasses.asdict(found)["differing"] == 1


@pytest.mark.parametrize(
    ("kind", "a", "out"),
    [
        ("add", np.ones(3, bool), np.ones(3, bool)),
        ("mul", np.full(3, 200, np.uint8), np.full(3, 64, np.uint8)),  # 40000 modulo 256
        ("add", np.full(3, 2**60 + 1), np.full(3, 2**61 + 2)),  # no float64 has it
    ],
)
def test_integers_are_judged_by_their_bits(kind, a, out):
    made = op(kind, {"a": a, "b": a}, out)
    assert outcome(made, out).agrees and outcome(made, out, False).agrees
    off = out.copy()
    off[1] = out.dtype.type(not out[1]) if out.dtype == bool else out[1] + 1
    found = outcome(made, off, False)
    assert not found.agrees and found.differing == 1 and found.recorded_error is None
