"""Verbs against the oracle, and public verbs with arguments that a user may pass by mistake."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from core import runner

import cases
import oracle
from diptych import core
from diptych.common.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fuzz import good
from fuzz.draw import Draw
from fuzz.raw import ALLOWED, GARBAGE

QUANTIZERS = (
    Float8CurrentScalingQuantizer(),
    Float8CurrentScalingQuantizer(fp8_dtype="float8_e5m2", columnwise=False),
    Float8BlockQuantizer(),
    Float8BlockQuantizer(block_scaling_dim=2, rowwise=False),
    MXFP8Quantizer(),
    MXFP8Quantizer(with_2d_quantization=True),
    Float8Quantizer(),
    NVFP4Quantizer(),
    NVFP4Quantizer(with_rht=True, row_scaled_nvfp4=True),
    NVFP4Quantizer(columnwise=False, stochastic_rounding=True),
)
DTYPES = (*cases.INPUT_DTYPES.values(), np.dtype(np.int32), np.dtype(np.float64), np.dtype(np.bool_),
          np.dtype(np.complex64), np.dtype(">f4"))  # fmt: skip
SHAPES = ((), (1,), (4,), (16,), (48,), (16, 48), (48, 16), (16, 16), (4, 40), (40, 4), (2, 16, 16), (0, 16), (16, 0))


def anything(d: Draw) -> Any:
    if d.maybe(0.3):
        return d.choice(GARBAGE)()
    return np.full(d.choice(SHAPES), d.randrange(4), d.choice(DTYPES))


def nonsense(d: Draw, be: Any) -> None:
    """One public verb with anything for its tensors, dtypes and options: one of four errors, or a result."""
    x, y, flag = anything(d), anything(d), lambda: d.maybe(0.5)
    dtype = d.choice(("float32", "bfloat16", "float16", "int8", "what", None, np.float64, 3))
    maybe = lambda: d.choice((None, None, np.ones(1, np.float32), anything(d)))  # noqa: E731
    qx, qy = d.choice(QUANTIZERS), d.choice(QUANTIZERS)

    def products() -> None:
        rng = d.choice((maybe(), oracle.rng_words(3, 4)))
        a = core.quantize(x, qx, rng=rng, amax=maybe(), columnwise_amax=maybe(), scale=maybe())
        core.dequantize(a, dtype)
        b = core.quantize(y, qy)
        core.gemm(a, b, trans_a=flag(), trans_b=flag(), bias=maybe(), alpha=d.scalar(), out_dtype=dtype,
                  fast_accum=flag())  # fmt: skip

    verbs: tuple[Callable[[], Any], ...] = (
        products,
        lambda: core.amax(x, per_row=flag(), rht=flag(), random_signs=flag()),
        lambda: core.bias_grad(x, dtype),
        lambda: core.hash(x),
        lambda: core.statistics(x),
        lambda: core.scale_update(x, y, reduced=maybe(), margin=d.scalar()),
        lambda: core.permute_map(x, experts=d.choice((None, 1, 4, d.scalar())), rows=d.choice((None, 8, 0))),
        lambda: core.chunk_map(x, y, 8),
        lambda: core.invert_map(x, 8),
        lambda: core.quantize_stack(x, qx),
        lambda: core.grouped_bias_grad(x, y, dtype),
    )
    with contextlib.suppress(*ALLOWED):
        d.choice(verbs)()


CALLS: dict[str, Callable[[Draw, Any], None]] = {**good.CALLS, "public": good.public, "nonsense": nonsense}
_NUMPY = runner.Numpy()


def run(d: Draw, count: Callable[[bool], None]) -> None:
    """One round: a verb, or an op with its gradient."""
    name = d.choice(list(CALLS))
    with good.settings(d):
        CALLS[name](d, _NUMPY)
    count(True)
