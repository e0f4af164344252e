"""Which code a section's rows come from, as one hash. Comments, docstrings and blank lines do not count."""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from pathlib import Path

from benchmarks.cases import Section

ROOT = Path(__file__).resolve().parents[1]
REGISTRY = "core_cuda/src/registry.cpp"
LONE_OPS = "core_cuda/include/diptych/lone_ops.def"
CPP = (".h", ".cpp", ".cu", ".cuh", ".def")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
OWN = ("bindings", "contracts", "csrc", "diptych", "functional", "isa", "ops", "primitives")  # with a file for each op
LISTED = r'^\s*(OP\({op},|\{{Op::{op},|(void )?add_{op}\(|#include "diptych/{op}\.h"|"{op}",$).*$'
STRING_OR_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|//[^\n]*|/\*.*?\*/', re.S)


def _python(text: str) -> str:
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.value.value is not None:
                lines[first.lineno - 1 : first.end_lineno] = [""] * ((first.end_lineno or 0) - first.lineno + 1)
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _cpp(text: str) -> str:
    return " ".join(STRING_OR_COMMENT.sub(lambda m: m[1] or " ", text).split())


@functools.cache
def code(path: Path, without: tuple[str, ...] = ()) -> str:
    """Returns a file's text without comments, docstrings, blank lines and the lines that list an op of `without`."""
    text = path.read_text()
    for op in without:
        text = re.sub(LISTED.format(op=op), "", text, flags=re.M)
    return _python(text) if path.suffix == ".py" else _cpp(text) if path.suffix in CPP else text


def _included(path: Path, root: Path) -> list[Path]:
    core = root / "core_cuda"
    folders = (path.parent, core, core / "include", core / "src", core / "bindings", root)
    names = INCLUDE.findall(path.read_text()) if path.suffix in CPP else []
    return [next(f / n for f in folders if (f / n).is_file()) for n in names if any((f / n).is_file() for f in folders)]


def files(section: Section, root: Path = ROOT) -> list[Path]:
    """Returns the section's files and, again and again, the files that they include."""
    found = {p.resolve() for pattern in section.sources for p in root.glob(pattern) if p.suffix in (*CPP, ".py")}
    new = found
    while new:
        new = {p.resolve() for path in new for p in _included(path, root)} - found
        found = found | new
    return sorted(found)


def digest(section: Section, root: Path = ROOT) -> str:
    """Returns the hash of the section's code, and of the kernel table's rows of its ops.

    Ops of lone_ops.def count only where the section names them: the folders and files that have an op's name, and the
    lines of frontends, bindings and contracts that list it.
    """
    total = hashlib.sha256()
    lone = re.findall(r"^OP\((\w+),", (root / LONE_OPS).read_text(), re.M)
    others = tuple([op for op in lone if op not in section.ops])
    for path in files(section, root):
        folder, name = path.parent.name, re.sub("^(simd)?_", "", path.stem)
        if folder not in others and not (folder in OWN and name in others):
            total.update(f"{path.relative_to(root.resolve())}\0{code(path, others)}\0".encode())
    rows = (root / REGISTRY).read_text().splitlines() if section.ops else []
    total.update("\n".join(r for r in rows if any(f"{{Op::{op}," in r for op in section.ops)).encode())
    return total.hexdigest()[:16]
