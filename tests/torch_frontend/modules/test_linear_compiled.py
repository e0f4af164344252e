"""The training surface of Linear under torch.compile: what eager code does, to the bit, and in how many graphs."""

from __future__ import annotations

import contextlib

import pytest
import torch

import diptych.torch as dt
from diptych.common import MXFP8BlockScaling
from torch_frontend import layer_cases as layers
from torch_frontend.layer_cases import NAMED
from torch_frontend.layer_cases import all_same as _all_same
from torch_frontend.layer_cases import gelu_model as _model
from torch_frontend.tools import normal

pytestmark = pytest.mark.sampled

MX = MXFP8BlockScaling()
counters = torch._dynamo.utils.counters


def compiled(fn, backend="aot_eager"):
    torch._dynamo.reset()
    counters.clear()
    return torch.compile(fn, fullgraph=True, backend=backend)


def whole(graphs):
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == graphs
    return True


def states(model):
    return [t.clone() for k, t in model.state_dict().items() if "scale_states" in k or "rng" in k]


def accumulate(layer, recipe, fn, each):
    """Three steps of three microbatches, the weight changed between steps. `each(i)`: keywords of microbatch i."""
    layer.seed_rng(layers.SEED)
    out = []
    for step in range(3):
        with dt.autocast(recipe=recipe):
            for i in range(3):
                x = normal(f"x{step}{i}", (16, 96), layers.dtype_of(recipe)).requires_grad_()
                y = fn(x, **each(i))
                y.square().sum().backward()
                out += [y.detach(), x.grad]
        out.append(layer.weight.grad if layer.weight.grad is not None else layer.weight.main_grad.clone())
        layer.zero_grad(set_to_none=True)
        with torch.no_grad():
            layer.weight.mul_(1.5)
    return out + states(layer)


# --- microbatches ---


@pytest.mark.parametrize("name", layers.one_of_each_kind(0))
def test_weight_caching(name):
    recipe = NAMED[name]
    plain, layer = layers.layer(), layers.layer()

    def first(i):
        return {"is_first_microbatch": i == 0}

    want = accumulate(plain, recipe, plain, first)
    _all_same(accumulate(layer, recipe, compiled(layer), first), want)
    whole(2)


def test_weight_caching_and_none():
    plain, layer = layers.layer(), layers.layer()

    def each(i):
        return {"is_first_microbatch": (None, True, False)[i]}

    want = accumulate(plain, MX, plain, each)
    _all_same(accumulate(layer, MX, compiled(layer), each), want)
    whole(3)


@pytest.mark.parametrize("name", ("fp8-delayed", "fp8-block", "nvfp4"))
def test_the_flag_that_skips_on_the_device(name):
    recipe = NAMED[name]
    plain, layer = layers.layer(), layers.layer()

    def each(i):
        return {"skip_weight_update": torch.tensor([float(i > 0)])}

    want = accumulate(plain, recipe, plain, each)
    _all_same(accumulate(layer, recipe, compiled(layer), each), want)
    whole(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("fp8-delayed", "nvfp4"))
@pytest.mark.parametrize("flag", ("is_first_microbatch", "skip_weight_update"))
@pytest.mark.parametrize("where", ("inside", "around"))
def test_weight_caching_under_a_checkpoint(where, flag, name):
    recipe = NAMED[name]
    plain, layer = layers.layer(), layers.layer()

    def each(i):
        return {flag: i == 0 if flag == "is_first_microbatch" else torch.tensor([float(i > 0)])}

    made = flag == "skip_weight_update" and where == "around"  # or the recomputation finds copies, and the forward none
    if made:
        for m in (plain, layer):
            m.seed_rng(layers.SEED)
            with torch.no_grad(), dt.autocast(recipe=recipe):
                m(layers.x_for(recipe, 16), skip_weight_update=torch.zeros(1))
    want = accumulate(plain, recipe, plain, each)
    if where == "inside":
        fn = compiled(lambda x, **kw: dt.checkpoint(layer, x, **kw))
    else:
        graph = compiled(layer)
        fn = lambda x, **kw: dt.checkpoint(graph, x, **kw)  # noqa: E731
    _all_same(accumulate(layer, recipe, fn, each), want)
    whole(1 if flag == "skip_weight_update" else 2)


def test_caching_in_a_compiled_checkpoint():
    plain, layer = layers.layer(), layers.layer()

    def each(i):
        return {"is_first_microbatch": i == 0}

    want = accumulate(plain, MX, plain, each)
    _all_same(accumulate(layer, MX, compiled(lambda x, **kw: dt.checkpoint(layer, x, **kw)), each), want)
    whole(2)


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("fp8-delayed", "skip_weight_update"),
        ("mxfp8", "is_first_microbatch"),
        layers.slow("mxfp8", "skip_weight_update"),
    ],
)
def test_through_inductor(name, flag):
    """All of it at once; E8M0 scales, which Inductor's C++ does not know, too."""
    recipe = NAMED[name]
    plain, layer = (layers.layer(fuse_wgrad_accumulation=True) for _ in "ab")
    for m in (plain, layer):
        m.weight.main_grad = torch.zeros(64, 96)

    def each(i):
        return {flag: i == 0 if flag == "is_first_microbatch" else torch.tensor([float(i > 0)])}

    want = accumulate(plain, recipe, plain, each)
    fn = compiled(lambda x, **kw: dt.checkpoint(layer, x, **kw), "inductor")
    _all_same(accumulate(layer, recipe, fn, each), want)
    whole(2 if flag == "is_first_microbatch" else 1)


# --- gradients that go elsewhere ---


@pytest.mark.parametrize("name", layers.one_of_each_kind(1))
def test_main_grad(name):
    recipe = NAMED[name]
    plain, layer = (layers.layer(fuse_wgrad_accumulation=True) for _ in "ab")
    for m in (plain, layer):
        m.weight.main_grad = torch.zeros(64, 96)
    want = accumulate(plain, recipe, plain, lambda i: {})
    _all_same(accumulate(layer, recipe, compiled(layer), lambda i: {}), want)
    whole(1)


@pytest.mark.slow
@pytest.mark.parametrize("where", ("inside", "around"))
@pytest.mark.parametrize("name", ("fp8-delayed", "mxfp8", "nvfp4"))
def test_main_grad_under_a_checkpoint(name, where):
    recipe = NAMED[name]
    plain, layer = (layers.layer(fuse_wgrad_accumulation=True) for _ in "ab")
    for m in (plain, layer):
        m.weight.main_grad = torch.zeros(64, 96)
    want = accumulate(plain, recipe, plain, lambda i: {})
    if where == "inside":
        fn = compiled(lambda x: dt.checkpoint(layer, x))
    else:
        graph = compiled(layer)
        fn = lambda x: dt.checkpoint(graph, x)  # noqa: E731
    _all_same(accumulate(layer, recipe, fn, lambda i: {}), want)
    whole(1)


# --- what is saved ---


def _hooks(how):
    if how == "eager":
        return contextlib.nullcontext()
    if how == "save_on_cpu":
        return torch.autograd.graph.save_on_cpu()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: (t.clone(), t.device), lambda p: p[0])


@pytest.mark.parametrize("name", layers.one_of_each_kind(2))
def test_saved_tensors_go_to_the_host(name):
    """By hooks around the compiled call. What backward adds to is no saved tensor: it stays the caller's."""
    recipe = NAMED[name]
    results = []
    for how in ("eager", "save_on_cpu", "own"):
        layer = layers.layer(fuse_wgrad_accumulation=True)
        layer.weight.main_grad = torch.zeros(64, 96)
        fn = layer if how == "eager" else compiled(layer)

        def hooked(x, fn=fn, how=how):
            with _hooks(how):
                return fn(x)

        results.append(accumulate(layer, recipe, hooked, lambda i: {}))
        assert how == "eager" or whole(1)
        _all_same(results[-1], results[0])


def test_hooks_inside_of_compiled_code_are_refused():
    """By Dynamo: without fullgraph it breaks the graph there."""
    layer = layers.layer()

    def inside(x):
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    with dt.autocast(recipe=MX), pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(inside)(normal("x", (16, 96)).requires_grad_())


# --- quantized weights ---


@pytest.mark.parametrize("name", layers.one_of_each_kind(1))
def test_held_quantized(name):
    """Steps with master weights, then inference."""
    recipe = NAMED["fp8-current" if name == "fp8-delayed" else name]
    results = []
    for compile_it in (False, True):
        torch.manual_seed(1)
        with dt.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
            layer = dt.Linear(96, 64)
        layer.seed_rng(layers.SEED)
        fn = compiled(layer) if compile_it else layer
        master = layer.weight.get_high_precision_init_val().clone()
        optimizer, out = torch.optim.AdamW([master], lr=0.05), []
        for i in range(3):
            x = normal(f"x{i}", (16, 96), layers.dtype_of(recipe)).requires_grad_()
            layer.zero_grad(set_to_none=True)
            with dt.autocast(recipe=recipe):
                y = fn(x)
            y.square().sum().backward()
            master.grad = layer.weight.grad.float()
            optimizer.step()
            with torch.no_grad():
                layer.weight.copy_(master)
            out += [y.detach(), x.grad, master.clone()]
        layer.eval()
        with torch.no_grad(), dt.autocast(recipe=recipe):
            out.append(fn(normal("x", (16, 96), layers.dtype_of(recipe))))
        results.append(out)
    _all_same(results[1], results[0])
    whole(2)


# --- torch's mixed precision ---


AMP = [("fp8-delayed", torch.float16), ("nvfp4", torch.bfloat16), ("fp8-block", torch.bfloat16)]
SLOW_AMP = [(n, torch.bfloat16) for n in NAMED if (n, torch.bfloat16) not in AMP] + [("nvfp4", torch.float16)]


@pytest.mark.parametrize(("name", "dtype"), [*AMP, *[layers.slow(*v) for v in SLOW_AMP]], ids=str)
def test_grad_scaler_and_amp(name, dtype):
    recipe = NAMED[name]
    if layers.packed(recipe) and dtype == torch.float16:
        recipe = recipe.replace(disable_rht=True)
    plain, model = _model(), _model()
    results = []
    for m in (plain, model):
        dt.seed_rng(m, layers.SEED)
        fn = compiled(m) if m is model else m
        optimizer = torch.optim.SGD(m.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=2)
        out = []
        for i in range(4):
            x = (normal(f"x{i}", (16, 96))).requires_grad_()
            with torch.amp.autocast("cpu", dtype), dt.autocast(recipe=recipe):
                y = fn(x)
            scaler.scale(y.float().square().sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            out += [y.detach(), x.grad, *[p.detach().clone() for p in m.parameters()], torch.tensor(scaler.get_scale())]
        results.append(out + states(m))
    _all_same(results[1], results[0])
    whole(1)
