"""Weight gradients that go elsewhere, of every module: into main_grad, and when `backward_dw` asks."""

from __future__ import annotations

import pytest
import torch

import diptych.torch as dt
from diptych.common import MXFP8BlockScaling
from diptych.core import reset_calls
from torch_frontend import composed, layers
from torch_frontend.layers import NAMED, all_same, train
from torch_frontend.tools import RECIPE_NAMES, calls, normal, same

MX = MXFP8BlockScaling()
MODULES = {
    "Linear": layers.layer,
    "LayerNormLinear": composed.linear,
    "LayerNormMLP": lambda **kw: composed.mlp(96, 64, **kw),
}
each_module = pytest.mark.parametrize("kind", MODULES)
each_dtype = pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)


def _weights(module) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in module.named_parameters() if p.dim() == 2}


def _with_main_grad(module, start: bool = False):
    for name, w in _weights(module).items():
        w.main_grad = normal(f"start {name}", tuple(w.shape)) if start else torch.zeros(w.shape)
    return module


@each_dtype
@each_module
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_main_grad(name, kind, dtype):
    """Float32 accumulation in the product itself: the sum of float32 gradients, also of bfloat16 weights."""
    recipe = NAMED[name]
    module = _with_main_grad(MODULES[kind](fuse_wgrad_accumulation=True, dtype=dtype, bias=False), start=True)
    want = MODULES[kind](dtype=torch.float32, bias=False)
    total = {n: w.main_grad.clone() for n, w in _weights(module).items()}
    with torch.no_grad():
        for p, q in zip(want.parameters(), module.parameters(), strict=True):
            p.copy_(q)  # the same values, gradients in float32
    for m in (module, want):
        m.seed_rng(layers.SEED)
    for i in range(2):
        for m in (module, want):
            x = normal(f"x{i}", (16, 96), "bfloat16").requires_grad_()
            with dt.autocast(recipe=recipe):
                m(x).square().sum().backward()
        for n, w in _weights(want).items():
            total[n] += w.grad
            w.grad = None
    for n, w in _weights(module).items():
        assert w.grad is None
        same(w.main_grad, total[n], n)


@each_module
def test_main_grad_that_does_not_fit(kind):
    module, x = MODULES[kind](fuse_wgrad_accumulation=True), normal("x", (4, 96))
    for w in _weights(module).values():
        _with_main_grad(module)
        rows, cols = w.shape
        bad = (None, torch.zeros(w.shape).half(), torch.zeros(cols + 1, rows), torch.zeros(cols, rows).t())
        with dt.autocast(recipe=MX):
            for acc in bad:
                w.main_grad = acc
                reset_calls()
                with pytest.raises(ValueError, match="main_grad"):
                    module(x)
                assert calls("gemm") == 0
    module(x).sum().backward()  # outside of regions it is plain
    assert all(w.grad is not None for w in _weights(module).values())


@each_dtype
@pytest.mark.parametrize("fuse", (False, True))
@each_module
@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_delayed_wgrad(name, kind, fuse, dtype):
    recipe, make = NAMED[name], MODULES[kind]
    want = _with_main_grad(make(fuse_wgrad_accumulation=fuse, dtype=dtype))
    module = _with_main_grad(make(fuse_wgrad_accumulation=fuse, delay_wgrad_compute=True, dtype=dtype))
    results = []
    for m in (want, module):
        done = train(m, recipe)
        results.append([t for t in done if t is not None and t.dim() != 2] + done[:6])
    all_same(*results)  # outputs, gradients of x and of vectors, states
    for w in _weights(module).values():
        assert w.grad is None and not w.main_grad.any()
    for _ in range(2):  # the second time nothing is left
        module.backward_dw()
        for (n, w), v in zip(_weights(module).items(), _weights(want).values(), strict=True):
            same(w.main_grad, v.main_grad, n)
            assert (w.grad is None) == fuse
            if not fuse:
                same(w.grad, v.grad, n)
    with pytest.raises(NotImplementedError, match="delay_wgrad_compute=True"):
        want.backward_dw()


def test_a_module_of_the_users_own():
    """It gets both from `QuantizedModule`."""

    class Two(dt.QuantizedModule):
        def __init__(self, **kw) -> None:
            super().__init__(**kw)
            self.fc1, self.fc2 = (torch.nn.Parameter(normal(n, (96, 96))) for n in ("w1", "w2"))

        def forward(self, x):
            return self.quantized_linear(self.quantized_linear(x, self.fc1, None, "fc1"), self.fc2, None, "fc2")

    want, module = Two(), _with_main_grad(Two(fuse_wgrad_accumulation=True, delay_wgrad_compute=True))
    for m in (want, module):
        with dt.autocast(recipe=MX):
            m(normal("x", (4, 96))).sum().backward()
    module.backward_dw()
    for w, v in zip(_weights(module).values(), _weights(want).values(), strict=True):
        same(w.main_grad, v.grad)


CELLS = [pytest.param(name, kind, id=f"{kind}-{name}", marks=() if (i + j) % len(MODULES) == 0 else pytest.mark.slow)
         for i, name in enumerate(RECIPE_NAMES) for j, kind in enumerate(MODULES)]  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), CELLS)
def test_compiled_main_grad(name, kind):
    """With the tests each recipe in one module; the other cells wait for a long sweep."""
    recipe, results = NAMED[name], []
    for compiling in (False, True):
        module = _with_main_grad(MODULES[kind](fuse_wgrad_accumulation=True), start=True)
        torch._dynamo.reset()
        fn = torch.compile(module.forward, fullgraph=True, backend="aot_eager") if compiling else None
        results.append(train(module, recipe, fn=fn) + [w.main_grad for w in _weights(module).values()])
        assert all(w.grad is None for w in _weights(module).values())
    left, right = [[t for t in done if t is not None] for done in results]
    all_same(left, right)
