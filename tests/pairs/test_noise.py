"""R of rounding alone on the pairs: 16 runs whose inputs are moved by one ulp, against the run that is not moved."""

import dataclasses

import numpy as np
import pytest

from diptych.lab.diff.differ import diff
from diptych.lab.diff.result import GREEN

from .lab_runs import trace
from .models import NAMES, draw

RUNS = 16
INPUTS = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight", "vit": "pixel_values"}
"""Models of text begin with a table of embeddings."""


def moved(pair, seed):
    """The pair with each element of its input one float32 up or down."""
    rng, name = np.random.default_rng(seed), INPUTS[pair.name]
    of = "weights" if name in pair.weights else "inputs"
    held = getattr(pair, of)
    x = np.asarray(held[name], np.float32)
    up = rng.random(x.shape) < 0.5
    x = np.nextafter(x, np.where(up, np.inf, -np.inf).astype(np.float32)).astype(held[name].dtype)
    return dataclasses.replace(pair, **{of: {**held, name: x}})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_r_stays_below_its_bound(name, tmp_path):
    pair = draw(name, 0)
    a, h = (trace(pair, "torch", dtype, tmp_path / dtype) for dtype in ("float32", "float64"))
    noise = []
    for seed in range(RUNS):
        result = diff(a, trace(moved(pair, seed), "torch", "float32", tmp_path / str(seed)), [h])
        cells = [(row, cell) for row in result.rows for cell in row.cells]
        findings = [row.a for row, cell in cells if cell.verdict not in GREEN]
        assert not findings, (seed, findings)
        noise += [(cell.noise, np.prod(row.shape)) for row, cell in cells if cell.noise is not None]
    large = [r for r, size in noise if size >= 100]
    assert len(large) > RUNS * 20 and max(large) <= 2
    assert sum(r > 0.5 for r in large) > RUNS  # the runs do differ from A
