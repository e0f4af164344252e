"""Files of rules: what they make of names, and every fault in them."""

import json

import pytest

from diptych.lab.diff import mapping
from diptych.lab.diff.result import DiffError
from diptych.lab.traces import Site


def rules(tmp_path, content) -> mapping.Rules:
    path = tmp_path / "map.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return mapping.read(path)


@pytest.mark.parametrize(
    ("content", "name", "want"),
    [
        ({"a.b": "x/y"}, "a.b", "x/y"),
        ({"a.b": "x/y"}, "a/b", "x/y"),
        ({"a.b": "x.y"}, "a.b.c", None),
        ({"h.*.fc": "block_*/up"}, "h.12.fc", "block_12/up"),
        ({"h.*.fc": "block_*/up"}, "h.1.2.fc", None),
        ({"h.*.**": "b/*/**"}, "h.3.mlp.fc.weight", "b/3/mlp/fc/weight"),
        ({"**.fc": "**/up"}, "h.3.fc", "h/3/up"),
        ({"a.b": "first", "a.*": "second/*"}, "a.b", "first"),
        ({"a.*": "second/*", "a.b": "first"}, "a.b", "second/b"),
        ({"a": "b"}, "a[0]", "b[0]"),
        ({"a[0]": "b", "a": "c"}, "a[0]", "b"),
        ({'a["x.y"]': "b"}, 'a["x.y"]', "b"),
        ({"a.(b)+": "c"}, "a.(b)+", "c"),
        ({"a.(b)+": "c"}, "a.bb", None),
    ],
)
def test_results(tmp_path, content, name, want):
    found = rules(tmp_path, content).find(name)
    assert (found and found[1]) == want


def test_transposed(tmp_path):
    found = rules(tmp_path, {"a": {"name": "b", "transposed": True}, "c": "d"})
    assert [r.transposed for r in found.rules] == [True, None]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "is no JSON"),
        ("[" * 10**5, "is no JSON"),
        ('{"a": "b", "a": "c"}', "twice"),
        ('{"a": NaN}', "no number of JSON"),
        ("[]", "must be a JSON object"),
        ("{}", "must be a JSON object"),
        ({"a": 1}, "'a': B's name must be text"),
        ({"a": None}, "'a': B's name must be text"),
        ({"a": ""}, "not empty"),
        ({"": "a"}, "not empty"),
        ({"a": {"name": "b"}}, 'must have "name" and "transposed"'),
        ({"a": {"name": "b", "transposed": 1}}, "true or false"),
        ({"a": {"name": ["b"], "transposed": True}}, "must be text"),
        ({"a": {"name": "b", "transposed": True, "more": 1}}, 'must have "name"'),
        ({"a.*": "b"}, "same wildcards"),
        ({"a.*.**": "**.*"}, "same wildcards"),
        ({"a": "b.*"}, "same wildcards"),
        ({"***": "***"}, "without text between"),
        ({"*a*b*c*d*": "*a*b*c*d*"}, "more than 4 wildcards"),
    ],
)
def test_faults_are_named(tmp_path, content, named):
    with pytest.raises(DiffError) as e:
        rules(tmp_path, content)
    assert named in str(e.value) and str(tmp_path / "map.json") in str(e.value)


def test_files_that_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "none", mapping.pathlib.Path("/dev/zero")):
        with pytest.raises(DiffError, match=str(path)):
            mapping.read(path)
    (tmp_path / "large").write_bytes(b" " * (mapping.LARGEST_FILE + 1))
    with pytest.raises(DiffError, match="larger than"):
        mapping.read(tmp_path / "large")
    (tmp_path / "bytes").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(DiffError, match="no JSON"):
        mapping.read(tmp_path / "bytes")


def sites(*names: str, kind="activation") -> list[Site]:
    return [Site(name, kind, 0, (1,), "float32") for name in names]


def test_rules_must_be_about_both_traces(tmp_path):
    given = rules(tmp_path, {"a.*": "b/*", "c": "d"})
    assert given.check(sites("a.0", "c"), sites("b/0", "d[0]")) == []
    (note,) = given.check(sites("a.0", "a.1", "a.2", "c"), sites("b/0", "d[0]"))
    assert note.endswith("'a.*': of 3 names that it makes, B does not have 'b/1', 'b/2'")
    with pytest.raises(DiffError, match="no name of A is left for this rule"):
        given.check(sites("a.0"), sites("b/0", "d"))
    with pytest.raises(DiffError, match="B has no 'b/0'"):
        given.check(sites("a.0", "c"), sites("b/1", "d"))
    with pytest.raises(DiffError, match="no name of A is left"):
        rules(tmp_path, {"*": "*", "a": "b"}).check(sites("a"), sites("a", "b"))


def test_transposed_is_said_of_parameters(tmp_path):
    given = rules(tmp_path, {"a": {"name": "b", "transposed": True}})
    with pytest.raises(DiffError, match='"transposed" is for parameters'):
        given.check(sites("a"), sites("b"))
    for kinds in (("activation", "parameter"), ("parameter", "activation"), ("parameter_grad",)):
        assert given.check([site for kind in kinds for site in sites("a", kind=kind)], sites("b")) == []
