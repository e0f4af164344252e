"""`ShardedWeight`: the part of a weight that one rank of FSDP2 holds, which is gathered quantized.

FSDP2 calls two methods of a parameter's local tensor: `fsdp_pre_all_gather` returns the tensors to send, and
`fsdp_post_all_gather` makes the weight from the received bytes. A `ShardedWeight` is the plain tensor of the part, in
high precision, with these two methods, so that optimizers, clipping and checkpoints see no difference. It sends bytes:
gloo refuses FP8, and NCCL refuses E8M0 and E2M1. The layer's weight is then a `QuantizedParameter` with a plain
gradient, which FSDP reduces as any other.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from diptych.torch.distributed.gather import Gather
from diptych.torch.distributed.quantized_parts import Received
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.private.dispatch import no_torch_function
from diptych.torch.private.sharding import inner_tensors
from diptych.torch.tensors.quantized import QuantizedStack, QuantizedTensor


class Send:
    """The `fsdp_pre_all_gather` of one part. FSDP2 reads its signature at each gather, so the signature is made
    once."""

    __signature__ = inspect.signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)

    def __init__(self, gather: Gather) -> None:
        self.gather = gather

    def __call__(
        self, mesh: Any, outer_size: torch.Size, outer_stride: tuple[int, ...], module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Received]:
        """Returns (bytes to send, the argument of `fsdp_post_all_gather`)."""
        return self.gather.parts.of(self.gather, mesh, mp_policy.param_dtype)


class ShardedWeight(Tensor):
    """A weight's part [N / ranks, K], or a stack's [G / ranks, N, K], in high precision. `parallel.prepare` makes it
    from FSDP2's local tensor, in place."""

    gather: Gather
    fsdp_pre_all_gather: Send
    __torch_function__ = no_torch_function

    @staticmethod
    def of(part: Tensor, gather: Gather) -> ShardedWeight:
        made: Any = part.as_subclass(ShardedWeight)
        made.gather, made.fsdp_pre_all_gather = gather, Send(gather)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the part as a plain tensor."""
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], received: Received, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Fills the whole weight's buffers. Returns (weight, tensors that FSDP frees with it), or None if `out`, which
        has these buffers, is given."""
        gather = self.gather
        received.known.fill()
        for name, t in received.same.items():
            gather.fill(name, t)
        for name, t in zip(received.plan.sent, outputs, strict=True):
            if gather.cut_by_columns(name):  # this makes [K, N] of [ranks * K, N / ranks]
                joined = t.view(received.ranks, -1, *t.shape[1:]).transpose(0, 1).flatten(1)
                gather.fill(name, joined.view(gather.whole[name].dtype))
                t.untyped_storage().resize_(0)
        if received.plan.turned:
            gather.fill_columnwise()
        if out is not None:
            return None
        kind = QuantizedStack if gather.stack else QuantizedTensor
        whole = kind(gather.quantizer, received.shape, received.dtype, **gather.whole)
        return QuantizedParameter.of(whole), inner_tensors(gather.param)
