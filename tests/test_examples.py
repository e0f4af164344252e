"""The examples run as a user would run them, and learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_example_learns(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    losses = [float(v) for v in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses) >= 2 and losses[-1] < losses[0], done.stdout


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUNNER = """
import runpy, sys
for path in sys.argv[1:]:
    print(path, file=sys.stderr)
    runpy.run_path(path, run_name="__main__")
"""


def test_code_on_pages_runs(tmp_path):
    """Each block by itself: it finds none of the names of those before it. One process imports torch for all."""
    paths, pages = [], set()
    for page in PAGES:
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.S):
            paths.append(tmp_path / f"{page.stem}_{len(paths)}.py")  # ops look up their dataclass, Dynamo the source
            paths[-1].write_text(block)
            pages.add(page.stem)
    assert pages >= {"README", "recipes", "states", "transformer_engine", "compile", "custom_ops", "moe", "numerics"}
    done = subprocess.run([sys.executable, "-c", RUNNER, *paths], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
