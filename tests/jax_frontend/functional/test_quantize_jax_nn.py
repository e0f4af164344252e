"""The oracle's MXFP8, and ours, against the quantizer behind `jax.nn.scaled_dot_general`, written by others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import diptych.jax as dj
import oracle

theirs = pytest.importorskip("jax._src.cudnn.scaled_matmul_stablehlo", reason="jax.nn's quantizer has moved")
SHAPE = (64, 160)


# The sets in which some blocks can be compared.
VALUES = tuple(v for v in cases.VALUE_SETS if v not in ("zeros", "subnormal_input", "tiny", "all_nan", "inf_places"))


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("values", VALUES)
def test_mxfp8_is_jax_nns(values, dtype):
    """Bit for bit in every block of finite values. Left out are blocks that hold float32 subnormals or lead to some,
    which XLA flushes on the CPU, and blocks of zeros, where jax.nn divides 0 by 0."""
    x = cases.draw(f"jax-nn-{values}-{dtype}", values, SHAPE, dtype)
    config = jax.nn.get_scaled_dot_general_config("mxfp8")
    data, scale = (np.asarray(v).view(np.uint8) for v in theirs.quantize(jnp.asarray(x), config))
    want = oracle.quantize(x, "mxfp8_e4m3", columnwise=False)
    blocks = x.astype(np.float32).reshape(SHAPE[0], -1, 32)
    size = np.abs(blocks)
    with np.errstate(invalid="ignore"):
        plain = np.isfinite(size).all(2) & (size.max(2) >= 448 * 2.0**-125)
        plain &= ((size == 0) | (size >= 2.0**-126)).all(2)
    assert plain.any()
    same = data.reshape(blocks.shape) == want.rowwise_data.reshape(blocks.shape)
    assert (scale.reshape(plain.shape) == want.rowwise_scale_inv)[plain].all(), cases.report_header()
    assert same[plain].all(), cases.report_header()
    ours = dj.quantize(jnp.asarray(x), dj.MXFP8Quantizer(columnwise=False))
    np.testing.assert_array_equal(np.asarray(ours.rowwise_data).view(np.uint8), want.rowwise_data)
    np.testing.assert_array_equal(np.asarray(ours.rowwise_scale_inv).view(np.uint8), want.rowwise_scale_inv)
