"""The script that runs TransformerEngine's tests, on a few tests that are written here in their form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "te_suite.py"
# Tests of each outcome, by the name of the outcome.
TESTS = """
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.pytorch import DotProductAttention, Float8Tensor, MXFP8Quantizer
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.quantization import FP8GlobalStateManager, RecipeState
from transformer_engine.pytorch.module.base import get_dummy_wgrad
from transformer_engine.pytorch.utils import init_method_normal
import transformer_engine_torch as tex


def test_passed_step():
    FP8GlobalStateManager.reset()
    layer = te.Linear(32, 32, init_method=init_method_normal(0.5), device="cuda").cuda()
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling()):
        layer(torch.randn(32, 32, device="cuda")).sum().backward()
    assert layer.weight.grad is not None and layer.weight.std() > 0.3


def test_passed_buffers():
    q = MXFP8Quantizer(tex.DType.kFloat8E4M3)(torch.ones(32, 64, device="cuda"))
    assert isinstance(q, Float8Tensor) and q._rowwise_data.dtype == torch.uint8
    assert q._rowwise_scale_inv.shape == (32, 2)


def test_passed_changed_recipe():
    changed = recipe.NVFP4BlockScaling()
    changed.disable_rht = True
    assert changed.disable_rht and changed.backward_override is None and changed.nvfp4_4over6 == "none"


def test_passed_grouped():
    layer = te.GroupedLinear(2, 32, 32)
    layer(torch.randn(64, 32), [32, 32]).sum().backward()
    assert [p.shape[0] for p in layer.parameters()] == [32] * 4 and layer.weight1.grad.shape == (32, 32)


def test_absent_name():
    DotProductAttention(1, 2)


def test_absent_argument():
    te.Linear(32, 32, ub_overlap_ag=True)


def test_absent_recipe():
    with te.autocast(recipe=recipe.NVFP4BlockScaling(nvfp4_4over6="all")):
        te.Linear(32, 32)(torch.randn(32, 32))


def test_internals_function():
    get_dummy_wgrad([1], torch.float32)


def test_internals_attribute():
    te.Linear(32, 32).fp8_meta


def test_meaning_of_a_value():
    MXFP8Quantizer(tex.DType.kFloat8E4M3).value.rowwise = False


def test_other():
    assert 1 == 2


def test_skipped():
    pytest.skip("not here")
"""
CLASSES = {
    "passed": "passed", "absent": "absent, said so", "internals": "reads TE's internals",
    "meaning": "other meaning, documented", "other": "other", "skipped": "skipped",
}  # fmt: skip


def test_each_outcome_is_counted_in_its_class(tmp_path):
    folder, out = tmp_path / "tests" / "pytorch", tmp_path / "out.json"
    folder.mkdir(parents=True)
    (folder / "test_them.py").write_text(TESTS)
    call = [sys.executable, str(SCRIPT), str(tmp_path), "test_them.py", "--json", str(out)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    made = json.loads(out.read_text())["test_them.py"]
    assert len(made) == TESTS.count("def test_")
    for test, (kind, words) in made.items():
        assert kind == CLASSES[test.rpartition("test_")[2].split("_")[0]], (test, kind, words)
    assert "test_them.py: 4 of 11 pass, 1 are skipped" in done.stdout
    assert [line.split() for line in done.stdout.splitlines()[1:2]] == [["3", "absent,", "said", "so"]]


def test_a_folder_without_the_tests_is_named(tmp_path):
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "has no tests/pytorch" in done.stderr
