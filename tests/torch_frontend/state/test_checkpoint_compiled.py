"""Checkpoints inside and around compiled code: the recomputation has the forward's scales and random bits."""

from __future__ import annotations

import itertools

import pytest
import torch

import diptych.torch as dt
from diptych.core import reset_calls
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED
from torch_frontend.layer_cases import all_same as _all_same
from torch_frontend.layer_cases import gelu_model as _model
from torch_frontend.layer_cases import train as _train
from torch_frontend.tools import calls, normal

pytestmark = pytest.mark.sampled


def compiled(fn, backend="aot_eager"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(fn, fullgraph=True, backend=backend)


def whole(graphs=1):
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs


def seeded(name):
    torch.manual_seed(0)
    model = _model()
    dt.seed_rng(model, layers.SEED)
    return model


@pytest.mark.parametrize("name", layers.one_of_each_kind(1))
def test_inside(name):
    model, plain = seeded(name), seeded(name)
    want = _train(plain, NAMED[name])
    fn = compiled(lambda x: dt.checkpoint(model, x))
    reset_calls()
    _all_same(_train(model, NAMED[name], fn=fn), want)
    assert calls("gemm") == 3 * (2 * 2 + 4)
    whole()


@pytest.mark.parametrize("name", ("fp8-delayed", layers.slow("nvfp4")))
def test_inside_through_inductor(name):
    model, plain = seeded(name), seeded(name)
    model[1] = plain[1] = torch.nn.ReLU()  # Inductor's own GELU differs from eager's in the last bit
    fn = compiled(lambda x: dt.checkpoint(model, x), "inductor")
    _all_same(_train(model, NAMED[name], fn=fn), _train(plain, NAMED[name]))
    whole()


WAYS = [("fp8-delayed", "reentrant"), ("nvfp4", "nested")]
SLOW_WAYS = [
    (name, how)
    for name in ("fp8-delayed", "nvfp4")
    for how in ("reentrant", "context_fn", "nested", "region inside", "twice", "two")
    if (name, how) not in WAYS
]


@pytest.mark.parametrize(("name", "how"), [*WAYS, *[layers.slow(*way) for way in SLOW_WAYS]])
def test_inside_in_other_ways(name, how):
    recipe = NAMED[name]
    model, plain = seeded(name), seeded(name)
    torchs = torch.utils.checkpoint.checkpoint

    def inside(x):
        with dt.autocast(recipe=recipe):
            return model(x)

    ways = {
        "reentrant": lambda x: dt.checkpoint(model, x, use_reentrant=True),
        "context_fn": lambda x: torchs(model, x, use_reentrant=False, context_fn=dt.checkpoint_contexts),
        "nested": lambda x: dt.checkpoint(lambda v: model[2](dt.checkpoint(lambda u: model[1](model[0](u)), v)), x),
        "region inside": lambda x: dt.checkpoint(inside, x),
        "twice": lambda x: dt.checkpoint(lambda u: model(model(u)), x),  # shared weights
        "two": lambda x: dt.checkpoint(model, dt.checkpoint(model, x)),
    }
    twice = how in ("twice", "two")
    want = _train(plain, recipe, fn=(lambda v: plain(plain(v))) if twice else None)
    # torch 2.11 says what to set for a region inside.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        _all_same(_train(model, recipe, fn=compiled(ways[how])), want)
    whole()


@pytest.mark.parametrize("name", layers.one_of_each_kind(2))
def test_torchs_own_is_refused_where_it_would_differ(name):
    model, plain = seeded(name), seeded(name)
    fn = compiled(lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
    if name in layers.STATELESS and not layers.packed(name):
        _all_same(_train(model, NAMED[name], fn=fn), _train(plain, NAMED[name]))
        return
    with pytest.raises(Exception, match=r"use diptych\.torch\.checkpoint"):
        _train(model, NAMED[name], fn=fn)


@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4"))
def test_torchs_own_inside_of_ours(name):
    model, plain = seeded(name), seeded(name)
    own = lambda u: torch.utils.checkpoint.checkpoint(model, u, use_reentrant=False)  # noqa: E731
    fn = compiled(lambda x: dt.checkpoint(own, x))
    if torch.__version__.startswith("2.11"):
        _all_same(_train(model, NAMED[name], fn=fn), _train(plain, NAMED[name]))
        return
    with pytest.raises(Exception, match=r"use diptych\.torch\.checkpoint"):
        _train(model, NAMED[name], fn=fn)


# --- compiled code inside of an eager checkpoint ---------------------------------------------------------------------


def _train_inside(model, recipe, fn):
    """`layers.train` of a function that enters its region itself."""
    out = []
    for i in range(3):
        x = (normal(f"x{i}", (16, 96), layers.dtype_of(recipe)) * (i + 1)).requires_grad_()
        y = fn(x)
        y.square().sum().backward()
        out += [y.detach(), x.grad]
    out += [p.grad for p in model.parameters()]
    return out + [t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k]


STATEFUL = [n for n in NAMED if n not in layers.STATELESS or layers.packed(n)]
AROUND = [(n, False, False) for n in NAMED if n not in STATEFUL]
AROUND = [AROUND[0], *[layers.slow(*given) for given in AROUND[1:]]]
for i, (name, inside, reentrant) in enumerate(itertools.product(STATEFUL, (False, True), (False, True))):
    given = (name, inside, reentrant)  # every pair of values is met
    AROUND.append(given if (i // 4 + inside + reentrant) % 2 == 0 else layers.slow(*given))


@pytest.mark.parametrize(("name", "inside", "reentrant"), AROUND)
def test_around(name, inside, reentrant):
    """The recomputation runs in the region of its forward, and by the same graph."""
    if torch.cuda.is_available():
        torch.cuda.init()  # as torch's checkpoint asks, and Inductor does when it compiles inside of one
    recipe, model, plain = NAMED[name], seeded(name), seeded(name)

    def entering(x):
        with dt.autocast(recipe=recipe):
            return model(x)

    fn = compiled(entering if inside else model)
    train = _train_inside if inside else _train
    want = _train(plain, recipe)
    reset_calls()
    _all_same(train(model, recipe, fn=lambda x: dt.checkpoint(fn, x, use_reentrant=reentrant)), want)
    assert calls("gemm") == 3 * (2 * 2 + 4)
    whole(2 if reentrant else 1)  # one of them without gradients


def test_around_after_later_steps():
    """The scales of the forward are gone from where the graph finds them: refused, and nothing has changed."""
    recipe, model = NAMED["fp8-delayed"], seeded("fp8-delayed")
    fn, ys = compiled(model), []
    for i in range(2):
        with dt.autocast(recipe=recipe):
            ys.append(dt.checkpoint(fn, normal(f"x{i}", (16, 96)).requires_grad_()))
    before = {k: t.clone() for k, t in model.state_dict().items()}
    with pytest.raises(NotImplementedError, match="a later autocast region has updated"):
        ys[0].sum().backward()
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    ys[1].sum().backward()


@pytest.mark.parametrize("reentrant", (False, True))
@pytest.mark.parametrize("name", layers.one_of_each_kind(0))
def test_torchs_own_around(name, reentrant):
    """torch's checkpoints tape the states of compiled code too."""
    recipe, model, plain = NAMED[name], seeded(name), seeded(name)
    fn = compiled(model)
    got = _train(model, recipe, fn=lambda x: torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=reentrant))
    _all_same(got, _train(plain, recipe))
