"""A linear layer under any recipe, composed from the core's NumPy verbs, which `dense` must equal bit for bit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import diptych.jax as dj
from diptych import core
from diptych.common import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer, Quantizer, QuantizerRole
from jax_frontend import tools

GEMMS = {"fprop": ("input", "weight"), "dgrad": ("grad_output", "weight"), "wgrad": ("grad_output", "input")}
NUMBERS = {
    ("input", "fprop"): 0, ("input", "wgrad"): 1, ("weight", "fprop"): 2, ("weight", "dgrad"): 3,
    ("grad_output", "dgrad"): 4, ("grad_output", "wgrad"): 5, ("output", ""): 6, ("grad_input", ""): 7,
    ("grad_weight", ""): 8,
}  # fmt: skip


def operands(shape=(2, 17, 65), n=33, dtype="float32", kernel_dtype=None, bias_dtype=None):
    """x, kernel, bias and the gradient of the output."""
    kernel_dtype = kernel_dtype or dtype
    x, kernel = tools.normal("x", shape, dtype), tools.normal("kernel", (n, shape[-1]), kernel_dtype)
    return x, kernel, tools.normal("bias", (n,), bias_dtype or dtype), tools.normal("dy", (*shape[:-1], n), dtype)


def rng_words(rng: Any, draws: int) -> np.ndarray:
    """int32 [4], `draws` offsets later, by integers of any size."""
    w = [int(v) & 0xFFFFFFFF for v in np.asarray(rng)]
    offset = ((w[3] << 32 | w[2]) + draws) % (1 << 64)
    return np.array([w[0], w[1], offset & 0xFFFFFFFF, offset >> 32], np.uint32).view(np.int32)


class Layer:
    """One forward and backward. `scales`: by slot; what each slot saw is in `amaxes` afterwards."""

    def __init__(self, recipe, scales=None, rng=None, module="linear", name=""):
        self.recipe, self.scales, self.rng, self.role = recipe, scales or {}, rng, (module, name)
        self.amaxes: dict[str, float] = {}
        self.plain: set[str] = set()  # products in high precision, whose last bits are XLA's to choose

    def quantizer(self, tensor: str, gemm: str) -> Quantizer | None:
        if self.recipe.backward_override and gemm != "fprop":
            return None
        return self.recipe.quantizer(QuantizerRole(self.role[0], tensor, gemm, self.role[1]))

    def copy(self, tensor: str, gemm: str, x: np.ndarray, columnwise: bool) -> Any:
        """The copy of one operand, or None: it stays in high precision."""
        quantizer, uses = self.quantizer(tensor, gemm), [g for t, g in NUMBERS if t == tensor]
        if quantizer is None:
            return None
        shared = self.quantizer(tensor, uses[0]) == self.quantizer(tensor, uses[-1])
        given, slot = {}, tensor if shared else f"{tensor}.{gemm}"
        if quantizer.needs_scale:
            given["scale"] = np.asarray(self.scales[slot])
            self.amaxes[slot] = max(self.amaxes.get(slot, 0.0), float(core.amax(x)[0]))
        if quantizer.needs_rng:
            given["rng"] = rng_words(self.rng, 2 * NUMBERS[tensor, uses[0] if shared else gemm])
        return core.quantize(x, quantizer.with_usage(rowwise=not columnwise, columnwise=columnwise), **given)

    def product(self, gemm: str, a: np.ndarray, b: np.ndarray, bias: Any, dtype: Any) -> np.ndarray:
        left, right = GEMMS[gemm]
        trans_a, trans_b = gemm == "wgrad", gemm == "fprop"
        qa, qb = self.copy(left, gemm, a, trans_a), self.copy(right, gemm, b, not trans_b)
        if self.recipe.backward_override == "dequantized" and gemm != "fprop":
            forward = self.copy(right, "fprop", b, False)
            b = b if forward is None else core.dequantize(forward, a.dtype)
        if qa is not None and qb is not None:
            fast = self.recipe.fast_accum(gemm)
            return core.gemm(qa, qb, trans_a=trans_a, trans_b=trans_b, bias=bias, out_dtype=dtype, fast_accum=fast)
        self.plain.add({"fprop": "y", "dgrad": "dx", "wgrad": "dkernel"}[gemm])
        inner = a.dtype if qa is None else b.dtype
        a, b = (v.astype(inner) if q is None else core.dequantize(q, inner) for v, q in ((a, qa), (b, qb)))
        a, b = jnp.asarray(a).reshape(-1, a.shape[-1]), jnp.asarray(b).reshape(-1, b.shape[-1])
        out = (a.T if trans_a else a) @ (b.T if trans_b else b)
        out = out if bias is None else out + jnp.asarray(bias, inner)
        return np.asarray(out.astype(dtype))

    def rounded(self, tensor: str, x: np.ndarray) -> np.ndarray:
        quantizer = self.recipe.quantizer(QuantizerRole(self.role[0], tensor, name=self.role[1]))
        if quantizer is None:
            return x
        given = {"rng": rng_words(self.rng, 2 * NUMBERS[tensor, ""])} if quantizer.needs_rng else {}
        q = core.quantize(x, quantizer.with_usage(rowwise=True, columnwise=False), **given)
        return core.dequantize(q, x.dtype)

    def run(self, x, kernel, bias, dy) -> dict[str, np.ndarray]:
        """Returns y, dx, dkernel and dbias."""
        x, kernel, dy = (np.asarray(v) for v in (x, kernel, dy))
        bias = None if bias is None else np.asarray(bias)
        y = self.rounded("output", self.product("fprop", x, kernel, bias, x.dtype).reshape(dy.shape))
        dx = self.rounded("grad_input", self.product("dgrad", dy, kernel, None, dy.dtype).reshape(x.shape))
        dkernel = self.rounded("grad_weight", self.product("wgrad", dy, x, None, kernel.dtype))
        out = {"y": y, "dx": dx, "dkernel": dkernel}
        return out if bias is None else out | {"dbias": tools.oracle_bias_grad(dy, bias.dtype)}


def run(recipe, x, kernel, bias, dy, **options):
    """Returns the results that `Layer.run` returns, computed by `dense` and its vjp."""
    args = [v for v in (x, kernel, bias) if v is not None]
    y, pull = jax.vjp(lambda *a: dj.dense(*a, recipe=recipe, **options), *args)
    return dict(zip(("y", "dx", "dkernel", "dbias"), (y, *pull(dy)), strict=False))


def same(got, want, label="", plain=()):
    assert got.keys() == want.keys()
    for name in want:
        if name in plain:
            assert got[name].dtype == want[name].dtype
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4, err_msg=f"{label} {name}")
        else:
            tools.same(got[name], want[name], f"{label} {name}")


# --- recipes of a user's own ---

E5M2 = Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2")
E4M3 = Float8CurrentScalingQuantizer()
MX = MXFP8Quantizer()
FP4 = NVFP4Quantizer(stochastic_rounding=True)
