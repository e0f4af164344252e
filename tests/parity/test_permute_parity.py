"""Permutation: torch bits == JAX bits on one device, forward and backward, and for every plane of quantized tensors."""

from __future__ import annotations

import numpy as np
import pytest
from core.permute.test_permute import as_mask, top_k
from core.permute.test_permute_misuse import lie

import cases
from diptych.common import FORMATS
from parity.panels import FIELDS, backends, dj, dt, jax, same, to_jax, to_torch, torch
from quantizers import quantizer as quantizer_for

T, E, K, H = 45, 6, 3, 40
IDS = top_k(cases.rng_for("moe-parity"), T, E, K)
MASK = as_mask(IDS, E)
ROWS = {"every row": {}, "padded": {"align_size": 16}, "dropped": {"num_out_tokens": 97, "align_size": 8}}
KINDS = {"mask": (MASK, {}), "index": (IDS, {"num_experts": E, "map_type": "index"})}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    if request.param == "cuda":
        request.getfixturevalue("cuda")
        if not backends("cuda"):
            pytest.skip("this JAX has no GPU backend")
    with jax.default_device(jax.devices("gpu" if request.param == "cuda" else "cpu")[0]):
        yield request.param


def draw(name, shape, dtype):
    return cases.draw(f"moe-parity-{name}", "normal", shape, dtype)


def of_torch(f, inputs, cotangents, device):
    """(results, gradients) of `f`, both in order."""
    given = [to_torch(x, device).requires_grad_() for x in inputs]
    outs = f(dt, lambda x: to_torch(x, device), *given)
    torch.autograd.backward(outs, [to_torch(g, device) for g in cotangents])
    return outs, [x.grad for x in given]


def of_jax(f, inputs, cotangents, device):
    @jax.jit
    def run(inputs, cotangents):
        outs, pull = jax.vjp(lambda *x: tuple(f(dj, lambda x: to_jax(x, device), *x)), *inputs)
        return outs, pull(cotangents)

    return run(*(tuple(to_jax(x, device) for x in arrays) for arrays in (inputs, cotangents)))


def same_all(got, want, label):
    for turn, (g, w) in enumerate(zip(got, want, strict=True)):
        same(g, w, f"{label} {turn}", nan_free=True)


def both(f, inputs, cotangents, device, label):
    """`f(panel, put, *inputs)` gives the same bits in both panels, and so do its gradients."""
    mine, theirs = (of(f, inputs, cotangents, device) for of in (of_torch, of_jax))
    same_all(mine[0], theirs[0], f"forward {label}")
    same_all(mine[1], theirs[1], f"backward {label}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", cases.INPUT_DTYPES)
def test_forward_and_backward(dtype, kind, device):
    routing, options = KINDS[kind]
    slots = routing.shape[1]
    for turn, (name, sized) in enumerate(ROWS.items()):
        label = f"{name} {kind} {dtype} {device} {cases.report_header()}"
        prob_dtype = list(cases.INPUT_DTYPES)[turn % 3]
        given = options | sized
        want = dt.moe_map(to_torch(routing, device), **given)
        same_all(want, jax.jit(lambda r, o=given: dj.moe_map(r, **o))(to_jax(routing, device)), f"map {label}")
        rows = want.row_source.shape[0]
        x, probs = draw("x", (T, H), dtype), draw("probs", (T, slots), prob_dtype)
        dy, dp = draw("dy", (rows, H), dtype), draw("dp", (rows,), prob_dtype)
        probs[::3] = 0

        def permuted(panel, put, x, probs, given=given, padding=bool(turn)):
            m = panel.moe_map(put(routing), **given)
            return panel.moe_permute_with_probs(x, probs, m, zero_prob_is_padding=padding)[:2]

        def summed(panel, put, x, probs, given=given, whole=turn == 1):
            m = panel.moe_map(put(routing), **given)
            return (panel.moe_unpermute(x, m if whole else m.row_id_map, probs),)

        both(permuted, (x, probs), (dy, dp), device, f"permute {label}")
        both(summed, (dy, probs), (x,), device, f"unpermute {label}")
    plain = {k: v for k, v in options.items() if k == "map_type"}

    def without_probs(panel, put, x):
        moved, row_id_map = panel.moe_permute(x, put(routing), 99, **plain)
        return moved, panel.moe_unpermute(moved, row_id_map, restore_shape=(5, T // 5, H))

    cotangents = draw("99", (99, H), dtype), draw("back", (5, T // 5, H), dtype)
    both(without_probs, (draw("x", (T, H), dtype),), cotangents, device, f"{kind} {dtype}")


def test_padding(device):
    x, probs, dy = draw("px", (T, H), "bfloat16"), draw("pp", (T, E), "float32"), draw("pdy", (200, H), "bfloat16")
    for counts in (None, MASK.sum(0).tolist(), [1, 50, 3, 0, 9, 2]):

        def padded(panel, put, x, probs, counts=counts):
            return panel.moe_permute_and_pad_with_probs(x, probs, put(MASK), counts, 8, num_out_tokens=200)

        def moved(panel, put, x, probs, padded=padded):
            return padded(panel, put, x, probs)[:2]

        both(moved, (x, probs), (dy, draw("pdp", (200,), "float32")), device, f"padding by {counts}")
        panels = [
            padded(panel, lambda v, put=put: put(v, device), put(x, device), put(probs, device))
            for panel, put in ((dt, to_torch), (dj, to_jax))
        ]
        assert panels[0][4].tolist() == panels[1][4].tolist() and panels[0][3] is panels[1][3] is None
    offsets = np.array([0, 3, -2, 2**31 - 1, -(2**31), 9], np.int32)
    to = np.asarray(dj.moe_map(MASK).row_id_map)

    def shifted(panel, put, x, probs):
        return (panel.moe_unpermute(x, put(to), probs, pad_offsets=put(offsets)),)

    both(shifted, (dy, probs), (x,), device, "pad_offsets")


def test_chunks(device):
    x, probs = draw("cx", (T, H), "float16"), draw("cp", (T,), "bfloat16")
    dy, dp = draw("cdy", (T, H), "float16"), draw("cdp", (T,), "bfloat16")
    for given in (([40, 0, 5], [2, 0, 1]), ([-9, 30, 2**31 - 1], [1, 1, 7])):

        def turned(panel, put, x, probs, given=given):
            numbers = [put(np.array(v, np.int32)) for v in given]
            return panel.moe_sort_chunks_by_index_with_probs(x, probs, *numbers)

        both(turned, (x, probs), (dy, dp), device, f"chunks {given}")


def test_maps_that_lie(device):
    """If several slots name a row, both frameworks take the gradient of the same one."""
    for slots in (1, 3, 40):
        m = lie(f"parity-{slots}", slots=slots)
        x, probs = draw("lx", (50, H), "float32"), draw("lp", m.row_id_map.shape, "float16")

        def summed(panel, put, x, probs, to=m.row_id_map):
            return (panel.moe_unpermute(x, put(to), probs),)

        both(summed, (x, probs), (draw("ldy", (len(probs), H), "float32"),), device, f"a lie of {slots} slots")


@pytest.mark.parametrize("fmt", [f.name for f in FORMATS if f.block_rows <= 1])
def test_quantized(fmt, device):
    one_scale = next(f for f in FORMATS if f.name == fmt).one_scale
    quantizer = quantizer_for(fmt, columnwise=one_scale)
    x, probs = draw("qx", (48, 128), "bfloat16"), draw("qp", (48, E), "float32")
    mask = as_mask(top_k(cases.rng_for("moe-parity-q"), 48, E, K), E)
    out = []
    for panel, put in ((dt, to_torch), (dj, to_jax)):
        m = panel.moe_map(put(mask, device), num_out_tokens=160, align_size=8)
        out.append(panel.moe_permute_with_probs(panel.quantize(put(x, device), quantizer), put(probs, device), m))
    (mine, *own), (theirs, *other) = out
    same_all(own, other, f"{fmt} {device}")
    for name in FIELDS:
        a, b = getattr(mine, name), getattr(theirs, name)
        assert (a is None) == (b is None), name
        if a is not None:
            same(a, b, f"{name} of {fmt} {device}")
    same(mine.dequantize(), theirs.dequantize(), f"values of {fmt} {device}")
