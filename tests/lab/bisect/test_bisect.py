"""`diptych bisect`: right ports, planted faults, scripts, and wrong arguments."""

from __future__ import annotations

import json
import os
import pathlib
import runpy
import sys

import bisect_models as models
import numpy as np
import pytest
import torch
from bisect_tools import of, run, shown

from diptych.lab import cli, frontend
from diptych.lab.bisect.forward import Inputs

OPERATIONS = {
    "epsilon": (
        "h.1.ln/layer_norm.out",
        "layer_norm(axes=1, eps=1e-05)",
        "B has instead: layer_norm(axes=1, eps=0.0001)",
    ),
    "gelu": ("h.1.act/gelu.out", "gelu(approximate=False)", "B has instead: gelu(approximate=True)", "gives the same"),
    "scale": ("First operation of A whose result B does not have: result:h.1.attn/softmax.out",),
    "mask": ("First operation of A whose result B does not have: result:h.1.attn/softmax.out",),
    "heads": (
        "First operation of A whose result B does not have: result:h.1.attn/matmul.out",
        "of operands with the same elements, in another order",
    ),
    "bias": (
        "First operation of A whose result B does not have: result:h.1.fc/linear.out",
        "of other operands: bias is missing",
    ),
    "transposed": ("First operation of A whose result B does not have: result:h.1.attn.v/linear.out",),
    "residual": ("No single operation",),  # what B does is no row of the table
}
"""The expected lines about the operations in the module that makes a difference."""


@pytest.mark.parametrize(
    "pair", [("torch_right", "torch_right"), pytest.param(("torch_right", "linen_right"), marks=pytest.mark.sampled)]
)
def test_right_ports_make_no_difference(pair, files, capsys):
    assert run(*pair, files / "tokens.npz", "--json", "-") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "\nNothing makes a difference (2" in err and (found["differs"], found["found"]) == (False, None)
    assert len(found["outputs"]) > 20 and not any(site["differs"] for site in found["outputs"])


@pytest.mark.parametrize("fault", models.FAULTS)
def test_faults_in_torch(fault, files, tmp_path, capsys):
    written = "--out", tmp_path / "show.py", "--json", tmp_path / "found.json"
    assert run("torch_right", f"torch_{fault}", files / "tokens.npz", *written) == 1
    output = capsys.readouterr().out
    path, itself = models.FAULTS[fault]
    assert of(output) == (path, itself)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["differs"] and found["found"]["itself"] == itself
    assert found["found"]["a"] == f"activation:{path.replace('/', '.')}"
    assert len(found["operations"]) == output.count("First operation of")
    for said in OPERATIONS.get(fault, ()):
        assert said in output
    text = (tmp_path / "show.py").read_text()
    called = path if itself else path.rpartition("/")[0]
    assert f"get_submodule({called.replace('/', '.')!r})" in text and "diptych." not in text.replace("diptych.py", "")


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["gelu", "transposed"])
def test_faults_in_linen(fault, files, tmp_path, capsys):
    assert run("torch_right", f"linen_{fault}", files / "tokens.npz", "--out", tmp_path / "show.py") == 1
    output = capsys.readouterr().out
    # A GELU is a module in torch alone, so that a wrong one stands before the product that follows it.
    assert of(output) == (("h/1/proj", False) if fault == "gelu" else models.FAULTS[fault])
    assert all(said in output for said in OPERATIONS[fault])
    assert shown(tmp_path / "show.py") > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fault", models.FAULTS)
@pytest.mark.parametrize("frameworks", [("torch", "linen"), ("linen", "torch"), ("linen", "linen")])
def test_faults_between_frameworks(fault, frameworks, files, tmp_path, capsys):
    a, b = frameworks
    assert run(f"{a}_right", f"{b}_{fault}", files / "tokens.npz", "--out", tmp_path / "show.py") == 1
    assert of(capsys.readouterr().out) == (("h/1/proj", False) if fault == "gelu" else models.FAULTS[fault])


@pytest.mark.sampled
def test_nnx(files, tmp_path, capsys):
    assert run("nnx_right", "torch_mlp", files / "rows.npz") == 0
    capsys.readouterr()
    assert run("torch_mlp", "nnx_epsilon", files / "rows.npz", "--out", tmp_path / "show.py") == 1
    assert of(capsys.readouterr().out) == ("ln", True)
    assert shown(tmp_path / "show.py") > 1e-6


@pytest.mark.sampled
def test_equinox_under_vmap(files, tmp_path, capsys):
    assert run("equinox_right", "equinox_epsilon", files / "rows.npz", "--out", tmp_path / "show.py") == 1
    assert of(capsys.readouterr().out) == ("mlp/ln", True)
    assert "jax.vmap" in (tmp_path / "show.py").read_text() and shown(tmp_path / "show.py") > 1e-6


@pytest.mark.sampled
def test_iterations_of_a_scan_are_fed_one_by_one(files, tmp_path, capsys):
    assert run("scanned_right", "scanned_iteration", files / "tokens.npz") == 1
    output = capsys.readouterr().out
    assert "The first that makes a difference: h/block/fc#1 in A" in output
    lines = [line for line in output.splitlines() if line.startswith("!")]
    assert [line.split()[-1] for line in lines] == ["h/block/fc#1"], "the fault is of the second iteration alone"
    assert "def compare" in output


def test_precisions_may_differ(files, capsys):
    assert run("torch_right", "torch_bfloat16", files / "tokens.npz") == 0


def test_arrays_of_a_large_script_are_beside_it(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("diptych.lab.bisect.command.LARGEST_TEXT", 10)
    assert run("torch_right", "torch_bias", files / "tokens.npz") == 1
    assert capsys.readouterr().out.endswith("take more than 10 bytes: --out FILE.py writes it to files.\n")
    assert run("torch_right", "torch_bias", files / "tokens.npz", "--out", tmp_path / "show.py") == 1
    assert sorted(os.listdir(tmp_path)) == ["show.py", "show_data.npz"]
    assert shown(tmp_path / "show.py", alone=True) > 1e-3


def test_a_fault_before_a_block_is_in_the_code_around_it(files, tmp_path, capsys):
    assert run("torch_right", "torch_between", files / "tokens.npz", "--out", tmp_path / "show.py") == 1
    output = capsys.readouterr().out
    assert of(output) == ("h/1/ln", False)
    assert "That code is in the model itself in A, the model itself in B, whose inputs are the same." in output
    assert "First operation of B whose result A does not have: result:(model)/add.out" in output
    assert "get_submodule" not in (tmp_path / "show.py").read_text()


def test_scripts_quote_names_and_compare_nan(files, tmp_path, capsys):
    out = tmp_path / 'show "\\N".py'
    before = list(sys.path)
    assert run("odd_right", "odd_wrong", files / "rows.npz", "--out", out) == 1
    assert sys.path == before
    assert "get_submodule" in out.read_text()
    capsys.readouterr()
    runpy.run_path(str(out), run_name="__main__")
    assert "relative rms of the difference 0.01; largest at" in capsys.readouterr().out


def test_modules_that_do_not_run_in_all_passes(files, capsys):
    assert run("Skipping", "skipping_fed", files / "rows.npz") == 1
    assert "B, given A's values, is inf (relative rms) from A" in capsys.readouterr().out
    assert run("Skipping", "skipping_moved", files / "rows.npz") == 0


def test_random_numbers_are_the_same_in_all_passes(files, capsys):
    state = torch.get_rng_state()
    assert run("random", "random", files / "rows.npz") == 0
    capsys.readouterr()
    assert run("random_off", "random", files / "rows.npz") == 1
    assert of(capsys.readouterr().out) == ("1", True)
    torch.set_rng_state(state)
    feeder = frontend.require("torch", "cpu").feeder(models.random(), "cpu")
    state = torch.get_rng_state()
    feeder(Inputs((models.rows(),), {}), {})
    assert torch.equal(torch.get_rng_state(), state)


def test_modules_of_fast_paths_are_seen(files, tmp_path, capsys):
    x = np.random.default_rng(0).standard_normal((2, 5, models.WIDTH), np.float32)
    np.savez(tmp_path / "x.npz", src=x, src_key_padding_mask=np.arange(5) >= [[3], [5]])
    assert run("masked", "masked", tmp_path / "x.npz") == 0
    assert "layers.0.self_attn" in capsys.readouterr().out
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.sampled
def test_states_of_a_pass_are_set_back(files, capsys):
    assert run("Queue", "Queue", files / "rows.npz") == 0


def test_packed_sequences(tmp_path, capsys):
    """A module that gets one is found, although a script cannot hold its argument as text."""
    np.savez(tmp_path / "x.npz", arg0=models.rows()[:2])
    assert run("Packed", "Packed", tmp_path / "x.npz") == 0
    assert run("Packed", "packed_moved", tmp_path / "x.npz") == 1
    out = capsys.readouterr().out
    assert 'The first that makes a difference: lstm[0]["data"] in A' in out and "compare(read())" in out


def test_arguments_of_any_name(files, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", model=models.rows())
    assert run("nnx_named", "nnx_named", tmp_path / "x.npz") == 0


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("nowhere_at_all:f", "nowhere_at_all cannot be imported: ModuleNotFoundError"),
        ("bisect_models", "is written as package.module:name"),
        ("bisect_models:absent", "bisect_models has no absent"),
        ("bisect_models:number", "must name a function that returns a model, got int"),
        ("bisect_models:failing", "raised RuntimeError: no weights here"),
        ("bisect_models:exits", "raised SystemExit: 0"),
        ("bisect_models:Exits", "(bisect_models:Exits) cannot be run in torch"),
        ("bisect_models:returns_number", "must return a model that can be called, got int"),
    ],
)
def test_wrong_factories(factory, message, files, capsys):
    given = ["bisect", "--a", "bisect_models:torch_right", "--b", factory, "--inputs", str(files / "tokens.npz")]
    assert cli.main(given) == cli.BAD_INPUT
    error = capsys.readouterr().err
    assert message in error and error.startswith("diptych bisect: error: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, "has no arrays"),
        ({"arg1": np.zeros(1)}, "positional arguments must be arg0, arg1, ..., got arg1"),
        ({"a b": np.zeros(1)}, "'a b' is no name of an argument"),
        ({"x": np.zeros(1, complex)}, "x: arrays of complex128 cannot be inputs"),
        ({"x": np.zeros(1, ">f4")}, "x: arrays of >f4 cannot be inputs"),
        ({"x": np.array(["a"])}, "cannot be inputs"),
        ({"other": np.zeros(1)}, "A (bisect_models:torch_right) cannot be run in torch on the inputs: TypeError"),
    ],
)
def test_wrong_inputs(arrays, message, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **arrays)
    assert run("torch_right", "torch_right", tmp_path / "x.npz") == cli.BAD_INPUT
    assert message in capsys.readouterr().err


def test_damaged_inputs(tmp_path, files, capsys):
    whole = (files / "tokens.npz").read_bytes()
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez(tmp_path / "objects.npz", x=np.array([{}]))
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.npz").write_bytes(whole[:150] + bytes([whole[150] ^ 1]) + whole[151:])
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "empty.npz").write_bytes(b"")
    for name in ("one.npy", "objects.npz", "cut.npz", "flipped.npz", "text.npz", "empty.npz", "absent.npz", "."):
        assert run("torch_right", "torch_right", tmp_path / name) == cli.BAD_INPUT, name
        assert str(tmp_path) in capsys.readouterr().err


def test_wrong_options(tmp_path, files, capsys):
    tokens = files / "tokens.npz"
    assert run("torch_right", "torch_right", tokens, "--framework-b", "jax") == cli.BAD_INPUT
    assert "--framework-b jax: bisect_models:torch_right returned Model" in capsys.readouterr().err
    for folder in (tmp_path, ".", "..", "/"):
        assert run("torch_right", "torch_right", tokens, "--out", folder) == cli.BAD_INPUT
        assert "is a folder, where a file is to be written" in capsys.readouterr().err
    source = pathlib.Path(models.__file__)
    before = source.read_bytes()
    assert run("torch_right", "torch_right", tokens, "--out", source) == cli.BAD_INPUT
    assert "would replace the source of the module bisect_models" in capsys.readouterr().err
    assert source.read_bytes() == before
    copy = tmp_path / "x_data.npz"
    copy.write_bytes(tokens.read_bytes())
    assert run("torch_right", "torch_right", copy, "--out", tmp_path / "x.py") == cli.BAD_INPUT
    assert "would replace --inputs" in capsys.readouterr().err
    (tmp_path / "map.json").write_text('{"nothing": "h.0"}')
    given = ("torch_right", "torch_right", tokens, "--map", tmp_path / "map.json")
    assert run(*given, "--out", tmp_path / "map.json") == cli.BAD_INPUT
    assert "would replace --map" in capsys.readouterr().err
    assert run("torch_right", "torch_right", tokens, "--map", tmp_path / "map.json") == cli.BAD_INPUT
    assert "no name of A is left for this rule" in capsys.readouterr().err
    assert run("torch_mlp", "equinox_right", tokens) == cli.BAD_INPUT  # tokens are no rows


@pytest.mark.parametrize(
    "rows", [np.full((2, models.WIDTH), np.nan, np.float32), np.zeros((0, models.WIDTH), np.float32)]
)
def test_inputs_that_show_nothing(rows, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", arg0=rows)
    assert run("torch_mlp", "torch_mlp", tmp_path / "x.npz") == cli.BAD_INPUT
    assert "no module output of A has a finite element" in capsys.readouterr().err


def test_functions_without_modules(files, capsys):
    assert run("torch_mlp", "without_modules", files / "rows.npz") == cli.BAD_INPUT
    message = "no module output of bisect_models:torch_mlp was matched with one of bisect_models:without_modules"
    assert message in capsys.readouterr().err


@pytest.mark.sampled
def test_branches_cannot_be_fed(files, capsys):
    assert run("torch_right", "conditional", files / "tokens.npz") == cli.BAD_INPUT
    assert "activations inside of cond cannot be replaced" in capsys.readouterr().err


@pytest.mark.sampled
def test_a_map_pairs_what_names_do_not(files, tmp_path, capsys):
    (tmp_path / "map.json").write_text('{"mlp/*": "*"}')
    assert run("equinox_right", "torch_mlp", files / "rows.npz", "--map", tmp_path / "map.json") == 0
