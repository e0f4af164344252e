"""`diptych bisect` of code between modules, arguments of any structure, and what no trace can hold."""

from __future__ import annotations

import functools

import bisect_tools
import numpy as np
import pytest
from bisect_models import WIDTH
from bisect_tools import of, shown
from sweeps import others_slow

run = functools.partial(bisect_tools.run, module="bisect_code_models")


@pytest.mark.parametrize("b", others_slow(("attention_heads", "attention_between"), ("attention_heads",)))
def test_one_tensor_that_is_several_arguments_stays_one(b, files, tmp_path, capsys):
    assert run("attention_right", b, files / "rows.npz", "--out", tmp_path / "show.py") == 1
    output = capsys.readouterr().out
    assert of(output) == ("att[0]", True)
    # Had the module got several tensors, its products would be others, and the first of them would be named.
    assert "whose result B does not have: result:att/matmul.out" in output
    assert "  B has instead: matmul(" in output and "\n    of other operands: a differs (" in output
    assert "return module(y0, y0, y0" in (tmp_path / "show.py").read_text()
    assert shown(tmp_path / "show.py") > 1e-3


def test_a_tensor_that_is_put_in_place_of_one_is_one(files, tmp_path, capsys):
    assert run("sharing_right", "sharing_between", files / "rows.npz") == 1
    assert of(capsys.readouterr().out) == ("shared[0]", False), "given A's inputs, which are other values, it agrees"
    assert run("sharing_right", "sharing_copied", files / "rows.npz", "--out", tmp_path / "show.py") == 1
    assert of(capsys.readouterr().out) == ("shared[0]", True)
    assert shown(tmp_path / "show.py") == pytest.approx(0.5), "equal tensors are one in A alone"


def test_operations_are_those_of_the_code_that_makes_the_difference(files, capsys):
    assert run("between_right", "between_wrong", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert of(output) == ("head", False)
    assert "No single operation" in output, "neither of the module, which agrees, nor of what follows it"


def test_outputs_that_traces_cannot_hold_are_named(files, capsys):
    said = (
        "has outputs of modules that traces cannot hold; they are not compared, and count as code between others: mix"
    )
    assert run("transformed_right", "transformed_right", files / "rows.npz") == 0
    output = capsys.readouterr().out
    assert f"note: A {said} (complex64)" in output and f"note: B {said} (complex64)" in output
    assert run("transformed_right", "transformed_wrong", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert said in output and of(output) == ("last", False) and "No single operation" in output


@pytest.mark.sampled
def test_outputs_of_jax_that_traces_cannot_hold_are_named(files, capsys):
    run("linen_transformed", "linen_transformed", files / "rows.npz")
    assert "note: A has outputs of modules that traces cannot hold" in (output := capsys.readouterr().out)
    assert "others: mix (complex64)" in output


RECURRENT = {
    "recurrent_right": (),
    "recurrent_order": (
        'model.cell["h"]',
        'its input [1]["h"] is the same',
        "The module itself",
        "model.cell/mul.out",
        "of other operands: a differs",
    ),
    "recurrent_gate": ('model.cell["h"]', "argument gated of model.cell is True in A, False in B"),
    "recurrent_second": ("model.cell.ih#1", "That code is in model in A, model in B", "No single operation"),
}


@pytest.mark.parametrize("b", others_slow(RECURRENT, ("recurrent_order",)))
def test_recurrences_with_structures_as_arguments(b, tmp_path, capsys):
    x = np.random.default_rng(0).standard_normal((4, 2, WIDTH), np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    texts = RECURRENT[b]
    assert run("recurrent_right", b, tmp_path / "x.npz", "--out", tmp_path / "show.py") == bool(texts)
    output = capsys.readouterr().out
    assert all(text in output for text in texts), output
    if texts:
        assert shown(tmp_path / "show.py") > 1e-3


def test_fields_of_arguments_are_inputs(files, capsys):
    assert run("batching_right", "batching_wrong", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert of(output) == ("batched", False)
    assert 'its input [0]["pair"]["x"] is the same' in output and 'its input [0]["pair"]["y"] differs (1)' in output


@pytest.mark.sampled
def test_inputs_that_jax_does_not_show_are_named(files, capsys):
    assert run("linen_batching", "linen_batching_wrong", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert "its input [0] is the same" in output and "[1] of B: without a partner in A" in output
    assert "Whether the module itself makes the difference is not known" in output


def test_inputs_without_a_partner_are_named(files, capsys):
    assert run("masking_right", "masking_ones", files / "rows.npz") == 0
    capsys.readouterr()
    assert run("masking_right", "masking_wrong", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert "[1] of B: without a partner in A" in output
    assert "Whether the module itself makes the difference is not known" in output
    assert "The module itself makes" not in output


def test_modules_that_are_given_no_array(files, tmp_path, capsys):
    assert run("positions_right", "positions_wrong", files / "rows.npz", "--out", tmp_path / "show.py") == 1
    assert of(capsys.readouterr().out) == ("table", True)
    assert shown(tmp_path / "show.py") > 1e-3 and "get_submodule('table')" in (tmp_path / "show.py").read_text()
    given = ("positions_inside", "positions_inside_wrong", files / "rows.npz", "--out", tmp_path / "show.py")
    assert run(*given) == 1
    assert of(output := capsys.readouterr().out) == ("table/rows", False)
    assert "That code is in table in A, table in B" in output and "get_submodule('table')" in given[-1].read_text()


def test_outputs_of_other_shapes_are_a_difference(files, capsys):
    assert run("positions_right", "positions_more", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert "only in A: table" in output and "The models differ: outputs of one name have other shapes" in output


@pytest.mark.sampled
def test_code_that_is_in_no_module(files, capsys):
    assert run("two_models", "two_models_wrong", files / "rows.npz") == 1
    output = capsys.readouterr().out
    assert of(output) == ("(model)#1", False)
    assert "That code is in no module: in the function that runs them." in output and "No single operation" in output
