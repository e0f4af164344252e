"""Shows docstrings on the API reference: prose of arguments becomes a table, and public names become links.

A docstring says `**Arguments:** ...; `name`: ...` in prose, which reads well in an editor. griffe (mkdocstrings) calls
this extension once the package is loaded; nothing is imported, and no source file is changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

HEADING = re.compile(r"^\*\*(\w+):\*\*\s*")
NAME = r"`\*{0,2}[\w.]+(?:=[^`]*)?`"
ENTRY = re.compile(rf"(?:^|(?<=[.;] ))({NAME}(?:(?:, | and |, and | or ){NAME})*): ")
CODE = re.compile(r"(?<![`\[\w])`([\w.]+)`(?![`\]])")
SHOWN = re.compile(r"^::: (\S+)$", re.M)
SECTION = re.compile(r"NUMERICS (\d+)(?:-(\d+))?")
# Modules whose `__all__` are public, by the prefix under which docstrings may name them.
SPACES = {
    "diptych.common": ("",), "diptych.core": ("core.",), "diptych.torch": ("dt.",), "diptych.jax": ("dj.",),
    "diptych.torch.parallel": ("parallel.", "dt.parallel."),
}  # fmt: skip


class Prose(griffe.Extension):
    """Rewrites the docstrings of a package."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        if pkg.path != "diptych":
            return
        docs = Path(__file__).parents[1]
        on_pages = {name for page in (docs / "api").glob("*.md") for name in SHOWN.findall(page.read_text())}
        links = {
            space: {said: path for said, path in _names(pkg, space).items() if path in on_pages} for space in SPACES
        }
        sections = _sections(docs / "numerics.md")
        for held in _objects(pkg):
            if held.docstring:
                held.docstring.value = shown(held.docstring.value, _reachable(held, links), sections)


def shown(text: str, links: dict[str, str], sections: dict[str, str] | None = None) -> str:
    """Returns a docstring as the Markdown of a page.

    **Arguments:** `links`: the full name of each public name that may be linked. `sections`: the anchors of the
    sections of the page Numerics, by number.
    """
    return "\n\n".join(_paragraph(part, links, sections or {}) for part in re.split(r"\n\s*\n", text))


def _paragraph(text: str, links: dict[str, str], sections: dict[str, str]) -> str:
    if text.startswith(("    ", "```", "|")):
        return text
    found = HEADING.match(text)
    if found and found[1] == "Arguments":
        return _arguments(text[found.end() :], links, sections)
    head = f"**{found[1]}**: " if found else ""
    body = text[found.end() :] if found else text
    return head + _linked(_list_apart(body), links, sections)


def _list_apart(text: str) -> str:
    """Returns text in which a list that follows a sentence directly begins a paragraph, as Markdown asks."""
    return re.sub(r"\A((?!- ).+?\n)(?=- )", r"\1\n", text, count=1, flags=re.S)


def _arguments(text: str, links: dict[str, str], sections: dict[str, str]) -> str:
    """Returns a table of the arguments, after the text that precedes the first one."""
    flat = " ".join(re.sub(r"(?m)^- ", "", text).split())
    first, *parts = ENTRY.split(flat)
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    before = f"**Arguments**: {_linked(first.strip(), links, sections)}" if first.strip() else "**Arguments**"
    if not pairs:
        return before
    rows = [f"| {_cell(name)} | {_cell(_linked(said.strip().rstrip(';'), links, sections))} |" for name, said in pairs]
    return "\n".join([before, "", "| argument | meaning |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _linked(text: str, links: dict[str, str], sections: dict[str, str]) -> str:
    def link(found: re.Match[str]) -> str:
        return f"[`{found[1]}`][{links[found[1]]}]" if found[1] in links else found[0]

    def section(found: re.Match[str]) -> str:
        if found[1] not in sections:
            return found[0]
        return f"[Numerics {found[1]}{f' to {found[2]}' if found[2] else ''}][{sections[found[1]]}]"

    return SECTION.sub(section, CODE.sub(link, text))


def _names(pkg: griffe.Module, space: str) -> dict[str, str]:
    """Returns the public names of a module, as docstrings write them, and their full names."""
    module = pkg[space.removeprefix("diptych.")]
    names = [str(getattr(n, "name", n)) for n in module.exports or ()]
    return {prefix + name: f"{space}.{name}" for name in names for prefix in ("", *SPACES[space])}


def _sections(page: Path) -> dict[str, str]:
    """Returns the anchor of each numbered section of a page."""
    titles = re.findall(r"^## ((\d+)\. .*)$", page.read_text(), re.M)
    return {number: re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title.lower())) for title, number in titles}


def _objects(held: Any) -> Iterator[griffe.Object]:
    """Yields a module or class and all that is defined in it."""
    yield held
    for member in held.members.values():
        if not member.is_alias:
            yield from _objects(member)


def _reachable(held: griffe.Object, links: dict[str, dict[str, str]]) -> dict[str, str]:
    """Returns the names that an object's docstring means: those of its own frontend and the common ones, without its
    own name and its arguments."""
    own = next((s for s in ("diptych.torch", "diptych.jax", "diptych.core") if f"{held.path}.".startswith(f"{s}.")), "")
    names = {path: path for known in links.values() for path in known.values()} | links["diptych.common"]
    if own == "diptych.torch":
        names |= links["diptych.torch.parallel"]
    names |= links[own] if own else {}
    arguments = {p.name for p in getattr(held, "parameters", ())} | set(held.members)
    return {n: path for n, path in names.items() if n not in arguments and n != held.name}
