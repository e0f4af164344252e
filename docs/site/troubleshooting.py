"""Writes the entries of docs/troubleshooting.md, below its comment, from docstrings of classes."""

from __future__ import annotations

from pathlib import Path

from diptych.common.errors import ExplainedWarning
from diptych.lab.explain import classes, explained

PAGE = Path(__file__).parents[1] / "troubleshooting.md"
BELOW = "<!-- Below: written by `python docs/site/troubleshooting.py` from the docstrings of the classes. -->\n"


def entry(name: str) -> str:
    e = explained(name)
    return f"### {name}\n{e['is']} It is a `{e['catch']}`.\n\n- **Cause**: {e['cause']}\n- **Remedy**: {e['remedy']}\n"


def written(page: str) -> str:
    """Returns the page with the entries of all classes."""
    found = {name: (issubclass(held, ExplainedWarning), ".lab." in held.__module__) for name, held in classes().items()}
    said = [page[: page.index(BELOW)] + BELOW]
    for title, kind in (
        ("Warnings", (True, False)),
        ("Errors", (False, False)),
        ("Warnings of the lab", (True, True)),
        ("Errors of the lab and its commands", (False, True)),
    ):
        names = sorted(name for name, of in found.items() if of == kind)
        said.append("\n".join([f"## {title}\n", *map(entry, names)]))
    return "\n".join(said)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
