"""FSDP2 with weights that are gathered quantized: ranks against one process that runs each rank's microbatches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import RECIPES, Float8CurrentScaling, NVFP4BlockScaling, NVFP4Quantizer, QuantizerRole
from diptych.common.errors import ArgumentError, ShapeError, UnsupportedError
from diptych.common.layers.plan import held_quantizer
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from torch_frontend.ranks import here, needs_gloo
from torch_frontend.tools import normal

pytestmark = needs_gloo
RANKS, STEPS, D = 2, 3, 256
DEVICES = ("cpu", "cuda")
CASES = {
    **{f"{name}, resharded": (name, {}) for name in RECIPES},
    **{f"{name}, kept": (name, {"reshard": False}) for name in ("fp8-current", "mxfp8", "nvfp4")},
    **{f"{name}, float32 masters": (name, {"mixed": True}) for name in ("fp8-current", "mxfp8", "fp8-block")},
    "fp8-current, two microbatches": ("fp8-current", {"microbatches": 2}),
    "mxfp8, two microbatches, resharded": ("mxfp8", {"microbatches": 2, "reshard": True}),
    "fp8-current, compiled": ("fp8-current", {"compiled": True}),
    "mxfp8, compiled": ("mxfp8", {"compiled": True}),
    "fp8-block, compiled, kept": ("fp8-block", {"compiled": True, "reshard": False}),
}


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.project = dt.LayerNormLinear(D, D, dtype=dtype)
        self.mlp = dt.LayerNormMLP(D, 2 * D, activation="swiglu", bias=False, dtype=dtype)
        self.out = dt.Linear(D, D, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(self.mlp(self.project(x)))


def model(device: str, mixed: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(torch.float32 if mixed else torch.bfloat16) for _ in range(2)])
    with torch.no_grad():  # the ranks' parts of a weight have unlike amaxes
        for p in net.parameters():
            p[: len(p) // RANKS].mul_(0.75)
    return net.to(device)


def batch(step: int, rank: int, microbatch: int, device: Any) -> torch.Tensor:
    return normal(f"x {step} {rank} {microbatch}", (64, D), "bfloat16", device).requires_grad_()


def seeded(net: nn.Module, rank: int) -> None:
    for i, module in enumerate(m for m in net.modules() if isinstance(m, dt.QuantizedModule)):
        dt.seed_rng(module, 100 * rank + i)


def backward(net: nn.Module, recipe: Any, step: int, rank: int, microbatch: int) -> list[torch.Tensor]:
    """Returns the output and the input's gradient."""
    x = batch(step, rank, microbatch, next(net.parameters()).device)
    with dt.autocast(recipe=recipe):
        y = net(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


def sharded(net: nn.Module, recipe: Any, mesh: Any, reshard: bool = True, mixed: bool = False, compiled: bool = False):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from diptych.torch import parallel

    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    for i, block in enumerate(net):
        if compiled:
            net[i] = block = torch.compile(block, fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    parallel.prepare(net, mesh, recipe)
    return net


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)  # by which DTensors are stepped


def train_sharded(rank: int, groups: Any, name: str, microbatches: int, options: dict[str, Any]) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recipe = copy.deepcopy(RECIPES[name])
    net = model(here(), options.get("mixed", False))
    dt.prepare(net, recipe)
    seeded(net, rank)
    net = sharded(net, recipe, init_device_mesh(here(), (RANKS,)), **options)
    optimizer = optimizer_of(net)
    outs, grads, graphs = [], [], []
    for step in range(STEPS):
        for i in range(microbatches):
            net.set_requires_gradient_sync(i == microbatches - 1)
            outs += backward(net, recipe, step, rank, i)
        grads.append([p.grad.full_tensor() for p in net.parameters()])
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    types = sorted({type(p._local_tensor).__name__ for p in net.parameters()})
    return {"outs": outs, "grads": grads, "ends": [p.full_tensor() for p in net.parameters()], "graphs": graphs,
            "types": types}  # fmt: skip


def on_rank(rank: int, groups: Any) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(here(), (RANKS,))
    return {"device": here(), "errors": errors(mesh), "made on meta": made_on_meta(mesh)}


# --- the reference: one process ---


def hold(net: nn.Module, recipe: Any, dtype: torch.dtype) -> None:
    """Replaces the quantized layers' weights by held ones, of the plain parameters that `masters` keeps."""
    for module in net.modules():
        if isinstance(module, dt.QuantizedModule):
            for layer in module.layers:
                name = f"{layer}_weight" if layer else "weight"
                quantizer = held_quantizer("test", recipe, module.module_kind, module._role_name(layer))
                weight = module._parameters[name]
                q = QuantizedParameter.of(dt.quantize(weight.detach().to(dtype), quantizer))
                module._parameters[name] = nn.Parameter(q)


def reference(device: str, name: str, microbatches: int, mixed: bool) -> dict[str, Any]:
    """Each rank is a model of its own, with its states; they share the weights. A step sums their gradients."""
    recipe = copy.deepcopy(RECIPES[name])
    masters = model(device, mixed)
    nets = [copy.deepcopy(masters) for _ in range(RANKS)]
    for rank, net in enumerate(nets):
        net.to(torch.bfloat16)
        dt.prepare(net, recipe)
        seeded(net, rank)
    optimizer = optimizer_of(masters)
    outs: list[list[torch.Tensor]] = [[] for _ in nets]
    grads = []
    for step in range(STEPS):
        sums = []
        for rank, net in enumerate(nets):
            plain = {key: p.detach() for key, p in masters.named_parameters()}
            for key, p in plain.items():
                owner, _, attribute = key.rpartition(".")
                net.get_submodule(owner)._parameters[attribute] = nn.Parameter(p.to(torch.bfloat16))
            hold(net, recipe, torch.bfloat16)
            for i in range(microbatches):
                outs[rank] += backward(net, recipe, step, rank, i)
            sums.append([p.grad for p in net.parameters()])
        dtype = torch.float32 if mixed else torch.bfloat16
        total = [sum(g.to(dtype) for g in of_ranks) / RANKS for of_ranks in zip(*sums, strict=True)]
        grads.append(total)
        for p, g in zip(masters.parameters(), total, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
    return {"outs": outs, "grads": grads, "ends": [p.detach() for p in masters.parameters()]}


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_one_process(case, on, pool, tmp_path):
    name, options = CASES[case]
    options = dict(options)
    microbatches = options.pop("microbatches", 1)
    made = pool.run(f"{__name__}:train_sharded", name, microbatches, options, into=tmp_path / "made", device=on)
    want = reference(on, name, microbatches, options.get("mixed", False))
    for rank, got in enumerate(made):
        assert got["types"] == ["ShardedWeight", "Tensor"]
        for what in ("outs", "grads", "ends"):
            expected = want[what][rank] if what == "outs" else want[what]
            for i, (g, w) in enumerate(zip(flat(got[what]), flat(expected), strict=True)):
                assert torch.equal(g, w.cpu()), f"rank {rank}, {what} {i}: {(g.float() - w.cpu().float()).abs().max()}"
        if options.get("compiled"):
            assert got["graphs"] == [1] * STEPS, "a block or a step was compiled anew"


def flat(nested: Any) -> list[torch.Tensor]:
    return [t for part in nested for t in (part if isinstance(part, list) else [part])]


def made_on_meta(mesh: Any) -> dict[str, Any]:
    """Prepared on the meta device, then filled: the local tensors are other ones than at `prepare`."""
    from torch.distributed.fsdp import fully_shard

    from diptych.torch import parallel

    recipe = RECIPES["fp8-current"]
    net = nn.Sequential(dt.Linear(D, D, bias=False, device="meta"))
    fully_shard(net, mesh=mesh, reshard_after_forward=True)
    parallel.prepare(net, mesh, recipe)
    net.to_empty(device=here())
    full = normal("meta", (D, D), device=here())
    net[0].weight.data.copy_(torch.distributed.tensor.distribute_tensor(full, mesh))
    with dt.autocast(recipe=recipe):
        y = net(normal("x", (64, D), device=here()))
    net[0].weight.data.mul_(2.0)  # a write that no version counter shows
    with dt.autocast(recipe=recipe):
        doubled = net(normal("x", (64, D), device=here()))
    return {"y": y.detach(), "doubled": doubled.detach(), "type": type(net[0].weight._local_tensor).__name__}


def test_made_on_meta_and_written_through_data(ranks):
    device = ranks[0]["device"]
    layer = dt.Linear(D, D, bias=False, device=device)
    for factor, key in ((1.0, "y"), (2.0, "doubled")):
        layer.weight.data.copy_(normal("meta", (D, D)) * factor)
        with dt.autocast(recipe=RECIPES["fp8-current"]):
            want = layer(normal("x", (64, D), device=device))
        for made in ranks:
            assert torch.equal(made["made on meta"][key], want.cpu())
            assert made["made on meta"]["type"] == "ShardedWeight"


# --- bad input ---


def errors(mesh: Any) -> dict[str, str]:
    """Returns the error messages of `prepare` for models whose weights it cannot gather, by case."""
    from torch.distributed.fsdp import fully_shard

    from diptych.torch import parallel

    said = {}

    def tried(name: str, net: nn.Module, recipe: Any, shard: bool = True, to: Any = mesh) -> None:
        if shard:
            fully_shard(net, mesh=mesh)
        try:
            parallel.prepare(net, to, recipe)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"

    current = Float8CurrentScaling()
    tried("not sharded", nn.Sequential(dt.Linear(64, 64)), current, shard=False)
    tried("rows", nn.Sequential(dt.Linear(64, 96)), RECIPES["fp8-block"])
    tried("odd", nn.Sequential(dt.Linear(64, 63)), current)
    tried("stack", nn.Sequential(dt.GroupedLinear(4, 64, 64)), current)
    tried("mesh", nn.Sequential(dt.Linear(64, 64)), current, to=None)
    tried("recipe", nn.Sequential(dt.Linear(64, 64)), "fp8")
    twice = nn.Sequential(dt.Linear(64, 64))
    fully_shard(twice, mesh=mesh)
    parallel.prepare(twice, mesh, current)
    tried("twice", twice, current, shard=False)
    tried("rht", nn.Sequential(dt.Linear(64, 64)), TransformedWeights())
    return said


class TransformedWeights(NVFP4BlockScaling):
    def quantizer(self, role: QuantizerRole) -> Any:
        return NVFP4Quantizer(with_rht=True) if role.tensor == "weight" else super().quantizer(role)


SAID = {
    "not sharded": (ArgumentError, "call torch.distributed.fsdp.fully_shard"),
    "rows": (
        ShapeError,
        "0.weight has 96 rows, and 2 ranks with blocks of 128 rows (fp8_e4m3_128x128) need a multiple of 256",
    ),
    "odd": (ShapeError, "0.weight has 63 rows"),
    "stack": (UnsupportedError, "0.weight [4, 64, 64] is a stack"),
    "mesh": (UnsupportedError, "it must be cut along dimension 0 over None"),
    "recipe": (ArgumentError, "recipe"),
    "twice": (ArgumentError, "0.weight is prepared already"),
    "rht": (UnsupportedError, "amaxes of rows or of a transform"),
}


@pytest.mark.parametrize("case", SAID)
def test_bad_input(ranks, case):
    kind, text = SAID[case]
    for made in ranks:
        assert made["errors"][case].startswith(kind.__name__) and text in made["errors"][case], made["errors"][case]
