"""TensorProto: the shape and dtype of an op's result before it exists, with known and with symbolic sizes."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import diptych.torch as dt
from diptych.common import Quantizer
from diptych.torch import TensorProto, to_tensor_proto
from diptych.torch.tensors.quantized import BUFFERS
from torch_frontend import tools
from torch_frontend.tools import ALL, named, normal, quantizer

pytestmark = pytest.mark.sampled

SHAPES = ((0, 16), (16, 0), (1, 16), (33, 65), (2, 3, 96), (130, 257), (48, 80), (2, 24, 96), (16,))
USAGES = ({}, {"columnwise": False}, {"rowwise": False})


def fits(name: str, shape: tuple[int, ...], usage: dict[str, bool]) -> bool:
    """Whether the format takes this shape, and this usage of it."""
    quant = named(name, **usage)
    try:
        dt.quantize(torch.zeros(shape, dtype=torch.bfloat16), quant, rng=tools.rng_for(quant))
    except ValueError:
        return False
    return True


def form(t: Any) -> Any:
    inner = [(n, form(getattr(t, n))) for n in BUFFERS if getattr(t, n) is not None] if _quantized(t) else ()
    return type(t).__name__.replace("Fake", ""), tuple(t.shape), t.dtype, t.stride(), t.device.type, inner


def _quantized(t: Any) -> bool:
    return isinstance(t, dt.QuantizedTensor)


@pytest.mark.parametrize("name", ALL)
def test_is_the_layout_of_the_op(name, device):
    """Names, shapes, dtypes, strides and device, for real and for fake tensors."""
    taken = 0
    for shape, usage in itertools.product(SHAPES, USAGES):
        quant = named(name, **usage)
        if not fits(name, shape, usage):
            with pytest.raises(ValueError, match="multiple of 16"):
                TensorProto(shape, torch.bfloat16, quant).create_tensor()
            continue
        taken += 1
        x = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        q = dt.quantize(x, quant, rng=tools.rng_for(quant, device))
        proto = TensorProto(shape, torch.bfloat16, quant, torch.device(device))
        made = proto.create_tensor()
        assert form(made) == form(q)
        assert proto.buffers == tuple((n, tuple(b.shape), b.dtype) for n in BUFFERS if (b := getattr(q, n)) is not None)
        assert tuple(b[0] for b in proto.buffers) == quant.buffer_names()
        with FakeTensorMode() as mode:
            fake = dt.quantize(mode.from_tensor(x), quant, rng=_fake(mode, tools.rng_for(quant, device)))
            assert form(fake) == form(proto.create_tensor()) == form(q)
        assert form(proto.create_tensor("meta")) == _on_meta(form(q))
    assert taken


def _fake(mode: FakeTensorMode, t: Tensor | None) -> Tensor | None:
    return None if t is None else mode.from_tensor(t)


def _on_meta(f: Any) -> Any:
    kind, shape, dtype, stride, _, inner = f
    return kind, shape, dtype, stride, "meta", [(n, _on_meta(t)) for n, t in inner] if inner else ()


def test_round_trip():
    for t in (
        torch.randn(3, 4, dtype=torch.float16),
        torch.nn.Parameter(torch.randn(3)),
        dt.quantize(normal("x", (2, 24, 96), "bfloat16"), named("nvfp4 rht")),
        dt.quantize(torch.nn.Parameter(normal("x", (24, 96))), quantizer("mxfp8_e4m3")),
    ):
        proto = to_tensor_proto(t)
        made = proto.create_tensor()
        assert proto.requires_grad == t.requires_grad == made.requires_grad
        assert form(made.detach()) == form(t.detach())
        assert to_tensor_proto(made) == proto
    for bad in (1, None, proto):
        with pytest.raises(TypeError, match=r"to_tensor_proto: t must be a torch\.Tensor"):
            to_tensor_proto(bad)


def test_requires_grad_is_that_of_the_moment():
    t = torch.zeros(3)
    before = to_tensor_proto(t)
    t.requires_grad_()
    assert not before.requires_grad and to_tensor_proto(t).requires_grad
    assert not before.create_tensor().requires_grad
    assert not to_tensor_proto(t, False).requires_grad
    assert to_tensor_proto(before.create_tensor(), True).requires_grad
    made = to_tensor_proto(t).create_tensor()
    assert made.requires_grad and made.is_leaf


def test_a_plain_prototype():
    proto = TensorProto((2, 3), torch.float64)
    assert proto.buffers == () and form(proto.create_tensor()) == form(torch.empty(2, 3, dtype=torch.float64))
    with pytest.raises(TypeError, match="a plain tensor has no copies"):
        proto.update_usage(rowwise_usage=True)


def test_update_usage_makes_another_quantizer():
    shared = quantizer("fp8_e4m3_1x128")
    proto = TensorProto((4, 256), torch.float32, shared)
    narrow = proto.update_usage(columnwise_usage=False)
    assert (shared.rowwise, shared.columnwise) == (True, True) and proto.quantizer is shared
    assert [b[0] for b in narrow.buffers] == ["rowwise_data", "rowwise_scale_inv"]
    assert [b[0] for b in narrow.update_usage(True, True).buffers] == list(shared.buffer_names())
    assert proto.update_usage() == proto
    with pytest.raises(ValueError, match="at least one"):
        narrow.update_usage(rowwise_usage=False)


# --- compiled --------------------------------------------------------------------------------------------------------

COMPILED = ("fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e4m3", "nvfp4", ALL[-1])


CELLS = [
    pytest.param(name, dynamic, marks=() if (i % 2 == 0) == (dynamic == "dynamic") else pytest.mark.slow)
    for i, name in enumerate(COMPILED)
    for dynamic in ("static", "dynamic")
]


@pytest.mark.parametrize(("name", "dynamic"), CELLS)
def test_compiled(name, dynamic):
    """Without a break; the tensor goes out, and its copies are used inside."""
    for usage in USAGES:
        _compiled(named(name, **usage), dynamic == "dynamic")


def _compiled(quant: Quantizer, dynamic: bool) -> None:
    def fn(x: Tensor) -> Any:
        proto = to_tensor_proto(x)._replace(quantizer=quant, dtype=torch.bfloat16)
        q = proto.create_tensor()
        sizes = [size for _, shape, _ in proto.buffers for size in shape]
        narrow = proto.update_usage(quant.rowwise, quant.columnwise)
        plain = to_tensor_proto(q.dequantize(torch.float16)).create_tensor()
        return q, narrow.create_tensor(), plain, torch.zeros(sum(sizes)), proto.requires_grad

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((144, 160), (176, 272)) if dynamic else ((144, 160),):
        got, want = compiled(torch.zeros(shape)), fn(torch.zeros(shape))
        assert [form(t) for t in got[:4]] == [form(t) for t in want[:4]]
        assert got[4] is want[4] is False
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("quant", (None, quantizer("mxfp8_e4m3")), ids=("plain", "quantized"))
def test_compiled_requires_grad(quant):
    """A tensor made while tracing can need a gradient inside."""

    def fn(x: Tensor) -> Any:
        proto = to_tensor_proto(x)._replace(quantizer=quant)
        t = proto.create_tensor()
        return proto.requires_grad, t.requires_grad, t.detach(), x * 2

    torch._dynamo.reset()
    x = torch.zeros(32, 64, requires_grad=True)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    if torch.__version__.startswith("2.11."):
        with pytest.raises(Exception, match=r"Unsupported Tensor\.requires_grad_\(\) call"):
            compiled(x)
        return
    got = compiled(x)
    want = fn(x)
    assert got[:2] == want[:2] == (True, True)
    assert form(got[2]) == form(want[2])
