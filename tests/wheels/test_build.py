"""The commands that build: their progress, what they say when something is missing, and the version. `bare.py` tries
wheels, which no test here builds."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "core_cuda/wheels"
sys.path.insert(0, str(FOLDER))

import progress  # noqa: E402

import build  # noqa: E402


def test_progress_counts_steps_and_shows_a_failure(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.2)
    script = "import sys, time; print('[3/9] a file', flush=True); time.sleep(0.7); sys.exit(int(sys.argv[1]))"
    assert progress.run("building", [sys.executable, "-c", script, "0"]) > 0.5
    said = capsys.readouterr().out
    assert said.startswith("== building\n") and "   building: 3 of 9 steps, 0 s\n" in said
    with pytest.raises(progress.CommandError, match=r"building failed with status 3:\n\[3/9\] a file"):
        progress.run("building", [sys.executable, "-c", script, "3"])
    with pytest.raises(progress.CommandError, match="no-such-command cannot be started"):
        progress.run("building", ["no-such-command"])


def test_wrong_arguments_are_named():
    for script, arguments, said in (
        ("build.py", ["--python", "3.9"], "invalid choice: '3.9'"),
        ("build.py", ["--cuda", "maybe"], "invalid choice: 'maybe'"),
        ("progress.py", [], "progress.py WHAT COMMAND"),
    ):
        done = subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and said in done.stderr, done


def test_a_missing_python_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no CPython of 3\.11, 3\.12, 3\.13 is on this machine"):
        build.build(list(build.PYTHONS), "off", tmp_path)


def test_this_python_is_found():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    found = build.find_python(version)
    if found is None:
        pytest.skip(f"no python{version} with venv is on PATH or in pyenv")
    out = subprocess.run([found, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    assert out.stdout.strip() == str(sys.version_info[:2])


def test_the_version_is_said_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    spec = importlib.util.spec_from_file_location("diptych", FOLDER / "package.py")  # which wheels contain
    diptych = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diptych)
    assert diptych.__version__ == version("diptych") == project["version"]
    assert re.search(rf"^## {re.escape(project['version'])}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)
    with pytest.raises(AttributeError, match="module 'diptych' has no attribute 'versoin'"):
        diptych.versoin  # noqa: B018
