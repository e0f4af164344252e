"""Counts that measure how much a reader must read, with bounds: `python tests/architecture/counts.py` prints them."""

from __future__ import annotations

import ast
import collections
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from architecture import rules, walks

ROOT = Path(__file__).resolve().parents[2]
# An option of products that every layer passes on: the number of files that contain it shows how often an op's
# arguments are written. Kernels, which must read it, and generated files are not counted.
ARGUMENT, UNCOUNTED = "fast_accum", ("core_cuda/cpu", "core_cuda/cuda", "core_cuda/diptych/core/_core.pyi")
ARGUMENT_FOLDERS = ("common", "core_cuda", "torch_frontend", "jax_frontend", "lab")
ARGUMENT_FILES = 10
PRIVATE_FILES = {"torch": 8, "jax": 1}  # by framework
# Bounds are lowered whenever the figure falls, until they reach the goal, and never raised.
# For each walk: files on the path to the kernel (goals: 7 and 15), files of a third call, files of all three.
# Functions that are not public and have more than ten parameters, by file, with the reason.
OP = "torch passes each argument of an op's schema by itself"
LONG_LISTS = {
    "torch_frontend/diptych/torch/primitives/gemm.py": (4, OP),
    "torch_frontend/diptych/torch/primitives/grouped.py": (4, OP),
}
BODY = 60  # lines of a function without its docstring
NESTING, NESTED_FOLDERS = 5, (*rules.PACKAGES.values(), "benchmarks", "tests/architecture")
WALKS = {"dt.quantize": (6, 12, 15), "Linear.forward": (10, 21, 34), "dj.dense": (10, 38, 43)}


class Figure(NamedTuple):
    """A figure of the architecture. `bound`: its upper bound, or with `least` its lower bound."""

    name: str
    value: float
    bound: float
    least: bool = False

    @property
    def kept(self) -> bool:
        return self.value >= self.bound if self.least else self.value <= self.bound

    def __str__(self) -> str:
        verdict = "" if self.kept else ", which it is not"
        return f"{self.name}: {self.value:g} ({'at least' if self.least else 'at most'} {self.bound:g}{verdict})"


def shared_basenames(root: Path) -> float:
    """Returns the percentage of files, in rooms that both panels have, with a twin in the other panel; the lower of
    both panels' percentages."""
    torch, jax = ({f for f in rules.package_files(root, panel) if _in_shared_room(f)} for panel in rules.ROOMS)
    return round(100 * len(torch & jax) / max(len(torch), len(jax), 1), 1)


def _in_shared_room(file: str) -> bool:
    room, _, name = file.partition("/")
    return room not in {*rules.UNPAIRED_ROOMS, *rules.OWN_FILES} and name not in ("", "__init__.py")


def lines(root: Path) -> list[int]:
    """Returns the lengths in lines of all non-empty sources, including tests, in ascending order."""
    return sorted(n for path in rules.sources(root) if (n := len(path.read_text().splitlines())))


def argument_files(root: Path) -> list[str]:
    """Returns the files that contain the argument's name, except kernels and generated files."""
    paths = (p.relative_to(root).as_posix() for p in rules.sources(root) if ARGUMENT in p.read_text())
    return [p for p in paths if p.startswith(ARGUMENT_FOLDERS) and not p.startswith(UNCOUNTED)]


class Function(NamedTuple):
    """A function of a package. `public`: whether users call it, itself or as the constructor of a class."""

    file: str
    name: str
    parameters: int
    body: int
    public: bool


def functions(root: Path) -> list[Function]:
    """Returns the functions of all packages; their parameters without `self` and `cls`."""
    faces = [p for folder in rules.PACKAGES.values() for p in (root / folder).glob("*.py")]
    public = {alias.asname or alias.name for p in faces for node in _imports_from(p) for alias in node.names}
    found = []
    for path in sorted({p for folder in rules.PACKAGES.values() for p in (root / folder).rglob("*.py")}):
        file = path.relative_to(root).as_posix()
        for owner, node in _functions_in(_tree(path)):
            method = isinstance(owner, ast.ClassDef)
            named = owner.name if method and node.name == "__init__" else node.name
            found.append(Function(file, node.name, *_lengths(node, method), named in public))
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _functions_in(node: ast.AST) -> Iterator[tuple[ast.AST, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields the functions below a node, each behind what it is defined in."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, child
        yield from _functions_in(child)


def _imports_from(path: Path) -> list[ast.ImportFrom]:
    return [node for node in _tree(path).body if isinstance(node, ast.ImportFrom)]


def _lengths(node: ast.FunctionDef | ast.AsyncFunctionDef, method: bool) -> tuple[int, int]:
    """Returns the number of parameters, and of the body's lines."""
    given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    first = node.body[1:] if ast.get_docstring(node) else node.body
    body = node.end_lineno - first[0].lineno + 1 if first and node.end_lineno else 0
    return len(given) - (method and bool(given) and given[0].arg in ("self", "cls")), body


_BLOCKS = (
    ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.TryStar, ast.Match,
)  # fmt: skip


def nested(root: Path, depth: int = NESTING) -> list[str]:
    """Returns the functions of packages and benchmarks that have `depth` statements of control flow, each inside of the
    one before. An `elif` is beside its `if`; functions inside of functions are counted by themselves."""
    found = []
    for path in sorted({p for folder in NESTED_FOLDERS for p in (root / folder).rglob("*.py")}):
        names = _nested_in(_tree(path), depth, "", 0)
        found += [f"{path.relative_to(root).as_posix()} {name}" for name in dict.fromkeys(names)]
    return found


def _nested_in(node: ast.AST, depth: int, function: str, now: int) -> list[str]:
    """Returns what `nested` does below a node that stands inside of `now` statements of a function."""
    found = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            found += _nested_in(child, depth, child.name, 0)
            continue
        beside = isinstance(node, ast.If) and isinstance(child, ast.If) and node.col_offset == child.col_offset
        inside = now + (isinstance(child, _BLOCKS) and not beside)
        found += [function] if function and inside >= depth else []
        found += _nested_in(child, depth, function, inside)
    return found


def figures(root: Path) -> list[Figure]:
    lengths = lines(root)
    return [
        Figure(
            "percent of a panel's files that have a twin in the other panel", shared_basenames(root), 85, least=True
        ),
        Figure("files that one panel alone has", sum(len(rules.UNPAIRED[panel]) for panel in rules.ROOMS), 12),
        Figure("files of the lab that one framework's part alone has", len(rules.UNPAIRED["lab.jax"]), 5),
        Figure("rooms that one panel alone has", len(rules.UNPAIRED_ROOMS), 6),  # `graph` was two rooms of one name
        *(
            Figure(f"files that name {framework}'s private API", len(rules.private_users(root, framework)), bound)
            for framework, bound in PRIVATE_FILES.items()
        ),
        Figure("lines that nine of ten sources keep within", lengths[len(lengths) * 9 // 10], 349),
        Figure("lines of the longest source", lengths[-1], rules.MAX_LINES),
        Figure("circles of imports", len(rules.import_circles(root)), 0),
        Figure(f"files outside of kernels that mention {ARGUMENT}", len(argument_files(root)), ARGUMENT_FILES),
        *_of_functions(functions(root)),
        _of_nesting(nested(root)),
        *(figure for name, walk in walks.in_a_fresh_process().items() for figure in _of_a_walk(name, walk)),
    ]


def _of_functions(found: list[Function]) -> list[Figure]:
    long = collections.Counter(f.file for f in found if f.parameters > 10 and not f.public)
    allowed = collections.Counter({file: count for file, (count, _) in LONG_LISTS.items()})
    unlisted = ", ".join(sorted(long - allowed))
    return [
        Figure("functions, not public, with more than ten parameters", long.total(), 8),
        Figure(
            f"of these without a reason in LONG_LISTS{f' ({unlisted})' if unlisted else ''}",
            (long - allowed).total(),
            0,
        ),
        Figure(f"functions with a body of more than {BODY} lines", sum(f.body > BODY for f in found), 0),
    ]


def _of_nesting(found: list[str]) -> Figure:
    names = ", ".join(found)
    return Figure(f"functions nested five deep or more{f' ({names})' if names else ''}", len(found), 0)


def _of_a_walk(name: str, walk: walks.Walk) -> list[Figure]:
    counted = {
        f"files on the way of {name} to the kernel": walk.way,
        f"files that a third {name} enters": walk.files,
        f"files that the first three {name} enter": walk.files + walk.preparation,
    }
    return [Figure(said, len(files), bound) for (said, files), bound in zip(counted.items(), WALKS[name], strict=True)]


def main() -> int:
    found = figures(ROOT)
    print(*found, sep="\n")
    return 0 if all(figure.kept for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
