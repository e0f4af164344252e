"""The schema: what is written is read again, and what is not exactly so is refused with the field's name."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_tools import STORED, meta

from diptych.lab.traces import Meta, Options, Quantization, Record, Site, Statistics, Step, TraceError
from diptych.lab.traces.schema import dump, load, to_json

NAMES = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20).filter(
    lambda s: ".." not in s.split("/")
)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SHARE = st.floats(0, 1)
KINDS = ["activation", "activation_grad", "parameter", "parameter_grad", "operand", "result"]
SITES = st.builds(
    Site, NAMES, st.sampled_from(KINDS), st.integers(0, 2**40),
    st.lists(st.integers(0, 9), max_size=4).map(tuple), st.sampled_from(STORED),
    st.none() | st.lists(NAMES, max_size=3).map(tuple),
)  # fmt: skip
QUANTIZED = st.builds(Quantization, SHARE, SHARE, st.none() | st.floats(allow_nan=False))
STATISTICS = st.builds(
    Statistics, st.none() | st.floats(0, 1e308), st.none() | FINITE, st.none() | st.floats(0, 1e308),
    SHARE, SHARE, SHARE, SHARE, st.none() | QUANTIZED,
)  # fmt: skip
RECORDS = st.builds(
    Record, st.integers(0, 10**6), st.none() | STATISTICS,
    st.none() | st.text("0123456789abcdef", min_size=32, max_size=32),
    st.sampled_from(["whole", "sampled"]), st.integers(0, 10**12), st.booleans(),
)  # fmt: skip
STEPS = st.builds(
    Step, st.integers(0, 2**63 - 1), st.lists(SITES, max_size=3).map(tuple), st.lists(RECORDS, max_size=3).map(tuple)
)
OPTIONS = st.builds(Options, st.text(), st.integers(1, 99), st.sampled_from(["hash", "sample", "full"]), st.integers(0))
SHOWN = st.text(st.characters(exclude_categories=("C", "Z")))
METAS = st.builds(
    Meta, SHOWN, st.dictionaries(SHOWN, SHOWN), SHOWN, st.integers(1, 2**20), st.none() | SHOWN,
    SHOWN, st.booleans(), st.none() | st.booleans(), OPTIONS,
)  # fmt: skip


@settings(deadline=None)
@given(STEPS | METAS | SITES | STATISTICS)
def test_what_is_written_is_read(value):
    line = dump(value)
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert load(type(value), line, "f") == value
    json.loads(line, parse_constant=pytest.fail)


STEP = Step(
    3,
    (Site("a.b", "parameter", 0, (2, 3), "bfloat16"), Site("c", "operand", 1, (), "float32", ("parameter:a.b",))),
    (
        Record(
            0, Statistics(1.0, -0.5, 0.7, 0, 0, 0, 0.25, Quantization(0, 0.5, math.inf)), "0" * 32, "whole", 6, False
        ),
        Record(1, None, None, "none", 0, True),
    ),
)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ((), [], ": must be an object, is a list"),
        (("step",), -1, ": step: must be from 0 to"),
        (("step",), True, ": step: must be an integer, is True"),
        (("step",), 1.0, "step: must be an integer, is 1.0"),
        (("step",), 2**63, "step: must be from 0"),
        (("sites",), {}, "sites: must be a list, is an object"),
        (("sites", 0), None, r"sites\[0\]: must be an object, is None"),
        (("sites", 0, "name"), "", r"sites\[0\]: name: must be 1 to 1000 printable"),
        (("sites", 0, "name"), "a\nb", "name: must be 1 to 1000 printable"),
        (("sites", 0, "name"), "\x1b[31m", "name: must be 1 to 1000 printable"),
        (("sites", 0, "name"), "\ud800", "name: must be 1 to 1000 printable"),
        (("sites", 0, "name"), "x" * 1001, "name: must be 1 to 1000 printable"),
        (("sites", 0, "name"), "../../etc", 'name: must have no part ".."'),
        (("sites", 0, "kind"), "gradient", r"sites\[0\].kind: must be one of activation, .*, is 'gradient'"),
        (("sites", 0, "call"), -1, "call: must not be negative"),
        (("sites", 0, "dtype"), "float7", "dtype: is unknown: 'float7'"),
        (("sites", 0, "dtype"), "float4_e2m1fn", "dtype: is unknown"),
        (("sites", 0, "shape"), [2, -3], "shape: is impossible"),
        (("sites", 0, "shape"), [2, 3.0], r"shape\[1\]: must be an integer, is 3.0"),
        (("sites", 0, "shape"), [2, None], r"shape\[1\]: must be an integer, is None"),
        (("sites", 0, "shape"), [2**40, 2**40], "shape: is impossible"),
        (("sites", 0, "shape"), [0, 2**62, 2**62], "shape: is impossible"),
        (("sites", 0, "shape"), [10**4000], "shape: is impossible"),
        (("sites", 0, "shape"), [1] * 33, "shape: has more than 32 axes"),
        (("sites", 1, "inputs"), "a.b", r"sites\[1\].inputs: must be a list"),
        (("sites", 1, "inputs", 0), 1, r"sites\[1\].inputs\[0\]: must be text"),
        (("records", 0, "site"), -1, r"records\[0\]: site: must not be negative"),
        (("records", 0, "hash"), "0" * 31, "hash: must be 32 of"),
        (("records", 0, "hash"), "G" * 32, "hash: must be 32 of"),
        (("records", 0, "hash"), "0" * 31 + "\n", "hash: must be 32 of"),
        (("records", 0, "values"), "all", "values: must be one of whole, sampled, none"),
        (("records", 0, "count"), -1, "count: must not be negative"),
        (("records", 1, "count"), 1, "count: must be 0 where no values are kept"),
        (("records", 0, "cut"), 0, "cut: must be true or false"),
        (("records", 0, "statistics", "amax"), -1, r"records\[0\].statistics: amax: must not be negative"),
        (("records", 0, "statistics", "amax"), "inf", "amax: must be finite"),
        (("records", 0, "statistics", "mean"), "nan", "mean: must be a number, is 'nan'"),
        (("records", 0, "statistics", "mean"), [], r"statistics.mean: must be a number, is a list"),
        (("records", 0, "statistics", "zero"), None, "zero: must be a number, is None"),
        (("records", 0, "statistics", "zero"), 1.5, "zero: must be from 0 to 1"),
        (("records", 0, "statistics", "rms"), 10**400, "rms: must be finite"),
        (("records", 0, "statistics", "quantized", "sqnr"), True, "quantized.sqnr: must be a number, is True"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(path, value, why):
    plain = to_json(STEP)
    if path:
        at = plain
        for part in path[:-1]:
            at = at[part]
        at[path[-1]] = value
    else:
        plain = value
    with pytest.raises(TraceError, match=f"^the file.*{why}") as e:
        load(Step, json.dumps(plain).encode(), "the file")
    assert len(str(e.value)) < 300


def test_fields_are_neither_more_nor_less():
    for path in (
        (),
        ("sites", 0),
        ("records", 0),
        ("records", 0, "statistics"),
        ("records", 0, "statistics", "quantized"),
    ):
        for name in sorted(_at(to_json(STEP), path)):
            plain = to_json(STEP)
            del _at(plain, path)[name]
            with pytest.raises(TraceError, match=f"f: .*lacks {name}"):
                load(Step, json.dumps(plain).encode(), "f")
        plain = to_json(STEP)
        _at(plain, path)["more"] = 1
        with pytest.raises(TraceError, match=r"f: .*has an unknown field 'more'"):
            load(Step, json.dumps(plain).encode(), "f")


def _at(plain, path):
    for part in path:
        plain = plain[part]
    return plain


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is no JSON"),
        (b'{"step": 3', "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[" * 10**6, "is no JSON"),
        (b'{"step": ' + b"1" * 5000 + b"}", "is no JSON"),
        (b'{"step": 1, "step": 2}', "is no JSON: it has 'step' twice"),
        (b'{"step": NaN}', "is no JSON: NaN is no number"),
        (b'{"step": -Infinity}', "is no JSON: -Infinity is no number"),
        (b"{} {}", "is no JSON"),
        (b"null", "must be an object, is None"),
    ],
    ids=range(10),
)
def test_what_is_no_json_is_refused(text, why):
    with pytest.raises(TraceError, match=f"^f: {why}"):
        load(Step, text, "f")


def test_a_number_beyond_float64_is_refused():
    text = dump(STEP).replace(b'"amax":1.0', b'"amax":1e999')
    with pytest.raises(TraceError, match="amax: must be finite"):
        load(Step, text, "f")


def test_other_formats_and_versions_are_named():
    plain = to_json(meta())
    for changes, why in (
        ({"version": 1}, "f: version: is 1, this diptych reads 2"),
        ({"version": "2"}, "f: version: is 2, this diptych reads 2"),
        ({"format": "x", "version": 1}, "f: format: must be diptych-trace"),
        ({"versions": {"torch": 2}}, "f: versions.torch: must be text, is 2"),
        ({"ranks": 0}, "f: ranks: must be from 1"),
        ({"options": {}}, "f: options: lacks budget, every, ops, sites, values"),
        ({"plain_bits": "yes"}, "f: plain_bits: must be true or false"),
    ):
        with pytest.raises(TraceError, match=why):
            load(Meta, json.dumps(plain | changes).encode(), "f")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_could_not_be_read_is_not_written(value):
    record = dataclasses.replace(STEP.records[1], statistics=dataclasses.replace(Statistics(*[0.0] * 7)))
    object.__setattr__(record.statistics, "mean", value)
    with pytest.raises(TraceError, match=r"Step: records\[0\].statistics.*mean"):
        dump(Step(0, (), (record,)))


def test_keys_are_unique():
    sites = [dataclasses.replace(STEP.sites[0], name=n, kind=k, call=c) for n in "ab" for k in KINDS for c in range(3)]
    assert len({s.key for s in sites}) == len(sites)
    assert [s.key for s in STEP.sites] == ["parameter:a.b", "operand:c#1"]


def test_the_page_has_every_field():
    page = (Path(__file__).parents[3] / "docs/traces.md").read_text()
    rows = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*\|$", page, re.M))))
    kinds = (Site, Record, Statistics, Quantization, Meta, Options)
    assert {f.name for kind in kinds for f in dataclasses.fields(kind)} <= rows and set(KINDS) <= rows


@pytest.mark.parametrize("name", ["framework", "device", "recipe", "hash", "versions"])
@pytest.mark.parametrize("text", ["\ud800", "\x1b[31mX", "a\nGREEN"])
def test_texts_that_are_shown_are_printable(name, text):
    with pytest.raises(ValueError, match=f"^{name}: must be printable text"):
        meta(**{name: {text: "1"} if name == "versions" else text})
