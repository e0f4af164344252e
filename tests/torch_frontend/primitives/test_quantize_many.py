"""quantize_many: each tensor gets the bits that `quantize` gives it alone, by its own amax or by a given one."""

from __future__ import annotations

import pytest
import torch

from diptych.common import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from diptych.torch.primitives import quantize as quantize_ops
from torch_frontend.tools import normal

SHAPES = ((128, 256), (256, 128), (128, 128))
QUANTIZERS = {
    "fp8": Float8CurrentScalingQuantizer(),
    "block": Float8BlockQuantizer(block_scaling_dim=2),
    "mxfp8": MXFP8Quantizer(),
    "nvfp4": NVFP4Quantizer(),
}
SIDES = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


def bits(made):
    return [[t.contiguous().view(torch.uint8).cpu() for t in buffers] for buffers in made]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("given", [False, True], ids=["own amax", "given amax"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_bits_of_single_calls(name, given, side, device):
    quantizer = QUANTIZERS[name].with_usage(rowwise=SIDES[side][0], columnwise=SIDES[side][1])
    two_level = quantizer.format.two_level
    if given and not (quantizer.format.one_scale or two_level):
        with pytest.raises(ValueError, match="amax"):
            quantize_ops.quantize_many(
                [normal("x", SHAPES[0], device=device)], quantizer, [torch.ones(1, device=device)]
            )
        return
    xs = [normal(f"many {i}", shape, "bfloat16", device) for i, shape in enumerate(SHAPES)]
    amaxes = [torch.full((1,), 7.0 + i, device=device) for i in range(len(xs))] if given else None
    made = quantize_ops.quantize_many(xs, quantizer, amaxes)
    rowwise, columnwise = SIDES[side]
    want = []
    for i, x in enumerate(xs):
        amax = None if amaxes is None else amaxes[i]
        of_rows, of_columns = (amax if rowwise or not two_level else None), (amax if columnwise and two_level else None)
        want.append(quantize_ops.quantize(x, quantizer, of_rows, of_columns))
    for ours, alone in zip(bits(made), bits(want), strict=True):
        assert len(ours) == len(alone) and all(map(torch.equal, ours, alone))
