"""The examples and the code on pages run, and the examples learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sweeps import named, others_slow

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").glob("*.py"))}
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
    """Returns the output of each program. One process runs them one after another, so that frameworks are imported
    once."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"  # they compile longer than they run
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *paths],
        env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names, texts = zip(*(part.split("\n", 1) for part in done.stdout.split("== ")[1:]), strict=True)
    assert [*names] == [str(path) for path in paths]
    return dict(zip(names, texts, strict=True))


@pytest.mark.parametrize("name", others_slow(EXAMPLES, ("jax_train.py",)))
def test_examples_learn(name):
    """With the tests runs the one that compiles quickly. The first block of README.md is torch_train.py's step."""
    (text,) = printed(EXAMPLES[name]).values()
    losses = [float(v) for v in re.findall(r"loss (\S+)", text)]
    assert len(losses) >= 2 and losses[-1] < losses[0], text


def blocks(page: Path) -> list[tuple[str, str]]:
    """Returns the Python blocks of a page, each with the output that the page shows right below it, or ""."""
    return re.findall(r"```python\n(.*?)```(?:\n\n```output\n(.*?)```)?", page.read_text(), re.S)


def without_losses(text: str) -> str:
    """Returns output without its losses, whose last digits depend on the processor."""
    return re.sub(r"\bloss \S+", "loss", text)


ELSEWHERE = ROOT / "docs/trainers.md"  # tests/integrations has its packages
ALL = sorted({ROOT / "README.md", *(ROOT / "docs").rglob("*.md")} - {ELSEWHERE})
PAGES = {str(page.relative_to(ROOT)): found for page in ALL if (found := blocks(page))}


def test_examples_and_pages_are_found():
    assert {path[:3] for path in EXAMPLES} >= {"jax", "tor"} and len(EXAMPLES) >= 8
    assert {Path(page).stem for page in PAGES} >= {
        "README", "recipes", "states", "transformer_engine", "compile", "custom_ops", "moe", "numerics"
    }  # fmt: skip


@pytest.mark.parametrize("code", named(PAGES, ("README.md", "docs/quick_start.md")))
def test_code_on_pages_runs(tmp_path, code):
    """Each block by itself: it finds none of the names of those before it. It prints what the page shows below it."""
    paths = [tmp_path / f"block_{i}.py" for i in range(len(code))]  # ops look up their dataclass, Dynamo the source
    for path, (block, _) in zip(paths, code, strict=True):
        path.write_text(block)
    for text, (_, shown) in zip(printed(*paths).values(), code, strict=True):
        assert not shown or "cuda" in text or without_losses(text) == without_losses(shown)
