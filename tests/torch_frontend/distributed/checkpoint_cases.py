"""A small model that is trained, for tests of checkpoints: every step is a function of its number and rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
from diptych.common import RECIPES, DelayedScaling, NVFP4BlockScaling
from torch_frontend.ranks import here

D = 64
TRAINED = {
    "delayed": DelayedScaling(amax_history_len=4),
    "nvfp4": NVFP4BlockScaling(),
    "mxfp8": RECIPES["mxfp8"],
    "fp8-current": RECIPES["fp8-current"],
}


def model(name: str = "delayed", seed: int = 0, held: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if name == "nvfp4" else torch.float32  # its Hadamard transform takes no other
    with dt.quantized_model_init(enabled=held, recipe=TRAINED[name]):
        return nn.Sequential(
            dt.Linear(D, D, dtype=dtype),
            dt.LayerNormMLP(D, D, dtype=dtype),
            nn.Linear(D, D, dtype=dtype),
        )


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    decayed, others = [p for p in net.parameters() if p.dim() > 1], [p for p in net.parameters() if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)


def sharded(name: str, rank: int, seed: int = 0, gathered: bool = True) -> tuple[nn.Module, Any]:
    """Returns (model, optimizer) with the model sharded over all ranks; each rank has random generators of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here(), (dist.get_world_size(),))
    net = dt.prepare(model(name, seed).to(here()), TRAINED[name])
    if name == "nvfp4":
        dt.seed_rng(net, 10 * seed + rank)
    for block in net.children():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if gathered:
        dt.parallel.prepare(net, mesh, TRAINED[name])
    return net, optimizer_of(net)


def train(net: nn.Module, optimizer: Any, steps: range, name: str = "delayed", rank: int = 0) -> None:
    weight = next(net.parameters())
    for step in steps:
        x = torch.randn(32, D, generator=torch.Generator().manual_seed(1000 * rank + step)) * (1 + step % 3)
        for g in optimizer.param_groups:
            g["lr"] = 1e-2 / (1 + step)
        with dt.autocast(recipe=TRAINED[name]):
            y = net(x.to(weight.device, weight.dtype))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def content(net: nn.Module, optimizer: Any = None) -> dict[str, torch.Tensor]:
    """All that a run depends on, each tensor whole, on the CPU."""
    state: dict[str, Any] = dict(dt.plain_state_dict(net))
    names = {p: name for name, p in net.named_parameters()}
    for p, kept in () if optimizer is None else optimizer.state.items():
        state |= {f"{names[p]}.{key}": t for key, t in kept.items()}
    for i, group in enumerate(() if optimizer is None else optimizer.param_groups):
        state |= {f"{i}.{key}": torch.tensor(group[key]) for key in ("lr", "weight_decay")}
    for name, p in net.named_parameters():
        if getattr(p, "main_param", None) is not None:
            state[f"{name}.main"] = p.main_param
    return {k: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().cpu().clone() for k, t in state.items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    def bits(t: torch.Tensor) -> torch.Tensor:
        return t.reshape(-1).view(torch.uint8)

    names = one.keys() | other.keys()
    return sorted(n for n in names if n not in one or n not in other or not torch.equal(bits(one[n]), bits(other[n])))
