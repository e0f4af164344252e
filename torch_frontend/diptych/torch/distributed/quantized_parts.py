"""`Parts`: this rank's parts of the weights that FSDP2 gathers together, quantized in few calls of the core.

FSDP2 asks for one weight after the other. When it asks for the first one, the weights of the whole group are quantized:
the host would fall behind the GPU if it quantized each weight by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.torch.distributed.gather import Gather, Plan
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.autograd import keep_version
from diptych.torch.private.dispatch import foreach_copy_
from diptych.torch.private.sharding import sharded_part


class Known:
    """Tensorwise scales, and amaxes, of all weights of a group. All ranks compute them, so that they are not sent."""

    def __init__(self) -> None:
        self._held: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, held: Tensor, value: Tensor) -> None:
        self._held.append(held)
        self._values.append(value)

    def fill(self) -> None:
        """Copies the values into the weights' buffers, in one call when the first weight is received."""
        held, values = self._held, self._values
        if not held:
            return
        self._held, self._values = [], []
        if held[0].is_cuda:  # FSDP quantizes on a stream of its own
            stream = torch.cuda.current_stream(held[0].device)
            for t in values:
                t.record_stream(stream)
        with keep_version(tuple(held)):
            foreach_copy_(held, values)


class Received(NamedTuple):
    """The part of a gathered weight that a rank has without receiving it. `known`: the values that all ranks know, of
    the whole group. `same`: the other buffers that are not sent, by name."""

    plan: Plan
    same: dict[str, Tensor]
    known: Known
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: int


class Parts:
    """The parts of the weights of one FSDP2 group.

    Invariant: all quantized parts are taken before a gather ends, since FSDP2 asks for every weight of a group.
    """

    def __init__(self) -> None:
        self._gathers: list[Gather] = []
        self._made: dict[int, tuple[tuple[Tensor, ...], Received]] = {}

    def add(self, gather: Gather) -> None:
        self._gathers.append(gather)

    def of(self, gather: Gather, mesh: Any, dtype: torch.dtype | None) -> tuple[tuple[Tensor, ...], Received]:
        """Returns (the bytes of a weight to send, the `Received` that completes them).

        `mesh`: the ranks that the weights are sharded over. `dtype`: the dtype to which weights are cast before they
        are quantized, or None.
        """
        if id(gather) not in self._made:
            with torch.no_grad():
                self._quantize(mesh, dtype)
        return self._made.pop(id(gather))

    def _quantize(self, mesh: Any, dtype: torch.dtype | None) -> None:
        ranks, known = mesh.size(), Known()
        alike: dict[Any, list[tuple[Gather, Plan, Tensor]]] = {}  # the core quantizes those together
        for gather in self._gathers:
            held = sharded_part(gather.param)
            if getattr(held, "gather", None) is not gather:  # FSDP2 gathers a plain tensor in high precision
                continue
            part = held.detach().as_subclass(Tensor)
            part = part if dtype is None else part.to(dtype)
            plan = gather.receive((part.shape[0] * ranks, *part.shape[1:]), part, ranks)
            q = plan.making
            key = (gather.stack, gather.amaxes is None, q.spec, q.rowwise, q.columnwise, part.dtype)
            alike.setdefault(key, []).append((gather, plan, part))
        for some in alike.values():
            for (gather, plan, part), buffers in zip(some, _quantized(some, mesh), strict=True):
                made = dict(zip(plan.names, buffers, strict=True))
                same = _not_sent(made, gather, plan, known)
                shape = (part.shape[0] * ranks, *part.shape[1:])
                received = Received(plan, same, known, shape, part.dtype, ranks)
                self._made[id(gather)] = tuple([made[name].view(torch.uint8) for name in plan.sent]), received


def _not_sent(made: dict[str, Tensor], gather: Gather, plan: Plan, known: Known) -> dict[str, Tensor]:
    """Returns the buffers of a part that every rank has, by name, without the single numbers: these go to `known`."""
    same = {}
    for name, t in made.items():
        if name in plan.sent:
            continue
        if t.numel() == 1 and t.dtype == torch.float32:
            known.add(gather.whole[name], t)
        else:
            same[name] = t
    return same


def _quantized(some: list[tuple[Gather, Plan, Tensor]], mesh: Any) -> list[list[Tensor]]:
    """Returns the buffers of parts that share a quantizer, a shape of copies and a dtype."""
    (first, plan, part), parts = some[0], [part for _, _, part in some]
    if first.stack:
        return [grouped_ops.quantize_stack(part, plan.making) for part in parts]
    if first.amaxes is None:
        return quantize_ops.quantize_many(parts, plan.making)
    amaxes = first.amaxes.of([gather.number for gather, _, _ in some], mesh.get_group(), part.dtype)
    return quantize_ops.quantize_many(parts, plan.making, amaxes)
