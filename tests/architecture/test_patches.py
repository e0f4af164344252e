"""The sources still hold the text that the variants of test_variants.py change: `make test` does not build those."""

from pathlib import Path

import pytest

from architecture.test_variants import MUTANTS, ROWS
from architecture.variant_format import BLOCKS, WHOLE_ROWS, rows

ROOT = Path(__file__).parents[2]
PATCHES = {
    "formats": rows(*ROWS),
    BLOCKS.name: BLOCKS.patches(),
    WHOLE_ROWS.name: WHOLE_ROWS.patches(),
    **{name: (patch,) for name, (_, _, patch) in MUTANTS.items()},
}


@pytest.mark.parametrize("name", PATCHES)
def test_a_patched_text_stands_once_in_the_source(name):
    for patch in PATCHES[name]:
        found = (ROOT / patch.path).read_text().count(patch.old)
        assert found == 1, f"{patch.path} holds {patch.old!r} {found} times: update the patch {name}"
