"""The examples and the code on pages run, and the examples learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNNER = """
import os, runpy, sys
for path in sys.argv[1:]:
    sys.path[0] = os.path.dirname(path)  # as python itself does
    print("==", path, flush=True)
    print(path, file=sys.stderr)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


def printed(*paths: Path) -> dict[str, str]:
    """What each program prints. One process runs them one after another, so that frameworks are imported once."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"  # they compile longer than they run
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *paths],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, texts = zip(*(part.split("\n", 1) for part in done.stdout.split("== ")[1:]), strict=True)
    assert [*names] == [str(path) for path in paths]
    return dict(zip(names, texts, strict=True))


@pytest.mark.parametrize("framework", ("jax", "torch"))
def test_examples_learn(framework):
    paths = [p for p in EXAMPLES if p.name.startswith("jax") == (framework == "jax")]
    assert len(paths) >= 3
    for path, text in printed(*paths).items():
        losses = [float(v) for v in re.findall(r"loss (\S+)", text)]
        assert len(losses) >= 2 and losses[-1] < losses[0], (path, text)


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_code_on_pages_runs(tmp_path):
    """Each block by itself: it finds none of the names of those before it."""
    paths, pages = [], set()
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            paths.append(tmp_path / f"{page.stem}_{len(paths)}.py")  # ops look up their dataclass, Dynamo the source
            paths[-1].write_text(block)
            pages.add(page.stem)
    assert pages >= {"README", "recipes", "states", "transformer_engine", "compile", "custom_ops", "moe", "numerics"}
    printed(*paths)
