"""Every name of torch's private API that diptych takes: that this torch has it, and what is said where one lacks it."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diptych.common.errors import FrameworkVersionError, UnsupportedError
from diptych.torch import private
from diptych.torch.private import require

FILES = sorted(p.stem for p in Path(private.__path__[0]).glob("*.py") if p.stem not in ("__init__", "require"))
VERSION = ".".join(torch.__version__.split(".")[:2])
TRIED = ("2.11", "2.13", "2.14")


def anew(file: str) -> ModuleType:
    """Runs a file of the room again, in a module of its own."""
    made, path = ModuleType(file), Path(private.__path__[0], f"{file}.py")
    exec(compile(path.read_text(), path, "exec"), vars(made))
    return made


def borrowed(file: str, monkeypatch: pytest.MonkeyPatch) -> list[require.Borrowed]:
    """Returns the rows of one file."""
    monkeypatch.setattr(require, "BORROWED", {})
    anew(file)
    return list(require.BORROWED.values())


def exists(name: str) -> bool:
    """Whether torch has a name, or the code of its owner, a class or module, sets an attribute of the name."""
    owner, _, attribute = name.rpartition(".")
    if require.found(name) is not require._MISSING:
        return True
    held = require.found(owner)
    return held is not require._MISSING and f".{attribute}" in inspect.getsource(held)


@pytest.mark.parametrize("file", FILES)
def test_torch_has_all_that_is_borrowed(file, monkeypatch):
    rows = borrowed(file, monkeypatch)
    assert rows
    for names, _, seen in rows:
        if not seen or VERSION in TRIED:
            assert any([exists(name) for name in names]) == (not seen or VERSION in seen), names


@pytest.mark.parametrize("file", FILES)
def test_a_missing_name_is_said_by_name(file, monkeypatch):
    """At import where everything needs it, else where it is used first."""
    have, checked = require.found, 0
    for names, use, seen in borrowed(file, monkeypatch):
        monkeypatch.setattr(require, "found", lambda name, no=names: require._MISSING if name in no else have(name))
        try:
            made = anew(file)
        except FrameworkVersionError as error:
            assert not seen
            raised = error
        else:
            functions = [v for v in vars(made).values() if isinstance(v, partial) and v.func is require._raise]
            if not functions:  # diptych does without it, or looks it up in an object of torch's
                continue
            for function in functions:
                with pytest.raises(FrameworkVersionError) as error:
                    function(1, of=2)
                raised = error.value
        said = f"lacks {' and '.join(names)}, which diptych needs {use}; it supports torch 2.11 to 2.14"
        assert str(raised) == f"torch {torch.__version__} {said}"
        checked += 1
    assert checked


def test_a_name_that_is_gone(monkeypatch):
    monkeypatch.delattr(torch._C, "_is_tracing")
    monkeypatch.delattr(torch._C, "_vmapmode_increment_nesting")
    said = (
        r"lacks torch\._C\._is_tracing, which diptych needs to see torch\.jit\.trace; it supports torch 2\.11 to 2\.14"
    )
    with pytest.raises(ImportError, match=said):
        anew("dispatch")
    functorch = anew("functorch")
    with pytest.raises(NotImplementedError, match="_vmapmode_increment_nesting, which diptych needs for"):
        functorch.legacy_level()
    assert issubclass(FrameworkVersionError, UnsupportedError)


def test_an_attribute_that_is_gone(monkeypatch):
    monkeypatch.setattr(require, "BORROWED", {})
    value = require.attribute("to gather", "torch.Group", "_new", "_old")
    assert value(type("Group", (), {"_old": 3})) == 3
    with pytest.raises(FrameworkVersionError, match=r"torch\.Group\._new and torch\.Group\._old, which diptych needs"):
        value(object())


def test_flags_are_read_when_they_are_asked():
    from diptych.torch.private import autograd

    assert autograd.forward_level() == -1
    with torch.autograd.forward_ad.dual_level():
        assert autograd.forward_level() == 0
    assert not autograd.profiled()
    with torch.profiler.profile():
        assert autograd.profiled()


def test_the_room_is_imported_in_no_time():
    assert {"autograd", "dispatch", "dynamo"} <= set(FILES)

    def run() -> float:
        begun = time.process_time()
        for file in FILES:
            if file != "dynamo":  # which is imported where torch._dynamo is
                anew(file)
        return time.process_time() - begun

    code = {file: Path(private.__path__[0], f"{file}.py").read_text() for file in FILES}
    begun = time.process_time()
    for text in code.values():
        compile(text, "", "exec")  # Python keeps what it compiles
    compiling = time.process_time() - begun
    assert min(run() for _ in range(5)) - compiling < 0.005


IMPORTS = """
import sys, torch
before = set(sys.modules)
import diptych.torch
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch")))
"""


def test_no_other_modules_of_torch_are_imported():
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and run.stdout.split() == ["torch.utils.flop_counter", "torch.utils.module_tracker"]
    assert "deprecated" not in run.stderr, run.stderr


def test_what_is_imported_late_is_said_by_name(monkeypatch):
    from torch.distributed import _composable_state, _functional_collectives
    from torch.distributed.tensor import placement_types

    from diptych.torch.private import sharding

    for owner, name, call in (
        (_functional_collectives, "all_reduce", lambda: sharding.maximum(torch.ones(1), None)),
        (_composable_state, "_module_state_mapping", sharding.module_states),
        (placement_types, "_StridedShard", lambda: sharding.strided_shard(2)),
    ):
        monkeypatch.delattr(owner, name)
        with pytest.raises(FrameworkVersionError, match=rf"lacks {re.escape(owner.__name__)}\.{name}.*, which diptych"):
            call()


WITHOUT_OPAQUE_TYPES = """
import torch, torch._library.opaque_object as opaque, warnings
for name in {"register_opaque_type", "register_custom_class"} & set(vars(opaque)):
    delattr(opaque, name)
with warnings.catch_warnings(record=True) as said:
    import diptych.torch as dt
assert any("has no opaque types: diptych runs eagerly" in str(one.message) for one in said)
from diptych.common import MXFP8BlockScaling
x = torch.randn(32, 32, requires_grad=True)
with dt.autocast(recipe=MXFP8BlockScaling()):
    dt.Linear(32, 32)(x).sum().backward()
assert x.grad.abs().sum() > 0
"""


def test_it_runs_eagerly_without_opaque_types():
    run = subprocess.run([sys.executable, "-c", WITHOUT_OPAQUE_TYPES], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
