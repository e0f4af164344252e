"""The autograd function of a traced `CustomOp`, whose forward and backward are a node each, and what nodes call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import UnsupportedError
from diptych.torch.graph import functorch
from diptych.torch.graph.fields import put, put_proto, put_sizes
from diptych.torch.primitives.checks import refuse_second_derivative
from diptych.torch.private.autograd import set_grad_enabled


def mark(ctx: Any, op: Any, arguments: Any, needs: tuple[str, ...], outputs: tuple[Tensor, ...]) -> None:
    """Tells autograd which outputs have no derivative."""
    plain = [t for t, p in zip(outputs, op.layout(arguments, needs), strict=True) if not p.requires_grad]
    ctx.mark_non_differentiable(*plain)


def traced_function(op: Any) -> Callable[..., Any]:
    """Returns the `apply` of an autograd function that runs both nodes of a `CustomOp` and keeps plain tensors, sizes
    and constants between them."""

    class Traced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, needs: tuple[str, ...], *values: Any) -> tuple[Tensor, ...]:
            arguments = op.arguments(*values)
            outputs, saved = op.run(arguments, needs)
            keeps = op.keeps(arguments, needs)
            tensors: list[Tensor] = []
            sizes: list[Any] = []
            held: list[Any] = []  # for each field: the spec of a tensor, or the value itself
            for (name, kind), value in zip(op._kinds(), values, strict=True):
                if kind in ("tensor", "quantizable"):
                    kept = value is None or name in keeps
                    held.append(put(value, tensors, sizes) if kept else put_proto(value, sizes))  # type: ignore[arg-type]
                elif kind == "tensors":
                    kept_list = value if name in keeps else []
                    held.append(len(kept_list))
                    tensors += kept_list
                elif kind == "quantizables":
                    held.append(tuple([put(t, tensors, sizes) for t in (value if name in keeps else [])]))
                elif kind in ("size", "sizes"):
                    held.append(put_sizes(value, sizes))
                else:
                    held.append(value)
            count = len(tensors)
            ctx.save_for_backward(*tensors, *saved)
            ctx.call = (needs, held, sizes, count, len(op.gradients(arguments, needs)))
            ctx.names = op.gradients(arguments, needs)
            if len(outputs) > 1:  # a single output is always differentiable
                mark(ctx, op, arguments, needs, outputs)
            return outputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
            refuse_second_derivative(op.name, op.remedy)
            needs, held, sizes, count, results = ctx.call
            found = list(ctx.saved_tensors)  # read once: a selective checkpoint recomputes for a single reading
            if functorch.mapped(*grads):

                def run(*tensors: Tensor) -> list[Tensor]:
                    kept, left = list(tensors[:count]), list(tensors[count:])
                    saved = [left.pop(0) for _ in found[count:]]
                    every = [None if g is None else left.pop(0) for g in grads]
                    return op.run_backward(held, kept, list(sizes), needs, saved, every, results)

                made = functorch.below(op.name, run, *found, *[g for g in grads if g is not None], remedy=op.remedy)
            else:
                made = op.run_backward(held, found[:count], list(sizes), needs, found[count:], list(grads), results)
            by_name = dict(zip(ctx.names, made, strict=True))
            return None, *[by_name.get(name) for name, _ in op._kinds()]

    return Traced.apply


# --- inside of the nodes ---


class NoGrad:
    """torch.no_grad without its overhead."""

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        set_grad_enabled(self.before)


def as_bytes(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t


def fixed(real: Callable[..., list[Tensor]]) -> Callable[..., Any]:
    def fixed(*inputs: Any) -> Any:
        made = real(*inputs)
        return (tuple(made) if len(made) > 1 else made[0]) if made else None

    return fixed


def new_memory(name: str, made: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Returns the results. **Raises** NotImplementedError if one is an argument, or is among the results twice."""
    seen = [id(t) for t in inputs]
    for i, t in enumerate(made):
        if id(t) in seen:
            raise UnsupportedError(
                f"{name}: result {i} is an argument, or stands among the results twice; name an argument that backward "
                "reads in keeps=, and save a tensor once"
            )
        seen.append(id(t))
    return made
