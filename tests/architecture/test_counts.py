"""Prints the project's figures (`pytest -s`), and compares them with their bounds."""

from pathlib import Path

from architecture import counts

ROOT = Path(__file__).resolve().parents[2]


def test_figures_keep_their_bounds():
    found = counts.figures(ROOT)
    print(*found, sep="\n")
    assert not [str(figure) for figure in found if not figure.kept]


def test_a_figure_beyond_its_bound_is_seen(tmp_path):
    room = tmp_path / "torch_frontend/diptych/torch/layers"
    room.mkdir(parents=True)
    (room / "x.py").write_text(f"{counts.ARGUMENT} = True\n" * 3)
    assert counts.lines(tmp_path) == [3]
    assert counts.argument_files(tmp_path) == ["torch_frontend/diptych/torch/layers/x.py"]
    assert counts.shared_basenames(tmp_path) == 0
    assert not counts.Figure("x", 3, 2).kept and not counts.Figure("x", 2, 3, least=True).kept
