"""A model whose layers are cut over ranks, by FSDP2 too, and what ranks do with its checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import diptych.torch as dt
from diptych.common.errors import CheckpointError
from torch_frontend.distributed.checkpoint_cases import TRAINED, D, content, differing, optimizer_of, train
from torch_frontend.ranks import here

F = 60
CASES = {"delayed": "swiglu", "fp8-current": "gelu"}  # activations by recipe
COLUMN = ("0.weight", "0.bias", "2.fc1_weight", "2.fc1_bias", "4.weight", "4.bias")
ROW = ("1.weight", "2.fc2_weight")


def cut_model(name: str, group: Any = None, seed: int = 0, ffn: int = F, head: int = 4) -> nn.Sequential:
    """A model of cut layers. With `head=2` a rank's part of the last weight has one row, so that FSDP2 gives one of its
    ranks no row at all."""
    torch.manual_seed(seed)
    ways: dict[str, Any] = {} if group is None else {"tp_group": group}
    options: dict[str, Any] = {"bias": name == "delayed"}
    column = ways | options | ({"parallel_mode": "column"} if ways else {})
    row = ways | options | ({"parallel_mode": "row"} if ways else {})
    both = ways | options | ({"set_parallel_mode": True} if ways else {})
    return nn.Sequential(
        dt.LayerNormLinear(D, D, **column),
        dt.Linear(D, D, **row),
        dt.LayerNormMLP(D, ffn, activation=CASES[name], **both),
        nn.Linear(D, D),
        dt.Linear(D, head, **column),
    )


class Layout:
    """The world as data-parallel ranks, over which FSDP2 shards, of `tp` tensor-parallel ones."""

    def __init__(self, tp: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.tp, self.dp = tp, dist.get_world_size() // tp
        self.mesh = init_device_mesh(here(), (self.dp, tp), mesh_dim_names=("dp", "tp"))
        self.group = self.mesh["tp"].get_group()

    def made(self, name: str, seed: int = 0, **sizes: int) -> tuple[nn.Module, Any]:
        from torch.distributed.fsdp import fully_shard

        net = dt.prepare(cut_model(name, self.group if self.tp > 1 else None, seed, **sizes).to(here()), TRAINED[name])
        for block in (*net, net) if self.dp > 1 else ():
            fully_shard(block, mesh=self.mesh["dp"])
        return net, optimizer_of(net)

    def train(self, net: nn.Module, optimizer: Any, steps: range, name: str) -> None:
        train(net, optimizer, steps, name, rank=self.mesh.get_local_rank("dp"))

    def whole(self, name: str, net: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
        """The content of all ranks, each tensor whole; delayed scales are this rank's."""
        found = content(net, optimizer)
        for key, t in found.items() if self.tp > 1 else ():
            parts = [torch.empty_like(t, device=here()) for _ in range(self.tp)]
            dist.all_gather(parts, t.to(here()).contiguous(), self.group)
            if t.dim() and key.startswith(ROW):
                found[key] = torch.cat(parts, 1).cpu()
            elif t.dim() and key.startswith(COLUMN):
                stacked = 2 if "fc1" in key and CASES[name] == "swiglu" else 1
                found[key] = torch.cat([p.chunk(stacked)[i] for i in range(stacked) for p in parts]).cpu()
        return found


def alone(name: str, folder: Path, group: Any = None) -> dict[str, torch.Tensor]:
    """One process trains the whole model and saves it."""
    net = dt.prepare(cut_model(name).to(here() if dist.is_initialized() else "cpu"), TRAINED[name])
    optimizer = optimizer_of(net)
    train(net, optimizer, range(2), name)
    dt.parallel.save(folder, net, optimizer, step=2, group=group)
    return content(net, optimizer)


def resumed(name: str, tp: int, folder: Path, **sizes: int) -> dict[str, Any]:
    """Trains, saves and exports, and goes on; another model loads and goes on. Returns what differs."""
    layout, made = Layout(tp), {}
    net, optimizer = layout.made(name, **sizes)
    layout.train(net, optimizer, range(2), name)
    saved, made["whole"] = content(net, optimizer), layout.whole(name, net, optimizer)
    dt.parallel.save(folder, net, optimizer, step=2)
    dt.parallel.export(folder / "model.safetensors", net)
    again, other = layout.made(name, seed=1, **sizes)
    dt.parallel.load(folder, again, other)
    made["loaded"] = differing(content(again, other), saved)
    for one, its in ((net, optimizer), (again, other)):
        layout.train(one, its, range(2, 4), name)
    made["resumed"] = differing(content(again, other), content(net, optimizer))
    dt.parallel.load(folder, net, optimizer)  # in the middle of a run
    made["loaded"] += differing(content(net, optimizer), saved)
    return made


def moved(name: str, tp: int, source: Path, target: Path | None = None) -> dict[str, Any]:
    """Loads a checkpoint of another layout, trains and saves."""
    layout, made = Layout(tp), {}
    net, optimizer = layout.made(name, seed=1)
    step = dt.parallel.load(source, net, optimizer).step
    made["loaded"] = layout.whole(name, net, optimizer)
    layout.train(net, optimizer, range(step, step + 1), name)
    if target is not None:
        made["whole"] = layout.whole(name, net, optimizer)
        dt.parallel.save(target, net, optimizer, step=step + 1)
    return made


def said(call: Any) -> str:
    try:
        call()
    except (CheckpointError, ValueError) as e:
        return f"{type(e).__name__}: {e}"
    return "no error"
