"""Traces of training steps: their data, the linear layer of each op, and the distance of two recordings in bits.

A frontend records every diptych op of a step with its raw operands, and named activations. Both are NumPy arrays here,
so that one framework's recording can be replayed in the other. This module imports no framework.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from diptych.lab.job import LINEARS, ModelConfig
from diptych.lab.replay.op import Bits, Op


def product(op: Op) -> str:
    """Returns the training product that a gemm computes: "fprop", "dgrad" or "wgrad"."""
    sides = (op.options["a"][1], op.options["b"][1])
    return {(False, False): "fprop", (False, True): "dgrad", (True, True): "wgrad"}.get(sides, "gemm")


@dataclasses.dataclass
class StepTrace:
    """One training step: loss before the update, activations in forward order, ops in call order, gradients."""

    loss: float
    activations: dict[str, np.ndarray]
    ops: list[Op]
    gradients: dict[str, np.ndarray]


class Labelled(NamedTuple):
    linear: str
    role: str  # "input", "weight", "grad_output", "fprop", "dgrad", "wgrad", "bias_grad"
    op: Op


ROLES = ("input", "weight", "fprop", "grad_output", "dgrad", "wgrad", "bias_grad")


def label(ops: list[Op], model: ModelConfig) -> list[Labelled]:
    """Returns the linear layer and role of each op, by following payload bytes from quantize into the three products.

    The forward products come in the order of the model's linear layers; all other ops are matched to them by their
    bytes. If bytes repeat (gradients may underflow to zeros, inputs may be equal), the match is the op that ran last
    before the use, and in backward the last layer that does not have this product yet. Ops that belong to no linear
    layer are left out.
    """
    quantized = [(i, op) for i, op in enumerate(ops) if op.kind == "quantize"]
    makers = _Makers((bits.digest, i, op) for i, op in quantized for bits in _payloads(op))
    sources = _Makers((op.inputs["x"].digest, i, op) for i, op in quantized)
    names = iter(model.linears)
    owner: dict[int, tuple[str, str]] = {}  # id of an op -> (linear, role)

    def claim(op: Op | None, linear: str, role: str) -> None:
        if op is not None:
            owner.setdefault(id(op), (linear, role))

    gemms = [(i, op) for i, op in enumerate(ops) if op.kind == "gemm"]
    for i, op in gemms:
        if product(op) == "fprop":
            linear = next(names, None)
            if linear is None:
                continue
            claim(op, linear, "fprop")
            claim(makers.before(i, op.inputs["a_data"]), linear, "input")
            claim(makers.before(i, op.inputs["b_data"]), linear, "weight")
    for i, op in gemms:
        if product(op) in ("dgrad", "wgrad"):
            owners = [owner.get(id(maker)) for maker in makers.all_before(i, op.inputs["b_data"])]
            linear = next((o[0] for o in owners if o is not None and (o[0], product(op)) not in owner.values()), None)
            if linear is not None:
                claim(op, linear, product(op))
                claim(makers.before(i, op.inputs["a_data"]), linear, "grad_output")
    for i, op in enumerate(ops):
        known = owner.get(id(sources.before(i, op.inputs["dy"]))) if op.kind == "bias_grad" else None
        if known is not None:
            claim(op, known[0], "bias_grad")
    return [Labelled(*owner[id(op)], op) for op in ops if id(op) in owner]


class _Makers:
    """Ops by the bytes that they made or read, in call order."""

    def __init__(self, entries: Iterable[tuple[bytes, int, Op]]) -> None:
        self._by_digest: dict[bytes, list[tuple[int, Op]]] = {}
        for digest, at, op in entries:
            self._by_digest.setdefault(digest, []).append((at, op))

    def all_before(self, at: int, bits: Bits) -> Iterator[Op]:
        """The ops of these bytes before place `at`, the last one first."""
        return (op for i, op in reversed(self._by_digest.get(bits.digest, [])) if i < at)

    def before(self, at: int, bits: Bits) -> Op | None:
        """Returns the last op of these bytes before place `at`, or None."""
        return next(self.all_before(at, bits), None)


def _payloads(op: Op) -> list[Bits]:
    return [bits for name, bits in op.outputs.items() if name.endswith("_data")]


def missing_products(labelled: list[Labelled], model: ModelConfig) -> list[str]:
    """Products of the model's linear layers that no quantized gemm of the step computed."""
    seen = {(item.linear, item.role) for item in labelled}
    return [f"{name} {p}" for name in model.linears for p in ("fprop", "dgrad", "wgrad") if (name, p) not in seen]


# --- distances ---


@dataclasses.dataclass(frozen=True)
class Difference:
    """How two bit patterns differ: elements, how many differ, the largest distance in ULP, the first difference."""

    elements: int
    differing: int
    max_ulp: int
    first: int | None

    @property
    def equal(self) -> bool:
        return self.differing == 0


_SIGNED_FLOATS = {"float32": np.float32, "float16": np.float16}


def _ordered(bits: Bits) -> np.ndarray:
    """Maps floats to integers whose differences count the representable values between them."""
    data = bits.data.astype(np.int64)
    if bits.dtype == "float8_e8m0fnu":
        return data
    sign = np.int64(1) << (8 * bits.data.dtype.itemsize - 1)
    return np.where(data & sign, -(data & (sign - 1)), data)


def _nan(bits: Bits) -> np.ndarray:
    if bits.dtype in _SIGNED_FLOATS:
        return np.isnan(bits.data.view(_SIGNED_FLOATS[bits.dtype]))
    if bits.dtype == "bfloat16":
        return (bits.data & 0x7FFF) > 0x7F80
    return np.zeros(bits.data.shape, bool)  # narrower formats have one NaN, compared as bits


def difference(a: Bits, b: Bits) -> Difference:
    """Compares two recordings of one tensor; high-precision NaNs count as equal, -0 and +0 do not.

    **Raises** ValueError if dtype or shape differ, which is a fault of the recording, not of a kernel.
    """
    if a.dtype != b.dtype or a.data.shape != b.data.shape:
        raise ValueError(f"cannot compare {a.dtype}{list(a.data.shape)} with {b.dtype}{list(b.data.shape)}")
    unequal = (a.data != b.data) & ~(_nan(a) & _nan(b))
    count = int(np.count_nonzero(unequal))
    if count == 0:
        return Difference(a.data.size, 0, 0, None)
    ulp = np.maximum(np.abs(_ordered(a) - _ordered(b)), 1)[unequal]
    return Difference(a.data.size, count, int(ulp.max()), int(np.argmax(unequal.reshape(-1))))


def merge(parts: list[Difference]) -> Difference:
    """Totals over several tensors; `first` is not kept."""
    worst = max((p.max_ulp for p in parts), default=0)
    return Difference(sum(p.elements for p in parts), sum(p.differing for p in parts), worst, None)


# --- the framework's own ops between the linears ---


class FrameworkOp(NamedTuple):
    """An op that the framework computes: `output` and `inputs` are names of activations, weights or the batch."""

    output: str
    kind: str
    inputs: tuple[str, ...]


def framework_ops(model: ModelConfig) -> list[FrameworkOp]:
    """The model's forward pass between the quantized linears, in order."""
    ops = [FrameworkOp("embed", "embedding", ("tokens", "embed.weight", "position.weight"))]
    stream = "embed"
    for i in range(model.layers):
        b = f"blocks.{i}."
        ops += [
            FrameworkOp(b + "norm1", "layer norm", (stream, b + "norm1.weight", b + "norm1.bias")),
            FrameworkOp(b + "scores", "attention scores", (b + "qkv",)),
            FrameworkOp(b + "softmax", "softmax", (b + "scores",)),
            FrameworkOp(b + "attention", "attention values", (b + "softmax", b + "qkv")),
            FrameworkOp(b + "residual", "residual add", (stream, b + "proj")),
            FrameworkOp(b + "norm2", "layer norm", (b + "residual", b + "norm2.weight", b + "norm2.bias")),
            FrameworkOp(b + "gelu", "gelu", (b + "up",)),
            FrameworkOp(b + "output", "residual add", (b + "residual", b + "down")),
        ]
        stream = b + "output"
    return ops + [
        FrameworkOp("norm", "layer norm", (stream, "norm.weight", "norm.bias")),
        FrameworkOp("head", "head matmul", ("norm", "head.weight")),
        FrameworkOp("loss", "cross entropy", ("head", "targets")),
    ]


def computed(op: FrameworkOp, inputs: list[np.ndarray], heads: int, replay: Callable[[Op], dict[str, Bits]]) -> Any:
    """Returns a framework op's output, float32, from its `inputs`. `replay`: a framework's, of rows of the table."""

    def row(kind: str, options: dict[str, Any], **operands: np.ndarray) -> np.ndarray:
        given = {name: Bits.of(np.ascontiguousarray(x)) for name, x in operands.items()}
        out = replay(Op(kind, given, options, {"out": Bits("float32", np.empty(0, np.uint32))}))["out"].floats
        assert out is not None, kind
        return out

    def product(equation: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return row("matmul", {"equation": equation, "dtype": "float32"}, a=a, b=b)

    def scores(qkv: np.ndarray) -> np.ndarray:
        q, k, _ = _heads(qkv, heads)
        scaled = product("bthd,bshd->bhts", q, k) * np.float32(1 / math.sqrt(q.shape[-1]))
        return np.where(np.tri(scaled.shape[-1], dtype=bool), scaled, np.float32(-np.inf))

    def embedding(tokens: np.ndarray, table: np.ndarray, position: np.ndarray) -> np.ndarray:
        return row("add", {}, a=row("embedding", {}, ids=tokens, table=table), b=position[: tokens.shape[-1]])

    kinds: dict[str, Callable[..., np.ndarray]] = {
        "embedding": embedding,
        "layer norm": lambda x, w, b: row("layer_norm", {"axes": 1, "eps": 1e-5}, x=x, weight=w, bias=b),
        "attention scores": scores,
        "softmax": lambda x: row("softmax", {"axis": -1}, x=x),
        "attention values": lambda p, qkv: product("bhts,bshd->bthd", p, _heads(qkv, heads)[2]).reshape(
            *qkv.shape[:-1], -1
        ),
        "residual add": lambda a, b: row("add", {}, a=a, b=b),
        "gelu": lambda x: row("gelu", {"approximate": False}, x=x),
        "head matmul": lambda x, w: row("linear", {"dtype": "float32"}, x=x, weight=w),
        "cross entropy": lambda x, y: row(
            "cross_entropy", {"axis": -1, "reduction": "mean", "ignore_index": None}, logits=x, targets=y
        ),
    }
    return kinds[op.kind](*inputs)


def _heads(qkv: np.ndarray, heads: int) -> np.ndarray:
    """[B, T, 3 D] -> [3, B, T, H, D / H]."""
    return np.moveaxis(qkv.reshape(*qkv.shape[:-1], 3, heads, -1), 2, 0)


def activation_order(model: ModelConfig) -> list[tuple[str, str]]:
    """(name, kind) of every activation in the order in which a forward pass computes it."""
    order = []
    for op in framework_ops(model):
        if op.kind == "attention scores":
            order.append((op.output.replace("scores", "qkv"), "quantized linear"))
        order.append((op.output, op.kind))
        after = {"attention values": "proj", "gelu": "down"}.get(op.kind)
        if op.output.endswith("norm2"):
            after = "up"
        if after is not None:
            assert after in LINEARS
            order.append((op.output.rsplit(".", 1)[0] + "." + after, "quantized linear"))
    return order
