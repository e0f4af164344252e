"""Checks the shapes of the frameworks' operations, so that a trace cannot ask for more memory than its tensors take.

Targets of cross entropy must be classes, and ids of an embedding must be rows of its table. For others the frameworks
have different results: PyTorch raises an error; JAX counts from the end, clips, or returns NaN or 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diptych.lab.replay.op import Bits, Op, ReplayError
from diptych.lab.traces import DTYPES

Shape = tuple[int, ...]
_LARGEST = 2**28
"""The most elements of a convolution's padded and dilated operand, which the reference holds in float64."""


def require_shape(op: Op) -> None:
    """**Raises** ReplayError if the recorded result of a framework's operation does not have the shape that operands
    and options imply, if a convolution needs too much memory, if a target is no class or an id is no row; ValueError if
    the operands do not fit."""
    if op.kind not in _ROWS:
        return
    shapes = {name: bits.data.shape for name, bits in op.inputs.items()}
    found, held = _ROWS[op.kind](shapes, op.options), op.outputs["out"].data.shape
    if found != held:
        raise ReplayError(f"the recorded result has shape {list(held)}, but its operands lead to {list(found)}")
    if op.kind == "cross_entropy":
        classes = op.inputs["logits"].data.shape[op.options["axis"]]
        _require_indices(op.inputs["targets"], classes, "targets are no classes", op.options["ignore_index"])
    if op.kind == "embedding":
        _require_indices(op.inputs["ids"], op.inputs["table"].data.shape[0], "ids are no rows of the table", None)


def _require_indices(given: Bits, count: int, says: str, ignored: int | None) -> None:
    found = DTYPES[given.dtype].decode(given.data)
    wrong = found[((found < 0) | (found >= count)) & (found != ignored)]
    if wrong.size:
        why = (
            "frameworks differ in what they do there: PyTorch raises an error, JAX counts from the end, clips or fills"
        )
        raise ReplayError(f"{wrong.size} {says} from 0 to {count - 1}, the first is {wrong[0]:.0f}; {why}")


def _matmul(of: Mapping[str, Shape], options: Mapping[str, Any]) -> Shape:
    terms, out = options["equation"].split("->")
    sizes: dict[str, int] = {}
    for name, letters in zip("ab", terms.split(","), strict=True):
        for letter, n in zip(letters, of[name], strict=True):
            if sizes.setdefault(letter, n) != n:
                raise ReplayError(
                    f"equation {options['equation']!r}: axes {letter} have {sizes[letter]} and {n} elements"
                )
    return tuple(sizes[letter] for letter in out)


def _conv(of: Mapping[str, Shape], options: Mapping[str, Any]) -> Shape:
    of_x, of_weight, of_out = options["layout"].split(",")
    x, weight = (dict(zip(axes, of[k], strict=True)) for k, axes in (("x", of_x), ("weight", of_weight)))
    spread = lambda n, by: (n - 1) * by + 1 if n else 0  # noqa: E731
    sizes, padded, kernel = {"N": x["N"], "C": weight["O"]}, x["N"] * x["C"], weight["O"] * weight["I"]
    for axis, stride, by, of_input, (low, high) in zip(
        sorted(set(of_x) - set("NC")), options["strides"], options["dilation"], options["input_dilation"],
        options["padding"], strict=True,
    ):  # fmt: skip
        n, k = spread(x[axis], of_input) + low + high, spread(weight[axis], by)
        sizes[axis] = max((n - k) // stride + 1, 0)
        padded *= max(n, spread(x[axis], of_input))
        kernel *= k
    if max(padded, kernel) > _LARGEST:
        raise ReplayError(f"an operand of the convolution has more than {_LARGEST} elements with padding and dilation")
    return tuple(sizes[axis] for axis in of_out)


def _cross_entropy(of: Mapping[str, Shape], options: Mapping[str, Any]) -> Shape:
    return of["targets"] if options["reduction"] == "none" else ()


def _broadcast(of: Mapping[str, Shape], _: Any) -> Shape:
    return np.broadcast_shapes(*of.values())


def _of_x(of: Mapping[str, Shape], _: Any) -> Shape:
    return of["x"]


_ROWS: dict[str, Callable[[Mapping[str, Shape], Mapping[str, Any]], Shape]] = {
    "linear": lambda of, _: (*of["x"][:-1], of["weight"][0]),
    "matmul": _matmul,
    "embedding": lambda of, _: (*of["ids"], *of["table"][1:]),
    "conv": _conv,
    **dict.fromkeys(("softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "silu"), _of_x),
    **dict.fromkeys(("add", "mul", "rotary"), _broadcast),
    "cross_entropy": _cross_entropy,
}
