"""The examples and the code on pages run, and the examples learn."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNNER = """
import runpy, sys
for path in sys.argv[1:]:
    print("==", path, flush=True)
    print(path, file=sys.stderr)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
"""


def printed(*paths: Path) -> dict[str, str]:
    """What each program prints. One process runs them one after another, so that frameworks are imported once."""
    done = subprocess.run([sys.executable, "-c", RUNNER, *paths], capture_output=True, text=True, timeout=600)
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


PAGES = ("recipes.md", "states.md", "transformer_engine.md", "compile.md", "custom_ops.md", "moe.md")


def test_code_on_pages_runs(tmp_path):
    """Each block by itself: it finds none of the names of those before it."""
    paths = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
        assert blocks, page
        for number, block in enumerate(blocks):
            paths.append(tmp_path / f"{Path(page).stem}{number}.py")  # ops look up their dataclass, Dynamo the source
            paths[-1].write_text(block)
    printed(*paths)
