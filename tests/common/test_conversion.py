"""The rules of convert, and its report."""

from __future__ import annotations

import pytest

from diptych.common import ArgumentError, MXFP8BlockScaling
from diptych.common.conversion import ConversionReport, ConvertedModule, Rules, matches

MX = MXFP8BlockScaling()


@pytest.mark.parametrize(
    "pattern, path, found",
    [
        ("head", "head", True), ("head", "body/head", False), ("*", "head", True), ("*", "body/head", False),
        ("*", "", False), ("**", "", True), ("**", "a/b/c", True), ("a/**", "a", True), ("a/**", "a/b/c", True),
        ("a/**", "ab", False), ("**/c", "c", True), ("**/c", "a/b/c", True), ("a/**/d", "a/d", True),
        ("a/**/d", "a/b/c/d", True), ("a/**/d", "a/b/c", False), ("a_?/x[12]", "a_3/x2", True),
        ("a_?/x[12]", "a_3/x3", False), ("A", "a", False), ("**/b/**", "a/b", True), ("**/b/**", "a/c", False),
    ],
)  # fmt: skip
def test_patterns_match_part_by_part(pattern, path, found):
    assert matches(pattern, path) is found


def test_the_first_rule_that_matches_decides():
    rules = Rules.of("convert", [("head", None), ("body/**", MX), ("**", None)])
    assert [rules.find(p).pattern for p in ("head", "body/0", "tail")] == ["head", "body/**", "**"]
    assert Rules.of("convert", {"body/*": MX}).find("head") is None
    assert Rules.of("convert", MX) == Rules.of("convert", {"**": MX})


@pytest.mark.parametrize(
    "rules, error, said",
    [
        ({}, ValueError, r'the rules are empty; \{"\*\*": recipe\}'),
        ([], ValueError, "the rules are empty"),
        ("mxfp8", ArgumentError, "must be a recipe, a mapping of patterns to recipes or a sequence"),
        (None, ArgumentError, "got NoneType"),
        (MXFP8BlockScaling, ArgumentError, "got the class MXFP8BlockScaling itself"),
        ({"head": "mxfp8"}, ArgumentError, "must be a diptych Recipe or None, got str"),
        ([("head", MX, 1)], ArgumentError, "a rule must be a pair"),
        ([(MX, "head")], ArgumentError, "a rule must be a pair"),
        (["ab"], ArgumentError, "a rule must be a pair"),
        ({"": MX}, ValueError, "a pattern is empty"),
        ([("a", MX), ("a", None)], ValueError, "'a' is given twice"),
    ],
)
def test_what_is_no_list_of_rules_is_refused(rules, error, said):
    with pytest.raises(error, match=said):
        Rules.of("convert", rules)


@pytest.mark.parametrize(
    "rules, said",
    [
        ({"blocks/3": MX}, r"'blocks/3' matches no module; near paths: 'blocks/0', 'blocks/1', 'head'"),
        ({"embed": MX}, "matches only 'embed', which has no product"),
        ({"embed2": None}, "matches no module; near paths: 'embed', "),
        ({"blocks": MX}, r"'blocks' matches no layer, but 'blocks/\*\*' would match layers inside of it; near paths: "),
        ({"**": MX, "head": None}, r"'head' never decides: an earlier one, '\*\*', matches 'head' first"),
    ],
)
def test_a_rule_that_decides_on_nothing_is_refused(rules, said):
    with pytest.raises(ValueError, match=said):
        Rules.of("convert", rules).require_used("convert", ["blocks/0", "blocks/1", "head"], ["embed"])


def test_rules_that_decide_are_taken():
    rules = Rules.of("convert", {"embed": None, "head": None, "**": MX})
    rules.require_used("convert", ["blocks/0", "head"], ["embed"])


def test_the_report_counts_and_groups():
    report = ConversionReport((
        ConvertedModule("a/0", "Linear", 1000, True, "", MX), ConvertedModule("a/1", "Linear", 1000, True, "", MX),
        ConvertedModule("head", "Linear", 500, False, "the rule 'head' left it"),
        ConvertedModule("", "Model", 0, False, "no layer that convert knows"),
    ))  # fmt: skip
    assert (report.converted, report.left) == (2000, 500)
    assert str(report).splitlines() == [
        "convert: 2,000 of 2,500 parameters (80.0 %) are in layers that quantize",
        "  converted           2,000  Linear: a/0 and 1 more; MXFP8BlockScaling",
        "  left                  500  Linear: head; the rule 'head' left it",
        "  left                    0  Model: the model; no layer that convert knows",
    ]
    assert str(ConversionReport(())) == "convert: 0 of 0 parameters (nothing) are in layers that quantize"
