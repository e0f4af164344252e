"""Tensor parallelism beside diptych's cut layers: parts of weights, tokens cut over ranks, the norm of the gradients.

Embedding, final norm and head are whole on each rank of a tensor-parallel group, whose ranks read the same tokens. With
sequence parallelism the blocks hold each rank's part of the sequence. Every rank computes the whole loss, so that what
comes back from it is the gradient of the whole: it is cut or gathered, and never summed. The gradients of whole
parameters are therefore the same on all ranks of the group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm


def gathered(part: Tensor, group: Any, dim: int = 0) -> Tensor:
    """Joins the parts of all ranks along `dim`, in rank order."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def own(whole: Tensor, group: Any, dim: int = 0) -> Tensor:
    """This rank's part of a tensor that is cut along `dim`."""
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


class CutTokens(torch.autograd.Function):
    """This rank's part of [T, ...], which every rank has; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return own(x, group).clone()  # a view would keep the whole in memory

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return gathered(grads[0], ctx.group), None


class GatherTokens(torch.autograd.Function):
    """[T, ...] of the ranks' parts; of the gradient, which every rank computes whole, each takes its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return own(grads[0], ctx.group), None


class Cut(NamedTuple):
    """How a parameter is cut: along `dim`, each of the `stacked` weights that lie one below the other in it."""

    dim: int
    stacked: int

    def part(self, whole: Tensor, group: Any) -> Tensor:
        return torch.cat([own(t, group, self.dim) for t in whole.chunk(self.stacked, self.dim)], self.dim)

    def whole(self, part: Tensor, group: Any) -> Tensor:
        return torch.cat([gathered(t, group, self.dim) for t in part.chunk(self.stacked, self.dim)], self.dim)


def cuts(model: nn.Module) -> dict[str, Cut]:
    """The parameters that are cut, by name, as their marks say before `fully_shard` makes new ones of them."""
    marked = [(n, p) for n, p in model.named_parameters() if getattr(p, "tensor_model_parallel", False)]
    return {name: Cut(p.partition_dim, p.partition_stride) for name, p in marked}


@torch.no_grad()
def clip(model: nn.Module, cut: dict[str, Cut], mesh: Any, largest: float) -> Tensor:
    """Scales the gradients to a norm of at most `largest`. `mesh`: [dp, tp].

    **Returns** the norm of all gradients: the parts of a cut parameter are added, a whole one counts once.
    """
    grads: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads[name in cut].append(p.grad.to_local())  # type: ignore[attr-defined]
    squares = [get_total_norm(grads[kind]).square() for kind in (True, False)]
    total = torch.stack([t.to(mesh.device_type) for t in squares])
    dist.all_reduce(total, group=mesh.get_group("dp"))
    dist.all_reduce(total[:1], group=mesh.get_group("tp"))
    norm = total.sum().sqrt()
    scale = (largest / (norm + 1e-6)).clamp(max=1)
    for grad in grads[True] + grads[False]:
        grad.mul_(scale)
    return norm
