"""The API reference has every public name, each with a docstring, and shows prose of arguments as tables; the page
Troubleshooting has every class of errors and warnings."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from diptych.lab.explain import classes

griffe = pytest.importorskip("griffe", reason="the site's packages are not installed: pip install '.[docs]'")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
SHOWN = re.findall(r"^::: (\S+)$", REFERENCE, re.M)
PATHS = ["common", "core_cuda", "torch_frontend", "jax_frontend", "lab"]
# Modules whose `__all__` is public (docs/public.md). `filters` is a name of diptych.torch.
PUBLIC = [
    "diptych.common", "diptych.core", "diptych.torch", "diptych.torch.parallel", "diptych.torch.lab", "diptych.te",
    "diptych.jax", "diptych.jax.nnx", "diptych.jax.linen", "diptych.jax.equinox", "diptych.jax.lab",
]  # fmt: skip
FILTERS = "diptych.torch.filters"


def load(name: str) -> Any:
    """Imports a file of docs/site."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"site/{name}.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def held(path: str) -> Any:
    """Returns the object of a full name."""
    space = max((p for p in [*PUBLIC, FILTERS] if path.startswith(f"{p}.")), key=len)
    module = importlib.import_module("diptych.torch").filters if space == FILTERS else importlib.import_module(space)
    return getattr(module, path.removeprefix(f"{space}."))


def public_names(space: str) -> list[str]:
    module = importlib.import_module("diptych.torch").filters if space == FILTERS else importlib.import_module(space)
    return [f"{space}.{name}" for name in module.__all__]


@pytest.mark.parametrize("space", [*PUBLIC, FILTERS])
def test_every_public_name_is_on_the_reference(space):
    """By its own full name, or by another public name of the same object that its page mentions."""
    known = {id(held(path)) for path in SHOWN}
    missing = [
        path
        for path in public_names(space)
        if path not in SHOWN
        and not (id(held(path)) in known and f"`{path.rpartition('.')[2]}`" in REFERENCE)
        and path
        not in (
            "diptych.torch.filters",
            "diptych.torch.parallel",
            "diptych.te.common",
        )  # modules, whose names are asked for
    ]
    assert missing == [], "add a line `::: NAME` to a page of docs/api for each of these"


def test_the_public_page_names_the_modules():
    said = (DOCS / "public.md").read_text()
    assert [space for space in [*PUBLIC, FILTERS] if f"`{space}`" not in said] == []


def test_the_reference_shows_each_name_once_and_no_other():
    assert len(SHOWN) == len(set(SHOWN)) > 200
    names = {name for space in [*PUBLIC, FILTERS] for name in public_names(space)}
    assert [path for path in SHOWN if path not in names] == []


# Pages that are records, and pages that only point elsewhere.
RECORDS = ("moved.md", "transformer_engine.md")


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda p: str(p.relative_to(DOCS)))
def test_a_page_says_what_the_reader_can_do_afterwards(page):
    if page.parent.name == "decisions" or page.name in RECORDS:
        return
    first = page.read_text().split("\n## ")[0]
    said = r"After (this|reading this) page|[Ll]ook up|: read which|: record what|so that you can"
    assert re.search(said, first), 'say "After this page you can ..." in the first lines'


def test_each_name_has_a_docstring():
    """In the source: a constant's stands below it."""
    package: Any = griffe.load("diptych", search_paths=[ROOT / path for path in PATHS], try_relative_path=False)
    bare, modules = [], []
    for path in SHOWN:
        found = package[path.removeprefix("diptych.")]
        found = found.final_target if found.is_alias else found
        if not found.docstring:
            bare.append(path)
        if found.is_module:  # also where a function has the name of its file, and is imported from the folder
            modules.append(path)
    assert bare == [] and modules == ["diptych.jax.checkpoint_policies"]


PROSE = """Adds numbers.

**Arguments:** as sum, without `start`. `a`, `b`: numbers; a | b. `mode`: "x": either; `scale` does the rest.

**Raises:** TypeError, see `quantize` (NUMERICS 2-3).
"""


def test_prose_becomes_a_table_and_names_become_links():
    prose = load("prose")
    sections = prose._sections(DOCS / "numerics.md")
    shown = prose.shown(PROSE, {"quantize": "diptych.torch.quantize", "scale": "s"}, sections)
    assert shown.splitlines() == [
        "Adds numbers.",
        "",
        "**Arguments**: as sum, without `start`.",
        "",
        "| argument | meaning |",
        "|---|---|",
        r"| `a`, `b` | numbers; a \| b. |",
        '| `mode` | "x": either; [`scale`][s] does the rest. |',
        "",
        "**Raises**: TypeError, see [`quantize`][diptych.torch.quantize] ([Numerics 2 to 3][2-one-scale-per-tensor]).",
    ]


def test_lists_of_arguments_become_tables_and_code_stays():
    shown = load("prose").shown(
        "**Arguments:**\n- `x`: [..., K]. `w`:\n  [N, K].\n\n    x = `y`\n\nUses:\n- one", {"y": "z"}
    )
    table = "| argument | meaning |\n|---|---|\n| `x` | [..., K]. |\n| `w` | [N, K]. |"
    assert shown == f"**Arguments**\n\n{table}\n\n    x = `y`\n\nUses:\n\n- one"


# --- troubleshooting -------------------------------------------------------------------------------------------------


def test_troubleshooting_is_what_its_command_writes():
    page = (DOCS / "troubleshooting.md").read_text()
    assert load("troubleshooting").written(page) == page, "run python docs/site/troubleshooting.py"


def test_every_class_of_errors_and_warnings_is_explained():
    """Private classes are left out: their own files catch them, so that no user sees one."""
    defined = set()
    for folder in PATHS:
        for path in (ROOT / folder / "diptych").rglob("*.py"):
            for name, bases in re.findall(r"^class (\w+)\((.*)\):", path.read_text(), re.M):
                if re.search(r"(Error|Warning|Exception)\b", bases) and not name.startswith("_"):
                    defined.add(name)
    assert defined - set(classes()) == {"ExplainedError", "ExplainedWarning"}
    assert len(classes()) > 20
