"""The three products: torch bits == JAX bits == oracle bits on the CPU; torch bits == JAX bits on one GPU."""

from __future__ import annotations

import numpy as np
import pytest
from sweeps import one_in

import cases
import oracle
from parity.panels import backends, cublaslt_mismatch, dj, dt, jax, same, to_jax, to_torch
from quantizers import oracle_options
from quantizers import quantizer as quantizer_for

pytestmark = pytest.mark.sampled

SHAPES = ((1, 1, 1), (7, 5, 33), (16, 32, 128), (33, 65, 257), (0, 4, 8), (4, 8, 0))
# fprop, dgrad, wgrad: (trans_a, trans_b), and the shapes of A and B from (m, n, k)
PRODUCTS = {
    "fprop": (False, True, lambda m, n, k: ((m, k), (n, k))),
    "dgrad": (False, False, lambda m, n, k: ((m, k), (k, n))),
    "wgrad": (True, False, lambda m, n, k: ((k, m), (k, n))),
}
EPILOGUES = ((1.0, None, "float32"), (0.7, "bfloat16", "bfloat16"), (-1.5, "float16", "float16"))


def torch_dtype(name: str):
    return to_torch(np.zeros(1, cases.INPUT_DTYPES[name])).dtype


def fitting(pair, mnk):
    """Extents in whole blocks where an operand is packed."""
    packed = any(fmt in cases.PACKED_FORMATS for fmt in pair)
    return tuple(-(-v // cases.PACKED_BLOCK) * cases.PACKED_BLOCK for v in mnk) if packed else mnk


def products(pair, shapes=SHAPES):
    """(label, A, B, bias, options) of every product; epilogues take turns."""
    for turn, mnk in enumerate(dict.fromkeys(fitting(pair, mnk) for mnk in shapes)):
        for shift, (name, (trans_a, trans_b, extents)) in enumerate(PRODUCTS.items()):
            alpha, bias_dtype, out_dtype = EPILOGUES[(turn + shift) % len(EPILOGUES)]
            label = f"{name} {'x'.join(pair)} {mnk} {out_dtype} {cases.report_header()}"
            a, b = (cases.draw(f"{label}-{i}", "normal", s, "bfloat16") for i, s in enumerate(extents(*mnk)))
            bias = None if bias_dtype is None else cases.draw(f"{label}-bias", "normal", (mnk[1],), bias_dtype)
            yield label, a, b, bias, {"trans_a": trans_a, "trans_b": trans_b, "alpha": alpha}, out_dtype


def of_torch(pair, a, b, bias, options, out_dtype, device="cpu"):
    qa, qb = (dt.quantize(to_torch(x, device), quantizer_for(f)) for x, f in zip((a, b), pair, strict=True))
    bias = None if bias is None else to_torch(bias, device)
    return dt.gemm(qa, qb, bias=bias, out_dtype=torch_dtype(out_dtype), **options)


def of_jax(pair, a, b, bias, options, out_dtype, device="cpu"):
    def product(a, b, bias):
        qa, qb = (dj.quantize(x, quantizer_for(f)) for x, f in zip((a, b), pair, strict=True))
        return dj.gemm(qa, qb, bias=bias, out_dtype=out_dtype, **options)

    bias = None if bias is None else to_jax(bias, device)
    return jax.jit(product)(to_jax(a, device), to_jax(b, device), bias)


# Pairs of two families: each format once as A and once as B.
MIXED = tuple(p for i, p in enumerate(cases.MIXED_PAIRS) if i % 7 == 0 or "nvfp4" in p)


@pytest.mark.parametrize("pair", one_in(3, cases.GEMM_PAIRS + MIXED), ids="-".join)
def test_three_products(pair):
    for label, a, b, bias, options, out_dtype in products(pair, SHAPES if pair in cases.GEMM_PAIRS else SHAPES[3:5]):
        qa = oracle.quantize(a, pair[0]).copy(options["trans_a"])
        qb = oracle.quantize(b, pair[1]).copy(not options["trans_b"])
        dtype = cases.INPUT_DTYPES[out_dtype]
        want = oracle.gemm_cpu(qa, qb, alpha=options["alpha"], bias=bias, out_dtype=dtype)
        same(of_torch(pair, a, b, bias, options, out_dtype), want, f"torch {label}")
        same(of_jax(pair, a, b, bias, options, out_dtype), want, f"jax {label}")


@pytest.mark.parametrize("fmt", ["fp8_e4m3_tensor", "fp8_e4m3_1x128", "mxfp8_e5m2", "nvfp4"])
def test_gemm_into(fmt):
    """Accumulation: torch writes into acc, JAX returns the new one; the same bits."""
    for turn, mnk in enumerate(((7, 5, 33), (32, 48, 128))):
        m, n, k = fitting((fmt,), mnk)
        a, b = (cases.draw(f"into-{fmt}-{turn}-{i}", "normal", (s, k), "float32") for i, s in enumerate((m, n)))
        acc = cases.draw(f"into-{fmt}-{turn}", "normal", (m, n), "bfloat16" if turn else "float32")
        q = [oracle.quantize(x, fmt).copy() for x in (a, b)]
        want = oracle.gemm_cpu(*q, alpha=0.5, beta=1.0, c=acc, out_dtype=acc.dtype)
        mine = to_torch(acc)
        ta, tb = (dt.quantize(to_torch(x), quantizer_for(fmt)) for x in (a, b))
        assert dt.gemm_into(mine, ta, tb, alpha=0.5) is mine
        same(mine, want, f"torch gemm_into {fmt}")
        ja, jb = (dj.quantize(to_jax(x), quantizer_for(fmt)) for x in (a, b))
        same(dj.gemm_into(to_jax(acc), ja, jb, alpha=0.5), want, f"jax gemm_into {fmt}")


def test_an_amax_for_each_row():
    """NVFP4 inputs by row and transformed, in fprop and in wgrad."""
    options = {"row_amax": True, "rht": True, "rht_signs": True}
    x, w, dy = (cases.draw(f"rows-{i}", "normal", s, "bfloat16") for i, s in enumerate(((32, 48), (64, 48), (32, 64))))
    q = {"x": (x, quantizer_for("nvfp4", **options)), "w": (w, quantizer_for("nvfp4", square=True)),
         "dy": (dy, quantizer_for("nvfp4", rht=True, rht_signs=True))}  # fmt: skip
    mine = {k: dt.quantize(to_torch(v), z) for k, (v, z) in q.items()}
    theirs = {k: dj.quantize(to_jax(v), z) for k, (v, z) in q.items()}
    reference = {k: oracle.quantize(v, "nvfp4", **oracle_options(z)) for k, (v, z) in q.items()}
    for a, b, trans_a, trans_b in (("x", "w", False, True), ("dy", "w", False, False), ("dy", "x", True, False)):
        want = oracle.gemm_cpu(reference[a].copy(trans_a), reference[b].copy(not trans_b))
        call = {"trans_a": trans_a, "trans_b": trans_b}
        same(dt.gemm(mine[a], mine[b], out_dtype=torch_dtype("float32"), **call), want, f"torch {a} {b}")
        same(dj.gemm(theirs[a], theirs[b], out_dtype="float32", **call), want, f"jax {a} {b}")


@pytest.mark.cuda
@pytest.mark.parametrize("pair", cases.GEMM_PAIRS, ids="-".join)
def test_three_products_on_cuda(pair, cuda):
    """The same bits from both frameworks on the same GPU, native and emulated shapes alike."""
    if not backends("cuda"):
        pytest.skip("this JAX has no GPU backend")
    if reason := cublaslt_mismatch():
        pytest.skip(reason)
    for label, *call in products(pair, SHAPES + cases.GEMM_SHAPES_ALIGNED):
        same(of_torch(pair, *call, "cuda"), of_jax(pair, *call, "cuda"), f"cuda {label}")
