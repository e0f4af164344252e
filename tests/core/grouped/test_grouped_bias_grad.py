"""grouped_bias_grad: each group's sum has the bits of bias_grad of its rows alone, on every device."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import cases
import oracle
from core import runner
from core.quantize.test_quantize import calls_of
from diptych import core
from diptych.core import _core

# R, N and offsets; rows before the first and after the last are in no group.
CASES: tuple[tuple[int, int, tuple[int, ...]], ...] = (
    (0, 5, (0, 0, 0)),
    (7, 1, (0, 7)),
    (9, 33, (2, 2, 3, 8)),
    (300, 40, (0, 0, 257, 257, 300)),
    (1500, 129, (3, 259, 516, 1499)),
    (70, 1000, tuple(range(0, 71))),
    (90, 24, (90,)),
    (5000, 3, (1, 4999)),
)


def run(be: Any, dy: np.ndarray, offsets: Any, dtype: str, offset: int = 0, poison: int = runner.POISON) -> np.ndarray:
    out, at = runner.Outputs(be, poison, offset), np.asarray(offsets, np.int32)
    rows, groups = oracle.fold(dy), len(at) - 1
    need = _core.grouped_bias_grad_workspace_bytes(*rows.shape, groups)
    operands = be.put(dy, dy.dtype.name, offset), be.put(at, "int32")
    _core.grouped_bias_grad(*operands, out.new("out", (groups, rows.shape[1]), dtype), out.workspace(need))
    return out.read()["out"]


@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_bits_are_bias_grads(dtype, device):
    be = runner.backend(device)
    for turn, (r, n, offsets) in enumerate(CASES):
        for values in ("normal", "inf_nan_mix"):
            dy = cases.draw(f"grouped-bias-{dtype}-{r}x{n}-{values}", values, (r, n), dtype)
            out_dtype = list(cases.INPUT_DTYPES)[turn % 3]
            groups = [dy[a:b] for a, b in itertools.pairwise(offsets)]
            if device == "cpu":
                sums = [oracle.bias_grad(g, cases.INPUT_DTYPES[out_dtype]) for g in groups]
            else:
                sums = [runner.bias_grad(be, g, out_dtype) for g in groups]
            want = np.stack(sums) if sums else np.zeros((0, n), cases.INPUT_DTYPES[out_dtype])
            for isa, threads in calls_of(device, dy.size):
                with runner.setting(isa, threads):
                    got = run(be, dy, offsets, out_dtype, offset=turn % 2)
                label = f"{dtype}[{r}, {n}] {values} -> {out_dtype} isa={isa} threads={threads}"
                runner.same_bits(got, want, f"{label} {cases.report_header()}", nan_free=True)


@pytest.mark.cuda
def test_offsets_that_lie_on_cuda(cuda):
    """Each is taken as at least the one before it and at most R; nothing is read out of bounds."""
    be, dy = runner.Torch(), cases.draw("grouped-bias-lies", "normal", (300, 20), "float32")
    for lie, honest in (((-5, 90, 40, 2**31 - 1), (0, 90, 90, 300)), ((400, 500, -(2**31)), (300, 300, 300))):
        runner.same_bits(run(be, dy, lie, "float32"), run(be, dy, honest, "float32"), lie)


@pytest.mark.cuda
@pytest.mark.sanitize
def test_small_groups_on_cuda(cuda):
    be, dy = runner.Torch(), cases.draw("grouped-bias-small", "normal", (33, 65), "bfloat16")
    got = run(be, dy, (0, 5, 5, 32), "float32", offset=1)
    for g, rows in enumerate((dy[:5], dy[5:5], dy[5:32])):
        exact, allowed = oracle.bias_grad_tolerance(rows)
        assert (np.abs(got[g] - exact) <= allowed).all(), g


def test_numpy_face():
    dy, offsets = cases.draw("grouped-bias-face", "normal", (2, 9, 40), "bfloat16"), np.array([1, 6, 18], np.int32)
    rows = dy.reshape(18, 40)
    want = np.stack([core.bias_grad(rows[1:6]), core.bias_grad(rows[6:])])
    runner.same_bits(core.grouped_bias_grad(dy, offsets), want, "the input's dtype")
    runner.same_bits(core.grouped_bias_grad(dy, offsets[1:2]), want[:0], "no groups")


def test_bad_input():
    dy, good = np.ones((8, 4), np.float32), np.array([0, 3, 8], np.int32)
    for offsets, error, match in (
        (good.astype(np.int64), TypeError, "int32"),
        (good[None], ValueError, r"\[groups \+ 1\]"),
        (good[:0], ValueError, r"\[groups \+ 1\]"),
        (np.array([0, 9], np.int32), ValueError, "outside of the tensor's 8 rows"),
        (np.array([0, 5, 3], np.int32), ValueError, "less than the one before"),
    ):
        with pytest.raises(error, match=match):
            core.grouped_bias_grad(dy, offsets)
    with pytest.raises(TypeError, match="grouped_bias_grad: dy"):
        core.grouped_bias_grad(dy.astype(np.float64), good)
    codes = runner.CODES
    operands = (dy, codes["float32"]), (good, codes["int32"])
    for shape in ((3, 4), (2, 5), (8,)):
        with pytest.raises(ValueError, match="grouped_bias_grad: out must be"):
            _core.grouped_bias_grad(*operands, (np.zeros(shape, np.float32), codes["float32"]), None)
    with pytest.raises(ValueError, match="overlaps"):
        _core.grouped_bias_grad(*operands, (dy[:2], codes["float32"]), None)
