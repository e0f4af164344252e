"""`Gather`: how one weight of FSDP2 is gathered quantized: the copies that travel, and the memory that receives them.

FSDP2 gathers a weight for forward, and again for backward unless it stays gathered in between. Forward reads the
rowwise copy and backward the columnwise one, so a gather receives what is read until the weight is resharded: copies in
one-dimensional blocks travel when they are read, others travel rowwise and are transposed when backward reads them.

Invariant: the whole weight's buffers are the same tensors for good, since graphs and autograd save in forward what they
read in backward. A buffer that is not gathered has no memory, and the core refuses to read it.
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
from diptych.torch.distributed.columnwise import byte_transposed, transposable, transposed
from diptych.torch.primitives import grouped as grouped_ops
from diptych.torch.primitives import quantize as quantize_ops
from diptych.torch.private.autograd import backward_pass, keep_version
from diptych.torch.private.sharding import reshards_after_forward, set_inner_tensors, training_state

ROWWISE, COLUMNWISE = "rowwise", "columnwise"


class Plan(NamedTuple):
    """How a weight is gathered when certain copies of it are read. `making`: quantizes a part; `names`: its buffers.
    `sent`: names of those that travel. `outputs`: what FSDP receives them into; `inner`: the other tensors that it
    allocates and frees. `turned`: whether the columnwise copy is made of the rowwise one that was received."""

    making: Quantizer
    names: tuple[str, ...]
    sent: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    inner: tuple[Tensor, ...]
    turned: bool


@dataclasses.dataclass
class Gather:
    """How one weight is gathered.

    `stack`: whether it is a stack of weights [G, N, K], of which each rank holds some whole ones. `param`, `group`:
    FSDP2's own objects for the weight and for those that are gathered with it. `recompute`: whether backward reads the
    rowwise copy too. `amaxes`: None where no block is cut; `number` is the weight's place in them. `parts`: quantizes
    the parts of all weights that are gathered together. `whole`: the gathered weight's buffers by name, once they are
    made; `plans`: by the copies that are read.
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
        """The copies that are read from the gather that begins now until the weight is resharded."""
        state, in_backward = training_state(self.group).name, backward_pass() != -1
        if not self.quantizer.columnwise:
            return (ROWWISE,)
        if state == "FORWARD" and reshards_after_forward(self.group) and not in_backward:
            return (ROWWISE,)
        if state == "PRE_BACKWARD" and self.group.reshard_after_backward and not self.recompute:
            return (COLUMNWISE,)
        return ROWWISE, COLUMNWISE  # the weight stays gathered, or a user's own call gathers it

    def travelling(self, read: tuple[str, ...]) -> tuple[str, ...]:
        """The copies that ranks send, for those that are read."""
        return (ROWWISE,) if transposable(self.quantizer) else read

    def sent(self, making: Quantizer) -> tuple[str, ...]:
        """The buffers that ranks send of those that are made. Scales of whole tensors, and amaxes, are known to all;
        those of a stack's weights to one rank each."""
        scales = () if self.quantizer.format.per_tensor else ("scale_inv",)
        return tuple([name for name in making.buffer_names() if self.stack or name.endswith(("data", *scales))])

    def cut_by_columns(self, name: str) -> bool:
        """Whether ranks hold columns of a buffer, which are not received as they lie."""
        return not self.stack and name.startswith(COLUMNWISE) and self.quantizer.format.columnwise == "transposed"

    def receive(self, shape: tuple[int, ...], like: Tensor, ranks: int) -> Plan:
        """Makes FSDP receive into the whole weight's buffers, and allocate and free the others that are read, as the
        plan says that it returns."""
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
        sent = self.sent(making)[: None if ranks > 1 else 1]  # FSDP takes one tensor of a single rank
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
        """Copies a buffer that was not received as it lies."""
        with self._written(name, t) as held:
            held.copy_(t)

    def fill_columnwise(self) -> None:
        """Makes the columnwise copy of the rowwise one that was received."""
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
        """The whole weight's buffer with its memory, to be written from `t`."""
        held = self.whole[name]
        storage = held.untyped_storage()
        if storage.nbytes() < held.nbytes:
            storage.resize_(held.nbytes)
        if t.is_cuda:  # FSDP makes small tensors on a stream of its own
            t.record_stream(torch.cuda.current_stream(t.device))
        with keep_version(held):
            yield held
