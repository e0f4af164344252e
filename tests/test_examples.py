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


PAGES = ("recipes.md", "compile.md", "custom_ops.md", "moe.md")
RUNNER = "import runpy, sys\nfor path in sys.argv[1:]:\n    runpy.run_path(path, run_name='__main__')\n"


@pytest.mark.parametrize("page", PAGES)
def test_code_on_a_page_runs(page, tmp_path):
    """Each block by itself: it finds none of the names of those before it. One process imports torch for all."""
    paths = []
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)):
        paths.append(tmp_path / f"block{number}.py")  # files: ops look their dataclass up, and Dynamo the source
        paths[-1].write_text(block)
    assert paths
    done = subprocess.run([sys.executable, "-c", RUNNER, *paths], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
