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


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), re.S)


@pytest.mark.parametrize("block", range(len(BLOCKS)))
def test_the_page_on_recipes_runs(block):
    done = subprocess.run([sys.executable, "-c", BLOCKS[block]], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
