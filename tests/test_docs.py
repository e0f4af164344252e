"""The pages agree with each other and with the files: links, file names, the index of decisions, the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
FOLDERS = ("core_cuda", "common", "torch_frontend", "jax_frontend", "lab", "tests", "benchmarks", "examples", "docs")
MOVED = DOCS / "moved.md"  # the first column of its table has paths that do not exist any more
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.M)
ENTRY = re.compile(r"^## (\d+)\. (.*)$", re.M)


def prose(page: Path) -> str:
    """A page's text without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchor(heading: str) -> str:
    """The fragment under which mkdocs and code hosts find a heading."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(page)):
        path, _, fragment = link.partition("#")
        if ":" in path:
            continue  # another site
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            broken.append(f"{link}: no such file")
        elif fragment and fragment not in map(anchor, HEADING.findall(prose(target))):
            broken.append(f"{link}: no such heading")
        elif page.is_relative_to(DOCS) and not target.is_relative_to(DOCS):
            broken.append(f"{link}: leaves docs/, where a built site has nothing")
    return broken


def missing_files(page: Path) -> list[str]:
    """Paths in the project that stand between backticks on a page and do not exist; `*` and `<...>` match anything."""
    text = prose(page) if page != MOVED else re.sub(r"^\|[^|]*", "", prose(page), flags=re.M)
    named = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w./*<>-]*)`", text)
    return [path for path in named if not list(ROOT.glob(re.sub(r"<[^>]*>", "*", path).rstrip("/")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_file_names(page):
    assert broken_links(page) == []
    assert missing_files(page) == []


def test_a_broken_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    links = "[a](#a-b) [b](#b) [c](none.md) [d](https://example.org/x#y)"
    page.write_text(f"# A b\n{links}\n`tests/none.py` `tests/test_*.py`\n")
    assert broken_links(page) == ["#b: no such heading", "none.md: no such file"]
    assert missing_files(page) == ["tests/none.py"]


def test_the_site_has_every_page():
    named = re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md"))


def test_the_index_of_decisions_is_complete():
    entries = {}
    for page in sorted((DOCS / "decisions").glob("*.md")):
        for number, title in ENTRY.findall(page.read_text()):
            assert number not in entries, f"two entries have the number {number}"
            entries[number] = (title, f"{page.name}#{anchor(f'{number}. {title}')}")
    rows = re.findall(r"^\| (\d+) \| \[(.*)\]\((.*)\) \|", (DOCS / "decisions/index.md").read_text(), re.M)
    assert [(n, (title, link)) for n, title, link in rows] == sorted(entries.items(), key=lambda e: int(e[0]))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


def test_a_word_has_one_meaning():
    words = [
        w for entry in re.findall(r"^- (\*\*.*?):", (DOCS / "glossary.md").read_text(), re.M) for w in entry.split(", ")
    ]
    assert len(words) > 50
    assert sorted({w for w in words if words.count(w) > 1}) == []
