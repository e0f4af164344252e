"""_kernels: look-ups in the kernel table, against the products that run."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from diptych import core
from diptych.common import RECIPES, Quantizer
from diptych.core import _kernels


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("gemm", _kernels.PRODUCTS)
def test_names_the_kernel_of_each_product(name, gemm):
    recipe = RECIPES[name]
    operands: Any = recipe.operands(gemm)
    options = recipe.gemm_options(gemm)
    found = _kernels.product(gemm, operands, (32, 64, 128), "float32", "cpu", 0, options)
    assert (found["level"], found["kernel"]) == ("native", "cpu.gemm")
    sizes = {"fprop": ((32, 128), (64, 128)), "dgrad": ((32, 128), (128, 64)), "wgrad": ((128, 32), (128, 64))}[gemm]
    if not any(q is not None and (q.needs_scale or q.needs_rng) for q in operands):
        dtype = ml_dtypes.bfloat16  # a Hadamard transform takes it alone
        a, b = [core.quantize(np.ones(shape, dtype), q) for shape, q in zip(sizes, operands, strict=True)]
        core.reset_calls()
        core.gemm(a, b, trans_a=gemm == "wgrad", trans_b=gemm == "fprop", out_dtype="float32", **options._asdict())
        assert [r["kernel"] for r in core.kernel_table() if r["calls"] and r["op"] == "gemm"] == [found["kernel"]]
    formats = [q.format.name for q in operands if isinstance(q, Quantizer)]
    assert _kernels.any_shape("gemm", formats, "cpu", 0) == found


def test_products_in_high_precision_and_missing_kernels():
    recipe = RECIPES["fp8-current"]
    x = recipe.operands("fprop")[0]
    assert x is not None
    given = (32, 32, 32), "float32", "cpu", 0, recipe.gemm_options("fprop")
    assert _kernels.product("fprop", (x, None), *given)["level"] == "high precision"
    assert _kernels.any_shape("no_op", [x.format.name], "cpu", 0)["level"] == "missing"
    assert _kernels.any_shape("gemm", ["no_format"], "cpu", 0)["note"] == "no gemm kernel for no_format"
    assert _kernels.arch_of("cpu", 0) == 0
