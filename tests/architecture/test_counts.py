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


def test_long_parameter_lists_and_bodies_are_seen(tmp_path):
    room = tmp_path / "torch_frontend/diptych/torch"
    room.mkdir(parents=True)
    many = ", ".join(f"a{i}" for i in range(11))
    (room / "__init__.py").write_text("from diptych.torch.x import Shown, shown\n")
    (room / "x.py").write_text(
        f"class Shown:\n    def __init__(self, {many}): ...\n    def run(self, {many}): ...\n\n\n"
        f"def shown({many}): ...\ndef hidden({many}): ...\ndef few(a, b):\n    a\n" + "    b\n" * counts.BODY
    )
    assert {(f.name, f.parameters, f.body > counts.BODY, f.public) for f in counts.functions(tmp_path)} == {
        ("__init__", 11, False, True), ("run", 11, False, False), ("shown", 11, False, True),
        ("hidden", 11, False, False), ("few", 2, True, False),
    }  # fmt: skip
    long, unlisted, bodies = counts._of_functions(counts.functions(tmp_path))
    assert (long.value, unlisted.value, bodies.value) == (2, 2, 1) and not unlisted.kept
    assert "torch_frontend/diptych/torch/x.py" in unlisted.name


def test_nesting_is_seen(tmp_path):
    room = tmp_path / "benchmarks"
    room.mkdir()
    four = "for a in b:\n    while a:\n        try:\n            with a:\n                {}\n        finally: ...\n"
    chain = "if a: ...\n" + "elif b: ...\n" * 6 + "else:\n    if c:\n        if d: ..."

    def function(name, body):
        return f"def {name}():\n" + "".join(f"    {line}\n" for line in body.splitlines())

    inner = four.format(function("within", "if a: ...").replace("\n", "\n" + " " * 16))
    functions = {"deep": four.format("if a: ..."), "flat": four.format("a"), "chain": chain, "outer": inner}
    (room / "x.py").write_text("\n".join(function(name, body) for name, body in functions.items()))
    assert counts.nested(tmp_path) == ["benchmarks/x.py deep"]
    assert counts.nested(tmp_path, 4) == [f"benchmarks/x.py {name}" for name in ("deep", "flat", "outer")]
    assert {*counts.nested(tmp_path, 3)} - {*counts.nested(tmp_path, 4)} == {"benchmarks/x.py chain"}
    figure = counts._of_nesting(counts.nested(tmp_path))
    assert figure.value == 1 and not figure.kept and "benchmarks/x.py deep" in figure.name
