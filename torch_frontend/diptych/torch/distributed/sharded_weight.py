"""`ShardedWeight`: the part of a weight that one rank of FSDP2 holds, which is gathered quantized.

FSDP2 asks a parameter's local tensor what to send (`fsdp_pre_all_gather`) and what to make of the bytes received
(`fsdp_post_all_gather`). A `ShardedWeight` is the plain tensor of the part, in high precision, with these two methods,
so that optimizers, clipping and checkpoints see no difference. It sends bytes: gloo refuses FP8, and NCCL refuses E8M0
and E2M1. The layer's weight is then a `QuantizedParameter`, whose gradient is plain, and FSDP reduces it as any other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.torch.distributed.gather import Gather, Plan
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensor


class Received(NamedTuple):
    """What a rank knows of a gathered weight without receiving it. `same`: the buffers that are not received, such as
    the scale of the whole weight."""

    plan: Plan
    same: dict[str, Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int


class ShardedWeight(Tensor):
    """A weight's part [N / ranks, K], or a stack's [G / ranks, N, K], in high precision. `prepare` makes it of FSDP2's
    local tensor, in place."""

    gather: Gather
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(part: Tensor, gather: Gather) -> ShardedWeight:
        made: Any = part.as_subclass(ShardedWeight)
        made.gather = gather
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the part as the plain tensor that it is."""
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    @torch.no_grad()
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Received]:
        """Quantizes the part by the whole weight's amax. Returns (bytes to send, what `fsdp_post_all_gather` needs)."""
        gather = self.gather
        part = self.detach().as_subclass(Tensor)
        dtype = part.dtype if mp_policy.param_dtype is None else mp_policy.param_dtype
        plan = gather.receive(tuple(outer_size), part, mesh.size())
        amax = None
        if gather.amaxes is not None:  # rounding keeps the order of values, so the cast weight's amax is the amax cast
            amax = gather.amaxes.of(gather.number, mesh.get_group()).to(dtype).to(torch.float32)
        made = gather.quantize(part.to(dtype), plan, amax)
        same = {name: t for name, t in made.items() if name not in plan.sent}
        received = Received(plan, same, tuple(outer_size), dtype, mesh.size())
        return tuple([made[name].view(torch.uint8) for name in plan.sent]), received

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], received: Received, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Fills the whole weight's buffers. Returns (weight, tensors that FSDP frees with it) where there is no `out`,
        which has these buffers."""
        gather = self.gather
        for name, t in received.same.items():
            gather.fill(name, t)
        for name, t in zip(received.plan.sent, outputs, strict=True):
            if gather.cut_by_columns(name):  # [ranks * K, N / ranks] to [K, N]
                joined = t.view(received.ranks, -1, *t.shape[1:]).transpose(0, 1).flatten(1)
                gather.fill(name, joined.view(gather.whole[name].dtype))
                t.untyped_storage().resize_(0)
        if received.plan.turned:
            gather.fill_columnwise()
        if out is not None:
            return None
        kind = QuantizedStack if gather.stack else QuantizedTensor
        whole = kind(gather.quantizer, received.shape, received.dtype, **gather.whole)
        return QuantizedParameter.of(whole), gather.param._unsharded_inner_tensors
