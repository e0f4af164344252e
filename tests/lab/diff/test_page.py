"""The page of a comparison as text: what it holds, that it loads nothing, and that no name breaks out of its place."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import math
import re

import pytest
import results

from diptych.lab.diff import page
from diptych.lab.diff.result import Cell

HOSTILE = """</script><img src=x onerror=alert(1)>"'&<!--{{ 7 * 7 }}"""


class Document(html.parser.HTMLParser):
    """The tags of a page with their attributes, the texts of its script and style elements, and all other text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.inside, self.texts, self.prose = [], [], {}, ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.inside.append(dict(attrs).get("id", tag))

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.inside.pop()

    def handle_data(self, data):
        if self.inside:
            self.texts[self.inside[-1]] = self.texts.get(self.inside[-1], "") + data
        else:
            self.prose += data


def read(text: str) -> dict:
    return json.loads(Document(text).texts["data"])


def numbers(data: dict, name: str, row: int) -> list:
    of = data["cells"][name][row]
    return of if isinstance(of, list) else [of] * len(data["steps"])


@pytest.mark.parametrize("made", [results.result(), results.result(references=False), results.result(fault=None)])
def test_the_cells_that_a_page_holds_are_the_results(made):
    data = read(page.render(made))
    assert data["steps"] == list(made.steps) and data["rows"]["name"] == [row.name for row in made.rows]
    assert data["rows"]["kind"] == [row.kind for row in made.rows]
    for i, row in enumerate(made.rows):
        assert [data["severity"][int(c)] for c in data["verdicts"][i]] == [c.verdict for c in row.cells]
        for name, field in (("ulp", "max_ulp"), ("differing", "differing"), ("compared", "compared")):
            assert numbers(data, name, i) == [getattr(c, field) for c in row.cells]
        for name in ("relative", "noise", "definition"):
            wanted = [getattr(c, name) for c in row.cells]
            for x, y in zip(numbers(data, name, i), wanted, strict=True):
                assert (x is None and y is None) or x == pytest.approx(y, rel=5e-5, abs=0)


def test_what_is_no_number_and_what_is_missing_stay_apart():
    made = results.result(1, 3, 4)
    cells = (Cell(0, "differs", math.inf, None, 3, 4), Cell(2, "unknown", None, None, None, 0, math.nan))
    data = read(page.render(results.changed(made, 2, cells=cells)))
    assert numbers(data, "relative", 2) == ["inf", None, None]
    assert numbers(data, "noise", 2) == [None, None, "nan"]
    assert numbers(data, "compared", 2) == [4, None, 0]
    codes = [None if c == "." else data["severity"][int(c)] for c in data["verdicts"][2]]
    assert codes == ["differs", None, "unknown"]


def test_equal_results_give_equal_pages():
    once, other = (page.render(results.result(seed=3)) for _ in range(2))
    assert once == other
    made = results.result(seed=3)
    cell = dataclasses.replace(made.rows[4].cells[1], max_ulp=7)
    assert page.render(results.changed(made, 4, cells=(made.rows[4].cells[0], cell, *made.rows[4].cells[2:]))) != once


def test_names_stay_text():
    made = results.result()
    sides = tuple(dataclasses.replace(s, folder=HOSTILE, recipe=HOSTILE, framework=HOSTILE) for s in made.sides)
    ambiguous = (dataclasses.replace(made.ambiguous[0], a=(HOSTILE,), why=HOSTILE),)
    made = results.changed(made, made.first[0].row, name=HOSTILE, b=HOSTILE)
    made = dataclasses.replace(
        made, sides=sides, ambiguous=ambiguous, unmatched_a=(HOSTILE,), unmatched_b=(HOSTILE,), notes=(HOSTILE,)
    )
    text = page.render(made)
    document = Document(text)
    assert "img" not in [tag for tag, _ in document.tags] and text.count("</script") == 2 and "<!--" not in text
    heads, table, lists, first = 2 * 2, 3 * len(sides), 2 + 3, 1
    assert document.prose.count(HOSTILE) == heads + table + lists + first
    assert json.loads(document.texts["data"])["rows"]["name"][made.first[0].row] == HOSTILE


def test_recipes_that_are_long_fold_to_their_name_and_none_is_not_recorded():
    made = results.result()
    long = f"Float8CurrentScaling({', '.join(f'option_{i}=False' for i in range(30))})"
    sides = tuple(dataclasses.replace(s, recipe=long if s.role == "A" else s.recipe) for s in made.sides)
    text = page.render(dataclasses.replace(made, sides=sides))
    cells = [row.split("<td")[4] for row in text.split('<h2 id="sides">')[1].split("<tr>")[2:6]]
    assert f"<summary>Float8CurrentScaling</summary>{long}</details>" in cells[0]
    assert ">mxfp8<" in cells[1] and all(">not recorded<" in cell for cell in cells[2:])


def test_steps_above_the_whole_numbers_of_float64_are_text():
    made = dataclasses.replace(results.result(1, 2, 4, fault=None), steps=(2**53, 2**53 + 1))
    made = results.changed(made, 0, cells=())
    rows = tuple(
        dataclasses.replace(row, cells=tuple(dataclasses.replace(c, step=2**53 + c.step) for c in row.cells))
        for row in made.rows
    )
    data = read(page.render(dataclasses.replace(made, rows=rows)))
    assert data["steps"] == [2**53, str(2**53 + 1)]


def test_the_policy_allows_the_pages_own_script_and_style_alone():
    document = Document(page.render(results.result()))
    policy = next(a["content"] for tag, a in document.tags if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(document.texts[name].encode()).digest()).decode()
        assert rules.pop(f"{name}-src") == f"'sha256-{digest}'"
    assert set(rules.values()) == {"'none'"} and "default-src" in rules


def test_the_page_loads_nothing():
    text = page.render(results.result())
    named = {name for _, attributes in Document(text).tags for name in attributes}
    assert not named & {"src", "href", "style", "action", "srcset"} and not [n for n in named if n.startswith("on")]
    rest = text.replace("http://www.w3.org/2000/svg", "")  # the name of a namespace
    assert not re.search(r"https?://|url\(|@import|fetch\(|XMLHttpRequest|import\(", rest)
    assert "{{" not in text and "{%" not in text


def unjudged(differing: int, status):
    """A result whose first row is unknown."""
    made = dataclasses.replace(results.result(fault=None), status=status)
    return results.changed(made, 0, cells=tuple(Cell(i, "unknown", None, None, differing, 9) for i in range(3)))


@pytest.mark.parametrize(
    "made, tone, words",
    [
        (results.result(), "bad", "differ by more than rounding"),
        (results.result(references=False), "bad", "sites differ"),
        (results.result(fault=None), "good", "No difference beyond rounding"),
        (results.result(references=False, fault=None), "good", "No difference"),
        (dataclasses.replace(results.result(fault=None), rows=(), steps=()), "none", "Nothing was compared"),
        (unjudged(0, "green"), "none", "No difference beyond rounding in what was judged; 3 of "),
        (unjudged(5, "differs"), "bad", "cells differ, and no reference judges them"),
        (dataclasses.replace(results.result(fault=None), status="differs"), "bad", "have other shapes"),
    ],
)
def test_the_header_says_the_status_in_words(made, tone, words):
    text = page.render(made)
    assert f'class="status {tone}-tone"' in text
    assert words in text.split('<h2 id="status">')[1].split("</h2>")[0]
    assert ("Show in the map" in text) == bool(made.first)


def test_the_header_names_the_first_of_each_direction():
    made = results.result(3, 5, 40, fault=(1, 2))
    assert {made.rows[f.row].name for f in made.first} == {"h.1.mlp.c_fc", "(model)"}
    prose = " ".join(Document(page.render(made)).prose.split())
    for heading, f in zip(("Forward", "Backward"), made.first, strict=True):
        row = made.rows[f.row]
        cell = row.cells[f.step]
        part = prose.split(f"{heading}: first to differ")[1][:300]
        assert part.startswith(f" {row.name} step {f.step} kind {row.kind.replace('_', ' ')} ▲ differs by definition")
        assert cell.differing is not None
        assert f"{100 * cell.differing / cell.compared:.3g} %" in part and f"R {cell.noise:.3g}" in part


def test_a_direction_whose_findings_all_follow_from_others():
    made = results.result(3, 5, 40, fault=(1, 2))
    made = dataclasses.replace(made, first=made.first[:1])
    prose = Document(page.render(made)).prose
    found = sum(row.kind.endswith("grad") and any(c.verdict != "rounding" for c in row.cells) for row in made.rows)
    assert f"All findings, at {found} sites, are computed from sites that differ" in prose


@pytest.mark.parametrize(
    "kind, name, module",
    [
        ("activation", "transformer.h.10.mlp.fc", "transformer.h.10"),
        ("activation", "transformer/h/10/mlp/fc", "transformer/h/10"),
        ("activation", "h.3", "h.3"),
        ("activation", "encoder/layers_3/dense", "encoder/layers_3"),
        ("parameter", "h.0.mlp.fc.weight", "h.0"),
        ("parameter", "wte.weight", "wte"),
        ("parameter_grad", "head/kernel", "head"),
        ("operand", "lm_head/gemm.d", "lm_head"),
        ("operand", "h.0.mlp.fc/quantize.x", "h.0"),
        ("result", "loss", "loss"),
        ("activation", "(model)", "(model)"),
    ],
)
def test_modules_of_names(kind, name, module):
    row = dataclasses.replace(results.result().rows[0], kind=kind, name=name)
    assert page.module_of(row) == module


def test_groups_are_consecutive_rows_of_one_module_and_direction():
    data = read(page.render(results.result(2, 1, 8)))
    of = {}
    for i, group in enumerate(data["rows"]["group"]):
        of.setdefault(group, []).append(i)
    for rows in of.values():
        assert rows == list(range(rows[0], rows[-1] + 1))
        assert len({data["rows"]["kind"][i] for i in rows}) == 1
    assert [data["groups"][g] for g in of][:4] == ["wte parameters", "h.0 parameters", "h.1 parameters", "wte"]


def test_groups_of_several_ranks_are_apart_and_named():
    made = results.result(2, 1, 8, fault=None)
    other = tuple(dataclasses.replace(row, rank=1) for row in made.rows)
    data = read(page.render(dataclasses.replace(made, rows=made.rows + other)))
    group, half = data["rows"]["group"], len(made.rows)
    assert not set(group[:half]) & set(group[half:])
    assert data["groups"][group[0]] == "wte parameters (rank 0)" and data["groups"][group[half + 1]].endswith(
        " (rank 1)"
    )


def test_the_page_of_30_layers_and_100_steps_stays_below_8_mb():
    made = results.result(30, 100, 40, fault=(11, 40))
    assert sum(len(row.cells) for row in made.rows) > 120_000
    assert len(page.render(made).encode()) < 8e6
