"""Rows of quantized tensors, moved with their scales: eagerly and in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import diptych.torch as dt
from diptych.common import Float8BlockQuantizer, Float8CurrentScalingQuantizer, MXFP8Quantizer, Quantizer
from diptych.core._permute import moved_parts
from diptych.torch.tensors.quantized import BUFFERS, QuantizedTensor
from torch_frontend.tools import ALL, named, normal, rng_for, same

pytestmark = pytest.mark.sampled

T, E, K = 32, 5, 256
MOVABLE = tuple(n for n in ALL if named(n).format.block_rows == 1)
BACKENDS = {"compiled": "aot_eager", "inductor": "inductor"}
MODES = ("eager", "compiled", pytest.param("inductor", marks=pytest.mark.slow))


def _marks(name: str, mode: str) -> list[Any]:
    """Options change how a tensor is quantized, and not how it moves."""
    return [pytest.mark.slow] if mode == "inductor" or (mode == "compiled" and " " in name) else []


CASES = [pytest.param(n, mode, marks=_marks(n, mode)) for n in MOVABLE for mode in ("eager", *BACKENDS)]


def in_mode(fn: Any, mode: str) -> Any:
    torch._dynamo.reset()
    return fn if mode == "eager" else torch.compile(fn, fullgraph=True, backend=BACKENDS[mode])


def quantized(x: torch.Tensor, quantizer: Quantizer) -> QuantizedTensor:
    scale = torch.full((1,), 2.0, device=x.device) if quantizer.needs_scale else None
    return dt.quantize(x, quantizer, scale=scale, rng=rng_for(quantizer, str(x.device)))


def movable(name: str) -> Quantizer:
    """The quantizer with every copy that moves."""
    quantizer = named(name)
    return quantizer.with_usage(rowwise=True, columnwise=quantizer.format.one_scale)


def mask_for(name: str, device: str) -> torch.Tensor:
    return (normal(f"mask-{name}", (T, E)) > 0.5).to(device)


def moved_by_hand(t: torch.Tensor, row_source: torch.Tensor, fill: int) -> torch.Tensor:
    """Rows of a buffer by plain indexing; absent ones repeat four bytes."""
    flat = t.reshape(t.shape[0] if t.dim() == 1 else t.numel() // t.shape[-1], -1).view(torch.uint8)
    absent = torch.tensor([fill >> (8 * (i % 4)) & 255 for i in range(flat.shape[1])], dtype=torch.uint8)
    rows = torch.where(row_source[:, None] >= 0, flat[row_source.clamp(0).long() // E], absent.to(t.device))
    return rows.view(t.dtype).reshape(len(row_source), *t.shape[1:])


@pytest.mark.parametrize("name, mode", CASES)
def test_buffers_and_gradients(name, mode, device):
    quantizer = movable(name)
    q = quantized(normal(name, (T, K), "bfloat16", device), quantizer).requires_grad_()
    m = dt.moe_map(mask_for(name, device), align_size=8)
    out, ids = in_mode(dt.moe_permute, mode)(q, m)
    assert isinstance(out, QuantizedTensor) and out.quantizer == quantizer and out.shape == (len(m.row_source), K)
    assert torch.equal(ids, m.row_id_map) and out.dtype == torch.bfloat16 and out.requires_grad
    parts = moved_parts(quantizer)
    for part in BUFFERS:
        t, got = getattr(q, part), getattr(out, part)
        assert (t is None) == (got is None), part
        if t is None:
            continue
        if part == "columnwise_data":
            want = moved_by_hand(t.t().contiguous(), m.row_source, 0).t()
        else:
            want = moved_by_hand(t, m.row_source, parts[part]) if part in parts else t
            assert part in parts or got.data_ptr() != t.data_ptr()
        same(got, want.contiguous(), part)
    values = dt.moe_permute(q.detach().dequantize(), m)[0]
    same(out.detach().dequantize(), values, "values")
    dy = normal("dy", (len(m.row_source), K), "bfloat16", device)
    out.backward(dy)
    assert type(q.grad) is torch.Tensor and q.grad.dtype == torch.bfloat16
    same(q.grad, dt.moe_unpermute(dy, m), "gradient")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n in MOVABLE if " " not in n])
def test_with_probs_and_chunks(name, mode, device):
    """Between quantize and dequantize, as a layer has them; delayed scales and all."""
    quantizer = movable(name)
    scale = torch.full((1,), 2.0, device=device) if quantizer.needs_scale else None
    mask, probs = mask_for(name, device), torch.rand(T, E, device=device, requires_grad=True)

    def layer(x, probs):
        q = dt.quantize(x, quantizer, scale=scale)
        out, moved, _ = dt.moe_permute_with_probs(q, probs, mask, 48)
        out = dt.moe_sort_chunks_by_index(out, [8, 40], [1, 0])
        return out.dequantize(torch.float32), moved

    x = normal(name, (T, K), "bfloat16", device).requires_grad_()
    results = []
    for fn in (layer, in_mode(layer, mode)):
        x.grad = probs.grad = None
        y, moved = fn(x, probs)
        torch.autograd.backward((y, moved), (torch.ones_like(y) * 3, torch.arange(48.0, device=device)))
        results.append((y, moved, x.grad, probs.grad))
    for a, b in zip(*results, strict=True):
        same(a, b)
    values = dt.quantize(x.detach(), quantizer, scale=scale).dequantize(torch.float32)
    plain, moved, _ = dt.moe_permute_with_probs(values, probs, mask, 48)
    same(results[0][0], torch.cat([plain[8:], plain[:8]]))
    same(results[0][1], moved)


def test_zero_probabilities_pad_with_quantized_zeros():
    q = dt.quantize(torch.randn(4, 64), MXFP8Quantizer(columnwise=False))
    probs = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    out, _, _ = dt.moe_permute_with_probs(q, probs, torch.ones(4, 1, dtype=torch.bool), zero_prob_is_padding=True)
    for part in (out.rowwise_data, out.rowwise_scale_inv):
        assert not part[1::2].view(torch.uint8).any()
    same(out.rowwise_data[::2].contiguous(), q.rowwise_data[::2].contiguous())


def test_what_does_not_move():
    x, mask = torch.randn(128, 128), torch.ones(128, 2, dtype=torch.bool)
    for quantizer, reason in (
        (Float8BlockQuantizer(block_scaling_dim=2), "blocks of inp's fp8_e4m3_128x128 span 128 rows"),
        (Float8BlockQuantizer(block_scaling_dim=1), "columnwise copy .* run along 128 tokens"),
        (MXFP8Quantizer(), "columnwise copy .* run along 32 tokens.*with_usage.columnwise=False"),
        (MXFP8Quantizer(rowwise=False), "no rowwise copy"),
        (Float8CurrentScalingQuantizer(rowwise=False), "no rowwise copy"),
    ):
        q = dt.quantize(x, quantizer)
        for fn in (lambda q: dt.moe_permute(q, mask), lambda q: dt.moe_sort_chunks_by_index(q, [28, 100], [1, 0])):
            with pytest.raises(ValueError, match=reason):
                fn(q)
    q = dt.quantize(x, MXFP8Quantizer())
    with pytest.raises(TypeError, match="moe_unpermute: inp is quantized, and its rows are summed"):
        dt.moe_unpermute(q, dt.moe_map(mask[:64]).row_id_map)
