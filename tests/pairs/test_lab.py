"""The lab on the pairs: nothing differs by definition, rounding is green, and faults are found at their sites."""

import atexit
import collections
import functools
import pathlib
import re
import shutil
import tempfile

import pytest

from diptych.lab.diff.differ import diff
from diptych.lab.diff.result import GREEN

from .faults import FAULTS, GIVEN
from .lab_runs import trace
from .models import NAMES, draw

# Sites that one framework alone has. torch: activations, attention's probabilities, cosines and sines. Flax: rotated
# keys and queries, and stacks of layers, which have outputs of their own there. GPT-2's position embeddings
# have no axis for the batch in torch.
TORCH_ALONE = r"\.(act|act_fn|intermediate_act_fn|attn_dropout)$|(attn|attention)\[1\]$|rotary_emb\[[01]\]$|[./]wpe$"
FLAX_ALONE = r"[./]wpe$|rotary_emb\[[01]\]$|(/h|/layers)\[0\]$|/layer\[\"last_hidden_state\"\]$|^result:loss$"
# Flax applies a tied head by itself, outside of the model's tree.
TIED = "|:lm_head$"


@functools.cache
def folder():
    path = pathlib.Path(tempfile.mkdtemp(prefix="diptych-pairs-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def right(framework, name, seed=0, **given):
    pair = draw(name, seed, **given)
    place = folder() / f"{name}-{framework}-{seed}-{len(given)}"
    return [trace(pair, framework, dtype, place / dtype) for dtype in ("float32", "float64")]


def faulty(fault, place):
    pair = draw(fault.model, 0, **GIVEN[fault.model])
    return [trace(pair, fault.framework, dtype, place / dtype, fault) for dtype in ("float32", "float64")]


def compared(a, b):
    return diff(a[0], b[0], (a[1], b[1]))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_differs_by_definition_and_rounding_is_green(name, seed):
    result = compared(right("torch", name, seed), right("jax", name, seed))
    findings = [(row.a, cell) for row in result.rows for cell in row.cells if cell.verdict not in GREEN]
    assert result.status == "green" and not findings and not result.first
    kinds = collections.Counter(row.kind for row in result.rows)
    assert min(kinds[k] for k in ("activation", "activation_grad", "parameter", "parameter_grad")) > 20
    assert kinds["parameter"] == kinds["parameter_grad"] == len(draw(name, seed).weights)
    alone = TORCH_ALONE + (TIED if draw(name, seed).config.tie_word_embeddings else "")
    assert [key for key in result.unmatched_a if not re.search(alone, key)] == []
    assert [key for key in result.unmatched_b if not re.search(FLAX_ALONE, key)] == []
    assert not result.ambiguous


@pytest.mark.parametrize("name", NAMES)
def test_operations_of_both_frameworks_are_paired(name, tmp_path):
    """Each framework cuts its modules into operations of its own; none that is paired is a finding."""
    pair = draw(name, 0)
    sides = [
        [trace(pair, framework, dtype, tmp_path / framework / dtype, ops="all") for dtype in ("float32", "float64")]
        for framework in ("torch", "jax")
    ]
    result = compared(*sides)
    assert result.status == "green" and not result.first
    operations = collections.Counter(row.a.rpartition("/")[2].partition("#")[0] for row in result.rows)
    layers = pair.config.num_hidden_layers
    least = {"linear.out": 4 * layers, "linear.weight": 4 * layers, "softmax.out": layers, "matmul.out": 0}
    least["matmul.out"] = 0 if name == "llama" else layers  # Llama's heads are as wide as the sequence is long
    assert {n: count for n, count in least.items() if operations[n] < count} == {}
    assert all(row.transposed for row in result.rows if row.a.endswith("/linear.weight"))


@pytest.mark.parametrize(
    "fault", [pytest.param(f, marks=[pytest.mark.sampled] if f.framework == "jax" else []) for f in FAULTS], ids=str
)
def test_a_fault_is_found_first_at_its_site(fault, tmp_path):
    given = GIVEN[fault.model]
    other = "jax" if fault.framework == "torch" else "torch"
    sides = [faulty(fault, tmp_path), right(other, fault.model, **given)]
    result = compared(*(sides if fault.framework == "torch" else sides[::-1]))
    assert result.status == "differs"
    found = [result.rows[f.row] for f in result.first]
    keys = [row.a if fault.framework == "torch" else row.b for row in found]
    expected = {f"{fault.kind}:{site}" for site in fault.sites}
    assert keys[0].removesuffix('["logits"]') in expected, keys
    assert len(keys) == 1
    assert result.first[0].verdict == "definition"
    before = result.rows[: result.first[0].row]
    if "grad" not in fault.kind:
        assert all(cell.verdict in GREEN for row in before for cell in row.cells), "an alarm before the fault"
    else:
        forward = [row for row in result.rows if not row.kind.endswith("grad")]
        assert all(cell.verdict in GREEN for row in forward for cell in row.cells), "an alarm in the forward pass"
