"""QuantizedTensor: what moves or copies it whole, what it refuses, and that torch.compile sees through it."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
import subprocess
import sys

import pytest
import torch

import cases
import diptych.torch as dt
from diptych.common import MXFP8Quantizer
from diptych.torch.tensors.quantized import BUFFERS
from torch_frontend import tools
from torch_frontend.tools import normal, quantizer, same


def _make(fmt: str = "fp8_e4m3_tensor", shape=(2, 24, 96), dtype="bfloat16", device="cpu", **options):
    quant = quantizer(fmt, **options)
    return dt.quantize(normal(f"{fmt}-{shape}", shape, dtype, device), quant, rng=tools.rng_for(quant, device))


def _equal(a: dt.QuantizedTensor, b: dt.QuantizedTensor) -> None:
    assert type(b) is dt.QuantizedTensor
    assert (a.quantizer, a.shape, a.dtype) == (b.quantizer, b.shape, b.dtype)
    for name in BUFFERS:
        old, new = getattr(a, name), getattr(b, name)
        assert (old is None) == (new is None), name
        if old is not None:
            same(new, old, name)
            assert new.dtype == old.dtype


def _apart(a: dt.QuantizedTensor, b: dt.QuantizedTensor) -> None:
    for name in BUFFERS:
        if getattr(a, name) is not None:
            assert getattr(a, name).data_ptr() != getattr(b, name).data_ptr(), name


def _saved(q, weights_only: bool):
    file = io.BytesIO()
    torch.save({"q": q}, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)["q"]


COPIES = {
    "clone": lambda q: q.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "save": lambda q: _saved(q, False),
    "save, weights only": lambda q: _saved(q, True),
    "to, copied": lambda q: q.to(q.device, copy=True),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("fmt", cases.FORMATS)
def test_copies(fmt, way, device):
    for (rowwise, columnwise), options in itertools.product(tools.USAGES, tools.variants(fmt)):
        q = _make(fmt, device=device, rowwise=rowwise, columnwise=columnwise, **options)
        new = COPIES[way](q)
        _equal(q, new)
        _apart(q, new)
        same(new.dequantize(), q.dequantize())
        assert new.device == q.device


def test_cheap_copies_share_memory(device):
    q = _make(device=device)
    for new in (q.detach(), copy.copy(q), q.contiguous(), q.to(q.device), q.to(q.dtype), torch.ops.aten.alias(q)):
        _equal(q, new)
        assert new.rowwise_data.data_ptr() == q.rowwise_data.data_ptr()


def test_deepcopy_keeps_identity_inside_one_object():
    q = _make()
    a, b = copy.deepcopy([q, q])
    assert a is b and a is not q


@pytest.mark.parametrize("shape", ((0, 16), (16, 0), (0,)))
@pytest.mark.parametrize("way", ("pickle", "save", "save, weights only"))
def test_copies_of_nothing(shape, way):
    for fmt in cases.FORMATS:
        q = _make(fmt, shape, columnwise=len(shape) == 2)
        _equal(q, COPIES[way](q))


def test_parameter_and_module_state():
    """A frozen quantized weight lives in a module, its state_dict and its checkpoint."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(_make(shape=(32, 64)), requires_grad=False)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    _equal(module.weight.data, torch.load(file, weights_only=True)["weight"].data)


def test_between_devices(device):
    q = _make(device=device)
    _equal(q, q.cpu())
    assert q.cpu().to(device).device.type == device
    assert q.cpu().rowwise_data.device.type == "cpu"


def test_copy_():
    a, b = _make("mxfp8_e4m3"), _make("mxfp8_e4m3")
    b.rowwise_data.zero_()
    assert b.copy_(a) is b
    _equal(a, b)
    _apart(a, b)
    for src in (_make("mxfp8_e5m2"), _make("mxfp8_e4m3", rowwise=False), _make("mxfp8_e4m3", dtype="float32")):
        with pytest.raises(ValueError, match="unlike quantized tensors"):
            b.copy_(src)
    with pytest.raises(TypeError, match="quantize it first"):
        b.copy_(torch.zeros(2, 24, 96))
    with pytest.raises(TypeError, match="dequantize it"):
        torch.zeros(2, 24, 96).copy_(b)
    _equal(a, b)


def test_equal():
    a = _make()
    b = a.clone()
    assert torch.equal(a, b)
    b.rowwise_data.view(torch.uint8)[0] ^= 1
    assert not torch.equal(a, b)
    assert not torch.equal(a, _make("fp8_e5m2_tensor"))
    assert not torch.equal(a, _make(columnwise=False))


REFUSED = {
    "aten.add": lambda q: q + 1,
    "aten.mm": lambda q: torch.mm(q.detach(), torch.zeros(96, 4)),
    "aten.view": lambda q: q.view(-1),
    "aten.transpose": lambda q: q.transpose(0, 1),
    "aten.slice": lambda q: q[:1],
    "aten.zero_": lambda q: q.zero_(),
    "aten.sum": lambda q: q.sum(),
    "aten.cat": lambda q: torch.cat([q, q]),
    "aten.eq": lambda q: q == q,
    "diptych.quantize": lambda q: torch.ops.diptych.quantize(q, q.quantizer),
}


@pytest.mark.parametrize("op", REFUSED)
def test_anything_else_is_refused(op):
    """Never a silent dequantize: the error names the op and the remedy."""
    q = _make()
    before = q.clone()
    with pytest.raises(NotImplementedError, match=r"(dequantize\(\) on it first|diptych)") as error:
        REFUSED[op](q)
    assert op.split(".")[1] in str(error.value)
    _equal(q, before)


def test_change_of_dtype_or_layout():
    """Only the logical dtype changes; the held tensors stay the same."""
    q = _make()
    for new in (q.float(), q.half(), q.to(torch.float32)):
        assert new.dtype == new.dequantize().dtype and new.dtype != q.dtype
        _equal(q, new.bfloat16())
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(NotImplementedError, match=f"cannot become {dtype}"):
            q.to(dtype)
    with pytest.raises(NotImplementedError, match="row-major"):
        q.clone(memory_format=torch.channels_last)


def test_repr_and_nothing_to_hold():
    text = repr(_make(columnwise=False))
    for part in ("shape=(2, 24, 96)", "torch.bfloat16", "fp8_e4m3_tensor", "copies=rowwise,"):
        assert part in text
    with pytest.raises(ValueError, match="neither was given"):
        dt.QuantizedTensor(quantizer("mxfp8_e4m3"), (2,), torch.float32)


def test_flatten_round_trip():
    for fmt in cases.FORMATS:
        for options in tools.variants(fmt):
            q = _make(fmt, **options)
            names, meta = q.__tensor_flatten__()
            new = dt.QuantizedTensor.__tensor_unflatten__({n: getattr(q, n) for n in names}, meta, q.shape, q.stride())
            _equal(q, new)
            assert torch.utils._python_dispatch.is_traceable_wrapper_subclass(q)


class Mine(MXFP8Quantizer):
    """Compared by identity: it has an attribute beside its fields."""

    def __init__(self, label: str):
        super().__init__()
        object.__setattr__(self, "label", label)


def test_quantizers_compared_by_identity():
    """They pickle themselves, are no part of a safe load, and name a tensor in no cache of compiled code."""
    x, quant = normal("identity", (4, 64)), Mine("a")
    q = dt.quantize(x, quant)
    assert q.quantizer is quant and q.clone().quantizer is quant
    new = pickle.loads(pickle.dumps(q))
    assert new.quantizer.label == "a" and new.quantizer != quant
    same(new.dequantize(), q.dequantize())
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        _saved(q, True)
    keys = {t._stable_hash_for_caching() for t in (q, q, dt.quantize(x, Mine("a")))}
    assert len(keys) == 3


def test_names_in_caches():
    """Equal for equal layouts and quantizers, and for nothing else."""
    make = {
        "plain": lambda: _make("nvfp4"),
        "rows": lambda: _make("nvfp4", row_amax=True),
        "shape": lambda: _make("nvfp4", (16, 32)),
        "dtype": lambda: _make("nvfp4", dtype="float32"),
        "copies": lambda: _make("nvfp4", columnwise=False),
        "square": lambda: _make("nvfp4", square=True),
        "format": lambda: _make("mxfp8_e4m3"),
    }
    keys = {name: call()._stable_hash_for_caching() for name, call in make.items()}
    assert len({*keys.values()}) == len(make)
    assert all(call()._stable_hash_for_caching() == keys[name] for name, call in make.items())


def test_loads_in_a_process_that_never_quantized(tmp_path):
    """A checkpoint of quantizers loads with weights_only=True once diptych.torch is imported, and not before."""
    torch.save(_make(), tmp_path / "q.pt")
    load = f"torch.load({str(tmp_path / 'q.pt')!r}, weights_only=True)"
    done = subprocess.run([sys.executable, "-c", f"import torch, diptych.torch; print({load})"], capture_output=True)
    assert b"fp8_e4m3_tensor" in done.stdout, done.stderr
    done = subprocess.run([sys.executable, "-c", f"import torch; {load}"], capture_output=True)
    assert b"add_safe_globals" in done.stderr


@pytest.mark.parametrize("fmt, options", (("fp8_e4m3_1x128", {}), ("nvfp4", {"row_amax": True, "rht": True})))
def test_through_compiled_regions(fmt, options, device):
    """As output, as input, and made and used inside; bit-equal to eager."""
    quant = quantizer(fmt, **options)
    x, w = normal("x", (2, 8, 160), "bfloat16", device), normal("w", (64, 160), "bfloat16", device)

    def make(x):
        return dt.quantize(x, quant)

    def use(a, b):
        return dt.gemm(a, b), b.dequantize(torch.bfloat16), a.detach().clone()

    torch._dynamo.reset()
    qx, qw = (torch.compile(make, fullgraph=True, backend="aot_eager")(t) for t in (x, w))
    _equal(make(x), qx)
    got = torch.compile(use, fullgraph=True, backend="aot_eager")(qx, qw)
    want = use(make(x), make(w))
    same(got[0], want[0])
    same(got[1], want[1])
    _equal(want[2], got[2])
    inside = torch.compile(lambda x, w: use(make(x), make(w))[:2], fullgraph=True)(x, w)
    same(inside[0], want[0])
    same(inside[1], want[1])


@pytest.mark.parametrize("fmt", ("fp8_e4m3_1x128", "nvfp4"))
def test_through_compiled_regions_with_dynamic_shapes(fmt, device):
    quant = quantizer(fmt)

    def step(x, w):
        a, b = dt.quantize(x, quant), dt.quantize(w, quant)
        return dt.gemm(a, b), dt.gemm(a, a, trans_a=True, trans_b=False), dt.dequantize(a), a

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for m, n, k in ((80, 144, 160), (72, 176, 272), (104, 160, 304)):
        x, w = normal("x", (2, m, k), "bfloat16", device), normal("w", (n, k), "bfloat16", device)
        *got, qx = compiled(x, w)
        *want, eager = step(x, w)
        for g, e in zip(got, want, strict=True):
            same(g, e)
        _equal(eager, qx)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
