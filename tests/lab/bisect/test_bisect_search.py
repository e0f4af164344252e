"""The parts of a search that need no framework."""

from __future__ import annotations

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from diptych.lab.bisect import command, narrow
from diptych.lab.bisect.search import _moved_fed, as_a, as_b, cast, enclosing, moved
from diptych.lab.diff.match import Pair
from diptych.lab.traces import DTYPES, Site, Tensor
from diptych.lab.traces.schema import Operation


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_finite_element_moves_by_one_ulp(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    info = ml_dtypes.finfo(kind)
    x = np.random.default_rng(0).standard_normal(2000).astype(kind)
    x[:6] = [0, float(info.max), float(info.min), np.nan, float(info.smallest_subnormal), -float(info.smallest_normal)]
    given = Tensor.of(x)
    got = moved(given, np.random.default_rng(1))
    ulps = given.dtype.ulps(given.bits, got.bits)
    assert got.bits[0] == given.bits[0] and got.bits[3] == given.bits[3]
    assert ulps[1] == ulps[2] == 1 and np.isfinite(got.dtype.decode(got.bits[1:3])).all()
    rest = np.delete(np.arange(2000), [0, 3])
    nonzero = given.dtype.decode(given.bits)[rest] != 0
    assert (ulps[rest][nonzero] == 1).all()
    up = got.dtype.decode(got.bits)[rest] > given.dtype.decode(given.bits)[rest]
    assert 0.4 < up.mean() < 0.6


def test_integers_do_not_move():
    x = Tensor.of(np.arange(5))
    assert moved(x, np.random.default_rng(0)).bits.tobytes() == x.bits.tobytes()


@pytest.mark.parametrize(("shape", "axes"), [((2, 3, 4, 5), (0, 3, 1, 2)), ((6, 20), None), ((3, 4), (1, 0))])
def test_layouts_are_turned_there_and_back(shape, axes):
    x = Tensor.of(np.random.default_rng(0).standard_normal(shape))
    held = tuple(np.empty(shape).transpose(np.argsort(axes)).shape) if axes else (120,)
    there = as_b(x, held, axes, DTYPES["float64"])
    assert there.bits.shape == held and (as_a(there, shape, axes).bits == x.bits).all()
    if axes:
        assert (there.bits.transpose(axes) == x.bits).all()


def test_casts_round_to_nearest():
    x = Tensor.of(np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, 1e39]))
    assert cast(x, DTYPES["bfloat16"]).bits.view(ml_dtypes.bfloat16).tolist() == [1, 1, 1 + 2**-6, np.inf, np.inf]
    assert cast(Tensor.of(np.array([2**40 + 1])), DTYPES["int32"]).bits.tolist() == [1]


@pytest.mark.parametrize(("a", "b"), [("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "float32")])
def test_moves_are_ulps_of_the_coarser_dtype(a, b):
    coarser = "bfloat16" if "bfloat16" in (a, b) else "float32"
    values = np.random.default_rng(0).standard_normal(100).astype(ml_dtypes.bfloat16)
    of_a, of_b = (Site("x", "activation", 0, (100,), dtype) for dtype in (a, b))
    pair = Pair(of_a, of_b, "map", None)
    x = cast(Tensor.of(values), DTYPES[a])
    got = cast(_moved_fed(x, pair, np.random.default_rng(1)), DTYPES[coarser])
    assert (got.dtype.ulps(got.bits, cast(x, DTYPES[coarser]).bits) == 1).all()


def test_modules_around_an_output():
    assert enclosing('h.0.attn["x"][0]') == ["", "h", "h.0", "h.0.attn"] and enclosing("model") == ["", "model"]


def test_why_the_other_framework_cannot_compute_an_operation_is_told():
    x = Tensor.of(np.linspace(-1, 1, 5, dtype=np.float32))
    site = Site("act/silu.out", "result", 0, (5,), "float32", ("operand:act/silu.x",), Operation("silu", "{}"))
    run = SimpleNamespace(values={site.key: x, "operand:act/silu.x": x})

    def refuses(op):
        assert (op.kind, list(op.inputs)) == ("silu", ["x"])
        raise TypeError("no such dtype\nand a long trace")

    assert narrow._again(run, site, refuses) == "TypeError: no such dtype"
    assert narrow._again(run, site, lambda op: {"out": op.inputs["x"]}) == 0
    ids, table, out = (
        Tensor.of(np.array([0, 7])),
        *(Tensor.of(np.ones(shape, np.float32)) for shape in ((5, 2), (2, 2))),
    )
    keys = ("e/embedding.ids", "e/embedding.table")
    site = Site("e/embedding.out", "result", 0, (2, 2), "float32", keys, Operation("embedding", "{}"))
    run = SimpleNamespace(values=dict(zip((*keys, site.key), (ids, table, out), strict=True)))
    assert "1 ids are no rows of the table from 0 to 4" in str(narrow._again(run, site, refuses))
    site = Site("act/silu.out", "result", 0, (5,), "float32")
    found = narrow.Narrowed("A", site.key, "silu", {}, None, (), "TypeError: no such dtype", False)
    assert command._narrowed(found)[-1] == "  B's framework cannot compute it: TypeError: no such dtype"
