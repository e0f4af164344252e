"""Weight gradients that backward adds to `weight.main_grad` or leaves to `backward_dw`.

A weight may carry attributes, as TransformerEngine and Megatron-LM name them, which are read in each backward:

    main_grad                the buffer, float32, bfloat16 or float16, that gradients are added to
    overwrite_main_grad      True: main_grad becomes the gradient instead
    grad_added_to_main_grad  where the weight has it, backward sets it to True, and autograd gets zeros for the weight,
                             so that hooks on it run. Zeros serve `zero_out_wgrad` too, which asks for them
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diptych.common.errors import ShapeError
from diptych.torch.primitives.checks import HIGH_PRECISION, describe


def accumulate(wgrad: Any, acc: Tensor, overwrite: bool) -> None:
    """Adds a `WeightGradient`, of one weight or of a stack, to a buffer, or replaces what it holds."""
    if overwrite:
        acc.zero_()
    wgrad.accumulate(acc)


class WeightGradients:
    """The destination of a module's weight gradients: `weight.main_grad` (`fuse`), in backward or in `backward_dw`
    (`delay`)."""

    def __init__(self, fuse: bool, delay: bool) -> None:
        self.fuse, self.delay = fuse, delay
        self.queue: list[tuple[Tensor, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"fuse": self.fuse, "delay": self.delay, "queue": []}

    def of(self, weight: Tensor) -> Sink:
        if self.fuse and weight.requires_grad and torch.is_grad_enabled():
            main_grad(weight)  # raises before the forward, not in backward
        return Sink(self, weight)

    def marks(self, weight: Tensor) -> bool:
        """Whether backward sets the weight's `grad_added_to_main_grad`."""
        return self.fuse and getattr(weight, "grad_added_to_main_grad", None) is not None

    def run(self) -> None:
        """Computes the gradients that wait, oldest first."""
        queue, self.queue = self.queue, []
        with torch.no_grad():
            for weight, wgrad in queue:
                if self.fuse:
                    accumulate(wgrad, main_grad(weight), overwrites(weight))
                elif weight.grad is None:
                    weight.grad = wgrad.compute()
                else:
                    weight.grad += wgrad.compute()


class Sink:
    """Takes one weight's gradients in backward. `marks`: autograd gets zeros for the weight instead of nothing."""

    def __init__(self, owner: WeightGradients, weight: Tensor) -> None:
        self.owner, self.weight, self.marks = owner, weight, owner.marks(weight)

    def buffers(self) -> list[Tensor]:
        """The tensors that backward adds to."""
        return [main_grad(self.weight)] if self.owner.fuse else []

    def accept(self, wgrad: Any) -> Tensor | None:
        """Computes the gradient or keeps it for `backward_dw`; returns what autograd gets."""
        if self.owner.delay:
            self.owner.queue.append((self.weight, wgrad))
        else:
            accumulate(wgrad, main_grad(self.weight), overwrites(self.weight))
        if not self.marks:
            return None
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.zeros(self.weight.shape, dtype=self.weight.dtype, device=self.weight.device)


def overwrites(weight: Tensor) -> bool:
    """Whether a backward replaces what `main_grad` holds."""
    return bool(getattr(weight, "overwrite_main_grad", False))


def main_grad(weight: Tensor) -> Tensor:
    """A weight's gradient buffer. **Raises** ValueError if it has none that fits."""
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
        raise ShapeError("weight.main_grad must be contiguous: it is written in place")
    return acc


class Buffer:
    """A buffer that a node adds a weight's gradient to. `how`: "add" or "overwrite"."""

    marks = False

    def __init__(self, buffer: Tensor, how: str) -> None:
        self.buffer, self.how = buffer, how

    def accept(self, wgrad: Any) -> None:
        accumulate(wgrad, self.buffer, self.how == "overwrite")
