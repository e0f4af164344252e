"""RunReport: one line for equal layers, counts by level, and plain values."""

from __future__ import annotations

import json

from diptych.common import MXFP8BlockScaling, NVFP4BlockScaling
from diptych.common.run_report import LayerRun, ProductRun, RunReport

MX = MXFP8BlockScaling()
DECODED = "decoded to bfloat16"


def layer(name, recipe=MX, **fields):
    products = (
        ProductRun("fprop", "native", "fast", ("a", "b"), "not said"),
        ProductRun("dgrad", "emulated", "slow", ("a", "b"), DECODED),
        ProductRun("wgrad", "emulated", "slow", ("a", "b"), DECODED),
    )
    return LayerRun(name, "Linear", 10, recipe, False, "cuda:0", 32, (4, 2), products, **fields)


def test_equal_layers_share_a_line():
    left = [LayerRun(name, "Linear", 5, why="not converted") for name in ("", "head")]
    report = RunReport((layer("a"), layer("b"), layer("c", NVFP4BlockScaling()), *left))
    assert str(report).split("\n") == [
        "report: 30 of 40 parameters (75.0 %) are in layers that ran quantized; products: 3 native, 6 emulated",
        "  quantized      Linear 4x2: a and 1 more; MXFP8BlockScaling on cuda:0, 32 rows; fprop native (fast); "
        "dgrad, wgrad emulated (slow: decoded to bfloat16)",
        "  quantized      Linear 4x2: c; NVFP4BlockScaling on cuda:0, 32 rows; fprop native (fast); "
        "dgrad, wgrad emulated (slow: decoded to bfloat16)",
        "  high precision Linear: the model and 1 more; not converted",
    ]
    assert [row.name for row in report.quantized] == ["a", "b", "c"] and report.high_precision == tuple(left)


def test_plain_values():
    plain = json.loads(json.dumps(RunReport((layer("a"), LayerRun("e", "Embedding", 5, why="why"))).json()))
    assert plain["levels"] == {"native": 1, "emulated": 2}
    first, second = plain["layers"]
    assert (first["recipe"], first["quantized"], first["weight"]) == (repr(MX), True, [4, 2])
    assert first["products"][1]["formats"] == ["a", "b"] and (second["recipe"], second["why"]) == (None, "why")


def test_names_with_braces_and_nothing():
    assert "{x}" in str(RunReport((layer("{x}"),)))
    assert str(RunReport(())) == (
        "report: 0 of 0 parameters (nothing) are in layers that ran quantized; products: none"
    )
