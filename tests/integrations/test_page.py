"""The code on docs/trainers.md runs, each block by itself."""

from pathlib import Path

from test_examples import blocks, printed

ROOT = Path(__file__).parents[2]


def test_code_on_the_page_runs(tmp_path):
    """In one process, so that packages are imported once."""
    code = blocks(ROOT / "docs/trainers.md")
    assert len(code) == 10
    paths = [tmp_path / f"block_{i}.py" for i in range(len(code))]
    for path, (block, _) in zip(paths, code, strict=True):
        path.write_text(block)
    printed(Path(__file__).with_name("torchvision_ops.py"), *paths)
