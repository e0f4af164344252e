"""The terminal's summary: what it says, its width and its length."""

import dataclasses

import numpy as np
import pytest
from diff_tools import compared, parameter, site, trace
from trace_tools import rng

from diptych.lab.diff import differ, summary
from diptych.lab.diff.result import Ambiguous
from diptych.lab.traces import Options


def many(gen: np.random.Generator, error: float, count: int = 60) -> list:
    return [
        site(f"layers.{i}.a_rather_long_name_of_a_module.projection", gen.random(50) * (1 + error), kind)
        for kind in ("activation", "activation_grad") for i in range(count)
    ]  # fmt: skip


def test_green(tmp_path):
    steps = [many(rng("green"), 0.0, 2)]
    text = summary.text(compared(tmp_path, steps, steps))
    assert "GREEN: nothing differs (4 pairs of sites, step 0)" in text
    assert "First" not in text and "Only in" not in text and "Largest" not in text


def test_what_was_not_judged_is_counted(tmp_path):
    x = np.linspace(1, 2, 5000)
    options = Options(values="sample")
    a, b = ([site("x", x)._replace(hash=None), site("k", np.ones(2))] for _ in range(2))
    result = differ.diff(*(trace(tmp_path / n, s, options=options) for n, s in (("a", a), ("b", b))))
    assert "GREEN in what was judged; 1 of 2 cells unknown (2 pairs of sites, step 0)" in summary.text(result)


def test_unknown_cells_that_differ(tmp_path):
    x, k = np.linspace(1, 2, 50).astype(np.float32), site("k", np.ones(2))
    h = [trace(tmp_path / n, [site("x", x), k]) for n in ("h_a", "h_b")]  # not in float64
    text = summary.text(compared(tmp_path, [[site("x", x), k]], [[site("x", 2 * x), k]], references=h))
    assert "DIFFERS (2 pairs of sites, step 0)" in text and "of the unknown cells 1 differ" in text
    assert "Largest distances:\n  activation:x\n    unknown, step 0, float32, relative 1" in text


def test_differs(tmp_path):
    a, b = (many(rng("differs"), e) for e in (0.0, 1e-3))
    a.append(site("only.here", np.ones(3)))
    result = compared(tmp_path, [[parameter("w", np.ones(4)), *a]], [[parameter("w", np.ones(4)), *b]])
    pair = Ambiguous(("activation:x", "activation:y"), ("activation:z",), "why")
    result = dataclasses.replace(
        result, ambiguous=(pair,) * 9, notes=tuple(f"note {i} " + "word " * 60 for i in range(9))
    )
    text = summary.text(result)
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    assert "DIFFERS (121 pairs of sites, step 0)" in lines
    counts = [line.split() for line in lines if line.split()[:1] in (["cells"], ["forward"], ["backward"])]
    assert counts == [["cells", "same", "differs"], ["forward", "1", "60"], ["backward", "0", "60"]]
    assert lines[lines.index("First, in step 0:") + 1].startswith("  activation:layers.0.a_rather_long")
    assert "    differs, step 0, float64, relative 0.001, " in text and " ulp" in text
    assert "Only in A: 1 sites: activation:only.here" in text
    assert "Ambiguous, which --map can settle: 9" in text and "  activation:x, activation:y with activation:z" in text
    assert "6 more notes are in --json and --html" in text


def test_worst_sites_come_first(tmp_path):
    x = np.linspace(1, 2, 50)
    names = "abcdefgh"
    a = [site(n, x) for n in names]
    b = [site(n, x * (1 + 10.0 ** -(8 - i))) for i, n in enumerate(names)]
    text = summary.text(compared(tmp_path, [a], [b])).partition("Largest distances:")[2]
    found = [line.strip() for line in text.splitlines() if line.startswith("  activation")]
    assert found == [f"activation:{n}" for n in "hgfed"]


@pytest.mark.parametrize(
    ("x", "text"), [(0, "0"), (999999, "999999"), (12345678, "1.2e+07"), (0.00123, "0.0012"), (float("inf"), "inf")]
)
def test_numbers(x, text):
    assert summary.number(x) == text
