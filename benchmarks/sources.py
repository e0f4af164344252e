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
CPP = (".h", ".cpp", ".cu", ".cuh", ".def")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)
IMPORT = re.compile(r"^ *from diptych\.(common|torch|jax)\.?([\w.]*) import (\([^)]*\)|.*)", re.M)
# Files that list ops and hold nothing else. A new op changes them, and the speed of no other op.
LISTS = ("ops.def", "ops.h", "families.def")
REGISTRY = "core_cuda/src/registry.cpp"
ROW = re.compile(r"^ *\{Op::(\w+),.*$", re.M)  # of the kernel table: the rows of a section's ops count alone
# Whose files count where they are imported. Their faces, which import everything, do not.
PACKAGES = {"common": "common", "torch": "torch_frontend", "jax": "jax_frontend"}
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


@functools.cache  # by the text: many sections share most files
def _code(suffix: str, text: str) -> str:
    return _python(text) if suffix == ".py" else _cpp(ROW.sub("", text)) if suffix in CPP else text


def code(path: Path) -> str:
    """Returns a file's text without comments, docstrings, blank lines and rows of the kernel table."""
    return _code(path.suffix, path.read_text())


@functools.cache  # by the text too, since a test changes files
def _needed(path: Path, root: Path, text: str) -> list[Path]:
    """Returns the files that a file of this text includes or imports."""
    if path.suffix == ".py":
        found = []
        for package, below, names in IMPORT.findall(text):
            module = Path(root, PACKAGES[package], "diptych", package, *below.split("."))
            found += [module / f"{name}.py" for name in re.findall(r"\w+", names)] + [module.with_suffix(".py")]
        return [p.resolve() for p in found if p.is_file()]
    core = root / "core_cuda"
    folders = (path.parent, core, core / "include", core / "src", core / "bindings", root)
    found = [[f / name for f in folders if (f / name).is_file()] for name in INCLUDE.findall(text)]
    return [files[0].resolve() for files in found if files]


def files(section: Section, root: Path = ROOT) -> list[Path]:
    """Returns the section's files and, again and again, the files that they include or import."""
    found = {p.resolve() for pattern in section.sources for p in root.glob(pattern) if p.suffix in (*CPP, ".py")}
    new = found
    while new:
        needed = {p for path in new for p in _needed(path, root, path.read_text())}
        new = {p for p in needed if p.name not in LISTS} - found
        found = found | new
    return sorted(found)


def digest(section: Section, root: Path = ROOT) -> str:
    """Returns the hash of the section's code, and of the kernel table's rows of its ops."""
    total = hashlib.sha256()
    for path in files(section, root):
        total.update(f"{path.relative_to(root.resolve())}\0{code(path)}\0".encode())
    rows, backend = ROW.finditer((root / REGISTRY).read_text()), "cpu" if section.device == "cpu" else "cuda"
    total.update("\n".join(r[0] for r in rows if r[1] in section.ops and f"Backend::{backend}," in r[0]).encode())
    return total.hexdigest()[:16]
