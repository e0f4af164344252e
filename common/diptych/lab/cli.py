"""The command `diptych`: doctor, train, compare, diff, replay, bisect."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import pathlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from diptych.common import RECIPES, CheckpointError, DeviceError, ShapeError, UnsupportedError
from diptych.lab import files
from diptych.lab.data import DEFAULT_CAP, ByteData, DataError, load
from diptych.lab.diff.result import DiffError
from diptych.lab.frontend import FrontendError, TrainingError
from diptych.lab.interrupt import STATUS, Interrupt
from diptych.lab.job import Corruption, Job, ModelConfig, OptimConfig
from diptych.lab.replay.op import ReplayError
from diptych.lab.traces.schema import TraceError

if TYPE_CHECKING:
    from diptych.lab.train import Settings

FAILED, BAD_INPUT, UNDECIDED, INTERRUPTED = 1, 2, 3, STATUS
RESULTS, REPORT = "results.json", "report.html"
VERDICTS = {True: "pass", False: "FAIL", None: "undecided"}
MAX_THREADS = 1024
FRAMEWORKS = ("torch", "jax")


class InputError(ValueError):
    """Invalid arguments; the message says which and why."""


_REFUSALS = (
    InputError, DataError, CheckpointError, DeviceError, ShapeError, UnsupportedError, FrontendError, files.BusyError,
    TraceError, DiffError, ReplayError, OSError,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command. Returns 0, 1 for a failed check or run, 2 for bad input, 3 for a comparison that needs
    more seeds, 130 after Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    args = parser.parse_args(arguments)
    ctrl_c = Interrupt(args.command)
    try:
        with ctrl_c if argv is None else contextlib.nullcontext():  # a caller keeps its own handler
            args.interrupt = ctrl_c
            try:
                return args.run(args, arguments)
            except KeyboardInterrupt:
                if argv is None:
                    ctrl_c.end()
                raise
    except BrokenPipeError:  # whoever read the output has enough of it
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


# --- arguments ---


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="diptych", description="Low-precision training with the same kernels and bits in PyTorch and JAX."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine runs natively, emulated or not at all, and why")
    doctor.add_argument("--json", action="store_true", help="machine-readable output")
    doctor.set_defaults(run=_doctor)

    train = commands.add_parser("train", help="train the demo model in one framework", formatter_class=_Formatter)
    train.add_argument("--framework", choices=FRAMEWORKS, required=True, help="where to train")
    train.add_argument("--recipe", choices=("none", *RECIPES), default="fp8-current", help="none is high precision")
    _shared(train, "runs/train-FRAMEWORK-RECIPE")
    train.add_argument(
        "--checkpoint-every",
        type=_natural,
        default=100,
        metavar="N",
        help="steps between checkpoints; 0: at the end only",
    )
    train.add_argument(
        "--resume", type=_path, metavar="PATH", help="continue this checkpoint, or the one in this folder"
    )
    train.add_argument(
        "--stop-after", type=_positive, metavar="N", help="stop early, after N steps in all; --resume goes on"
    )
    train.add_argument("--overwrite", action="store_true", help="start anew although --out holds a checkpoint")
    train.set_defaults(run=_train)

    compare = commands.add_parser(
        "compare",
        help="train in torch and JAX, in high precision and low, and report how closely they agree",
        formatter_class=_Formatter,
    )
    compare.add_argument("--recipe", choices=tuple(RECIPES), default="fp8-current", help="the low precision")
    _shared(compare, "runs/compare-RECIPE")
    compare.add_argument(
        "--seeds",
        type=_positive,
        default=1,
        metavar="N",
        help="train from N seeds, and judge the recipe by the 95%% interval of the mean difference; exit status 3: "
        "more seeds are needed",
    )
    compare.add_argument(
        "--trace-steps", type=_positive, default=3, metavar="N", help="first steps to capture, replay and compare"
    )
    compare.add_argument("--keep-traces", action="store_true", help="keep these as traces in OUT/traces")
    compare.add_argument(
        "--corrupt-scale",
        nargs="?",
        const="torch",
        choices=FRAMEWORKS,
        metavar="FRAMEWORK",
        help="self-test: corrupt one layer's weight scale in this framework's low-precision run (torch where none is "
        "named); the comparison must then fail",
    )
    compare.set_defaults(run=_compare)

    diff = commands.add_parser(
        "diff",
        help=(says := "compare two traces site by site and name where they part; exit 0 green, 1 differs, 2 bad input"),
        description=says[0].upper() + says[1:] + ".",
    )
    diff.add_argument("a", type=_path, metavar="A", help="folder of a trace")
    diff.add_argument("b", type=_path, metavar="B", help="folder of the trace that is compared with A")
    diff.add_argument(
        "--ref",
        type=_path,
        nargs="+",
        action="extend",
        metavar="H",
        help="float64 traces H_A H_B of both models, which tell definition from rounding; or one of either, for the "
        "verdict on rounding alone",
    )
    diff.add_argument("--map", type=_path, metavar="FILE", help="JSON that gives B's names for names of A")
    diff.add_argument(
        "--steps",
        type=_steps,
        metavar="STEPS",
        help="such as 0,5,10-20, where a range takes the steps that are there; without it all common ones",
    )
    diff.add_argument("--json", type=_path, metavar="FILE", help="write all that was found")
    diff.add_argument("--html", type=_path, metavar="FILE", help="write a page that shows it")
    diff.set_defaults(run=_diff)

    replay = commands.add_parser(
        "replay",
        help=(says := "compute one recorded operation again on its recorded operands, in another framework or on "
              "another device; exit 0 it agrees, 1 it differs, 2 bad input"),
        description=says[0].upper() + says[1:] + ".",
    )  # fmt: skip
    replay.add_argument("trace", type=_path, metavar="TRACE", help="folder of a trace with whole values")
    replay.add_argument("site", metavar="SITE", help="a result's key or name, such as result:h.0.mlp.fc/gemm.d")
    replay.add_argument("--framework", choices=FRAMEWORKS, help="where to compute; default: not the trace's")
    replay.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    replay.add_argument("--step", type=_natural, metavar="N", help="default: the first that was recorded")
    replay.add_argument(
        "--rank", type=_natural, default=0, metavar="N", help="of a run of several processes; default: 0"
    )
    replay.add_argument("--json", type=_path, metavar="FILE", help="write what was found")
    replay.set_defaults(run=_replay)

    bisect = commands.add_parser(
        "bisect",
        help=(says := "feed one model's activations into another and name the module that makes a difference; exit 0 "
              "none does, 1 one does, 2 bad input"),
        description=says[0].upper() + says[1:] + ".",
    )  # fmt: skip
    bisect.add_argument("--a", required=True, metavar="PKG:FACTORY", help="a function that returns the model A")
    bisect.add_argument("--b", required=True, metavar="PKG:FACTORY", help="the one that is compared with A")
    bisect.add_argument(
        "--inputs", required=True, type=_path, metavar="FILE", help=".npz of the models' arguments, arg0 or by name"
    )
    for name in "ab":
        bisect.add_argument(f"--framework-{name}", choices=FRAMEWORKS, help="default: by the model's type")
    bisect.add_argument("--map", type=_path, metavar="FILE", help="JSON: B's names for names of A")
    bisect.add_argument("--out", type=_path, metavar="FILE", help="write the script there")
    bisect.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    bisect.set_defaults(run=_bisect)
    return parser


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}; {self.prog} --help lists what there is\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not `None` ones."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _shared(p: argparse.ArgumentParser, out: str) -> None:
    model, optim = ModelConfig(), OptimConfig()
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument(
        "--data",
        type=_path,
        metavar="FILE_OR_DIR",
        help="bytes to train on; without it the source of Python's standard library",
    )
    p.add_argument("--data-cap", type=_positive, default=DEFAULT_CAP, metavar="BYTES", help="bytes read at most")
    p.add_argument("--out", type=_path, metavar="DIR", help=f"folder for results; without it {out}")
    p.add_argument("--steps", type=_positive, default=optim.steps)
    p.add_argument("--seed", type=_natural, default=0, help="of weights, batches and stochastic rounding")
    p.add_argument("--batch", type=_positive, default=8, help="sequences a step")
    p.add_argument("--lr", type=_rate, default=optim.lr, help="largest learning rate")
    p.add_argument("--warmup", type=_natural, default=optim.warmup, metavar="N", help="steps until --lr is reached")
    p.add_argument("--clip", type=_rate, metavar="NORM", help="largest global norm of the gradients; without it any")
    p.add_argument(
        "--eval-every", type=_natural, default=50, metavar="N", help="steps between validations; 0: at the end only"
    )
    p.add_argument("--eval-batches", type=_positive, default=16, metavar="N", help="validation batches")
    group = p.add_argument_group("model")
    group.add_argument("--width", type=_positive, default=model.width)
    group.add_argument("--layers", type=_positive, default=model.layers)
    group.add_argument("--heads", type=_positive, default=model.heads)
    group.add_argument("--seq", type=_positive, default=model.seq, help="bytes a sequence")
    p.add_argument("--threads", type=_threads, default=2, help="torch's CPU threads")
    p.add_argument("--no-compile", action="store_true", help="torch runs eagerly, which needs no C++ compiler")
    p.add_argument("--quiet", action="store_true", help="no progress bars")


def _positive(text: str) -> int:
    return _integer(text, 1)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
    return value


def _threads(text: str) -> int:
    value = _positive(text)
    if value > MAX_THREADS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_THREADS}, got {value}")
    return value


def _steps(text: str) -> list[int | range]:
    from diptych.lab.diff import command

    return command.steps(text)


def _path(text: str) -> pathlib.Path:
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return pathlib.Path(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return value


# --- commands ---


def _doctor(args: argparse.Namespace, _: list[str]) -> int:
    from diptych.lab import doctor

    found = doctor.diagnose()
    print(json.dumps(found, indent=1) if args.json else doctor.as_text(found))
    return 0


def _configs(args: argparse.Namespace) -> tuple[ModelConfig, OptimConfig, Settings, ByteData]:
    _need_lab_packages()
    from diptych.lab.train import Settings

    try:
        model = ModelConfig(width=args.width, layers=args.layers, heads=args.heads, seq=args.seq)
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
    data = load(args.data, cap=args.data_cap)
    data.check(model.seq)
    return model, optim, settings, data


def _need_lab_packages() -> None:
    for name in ("tqdm", "matplotlib", "jinja2"):
        try:
            __import__(name)
        except ImportError as e:
            raise InputError(f"this command needs {name} ({e}); install it with: pip install 'diptych[lab]'") from e


def _frontend(name: str, device: str) -> Any:
    from diptych import core
    from diptych.lab import frontend

    if device == "cuda" and not core.build_info()["cuda"]:
        raise InputError(
            "--device cuda: this build of diptych has no CUDA backend; rebuild it with nvcc (DIPTYCH_CUDA=on)"
        )
    return frontend.require(name, device)


@contextlib.contextmanager
def _writing(folder: pathlib.Path, *names: str) -> Iterator[None]:
    """Locks the folder of results, and refuses at once a path at which results could not be written later."""
    if (found := files.kind(folder)) not in ("a folder", "nothing"):
        raise InputError(f"--out {folder}: is not a folder but {found}")
    for name in names:
        if (folder / name).is_dir():
            raise InputError(f"{folder / name}: is a folder, where a file is to be written")
    with files.only_run(folder):
        yield


def _train(args: argparse.Namespace, _: list[str]) -> int:
    model, optim, settings, data = _configs(args)
    from diptych.lab import checkpoint

    frontend = _frontend(args.framework, args.device)
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
    with _writing(folder, target.name, RESULTS):
        if target.exists() and not args.overwrite and (home is None or home.resolve() != folder.resolve()):
            raise InputError(
                f"{target} exists: --resume {folder} continues it, --overwrite starts anew, --out DIR keeps it"
            )
        print(f"{args.framework} {args.recipe} on {args.device}: {model.parameters} parameters, {data.source}, "
              f"{data.files} files")  # fmt: skip
        args.interrupt.left = lambda: _kept(target)
        return _train_in(folder, target, args, frontend, job, data, settings)


def _train_in(
    folder: pathlib.Path, target: pathlib.Path, args: argparse.Namespace, frontend: Any, job: Job, data: ByteData,
    settings: Settings,
) -> int:  # fmt: skip
    from diptych.lab import train

    result = train.run(
        frontend,
        job,
        data,
        settings,
        name=f"{args.framework} {args.recipe}",
        checkpoint=target,
        resume=args.resume,
        stop_after=args.stop_after,
        on_step=args.interrupt.stepped,
        stop=args.interrupt.requested,
        progress=_bars(args),
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
    if result.validation:
        print(f"validation loss {result.final:.4f} nats per byte (unigram entropy {data.unigram_entropy:.4f})")
    print(f"{len(result.losses)} of {job.optim.steps} steps; {result.seconds:.0f} s; {target}")
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


def _bars(args: argparse.Namespace) -> bool:
    return not args.quiet and sys.stderr.isatty()


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
    pair = (_frontend("torch", args.device), _frontend("jax", args.device))
    folder = args.out or pathlib.Path(f"runs/compare-{args.recipe}")
    with _writing(folder, RESULTS, REPORT):
        results = compare.compare(pair, data, options, folder, print, _bars(args))
        files.write_text(folder / RESULTS, json.dumps(results, indent=1))
        commands = [shlex.join(["diptych", *arguments]), "diptych doctor"]
        files.write_text(folder / REPORT, report.render(results, commands))
    for check in results["checks"]:
        print(f"{VERDICTS[check['passed']]}  {check['name']}: {check['detail']}")
    print(f"{results['seconds']:.0f} s; report: {folder / REPORT}")
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


if __name__ == "__main__":
    sys.exit(main())
