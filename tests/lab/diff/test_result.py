"""The schema of a result: its documentation, and that reading is strict."""

import dataclasses
import re
import typing
from pathlib import Path

import numpy as np
import pytest
from diff_tools import compared, site

from diptych.lab.diff import result
from diptych.lab.traces import TraceError
from diptych.lab.traces.schema import dump, from_json, load, parse, to_json

PAGE = (Path(__file__).parents[3] / "docs" / "lab.md").read_text()


def test_the_page_has_every_field_and_word():
    words = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*\|$", PAGE, re.M))))
    kinds = (result.Result, result.Side, result.Row, result.Cell, result.First, result.Ambiguous)
    assert {f.name for kind in kinds for f in dataclasses.fields(kind)} <= words
    assert {w for union in (result.Verdict, result.Matched) for w in typing.get_args(union)} <= words


def test_the_examples_run():
    exec(compile("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.S)), "docs/lab.md", "exec"), {})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("status",), "red"),
        (("rows", 0, "cells", 0, "verdict"), "fine"),
        (("rows", 0, "cells", 0, "relative"), "nan"),
        (("rows", 0, "more"), 1),
        (("first", 0, "row"), None),
        (("sides", 0, "versions"), ["torch"]),
    ],
)
def test_reading_is_strict(tmp_path, path, value):
    found = compared(tmp_path, [[site("x", np.ones(1))]], [[site("x", np.zeros(1))]])
    plain = parse(dump(found), "r")
    assert load(result.Result, dump(found), "r") == found and to_json(found) == plain
    place = plain
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    with pytest.raises(TraceError, match=r"^r: "):
        from_json(result.Result, plain, "r")
