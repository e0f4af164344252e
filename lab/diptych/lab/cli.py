"""The command `diptych`: doctor, train, compare, diff, replay, bisect, explain, completion."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from diptych.common import RECIPES, ArgumentError, CheckpointError, DeviceError, ShapeError, UnsupportedError
from diptych.common.errors import ExplainedError
from diptych.lab import files
from diptych.lab.arguments import BAD_INPUT, parser
from diptych.lab.data import ByteData, DataError, load
from diptych.lab.diff.result import DiffError
from diptych.lab.frontend import FrontendError, TrainingError
from diptych.lab.interrupt import STATUS, Interrupt
from diptych.lab.job import Corruption, Job, ModelConfig, OptimConfig
from diptych.lab.output import Output
from diptych.lab.progress import Progress
from diptych.lab.replay.op import ReplayError
from diptych.lab.traces.schema import TraceError

if TYPE_CHECKING:
    from diptych.lab.train import Settings

FAILED, UNDECIDED, INTERRUPTED = 1, 3, STATUS
RESULTS, REPORT = "results.json", "report.html"
VERDICTS = {True: "pass", False: "FAIL", None: "undecided"}


class InputError(ExplainedError, ValueError):
    """The error for invalid arguments. Its message names the argument and the fault.

    **Cause:** A value that the command cannot use, or a package that it needs and that is not installed.

    **Remedy:** Correct the argument; `diptych COMMAND --help` lists what each takes.
    """


_REFUSALS = (
    InputError, DataError, CheckpointError, DeviceError, ShapeError, UnsupportedError, FrontendError, files.BusyError,
    TraceError, DiffError, ReplayError, OSError,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0 for success, 1 for a failed check or run, 2 for bad input, 3 for a comparison that
    needs more seeds, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(arguments)
    ctrl_c = Interrupt(args.command)
    try:
        with ctrl_c if argv is None else contextlib.nullcontext():  # code that calls `main` keeps its own handler
            args.interrupt = ctrl_c
            args.progress = Progress(f"diptych {args.command}", quiet=getattr(args, "quiet", True))
            try:
                return COMMANDS[args.command](args, arguments)
            except KeyboardInterrupt:
                if argv is None:
                    ctrl_c.end()
                raise
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except _REFUSALS as e:
        return _fail(args.command, e, BAD_INPUT)
    except MemoryError as e:
        return _fail(args.command, f"too large for this machine's memory: {e or 'out of memory'}", BAD_INPUT)
    except TrainingError as e:
        return _fail(args.command, e, FAILED)
    except KeyboardInterrupt:
        print(ctrl_c.message(), file=sys.stderr)
        return INTERRUPTED


def _fail(command: str, what: object, status: int) -> int:
    print(f"diptych {command}: error: {' '.join(str(what).split())}", file=sys.stderr)
    return status


# --- commands ---


def _doctor(args: argparse.Namespace, _: list[str]) -> int:
    from diptych.lab import doctor

    output = Output(args.json)
    with args.progress.stage("loading frameworks, asking what runs"):
        found = doctor.diagnose()
    output.say(doctor.as_text(found))
    output.give(found)
    return 0


def _explain(args: argparse.Namespace, _: list[str]) -> int:
    from diptych.lab import explain

    output = Output(args.json)
    try:
        found = [explain.explained(name) for name in ([args.name] if args.name else explain.classes())]
    except ArgumentError as e:
        raise InputError(str(e)) from e
    output.say(explain.as_text(found))
    output.give(found)
    return 0


def _configs(args: argparse.Namespace) -> tuple[ModelConfig, OptimConfig, Settings, ByteData]:
    _need_lab_packages()
    from diptych.lab.train import Settings

    try:
        sizes = {f: getattr(args, f) for f in ("width", "layers", "heads", "seq", "high_blocks")}
        model = ModelConfig(**sizes)
        optim = OptimConfig(lr=args.lr, steps=args.steps, warmup=args.warmup, clip=args.clip)
    except ValueError as e:
        raise InputError(str(e)) from e
    settings = Settings(
        seed=args.seed,
        batch=args.batch,
        eval_every=args.eval_every,
        eval_batches=args.eval_batches,
        checkpoint_every=getattr(args, "checkpoint_every", 0),
    )
    with args.progress.stage("reading data"):
        data = load(args.data, cap=args.data_cap)
    data.check(model.seq)
    return model, optim, settings, data


def _need_lab_packages() -> None:
    for name in ("tqdm", "matplotlib", "jinja2"):
        try:
            __import__(name)
        except ImportError as e:
            raise InputError(f"this command needs {name} ({e}); install it with: pip install 'diptych[lab]'") from e


def _frontend(name: str, args: argparse.Namespace) -> Any:
    from diptych import core
    from diptych.lab import frontend

    if args.device == "cuda" and not core.build_info()["cuda"]:
        raise InputError(
            "--device cuda: this build of diptych has no CUDA backend; rebuild it with nvcc (DIPTYCH_CUDA=on)"
        )
    with args.progress.stage(f"loading {name}"):
        return frontend.require(name, args.device)


@contextlib.contextmanager
def _writing(folder: pathlib.Path, *names: str) -> Iterator[None]:
    """Locks the folder of results. **Raises** InputError at once if results could not be written there later."""
    if (found := files.kind(folder)) not in ("a folder", "nothing"):
        raise InputError(f"--out {folder}: is not a folder but {found}")
    for name in names:
        if (folder / name).is_dir():
            raise InputError(f"{folder / name}: is a folder, where a file is to be written")
    with files.only_run(folder):
        yield


def _train(args: argparse.Namespace, _: list[str]) -> int:
    if args.recipe == "none" and args.high_blocks:
        raise InputError("--high-blocks: without a recipe all blocks are in high precision; leave the option out")
    model, optim, settings, data = _configs(args)
    from diptych.lab import checkpoint

    frontend = _frontend(args.framework, args)
    job = Job(
        model=model,
        optim=optim,
        recipe=RECIPES.get(args.recipe),
        device=args.device,
        compile=not args.no_compile,
        threads=args.threads,
        seed=args.seed,
    )
    resumed = args.resume
    home = resumed if resumed is None or resumed.is_dir() else resumed.parent
    folder = args.out or home or pathlib.Path(f"runs/train-{args.framework}-{args.recipe}")
    target = folder / checkpoint.FILE_NAME
    output = Output(args.json)
    with _writing(folder, target.name, RESULTS):
        if target.exists() and not args.overwrite and (home is None or home.resolve() != folder.resolve()):
            raise InputError(
                f"{target} exists: --resume {folder} continues it, --overwrite starts anew, --out DIR keeps it"
            )
        what = f"{model.parameters} parameters, {data.source}, {data.files} files"
        output.say(f"{args.framework} {args.recipe} on {args.device}: {what}")
        args.interrupt.left = lambda: _kept(target)
        return _train_in(folder, target, args, output, frontend, job, data, settings)


def _train_in(
    folder: pathlib.Path, target: pathlib.Path, args: argparse.Namespace, output: Output, frontend: Any, job: Job,
    data: ByteData, settings: Settings,
) -> int:  # fmt: skip
    from diptych.lab import train

    result = train.run(
        frontend,
        job,
        data,
        settings,
        train.Stretch(target, args.resume, args.stop_after),
        name=f"{args.framework} {args.recipe}",
        on_step=args.interrupt.stepped,
        stop=args.interrupt.requested,
        progress=args.progress,
    )
    summary = {
        "framework": args.framework,
        "recipe": args.recipe,
        "device": args.device,
        "steps": len(result.losses),
        "losses": result.losses.tolist(),
        "validation": {str(k): v for k, v in result.validation.items()},
        "unigram_entropy": data.unigram_entropy,
        "kernel_calls": result.calls,
        "seconds": result.seconds,
        "seconds_per_step": result.step_seconds,
        "versions": frontend.versions(),
    }
    files.write_text(folder / RESULTS, json.dumps(summary, indent=1))
    output.give(summary)
    if result.validation:
        output.say(f"validation loss {result.final:.4f} nats per byte (unigram entropy {data.unigram_entropy:.4f})")
    output.say(f"{len(result.losses)} of {job.optim.steps} steps; {result.seconds:.0f} s; {target}")
    return 0


def _kept(target: pathlib.Path) -> str:
    """Returns a sentence on the checkpoint, if any, that an interrupted run has written."""
    from diptych.lab import checkpoint

    if not target.exists():
        return "no checkpoint was written yet"
    try:
        return f"{target} holds {checkpoint.load(target).state.step} steps, and --resume {target.parent} goes on"
    except CheckpointError as e:
        return str(e)


def _compare(args: argparse.Namespace, arguments: list[str]) -> int:
    model, optim, settings, data = _configs(args)
    from diptych.lab import compare, report

    corruption = Corruption("blocks.0.qkv") if args.corrupt_scale else None
    options = compare.Options(
        recipe_name=args.recipe,
        recipe=RECIPES[args.recipe],
        model=model,
        optim=optim,
        settings=settings,
        device=args.device,
        compile=not args.no_compile,
        threads=args.threads,
        trace_steps=min(args.trace_steps, args.steps),
        corrupt=args.corrupt_scale,
        corruption=corruption,
        seeds=args.seeds,
        keep_traces=args.keep_traces,
    )
    output = Output(args.json)
    pair = (_frontend("torch", args), _frontend("jax", args))
    folder = args.out or pathlib.Path(f"runs/compare-{args.recipe}")
    with _writing(folder, RESULTS, REPORT):
        results = compare.compare(pair, data, options, folder, output.say, args.progress)
        files.write_text(folder / RESULTS, json.dumps(results, indent=1))
        commands = [shlex.join(["diptych", *arguments]), "diptych doctor"]
        with args.progress.stage("drawing the report"):
            files.write_text(folder / REPORT, report.render(results, commands))
    output.give(results)
    for check in results["checks"]:
        output.say(f"{VERDICTS[check['passed']]}  {check['name']}: {check['detail']}")
    output.say(f"{results['seconds']:.0f} s; report: {folder / REPORT}")
    return {True: 0, False: FAILED, None: UNDECIDED}[results["passed"]]


def _diff(args: argparse.Namespace, _: list[str]) -> int:
    from diptych.lab.diff import command

    return command.run(args)


def _replay(args: argparse.Namespace, _: Sequence[str]) -> int:
    from diptych.lab.replay import command

    return command.run(args)


def _bisect(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from diptych.lab.bisect import command

    return command.run(args, arguments)


def _completion(args: argparse.Namespace, _: Sequence[str]) -> int:
    try:
        import shtab
    except ImportError as e:
        raise InputError(f"completion needs shtab ({e}); install it with: pip install 'diptych[lab]'") from e
    Output(None).say(shtab.complete(parser(), args.shell))
    return 0


COMMANDS = {
    "doctor": _doctor, "train": _train, "compare": _compare, "diff": _diff, "replay": _replay, "bisect": _bisect,
    "explain": _explain, "completion": _completion,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
