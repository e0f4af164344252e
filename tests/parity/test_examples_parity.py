"""The mixture of experts of examples/ in both panels: the whole layer has the same bits, and its models learn alike."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sweeps import others_slow

import cases
from diptych.common import RECIPES, Recipe
from diptych.common.layers.groups import row_align
from diptych.common.ops.activation import ACTIVATIONS
from diptych.jax.functional import activation as jax_activation
from diptych.torch.functional import activation as torch_activation
from parity.panels import backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch, torch

pytestmark = pytest.mark.sampled

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # a dataclass looks its module up
    spec.loader.exec_module(module)
    return module


torch_moe, jax_moe = example("torch_moe"), example("jax_moe")
SIZES = {"width": 64, "hidden": 96, "experts": 4, "blocks": 1}
TOKENS, STEPS = 48, 3


@pytest.fixture
def exact(monkeypatch):
    """SwiGLU by the core, whose exponentials are the same in both panels."""
    options = ACTIVATIONS["swiglu"]
    monkeypatch.setattr(torch_moe, "swiglu", lambda x: torch_activation.activate(x, options))
    monkeypatch.setattr(jax_moe, "swiglu", lambda x: jax_activation.activate("silu", True, x))


def routings(label: str) -> list[tuple[np.ndarray, ...]]:
    """x, dy, each token's experts and their probabilities, of each step: in the last, one expert has no token.

    x is bfloat16: XLA does not round what it sums in bfloat16 and casts to float32 at once.
    """
    rng, out = cases.rng_for(label), []
    for i in range(STEPS):
        x, dy = (cases.draw(f"{label}-{i}-{n}", "normal", (TOKENS, SIZES["width"]), "bfloat16") for n in ("x", "dy"))
        among = SIZES["experts"] - (i == STEPS - 1)
        ids = np.argsort(rng.random((TOKENS, among)), axis=1)[:, :2].astype(np.int32)
        top = rng.random((TOKENS, 2)).astype(np.float32)
        out.append((x, dy, ids, top))
    return out


def of_torch(recipe: Recipe, weights: dict[str, np.ndarray], steps: list[Any], device: str) -> list[dict[str, Any]]:
    config, out = torch_moe.Config(**SIZES, align=row_align(recipe)), []
    layer = torch_moe.MoE(config)
    layer.load_state_dict({k: to_torch(v) for k, v in weights.items()}, strict=False)
    layer.to(device)
    dt.seed_rng(layer, 0)
    for arrays in steps:
        x, dy, ids, top = (to_torch(a, device) for a in arrays)
        layer.zero_grad(set_to_none=True)
        x.requires_grad_()
        top.requires_grad_()
        layer.router.forward = lambda _, ids=ids, top=top: (ids, top, top.sum() * 0)
        with dt.autocast(recipe=recipe):
            y, _ = layer(x)
        y.backward(dy.to(y.dtype))
        found = {"y": y, "dx": x.grad, "dprobs": top.grad}
        out.append(found | {n: p.grad for n, p in layer.named_parameters() if not n.startswith("router")})
    return out


def of_jax(recipe: Recipe, weights: dict[str, np.ndarray], steps: list[Any], device: str, patch: Any) -> Any:
    config, out = jax_moe.Config(**SIZES, align=row_align(recipe)), []
    kept = jax_moe.kept_by(recipe, config)
    rngs = {f"blocks.0.moe.{name}": dj.rng_state(0, i << 40) for i, name in enumerate(weights_of())}
    kept = jax_moe.Kept(
        {k: v for k, v in kept.states.items() if ".moe." in k}, {k: rngs[k] for k in kept.rngs if ".moe." in k}
    )
    params = {f"blocks.0.moe.{n}.weight": to_jax(w, device) for n, w in weights.items()}

    def step(kept: Any, params: Any, x: Any, dy: Any, ids: Any, top: Any) -> Any:
        states = dj.update_state(kept.states, recipe)

        def layer(params: Any, states: Any, x: Any, top: Any) -> Any:
            patch.setattr(jax_moe, "router", lambda *_: (ids, top, 0.0))
            gate = {"blocks.0.moe.router.gate.weight": None}
            return jax_moe.Model(config, recipe, params | gate, jax_moe.Kept(states, kept.rngs)).moe("blocks.0.moe", x)[
                0
            ]

        y, back = jax.vjp(layer, params, states, x, top)
        grads, news, dx, dprobs = back(dy.astype(y.dtype))
        rngs = {n: dj.rng_at(r, dj.OFFSETS) for n, r in kept.rngs.items()}
        kept = jax_moe.Kept(dj.overwrite_states(states, news), rngs)
        return kept, {"y": y, "dx": dx, "dprobs": dprobs} | {
            n.removeprefix("blocks.0.moe."): g for n, g in grads.items()
        }

    run = jax.jit(step)
    for arrays in steps:
        kept, found = run(kept, params, *(to_jax(a, device) for a in arrays))
        out.append(found)
    return out


def weights_of() -> dict[str, np.ndarray]:
    """Returns the weights of the quantized layers, in the order of their random streams."""
    found = jax_moe.Config(**SIZES).linears()
    shapes = {n.removeprefix("blocks.0.moe."): shape for n, (_, shape) in found.items() if ".moe." in n}
    return {n: cases.draw(f"moe-{n}", "normal", shape, "float32") / np.float32(8) for n, shape in shapes.items()}


def check_layer(name: str, device: str, patch: Any) -> None:
    recipe, weights = RECIPES[name], weights_of()
    label = f"moe {name} {device} {cases.report_header()}"
    steps = routings(label)
    mine = of_torch(recipe, {f"{n}.weight": w for n, w in weights.items()}, steps, device)
    for i, (t, j) in enumerate(zip(mine, of_jax(recipe, weights, steps, device, patch), strict=True)):
        assert t.keys() == j.keys()
        for part, want in t.items():
            same(j[part], want, f"step {i} {part}: {label}")


@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_has_the_same_bits(name, exact, monkeypatch):
    check_layer(name, "cpu", monkeypatch)


@pytest.mark.cuda
@pytest.mark.parametrize("name", RECIPES)
def test_the_layer_has_the_same_bits_on_cuda(name, exact, monkeypatch, cuda):
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    check_layer(name, "cuda", monkeypatch)


@pytest.mark.parametrize("name", others_slow(RECIPES, ("mxfp8",)))
def test_models_learn_alike(name):
    """Two blocks, the same initial weights and bytes: the losses of the last steps differ by 2 % at most."""
    recipe, steps, path = RECIPES[name], 60, Path(torch_moe.__file__)
    config = torch_moe.Config(width=32, hidden=64, seq=32, align=row_align(recipe))
    torch.manual_seed(0)
    params = {n: p.detach().numpy() for n, p in torch_moe.MoELanguageModel(config).named_parameters()}
    mine = torch_moe.train(recipe, steps, config=config, path=path)
    same_config = jax_moe.Config(width=32, hidden=64, seq=32, align=row_align(recipe))
    theirs = jax_moe.train(recipe, steps, config=same_config, params=params, path=path)
    assert mine[0] == pytest.approx(theirs[0], rel=2e-3)
    last = np.mean([mine[-10:], theirs[-10:]], axis=1)
    assert last[0] < mine[0] - 1.5 and abs(last[1] / last[0] - 1) < 0.02, (mine, theirs)
