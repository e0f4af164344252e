"""Moves of tokens under TransformerEngine's names, where a probability of zero is padding."""

from __future__ import annotations

import torch

import diptych.te as te
import diptych.torch as dt


def test_zero_probabilities_are_padding():
    x, mask = torch.randn(6, 8), torch.tensor([[1, 0], [1, 1], [0, 1], [1, 0], [0, 1], [1, 1]])
    probs = torch.rand(6, 2) * mask
    probs[1, 0] = 0.0
    want = dt.moe_permute_with_probs(x, probs, mask, 8, zero_prob_is_padding=True)
    got = te.moe_permute_with_probs(x, probs, mask, 8)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not got[0][1].any() and dt.moe_permute_with_probs(x, probs, mask, 8)[0][1].any()
    counts = mask.sum(0)
    padded = te.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16)
    want = dt.moe_permute_and_pad_with_probs(x, probs, mask, counts, 16, zero_prob_is_padding=True)
    assert all(torch.equal(a, b) for a, b in zip(padded, want, strict=True) if a is not None)
    assert te.moe_unpermute is dt.moe_unpermute
