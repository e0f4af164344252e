"""The comparison of two frameworks: the same model, weights and batches, in high precision and with a recipe.

First, some steps are captured as traces: every operation of the first framework is replayed in the second on the
recorded operands, and the bits of both trajectories are compared. Then four runs train to the end, and their losses and
kernel counts are checked. Each further seed adds four runs, whose final losses alone are compared. All results go into
one plain dictionary, which the report shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diptych.common import Recipe, TensorPlan, linear_plan
from diptych.lab import train
from diptych.lab.data import ByteData
from diptych.lab.first_steps import FirstSteps, first_steps, loss_distance
from diptych.lab.frontend import Frontend
from diptych.lab.job import Corruption, Job, ModelConfig, OptimConfig, initial_weights, loss_tolerance
from diptych.lab.progress import Progress
from diptych.lab.seeds import Pairs, overall

ENTROPY_FACTOR = 0.8
OPS = ("quantize", "gemm", "bias_grad", "scale_update")
JOINED = "scale_update_many"  # this op runs in place of scale_update if Frontend.updates_together is true
"""The op whose count in the kernel table is checked, together with those in `OPS`."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a comparison. `corrupt`: the framework whose low-precision runs get `corruption`. `seeds`: the
    number of seeds to train, from `settings.seed` on; traces, replays and kernel counts are those of the first seed.
    `keep_traces`: whether the values of the first steps stay on disk."""

    recipe_name: str
    recipe: Recipe
    model: ModelConfig
    optim: OptimConfig
    settings: train.Settings
    device: str = "cpu"
    compile: bool = True
    threads: int = 2
    trace_steps: int = 3
    corrupt: str | None = None
    corruption: Corruption | None = None
    seeds: int = 1
    keep_traces: bool = False

    def of_seed(self, seed: int) -> Options:
        """Returns the options for a comparison with one other seed."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, seed=seed), seeds=1)

    def job(self, framework: str, low: bool) -> Job:
        return Job(
            model=self.model,
            optim=self.optim,
            recipe=self.recipe if low else None,
            device=self.device,
            compile=self.compile,
            threads=self.threads,
            seed=self.settings.seed,
            corruption=self.corruption if low and framework == self.corrupt else None,
        )


@dataclasses.dataclass(frozen=True)
class Check:
    """The result of one check; the command fails if any check fails. `passed`: None if it is undecided."""

    name: str
    passed: bool | None
    detail: str


Say = Callable[[str], None]


def compare(
    pair: tuple[Frontend, Frontend],
    data: ByteData,
    options: Options,
    folder: pathlib.Path,
    say: Say,
    progress: Progress,
) -> dict[str, Any]:
    """Runs the whole comparison of a pair of frontends. `folder`: the folder for results. Traces are written in it, and
    stay as `traces/FRAMEWORK` if `options` ask for that.

    **Raises** TraceError if traces are to stay and older ones are there.

    **Returns:** plain data: "checks", "passed" (None: undecided), "runs" (of the first seed), "pairs" (of all seeds by
    framework), "trace", "replay", "framework_ops", "entropy", "seconds", settings.
    """
    began = time.perf_counter()
    data.check(options.model.seq)
    say(f"tracing the first {options.trace_steps} steps in {pair[0].name} and {pair[1].name}")
    traced = _first_steps(pair, data, options, folder, progress)
    seeds = range(options.settings.seed, options.settings.seed + options.seeds)
    of_seeds = {seed: _four_runs(pair, data, options, seed, say, progress) for seed in seeds}
    runs = of_seeds[options.settings.seed]
    pairs = {f.name: _pairs(f.name, of_seeds, options) for f in pair}
    checks = _checks(pair, runs, pairs, traced, data.unigram_entropy, options)
    shown = {name: _run_data(pair, name, r, options) for name, r in runs.items()}
    return {
        "checks": [dataclasses.asdict(c) for c in checks],
        "passed": overall(c.passed for c in checks),
        "runs": shown,
        "pairs": {name: p.data() for name, p in pairs.items()},
        "counted": [op for op in (*OPS, JOINED) if any(run["expected"][op] for run in shown.values())],
        "losses_part": _losses_part(pair, runs, options),
        "entropy": data.unigram_entropy,
        "frameworks": [f.name for f in pair],
        "recipe": {
            "name": options.recipe_name,
            "value": repr(options.recipe),
            "fingerprint": options.recipe.fingerprint,
            "formats": _formats(options.recipe),
            "tolerance": loss_tolerance(options.recipe),
            "linear_dtype": options.job(pair[0].name, True).linear_dtype,
        },
        "model": dataclasses.asdict(options.model) | {"parameters": options.model.parameters},
        "optimizer": dataclasses.asdict(options.optim),
        "settings": dataclasses.asdict(options.settings)
        | {"device": options.device, "compile": options.compile, "seeds": options.seeds},
        "corrupted": _corruption_data(options),
        "data": {"source": data.source, "files": data.files, "train": len(data.train), "valid": len(data.valid)},
        "versions": {f.name: f.versions() for f in pair},
        "seconds": time.perf_counter() - began,
        **traced.data,
    }


def _first_steps(
    pair: tuple[Frontend, Frontend], data: ByteData, options: Options, folder: pathlib.Path, progress: Progress
) -> FirstSteps:
    model, settings = options.model, options.settings
    weights = initial_weights(model, settings.seed)
    jobs = [dataclasses.replace(options.job(f.name, True), compile=False) for f in pair]
    a, b = (f.trainer(job, weights) for f, job in zip(pair, jobs, strict=True))
    batches = [data.batch(settings.seed, i, settings.batch, model.seq) for i in range(options.trace_steps)]
    with contextlib.ExitStack() as stack:
        if options.keep_traces:
            folder = folder / "traces"
        else:
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="traces-", dir=folder)))
        return first_steps(pair, (a, b), batches, model, options.device, folder, options.keep_traces, progress)


HIGH = "high precision"


def _four_runs(
    pair: tuple[Frontend, Frontend], data: ByteData, options: Options, seed: int, say: Say, progress: Progress
) -> dict[str, train.RunResult]:
    """Trains both frameworks in both precisions from one seed. **Returns** the runs by "FRAMEWORK PRECISION"."""
    runs = {}
    one = options.of_seed(seed)
    for frontend in pair:
        for low in (False, True):
            name = f"{frontend.name} {options.recipe_name if low else HIGH}"
            shown = f"{name}, seed {seed}" if options.seeds > 1 else name
            if not progress.bars:
                say(f"training {shown}")
            runs[name] = train.run(
                frontend, one.job(frontend.name, low), data, one.settings, name=shown, progress=progress
            )
    return runs


def _pairs(framework: str, of_seeds: dict[int, dict[str, train.RunResult]], options: Options) -> Pairs:
    high, low = (
        tuple(runs[f"{framework} {which}"].final for runs in of_seeds.values()) for which in (HIGH, options.recipe_name)
    )
    return Pairs(tuple(of_seeds), high, low)


def _formats(recipe: Recipe) -> list[dict[str, str]]:
    """Returns the quantizers of each product's operands, in one row for each tensor and quantizer."""
    plan, rows = linear_plan(recipe), []
    uses = (("input", "fprop", "wgrad"), ("weight", "fprop", "dgrad"), ("grad_output", "dgrad", "wgrad"))
    for tensor, *products in uses:
        operand: TensorPlan = getattr(plan, tensor)
        made = list(zip(products, (operand.rowwise, operand.columnwise), strict=True))
        if operand.shared:
            made = [(" and ".join(products), operand.rowwise)]
        for product, quantizer in made:
            name = "high precision" if quantizer is None else quantizer.format.name
            rows.append({"tensor": tensor, "products": product, "format": name, "quantizer": str(quantizer or "")})
    return rows


def _corruption_data(options: Options) -> dict[str, Any] | None:
    if options.corruption is None:
        return None
    return {"framework": options.corrupt, **dataclasses.asdict(options.corruption)}


# --- verdicts ---


def calls_per_linear(recipe: Recipe | None) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the kernel calls of one linear layer by op, in a training step and in an evaluated batch."""
    step: dict[str, int] = dict.fromkeys(OPS, 0)
    if recipe is None:
        return step, dict(step)
    plan = linear_plan(recipe)
    operands = (plan.input, plan.weight, plan.grad_output)
    step["quantize"] = sum(len(t.calls(True, True)) for t in operands)
    step["gemm"], step["bias_grad"], step["scale_update"] = sum(plan.quantized), 1, len(plan.states)
    forward = {"quantize": sum(len(t.calls(True, False)) for t in operands[:2]), "gemm": int(plan.quantized[0])}
    return step, {**dict.fromkeys(OPS, 0), **forward}


def expected_calls(options: Options, frontend: Frontend, run: train.RunResult, low: bool) -> dict[str, int]:
    """Returns the kernel calls that a training run must make, by op."""
    step, evaluated = calls_per_linear(options.recipe if low else None)
    linears = len(options.model.linears)
    calls = {op: linears * (step[op] * run.steps_run + evaluated[op] * run.evaluations_run) for op in step}
    calls[JOINED] = 0
    if frontend.updates_together:
        calls["scale_update"], calls[JOINED] = 0, linears * min(step["scale_update"], 1) * run.steps_run
    return calls


def _checks(
    pair: tuple[Frontend, Frontend], runs: dict[str, train.RunResult], pairs: dict[str, Pairs], traced: FirstSteps,
    entropy: float, options: Options,
) -> list[Check]:  # fmt: skip
    limit = ENTROPY_FACTOR * entropy
    checks = []
    for name, run in runs.items():
        detail = f"{run.final:.4f} nats, limit {limit:.4f} = {ENTROPY_FACTOR} x unigram entropy {entropy:.4f}"
        checks.append(Check(f"{name}: validation loss beats the unigram entropy", run.final < limit, detail))
    tolerance = loss_tolerance(options.recipe)
    for name, found in pairs.items():
        what = "trains as high precision does" if options.seeds > 1 else "ends near high precision in a single pair"
        named = f"{name}: {options.recipe_name} {what}"
        checks.append(Check(named, found.verdict(tolerance), found.said(tolerance)))
    for frontend in pair:
        run = runs[f"{frontend.name} {options.recipe_name}"]
        want, got = expected_calls(options, frontend, run, True)["gemm"], run.calls["gemm"]
        gaps = [m for m in traced.missing if m.startswith(frontend.name + " ")]
        step, evaluated = (calls["gemm"] for calls in calls_per_linear(options.recipe))
        detail = f"{got} quantized GEMMs ran, {want} = {len(options.model.linears)} linears x "
        detail += f"({step} x {run.steps_run} steps + {evaluated} x {run.evaluations_run} evaluated batches) expected"
        detail += f"; missing in the trace: {', '.join(gaps[:3])}" if gaps else ""
        name = f"{frontend.name}: every linear's three GEMMs ran quantized kernels"
        checks.append(Check(name, got == want and not gaps, detail))
    differing = sum(d.differing or 0 for d in traced.replayed)
    elements = sum(d.elements for d in traced.replayed)
    detail = f"{len(traced.replayed)} tensors with {elements:,} elements, {differing:,} differ"
    name = f"every {pair[0].name} op, replayed in {pair[1].name} on the same inputs, gives the same bits"
    return [*checks, Check(name, bool(traced.replayed) and not differing, detail)]


def _run_data(pair: tuple[Frontend, Frontend], name: str, run: train.RunResult, options: Options) -> dict[str, Any]:
    low = not name.endswith(HIGH)
    (frontend,) = [f for f in pair if f.name == name.split()[0]]
    return {
        "losses": run.losses.tolist(),
        "validation": {str(k): v for k, v in run.validation.items()},
        "final": run.final,
        "seconds": run.seconds,
        "seconds_per_step": run.step_seconds,
        "calls": run.calls,
        "expected": expected_calls(options, frontend, run, low),
        "scales": {str(k): v for k, v in run.scales.items()},
        "low": low,
    }


def _losses_part(pair: tuple[Frontend, Frontend], runs: dict[str, train.RunResult], options: Options) -> list[Any]:
    """Returns, for each precision, the first step in which the compiled runs' losses differ, and the distance in
    ULP."""
    out = []
    for which in (HIGH, options.recipe_name):
        a, b = (runs[f"{f.name} {which}"].losses.astype(np.float32) for f in pair)
        steps = np.flatnonzero(a != b)
        at = int(steps[0]) if len(steps) else None
        ulp = 0 if at is None else loss_distance(a[at], b[at]).max_ulp
        out.append({"precision": which, "step": at, "ulp": ulp, "largest": float(np.abs(a - b).max())})
    return out
