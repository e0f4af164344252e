"""Weight gradients that go elsewhere, of every module: into main_grad, and when `backward_dw` asks."""

from __future__ import annotations

import contextlib

import pytest
import torch

import diptych.torch as dt
from diptych.common import DelayedScaling, MXFP8BlockScaling
from diptych.core import reset_calls
from torch_frontend import composed
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED, all_same, train
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
        bad = (None, torch.zeros(w.shape).double(), torch.zeros(cols + 1, rows), torch.zeros(cols, rows).t())
        with dt.autocast(recipe=MX):
            for acc in bad:
                w.main_grad = acc
                reset_calls()
                with pytest.raises(ValueError, match="main_grad"):
                    module(x)
                assert calls("gemm") == 0
        with pytest.raises(ValueError, match="main_grad"):
            module(x)


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


class _Own(dt.QuantizedModule):
    def __init__(self, **kw) -> None:
        super().__init__(**kw)
        self.weight = torch.nn.Parameter(normal("own", (64, 96)))

    def forward(self, x):
        return self.quantized_linear(x, self.weight, None)


EVERY = {
    "Linear": lambda **kw: dt.Linear(96, 64, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(96, 64, **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(96, 64, activation="swiglu", **kw),
    "GroupedLinear": lambda **kw: dt.GroupedLinear(3, 96, 64, **kw),
    "own": _Own,
}
REGIONS = {
    "outside": contextlib.nullcontext,
    "disabled": lambda: dt.autocast(enabled=False),
    "calibrating": lambda: dt.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()),
    "MXFP8": lambda: dt.autocast(recipe=MX),
}


def _twins(kind, **options):
    """A plain module and one with options, of equal parameters; and the latter's weights by name."""
    torch.manual_seed(1)
    plain, module = EVERY[kind](), EVERY[kind](**options)
    module.load_state_dict(plain.state_dict())
    return plain, module, {n: p for n, p in module.named_parameters() if p.dim() > 1 and not n.endswith("bias")}


def _step(module, region, fn=None):
    x = normal("x", (64, 96))
    with REGIONS[region]():
        y = (module if fn is None else fn)(x, *([[32, 0, 32]] if isinstance(module, dt.GroupedLinear) else []))
    y.square().sum().backward()


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("delay", [False, True])
def test_gradients_go_elsewhere_in_every_region_of_every_module(kind, region, delay):
    plain, module, weights = _twins(kind, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    for n, w in weights.items():
        w.main_grad = normal(n, tuple(w.shape))
    start = {n: w.main_grad.clone() for n, w in weights.items()}
    _step(plain, region)
    _step(module, region)
    if delay:
        assert all(torch.equal(w.main_grad, start[n]) for n, w in weights.items())
        module.backward_dw()
    for n, p in plain.named_parameters():
        q = module.get_parameter(n)
        if n in weights:
            assert q.grad is None
            torch.testing.assert_close(q.main_grad - start[n], p.grad, rtol=1e-4, atol=1e-3)
        else:
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-4)
    assert {k: v.shape for k, v in module.state_dict().items()} == {k: v.shape for k, v in plain.state_dict().items()}


@pytest.mark.parametrize("region", ["outside", "MXFP8"])
@pytest.mark.parametrize("kind", EVERY)
def test_attributes_of_weights_say_how_main_grad_is_written(kind, region):
    """bfloat16 buffers, `overwrite_main_grad`, and Megatron's `grad_added_to_main_grad`, under which hooks run."""
    plain, module, weights = _twins(kind, fuse_wgrad_accumulation=True)
    ran = []
    for n, w in weights.items():
        w.main_grad = torch.full(w.shape, 1e4, dtype=torch.bfloat16)
        w.overwrite_main_grad, w.grad_added_to_main_grad = True, False
        w.register_post_accumulate_grad_hook(lambda p, n=n: ran.append((n, p.grad_added_to_main_grad)))
    for _ in range(2):
        _step(module, region)
    _step(plain, region)
    assert sorted(ran) == sorted((n, True) for n in weights for _ in range(2))
    for n, w in weights.items():
        want = plain.get_parameter(n).grad
        assert w.grad.shape == w.shape and not w.grad.any()
        torch.testing.assert_close(w.main_grad.float(), want, rtol=2**-8, atol=float(want.abs().max()) * 2**-8)
        w.overwrite_main_grad = False
    before = {n: w.main_grad.float() for n, w in weights.items()}
    _step(module, region)
    for n, w in weights.items():
        torch.testing.assert_close(w.main_grad.float(), 2 * before[n], rtol=2**-6, atol=float(before[n].max()) * 2**-6)


@pytest.mark.parametrize("kind", ["Linear", pytest.param("GroupedLinear", marks=pytest.mark.slow)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_compiled_outside_of_regions(kind, overwrite):
    results = []
    for compiling in (False, True):
        torch._dynamo.reset()
        _, module, weights = _twins(kind, fuse_wgrad_accumulation=True)
        for n, w in weights.items():
            w.main_grad, w.overwrite_main_grad = normal(n, tuple(w.shape)).bfloat16(), overwrite
        _step(module, "outside", torch.compile(module, fullgraph=True, backend="aot_eager") if compiling else None)
        results.append([w.main_grad for w in weights.values()])
        assert all(w.grad is None for w in weights.values())
    all_same(*results)


def test_a_graph_leaves_marked_weights_to_eager_code():
    torch._dynamo.reset()
    _, module, _ = _twins("Linear", fuse_wgrad_accumulation=True)
    module.weight.main_grad, module.weight.grad_added_to_main_grad = torch.zeros(64, 96), False
    with pytest.warns(dt.EagerWarning, match="grad_added_to_main_grad"):
        _step(module, "MXFP8", torch.compile(module, backend="aot_eager"))
    assert module.weight.grad_added_to_main_grad and module.weight.main_grad.any() and not module.weight.grad.any()


CELLS = [pytest.param(name, kind, id=f"{kind}-{name}", marks=() if (i + j) % len(MODULES) == 0 else pytest.mark.slow)
         for i, name in enumerate(RECIPE_NAMES) for j, kind in enumerate(MODULES)]  # fmt: skip


@pytest.mark.sampled  # test_compiled_matrix.py has each module with each recipe
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


@each_module
def test_weights_that_are_frozen_before_their_gradients_are_computed(kind):
    """An error that names the order; nothing is lost."""
    module = MODULES[kind](delay_wgrad_compute=True)
    with dt.autocast(recipe=MX):
        module(normal("x", (32, 96), "float32")).sum().backward()
    module.requires_grad_(False)
    with pytest.raises(ValueError, match="backward_dw: a weight was frozen after the backward"):
        module.backward_dw()
    module.requires_grad_()
    module.backward_dw()
    assert all(w.grad is not None for w in _weights(module).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(256, 128), (2, 64, 128), (2, 3, 32, 128)])
def test_delayed_wgrad_outside_of_regions_changes_no_gradient(shape, dtype):
    makers = {
        "Linear": lambda **kw: dt.Linear(128, 512, **kw),
        "LayerNormLinear": lambda **kw: dt.LayerNormLinear(128, 512, **kw),
        "LayerNormMLP": lambda **kw: dt.LayerNormMLP(128, 256, **kw),
    }
    for kind, make in makers.items():
        x = torch.randn(shape, dtype=getattr(torch, dtype))
        now, later = (make(dtype=x.dtype, delay_wgrad_compute=delay) for delay in (False, True))
        later.load_state_dict(now.state_dict())
        for module in (now, later):
            y = module(x)
            y.backward(torch.sin(torch.arange(y.numel())).view_as(y).to(y.dtype))
        later.backward_dw()
        for (name, p), q in zip(now.named_parameters(), later.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), (kind, name)
