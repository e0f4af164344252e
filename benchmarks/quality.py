"""Measures how recipes train: final losses of a byte-level GPT from several seeds, in both frameworks.

    python -m benchmarks.quality [--seconds S] [--jobs N] [--only RECIPE ...] [--device DEVICE] [--file FILE] [SETTING]
    python -m benchmarks.quality render [--check]

Each finished run appends a line to FILE, by default benchmarks/results/MACHINE/quality.jsonl. A call trains what the
file does not have yet, several processes at a time on all GPUs, and begins no step after S seconds, so that any number
of calls complete the table; the exit status is 3 while runs are missing, and 1 if a process failed. A run that was
stopped begins anew. Runs in high precision serve all recipes; `--only none` trains nothing else. `render` writes
docs/quality.md from the files. Runs of different code are not compared: a file that has runs of the setting by other
code is not continued, and not rendered.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fcntl
import gc
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import results
from benchmarks.cases import JAX, LAYER, STEP_OPS, TORCH, Section, cases_of
from benchmarks.render import DOCS, FOLDERS, Page, Shown, grid
from benchmarks.sources import digest
from diptych.common import RECIPES, Recipe
from diptych.lab import checkpoint
from diptych.lab.data import ByteData, load
from diptych.lab.job import LOSS_TOLERANCE, Job, ModelConfig, OptimConfig, elements_per_byte
from diptych.lab.seeds import Pairs
from diptych.lab.train import Settings

PAGE, TEXT = DOCS / "quality.md", Path(__file__).parent / "quality.md"
FILE = "quality.jsonl"
FRAMEWORKS = ("torch", "jax")
BOTH = "both"  # the mean of their losses, seed by seed
HIGH = "none"
SEEDS = 4  # the most that one process trains
GRACE = 20.0  # seconds that a process has after the deadline, in which it may be compiling
INCOMPLETE = 3
VERDICTS = {True: "within", False: "**outside**", None: "undecided: needs more seeds"}

LAB = tuple(f"lab/diptych/lab/{name}.py" for name in ("data", "job", "train"))
MODELS = tuple(f"lab/diptych/lab/{f}/{name}.py" for f in FRAMEWORKS for name in ("adapter", "gpt"))
CODE = Section("quality", "cuda", (*LAYER, *TORCH, *JAX, *LAB, *MODELS), STEP_OPS)  # decides what is computed

Line = dict[str, Any]


class Way(NamedTuple):
    """How a model is trained. `high_blocks`: see `ModelConfig`."""

    recipe: Recipe
    high_blocks: int = 0


WAYS = {name: Way(recipe) for name, recipe in RECIPES.items()}
for _name, _recipe in RECIPES.items():
    if elements_per_byte(_recipe) == 2:
        WAYS |= {f"{_name}-high-{n}": Way(_recipe, n) for n in (1, 2)}
        WAYS[f"{_name}-nearest"] = Way(dataclasses.replace(_recipe, disable_stochastic_rounding=True))  # type: ignore[call-arg]
BY_SIZE = {1: 0.005, 2: 0.015}  # goals for the mean difference from high precision, by payload elements per byte
GOALS = {name: BY_SIZE[elements_per_byte(way.recipe)] for name, way in WAYS.items()}


class MixedCodeError(ValueError):
    """Runs of different code that would be compared; the message names the commits and says what to do."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model, its training and its seeds, which are the same in all runs of a table."""

    seeds: int = 8
    width: int = 512
    layers: int = 6
    heads: int = 4
    seq: int = 256
    batch: int = 32
    lr: float = 1e-3
    steps: int = 1500
    warmup: int = 500
    clip: float = 1.0
    device: str = "cuda"
    compile: bool = True

    def job(self, way: str, seed: int) -> Job:
        recipe, high_blocks = WAYS.get(way, (None, 0))
        return Job(
            model=ModelConfig(self.width, self.layers, self.heads, self.seq, high_blocks=high_blocks),
            optim=OptimConfig(lr=self.lr, steps=self.steps, warmup=self.warmup, clip=self.clip),
            recipe=recipe,
            device=self.device,
            compile=self.compile,
            threads=1,
            seed=seed,
        )

    def settings(self, seed: int) -> Settings:
        return Settings(seed=seed, batch=self.batch, eval_every=0)


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that one process trains one after the other, so that it compiles once."""

    framework: str
    recipe: str
    seeds: tuple[int, ...]


def lines_of(path: Path) -> list[Line]:
    """Returns the lines of a file; a last one that a killed process left without its end does not count."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def require_one_code(path: Path, lines: Iterable[Line]) -> None:
    """**Raises** MixedCodeError if lines of one setting have been trained by different code."""
    commits: dict[str, set[str]] = {}
    for line in lines:
        commits.setdefault(line["sources"], set()).add(line["commit"])
    if len(commits) > 1:
        named = "; ".join(f"{', '.join(sorted(names))} (sources {code})" for code, names in commits.items())
        raise MixedCodeError(
            f"{path}: runs of different code are not compared, and these are of commits {named}. Move the file away or "
            "name another one by --file, and train all runs by one code; or check out the commit that it began with"
        )


def append(path: Path, line: Line) -> None:
    """Adds a line, after cutting off a last one without its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        f.truncate(f.read().rfind(b"\n") + 1)
        f.write(json.dumps(line).encode() + b"\n")


def groups_left(setting: Setting, recipes: Iterable[str], data: ByteData, path: Path) -> list[Group]:
    """Returns the runs that the file does not have, high precision first."""
    done = [(line["framework"], line["identity"]) for line in lines_of(path)]
    groups = []
    for recipe in (HIGH, *recipes):
        for framework in FRAMEWORKS:
            seeds = [s for s in range(setting.seeds) if (framework, _identity(setting, recipe, s, data)) not in done]
            groups += [Group(framework, recipe, some) for some in _parts(seeds)]
    return groups


def _parts(seeds: list[int]) -> list[tuple[int, ...]]:
    return [tuple(seeds[at : at + SEEDS]) for at in range(0, len(seeds), SEEDS)]


def _identity(setting: Setting, recipe: str, seed: int, data: ByteData) -> dict[str, Any]:
    return checkpoint.identity(setting.job(recipe, seed), seed=seed, batch=setting.batch, data=data.train)


def work(group: Group, setting: Setting, path: Path, deadline: float, about: Line) -> None:
    """Trains a group's runs until the deadline of `time.monotonic`, and appends a line for each. A loss that is not
    finite is a result too: a line without `final`."""
    from diptych.lab import frontend

    there = frontend.require(group.framework, setting.device)
    data = load()
    for seed in group.seeds:
        if time.monotonic() > deadline:
            return
        line = {"framework": group.framework, "recipe": group.recipe, "seed": seed}
        try:
            line |= _trained(there, setting, group.recipe, seed, data, deadline)
        except KeyboardInterrupt:  # `stop` said so
            return
        except frontend.TrainingError as error:
            line |= {"final": None, "failed": str(error)}
        append(path, line | {"identity": _identity(setting, group.recipe, seed, data), **about})
        said = f"{line['final']:.4f} nats, {line['seconds']} s" if line["final"] is not None else line["failed"]
        print(f"{group.framework} {group.recipe}, seed {seed}: {said}", flush=True)
        gc.collect()  # the memory of the GPU, before the next run


def _trained(there: Any, setting: Setting, recipe: str, seed: int, data: ByteData, deadline: float) -> Line:
    """**Raises** KeyboardInterrupt after the deadline."""
    from diptych.lab import train

    run = train.run(
        there, setting.job(recipe, seed), data, setting.settings(seed),
        stop=lambda: time.monotonic() > deadline,
    )  # fmt: skip
    return {"final": run.final, "seconds": round(run.seconds, 1), "step_seconds": round(run.step_seconds, 5)}


def visible_gpus() -> list[str]:
    """Returns each GPU's value of CUDA_VISIBLE_DEVICES."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    return given.split(",") if given else [str(n) for n in range(torch.cuda.device_count())]


def _work_on(gpu: str | None, *arguments: Any) -> None:
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # no framework has asked for GPUs in this process yet
    work(*arguments)


def measure(groups: list[Group], setting: Setting, path: Path, seconds: float, jobs: int, about: Line) -> int:
    """Runs groups in processes, `jobs` at a time, each on the GPU that has the fewest. **Returns** how many failed."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    deadline, waiting, failures = time.monotonic() + seconds, list(groups), 0
    gpus = visible_gpus() if setting.device == "cuda" else [None]
    busy: collections.Counter[str | None] = collections.Counter()
    running: dict[Any, Any] = {}
    while running or (waiting and time.monotonic() < deadline):
        while waiting and len(running) < jobs and time.monotonic() < deadline:
            gpu = min(gpus, key=busy.__getitem__)
            process = spawn.Process(target=_work_on, args=(gpu, waiting.pop(0), setting, path, deadline, about))
            process.start()
            busy[gpu] += 1
            running[process.sentinel] = process, gpu
        left = deadline + GRACE - time.monotonic()
        for sentinel in multiprocessing.connection.wait(list(running), max(0.0, left)):
            process, gpu = running.pop(sentinel)
            process.join()
            busy[gpu] -= 1
            failures += process.exitcode != 0
        if left <= 0:
            for process, _ in running.values():  # still compiling: there is nothing to keep
                process.kill()
                process.join()
            running = {}
    return failures


# --- the page ---


def tables(lines: list[Line]) -> list[tuple[Line, list[Line]]]:
    """Returns the lines by setting: what is equal in them, with the lines."""
    found: dict[str, tuple[Line, list[Line]]] = {}
    for line in lines:
        shared = shared_of(line["identity"])
        found.setdefault(json.dumps(shared, sort_keys=True), (shared, []))[1].append(line)
    return list(found.values())


def shared_of(identity: Line) -> Line:
    """Returns what is equal in the runs of a table."""
    model = {k: v for k, v in identity["model"].items() if k != "high_blocks"}
    return {"model": model, **{k: identity[k] for k in ("optimizer", "batch", "data")}}


def finals(lines: list[Line], framework: str, recipe: str) -> dict[int, float | None]:
    """Returns the final losses by seed; None where a loss was not finite."""
    if framework == BOTH:
        one, other = (finals(lines, f, recipe) for f in FRAMEWORKS)
        pairs = {seed: (one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())}
        return {seed: None if None in pair else statistics.fmean(pair) for seed, pair in pairs.items()}  # type: ignore[arg-type]
    return {x["seed"]: x["final"] for x in lines if (x["framework"], x["recipe"]) == (framework, recipe)}


def pairs_of(lines: list[Line], framework: str, recipe: str) -> Pairs | None:
    """Returns the pairs of seeds that both precisions have; None without any, or if a run was not finite."""
    high, low = finals(lines, framework, HIGH), finals(lines, framework, recipe)
    seeds = sorted(high.keys() & low.keys())
    if not seeds or any(x is None for s in seeds for x in (high[s], low[s])):
        return None
    return Pairs(tuple(seeds), tuple(high[s] for s in seeds), tuple(low[s] for s in seeds))  # type: ignore[arg-type]


def high_precision(lines: list[Line]) -> str:
    """Returns a table of the runs in high precision: how far the seeds lie apart."""
    body = []
    for framework in FRAMEWORKS:
        found = [x for x in finals(lines, framework, HIGH).values() if x is not None]
        if found:
            mean = statistics.fmean(found)
            spread = f"{100 * (max(found) - min(found)) / mean:.2f} %" if len(found) > 1 else "–"
            body.append([framework, str(len(found)), f"{mean:.4f}", f"{min(found):.4f} to {max(found):.4f}", spread])
    return grid(["", "seeds", "mean, nats", "range", "of the mean"], body)


def by_recipe(lines: list[Line]) -> str:
    """Returns the table of recipes: mean differences, their intervals, and the verdict on the goal."""
    body = []
    for recipe, goal in GOALS.items():
        for framework in (*FRAMEWORKS, BOTH):
            low = finals(lines, framework, recipe)
            if not low:
                continue
            lost = [str(seed) for seed, final in sorted(low.items()) if final is None]
            pairs = pairs_of(lines, framework, recipe)
            cells = [recipe, framework, f"±{100 * goal:g} %"]
            high = finals(lines, framework, HIGH)
            lost_high = [str(seed) for seed in sorted(low.keys() & high.keys()) if high[seed] is None]
            if lost or lost_high:
                what, seeds = ("**not finite**", lost) if lost else ("high precision **not finite**", lost_high)
                body.append([*cells, str(len(low)), "–", "–", f"{what} from seed {', '.join(seeds)}"])
            elif pairs is not None:
                interval = pairs.interval
                shown = "–" if interval is None else f"{100 * interval[0]:+.2f} to {100 * interval[1]:+.2f} %"
                verdict = VERDICTS[pairs.verdict(goal)] if interval else "a single pair tells nothing"
                body.append([*cells, str(len(pairs.seeds)), f"{100 * pairs.mean:+.2f} %", shown, verdict])
    return grid(["recipe", "framework", "goal", "pairs", "mean difference", "95 % interval", ""], body)


def by_blocks(lines: list[Line]) -> str:
    """Returns a table of the ways with blocks in high precision, beside the difference that the share of the other
    blocks would have of that of all blocks."""
    layers, body = lines[0]["identity"]["model"]["layers"], []
    for name, way in WAYS.items():
        of_all, found = (pairs_of(lines, BOTH, n) for n in (name.partition("-high-")[0], name))
        if way.high_blocks and of_all and found:
            quantized = layers - way.high_blocks
            expected = quantized / layers * of_all.mean
            body.append([name, f"{quantized} of {layers}", f"{100 * expected:+.2f} %", f"{100 * found.mean:+.2f} %"])
    heads = ["", "quantized blocks", "their share of the difference with all", "mean difference"]
    return grid(heads, body) if body else ""


def every_pair(lines: list[Line]) -> str:
    """Returns a table of all final losses, with a line for each framework and seed."""
    recipes = [r for r in (HIGH, *GOALS) if any(x["recipe"] == r for x in lines)]
    body = []
    for framework in FRAMEWORKS:
        found = {recipe: finals(lines, framework, recipe) for recipe in recipes}
        for seed in sorted({seed for of in found.values() for seed in of}):
            body.append([framework, str(seed), *(_loss(found[r], seed) for r in recipes)])
    return grid(["", "seed", *("high precision" if r == HIGH else r for r in recipes)], body)


def _loss(found: dict[int, float | None], seed: int) -> str:
    final = found.get(seed, math.nan)
    return "not finite" if final is None else "" if math.isnan(final) else f"{final:.4f}"


def noise(folder: Path) -> str:
    """Returns a table of the noise that recipes add, and its source; nothing if the present code was not measured."""
    shown = Shown(folder)
    rows = shown.find("noise", cases_of("noise")[0])
    if not rows:
        return ""
    least = min(r["noise"] for r in rows.values())
    body = [
        [name, str(r["payloads"]), f"{100 * r['noise']:.3f} %", f"{r['dB']:.1f}", f"{r['noise'] / least:.1f}"]
        for name, r in rows.items()
    ]
    heads = ["recipe", "payloads", "noise", "signal to noise, dB", "noise, times the least"]
    return f"{grid(heads, body)}\n\n{Page(shown).source('noise')}"


def where(lines: list[Line]) -> str:
    """Names the machines, versions and commits of lines."""
    machines = sorted({f"{x['machine']}, {x['versions']}" for x in lines})
    commits = sorted({x["commit"] for x in lines})
    return f"{'; '.join(machines)}; commit {', '.join(commits)}"


def rendered(folder: Path = results.FOLDER) -> str:
    """Returns the page. **Raises** MixedCodeError for a table of different code."""
    import jinja2

    machines = {}
    for path in sorted(folder.glob(f"*/{FILE}")):
        machines[path.parent.name] = found = tables(lines_of(path))
        for _, lines in found:
            require_one_code(path, lines)
    env = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    shown = {f.__name__: f for f in (high_precision, by_recipe, by_blocks, every_pair, where)}
    page = env.from_string(TEXT.read_text()).render(
        machines=machines, setting=Setting(), goals=GOALS, tolerance=LOSS_TOLERANCE, noise=noise(folder), **shown
    )
    return page.strip() + "\n"


# --- the command ---


def arguments(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("run", "render"), default="run")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin no step later than this; default 540")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time; default 8")
    parser.add_argument("--only", nargs="+", choices=(HIGH, *WAYS), metavar="RECIPE", help=", ".join((HIGH, *WAYS)))
    parser.add_argument("--file", type=Path, help="where lines are kept")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--no-compile", action="store_true", help="torch runs eagerly")
    parser.add_argument("--check", action="store_true", help="render: exit 1 if the page is not what it would write")
    group = parser.add_argument_group("SETTING: another one than that of docs/quality.md")
    for field in dataclasses.fields(Setting):
        if field.name not in ("device", "compile"):
            group.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    args = parser.parse_args(argv)
    if min(args.seconds, args.jobs, args.seeds, args.batch) <= 0:
        parser.error("--seconds, --jobs, --seeds and --batch must be positive")
    return parser, args


def main(argv: list[str] | None = None) -> int:
    parser, args = arguments(sys.argv[1:] if argv is None else argv)
    try:
        return _render(args.check) if args.command == "render" else _run(parser, args)
    except MixedCodeError as error:
        print(f"benchmarks.quality: {error}", file=sys.stderr)
        return 1


def _render(check: bool) -> int:
    page = rendered()
    if check and page != PAGE.read_text():
        print("docs/quality.md is not what `python -m benchmarks.quality render` writes", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(page)
        _draw(results.FOLDER / FOLDERS["cuda"] / FILE)
    return 0


def _draw(path: Path) -> None:
    """Draws the table of a file's first setting, which docs/choose.md shows."""
    from benchmarks import plots

    lines = tables(lines_of(path))[0][1]
    found = {recipe: pairs_of(lines, BOTH, recipe) for recipe in GOALS}
    rows = [
        (name, 100 * p.mean, 100 * p.interval[0], 100 * p.interval[1]) for name, p in found.items() if p and p.interval
    ]
    plots.intervals(DOCS / "plots" / "quality.svg", rows, f"A byte-level GPT on {lines[0]['machine']}")


def _run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Setting) if hasattr(args, f.name)}
    setting = dataclasses.replace(Setting(**given), compile=not args.no_compile)
    recipes = [name for name in args.only or WAYS if name != HIGH]
    try:
        for name in (HIGH, *recipes):
            setting.job(name, 0)
    except ValueError as error:
        parser.error(str(error))
    env = results.environment(args.device)
    path = args.file or results.FOLDER / results.machine(env) / FILE
    data = load()
    about = {
        "machine": env.get("gpu", env["machine"]),
        "versions": ", ".join(f"{k} {v}" for k, v in env["versions"].items() if k in ("torch", "jax", "jaxlib")),
        "commit": env["commit"],
        "sources": digest(CODE),
    }
    shared = shared_of(_identity(setting, HIGH, 0, data))
    require_one_code(path, [*(x for x in lines_of(path) if shared_of(x["identity"]) == shared), about])
    groups = groups_left(setting, recipes, data, path)
    print(f"{sum(len(g.seeds) for g in groups)} runs are missing in {path}", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        # Each run jits its step anew, and all seeds of a group compile the same one.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are many
        failures = measure(groups, setting, path, args.seconds, args.jobs, about)
    left = sum(len(g.seeds) for g in groups_left(setting, recipes, data, path))
    print(f"{left} runs are still missing, {failures} processes failed")
    return 1 if failures else INCOMPLETE if left else 0


if __name__ == "__main__":
    sys.exit(main())
