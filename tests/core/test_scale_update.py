"""scale_update, delayed scaling's step, against the oracle, bit for bit."""

from __future__ import annotations

import itertools
import platform

import numpy as np
import pytest

import cases
import oracle
from core import runner
from diptych import core
from diptych.common.quantizers import Float8Quantizer

# (n tensors, L entries)
SHAPES = ((1, 1), (3, 1), (1, 2), (7, 2), (1, 16), (5, 33), (2, 1024), (300, 20), (1, 70000), (0, 4))
FP8_MAX, MARGINS = (448.0, 57344.0), (0, 3, -2, 64, -64)


def floats(rng: np.random.Generator, shape: tuple[int, ...], odd: bool) -> np.ndarray:
    """Amaxes of all magnitudes; among them zeros, and where `odd` infinities, subnormals and the largest."""
    x = np.exp2(rng.uniform(-20, 20, shape)).astype(np.float32)
    some = [0.0, np.inf, 1e-45, 2.0**-126, 1.3e-36, 3.4028235e38] if odd else [0.0]
    return np.where(rng.random(shape) < 0.25, rng.choice(np.array(some, np.float32), shape), x).astype(np.float32)


def check(be, history, scale, label, **options) -> None:
    old = history.copy(), scale.copy()
    known = {k: v for k, v in options.items() if k not in ("in_place", "offset", "poison")}
    want = oracle.scale_update(history, scale, **known)
    got = runner.scale_update(be, history, scale, **options)
    runner.same_bits(got[0], want[0], f"{label} {options} history", nan_free=True)
    runner.same_bits(got[1], want[1], f"{label} {options} scale")
    assert (history == old[0]).all() and (scale == old[1]).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(device, shape):
    be = runner.backend(device)
    turns = itertools.product((False, True), (False, True), (None, "reduced", "amax", "both"), range(2))
    for turn, (odd, most_recent, given, draw) in enumerate(turns):
        if most_recent and given in ("amax", "both"):
            continue  # two algorithms at once are refused
        label = f"update-{shape}-{turn}-{draw} ({cases.report_header()})"
        rng = cases.rng_for(label)
        history, scale = floats(rng, shape, odd), np.exp2(rng.uniform(-30, 30, shape[:1])).astype(np.float32)
        options = {"fp8_max": FP8_MAX[turn % 2], "margin": MARGINS[turn % 5], "most_recent": most_recent}
        if given in ("reduced", "both"):
            options["reduced"] = floats(rng, shape[:1], odd)
        if given in ("amax", "both"):
            options["amax"] = floats(rng, shape[:1], odd)
        check(be, history, scale, label, **options, offset=turn % 3)
        check(be, history, scale, label, **options, in_place=True, offset=turn % 2, poison=0x5A)


def arr(*values) -> np.ndarray:
    return np.array(values, np.float32)


# history, options, then what must come out (NUMERICS 2); the scale was 5
KNOWN = [
    ([3, 1, 8, 2], {}, [0, 8, 2, 3], 56),
    ([3, 1, 8, 2], {"most_recent": True}, [0, 8, 2, 3], np.float32(448) / np.float32(3)),
    ([9, 8, 1, 2], {"margin": 2}, [0, 1, 2, 9], np.float32(112) / np.float32(9)),
    ([0, 1, 8, 2], {}, [0, 1, 8, 2], 5),
    ([0, 1, 8, 2], {"amax": 7.0}, [0, 1, 8, 2], 5),
    ([0, 1, 8, 2], {"reduced": 4.0}, [0, 8, 2, 4], 56),
    ([3, 1, 8, 2], {"reduced": 0.0}, [0, 8, 2, 3], 56),
    ([3, 1, 8, 2], {"amax": 7.0}, [0, 8, 2, 3], 64),
    ([3, 1, 8, 2], {"amax": 0.0}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"amax": -1.0}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"amax": np.nan}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"amax": np.inf}, [0, 8, 2, 3], 5),
    ([3, 1, 8, 2], {"reduced": np.nan, "most_recent": True}, [0, 8, 2, np.nan], 5),
    ([3, 1, 8, 2], {"reduced": np.nan}, [0, 8, 2, np.nan], 56),  # a maximum ignores NaN
    ([3, 1, np.nan, 2], {}, [0, np.nan, 2, 3], np.float32(448) / np.float32(3)),
    ([np.nan, 0, np.nan], {}, [0, np.nan, np.nan], 5),
    ([np.inf, 1, 8, 2], {}, [0, 8, 2, np.inf], 5),
    ([3, 1, np.inf, 2], {}, [0, np.inf, 2, 3], 5),
    ([1e-45, 0, 0], {}, [0, 0, 1e-45], oracle.FLT_MAX),
    ([3, 8], {}, [0, 3], 56),
    ([4], {}, [0], 112),
    ([4], {"most_recent": True, "margin": 1}, [0], 56),
    ([4], {"reduced": 8.0}, [0], 56),
    ([0], {}, [0], 5),
]


@pytest.mark.parametrize("history, options, new_history, new_scale", KNOWN, ids=range(len(KNOWN)))
def test_known_answers(device, history, options, new_history, new_scale):
    be = runner.backend(device)
    named = {k: arr(v) if k in ("reduced", "amax") else v for k, v in options.items()}
    for in_place in (False, True):
        got = runner.scale_update(be, arr(*history)[None], arr(5), in_place=in_place, **named)
        np.testing.assert_array_equal(got[0], arr(*new_history)[None])
        assert got[1].tolist() == [float(new_scale)]
        runner.same_bits(got[0][:, 0], arr(0), "the slot that waits is +0")


def test_tensors_do_not_mix(device):
    """n tensors at once are n tensors one by one."""
    be, rng = runner.backend(device), cases.rng_for("mix")
    history, scale = floats(rng, (40, 7), True), np.exp2(rng.uniform(-5, 5, 40)).astype(np.float32)
    together = runner.scale_update(be, history, scale)
    for i in range(40):
        alone = runner.scale_update(be, history[i : i + 1], scale[i : i + 1])
        for a, b in zip(together, alone, strict=True):
            runner.same_bits(a[i : i + 1], b, f"tensor {i} {cases.report_header()}")


def test_callers_float_mode_does_not_matter():
    if platform.machine() != "x86_64":
        pytest.skip("sets FTZ through glibc's x86-64 fenv_t")
    history = arr(1e-45, 2e-38, 1e-40, 0, 3e38, 2e38, 0, 5, 1e4, 1e3).reshape(5, 2)
    scale = arr(1e-40, 1e-40, 1e-40, 1e-40, 1e-40)
    reduced = arr(1e-45, 0, 1e-39, 1e-42, 0)
    for options in ({}, {"most_recent": True}, {"margin": 126}, {"reduced": reduced}, {"amax": reduced}):
        want = oracle.scale_update(history, scale, **options)
        with runner.flushed():
            got = runner.scale_update(runner.Numpy(), history, scale, **options)
        for g, w in zip(got, want, strict=True):
            runner.same_bits(g, w, f"{options} FTZ+DAZ")


def test_numpy_face():
    """A training loop in small: quantize with the scale, keep the amax, update."""
    rng = cases.rng_for("loop")
    history, scale = np.zeros((1, 4), np.float32), np.ones(1, np.float32)
    seen = []
    quantizer = Float8Quantizer(columnwise=False)
    for step in range(10):
        top = np.float32(2.0 ** rng.integers(-5, 6))
        x = np.array([[top, -top / 2]], np.float32)
        q = core.quantize(x, quantizer, scale=scale)
        history[0, 0] = max(history[0, 0], q.amax[0])
        want = oracle.scale_update(history, scale, margin=1)
        history, scale = core.scale_update(history, scale, margin=1)
        runner.same_bits(history, want[0], f"step {step}")
        runner.same_bits(scale, want[1], f"step {step}")
        seen.append(top)
        assert scale[0] == 224 / max(seen[-4:])
