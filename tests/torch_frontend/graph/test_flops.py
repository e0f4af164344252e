"""FLOP counters and profilers see diptych's products by name, and count them like torch's own."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import diptych.torch as dt
from diptych.common.recipes import RECIPES, Float8CurrentScaling, NVFP4BlockScaling
from diptych.torch.primitives import register

M, K, N, G = 64, 96, 32, 3
PRODUCT = 2 * M * K * N


def counted(fn):
    with FlopCounterMode(display=False) as mode:
        fn()
    return mode.get_total_flops()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_layers_three_products_count_as_those_of_torch(recipe):
    layer, x = dt.Linear(K, N, dtype=torch.bfloat16), torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)

    def step(enabled):
        with dt.autocast(enabled, recipe=recipe):
            layer(x).float().square().sum().backward()

    assert counted(lambda: step(True)) == counted(lambda: step(False)) == 3 * PRODUCT


@pytest.mark.parametrize("fuse", [False, True])
def test_fused_layers_and_groups_count_every_product(fuse):
    x = torch.randn(M, K, requires_grad=True)
    mlp = dt.LayerNormMLP(K, N, activation="swiglu", fuse_wgrad_accumulation=fuse)
    experts = dt.GroupedLinear(G, K, N, fuse_wgrad_accumulation=fuse)
    for p in (*mlp.parameters(), *experts.parameters()):
        p.main_grad = torch.zeros_like(p)
    with dt.autocast(recipe=Float8CurrentScaling()):
        assert counted(lambda: mlp(x).sum().backward()) == 3 * (2 + 1) * PRODUCT
        assert counted(lambda: experts(x, [32, 32, 0]).sum().backward()) == 3 * PRODUCT
    plain = dt.GroupedLinear(G, K, N)
    assert counted(lambda: plain(x, [32, 32, 0]).sum().backward()) == 3 * PRODUCT


def test_nodes_of_a_graph_count_what_they_run():
    layer, x = dt.Linear(K, N), torch.randn(M, K, requires_grad=True)
    region = dt.autocast(recipe=Float8CurrentScaling())
    with region:
        exported = torch.export.export(torch.nn.Sequential(layer), (x,)).module()
    names = [str(node.target) for node in exported.graph.nodes if "diptych" in str(node.target)]
    assert names == ["diptych.linear.default"]
    with torch.no_grad():
        assert counted(lambda: exported(x)) == PRODUCT
    with region:
        y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert counted(lambda: y.sum().backward()) == 2 * PRODUCT
    for op in ("linear", "grouped_linear", "layernorm_linear", "layernorm_mlp"):  # those that write have a name too
        assert {getattr(torch.ops.diptych, op + end) for end in ("", "_backward", "_backward_")} <= flop_registry.keys()


def test_a_profiler_sees_ops_by_name_and_changes_nothing():
    layer, x = dt.Linear(K, N, dtype=torch.bfloat16), torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    dt.seed_rng(layer, 3)

    def step(remembers):
        dt.seed_rng(layer, 3)
        layer.weight.grad = None
        with dt.autocast(recipe=NVFP4BlockScaling()):
            y = dt.checkpoint(layer, x, use_reentrant=False) if remembers else layer(x)
        y.sum().backward()
        return y.detach(), layer.weight.grad

    for remembers in (False, True):
        plain = step(remembers)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            seen = step(remembers)
        assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
        counts = {e.key: e.count for e in profile.key_averages() if e.key.startswith("diptych::")}
        assert counts["diptych::gemm"] == 3 + remembers and counts["diptych::quantize"] >= 3
        assert {"diptych::linear", "diptych::linearBackward", "diptych::bias_grad"} <= counts.keys()
    assert register.direct(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert not register.direct(x) and register.direct(x, unnamed=True)
