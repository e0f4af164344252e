"""Runs of the table of recipes: what is left to train, lines, tables and the page."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from sweeps import one_in

from benchmarks import quality
from diptych.common import RECIPES
from diptych.lab import data, frontend

TINY = quality.Setting(seeds=3, width=32, layers=1, heads=2, seq=16, batch=2, steps=3, device="cpu", compile=False)
ABOUT = {"machine": "a machine", "versions": "torch 1", "commit": "abc", "sources": "0" * 16}


class Fake:
    """A framework whose losses follow from recipe and seed; `broken` recipes give NaN."""

    name = "fake"

    def __init__(self, *broken: str, pause: float = 0.0) -> None:
        self.broken, self.pause, self.steps = broken, pause, 0

    def trainer(self, job, weights):
        way = (job.recipe, job.model.high_blocks)
        name = next((n for n, w in quality.WAYS.items() if w == way), "none")
        loss = float("nan") if name in self.broken else 2 + 0.1 * job.seed + 0.02 * (name != "none")
        return Trainer(self, loss)


class Trainer:
    def __init__(self, fake: Fake, loss: float) -> None:
        self.fake, self.loss = fake, loss

    def step(self, batch):
        self.fake.steps += 1
        time.sleep(self.fake.pause)
        return self.loss

    def evaluate(self, batch):
        return self.loss

    def scales(self):
        return {}


@pytest.fixture
def bytes_(small_bytes, monkeypatch):
    monkeypatch.setattr(quality, "load", lambda: small_bytes)
    return small_bytes


@pytest.fixture(scope="module")
def small_bytes():
    values = np.random.default_rng(0).integers(0, 16, 4000).astype(np.uint8)
    return data.ByteData(values[:3000], values[3000:], "random bytes", 1)


def trained(path, monkeypatch, *broken: str, recipes=("nvfp4",), seconds=600.0):
    """Trains all groups in this process, which keeps its garbage: each run collects it for the memory of a GPU."""
    monkeypatch.setattr(quality.gc, "collect", lambda: 0)
    monkeypatch.setattr(frontend, "require", lambda name, device: Fake(*broken))
    for group in quality.groups_left(TINY, recipes, quality.load(), path):
        quality.work(group, TINY, path, time.monotonic() + seconds, ABOUT)


def test_what_is_left_follows_from_the_lines(bytes_, tmp_path, monkeypatch):
    path = tmp_path / "quality.jsonl"
    groups = quality.groups_left(TINY, ("nvfp4",), bytes_, path)
    names = [(g.recipe, g.framework, g.seeds) for g in groups]
    assert names == [(r, f, (0, 1, 2)) for r in ("none", "nvfp4") for f in ("torch", "jax")]
    trained(path, monkeypatch, seconds=-1)
    assert not path.exists()
    trained(path, monkeypatch)
    assert quality.groups_left(TINY, ("nvfp4",), bytes_, path) == []
    shared = quality.groups_left(TINY, ("mxfp8",), bytes_, path)
    assert {g.recipe for g in shared} == {"mxfp8"}, "runs in high precision serve all recipes"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:30])  # a process was killed as it wrote
    assert [(g.framework, g.recipe, g.seeds) for g in quality.groups_left(TINY, ("nvfp4",), bytes_, path)] == [
        ("jax", "none", (1, 2)), ("torch", "nvfp4", (0, 1, 2)), ("jax", "nvfp4", (0, 1, 2))
    ]  # fmt: skip
    trained(path, monkeypatch)
    again = path.read_text().splitlines(keepends=True)
    without_times = [{k: v for k, v in json.loads(x).items() if "seconds" not in k} for x in lines]
    assert [{k: v for k, v in json.loads(x).items() if "seconds" not in k} for x in again] == without_times


@pytest.mark.parametrize("change", one_in(4, [{"steps": 4}, {"warmup": 7}, {"clip": 2.0}, {"batch": 3}, {"width": 64}]))
def test_another_setting_shares_no_run(bytes_, tmp_path, monkeypatch, change):
    path = tmp_path / "quality.jsonl"
    trained(path, monkeypatch)
    other = quality.dataclasses.replace(TINY, **change)
    assert sum(len(g.seeds) for g in quality.groups_left(other, ("nvfp4",), bytes_, path)) == 12
    assert len(quality.tables(quality.lines_of(path))) == 1


def test_a_run_that_stops_at_the_deadline_leaves_no_line(bytes_, tmp_path, monkeypatch):
    path, fake = tmp_path / "quality.jsonl", Fake(pause=0.5)
    monkeypatch.setattr(frontend, "require", lambda name, device: fake)
    quality.work(quality.Group("torch", "nvfp4", (0, 1)), TINY, path, time.monotonic() + 0.4, ABOUT)
    assert not path.exists() and fake.steps <= 1


def test_the_page_has_means_intervals_and_verdicts(bytes_, tmp_path, monkeypatch):
    folder = tmp_path / "h200"
    trained(folder / quality.FILE, monkeypatch, recipes=("fp8-block", "nvfp4"))
    (_, lines), = quality.tables(quality.lines_of(folder / quality.FILE))  # fmt: skip
    off = np.array([0.02 / (2 + 0.1 * s) for s in range(3)])
    half = 4.302653 * off.std(ddof=1) / 3**0.5
    found = quality.pairs_of(lines, "jax", "fp8-block")
    assert found is not None and found.interval == pytest.approx((off.mean() - half, off.mean() + half), rel=1e-6)
    page = quality.rendered(tmp_path)
    assert "no result on an H200" not in page and "## h200: width 32, 1 layers, 3 steps" in page
    mean, low, high = (f"{100 * x:+.2f}" for x in (off.mean(), off.mean() - half, off.mean() + half))
    shown = f"| 3 | {mean} % | {low} to {high} % |"
    assert f"| fp8-block | torch | ±0.5 % {shown} **outside** |" in page
    assert f"| nvfp4 | jax | ±1.5 % {shown} within |" in page
    assert "| torch | 3 | 2.1000 | 2.0000 to 2.2000 | 9.52 % |" in page
    assert "| jax | 2 | 2.2000 | 2.2200 | 2.2200 |" in page and "a machine, torch 1; commit abc" in page


def test_a_loss_that_is_not_finite_is_a_result(bytes_, tmp_path, monkeypatch):
    path = tmp_path / "h200" / quality.FILE
    trained(path, monkeypatch, "nvfp4")
    assert quality.groups_left(TINY, ("nvfp4",), bytes_, path) == []
    line = quality.lines_of(path)[-1]
    assert line["final"] is None and "the loss of step 0 is nan" in line["failed"]
    page = quality.rendered(tmp_path)
    assert "| nvfp4 | jax | ±1.5 % | 3 | – | – | **not finite** from seed 0, 1, 2 |" in page


def test_a_recipe_stays_where_high_precision_was_not_finite():
    def line(recipe: str, seed: int, final: float | None) -> dict:
        return {"framework": "torch", "recipe": recipe, "seed": seed, "final": final}

    lines = [line("none", 0, None), line("none", 1, 2.0), *(line("fp8-current", seed, 2.0) for seed in range(2))]
    table = quality.by_recipe(lines)
    assert "| fp8-current | torch | ±0.5 % | 2 | – | – | high precision **not finite** from seed 0 |" in table


def test_both_frameworks_and_the_share_of_blocks():
    def line(framework: str, recipe: str, seed: int, final: float | None) -> dict:
        identity = {"model": {"layers": 4}}
        return {"framework": framework, "recipe": recipe, "seed": seed, "final": final, "identity": identity}

    lines = [line(f, "none", seed, 2.0) for f in quality.FRAMEWORKS for seed in range(3)]
    lines += [line("torch", "nvfp4", 0, 2.04), line("torch", "nvfp4", 1, 2.06), line("torch", "nvfp4", 2, 2.0)]
    lines += [line("jax", "nvfp4", 0, 2.0), line("jax", "nvfp4", 1, 2.04)]
    assert quality.finals(lines, quality.BOTH, "nvfp4") == {0: pytest.approx(2.02), 1: pytest.approx(2.05)}
    half = 12.7062 * 0.75  # Student's t of one degree of freedom, and the standard error of 1 % and 2.5 %
    assert f"| nvfp4 | both | ±1.5 % | 2 | +1.75 % | {1.75 - half:+.2f} to {1.75 + half:+.2f} %" in quality.by_recipe(
        lines
    )
    assert quality.by_blocks(lines) == ""
    lines += [line(f, "nvfp4-high-1", 0, 2.03) for f in quality.FRAMEWORKS]
    lines += [line("torch", "nvfp4-nearest", 0, 2.03), line("jax", "nvfp4-nearest", 0, None)]
    assert "| nvfp4-high-1 | 3 of 4 | +1.31 % | +1.50 % |" in quality.by_blocks(lines)
    assert "nearest" not in quality.by_blocks(lines)
    assert quality.finals(lines, quality.BOTH, "nvfp4-nearest") == {0: None}
    assert "| nvfp4-nearest | both | ±1.5 % | 1 | – | – | **not finite** from seed 0 |" in quality.by_recipe(lines)


def arguments(path, **changes) -> list[str]:
    """Returns arguments of `python -m benchmarks.quality` that give TINY's setting."""
    sizes = {k: getattr(TINY, k) for k in ("seeds", "width", "layers", "heads", "seq", "batch", "steps")} | changes
    given = [text for k, v in sizes.items() for text in (f"--{k}", str(v))]
    return [*given, "--only", "nvfp4", "--device", "cpu", "--no-compile", "--file", str(path)]


def test_runs_of_different_code_are_not_compared(bytes_, tmp_path, monkeypatch, capsys):
    path = tmp_path / "h200" / quality.FILE
    trained(path, monkeypatch)
    held, begun = path.read_text(), []
    monkeypatch.setattr(quality, "measure", lambda groups, *_: begun.extend(groups) or 0)
    assert quality.main(arguments(path)) == 1 and not begun and path.read_text() == held
    said = capsys.readouterr().err
    assert f"{path}: runs of different code" in said and f"commits abc (sources {'0' * 16}); " in said
    assert f"(sources {quality.digest(quality.CODE)})" in said and "--file" in said
    assert quality.main(arguments(path, steps=4)) == quality.INCOMPLETE and begun, "another setting is another table"
    assert "commit abc" in quality.rendered(tmp_path)
    with path.open("a") as f:  # files that were put together
        f.write(json.dumps(json.loads(held.splitlines()[0]) | {"commit": "def", "sources": "1" * 16}) + "\n")
    with pytest.raises(quality.MixedCodeError, match=r"commits abc \(sources 0+\); def \(sources 1+\)"):
        quality.rendered(tmp_path)


def test_one_code_continues_its_file(bytes_, tmp_path, monkeypatch, capsys):
    """At another commit too, such as one that changed documents alone."""
    path = tmp_path / quality.FILE
    monkeypatch.setitem(ABOUT, "sources", quality.digest(quality.CODE))
    trained(path, monkeypatch)
    assert quality.main(arguments(path)) == 0
    assert "0 runs are still missing" in capsys.readouterr().out


def test_without_a_result_the_page_says_so(tmp_path):
    page = quality.rendered(tmp_path)
    assert "There is no result on an H200 yet" in page and "No machine has any" in page
    fp4 = dict.fromkeys(("nvfp4", "nvfp4-high-1", "nvfp4-high-2", "nvfp4-nearest"), 0.015)
    assert dict.fromkeys(RECIPES, 0.005) | fp4 == quality.GOALS


def test_the_page_is_what_render_writes():
    assert quality.main(["render", "--check"]) == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--only", "fp4"], "fp4"),
        (["--jobs", "0"], "must be positive"),
        (["--clip", "0"], "clip must be positive"),
        (["--width", "30"], "not a multiple of heads"),
        (["--layers", "2"], "high_blocks must be less than layers, 2, got 2"),
    ],
)
def test_wrong_arguments(argv, said, capsys):
    with pytest.raises(SystemExit) as e:
        quality.main(argv)
    assert e.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.slow  # three processes that import torch or JAX
def test_pieces_of_time_make_the_table(tmp_path):
    """The first call has no time to finish, the second one does the rest, and the third has nothing left to do."""
    options = "--device cpu --no-compile --only fp8-current --seeds 1 --width 32 --layers 1 --heads 2 --seq 16"
    command = [sys.executable, "-m", "benchmarks.quality", *options.split(), "--batch", "2", "--steps", "3"]
    for seconds, status in (("0.001", 3), ("500", 0), ("500", 0)):
        more = ["--jobs", "1", "--seconds", seconds, "--file", tmp_path / "q.jsonl"]
        run = subprocess.run([*command, *more], cwd=quality.DOCS.parent, capture_output=True, text=True)
        assert run.returncode == status, run.stderr
    assert run.stdout.startswith("0 runs are missing")
    lines = quality.lines_of(tmp_path / "q.jsonl")
    assert sorted((x["framework"], x["recipe"]) for x in lines) == [
        (f, r) for f in ("jax", "torch") for r in ("fp8-current", "none")
    ]
    assert all(1 < x["final"] < 10 for x in lines)


class Process:
    """Stands for a process that ends when it is joined."""

    def __init__(self, target, args, started: list[str]) -> None:
        self.gpu, self.started, self.exitcode = args[0], started, 0
        self.sentinel = object()

    def start(self) -> None:
        self.started.append(self.gpu)

    def join(self) -> None:
        pass


@pytest.mark.parametrize(
    ("visible", "jobs", "gpus"), [("4,7", 3, "4 7 4 7 4"), ("4,7", 1, "4 4 4 4 4"), ("", 4, "0 1 2 0 1")]
)
def test_processes_are_shared_out_among_gpus(tmp_path, monkeypatch, visible, jobs, gpus):
    """Each process runs on the GPU that has the fewest. Of those that run, the one that began second ends first."""
    started: list[str] = []
    context = SimpleNamespace(Process=lambda target, args: Process(target, args, started))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(quality.multiprocessing, "get_context", lambda _: context)
    monkeypatch.setattr(quality.multiprocessing.connection, "wait", lambda running, _: running[:2][-1:])
    groups = [quality.Group("torch", name, (0,)) for name in list(RECIPES)[:5]]
    setting = quality.dataclasses.replace(TINY, device="cuda")
    assert quality.measure(groups, setting, tmp_path / quality.FILE, 600.0, jobs, ABOUT) == 0
    assert started == gpus.split()


def test_high_precision_alone(bytes_, tmp_path, monkeypatch):
    begun: list[quality.Group] = []
    monkeypatch.setattr(quality, "measure", lambda groups, *_: begun.extend(groups) or 0)
    argv = arguments(tmp_path / quality.FILE)
    argv[argv.index("nvfp4")] = "none"
    assert quality.main(argv) == quality.INCOMPLETE
    assert [(g.framework, g.recipe) for g in begun] == [("torch", "none"), ("jax", "none")]


def test_blocks_in_high_precision_are_another_row_of_the_same_table(bytes_):
    setting = quality.dataclasses.replace(TINY, layers=3)
    jobs = [setting.job(name, 0) for name in ("none", "nvfp4", "nvfp4-high-1", "nvfp4-nearest")]
    assert [job.model.high_blocks for job in jobs] == [0, 0, 1, 0]
    assert [len(job.model.linears) for job in jobs] == [12, 12, 8, 12]
    identities = [quality._identity(setting, name, 0, bytes_) for name in quality.WAYS]
    assert len({json.dumps(identity["recipe"]) for identity in identities}) == len(RECIPES) + 1
    assert len({json.dumps(quality.shared_of(identity)) for identity in identities}) == 1
