"""The comparison of two frameworks: the same model, weights and batches, in high precision and by a recipe.

First, some steps are traced: every diptych op of the first framework is replayed in the second on the recorded inputs,
and both trajectories are compared in bits. Then four runs train to the end, and their losses and kernel counts are
checked. Further seeds add four runs each, of which the final losses alone are compared. All results go into one plain
dictionary, which the report shows.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from diptych.common import Recipe, TensorPlan, linear_plan
from diptych.lab import train
from diptych.lab.data import ByteData
from diptych.lab.frontend import Frontend, Trainer
from diptych.lab.job import Corruption, Job, ModelConfig, OptimConfig, initial_weights, loss_tolerance
from diptych.lab.replay.op import Bits
from diptych.lab.seeds import Pairs, overall
from diptych.lab.trace import (
    ROLES,
    Difference,
    Labelled,
    StepTrace,
    activation_order,
    computed,
    difference,
    framework_ops,
    label,
    merge,
    missing_products,
)

ENTROPY_FACTOR = 0.8
OPS = ("quantize", "gemm", "bias_grad", "scale_update")
JOINED = "scale_update_many"  # runs in place of scale_update where Frontend.updates_together
"""Ops that training calls, whose counts in the kernel table are checked."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a comparison. `corrupt`: name of the framework whose low-precision runs get `corruption`. `seeds`: how
    many seeds from `settings.seed` on are trained; the trace, replays and kernel counts are those of the first."""

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

    def of_seed(self, seed: int) -> Options:
        """Returns the options of a comparison of one other seed."""
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
    """One check's result; if any check fails, so does the command. `passed`: None is undecided."""

    name: str
    passed: bool | None
    detail: str


Say = Callable[[str], None]


def compare(
    pair: tuple[Frontend, Frontend], data: ByteData, options: Options, say: Say, progress: bool
) -> dict[str, Any]:
    """Runs the whole comparison of a pair of frontends.

    **Returns:** plain data: "checks", "passed" (None: undecided), "runs" (of the first seed), "pairs" (of all seeds by
    framework), "trace", "replay", "framework_ops", "entropy", "seconds", settings.
    """
    began = time.perf_counter()
    data.check(options.model.seq)
    say(f"tracing the first {options.trace_steps} steps in {pair[0].name} and {pair[1].name}")
    traced = _trace(pair, data, options)
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
        **{k: v for k, v in traced.items() if not k.startswith("_")},
    }


HIGH = "high precision"


def _four_runs(
    pair: tuple[Frontend, Frontend], data: ByteData, options: Options, seed: int, say: Say, progress: bool
) -> dict[str, train.RunResult]:
    """Trains both frameworks in both precisions from one seed. **Returns** the runs by "FRAMEWORK PRECISION"."""
    runs = {}
    one = options.of_seed(seed)
    for frontend in pair:
        for low in (False, True):
            name = f"{frontend.name} {options.recipe_name if low else HIGH}"
            shown = f"{name}, seed {seed}" if options.seeds > 1 else name
            if not progress:
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
    """Returns the quantizers of the operands of each product: a row for each tensor and quantizer."""
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


# --- the first steps, in bits ---


def _trace(pair: tuple[Frontend, Frontend], data: ByteData, options: Options) -> dict[str, Any]:
    weights = initial_weights(options.model, options.settings.seed)
    trainers: list[Trainer] = [f.trainer(options.job(f.name, True), weights) for f in pair]
    steps: list[dict[str, Any]] = []
    replayed: dict[str, list[Difference]] = {}
    isolated: dict[str, list[Difference]] = {}
    drift: list[dict[str, Any]] = []
    missing: list[str] = []
    for step in range(options.trace_steps):
        batch = data.batch(options.settings.seed, step, options.settings.batch, options.model.seq)
        before = trainers[0].state().weights
        a, b = (t.traced_step(batch) for t in trainers)
        labelled = [label(t.ops, options.model) for t in (a, b)]
        for name, items in zip((f.name for f in pair), labelled, strict=True):
            missing += [f"{name} step {step}: {p}" for p in missing_products(items, options.model)]
        for op in a.ops:
            again = pair[1].replay(op, options.device)
            replayed.setdefault(op.kind, []).extend(difference(v, again[k]) for k, v in op.outputs.items())
        for kind, part in _isolated(pair[1], a, before, batch, options.model):
            isolated.setdefault(kind, []).append(part)
        drift.append(_activations(a, b, options.model))
        steps.append(_step_data(step, a, b, labelled))
    parting = _parting(drift)
    return {
        "trace": steps,
        "replay": [{"op": kind, **_counts(parts)} for kind, parts in replayed.items()],
        "framework_ops": [
            {"kind": kind, **_counts(parts), "parts": parting["by_kind"].get(kind)} for kind, parts in isolated.items()
        ],
        "first_parting": parting["first"],
        "drift": drift,
        "_missing": missing,
        "_replayed": merge([p for parts in replayed.values() for p in parts]),
        "_tensors": sum(len(parts) for parts in replayed.values()),
    }


def _counts(parts: list[Difference]) -> dict[str, Any]:
    total = merge(parts)
    return {
        "tensors": len(parts),
        "tensors_differing": sum(not p.equal for p in parts),
        "elements": total.elements,
        "differing": total.differing,
        "max_ulp": total.max_ulp,
    }


def _isolated(other: Frontend, trace: StepTrace, weights: Any, batch: np.ndarray, model: ModelConfig) -> Any:
    """Returns (kind, Difference) for each framework op, computed by `other` on the inputs in `trace`."""
    known = {**weights, **trace.activations, "tokens": batch[:, :-1], "targets": batch[:, 1:]}
    for op in framework_ops(model):
        inputs = [np.ascontiguousarray(known[name]) for name in op.inputs]
        out = computed(op, inputs, model.heads, lambda row: other.replay(row, "cpu"))
        yield op.kind, difference(Bits.of(np.asarray(known[op.output])), Bits.of(out))


def _activations(a: StepTrace, b: StepTrace, model: ModelConfig) -> dict[str, Any]:
    """Returns the difference of every activation between the two trajectories, in forward order."""
    rows = []
    for name, kind in activation_order(model):
        x, y = a.activations[name], b.activations[name]
        found = difference(Bits.of(x), Bits.of(y))
        finite = np.isfinite(x) & np.isfinite(y)
        relative = _relative(x[finite], y[finite])
        rows.append({"name": name, "kind": kind, "differing": found.differing, "elements": found.elements,
                     "max_ulp": found.max_ulp, "relative": relative})  # fmt: skip
    return {"activations": rows}


def _relative(x: np.ndarray, y: np.ndarray) -> float:
    """||x - y|| / ||x||."""
    norm = float(np.linalg.norm(x.astype(np.float64)))
    return float(np.linalg.norm(x.astype(np.float64) - y)) / norm if norm else 0.0


def _parting(drift: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the first activation that differs over all steps, and the first one for each kind of op."""
    first, by_kind = None, {}
    for step, trace in enumerate(drift):
        for row in trace["activations"]:
            if row["differing"]:
                here = {"step": step, "name": row["name"], "kind": row["kind"], "max_ulp": row["max_ulp"]}
                first = first or here
                by_kind.setdefault(row["kind"], here)
    return {"first": first, "by_kind": by_kind}


_PARTS = {"data": "payload", "inv": "scale", "amax": "amax"}
_WHAT = {"input": "quantized input", "weight": "quantized weight", "grad_output": "quantized output gradient"}


def _step_data(step: int, a: StepTrace, b: StepTrace, labelled: list[list[Labelled]]) -> dict[str, Any]:
    """Returns one step's table: for each kind of tensor, how many elements differ and where the first one is."""
    ours, theirs = labelled
    by_key = {(item.linear, item.role): item.op for item in theirs}
    found: dict[str, list[tuple[str, Difference]]] = {}
    far: dict[str, float] = {}  # largest relative distance of a tensor, where its elements are numbers of their own
    for item in sorted(ours, key=lambda i: ROLES.index(i.role)):
        other = by_key.get((item.linear, item.role))
        if other is None:
            raise ValueError(f"step {step}: {item.linear} {item.role} was recorded in one framework only")
        for name, bits in item.op.outputs.items():
            if item.role in _WHAT:
                what = f"{_WHAT[item.role]}: {_PARTS[name.rsplit('_', 1)[-1]]}"
            else:
                what = f"{item.role} result"
            found.setdefault(what, []).append((item.linear, difference(bits, other.outputs[name])))
            x, y = bits.floats, other.outputs[name].floats
            if x is not None and y is not None and item.role not in _WHAT:
                far[what] = max(far.get(what, 0.0), _relative(x, y))
    for name, grad in a.gradients.items():
        parts = found.setdefault("parameter gradients", [])
        parts.append((name, difference(Bits.of(grad), Bits.of(b.gradients[name]))))
    far["parameter gradients"] = max(_relative(g, b.gradients[name]) for name, g in a.gradients.items())
    rows = []
    for what, parts in found.items():
        where = next((name for name, part in parts if not part.equal), None)
        rows.append({"what": what, **_counts([part for _, part in parts]), "first": where, "relative": far.get(what)})
    return {"step": step, "losses": [a.loss, b.loss], "loss_ulp": _loss_ulp(a.loss, b.loss), "rows": rows}


def _loss_ulp(x: float, y: float) -> int:
    return difference(Bits.of(np.array([x], np.float32)), Bits.of(np.array([y], np.float32))).max_ulp


# --- verdicts ---


def calls_per_linear(recipe: Recipe | None) -> tuple[dict[str, int], dict[str, int]]:
    """Kernel calls of one linear in a training step, and in an evaluated batch, by op."""
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
    """Kernel calls that training must make, by op."""
    step, evaluated = calls_per_linear(options.recipe if low else None)
    linears = len(options.model.linears)
    calls = {op: linears * (step[op] * run.steps_run + evaluated[op] * run.evaluations_run) for op in step}
    calls[JOINED] = 0
    if frontend.updates_together:
        calls["scale_update"], calls[JOINED] = 0, linears * min(step["scale_update"], 1) * run.steps_run
    return calls


def _checks(
    pair: tuple[Frontend, Frontend], runs: dict[str, train.RunResult], pairs: dict[str, Pairs], traced: Any,
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
        gaps = [m for m in traced["_missing"] if m.startswith(frontend.name + " ")]
        step, evaluated = (calls["gemm"] for calls in calls_per_linear(options.recipe))
        detail = f"{got} quantized GEMMs ran, {want} = {len(options.model.linears)} linears x "
        detail += f"({step} x {run.steps_run} steps + {evaluated} x {run.evaluations_run} evaluated batches) expected"
        detail += f"; missing in the trace: {', '.join(gaps[:3])}" if gaps else ""
        name = f"{frontend.name}: every linear's three GEMMs ran quantized kernels"
        checks.append(Check(name, got == want and not gaps, detail))
    replayed: Difference = traced["_replayed"]
    detail = f"{traced['_tensors']} tensors with {replayed.elements:,} elements, {replayed.differing:,} differ"
    name = f"every {pair[0].name} op, replayed in {pair[1].name} on the same inputs, gives the same bits"
    return [*checks, Check(name, replayed.equal and traced["_tensors"] > 0, detail)]


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
    """Returns for each precision the first step whose losses differ between the compiled runs, and by how many ULP."""
    out = []
    for which in (HIGH, options.recipe_name):
        a, b = (runs[f"{f.name} {which}"].losses.astype(np.float32) for f in pair)
        steps = np.flatnonzero(a != b)
        at = int(steps[0]) if len(steps) else None
        ulp = 0 if at is None else _loss_ulp(float(a[at]), float(b[at]))
        out.append({"precision": which, "step": at, "ulp": ulp, "largest": float(np.abs(a - b).max())})
    return out
