"""The suite of benchmarks: its case table, its hashes, what it does with failures, and the page that it renders."""

from __future__ import annotations

import importlib
import json
import math
import random
import shutil
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as suite
from benchmarks import peers, plots, quality, render, results, room, sources
from benchmarks.cases import CASES, FP8, GOALS, MEASURES, MOVES, PACKED, SECTIONS, Case, cases_of
from benchmarks.quantizers import quantizers
from diptych.common import RECIPES

SMALL = (
    Case("quantize", "both", (128, 256), ("fp8_e4m3_128x128", "nvfp4 rht")),
    Case("gemm", "wgrad float32", (128, 128, 256), FP8),
    Case("gemm", "wgrad added", (128, 128, 256), FP8),
    Case("grouped", "dgrad random", (4, 256, 128, 128), ("fp8-block", "mxfp8")),
    Case("fused", "swiglu", (128, 512), ("fp8-delayed", "mxfp8")),
    Case("fused", "gradient of norm", (128, 256)),
    Case("linear", "Linear", (128, 128, 256), ("fp8-current",)),
    Case("linear", "GroupedLinear", (4, 128, 128, 256), ("mxfp8",)),
    Case("several", "reductions", (1, 32, 512)),
    Case("permute", "index", (128, 256, 8, 2)),
    Case("permute", "quantize both", (128, 256, 8, 2), ("mxfp8_e4m3",)),
    Case("jax_cpu", "eager dense", (32, 64, 32), ("mxfp8", "fp8-delayed")),
    Case("lab", "hash", (1 << 16,)),
    Case("lab", "diff", (1 << 20,)),
    Case("lab", "page", (2, 5)),
    Case("captures", "ops", (1 << 16,), MEASURES),
)
LONG = (  # "reductions" starts the ranks, too
    Case("several", "gathers", (1, 32, 512), ("fp8-current",)),
    Case("several", "tensor parallel", (2, 32, 512), ("fp8-current",)),
    Case("several", "weak scaling", (1, 32, 512), ("mxfp8",)),
    Case("jax_cpu", "trace and compile", (1,), ("mxfp8", "fp8-delayed")),
    Case("lab", "capture", (32, 1, 2, 16)),
    Case("captures", "step", (32, 1, 2, 16)),
)


def suite_of(section: str, stamp: str) -> dict:
    """A section's results with invented times: a row for each case and name, and for peers that pages show."""
    draw, rows = random.Random(section), []
    for case in cases_of(section):
        for name in ("bf16", "copy", "nn.Linear", "DeepGEMM", "torchao tensorwise", *case.names):
            rate = draw.uniform(600, 1400)
            row = {"case": str(case), "name": name, "us": 1e6 / rate, "rate": rate, "unit": "TFLOP/s", "GiB": 12.0,
                   "intensity": draw.uniform(50, 4000), "peer": "np.take", "peer us": 1.0}  # fmt: skip
            rows.append(row | {"sources": stamp})
    env = {"commit": "abc1234", "python": "3.12", "machine": "2 cores", "versions": {"torch": "2.11.0"}}
    return {"environment": env, "absent": {"te": "not installed"}, "rows": rows}


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(room, "DEVICE", "cpu")
    monkeypatch.setattr(importlib.import_module("benchmarks.sections.several"), "BACKEND", "aot_eager")
    monkeypatch.setattr(importlib.import_module("benchmarks.sections.lab"), "ROUNDS", 2)
    for name in ("quantize", "fused"):
        monkeypatch.setattr(importlib.import_module(f"benchmarks.sections.{name}"), "COPY", 1 << 12)


def test_the_case_table_is_consistent():
    assert len(set(CASES)) == len(CASES) == len({(c.section, str(c), c.names) for c in CASES})
    assert {c.section for c in CASES} == set(SECTIONS)
    for section in SECTIONS.values():
        assert cases_of(section.name, quick=True), section.name
        assert sources.files(section), section.name
        importlib.import_module(f"benchmarks.sections.{section.name}")
    known = {
        "bf16",
        *MOVES,
        *MEASURES,
        *RECIPES,
        *quantizers(),
        *(f"{r} {kind}" for r in RECIPES for kind in ("fused", "linears")),
    }
    assert {name for c in CASES for name in c.names} <= known


def test_every_goal_has_cases():
    for goal in GOALS:
        counted = [c for c in cases_of(goal.section) if c.what in goal.what and goal.shapes in ((), (c.shape,))]
        counted += [c for c in cases_of(goal.section) if c.what in goal.what and c.shape in goal.shapes]
        assert any(goal.name in c.names for c in counted), goal
        assert goal.aim <= goal.must if goal.less else goal.aim >= goal.must


def test_comments_do_not_change_a_hash(tmp_path):
    before = sources.code
    python, cpp = tmp_path / "a.py", tmp_path / "a.cu"
    texts = []
    for text in ('"""Doc."""\n\nx = "# no"  # a\n', 'x = "# no"\n', 'x = "#  no"\n'):
        python.write_text(text)
        texts.append(before(python))
    assert texts[0] == texts[1] != texts[2]
    texts = []
    for text in ('int a;  // b\nchar* c = "// d";', 'int a; /* e\n */ char* c = "// d";', 'int a; char* c = "//";'):
        cpp.write_text(text)
        texts.append(before(cpp))
    assert texts[0] == texts[1] != texts[2]


def test_a_hash_covers_included_files():
    found = {p.name for p in sources.files(SECTIONS["quantize"])}
    assert {"quantize.cu", "launch.cuh", "format.h"} <= found
    assert not {"norm.cu", "native.cu", "permute.cu"} & found
    assert sources.digest(SECTIONS["quantize"]) != sources.digest(SECTIONS["gemm"])


def with_a_new_op(root: Path) -> Path:
    """Returns a copy of the sources to which the op `shuffle` was added, as CONTRIBUTING.md says."""
    ignored = shutil.ignore_patterns("results", "__pycache__")
    for folder in ("common", "core_cuda", "jax_frontend", "lab", "torch_frontend"):
        shutil.copytree(sources.ROOT / folder, root / folder, ignore=ignored)
    core, table = root / "core_cuda", "    {Op::shuffle, Backend::cpu, {}},\n    {Op::shuffle, Backend::cuda, {80}},\n"
    lines = {
        "include/diptych/ops.def": ("OP(amax,", "OP(shuffle, ShuffleArgs, 0, describe(a.x))\n"),
        "include/diptych/ops.h": ('#include "diptych/quantize.h"', '#include "diptych/shuffle.h"\n'),
        "bindings/families.def": ("FAMILY(quantize)", "FAMILY(shuffle)\n"),
        "src/registry.cpp": ("    {Op::amax,", table),
    }
    for name, (before, line) in lines.items():
        text = (core / name).read_text()
        at = text.index(f"\n{before}") + 1
        (core / name).write_text(text[:at] + line + text[at:])
    folders = "bindings", "src/contracts", "cpu/shuffle", "cuda/shuffle", "../jax_frontend/csrc"
    files = [core / "include/diptych/shuffle.h", *(core / folder / "shuffle.cpp" for folder in folders)]
    for panel in ("torch", "jax"):
        files += [root / f"{panel}_frontend/diptych/{panel}" / f / "shuffle.py" for f in ("primitives", "functional")]
    for file in (*files, root / "common/diptych/common/ops/shuffle.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("1")
    return root


def test_a_hash_counts_what_runs(tmp_path):
    """A new op changes no section's hash; a header, a kernel and a row of the kernel table those of what they serve."""
    root = with_a_new_op(tmp_path)
    before = {section.name: sources.digest(section) for section in (*SECTIONS.values(), quality.CODE)}
    for section in (*SECTIONS.values(), quality.CODE):
        assert sources.digest(section, root) == before[section.name], section.name
    some = {name: SECTIONS[name] for name in ("quantize", "permute", "linear")}

    def changed(path: str, old: str, new: str) -> set[str]:
        """Returns the sections whose hash a change of a file changes."""
        file = root / path
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        found = {name for name, section in some.items() if sources.digest(section, root) != before[name]}
        file.write_text(text)
        return found

    assert changed("torch_frontend/diptych/torch/layers/linear.py", "import", "import  ") == {"linear"}
    assert changed("core_cuda/src/registry.cpp", '"cuda.permute"', '"cuda.permute_all"') == {"permute"}
    assert changed("core_cuda/include/diptych/quantize.h", "struct", "class") == set(some)


def written(tmp_path, stamps: dict[str, str]) -> render.Shown:
    for section in SECTIONS.values():
        folder = tmp_path / render.FOLDERS[section.device]
        held = suite_of(section.name, stamps.get(section.name, sources.digest(section)))
        results.save(folder, section.name, held["environment"], held["rows"], absent=held["absent"])
    return render.Shown(tmp_path)


def test_the_page_shows_what_is_current(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "DOCS", tmp_path)
    page = render.rendered(written(tmp_path, {}))
    assert "Nothing here" not in page and "## Goals" in page
    assert "te (not installed)" in page
    for name in ("gemm", "grouped"):
        text = (tmp_path / "plots" / f"{name}.svg").read_text()
        assert xml.etree.ElementTree.fromstring(text).tag.endswith("svg") and "fp8-block" in text


def test_the_page_refuses_stale_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "DOCS", tmp_path)
    shown = written(tmp_path, {"gemm": "0" * 16})
    page = render.rendered(shown)
    assert not shown.find("gemm", cases_of("gemm")[0])
    assert page.count("Nothing here was measured") == 1
    assert "python -m benchmarks --only gemm`." in page
    assert "mxfp8 dense" not in page and "mxfp8 grouped" in page  # goals


def test_the_plot_of_speeds_takes_the_gpu_first_and_then_the_cpu():
    shown = render.Shown(Path("no folder"))
    assert render.speeds(shown) is None
    env = {"environment": {"commit": "abc", "machine": "2 cores"}}
    layer = {"case": "linear", "peer us": 4.0, "us": 8.0}
    shown.rows["cpu"] = [{**layer, "name": f"mxfp8 {shape} by 1024x1024"} for shape in ("16x1024", "512x1024")]
    shown.runs = {"cpu": env, "llama": env}
    assert render.speeds(shown) == ({"mxfp8": 0.5}, "float32", render.speeds(shown)[2])
    stack = {"case": "torch 4x4096x4096"}
    shown.rows["llama"] = [{**stack, "name": "bf16", "us": 3.0}, {**stack, "name": "fp8-block fused", "us": 2.0}]
    assert render.speeds(shown)[:2] == ({"fp8-block": 1.5}, "bfloat16")
    shown.rows["llama"] = [{**stack, "name": "", "failed": "no memory"}]
    assert render.speeds(shown)[1] == "float32"


@pytest.mark.parametrize("draw", [
    lambda path: plots.bars(path, {"MXFP8": 0.5}, "float32", "Speeds"),
    lambda path: plots.intervals(path, [("MXFP8", 0.5, 0.2, 0.8)], "Losses"),
])  # fmt: skip
def test_bars_and_intervals_are_the_same_each_time(tmp_path, draw):
    for name in ("a", "b"):
        draw(tmp_path / f"{name}.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "MXFP8" in (tmp_path / "a.svg").read_text()


def test_a_plot_is_the_same_each_time(tmp_path):
    rows = suite_of("gemm", "")["rows"]
    for name in ("a", "b"):
        plots.roofline(tmp_path / f"{name}.svg", rows, 4200.0, "Products")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize(
    "case",
    (*SMALL, *[pytest.param(c, marks=pytest.mark.slow) for c in LONG]),
    ids=lambda c: f"{c.section} {c.what}",
)
def test_results_are_right_where_a_section_measures(case, on_the_cpu):
    here, _ = peers.find(None)
    module = importlib.import_module(f"benchmarks.sections.{case.section}")
    rows = {r["name"]: r for r in module.rows(case, {k: v for k, v in here.items() if k == "grouped_mm"})}
    assert set(case.names) <= set(rows)
    for name, row in rows.items():
        if name != "torch FP8 by row":  # torch has none on the CPU
            assert "failed" not in row and row["us"] > 0


def test_goals_of_the_lab():
    """Each row that has a goal says how far it is from it, as `--check` reads it."""
    module = importlib.import_module("benchmarks.sections.lab")
    hashed, measured = module.rows(Case("lab", "hash", (1 << 16,)), {})
    assert hashed["ratio"] == hashed["rate"] / hashed["at least"] and hashed["at least"] == 5
    assert measured["ratio"] == measured["rate"] / measured["at least"] and measured["at least"] == 3
    (found,) = module.rows(Case("lab", "diff", (1 << 20,)), {})
    assert found["ratio"] == min(10 / found["s"], 1 / found["GB"]) and found["cpu s"] > 0
    assert 0.02 < found["GB"] < 0.5, "the memory is not that of this process"
    assert not results.misses({"ratio": 1.0, **module.at_most(1.15, 1.15)})
    assert results.misses(module.at_most(1.15, 1.16)) and results.misses(module.at_least(5.0, 4.9))


def test_the_noise_of_recipes(monkeypatch):
    module = importlib.import_module("benchmarks.sections.noise")
    monkeypatch.setattr(module, "BEFORE", 2)
    fp8, fp4 = module.rows(Case("noise", "payloads", (64, 1, 2, 32), ("fp8-block", PACKED)), {})
    assert fp8["payloads"] == 4 * 3 * 2 and fp4["payloads"] == 4 * (3 + 1)  # linears, operands, copies that compare
    assert 0.0004 < fp8["noise"] < 0.0012 and 0.008 < fp4["noise"] < 0.02  # of normal values: 0.0007 and 0.013
    assert fp8["dB"] == pytest.approx(-10 * math.log10(fp8["noise"]))


def test_a_wrong_result_is_a_row_without_figures(on_the_cpu):
    x = torch.ones(4)
    runs = {
        "right": room.Run(lambda: x + 1, check=lambda t: room.difference(t, x + 1)),
        "wrong": room.Run(lambda: x + 2, check=lambda t: room.difference(t, x + 1), bound=1e-3),
        "nan": room.Run(lambda: x * float("nan"), check=lambda t: room.difference(t, x), bound=1e-3),
        "raises": room.Run(lambda: x @ torch.ones(5)),
    }
    rows = {r["name"]: r for r in room.measured(CASES[0], runs)}
    assert "us" in rows["right"] and "failed" not in rows["right"]
    assert "differs by" in rows["wrong"]["failed"] and "us" not in rows["wrong"]
    assert "nan" in rows["nan"]["failed"] and "RuntimeError" in rows["raises"]["failed"]


def test_results_are_made_in_poisoned_memory():
    held = torch.zeros(8)
    assert room.poisoned(lambda: held).isnan().all()
    scalar = torch.zeros(())
    room.poison(scalar)
    assert scalar.isnan()


def test_the_page_is_what_render_writes():
    assert suite.main(["render", "--check"]) == 0


class Raising:
    @staticmethod
    def rows(case, _):
        yield {"case": str(case), "name": "first", "us": 1.0}
        raise ValueError(f"no {case}")


def test_a_failing_case_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    for name in ("cpu", "jax_cpu", "memory", "lab"):
        monkeypatch.setitem(sys.modules, f"benchmarks.sections.{name}", Raising)
    assert suite.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
    held = json.loads((tmp_path / results.FILE).read_text())
    assert list(held) == ["cpu", "jax_cpu", "memory", "lab"]
    rows = held["cpu"]["rows"]
    assert [r["name"] for r in rows] == ["first", ""] * 5
    assert all(r["sources"] == sources.digest(SECTIONS["cpu"]) for r in rows)
    assert "failed: quantize, : ValueError: no quantize" in capsys.readouterr().err


def test_a_row_below_its_goal_is_a_failure_only_where_that_is_asked(tmp_path, monkeypatch):
    row = {"case": "a", "name": "b", "ratio": 0.6, "goal": 1.0, "slack": 0.7}
    assert results.misses(row) and not results.misses(row | {"ratio": 0.8})
    assert results.misses(row | {"ratio": float("nan")})
    monkeypatch.setattr(suite, "measure", lambda *_: [row])
    call = ["--only", "cpu", "--out", str(tmp_path)]
    assert suite.main(call) == 0
    assert suite.main([*call, "--check"]) == 1


@pytest.mark.parametrize(
    "argv, said",
    (
        (["--only", "gem"], "invalid choice"),
        (["--device", "cpu", "--only", "gemm"], "gemm is not measured on cpu"),
        (["render", "--quick"], "no other option"),
        (["--library", "none.so"], "is no file"),
        (["measure"], "invalid choice"),
    ),
)
def test_wrong_arguments(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        suite.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_absent_peers_have_reasons():
    here, absent = peers.find(None)
    assert {*here, *absent} == set(peers.NAMES)
    assert "--library" in absent["deepgemm"]


def test_only_the_checkout_is_measured(monkeypatch, tmp_path):
    assert suite.foreign() == []
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    (tmp_path / "common/diptych/common").mkdir(parents=True)
    (tmp_path / "common/diptych/common/errors.py").write_text("x = 1\n")
    assert suite.foreign() == ["common/diptych/common/errors.py"]
