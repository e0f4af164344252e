"""Prints the files that three calls enter (`pytest -s`), and compares docs/walks.md with them."""

import re
import sys
from pathlib import Path

from architecture.walks import in_a_fresh_process, walk
from diptych.common.formats import format_by_name
from diptych.common.recipes import recipe_by_name

ROOT = Path(__file__).resolve().parents[2]


def test_a_walk_is_in_order_of_first_entry_and_of_our_files_alone():
    def call():
        re.compile("standard library")
        recipe_by_name("mxfp8")
        format_by_name("mxfp8_e4m3")
        recipe_by_name("nvfp4")

    common = "common/diptych/common"
    assert walk(call) == ([f"{common}/recipes.py", f"{common}/formats.py"], [])
    assert sys.getprofile() is None


def test_the_page_shows_the_walks():
    sections = (ROOT / "docs/walks.md").read_text().split("\n## ")
    for name, found in in_a_fresh_process().items():
        print(f"{name}: {len(found.files)} files", *found.files, sep="\n  ")
        (section,) = [s for s in sections if s.startswith(f"From `{name}`")]
        listed = re.findall(r"^\d+\. (\**)`([^`]+)`", section, re.M)
        assert [file for _, file in listed] == found.files, name
        assert [file for bold, file in listed if bold] == found.way, name
        assert re.findall(r"^- `([^`]+)`", section, re.M) == found.preparation, name
