"""The command `diptych replay`."""

from __future__ import annotations

import argparse
import dataclasses

from diptych.lab.frontend import require
from diptych.lab.output import Output
from diptych.lab.replay.judge import Outcome, judged
from diptych.lab.replay.op import REFUSED, ReplayError
from diptych.lab.replay.recorded import Recorded, recorded
from diptych.lab.replay.shapes import require_shape
from diptych.lab.traces import Observation, Trace

DIFFERS = 1


def run(args: argparse.Namespace) -> int:
    """Computes a recorded operation again and shows whether it agrees. Returns 0 if it does, else 1.

    **Raises** ReplayError or TraceError if the operation cannot be computed again, FrontendError if the framework
    cannot run, FileError if the file for --json cannot be written.
    """
    with args.progress.stage("reading the trace"):
        trace = Trace.open(args.trace)
        output = Output(args.json, [args.trace])
        found = recorded(trace, args.site, args.step, args.rank)
    framework = args.framework or ("jax" if trace.meta.framework == "torch" else "torch")
    with args.progress.stage(f"loading {framework}"):
        frontend = require(framework, args.device)
    try:
        with args.progress.stage(f"computing {found.op.kind} again"):
            require_shape(found.op)
            again = frontend.replay(found.op, args.device)
            outcomes = judged(found.op, again, trace.meta.device == args.device)
    except REFUSED as e:
        raise ReplayError(f"{args.site}: {found.op.kind} cannot be computed from the recorded operands: {e}") from e
    output.give(_data(found, framework, args.device, outcomes))
    output.say(_text(found, trace, framework, args.device, outcomes))
    return 0 if all(o.agrees for o in outcomes) else DIFFERS


def _data(found: Recorded, framework: str, device: str, outcomes: list[Outcome]) -> dict[str, object]:
    return {
        "operation": found.op.kind,
        "options": {k: str(v) for k, v in found.op.options.items()},
        "operands": {k: o.site.key for k, o in found.operands.items()},
        "framework": framework,
        "device": device,
        "results": [dataclasses.asdict(o) | {"result": found.results[o.result].site.key} for o in outcomes],
        "agrees": all(o.agrees for o in outcomes),
    }


def _text(found: Recorded, trace: Trace, framework: str, device: str, outcomes: list[Outcome]) -> str:
    op, step = found.op, next(iter(found.results.values())).step
    of = f"{trace.meta.framework} on {trace.meta.device}"
    lines = [f"{op.kind} of step {step}, recorded in {of}, computed in {framework} on {device}"]
    lines += [f"  option {k} = {v}" for k, v in op.options.items()]
    lines += [f"  {k} = {_shown(o)}" for k, o in found.operands.items()]
    for o in outcomes:
        lines.append(f"  -> {_shown(found.results[o.result])}")
        if o.differing:
            ulp = "" if o.max_ulp is None else f", at most {o.max_ulp} ULP"
            far = "" if o.relative is None else f", relative rms {o.relative:.3g}"
            lines.append(f"     {o.differing} of {o.elements} elements differ{ulp}{far}")
        if o.recorded_error is not None and o.replayed_error is not None:
            errors = f"recorded {o.recorded_error:.2g}, computed again {o.replayed_error:.2g}"
            lines.append(f"     largest errors in units of the rounding bound: {errors}")
        lines.append(f"     {'agrees' if o.agrees else 'DIFFERS'}: {o.why}")
    if all(o.agrees for o in outcomes):
        lines.append("The operation agrees: where another run differs at this site, its operands or options do.")
    else:
        lines.append("The operation differs: equal operands give other results.")
    return "\n".join(lines)


def _shown(o: Observation) -> str:
    return f"{o.site.key} {o.site.dtype}{list(o.site.shape)}"
