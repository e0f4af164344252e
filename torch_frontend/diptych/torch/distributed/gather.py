"""`Gather`: the quantized gathering of one FSDP2 weight: the copies that are sent, and the memory that receives them.

FSDP2 gathers a weight for forward, and again for backward unless it stays gathered in between. Forward reads the
rowwise copy and backward the columnwise one, so a gather receives the copies that are read until the weight is
resharded. Copies in one-dimensional blocks are sent when they are read; others are sent rowwise and transposed when
backward reads them.

Invariant: the whole weight's buffers remain the same tensors, since graphs and autograd save in forward the tensors
that they read in backward. A buffer that is not gathered has no memory, and the core refuses to read it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from diptych.common.quantizers import Quantizer
from diptych.torch.distributed.amaxes import WholeAmaxes
from diptych.torch.distributed.columnwise import byte_transposed, transposed
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.autograd import backward_pass, keep_version
from diptych.torch.private.sharding import reshards_after_forward, set_inner_tensors, training_state

ROWWISE, COLUMNWISE = "rowwise", "columnwise"


class Plan(NamedTuple):
    """The gathering of a weight for certain copies that are read. `making`: the quantizer of a part. `names`: the
    part's buffers. `sent`: the names of those that are sent. `outputs`: the tensors into which FSDP receives them.
    `inner`: the other tensors that FSDP allocates and frees. `turned`: whether the columnwise copy is made from the
    received rowwise copy."""

    making: Quantizer
    names: tuple[str, ...]
    sent: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    inner: tuple[Tensor, ...]
    turned: bool


@dataclasses.dataclass
class Gather:
    """The gathering of one weight.

    `stack`: whether it is a stack of weights [G, N, K], of which each rank holds some whole ones. `param`, `group`:
    FSDP2's own objects for the weight and for the weights that are gathered together with it. `recompute`: whether
    backward reads the rowwise copy too. `amaxes`: the amaxes of whole weights, None if no block is cut; `number`: the
    weight's number in them. `parts`: quantizes the parts of all weights of the group. `whole`: the gathered weight's
    buffers by name, once they exist. `plans`: the plans by the copies that are read.
    """

    name: str
    quantizer: Quantizer
    stack: bool
    param: Any
    group: Any
    recompute: bool
    amaxes: WholeAmaxes | None = None
    number: int = 0
    parts: Any = None
    whole: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    plans: dict[tuple[str, ...], Plan] = dataclasses.field(default_factory=dict)

    def read(self) -> tuple[str, ...]:
        """Returns the copies that are read from the gather that begins now, until the weight is resharded."""
        state, in_backward = training_state(self.group).name, backward_pass() != -1
        if not self.quantizer.columnwise:
            return (ROWWISE,)
        if state == "FORWARD" and reshards_after_forward(self.group) and not in_backward:
            return (ROWWISE,)
        if state == "PRE_BACKWARD" and self.group.reshard_after_backward and not self.recompute:
            return (COLUMNWISE,)
        return ROWWISE, COLUMNWISE  # the weight stays gathered, or a user's own call gathers it

    def travelling(self, read: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the copies that ranks send if the copies `read` are read."""
        return (ROWWISE,) if self.quantizer.copies_agree() else read

    def sent(self, making: Quantizer) -> tuple[str, ...]:
        """Returns the names of the buffers of a part that ranks send. The scales of tensorwise formats, and amaxes, are
        known to all ranks and are not sent, except those of a stack, each of whose weights one rank has."""
        scales = () if self.quantizer.format.one_scale else ("scale_inv",)
        return tuple([name for name in making.buffer_names() if self.stack or name.endswith(("data", *scales))])

    def cut_by_columns(self, name: str) -> bool:
        """Returns whether ranks hold columns of a buffer, so that the received bytes must be reordered."""
        return not self.stack and name.startswith(COLUMNWISE) and self.quantizer.format.columnwise == "transposed"

    def receive(self, shape: tuple[int, ...], like: Tensor, ranks: int) -> Plan:
        """Makes FSDP receive into the whole weight's buffers, and allocate and free the other buffers that are read.
        Returns the plan that describes this."""
        read = self.read()
        plan = self.plans.get(read)
        if plan is None:
            plan = self.plans[read] = self._planned(read, shape, like, ranks)
        self.param.all_gather_outputs = list(plan.outputs)
        set_inner_tensors(self.param, list(plan.inner))
        return plan

    def _planned(self, read: tuple[str, ...], shape: tuple[int, ...], like: Tensor, ranks: int) -> Plan:
        if not self.whole:
            empty = grouped_ops.empty_stack if self.stack else quantize_ops.empty
            buffers = empty(shape, self.quantizer, like.device)
            self.whole = dict(zip(self.quantizer.buffer_names(), buffers, strict=True))
            for t in self.whole.values():
                if t.numel() > 1:
                    t.untyped_storage().resize_(0)
        travelling = self.travelling(read)
        making = self.quantizer.with_usage(rowwise=ROWWISE in travelling, columnwise=COLUMNWISE in travelling)
        sent = self.sent(making)[: None if ranks > 1 else 1]  # FSDP takes a single tensor if there is one rank
        outputs = {name: self.whole[name].view(-1).view(torch.uint8) for name in sent}
        for name in sent:
            if self.cut_by_columns(name):
                outputs[name] = torch.empty_like(outputs[name])
                outputs[name].untyped_storage().resize_(0)  # FSDP allocates on the stream that reads it
        inner = [
            t
            for name, t in self.whole.items()
            if t.numel() > 1 and name.startswith(read) and (name not in sent or self.cut_by_columns(name))
        ]
        turned = COLUMNWISE in read and COLUMNWISE not in travelling
        names = tuple(making.buffer_names())
        return Plan(making, names, sent, tuple(outputs.values()), tuple(inner), turned)

    def fill(self, name: str, t: Tensor) -> None:
        """Copies `t` into a buffer that was not received in place."""
        with self._written(name, t) as held:
            held.copy_(t)

    def fill_columnwise(self) -> None:
        """Makes the columnwise copy from the received rowwise copy."""
        data, scale_inv = transposed(self.quantizer, self.whole["rowwise_data"], self.whole["rowwise_scale_inv"])
        if byte_transposed(self.quantizer):
            with self._written("columnwise_data", data) as held:
                quantize_ops.transpose_into(data, held)
        else:
            self.fill("columnwise_data", data)
        self.fill("columnwise_scale_inv", scale_inv)
        if self.quantizer.format.two_level:
            self.fill("columnwise_amax", self.whole["amax"])

    @contextlib.contextmanager
    def _written(self, name: str, t: Tensor) -> Iterator[Tensor]:
        """Returns a context with the whole weight's buffer, which has memory and may be written from `t`."""
        held = self.whole[name]
        storage = held.untyped_storage()
        if storage.nbytes() < held.nbytes:
            storage.resize_(held.nbytes)
        if t.is_cuda:  # FSDP makes small tensors on a stream of its own
            t.record_stream(torch.cuda.current_stream(t.device))
        with keep_version(held):
            yield held
