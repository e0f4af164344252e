"""Weights that are held quantized: their arithmetic, optimizers, `.data`, dtypes and copies."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import LostUpdateWarning, MXFP8Quantizer
from diptych.torch.modules import quantized_parameter as held_module
from torch_frontend.held import KINDS, MX, buffers, layer, requantized, same_buffers, weight
from torch_frontend.tools import RECIPE_NAMES, normal, same

pytestmark = pytest.mark.filterwarnings("ignore::diptych.common.LostUpdateWarning")


# --- optimizers ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "Adam, decay": lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon(p, lr=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_with_a_master_an_optimizer_runs_as_on_the_master(optimizer, kind):
    """The bits of a plain parameter in float32, and the weight is quantized from it at every step."""
    if optimizer == "Muon" and kind == "stack":
        pytest.skip("Muon steps matrices alone")
    for name in ("fp8-current",) if optimizer == "Muon" else RECIPE_NAMES:  # which multiplies for long
        w = weight(kind, name)
        w.main_param = torch.randn(w.shape)
        plain = torch.nn.Parameter(w.main_param.clone())
        with torch.no_grad():
            w.copy_(w.main_param)
        steps = [OPTIMIZERS[optimizer]([p]) for p in (w, plain)]
        for _ in range(3):
            w.grad = torch.randn(w.shape)
            plain.grad = w.grad.clone()
            with warnings.catch_warnings():
                warnings.simplefilter("error", LostUpdateWarning)
                for step in steps:
                    step.step()
            same(w.main_param, plain)
            same_buffers(w, requantized(w, plain))
        for state in steps[0].state[w].values():
            assert not isinstance(state, dt.QuantizedTensor | dt.QuantizedStack)


@pytest.mark.parametrize("foreach", (False, True))
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_master_an_optimizer_steps_the_values(kind, foreach):
    for name in RECIPE_NAMES:
        w = weight(kind, name)
        plain = torch.nn.Parameter(w.dequantize().detach())
        # One addition a step, so that what it is added to is known.
        steps = [torch.optim.SGD([p], lr=0.1, momentum=0.9, weight_decay=0.1, foreach=foreach) for p in (w, plain)]
        for _ in range(3):
            w.grad = torch.randn(w.shape)
            plain.grad = w.grad.clone()
            plain.data.copy_(w.dequantize())
            version = w._version
            for step in steps:
                step.step()
            same_buffers(w, requantized(w, plain))
            assert w._version > version


def test_a_layer_trains_by_its_master_as_a_plain_one():
    """Forward, backward and AdamW, with weights in bfloat16 and masters in float32."""
    torch.manual_seed(0)
    with dt.quantized_model_init(recipe=MX, preserve_high_precision_init_val=True):
        ours = dt.Linear(96, 64, dtype=torch.bfloat16)
    ours.weight.main_param = ours.weight.get_high_precision_init_val().float()
    start, optimizer = ours.weight.main_param.clone(), torch.optim.AdamW(ours.parameters(), lr=2.0**-14)
    for i in range(3):
        with dt.autocast(recipe=MX):
            ours(normal(f"x{i}", (32, 96), "bfloat16")).square().mean().backward()
        optimizer.step()
    moved = (ours.weight.main_param - start).abs()
    assert 0 < moved.max() < 2.0**-11 * 4  # below half a step of the payload, and yet there
    same_buffers(ours.weight, requantized(ours.weight, ours.weight.main_param))


def test_lost_updates_are_reported_once(monkeypatch):
    monkeypatch.setattr(held_module, "_warned", False)
    w, with_master = weight(), weight()
    with_master.main_param = torch.zeros(64, 96)
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            w.copy_(torch.ones(64, 96))
            w.uniform_()
            with_master.add_(1)
        with pytest.warns(LostUpdateWarning, match=r"^add_ on a weight .* Set weight\.main_param to a float32"):
            w.add_(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            w.add_(1)


def test_masters_that_do_not_fit():
    w = weight()
    for master, match in (
        (torch.zeros(64, 96, dtype=torch.bfloat16), r"must be a float32 tensor, got bfloat16"),
        ("master", "must be a float32 tensor, got str"),
        (torch.zeros(96, 64), r"must be \[64, 96\] on cpu, got float32\[96, 64\]"),
    ):
        w.main_param = master
        with torch.no_grad(), pytest.raises(ValueError, match=match):
            w.add_(1)


@pytest.mark.parametrize("make", (torch.optim.AdamW, torch.optim.SGD))
def test_fused_optimizers_are_refused(make):
    w = weight()
    w.grad, before = torch.ones(64, 96), w.dequantize().detach()
    with pytest.raises(NotImplementedError, match="make the optimizer with fused=False") as error:
        make([w], lr=0.1, fused=True).step()
    assert "aten" not in str(error.value)
    same(w.dequantize(), before)


def test_a_change_between_forward_and_backward_is_noticed():
    for change in (lambda w: w.mul_(2), lambda w: torch._foreach_mul_([w], 2), lambda w: w.copy_(torch.ones(64, 96))):
        ours = layer()
        with dt.autocast(recipe=MX):
            y = ours(normal("x", (32, 96)).requires_grad_())
        with torch.no_grad():
            change(ours.weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


# --- arithmetic ------------------------------------------------------------------------------------------------------

X = torch.linspace(-2, 3, 64 * 96).view(64, 96)
IN_PLACE: dict[str, Any] = {
    "add_": lambda w: w.add_(X, alpha=0.5),
    "iadd": lambda w: w.__iadd__(X),
    "mul_": lambda w: w.mul_(0.37),
    "addcdiv_": lambda w: w.addcdiv_(X, X.square() + 1, value=-0.1),
    "lerp_": lambda w: w.lerp_(X, 0.3),
    "clamp_": lambda w: w.clamp_(-0.05, 0.02),
    "masked_fill_": lambda w: w.masked_fill_(X > 1, 7),
    "addmm_": lambda w: w.addmm_(X[:, :4], X[:4]),
    "add_ of itself": lambda w: w.add_(w),
    "zero_": lambda w: w.zero_(),
    "fill_": lambda w: w.fill_(3),
    "copy_": lambda w: w.copy_(X),
    "copy_, double": lambda w: w.copy_(X.double()),
    "copy_, float8": lambda w: w.copy_(X.to(torch.float8_e4m3fn)),
    "uniform_": lambda w: torch.nn.init.kaiming_uniform_(w, generator=torch.Generator().manual_seed(3)),
    "normal_": lambda w: w.normal_(generator=torch.Generator().manual_seed(3)),
    "out": lambda w: torch.add(w, X, out=w),
    "whole slice": lambda w: w.__setitem__(slice(None), X),
    "ellipsis": lambda w: w.__setitem__(..., 2.0),
    "through data": lambda w: w.data.add_(X),
    "foreach": lambda w: torch._foreach_add_([w, torch.zeros(64, 96)], [X, X]),
    "foreach copy": lambda w: torch._foreach_copy_([w], [X]),
}


@pytest.mark.parametrize("op", IN_PLACE)
def test_in_place(op):
    """Computed on the values, and quantized into the same buffers."""
    for name in RECIPE_NAMES:
        w = weight("tensor", name)
        plain, kept, version = w.dequantize().detach(), {n: t.data_ptr() for n, t in buffers(w).items()}, w._version
        with torch.no_grad():
            got = IN_PLACE[op](w)
            IN_PLACE[op](plain)
        if isinstance(got, torch.Tensor) and "data" not in op:
            assert got is w
        same_buffers(w, requantized(w, plain))
        assert {n: t.data_ptr() for n, t in buffers(w).items()} == kept
        assert w._version > version or "data" in op  # which has a count of its own, as every tensor's


def test_in_place_on_a_part_of_a_stack():
    w = weight("stack")
    before = w.dequantize().detach()
    w.main_param = before.clone()
    with torch.no_grad():
        w[1].mul_(3)
    before[1] *= 3
    same(w.main_param, before)
    same_buffers(w, requantized(w, before))


READS: dict[str, Any] = {
    "add": lambda w: w + 1,
    "mul": lambda w: X * w,
    "norm": lambda w: w.norm(),
    "linalg norm": lambda w: torch.linalg.norm(w, dim=-1),
    "abs max": lambda w: w.abs().max(),
    "std": lambda w: w.std(dim=0),
    "finite": lambda w: w.isfinite().all(),
    "compare": lambda w: w > X,
    "cat": lambda w: torch.cat([w, X]),
    "index": lambda w: w[torch.tensor([3, 1])],
    "row": lambda w: w[5].sum(),
    "transposed": lambda w: w.t().amax(1),
    "flat": lambda w: w.view(-1) * 2,
    "chunks": lambda w: torch.stack([c.sum() for c in w.chunk(4)]),
    "into plain": lambda w: torch.zeros(64, 96).copy_(w),
    "added to plain": lambda w: torch.ones(64, 96).add_(w, alpha=2),
    "foreach": lambda w: torch._foreach_add([X], [w], alpha=0.5)[0],
    "zeros_like": lambda w: torch.zeros_like(w, memory_format=torch.preserve_format),
    "new_full": lambda w: w.new_full((2, 3), 4),
    "vector": lambda w: torch.nn.utils.parameters_to_vector([w, torch.nn.Parameter(X)]),
    "allclose": lambda w: torch.tensor(torch.allclose(w, X)),
}


@pytest.mark.parametrize("op", READS)
def test_reads(op):
    w = weight()
    plain = w.dequantize().detach()
    got = READS[op](w)
    assert type(got) is torch.Tensor
    same(got.detach(), READS[op](plain))


def test_what_is_read_has_a_gradient():
    w = weight()
    (w.square().sum() + w.view(-1)[:5].sum()).backward()
    want = 2 * w.dequantize().detach()
    want.view(-1)[:5] += 1
    assert type(w.grad) is torch.Tensor
    same(w.grad, want)


REFUSED: dict[str, Any] = {
    "mm": lambda w: X.t() @ w,
    "linear": lambda w: torch.nn.functional.linear(X, w),
    "addmm_": lambda w: torch.zeros(64, 96).addmm_(torch.ones(64, 64), w),
    "t_": lambda w: w.t_(),
    "row": lambda w: w.__setitem__(0, 1.0),
    "column": lambda w: w[:, 3].zero_(),
    "view": lambda w: w.view(-1).mul_(2),
    "share_memory_": lambda w: w.share_memory_(),
    "with an activation": lambda w: w.add_(dt.quantize(X, MXFP8Quantizer())),
}


@pytest.mark.parametrize("op", REFUSED)
def test_refused(op):
    """In our words: no operator of torch's own inside is named, and nothing changes."""
    w = weight()
    before = {n: t.clone() for n, t in buffers(w).items()}
    with torch.no_grad(), pytest.raises(NotImplementedError, match=r"quantized|share_memory_") as error:
        REFUSED[op](w)
    assert "aten" not in str(error.value)
    same_buffers(w, before)


def test_compiled_code_takes_copy_and_no_other_change():
    """Without fullgraph another change runs between graphs."""

    def step(w: Any, change: str) -> None:
        with torch.no_grad():
            w.copy_(X) if change == "copy_" else w.mul_(2)

    torch._dynamo.reset()
    w, whole = weight(), torch.compile(step, backend="aot_eager", fullgraph=True)
    whole(w, "copy_")
    same_buffers(w, requantized(w, X))
    with pytest.raises(Exception, match="mul_ on a weight that is held quantized, in compiled code"):
        whole(w, "mul_")
    want = requantized(w, w.dequantize() * 2)
    torch.compile(step, backend="aot_eager")(w, "mul_")
    same_buffers(w, want)


# --- .data, dtypes, usage --------------------------------------------------------------------------------------------


def test_assigning_data():
    for kind in KINDS:
        w = weight(kind)
        kept = w.rowwise_data.data_ptr()
        values = torch.randn(w.shape)
        w.data = values
        same_buffers(w, requantized(w, values))
        assert w.rowwise_data.data_ptr() == kept
        other = weight(kind)
        w.data = other.data.bfloat16()
        assert w.dtype == torch.bfloat16 and w.requires_grad and isinstance(w, torch.nn.Parameter)
        same_buffers(w, buffers(other))
    q = dt.quantize(torch.zeros(32, 64), MXFP8Quantizer())
    q.data = torch.ones(32, 64)
    same(q.dequantize(), torch.ones(32, 64))
    q.data = dt.quantize(torch.full((32, 64), 2.0), MXFP8Quantizer(columnwise=False))
    assert q.columnwise_data is None and not q.quantizer.columnwise
    same(q.dequantize(), torch.full((32, 64), 2.0))
    for value, error, match in (
        (torch.ones(3, 2, dtype=torch.float16), ValueError, r"got float16\[3, 2\] on cpu; .* keeps its shape"),
        (torch.ones(32, 64, device="meta"), ValueError, "move the quantized tensor first"),
        (3.0, TypeError, "a tensor is needed, got float"),
        (dt.quantize_stack(torch.ones(32, 64), MXFP8Quantizer()), TypeError, "got a QuantizedStack"),
    ):
        with pytest.raises(error, match=match):
            q.data = value
    same(q.dequantize(), torch.full((32, 64), 2.0))


def test_merging_an_adapter():
    a, b = torch.randn(64, 4), torch.randn(4, 96)
    ways: tuple[Any, ...] = (
        lambda w: setattr(w, "data", w.data + a @ b),
        lambda w: w.data.__iadd__(a @ b),
        lambda w: w.add_(a @ b),
        lambda w: w.copy_(w + a @ b),
    )
    for way in ways:
        ours = layer()
        want = ours.weight.dequantize().detach() + a @ b
        with torch.no_grad():
            way(ours.weight)
        same_buffers(ours.weight, requantized(ours.weight, want))


def test_dtypes_of_a_module():
    """The payload stays, after a step too, and what a user has put on the weight."""
    ours = layer()
    ours.weight.main_grad = main_grad = torch.zeros(64, 96)
    with dt.autocast(recipe=MX):
        ours(normal("x", (32, 96))).sum().backward()
    want, w = {n: t.clone() for n, t in buffers(ours.weight).items()}, ours.weight
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        ours.to(dtype)
        assert ours.weight is w and w.dtype == w.dequantize().dtype == w.grad.dtype == dtype
        same_buffers(w, want)
        assert w.main_grad is main_grad
    assert isinstance(ours.to_empty(device="cpu").weight, dt.QuantizedParameter)
    with pytest.raises(NotImplementedError, match=r"cannot become torch\.float64"):
        ours.double()


def test_update_usage_and_quantize_():
    w = layer().weight
    w.update_usage(columnwise_usage=False)
    assert buffers(w).keys() == {"rowwise_data", "rowwise_scale_inv"} and not w.quantizer.columnwise
    w.quantize_(X)
    same_buffers(w, requantized(w, X))
    with pytest.raises(ValueError, match="columnwise copy was not made"):
        w.update_usage(columnwise_usage=True)
    with pytest.raises(ValueError, match="at least one"):
        w.update_usage(rowwise_usage=False)
    with pytest.raises(ValueError, match="quantize_ of a QuantizedTensor"):
        dt.quantize(X, MXFP8Quantizer()).quantize_(X.t())


def test_copies_have_their_own_master():
    ours = layer(preserve_high_precision_init_val=True)
    ours.weight.main_param = ours.weight.get_high_precision_init_val().clone()
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for other in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        same_buffers(other.weight, buffers(ours.weight))
        same(other.weight.get_high_precision_init_val(), ours.weight.get_high_precision_init_val())
        with torch.no_grad():
            other.weight.add_(1)
        same(other.weight.main_param, ours.weight.get_high_precision_init_val() + 1)
        same(ours.weight.main_param, ours.weight.get_high_precision_init_val())
    assert ours.bfloat16().weight.main_param.dtype == torch.float32
    ours.load_state_dict(layer().state_dict())
    same(ours.weight.main_param, ours.weight.dequantize(torch.float32))
