"""Measures the project beside ceilings and peers, and writes docs/performance.md.

    python -m benchmarks [--only SECTION ...] [--device cuda|gpus|cpu] [--out DIR] [--quick] [--library FILE] [--check]
    python -m benchmarks render [--check]

A case that fails becomes a row that says why, the others go on, and the exit status is 1. DIR/suite.json is written
after each section; render shows the files of benchmarks/results. `rule` and `noise` run only where --only names them.
`gpus` are two GPUs of one host.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks import render, results
from benchmarks.cases import RANKS, SECTIONS, Section, cases_of, chosen
from benchmarks.sources import ROOT, code, digest

QUICK = 0.6  # of a section's time
PYTHON = {"torch_frontend": "torch", "jax_frontend": "jax", "lab": "lab", "common": "common", "core_cuda": "core"}


def measure(section: Section, quick: bool, peers: dict[str, Any]) -> list[results.Row]:
    """Runs a section's cases. A case that raises, or that no time is left for, is a row with `failed`."""
    from benchmarks import room

    rows: list[results.Row] = []
    room.deadline = time.perf_counter() + section.seconds * (QUICK if quick else 1)
    for case in cases_of(section.name, quick):
        start = time.perf_counter()
        fresh: list[results.Row] = []
        try:
            room.require_time()
            fresh.extend(importlib.import_module(f"benchmarks.sections.{section.name}").rows(case, peers))
        except Exception as error:
            if not isinstance(error, TimeoutError):
                traceback.print_exc()
            fresh.append(results.failed(case, "", error))
        rows += fresh
        print(f"{results.table(fresh)}\n{time.perf_counter() - start:.1f} s\n", flush=True)
        if section.device != "cpu":
            import torch

            torch.cuda.empty_cache()
    return rows


def foreign() -> list[str]:
    """Returns the checkout's Python files whose code is not that of the installed package, which is what would run."""
    found = []
    for folder, name in PYTHON.items():
        module = f"diptych.{name}" if name != "lab" else "diptych.lab.job"  # the lab has no __init__.py
        package = Path(importlib.import_module(module).__file__ or "").parent
        own = ROOT / folder / "diptych" / name
        for path in sorted(own.rglob("*.py")):
            there = package / path.relative_to(own)
            if not there.is_file() or code(there) != code(path):
                found.append(str(path.relative_to(ROOT)))
    return found


def arguments(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=("run", "render"), default="run")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument(
        "--device",
        choices=("cuda", "gpus", "cpu"),
        help="by default cuda, where there is a GPU, or that of the sections named",
    )
    parser.add_argument("--out", type=Path, help="folder for suite.json, by default benchmarks/results/MACHINE")
    parser.add_argument("--quick", action="store_true", help="fewer cases, in three fifths of the time")
    parser.add_argument("--library", type=Path, help="DeepGEMM's kernels (python -m benchmarks.peers.deepgemm)")
    parser.add_argument(
        "--check", action="store_true", help="exit 1 for a cpu row below its goal, or a page not rendered"
    )
    args = parser.parse_args(argv)
    if args.command == "render":
        if args.only or args.device or args.out or args.quick or args.library:
            parser.error("render takes no other option than --check")
        return parser, args
    if args.library and not args.library.is_file():
        parser.error(f"--library: {args.library} is no file")
    devices = {SECTIONS[s].device for s in args.only or ()}
    if args.device is None and len(devices) == 1:
        args.device = devices.pop()
    return parser, args


def main(argv: list[str] | None = None) -> int:
    parser, args = arguments(sys.argv[1:] if argv is None else argv)
    if args.command == "render":
        return render.main(args.check)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import torch

    from benchmarks.peers import find
    from diptych import core

    able = bool(core.build_info()["cuda"] and torch.cuda.is_available())
    device = args.device or ("cuda" if able else "cpu")
    if other := [s for s in args.only or () if SECTIONS[s].device != device]:
        parser.error(f"--only: {', '.join(other)} is not measured on {device}; see --device")
    if device != "cpu" and not able:
        print("benchmarks: needs a GPU and a build with CUDA; see `diptych doctor`", file=sys.stderr)
        return 1
    if device == "gpus" and torch.cuda.device_count() < RANKS:
        print(f"benchmarks: needs {RANKS} GPUs", file=sys.stderr)
        return 1
    if differing := foreign():
        print(f"benchmarks: the installed diptych is not this checkout's: {', '.join(differing[:3])}", file=sys.stderr)
        return 1
    peers, absent = find(args.library) if device == "cuda" else ({}, {})
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    env = results.environment(device)
    out = args.out or results.FOLDER / results.machine(env)
    options = {"quick": args.quick, "absent": absent}
    bad = 0
    for section in chosen(device, args.only or ()):
        start = time.perf_counter()
        rows = measure(section, args.quick, peers)
        stamp = digest(section)
        results.save(out, section.name, env, [r | {"sources": stamp} for r in rows], **options)
        failures = [r for r in rows if "failed" in r]
        missed = [r for r in rows if args.check and results.misses(r)]
        bad += len(failures) + len(missed)
        print(f"== {section.name}: {len(rows)} rows, {len(failures)} failed, {time.perf_counter() - start:.0f} s")
        for r in failures:
            print(f"failed: {r['case']}, {r['name']}: {r['failed']}", file=sys.stderr)
        for r in missed:
            print(f"too slow: {r['case']}: ratio {r['ratio']:.2f}, goal {r['goal']}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
