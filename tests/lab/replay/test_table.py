import json

import pytest

from diptych.common import RECIPES, linear_plan
from diptych.common.quantizers import MXFP8Quantizer
from diptych.lab.replay import table
from diptych.lab.replay.reference import _ROWS
from diptych.lab.traces.schema import Operation

CONV = {
    "layout": "NC01,OI01,NC01", "strides": (1, 2), "padding": ((0, 1), (2, 2)), "dilation": (1, 1),
    "input_dilation": (1, 3), "groups": 2,
}  # fmt: skip

BAD_CONVS = [
    ("strides", (0, 1)), ("dilation", (1, 2**40)), ("input_dilation", (-1, 1)), ("groups", 0),
    ("padding", ((0, 2**70),)), ("layout", "NC01,OI01"), ("layout", "NC0a,OI0a,NC0a"), ("layout", "NC00,OI01,NC01"),
    ("layout", "NC,OI,NC"),
]  # fmt: skip
BAD_EQUATIONS = ["", "ab,bc", "ab,bc->ac->", "...a,ab->...b", "a,b,c->abc", "ab, bc->ac", "ab,bc->ac\n"]


def quantize(quantizer):
    return {"quantizer": quantizer, "source": ("norm", "layernorm", True, False), "column_sum": "float32"}


def test_every_row_of_the_frameworks_has_a_reference():
    assert set(_ROWS) == {name for name, row in table.TABLE.items() if not row.own}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("conv", CONV),
        ("silu", {}),
        ("layer_norm", {"axes": 2, "eps": 1e-5}),
        ("cross_entropy", {"axis": -1, "reduction": "mean", "ignore_index": None}),
        ("quantize", quantize(MXFP8Quantizer(rowwise=True, columnwise=False))),
    ],
)
def test_options_come_back(name, options):
    text = table.encoded(name, options)
    assert table.decoded(name, text) == options
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_every_recipes_quantizers_come_back(recipe):
    plan = linear_plan(recipe)
    for tensor in (plan.input, plan.weight, plan.grad_output):
        for quantizer in (tensor.rowwise, tensor.columnwise):
            if quantizer is not None:
                options = quantize(quantizer)
                assert table.decoded("quantize", table.encoded("quantize", options)) == options


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("fft", "{}", "'fft' is no operation that can be computed again; there are quantize, "),
        ("silu", '{"x":1}', "silu: its options are none, got x"),
        ("gelu", "{}", "gelu: its options are approximate, got none"),
        ("gelu", '{"approximate":1}', "option approximate cannot be '1'"),
        ("gelu", '{"approximate":true,"approximate":true}', "twice"),
        ("gelu", "[true]", "must be a JSON object"),
        ("gelu", "{", "is no JSON"),
        ("softmax", '{"axis":NaN}', "is no JSON"),
        ("conv", json.dumps({**CONV, "padding": [[0]] * 2}), "option padding cannot be"),
        ("cross_entropy", '{"axis":1,"ignore_index":0,"reduction":"max"}', "option reduction cannot be 'max'"),
        ("quantize", '{"column_sum":"","quantizer":{"class":"os.system","fields":{}},"source":null}', "os.system"),
        ("quantize", '{"column_sum":"","quantizer":1,"source":null}', "quantizer must be written as"),
        *[("conv", json.dumps({**CONV, name: value}), f"option {name} cannot be") for name, value in BAD_CONVS],
        *[("matmul", json.dumps({"equation": e, "dtype": "float32"}), "option equation") for e in BAD_EQUATIONS],
        *[("linear", json.dumps({"dtype": d}), "option dtype cannot be") for d in ("manual_seed", "complex64", "")],
        *[("layer_norm", f'{{"axes":1,"eps":{eps}}}', "option eps cannot be") for eps in ("1e999", "1" + "0" * 400)],
        *[("rms_norm", f'{{"axes":{axes},"eps":1e-6}}', "option axes cannot be") for axes in (0, -1, 2**70, "true")],
        ("softmax", f'{{"axis":{2**70}}}', "option axis cannot be"),
        ("chunk_map", f'{{"tokens":{2**45}}}', "option tokens cannot be"),
    ],
)
def test_foreign_options_are_refused(name, text, why):
    with pytest.raises(ValueError, match=why):
        table.decoded(name, text)


def test_options_that_a_row_lacks_are_not_written():
    with pytest.raises(ValueError, match=r"option axes cannot be .1\.0."):
        table.encoded("rms_norm", {"axes": 1.0, "eps": 1e-6})


def test_options_that_differ_are_named():
    a, b = (Operation("layer_norm", table.encoded("layer_norm", {"axes": 1, "eps": eps})) for eps in (1e-6, 1e-5))
    assert table.options_apart(a, b) == ("eps: 1e-06, 1e-05",)
    assert table.options_apart(a, a) == table.options_apart(a, None) == table.options_apart(None, b) == ()
    assert table.options_apart(a, Operation("rms_norm", b.options)) == ()
    assert table.options_apart(a, Operation("layer_norm", "{")) == table.options_apart(Operation("add", "1"), a) == ()
