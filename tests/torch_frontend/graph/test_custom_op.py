"""`CustomOp`: a user's op is its dataclass, its implementation and its layout, eagerly and as nodes of a graph."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import diptych.torch as dt
from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
    Recipe,
    UnsupportedError,
)
from diptych.torch import CustomOp, Group, QuantizedTensor, Size, TensorProto, Written, to_tensor_proto

pytestmark = pytest.mark.sampled


@dataclasses.dataclass
class Arguments:
    """A linear layer whose input may be quantized, and whose output is where `out` says so."""

    x: Tensor | QuantizedTensor
    w: Tensor
    bias: Tensor | None
    factors: list[Tensor]
    seen: Written
    group: Group
    recipe: Recipe
    label: str
    nested: tuple[Any, ...]
    out: Quantizer | None
    rows: Size
    sizes: tuple[Size, ...]
    dtype: torch.dtype


def values(t: Any) -> Tensor:
    return t.dequantize() if isinstance(t, QuantizedTensor) else t


def forward(a: Arguments, needs: tuple[str, ...]) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    assert a.nested == (1, ("two", None)) and a.label == "layer" and isinstance(a.recipe, Recipe)
    assert a.rows == a.x.shape[0] and tuple(a.sizes) == tuple(a.x.shape)
    y = values(a.x) @ a.w.t() * a.factors[0]
    if a.bias is not None:
        y = y + a.bias
    y = y.to(a.dtype)
    x = dt.quantize(values(a.x), Float8CurrentScalingQuantizer(columnwise=False))
    assert x.rowwise_data is not None and x.rowwise_scale_inv is not None and x.amax is not None
    outputs: tuple[Tensor, ...] = (y if a.out is None else dt.quantize(y, a.out), x.amax)
    return outputs, [x.rowwise_data, x.rowwise_scale_inv] if "w" in needs else []


def layout(a: Arguments, needs: tuple[str, ...]) -> tuple[TensorProto, ...]:
    shape = (*a.x.shape[:-1], a.w.shape[0])
    return (
        TensorProto(shape, a.dtype, a.out, a.x.device, bool(needs)),
        TensorProto((1,), torch.float32, None, a.x.device),
    )


def backward(a: Arguments, needs: tuple[str, ...], saved: list[Tensor], grads: list[Any]) -> list[Tensor]:
    dy = grads[0].float() * a.factors[0]
    made = {"bias": grads[0].sum(0)}
    if "x" in needs:
        assert isinstance(a.w, Tensor)
        made["x"] = (dy @ a.w).to(a.x.dtype)
    if "w" in needs:
        made["w"] = dy.t() @ (saved[0].float() * saved[1])
    assert type(a.x) is TensorProto  # not kept: only its form is known
    for history in a.seen:
        history[:1].copy_(torch.maximum(history[:1], grads[0].abs().amax()))
    return [made[name] for name in needs]


def keeps(a: Arguments, needs: tuple[str, ...]) -> tuple[str, ...]:
    return ("w", "factors") if "x" in needs else ("factors",)


toy = CustomOp("diptych_test::toy", Arguments, forward, layout, backward, keeps=keeps)


def arguments(x: Tensor, w: Tensor, bias: Tensor | None, factor: Tensor, seen: list[Tensor], out: Any) -> Arguments:
    recipe = Float8CurrentScaling()
    return Arguments(
        x, w, bias, [factor], seen, None, recipe, "layer", (1, ("two", None)), out,  # type: ignore[arg-type]
        x.shape[0], tuple(x.shape), torch.float32,  # type: ignore[arg-type]
    )  # fmt: skip


def layer(x: Tensor, w: Tensor, bias: Tensor | None, factor: Tensor, seen: list[Tensor], out: Any) -> Tensor:
    y, amax = toy(arguments(x, w, bias, factor, seen, out))
    if out is not None:  # a quantized tensor that needs grad, between two ops
        y, _ = toy(arguments(y, w, bias, factor, seen, None))
    return y * 2 + amax


QUANTIZERS = (
    None,
    Float8CurrentScalingQuantizer(columnwise=False),
    Float8BlockQuantizer(block_scaling_dim=1),
    MXFP8Quantizer(rowwise=False),
    NVFP4Quantizer(),
)


def _name(out: Quantizer | None) -> str:
    return "plain" if out is None else out.format.name


def run(fn: Any, n: int, out: Any, needs: tuple[bool, bool, bool], seed: int) -> list[Any]:
    torch.manual_seed(seed)
    x, w, bias = torch.randn(n, 32), torch.randn(32, 32), torch.randn(32)
    for t, need in zip((x, w, bias), needs, strict=True):
        t.requires_grad_(need)
    seen = torch.zeros(4)
    y = fn(x, w, bias, torch.full((1,), 0.5), [seen], out)
    if any(needs):
        y.pow(2).sum().backward()
    return [y.detach(), x.grad, w.grad, bias.grad, seen]


CELLS = [pytest.param(q, "aot_eager", id=f"{_name(q)}-aot_eager") for q in QUANTIZERS]
CELLS += [  # one whose scales Inductor's C++ does not know runs with the tests
    pytest.param(q, "inductor", id=f"{_name(q)}-inductor", marks=() if i == 3 else pytest.mark.slow)
    for i, q in enumerate(QUANTIZERS)
]


@pytest.mark.parametrize(("out", "backend"), CELLS)
def test_compiled_is_eager(out: Any, backend: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    needs = (True, True, True)
    for i, n in enumerate((16, 32, 48, 64)):
        for a, b in zip(run(layer, n, out, needs, i), run(compiled, n, out, needs, i), strict=True):
            assert torch.equal(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_gradients_that_are_asked_for() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for needs in itertools.product((False, True), repeat=3):
        mine, theirs = run(layer, 16, None, needs, 0), run(compiled, 16, None, needs, 0)
        for a, b, need in zip(mine[1:4], theirs[1:4], needs, strict=True):
            assert (a is not None) == (b is not None) == need
            assert a is None or torch.equal(a, b)


def nodes(fn: Any, *args: Any) -> list[list[str]]:
    """Ops of ours in the forward and in the backward graph."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    found: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names = []
        for n in graph.graph.nodes:
            if n.op == "call_function":
                target = n.args[0] if "auto_functionalized" in str(n.target) else n.target
                names += [str(target)] if "diptych" in str(target) else []
        found.append(names)
        return graph.forward

    torch._dynamo.reset()
    kept = {"partition_fn": min_cut_rematerialization_partition, "keep_inference_input_mutations": True}  # aot_eager's
    backend = aot_autograd(fw_compiler=note, bw_compiler=note, **kept)
    torch.compile(fn, fullgraph=True, backend=backend)(*args).sum().backward()
    return found


def test_forward_and_backward_are_one_node_each() -> None:
    x, w, bias = torch.randn(16, 32, requires_grad=True), torch.randn(32, 32, requires_grad=True), torch.randn(32)
    forward_graph, backward_graph = nodes(layer, x, w, bias, torch.ones(1), [torch.zeros(2)], None)
    assert forward_graph == ["diptych_test.toy.default"]
    assert backward_graph == ["diptych_test.toy_backward_.r2"]


def test_intermediates_of_backward_are_gone_when_it_returns() -> None:
    import weakref

    made: list[Any] = []

    def spying(a: Arguments, needs: Any, saved: Any, grads: Any) -> Any:
        extra = torch.zeros(8)
        made.append(weakref.ref(extra))
        return backward(a, needs, saved, grads)

    op = CustomOp("diptych_test::spied", Arguments, forward, layout, spying, keeps=keeps)
    x, w = torch.randn(16, 32, requires_grad=True), torch.randn(32, 32)
    fn = torch.compile(
        lambda: op(arguments(x, w, None, torch.ones(1), [], None))[0], fullgraph=True, backend="aot_eager"
    )
    fn().sum().backward()
    assert made and all(ref() is None for ref in made)


def test_fake_and_real_results_have_one_layout() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def form(t: Any) -> Any:
        inner = [(n, form(getattr(t, n))) for n in t.__tensor_flatten__()[0]] if isinstance(t, QuantizedTensor) else []
        return tuple(t.shape), t.dtype, t.stride(), str(t.device), inner

    for out in QUANTIZERS:
        x, w = torch.randn(16, 32), torch.randn(32, 32)
        given = (None, torch.ones(1), [])
        real = toy.run(arguments(x, w, *given, out), ("w",))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = [mode.from_tensor(t) for t in (x, w)]
            fake = toy.run(arguments(*fakes, None, mode.from_tensor(torch.ones(1)), [], out), ("w",))
        assert [form(t) for t in real[0]] == [form(t) for t in fake[0]]
        assert [form(t) for t in real[1]] == [form(t) for t in fake[1]]
        protos = layout(arguments(x, w, *given, out), ("w",))
        assert [form(t) for t in real[0]] == [form(p.create_tensor()) for p in protos]


@dataclasses.dataclass
class Several:
    x: Tensor
    others: list[Tensor | QuantizedTensor | None]


def test_lists_of_quantized_tensors():
    """Sum of what they stand for, times x; backward keeps them."""

    def total(a: Several) -> Tensor:
        return sum((values(t) for t in a.others if t is not None), torch.zeros(()))  # type: ignore[return-value]

    op = CustomOp(
        "diptych_test::several", Several,
        lambda a, needs: ((a.x * total(a),), []),
        lambda a, needs: (to_tensor_proto(a.x, True),),
        lambda a, needs, saved, grads: [grads[0] * total(a)],
        keeps=lambda a, needs: ("others",),
    )  # fmt: skip

    def run(x: Tensor, y: Tensor) -> Tensor:
        q = [dt.quantize(y, quantizer) for quantizer in QUANTIZERS[1:]]
        return op(Several(x, [*q, None, y]))[0]

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (16, 32, 48):
        y = torch.randn(n, 32)
        x = [torch.randn(n, 32, generator=torch.Generator().manual_seed(n)).requires_grad_() for _ in range(2)]
        out = [fn(t, y) for fn, t in zip((run, compiled), x, strict=True)]
        for o in out:
            o.pow(2).sum().backward()
        assert torch.equal(*out) and torch.equal(x[0].grad, x[1].grad)


# --- bad ops ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class One:
    x: Tensor


def _one(name: str, forward: Any, layout: Any = None, **more: Any) -> CustomOp:
    layout = layout or (lambda a, needs: (to_tensor_proto(a.x, True),))
    return CustomOp(f"diptych_test::{name}", One, forward, layout, **more)


def compiled(op: CustomOp, x: Tensor) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x: op(One(x))[0], fullgraph=True, backend="aot_eager")(x)


def test_an_argument_is_no_result() -> None:
    op = _one("alias", lambda a, needs: ((a.x,), []))
    with pytest.raises(Exception, match="result 0 is an argument"):
        compiled(op, torch.ones(3))
    op = _one("twice", lambda a, needs: ((a.x * 2,), [t := a.x + 1, t]))
    with pytest.raises(Exception, match="stands among the results twice"):
        compiled(op, torch.ones(3))


def test_a_layout_that_is_wrong() -> None:
    op = _one("wrong", lambda a, needs: ((a.x.double(),), []))
    with pytest.raises(Exception, match=r"its layout says .* make both agree"):
        compiled(op, torch.ones(3))


def test_no_derivative() -> None:
    op = _one("plain", lambda a, needs: ((a.x * 2,), []))
    assert torch.equal(op(One(torch.ones(2)))[0], torch.full((2,), 2.0))
    with pytest.raises(UnsupportedError, match=r"has no derivative, and x require.*give the CustomOp a backward"):
        op(One(torch.ones(2, requires_grad=True)))


def test_no_second_derivative() -> None:
    op = _one("square", lambda a, needs: ((a.x * a.x,), [a.x * 2]), backward=lambda a, n, saved, g: [saved[0] * g[0]])
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="no second derivative"):
        torch.autograd.grad(op(One(x))[0].sum(), x, create_graph=True)


def test_fields_that_cannot_cross() -> None:
    @dataclasses.dataclass
    class Bad:
        x: Tensor | int

    with pytest.raises(TypeError, match="cannot pass field x"):
        CustomOp("diptych_test::bad", Bad, forward, layout)
    with pytest.raises(TypeError, match="must be a dataclass"):
        CustomOp("diptych_test::worse", int, forward, layout)
