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


PAGES = ("recipes.md", "compile.md", "custom_ops.md")
BLOCKS = [
    (page, block)
    for page in PAGES
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
]


@pytest.mark.parametrize("number", range(len(BLOCKS)), ids=lambda i: f"{BLOCKS[i][0]}-{i}")
def test_code_on_a_page_runs(number, tmp_path):
    path = tmp_path / "block.py"  # a file: ops look their dataclass up, and Dynamo the source
    path.write_text(BLOCKS[number][1])
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
