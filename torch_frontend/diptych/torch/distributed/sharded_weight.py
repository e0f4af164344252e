"""`ShardedWeight`: the part of a weight that one rank of FSDP2 holds, which is gathered quantized.

FSDP2 asks a parameter's local tensor what to send (`fsdp_pre_all_gather`) and what to make of the bytes received
(`fsdp_post_all_gather`). A `ShardedWeight` is the plain tensor of the part, in high precision, with these two methods,
so that optimizers, clipping and checkpoints see no difference. It sends bytes: gloo refuses FP8, and NCCL refuses E8M0
and E2M1. The layer's weight is then a `QuantizedParameter`, whose gradient is plain, and FSDP reduces it as any other.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.quantizers import Quantizer
from diptych.torch.distributed.amaxes import WholeAmaxes
from diptych.torch.distributed.columnwise import transposable, transposed
from diptych.torch.modules.quantized_parameter import QuantizedParameter
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.tensors.quantized import QuantizedTensor

_ROWS, _COLUMNS = "rows", "columns"  # the dimension along which a buffer is cut


@dataclasses.dataclass
class Gather:
    """How one weight is gathered. `number`: the weight's place in `amaxes`, which are None for formats whose blocks are
    never cut."""

    name: str
    quantizer: Quantizer
    amaxes: WholeAmaxes | None
    number: int = 0

    @property
    def sent(self) -> tuple[tuple[str, str], ...]:
        """(buffer, the dimension along which it is cut) of what ranks send."""
        fmt = self.quantizer.format
        names = [("rowwise_data", _ROWS)] + [("rowwise_scale_inv", _ROWS)] * (not fmt.per_tensor)
        if self.quantizer.columnwise and not transposable(self.quantizer):
            cut = _COLUMNS if fmt.columnwise == "transposed" else _ROWS
            names += [("columnwise_data", cut), ("columnwise_scale_inv", cut)]
        return tuple(names)


class Received(NamedTuple):
    """The facts about a gathered weight that a rank has without receiving them, such as a scale of the whole weight."""

    same: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int


class ShardedWeight(Tensor):
    """A weight's part [N / ranks, K] in high precision. `prepare` makes it of FSDP2's local tensor, in place."""

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
        amaxes: list[Tensor] = []
        if gather.amaxes is not None:  # rounding keeps the order of values, so the cast weight's amax is the amax cast
            whole = gather.amaxes.of(gather.number, mesh.get_group()).to(dtype).to(torch.float32)
            amaxes = [whole, whole] if gather.quantizer.format.two_level and gather.quantizer.columnwise else [whole]
        sent = dict(gather.sent if mesh.size() > 1 else gather.sent[:1])  # FSDP takes one tensor of a single rank
        making = gather.quantizer.with_usage(columnwise="columnwise_data" in dict(gather.sent))
        if making.format.two_level and not making.columnwise:
            amaxes = amaxes[:1]
        made = dict(zip(making.buffer_names(), quantize_ops.quantize(part.to(dtype), making, *amaxes), strict=True))
        same = {name: t for name, t in made.items() if name not in sent}
        dtypes = {name: made[name].dtype for name in sent}
        received = Received(same, dtypes, tuple(outer_size), dtype, mesh.size())
        return tuple([made[name].view(torch.uint8) for name in sent]), received

    @torch.no_grad()
    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], received: Received, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Makes the whole weight of the bytes received: (weight, tensors that FSDP frees with it), or into `out`."""
        gather, quantizer = self.gather, self.gather.quantizer
        parts: dict[str, Tensor] = dict(received.same)
        views = set()
        for (name, dtype), t in zip(received.dtypes.items(), outputs, strict=True):
            joined = t.view(dtype)
            if dict(gather.sent)[name] == _ROWS:
                views.add(name)
            else:  # [ranks * K, N / ranks] to [K, N]
                joined = t.view(received.ranks, -1, *t.shape[1:]).transpose(0, 1).flatten(1).view(dtype)
            parts[name] = joined
        if quantizer.columnwise and "columnwise_data" not in parts:
            turned = transposed(quantizer, parts["rowwise_data"], parts["rowwise_scale_inv"])
            parts["columnwise_data"], parts["columnwise_scale_inv"] = turned
            if quantizer.format.two_level:
                parts["columnwise_amax"] = parts["amax"]
        if out is not None:
            for name, t in parts.items():
                if name not in views:
                    held = getattr(out, name)
                    with torch.autograd._unsafe_preserve_version_counter(held):  # pyright: ignore[reportPrivateImportUsage]
                        held.copy_(t)
            return None
        parts = {
            name: t if name in views else t.clone(memory_format=torch.contiguous_format) for name, t in parts.items()
        }
        whole = QuantizedTensor(quantizer, received.shape, received.dtype, **parts)
        owned = [t for name, t in parts.items() if name not in views and t.numel() > 1]
        return QuantizedParameter.of(whole), tuple(owned)
