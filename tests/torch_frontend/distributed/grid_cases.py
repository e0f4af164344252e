"""Linear layers on a mesh of two dimensions: FSDP2 shards over `dp`, with quantized gathers, and a tensor-parallel
group lies along `tp`. Each rank of `dp` has data of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

import diptych.torch as dt
import oracle
from diptych.common import QuantizerRole
from oracle import parallel
from quantizers import oracle_options
from torch_frontend import cut_layers
from torch_frontend.cut_layers import RECIPES, Reference
from torch_frontend.ranks import here
from torch_frontend.tools import to_torch

STEPS = 2
WAYS = {  # (dp, tp, sequence parallelism)
    "FSDP2": (4, 1, False),
    "TP": (1, 4, False),
    "TP+SP": (1, 4, True),
    "FSDP2 x TP": (2, 2, False),
    "FSDP2 x TP+SP": (2, 2, True),
}


@dataclass(frozen=True)
class Grid(cut_layers.Case):
    """`size`: of `tp`. `replica`: whose data, of the ranks of `dp`."""

    dp: int = 2
    replica: int = 0
    compiled: bool = False

    @property
    def nk(self) -> tuple[int, int]:
        n, k = self.dp * self.unit, self.unit + (0 if self.recipe in cut_layers.NO_RAGGED else 7)
        return (self.size * n, k) if self.mode == "column" else (n, self.size * self.unit)

    @property
    def lead(self) -> tuple[int, ...]:
        return super().lead if self.size > 1 else (self.unit,)

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        made = super().tensors(step)
        for name in ("x", "dy"):
            made[name] = self.draw(f"{name} of {self.replica}", step, made[name].shape, self.dtypes[0])
        return made


def meshes(dp: int, tp: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(here(), (dp, tp), mesh_dim_names=("dp", "tp"))


def steps(rank: int, groups: Any, case: Grid) -> list[dict[str, torch.Tensor]]:
    """y, dx and the whole gradients of this rank's part of the weight and bias, by step."""
    from torch.distributed.fsdp import fully_shard

    mesh = meshes(case.dp, case.size)
    case = replace(case, replica=mesh.get_local_rank("dp"))
    torch._dynamo.reset()
    recipe = copy.deepcopy(RECIPES[case.recipe])
    layer: Any = cut_layers.linear(case, mesh["tp"].get_group()).to(here())
    dt.prepare(layer, recipe)
    fn = torch.compile(layer, fullgraph=True, backend="aot_eager") if case.compiled else layer
    if case.dp > 1:
        fully_shard(fn, mesh=mesh["dp"], reshard_after_forward=True)
        dt.parallel.prepare(fn, mesh["dp"], recipe)
    made = []
    for step in range(STEPS):
        tensors = {name: to_torch(t).to(here()) for name, t in case.tensors(step).items()}
        parts = {name: case.part(name, t, mesh.get_local_rank("tp")).contiguous() for name, t in tensors.items()}
        for p, name in ((layer.weight, "w"), (layer.bias, "b")):
            local = parts[name].chunk(case.dp)[case.replica] if case.dp > 1 else parts[name]
            with torch.no_grad():
                (p.to_local() if case.dp > 1 else p).copy_(local)
        x = parts["x"].requires_grad_()
        with dt.autocast(recipe=recipe):
            y = fn(x)
        y.backward(parts["dy"])
        grads = [p.grad.full_tensor() if case.dp > 1 else p.grad for p in (layer.weight, layer.bias)]
        made.append({"y": y.detach(), "dx": x.grad, "dw": grads[0], "db": grads[1]})
        layer.zero_grad()
    return made


class Gathered(Reference):
    """Gathered weights have the scale of their current amax under delayed scaling, too."""

    def quantized(self, tensor: str, value: np.ndarray) -> oracle.Quantized:
        q: Any = self.recipe.quantizer(QuantizerRole("linear", tensor))
        if tensor != "weight" or not q.needs_scale:
            return super().quantized(tensor, value)
        return oracle.quantize(value, q.format.name, **oracle_options(q))


def expected(case: Grid) -> Iterator[list[list[dict[str, np.ndarray]]]]:
    """By step: what each rank of `dp` and of `tp` makes alone, before gradients are reduced over `dp`."""
    kind = Gathered if case.dp > 1 else Reference
    references = [kind(RECIPES[case.recipe]) for _ in range(case.dp)]
    for step in range(STEPS):
        yield [cut_layers.expected(replace(case, replica=i), r, step) for i, r in enumerate(references)]


def check(case: Grid, ranks: list[list[dict[str, torch.Tensor]]]) -> None:
    """Compares what the ranks made with the oracle: bits, but for FSDP's sums over more than two ranks."""
    from torch_frontend.tools import same, to_numpy

    for step, want in enumerate(expected(case)):
        for rank, made in enumerate(ranks):
            replica, part = divmod(rank, case.size)
            got, alone = made[step], want[replica][part]
            for name in ("y", "dx"):
                same(got[name], alone[name], f"{case}, step {step}, rank {rank}: {name}")
            for name in ("dw", "db"):
                each = [of[part][name] for of in want]
                if case.dp <= 2:
                    same(got[name], parallel.sum_gradients(each), f"{case}, step {step}, rank {rank}: {name}")
                    continue
                total, bound = parallel.sum_gradients_tolerance(each)
                assert (np.abs(to_numpy(got[name]).astype(np.float64) - total) <= bound).all()
