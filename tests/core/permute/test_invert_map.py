"""invert_map of hand-made maps: the last slot that names a row counts."""

from __future__ import annotations

import numpy as np
import pytest

import cases
from core import permute_runner, runner
from core.permute.test_permute import maps, threads_of
from diptych import core
from diptych.core import _core


def expected(row_id_map: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    row_source, kept = np.full(rows, -1, np.int32), np.full(row_id_map.size, -1, np.int32)
    flat = row_id_map.reshape(-1)
    for i in np.flatnonzero((flat >= 0) & (flat < rows)):
        row_source[flat[i]] = i
    kept[row_source[row_source >= 0]] = np.flatnonzero(row_source >= 0)
    return row_source, kept.reshape(row_id_map.shape)


def invert(be, row_id_map: np.ndarray, rows: int, *, kept: bool, offset: int = 0) -> list[np.ndarray]:
    out = runner.Outputs(be, offset=offset)
    made = [out.new("row_source", (rows,), "int32")]
    if kept:
        made.append(out.new("kept", row_id_map.shape, "int32"))
    _core.invert_map(permute_runner.put(be, row_id_map, offset), *made)
    read = out.read()
    return [read[name] for name in ("row_source", "kept")[: len(made)]]


def hostile(rng: np.random.Generator, tokens: int, slots: int, rows: int) -> np.ndarray:
    edges = np.array([-1, -2, rows, rows - 1, 0, 2**31 - 1, -(2**31)])
    some = np.where(rng.random((tokens, slots)) < 0.3, rng.choice(edges, (tokens, slots)), 0)
    return np.where(some == 0, rng.integers(0, max(1, rows), (tokens, slots)), some).astype(np.int32)


@pytest.mark.parametrize("size", [(0, 3, 5), (1, 1, 1), (7, 3, 12), (7, 0, 4), (5, 2, 0), (3000, 40, 900)], ids=str)
def test_any_map(size, device):
    be = runner.backend(device)
    row_id_map = hostile(cases.rng_for(f"invert-{size}"), *size)
    want = expected(row_id_map, size[2])
    for threads in threads_of(device):
        for kept in (False, True):
            with runner.setting(threads=threads):
                got = invert(be, row_id_map, size[2], kept=kept, offset=threads % 2)
            for g, w in zip(got, want, strict=False):
                runner.same_bits(g, w, f"{size} {cases.report_header()}")


def test_maps_of_experts_come_back(device):
    be = runner.backend(device)
    for name, m in maps(((7, 3, 2), (64, 8, 2), (300, 60, 4))):
        for got, want in zip(invert(be, m.row_id_map, m.rows, kept=True), (m.row_source, m.row_id_map), strict=True):
            runner.same_bits(got, want, name)


def test_numpy_face():
    m = core.invert_map(np.array([[3, 1], [3, -1], [9, 0]], np.int32), 5)
    assert m.row_source.tolist() == [5, 1, -1, 2, -1]
    assert m.row_id_map.tolist() == [[-1, 1], [3, -1], [-1, 0]]
    with pytest.raises(TypeError, match="invert_map: row_id_map must be"):
        core.invert_map(np.zeros((2, 2)), 3)
    with pytest.raises(ValueError, match="invert_map: row_id_map must have two dimensions"):
        core.invert_map(np.zeros(2, np.int32), 3)


def test_bad_calls():
    i32 = runner.CODES["int32"]
    maps = (np.zeros((2, 3), np.int32), i32)
    with pytest.raises(ValueError, match="kept"):
        _core.invert_map(maps, (np.zeros(4, np.int32), i32), (np.zeros((2, 2), np.int32), i32))
    with pytest.raises(TypeError, match="row_source"):
        _core.invert_map(maps, (np.zeros(4, np.float32), runner.CODES["float32"]))
    with pytest.raises(ValueError, match="row_id_map must have two"):
        _core.invert_map((np.zeros(3, np.int32), i32), maps)
