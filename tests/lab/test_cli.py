import json
import subprocess
import sys

import pytest

from diptych.common import RECIPES, format_by_name, linear_plan
from diptych.lab import cli, frontend

MODEL = ["--width", "32", "--layers", "1", "--heads", "2", "--seq", "16"]
TINY = [*MODEL, "--batch", "2", "--eval-batches", "1", "--no-compile", "--threads", "1", "--quiet"]


def refused(argv, capsys) -> str:
    """The message of a command that must refuse its arguments."""
    try:
        status = cli.main(argv)
    except SystemExit as e:
        status = e.code
    assert status == 2
    message = capsys.readouterr().err
    assert "error: " in message and "Traceback" not in message
    return message


@pytest.mark.parametrize("command", [[], ["doctor"], ["train"], ["compare"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as e:
        cli.main([*command, "--help"])
    assert e.value.code == 0
    assert "usage: diptych" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["doctor", "--loud"], "--loud"),
        (["train"], "--framework"),
        (["train", "--framework", "numpy"], "numpy"),
        (["train", "--framework", "torch", "--recipe", "fp4"], "fp4"),
        (["train", "--framework", "torch", "--steps", "0"], "must be at least 1, got 0"),
        (["train", "--framework", "torch", "--steps", "many"], "'many' is not a whole number"),
        (["train", "--framework", "torch", "--lr", "nan"], "must be positive and finite"),
        (["train", "--framework", "torch", "--width", "30"], "width 30 is not a multiple of heads 4"),
        (["train", "--framework", "torch", "--data", "/no/such/place"], "/no/such/place: no such file"),
        (["train", "--framework", "jax", "--resume", "/no/such/run"], "/no/such/run: no such checkpoint"),
        (["compare", "--recipe", "none"], "none"),
        (["compare", "--data", "/no/such/place"], "/no/such/place: no such file"),
        (["compare", "--corrupt-scale", "numpy"], "numpy"),
        (["compare", "--seed", "-1"], "must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_named(argv, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named in refused(argv, capsys)


def test_cuda_without_a_cuda_build_says_so(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("diptych.core.build_info", lambda: {"cuda": False})
    assert "no CUDA backend" in refused(["train", "--framework", "torch", "--device", "cuda"], capsys)


def test_out_that_is_a_file(capsys, tmp_path, text):
    taken = tmp_path / "taken"
    taken.write_text("")
    argv = ["train", "--framework", "torch", "--data", str(text), "--out", str(taken), *TINY]
    assert "is not a folder" in refused(argv, capsys)


def test_a_frontend_that_does_not_load_is_named(capsys, monkeypatch, tmp_path):
    class Broken:
        name = "jax"

        def load(self):
            raise ImportError("no module named jax")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(frontend.importlib.metadata, "entry_points", lambda group: [Broken()])
    message = refused(["train", "--framework", "jax"], capsys)
    assert "no module named jax" in message and "pip install 'diptych[jax]'" in message
    assert cli.main(["doctor"]) == 0
    assert "not usable: ImportError: no module named jax" in capsys.readouterr().out


def test_doctor_without_any_frontend(capsys, monkeypatch):
    monkeypatch.setattr(frontend.importlib.metadata, "entry_points", lambda group: [])
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["frontends"] == {}
    assert {r["recipe"] for r in found["recipes"]} == set(RECIPES)


def test_doctor(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["frontends"]) == {"torch", "jax"}
    assert all(f["usable"] for f in found["frontends"].values())
    assert "jaxlib headers" in found["frontends"]["jax"]["versions"]
    on_cpu = [r for r in found["recipes"] if r["device"] == "CPU"]
    assert len(on_cpu) == len(RECIPES)
    aligned = {p["aligned"]["level"] for r in on_cpu for p in r["products"].values()}
    assert aligned | {o["level"] for r in on_cpu for o in r["ops"]} == {"native"}
    for r in on_cpu:
        packed = any(format_by_name(f).pack > 1 for f in r["formats"])
        levels = {p["unaligned"]["level"] for p in r["products"].values()}
        assert levels == ({"refused"} if packed else {"native"}), r["recipe"]
        states = linear_plan(RECIPES[r["recipe"]]).states
        assert {o["op"] for o in r["ops"]} == {"quantize", *["scale_update"] * bool(states)}
    assert {f for r in on_cpu for f in r["formats"]} <= set(found["formats"])
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cpu.gemm" in text and "mxfp8 on CPU" in text


def test_train_writes_resumes_and_protects_its_checkpoint(capsys, tmp_path, text):
    base = ["train", "--framework", "torch", "--steps", "4", "--data", str(text), *TINY]
    out = ["--out", str(tmp_path / "a")]
    assert cli.main([*base, *out, "--stop-after", "2"]) == 0
    assert "exists: --resume" in refused([*base, *out], capsys)
    assert cli.main([*base, "--resume", str(tmp_path / "a")]) == 0
    assert cli.main([*base, "--out", str(tmp_path / "b")]) == 0
    resumed, whole = (json.loads((tmp_path / d / "results.json").read_text()) for d in "ab")
    assert resumed["losses"] == whole["losses"] and len(whole["losses"]) == 4
    assert resumed["validation"] == whole["validation"]
    assert cli.main([*base, *out, "--overwrite"]) == 0


def test_the_lab_knows_no_framework():
    code = "import sys, diptych.lab.cli, diptych.lab.compare, diptych.lab.report, diptych.lab.doctor\n"
    code += "print('torch' in sys.modules, 'jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_the_installed_command_exits_non_zero_on_bad_input():
    code = "import sys; from diptych.lab.cli import main; sys.exit(main())"
    out = subprocess.run([sys.executable, "-c", code, "train", "--framework", "torch", "--data", "/no/such/place"],
                         capture_output=True, text=True)  # fmt: skip
    assert out.returncode == 2
    assert "diptych train: error: /no/such/place" in out.stderr
