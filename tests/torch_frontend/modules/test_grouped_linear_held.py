"""Stacks as tensors, and grouped layers whose weights are held as one: the bits of weights in high precision."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import cases
import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    MXFP8Quantizer,
    NVFP4Quantizer,
    UnsupportedError,
)
from diptych.core import reset_calls
from diptych.torch import TensorProto, to_tensor_proto
from diptych.torch.tensors.quantized import BUFFERS, QuantizedTensorBase
from torch_frontend import tools
from torch_frontend.grouped import GROUPS, K, N, input_for, layer, offsets_of, run
from torch_frontend.layer_cases import NAMED, dtype_of, same_step
from torch_frontend.modules.test_grouped_linear import _noisy
from torch_frontend.modules.test_grouped_linear_compiled import compiled, graphs
from torch_frontend.tensors.test_quantized import COPIES, _saved
from torch_frontend.tools import RECIPE_NAMES, calls, normal, quantizer, same

MX = MXFP8BlockScaling()
G = 4

# --- stacks ----------------------------------------------------------------------------------------------------------


def stack(fmt: str = "mxfp8_e4m3", groups: int = 3, device: str = "cpu", **usage: Any) -> dt.QuantizedStack:
    return dt.quantize_stack(normal(f"stack-{fmt}", (groups, 32, 48), "bfloat16", device), quantizer(fmt, **usage))


def same_stack(got: Any, want: Any) -> None:
    assert (got.kind, got.quantizer, got.shape, got.dtype) == (want.kind, want.quantizer, want.shape, want.dtype)
    for name in BUFFERS:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        assert a is None or same(a, b, name) is None


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_a_stack_moves_whole(fmt, device):
    for (rowwise, columnwise), groups in itertools.product(tools.USAGES, (3, 0)):
        q = stack(fmt, groups, device, rowwise=rowwise, columnwise=columnwise)
        assert isinstance(q, torch.Tensor) and not isinstance(q, dt.QuantizedTensor) and q.device.type == device
        for way, make in (*COPIES.items(), ("copy_", lambda q: q.clone().copy_(q))):
            made = make(q)
            same_stack(made, q)
            assert torch.equal(made, q), way
            for name in BUFFERS if groups else ():
                t = getattr(q, name)
                assert t is None or t.data_ptr() != getattr(made, name).data_ptr(), (way, name)
        same_stack(q.cpu().to(device), q)


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_a_stacks_tensors_are_views(fmt):
    q = stack(fmt)
    assert len(q) == 3
    for g, one in enumerate(q):
        alone = dt.quantize(normal(f"stack-{fmt}", (3, 32, 48), "bfloat16")[g], q.quantizer)
        for got in (one, q[g], q[g - 3]):
            assert type(got) is dt.QuantizedTensor
            same_stack(got, alone)
            assert got.rowwise_data.data_ptr() == q.rowwise_data[g].data_ptr()
    with pytest.raises(IndexError):
        q[3]
    with pytest.raises(NotImplementedError, match="first dimension of a QuantizedStack"):
        q.select(1, 0)
    with pytest.raises(NotImplementedError, match="first dimension of a QuantizedStack"):
        q[0][0]


@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_the_prototype_of_a_stack(fmt, device):
    q = stack(fmt, device=device)
    proto = to_tensor_proto(q)
    assert proto == TensorProto(q.shape, q.dtype, q.quantizer, q.device, False, True)
    made = proto.create_tensor()
    assert isinstance(made, dt.QuantizedStack) and made.requires_grad is False
    for name, shape, dtype in proto.buffers:
        for t in (getattr(made, name), getattr(q, name)):
            assert (tuple(t.shape), t.dtype) == (shape, dtype), name
    assert [b[0] for b in proto.buffers] == [n for n in BUFFERS if getattr(q, n) is not None]


def test_what_a_stack_is_not():
    """Where one tensor is meant, a stack is refused, and the other way round."""
    q, x = stack(), normal("x", (32, 48), "bfloat16")
    one = dt.quantize(x, MXFP8Quantizer())
    folded = dt.quantize(normal("stack-mxfp8_e4m3", (3, 32, 48), "bfloat16"), MXFP8Quantizer())
    offsets = offsets_of((0, 8, 16, 32))
    for call, error, match in (
        (lambda: q + 1, NotImplementedError, "not defined on a QuantizedStack"),
        (lambda: dt.quantize(q, MXFP8Quantizer()), NotImplementedError, "not defined on a QuantizedStack"),
        (lambda: dt.gemm(one, q), TypeError, "must be a QuantizedTensor, got QuantizedStack"),
        (lambda: dt.dequantize(q), TypeError, "must be a QuantizedTensor, got QuantizedStack"),
        (lambda: dt.linear(x, q, None, MX), TypeError, "must be a QuantizedTensor, got a"),
        (lambda: dt.grouped_gemm(one, folded, offsets), TypeError, "b must be a QuantizedStack"),
        (lambda: dt.grouped_linear(x, folded, None, offsets, MX), TypeError, "must be a QuantizedStack, got a"),
        (lambda: q.clone().copy_(folded), TypeError, "into a QuantizedStack takes another"),
        (lambda: folded.clone().copy_(q), TypeError, "into a QuantizedTensor takes another"),
        (lambda: torch.empty(3, 32, 48).copy_(q), TypeError, "out of a QuantizedStack takes another"),
        (lambda: q.clone().copy_(stack("fp8_e4m3_1x128")), ValueError, "unlike quantized tensors"),
        (lambda: q.to(torch.int8), NotImplementedError, "cannot become torch.int8"),
        (lambda: dt.QuantizedStack(MXFP8Quantizer(), (3, 32, 48), torch.float32), ValueError, "a QuantizedStack holds"),
    ):
        with pytest.raises(error, match=match):
            call()
    assert not torch.equal(q, folded)


def test_a_stack_enters_and_leaves_graphs():
    w = normal("w", (3, 32, 48), "bfloat16")
    q = dt.quantize_stack(w, MXFP8Quantizer())

    def values(q: Any, scale: float) -> Any:
        return q.dequantize() * scale, q[1].dequantize(), q.clone()

    for got, want in zip(compiled(values)(q, 2.0), values(q, 2.0), strict=True):
        same_stack(got, want) if isinstance(want, QuantizedTensorBase) else same(got, want)


@dataclasses.dataclass
class Halving:
    stack: dt.QuantizedStack
    others: list[torch.Tensor | dt.QuantizedStack | None]


def _halves(a: Halving, needs: tuple[str, ...]) -> Any:
    """The values of both, and a stack of the halved ones."""
    values = [t.dequantize() for t in (a.stack, *a.others) if t is not None]
    total = sum(values[1:], start=values[0])  # from 0 on it would lose the sign of a sum that is -0
    return (total, dt.quantize_stack(total / 2, a.stack.quantizer)), []


def _halves_layout(a: Halving, needs: tuple[str, ...]) -> Any:
    plain = to_tensor_proto(a.stack)._replace(quantizer=None, stack=False, requires_grad=True)
    return plain, to_tensor_proto(a.stack, False)


def _halves_gradient(a: Halving, needs: tuple[str, ...], saved: list[Any], grads: list[Any]) -> list[torch.Tensor]:
    return [grads[0] * 1.0]


def test_ops_of_ones_own_take_and_make_stacks():
    op = dt.CustomOp("diptych_tests::halves", Halving, _halves, _halves_layout, _halves_gradient)
    held = torch.nn.Parameter(dt.QuantizedParameter.of(stack()))

    def step(held: Any, other: Any) -> Any:
        return op(Halving(held, [None, other]))

    for fn in (step, compiled(step)):
        total, made = fn(held, stack())
        same(total.detach(), stack().dequantize() * 2)
        same_stack(made, dt.quantize_stack(stack().dequantize(), stack().quantizer))
        held.grad = None
        total.sum().backward()
        assert type(held.grad) is torch.Tensor
        same(held.grad, torch.ones_like(total))


# --- held weights ----------------------------------------------------------------------------------------------------


def pair(name: str, device: str = "cpu", **kw: Any) -> tuple[Any, Any]:
    """A layer that holds its weights quantized, and one that has those in high precision which it was made of."""
    plain = layer(device=device, **kw)
    with dt.quantized_model_init(recipe=NAMED[name]):
        held = dt.GroupedLinear(G, K, N, device=device, **kw)
    with torch.no_grad():
        held.weight.copy_(plain.weight)
        held.bias.copy_(plain.bias)
    return held, plain


def by_weight(name: str) -> Any:
    """The recipe that gives a weight in high precision the scales of a held one: of itself."""
    return Float8CurrentScaling() if name == "fp8-delayed" else NAMED[name]


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_held_weights(name, device):
    """The products of the weights that they were made of, with nothing to quantize; eagerly, compiled and permuted."""
    held, plain = pair(name, device)
    assert isinstance(held.weight, torch.nn.Parameter) and isinstance(held.weight, dt.QuantizedParameter)
    assert isinstance(held.weight, dt.QuantizedStack) and held.weight.shape == plain.weight.shape
    recipe, (rows, offsets, align) = by_weight(name), GROUPS["even"]
    x, dy = input_for(name, rows, device=device), normal("dy", (rows, N), dtype_of(name), device)
    groups: dict[str, Any] = {"offsets": offsets_of(offsets, device), "align": align}
    want = run(plain, plain, x, recipe, dy, **groups)
    reset_calls()
    same_step(run(held, held, x, recipe, dy, **groups), want)
    assert calls("quantize") == 2  # x and dy
    fn = compiled(held)
    same_step(run(fn, held, x, recipe, dy, **groups), want)
    with torch.no_grad():
        for m in (held, plain):
            m.weight.copy_(normal("other", (G, N, K), device=device))
    want = run(plain, plain, x, recipe, dy, **groups)
    same_step(run(fn, held, x, recipe, dy, **groups), want)
    assert graphs() == 1
    ids = (torch.arange(rows // 2, device=device)[:, None] + torch.arange(2, device=device)) % G
    row_map = dt.moe_map(ids, G, map_type="index", num_out_tokens=rows, align_size=align)
    groups = {"row_map": row_map, "align": align}
    want = run(plain, plain, x[: rows // 2], recipe, dy, **groups)
    same_step(run(held, held, x[: rows // 2], recipe, dy, **groups), want)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_held_weights_in_high_precision(name):
    """Outside of regions the values that the weights stand for are multiplied, and the gradient is theirs."""
    held, _ = pair(name)
    x, offsets = normal("x", (64, K)), (0, 16, 32, 48, 64)
    w = held.weight.dequantize().detach().requires_grad_()
    each = [F.linear(x[a:b], w[g], held.bias[g]) for g, (a, b) in enumerate(itertools.pairwise(offsets))]
    dy = normal("dy", (64, N))
    torch.cat(each).backward(dy)
    for fn in (held, compiled(held)) if name == "mxfp8" else (held,):
        got = run(fn, held, x, None, dy, offsets=offsets_of(offsets))
        torch.testing.assert_close(got["y"], torch.cat(each).detach(), rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(got["weight"], w.grad, rtol=1e-4, atol=1e-3)
        assert type(got["weight"]) is torch.Tensor


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_master_weights(name):
    """The optimizer steps a master in float32, and copy_ quantizes it again: the run of weights in high precision."""
    recipe, (rows, offsets, align) = by_weight(name), GROUPS["even"]
    plain = layer(bias=False)
    with dt.quantized_model_init(recipe=NAMED[name], preserve_high_precision_init_val=True):
        held = dt.GroupedLinear(G, K, N, bias=False)
    with torch.no_grad():
        plain.weight.copy_(held.weight.get_high_precision_init_val())
    master = held.weight.get_high_precision_init_val().clone()
    optimizers = [torch.optim.AdamW([p], lr=0.05) for p in (plain.weight, master)]
    groups: dict[str, Any] = {"offsets": offsets_of(offsets), "align": align}
    for i in range(3):
        x, dy = input_for(name, rows) * (i + 1), normal(f"dy{i}", (rows, N), dtype_of(name))
        run(plain, plain, x, recipe, dy, **groups)
        master.grad = run(held, held, x, recipe, dy, **groups)["weight"]
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            held.weight.copy_(master)
        same(master, plain.weight)
    same_step(run(held, held, x, recipe, dy, **groups), run(plain, plain, x, recipe, dy, **groups))


def test_main_grad_and_microbatches_of_held_weights():
    held, plain = pair("mxfp8", fuse_wgrad_accumulation=True)
    groups: dict[str, Any] = {"offsets": offsets_of((0, 32, 32, 64, 96)), "align": 32}
    made = []
    for m in (held, plain):
        m.weight.main_grad = torch.zeros(G, N, K)
        for first in (True, False):
            x, dy = normal(f"x{first}", (96, K)), normal(f"dy{first}", (96, N))
            made.append(
                run(m, m, x, MX, dy, is_first_microbatch=first, **groups) | {"main": m.weight.main_grad.clone()}
            )
    same_step(made[0], made[2])
    same_step(made[1], made[3])
    assert held.weight.grad is None and held._caches is None  # what is held is not kept once more


def test_held_weights_travel():
    held, plain = pair("mxfp8")
    other, _ = pair("mxfp8")
    x, offsets = normal("x", (64, K)), offsets_of((0, 16, 32, 48, 64))

    def of(m: Any) -> torch.Tensor:
        with dt.autocast(recipe=MX):
            return m(x, offsets=offsets).detach()

    want = of(held)
    same(of(copy.deepcopy(held)), want)
    assert copy.deepcopy(held).weight.requires_grad
    for whole in (False, True):
        loaded = _saved(held if whole else held.state_dict(), not whole)
        if not whole:
            with torch.no_grad():
                other.weight.copy_(torch.zeros(G, N, K))
            other.load_state_dict(loaded)
            loaded = other
        same(of(loaded), want)
        assert loaded.weight.requires_grad and isinstance(loaded.weight, dt.QuantizedStack)
    with torch.no_grad():
        plain.weight.mul_(3)
    apart = {f"weight{g}": plain.weight[g].detach() for g in range(G)} | {"bias": plain.bias.detach()}
    for state in (plain.state_dict(), apart):  # checkpoints in high precision are quantized on their way in
        held.load_state_dict(state)
        same(of(held), of(plain))
    parts = {f"weight{g}": held.weight[g].detach() for g in range(G)} | {"bias": plain.bias.detach()}
    with pytest.raises(RuntimeError, match="weight0"):
        held.load_state_dict(parts)


def test_what_held_weights_cannot():
    held, _ = pair("mxfp8")
    x, offsets = normal("x", (64, K)), offsets_of((0, 16, 32, 48, 64))
    with (
        dt.autocast(recipe=Float8BlockScaling()),
        pytest.raises(ValueError, match="grouped_linear: the weight is held as mxfp8_e4m3"),
    ):
        held(x, offsets=offsets)
    rowwise = dt.quantize_stack(normal("w", (G, N, K)), MXFP8Quantizer(columnwise=False))
    with pytest.raises(ValueError, match="columnwise copy"):
        dt.grouped_linear(x.clone().requires_grad_(), rowwise, None, offsets, MX)
    dt.grouped_linear(x, rowwise, None, offsets, MX)  # dgrad alone would need it
    run(held, held, x, MX, torch.ones(64, N), offsets=offsets)
    with pytest.raises(ValueError, match="copy_ into a quantized parameter"), torch.no_grad():
        held.weight.copy_(torch.zeros(G, K, N))


def test_held_weights_are_not_rounded():
    """A recipe that rounds weights stochastically, which a stack of them is refused, asks nothing of held ones."""
    steady = CustomRecipe(lambda role: NVFP4Quantizer())
    with dt.quantized_model_init(recipe=steady):
        held = dt.GroupedLinear(G, K, N)
    plain = layer()
    with torch.no_grad():
        held.weight.copy_(plain.weight)
        held.bias.copy_(plain.bias)
    (rows, offsets, align), dy = GROUPS["even"], normal("dy", (GROUPS["even"][0], N))
    groups: dict[str, Any] = {"offsets": offsets_of(offsets), "align": align}
    want = run(plain, plain, input_for("mxfp8", rows), steady, dy, **groups)
    same_step(run(held, held, input_for("mxfp8", rows), CustomRecipe(_noisy), dy, **groups), want)


def test_parts_of_the_stacks_by_their_numbers():
    module = dt.GroupedLinear(3, 32, 64)
    module(torch.randn(48, 32), [16, 16, 16]).sum().backward()
    module.weight.main_grad = torch.zeros(3, 64, 32)
    for g in range(3):
        weight, bias = getattr(module, f"weight{g}"), getattr(module, f"bias{g}")
        assert weight.is_leaf and weight.requires_grad and torch.equal(weight, module.weight[g])
        assert torch.equal(weight.grad, module.weight.grad[g]) and torch.equal(bias.grad, module.bias.grad[g])
        weight.main_grad.fill_(g)
        with torch.no_grad():
            weight.fill_(g)
            bias.copy_(torch.full((64,), float(g)))
    wanted = torch.arange(3.0)
    assert torch.equal(module.weight[:, 0, 0], wanted) and torch.equal(module.bias[:, 0], wanted)
    assert torch.equal(module.weight.main_grad[:, 0, 0], wanted)
    for absent in ("weight3", "weight01", "bias9", "weight"):
        assert hasattr(module, absent) is (absent == "weight")
    assert not hasattr(dt.GroupedLinear(2, 16, 16, bias=False), "bias0")
    with pytest.raises(UnsupportedError, match=r"GroupedLinear.weight1 cannot be assigned: the weights of all groups"):
        module.weight1 = torch.nn.Parameter(torch.zeros(64, 32))
    with dt.quantized_model_init(recipe=MXFP8BlockScaling()):
        held = dt.GroupedLinear(2, 32, 32)
    held(torch.randn(32, 32), [16, 16]).sum().backward()
    part = held.weight1
    assert isinstance(part, dt.QuantizedTensor) and torch.equal(part.grad, held.weight.grad[1])
    part.detach().quantize_(torch.ones(32, 32))
    assert torch.equal(held.weight.dequantize()[1], torch.ones(32, 32))
