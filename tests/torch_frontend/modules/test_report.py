"""report: what layers ran, against the core's own counts of kernels, eager and compiled."""

from __future__ import annotations

import copy
import io
import json

import pytest
import torch
from torch import nn

import diptych.torch as dt
from diptych.common import CustomRecipe, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
from diptych.core import kernel_table, reset_calls
from torch_frontend.layer_cases import NAMED
from torch_frontend.ranks import needs_gloo
from torch_frontend.tools import RECIPE_NAMES, calls, normal

MX, CURRENT = MXFP8BlockScaling(), Float8CurrentScaling()
PRODUCTS = ["fprop", "dgrad", "wgrad"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 64), nn.LayerNorm(64)
        self.mlp, self.proj = dt.LayerNormMLP(64, 128), dt.LayerNormLinear(64, 64)
        self.up, self.down, self.head = dt.Linear(64, 128), dt.Linear(128, 64), nn.Linear(64, 32)

    def forward(self, tokens):
        return self.head(self.down(self.up(self.proj(self.mlp(self.norm(self.embed(tokens)))))))


LAYERS = ["mlp.fc1", "mlp.fc2", "proj", "up", "down"]
TOKENS = torch.arange(32)


def rows(model):
    return {layer.name: layer for layer in dt.report(model).layers}


def products(row):
    return [p.product for p in row.products]


def counted(model):
    """Holds the report's kernels against the calls that the core has counted since `reset_calls`."""
    reported: dict[str, int] = {}
    for layer in dt.report(model).layers:
        for p in layer.products:
            if p.kernel:
                reported[p.kernel] = reported.get(p.kernel, 0) + 1
    ran = {r["kernel"]: r["calls"] for r in kernel_table() if r["op"] in ("gemm", "grouped_gemm") and r["calls"]}
    assert reported == ran
    return sum(ran.values())


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_reports_the_products_that_the_core_counts(name):
    model = Model().bfloat16()
    assert not dt.report(model).quantized
    reset_calls()
    with dt.autocast(recipe=NAMED[name]):
        model(TOKENS).float().sum().backward()
    assert counted(model) == 15
    found = rows(model)
    assert [n for n, row in found.items() if row.quantized] == LAYERS
    for layer in LAYERS:
        row = found[layer]
        assert row.recipe == NAMED[name] and products(row) == PRODUCTS and row.rows == 32 and not row.compiled
        assert all(p.level == "native" and len(p.formats) == 2 for p in row.products) and row.device == "cpu"
    assert found["mlp.fc2"].weight == (64, 128) and found["up"].weight == (128, 64)
    assert "multiplies by none" in found["embed"].why and "vectors" in found["norm"].why
    assert "not converted" in found["head"].why
    report = dt.report(model)
    assert sum(layer.parameters for layer in report.layers) == sum(p.numel() for p in model.parameters())
    assert report.levels == {"native": 15} and json.loads(json.dumps(report.json()))["levels"] == report.levels
    assert str(report).count("\n") == len(report.layers)


def test_only_products_that_a_backward_computes():
    model = nn.Sequential(dt.Linear(64, 64), dt.Linear(64, 64)).requires_grad_(True)
    x = normal("x", (16, 64))
    with dt.autocast(recipe=CURRENT):
        for frozen, want in ((False, [["fprop", "wgrad"], PRODUCTS]), (True, [["fprop", "wgrad"], ["fprop", "dgrad"]])):
            model[1].weight.requires_grad_(not frozen)
            reset_calls()
            model(x).sum().backward()
            assert [products(row) for row in dt.report(model).layers] == want
            counted(model)
        with torch.no_grad():
            model(x)
    assert [products(row) for row in dt.report(model).layers] == [["fprop"]] * 2
    assert str(dt.report(model)).count("\n") == 1  # equal layers share a line
    assert "0 and 1 more" in str(dt.report(model))


def test_why_layers_ran_in_high_precision():
    model = nn.ModuleList([dt.Linear(64, 64), dt.Linear(64, 64), dt.GroupedLinear(2, 64, 64), dt.LayerNormMLP(64, 64)])
    x, splits = normal("x", (32, 64)), [16, 16]

    def run():
        for layer, given in ((0, (x,)), (2, (x, splits)), (3, (x,))):
            model[layer](*given)
        return {name: row.why for name, row in rows(model).items()}

    why = run()
    assert "has not run" in why["1"]
    assert all("outside of any region" in why[name] for name in ("0", "2", "3.fc1", "3.fc2"))
    with dt.autocast(enabled=False):
        assert "enabled=False" in run()["3.fc2"]
    with dt.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
        assert "calibrating" in run()["2"]
    with dt.autocast(recipe=MX):
        assert {n for n, why in run().items() if not why} == {"0", "2", "3.fc1", "3.fc2"}
    assert not dt.report(model).layers[0].why and rows(model)["2"].products[0].kernel == "cpu.grouped_gemm"


def test_products_that_a_recipe_leaves():
    def factory(role):
        return None if role.tensor == "grad_output" else CURRENT.quantizer(role)

    model = dt.Linear(64, 64, recipe=CustomRecipe(factory))
    reset_calls()
    model(normal("x", (16, 64)).requires_grad_()).sum().backward()
    (row,) = dt.report(model).layers
    assert [(p.product, p.level) for p in row.products] == [
        ("fprop", "native"), ("dgrad", "high precision"), ("wgrad", "high precision")
    ]  # fmt: skip
    assert counted(model) == 1 and "as the recipe says" in str(dt.report(model))


def test_a_users_own_module():
    class Own(dt.QuantizedModule):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            return self.quantized_linear(x, self.w, None, "inner")

    model = nn.Sequential(Own())
    with dt.autocast(recipe=MX):
        model(normal("x", (32, 64))).sum().backward()
    (row,) = dt.report(model).layers
    assert row.name == "0.inner" and row.products[0].kernel == "cpu.gemm" and row.parameters == 64 * 64


def test_compiled_code_is_seen_before_each_run():
    torch._dynamo.reset()
    blocks = nn.ModuleList([dt.Linear(64, 64) for _ in range(3)])
    run = torch.compile(lambda module, x: module(x), backend="aot_eager", fullgraph=True)

    def step(recipe, module, rows=32):
        with dt.autocast(recipe is not None, recipe=recipe):
            run(module, normal("x", (rows, 64)))
        return [(type(row.recipe).__name__, row.compiled) for row in dt.report(blocks).layers]

    none, fp8, mx = ("NoneType", False), ("Float8CurrentScaling", True), ("MXFP8BlockScaling", True)
    assert step(CURRENT, blocks[0]) == [fp8, none, none]
    assert step(MX, blocks[0]) == [mx, none, none]
    assert step(CURRENT, blocks[1]) == [mx, fp8, none]  # it shares a graph, and nothing is traced
    assert step(CURRENT, blocks[0]) == [fp8, fp8, none]
    assert step(None, blocks[1]) == [fp8, none, none]
    assert "enabled=False" in dt.report(blocks).layers[1].why
    blocks[0](normal("x", (32, 64)))
    assert "outside of any region" in dt.report(blocks).layers[0].why


def test_compiled_models_and_rows_that_vary():
    torch._dynamo.reset()
    model = nn.Sequential(dt.Linear(64, 64), nn.ReLU(), dt.Linear(64, 64))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    reset_calls()
    with dt.autocast(recipe=CURRENT):
        compiled(normal("x", (32, 64))).sum().backward()
    assert counted(compiled) == 5
    row = rows(model)["2"]
    assert row.compiled and row.rows is None and products(row) == PRODUCTS


def test_copies_and_files_hold_no_calls():
    recipe = CustomRecipe(lambda role: CURRENT.quantizer(role))  # cannot be pickled
    model = nn.Sequential(dt.Linear(64, 64))
    with dt.autocast(recipe=recipe):
        model(normal("x", (16, 64)))
    torch.save(model, io.BytesIO())
    assert "has not run" in dt.report(copy.deepcopy(model)).layers[0].why and dt.report(model).quantized


def test_bad_input():
    with pytest.raises(TypeError, match=r"report: model must be a torch.nn.Module"):
        dt.report("model")  # type: ignore[arg-type]


def test_converted_layers_of_other_libraries():
    transformers = pytest.importorskip("transformers")
    model = dt.convert(nn.Sequential(transformers.pytorch_utils.Conv1D(96, 64)), MX, verbose=False)
    reset_calls()
    model(normal("x", (32, 64))).sum().backward()
    (row,) = dt.report(model).layers
    assert row.weight == (96, 64) and counted(model) == calls("gemm") == 2


# --- cut layers ---


def on_rank(rank, groups):
    cut = {"tp_group": groups["data"], "sequence_parallel": True, "recipe": MX}
    model = nn.Sequential(
        dt.LayerNormMLP(64, 256, set_parallel_mode=True, **cut),
        dt.Linear(64, 128, parallel_mode="column", **cut),
        dt.Linear(128, 64, parallel_mode="row", **cut),
    )
    reset_calls()
    model(normal("x", (32, 64))).sum().backward()
    counted(model)
    return [(row.weight, row.rows, products(row)) for row in dt.report(model).layers]


@needs_gloo
def test_layers_that_are_cut_over_ranks(ranks):
    want = [((128, 64), 64), ((64, 128), 64), ((64, 64), 64), ((64, 64), 64)]
    assert ranks == [[(*shapes, PRODUCTS) for shapes in want]] * 2
