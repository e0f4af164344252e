"""The arguments of the command `diptych`."""

from __future__ import annotations

import argparse
import math
import pathlib
from typing import Any, NoReturn

from diptych.common import RECIPES
from diptych.lab.data import DEFAULT_CAP
from diptych.lab.job import ModelConfig, OptimConfig

BAD_INPUT = 2  # exit status
MAX_THREADS = 1024
FRAMEWORKS = ("torch", "jax")
SHELLS = ("bash", "zsh")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command `diptych`, which exits with status 2 on wrong arguments."""
    made = _Parser(
        prog="diptych", description="Low-precision training with the same kernels and bits in PyTorch and JAX."
    )
    made.add_argument("--version", action=_Version, nargs=0, help="print the version of diptych, and exit")
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_doctor, _train, _compare, _diff, _replay, _bisect, _explain, _completion):
        add(commands)
    return made


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from importlib.metadata import version  # takes 20 ms, which other commands need not wait for

        print(f"diptych {version('diptych')}")
        parser.exit()


def _doctor(commands: Any) -> None:
    doctor = commands.add_parser("doctor", help="what this machine runs natively, emulated or not at all, and why")
    _output(doctor)


def _explain(commands: Any) -> None:
    explain = _described(commands, "explain", "say what causes an error or a warning of diptych's, and what to do")
    explain.add_argument("name", nargs="?", metavar="NAME", help="such as EmulationWarning; without it all are listed")
    _output(explain, alone=False)


def _train(commands: Any) -> None:
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


def _compare(commands: Any) -> None:
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


def _diff(commands: Any) -> None:
    diff = _described(
        commands,
        "diff",
        "compare two traces site by site and name where they part; exit 0 green, 1 differs, 2 bad input",
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
        "verdict on rounding alone; give it after A and B",
    )
    diff.add_argument("--map", type=_path, metavar="FILE", help="JSON that gives B's names for names of A")
    diff.add_argument(
        "--steps",
        type=_steps,
        metavar="STEPS",
        help="such as 0,5,10-20, where a range takes the steps that are there; without it all common ones",
    )
    diff.add_argument("--html", type=_path, metavar="FILE", help="write a page that shows it")
    _output(diff, alone=False)


def _replay(commands: Any) -> None:
    replay = _described(
        commands,
        "replay",
        "compute one recorded operation again on its recorded operands, in another framework or on another device; "
        "exit 0 it agrees, 1 it differs, 2 bad input",
    )
    replay.add_argument("trace", type=_path, metavar="TRACE", help="folder of a trace with whole values")
    replay.add_argument("site", metavar="SITE", help="a result's key or name, such as result:h.0.mlp.fc/gemm.d")
    replay.add_argument("--framework", choices=FRAMEWORKS, help="where to compute; default: not the trace's")
    replay.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    replay.add_argument("--step", type=_natural, metavar="N", help="default: the first that was recorded")
    replay.add_argument(
        "--rank", type=_natural, default=0, metavar="N", help="of a run of several processes; default: 0"
    )
    _output(replay, alone=False)


def _bisect(commands: Any) -> None:
    bisect = _described(
        commands,
        "bisect",
        "feed one model's activations into another and name the module that makes a difference; exit 0 none does, 1 "
        "one does, 2 bad input",
    )
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
    _output(bisect)


def _completion(commands: Any) -> None:
    completion = _described(
        commands, "completion", "print a script for a shell, with which Tab completes this command's words and files"
    )
    completion.add_argument("shell", choices=SHELLS, help="load it by: source <(diptych completion bash)")


def _output(p: argparse.ArgumentParser, *, alone: bool = True) -> None:
    """Adds what all commands have. `alone`: whether --json may stand without a file, which no positional may follow."""
    says = "write what was found as JSON; - prints it in place of the text"
    if alone:
        p.add_argument("--json", type=_path, nargs="?", const=pathlib.Path("-"), metavar="FILE",
                       help=f"{says}, as no FILE does")  # fmt: skip
    else:
        p.add_argument("--json", type=_path, metavar="FILE", help=says)
    p.add_argument("--quiet", action="store_true", help="do not show how far it is")


def _described(commands: Any, name: str, says: str) -> argparse.ArgumentParser:
    """Adds a command whose own help begins with its line in the list of commands."""
    return commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")


_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files"}  # how shtab spells that files complete a word


class _Parser(argparse.ArgumentParser):
    """A parser that prints an error in one line, and whose paths a shell completes."""

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        action = super().add_argument(*names, **options)
        if options.get("type") is _path:
            action.complete = _FILES  # type: ignore[attr-defined]  # shtab reads this attribute
        return action

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: error: {message}; {self.prog} --help lists what there is\n")


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """A formatter that shows default values, except `None`."""

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
    group.add_argument(
        "--high-blocks", type=_natural, default=0, metavar="N", help="the last N blocks stay in high precision"
    )
    p.add_argument("--threads", type=_threads, default=2, help="torch's CPU threads")
    p.add_argument("--no-compile", action="store_true", help="torch runs eagerly, which needs no C++ compiler")
    _output(p)


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
