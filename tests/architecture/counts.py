"""Counts that measure how much a reader must read, with bounds: `python tests/architecture/counts.py` prints them."""

from __future__ import annotations

import sys
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
# Bounds are lowered whenever the figure falls, until they reach the goal, and never raised.
# For each walk: files on the path to the kernel (goals: 7 and 15), files of a third call, files of all three.
WALKS = {"dt.quantize": (6, 12, 15), "Linear.forward": (10, 21, 34)}


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
    return room not in rules.UNPAIRED_ROOMS and name not in ("", "__init__.py")


def lines(root: Path) -> list[int]:
    """Returns the lengths in lines of all non-empty sources, including tests, in ascending order."""
    return sorted(n for path in rules.sources(root) if (n := len(path.read_text().splitlines())))


def argument_files(root: Path) -> list[str]:
    """Returns the files that contain the argument's name, except kernels and generated files."""
    paths = (p.relative_to(root).as_posix() for p in rules.sources(root) if ARGUMENT in p.read_text())
    return [p for p in paths if p.startswith(ARGUMENT_FOLDERS) and not p.startswith(UNCOUNTED)]


def figures(root: Path) -> list[Figure]:
    lengths = lines(root)
    return [
        Figure(
            "percent of a panel's files that have a twin in the other panel", shared_basenames(root), 85, least=True
        ),
        Figure("files that one panel alone has", sum(len(rules.UNPAIRED[panel]) for panel in rules.ROOMS), 12),
        Figure("files of the lab that one framework's part alone has", len(rules.UNPAIRED["lab.jax"]), 5),
        Figure("rooms that one panel alone has", len(rules.UNPAIRED_ROOMS), 5),  # `graph` was two rooms of one name
        Figure("lines that nine of ten sources keep within", lengths[len(lengths) * 9 // 10], 349),
        Figure("lines of the longest source", lengths[-1], rules.MAX_LINES),
        Figure("circles of imports", len(rules.import_circles(root)), 0),
        Figure(f"files outside of kernels that mention {ARGUMENT}", len(argument_files(root)), ARGUMENT_FILES),
        *(figure for name, walk in walks.in_a_fresh_process().items() for figure in _of_a_walk(name, walk)),
    ]


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
