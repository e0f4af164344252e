"""The states that check_states reports, and those that it does not."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.common import DelayedScaling, MXFP8BlockScaling
from torch_frontend.tools import normal, same

RECIPE = DelayedScaling(amax_history_len=8)


def _step(module, x, dy=1.0, recipe=RECIPE):
    with dt.autocast(recipe=recipe):
        y = module(x.clone().requires_grad_())
    y.backward(torch.full_like(y, dy))


def _model():
    torch.manual_seed(1)
    return torch.nn.Sequential(dt.Linear(32, 32), dt.Linear(32, 32))


def _names(rows):
    return [row.name for row in rows]


@pytest.mark.parametrize("compiled", (False, pytest.param(True, marks=pytest.mark.slow)))
def test_a_healthy_model_has_no_findings(compiled):
    model, x = _model(), normal("x", (16, 32))
    call = model
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager")
    for step in range(5):
        _step(call, x * (step + 1))
    report = dt.check_states(model)
    assert str(report) == "6 delayed scales: 0 frozen, 0 outlying, 0 unused"
    first = report.rows[0]
    assert first.name == "0.scale_states.input" and first.steps == 4 and first.finding == ""
    assert first.scale == model[0].scale_states.input.scale.item()
    assert first.newest == first.largest == dt.amax(x * 4).item() and first.median == dt.amax(x * 3).item()
    assert str(dt.check_states(torch.nn.Linear(2, 2))) == "0 delayed scales: 0 frozen, 0 outlying, 0 unused"


def test_an_outlier_and_how_long_it_stays():
    model, x = _model(), normal("x", (16, 32))
    for factor in (1.0, 1.0, 1e5, 1.0, 1.0, 1.0):
        _step(model, x * factor)
    report = dt.check_states(model)
    assert _names(report.outlying) == ["0.scale_states.input"]  # its product saturates
    said = str(report).splitlines()[1]
    history = model[0].scale_states.input.amax_history
    assert history[5] == dt.amax(x * 1e5)
    want = "  0.scale_states.input: outlying, one amax is 1e+05 times the median and sets the scale for 5 more updates"
    assert said.startswith(want)
    for _ in range(4):
        _step(model, x)
    assert dt.check_states(model).outlying[0].detail.endswith("for 1 more updates")
    _step(model, x)
    assert not dt.check_states(model).outlying
    recent = _model()
    for factor in (1.0, 1.0, 1e5, 1.0, 1.0, 1.0):
        _step(recent, x * factor, recipe=DelayedScaling(amax_history_len=8, amax_compute_algo="most_recent"))
    assert not dt.check_states(recent).outlying  # it sets nothing any more
    assert dt.check_states(model, outlier=1.0001).rows == dt.check_states(model).rows


def test_frozen_and_unused():
    model, x = dt.prepare(_model(), RECIPE), normal("x", (16, 32))
    report = dt.check_states(model)
    assert _names(report.unused) == _names(report.rows) and len(report.rows) == 6
    assert report.unused[0].detail == "nothing has been recorded"
    for _ in range(5):
        _step(model[0], x, 0.0)  # gradients of 0
    report = dt.check_states(model)
    assert _names(report.frozen) == ["0.scale_states.grad_output"]
    assert report.frozen[0].detail == "others of its layer have amaxes of 4 steps" and report.frozen[0].scale == 1.0
    assert _names(report.unused) == [f"1.scale_states.{s}" for s in ("input", "weight", "grad_output")]
    other = _model()
    other.load_state_dict(model.state_dict())
    assert {row.detail for row in dt.check_states(other).unused} == {"no recipe has used it since it was loaded"}
    for key, t in other.state_dict().items():  # looking changes nothing
        same(t, model.state_dict()[key], key)
    model[0].scale_states.input.amax_history[3] = torch.inf
    assert "not finite" in dt.check_states(model).frozen[0].detail


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"^check_states: model must be a torch\.nn\.Module, got int"):
        dt.check_states(3)
    with pytest.raises(ValueError, match=r"^check_states: outlier must be greater than 1, got 1"):
        dt.check_states(_model(), outlier=1)
    assert not dt.check_states(dt.prepare(_model(), MXFP8BlockScaling())).rows
