"""Padding of groups: rows come back as they were, and a padded layer gives the bits of one that is not."""

from __future__ import annotations

import pytest
import torch

import diptych.te as te
from diptych.common import RECIPES
from diptych.common.errors import ShapeError


@pytest.mark.parametrize("splits", [[17, 15], [0, 32], [64, 128], [1, 0]])
@pytest.mark.parametrize("align", [16, 128])
def test_rows_come_back(splits, align):
    pad, unpad = te.Fp8Padding(2, align), te.Fp8Unpadding(2, align_size=align)
    x = torch.randn(sum(splits), 8, requires_grad=True)
    padded, sizes = pad(x, splits)
    assert sizes == [-(-m // align) * align for m in splits] and padded.shape == (sum(sizes), 8)
    for part, mine, m in zip(padded.split(sizes), x.split(splits), splits, strict=True):
        assert torch.equal(part[:m], mine) and not part[m:].any()
    back = unpad(padded, splits)
    assert torch.equal(back, x)
    back.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_padded_layer_is_one_that_is_not():
    layer, x = te.GroupedLinear(2, 64, 32, bias=False, device="cpu"), torch.randn(40, 64)
    grads = []
    for padded in (False, True):
        layer.zero_grad()
        with te.autocast(recipe=RECIPES["mxfp8"]):
            rows, sizes = te.Fp8Padding(2)(x, [32, 8]) if padded else (x, [32, 8])
            y = layer(rows, sizes)
            y = te.Fp8Unpadding(2)(y, [32, 8]) if padded else y
        y.square().sum().backward()
        grads.append((y.detach(), layer.weight.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_sizes_that_do_not_fit():
    pad = te.Fp8Padding(2)
    with pytest.raises(ValueError, match="Fp8Padding: give align_size, or call it in a region"):
        pad(torch.randn(32, 8), [16, 16])
    with te.autocast(recipe=RECIPES["mxfp8"]):
        assert pad.align_size == 32 and te.Fp8Padding(2, 64).align_size == 64
        for splits in ([16, 17], [32], [16, 8, 8]):
            with pytest.raises(ShapeError, match="Fp8Padding: m_splits must have 2 sizes"):
                pad(torch.randn(32, 8), splits)
        with pytest.raises(ShapeError, match="Fp8Unpadding: m_splits must have 2 sizes"):
            te.Fp8Unpadding(2)(torch.randn(32, 8), [16, 16])
