import dataclasses
import json
import re

import numpy as np
import pytest

from diptych.lab import compare, seeds, train
from diptych.lab.cli import main

TINY_ARGS = [
    *("--width", "32", "--layers", "1", "--heads", "2", "--seq", "16", "--batch", "8", "--lr", "0.01"),
    *("--steps", "40", "--eval-every", "0", "--eval-batches", "8", "--no-compile", "--trace-steps", "2", "--quiet"),
    *("--threads", "1"),
]


def compared(recipe, text, out, *more):
    """One whole comparison, small: (exit status, folder)."""
    argv = ["compare", "--recipe", recipe, "--data", str(text), "--out", str(out)]
    return main([*argv, *TINY_ARGS, "--json", str(out / "written.json"), *more]), out


@pytest.fixture(scope="module", autouse=True)
def trained_once(compiled_once):
    """Comparisons share runs of one job: those in high precision, and whole ones with those of a corrupted partner."""
    run, known = train.run, {}

    def shared(frontend, job, data, settings, name, progress):
        key = frontend.name, job, settings
        if key not in known:
            known[key] = run(frontend, job, data, settings, name=name, progress=progress)
        return dataclasses.replace(known[key], name=name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "run", shared)
        yield


@pytest.fixture(scope="module")
def good(text, tmp_path_factory):
    return compared("fp8-block", text, tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def delayed(text, tmp_path_factory):
    return compared("fp8-delayed", text, tmp_path_factory.mktemp("delayed"))


@pytest.fixture(scope="module")
def narrow(text, tmp_path_factory):
    return compared("nvfp4", text, tmp_path_factory.mktemp("narrow"))


def test_it_passes_and_writes_report_and_results(good):
    status, out = good
    results = json.loads((out / "results.json").read_text())
    assert [c for c in results["checks"] if not c["passed"]] == []
    assert status == 0 and results["passed"]
    assert results == json.loads((out / "written.json").read_text())
    assert len(results["checks"]) == 9
    assert len(results["runs"]) == 4
    assert {row["op"] for row in results["replay"]} == {"quantize", "gemm", "bias_grad"}
    assert all(row["differing"] == 0 for row in results["replay"])


@pytest.mark.slow  # of the whole comparisons one runs with the tests
def test_delayed_scaling_passes_and_shows_its_scales(delayed):
    status, out = delayed
    results = json.loads((out / "results.json").read_text())
    assert status == 0, [c for c in results["checks"] if not c["passed"]]
    assert {row["op"] for row in results["replay"]} == {"quantize", "gemm", "bias_grad", "scale_update"}
    assert all(run["calls"] | run["expected"] == run["calls"] for run in results["runs"].values())
    low = [run for run in results["runs"].values() if run["low"]]
    assert all(len(run["scales"]) == 40 and len(run["scales"]["40"]) == 12 for run in low)
    html = (out / "report.html").read_text()
    assert html.count("<svg") == 4 and "Delayed scales" in html and "scale_update" in html


@pytest.mark.slow  # a corrupted scale of NVFP4 is found each time
def test_four_bits_pass_within_their_own_tolerance(narrow):
    status, out = narrow
    results = json.loads((out / "results.json").read_text())
    assert status == 0, [c for c in results["checks"] if not c["passed"]]
    assert results["recipe"]["tolerance"] == 0.04 and results["recipe"]["linear_dtype"] == "bfloat16"
    assert [row["products"] for row in results["recipe"]["formats"]] == [
        "fprop and wgrad", "fprop and dgrad", "dgrad and wgrad"
    ]  # fmt: skip
    assert any("amax" in row["what"] for row in results["trace"][0]["rows"])


def details(results):
    return {c["name"]: c["detail"] for c in results["checks"]}


def test_a_single_pair_is_called_so(good):
    results = json.loads((good[1] / "results.json").read_text())
    for framework, pairs in results["pairs"].items():
        assert pairs["seeds"] == [0] and pairs["interval"] is None
        said = details(results)[f"{framework}: fp8-block ends near high precision in a single pair"]
        assert "one seed does not tell this from the noise of seeds" in said
    html = (good[1] / "report.html").read_text()
    assert "A single pair for each framework" in html and "95 %" not in html


@pytest.mark.slow  # test_seeds.py has the verdicts and intervals
def test_several_seeds_are_judged_by_the_interval_of_the_mean(good, text, tmp_path):
    status, out = compared("fp8-block", text, tmp_path, "--seeds", "3")
    results = json.loads((out / "results.json").read_text())
    assert status == 0 and results["passed"] and len(results["checks"]) == 9 and len(results["runs"]) == 4
    one = json.loads((good[1] / "results.json").read_text())
    for framework, pairs in results["pairs"].items():
        assert pairs["seeds"] == [0, 1, 2] and len({*pairs["high"], *pairs["low"]}) == 6
        first = [results["runs"][f"{framework} {which}"]["final"] for which in ("high precision", "fp8-block")]
        assert [pairs["high"][0], pairs["low"][0]] == first
        assert first == [one["pairs"][framework][k][0] for k in ("high", "low")]
        off = np.array(pairs["low"]) / np.array(pairs["high"]) - 1
        half = 4.302653 * off.std(ddof=1) / 3**0.5
        assert pairs["interval"] == pytest.approx([off.mean() - half, off.mean() + half], rel=1e-6)
        said = details(results)[f"{framework}: fp8-block trains as high precision does"]
        assert f"mean of 3 pairs {100 * off.mean():+.2f} %" in said
    html = (out / "report.html").read_text()
    assert html.count("<svg") == 4 and "over 3 pairs" in html and "seed 0 alone" in html
    assert all(f"{x:.4f}" in html for pairs in results["pairs"].values() for k in ("high", "low") for x in pairs[k])


@pytest.mark.parametrize(
    ("verdicts", "status", "said"), [([None], 3, "1 of 9 checks undecided"), ([None, False], 1, "1 of 9 checks failed")]
)
def test_an_undecided_comparison_has_an_exit_status_of_its_own(
    good, text, tmp_path, monkeypatch, capsys, verdicts, status, said
):
    results = json.loads((good[1] / "results.json").read_text())
    for check, verdict in zip(results["checks"], verdicts, strict=False):
        check["passed"] = verdict
    results["passed"] = seeds.overall(c["passed"] for c in results["checks"])
    results["optimizer"]["clip"] = 1.5
    monkeypatch.setattr(compare, "compare", lambda *_: results)
    assert compared("fp8-block", text, tmp_path)[0] == status
    assert f"undecided  {results['checks'][0]['name']}" in capsys.readouterr().out
    html = (tmp_path / "report.html").read_text()
    assert said in html and "gradients clipped to a norm of 1.5" in html
    assert html.count(">UNDECIDED<") == 1 and html.count(">FAIL<") == verdicts.count(False)


def test_the_control_runs_call_no_kernel(good):
    results = json.loads((good[1] / "results.json").read_text())
    for name, run in results["runs"].items():
        assert (run["calls"]["gemm"] == 0) == ("high precision" in name)


def test_the_report_stands_alone(good):
    html = (good[1] / "report.html").read_text()
    assert html.count("<svg") == 3
    assert "All 9 checks passed" in html and "diptych compare --recipe fp8-block" in html
    assert not re.search(r"""(src|href)=["'](?!#)""", html), "the report must not load anything"
    assert "{{" not in html and "{%" not in html


def test_the_first_payloads_are_equal_and_the_parting_op_is_named(good):
    results = json.loads((good[1] / "results.json").read_text())
    rows = {row["what"]: row for row in results["trace"][0]["rows"]}
    assert rows["quantized weight: payload"]["differing"] == rows["quantized weight: scale"]["differing"] == 0
    first = results["first_parting"]
    assert first["step"] == 0 and first["kind"] in {row["kind"] for row in results["framework_ops"]}


@pytest.mark.slow  # diff/test_corrupted_scale.py finds such a scale in less time
@pytest.mark.parametrize(
    ("framework", "recipe"),
    [
        ("jax", "nvfp4"),
        ("torch", "fp8-delayed"),
        ("torch", "fp8-block"),
        ("jax", "mxfp8"),
        ("torch", "nvfp4"),
        ("jax", "fp8-delayed"),
    ],
)
def test_a_corrupted_scale_fails_the_precision_check(text, tmp_path, framework, recipe, capsys):
    argv = ["compare", "--recipe", recipe, "--data", str(text)]
    status = main([*argv, "--out", str(tmp_path), *TINY_ARGS, "--corrupt-scale", framework])
    assert status == 1
    results = json.loads((tmp_path / "results.json").read_text())
    failed = [c["name"] for c in results["checks"] if not c["passed"]]
    assert f"{framework}: {recipe} ends near high precision in a single pair" in failed
    other = "jax" if framework == "torch" else "torch"
    assert not any(name.startswith(f"{other}:") for name in failed)
    assert "FAIL" in capsys.readouterr().out
    assert "deliberate fault" in (tmp_path / "report.html").read_text()
