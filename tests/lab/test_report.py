"""The report of a short comparison: what it says of the runs, and that its plots show their losses."""

import copy
import json

import numpy as np
import pytest

from diptych.lab import report
from diptych.lab.cli import main

pytestmark = pytest.mark.slow  # another whole comparison; test_compare.py checks the report of one with the tests

TINY = [
    *("--width", "32", "--layers", "1", "--heads", "2", "--seq", "16", "--batch", "2", "--steps", "4"),
    *("--eval-every", "2", "--eval-batches", "1", "--no-compile", "--trace-steps", "2", "--quiet", "--threads", "1"),
]


@pytest.fixture(scope="module")
def results(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("short")
    main(["compare", "--recipe", "fp8-block", "--data", str(text), "--out", str(out), *TINY])
    return json.loads((out / "results.json").read_text())


def test_it_says_how_the_runs_were_compiled(results):
    compiled = copy.deepcopy(results)
    compiled["settings"]["compile"] = True
    texts = [" ".join(report.render(r, []).split()) for r in (results, compiled)]
    said = " Here torch ran eagerly, and JAX compiled: their reductions", " Both runs are compiled: their reductions"
    assert [[s in text for s in said] for text in texts] == [[True, False], [False, True]]


@pytest.fixture
def figures(monkeypatch):
    """Plots are figures then."""
    monkeypatch.setattr(report, "_svg", lambda fig: fig)
    yield
    report.plt.close("all")


def test_losses_above_the_entropy_are_seen_where_most_are(results, figures):
    assert min(min(run["losses"]) for run in results["runs"].values()) > 1.3 * results["entropy"]
    highest = max(max(run["losses"]) for run in results["runs"].values())
    assert all(ax.get_ylim()[1] > highest for ax in report._losses(results).axes)
    trained = copy.deepcopy(results)
    for run in trained["runs"].values():
        run["losses"][1:] = [0.9 * trained["entropy"]] * 3
    assert all(ax.get_ylim()[1] == 1.3 * trained["entropy"] for ax in report._losses(trained).axes)


def test_plots_count_steps_from_0(results, figures):
    losses, differences = report._losses(results), report._differences(results)
    for ax in (*losses.axes, *differences.axes):
        training = [line for line in ax.lines if len(line.get_xdata()) == 4]
        assert all(list(line.get_xdata()) == [0, 1, 2, 3] for line in training)
    assert sum(len(line.get_xdata()) == 4 for line in losses.axes[0].lines) == 2


def test_the_legend_of_the_drift_lies_outside(results, figures):
    fig = report._drift(results)
    fig.canvas.draw()
    (legend,), (ax,) = fig.legends, fig.axes
    assert ax.get_legend() is None and not legend.get_window_extent().overlaps(ax.get_tightbbox())
    assert np.isfinite(ax.get_ylim()).all()
