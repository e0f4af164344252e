"""prepare_weights: weights quantized after the optimizer's step give the bits of those quantized in forward."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import diptych.torch as dt
from diptych import core
from diptych.common import CustomRecipe, Float8CurrentScalingQuantizer, MXFP8Quantizer
from diptych.common.errors import ArgumentError
from diptych.common.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = pytest.mark.sampled

RECIPES = {
    "current": Float8CurrentScaling(),
    "block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
    "delayed": DelayedScaling(),
}
STATELESS = ("current", "block", "mxfp8", "nvfp4")
MUCH = 1 << 30


def model(device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Returns a model of several kinds of modules, with weights of several shapes."""
    torch.manual_seed(3)
    layers = [
        dt.Linear(64, 96),
        dt.LayerNormLinear(96, 128, bias=False),
        dt.LayerNormMLP(128, 160),
        nn.Sequential(dt.Linear(128, 48, bias=False)),
    ]
    return nn.Sequential(*layers).to(device=device, dtype=dtype)


def optimizer(m: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(m.parameters(), lr=0.01, **options)


def train(m: Any, opt: Any, recipe: Any, steps: int = 3, change: Any = None) -> list[torch.Tensor]:
    """Returns all outputs, gradients and weights of some steps of two microbatches."""
    seen, device = [], next(m.parameters()).device
    for step in range(steps):
        opt.zero_grad()
        if change is not None:
            change(m, step)
        for half in range(2):
            torch.manual_seed(100 * step + half)
            x = torch.randn(32, 64, dtype=torch.bfloat16).to(device).requires_grad_(half == 0)
            with dt.autocast(recipe=recipe):
                y = m(x)
            y.float().square().sum().backward()
            seen += [y.detach().clone()] + ([] if x.grad is None else [x.grad])
        seen += [p.grad.clone() for p in m.parameters()]
        opt.step()
        seen += [p.detach().clone() for p in m.parameters()]
    return seen


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(g.view(torch.uint8), w.view(torch.uint8)), i


def calls(name: str = "quantize") -> int:
    return sum(row["calls"] for row in core.kernel_table() if row["op"] == name)


def layers(m: Any) -> list[Any]:
    parts = [module._prepared for module in m.modules() if getattr(module, "_prepared", None) is not None]
    return [one for part in parts for one in part.by_layer.values()]


def used(m: Any) -> list[bool]:
    """Whether each layer holds copies that it may use."""
    return [one.copies is not None for one in layers(m)]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["", "foreach"])
def test_bits(device, name, options):
    recipe = RECIPES[name]
    want = train(m := model(device), optimizer(m, **options), recipe)
    m = model(device)
    opt = optimizer(m, **options)
    prepared = dt.prepare_weights(m, opt, max_bytes=MUCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "delayed" else "error")
        same(train(m, opt, recipe), want)
    assert used(m) == [name != "delayed"] * 5 and (prepared.nbytes > 0) == (name != "delayed")


@pytest.mark.parametrize("name", STATELESS)
def test_forwards_do_not_quantize_prepared_weights(name):
    m = model()
    opt = optimizer(m)
    prepared = dt.prepare_weights(m, opt, max_bytes=MUCH)
    train(m, opt, RECIPES[name], 1)
    counts = []
    for on in (True, False):
        if not on:
            prepared.remove()
            assert used(m) == [] and prepared.nbytes == 0
        core.reset_calls()
        with dt.autocast(recipe=RECIPES[name]):
            m(torch.ones(32, 64, dtype=torch.bfloat16))
        counts.append(calls())
    assert counts[1] - counts[0] == 5
    before = calls("quantize_many")
    opt.step()
    assert calls("quantize_many") == before


def test_the_whole_model_is_one_call_for_each_kind():
    m = model()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    train(m, opt, RECIPES["current"], 1)
    core.reset_calls()
    opt.step()
    assert calls("quantize_many") == 1


def scaled(m: nn.Module, step: int) -> None:
    with torch.no_grad():
        for i, p in enumerate(m.parameters()):
            if i % 2 == step % 2:
                p.mul_(1.5)


def moved(m: nn.Module, step: int) -> None:
    """Other memory, with other values, under an unchanged version."""
    for p in m.parameters():
        p.data = p.data * 1.25


def moved_back(m: nn.Module, step: int) -> None:
    """Memory that may be the first again, with other values, under an unchanged version."""
    for _ in range(2):
        moved(m, step)


def replaced(m: Any, step: int) -> None:
    m[0].weight = nn.Parameter(m[0].weight.detach() * 2)


def loaded(m: nn.Module, step: int) -> None:
    m.load_state_dict({k: v * 0.5 if v.is_floating_point() else v for k, v in m.state_dict().items()})


@pytest.mark.parametrize("change", [scaled, moved, moved_back, replaced, loaded], ids=lambda f: f.__name__)
def test_stale_copies_are_not_used(device, change):
    for name in STATELESS:
        want = train(m := model(device), optimizer(m), RECIPES[name], change=change)
        m = model(device)
        opt = optimizer(m)
        dt.prepare_weights(m, opt, max_bytes=MUCH)
        same(train(m, opt, RECIPES[name], change=change), want)


def test_other_recipes_and_modes_between_steps(device):
    """A recipe that changes, an evaluation in another one, and no region at all."""

    def run(prepare: bool) -> list[torch.Tensor]:
        m = model(device)
        opt = optimizer(m)
        if prepare:
            dt.prepare_weights(m, opt, max_bytes=MUCH)
        seen = []
        x = torch.ones(32, 64, dtype=torch.bfloat16, device=device)
        for name in ("current", "block", "current", "nvfp4", "nvfp4"):
            seen += train(m, opt, RECIPES[name], 1)
            for other in ("mxfp8", name):
                with dt.autocast(recipe=RECIPES[other]), torch.no_grad():
                    seen.append(m.eval()(x))
                m.train()
            seen.append(m(x).detach())
        return seen

    same(run(True), run(False))


def test_a_recipe_with_another_copy_for_backward_alone():
    """The next step makes the copies that the new recipe reads."""

    def other(role: Any) -> Any:
        return Float8CurrentScalingQuantizer() if role.gemm == "dgrad" else MXFP8Quantizer()

    m = model()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    train(m, opt, RECIPES["mxfp8"])
    train(m, opt, CustomRecipe(other), 1)
    for one in layers(m):
        assert any([isinstance(call.quantizer, Float8CurrentScalingQuantizer) for call in one.calls])


def test_checkpointing(device):
    def run(prepare: bool, reentrant: bool) -> list[torch.Tensor]:
        m = model(device)
        opt = optimizer(m)
        if prepare:
            dt.prepare_weights(m, opt, max_bytes=MUCH)
        seen = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(32, 64, dtype=torch.bfloat16).to(device).requires_grad_()
            with dt.autocast(recipe=RECIPES["block"]):
                y = torch.utils.checkpoint.checkpoint(m, x, use_reentrant=reentrant)
                y.float().sum().backward()
            opt.step()
            opt.zero_grad()
            seen += [y.detach(), x.grad, *[p.detach().clone() for p in m.parameters()]]
        return seen

    for reentrant in (False, True):
        same(run(True, reentrant), run(False, reentrant))


@pytest.mark.parametrize("fit", range(6))
def test_bound(fit):
    m = model()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    train(m, opt, RECIPES["current"], 1)
    sizes = [sum(t.nbytes for copy in one.copies for t in copy[:3] if t is not None) + 4 for one in layers(m)]
    m = model()
    opt = optimizer(m)
    prepared = dt.prepare_weights(m, opt, max_bytes=sum(sizes[:fit]))
    want = train(other := model(), optimizer(other), RECIPES["current"])
    same(train(m, opt, RECIPES["current"]), want)
    assert used(m) == [i < fit for i in range(5)] and prepared.nbytes == sum(sizes[:fit])


def test_experts(device):
    def run(prepare: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        m = dt.GroupedLinear(3, 64, 48, bias=False).to(device=device, dtype=torch.bfloat16)
        opt = optimizer(m)
        if prepare:
            dt.prepare_weights(m, opt, max_bytes=MUCH)
        seen = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.randn(96, 64, dtype=torch.bfloat16).to(device)
            with dt.autocast(recipe=RECIPES["mxfp8"]):
                y = m(x, [32, 32, 32])
            y.float().sum().backward()
            opt.step()
            seen += [y.detach(), *[p.detach().clone() for p in m.parameters()]]
        assert not prepare or used(m) == [True]
        return seen

    same(run(True), run(False))


def test_prepared_copies_are_no_state():
    m = model()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    keys = list(m.state_dict())
    want = train(model_ := copy.deepcopy(m), optimizer(model_), RECIPES["current"])
    train(m, opt, RECIPES["current"], 1)
    assert list(m.state_dict()) == keys
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert used(other) == [] and all(getattr(part, "_prepared", None) is None for part in other.modules())
    same(train(fresh := model(), optimizer(fresh), RECIPES["current"]), want)


def test_compiled_graphs_quantize_themselves_and_say_so():
    recipe = RECIPES["current"]
    m = nn.Sequential(dt.Linear(64, 32), dt.Linear(32, 16)).bfloat16()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    plain = copy.deepcopy(m)
    other = optimizer(plain)
    x = torch.randn(16, 64, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="prepare_weights: a compiled graph"), dt.autocast(recipe=recipe):
        compiled(x)
    for step in range(3):
        for f, o in ((m if step == 1 else compiled, opt), (plain, other)):
            o.zero_grad()
            with dt.autocast(recipe=recipe):
                f(x).float().sum().backward()
            o.step()
        same([p.detach() for p in m.parameters()], [p.detach() for p in plain.parameters()])


def updates() -> int:
    return calls("scale_update_many") + calls("scale_update")


def test_one_update_of_scales_after_a_step():
    m = model()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    x, counts = torch.ones(32, 64, dtype=torch.bfloat16), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            for _ in range(2):
                before = updates()
                with dt.autocast(recipe=RECIPES["delayed"]):
                    m(x).float().sum().backward()
                counts.append(updates() - before)
            opt.step()
    assert counts == [5, 5, 1, 5, 1, 5]


def most_of(history: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    return history.amax(1) * 0 + amax


KINDS = ["skipped", "loaded", "recipe", "evaluated", "own", "copied", "compiled", "saved", "given", "frozen"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_joint_updates_have_the_same_bits(device, kind):
    """Where layers skip a region, states are loaded or copied, recipes change or are given to a module, graphs share
    the states, a module is frozen in evaluation mode."""

    def run(prepare: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        m = model(device)
        opt = optimizer(m)
        if prepare:
            dt.prepare_weights(m, opt, max_bytes=MUCH)
        compiled = torch.compile(m[2], backend="aot_eager")
        seen, recipes = [], [DelayedScaling(), DelayedScaling(margin=2), Float8CurrentScaling()]
        for step in range(6):
            torch.manual_seed(step)
            x = torch.randn(32, 64, dtype=torch.bfloat16).to(device).requires_grad_()
            recipe = recipes[step // 2] if kind == "recipe" else recipes[0]
            if kind == "own":
                recipe = DelayedScaling(amax_compute_algo=most_of)
            if kind == "loaded" and step % 2:
                m.load_state_dict({k: v * 2 if k.endswith("scale") else v for k, v in m.state_dict().items()})
            if kind == "given" and step == 3:
                m[1].recipe = DelayedScaling(amax_compute_algo="most_recent", margin=1)
            if kind == "frozen":
                m[1].train(step != 3)
            if kind == "evaluated":
                with dt.autocast(recipe=recipe), torch.no_grad():
                    seen.append(m.eval()(x))
                m.train()
            with dt.autocast(recipe=recipe):
                y = m[1](m[0](x))
                if not (kind == "skipped" and step in (1, 2, 4)):
                    y = m[3]((compiled if kind == "compiled" and step % 3 == 1 else m[2])(y))
            y.float().square().sum().backward()
            opt.step()
            opt.zero_grad()
            if kind == "copied" and step == 2:
                m = copy.deepcopy(m)
                opt = optimizer(m)
                if prepare:
                    dt.prepare_weights(m, opt, max_bytes=MUCH)
            seen += [y.detach(), x.grad]
            if kind in ("saved", "frozen"):
                seen += [t.detach().clone() for _, t in sorted(m.state_dict().items())]
        return [*seen, *[t.detach() for _, t in sorted(m.state_dict().items())]]

    same(run(True), run(False))


def test_unsupported_recipes_warn_once():
    m = model()
    opt = optimizer(m)
    dt.prepare_weights(m, opt, max_bytes=MUCH)
    with pytest.warns(UserWarning, match="prepare_weights: .* quantized in forward"):
        train(m, opt, RECIPES["delayed"], 1)


def test_refuses():
    m, good = model(), {"max_bytes": 1}
    opt = optimizer(m)
    bad: Any
    for bad, error, words in (
        (((1, opt), good), ArgumentError, "model must be a torch.nn.Module, got int"),
        (((m, m), good), ArgumentError, "optimizer must be a torch.optim.Optimizer, got Sequential"),
        (((m, opt), {"max_bytes": 1.5}), ArgumentError, "max_bytes must be an int, got float"),
        (((m, opt), {"max_bytes": True}), ArgumentError, "max_bytes must be an int, got bool"),
        (((m, opt), {"max_bytes": -1}), ValueError, "max_bytes must be 0 or more, got -1"),
        (((nn.Linear(2, 2), opt), good), ValueError, "no module of diptych.torch"),
    ):
        with pytest.raises(error, match=words):
            dt.prepare_weights(*bad[0], **bad[1])
    held = dt.prepare_weights(m, opt, **good)
    with pytest.raises(ValueError, match=r"prepared already; remove\(\) that first"):
        dt.prepare_weights(m[0], opt, **good)
    held.remove()
    held.remove()
    dt.prepare_weights(m, opt, **good)
