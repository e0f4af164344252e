"""A model that FSDP2 trains with quantized gathers, and its reference: one process that runs each rank's microbatches
and adds their gradients."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import diptych.torch as dt
from diptych.common import recipes
from diptych.common.layers.plan import held_quantizer
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from torch_frontend.ranks import here
from torch_frontend.tools import normal

STEPS = 3
TRAIN = f"{__name__}:train_sharded"
SPLITS = [128, 0, 256, 128]  # rows of each expert, which have whole blocks of every format
RECIPES = {
    **recipes.RECIPES,
    "fp8-block-1d": recipes.Float8BlockScaling(w_block_scaling_dim=1),
    "nvfp4-1d": recipes.NVFP4BlockScaling(disable_2d_quantization=True),
}


@dataclass(frozen=True)
class Case:
    """`parts`: how many ranks hold a part of a weight. `mixed`: float32 where weights are sharded, bfloat16 gathered.
    `held`: weights are held quantized before they are sharded: "values", or by a "master" and in float32. `how`: blocks
    run again in backward ("checkpoint"), are gathered by hand before each forward ("unshard"), or stay gathered from
    backward to the next microbatch's forward ("keep"). `experts`: blocks end with a stack of weights."""

    recipe: str
    parts: int = 2
    reshard: bool = True
    mixed: bool = False
    compiled: bool = False
    microbatches: int = 1
    held: str = ""
    how: str = ""
    experts: bool = False

    @property
    def width(self) -> int:
        return 128 * self.parts  # a part has whole blocks of every format

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.mixed or self.held == "master" else torch.bfloat16

    @property
    def gathered(self) -> torch.dtype:
        return torch.bfloat16 if self.mixed else self.dtype


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        width, dtype = case.width, case.dtype
        self.checkpointed = case.how == "checkpoint"
        self.project = dt.LayerNormLinear(width, width, dtype=dtype)
        if case.experts:
            self.out = dt.GroupedLinear(4, width, width, bias=False, dtype=dtype)
            return
        self.mlp = dt.LayerNormMLP(width, 2 * width, activation="swiglu", bias=False, dtype=dtype)
        self.out = dt.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dt.checkpoint(self.run, x) if self.checkpointed else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x)
        return x + (self.out(self.mlp(y)) if isinstance(self.out, dt.Linear) else self.out(y, SPLITS))


def plain_model(case: Case, device: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(*[Block(case) for _ in range(2)])
    with torch.no_grad():
        for p in net.parameters():
            for i, part in enumerate(p.chunk(case.parts)):
                part.mul_(1 - 0.5 * i / case.parts)  # the parts have unlike amaxes
    return net.to(device)


def model(case: Case, device: str) -> nn.Sequential:
    net = plain_model(case, device)
    if not case.held:
        return net
    with torch.device(device), dt.quantized_model_init(recipe=RECIPES[case.recipe]):
        held = nn.Sequential(*[Block(case) for _ in range(2)])
    for p in held.parameters():
        if case.held == "master" and isinstance(p, QuantizedParameter):
            p.main_param = torch.empty(p.shape, device=device)
    held.load_state_dict(net.state_dict())
    return held


def seeded(net: nn.Module, rank: int) -> None:
    for i, module in enumerate(m for m in net.modules() if isinstance(m, dt.QuantizedModule)):
        dt.seed_rng(module, 100 * rank + i)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)  # by which DTensors are stepped


def backward(net: nn.Module, case: Case, recipe: Any, step: int, rank: int, microbatch: int) -> list[torch.Tensor]:
    """Returns the output and the input's gradient."""
    x = normal(
        f"x {step} {rank} {microbatch}",
        (sum(SPLITS) if case.experts else 64, case.width),
        str(case.gathered).removeprefix("torch."),
        next(net.parameters()).device.type,
    ).requires_grad_()
    with dt.autocast(recipe=recipe):
        y = net(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad]  # type: ignore[list-item]


# --- the ranks ---


def sharded(net: nn.Sequential, recipe: Any, mesh: Any, case: Case) -> nn.Sequential:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from diptych.torch import parallel

    given: dict[str, Any] = dict(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if case.mixed else {}
    policy = MixedPrecisionPolicy(**given)
    for i, block in enumerate(net):
        if case.compiled:
            net[i] = block = torch.compile(block, fullgraph=True, backend="aot_eager")
        fully_shard(block, mesh=mesh, reshard_after_forward=case.reshard, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    parallel.prepare(net, mesh, recipe, recompute=case.how == "checkpoint")
    return net


def train_sharded(rank: int, groups: Any, case: Case, shape: tuple[int, ...] = (2,)) -> dict[str, Any]:
    """`shape`: of the mesh: (parts,) or (replicas, parts)."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(here(), shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recipe = copy.deepcopy(RECIPES[case.recipe])
    net = model(case, here())
    dt.prepare(net, recipe)
    seeded(net, rank)
    net = sharded(net, recipe, mesh, case)
    optimizer = optimizer_of(net)
    outs, grads, graphs = [], [], []
    for step in range(STEPS):
        for i in range(case.microbatches):
            last = i == case.microbatches - 1
            net.set_requires_gradient_sync(last)  # type: ignore[operator]
            if case.how == "keep":
                net.set_reshard_after_backward(last)  # type: ignore[operator]
            for block in net if case.how == "unshard" else ():
                block.unshard()  # type: ignore[operator]
            outs += backward(net, case, recipe, step, rank, i)
        grads.append([p.grad.full_tensor() for p in net.parameters()])  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    types = sorted({type(p._local_tensor).__name__ for p in net.parameters()})  # type: ignore[attr-defined]
    ends = [p.full_tensor() for p in net.parameters()]  # type: ignore[attr-defined]
    return {"outs": outs, "grads": grads, "ends": ends, "graphs": graphs, "types": types}


# --- the reference: one process ---


def hold(net: nn.Module, recipe: Any) -> None:
    """Replaces the quantized layers' weights by held ones."""
    for module in net.modules():
        if isinstance(module, dt.QuantizedModule):
            for layer in module.layers:
                name = f"{layer}_weight" if layer else "weight"
                quantizer = held_quantizer("test", recipe, module.module_kind, module._role_name(layer))
                weight: Any = module._parameters[name]
                quantize = dt.quantize_stack if weight.dim() == 3 else dt.quantize
                q = QuantizedParameter.of(quantize(weight.detach(), quantizer))
                module._parameters[name] = nn.Parameter(q)


def reference(case: Case, made: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Each rank is a model of its own, with its states; they share the weights. A step takes the sum of their gradients
    at 2 ranks. Further ranks may add in any order, and a step takes the sums that they `made`, which differ from the
    reference's by `excess`: the largest ratio of a difference to its bound."""
    recipe = copy.deepcopy(RECIPES[case.recipe])
    masters = model(case, device)
    if case.held == "values":
        for module in masters.modules():
            for name, p in module._parameters.items():
                if isinstance(p, QuantizedParameter):
                    module._parameters[name] = nn.Parameter(p.dequantize().detach())
    nets = [copy.deepcopy(masters) for _ in made]
    for rank, net in enumerate(nets):
        net.to(case.gathered)
        dt.prepare(net, recipe)
        seeded(net, rank)
    optimizer = optimizer_of(masters)
    outs: list[list[torch.Tensor]] = [[] for _ in nets]
    grads, excess = [], 0.0
    for step in range(STEPS):
        each = []
        for rank, net in enumerate(nets):
            for key, p in masters.named_parameters():
                owner, _, attribute = key.rpartition(".")
                net.get_submodule(owner)._parameters[attribute] = nn.Parameter(p.detach().to(case.gathered))
            if case.held != "master":
                hold(net, recipe)
            added: list[Any] = [0] * len(list(net.parameters()))
            for i in range(case.microbatches):
                outs[rank] += backward(net, case, recipe, step, rank, i)
                added = [a + p.grad.to(case.dtype) for a, p in zip(added, net.parameters(), strict=True)]  # type: ignore[union-attr]
                net.zero_grad()
            each.append(added)
        total = []
        for k, of_ranks in enumerate(zip(*each, strict=True)):
            if len(made) > 2:
                total.append(made[0]["grads"][step][k])
                excess = max(excess, excess_of(total[-1], of_ranks, case.dtype))
            else:
                total.append(sum(of_ranks) / len(made))
        grads.append(total)
        for p, g in zip(masters.parameters(), total, strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()
    return {"outs": outs, "grads": grads, "ends": [values(p) for p in masters.parameters()], "excess": excess}


def values(p: Any) -> torch.Tensor:
    return p.main_param if isinstance(p, QuantizedParameter) else p.detach()


def excess_of(got: torch.Tensor, of_ranks: Any, dtype: torch.dtype) -> float:
    """Returns the largest ratio of a mean's error to its bound: n - 1 additions and 2 divisions round in `dtype`."""
    exact = torch.stack([g.double() for g in of_ranks])
    n, u = len(of_ranks) + 1, torch.finfo(dtype).eps / 2
    bound = n * u / (1 - n * u) * exact.abs().mean(0) + torch.finfo(dtype).smallest_normal
    return ((got.double() - exact.mean(0)).abs() / bound).max().item()


def check(case: Case, made: list[dict[str, Any]], device: str = "cpu") -> None:
    """Compares what the ranks made with one process."""
    want = reference(case, made, device)
    for rank, got in enumerate(made):
        assert got["types"] == ["ShardedWeight", "Tensor"]
        for what in ("outs", "grads", "ends"):
            expected = want[what][rank] if what == "outs" else want[what]
            for i, (g, w) in enumerate(zip(flat(got[what]), flat(expected), strict=True)):
                assert torch.equal(g, w.cpu()), f"rank {rank}, {what} {i}: {(g.float() - w.cpu().float()).abs().max()}"
        if case.compiled:
            assert got["graphs"] == [got["graphs"][0]] * STEPS, "a step was compiled anew"
    assert want["excess"] <= 1


def flat(nested: Any) -> list[torch.Tensor]:
    return [t for part in nested for t in (part if isinstance(part, list) else [part])]
