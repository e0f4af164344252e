"""`check` compares a plain step with one under taps, and leaves the run that follows as if it had not been called."""

import warnings

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from diptych.lab.capture import CaptureWarning
from diptych.lab.traces import Trace
from diptych.torch import lab

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("fresh")]
RECIPES = [Float8CurrentScaling(), DelayedScaling(), Float8BlockScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]


class Layers(nn.Module):
    """Layers with delayed scales and random states, statistics of batches, random masks and fused gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = dt.Linear(32, 32, fuse_wgrad_accumulation=True), nn.BatchNorm1d(32)
        self.drop, self.last = nn.Dropout(0.2), dt.LayerNormMLP(32, 64)
        self.first.weight.main_grad = torch.zeros(32, 32)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x))))


def of(model):
    """Copies of what a step leaves, without the count of regions of the whole process."""
    found = {n: p.grad for n, p in model.named_parameters()} | {
        n: b for n, b in model.named_buffers() if "seen" not in n
    }
    return {n: t.clone() for n, t in found.items() if t is not None} | {"main": model.first.weight.main_grad.clone()}


def trained(folder, recipe, compiled, checked, prepared=False, before=0):
    """Trains for a few steps. Returns what each one leaves, and what the check said and warned of."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Layers().to(torch.bfloat16), torch.randn(16, 32, dtype=torch.bfloat16)
    model.first.weight.main_grad = torch.zeros(32, 32)
    if prepared:
        dt.prepare(model, recipe)
    run = torch.compile(model, backend="aot_eager") if compiled else model

    def step():
        with dt.autocast(recipe=recipe):
            loss = run(x).float().square().mean()
        loss.backward()
        return loss

    for _ in range(before):
        step()
    found = []
    with warnings.catch_warnings(record=True) as caught, lab.capture(model, out=folder) as t:
        warnings.simplefilter("always")
        same = t.check(step) if checked else None
        for _ in range(2):
            model.zero_grad()
            found.append({"loss": step().detach(), **of(model)})
            t.step()
    return found, same, [str(w.message) for w in caught if issubclass(w.category, CaptureWarning)]


def assert_equal(have, want):
    for one, other in zip(have, want, strict=True):
        assert one.keys() == other.keys()
        assert [n for n in one if not torch.equal(one[n], other[n])] == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize(("compiled", "prepared", "before"), [(False, False, 0), (False, False, 1), (True, True, 0)])
def test_a_check_does_not_change_the_run_that_follows(tmp_path, recipe, compiled, prepared, before):
    want, *_ = trained(tmp_path / "plain", recipe, compiled, False, prepared, before)
    have, same, warned = trained(tmp_path / "checked", recipe, compiled, True, prepared, before)
    assert same and not warned
    assert Trace.open(tmp_path / "checked").meta.plain_bits is True
    assert_equal(have, want)


@pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4BlockScaling()], ids=lambda r: type(r).__name__)
def test_states_that_compiled_code_makes_in_a_check(tmp_path, recipe):
    want, *_ = trained(tmp_path / "plain", recipe, True, False)
    have, same, warned = trained(tmp_path / "checked", recipe, True, True)
    assert same and not warned
    assert_equal(have, want)


class Kept(nn.Module):
    """Keeps what it computed: in a buffer, an attribute and a list, which it makes, replaces or writes in place."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.list = nn.Linear(4, 4), how, []
        self.register_buffer("mean", None if how == "made" else torch.zeros(4))
        if how == "attribute":
            del self.mean
            self.mean = torch.zeros(4)

    def forward(self, x):
        y = self.linear(x)
        found = y.detach().mean(0)
        if self.how == "in place":
            self.mean.mul_(0.5).add_(found)
        elif self.how == "list":
            self.list.append(found)
            return y - sum(self.list)
        else:
            self.mean = found if self.mean is None else self.mean / 2 + found
        return y - self.mean


@pytest.mark.parametrize("how", ["made", "replaced", "attribute", "in place", "list"])
def test_what_a_step_keeps_is_set_back(tmp_path, how):
    model, x = Kept(how), torch.randn(3, 4)
    mean = model.mean
    before = None if mean is None else mean.clone()
    with lab.capture(model, out=tmp_path / "t") as t:
        assert t.check(lambda: model(x).square().sum())
        assert model.mean is mean and (mean is None or torch.equal(mean, before)) and model.list == []
        model(x)
        t.step()


def test_runs_that_show_nothing_are_refused(tmp_path):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def updates():
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        optimizer.step()
        return loss

    with lab.capture(model, out=tmp_path / "t") as t:
        with pytest.raises(RuntimeError, match=r"check\(\) is given must update nothing, and changed weight, bias"):
            t.check(updates)
        with pytest.raises(RuntimeError, match="ran no module of the model"):
            t.check(lambda: torch.zeros(()))
        updates()
        t.step()
    assert Trace.open(tmp_path / "t").meta.plain_bits is None


def test_a_check_that_raises_sets_back_and_expanded_buffers_stay(tmp_path):
    model = nn.BatchNorm1d(4)
    model.register_buffer("ones", torch.ones(1).expand(4))

    def fails():
        model(torch.randn(3, 4))
        raise KeyError

    with lab.capture(model, out=tmp_path / "t") as t:
        with pytest.raises(KeyError):
            t.check(fails)
        assert model.num_batches_tracked == 0 and torch.equal(model.running_mean, torch.zeros(4))
        assert t.check(lambda: model(torch.randn(3, 4)).sum())
        model(torch.randn(3, 4))
        t.step()
