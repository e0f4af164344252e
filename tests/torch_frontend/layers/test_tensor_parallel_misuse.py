"""Layers and inputs that cannot be cut over ranks raise an error on each rank, before anything is sent."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import diptych.torch as dt
from diptych.common import (
    CustomRecipe,
    Float8BlockQuantizer,
    Float8CurrentScaling,
    Float8CurrentScalingQuantizer,
    MXFP8Quantizer,
    NVFP4BlockScaling,
    QuantizerRole,
)
from diptych.common.errors import ShapeError, UnsupportedError
from diptych.torch.layers.tensor_parallel import require_whole
from quantizers import InventedQuantizer
from torch_frontend.cut_layers import RECIPES, error_of
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import normal

pytestmark = needs_gloo


class Own(MXFP8Quantizer):
    def quantize_impl(self, x: Any, quantize: Any) -> Any:
        return quantize(x, MXFP8Quantizer(rowwise=self.rowwise, columnwise=self.columnwise))


def own(role: Any) -> Any:
    return Own() if role.tensor == "input" else MXFP8Quantizer()


class Layer(NamedTuple):
    """A layer of `nk`, and a rank's input of the shape `x`; what the error says."""

    recipe: Any
    mode: str
    sequence: bool
    x: tuple[int, ...]
    nk: tuple[int, int]
    says: str
    error: str = "ValueError"


MX, MX2D, BLOCK = (RECIPES[n] for n in ("mxfp8", "mxfp8 2d", "block"))
NV, NV1D, NV2D = (RECIPES[n] for n in ("nvfp4", "nvfp4 1d", "nvfp4 2d"))
CURRENT, DELAYED = RECIPES["current"], RECIPES["delayed"]
BY_ROW = NVFP4BlockScaling(row_scaled_activation=True, disable_stochastic_rounding=True)
OTHER = Float8CurrentScaling(amax_group="other")
COL, ROW = "column", "row"
REFUSED = {
    "a weight's rows": Layer(MX, COL, False, (32, 64), (96, 64), "48 .* of 32"),
    "a weight's columns": Layer(MX, ROW, False, (32, 48), (64, 96), "48 columns.* of 32"),
    "32x32": Layer(MX2D, COL, False, (32, 64), (96, 64), "48 .* of 32"),
    "128x128": Layer(BLOCK, COL, False, (8, 128), (384, 128), "192 .* of 128"),
    "128 columns": Layer(BLOCK, ROW, False, (8, 192), (128, 384), "192 columns.* of 128"),
    "16x16": Layer(NV, COL, False, (16, 64), (48, 64), "24 .* of 16"),
    "16 columns": Layer(NV, ROW, False, (16, 24), (48, 48), "24 columns.* of 16"),
    "32 tokens": Layer(MX, COL, True, (24, 64), (64, 64), "24 rows.* of 32"),
    "128 tokens": Layer(BLOCK, COL, True, (64, 128), (256, 128), "64 rows.* of 128"),
    "16 tokens": Layer(NV1D, COL, True, (8, 64), (64, 64), "8 rows.* of 16"),
    "rotated tokens": Layer(NV, COL, True, (8, 64), (64, 64), "8 rows.* of 16"),
    "32 tokens of a gradient": Layer(MX, ROW, True, (2, 24, 32), (64, 64), "24 rows.* of 32"),
    "16 tokens of a gradient": Layer(NV2D, ROW, True, (16, 32), (64, 64), "8 rows.* of 16"),
    "tokens that ranks cannot share": Layer(CURRENT, ROW, True, (5, 32), (64, 64), "multiple of the 2 ranks.* got 5"),
    "one token without a dimension": Layer(CURRENT, COL, True, (64,), (64, 64), "of one dimension; reshape"),
    "an input that is whole": Layer(CURRENT, ROW, False, (4, 64), (64, 64), "64"),
    "a quantizer of one's own": Layer(CustomRecipe(own), ROW, False, (32, 32), (64, 64), "own", "NotImplementedError"),
    "amaxes of rows": Layer(BY_ROW, ROW, False, (32, 32), (64, 64), "amaxes of rows", "NotImplementedError"),
    "another amax_group": Layer(OTHER, ROW, False, (4, 32), (64, 64), "amax_group"),
    "a reduction that leaves out ranks": Layer(DELAYED, COL, False, (4, 64), (64, 64), "all ranks"),
}


def region_of(what: str) -> dict[str, Any]:
    if what not in ("another amax_group", "a reduction that leaves out ranks"):
        return {}
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return {"amax_groups": {"other": alone}} if what.startswith("another") else {"amax_reduction_group": alone}


def refused(rank: int, groups: Any, what: str) -> tuple[str, str, list[Any]]:
    case = REFUSED[what]
    n, k = case.nk
    cut: dict[str, Any] = {"parallel_mode": case.mode, "tp_group": groups["data"], "sequence_parallel": case.sequence}
    layer = dt.Linear(k, n, dtype=torch.bfloat16, **cut)
    x = torch.ones(case.x, dtype=torch.bfloat16, requires_grad=True)
    return error_of(lambda: layer(x), case.recipe, **region_of(what))


@pytest.mark.parametrize("what", REFUSED)
def test_operands(what, pool, tmp_path):
    case = REFUSED[what]
    for classes, text, seen in pool.run(f"{__name__}:refused", what, into=tmp_path / "made"):
        assert case.error in classes.split() and not seen, (classes, text, seen)
        with pytest.raises(ValueError, match=case.says):
            raise ValueError(text)


HELD = {"input": "takes no quantized input", "weight": "held quantized cannot be cut"}


def held(rank: int, groups: Any, what: str) -> tuple[str, str, list[Any]]:
    layer: Any = dt.Linear(64, 64, bias=False, parallel_mode="column", tp_group=groups["data"])
    x: Any = normal("x", (32, 64))
    quantizer: Any = MX.quantizer(QuantizerRole(tensor=what))
    if what == "input":
        x = dt.quantize(x, quantizer)
    else:
        layer.weight = torch.nn.Parameter(dt.quantize(layer.weight.detach(), quantizer))
    return error_of(lambda: layer(x), MX)


@pytest.mark.parametrize("what", HELD)
def test_operands_that_are_quantized_already(what, pool, tmp_path):
    for classes, text, seen in pool.run(f"{__name__}:held", what, into=tmp_path / "made"):
        assert "NotImplementedError" in classes.split() and HELD[what] in text and not seen, (classes, text)


# --- blocks of what a layer computes, and of gate and value ---


def fc1_in_blocks(role: QuantizerRole) -> Any:
    """128x128 weights in fc1 alone: fc2's blocks would be cut first."""
    return (BLOCK if "fc1" in role.name else CURRENT).quantizer(role)


def output_in_blocks(role: QuantizerRole) -> Any:
    if role.tensor in role.RESULTS:
        return Float8BlockQuantizer() if role.tensor == "output" else None
    return Float8CurrentScalingQuantizer()


def gate_and_value(rank: int, groups: Any) -> tuple[str, str, list[Any]]:
    """A rank has 64 rows of the gate and 64 of the value: 128 rows, of two of the whole weight's blocks."""
    module = dt.LayerNormMLP(128, 128, activation="swiglu", set_parallel_mode=True, tp_group=groups["data"])
    return error_of(lambda: module(torch.ones(8, 128)), CustomRecipe(fc1_in_blocks))


def output(rank: int, groups: Any, recipe: str) -> tuple[str, str, list[Any]]:
    """Results whose blocks ranks share: 24 tokens on each, or 64 columns of 128."""
    columns = recipe == "custom"
    made = CustomRecipe(output_in_blocks, quantize_results=True) if columns else RECIPES[recipe]
    cut: dict[str, Any] = (
        {"parallel_mode": "column"} if columns else {"parallel_mode": "row", "sequence_parallel": True}
    )
    layer = dt.Linear(256, 128, tp_group=groups["data"], **cut)
    x = torch.ones(48, 256 if columns else 128)
    with torch.no_grad():
        return error_of(lambda: layer(x, fp8_output=not columns), made)


@pytest.mark.parametrize(
    ("function", "given"),
    [("gate_and_value", ()), *(("output", (recipe,)) for recipe in ("mxfp8", "block", "nvfp4 2d", "custom"))],
    ids=("gate and value", "mxfp8 output", "block output", "nvfp4 output", "columns of an output"),
)
def test_blocks_that_are_not_operands(function, given, pool, tmp_path):
    for classes, text, seen in pool.run(f"{__name__}:{function}", *given, into=tmp_path / "made"):
        assert "ShapeError" in classes.split() and not seen, (classes, text, seen)


def test_blocks_of_whole_extents_are_not_cut():
    """Nothing is sent: the check needs no ranks."""
    whole_row = InventedQuantizer(block=(1, 0))
    for rows, cols, said in ((None, 64, "columns"), (64, None, "rows")):
        with pytest.raises(UnsupportedError, match=f"cut along its {said}, and a scale of invented .* all {said}"):
            require_whole("linear: the input", whole_row, rows, cols)
    require_whole("linear: the input", whole_row.with_usage(columnwise=False), 64, None)
    square = Float8BlockQuantizer(block_scaling_dim=2)
    require_whole("linear: the weight", square, 256, None)
    with pytest.raises(ShapeError, match="multiple of 128"):
        require_whole("linear: the weight", square, 64, None)
