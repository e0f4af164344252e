"""Weight gradients that wait or go to main_grad, where something reduces or scales gradients: the bits of the usual
gradients, or an error that names the option."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from sweeps import others_slow
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import diptych.torch as dt
from diptych.common import Float8CurrentScaling
from diptych.common.errors import UnsupportedError
from diptych.torch.state.autocast import recognize_pipelines
from torch_frontend.layer_cases import NAMED, dtype_of
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import RECIPE_NAMES, normal, same

D, STEPS = 256, 2
CURRENT = Float8CurrentScaling()
KINDS = {
    "Linear": lambda **kw: dt.Linear(D, D, **kw),
    "LayerNormLinear": lambda **kw: dt.LayerNormLinear(D, D, **kw),
    "LayerNormMLP": lambda **kw: dt.LayerNormMLP(D, D, activation="swiglu", **kw),
    "GroupedLinear": lambda **kw: dt.GroupedLinear(2, D, D, **kw),
}
WAYS = (
    "DDP", "DDP, two microbatches", "FSDP2", "FSDP2, prepared", "FSDP2, two microbatches", "FSDP2, two calls",
    "FSDP2, replicas",
)  # fmt: skip
CASES = ["; ".join(case) for case in itertools.product(RECIPE_NAMES, KINDS, WAYS)]
# Each recipe and each way with some kind.
NOW = [
    "; ".join((name, list(KINDS)[i // 2 % len(KINDS)], WAYS[i % len(WAYS)]))
    for i, name in zip(range(max(len(RECIPE_NAMES), len(WAYS))), itertools.cycle(RECIPE_NAMES), strict=False)
]


class Halved(nn.Module):
    def forward(self, w: torch.Tensor) -> torch.Tensor:
        return w * 0.5


class Model(nn.Module):
    """A layer that other options reach, and one whose gradients are as usual."""

    def __init__(self, kind: str, name: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = dt.Linear(D, D), nn.Linear(D, D)
        self.layer: Any = KINDS[kind](**options)
        dt.prepare(self.to(here()), NAMED[name])
        dt.seed_rng(self, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = ([64, 64],) if isinstance(self.layer, dt.GroupedLinear) else ()
        return self.last(self.layer(self.first(x), *groups).float())


def _wrapped(model: Model, way: str, recipe: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if way.startswith("DDP"):
        return DistributedDataParallel(model, broadcast_buffers=False)
    shape, names = ((2, 1), ("replicate", "shard")) if "replicas" in way else ((2,), None)
    mesh = init_device_mesh(here(), shape, mesh_dim_names=names)
    for module in (model.first, model.layer, model):
        fully_shard(module, mesh=mesh)
    if way == "FSDP2, prepared":
        dt.parallel.prepare(model, mesh, recipe)
    return model


def gradients(rank: int, groups: Any, case: str) -> list[list[torch.Tensor]]:
    """The gradients of each step, whole: the usual ones, and those of a layer whose weight's gradients wait."""
    return [_gradients(rank, case, delay) for delay in (False, True)]


def _gradients(rank: int, case: str, delay: bool) -> list[torch.Tensor]:
    name, kind, way = case.split("; ")
    model, recipe = Model(kind, name, delay_wgrad_compute=delay), NAMED[name]
    wrapped, made = _wrapped(model, way, recipe), []
    count = 2 if "two" in way else 1
    for step in range(STEPS):
        for i in range(count):
            last = i == count - 1
            if "FSDP2" in way:
                wrapped.set_requires_gradient_sync(last)
                wrapped.set_reshard_after_backward(last)
            x = normal(f"x {step} {rank} {i}", (128, D), dtype_of(name), here())
            with wrapped.no_sync() if "DDP" in way and not last else contextlib.nullcontext():
                with dt.autocast(recipe=recipe):
                    y = wrapped(x)
                y.square().sum().backward()
            if delay and (last or "two calls" in way):
                with torch.no_grad():  # as a trainer may call it
                    model.layer.backward_dw()
        made += [whole(p.grad) for p in model.parameters()]
        wrapped.zero_grad()
    return made


def whole(t: Any) -> torch.Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()


@needs_gloo
@pytest.mark.parametrize("case", others_slow(CASES, NOW))
def test_what_waits_is_reduced(case, pool, tmp_path):
    """Bits of the wrapper's usual gradients, equal on both ranks. Two calls for one gradient are two reductions, whose
    results are added."""
    (usual, delayed), (_, other) = pool.run(f"{__name__}:gradients", case, into=tmp_path / "made")
    assert all(t.any() for t in usual)
    for i, (g, o, w) in enumerate(zip(delayed, other, usual, strict=True)):
        same(g, o, i)
        if "two calls" in case:
            torch.testing.assert_close(g, w, rtol=1e-6, atol=float(w.abs().max()) * 2**-20)
        else:
            same(g, w, i)


# --- refusals ---


def on_rank(rank: int, groups: Any) -> dict[str, str]:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh(here(), (2,))

    def flat(model: Any, original: bool = False) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=original)

    def ignoring(model: nn.Module) -> nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["layer.weight"])
        return DistributedDataParallel(model)

    def halved(model: Any) -> nn.Module:
        torch.nn.utils.parametrize.register_parametrization(model.layer, "weight", Halved())
        return fully_shard(model, mesh=mesh)

    def checkpointed(model: Any) -> nn.Module:
        forward = model.layer.forward
        model.layer.forward = lambda x: checkpoint(forward, x, use_reentrant=True)
        return DistributedDataParallel(model)

    fuse, delay = {"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}
    tries = {
        "fuse, DDP": (fuse, DistributedDataParallel),
        "fuse, not DDP's": (fuse, ignoring),
        "fuse, FSDP2": (fuse, lambda m: fully_shard(m, mesh=mesh)),
        "fuse, replicate": (fuse, lambda m: replicate(m)),
        "fuse, checkpointed in DDP": (fuse, checkpointed),
        "fuse, FSDP": (fuse, flat),
        "delay, FSDP with original parameters": (delay, lambda m: flat(m, True)),
        "delay, parametrized in FSDP2": (delay, halved),
        "delay, unused": (delay, lambda m: DistributedDataParallel(m, find_unused_parameters=True)),
        "delay, static": (delay, lambda m: DistributedDataParallel(m, static_graph=True)),
    }
    return {name: _tried(wrap, **options) for name, (options, wrap) in tries.items()}


def _tried(wrap: Any, **options: Any) -> str:
    """Returns the error of a wrapped model's step, or whether the step wrote to the main_grad."""
    model = Model("Linear", "fp8-current", **options)
    model.layer.weight.main_grad = torch.zeros(D, D, device=here())
    try:
        wrapped = wrap(model)
        with dt.autocast(recipe=CURRENT):
            wrapped(normal("x", (32, D), device=here())).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"ran, {bool(model.layer.weight.main_grad.any())}"


def compiled(rank: int, groups: Any, way: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def wrap(model: Any) -> nn.Module:
        model.layer = torch.compile(model.layer, backend="aot_eager")
        return (
            DistributedDataParallel(model) if way == "DDP" else fully_shard(model, mesh=init_device_mesh(here(), (2,)))
        )

    torch._dynamo.reset()
    return _tried(wrap, fuse_wgrad_accumulation=True)


FLAT = "fuse_wgrad_accumulation and delay_wgrad_compute under FullyShardedDataParallel"
SAID = {
    "fuse, DDP": "UnsupportedError: fuse_wgrad_accumulation under DistributedDataParallel",
    "fuse, not DDP's": "ran, True",
    "fuse, FSDP2": "UnsupportedError: fuse_wgrad_accumulation under FSDP2",
    "fuse, replicate": "UnsupportedError: fuse_wgrad_accumulation under DistributedDataParallel",
    "fuse, checkpointed in DDP": "UnsupportedError: fuse_wgrad_accumulation under DistributedDataParallel",
    "fuse, FSDP": f"UnsupportedError: {FLAT}",
    "delay, FSDP with original parameters": f"UnsupportedError: {FLAT}",
    "delay, parametrized in FSDP2": "UnsupportedError: delay_wgrad_compute under FSDP2 (fully_shard) for a weight that",
    "delay, unused": "UnsupportedError: delay_wgrad_compute under DistributedDataParallel with find_unused_parameters",
    "delay, static": "UnsupportedError: delay_wgrad_compute under DistributedDataParallel with static_graph",
}


@needs_gloo
@pytest.mark.parametrize("case", SAID)
def test_gradients_that_a_reducer_would_miss_are_refused(ranks, case):
    for made in ranks:
        assert SAID[case] in made[case], made[case]


@needs_gloo
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_compiled_ones_are_refused(way, pool, tmp_path):
    for said in pool.run(f"{__name__}:compiled", way, into=tmp_path / "made"):
        assert f"fuse_wgrad_accumulation under {way.replace('DDP', 'DistributedDataParallel')}" in said, said


def test_a_graph_that_was_traced_before_is_not_run_in_a_wrapper(one_rank):
    """The graph of a module alone adds to main_grad; a wrapper around the module comes later."""
    torch._dynamo.reset()
    layer = layer_of(fuse_wgrad_accumulation=True)
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), normal("x", (32, D))
    with dt.autocast(recipe=CURRENT):
        compiled(x).sum().backward()
        assert layer.weight.main_grad.any()
        with pytest.raises(Exception, match="fuse_wgrad_accumulation under DistributedDataParallel"):
            DistributedDataParallel(compiled)(x)


def test_stages_are_wrapped():
    from torch.distributed.pipelining.stage import PipelineStage

    recognize_pipelines()
    for name in ("_prepare_backward_infra", "scale_grads"):
        assert hasattr(getattr(PipelineStage, name), "__wrapped__")


# --- one process ---


def layer_of(**options: Any) -> Any:
    torch.manual_seed(1)
    layer: Any = dt.Linear(D, D, **options)
    layer.weight.main_grad = torch.zeros(D, D)
    return layer


def test_hooks_of_a_weight_run_when_its_gradient_is_delivered():
    layer, x, ran = layer_of(delay_wgrad_compute=True), normal("x", (32, D)), []
    layer.weight.register_hook(lambda g: ran.append("hook") or g * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: ran.append("accumulated"))
    for _ in range(2):
        with dt.autocast(recipe=CURRENT):
            layer(x).sum().backward()
    assert not ran
    layer.backward_dw()
    usual = layer_of()
    with dt.autocast(recipe=CURRENT):
        usual(x).sum().backward()
    assert ran == ["hook", "accumulated"]
    same(layer.weight.grad, usual.weight.grad * 4)  # powers of two lose nothing


def test_marked_weights_whose_gradient_waits():
    """Hooks, by which Megatron-LM's trainers reduce, run once main_grad is whole."""
    layer, x, seen = layer_of(delay_wgrad_compute=True, fuse_wgrad_accumulation=True), normal("x", (32, D)), []
    layer.weight.grad_added_to_main_grad = False
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(bool(p.main_grad.any())))
    with dt.autocast(recipe=CURRENT):
        layer(x).sum().backward()
    assert not seen and not layer.weight.grad_added_to_main_grad
    layer.backward_dw()
    assert seen == [True] and layer.weight.grad_added_to_main_grad


def test_a_weight_that_is_computed_from_parameters():
    """The gradient flows on to them, in a pass that is asked for them too."""
    made = []
    for delay, asks in ((False, ""), (True, ""), (True, "parameter"), (True, "edge")):
        layer = layer_of(delay_wgrad_compute=delay)
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
        with dt.autocast(recipe=CURRENT):
            y = layer(normal("x", (32, D))).sum()
        original = layer.parametrizations.weight.original
        if asks:
            with pytest.raises(UnsupportedError, match=r"delay_wgrad_compute and autograd\.grad"):
                torch.autograd.grad(y, [original])
        y.backward(inputs={"": None, "parameter": [original], "edge": [get_gradient_edge(original)]}[asks])
        if delay:
            assert original.grad is None
            layer.backward_dw()
        made.append(original.grad)
    for gradient in made[1:]:
        same(made[0], gradient)


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
def test_modules_that_ran_can_swap_their_parameters(option, monkeypatch):
    """torch swaps no tensor that has a weak reference."""
    import torch.distributed.fsdp  # where it is imported, weights are looked up in its groups

    layer = layer_of(**{option: True})
    with dt.autocast(recipe=CURRENT):
        layer(normal("x", (32, D))).sum().backward()
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16


def test_sharded_models_are_freed(one_rank):
    from torch.distributed.fsdp import fully_shard

    model: Any = fully_shard(nn.Sequential(layer_of(delay_wgrad_compute=True)))
    with dt.autocast(recipe=CURRENT):
        model(normal("x", (32, D))).sum().backward()
    model[0].backward_dw()
    held = weakref.ref(model[0].weight), weakref.ref(model._get_fsdp_state())
    del model
    gc.collect()
    assert held[0]() is None and held[1]() is None


def test_backward_of_some_inputs():
    """One that names the weight computes its gradient for `backward_dw`; autograd.grad could not return it."""
    made, x = [], normal("x", (32, D))
    for inputs in (None, "weight", "edge", "parameters"):
        layer = layer_of(delay_wgrad_compute=True)
        asks = {"weight": [layer.weight], "edge": [get_gradient_edge(layer.weight)], "parameters": layer.parameters()}
        given = None if inputs is None else list(asks[inputs])
        with dt.autocast(recipe=CURRENT):
            layer(x).sum().backward(inputs=given)
        with torch.inference_mode():  # as a trainer may call it
            layer.backward_dw()
        assert not layer.weight.grad.is_inference()
        made.append(layer.weight.grad)
    for gradient in made[1:]:
        same(made[0], gradient)
    with dt.autocast(recipe=CURRENT):
        y = layer(x).sum()
    with pytest.raises(UnsupportedError, match=r"delay_wgrad_compute and autograd\.grad for a layer's weight"):
        torch.autograd.grad(y, [layer.weight])
    (of_square,) = torch.autograd.grad(layer.weight.square().sum(), [layer.weight])  # y is not asked
    same(of_square, 2 * layer.weight.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_held_quantized(kind):
    made = []
    for delay in (False, True):
        torch.manual_seed(0)
        with dt.quantized_model_init(recipe=CURRENT):
            layer = KINDS[kind](delay_wgrad_compute=delay)
        for step in range(2):
            with dt.autocast(recipe=CURRENT):
                y = layer(normal(f"x {step}", (128, D)), *([64, 64],) if kind == "GroupedLinear" else ())
            y.square().sum().backward()
            if delay:
                layer.backward_dw()
        made.append([p.grad for p in layer.parameters()])
    for got, want in zip(*made, strict=True):
        assert want.any()
        same(got, want)


def test_transforms_refuse_what_waits():
    layer = layer_of(delay_wgrad_compute=True)

    def loss(weight: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, normal("x", (32, D))).sum()

    with pytest.raises(UnsupportedError, match=r"delay_wgrad_compute inside of a transform of torch\.func"):
        torch.func.grad(loss)(layer.weight.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [("delay",), ("fuse",), ("fuse", "delay")], ids=str)
@pytest.mark.parametrize("marked", [False, True])
def test_a_dry_run_leaves_no_trace(kind, options, marked):
    """Its backward runs outside of the region."""
    names = {"delay": "delay_wgrad_compute", "fuse": "fuse_wgrad_accumulation"}
    layer = KINDS[kind](**{names[o]: True for o in options})
    weights = [p for n, p in layer.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
    for w in weights:
        w.main_grad = torch.ones(w.shape)
        if marked:
            w.grad_added_to_main_grad = False
    groups = ([64, 64],) if kind == "GroupedLinear" else ()
    with dt.dry_run(), dt.autocast(recipe=CURRENT):
        y = layer(normal("x", (128, D)).requires_grad_(), *groups)
    y.sum().backward()
    assert not layer._weight_gradients.queue
    for w in weights:
        assert w.grad is None and bool((w.main_grad == 1).all())
        assert not getattr(w, "grad_added_to_main_grad", False)
    with dt.autocast(recipe=CURRENT):
        y = layer(normal("x", (128, D)), *groups)
    with dt.dry_run():
        y.sum().backward()
    if "delay" in options:
        layer.backward_dw()
    for w in weights:
        assert bool((w.main_grad != 1).any()) if "fuse" in options else w.grad.any()


def test_a_compiled_dry_run_leaves_no_trace():
    torch._dynamo.reset()
    layer = layer_of(fuse_wgrad_accumulation=True)
    compiled, x = torch.compile(layer, backend="aot_eager", fullgraph=True), normal("x", (32, D))
    with dt.autocast(recipe=CURRENT), dt.dry_run():
        compiled(x.requires_grad_()).sum().backward()
    assert not layer.weight.main_grad.any() and layer.weight.grad is None
    with dt.autocast(recipe=CURRENT):
        compiled(x).sum().backward()
    assert layer.weight.main_grad.any()
