"""Modules under TransformerEngine's names: the same step as diptych.torch's, made by TransformerEngine's arguments."""

from __future__ import annotations

import inspect

import pytest
import torch

import diptych.te as te
import diptych.torch as dt
from diptych.common import RECIPES, UnsupportedError
from diptych.common.te_signatures import REQUIRED, SIGNATURES

LAYERS = {
    "Linear": ((64, 32), ()),
    "LayerNormLinear": ((64, 32), ()),
    "LayerNormMLP": ((64, 32), ()),
    "GroupedLinear": ((2, 64, 32), ([16, 16],)),
}
NORMS = ("LayerNorm", "RMSNorm")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
each_layer = pytest.mark.parametrize("name", LAYERS)


@each_layer
def test_arguments_by_position_are_those_there(name):
    cls, (sizes, _) = getattr(te, name), LAYERS[name]
    given = [v for v in SIGNATURES[name].values() if v is not REQUIRED]
    given = [DEVICE if v == "cuda" else v for v in given]
    m = cls(*sizes, *given)
    assert not m.return_bias and {p.device.type for p in m.parameters()} == {DEVICE}
    assert list(inspect.signature(cls).parameters) == [*SIGNATURES[name], "others"]
    with pytest.raises(TypeError, match=f"{name}: missing a required argument"):
        cls(sizes[0])
    with pytest.raises(TypeError, match=f"{name}: too many positional arguments"):
        cls(*sizes, *given, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        cls(*sizes, nonsense=1)
    with pytest.raises(UnsupportedError, match=f"{name}: ub_overlap_ag must be False, got True"):
        cls(*sizes, ub_overlap_ag=True)


@each_layer
def test_initial_values_and_the_device(name):
    cls, (sizes, _) = getattr(te, name), LAYERS[name]
    m = cls(*[16 * n if n > 2 else n for n in sizes])
    for n, p in m.named_parameters():
        if n.endswith("weight") and "norm" not in n:
            assert abs(p.mean().item()) < 1e-3 and abs(p.std().item() - 0.023) < 1e-3
        elif "norm" not in n:
            assert not p.any()
        assert p.device.type == DEVICE
    m = cls(*sizes, init_method=torch.nn.init.ones_, device="cpu", params_dtype=torch.bfloat16)
    weight = m.fc1_weight if name == "LayerNormMLP" else m.weight
    assert (weight == 1).all() and weight.dtype == torch.bfloat16


@each_layer
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_is_diptych_torchs(name, recipe):
    sizes, splits = LAYERS[name]
    ours, theirs = getattr(dt, name)(*sizes, device="cpu"), getattr(te, name)(*sizes, device="cpu")
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(32, 64).bfloat16()
    for m, region in ((ours, dt.autocast), (theirs, te.autocast)):
        m.bfloat16()
        dt.seed_rng(m, 1)
        with region(recipe=RECIPES[recipe]):
            m(x, *splits).float().square().sum().backward()
    assert isinstance(theirs, type(ours))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("name", NORMS)
def test_norms(name):
    m = getattr(te, name)(64, 1e-3, True, torch.float16, True)
    assert m.eps == 1e-3 and m.zero_centered_gamma and not m.weight.any() and m.weight.dtype == torch.float16
    assert all(p.sequence_parallel for p in m.parameters()) and m.weight.device.type == DEVICE
    plain = getattr(te, name)(64, sequence_parallel=False, device="cpu")
    assert not plain.weight.sequence_parallel and not hasattr(getattr(te, name)(64).weight, "sequence_parallel")
    x = torch.randn(4, 64)
    assert torch.equal(plain(x), getattr(dt, name)(64)(x)) and isinstance(m, getattr(dt, name))
    with pytest.raises(UnsupportedError, match=f"{name}: sm_margin must be 0"):
        getattr(te, name)(64, sm_margin=2)


def test_without_a_gpu_cuda_is_refused_by_torch():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((AssertionError, RuntimeError), match=r"(?i)cuda"):
        te.Linear(16, 16, device="cuda")


@each_layer
def test_backward_dw_is_for_gradients_that_wait(name):
    sizes, splits = LAYERS[name]
    now, later = (getattr(te, name)(*sizes, device="cpu", delay_wgrad_compute=delay) for delay in (False, True))
    later.load_state_dict(now.state_dict())
    x = torch.randn(32, 64)
    for m in (now, later):
        m(x, *splits).square().sum().backward()
    weight = "fc1_weight" if name == "LayerNormMLP" else "weight"
    assert getattr(later, weight).grad is None
    for m in (now, later):
        m.backward_dw()
    for p, q in zip(now.parameters(), later.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
