"""The command `diptych diff`: exit codes, files, and every argument that is wrong."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from diff_tools import parameter, site, trace

from diptych.lab import cli
from diptych.lab.diff.result import Result
from diptych.lab.traces import Entry, Options, Site
from diptych.lab.traces.schema import load


@pytest.fixture
def traces(tmp_path, monkeypatch):
    """Equal traces a and b, and c, which differs."""
    monkeypatch.chdir(tmp_path)
    for name, value in (("a", 1), ("b", 1), ("c", 2)):
        trace(tmp_path / name, *[[parameter("w", np.ones(3)), site("x", np.full(4, value))]] * 3)
    return tmp_path


def refused(argv, capsys) -> str:
    try:
        status = cli.main(["diff", *argv])
    except SystemExit as e:
        status = e.code
    assert status == 2
    found = capsys.readouterr()
    assert found.err.startswith("diptych diff: error: ") and found.err.count("\n") == 1 and not found.out
    return found.err


def test_exit_codes(traces, capsys):
    assert cli.main(["diff", "a", "b"]) == 0
    assert "GREEN" in capsys.readouterr().out
    assert cli.main(["diff", "a", "c"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
    assert cli.main(["diff", "a", "c", "--steps", "1-2"]) == 1
    assert "2 steps from 1 to 2" in capsys.readouterr().out
    assert cli.main(["diff", "a", "c", "--steps", "0,2-9"]) == 1  # a range takes what is there
    assert "2 steps from 0 to 2" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        cli.main(["diff", "--help"])
    assert "exit 0 green, 1 differs, 2 bad input" in " ".join(capsys.readouterr().out.split())


def test_json_and_html(traces, capsys):
    assert cli.main(["diff", "a", "c", "--json", "out/r.json", "--html", "out/r.html"]) == 1
    result = load(Result, (traces / "out/r.json").read_bytes(), "r.json")
    assert result.status == "differs" and [c.verdict for c in result.rows[1].cells] == ["differs"] * 3
    assert (traces / "out/r.html").read_text().lstrip().lower().startswith("<!doctype html>")
    assert "written: out/r.json, out/r.html" in capsys.readouterr().out


def test_json_in_place_of_the_text(traces, capsys):
    assert cli.main(["diff", "a", "c", "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert load(Result, out.encode(), "stdout").status == "differs" and "DIFFERS" in err


def test_references_in_one_option_or_two(traces, capsys):
    for name in ("h", "i"):
        trace(traces / name, [parameter("w", np.ones(3)), site("x", np.full(4, 1.0))])
    for argv in (["--ref", "h", "i"], ["--ref", "h", "--ref", "i"]):
        cli.main(["diff", "a", "b", *argv])
        out = capsys.readouterr().out
        assert "H_A h: " in out and "H_B i: " in out


def test_a_map(traces, capsys):
    (traces / "map.json").write_text(json.dumps({"x": "x"}))
    assert cli.main(["diff", "a", "b", "--map", "map.json"]) == 0
    capsys.readouterr()
    (traces / "map.json").write_text('{"x": "y"}')
    assert "map.json: 'x': B has no 'y'" in refused(["a", "b", "--map", "map.json"], capsys)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "A, B"),
        (["a"], "B"),
        (["a", "none"], "none/meta.json: cannot be read"),
        (["a", "a"], "a: is given twice"),
        (["a", "b/../a"], "is given twice"),
        (["a", "b", "--ref", "a"], "a: is given twice"),
        (["a", "b", "--ref", "c", "c"], "c: is given twice"),
        (["a", "b", "--ref", "c", "d", "e"], "--ref takes one or two folders, got 3"),
        (["a", "b", "--ref"], "expected at least one argument"),
        (["a", "b", "--ref", "none"], "none/meta.json: cannot be read"),
        (["a", ""], "'' is not a path"),
        (["a", "a\0"], "is not a path"),
        (["a", "/dev/null"], "/dev/null"),
        (["a", "loop"], "loop/meta.json: cannot be read"),
        (["loop", "b"], "loop/meta.json: cannot be read"),
        (["a", "b", "--json", "loop"], "--json loop: is "),
        (["a", "b", "--json", "link"], "--json link: is a link to file; name the file itself"),
        (["a", "b", "--json", "/dev/stdout"], "--json /dev/stdout: is "),
        (["a", "b", "--html", "-"], "--html -: is no name of a file"),
        (["a", "b", "--json", "loop/x"], "--json loop/x: "),
        (["a", "b", "--map", "none"], "none: cannot be read"),
        (["a", "b", "--map", "/dev/zero"], "/dev/zero: is a character device"),
        (["a", "b", "--map", "a"], "a: cannot be read: it is a folder"),
        (["a", "b", "--steps", "x"], "'x' are no steps"),
        (["a", "b", "--steps", ""], "'' are no steps"),
        (["a", "b", "--steps", "1,"], "'1,' are no steps"),
        (["a", "b", "--steps=-1"], "'-1' are no steps"),
        (["a", "b", "--steps", "3-1"], "'3-1' must go from a step to a later one"),
        (["a", "b", "--steps", "0-99999999999"], "at most a million"),
        (["a", "b", "--steps", "1-"], "are no steps"),
        (["a", "b", "--steps", "\u0661"], "are no steps"),
        (["a", "b", "--steps", "5"], "step 5 is not in both traces, which have 3 steps from 0 to 2"),
        (["a", "b", "--steps", "5-9"], "no step from 5 to 9 is in both traces, which have 3 steps from 0 to 2"),
        (["a", "b", "--json", "a"], "--json a: is a folder"),
        (["a", "b", "--json", "a/x.json"], "--json a/x.json: is inside of a trace"),
        (["a", "b", "--html", "/dev/null"], "--html /dev/null: is a character device"),
        (["a", "b", "--json", "a/meta.json/x"], "a/meta.json/x"),
        (["a", "b", "--json", "file/x"], "--json file/x: "),
        (["a", "b", "--json", "x", "--html", "./x"], "name the same file: x"),
    ],
)
def test_wrong_arguments_are_named(traces, capsys, argv, named):
    (traces / "file").write_text("")
    (traces / "loop").symlink_to("loop")
    (traces / "link").symlink_to("file")
    before = sorted(p for p in traces.rglob("*"))
    assert named in refused(argv, capsys)
    assert sorted(p for p in traces.rglob("*")) == before


def test_a_damaged_trace_is_named(traces, capsys):
    path = traces / "b" / "rank0" / "steps.jsonl"
    path.write_bytes(b"{}\n" + path.read_bytes())
    assert "b/rank0/steps.jsonl: line 1: lacks" in refused(["a", "b"], capsys)


def test_a_page_that_cannot_be_made(traces, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "diptych.lab.diff.page", raising=False)
    monkeypatch.setattr("diptych.lab.diff.page", None, raising=False)
    monkeypatch.delattr("diptych.lab.diff.page")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "pip install 'diptych[lab]'" in refused(["a", "b", "--html", "x.html"], capsys)
    assert cli.main(["diff", "a", "b"]) == 0


def test_nothing_but_numpy_is_imported(traces):
    code = (
        "import sys; from diptych.lab import cli; print(cli.main(['diff', 'a', 'b']));"
        "print([m for m in ('matplotlib', 'jinja2', 'torch', 'jax') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-2:] == ["0", "[]"]


def test_a_closed_pipe_keeps_the_status(traces):
    read, write = os.pipe()
    os.close(read)
    code = "import sys; from diptych.lab import cli; sys.exit(cli.main(['diff', 'a', 'c']))"
    found = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (found.returncode, found.stderr) == (1, "")


@pytest.mark.slow
def test_large_traces_in_time_and_memory(tmp_path):
    """Two traces of 1 GB in which all elements differ. Two cores need half of the time of a process, without others."""
    x = np.random.default_rng(0).standard_normal((2048, 2048), np.float32)
    for name, more in (("a", 0), ("b", 1e-3)):
        sites = [Site(f"l.{i}", "activation", 0, x.shape, "float32") for i in range(64)]
        entries = [Entry(s, None, None, x + np.float32(i + more)) for i, s in enumerate(sites)]
        trace(tmp_path / name, entries, options=Options(values="full", budget=2**32))
    code = (
        "import time; from diptych.lab import cli; status = cli.main(['diff', 'a', 'b']);"
        "held = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'));"
        "print(status, held, time.process_time())"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    status, kilobytes, seconds = map(float, found.stdout.splitlines()[-1].split())
    assert status == 1 and kilobytes < 1e6 and seconds < 20
