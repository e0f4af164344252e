"""A few rounds of each target find nothing, and every kind of planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cases
from diptych.core import _core
from fuzz import raw
from fuzz.__main__ import TESTS, run
from fuzz.draw import Draw
from fuzz.memory import Guarded, Pool


@pytest.mark.parametrize(
    ("target", "rounds", "families"),
    [
        ("raw", 150, ("changed", "hammer")), ("verbs", 150, ()), ("files", 150, ()),
        pytest.param("modules", 8, (), marks=pytest.mark.slow),  # test_modules.py has rounds in this process
    ],
)  # fmt: skip
def test_nothing_is_found(target, rounds, families):
    report = run(target, cases.SEED, rounds=rounds, families=families)
    assert report.rounds == rounds and report.calls >= rounds * 0.8
    assert not report.found, report


def test_a_seed_repeats_its_rounds():
    first, again = (run("raw", 7, rounds=40, families=("changed", "hammer")) for _ in range(2))
    assert (first.calls, first.succeeded) == (again.calls, again.succeeded)
    other = run("raw", 8, rounds=40, families=("changed", "hammer"))
    assert (first.calls, first.succeeded) != (other.calls, other.succeeded)


PLANT = """
import ctypes
from fuzz import good, verbs
from diptych.core import _core
real = _core.{name}
def call(*args, **kwargs):
    out = real(*args, **kwargs)
    given = dict(zip({names}, args)) | kwargs
    {fault}
    return out
_core.{name} = call
good.CALLS = verbs.CALLS = {{'{name}': getattr(good, '{name}')}}
"""
ADDRESS = "array = given[{name!r}][0]; ctypes.memset(array.ctypes.data + {at}, {byte}, 1) if array.nbytes else None"


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def planted(name: str, names: list[str], fault: str) -> str:
    return PLANT.format(name=name, names=names, fault=fault)


BIAS_GRAD = ["dy", "out", "workspace"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ADDRESS.format(name="out", at="array.nbytes", byte=1), "SIGSEGV|has written beside an output"),
        (ADDRESS.format(name="dy", at="0", byte=1), "SIGSEGV"),
        slow(ADDRESS.format(name="out", at="-1", byte=1), "SIGSEGV|has written beside an output"),
        slow(ADDRESS.format(name="dy", at="array.nbytes + 4095", byte=1), "SIGSEGV"),
    ],
    ids=["beyond its end", "its input", "before its beginning", "far away"],
)  # fmt: skip
def test_a_binding_that_writes_wrong_bytes_is_found(fault, words):
    report = run("raw", 3, rounds=6, families=("changed",), plant=planted("bias_grad", BIAS_GRAD, fault))
    assert any(any(word in what for word in words.split("|")) for what in report.found), report


def test_a_call_that_leaves_bytes_or_writes_elsewhere_is_found(monkeypatch):
    be = Guarded(Pool(), Draw(1))
    spare, out = (be.part(be.poisoned(16, 0), 0, 16, (4,), "float32") for _ in range(2))
    args = {"dy": be.put(np.ones((3, 4), np.float32), "float32"), "out": out, "workspace": None}
    assert raw.check("bias_grad", args, be)
    monkeypatch.setattr(_core, "bias_grad", lambda *_: None)
    with pytest.raises(AssertionError, match=r"bias_grad\(dy=float32\[3, 4\] frozen.* has left bytes of an output"):
        raw.check("bias_grad", args, be)
    monkeypatch.setattr(_core, "bias_grad", lambda *_: spare[0].fill(7))
    with pytest.raises(AssertionError, match="has written to memory that it was not given"):
        raw.check("bias_grad", args, be)


def test_a_refusal_that_has_written_and_an_unknown_error_are_found():
    wrong = """
from diptych.core import _core
real = _core.bias_grad
def call(*args, **kwargs):
    try: return real(*args, **kwargs)
    except ValueError:
        out = kwargs["out"] if "out" in kwargs else args[1]
        out[0].view("u1")[..., :1] += 1
        raise
    except TypeError: raise KeyError("lost")
_core.bias_grad = call
from fuzz import good
good.CALLS = {"bias_grad": good.bias_grad}
"""
    report = run("raw", 3, rounds=60, families=("changed",), plant=wrong)
    assert any("is refused, and has written" in what for what in report.found), report
    assert any("KeyError: 'lost'" in what for what in report.found), report


def test_a_verb_that_returns_a_wrong_byte_is_found():
    wrong = planted("bias_grad", BIAS_GRAD, "given['out'][0].view('u1')[..., :1] ^= 1")
    report = run("verbs", 5, rounds=20, plant=wrong)
    assert report.found and all("bias_grad" in what for what in report.found), report


def test_a_reader_that_believes_its_file_is_found():
    wrong = "from diptych.lab import checkpoint; checkpoint._digest = lambda *_: '0' * 64"
    report = run(
        "files", 5, rounds=150, plant=wrong + "\nfrom fuzz import files; files.CHECKS = (files.check_forgery,)"
    )
    assert any("loads with other content" in what for what in report.found), report


def test_a_round_that_hangs_is_found_and_the_next_one_runs():
    wrong = "import time\nfrom fuzz import files\nreal, calls = files.run, []\n"
    wrong += "files.run = lambda d, count: calls.append(1) or time.sleep(60 * (len(calls) == 20)) or real(d, count)"
    report = run("files", 6, rounds=30, plant=wrong, hang=1.0)
    assert any("the process hangs" in what for what in report.found) and report.rounds == 30, report


def test_the_command_says_how_to_repeat_and_fails():
    command = [sys.executable, "-m", "fuzz", "--target", "files", "--seed", "11", "--rounds", "20"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("files: seed 11, 20 rounds, 20 calls (") and done.stdout.endswith(" 0 found\n")
