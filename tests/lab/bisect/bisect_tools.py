"""Runs `diptych bisect` and its scripts, for its tests."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re
import runpy
import subprocess
import sys

from diptych.lab import cli

HERE = pathlib.Path(__file__).parent


def run(a, b, inputs, *more, module="bisect_models"):
    given = ["bisect", "--a", f"{module}:{a}", "--b", f"{module}:{b}", "--inputs", str(inputs)]
    return cli.main([*given, *map(str, more)])


def of(output):
    """Returns the site of A that was found, with "/" between its parts, and whether the module differs itself."""
    site = re.search(r"^The first that makes a difference: (\S+) in A", output, re.MULTILINE)
    itself = {"The module itself makes": True, "Given A's inputs, the module agrees": False}
    said = [value for text, value in itself.items() if text in output]
    return site[1].replace(".", "/").replace("h_", "h/"), *said


def shown(path, alone=False):
    """Runs a script, in a process of its own if `alone`. Returns the relative difference that it prints."""
    if alone:
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True, cwd=HERE, timeout=300)
        printed = done.stdout
    else:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(str(path), run_name="__main__")
        printed = out.getvalue()
    return float(re.search(r"relative rms of the difference ([\d.e+-]+)", printed)[1])
