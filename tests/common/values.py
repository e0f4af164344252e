"""Checks of value objects that the tests of quantizers and recipes share."""

from __future__ import annotations

import copy
import dataclasses
import enum
import json
import os
import pickle
import subprocess
import sys
import types
from typing import Any

import pytest

from diptych.common.value import Value, ValueMeta

SCRIPT = """
import json, pickle, sys
values = pickle.loads(bytes.fromhex(sys.stdin.read()))
print(json.dumps([[v.fingerprint, repr(v), v.__fx_repr__()[0]] for v in values]))
"""


def parts(value: Any) -> list[Any]:
    """The object and the values inside of it."""
    inner = [getattr(value, f.name) for f in dataclasses.fields(value)]
    return [value] + [p for v in inner if isinstance(v, Value) for p in parts(v)]


def check_value(value: Value) -> None:
    """Frozen, hashable, equal by content, copied by pickle and deepcopy, rebuilt from its expression."""
    assert isinstance(type(value), ValueMeta)
    hash(value)
    for name in [f.name for f in dataclasses.fields(value)]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, getattr(value, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(value, name)
    same = dataclasses.replace(value)
    assert same is not value and same == value and hash(same) == hash(value) and {value: 1}[same] == 1
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(value, protocol))
        assert loaded == value and type(loaded) is type(value) and hash(loaded) == hash(value)
    assert copy.deepcopy(value) == copy.copy(value) == value
    expression, classes = value.__fx_repr__()
    assert all(c.__name__ == name for name, c in classes.items())
    rebuilt = eval(expression, dict(classes))
    assert rebuilt == value and type(rebuilt) is type(value) and rebuilt.fingerprint == value.fingerprint
    assert len(value.fingerprint) == 12 and int(value.fingerprint, 16) >= 0
    assert type(value).__name__ in repr(value)


def check_fields_matter(value: Value, changes: dict[str, Any]) -> None:
    """Each changed field gives another object: unequal, another fingerprint, another expression."""
    assert set(changes) == {f.name for f in dataclasses.fields(value)}, "a field is not covered"
    seen = {value.fingerprint}
    for name, new in changes.items():
        other = value.replace(**{name: new})
        assert other != value and getattr(other, name) == new and getattr(value, name) != new
        assert other.fingerprint not in seen, name
        seen.add(other.fingerprint)
    with pytest.raises(TypeError):
        value.replace(no_such_field=1)


def check_other_processes(values: list[Value]) -> None:
    """Fingerprints and expressions do not depend on the process's hash seed."""
    expected = [[v.fingerprint, repr(v), v.__fx_repr__()[0]] for v in values]
    text = pickle.dumps(values).hex()
    for seed in ("0", "4242"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run([sys.executable, "-c", SCRIPT], input=text, env=env, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        assert json.loads(out.stdout) == expected


def scalars_only(value: Any) -> bool:
    """Nothing that lives: no tensor, no process group; a callable only by its module-level name."""
    return all(
        v is None
        or isinstance(v, (bool, int, float, str, enum.Enum, types.FunctionType))
        or (isinstance(v, Value) and scalars_only(v))
        for v in (getattr(value, f.name) for f in dataclasses.fields(value))
    )
