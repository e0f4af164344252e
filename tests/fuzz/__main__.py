"""Random calls and files, for a time or a number of calls: `python -m fuzz --seed N` (with tests/ on PYTHONPATH).

Four targets: `raw` (the binding between inaccessible pages), `verbs` (against the oracle), `files`, and `modules` (uses
of torch's modules against a model that recomputes everything). Each runs in a process of its own. A round is a few
calls, or a sequence of uses, made from (seed, target, number of the round) alone; what is found is printed with the
command that repeats it, a crash or a hang too, and the next round follows. Status 1: something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TARGETS = ("raw", "verbs", "files", "modules")
ENVIRONMENT = {"modules": {"OMP_NUM_THREADS": "1"}}
"""Environment variables of the process that runs a target, by target. One thread: the modules are so small that torch's
threads would take longer to meet than the modules to run."""
HANG = 60.0
"""Seconds that a round may take."""
_PROGRESS = struct.Struct("qqq")  # the round that runs, calls made, calls that succeeded


@dataclasses.dataclass
class Report:
    """A target's rounds and its findings, by message, with the first round that had each and the round with which its
    process began."""

    target: str
    seed: int
    rounds: int = 0
    calls: int = 0
    succeeded: int = 0
    seconds: float = 0.0
    found: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        rate = self.calls / self.seconds if self.seconds else 0
        counts = f"{self.rounds} rounds, {self.calls} calls ({self.succeeded} succeeded)"
        lines = [f"{self.target}: seed {self.seed}, {counts}, {self.seconds:.0f} s, {rate:.0f} calls/s, "
                 f"{len(self.found)} found"]  # fmt: skip
        for what, (number, start) in self.found.items():
            again = f"python -m fuzz --target {self.target} --seed {self.seed}"
            lines += [f"  {what}", f"    again: {again} --first {number} --rounds 1"]
            lines += [f"    or, if it takes what came before: --first {start} --rounds {number - start + 1}"]
        return "\n".join(lines)


def run(
    target: str, seed: int, *, seconds: float | None = None, calls: int | None = None, first: int = 0,
    rounds: int | None = None, families: tuple[str, ...] = (), plant: str = "",
    hang: float = HANG,
) -> Report:  # fmt: skip
    """Rounds of one target from `first` on until the time is over, or so many calls or rounds are made.

    `families`: those of `raw.FAMILIES` that run; none for all. `plant`: Python code that runs first, to see that the
    fault which it makes is found.
    """
    report, began = Report(target, seed), time.monotonic()
    env = {**os.environ, "DIPTYCH_TEST_SEED": str(seed), **ENVIRONMENT.get(target, {})}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [env.get("PYTHONPATH")])])
    end = None if rounds is None else first + rounds
    number = first
    with tempfile.TemporaryDirectory() as folder:
        shared, out, err = (Path(folder, name) for name in ("shared", "out", "err"))
        while end is None or number < end:
            left = None if seconds is None else seconds - (time.monotonic() - began)
            if (left is not None and left <= 0) or (calls is not None and report.calls >= calls):
                break
            shared.write_bytes(_PROGRESS.pack(number, 0, 0))
            work = {"target": target, "seed": seed, "first": number, "end": end, "seconds": left, "plant": plant,
                    "families": families, "shared": str(shared),
                    "calls": None if calls is None else calls - report.calls}  # fmt: skip
            command = [sys.executable, "-X", "faulthandler", "-m", "fuzz", "--child", json.dumps(work)]
            with open(out, "wb") as o, open(err, "wb") as e:
                child = subprocess.Popen(command, env=env, stdout=o, stderr=e)
                hung = _watch(child, shared, hang)
            at, made, good = _PROGRESS.unpack(shared.read_bytes())
            report.calls, report.succeeded = report.calls + made, report.succeeded + good
            report.rounds += at - number + (child.returncode != 0)
            for found in map(json.loads, out.read_text().splitlines()):
                report.found.setdefault(found["what"], (found["round"], number))
            if child.returncode == 0:
                break
            report.found.setdefault(_death(child.returncode, hung, err.read_text(errors="replace")), (at, number))
            number = at + 1
    report.seconds = time.monotonic() - began
    return report


def _watch(child: subprocess.Popen[bytes], shared: Path, hang: float) -> bool:
    """Waits for the child's end; whether a round took too long, and it was ended."""
    last, since, hung = b"", time.monotonic(), False
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.2)
            return hung
        at = shared.read_bytes()
        if at != last:
            last, since = at, time.monotonic()
        elif time.monotonic() - since > hang and not hung:
            hung = True
            child.send_signal(signal.SIGABRT)  # its stack is printed


def _death(status: int, hung: bool, said: str) -> str:
    """How a process ended, in one line with the innermost Python lines."""
    lines = said.splitlines()
    how = "hangs" if hung else f"ends by {signal.Signals(-status).name}" if status < 0 else f"ends with status {status}"
    reports = [line.strip() for line in lines if "ERROR: " in line or "runtime error" in line][:1]
    frames = [line.strip() for line in lines if line.strip().startswith("File ")][:3]
    return f"the process {how}: {'; '.join([*reports, *frames]) or ' '.join(lines[-3:])}"


def child(work: dict[str, object]) -> None:
    """Runs rounds and prints what they find, a line of JSON each."""
    from fuzz.draw import Draw

    name, seed, number = str(work["target"]), work["seed"], int(str(work["first"]))
    target = importlib.import_module(f"fuzz.{name}")
    families = work["families"] or list(getattr(target, "FAMILIES", ()))
    options = {"families": families} if families else {}
    exec(str(work["plant"]), {})
    deadline = None if work["seconds"] is None else time.monotonic() + float(str(work["seconds"]))
    counts = [0, 0]

    def count(succeeded: bool) -> None:
        counts[0] += 1
        counts[1] += succeeded

    with open(str(work["shared"]), "r+b") as f, mmap.mmap(f.fileno(), _PROGRESS.size) as progress:
        while work["end"] is None or number < int(str(work["end"])):
            if deadline is not None and time.monotonic() > deadline:
                break
            if work["calls"] is not None and counts[0] >= int(str(work["calls"])):
                break
            progress[:] = _PROGRESS.pack(number, *counts)
            try:
                target.run(Draw(seed, name, number), count, **options)
            except Exception as e:
                frame = e.__traceback__
                while frame is not None and frame.tb_next is not None:
                    frame = frame.tb_next
                where = "" if frame is None else f" ({Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno})"
                what = f"{type(e).__name__}: {' '.join(str(e).split())[:2400]}{where}"
                print(json.dumps({"round": number, "what": what}), flush=True)
            number += 1
        progress[:] = _PROGRESS.pack(number, *counts)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("--target", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--seed", type=int, help="without it a new one, which is printed")
    parser.add_argument("--seconds", type=float, metavar="N", help="for each target")
    parser.add_argument("--calls", type=int, metavar="N", help="of all targets together, each making as many")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first round")
    parser.add_argument("--rounds", type=int, metavar="N", help="how many rounds of each target")
    parser.add_argument("--family", nargs="+", default=(), metavar="NAME", help="of raw's rounds these alone run")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(json.loads(args.child))
        return 0
    seed = int.from_bytes(os.urandom(4), "little") if args.seed is None else args.seed
    endless = args.seconds is None and args.calls is None and args.rounds is None
    seconds = 20.0 if endless else args.seconds
    calls = None if args.calls is None else -(-args.calls // len(args.target))
    found = 0
    for target in args.target:
        report = run(
            target,
            seed,
            seconds=seconds,
            calls=calls,
            first=args.first,
            rounds=args.rounds,
            families=(*args.family,) * (target == "raw"),
        )
        print(report, flush=True)
        found += len(report.found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
