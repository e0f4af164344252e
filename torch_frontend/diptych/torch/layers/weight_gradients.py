"""Weight gradients that backward adds to `weight.main_grad` or leaves to `backward_dw`.

A weight may carry attributes, as TransformerEngine and Megatron-LM name them, which are read in each backward:

    main_grad                the buffer, float32, bfloat16 or float16, to which gradients are added
    overwrite_main_grad      if True, main_grad becomes the gradient instead
    grad_added_to_main_grad  if the weight has this attribute, backward sets it to True, and autograd gets zeros for the
                             weight, so that the weight's hooks run. `zero_out_wgrad` asks for zeros too

Invariants:

- A gradient that waits reaches its weight through autograd's engine when `backward_dw` runs: the hooks of the weight
  and of reducers see it as they see any gradient. Before that the engine must not reach the weight, since a reducer
  would treat the weight as one without a gradient. So forward reads a leaf with the weight's values in its place
  (`Sink.stand_in`). A backward that is asked for the weight's gradient (`inputs=`) computes the leaf's gradient.
- FSDP2 reduces gradients at the end of backward, and again when `backward_dw` has delivered more. Nothing reduces a
  `main_grad`: weights that DistributedDataParallel or FSDP2 manage are refused.
- The backward of a dry run, wherever it runs, changes no queue and no buffer.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from diptych.common.errors import ShapeError, UnsupportedError
from diptych.common.layer_options import WeightGradientOptions
from diptych.torch.graph.guards import before_each_call
from diptych.torch.primitives.checks import HIGH_PRECISION, describe, wrapped
from diptych.torch.private.functorch import transforms_active
from diptych.torch.private.sharding import (
    BEFORE_BACKWARD,
    active_ddp,
    groups_of,
    is_gathered,
    module_states,
    reduce_again,
    reduced_parameters,
)
from diptych.torch.state.autocast import ASKED_OF_BACKWARD, STAGE_METHODS, STATE


def accumulate(wgrad: Any, acc: Tensor, overwrite: bool) -> None:
    """Adds a `WeightGradient`, of one weight or of a stack, to a buffer, or replaces the buffer's values by it."""
    if overwrite:
        acc.zero_()
    wgrad.accumulate(acc)


class WeightGradients:
    """The destination of a module's weight gradients, and those that wait there."""

    def __init__(self, options: WeightGradientOptions) -> None:
        self.options = options
        self.queue: list[tuple[Sink, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "queue": []}

    def of(self, weight: Tensor) -> Sink:
        """Returns the destination of one call's gradient. **Raises**, before the forward runs, ValueError for a weight
        without a `main_grad` that fits, NotImplementedError for one whose gradient a reducer would miss."""
        if weight.requires_grad and (torch.is_grad_enabled() or STATE.taped):
            if not torch.compiler.is_compiling():  # `require_while_tracing` checks this for compiled code
                if self.options.fuse and wrapped(weight):
                    raise UnsupportedError(
                        "fuse_wgrad_accumulation for a weight that a transform of torch.func passes: the transform "
                        "returns the weight's gradient and cannot write to main_grad; make the module without "
                        "fuse_wgrad_accumulation"
                    )
                self.require_reduced(weight)
            if self.options.fuse:
                main_grad(weight)
        return Sink(self, weight)

    def require_reduced(self, weight: Tensor) -> None:
        """**Raises** NotImplementedError for a weight whose gradient a reducer would miss."""
        if said := _missed(self.options.fuse, weight):
            raise UnsupportedError(said)

    def marks(self, weight: Tensor) -> bool:
        """Returns whether backward sets the weight's `grad_added_to_main_grad`."""
        return self.options.fuse and getattr(weight, "grad_added_to_main_grad", None) is not None

    def run(self) -> None:
        """Computes the gradients that wait, oldest first. Several gradients of one weight reach it as their sum.
        **Raises** ValueError, and keeps the gradients, if a weight does not require a gradient any more."""
        waiting: dict[int, tuple[Sink, list[Any]]] = {}
        for sink, wgrad in self.queue:
            waiting.setdefault(id(sink.weight), (sink, []))[1].append(wgrad)
        if not waiting:
            return
        if not all([sink.weight.requires_grad for sink, _ in waiting.values()]):
            raise ValueError(
                "backward_dw: a weight was frozen after the backward that left its gradient; freeze it after "
                "backward_dw"
            )
        self.queue = []
        with torch.inference_mode(False), torch.enable_grad():
            nodes = [_Delivery.apply(sink.weight, sink, wgrads) for sink, wgrads in waiting.values()]
            torch.autograd.backward(nodes, [torch.empty_like(node) for node in nodes])
        groups = [fsdp_group(sink.weight) for sink, _ in waiting.values()]
        for group in dict.fromkeys([group for group in groups if group is not None]):
            reduce_again(group)


class Sink:
    """Takes one weight's gradients in backward. `marks`: whether autograd gets zeros for the weight instead of nothing.
    `dry`: whether the forward was a dry run."""

    def __init__(self, owner: WeightGradients, weight: Tensor) -> None:
        self.owner, self.weight, self.dry = owner, weight, STATE.dry
        self.marks = owner.marks(weight) and not (owner.options.delay or self.dry)

    def buffers(self) -> list[Tensor]:
        """Returns the buffers to which backward adds: the weight's `main_grad`, or none."""
        return [main_grad(self.weight)] if self.owner.options.fuse else []

    def how(self) -> str:
        """Returns how a backward changes the buffer: "add", "overwrite" or, after a dry run, "keep"."""
        return "keep" if self.dry else "overwrite" if overwrites(self.weight) else "add"

    def stand_in(self) -> Tensor:
        """Returns the tensor that forward reads: the weight, or, if its gradient waits, a leaf with the weight's values
        and without its hooks."""
        if self.dry or not (self.owner.options.delay and self.weight.requires_grad and torch.is_grad_enabled()):
            return self.weight
        if transforms_active():
            raise UnsupportedError(
                "delay_wgrad_compute inside of a transform of torch.func: the transform returns the gradients that "
                "backward computes, and this one waits for backward_dw; make the module without delay_wgrad_compute"
            )
        made = self.weight.detach().requires_grad_()
        _stand_ins[made] = [self.weight, self.weight.grad_fn, *_leaves(self.weight)]
        return made

    def accept(self, wgrad: Any) -> Tensor | None:
        """Computes the gradient, or keeps it for `backward_dw`. Returns the gradient that autograd gets, or None."""
        if self.dry:
            return None
        if self.owner.options.delay:
            self.owner.queue.append((self, wgrad))
            return None
        return self.added([wgrad])

    def delivered(self, wgrads: list[Any]) -> Tensor | None:
        """Computes the gradients that waited. Returns the gradient that autograd gets, or None."""
        if self.owner.options.fuse:
            return self.added(wgrads)
        total = wgrads[0].compute()
        for wgrad in wgrads[1:]:
            total += wgrad.compute()
        return total

    def added(self, wgrads: list[Any]) -> Tensor | None:
        """Adds gradients to `main_grad`. Returns the gradient that autograd gets, zeros or None."""
        for wgrad in wgrads:
            accumulate(wgrad, main_grad(self.weight), overwrites(self.weight))
        if not self.owner.marks(self.weight):
            return None
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.zeros(self.weight.shape, dtype=self.weight.dtype, device=self.weight.device)


# The living leaves that `Sink.stand_in` made, each with its weight and the nodes and parameters from which the weight
# is computed. The weights are not referenced weakly: torch swaps no tensor that has a weak reference
# (`torch.__future__.set_swap_module_params_on_conversion`).
_stand_ins = WeakIdKeyDictionary()


def _asked_for_what_waits(tensors: Any, inputs: Any, accumulate: bool) -> Any:
    """Makes a backward pass that is asked for the gradient of a weight compute it for `backward_dw`. `tensors`: those
    at which the pass begins. `inputs`: those whose gradients it is asked for. Both are tensors or edges of a graph."""
    if not _stand_ins:
        return inputs
    asked = [getattr(t.node, "variable", t.node) if isinstance(t, GradientEdge) else t for t in inputs]
    ids = {id(each) for each in asked}
    waiting = [made for made, sources in _stand_ins.items() if any([id(each) in ids for each in sources])]
    if accumulate or not waiting:
        return (*inputs, *waiting)
    reached = {id(leaf) for t in tensors for leaf in _leaves(t)}
    if any([id(made) in reached for made in waiting]):
        raise UnsupportedError(
            "delay_wgrad_compute and autograd.grad for a layer's weight: its gradient waits for backward_dw, "
            "which adds it to weight.grad; use backward(), or make the module without delay_wgrad_compute"
        )
    return inputs


ASKED_OF_BACKWARD.append(_asked_for_what_waits)


class _Delivery(torch.autograd.Function):
    """A node whose backward computes the gradients of a weight that waited."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, sink: Sink, wgrads: list[Any]) -> Tensor:
        ctx.waiting = sink, wgrads
        return torch.empty(0, device=weight.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, None, None]:
        sink, wgrads = ctx.waiting
        return sink.delivered(wgrads), None, None


def overwrites(weight: Tensor) -> bool:
    """Returns whether a backward replaces the values of `main_grad`."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def main_grad(weight: Tensor) -> Tensor:
    """Returns a weight's gradient buffer. **Raises** ValueError if the weight has none that fits."""
    acc = getattr(weight, "main_grad", None)
    if not isinstance(acc, Tensor):
        raise ValueError(
            "fuse_wgrad_accumulation adds to weight.main_grad, which the weight does not have: set it to "
            "torch.zeros(weight.shape, dtype=torch.float32) before the step"
        )
    if acc.dtype not in HIGH_PRECISION or acc.shape != weight.shape or acc.device != weight.device:
        raise ShapeError(
            f"weight.main_grad must be float32, bfloat16 or float16, {list(weight.shape)} on {weight.device}, got "
            f"{describe(acc)}"
        )
    if not acc.is_contiguous():
        raise ShapeError(
            f"weight.main_grad must be contiguous, since it is written in place, got strides {acc.stride()}; set it to "
            "weight.main_grad.contiguous()"
        )
    return acc


class Buffer:
    """A buffer to which a node adds a weight's gradient. `how`: "add", "overwrite" or "keep"."""

    marks = False

    def __init__(self, buffer: Tensor, how: str) -> None:
        self.buffer, self.how = buffer, how

    def accept(self, wgrad: Any) -> None:
        if self.how != "keep":
            accumulate(wgrad, self.buffer, self.how == "overwrite")


# --- reducers --------------------------------------------------------------------------------------------------------


# The groups of gathered parameters, by the parameters' ids. FSDP2 keeps a gathered parameter as long as its group, so
# an id stays the parameter's own. A parameter as the key would be kept alive by its value, a group that refers to it.
_groups: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def fsdp_group(weight: Tensor) -> Any:
    """Returns the FSDP2 group to which a weight belongs, in the gathered form that forward sees; None for others."""
    if "torch.distributed.fsdp" not in sys.modules:
        return None
    known = _groups.get(id(weight))
    if known is not None and _holds(known, weight):
        return known
    # This is a loop because Dynamo would trace a comprehension as a function and confuse its weak references with the
    # objects to which they refer.
    for made in module_states():
        for group in groups_of(made()):
            if _holds(group, weight):
                _groups[id(weight)] = group
                return group
    return None


def _holds(group: Any, weight: Tensor) -> bool:
    return any([is_gathered(param, weight) for param in group.fsdp_params])


def _reduces(ddp: DistributedDataParallel, leaves: list[Tensor]) -> bool:
    """Returns whether DistributedDataParallel reduces the gradient of one of these parameters."""
    return any([p is leaf for p in reduced_parameters(ddp) for leaf in leaves])


def _leaves(t: Any) -> list[Tensor]:
    """Returns the leaves of the graph from which a tensor, or the tensor of an edge, is computed. For a weight that is
    not parametrized that is the weight itself."""
    begin: Any = t.node if isinstance(t, GradientEdge) else t.grad_fn
    if begin is None:
        return [t]  # type: ignore[list-item]
    found, seen, ahead = [], set(), [begin]
    while ahead:
        node: Any = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [next_node for next_node, _ in node.next_functions]
            found += [node.variable] if hasattr(node, "variable") else []
    return found


def _of_flat_parameter(weight: Tensor, leaves: list[Tensor]) -> bool:
    """Returns whether a weight is a view of a flat parameter of FullyShardedDataParallel, or computed from one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any([isinstance(t, fsdp.FlatParameter) for t in (weight._base, *leaves)])


def _missed(fuse: bool, weight: Tensor) -> str:
    """Returns the reason why a reducer would miss a weight's gradient, as an error message; "" if there is none."""
    leaves = _leaves(weight)
    if _of_flat_parameter(weight, leaves):
        return (
            "fuse_wgrad_accumulation and delay_wgrad_compute under FullyShardedDataParallel: the wrapper reduces the "
            "gradient of its flat parameter once, in backward; shard by fully_shard, or make the module without these "
            "options"
        )
    ddp = active_ddp()
    wrapped = ddp is not None and (fuse or ddp.find_unused_parameters or ddp.static_graph) and _reduces(ddp, leaves)
    sharded = (fuse or weight.grad_fn is not None) and any([fsdp_group(leaf) is not None for leaf in leaves])
    if fuse and (wrapped or sharded):
        who = "DistributedDataParallel" if wrapped else "FSDP2 (fully_shard)"
        return (
            f"fuse_wgrad_accumulation under {who}, which reduces weight.grad over the ranks: nothing would reduce "
            "weight.main_grad; make the module without fuse_wgrad_accumulation"
        )
    if sharded:
        return (
            "delay_wgrad_compute under FSDP2 (fully_shard) for a weight that is computed from parameters, such as a "
            "parametrized one: FSDP2 has resharded these when backward_dw runs; make the module without "
            "delay_wgrad_compute"
        )
    if ddp is not None and wrapped:
        option = "find_unused_parameters" if ddp.find_unused_parameters else "static_graph"
        return (
            f"delay_wgrad_compute under DistributedDataParallel with {option}=True: the wrapper would treat a weight "
            f"whose gradient waits for backward_dw as one without a gradient; leave {option} off, or make the module "
            "without delay_wgrad_compute"
        )
    return ""


def require_while_tracing(context: Any, module: Any) -> None:
    """Checks, while Dynamo traces a module, that no reducer would miss its gradients, and adds a guard to the graph: if
    a reducer would miss one later, Dynamo traces again. **Raises** what `WeightGradients.require_reduced` raises."""
    gradients: WeightGradients | None = module._weight_gradients
    if gradients is None or not gradients.options.fuse:
        return
    for weight in _weights(module):
        gradients.require_reduced(weight)
    before_each_call(context, "self", lambda module: not any([_missed(True, weight) for weight in _weights(module)]))


def _weights(module: Any) -> list[Tensor]:
    """Returns a module's parameters that have a main_grad. The weights whose gradients go there are among them."""
    return [p for p in module.parameters() if isinstance(getattr(p, "main_grad", None), Tensor)]


# --- pipelines -------------------------------------------------------------------------------------------------------


def _with(stage: Any, option: str) -> str:
    """Returns the name of a module of a pipeline's stage that has an option ("fuse" or "delay"); "" if none has."""
    for name, module in stage.submod.named_modules():
        gradients = getattr(module, "_weight_gradients", None)
        if gradients is not None and getattr(gradients.options, option):
            return f"{name or 'the module'} ({type(module).__name__})"
    return ""


def _before_backward(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the method that a stage calls once, before its first step with a backward."""

    @functools.wraps(prepare)
    def prepared(stage: Any, *args: Any, **kwargs: Any) -> Any:
        if name := _with(stage, "delay"):
            raise UnsupportedError(
                f"delay_wgrad_compute in a schedule of torch.distributed.pipelining: {name} would compute its weight "
                "gradients after the schedule has scaled and reduced gradients; make it without delay_wgrad_compute, "
                "and use a zero-bubble schedule, which asks layers for input and weight gradients separately"
            )
        return prepare(stage, *args, **kwargs)

    return prepared


def _scaling(scale_grads: Callable[..., None]) -> Callable[..., None]:
    """Wraps the method that divides the gradients of a stage by the number of its microbatches."""

    @functools.wraps(scale_grads)
    def scaled(stage: Any, grad_scale_factor: int) -> None:
        if grad_scale_factor != 1 and (name := _with(stage, "fuse")):
            raise UnsupportedError(
                f"fuse_wgrad_accumulation in a schedule with scale_grads=True: the schedule divides weight.grad by "
                f"{grad_scale_factor}, and would leave weight.main_grad of {name} as it is; make the schedule with "
                "scale_grads=False and divide the loss, or make the module without fuse_wgrad_accumulation"
            )
        scale_grads(stage, grad_scale_factor)

    return scaled


STAGE_METHODS[BEFORE_BACKWARD] = _before_backward
STAGE_METHODS["scale_grads"] = _scaling
